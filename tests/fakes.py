"""A working stand-in for llama.cpp: keeps tokens where it keeps keys and values.

It refuses what llama.cpp refuses (`test_runner_contract` holds both to the same promises), and
its logits depend on every token before them, so that a cache used wrongly changes the output.
"""

import math
import threading
from collections.abc import Sequence as Seq
from hashlib import blake2b
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from replica.batch import (
    AbortedError,
    Batch,
    Copy,
    Cut,
    DecodeError,
    Move,
    Restore,
    Save,
    SnapshotStore,
)
from replica.lookup import DRAFT_MAX
from replica.sampling import Sampler
from replica.sequence import Sequence
from replica.wire import EnginePhase, Generate, Sampling

Row = NDArray[np.float32]

VOCAB_TOKENS = 32
END_TOKEN_ID = 0
GREEDY = Sampling(seed=1, temperature=0.0)


def logits_after(token_ids: Seq[int], vocab_tokens: int = VOCAB_TOKENS) -> Row:
    """The fake model: what comes next depends on every token before, and on their order."""
    digest = blake2b(np.array(token_ids, np.int32).tobytes(), digest_size=8).digest()
    random = np.random.default_rng(int.from_bytes(digest, "little"))
    return random.standard_normal(vocab_tokens, np.float32) * 2


def reference(request: Generate, context_tokens: int) -> list[int]:
    """The completion a request must get: computed alone, from no cache, one token at a time."""
    token_ids = list(request.token_ids)
    prompt = token_ids[: request.prompt_tokens]
    sampler = Sampler(
        request.sampling,
        [END_TOKEN_ID],
        ignore_eos=request.ignore_eos,
        prompt=prompt,
        completion=token_ids[request.prompt_tokens :],
    )
    while len(token_ids) < min(context_tokens, request.prompt_tokens + request.tokens_max):
        index = len(token_ids) - request.prompt_tokens
        token_id = sampler.draw(logits_after(token_ids), index).token_id
        if token_id == END_TOKEN_ID:
            break
        sampler.accept(token_id)
        token_ids.append(token_id)
    return token_ids[len(request.token_ids) :]


class FakeRunner:
    """A `replica.batch.Runner` with the facts of `replica.llama.Llama` around it."""

    def __init__(
        self,
        parallel: int,
        room_tokens: int,
        *,
        batch_tokens_max: int = 8,
        trimmable: bool = True,
        vocab_tokens: int = VOCAB_TOKENS,
    ) -> None:
        self.vocab_tokens = vocab_tokens
        self.end_token_ids = [END_TOKEN_ID]
        self.trimmable = self.copies_prefixes = trimmable
        self.batch_tokens_max = batch_tokens_max
        self.cells: list[list[int]] = [[] for _ in range(parallel)]
        self.phases: list[EnginePhase] = []
        self.sizes: list[list[tuple[int, int]]] = []
        """Of every batch: (stream id, tokens) of its chunks."""
        self.nan_after: tuple[int, ...] | None = None
        """A stream that begins with these tokens has logits that are no numbers."""
        self.abort_after: int | None = None
        """The next batch is aborted after so many of its tokens, wherever that leaves them."""
        self.aborted = threading.Event()
        self.copied = 0
        """Tokens copied so far from one stream to another."""
        self.restores_fail = False
        self.snapshots: SnapshotStore | None = None
        self.threads: list[int] = []
        """Every number of threads it was told to use."""
        self.padded = 0
        """Dummy rows computed so far."""
        self._room_tokens = room_tokens
        self._rows_max = max(batch_tokens_max, parallel, 1 + DRAFT_MAX)

    @property
    def rows(self) -> int:
        """Tokens computed so far."""
        return sum(size for chunks in self.sizes for _, size in chunks)

    def close(self) -> None:
        """Nothing to free; `Llama` has it."""

    def set_threads(self, threads: int) -> None:
        assert threads > 0
        self.threads.append(threads)

    def abort(self) -> None:
        self.aborted.set()

    def move(self, move: Move) -> bool:
        match move:
            case Cut(stream_id, keep):
                self._truncate(stream_id, keep)
            case Copy(source, target, keep):
                self._copy(source, target, keep)
            case Restore(stream_id, snapshot, keep):
                return self._restore(stream_id, snapshot, keep)
            case Save(stream_id, token_ids, blocks):
                return self._save(stream_id, token_ids, blocks)
        return True

    def decode(self, batch: Batch) -> list[Row]:
        self.aborted.clear()
        assert 0 < batch.rows + len(batch.padding) <= self._rows_max
        ids = [_stream_id(chunk.sequence) for chunk in batch.chunks]
        assert all(0 <= stream_id < len(self.cells) for stream_id in ids)
        assert all(one < other for one, other in pairwise(ids)), "ids ascend"
        for pad in batch.padding:
            assert pad.stream_id not in ids
            assert pad.keep == len(self.cells[pad.stream_id]) < self._room_tokens
            assert self.trimmable, "a dummy row must be taken back"
        rows: list[Row] = []
        for stream_id, chunk in zip(ids, batch.chunks, strict=True):
            start = chunk.sequence.computed_tokens
            assert start + chunk.rows <= self._room_tokens
            assert chunk.size > 0
            assert chunk.completes or not chunk.draft
            tokens = [*chunk.sequence.token_ids[start : start + chunk.size], *chunk.draft]
            self._extend(stream_id, start, tokens[: self.abort_after])
            self._count_down(len(tokens))
            cells = self.cells[stream_id]
            first = len(cells) - chunk.outputs + 1
            rows += [self._logits(cells[:end]) for end in range(first, len(cells) + 1)]
        self.phases.append(batch.phase)
        self.sizes.append([(i, chunk.rows) for i, chunk in zip(ids, batch.chunks, strict=True)])
        self.padded += len(batch.padding)
        return rows

    def _save(self, stream_id: int, token_ids: list[int], blocks: list[int]) -> bool:
        cells = np.array(self.cells[stream_id], np.int32)
        assert list(cells) == token_ids
        if self.snapshots is None:
            return False

        def write(room: memoryview) -> int:
            np.frombuffer(room, np.int32)[:] = cells
            return cells.nbytes

        return self.snapshots.put(token_ids, blocks, cells.nbytes, write)

    def _restore(self, stream_id: int, snapshot: NDArray[np.uint8], keep: int) -> bool:
        cells = snapshot.view(np.int32).tolist()
        self.cells[stream_id] = []
        if len(cells) < keep or self.restores_fail:
            return False
        if keep < len(cells) and not self.trimmable:
            raise DecodeError(f"the state of stream {stream_id} cannot be cut back to {keep}")
        self.cells[stream_id] = cells[:keep]
        return True

    def _count_down(self, tokens: int) -> None:
        if self.abort_after is None:
            return
        self.abort_after -= tokens
        if self.abort_after <= 0:
            self.abort_after = None
            raise AbortedError

    def _copy(self, source: int, target: int, keep: int) -> None:
        assert source != target
        assert keep <= len(self.cells[source])
        if keep < len(self.cells[source]) and not self.trimmable:
            raise DecodeError(f"the state of stream {source} cannot be cut back to {keep}")
        self.cells[target] = self.cells[source][:keep]
        self.copied += keep

    def _truncate(self, stream_id: int, keep: int) -> None:
        assert 0 <= stream_id < len(self.cells)
        cells = self.cells[stream_id]
        assert 0 <= keep <= len(cells)
        if keep not in (0, len(cells)) and not self.trimmable:
            raise DecodeError(f"the state of stream {stream_id} cannot be cut back to {keep}")
        del cells[keep:]

    def _extend(self, stream_id: int, start: int, token_ids: list[int]) -> None:
        cells = self.cells[stream_id]
        if start != len(cells):
            raise DecodeError(f"stream {stream_id} ends at {len(cells)}, not at {start}")
        if not all(0 <= token_id < self.vocab_tokens for token_id in token_ids):
            raise DecodeError("a token outside the vocabulary")
        cells.extend(token_ids)

    def _logits(self, cells: list[int]) -> Row:
        if self.nan_after is not None and tuple(cells[: len(self.nan_after)]) == self.nan_after:
            return np.full(self.vocab_tokens, math.nan, np.float32)
        return logits_after(cells, self.vocab_tokens)


def _stream_id(sequence: Sequence) -> int:
    assert sequence.stream_id is not None
    return sequence.stream_id
