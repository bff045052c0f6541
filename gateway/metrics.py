"""Everything on `/metrics`: live objects are read when scraped, only the data plane is recorded.

Names are the contract with dashboards; a label never holds anything a client sent. Buckets fit
inference on CPUs, where a first token may take minutes and a request an hour.
"""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from gateway.control import Control, ReplicaState
from gateway.dispatch import Dispatcher
from gateway.modes import Mode
from gateway.routing import REASONS
from replica.kv_store import KvStore

CACHE_TIERS = ("stream", "copy", "store")
NO_REPLICA = "none"
"""The `replica` label of requests that never reached one."""
# fmt: off
TTFT_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 7.5,
    10, 20, 40, 80, 160, 320, 640, 1280, 2560,
)
ITL_BUCKETS_S = (
    0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1, 2.5, 5, 10, 20, 40, 80,
)
DURATION_BUCKETS_S = (
    0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60,
    120, 240, 480, 960, 1920, 3840, 7680,
)
# fmt: on


class Metrics:
    """What the data plane records, and the registry that `/metrics` shows."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._requests = Counter(
            "numaserve_requests_total",
            "Requests by the HTTP status they ended with; 499 is a client that left.",
            ["mode", "replica", "code"],
            registry=registry,
        )
        self._ttft = _histogram(
            "numaserve_time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS_S, self
        )
        self._itl = _histogram(
            "numaserve_inter_token_latency_seconds",
            "Between two tokens of one stream, as sent to the client.",
            ITL_BUCKETS_S,
            self,
        )
        self._duration = _histogram(
            "numaserve_request_duration_seconds", "Arrival to end.", DURATION_BUCKETS_S, self
        )
        self._queue = _histogram(
            "numaserve_queue_seconds", "Waiting for a replica.", TTFT_BUCKETS_S, self
        )
        self._prompt_tokens = Counter(
            "numaserve_prompt_tokens_total", "Tokens of served prompts.", registry=registry
        )
        self._cached_tokens = Counter(
            "numaserve_prompt_tokens_cached_total",
            "Prompt tokens not computed: left in their stream, copied from one, or from the store.",
            ["tier"],
            registry=registry,
        )
        for tier in CACHE_TIERS:
            self._cached_tokens.labels(tier)
        self._generated = Counter(
            "numaserve_generation_tokens_total", "Tokens generated.", ["replica"], registry=registry
        )
        self._decisions = Counter(
            "numaserve_routing_decisions_total",
            "Placements by what decided them.",
            ["reason"],
            registry=registry,
        )
        for reason in REASONS:
            self._decisions.labels(reason)
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)

    def placed(self, reason: str, queue_s: float) -> None:
        self._decisions.labels(reason).inc()
        self._queue.observe(queue_s)

    def generated(self, replica_id: str, count: int) -> None:
        self._generated.labels(replica_id).inc(count)

    def cached(self, tokens: Mapping[str, int]) -> None:
        """Count prompt tokens that a replica need not compute, by tier."""
        for tier, count in tokens.items():
            self._cached_tokens.labels(tier).inc(count)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def tokens(self, gap_s: float, count: int) -> None:
        """`count` tokens of one stream came `gap_s` after the ones before them."""
        for _ in range(count):
            self._itl.observe(gap_s / count)

    def ended(  # the labels and numbers of one request
        self,
        *,
        mode: str,
        replica_id: str | None,
        code: int,
        duration_s: float,
        prompt_tokens: int,
    ) -> None:
        self._requests.labels(mode, replica_id or NO_REPLICA, str(code)).inc()
        self._duration.observe(duration_s)
        if replica_id is not None:
            self._prompt_tokens.inc(prompt_tokens)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


class LiveCollector(Collector):
    """Reads the control plane's objects at scrape time; never asks a replica."""

    def __init__(
        self, control: Control, dispatcher: Dispatcher, mode: Mode, store: KvStore | None = None
    ) -> None:
        self._control = control
        self._dispatcher = dispatcher
        self._mode = mode
        self._store = store

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "numaserve_requests_waiting",
            "Requests that wait for a replica.",
            value=self._dispatcher.queued,
        )
        mode = GaugeMetricFamily("numaserve_mode", "1 for the mode in force.", labels=["mode"])
        for each in Mode:
            mode.add_metric([each.value], float(each is self._mode))
        yield mode
        if self._store is not None:
            used = self._store.stats().bytes_used
            yield GaugeMetricFamily("numaserve_kv_store_bytes", "Held by snapshots.", value=used)
        yield from self._per_replica()

    def _per_replica(self) -> Iterable[Metric]:
        up = _per_replica_gauge("replica_up", "1 when the replica may get requests.", "node")
        running = _per_replica_gauge("requests_running", "Requests placed on the replica.")
        usage = _per_replica_gauge(
            "kv_cache_usage_ratio", "Share of its KV cells that hold tokens."
        )
        local = _per_replica_gauge("memory_local_ratio", "Share of its memory on its own nodes.")
        for name, replica in self._control.replicas.items():
            ready = replica.state is ReplicaState.READY
            up.add_metric([name, str(replica.node)], float(ready))
            running.add_metric([name], self._dispatcher.inflight(name))
            if replica.facts is None:
                continue  # what cannot be read is absent, never zero
            capacity = replica.facts.parallel * replica.facts.context_tokens
            usage.add_metric([name], replica.load.kv_used_tokens / capacity)
            if replica.facts.memory_local_ratio is not None:
                local.add_metric([name], replica.facts.memory_local_ratio)
        yield from (up, running, usage, local)


def _per_replica_gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"numaserve_{name}", text, labels=["replica", *labels])


def _histogram(name: str, text: str, buckets: tuple[float, ...], metrics: Metrics) -> Histogram:
    return Histogram(name, text, buckets=buckets, registry=metrics.registry)
