"""`numaserve topology`, from its wishes to what is printed."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from gateway import topology_table
from gateway.topology_table import render, topology_command, topology_json
from replica.placement import plan
from replica.topology import Topology, read_topology
from tests.fixtures.make_sysfs import MACHINES, SYSFS


def machine(name: str) -> Topology:
    return read_topology(SYSFS / name / "sys", SYSFS / name / "proc")


def printed(topology: Topology, width: int = 80) -> list[str]:
    console = Console(file=StringIO(), width=width, highlight=False)
    console.print(render(topology, plan(topology)))
    assert isinstance(console.file, StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_machine_of_eight_nodes_fits_eighty_columns() -> None:
    lines = printed(machine("epyc-nps4"))
    assert "node  socket  cores  CPUs   siblings  GiB   free  distances" == lines[0]
    assert "0     0       8      0-7    64-71     32.0  28.0  10 12 12 12 32 32 32 32" == lines[1]
    assert "replica  memory  threads  computes on  housekeeping  idle siblings" == lines[10]
    assert "0        node 0  7        1-7          0, 64         65-71" == lines[11]


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("width", [80, 100])
def test_a_long_cpu_list_wraps_between_numbers(name: str, width: int) -> None:
    """`1` at the end of a line and `2` on the next would be read as two CPUs."""
    lines = printed(machine(name), width)
    whole = printed(machine(name), 1000)
    assert set(" ".join(lines).split()) == set(" ".join(whole).split())


def test_what_does_not_exist_is_a_dash() -> None:
    lines = printed(machine("cxl-memory-node"))
    assert ["2", "-", "0", "-", "-", "128.0", "112.0", "14", "24", "10"] == lines[3].split()


def test_the_plan_ends_with_what_an_operator_should_know() -> None:
    lines = printed(machine("offline-cpus"))
    assert ["The gateway runs on CPUs 0, 4, 8, 12.", "- CPUs 3,11,13 are offline"] == lines[-2:]


def test_json_holds_every_core_and_the_plan() -> None:
    topology = machine("cpuset-half-node")
    found = topology_json(topology, plan(topology))
    assert found == json.loads(json.dumps(found)), "nothing that JSON would change"
    nodes, made, cpus = found["nodes"], found["plan"], found["cpus"]
    assert isinstance(nodes, list)
    assert {"package": 1, "die": 0, "core": 7, "cpus": [15, 31]} == nodes[1]["cores"][7]
    assert ([], [8, 9, 10, 11, 24, 25, 26, 27]) == tuple(node["usable_cpus"] for node in nodes)
    assert {"0": 21, "1": 10} == nodes[1]["distances"]
    assert isinstance(cpus, dict)
    assert ([], [8, 9, 10, 11, 24, 25, 26, 27]) == (cpus["offline"], cpus["allowed"])
    assert {
        "domains": [
            {
                "index": 0,
                "nodes": [1],
                "compute_cpus": [9, 10, 11],
                "housekeeping_cpus": [8, 24],
                "idle_siblings": [25, 26, 27],
                "virtual": False,
            }
        ],
        "gateway_cpus": [8, 24],
    } == made
    assert 24 * 2**30 == found["memory_limit_bytes"]


@pytest.mark.parametrize("below", ["", "sys"])
def test_another_machine_is_read_from_a_directory(
    capsys: pytest.CaptureFixture[str], below: str
) -> None:
    """It may hold `sys` and `proc`, or be that `sys`; the running machine has no part in it."""
    assert 0 == topology_command(SYSFS / "cpuset-half-node" / below, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert [1] == found["allowed_mems"]
    assert not any("libnuma" in note for note in found["notes"])


def test_every_wish_reaches_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    root = SYSFS / "xeon-snc2"
    assert 0 == topology_command(root, nodes=[2, 3], domain="socket", threads=4, as_json=True)
    (joined,) = json.loads(capsys.readouterr().out)["plan"]["domains"]
    assert ([2, 3], 4) == (joined["nodes"], len(joined["compute_cpus"]))
    assert 0 == topology_command(root, virtual_nodes=5, as_json=True)
    assert 5 == len(json.loads(capsys.readouterr().out)["plan"]["domains"])


def test_a_wish_that_cannot_be_met_is_one_line_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert 2 == topology_command(SYSFS / "laptop", nodes=[7])
    expected = "numaserve topology: --nodes 7: there is no NUMA node 7; this machine has node 0\n"
    assert ("", expected) == capsys.readouterr()


def test_a_directory_without_a_machine_is_one_line_on_stderr(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert 2 == topology_command(tmp_path)
    out, err = capsys.readouterr()
    assert ("", 1) == (out, err.count("\n"))
    assert err.endswith("sys/devices/system/cpu/online: No such file or directory\n")


def test_the_running_machine_is_checked_against_libnuma(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology_table, "verify_with_libnuma", lambda _: ["libnuma disagrees"])
    assert 0 == topology_command()
    assert capsys.readouterr().out.endswith("- libnuma disagrees\n")
