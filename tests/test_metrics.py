"""What `/metrics` shows: the contract with dashboards, read from live objects."""

import json
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from gateway import operations
from gateway.control import Control
from gateway.dispatch import Dispatcher, Ticket
from gateway.metrics import (
    DURATION_BUCKETS_S,
    ITL_BUCKETS_S,
    NO_REPLICA,
    TTFT_BUCKETS_S,
    LiveCollector,
    Metrics,
)
from gateway.modes import Mode
from gateway.openai.edge import RequestRecord
from gateway.openai.routes import install
from gateway.prefix_index import PrefixIndex
from gateway.recorder import Recorder
from gateway.routing import REASONS, least_loaded
from gateway.supervisor import ProcessState
from replica.kv_store import KvStore
from replica.wire import Load
from tests.fakes_gateway import CONTEXT_TOKENS, FINGERPRINT, facts, frame, hello
from tests.fakes_openai import Bench as EdgeBench

STORE_BYTES = 1 << 20
A, B = "replica-0", "replica-1"
STUDY_TTFT_S = 166
"""The longest time to first token of the study the project rests on."""

CONTRACT: dict[str, tuple[str, set[str]]] = {
    "numaserve_requests": ("counter", {"mode", "replica", "code"}),
    "numaserve_time_to_first_token_seconds": ("histogram", set()),
    "numaserve_inter_token_latency_seconds": ("histogram", set()),
    "numaserve_request_duration_seconds": ("histogram", set()),
    "numaserve_queue_seconds": ("histogram", set()),
    "numaserve_prompt_tokens": ("counter", set()),
    "numaserve_prompt_tokens_cached": ("counter", {"tier"}),
    "numaserve_generation_tokens": ("counter", {"replica"}),
    "numaserve_requests_running": ("gauge", {"replica"}),
    "numaserve_requests_waiting": ("gauge", set()),
    "numaserve_kv_store_bytes": ("gauge", set()),
    "numaserve_kv_cache_usage_ratio": ("gauge", {"replica"}),
    "numaserve_mode": ("gauge", {"mode"}),
    "numaserve_replica_up": ("gauge", {"replica", "node"}),
    "numaserve_memory_local_ratio": ("gauge", {"replica"}),
    "numaserve_routing_decisions": ("counter", {"reason"}),
}
"""Of DESIGN.md's list, what is served now; the parser takes the `_total` off counters' names."""


class Bench:
    """Metrics on real objects, and what a scraper makes of them."""

    def __init__(self, mode: Mode = Mode.DATA_PARALLEL, store: KvStore | None = None) -> None:
        index = PrefixIndex()
        self.dispatcher = Dispatcher(least_loaded, index, queue_max=9)
        self.control = Control(
            [(A, 0), (B, 1)], self.dispatcher, index, FINGERPRINT, CONTEXT_TOKENS
        )
        self.metrics = Metrics()
        self.control.count_cached = self.metrics.cached
        live = LiveCollector(self.control, self.dispatcher, mode, store)
        self.metrics.registry.register(live)
        self.recorder = Recorder(self.metrics, mode.value)

    def text(self) -> str:
        return self.metrics.exposition().decode()

    def families(self) -> dict[str, Metric]:
        return {family.name: family for family in text_string_to_metric_families(self.text())}

    def values(self, name: str) -> dict[tuple[str, ...], float]:
        """Return the samples of this very name by their labels' values, in order of names."""
        return {
            tuple(value for _, value in sorted(sample.labels.items())): sample.value
            for family in self.families().values()
            for sample in family.samples
            if sample.name == name
        }

    def use_everything(self) -> None:
        """Make every metric of the contract have a sample."""
        self.control.connected(A, hello())
        self.metrics.placed("turn", 0.5)
        self.metrics.generated(A, 3)
        self.recorder.on_first_token(1.0)
        self.recorder.on_tokens(0.3, 2)
        self.recorder.on_request(record())


def record(**changes: Any) -> RequestRecord:  # noqa: ANN401 - of a record's many types
    return replace(
        RequestRecord(
            request_id="req-1",
            route="/v1/completions",
            replica_id=A,
            mode="data-parallel",
            code=200,
            outcome="ok",
            prompt_tokens=10,
            cached_tokens=4,
            completion_tokens=3,
            ttft_s=1.0,
            duration_s=2.0,
            finish_reasons=("stop",),
        ),
        **changes,
    )


@pytest.fixture
def used() -> Iterator[Bench]:
    """Yield a bench on which every metric of the contract has a sample."""
    with KvStore.create(STORE_BYTES) as store:
        bench = Bench(store=store)
        bench.use_everything()
        yield bench


@pytest.mark.parametrize("name", CONTRACT)
def test_every_name_of_the_contract_is_served(used: Bench, name: str) -> None:
    family = used.families()[name]
    kind, labels = CONTRACT[name]

    assert kind == family.type
    assert family.documentation
    assert family.samples
    for sample in family.samples:
        assert labels == set(sample.labels) - {"le"}


def test_nothing_of_ours_is_served_that_no_contract_names(used: Bench) -> None:
    """A dashboard cannot rely on it, and a test here would not miss it."""
    served = {name for name in used.families() if name.startswith("numaserve_")}

    assert set(CONTRACT) == {name for name in served if not name.endswith("_created")}


def test_the_process_tells_of_itself() -> None:
    families = Bench().families()

    assert {"process_resident_memory_bytes", "process_cpu_seconds", "python_info"} <= set(families)


def test_promtool_has_no_complaint(used: Bench) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    checked = subprocess.run(
        [promtool, "check", "metrics"],
        input=used.text(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert "" == checked.stdout + checked.stderr
    assert 0 == checked.returncode


@pytest.mark.parametrize("buckets", [TTFT_BUCKETS_S, ITL_BUCKETS_S, DURATION_BUCKETS_S])
def test_buckets_ascend(buckets: tuple[float, ...]) -> None:
    assert sorted(set(buckets)) == list(buckets)


@pytest.mark.parametrize("buckets", [TTFT_BUCKETS_S, DURATION_BUCKETS_S])
def test_buckets_reach_what_was_really_measured(buckets: tuple[float, ...]) -> None:
    """Beyond the last one every quantile is a lie."""
    assert STUDY_TTFT_S < buckets[-2]


class TestLive:
    def test_before_any_replica_what_is_unknown_is_absent(self) -> None:
        """A zero would say that the cache is empty, or all memory remote."""
        bench = Bench()

        assert {} == bench.values("numaserve_kv_cache_usage_ratio")
        assert {} == bench.values("numaserve_memory_local_ratio")
        assert {("0", A): 0, ("1", B): 0} == bench.values("numaserve_replica_up")
        assert {(A,): 0, (B,): 0} == bench.values("numaserve_requests_running")

    def test_a_ready_replica_is_up(self) -> None:
        bench = Bench()
        bench.control.connected(B, hello(about=facts(node=3)))

        assert {("0", A): 0, ("3", B): 1} == bench.values("numaserve_replica_up")

    def test_a_refused_replica_is_not_up(self) -> None:
        bench = Bench()
        bench.control.connected(A, hello(about=facts(refusal="no")))

        assert {0} == set(bench.values("numaserve_replica_up").values())

    def test_a_lost_replica_takes_its_facts_along(self) -> None:
        bench = Bench()
        bench.control.connected(A, hello())
        bench.control.lost(A, "gone", silent=False)
        bench.control.process_changed(A, ProcessState.FAILED, "gone for good")

        assert 0 == bench.values("numaserve_replica_up")["0", A]
        assert {} == bench.values("numaserve_kv_cache_usage_ratio")
        assert {} == bench.values("numaserve_memory_local_ratio")

    def test_cache_usage_is_a_share_of_all_cells(self) -> None:
        bench = Bench()
        bench.control.connected(A, hello(about=facts(parallel=4)))
        assert bench.control.heard(A, frame(1, load=Load(1, 0, CONTEXT_TOKENS)))

        assert {(A,): 0.25} == bench.values("numaserve_kv_cache_usage_ratio")

    def test_memory_that_cannot_be_measured_is_absent(self) -> None:
        bench = Bench()
        bench.control.connected(A, hello(about=facts(memory_local_ratio=None)))
        bench.control.connected(B, hello(about=facts(memory_local_ratio=0.5)))

        assert {(B,): 0.5} == bench.values("numaserve_memory_local_ratio")

    def test_running_and_waiting_are_those_of_the_dispatcher(self) -> None:
        bench = Bench()
        bench.control.connected(A, hello(about=facts(parallel=2)))
        for name in "abc":
            assert bench.dispatcher.submit(Ticket(name, ()))
        bench.dispatcher.assign()

        assert {(A,): 2, (B,): 0} == bench.values("numaserve_requests_running")
        assert {(): 1} == bench.values("numaserve_requests_waiting")

    def test_the_store_is_measured_where_there_is_one(self) -> None:
        assert {} == Bench().values("numaserve_kv_store_bytes")
        with KvStore.create(STORE_BYTES) as store:
            values = Bench(store=store).values("numaserve_kv_store_bytes")
            assert {(): store.stats().bytes_used} == values

    @pytest.mark.parametrize("mode", Mode)
    def test_exactly_one_mode_is_in_force(self, mode: Mode) -> None:
        values = Bench(mode).values("numaserve_mode")

        assert {(each.value,): float(each is mode) for each in Mode} == values


class TestRecorded:
    def test_a_request_is_counted_once_with_its_numbers(self) -> None:
        bench = Bench()
        bench.recorder.on_request(record(code=200))

        assert {("200", "data-parallel", A): 1} == bench.values("numaserve_requests_total")
        assert {(): 10} == bench.values("numaserve_prompt_tokens_total")
        assert {(): 1} == bench.values("numaserve_request_duration_seconds_count")
        assert {(): 2} == bench.values("numaserve_request_duration_seconds_sum")

    def test_a_request_that_reached_no_replica_computed_no_prompt(self) -> None:
        bench = Bench()
        bench.recorder.on_request(record(replica_id=None, mode=None, code=429))

        assert {("429", "data-parallel", NO_REPLICA): 1} == bench.values("numaserve_requests_total")
        assert {(): 0} == bench.values("numaserve_prompt_tokens_total")

    def test_cached_tokens_are_counted_by_tier_as_the_replica_tells(self) -> None:
        bench = Bench()
        bench.metrics.cached({"stream": 4, "store": 16})

        assert {("stream",): 4, ("copy",): 0, ("store",): 16} == bench.values(
            "numaserve_prompt_tokens_cached_total"
        )

    def test_the_store_is_on_show_where_there_is_one(self) -> None:
        assert {} == Bench().values("numaserve_kv_store_bytes")
        with KvStore.create(1 << 20) as store:
            bench = Bench(store=store)

            assert {(): store.stats().bytes_used} == bench.values("numaserve_kv_store_bytes")

    def test_placements_are_counted_by_reason(self) -> None:
        bench = Bench()
        before = bench.values("numaserve_routing_decisions_total")
        assert {(reason,): 0 for reason in REASONS} == before, "known reasons exist from the start"
        bench.metrics.placed("prefix", 0.25)
        bench.metrics.placed("prefix", 0.5)

        assert before | {("prefix",): 2} == bench.values("numaserve_routing_decisions_total")
        assert {(): 0.75} == bench.values("numaserve_queue_seconds_sum")

    def test_tokens_are_counted_by_replica(self) -> None:
        bench = Bench()
        bench.metrics.generated(A, 3)
        bench.metrics.generated(B, 2)
        bench.metrics.generated(A, 1)

        assert {(A,): 4, (B,): 2} == bench.values("numaserve_generation_tokens_total")

    def test_tokens_that_come_together_share_their_gap(self) -> None:
        """Else the mean of the histogram would be that of the writes, not of the tokens."""
        bench = Bench()
        bench.recorder.on_tokens(0.5, 4)

        assert {(): 4} == bench.values("numaserve_inter_token_latency_seconds_count")
        assert {(): 0.5} == bench.values("numaserve_inter_token_latency_seconds_sum")
        assert 4 == bench.values("numaserve_inter_token_latency_seconds_bucket")["0.15",]

    def test_a_first_token_is_observed_once(self) -> None:
        bench = Bench()
        bench.recorder.on_first_token(166.0)

        assert {(): 166} == bench.values("numaserve_time_to_first_token_seconds_sum")
        assert 0 == bench.values("numaserve_time_to_first_token_seconds_bucket")["160.0",]
        assert 1 == bench.values("numaserve_time_to_first_token_seconds_bucket")["320.0",]

    def test_the_access_log_has_a_line_with_everything(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", "numaserve.access")
        Bench().recorder.on_request(record(ttft_s=None, finish_reasons=("stop", "length")))
        (line,) = caplog.records

        told = {key: getattr(line, key) for key in ("id", "replica", "code", "ttft_s", "finish")}
        assert {
            "id": "req-1", "replica": A, "code": 200, "ttft_s": None, "finish": "stop,length",
        } == told  # fmt: skip


EVIL = "mallory"


def requests() -> Iterable[tuple[str, str, dict[str, object], dict[str, str]]]:
    """Everything a client can put its name into."""
    yield "POST", "/v1/completions", {"prompt": EVIL, "user": EVIL}, {"x-request-id": EVIL}
    yield "POST", "/v1/completions", {"prompt": EVIL, "model": EVIL}, {"user-agent": EVIL}
    yield "POST", "/v1/completions", {"prompt": "x", "stop": [EVIL]}, {"authorization": EVIL}
    yield "POST", "/v1/completions", {EVIL: EVIL}, {"x-forwarded-for": EVIL}
    yield "POST", f"/v1/{EVIL}?{EVIL}={EVIL}", {}, {"host": EVIL}
    yield "GET", f"/{EVIL}", {}, {"traceparent": EVIL}
    yield "PUT", "/v1/completions", {}, {"content-type": EVIL}


async def test_nothing_a_client_sends_becomes_a_label() -> None:
    """Each new label value is a new time series: a client could fill Prometheus's memory."""
    bench = Bench()
    api = FastAPI()
    install(api, replace(EdgeBench().edge, observe=bench.recorder))
    transport = httpx.ASGITransport(api, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
        for method, path, body, headers in requests():
            await client.request(method, path, json=body, headers=headers)

    assert bench.values("numaserve_requests_total"), "they were counted"
    assert EVIL not in bench.text()


class TestRoutes:
    """What probes, scrapers and operators ask."""

    async def get(self, bench: Bench, path: str) -> httpx.Response:
        api = FastAPI()
        api.include_router(operations.router(bench.control, bench.metrics, lambda: {"mode": "x"}))
        transport = httpx.ASGITransport(api)
        async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
            return await client.get(path)

    async def test_metrics_are_text_for_prometheus(self) -> None:
        response = await self.get(Bench(), "/metrics")

        assert 200 == response.status_code
        assert response.headers["content-type"].startswith("text/plain; version=")
        assert "numaserve_requests_waiting 0.0\n" in response.text

    async def test_health_is_that_the_process_answers(self) -> None:
        bench = Bench()
        bench.control.draining = True

        assert 200 == (await self.get(bench, "/health")).status_code

    async def test_ready_is_that_a_request_would_be_served(self) -> None:
        bench = Bench()
        response = await self.get(bench, "/ready")
        assert 503 == response.status_code
        states = {A: "starting", B: "starting"}
        assert {"status": "not ready", "replicas": states} == response.json()
        bench.control.connected(A, hello())
        assert 200 == (await self.get(bench, "/ready")).status_code
        bench.control.draining = True
        response = await self.get(bench, "/ready")

        assert 503 == response.status_code
        assert "draining" == response.json()["status"]

    async def test_status_is_the_document(self) -> None:
        response = await self.get(Bench(), "/admin/status")

        assert {"mode": "x"} == json.loads(response.text)
