"""Where a prompt's beginning comes from when it need not be computed.

Three tiers: the stream it was left in, a copy from another stream, a snapshot from the store. Knows
the books of the streams and what the store offers; makes no move itself, and knows no clock.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from replica.batch import Copy, Cut, Move, Restore, Save
from replica.kv_streams import KvStreams, shared_tokens
from replica.sequence import Sequence

RESTORE_GAIN_TOKENS = 32
"""A snapshot is read only for more tokens than this beyond what the streams hold."""
WAIT_GAIN_TOKENS = 32
"""A prompt waits for another that is being read if that saves it more than this many tokens."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A verified snapshot, and how many leading tokens of the prompt it holds."""

    tokens: int
    data: NDArray[np.uint8]


class Snapshots(Protocol):
    """The store, as far as prompts need it."""

    def find(self, token_ids: Seq[int], longer_than: int, *, whole: bool) -> Snapshot | None:
        """Return a snapshot that shares more leading tokens than that with a prompt.

        `whole`: and holds nothing else.
        """
        ...


class Prefixes:
    """Gives sequences streams that hold as much of their prompts as is to be had."""

    def __init__(self, kv_streams: KvStreams, snapshots: Snapshots | None) -> None:
        self._kv_streams = kv_streams
        # A snapshot of a sliding window, cut back later as other streams are, gave wrong tokens.
        movable = kv_streams.copies_prefixes or not kv_streams.trimmable
        self._snapshots = snapshots if movable else None
        self.cached_tokens: Counter[str] = Counter()
        """Prompt tokens that need not be computed, by tier, since they were last taken."""

    def lease(self, sequence: Sequence, *, may_save: Callable[[int], bool]) -> list[Move] | None:
        """Give a sequence a stream; return the moves that fill it. None when all are in use.

        What the stream held is saved first if it is worth that, and so many tokens `may_save`.
        """
        lease = self._kv_streams.acquire(sequence.token_ids)
        if lease is None:
            return None
        stream_id, cached = lease.stream_id, lease.cached_tokens
        moves: list[Move] = []
        snapshot = None
        if self._snapshots is not None:
            if lease.lost is not None and may_save(len(lease.lost[0])):
                moves.append(Save(stream_id, *lease.lost))
            snapshot = self._snapshots.find(
                sequence.token_ids,
                cached + RESTORE_GAIN_TOKENS,
                whole=not self._kv_streams.trimmable,
            )
        tier = "stream"
        if snapshot is not None:
            tier, cached = "store", snapshot.tokens
            self._kv_streams.restored(stream_id, sequence.token_ids[:cached])
            moves.append(Restore(stream_id, snapshot.data, cached))
        elif lease.copied_from is not None:
            tier = "copy"
            moves.append(Copy(lease.copied_from, stream_id, cached))
        else:
            moves.append(Cut(stream_id, cached))
        sequence.stream_id, sequence.tier = stream_id, tier
        sequence.computed_tokens = cached
        sequence.cached_tokens = min(cached, sequence.request.prompt_tokens)
        self.cached_tokens[tier] += sequence.cached_tokens
        return moves

    def restore_failed(self, restore: Restore, sequences: Iterable[Sequence]) -> None:
        """Have the prompt computed after all: its snapshot was none."""
        self._kv_streams.emptied(restore.stream_id)
        for sequence in sequences:
            if sequence.stream_id == restore.stream_id:
                self.cached_tokens[sequence.tier] -= sequence.cached_tokens
                sequence.computed_tokens = sequence.cached_tokens = 0

    def take_cached_tokens(self) -> dict[str, int]:
        taken = {tier: tokens for tier, tokens in self.cached_tokens.items() if tokens}
        self.cached_tokens.clear()
        return taken

    def rest(self) -> Save | None:
        """Return what is worth saving while there is nothing else to do."""
        stream_id = self._kv_streams.unsaved() if self._snapshots is not None else None
        return None if stream_id is None else Save(stream_id, *self._kv_streams.saved(stream_id))

    def gains_by_waiting(self, sequence: Sequence, reading: Seq[Sequence]) -> bool:
        """Whether a prompt being read begins as this one does: it can be copied when it is."""
        if not reading or not self._kv_streams.copies_prefixes:
            return False
        longest = len(sequence.token_ids) - 1
        soon = max(shared_tokens(other.token_ids, sequence.token_ids) for other in reading)
        soon = min(soon, longest)
        if soon <= WAIT_GAIN_TOKENS:
            return False
        gain = soon - self._kv_streams.reusable(sequence.token_ids)
        # Who has begun to wait does so to the end, or the last tokens were computed by everybody.
        sequence.awaits_prefix = gain > (0 if sequence.awaits_prefix else WAIT_GAIN_TOKENS)
        return sequence.awaits_prefix
