"""What the operating system says about the replicas of a running server."""

from pathlib import Path

import pytest

from tests.e2e.server import Server

pytestmark = pytest.mark.e2e


def allowed_cpus(pid: int) -> set[int]:
    """Return the CPUs any thread of the process may run on."""
    cpus: set[int] = set()
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        text = status.read_text().partition("Cpus_allowed_list:")[2].split()[0]
        for part in text.split(","):
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def test_replicas_never_share_a_cpu(server: Server) -> None:
    first, second = (allowed_cpus(row["pid"]) for row in server.replicas())

    assert first
    assert second
    assert first.isdisjoint(second)


def test_the_status_says_where_each_replica_is(server: Server) -> None:
    rows = server.replicas()

    assert ["replica-0", "replica-1"] == [row["id"] for row in rows]
    for row in rows:
        assert row["state"] == "ready"
        assert set(row["cpus"]) == allowed_cpus(row["pid"])
        assert row["memory_local_ratio"] >= 0.99
        assert row["kv_capacity_tokens"] == 8 * 4096


def test_no_weights_are_mapped_from_the_page_cache(server: Server) -> None:
    for row in server.replicas():
        maps = Path(f"/proc/{row['pid']}/maps").read_text()

        assert ".gguf" not in maps


def test_memory_is_bound_by_numactl(server: Server) -> None:
    """The policy is inherited from numactl: every large mapping says so."""
    for row in server.replicas():
        maps = Path(f"/proc/{row['pid']}/numa_maps").read_text().splitlines()

        assert any(" bind:0 " in line for line in maps)
