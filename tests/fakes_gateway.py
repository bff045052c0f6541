"""Working stand-ins for what the gateway's data plane stands on: replicas, and who counts."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from gateway.dispatch import Dispatcher
from gateway.link import ReplicaLostError
from gateway.prefix_index import PrefixIndex
from gateway.proxy import Done, Job, JobEvent, Placed, Proxy, Tokens
from gateway.routing import least_loaded
from replica.wire import (
    EnginePhase,
    Facts,
    Finished,
    FinishReason,
    Frame,
    Generate,
    Heartbeat,
    Hello,
    KvEvent,
    Load,
    Output,
    Sampling,
)
from tests.fakes import reference

EVENTUALLY_S = 30.0
FINGERPRINT = "model-a"
CONTEXT_TOKENS = 64
GREEDY = Sampling(seed=1, temperature=0.0)
TURNS_MAX = 1000
ROOT = 42
"""Of the proxy's block names."""
TOKENS_MAX = 6


async def until(condition: Callable[[], object]) -> None:
    """Let the other tasks run until this holds; for what needs no time, only turns."""
    for _ in range(TURNS_MAX):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the event loop turned in vain")


async def eventually(condition: Callable[[], object], what: str) -> None:
    """Wait until this holds; for what other processes and threads bring about."""
    try:
        async with asyncio.timeout(EVENTUALLY_S):
            while not condition():  # noqa: ASYNC110 - other processes set no Event
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"never came: {what}") from None


FACTS = Facts(
    replica_id="itself",
    node=0,
    pid=4711,
    cpus=[0, 2],
    threads=2,
    model_fingerprint=FINGERPRINT,
    context_tokens=CONTEXT_TOKENS,
    parallel=2,
    block_tokens=16,
    memory_local_ratio=1.0,
)


def facts(**changes: object) -> Facts:
    return msgspec.structs.replace(FACTS, **changes)


def hello(*blocks: int, about: Facts | None = None, version: int = 1, epoch: int = 1) -> Hello:
    return Hello(version, epoch, about or FACTS, list(blocks), Load(0, 0, 0))


def frame(seq: int, *events: KvEvent, load: Load | None = None) -> Frame:
    return Frame(seq=seq, load=load or Load(0, 0, 0), events=list(events))


def job(name: str, *token_ids: int, tokens_max: int = 6) -> Job:
    return Job(name, list(token_ids) or [1, 2, 3], tokens_max, GREEDY)


def expected(asked: Job) -> list[int]:
    """The completion this job must get, wherever and however often it is computed."""
    request = Generate(
        asked.request_id, asked.token_ids, len(asked.token_ids), asked.tokens_max, asked.sampling
    )
    return reference(request, CONTEXT_TOKENS)


@dataclass
class Course:
    """What happens to one request on a fake replica; nothing unusual by default."""

    lost_after: int | None = None
    """The connection breaks when so many tokens have been sent."""
    lost_before_finished: bool = False
    """The connection breaks between the last token and the news that it was the last."""
    finished: tuple[FinishReason, str | None] | None = None
    """Said instead of computing anything."""
    gate: asyncio.Event | None = None
    """Nothing comes before it is set."""
    cached_tokens: int = 0


class FakeReplica:
    """A `ReplicaClient` that computes what the real one would, and refuses what it would."""

    def __init__(self, slots: int = 2) -> None:
        self.slots = slots
        self.courses: deque[Course] = deque()
        """Of the next requests, in order."""
        self.requests: list[Generate] = []
        self.running: set[str] = set()
        self.cancelled: list[str] = []

    async def generate(self, request: Generate) -> AsyncGenerator[Output | Finished]:
        self._check(request)
        self.requests.append(request)
        self.running.add(request.request_id)
        course = self.courses.popleft() if self.courses else Course()
        over = False
        try:
            if course.gate is not None:
                await course.gate.wait()
            async for said in self._follow(request, course):
                over = isinstance(said, Finished)
                yield said
        except ReplicaLostError:
            over = True
            raise
        finally:
            self.running.remove(request.request_id)
            if not over:
                self.cancelled.append(request.request_id)

    def _check(self, request: Generate) -> None:
        assert request.request_id not in self.running
        assert len(self.running) < self.slots, "more at once than the replica offered"
        done = len(request.token_ids) - request.prompt_tokens
        assert 0 <= done < request.tokens_max, "no token is left to produce"

    async def _follow(self, request: Generate, course: Course) -> AsyncGenerator[Output | Finished]:
        name, prompt_tokens = request.request_id, request.prompt_tokens
        if course.finished is not None:
            reason, error = course.finished
            yield Finished(name, reason, prompt_tokens, 0, 0, error)
            return
        token_ids = reference(request, CONTEXT_TOKENS)
        for count, token_id in enumerate(token_ids):
            if count == course.lost_after:
                raise ReplicaLostError("the fake connection broke")
            cached = None if count else course.cached_tokens
            yield Output(name, [token_id], cached_tokens=cached)
            await asyncio.sleep(0)
        if course.lost_after is not None or course.lost_before_finished:
            raise ReplicaLostError("the fake connection broke at the end")
        total = len(request.token_ids) - prompt_tokens + len(token_ids)
        reason = FinishReason.LENGTH if total == request.tokens_max else FinishReason.STOP
        yield Finished(name, reason, prompt_tokens, course.cached_tokens, total)


@dataclass
class Counts:
    """A proxy's observer that remembers."""

    reasons: list[str] = field(default_factory=list)
    generated_tokens: dict[str, int] = field(default_factory=dict)

    def placed(self, reason: str, queue_s: float) -> None:
        assert queue_s >= 0
        self.reasons.append(reason)

    def generated(self, replica_id: str, count: int) -> None:
        assert count > 0
        self.generated_tokens[replica_id] = self.generated_tokens.get(replica_id, 0) + count


@dataclass
class Heard:
    """A link's listener that remembers, and finds gaps as the real one does."""

    hellos: list[Hello] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    phases: list[EnginePhase] = field(default_factory=list)
    losses: list[tuple[str, bool]] = field(default_factory=list)
    _seq: int = 0

    def connected(self, replica_id: str, hello: Hello) -> None:
        assert replica_id
        assert len(self.hellos) <= len(self.losses), "connected twice without a loss between"
        self.hellos.append(hello)
        self._seq = 0

    def heard(self, replica_id: str, frame: Frame) -> bool:
        assert replica_id
        self._seq += 1
        if frame.seq != self._seq:
            return False
        self.frames.append(frame)
        return True

    def beat(self, replica_id: str, heartbeat: Heartbeat) -> None:
        assert replica_id
        self.phases.append(heartbeat.phase)

    def lost(self, replica_id: str, reason: str, *, silent: bool) -> None:
        assert replica_id
        connected = len(self.hellos) > len(self.losses)
        assert connected or silent, "lost what was not connected"
        self.losses.append((reason, silent))


class ProxyBench:
    """A proxy on a real dispatcher, in front of fake replicas r0, r1 and so on."""

    def __init__(
        self, *replicas: FakeReplica, queue_max: int = 8, queue_timeout_s: float = 60.0
    ) -> None:
        self.replicas = {f"r{number}": replica for number, replica in enumerate(replicas)}
        self.index = PrefixIndex()
        self.dispatcher = Dispatcher(least_loaded, self.index, queue_max)
        self.counts = Counts()
        self.hopeless = False
        self.proxy = Proxy(
            self.dispatcher,
            self.replicas,
            self.counts,
            root=ROOT,
            mode=lambda: "data-parallel",
            hopeless=lambda: self.hopeless,
            queue_timeout_s=queue_timeout_s,
        )
        for name, replica in self.replicas.items():
            self.dispatcher.open(name, replica.slots)

    async def run(self, asked: Job) -> list[JobEvent]:
        async with aclosing(self.proxy.generate(asked)) as events:
            return [event async for event in events]

    def start(self, asked: Job) -> asyncio.Task[list[JobEvent]]:
        return asyncio.create_task(self.run(asked))

    def assert_at_rest(self) -> None:
        """Nothing runs, nothing waits, and every slot is free."""
        assert 0 == self.dispatcher.running
        assert 0 == self.dispatcher.queued
        assert all(not replica.running for replica in self.replicas.values())
        assert {} == self.proxy._placements
        assert self.proxy._idle.is_set()


def replica(*courses: Course, slots: int = 2) -> FakeReplica:
    made = FakeReplica(slots)
    made.courses.extend(courses)
    return made


def tokens_of(events: list[JobEvent]) -> list[int]:
    return [token for event in events if isinstance(event, Tokens) for token in event.token_ids]


def long_job(name: str = "job") -> Job:
    """Return a job that goes on to its last allowed token."""
    found = (job(name, 1, number, tokens_max=TOKENS_MAX) for number in range(1, 32))
    return next(asked for asked in found if len(expected(asked)) == TOKENS_MAX)


def short_job() -> Job:
    """Return a job whose model stops by itself, after some tokens."""
    found = (job("short", a, b, tokens_max=TOKENS_MAX) for a in range(1, 32) for b in range(1, 32))
    return next(asked for asked in found if 1 < len(expected(asked)) < TOKENS_MAX)


def assert_whole(asked: Job, events: list[JobEvent]) -> None:
    """Placed first, Done last, each once, and between them exactly the right tokens."""
    kinds = [type(event) for event in events]
    assert Placed is kinds[0]
    assert Done is kinds[-1]
    assert {Tokens} >= set(kinds[1:-1])
    assert expected(asked) == tokens_of(events)
    done = events[-1]
    assert isinstance(done, Done)
    assert done.reason == ("length" if len(expected(asked)) == asked.tokens_max else "stop")
