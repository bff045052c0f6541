"""Where replicas may live: which cores compute, which keep house, which memory they use.

A pure function from a topology and the operator's wishes to a plan. It reads nothing and binds
nothing, and it says in whole sentences what it left out and why.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, NamedTuple

from replica.topology import Core, Node, Topology, format_cpu_list

LARGE_DOMAIN_CORES = 14
"""From here on two cores keep house: the study reserved 2 of 14."""

SMALL_DOMAIN_CORES = 2
"""Up to here no core can be spared."""

DomainKind = Literal["node", "socket"]

_SMT_OFF = {"off", "forceoff"}


class PlacementError(Exception):
    """The operator asked for a place that this machine cannot give."""


@dataclass(frozen=True, slots=True)
class PlacementDomain:
    """One replica's place. No two domains of a plan share a CPU."""

    index: int
    nodes: tuple[int, ...]
    """Where its memory lies."""
    compute_cpus: tuple[int, ...]
    """One logical CPU per physical core, by node and then by id."""
    housekeeping_cpus: tuple[int, ...]
    """For event loops: every thread of the reserved cores. May be empty."""
    idle_siblings: tuple[int, ...]
    """The other threads of computing cores, to be left alone."""
    virtual: bool = False
    """A pretend node: others have the same memory."""
    interleaved: bool = False
    """Its memory alternates between its nodes: one replica spans them all."""


@dataclass(frozen=True, slots=True)
class Plan:
    domains: tuple[PlacementDomain, ...]
    """At least one."""
    gateway_cpus: tuple[int, ...]
    """All housekeeping CPUs, or everything usable where there are none."""
    notes: tuple[str, ...]
    """What an operator should know, in sentences."""


class _Place(NamedTuple):
    """A domain before its cores are shared out."""

    name: str
    nodes: tuple[int, ...]
    rows: tuple[tuple[Core, ...], ...]
    """Per node, with the usable threads alone; no row is empty."""

    @property
    def cores(self) -> tuple[Core, ...]:
        return tuple(core for row in self.rows for core in row)


class _Share(NamedTuple):
    """How many of a place's cores do what; what is left stays idle."""

    compute: int
    reserved: int


def plan(
    topology: Topology,
    *,
    nodes: Sequence[int] | None = None,
    domain: DomainKind = "node",
    virtual_nodes: int | None = None,
    threads: int | None = None,
) -> Plan:
    """Choose the domains, or raise PlacementError with the option, the value and the remedy."""
    chosen = _chosen_nodes(topology, nodes)
    if virtual_nodes is not None:
        if nodes is not None or domain == "socket":
            other = "--domain socket" if nodes is None else f"--nodes {_comma(nodes)}"
            message = (
                f"--virtual-nodes {virtual_nodes} divides the whole machine: leave out {other}"
            )
            raise PlacementError(message)
        places = _virtual_places(topology, chosen, virtual_nodes)
    elif domain == "socket":
        places = _socket_places(topology, chosen)
    else:
        places = [_Place(f"node {n.id}", (n.id,), (topology.usable_cores(n),)) for n in chosen]
    _check_threads(places, threads)
    quota = None if topology.cpu_quota is None else int(topology.cpu_quota / len(places))
    shares = [_share(len(place.cores), threads, quota) for place in places]
    virtual = virtual_nodes is not None
    domains = tuple(
        _domain(index, place, share, virtual=virtual)
        for index, (place, share) in enumerate(zip(places, shares, strict=True))
    )
    housekeeping = sorted(cpu for made in domains for cpu in made.housekeeping_cpus)
    notes = [*topology.notes, *_machine_notes(topology), *_limit_notes(topology)]
    if domain == "node" and not virtual:
        notes += _split_package_notes(topology)
    notes += _share_notes(places, shares, threads)
    return Plan(domains, tuple(housekeeping or sorted(topology.allowed_cpus)), tuple(notes))


def numactl_argv(domain: PlacementDomain, *, bind_memory: bool) -> list[str]:
    """What to put before a replica's command.

    Without `--all` numactl refuses CPUs outside the affinity of the thread that starts it, and
    that may be a gateway's that has already moved to its housekeeping CPUs.
    """
    argv = ["numactl", "--all", f"--physcpubind={_comma(domain.compute_cpus)}"]
    if bind_memory:
        policy = "--interleave" if domain.interleaved else "--membind"
        argv.append(f"{policy}={_comma(domain.nodes)}")
    return [*argv, "--"]


def _obstacle(topology: Topology, node: Node) -> str | None:
    """Why no replica can live on this node, or None."""
    if not node.cores:
        return (
            "has memory but no CPUs" if node.memory_total_bytes else "has neither CPUs nor memory"
        )
    if node.memory_total_bytes == 0:
        return "has CPUs but no memory of its own"
    if not topology.usable_cores(node):
        return "has no CPU that this process may use (affinity or cpuset)"
    if node.id not in topology.allowed_mems:
        return "has no memory that this process may use (cpuset.mems)"
    return None


def _chosen_nodes(topology: Topology, wanted: Sequence[int] | None) -> list[Node]:
    fit = [node for node in topology.nodes if _obstacle(topology, node) is None]
    if not fit:
        reasons = "; ".join(
            f"node {node.id} {_obstacle(topology, node)}" for node in topology.nodes
        )
        message = f"no NUMA node can hold a replica: {reasons}"
        raise PlacementError(message)
    if wanted is None:
        return fit
    asked = f"--nodes {_comma(wanted)}"
    if not wanted or len(set(wanted)) < len(wanted):
        message = f"{asked}: name at least one node, and each only once"
        raise PlacementError(message)
    by_id = {node.id: node for node in topology.nodes}
    for number in wanted:
        if number not in by_id:
            machine = f"this machine has {_nodes(list(by_id))}"
            message = f"{asked}: there is no NUMA node {number}; {machine}"
            raise PlacementError(message)
        obstacle = _obstacle(topology, by_id[number])
        if obstacle is not None:
            remedy = f"choose from {_nodes([node.id for node in fit])}"
            message = f"{asked}: node {number} {obstacle}; {remedy}"
            raise PlacementError(message)
    return [by_id[number] for number in sorted(wanted)]


def _socket_places(topology: Topology, chosen: list[Node]) -> list[_Place]:
    """Join the nodes that have a package in common; an unknown package joins nothing."""
    groups: list[list[Node]] = []
    for node in chosen:
        mine = {package for package in node.packages if package >= 0}
        near = [group for group in groups if any(mine & {*other.packages} for other in group)]
        groups = [group for group in groups if group not in near]
        groups.append([*(other for group in near for other in group), node])
    places = []
    for group in sorted(groups, key=lambda group: group[0].id):
        ids = tuple(sorted(node.id for node in group))
        packages = sorted({package for node in group for package in node.packages})
        ordered = sorted(group, key=lambda node: node.id)
        rows = tuple(topology.usable_cores(node) for node in ordered)
        places.append(_Place(f"socket {_comma(packages)} ({_nodes(ids)})", ids, rows))
    return places


def _virtual_places(topology: Topology, chosen: list[Node], count: int) -> list[_Place]:
    """Cut the row of all usable cores into `count` pieces that differ by one core at most.

    A piece has the memory of the real nodes its cores are on.
    """
    row = [(node.id, core) for node in chosen for core in topology.usable_cores(node)]
    if not 1 <= count <= len(row):
        asked = f"--virtual-nodes {count}"
        message = f"{asked}: there are {_cores(len(row))}; choose 1 to {len(row)}"
        raise PlacementError(message)
    places = []
    for index in range(count):
        piece = row[len(row) * index // count : len(row) * (index + 1) // count]
        memory = tuple(sorted({node for node, _ in piece}))
        places.append(_Place(f"virtual node {index}", memory, (tuple(core for _, core in piece),)))
    return places


def _check_threads(places: list[_Place], threads: int | None) -> None:
    if threads is None:
        return
    least = min(places, key=lambda place: len(place.cores))
    if not 1 <= threads <= len(least.cores):
        has = f"{least.name} has {_cores(len(least.cores))}"
        message = f"--threads {threads}: {has}; choose 1 to {len(least.cores)}"
        raise PlacementError(message)


def _share(cores: int, threads: int | None, quota: int | None) -> _Share:
    """More threads than the quota has CPUs would be throttled while they spin."""
    if threads is None:
        budget = cores if quota is None else max(1, min(cores, quota))
        compute = budget - _reserve(budget)
    else:
        compute = threads
    return _Share(compute, min(_reserve(cores), cores - compute))


def _reserve(cores: int) -> int:
    if cores <= SMALL_DOMAIN_CORES:
        return 0
    return 2 if cores >= LARGE_DOMAIN_CORES else 1


def _domain(index: int, place: _Place, share: _Share, *, virtual: bool) -> PlacementDomain:
    """The first cores keep house, because a kernel sends most interrupts to low ids.

    Cores are taken from all of a socket's nodes in turn: each node has its own memory channels.
    """
    in_turn = [core for rank in zip_longest(*place.rows) for core in rank if core is not None]
    reserved = in_turn[: share.reserved]
    taken = set(in_turn[share.reserved : share.reserved + share.compute])
    compute = [core for core in place.cores if core in taken]
    assert len(compute) == share.compute > 0
    return PlacementDomain(
        index=index,
        nodes=place.nodes,
        compute_cpus=tuple(core.cpus[0] for core in compute),
        housekeeping_cpus=tuple(sorted(cpu for core in reserved for cpu in core.cpus)),
        idle_siblings=tuple(sorted(cpu for core in compute for cpu in core.cpus[1:])),
        virtual=virtual,
    )


def _machine_notes(topology: Topology) -> list[str]:
    notes = []
    for node in topology.nodes:
        obstacle = _obstacle(topology, node)
        if obstacle is not None:
            notes.append(f"node {node.id} {obstacle}: it is never chosen")
        if len([package for package in node.packages if package >= 0]) > 1:
            notes.append(
                f"node {node.id} spans packages {_comma(node.packages)}, so nothing can be kept "
                "local to one of them: switch off node interleaving (AMD: NPS0) in the firmware, "
                "unless this is a virtual machine"
            )
    if topology.offline:
        why = ", because SMT is switched off" if topology.smt_control in _SMT_OFF else ""
        notes.append(f"CPUs {format_cpu_list(topology.offline)} are offline{why}")
    barred = topology.online - topology.allowed_cpus
    if barred:
        notes.append(f"affinity or cpuset bars this process from CPUs {format_cpu_list(barred)}")
    halves = [
        core.cpus[0]
        for node in topology.nodes
        for core in node.cores
        if 0 < len(topology.allowed_cpus.intersection(core.cpus)) < len(core.cpus)
    ]
    if halves:
        cores = format_cpu_list(halves)
        notes.append(f"others may run on a sibling of the cores with CPUs {cores}, and slow them")
    return notes


def _limit_notes(topology: Topology) -> list[str]:
    notes = []
    if topology.cpu_quota is not None:
        notes.append(f"the cgroup grants the time of {topology.cpu_quota:g} CPUs (cpu.max)")
    if topology.memory_limit_bytes is not None:
        size = topology.memory_limit_bytes / 2**30
        notes.append(f"the cgroup grants {size:.1f} GiB of memory in all (memory.max)")
    return notes


def _split_package_notes(topology: Topology) -> list[str]:
    split = {p: ids for p, ids in topology.packages.items() if p >= 0 and len(ids) > 1}
    return [
        f"package {package} is split into {_nodes(ids)} (SNC, NPS): --domain socket joins them"
        for package, ids in split.items()
    ]


def _share_notes(places: list[_Place], shares: list[_Share], threads: int | None) -> list[str]:
    """One sentence per circumstance, with the places it applies to."""
    found: dict[str, list[str]] = {}
    for place, share in zip(places, shares, strict=True):
        total = len(place.cores)
        why = "cpu.max" if threads is None else f"--threads {threads}"
        if share.reserved == 0 and total <= SMALL_DOMAIN_CORES:
            found.setdefault(f"{_cores(total)}: nothing reserved", []).append(place.name)
        elif share.reserved < _reserve(total):
            text = f"{share.reserved} of {_cores(total)} reserved, because of {why}"
            found.setdefault(text, []).append(place.name)
        idle = total - share.compute - share.reserved
        if idle:
            text = f"{idle} of {_cores(total)} idle, because of {why}"
            found.setdefault(text, []).append(place.name)
    return [f"{', '.join(names)}: {text}" for text, names in found.items()]


def _comma(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _cores(count: int) -> str:
    return f"{count} usable core{'' if count == 1 else 's'}"


def _nodes(ids: Sequence[int]) -> str:
    return f"node{'' if len(ids) == 1 else 's'} {', '.join(map(str, ids))}"
