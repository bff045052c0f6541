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
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replica.batch import (
    AbortedError,
    Batch,
    Chunk,
    Copy,
    Cut,
    DecodeError,
    Move,
    Restore,
    Save,
    SnapshotStore,
)
from replica.ggml import open_library
from replica.lookup import DRAFT_MAX

KV_TYPES = {"f16": 1, "q8_0": 8}
"""Names of KV cell types and their ggml_type numbers."""
UBATCH_TOKENS = 512
STREAMS_MAX = 256
"""LLAMA_MAX_SEQ, fixed when llama.cpp is compiled."""
ABORTED = 2
"""What llama_decode returns when its abort callback said so."""
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

    def __init__(self, options: LlamaOptions, store: SnapshotStore | None = None) -> None:
        assert 0 < options.parallel <= STREAMS_MAX
        self._llama = llama = open_library()
        self._store = store
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
        self._scratch = np.empty(0, np.uint8)
        self._abort_flag = ctypes.create_string_buffer(2)
        self._abort_callback = _strlen_as_abort_callback(llama)
        llama.llama_set_abort_callback(
            self._context, self._abort_callback, ctypes.addressof(self._abort_flag)
        )
        self.trimmable = self._probe_trimming()
        self.copies_prefixes = self.trimmable and int(llama.llama_model_n_swa(self._model)) == 0

    def close(self) -> None:
        """Free the context and the model; the object is dead afterwards."""
        self._llama.llama_free(self._context)
        self._llama.llama_model_free(self._model)

    def set_threads(self, threads: int) -> None:
        """Compute with so many threads from now on."""
        assert threads > 0
        self._llama.llama_set_n_threads(self._context, threads, threads)

    def abort(self) -> None:
        """Make the running decode give up. llama.cpp asks `strlen(flag)` between two operations."""
        self._abort_flag[0] = b"\x01"

    def move(self, move: Move) -> bool:
        """Change what streams hold; see `replica.batch.Runner`. A `Save` goes to the store."""
        match move:
            case Cut(stream_id, keep):
                self._truncate(stream_id, keep)
            case Copy(source, target, keep):
                self._copy(source, target, keep)
            case Restore(stream_id, snapshot, keep):
                return self._restore(stream_id, snapshot, keep)
            case Save():
                return self._store is not None and self._save(move, self._store)
        return True

    def decode(self, batch: Batch) -> list[NDArray[np.float32]]:
        """Compute a batch; see `replica.batch.Runner`. Rows are views into llama.cpp's memory."""
        count, outputs = self._fill(batch)
        try:
            self._decode_rows(count)
        finally:
            for stream_id, keep in ((pad.stream_id, pad.keep) for pad in batch.padding):
                self._truncate(stream_id, keep)
        return list(self._logits(outputs)) if outputs else []

    def _fill(self, batch: Batch) -> tuple[int, int]:
        """Write a batch's rows, ascending by stream; return their number and that of outputs."""
        padding = {pad.stream_id: pad.keep for pad in batch.padding}
        ids = [_stream_id(chunk) for chunk in batch.chunks]
        assert all(0 <= stream_id < self._parallel for stream_id in [*ids, *padding])
        assert all(one < other for one, other in pairwise(ids)), "ids ascend"
        chunks = dict(zip(ids, batch.chunks, strict=True))
        assert padding.keys().isdisjoint(chunks)
        used = outputs = 0
        for stream_id in sorted(padding.keys() | chunks.keys()):
            chunk = chunks.get(stream_id)
            if chunk is None:
                assert padding[stream_id] < self._room
                used = self._rows.fill(used, [0], padding[stream_id], stream_id, 0)
                continue
            start = chunk.sequence.computed_tokens
            assert start + chunk.rows <= self._room
            tokens = [*chunk.sequence.token_ids[start : start + chunk.size], *chunk.draft]
            used = self._rows.fill(used, tokens, start, stream_id, chunk.outputs)
            outputs += chunk.outputs
        return used, outputs

    def _decode_rows(self, count: int) -> None:
        assert 0 < count <= self._batch_rows_max
        self._abort_flag[0] = b"\x00"
        code = self._llama.llama_decode(self._context, self._rows.struct(count))
        if code == ABORTED:
            raise AbortedError
        if code != 0:
            raise DecodeError(f"llama_decode returned {code} for a batch of {count} rows")

    def _logits(self, outputs: int) -> NDArray[np.float32]:
        """Return the logits of the flagged rows, in batch order, (outputs, vocab_tokens)."""
        pointer = self._llama.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, (outputs, self.vocab_tokens))

    def _copy(self, source: int, target: int, keep: int) -> None:
        """Copy a stream's first tokens by its serialised state: `seq_cp` takes whole streams."""
        size = self._state_bytes(source)
        if size > self._scratch.nbytes:
            self._scratch = np.empty(size, np.uint8)
        snapshot = self._scratch[: self._export(source, self._scratch[:size])]
        if not self._restore(target, snapshot, keep):
            raise DecodeError(f"stream {source} could not be copied to {target}")

    def _save(self, save: Save, store: SnapshotStore) -> bool:
        size = self._state_bytes(save.stream_id)

        def write(room: memoryview) -> int:
            return self._export(save.stream_id, np.frombuffer(room, np.uint8))

        return store.put(save.token_ids, save.blocks, size, write)

    def _state_bytes(self, stream_id: int) -> int:
        assert 0 <= stream_id < self._parallel
        return int(self._llama.llama_state_seq_get_size_ext(self._context, stream_id, 0))

    def _export(self, stream_id: int, room: NDArray[np.uint8]) -> int:
        """Write a stream's state into `room`; return its bytes, 0 when it does not fit."""
        buffer = _pointer(room, ctypes.c_uint8)
        return int(
            self._llama.llama_state_seq_get_data_ext(
                self._context, buffer, room.nbytes, stream_id, 0
            )
        )

    def _restore(self, stream_id: int, snapshot: NDArray[np.uint8], keep: int) -> bool:
        """Replace a stream's state; on failure it is empty."""
        self._truncate(stream_id, 0)
        buffer = _pointer(snapshot, ctypes.c_uint8)
        read = int(
            self._llama.llama_state_seq_set_data_ext(
                self._context, buffer, snapshot.nbytes, stream_id, 0
            )
        )
        if read != snapshot.nbytes or self._held(stream_id) < keep:
            self._truncate(stream_id, 0)
            return False
        self._truncate(stream_id, keep)
        return True

    def _held(self, stream_id: int) -> int:
        """Return how many tokens a stream holds."""
        assert 0 <= stream_id < self._parallel
        return int(self._llama.llama_memory_seq_pos_max(self._memory, stream_id)) + 1

    def _truncate(self, stream_id: int, keep: int) -> None:
        held = self._held(stream_id)
        assert 0 <= keep <= held, f"stream {stream_id} holds {held} tokens, {keep} were expected"
        if keep == held:
            return
        start = keep if keep > 0 else -1
        if not self._llama.llama_memory_seq_rm(self._memory, stream_id, start, -1):
            raise DecodeError(f"stream {stream_id} could not be cut back to {keep} tokens")

    def try_step(self, rows: int) -> None:
        """Compute a step of `rows` streams that stays without consequence; for timing."""
        used = 0
        for stream_id in range(rows):
            used = self._rows.fill(used, [0], 0, stream_id, 1)
        self._decode_rows(used)
        self._clear()

    def try_prompt(self, tokens: int) -> None:
        """Read a prompt of so many tokens that stays without consequence; for timing."""
        self._rows.fill(0, [0] * tokens, 0, 0, 1)
        self._decode_rows(tokens)
        self._clear()

    def _clear(self) -> None:
        """Empty all streams, without overwriting gigabytes of cells."""
        self._llama.llama_memory_clear(self._memory, False)  # noqa: FBT003  # a C call

    def _probe_trimming(self) -> bool:
        """Return whether a stream can be cut back, by trying; recurrent states cannot.

        Also the warm-up: the first decode touches the compute buffers.
        """
        token = self.end_token_ids[0] if self.end_token_ids else 0
        self._rows.fill(0, [token, token], 0, 0, 0)
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
        self, at: int, token_ids: Sequence[int], position: int, stream_id: int, outputs: int
    ) -> int:
        """Write a run of one stream's tokens behind row `at`; return the row after it.

        The last `outputs` of them give logits.
        """
        end = at + len(token_ids)
        assert at < end <= len(self._token)
        self._token[at:end] = token_ids
        self._pos[at:end] = np.arange(position, position + len(token_ids))
        self._seq_pointer[at:end] = self._ids.ctypes.data + stream_id * self._ids.itemsize
        self._logits[at:end] = 0
        self._logits[end - outputs : end] = 1
        return end

    def struct(self, count: int) -> Any:
        self._batch.n_tokens = count
        return self._batch


def _pointer(array: NDArray[Any], item: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(item))


def _stream_id(chunk: Chunk) -> int:
    assert chunk.sequence.stream_id is not None
    return chunk.sequence.stream_id


def _strlen_as_abort_callback(llama: Any) -> Any:
    """Return libc's strlen in the guise of `bool callback(void *flag)`: true while flag is set.

    A callback written in Python would take the GIL at every operation of every graph.
    """
    strlen = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p).value
    return llama.ggml_abort_callback(strlen)


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
    params.n_outputs_max = max(options.parallel, 1 + DRAFT_MAX)
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
