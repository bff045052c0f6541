"""`numaserve topology`: a machine and the plan for it, as tables or as JSON.

Shows what `replica.topology` read and `replica.placement` decided; decides nothing itself.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from replica.placement import DomainKind, PlacementDomain, PlacementError, Plan, plan
from replica.topology import (
    Node,
    Topology,
    TopologyError,
    format_cpu_list,
    read_topology,
    verify_with_libnuma,
)

EXIT_REFUSED = 2
LIVE_ROOT = Path("/")


def topology_command(  # noqa: PLR0913 - one for each option of the command
    sysfs_root: Path | None = None,
    *,
    nodes: Sequence[int] | None = None,
    domain: DomainKind = "node",
    virtual_nodes: int | None = None,
    threads: int | None = None,
    as_json: bool = False,
) -> int:
    """Print the machine and the plan; return the exit code.

    `sysfs_root` holds another machine's `sys` and `proc`; its `sys` itself will do as well.
    Without it the running machine is read, and libnuma is asked whether it agrees.
    """
    above = _above(sysfs_root)
    try:
        topology = read_topology(above / "sys", above / "proc")
        made = plan(
            topology, nodes=nodes, domain=domain, virtual_nodes=virtual_nodes, threads=threads
        )
    except (TopologyError, PlacementError) as error:
        sys.stderr.write(f"numaserve topology: {error}\n")
        return EXIT_REFUSED
    if above.resolve() == LIVE_ROOT:
        made = replace(made, notes=(*made.notes, *verify_with_libnuma(topology)))
    if as_json:
        sys.stdout.write(json.dumps(topology_json(topology, made), indent=2) + "\n")
    else:
        Console(file=sys.stdout, highlight=False).print(render(topology, made))
    return 0


def render(topology: Topology, made: Plan) -> RenderableType:
    """Tables that stay readable at 80 columns; long CPU lists wrap."""
    parts: list[RenderableType] = [
        _machine_table(topology),
        "",
        _plan_table(made),
        "",
        Text(f"The gateway runs on CPUs {_cpus(made.gateway_cpus)}."),
        *(Text(f"- {note}") for note in made.notes),
    ]
    return Group(*parts)


def topology_json(topology: Topology, made: Plan) -> dict[str, object]:
    """Everything the tables show, and the cores one by one."""
    return {
        "nodes": [_node_json(topology, node) for node in topology.nodes],
        "packages": {str(package): list(ids) for package, ids in topology.packages.items()},
        "cpus": {
            "online": sorted(topology.online),
            "offline": sorted(topology.offline),
            "allowed": sorted(topology.allowed_cpus),
        },
        "allowed_mems": sorted(topology.allowed_mems),
        "smt": topology.smt,
        "cpu_quota": topology.cpu_quota,
        "memory_limit_bytes": topology.memory_limit_bytes,
        "plan": {
            "domains": [_domain_json(domain) for domain in made.domains],
            "gateway_cpus": list(made.gateway_cpus),
        },
        "notes": list(made.notes),
    }


def _above(sysfs_root: Path | None) -> Path:
    """The directory that holds `sys` and `proc`."""
    if sysfs_root is None:
        return LIVE_ROOT
    is_sys = (sysfs_root / "devices/system").is_dir()
    return sysfs_root.resolve().parent if is_sys else sysfs_root


def _machine_table(topology: Topology) -> Table:
    table = _table("node", "socket", "cores", "CPUs", "siblings", "GiB", "free", "distances")
    for node in topology.nodes:
        table.add_row(
            str(node.id),
            _comma(node.packages) or "-",
            str(len(node.cores)),
            _cpus(core.cpus[0] for core in node.cores),
            _cpus(cpu for core in node.cores for cpu in core.cpus[1:]),
            f"{node.memory_total_bytes / 2**30:.1f}",
            f"{node.memory_free_bytes / 2**30:.1f}",
            " ".join(str(distance) for distance in node.distances.values()) or "-",
        )
    return table


def _plan_table(made: Plan) -> Table:
    table = _table("replica", "memory", "threads", "computes on", "housekeeping", "idle siblings")
    for domain in made.domains:
        table.add_row(
            str(domain.index),
            f"node {_comma(domain.nodes)}",
            str(len(domain.compute_cpus)),
            _cpus(domain.compute_cpus),
            _cpus(domain.housekeeping_cpus),
            _cpus(domain.idle_siblings),
        )
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in names:
        table.add_column(name)
    return table


def _cpus(cpus: Iterable[int]) -> str:
    """Blanks after the commas, so that a long list wraps between numbers and never within one."""
    return format_cpu_list(cpus).replace(",", ", ") or "-"


def _node_json(topology: Topology, node: Node) -> dict[str, object]:
    return {
        "id": node.id,
        "packages": list(node.packages),
        "cpus": list(node.cpus),
        "usable_cpus": sorted(topology.allowed_cpus.intersection(node.cpus)),
        "cores": [
            {"package": core.key[0], "die": core.key[1], "core": core.key[2], "cpus": [*core.cpus]}
            for core in node.cores
        ],
        "memory_total_bytes": node.memory_total_bytes,
        "memory_free_bytes": node.memory_free_bytes,
        "distances": {str(other): distance for other, distance in node.distances.items()},
    }


def _domain_json(domain: PlacementDomain) -> dict[str, object]:
    return {
        "index": domain.index,
        "nodes": list(domain.nodes),
        "compute_cpus": list(domain.compute_cpus),
        "housekeeping_cpus": list(domain.housekeeping_cpus),
        "idle_siblings": list(domain.idle_siblings),
        "virtual": domain.virtual,
    }


def _comma(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
