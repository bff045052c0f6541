"""Reading a machine from sysfs: the checked-in machines, and trees with something missing."""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.topology import (
    Topology,
    TopologyError,
    format_cpu_list,
    parse_cpu_list,
    read_topology,
    verify_with_libnuma,
)
from tests.fixtures.make_sysfs import MACHINES, SYSFS, Machine, files, threads, write

GIB = 2**30


def read(root: Path) -> Topology:
    return read_topology(root / "sys", root / "proc")


def machine(name: str) -> Topology:
    return read(SYSFS / name)


@pytest.fixture
def box(tmp_path: Path) -> Path:
    """A small relative of the R730, to damage: nodes 0,2,4,6 and 1,3,5,7; siblings from 4."""
    cores = [(0, 0, 0), (1, 1, 0), (0, 0, 1), (1, 1, 1)]
    write(Machine(threads(cores, 4), {0: 64, 1: 64}, [[10, 21], [21, 10]]), tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", MACHINES)
def test_the_checked_in_trees_are_what_the_generator_writes(name: str) -> None:
    root = SYSFS / name
    expected = {path: text + "\n" for path, text in files(MACHINES[name])}
    found = {p.relative_to(root).as_posix(): p.read_text() for p in root.rglob("*") if p.is_file()}
    assert expected == found


def test_every_machine_that_is_checked_in_has_a_description() -> None:
    assert set(MACHINES) == {path.name for path in SYSFS.iterdir()}


@given(st.frozensets(st.integers(min_value=0, max_value=300)))
def test_a_cpu_list_survives_being_written_and_read(cpus: frozenset[int]) -> None:
    assert cpus == parse_cpu_list(format_cpu_list(cpus))


def test_a_cpu_list_is_written_as_the_kernel_writes_it() -> None:
    assert "0,2,4-6" == format_cpu_list([6, 5, 4, 2, 0, 0])
    assert "" == format_cpu_list([])


def test_the_r730_has_even_ids_on_one_socket_and_odd_ones_on_the_other() -> None:
    """The machine of the study: no socket's ids are a range."""
    topology = machine("r730")
    even, odd = topology.nodes
    assert tuple(range(0, 56, 2)) == even.cpus
    assert tuple(range(1, 56, 2)) == odd.cpus
    assert (14, 14) == (len(even.cores), len(odd.cores))
    assert (0, 28) == even.cores[0].cpus
    assert (0, 0, 8) == even.cores[7].key, "this die has no core 7"
    assert topology.smt
    assert {0: (0,), 1: (1,)} == topology.packages
    assert {0: 10, 1: 21} == even.distances
    assert 64 * GIB == even.memory_total_bytes
    assert 56 * GIB == even.memory_free_bytes, "free and droppable file pages"


def test_core_ids_that_repeat_on_the_other_socket_are_other_cores() -> None:
    cores = [core for node in machine("r730").nodes for core in node.cores]
    assert 28 == len({core.key for core in cores})


def test_an_epyc_in_nps4_has_four_nodes_per_package() -> None:
    topology = machine("epyc-nps4")
    assert {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)} == topology.packages
    assert [8] * 8 == [len(node.cores) for node in topology.nodes]
    assert [10, 12, 12, 12, 32, 32, 32, 32] == [
        topology.nodes[0].distances[number] for number in range(8)
    ]


def test_snc_shares_the_ids_of_a_socket_out_unevenly() -> None:
    topology = machine("xeon-snc2")
    assert (0, 1, 2, 5, 6, 20, 21, 22, 25, 26) == topology.nodes[0].cpus
    assert {0: (0, 1), 1: (2, 3)} == topology.packages


def test_a_cxl_expander_is_a_node_with_memory_and_without_cores() -> None:
    expander = machine("cxl-memory-node").nodes[2]
    assert ((), ()) == (expander.cores, expander.packages)
    assert 128 * GIB == expander.memory_total_bytes


def test_offline_cpus_are_in_no_core() -> None:
    topology = machine("offline-cpus")
    assert frozenset({3, 11, 13}) == topology.offline
    assert [(0, 8), (1, 9), (2, 10)] == [core.cpus for core in topology.nodes[0].cores]
    assert (5,) == topology.nodes[1].cores[1].cpus


def test_a_laptop_is_one_node_whose_cores_differ_in_threads() -> None:
    (node,) = machine("laptop").nodes
    assert [(0, 1), (2, 3), (4, 5), (6, 7), (8,), (9,), (10,), (11,)] == [
        core.cpus for core in node.cores
    ]


def test_an_arm_server_has_no_siblings_and_odd_package_numbers() -> None:
    topology = machine("arm-no-smt")
    assert not topology.smt
    assert "notsupported" == topology.smt_control
    assert {36: (0,), 3180: (1,)} == topology.packages


def test_a_cpuset_leaves_half_of_one_node() -> None:
    topology = machine("cpuset-half-node")
    assert frozenset({8, 9, 10, 11, 24, 25, 26, 27}) == topology.allowed_cpus
    assert frozenset({1}) == topology.allowed_mems
    assert () == topology.usable_cores(topology.nodes[0])
    assert [(8, 24), (9, 25), (10, 26), (11, 27)] == [
        core.cpus for core in topology.usable_cores(topology.nodes[1])
    ]
    assert 24 * GIB == topology.memory_limit_bytes
    assert topology.cpu_quota is None, "cpu.max says max"


def test_usable_is_what_affinity_and_cpuset_and_the_kernel_all_allow(tmp_path: Path) -> None:
    root = Path(shutil.copytree(SYSFS / "cpuset-half-node", tmp_path / "machine"))
    (root / "proc/self/status").write_text("Cpus_allowed_list:\t9-16\nMems_allowed_list:\t0-1\n")
    (root / "sys/devices/system/cpu/online").write_text("0-9,11-31\n")
    topology = read(root)
    assert frozenset({9, 11}) == topology.allowed_cpus
    assert frozenset({1}) == topology.allowed_mems


def test_the_caller_may_know_the_affinity_better() -> None:
    """A gateway that has moved its first thread still plans with what it was started with."""
    root = SYSFS / "r730"
    topology = read_topology(root / "sys", root / "proc", allowed=frozenset({1, 3, 99}))
    assert frozenset({1, 3}) == topology.allowed_cpus


def test_the_tightest_limit_of_the_cgroups_around_us_counts(box: Path) -> None:
    (box / "proc/self/cgroup").write_text("4:memory:/else\n0::/outer/inner\n")
    mount = box / "sys/fs/cgroup"
    (mount / "outer/inner").mkdir(parents=True)
    (mount / "outer/cpu.max").write_text("250000 100000\n")
    (mount / "outer/inner/cpu.max").write_text("800000 100000\n")
    (mount / "outer/memory.max").write_text("max\n")
    (mount / "outer/inner/memory.max").write_text("4096\n")
    (mount / "outer/cpuset.cpus.effective").write_text("0-3\n")
    (mount / "cpuset.cpus.effective").write_text("0-7\n")
    topology = read(box)
    assert 2.5 == topology.cpu_quota
    assert 4096 == topology.memory_limit_bytes
    assert frozenset(range(4)) == topology.allowed_cpus


@pytest.mark.parametrize("path", ["/docker/0123", "/../sibling", "/"])
def test_a_container_that_sees_its_cgroup_as_the_root_finds_its_limits(
    box: Path, path: str
) -> None:
    (box / "proc/self/cgroup").write_text(f"0::{path}\n")
    (box / "sys/fs/cgroup").mkdir(parents=True)
    (box / "sys/fs/cgroup/cpu.max").write_text("400000 100000\n")
    assert 4.0 == read(box).cpu_quota


def test_a_cgroup_that_names_no_cpus_leaves_those_of_the_one_around_it(box: Path) -> None:
    (box / "proc/self/cgroup").write_text("0::/inner\n")
    (box / "sys/fs/cgroup/inner").mkdir(parents=True)
    (box / "sys/fs/cgroup/inner/cpuset.cpus.effective").write_text("\n")
    (box / "sys/fs/cgroup/cpuset.cpus.effective").write_text("5-6\n")
    assert frozenset({5, 6}) == read(box).allowed_cpus


def test_the_second_hierarchy_of_a_hybrid_system_is_found(box: Path) -> None:
    (box / "sys/fs/cgroup/unified").mkdir(parents=True)
    (box / "sys/fs/cgroup/unified/memory.max").write_text("8192\n")
    assert 8192 == read(box).memory_limit_bytes


def test_a_kernel_without_numa_is_one_node_with_all_cpus(box: Path) -> None:
    shutil.rmtree(box / "sys/devices/system/node")
    topology = read(box)
    (node,) = topology.nodes
    assert (0, tuple(range(8)), 4) == (node.id, node.cpus, len(node.cores))
    assert 128 * GIB == node.memory_total_bytes
    assert ("this kernel knows no NUMA: everything is taken for node 0",) == topology.notes


def test_the_only_node_with_memory_has_what_proc_meminfo_says(tmp_path: Path) -> None:
    """Memory plugged into a virtual machine after boot shows up there alone."""
    root = Path(shutil.copytree(SYSFS / "laptop", tmp_path / "machine"))
    (root / "proc/meminfo").write_text("MemTotal: 64 kB\nMemFree: 3 kB\nMemAvailable: 40 kB\n")
    (node,) = read(root).nodes
    assert (65536, 40960) == (node.memory_total_bytes, node.memory_free_bytes)
    (root / "proc/meminfo").unlink()
    assert 16 * GIB == read(root).nodes[0].memory_total_bytes


def test_of_two_nodes_one_without_memory_the_other_has_it_all(tmp_path: Path) -> None:
    write(replace(MACHINES["r730"], memory_gib={0: 0, 1: 64}), tmp_path)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 64 kB\nMemAvailable: 64 kB\n")
    assert [0, 65536] == [node.memory_total_bytes for node in read(tmp_path).nodes]


def test_distances_belong_to_node_ids_also_when_those_have_gaps(tmp_path: Path) -> None:
    cpus = threads([(0, 0, 0), (8, 1, 0)], None)
    write(Machine(cpus, {0: 1, 8: 1}, [[10, 40], [40, 10]]), tmp_path)
    assert {0: 40, 8: 10} == read(tmp_path).nodes[1].distances


def test_core_ids_that_repeat_within_a_package_do_not_join_cores(box: Path) -> None:
    """Clusters of some ARM machines each count their cores from 0; sibling lists are right."""
    for cpu in range(8):
        topology = box / f"sys/devices/system/cpu/cpu{cpu}/topology"
        (topology / "core_id").write_text("0\n")
        (topology / "thread_siblings_list").write_text(f"{cpu}\n")
    assert [4, 4] == [len(node.cores) for node in read(box).nodes]


def test_without_sibling_lists_the_core_ids_tell(box: Path) -> None:
    before = read(box)
    for path in box.rglob("thread_siblings_list"):
        path.unlink()
    assert before == read(box)


def test_a_cpu_without_topology_is_a_core_of_its_own_and_that_is_said(box: Path) -> None:
    shutil.rmtree(box / "sys/devices/system/cpu/cpu6/topology")
    topology = read(box)
    assert [3, 2] == [len(node.cores) for node in topology.nodes]
    assert {-1: (0,), 0: (0,), 1: (1,)} == topology.packages
    assert ("some CPUs do not tell their core: each counts as a core of its own",) == topology.notes


def test_a_cpu_that_went_offline_meanwhile_is_not_counted(box: Path) -> None:
    (box / "sys/devices/system/cpu/online").write_text("0-6\n")
    topology = read(box)
    assert (3,) == topology.nodes[1].cores[-1].cpus
    assert () == topology.notes


def test_a_cpu_that_two_nodes_list_counts_for_the_first(tmp_path: Path) -> None:
    """The kernel's `numa=fake` gives every pretend node all CPUs."""
    root = Path(shutil.copytree(SYSFS / "cxl-memory-node", tmp_path / "machine"))
    (root / "sys/devices/system/node/node1/cpulist").write_text("2-7,12-15\n")
    topology = read(root)
    assert (4, 5, 6, 7, 12, 13, 14, 15) == topology.nodes[1].cpus
    assert ("CPUs 2-3 are in several nodes; they count for the lowest",) == topology.notes


@pytest.mark.parametrize(
    "name",
    [
        "sys/devices/system/cpu/offline",
        "sys/devices/system/cpu/smt/control",
        "sys/devices/system/node/node0/distance",
        "sys/devices/system/cpu/cpu0/topology/die_id",
        "proc/self/status",
        "proc/self/cgroup",
        "proc/meminfo",
    ],
)
def test_an_optional_file_may_be_missing(box: Path, name: str) -> None:
    (box / name).unlink()
    assert frozenset(range(8)) == read(box).allowed_cpus


@pytest.mark.parametrize(
    "name",
    [
        "sys/devices/system/cpu/online",
        "sys/devices/system/node/online",
        "sys/devices/system/node/node1/cpulist",
        "sys/devices/system/node/node1/meminfo",
    ],
)
@pytest.mark.parametrize("content", [None, "nonsense"])
def test_a_mandatory_file_that_cannot_be_read_is_named(
    box: Path, name: str, content: str | None
) -> None:
    if content is None:
        (box / name).unlink()
    else:
        (box / name).write_text(content)
    with pytest.raises(TopologyError, match=name):
        read(box)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("proc/self/status", "Cpus_allowed_list: x\n"),
        ("proc/self/status", "Mems_allowed_list: 0-y\n"),
        ("sys/devices/system/node/node0/distance", "ten 21\n"),
        ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: lots kB\n"),
        ("sys/devices/system/cpu/cpu5/topology/core_id", "x\n"),
        ("sys/fs/cgroup/cpu.max", "100000\n"),
        ("sys/fs/cgroup/memory.max", "much\n"),
    ],
)
def test_a_file_that_makes_no_sense_is_named(box: Path, name: str, content: str) -> None:
    (box / name).parent.mkdir(parents=True, exist_ok=True)
    (box / name).write_text(content)
    with pytest.raises(TopologyError, match=name):
        read(box)


def test_the_running_machine_can_be_read() -> None:
    topology = read_topology()
    assert frozenset(os.sched_getaffinity(0)) == topology.allowed_cpus
    assert all(node.memory_total_bytes >= node.memory_free_bytes for node in topology.nodes)
    assert any(node.memory_free_bytes for node in topology.nodes)


def test_libnuma_agrees_about_the_running_machine() -> None:
    try:
        import numa  # noqa: F401, PLC0415 - loads libnuma.so, which may be missing
    except (ImportError, OSError, AttributeError):
        pytest.skip("no libnuma on this machine")
    assert [] == verify_with_libnuma(read_topology())


def pretend_libnuma(monkeypatch: pytest.MonkeyPatch, topology: Topology) -> SimpleNamespace:
    """py-libnuma's answers on a machine of ours."""
    nodes = {node.id: node for node in topology.nodes}
    info = SimpleNamespace(
        numa_available=lambda: True,
        get_max_node=lambda: max(nodes),
        node_to_cpus=lambda node: list(nodes[node].cpus),
        numa_distance=lambda a, b: nodes[a].distances[b],
    )
    sizes = {node.id: node.memory_total_bytes or -1 for node in nodes.values()}
    memory = SimpleNamespace(node_memory_info=lambda node: (sizes[node], 0), sizes=sizes)
    module = SimpleNamespace(info=info, memory=memory)
    monkeypatch.setitem(sys.modules, "numa", module)
    return module


@pytest.mark.parametrize("name", MACHINES)
def test_a_libnuma_that_agrees_is_silent(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pretend_libnuma(monkeypatch, machine(name))
    assert [] == verify_with_libnuma(machine(name))


def test_libnuma_has_no_size_for_a_node_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = machine("cxl-memory-node").nodes
    nodes = (first, replace(second, memory_total_bytes=0), third)
    topology = replace(machine("cxl-memory-node"), nodes=nodes)
    pretend_libnuma(monkeypatch, topology)
    assert [] == verify_with_libnuma(topology)


def test_what_libnuma_sees_differently_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    libnuma = pretend_libnuma(monkeypatch, machine("r730"))
    libnuma.info.get_max_node = lambda: 3
    libnuma.info.numa_distance = lambda a, b: 10 if a == b else 20
    libnuma.memory.sizes[1] = 32 * GIB
    assert [
        "the highest node: sysfs says 1, libnuma says 3",
        "the distance from node 0 to node 1: sysfs says 21, libnuma says 20",
        "the distance from node 1 to node 0: sysfs says 21, libnuma says 20",
        "the bytes of node 1: sysfs says 68719476736, libnuma says 34359738368",
    ] == verify_with_libnuma(machine("r730"))


def test_a_cpu_that_libnuma_misses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_libnuma(monkeypatch, machine("laptop")).info.node_to_cpus = lambda _: [0, 1]
    (note,) = verify_with_libnuma(machine("laptop"))
    assert note.startswith("the CPUs of node 0: sysfs says (0, 1, 2, ")
    assert note.endswith("libnuma says (0, 1)")


def test_a_machine_without_libnuma_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numa", None)
    (note,) = verify_with_libnuma(machine("laptop"))
    assert note.startswith("libnuma could not be asked: ")


def test_a_kernel_without_numa_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_libnuma(monkeypatch, machine("r730")).info.numa_available = lambda: False
    assert ["libnuma finds no NUMA support in this kernel"] == verify_with_libnuma(machine("r730"))
