"""Locks on bytes of a shared file that end with their holder, whatever ends it.

The kernel's open-file-description locks. They belong to the opened file, so every holder opens
it anew: through an inherited descriptor all processes would hold one and the same lock. What a
byte stands for is the caller's to say; a byte needs not exist in the file.
"""

import fcntl
import os
import struct
import time

RETRY_S = 0.0001
"""Between two attempts, in seconds. Nobody sleeps in the kernel for a holder that is stopped."""


def reopen(fd: int) -> int:
    """Open the file behind `fd` once more, for locks of one's own. The caller closes it."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR)


def try_lock(fd: int, byte: int, *, shared: bool = False) -> bool:
    """Take the byte, exclusively or together with others who share it; False when it is taken."""
    kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _range(kind, byte))
    except BlockingIOError:
        return False
    return True


def lock_within(fd: int, byte: int, wait_s: float) -> bool:
    """Take the byte exclusively, trying for `wait_s` at most."""
    until = time.monotonic() + wait_s
    while not try_lock(fd, byte):
        if time.monotonic() >= until:
            return False
        time.sleep(RETRY_S)
    return True


def unlock(fd: int, byte: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _range(fcntl.F_UNLCK, byte))


def is_held(fd: int, byte: int) -> bool:
    """Say whether somebody else, who opened the file on their own, holds the byte."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _range(fcntl.F_WRLCK, byte))
    kind: int = struct.unpack_from("h", answer)[0]
    return kind != fcntl.F_UNLCK


def _range(kind: int, byte: int) -> bytes:
    """Return the `struct flock` of one byte: type, whence, start, length, pid."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0)
