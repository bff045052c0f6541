"""The plan: which cores compute, which keep house, and what is refused."""

from contextlib import suppress
from dataclasses import replace
from typing import TypedDict, Unpack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.placement import DomainKind, PlacementDomain, PlacementError, Plan, numactl_argv, plan
from replica.topology import Core, Node, Topology, read_topology
from tests.fixtures.make_sysfs import SYSFS


def machine(name: str) -> Topology:
    return read_topology(SYSFS / name / "sys", SYSFS / name / "proc")


def small(cores: int, threads: int = 1) -> Topology:
    """One node of so many cores, its ids in a row per thread."""
    made = tuple(
        Core((0, 0, n), tuple(n + cores * thread for thread in range(threads)))
        for n in range(cores)
    )
    cpus = frozenset(range(cores * threads))
    node = Node(0, made, 2**30, 2**29, {0: 10})
    return Topology((node,), cpus, frozenset(), cpus, frozenset({0}))


def sizes(made: Plan) -> list[tuple[int, int]]:
    return [(len(d.compute_cpus), len(d.housekeeping_cpus)) for d in made.domains]


class Wishes(TypedDict, total=False):
    nodes: list[int] | None
    domain: DomainKind
    virtual_nodes: int | None
    threads: int | None


def refusal(topology: Topology, **wishes: Unpack[Wishes]) -> str:
    with pytest.raises(PlacementError) as caught:
        plan(topology, **wishes)
    return str(caught.value)


def test_the_r730_computes_on_twelve_even_and_twelve_odd_cores() -> None:
    """As the study did: 12 of 14 cores for inference, hyperthreads excluded."""
    made = plan(machine("r730"))
    assert (
        PlacementDomain(
            index=0,
            nodes=(0,),
            compute_cpus=tuple(range(4, 28, 2)),
            housekeeping_cpus=(0, 2, 28, 30),
            idle_siblings=tuple(range(32, 56, 2)),
        )
        == made.domains[0]
    )
    assert tuple(range(5, 28, 2)) == made.domains[1].compute_cpus
    assert (0, 1, 2, 3, 28, 29, 30, 31) == made.gateway_cpus
    assert () == made.notes


@pytest.mark.parametrize(("cores", "reserved"), [(1, 0), (2, 0), (3, 1), (13, 1), (14, 2), (64, 2)])
def test_a_node_keeps_as_many_cores_for_the_house_as_it_can_spare(
    cores: int, reserved: int
) -> None:
    assert [(cores - reserved, reserved)] == sizes(plan(small(cores)))


@pytest.mark.parametrize(("cores", "text"), [(1, "1 usable core"), (2, "2 usable cores")])
def test_where_nothing_can_be_spared_the_gateway_runs_anywhere_and_the_plan_says_so(
    cores: int, text: str
) -> None:
    made = plan(small(cores, threads=2))
    assert tuple(range(2 * cores)) == made.gateway_cpus
    assert (f"node 0: {text}: nothing reserved",) == made.notes


def test_a_socket_joins_its_nodes_and_their_memory() -> None:
    made = plan(machine("xeon-snc2"), domain="socket")
    assert [(0, 1), (2, 3)] == [d.nodes for d in made.domains]
    assert (1, 2, 5, 6, 3, 4, 7, 8, 9) == made.domains[0].compute_cpus, "by node, then by id"
    assert [(30, 4), (30, 4)] == sizes(plan(machine("epyc-nps4"), domain="socket"))


def test_a_socket_takes_cores_from_all_its_nodes_in_turn() -> None:
    """Each node has memory channels of its own, which nobody else would use."""
    first, _ = plan(machine("epyc-nps4"), domain="socket", threads=5).domains
    assert (0, 8, 64, 72) == first.housekeeping_cpus
    assert (1, 9, 16, 17, 24) == first.compute_cpus


def test_a_socket_of_one_node_is_that_node() -> None:
    assert plan(machine("r730")) == plan(machine("r730"), domain="socket")


def test_a_socket_joins_only_the_nodes_that_were_asked_for() -> None:
    made = plan(machine("epyc-nps4"), nodes=[6, 1, 5], domain="socket")
    assert [(1,), (5, 6)] == [d.nodes for d in made.domains]


def test_nodes_of_unknown_packages_are_not_joined() -> None:
    """Some firmware reports -1 for every package."""
    snc = machine("xeon-snc2")
    nodes = tuple(
        replace(n, cores=tuple(Core((-1, 0, c.key[2]), c.cpus) for c in n.cores)) for n in snc.nodes
    )
    made = plan(replace(snc, nodes=nodes), domain="socket")
    assert [(0,), (1,), (2,), (3,)] == [d.nodes for d in made.domains]


def test_nodes_that_share_packages_in_a_chain_are_one_socket() -> None:
    nodes = tuple(
        Node(n, tuple(Core((p, 0, n), (10 * n + p,)) for p in packages), 1, 1, {})
        for n, packages in enumerate([(0,), (1,), (0, 1), (2,)])
    )
    cpus = frozenset(cpu for node in nodes for cpu in node.cpus)
    made = plan(Topology(nodes, cpus, frozenset(), cpus, frozenset(range(4))), domain="socket")
    assert [(0, 1, 2), (3,)] == [d.nodes for d in made.domains]


def test_a_split_package_is_pointed_out_unless_it_was_joined() -> None:
    note = "package 0 is split into nodes 0, 1 (SNC, NPS): --domain socket joins them"
    assert note in plan(machine("xeon-snc2")).notes
    assert () == plan(machine("xeon-snc2"), domain="socket").notes


def test_two_packages_in_one_node_are_pointed_out() -> None:
    """NPS0 and node interleaving take away what this program is for."""
    made = plan(replace(small(4), nodes=(merged(machine("r730")),)))
    (note,) = (note for note in made.notes if "spans" in note)
    assert note.startswith("node 0 spans packages 0,1, so nothing can be kept local")
    assert "NPS0" in note


def merged(topology: Topology) -> Node:
    cores = tuple(core for node in topology.nodes for core in node.cores)
    return Node(0, cores, 2**30, 2**29, {0: 10})


def test_a_memory_only_node_is_mentioned_and_not_chosen() -> None:
    made = plan(machine("cxl-memory-node"))
    assert [(0,), (1,)] == [d.nodes for d in made.domains]
    assert ("node 2 has memory but no CPUs: it is never chosen",) == made.notes


@pytest.mark.parametrize("domain", ["node", "socket"])
def test_a_node_without_memory_is_mentioned_and_not_chosen(domain: DomainKind) -> None:
    r730 = machine("r730")
    bare = replace(r730.nodes[1], memory_total_bytes=0)
    made = plan(replace(r730, nodes=(r730.nodes[0], bare)), domain=domain)
    assert [(0,)] == [d.nodes for d in made.domains]
    assert ("node 1 has CPUs but no memory of its own: it is never chosen",) == made.notes


def test_a_node_whose_memory_the_cpuset_bars_is_not_chosen() -> None:
    made = plan(replace(machine("r730"), allowed_mems=frozenset({1})))
    assert [(1,)] == [d.nodes for d in made.domains]
    (note,) = made.notes
    assert "node 0 has no memory that this process may use (cpuset.mems)" in note


def test_a_cpuset_shrinks_the_plan_and_is_mentioned() -> None:
    made = plan(machine("cpuset-half-node"))
    (only,) = made.domains
    assert ((1,), (9, 10, 11), (8, 24), (25, 26, 27)) == (
        only.nodes,
        only.compute_cpus,
        only.housekeeping_cpus,
        only.idle_siblings,
    )
    assert "affinity or cpuset bars this process from CPUs 0-7,12-23,28-31" in made.notes
    assert "the cgroup grants 24.0 GiB of memory in all (memory.max)" in made.notes


def test_a_core_of_which_only_the_second_thread_is_ours_computes_on_that_and_is_mentioned() -> None:
    made = plan(replace(small(4, threads=2), allowed_cpus=frozenset({0, 1, 2, 4, 5, 7})))
    assert (1, 2, 7) == made.domains[0].compute_cpus
    assert (0, 4) == made.domains[0].housekeeping_cpus
    assert (5,) == made.domains[0].idle_siblings
    assert "others may run on a sibling of the cores with CPUs 2-3, and slow them" in made.notes
    barred = plan(replace(small(4, threads=2), allowed_cpus=frozenset({0, 4, 1, 5})))
    assert not any("sibling" in note for note in barred.notes), "a barred core is not half ours"
    assert (0, 1, 4, 5) == barred.gateway_cpus, "nothing reserved, but not what is barred either"


def test_offline_cpus_are_mentioned() -> None:
    made = plan(machine("offline-cpus"))
    assert ("CPUs 3,11,13 are offline",) == made.notes
    made = plan(replace(machine("offline-cpus"), smt_control="off"))
    assert ("CPUs 3,11,13 are offline, because SMT is switched off",) == made.notes


def test_what_reading_the_machine_noticed_is_passed_on() -> None:
    assert ("mind the gap",) == plan(replace(small(4), notes=("mind the gap",))).notes


@pytest.mark.parametrize(
    ("quota", "expected"),
    [(0.5, 1), (2.0, 1), (5.9, 2), (7.9, 2), (8.0, 3), (24.0, 11), (28.0, 12), (99.0, 12)],
)
def test_threads_are_capped_by_the_time_the_cgroup_grants(quota: float, expected: int) -> None:
    """Threads that spin beyond the quota are throttled together with those that work."""
    made = plan(replace(machine("r730"), cpu_quota=quota))
    assert [expected, expected] == [len(d.compute_cpus) for d in made.domains]
    assert f"the cgroup grants the time of {quota:g} CPUs (cpu.max)" in made.notes
    idle = 12 - expected
    note = f"node 0, node 1: {idle} of 14 usable cores idle, because of cpu.max"
    assert (idle > 0) == (note in made.notes)


def test_threads_may_be_fewer_than_the_cores_and_the_rest_stays_idle() -> None:
    made = plan(machine("r730"), threads=5)
    assert (4, 6, 8, 10, 12) == made.domains[0].compute_cpus
    assert (32, 34, 36, 38, 40) == made.domains[0].idle_siblings
    assert ("node 0, node 1: 7 of 14 usable cores idle, because of --threads 5",) == made.notes


@pytest.mark.parametrize(("threads", "reserved"), [(12, 2), (13, 1), (14, 0)])
def test_threads_may_take_the_housekeeping_cores(threads: int, reserved: int) -> None:
    made = plan(replace(machine("r730"), cpu_quota=4.0), threads=threads)
    assert [(threads, 2 * reserved)] * 2 == sizes(made), "also against the quota"
    note = f"node 0, node 1: {reserved} of 14 usable cores reserved, because of --threads {threads}"
    assert (reserved < 2) == (note in made.notes)


def test_nodes_selects() -> None:
    domains = plan(machine("epyc-nps4"), nodes=[5, 2]).domains
    assert [(0, (2,)), (1, (5,))] == [(d.index, d.nodes) for d in domains]


def test_virtual_nodes_divide_the_cores_of_a_laptop() -> None:
    made = plan(machine("laptop"), virtual_nodes=2)
    assert [(0,), (0,)] == [d.nodes for d in made.domains]
    assert [(2, 4, 6), (9, 10, 11)] == [d.compute_cpus for d in made.domains]
    assert [(0, 1), (8,)] == [d.housekeeping_cpus for d in made.domains]
    assert [True, True] == [d.virtual for d in made.domains]


def test_virtual_nodes_differ_by_one_core_at_most() -> None:
    made = plan(small(11), virtual_nodes=4)
    assert [2, 3, 3, 3] == sorted(c + h for c, h in sizes(made))


def test_as_many_virtual_nodes_as_cores_reserve_nothing() -> None:
    made = plan(small(2), virtual_nodes=2)
    assert [(0,), (1,)] == [d.compute_cpus for d in made.domains]
    assert (0, 1) == made.gateway_cpus
    assert ("virtual node 0, virtual node 1: 1 usable core: nothing reserved",) == made.notes


def test_virtual_nodes_of_two_real_ones_keep_to_the_memory_of_their_cores() -> None:
    made = plan(machine("r730"), virtual_nodes=4)
    assert [(0,), (0,), (1,), (1,)] == [d.nodes for d in made.domains]
    assert [(0, 1)] == [d.nodes for d in plan(machine("r730"), virtual_nodes=1).domains]


REFUSALS: list[tuple[str, Wishes, str]] = [
    ("r730", {"nodes": [0, 3]}, "there is no NUMA node 3; this machine has nodes 0, 1"),
    ("laptop", {"nodes": [1]}, "--nodes 1: there is no NUMA node 1; this machine has node 0"),
    ("cxl-memory-node", {"nodes": [2]}, "node 2 has memory but no CPUs; choose from nodes 0, 1"),
    ("cpuset-half-node", {"nodes": [0]}, "node 0 has no CPU that this process may use"),
    ("r730", {"nodes": [1, 1]}, "--nodes 1,1: name at least one node, and each only once"),
    ("r730", {"nodes": []}, "name at least one node, and each only once"),
    ("r730", {"threads": 15}, "--threads 15: node 0 has 14 usable cores; choose 1 to 14"),
    ("r730", {"threads": 0}, "--threads 0: node 0 has 14 usable cores; choose 1 to 14"),
    ("offline-cpus", {"threads": 4}, "--threads 4: node 0 has 3 usable cores; choose 1 to 3"),
    ("laptop", {"virtual_nodes": 9}, "--virtual-nodes 9: there are 8 usable cores; choose 1 to 8"),
    ("laptop", {"virtual_nodes": 0}, "--virtual-nodes 0: there are 8 usable cores; choose 1 to 8"),
    (
        "r730",
        {"virtual_nodes": 2, "nodes": [0, 1]},
        "--virtual-nodes 2 divides the whole machine: leave out --nodes 0,1",
    ),
    (
        "r730",
        {"virtual_nodes": 2, "domain": "socket"},
        "--virtual-nodes 2 divides the whole machine: leave out --domain socket",
    ),
]


@pytest.mark.parametrize(("name", "wishes", "message"), REFUSALS)
def test_a_wish_that_cannot_be_met_is_refused_with_a_remedy(
    name: str, wishes: Wishes, message: str
) -> None:
    assert message in refusal(machine(name), **wishes)


def test_a_machine_without_any_fit_node_is_refused_with_every_reason() -> None:
    nowhere = replace(machine("cxl-memory-node"), allowed_mems=frozenset({2}))
    assert (
        "no NUMA node can hold a replica: "
        "node 0 has no memory that this process may use (cpuset.mems); "
        "node 1 has no memory that this process may use (cpuset.mems); "
        "node 2 has memory but no CPUs"
    ) == refusal(nowhere)


def test_numactl_binds_to_the_computing_cpus_and_their_memory_and_nothing_else() -> None:
    (first, _) = plan(machine("xeon-snc2"), nodes=[1, 0, 2], domain="socket").domains
    argv = ["numactl", "--all", "--physcpubind=1,2,5,6,3,4,7,8,9"]
    assert [*argv, "--membind=0,1", "--"] == numactl_argv(first, bind_memory=True)
    assert [*argv, "--"] == numactl_argv(first, bind_memory=False)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Any machine: ids in any order, nodes without cores or memory, any cpuset."""
    shapes = draw(st.lists(st.lists(st.integers(1, 4), max_size=16), min_size=1, max_size=5))
    count = sum(map(sum, shapes))
    ids = iter(draw(st.permutations(range(count))))
    numbers = draw(st.permutations(range(2 * len(shapes))))[: len(shapes)]
    nodes = []
    for number, shape in zip(sorted(numbers), shapes, strict=True):
        packages = draw(st.lists(st.integers(-1, 2), min_size=len(shape), max_size=len(shape)))
        cores = [
            Core((package, 0, core), tuple(sorted(next(ids) for _ in range(threads))))
            for core, (package, threads) in enumerate(zip(packages, shape, strict=True))
        ]
        memory = draw(st.sampled_from([0, 2**30]))
        nodes.append(Node(number, tuple(cores), memory, memory, {}))
    online = frozenset(range(count))
    allowed = draw(st.one_of(st.just(online), st.frozensets(st.sampled_from([*online, -1]))))
    mems = frozenset(draw(st.lists(st.sampled_from(numbers))) if draw(st.booleans()) else numbers)
    quota = draw(st.none() | st.floats(0.1, 64))
    return Topology(tuple(nodes), online, frozenset(), online & allowed, mems, cpu_quota=quota)


@given(
    topology=topologies(),
    wishes=st.fixed_dictionaries(
        {},
        optional={
            "nodes": st.none() | st.lists(st.integers(0, 9), max_size=3),
            "domain": st.sampled_from(["node", "socket"]),
            "virtual_nodes": st.none() | st.integers(0, 6),
            "threads": st.none() | st.integers(0, 16),
        },
    ),
)
def test_a_plan_never_shares_or_borrows_or_doubles_up(topology: Topology, wishes: Wishes) -> None:
    """Whatever the machine and the wishes: a refusal, or a plan that keeps every promise."""
    with suppress(PlacementError):
        made = plan(topology, **wishes)
        check(topology, made)
        assert wishes.get("virtual_nodes") in {None, len(made.domains)}
        assert {wishes.get("threads")} <= {None, *(len(d.compute_cpus) for d in made.domains)}
        nodes = wishes.get("nodes")
        if nodes is not None:
            assert sorted(nodes) == sorted(node for d in made.domains for node in d.nodes)


@given(topology=topologies(), domain=st.sampled_from(["node", "socket"]))
def test_a_machine_is_refused_only_if_no_node_is_fit(
    topology: Topology, domain: DomainKind
) -> None:
    fit = {
        node.id
        for node in topology.nodes
        if node.memory_total_bytes
        and node.id in topology.allowed_mems
        and topology.allowed_cpus.intersection(node.cpus)
    }
    if fit:
        made = plan(topology, domain=domain)
        assert fit == {node for d in made.domains for node in d.nodes}
        check(topology, made)
    else:
        assert refusal(topology, domain=domain).startswith("no NUMA node can hold a replica: ")


def check(topology: Topology, made: Plan) -> None:
    """What every plan promises."""
    core_of = {cpu: core for n in topology.nodes for core in n.cores for cpu in core.cpus}
    node_of = {cpu: node for node in topology.nodes for cpu in node.cpus}
    used = [
        cpu
        for d in made.domains
        for cpu in (*d.compute_cpus, *d.housekeeping_cpus, *d.idle_siblings)
    ]
    assert len(set(used)) == len(used), "no CPU has two jobs"
    assert topology.allowed_cpus >= set(used), "nothing that is barred"
    for d in made.domains:
        assert d.compute_cpus
        computing = [core_of[cpu] for cpu in d.compute_cpus]
        assert len(set(computing)) == len(computing), "one computing thread per core"
        assert {core_of[cpu] for cpu in d.idle_siblings} <= set(computing)
        assert not {core_of[cpu] for cpu in d.housekeeping_cpus} & set(computing)
        assert {node_of[cpu].id for cpu in (*d.compute_cpus, *d.housekeeping_cpus)} <= {*d.nodes}
        for node in topology.nodes:
            if node.id in d.nodes:
                assert node.memory_total_bytes
                assert node.id in topology.allowed_mems
    houses = {cpu for d in made.domains for cpu in d.housekeeping_cpus}
    assert (houses or topology.allowed_cpus) == set(made.gateway_cpus)
    assert len(made.domains) == len({d.index for d in made.domains})
