"""`/admin/status`: every key of the contract, and null where nothing is known."""

import io

from rich.console import Console

from gateway.modes import Mode
from gateway.status import render, status, store_status
from gateway.supervisor import ProcessState, Supervisor
from replica.kv_store import KvStore
from replica.wire import EnginePhase, Heartbeat, Load
from tests.fakes_gateway import CONTEXT_TOKENS, FakeReplica, ProxyBench, facts, frame, hello, job
from tests.test_control import A, B, Bench

ROW_KEYS = {
    "id", "node", "state", "pid", "cpus", "running", "waiting", "kv_used_tokens",
    "kv_capacity_tokens", "memory_local_ratio",
}  # fmt: skip
KEYS = {
    "mode", "mode_reason", "concurrency", "crossover", "profile", "replicas", "kv_store", "power",
}  # fmt: skip


def document(bench: Bench) -> dict[str, object]:
    proxy = ProxyBench(FakeReplica()).proxy
    supervisor = Supervisor(bench.control)
    mode = (Mode.SINGLE, "one placement domain")
    document = status(mode, bench.control, bench.dispatcher, proxy, supervisor)
    return document | {"kv_store": store_status(None)}


def rows(bench: Bench) -> list[dict[str, object]]:
    found = document(bench)["replicas"]
    assert isinstance(found, list)
    return found


def drawn(bench: Bench) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(render(document(bench)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_key_of_the_contract_is_there() -> None:
    bench = Bench(A, B)

    assert set(document(bench)) >= KEYS
    assert all(set(row) >= ROW_KEYS for row in rows(bench))
    assert [A, B] == [row["id"] for row in rows(bench)]


def test_what_is_not_known_is_null() -> None:
    (row,) = rows(Bench(A))

    unknown = ("pid", "cpus", "kv_capacity_tokens", "memory_local_ratio", "phase", "reason")
    assert {None} == {row[key] for key in unknown}
    assert "starting" == row["state"]


def test_a_connected_replica_tells_its_facts() -> None:
    bench = Bench(A)
    bench.control.connected(A, hello(about=facts(parallel=2)))
    bench.control.beat(A, Heartbeat(EnginePhase.DECODE, 0.0))
    assert bench.control.heard(A, frame(1, load=Load(1, 5, 30)))
    (row,) = rows(bench)

    assert ("ready", "decode", 4711, [0, 2]) == tuple(
        row[key] for key in ("state", "phase", "pid", "cpus")
    )
    assert (5, 30, 2 * CONTEXT_TOKENS, 1.0) == tuple(
        row[key]
        for key in ("waiting", "kv_used_tokens", "kv_capacity_tokens", "memory_local_ratio")
    )


def test_the_store_tells_its_books() -> None:
    assert store_status(None) is None
    with KvStore.create(1 << 20) as store:
        told = store_status(store)
        stats = store.stats()

    assert {
        "bytes": stats.bytes_used,
        "budget_bytes": stats.budget_bytes,
        "snapshots": 0,
        "evictions": 0,
    } == told


async def test_concurrency_is_what_runs_and_what_waits() -> None:
    bench = ProxyBench(FakeReplica(slots=1))
    control = Bench(A).control
    running = bench.proxy.generate(job("a"))
    await anext(running)
    waiting = bench.start(job("b"))
    while not bench.dispatcher.queued:
        await anext(running)
    said = status((Mode.SINGLE, ""), control, bench.dispatcher, bench.proxy, Supervisor(control))
    await running.aclose()
    await waiting

    assert (2, 1) == (said["concurrency"], said["waiting"])


def test_a_table_shows_state_and_reason() -> None:
    bench = Bench(A, B)
    bench.control.connected(A, hello())
    bench.control.process_changed(B, ProcessState.FAILED, "it exited with 2")
    table = drawn(bench)

    for shown in ("single (one placement domain)", "ready", "failed", "100.0%", "0,2"):
        assert shown in table
    assert f"{B}: it exited with 2" in table


def test_the_store_tells_what_it_holds() -> None:
    with KvStore.create(1 << 20) as store:
        told = store_status(store)

    assert told is not None
    assert {"bytes", "budget_bytes", "snapshots"} <= set(told)
    assert 0 == told["snapshots"]
    assert 1 << 20 == told["budget_bytes"]
