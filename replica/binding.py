"""What a process does about its own place, and how it learns where its memory really lies.

The plan is `replica.placement`'s and numactl has applied it before this process began; here is what
is left: moving single threads, asking whether memory may be bound at all, and measuring.
"""

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from replica.topology import format_cpu_list

LARGE_MAPPING_BYTES = 4 << 20
"""Mappings with less in memory are left out: libraries, stacks and small heaps say nothing."""

PROBE_TIMEOUT_S = 10.0

_NODE_PAGES = re.compile(r"N(\d+)=(\d+)")
_ESCAPED = re.compile(r"\\([0-7]{3})")  # how the kernel writes a blank in a file's name


class BindingError(Exception):
    """The place cannot be taken; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Locality:
    """Where the large memory of a process lies."""

    bytes_per_node: Mapping[int, int]
    local_bytes: int
    total_bytes: int
    reason: str | None = None
    """Why there is no ratio; None when there is one."""

    @property
    def ratio(self) -> float | None:
        """The local share, or None where nothing was found or the kernel would not tell."""
        return self.local_bytes / self.total_bytes if self.total_bytes else None


def move_thread(cpus: Collection[int]) -> None:
    """Let the calling thread run on these CPUs only; an empty collection changes nothing.

    Threads that it starts afterwards inherit this, threads that exist do not. numactl is no wall:
    a thread may move to CPUs outside its `--physcpubind`, though not outside its cpuset.
    """
    if not cpus:
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        message = (
            f"cannot run on CPUs {format_cpu_list(cpus)} ({error.strerror}): they are offline or "
            "outside this process's cpuset; read the topology again"
        )
        raise BindingError(message) from error


def memory_locality(
    nodes: Collection[int],
    numa_maps: Path = Path("/proc/self/numa_maps"),
    min_bytes: int = LARGE_MAPPING_BYTES,
    weights: Path | None = None,
) -> Locality:
    """Sum up the large anonymous mappings, and that of `weights` where the model is mapped.

    Other files do not count: libraries and shared memory lie where someone else put them. The
    kernel walks page tables for this, seconds for 100s of GB: call it rarely, never per scrape.
    """
    try:
        text = numa_maps.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        return Locality({}, 0, 0, f"cannot read {numa_maps}: {error.strerror}")
    found: Counter[int] = Counter()
    for line in text.splitlines():
        words = line.split(" ")
        if _counts(words, weights):
            resident = _resident(words)
            if resident.total() >= min_bytes:
                found += resident
    if not found:
        return Locality({}, 0, 0, f"no mapping holds {min_bytes} bytes or more")
    local = sum(size for node, size in found.items() if node in nodes)
    return Locality(dict(found), local, found.total())


def probe_membind(nodes: Sequence[int], numactl: str = "numactl") -> str | None:
    """Try to bind memory to these nodes; why it is refused, or None when it works.

    Containers without SYS_NICE refuse it. Raises BindingError where there is no numactl.
    """
    path = shutil.which(numactl)
    if path is None:
        message = "numactl is not installed: install the package numactl"
        raise BindingError(message)
    command = [path, f"--membind={','.join(map(str, nodes))}", "--", "true"]
    try:
        done = subprocess.run(  # noqa: S603 - numbers and our own words alone
            command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(command)}: {error}"
    if done.returncode == 0:
        return None
    said = done.stderr.strip().partition("\n")[0] or f"exit code {done.returncode}"
    return f"binding memory to nodes {command[1].partition('=')[2]} is refused: {said}"


def _counts(words: list[str], weights: Path | None) -> bool:
    names = [word.removeprefix("file=") for word in words if word.startswith("file=")]
    if not names:
        return True
    name = _ESCAPED.sub(lambda m: chr(int(m[1], 8)), names[0]).removesuffix(" (deleted)")
    # The kernel backs anonymous hugetlb mappings by a file of its own.
    return name == "/anon_hugepage" or (weights is not None and name == str(weights))


def _resident(words: list[str]) -> Counter[int]:
    """Bytes per node.

    Transparent huge pages are counted in base pages and only hugetlb in its own, which is what
    `kernelpagesize_kB` says.
    """
    sizes = [word.partition("=")[2] for word in words if word.startswith("kernelpagesize_kB=")]
    if not sizes:
        return Counter()
    pages = (_NODE_PAGES.fullmatch(word) for word in words)
    return Counter({int(m[1]): int(m[2]) * int(sizes[0]) * 1024 for m in pages if m})
