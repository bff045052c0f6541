"""One llama_decode call as a value, and what the engine expects of whoever computes it."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from replica.sequence import Sequence
from replica.wire import EnginePhase


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `size` uncomputed tokens of a sequence."""

    sequence: Sequence
    size: int

    @property
    def completes(self) -> bool:
        """Whether nothing is left to compute after it, so that a token can be drawn."""
        return self.size == self.sequence.pending_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """One llama_decode call; chunks ascend by stream id."""

    phase: EnginePhase
    chunks: list[Chunk]
    truncate: list[tuple[int, int]]
    """(stream id, tokens to keep), to be cut before anything is decoded."""

    @property
    def rows(self) -> int:
        return sum(chunk.size for chunk in self.chunks)

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that get a token from this batch, in the order of its rows."""
        return [chunk.sequence for chunk in self.chunks if chunk.completes]


class DecodeError(Exception):
    """llama.cpp refused a batch: our bookkeeping and its memory disagree."""


class Runner(Protocol):
    """Anything that computes a batch: llama.cpp, or a fake that refuses what it refuses."""

    def decode(self, batch: Batch) -> list[NDArray[np.float32]]:
        """Cut, compute, and return one row of logits per `batch.sampled`.

        A row has one float per vocabulary entry; it may be changed, and is valid until the next
        call. Raises `DecodeError` when the KV cache can no longer be trusted.
        """
        ...
