"""KV snapshots in memory that all replicas of a machine share, and that outlives each of them.

The supervisor makes the memory (`create`) and the replicas inherit it (`attach`), so the kernel
frees it with its last holder; replicas in separate containers share a file on a tmpfs (`at`).
A snapshot is found by its prefix's block hashes, and believed only when the tokens, the
generation and the checksum are right in the reader's own copy: no parser sees torn bytes.

One lock guards the table, and no snapshot's bytes are moved under it. Whoever cannot have it
soon does without the store: that costs a request its cache, never a stream its step. A snapshot
half-written belongs to its writer until the kernel says that the writer is dead; a living one,
however long it has been stopped, may still write where it was told to.

It knows no llama.cpp. One instance per process, used by one thread; a forked child needs its own.
"""

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import xxhash

from replica.blocks import BLOCK_TOKENS
from replica.kv_arena import Bytes, Layout, State, Tokens, Words, longest_match, whole_match
from replica.kv_lock import is_held, lock_within, unlock
from replica.kv_memory import ARENA_AT, FIRST_WRITER_BYTE, TABLE_BYTE, KvMemory, KvStoreError

__all__ = ["Found", "KvStore", "KvStoreError", "Stats"]

LOCK_WAIT_S = 0.005
"""How long to try for the table before doing without the store, in seconds."""


@dataclass(frozen=True, slots=True)
class Found:
    """A snapshot worth reading, as it was when it was found."""

    entry: int
    generation: int
    """Tells this snapshot from all that were or will be in the same entry."""
    blocks: int
    """Leading blocks that it shares with the prompt."""
    tokens: int
    """All that it holds; those behind the shared blocks are for the caller to cut off."""
    size: int
    """Bytes of the snapshot itself."""


@dataclass(frozen=True, slots=True)
class Stats:
    """What the store holds, and what has happened in it since it was made, by anyone."""

    bytes_used: int
    """The table included."""
    budget_bytes: int
    snapshots: int
    evictions: int
    orphans: int
    """Snapshots given up half-written, because their writer had died or failed."""
    corrupt: int
    """Snapshots whose bytes were not those that had been written."""
    resets: int
    """Times the table itself was found damaged, and emptied."""


@dataclass(frozen=True, slots=True)
class _Claim:
    """An entry that is ours to fill, for as long as its generation says so."""

    entry: int
    generation: int
    offset: int
    layout: Layout
    backed: int
    """Leading bytes of the arena that are known to have memory behind them."""


class KvStore:
    """One process's door to the store."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory

    @classmethod
    def create(cls, budget_bytes: int) -> Self:
        """Make a store of at most so many bytes, table included; it dies with its last holder."""
        return cls(KvMemory.create(budget_bytes))

    @classmethod
    def attach(cls, fd: int) -> Self:
        """Join the store behind an inherited descriptor, which from now on is the store's."""
        return cls(KvMemory.attach(fd))

    @classmethod
    def at(cls, path: Path, budget_bytes: int) -> Self:
        """Join the store in a tmpfs file, or make it; the last to close it removes the file."""
        return cls(KvMemory.at(path, budget_bytes))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"<KvStore {stats.snapshots} snapshots, "
            f"{stats.bytes_used}/{stats.budget_bytes} bytes, {stats.evictions} evicted>"
        )

    def close(self) -> None:
        self._memory.close()

    def fileno(self) -> int:
        """The descriptor for other processes to inherit."""
        return self._memory.fd

    def stats(self) -> Stats:
        """Return the store's books; where the table cannot be had, as they look without it."""
        with self._locked():
            header = self._memory.header[0]
            entries = self._memory.entries
            return Stats(
                bytes_used=ARENA_AT + entries.used_bytes,
                budget_bytes=self._memory.size,
                snapshots=int(np.count_nonzero(entries.state == State.READY)),
                evictions=int(header["evictions"]),
                orphans=int(header["orphans"]),
                corrupt=int(header["corrupt"]),
                resets=int(header["resets"]),
            )

    def put(
        self,
        namespace: int,
        token_ids: Sequence[int],
        hashes: Sequence[int],
        size: int,
        write: Callable[[memoryview], int],
    ) -> bool:
        """Store a snapshot of `size` bytes, evicting what has been idle longest.

        `write` fills the shared buffer and returns how many bytes it wrote; it must not call the
        store, nor keep the buffer. False when there is nothing new in the store: the snapshot was
        there already (and counts as used), is too large, has no whole block by which it could be
        found, came out at another size, or the table could not be had.
        """
        assert len(hashes) == len(token_ids) // BLOCK_TOKENS
        assert size > 0
        if not hashes:
            return False
        tokens = np.array(token_ids, np.int32)
        claim = self._claim(namespace, tokens, Layout(len(hashes), len(tokens), size))
        if claim is None:
            return False
        published = False
        try:
            checksum = self._fill(claim, tokens, np.array(hashes, np.uint64), write)
            published = checksum is not None and self._publish(claim, checksum)
        finally:
            if not published:
                self._abandon(claim)
        return published

    def find(self, namespace: int, hashes: Sequence[int], *, whole: bool = False) -> Found | None:
        """Return the snapshot that shares the most leading blocks, of those the smallest.

        With `whole`, only snapshots that end where the match ends: for models whose state
        cannot be cut back. None also when the table could not be had.
        """
        wanted = np.array(hashes, np.uint64)
        match = whole_match if whole else longest_match
        with self._locked() as locked:
            if not locked:
                return None
            entries = self._memory.entries
            rows = np.flatnonzero((entries.state == State.READY) & (entries.namespace == namespace))
            if whole:
                rows = rows[entries.tokens[rows] == entries.blocks[rows] * BLOCK_TOKENS]
            first = (ARENA_AT + entries.offset[rows]) // wanted.itemsize
            blocks, hits = match(self._memory.words, first, entries.blocks[rows], wanted)
            if blocks == 0:
                return None
            best = rows[hits]
            entry = int(best[np.argmin(entries.size[best])])
            layout = entries.layout(entry)
            generation = int(entries.generation[entry])
        return Found(entry, generation, blocks, layout.tokens, layout.size)

    def read(self, found: Found, token_ids: Sequence[int]) -> Bytes | None:
        """Return the caller's own copy of the snapshot, which counts as used.

        None when it is no longer there, was damaged (then it is removed), or when its leading
        tokens are not the prompt's: equal hashes alone prove nothing.
        """
        matched = found.blocks * BLOCK_TOKENS
        assert 0 < matched <= min(found.tokens, len(token_ids))
        entries = self._memory.entries
        with self._locked() as locked:
            if not locked or not self._is_there(found):
                return None
            entries.used_at[found.entry] = self._tick()
            layout = entries.layout(found.entry)
            start = ARENA_AT + int(entries.offset[found.entry])
            checksum = int(entries.checksum[found.entry])
        # Nothing keeps the snapshot where it is while it is copied: the checksum tells.
        copy = self._memory.bytes[start : start + layout.length].copy()
        if xxhash.xxh3_64_intdigest(copy.data) != checksum:
            self._remove_corrupt(found)
            return None
        tokens = copy[layout.tokens_at :][: layout.tokens * 4].view(np.int32)
        if not np.array_equal(tokens[:matched], np.array(token_ids[:matched], np.int32)):
            return None
        return copy[layout.data_at :]

    def _claim(self, namespace: int, tokens: Tokens, layout: Layout) -> _Claim | None:
        """Make an entry and its extent ours. None when that cannot or need not be."""
        entries = self._memory.entries
        key = xxhash.xxh3_64_intdigest(tokens.data)
        with self._locked() as locked:
            if not locked:
                return None
            self._reclaim_orphans()
            same = (entries.namespace == namespace) & (entries.key == key)
            there = np.flatnonzero(same & (entries.state != State.FREE))
            if there.size:
                entries.used_at[there] = self._tick()
                return None
            offset = self._make_room(layout.extent)
            entry = entries.vacant()
            if offset is None or entry is None:
                return None
            generation = self._tick()
            entries.generation[entry] = entries.used_at[entry] = generation
            entries.offset[entry], entries.extent[entry] = offset, layout.extent
            entries.blocks[entry], entries.tokens[entry] = layout.blocks, layout.tokens
            entries.size[entry], entries.writer[entry] = layout.size, self._memory.writer
            entries.namespace[entry], entries.key[entry] = namespace, key
            entries.state[entry] = State.WRITING
            backed = int(self._memory.header["backed"][0])
            return _Claim(entry, generation, offset, layout, backed)

    def _make_room(self, extent: int) -> int | None:
        """Evict what must go for an extent and an entry; return where the extent may lie."""
        entries = self._memory.entries
        place = entries.place(extent)
        if place is None:
            return None
        victims = place.victims
        if not victims and entries.vacant() is None:
            victims = entries.oldest()
        for victim in victims:
            entries.state[victim] = State.FREE
            self._count("evictions")
        return place.offset

    def _fill(
        self,
        claim: _Claim,
        tokens: Tokens,
        hashes: Words,
        write: Callable[[memoryview], int],
    ) -> int | None:
        """Write the claimed extent and return its checksum. None when it could not be filled."""
        memory, layout = self._memory, claim.layout
        start = ARENA_AT + claim.offset
        if claim.offset + layout.extent > claim.backed:
            try:  # a page that a full tmpfs refuses here is a SIGBUS when it is touched
                os.posix_fallocate(memory.fd, start, layout.extent)
            except OSError:
                return None
        body = memory.bytes[start : start + layout.length]
        body[: layout.tokens_at] = hashes.view(np.uint8)
        body[layout.tokens_at :][: tokens.nbytes] = tokens.view(np.uint8)
        if write(memory.view[start + layout.data_at : start + layout.length]) != layout.size:
            return None
        return xxhash.xxh3_64_intdigest(body.data)

    def _publish(self, claim: _Claim, checksum: int) -> bool:
        entries, header = self._memory.entries, self._memory.header
        with self._locked() as locked:
            if not locked or not self._is_ours(claim):
                return False
            entries.checksum[claim.entry] = checksum
            backed = int(header["backed"][0])
            if claim.offset <= backed:
                header["backed"][0] = max(backed, claim.offset + claim.layout.extent)
            entries.state[claim.entry] = State.READY
            return True

    def _abandon(self, claim: _Claim) -> None:
        with self._locked() as locked:  # if not now, the next `put` takes it for an orphan
            if locked and self._is_ours(claim):
                self._memory.entries.state[claim.entry] = State.FREE

    def _remove_corrupt(self, found: Found) -> None:
        with self._locked() as locked:
            if locked and self._is_there(found):
                self._memory.entries.state[found.entry] = State.FREE
                self._count("corrupt")

    def _reclaim_orphans(self) -> None:
        """Free what was being written by the dead, or by ourselves and could not be freed then."""
        entries, memory = self._memory.entries, self._memory
        for entry in np.flatnonzero(entries.state == State.WRITING):
            writer = int(entries.writer[entry])  # ourselves we do not count as holding
            if not is_held(memory.lock_fd, FIRST_WRITER_BYTE + writer):
                entries.state[entry] = State.FREE
                self._count("orphans")

    def _is_ours(self, claim: _Claim) -> bool:
        return self._is_in(State.WRITING, claim.entry, claim.generation)

    def _is_there(self, found: Found) -> bool:
        return self._is_in(State.READY, found.entry, found.generation)

    def _is_in(self, state: State, entry: int, generation: int) -> bool:
        entries = self._memory.entries
        return bool(entries.state[entry] == state and entries.generation[entry] == generation)

    def _tick(self) -> int:
        """Return the next moment: used once as a generation, or as the time of a use."""
        return self._count("clock")

    def _count(self, name: str) -> int:
        field = self._memory.header[name]
        field[0] += 1
        return int(field[0])

    @contextmanager
    def _locked(self) -> Generator[bool]:
        """Hold the table, if it can be had soon; say whether. It is sound when we have it."""
        memory = self._memory
        if not lock_within(memory.lock_fd, TABLE_BYTE, LOCK_WAIT_S):
            yield False
            return
        try:
            if not memory.entries.is_sound():
                memory.entries.state[:] = State.FREE
                self._count("resets")
            yield True
        finally:
            unlock(memory.lock_fd, TABLE_BYTE)
