"""Where each KV snapshot lies in the shared arena, and which ones must go for another.

Pure bookkeeping on a table in shared memory: no process, no lock, no snapshot's bytes. It must
survive a holder that is killed anywhere in here, so nothing is derived and kept: holes are what
the entries leave free, and every change is made by one store to an entry's `state`, after
everything that the new state promises has been written.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

ENTRIES_MAX = 1024
"""Snapshots a store can hold, whatever their size."""

PAGE_BYTES = 4096
"""Extents begin and end on pages: no page is shared by two snapshots, or by two NUMA nodes."""

DATA_ALIGN_BYTES = 64

ENTRY = np.dtype(
    [
        ("generation", "i8"),
        ("used_at", "i8"),
        ("offset", "i8"),
        ("extent", "i8"),
        ("size", "i8"),
        ("tokens", "i8"),
        ("blocks", "i8"),
        ("writer", "i8"),
        ("namespace", "u8"),
        ("key", "u8"),
        ("checksum", "u8"),
        ("state", "i8"),
    ]
)

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Table = NDArray[np.void]
Tokens = NDArray[np.int32]
Words = NDArray[np.uint64]


class State(IntEnum):
    """What an entry's extent holds; zeroed memory is an empty table."""

    FREE = 0
    WRITING = 1
    READY = 2


@dataclass(frozen=True, slots=True)
class Layout:
    """How a snapshot lies in its extent: hashes, tokens, then the data."""

    blocks: int
    tokens: int
    size: int

    @property
    def tokens_at(self) -> int:
        return self.blocks * 8

    @property
    def data_at(self) -> int:
        return _round_up(self.tokens_at + self.tokens * 4, DATA_ALIGN_BYTES)

    @property
    def length(self) -> int:
        return self.data_at + self.size

    @property
    def extent(self) -> int:
        return _round_up(self.length, PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class Place:
    """Room for one snapshot once the victims are gone."""

    offset: int
    victims: tuple[int, ...]


class Entries:
    """The table's columns, as views: writing to them writes to the shared memory."""

    def __init__(self, table: Table, arena_bytes: int) -> None:
        assert table.dtype == ENTRY
        self._arena_bytes = arena_bytes
        self.generation: Ints = table["generation"]
        self.used_at: Ints = table["used_at"]
        self.offset: Ints = table["offset"]
        self.extent: Ints = table["extent"]
        self.size: Ints = table["size"]
        self.tokens: Ints = table["tokens"]
        self.blocks: Ints = table["blocks"]
        self.writer: Ints = table["writer"]
        self.namespace: Words = table["namespace"]
        self.key: Words = table["key"]
        self.checksum: Words = table["checksum"]
        self.state: Ints = table["state"]

    @property
    def used_bytes(self) -> int:
        return int(self.extent[self.state != State.FREE].sum())

    def layout(self, entry: int) -> Layout:
        return Layout(int(self.blocks[entry]), int(self.tokens[entry]), int(self.size[entry]))

    def vacant(self) -> int | None:
        """Return a free entry, or None when the table is full."""
        free = np.flatnonzero(self.state == State.FREE)
        return int(free[0]) if free.size else None

    def oldest(self) -> tuple[int, ...]:
        """Return the least recently used snapshot, if there is any."""
        ready = np.flatnonzero(self.state == State.READY)
        return (int(ready[np.argmin(self.used_at[ready])]),) if ready.size else ()

    def place(self, need: int) -> Place | None:
        """Find room for `need` bytes such that the youngest victim is as old as can be.

        Snapshots lie where they lie, so removing the oldest need not leave one large hole. Of
        all sets whose removal does, this takes one whose youngest member is oldest, and of that
        set only those in the way. Where nothing must go, it is the first hole that fits.
        """
        live = np.flatnonzero(self.state != State.FREE)
        order = live[np.argsort(self.offset[live])]
        start, end = self.offset[order], self.offset[order] + self.extent[order]
        evictable = np.flatnonzero(self.state[order] == State.READY)
        rank = np.full(order.size, order.size)  # how many go before this one does
        rank[evictable[np.argsort(self.used_at[order][evictable])]] = np.arange(evictable.size)

        fewest, most = 0, evictable.size
        while fewest < most:
            middle = (fewest + most) // 2
            keep = rank >= middle
            if self._first_hole(start[keep], end[keep], need) is None:
                fewest = middle + 1
            else:
                most = middle
        keep = rank >= fewest
        hole = self._first_hole(start[keep], end[keep], need)
        if hole is None:
            return None
        in_the_way = (start < hole + need) & (end > hole)
        return Place(hole, tuple(int(entry) for entry in order[in_the_way]))

    def is_sound(self) -> bool:
        """Say whether every entry lies inside the arena, apart from the others.

        Our own code leaves no other table behind, killed or not: this finds stray writes.
        """
        if np.any((self.state < State.FREE) | (self.state > State.READY)):
            return False
        live = np.flatnonzero(self.state)
        order = live[np.argsort(self.offset[live])]
        start, extent = self.offset[order], self.extent[order]
        sizes = np.stack((start, extent, self.size[order], self.tokens[order], self.blocks[order]))
        if np.any((sizes < 0) | (sizes > self._arena_bytes)) or np.any(start % PAGE_BYTES):
            return False
        data_at = 8 * self.blocks[order] + 4 * self.tokens[order]
        end = start + extent
        return bool(
            np.all(self.blocks[order] > 0)
            and np.all(data_at + self.size[order] <= extent)
            and np.all(end[:-1] <= start[1:])
            and np.all(end[-1:] <= self._arena_bytes)
        )

    def _first_hole(self, start: Ints, end: Ints, need: int) -> int | None:
        """Return where the first gap of `need` bytes begins; the extents ascend."""
        begins = np.concatenate(([0], end))
        gaps = np.concatenate((start, [self._arena_bytes])) - begins
        fits = np.flatnonzero(gaps >= need)
        return int(begins[fits[0]]) if fits.size else None


def longest_match(words: Words, first: Ints, blocks: Ints, hashes: Words) -> tuple[int, Ints]:
    """Return how many leading hashes the best entry shares, and the rows that share so many.

    Row i's hashes are `words[first[i] : first[i] + blocks[i]]`. A hash covers everything before
    it, so "some row shares k" holds up to the answer and never beyond: one binary search for
    all rows at once.
    """
    rows = np.arange(first.size)
    low, high = 0, hashes.size
    while low < high:
        middle = (low + high + 1) // 2
        long_enough = rows[blocks[rows] >= middle]
        same = long_enough[words[first[long_enough] + middle - 1] == hashes[middle - 1]]
        if same.size:
            low, rows = middle, same
        else:
            high = middle - 1
    return low, rows


def whole_match(words: Words, first: Ints, blocks: Ints, hashes: Words) -> tuple[int, Ints]:
    """Return how many leading hashes the longest wholly shared row has, and the rows like it."""
    fits = np.flatnonzero(blocks <= hashes.size)
    last = blocks[fits] - 1
    shared = fits[words[first[fits] + last] == hashes[last]]
    longest = int(blocks[shared].max(initial=0))
    return longest, shared[blocks[shared] == longest]


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
