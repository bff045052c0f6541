"""What a model keeps for every token, and for every sequence, of its context: from metadata alone.

The rules are those by which llama.cpp sizes its caches: llama_model::create_memory
(src/llama-model.cpp), llama_kv_cache (src/llama-kv-cache.cpp) with `swa_full` (its default, which
the engine keeps: streams can then be cut back), n_embd_r and n_embd_s (src/llama-hparams.cpp).
Where a rule is in the code of one architecture only, what is assumed here is the larger cache.
"""

from dataclasses import dataclass
from typing import Literal

from replica.gguf_header import Header
from replica.llama_cpp_tables import HYBRID, HYBRID_INTERVAL, RECURRENT, SLIDING_WINDOW

WIDTH_MAX = 1 << 24
"""Of any single dimension in the metadata; real ones stay below a million."""

Kind = Literal["attention", "sliding-window", "recurrent", "hybrid"]
"""How a sequence's past is held, and so whether its cache can be cut back to a prefix.

"attention": to any length. "sliding-window": to any length as long as the engine keeps `swa_full`.
"recurrent" and "hybrid": a state that cannot be taken back, only continued or restored whole.
"""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes in elements; those per token are of the KV type, those per sequence are F32."""

    key_widths: tuple[int, ...]
    """Per layer that attends: elements of K per token."""
    value_widths: tuple[int, ...]
    state_elements: int
    """Per sequence, whatever its length: the recurrent layers' states together."""
    state_layers: int
    state_width: int
    """Elements per token inside a recurrent layer; 0 without one."""


def cache_kind(header: Header) -> Kind:
    architecture = header.text("general.architecture")
    if architecture in RECURRENT:
        return "recurrent"
    if architecture in HYBRID:
        return "hybrid"
    key = f"{architecture}.attention.sliding_window"
    window = header.integer(key, 1 if architecture == "llama4" else 0, high=WIDTH_MAX)
    return "sliding-window" if architecture in SLIDING_WINDOW and window else "attention"


def cache_shape(
    header: Header, layers: int, width: int, heads: tuple[int, ...], kv_heads: tuple[int, ...]
) -> CacheShape:
    """Return what the `layers` of a model cache; `width` is its embedding's."""
    prefix = header.text("general.architecture") + "."
    attends, recurs = _layer_roles(header, prefix, layers, kv_heads)
    head = width // max(heads[0], 1)
    keys = _head_widths(header, prefix, "key", layers, head)
    values = _head_widths(header, prefix, "value", layers, head)
    if f"{prefix}attention.key_length_mla" in header.metadata:
        values = (0,) * layers  # MLA: V is part of what is stored as K
    indexer = header.integer(f"{prefix}attention.indexer.key_length", 0, high=WIDTH_MAX)
    shared = header.integer(f"{prefix}attention.shared_kv_layers", 0, high=layers)
    own = [layer for layer in attends if layer < layers - shared]
    state = _state_elements(header, prefix, width, heads[0], head) if recurs else 0
    inner = header.integer(f"{prefix}ssm.inner_size", 0, high=WIDTH_MAX) or width
    return CacheShape(
        tuple(keys[layer] * kv_heads[layer] + indexer for layer in own),
        tuple(values[layer] * kv_heads[layer] for layer in own),
        state_elements=len(recurs) * state,
        state_layers=len(recurs),
        state_width=inner if recurs else 0,
    )


def _layer_roles(
    header: Header, prefix: str, layers: int, kv_heads: tuple[int, ...]
) -> tuple[list[int], list[int]]:
    """Return the layers that attend, and those that carry a state."""
    architecture = prefix.removesuffix(".")
    every = list(range(layers))
    if architecture in RECURRENT:
        return [], every
    # A head for drafting comes after the layers proper, and has no place in this context.
    every = every[: layers - header.integer(f"{prefix}nextn_predict_layers", 0, high=layers - 1)]
    if architecture not in HYBRID:
        return every, []
    if architecture == "falcon-h1":
        return every, every
    named = header.metadata.get(f"{prefix}attention.recurrent_layers")
    if architecture in HYBRID_INTERVAL and isinstance(named, tuple) and len(named) >= layers:
        recurs = [layer for layer in every if named[layer]]
    elif architecture in HYBRID_INTERVAL:
        key = f"{prefix}full_attention_interval"
        interval = header.integer(key, HYBRID_INTERVAL[architecture], low=1, high=layers)
        recurs = [layer for layer in every if (layer + 1) % interval]
    else:
        recurs = [layer for layer in every if kv_heads[layer] == 0]
    return [layer for layer in every if layer not in set(recurs)], recurs


def _head_widths(
    header: Header, prefix: str, what: str, layers: int, default: int
) -> tuple[int, ...]:
    """Return the width of a head's keys or values per layer; layers with a window may differ."""
    key = f"{prefix}attention.{what}_length"
    full = header.integer(key, default, high=WIDTH_MAX)
    window = header.integer(f"{key}_swa", full, high=WIDTH_MAX)
    pattern = header.metadata.get(f"{prefix}attention.sliding_window_pattern")
    if not isinstance(pattern, tuple) or len(pattern) < layers:
        return (max(full, window),) * layers
    return tuple(window if slides else full for slides in pattern[:layers])


def _state_elements(header: Header, prefix: str, width: int, heads: int, head: int) -> int:
    """Return the elements of one recurrent layer's state: n_embd_r + n_embd_s."""

    def get(key: str, default: int = 0) -> int:
        return header.integer(prefix + key, default, high=WIDTH_MAX)

    if wkv := get("wkv.head_size"):
        return get("token_shift_count", 2) * width + width * wkv
    if shortconv := get("shortconv.l_cache"):
        return width * (shortconv - 1)
    conv_columns = get("ssm.conv_kernel") - 1
    if kda := get("kda.head_dim"):
        return 3 * (conv_columns if conv_columns > 0 else 3) * heads * kda + heads * kda * kda
    if prefix == "minimax-01.":
        head = get("attention.key_length", head)
        return heads * head * head
    inner, state = get("ssm.inner_size"), get("ssm.state_size")
    return max(conv_columns, 0) * (inner + 2 * get("ssm.group_count") * state) + state * inner
