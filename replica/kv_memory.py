"""The shared file that a KV store lives in: made, joined, checked, mapped, and given up.

Either it has no name, and the kernel frees it with its last holder; or it has one on a tmpfs, and
whoever closes it last in good order removes it. After a kill of all at once the named file stays
until the next start, which takes it over, or until its tmpfs goes. It knows what the file begins
with and which bytes are locked for what, and nothing of what is stored.
"""

import fcntl
import mmap
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import numpy as np

from replica.blocks import BLOCK_TOKENS
from replica.kv_arena import ENTRIES_MAX, ENTRY, PAGE_BYTES, Bytes, Entries, Table, Words
from replica.kv_lock import lock_within, reopen, try_lock, unlock

MAGIC = int.from_bytes(b"numakv\r\n", "little")
VERSION = 1
"""Raised with every change of the header, the table or a snapshot's layout."""

HEADER = np.dtype(
    [
        ("magic", "u8"),
        ("version", "i8"),
        ("block_tokens", "i8"),
        ("budget", "i8"),
        ("clock", "i8"),
        ("backed", "i8"),
        ("evictions", "i8"),
        ("orphans", "i8"),
        ("corrupt", "i8"),
        ("resets", "i8"),
    ]
)
ENTRIES_AT = PAGE_BYTES
ARENA_AT = -(-(ENTRIES_AT + ENTRY.itemsize * ENTRIES_MAX) // PAGE_BYTES) * PAGE_BYTES
"""Bytes in front of the arena, which the budget pays for as well."""

TABLE_BYTE = 0
"""Locked by whoever reads or changes the table."""
IN_USE_BYTE = 1
"""Shared by all who have a named file open, so that the last one knows that it is the last."""
FIRST_WRITER_BYTE = 2
WRITERS_MAX = 2**56
"""Every instance draws a number below this, and holds that byte's lock as long as it lives."""

JOIN_WAIT_S = 2.0
"""How long to try for the table when a named file is opened or given up, in seconds."""
JOIN_TRIES_MAX = 100
"""How often a named file may vanish between being opened and being joined."""


class KvStoreError(Exception):
    """This memory cannot be used as a KV store; the message says why."""


class KvMemory:
    """One process's mapping of the file, and its own descriptor for locks on it."""

    def __init__(self, fd: int, lock_fd: int, path: Path | None = None) -> None:
        """Take over both descriptors of a file that has been checked."""
        self.fd = fd
        self.lock_fd = lock_fd
        self._path = path
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self.size = len(self._map)
        self.view = memoryview(self._map)
        self.bytes: Bytes = np.frombuffer(self._map, np.uint8)
        self.words: Words = np.frombuffer(self._map, np.uint64)
        self.header: Table = np.frombuffer(self._map, HEADER, count=1)
        table = np.frombuffer(self._map, ENTRY, count=ENTRIES_MAX, offset=ENTRIES_AT)
        self.entries = Entries(table, self.size - ARENA_AT)
        self.writer = int.from_bytes(os.urandom(8), "little") % WRITERS_MAX
        alone = try_lock(lock_fd, FIRST_WRITER_BYTE + self.writer)
        assert alone, "two instances drew the same number of 56 bits"

    @classmethod
    def create(cls, budget_bytes: int) -> Self:
        """Make a file without a name. Nobody can cut it short under a reader."""
        fd = os.memfd_create("numaserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with ExitStack() as undo:
            undo.callback(os.close, fd)
            _format(fd, budget_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            memory = cls(fd, reopen(fd))
            undo.pop_all()
        return memory

    @classmethod
    def attach(cls, fd: int) -> Self:
        """Join the file behind an inherited descriptor, which is taken over if that succeeds."""
        try:
            lock_fd = reopen(fd)
        except OSError as error:
            raise KvStoreError(f"file descriptor {fd} is no KV store: {error.strerror}") from error
        with ExitStack() as undo:
            undo.callback(os.close, lock_fd)
            _check(lock_fd, f"file descriptor {fd}")
            memory = cls(fd, lock_fd)
            undo.pop_all()
        return memory

    @classmethod
    def at(cls, path: Path, budget_bytes: int) -> Self:
        """Join the named file, making it first where there is none."""
        for _ in range(JOIN_TRIES_MAX):
            with ExitStack() as undo:
                fd = _open(path)
                undo.callback(os.close, fd)
                lock_fd = reopen(fd)
                undo.callback(os.close, lock_fd)
                if not lock_within(lock_fd, TABLE_BYTE, JOIN_WAIT_S):
                    raise KvStoreError(f"{path} is locked by a process that does not go on")
                if not _is_behind(path, fd):
                    continue  # its last user has just removed it
                if _is_blank(fd, budget_bytes):
                    _require_space(path, budget_bytes)
                    _format(fd, budget_bytes)
                _check(fd, str(path), budget_bytes)
                joined = try_lock(lock_fd, IN_USE_BYTE, shared=True)
                assert joined, "taken for itself only by who holds the table"
                memory = cls(fd, lock_fd, path)
                unlock(lock_fd, TABLE_BYTE)
                undo.pop_all()
                return memory
        raise KvStoreError(f"{path} was removed {JOIN_TRIES_MAX} times while it was being opened")

    def close(self) -> None:
        """Let go of everything; the last to close a named file removes it."""
        if self._path is not None and lock_within(self.lock_fd, TABLE_BYTE, JOIN_WAIT_S):
            last = try_lock(self.lock_fd, IN_USE_BYTE)
            if last and _is_behind(self._path, self.fd):
                self._path.unlink()
        del self.entries, self.header, self.words, self.bytes, self.view
        with suppress(BufferError):  # a view that somebody kept unmaps it when it goes
            self._map.close()
        os.close(self.lock_fd)
        os.close(self.fd)


def _format(fd: int, budget_bytes: int) -> None:
    """Make an empty store of the file. What makes it one is written last."""
    if budget_bytes < ARENA_AT + PAGE_BYTES:
        raise KvStoreError(
            f"a KV store of {budget_bytes:,} bytes has no room for a snapshot: "
            f"its table alone takes {ARENA_AT:,}"
        )
    size = _file_size(budget_bytes)
    header = np.zeros(1, HEADER)
    header["version"], header["block_tokens"], header["budget"] = VERSION, BLOCK_TOKENS, size
    os.ftruncate(fd, size)
    try:
        os.posix_fallocate(fd, 0, ARENA_AT)
    except OSError as error:
        raise KvStoreError(f"no memory for a KV store's table: {error.strerror}") from error
    os.pwrite(fd, header.tobytes(), 0)
    os.pwrite(fd, MAGIC.to_bytes(8, "little"), 0)


def _check(fd: int, name: str, budget_bytes: int | None = None) -> None:
    """Refuse a file that is no store of ours, or not the one that is wanted."""
    size = os.fstat(fd).st_size
    start = os.pread(fd, HEADER.itemsize, 0) if size >= ARENA_AT else b""
    header = np.frombuffer(start, HEADER)
    if not header.size or header["magic"][0] != MAGIC:
        raise KvStoreError(f"{name} is no KV store")
    made = (int(header["version"][0]), int(header["block_tokens"][0]))
    if made != (VERSION, BLOCK_TOKENS):
        raise KvStoreError(
            f"{name} is a KV store of version {made[0]} with blocks of {made[1]} tokens; "
            f"this program's is version {VERSION} with blocks of {BLOCK_TOKENS}"
        )
    if size != header["budget"][0]:
        raise KvStoreError(f"{name} is a KV store whose size was changed: do not use it")
    if budget_bytes is not None and size != _file_size(budget_bytes):
        raise KvStoreError(
            f"{name} is a KV store of {size:,} bytes, and {budget_bytes:,} were asked for: "
            "give all its users the same budget, or remove the file while none of them runs"
        )


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise KvStoreError(f"cannot open the KV store {path}: {error.strerror}") from error
    owner = os.fstat(fd).st_uid
    if owner != os.geteuid():  # whoever made the file could read every prompt in it
        os.close(fd)
        raise KvStoreError(f"the KV store {path} belongs to another user, number {owner}")
    return fd


def _require_space(path: Path, budget_bytes: int) -> None:
    """Refuse a budget that the file could not grow to: it would turn every snapshot away."""
    space = os.statvfs(path)
    free = space.f_bavail * space.f_frsize
    if free < budget_bytes and space.f_blocks > 0:  # a tmpfs without a limit counts no blocks
        path.unlink()
        raise KvStoreError(
            f"{path} cannot hold a KV store of {budget_bytes:,} bytes: {free:,} are free there. "
            "Lower the budget or give the tmpfs more (--shm-size, sizeLimit)"
        )


def _is_behind(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _is_blank(fd: int, budget_bytes: int) -> bool:
    """Say whether the file is new, or its maker died before it was one of ours."""
    size = os.fstat(fd).st_size
    if size == 0:
        return True
    return size == _file_size(budget_bytes) and not any(os.pread(fd, HEADER.itemsize, 0)[:8])


def _file_size(budget_bytes: int) -> int:
    return budget_bytes - budget_bytes % PAGE_BYTES
