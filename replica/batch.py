"""One llama_decode call as a value, and what the engine expects of whoever computes it."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from replica.sequence import Sequence
from replica.wire import EnginePhase


@dataclass(frozen=True, slots=True)
class Cut:
    """Keep a stream's first tokens, drop the rest."""

    stream_id: int
    keep: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Make a stream hold the first tokens of another one, whatever it held before."""

    source: int
    target: int
    keep: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Make a stream hold the first tokens of a snapshot, whatever it held before."""

    stream_id: int
    snapshot: NDArray[np.uint8]
    keep: int


@dataclass(frozen=True, slots=True)
class Save:
    """Put what a stream holds into the store, if that is not there yet."""

    stream_id: int
    token_ids: list[int]
    blocks: list[int]


Move = Cut | Copy | Restore | Save


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `size` uncomputed tokens of a sequence, and guesses at what follows them."""

    sequence: Sequence
    size: int
    draft: tuple[int, ...] = ()
    """Only behind a sequence's last token. Every row from that token on gives logits."""

    @property
    def completes(self) -> bool:
        """Whether nothing is left to compute after it, so that a token can be drawn."""
        return self.size == self.sequence.pending_tokens

    @property
    def rows(self) -> int:
        return self.size + len(self.draft)

    @property
    def outputs(self) -> int:
        """Rows of logits it gives."""
        return 1 + len(self.draft) if self.completes else 0


@dataclass(frozen=True, slots=True)
class Batch:
    """One llama_decode call; chunks ascend by stream id."""

    phase: EnginePhase
    chunks: list[Chunk]
    moves: list[Move]
    """To be made in order before it is decoded."""
    padding: tuple[Cut, ...] = ()
    """Streams that get a dummy row behind what they keep, and lose it again afterwards."""

    @property
    def rows(self) -> int:
        """Tokens that are computed for somebody."""
        return sum(chunk.rows for chunk in self.chunks)

    @property
    def sampled(self) -> list[Chunk]:
        """The chunks that get tokens from this batch, in the order of its rows."""
        return [chunk for chunk in self.chunks if chunk.completes]


class DecodeError(Exception):
    """llama.cpp refused a batch: our bookkeeping and its memory disagree."""


class AbortedError(Exception):
    """A batch was given up on demand; what its streams hold now is to be cut back."""


class SnapshotStore(Protocol):
    """Where a stream's state may be put."""

    def put(
        self,
        token_ids: Seq[int],
        blocks: Seq[int],
        size: int,
        write: Callable[[memoryview], int],
    ) -> bool: ...


class Runner(Protocol):
    """Anything that computes a batch: llama.cpp, or a fake that refuses what it refuses."""

    def move(self, move: Move) -> bool:
        """Change what streams hold; False when a snapshot could not be restored.

        The stream is empty then. Raises `DecodeError` when a stream cannot be cut or copied.
        """
        ...

    def decode(self, batch: Batch) -> list[NDArray[np.float32]]:
        """Compute, and return rows of logits: `outputs` of each of `batch.sampled`.

        A row has one float per vocabulary entry; it may be changed, and is valid until the next
        call. Raises `DecodeError` when the KV cache can no longer be trusted, `AbortedError`
        after `abort`.
        """
        ...

    def set_threads(self, threads: int) -> None:
        """Compute with so many threads from the next batch on."""
        ...

    def abort(self) -> None:
        """Make the running `decode` raise `AbortedError` soon. From any thread; may come late."""
        ...
