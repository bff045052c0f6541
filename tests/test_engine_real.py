"""The engine on the real llama.cpp and the demo model, under random company.

Company changes the order in which llama.cpp adds numbers up, and so the last bits of a logit.
Each request must get the tokens of an undisturbed run, or have met a tie: two candidates no further
apart than those last bits. How large they are is measured here, and bounded.
"""

from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import replica.demo
from replica.batch import Batch, Chunk, Cut
from replica.blocks import BLOCK_TOKENS
from replica.engine import Engine, StepResult
from replica.kv_store import KvStore
from replica.kv_streams import KvStreams
from replica.limits import Limits
from replica.llama import Llama, LlamaOptions
from replica.pace import Pace
from replica.sampling import Sampler
from replica.scheduler import News, Scheduler
from replica.sequence import Sequence
from replica.snapshots import ReplicaSnapshots
from replica.step_curve import StepCurve
from replica.wire import Cancel, EnginePhase, Generate, Sampling

pytestmark = pytest.mark.model

MODEL = Path(replica.demo.__file__).with_name("demo.gguf")
CONTEXT_TOKENS = 256
STREAMS = 4
ROOT = 1
TIE = 0.5
"""Logits nearer than this may change places. The largest difference seen was 0.17, between a prompt
read at once and in chunks: from 64 rows on llama.cpp computes attention by another kernel."""
GREEDY = Sampling(seed=1, temperature=0.0)
ROWS_ARE_CHEAP = StepCurve({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.3})
"""So that gaps are filled and tokens guessed wherever that is possible."""


@dataclass
class Bench:
    """One loaded model; an engine around it for every example."""

    llama: Llama
    store: KvStore
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)

    def engine(self) -> tuple[Engine, Scheduler]:
        """Return an engine whose streams are as the last example left them: full of leftovers."""
        self.tokens, self.ended = {}, set()
        for stream_id in range(STREAMS):
            self.llama.move(Cut(stream_id, 0))
        streams = KvStreams(STREAMS, BLOCK_TOKENS, ROOT, trimmable=self.llama.trimmable)
        limits = Limits(CONTEXT_TOKENS, self.llama.vocab_tokens, 64, 16, 100)
        snapshots = ReplicaSnapshots(self.store, 7, ROOT, BLOCK_TOKENS)
        pace = Pace(ROWS_ARE_CHEAP)
        scheduler = Scheduler(streams, limits, self.llama.end_token_ids, pace, snapshots)
        return Engine(self.llama, scheduler, streams, self.publish), scheduler

    def publish(self, result: StepResult) -> None:
        for output in result.news.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
        for finished in result.news.finished:
            assert finished.request_id not in self.ended
            self.ended.add(finished.request_id)

    def alone(self, request: Generate) -> list[int]:
        engine, scheduler = self.engine()
        run(engine, scheduler, [request])
        return self.tokens.get(request.request_id, [])

    def logits(self, token_ids: list[int]) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
        self.llama.move(Cut(0, 0))
        request = Generate("x", token_ids, len(token_ids), 1, GREEDY)
        sampler = Sampler(GREEDY, [], ignore_eos=False, prompt=token_ids, completion=[])
        sequence = Sequence(request, sampler)
        sequence.stream_id = 0
        (row,) = self.llama.decode(
            Batch(EnginePhase.PREFILL, [Chunk(sequence, len(token_ids))], [])
        )
        return row.copy()


@pytest.fixture(scope="module")
def bench() -> Generator[Bench]:
    with KvStore.create(32 << 20) as store:
        snapshots = ReplicaSnapshots(store, 7, ROOT, BLOCK_TOKENS)
        llama = Llama(LlamaOptions(MODEL, CONTEXT_TOKENS, STREAMS, threads=1), snapshots)
        yield Bench(llama, store)
        llama.close()


def run(
    engine: Engine,
    scheduler: Scheduler,
    requests: list[Generate],
    actions: list[tuple[int, int]] | None = None,
) -> None:
    """Submit requests one by one between steps, cancelling some, until all have ended.

    An action is (steps before the next request, index of a request to cancel or -1).
    """
    for number, request in enumerate(requests):
        news = News()
        engine.obey(request, news)
        engine.step(news)
        steps, victim = actions[number] if actions else (0, -1)
        for _ in range(steps):
            engine.step(News())
        if victim >= 0:
            news = News()
            engine.obey(Cancel(str(victim)), news)
            engine.step(news)
    while not scheduler.idle:
        engine.step(News())


texts = st.lists(st.integers(300, 1900), min_size=1, max_size=70)


@st.composite
def companies(draw: st.DrawFn) -> tuple[list[Generate], list[tuple[int, int]]]:
    """Requests that share beginnings, and when each arrives or is cancelled."""
    beginnings = [draw(texts) for _ in range(2)]
    count = draw(st.integers(2, 7))
    requests = []
    for number in range(count):
        prompt = [*draw(st.sampled_from(beginnings)), *draw(texts)][:150]
        length = draw(st.integers(1, 24))
        requests.append(Generate(str(number), prompt, len(prompt), length, GREEDY, ignore_eos=True))
    steps = st.integers(0, 8)
    victims = st.one_of(st.just(-1), st.just(-1), st.integers(0, count - 1))
    return requests, draw(st.lists(st.tuples(steps, victims), min_size=count, max_size=count))


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(companies())
def test_company_changes_no_token_but_in_a_tie(
    bench: Bench, company: tuple[list[Generate], list[tuple[int, int]]]
) -> None:
    requests, actions = company
    engine, scheduler = bench.engine()
    run(engine, scheduler, requests, actions)
    got, ended = dict(bench.tokens), set(bench.ended)

    assert {request.request_id for request in requests} == ended
    for request in requests:
        tokens = got.get(request.request_id, [])
        expected = bench.alone(request)[: len(tokens)]
        if tokens != expected:
            assert_tie(bench, request, expected, tokens)


def assert_tie(bench: Bench, request: Generate, expected: list[int], got: list[int]) -> None:
    first = next(i for i, pair in enumerate(zip(expected, got, strict=True)) if pair[0] != pair[1])
    row = bench.logits([*request.token_ids, *expected[:first]])
    row[bench.llama.end_token_ids] = -np.inf

    assert row[got[first]] >= row.max() - TIE, f"{request.request_id} at token {first}"


def test_the_last_bits_are_smaller_than_what_counts_as_a_tie(bench: Bench) -> None:
    """Read at once, and in chunks of 16 beside another prompt: how far apart logits come."""
    text = [int(token) for token in np.random.default_rng(5).integers(300, 1900, 120)]
    whole = bench.logits(text)
    engine, scheduler = bench.engine()
    requests = [Generate(str(n), text[n * 7 :], 120 - n * 7, 8, GREEDY) for n in range(3)]
    run(engine, scheduler, requests)
    again = bench.logits(text)
    differences = [float(np.abs(whole - again).max())]
    for size in (1, 16, 33):
        bench.llama.move(Cut(1, 0))
        differences.append(float(np.abs(whole - chunked(bench, text, size)).max()))

    assert max(differences) < TIE


def chunked(
    bench: Bench, text: list[int], size: int
) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    request = Generate("x", text, len(text), 1, GREEDY)
    sampler = Sampler(GREEDY, [], ignore_eos=False, prompt=text, completion=[])
    sequence = Sequence(request, sampler)
    sequence.stream_id = 1
    rows = []
    while sequence.pending_tokens:
        chunk = Chunk(sequence, min(size, sequence.pending_tokens))
        rows = bench.llama.decode(Batch(EnginePhase.PREFILL, [chunk], []))
        sequence.computed_tokens += chunk.size
    return rows[0].copy()
