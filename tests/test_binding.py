"""Taking one's place, and measuring where memory really lies."""

import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from replica.binding import BindingError, Locality, memory_locality, move_thread, probe_membind
from replica.placement import PlacementDomain, numactl_argv

T = TypeVar("T")
MIB = 2**20

NUMA_MAPS = r"""
5560fcd07000 default file=/usr/bin/python3.11 mapped=9000 N1=9000 kernelpagesize_kB=4
5560fd000000 bind:0 heap anon=2048 dirty=2048 N0=2048 kernelpagesize_kB=4
7f1000000000 bind:0 anon=32769 dirty=32769 active=0 N0=30000 N1=2769 kernelpagesize_kB=4
7f2000000000 bind:0 file=/anon_hugepage\040(deleted) huge anon=16 dirty=16 N1=16 \
kernelpagesize_kB=2048
7f3000000000 default anon=1023 dirty=1023 N1=1023 kernelpagesize_kB=4
7f4000000000 default file=/dev/shm/kv\040store dirty=5000 N1=5000 kernelpagesize_kB=4
7f5000000000 default file=/models/a\040b\075c.gguf mapped=4096 N0=1024 N1=3072 kernelpagesize_kB=4
7f6000000000 default
7ffd00000000 default stack anon=10 dirty=10 N1=10 kernelpagesize_kB=4
""".replace("\\\n", "").lstrip()


@pytest.fixture
def numa_maps(tmp_path: Path) -> Path:
    path = tmp_path / "numa_maps"
    path.write_text(NUMA_MAPS)
    return path


def in_a_thread(work: Callable[[], T]) -> T:
    """Affinity belongs to threads: leave the tests' own alone."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(work).result()


def test_large_anonymous_memory_counts_in_the_size_of_its_pages(numa_maps: Path) -> None:
    """Base pages also where the kernel made them huge by itself; hugetlb in its own pages."""
    expected = {0: (2048 + 30000) * 4096, 1: 2769 * 4096 + 16 * 2 * MIB}
    locality = memory_locality([0], numa_maps)
    assert expected == locality.bytes_per_node
    assert expected[0] == locality.local_bytes
    assert expected[0] + expected[1] == locality.total_bytes
    assert expected[0] / (expected[0] + expected[1]) == locality.ratio
    assert locality.reason is None


def test_memory_on_any_of_a_domains_nodes_is_local(numa_maps: Path) -> None:
    assert 1.0 == memory_locality([0, 1], numa_maps).ratio
    assert 0.0 == memory_locality([2], numa_maps).ratio


def test_the_size_from_which_a_mapping_counts_is_inclusive(numa_maps: Path) -> None:
    at = memory_locality([1], numa_maps, min_bytes=1023 * 4096)
    above = memory_locality([1], numa_maps, min_bytes=1023 * 4096 + 1)
    assert 1023 * 4096 == at.total_bytes - above.total_bytes


def test_a_mapped_model_counts_when_it_is_named(numa_maps: Path) -> None:
    """Its name reaches us with blanks and equal signs escaped."""
    without = memory_locality([0], numa_maps)
    named = memory_locality([0], numa_maps, weights=Path("/models/a b=c.gguf"))
    assert 4 * MIB == named.local_bytes - without.local_bytes
    assert 16 * MIB == named.total_bytes - without.total_bytes


def test_without_large_memory_there_is_no_ratio(tmp_path: Path) -> None:
    (tmp_path / "numa_maps").write_text("7ffd00000000 default stack anon=1 N0=1\n")
    expected = Locality({}, 0, 0, "no mapping holds 4194304 bytes or more")
    assert expected == memory_locality([0], tmp_path / "numa_maps")
    assert expected.ratio is None


def test_a_kernel_that_does_not_tell_is_no_measurement(tmp_path: Path) -> None:
    locality = memory_locality([0], tmp_path / "missing")
    assert locality.ratio is None
    assert f"cannot read {tmp_path / 'missing'}: No such file or directory" == locality.reason


def test_a_file_name_that_is_no_text_does_no_harm(tmp_path: Path) -> None:
    line = b"7f default file=/models/\xff N0=2000 kernelpagesize_kB=4\n7f heap N0=1024 "
    (tmp_path / "numa_maps").write_bytes(line + b"kernelpagesize_kB=4\n")
    assert 4 * MIB == memory_locality([0], tmp_path / "numa_maps").total_bytes


def test_this_process_finds_its_own_memory() -> None:
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel knows no NUMA")
    everywhere = range(1024)
    before = memory_locality(everywhere, min_bytes=1).total_bytes
    with mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(b"x" * (32 * MIB))
        after = memory_locality(everywhere)
        grown = memory_locality(everywhere, min_bytes=1).total_bytes - before
    assert 1.0 == after.ratio
    assert grown == pytest.approx(32 * MIB, rel=0.2)


def test_a_thread_moves_alone() -> None:
    before = os.sched_getaffinity(0)
    last = max(before)

    def move() -> set[int]:
        move_thread([last])
        return os.sched_getaffinity(0)

    assert {last} == in_a_thread(move)
    assert before == os.sched_getaffinity(0)


def test_without_housekeeping_cpus_a_thread_stays_where_it_is() -> None:
    def stay() -> set[int]:
        move_thread(())
        return os.sched_getaffinity(0)

    assert os.sched_getaffinity(0) == in_a_thread(stay)


def test_a_cpu_that_is_not_there_is_named() -> None:
    with pytest.raises(BindingError, match=r"cannot run on CPUs 1000-1001 \(Invalid argument\)"):
        in_a_thread(lambda: move_thread([1000, 1001]))


def test_numactl_starts_a_replica_also_from_a_thread_that_keeps_house_elsewhere() -> None:
    """Without `--all` it refuses CPUs outside the affinity it was started with."""
    cpus = sorted(os.sched_getaffinity(0))
    if shutil.which("numactl") is None or len(cpus) == 1:
        pytest.skip("needs numactl and two CPUs")
    domain = PlacementDomain(0, (0,), (cpus[-1],), (), ())
    command = [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"]

    def start() -> str:
        move_thread([cpus[0]])
        argv = [*numactl_argv(domain, bind_memory=False), *command]
        return subprocess.check_output(argv, text=True)

    assert f"{cpus[-1]}\n" == in_a_thread(start)


@pytest.fixture
def numactl(tmp_path: Path) -> Callable[[str], str]:
    """Make a numactl that does what a line of shell says."""

    def make(script: str) -> str:
        path = tmp_path / "numactl"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return make


def test_memory_that_may_be_bound_needs_no_words(numactl: Callable[[str], str]) -> None:
    asked = numactl('test "$1 $2 $3" = "--membind=0,2 -- true"')
    assert probe_membind([0, 2], asked) is None


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "echo 'set_mempolicy: Operation not permitted' >&2; echo usage >&2; exit 1",
            "binding memory to nodes 0,2 is refused: set_mempolicy: Operation not permitted",
        ),
        ("exit 3", "binding memory to nodes 0,2 is refused: exit code 3"),
    ],
)
def test_a_container_that_may_not_bind_memory_is_told_why(
    numactl: Callable[[str], str], script: str, said: str
) -> None:
    assert said == probe_membind([0, 2], numactl(script))


def test_a_numactl_that_hangs_is_given_up(
    numactl: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replica.binding.PROBE_TIMEOUT_S", 0.1)
    said = probe_membind([0], numactl("exec sleep 60"))
    assert said is not None
    assert "timed out" in said


def test_a_machine_without_numactl_is_told_what_to_install() -> None:
    with pytest.raises(BindingError, match="install the package numactl"):
        probe_membind([0], "numactl-that-is-not-there")


def test_the_real_numactl_refuses_a_node_that_is_not_there() -> None:
    if shutil.which("numactl") is None:
        pytest.skip("needs numactl")
    said = probe_membind([999])
    assert said is not None
    assert said.startswith("binding memory to nodes 999 is refused: ")
