"""Predict the memory a model will take on its node, from its metadata, and judge whether it fits.

Pure arithmetic: knows no file, no node and no llama.cpp. The rules are llama.cpp's where it has
any (the KV cache, the output buffer). The compute buffer is llama.cpp's allocator at work, for
which there is no formula; what is here was fitted to what it logs for 19 shapes of dense models and
mixtures of experts from 0.5B to 70B, and two of mamba: see `tests/test_memory.py`.
"""

from dataclasses import dataclass

from replica.gguf_file import GgufFile
from replica.llama_cpp_tables import REPACKED_TYPES, TENSOR_TYPES

CONTEXT_STEP_TOKENS = 256
"""llama.cpp rounds each sequence's room up to a multiple of this."""
FLOAT_BYTES = 4
MASK_BYTES = 2
"""The attention mask's cells are F16."""

PROCESS_BYTES = 80 << 20
"""Python, our code and the libraries of a replica: 48 MiB measured before its server starts."""
LOADING_BYTES = 32 << 20
"""What malloc keeps of the buffers through which weights were read: glibc's largest threshold."""
TOKEN_BYTES = 224
"""llama.cpp's vocabulary per token: 192 to 224 measured."""
MERGE_BYTES = 176
"""And per merge of a BPE vocabulary: 166 measured."""
CELL_BYTES = 56
"""llama.cpp's books on one KV cell (llama_kv_cells): 53 measured on half a million of them."""
WORK_BYTES_PER_ELEMENT = 1.15
"""ggml quantizes the rows it multiplies to about 8 bits (Q8_K: 1.14)."""

_TYPE_SIZES = {name: size / block for name, block, size in TENSOR_TYPES.values()}
_GIB = 1 << 30


class DoesNotFitError(Exception):
    """The model with its caches needs more memory than its node has free; figures and remedies."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What one replica takes, in bytes."""

    weights_bytes: int
    kv_bytes: int
    """Room for every sequence at its full length, touched at start; and recurrent states."""
    compute_bytes: int
    """The intermediate results of one step."""
    output_bytes: int
    """The logits of one row per sequence."""
    overhead_bytes: int
    """The process, the vocabulary, the books."""

    @property
    def total_bytes(self) -> int:
        return (
            self.weights_bytes
            + self.kv_bytes
            + self.compute_bytes
            + self.output_bytes
            + self.overhead_bytes
        )


def predict_memory(
    gguf: GgufFile,
    *,
    context_tokens: int,
    parallel: int,
    kv_type: str = "f16",
    batch_tokens: int = 512,
) -> MemoryNeed:
    """Return what a replica will need that holds `parallel` sequences of `context_tokens`.

    `kv_type` is the name of a ggml type, `batch_tokens` is n_ubatch. Supposes the engine's
    settings: flash attention, split streams, `swa_full`, and one row of logits per sequence.
    """
    assert context_tokens > 0
    assert parallel > 0
    assert batch_tokens > 0
    room = -(-context_tokens // CONTEXT_STEP_TOKENS) * CONTEXT_STEP_TOKENS
    cache = gguf.cache
    token_elements = sum(cache.key_widths) + sum(cache.value_widths)
    streams_bytes = room * parallel * token_elements * _TYPE_SIZES[kv_type]
    states_bytes = parallel * cache.state_elements * FLOAT_BYTES
    overhead_bytes = (
        PROCESS_BYTES
        + LOADING_BYTES
        + _work_bytes(gguf, batch_tokens)
        + gguf.n_vocab * TOKEN_BYTES
        + gguf.n_merges * MERGE_BYTES
        + room * parallel * CELL_BYTES
    )
    return MemoryNeed(
        weights_bytes=gguf.weights_bytes + _output_matrix_bytes(gguf),
        kv_bytes=round(streams_bytes) + states_bytes,
        compute_bytes=_compute_bytes(gguf, room, parallel, batch_tokens),
        output_bytes=parallel * gguf.n_vocab * FLOAT_BYTES,
        overhead_bytes=overhead_bytes,
    )


def check_fit(need: MemoryNeed, free_bytes: int, node_label: str) -> None:
    """Raise `DoesNotFitError` if `need` exceeds what is free at `node_label`, such as "node 0"."""
    if need.total_bytes <= free_bytes:
        return
    parts = ", ".join(
        f"{name} {_gib(size)}"
        for name, size in (
            ("weights", need.weights_bytes),
            ("KV cache", need.kv_bytes),
            ("compute buffers", need.compute_bytes + need.output_bytes),
            ("the process", need.overhead_bytes),
        )
    )
    message = (
        f"the model does not fit {node_label}: it needs {_gib(need.total_bytes)} GiB ({parts}) "
        f"and {_gib(free_bytes)} GiB are free; {_remedies(need, free_bytes)}"
    )
    raise DoesNotFitError(message)


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f}"


def _remedies(need: MemoryNeed, free_bytes: int) -> str:
    """Say what would help: a smaller cache only if the rest fits without any."""
    elsewhere = "take several nodes for one replica with --domain socket or --mode span"
    if need.total_bytes - need.kv_bytes < free_bytes:
        smaller = "lower --ctx or --parallel, set --kv-type q8_0, choose a smaller quantization"
    else:
        smaller = "choose a smaller quantization or a smaller model"
    return f"{smaller}, or {elsewhere}"


def _output_matrix_bytes(gguf: GgufFile) -> int:
    """Return what a second copy of the embedding takes, where it is also the output matrix.

    Rows are looked up in the file's layout and multiplied in the processor's own, so llama.cpp
    keeps both if the processor has one for this type (model_loader's TENSOR_DUPLICATED). Whether
    it has is known only there; where it has none, this is too much.
    """
    tied = gguf.tied_embedding
    return tied.size_bytes if tied is not None and tied.type_name in REPACKED_TYPES else 0


def _compute_bytes(gguf: GgufFile, room: int, parallel: int, batch_tokens: int) -> int:
    """Return the size of the buffer for intermediate results, for the largest step there can be.

    It holds what lives at once in the most demanding place: the feed-forward layer, the experts,
    attention, a recurrent layer, or the rows of logits. And the masks: two with sliding windows.
    """
    width, cache = gguf.n_embd, gguf.cache
    query = max(gguf.n_heads) * gguf.head_width
    attended = max(cache.key_widths, default=0) + max(cache.value_widths, default=0)
    routed = gguf.n_experts_used
    per_token = max(
        3 * _feed_forward_width(gguf) + 3 * width + query,
        2 * routed * width + routed * (gguf.n_ff_expert or gguf.n_ff) + 3 * width,
        2 * query + attended + 4 * width,
        7 * cache.state_width,
    )
    masks = {"sliding-window": 2, "recurrent": 0}.get(gguf.kind, 1)
    layer_bytes = batch_tokens * (per_token * FLOAT_BYTES + masks * room * MASK_BYTES)
    states_bytes = parallel * cache.state_elements // max(cache.state_layers, 1) * FLOAT_BYTES
    logits_bytes = (parallel * gguf.n_vocab + 3 * batch_tokens * width) * FLOAT_BYTES
    return max(layer_bytes + states_bytes, logits_bytes)


def _work_bytes(gguf: GgufFile, batch_tokens: int) -> int:
    """Return the scratch space of the widest matrix product."""
    widest = max(_feed_forward_width(gguf), max(gguf.n_heads) * gguf.head_width, gguf.n_embd)
    return round(batch_tokens * widest * WORK_BYTES_PER_ELEMENT)


def _feed_forward_width(gguf: GgufFile) -> int:
    """Return how wide a token's feed-forward layer is, all its experts together."""
    routed = gguf.n_experts_used * (gguf.n_ff_expert or gguf.n_ff)
    return routed or gguf.n_ff
