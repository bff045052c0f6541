"""A private directory for this process's Unix sockets, gone when the process is.

After kill -9 nobody can remove it, so whoever starts next does: the name carries the owner's pid
and start time, and a directory without a living owner is nobody's.
"""

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "numaserve-"


@contextmanager
def runtime_dir(base: Path, proc: Path = Path("/proc")) -> Generator[Path]:
    """Make the directory (mode 0700) below `base`, and remove it and those of the dead at last."""
    remove_orphans(base, proc)
    pid = os.getpid()
    name = f"{PREFIX}{pid}-{_started(pid, proc)}-"
    directory = Path(tempfile.mkdtemp(prefix=name, dir=base))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def remove_orphans(base: Path, proc: Path = Path("/proc")) -> list[Path]:
    """Remove this user's directories whose owner no longer lives; return them."""
    removed = []
    for directory in base.glob(f"{PREFIX}*-*-*"):
        pid, _, started = directory.name.removeprefix(PREFIX).rpartition("-")[0].partition("-")
        if not (pid.isdecimal() and started.isdecimal() and _is_ours(directory)):
            continue
        if _started(int(pid), proc) != int(started):
            shutil.rmtree(directory, ignore_errors=True)
            removed.append(directory)
    return removed


def _is_ours(directory: Path) -> bool:
    try:
        return directory.lstat().st_uid == os.getuid()
    except OSError:  # somebody else was quicker
        return False


def _started(pid: int, proc: Path) -> int | None:
    """Return the process's start in clock ticks since boot; None when there is no such process."""
    try:
        stat = (proc / str(pid) / "stat").read_text()
    except OSError:
        return None
    after_name = stat.rpartition(")")[2].split()
    return int(after_name[19])  # field 22 of proc(5), counted from the state behind the name
