"""Which KV stream holds which tokens, and what of that can be reused.

Pure bookkeeping: it decides, `replica.llama` does. llama.cpp's KV cache is split into streams,
one per sequence id, each with room for a whole context; so a leased stream can never run out of
room, and no step can fail for lack of it. Every change is also reported as a `KvEvent`, so the
gateway's picture of this cache comes from the same lines as the cache itself.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from replica.blocks import block_hashes
from replica.wire import Evicted, KvEvent, Stored

COPY_TOKENS = 16
"""What copying a stream is thought to cost, in tokens computed instead. Measured, it costs less
than one (512 tokens of a 0.5B model: 1.5 ms there and back, against 1.5 s to compute them); the
rest is for the chance that the stream copied from is continued in place anyhow."""
SAVE_TOKENS_MIN = 64
"""Fewer tokens are computed again rather than looked up: their snapshot would only crowd out
longer ones."""
RETURN_PROBABILITY = 0.1
"""How likely a cached token is thought to be asked for again: what overwriting it costs, in
tokens computed now. It keeps a prompt that shares only a template's opening words with a long
conversation from destroying that conversation while an empty stream lies beside it."""


@dataclass(slots=True)
class Stream:
    """One sequence id of llama.cpp and what its KV cells hold."""

    stream_id: int
    token_ids: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    leased: bool = False
    used_at: int = 0
    saved_tokens: int = 0
    """How many of its tokens are in a snapshot that was made of it."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Permission to append to a stream whose first `cached_tokens` tokens are already right."""

    stream_id: int
    cached_tokens: int
    copied_from: int | None = None
    """The stream that holds them, when it is another one: they must be copied first."""
    lost: tuple[list[int], list[int]] | None = None
    """Tokens and blocks the stream held before, when more than a little of that is given up."""


class KvStreams:
    """All streams of one llama.cpp context.

    `trimmable` is False for models whose state cannot be cut back (recurrent ones): there a
    stream is continued only from exactly where it ended, and copied only whole.
    `copies_prefixes` is False for those too, and for sliding windows: a copy lacks what lies
    outside the window at the source's end, so it could not be cut back like other streams, and
    none is made.
    """

    def __init__(
        self,
        parallel: int,
        block_tokens: int,
        root: int,
        *,
        trimmable: bool,
        copies_prefixes: bool = True,
    ) -> None:
        assert parallel > 0
        assert block_tokens > 0
        self._streams = [Stream(stream_id) for stream_id in range(parallel)]
        self._block_tokens = block_tokens
        self._root = root
        self.parallel = parallel
        self.trimmable = trimmable
        self.copies_prefixes = copies_prefixes and trimmable
        self._holders: Counter[int] = Counter()
        self._events: list[KvEvent] = []
        self._releases = 0

    def __repr__(self) -> str:
        leased = sum(stream.leased for stream in self._streams)
        return f"<KvStreams {leased}/{len(self._streams)} leased, {self.used_tokens} tokens>"

    @property
    def used_tokens(self) -> int:
        return sum(len(stream.token_ids) for stream in self._streams)

    @property
    def free(self) -> int:
        return sum(not stream.leased for stream in self._streams)

    def acquire(self, token_ids: Sequence[int]) -> Lease | None:
        """Lease the free stream that saves most, and make it hold what is shared, and no more.

        What is shared may also be copied from another stream, free or in use. Ties go to the least
        recently used, then the lowest id. None when all are leased.
        """
        free = [stream for stream in self._streams if not stream.leased]
        if not free:
            return None
        shared = [self._reusable(stream, token_ids) for stream in self._streams]
        copyable = [self._copyable(s, shared[s.stream_id]) for s in self._streams]
        source = max(self._streams, key=lambda s: (copyable[s.stream_id], -s.stream_id))
        copied = copyable[source.stream_id] - COPY_TOKENS

        def in_place(stream: Stream) -> float:
            keep = shared[stream.stream_id]
            return keep - RETURN_PROBABILITY * (len(stream.token_ids) - keep)

        def by_copy(stream: Stream) -> float:
            return copied - RETURN_PROBABILITY * len(stream.token_ids)

        stream = max(free, key=lambda s: (max(in_place(s), by_copy(s)), -s.used_at, -s.stream_id))
        keep = shared[stream.stream_id]
        stream.leased = True
        if stream is source or in_place(stream) >= by_copy(stream):
            lost = self._worth_saving(stream, keep)
            self._truncate(stream, keep)
            return Lease(stream.stream_id, keep, lost=lost)
        lost = self._worth_saving(stream, 0)
        keep = copyable[source.stream_id]
        self._copy(source, stream, keep)
        return Lease(stream.stream_id, keep, source.stream_id, lost)

    def restored(self, stream_id: int, token_ids: Sequence[int]) -> None:
        """Record that a leased stream holds just these tokens, from a snapshot."""
        stream = self._streams[stream_id]
        assert stream.leased
        self._truncate(stream, 0)
        stream.saved_tokens = len(token_ids)
        self.append(stream_id, token_ids)

    def emptied(self, stream_id: int) -> None:
        """Record that a stream holds nothing any more."""
        self._truncate(self._streams[stream_id], 0)

    def unsaved(self) -> int | None:
        """Return the stream, of those that rest, whose snapshot is most worth making."""
        resting = [
            stream
            for stream in self._streams
            if not stream.leased and len(stream.token_ids) - stream.saved_tokens >= SAVE_TOKENS_MIN
        ]
        return max(resting, key=lambda s: s.used_at).stream_id if resting else None

    def saved(self, stream_id: int) -> tuple[list[int], list[int]]:
        """Record that a snapshot is made of a stream; return its tokens and blocks."""
        stream = self._streams[stream_id]
        stream.saved_tokens = len(stream.token_ids)
        return list(stream.token_ids), list(stream.blocks)

    def reusable(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens some stream holds."""
        return max(self._reusable(stream, token_ids) for stream in self._streams)

    def holding(self, stream_id: int) -> int:
        """Return how many tokens a stream holds."""
        return len(self._streams[stream_id].token_ids)

    def forget(self, stream_id: int) -> int:
        """Say that what follows the recorded tokens is unknown; return how many can be kept."""
        stream = self._streams[stream_id]
        if not self.trimmable:
            self._truncate(stream, 0)
        return len(stream.token_ids)

    def append(self, stream_id: int, token_ids: Sequence[int]) -> None:
        """Record that these tokens' keys and values have been computed behind the others."""
        stream = self._streams[stream_id]
        assert stream.leased
        stream.token_ids.extend(token_ids)
        known = len(stream.blocks)
        if len(stream.token_ids) // self._block_tokens > known:
            stream.blocks = block_hashes(
                stream.token_ids, self._block_tokens, self._root, known=stream.blocks
            )
            self._hold(stream.blocks[known:])

    def release(self, stream_id: int) -> None:
        """Give the stream back but keep its tokens: an idle stream is the prefix cache."""
        stream = self._streams[stream_id]
        assert stream.leased
        stream.leased = False
        self._releases += 1
        stream.used_at = self._releases

    def take_events(self) -> list[KvEvent]:
        """Return what changed since the last call, in order."""
        events, self._events = self._events, []
        return events

    def held_blocks(self) -> list[int]:
        return sorted(self._holders)

    def tokens_of(self, stream_id: int) -> list[int]:
        return list(self._streams[stream_id].token_ids)

    def _reusable(self, stream: Stream, token_ids: Sequence[int]) -> int:
        # The last prompt token is always computed: its logits choose the first new token.
        keep = min(shared_tokens(stream.token_ids, token_ids), len(token_ids) - 1)
        if self.trimmable or keep == len(stream.token_ids):
            return keep
        return 0

    def _copyable(self, stream: Stream, shared: int) -> int:
        if self.trimmable:
            return shared if self.copies_prefixes else 0
        return shared if shared == len(stream.token_ids) else 0

    def _worth_saving(self, stream: Stream, keep: int) -> tuple[list[int], list[int]] | None:
        """Return what a stream holds, if cutting it gives up much that no snapshot holds."""
        unsaved = len(stream.token_ids) - max(keep, stream.saved_tokens)
        if unsaved < SAVE_TOKENS_MIN:
            return None
        return list(stream.token_ids), list(stream.blocks)

    def _copy(self, source: Stream, target: Stream, keep: int) -> None:
        self._truncate(target, 0)
        target.token_ids = source.token_ids[:keep]
        target.blocks = source.blocks[: keep // self._block_tokens]
        target.saved_tokens = min(keep, source.saved_tokens)
        self._hold(target.blocks)

    def _truncate(self, stream: Stream, keep: int) -> None:
        whole_blocks = keep // self._block_tokens
        del stream.token_ids[keep:]
        stream.saved_tokens = min(keep, stream.saved_tokens)
        gone = stream.blocks[whole_blocks:]
        del stream.blocks[whole_blocks:]
        self._drop(gone)

    def _hold(self, blocks: Sequence[int]) -> None:
        new = [block for block in blocks if block not in self._holders]
        self._holders.update(blocks)
        if new:
            self._events.append(Stored(new))

    def _drop(self, blocks: Sequence[int]) -> None:
        self._holders.subtract(blocks)
        gone = [block for block in blocks if self._holders[block] == 0]
        for block in gone:
            del self._holders[block]
        if gone:
            self._events.append(Evicted(gone))


def shared_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    low, high = 0, limit  # invariant: a[:low] == b[:low] and a[:high] != b[:high]
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
