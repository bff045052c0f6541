"""What this machine is: nodes, cores, memory, and how much of it this process may use.

Everything is read below two roots, `/sys` and `/proc` unless told otherwise, and nothing is assumed
about the order of CPU ids. Knows no plan: which cores compute is `replica.placement`'s to decide.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TypeVar

T = TypeVar("T", int, float, frozenset[int])  # what a file may hold

LIBNUMA_SIZE_TOLERANCE = 0.02
"""Of a node's memory: the two readings are not taken at the same instant."""


class TopologyError(Exception):
    """The machine cannot be read; the message names the file."""


@dataclass(frozen=True, slots=True)
class Core:
    """One physical core and its online hardware threads."""

    key: tuple[int, int, int]
    """(package, die, core id); core ids repeat per package. A package of -1 is unknown."""
    cpus: tuple[int, ...]
    """Ascending, at least one."""

    @property
    def package(self) -> int:
        return self.key[0]


@dataclass(frozen=True, slots=True)
class Node:
    """One NUMA node. It may lack cores (memory-only) or memory (CPU-only)."""

    id: int
    cores: tuple[Core, ...]
    """By lowest CPU id."""
    memory_total_bytes: int
    memory_free_bytes: int
    """Free, or held by file pages that the kernel can drop."""
    distances: Mapping[int, int]
    """By node id; empty where the kernel does not tell."""

    @property
    def cpus(self) -> tuple[int, ...]:
        """Online, ascending."""
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))

    @property
    def packages(self) -> tuple[int, ...]:
        return tuple(sorted({core.package for core in self.cores}))


@dataclass(frozen=True, slots=True)
class Topology:
    """One reading of the machine. CPUs come and go, so read again before each start."""

    nodes: tuple[Node, ...]
    online: frozenset[int]
    offline: frozenset[int]
    allowed_cpus: frozenset[int]
    """Online, and within both the affinity and the cgroup's cpuset."""
    allowed_mems: frozenset[int]
    """Nodes whose memory this process may use."""
    smt_control: str | None = None
    """`on`, `off`, `notsupported`, …: the kernel's switch."""
    cpu_quota: float | None = None
    """CPUs' worth of time that the cgroup grants (`cpu.max`); None is unlimited."""
    memory_limit_bytes: int | None = None
    """What the cgroup grants in all (`memory.max`); None is unlimited."""
    notes: tuple[str, ...] = ()
    """What could not be read, and what stood in for it."""

    @property
    def smt(self) -> bool:
        """Some core has more than one thread online."""
        return any(len(core.cpus) > 1 for node in self.nodes for core in node.cores)

    @property
    def packages(self) -> dict[int, tuple[int, ...]]:
        """The nodes of each package."""
        ids = sorted({package for node in self.nodes for package in node.packages})
        return {p: tuple(node.id for node in self.nodes if p in node.packages) for p in ids}

    def usable_cores(self, node: Node) -> tuple[Core, ...]:
        """The node's cores with the threads this process may run on, without empty ones."""
        kept = (
            Core(core.key, tuple(cpu for cpu in core.cpus if cpu in self.allowed_cpus))
            for core in node.cores
        )
        return tuple(core for core in kept if core.cpus)


def read_topology(
    sysfs_root: Path = Path("/sys"),
    proc_root: Path = Path("/proc"),
    allowed: frozenset[int] | None = None,
) -> Topology:
    """Read the machine.

    `allowed` stands in for the affinity of `/proc/self/status`, which is that of the process's
    first thread: pass what it was before that thread was moved to a few CPUs of its own.
    """
    cpu_root = sysfs_root / "devices/system/cpu"
    online = _cpu_list(cpu_root / "online")
    notes: list[str] = []
    nodes = _read_nodes(sysfs_root, proc_root, online, notes)
    status = proc_root / "self/status"
    if allowed is None:
        allowed = _status_list(status, "Cpus_allowed_list", online)
    mems = _status_list(status, "Mems_allowed_list", frozenset(node.id for node in nodes))
    cgroups = _cgroups(sysfs_root / "fs/cgroup", proc_root)
    return Topology(
        nodes=nodes,
        online=online,
        offline=_optional_list(cpu_root / "offline") or frozenset(),
        allowed_cpus=online & allowed & _effective(cgroups, "cpuset.cpus.effective", online),
        allowed_mems=mems & _effective(cgroups, "cpuset.mems.effective", mems),
        smt_control=_optional_text(cpu_root / "smt/control"),
        cpu_quota=_least(_cpu_max(path / "cpu.max") for path in cgroups),
        memory_limit_bytes=_least(_memory_max(path / "memory.max") for path in cgroups),
        notes=tuple(notes),
    )


def parse_cpu_list(text: str) -> frozenset[int]:
    """The kernel's list format: `0,2,4-6`; ValueError for anything else."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part.strip():
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def format_cpu_list(cpus: Iterable[int]) -> str:
    """The kernel's list format: `0,2,4-6`."""
    runs: list[tuple[int, int]] = []
    for cpu in sorted(set(cpus)):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1] = (runs[-1][0], cpu)
        else:
            runs.append((cpu, cpu))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def verify_with_libnuma(topology: Topology) -> list[str]:
    """Where libnuma, asked about the running machine, says otherwise; one sentence each."""
    try:
        # The import loads libnuma.so; a machine without it still serves.
        from numa import info, memory  # noqa: PLC0415
    except (ImportError, OSError, AttributeError) as error:
        return [f"libnuma could not be asked: {error}"]
    if not info.numa_available():
        return ["libnuma finds no NUMA support in this kernel"]
    found = [
        _difference(
            "the highest node", max(node.id for node in topology.nodes), info.get_max_node()
        )
    ]
    with_memory = [node for node in topology.nodes if node.memory_total_bytes > 0]
    for node in topology.nodes:
        theirs = tuple(info.node_to_cpus(node.id))
        found.append(_difference(f"the CPUs of node {node.id}", node.cpus, theirs))
        for other, distance in node.distances.items():
            what = f"the distance from node {node.id} to node {other}"
            found.append(_difference(what, distance, info.numa_distance(node.id, other)))
        # The only node's size is that of /proc/meminfo, on purpose: see `_read_nodes`.
        if len(with_memory) > 1:
            size = max(0, memory.node_memory_info(node.id)[0])
            if not math.isclose(size, node.memory_total_bytes, rel_tol=LIBNUMA_SIZE_TOLERANCE):
                what = f"the bytes of node {node.id}"
                found.append(_difference(what, node.memory_total_bytes, size))
    return [sentence for sentence in found if sentence is not None]


def _difference(what: str, ours: object, theirs: object) -> str | None:
    return None if ours == theirs else f"{what}: sysfs says {ours}, libnuma says {theirs}"


def _read_nodes(
    sysfs_root: Path, proc_root: Path, online: frozenset[int], notes: list[str]
) -> tuple[Node, ...]:
    cpu_root = sysfs_root / "devices/system/cpu"
    node_root = sysfs_root / "devices/system/node"
    nodes: list[Node] = []
    if node_root.is_dir():
        free = online
        ids = sorted(_cpu_list(node_root / "online"))
        for number in ids:
            path = node_root / f"node{number}"
            listed = _cpu_list(path / "cpulist") & online
            if listed - free:
                cpus = format_cpu_list(listed - free)
                notes.append(f"CPUs {cpus} are in several nodes; they count for the lowest")
            nodes.append(_read_node(path, number, ids, _read_cores(cpu_root, listed & free)))
            free -= listed
    else:
        notes.append("this kernel knows no NUMA: everything is taken for node 0")
        nodes.append(Node(0, _read_cores(cpu_root, online), 0, 0, {0: 10}))
    if any(not (cpu_root / f"cpu{cpu}/topology/core_id").exists() for cpu in online):
        notes.append("some CPUs do not tell their core: each counts as a core of its own")
    with_memory = [node for node in nodes if node.memory_total_bytes > 0] or nodes[:1]
    if len(with_memory) == 1:
        # A virtual machine may count memory that was plugged in after boot only in /proc/meminfo.
        # With one node there is no doubt whose it is.
        only = with_memory[0]
        nodes[nodes.index(only)] = _with_memory_of(proc_root / "meminfo", only)
    return tuple(nodes)


def _read_node(path: Path, number: int, ids: list[int], cores: tuple[Core, ...]) -> Node:
    meminfo = _fields(path / "meminfo", required=True)
    if "MemTotal" not in meminfo:
        message = f"cannot make sense of {path / 'meminfo'}: it holds no MemTotal"
        raise TopologyError(message)
    total = _kilobytes(path / "meminfo", meminfo["MemTotal"])
    droppable = ("MemFree", "Active(file)", "Inactive(file)")
    free = sum(_kilobytes(path / "meminfo", meminfo.get(name, "0")) for name in droppable)
    words = (_optional_text(path / "distance") or "").split()
    distances = [_parse(path / "distance", word, int) for word in words]
    # The kernel lists one distance per online node, so ids with gaps still match by position.
    by_id = dict(zip(ids, distances, strict=True)) if len(distances) == len(ids) else {}
    return Node(number, cores, total, free, by_id)


def _with_memory_of(path: Path, node: Node) -> Node:
    meminfo = _fields(path)
    total = _kilobytes(path, meminfo.get("MemTotal", "0"))
    free = _kilobytes(path, meminfo.get("MemAvailable", meminfo.get("MemFree", "0")))
    if total == 0:
        return node
    return replace(node, memory_total_bytes=total, memory_free_bytes=free)


def _read_cores(cpu_root: Path, cpus: Iterable[int]) -> tuple[Core, ...]:
    """Group CPUs that the kernel calls siblings.

    Core ids alone would do for x86, but repeat among the clusters of some ARM machines.
    """
    keys: dict[int, tuple[int, int, int]] = {}
    threads: dict[object, list[int]] = {}
    for cpu in sorted(cpus):
        path = cpu_root / f"cpu{cpu}/topology"
        package = _optional_int(path / "physical_package_id", -1)
        keys[cpu] = (
            package,
            _optional_int(path / "die_id", 0),
            _optional_int(path / "core_id", cpu),
        )
        siblings = _optional_list(path / "thread_siblings_list")
        threads.setdefault(siblings or keys[cpu], []).append(cpu)
    return tuple(Core(keys[group[0]], tuple(group)) for group in threads.values())


def _cgroups(mount: Path, proc_root: Path) -> list[Path]:
    """This process's cgroup (v2) and those around it, the nearest first."""
    if (mount / "unified").is_dir():
        mount = mount / "unified"
    lines = (_optional_text(proc_root / "self/cgroup") or "").splitlines()
    paths = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    own = PurePosixPath(*paths[:1])
    # A container may see its own cgroup as the mount while /proc names a path of the host: of that
    # path nothing is there, and the mount remains.
    return [mount / path for path in (own, *own.parents)]


def _effective(cgroups: list[Path], name: str, otherwise: frozenset[int]) -> frozenset[int]:
    """The nearest cgroup's list; it already respects those around it."""
    found = (_optional_list(path / name) for path in cgroups)
    return next((cpus for cpus in found if cpus), otherwise)


def _cpu_max(path: Path) -> float | None:
    text = _optional_text(path)
    return None if text is None or text.startswith("max") else _parse(path, text, _quota)


def _quota(text: str) -> float:
    quota, period = text.split()
    return int(quota) / int(period)


def _memory_max(path: Path) -> int | None:
    text = _optional_text(path)
    return None if text is None or text == "max" else _parse(path, text, int)


def _least(values: Iterable[T | None]) -> T | None:
    return min((value for value in values if value is not None), default=None)


def _kilobytes(path: Path, text: str) -> int:
    """In bytes: `7039188 kB`."""
    return _parse(path, text, lambda value: int(value.removesuffix("kB"))) * 1024


def _fields(path: Path, *, required: bool = False) -> dict[str, str]:
    """`name: value` lines; a node's meminfo puts `Node 0 ` before each name."""
    text = _text(path) if required else _optional_text(path) or ""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.split()[-1]: value.strip() for name, _, value in pairs if name.strip()}


def _status_list(path: Path, name: str, otherwise: frozenset[int]) -> frozenset[int]:
    text = _fields(path).get(name)
    return otherwise if text is None else _parse(path, text, parse_cpu_list)


def _cpu_list(path: Path) -> frozenset[int]:
    return _parse(path, _text(path), parse_cpu_list)


def _optional_list(path: Path) -> frozenset[int] | None:
    text = _optional_text(path)
    return None if text is None else _parse(path, text, parse_cpu_list)


def _optional_int(path: Path, otherwise: int) -> int:
    text = _optional_text(path)
    return otherwise if text is None else _parse(path, text, int)


def _parse(path: Path, text: str, parser: Callable[[str], T]) -> T:
    try:
        return parser(text)
    except ValueError as error:
        message = f"cannot make sense of {path}: it holds {text!r}"
        raise TopologyError(message) from error


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        message = f"cannot read {path}: {error.strerror}"
        raise TopologyError(message) from error


def _optional_text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
