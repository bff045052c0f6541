"""llama.cpp as the engine's runner: load a model here, on this node, and compute batches.

One object, used by one thread only: libgomp keeps a team of threads per calling thread. Knows
batches and logits; knows no request, no sampling and no socket. What kills the process inside
llama.cpp (an id out of range, a batch too long, ...) is asserted here first.
"""
# ruff: noqa: ANN401  # C pointers and ctypes structs have no useful types

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replica.batch import Batch, DecodeError
from replica.ggml import open_library

KV_TYPES = {"f16": 1, "q8_0": 8}
"""Names of KV cell types and their ggml_type numbers."""
UBATCH_TOKENS = 512
STREAMS_MAX = 256
"""LLAMA_MAX_SEQ, fixed when llama.cpp is compiled."""
CONTEXT_STEP_TOKENS = 256
"""llama.cpp rounds a stream's room up to a multiple of this."""


class ModelLoadError(Exception):
    """llama.cpp would not load the model or make a context for it."""


@dataclass(frozen=True, slots=True)
class LlamaOptions:
    """How a model is loaded."""

    path: Path
    context_tokens: int
    """Per stream."""
    parallel: int
    """Streams."""
    threads: int
    kv_type: str = "f16"
    batch_tokens_max: int = UBATCH_TOKENS


class Llama:
    """A loaded model with one KV stream per sequence; a `replica.batch.Runner`."""

    def __init__(self, options: LlamaOptions) -> None:
        assert 0 < options.parallel <= STREAMS_MAX
        self._llama = llama = open_library()
        self._parallel = options.parallel
        self.batch_tokens_max = options.batch_tokens_max
        self._batch_rows_max = max(options.batch_tokens_max, options.parallel)
        self._model = _load_model(llama, options.path)
        self._context = _make_context(llama, self._model, options, self._batch_rows_max)
        self._memory = llama.llama_get_memory(self._context)
        vocab = llama.llama_model_get_vocab(self._model)
        self.vocab_tokens = int(llama.llama_vocab_n_tokens(vocab))
        self.end_token_ids = [
            token for token in range(self.vocab_tokens) if llama.llama_vocab_is_eog(vocab, token)
        ]
        room = int(llama.llama_n_ctx_seq(self._context))
        assert room >= options.context_tokens, "llama.cpp gave less room than was asked for"
        self._room = room
        self._rows = _BatchRows(llama, self._batch_rows_max, options.parallel)
        self.trimmable = self._probe_trimming()

    def close(self) -> None:
        """Free the context and the model; the object is dead afterwards."""
        self._llama.llama_free(self._context)
        self._llama.llama_model_free(self._model)

    def decode(self, batch: Batch) -> list[NDArray[np.float32]]:
        """Compute a batch; see `replica.batch.Runner`. Rows are views into llama.cpp's memory."""
        for cut_id, keep in batch.truncate:
            self._truncate(cut_id, keep)
        used = 0
        outputs = 0
        lowest_id = 0
        for chunk in batch.chunks:
            start, stream_id = chunk.sequence.computed_tokens, chunk.sequence.stream_id
            assert stream_id is not None
            assert lowest_id <= stream_id < self._parallel
            assert start + chunk.size <= self._room
            tokens = chunk.sequence.token_ids[start : start + chunk.size]
            used = self._rows.fill(used, tokens, start, stream_id, wants_logits=chunk.completes)
            outputs += chunk.completes
            lowest_id = stream_id + 1
        self._decode_rows(used)
        return list(self._logits(outputs)) if outputs else []

    def _decode_rows(self, count: int) -> None:
        assert 0 < count <= self._batch_rows_max
        code = self._llama.llama_decode(self._context, self._rows.struct(count))
        if code != 0:
            raise DecodeError(f"llama_decode returned {code} for a batch of {count} rows")

    def _logits(self, outputs: int) -> NDArray[np.float32]:
        """Return the logits of the flagged rows, in batch order, (outputs, vocab_tokens)."""
        pointer = self._llama.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, (outputs, self.vocab_tokens))

    def _truncate(self, stream_id: int, keep: int) -> None:
        assert 0 <= stream_id < self._parallel
        assert keep >= 0
        held = int(self._llama.llama_memory_seq_pos_max(self._memory, stream_id)) + 1
        assert keep <= held, f"stream {stream_id} holds {held} tokens, {keep} were expected"
        if keep == held:
            return
        start = keep if keep > 0 else -1
        if not self._llama.llama_memory_seq_rm(self._memory, stream_id, start, -1):
            raise DecodeError(f"stream {stream_id} could not be cut back to {keep} tokens")

    def _probe_trimming(self) -> bool:
        """Return whether a stream can be cut back, by trying; recurrent states cannot.

        Also the warm-up: the first decode touches the compute buffers.
        """
        token = self.end_token_ids[0] if self.end_token_ids else 0
        self._rows.fill(0, [token, token], 0, 0, wants_logits=False)
        self._decode_rows(2)
        trimmable = bool(self._llama.llama_memory_seq_rm(self._memory, 0, 1, -1))
        self._llama.llama_memory_clear(self._memory, True)  # noqa: FBT003  # a C call
        return trimmable


class _BatchRows:
    """The arrays behind a llama_batch, allocated once and filled through numpy."""

    def __init__(self, llama: Any, rows: int, parallel: int) -> None:
        self._token = np.zeros(rows, np.int32)
        self._pos = np.zeros(rows, np.int32)
        self._logits = np.zeros(rows, np.int8)
        self._seq_count = np.ones(rows, np.int32)
        self._ids = np.arange(parallel, dtype=np.int32)
        self._seq_pointer = np.zeros(rows, np.uintp)
        self._batch = llama.llama_batch(
            n_tokens=0,
            token=_pointer(self._token, ctypes.c_int32),
            embd=None,
            pos=_pointer(self._pos, ctypes.c_int32),
            n_seq_id=_pointer(self._seq_count, ctypes.c_int32),
            seq_id=_pointer(self._seq_pointer, ctypes.POINTER(ctypes.c_int32)),
            logits=_pointer(self._logits, ctypes.c_int8),
        )

    def fill(
        self,
        at: int,
        token_ids: Sequence[int],
        position: int,
        stream_id: int,
        *,
        wants_logits: bool,
    ) -> int:
        """Write a run of one stream's tokens behind row `at`; return the row after it.

        `wants_logits` concerns the last of them only.
        """
        end = at + len(token_ids)
        assert at < end <= len(self._token)
        self._token[at:end] = token_ids
        self._pos[at:end] = np.arange(position, position + len(token_ids))
        self._seq_pointer[at:end] = self._ids.ctypes.data + stream_id * self._ids.itemsize
        self._logits[at:end] = 0
        self._logits[end - 1] = wants_logits
        return end

    def struct(self, count: int) -> Any:
        self._batch.n_tokens = count
        return self._batch


def _pointer(array: NDArray[Any], item: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(item))


def _load_model(llama: Any, path: Path) -> Any:
    params = llama.llama_model_default_params()
    # Anonymous memory, touched first by this pinned thread and so on this node. Pages of a mapped
    # file would stay on whichever node read them first.
    params.load_mode = llama.LLAMA_LOAD_MODE_NONE
    model = llama.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise ModelLoadError(f"llama.cpp could not load {path}; its log above says why")
    return model


def _make_context(llama: Any, model: Any, options: LlamaOptions, batch_rows_max: int) -> Any:
    room = -(-options.context_tokens // CONTEXT_STEP_TOKENS) * CONTEXT_STEP_TOKENS
    params = llama.llama_context_default_params()
    params.n_ctx = room * options.parallel
    params.n_batch = batch_rows_max
    params.n_ubatch = UBATCH_TOKENS
    params.n_seq_max = options.parallel
    params.n_outputs_max = options.parallel
    params.n_threads = params.n_threads_batch = options.threads
    params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.type_k = params.type_v = KV_TYPES[options.kv_type]
    params.kv_unified = False
    params.swa_full = True  # else layers with a window forget, and a stream cannot be cut back
    context = llama.llama_init_from_model(model, params)
    if not context:
        llama.llama_model_free(model)
        raise ModelLoadError(
            f"llama.cpp could not make a context of {options.parallel} x {room} tokens "
            f"with {options.kv_type} KV cells; its log above says why"
        )
    return context
