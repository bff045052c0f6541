"""What the simulated machine is made of: an event loop without waiting, sockets, replicas.

The loop does not wait for its next timer but sets its clock forward to it. Replicas are the real
ones from the server down; only their model is fake.
"""

import asyncio
import selectors
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from hashlib import blake2b
from itertools import count
from typing import Any, Self, cast

import pytest
from websockets.exceptions import ConnectionClosedError

from replica.batch import Batch
from replica.engine import Engine, StepResult
from replica.kv_streams import KvStreams
from replica.limits import Limits
from replica.scheduler import News, Scheduler
from replica.server import ReplicaServer
from replica.wire import Facts
from tests.fakes import FakeRunner, Row

LATENCY_S = 0.0003
STEP_S, ROW_S = 0.008, 0.0005
"""What a step takes, and every token in it."""
OPEN_S = 1.0
"""What a gateway waits for the handshake."""


class _Timers(selectors.SelectSelector):
    """A selector to which nothing ever happens, except that time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise AssertionError("everybody waits, and nothing will ever happen again")
        self.now += timeout
        return []


class _Task(asyncio.Task[Any]):
    """A task whose place in a set does not depend on its address."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], number: int, **options: Any) -> None:  # noqa: ANN401
        self._number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own, and a trace of what was worth telling."""

    def __init__(self) -> None:
        self._timers = _Timers()
        super().__init__(self._timers)
        numbers = count()
        self.set_task_factory(
            lambda loop, coroutine, **options: _Task(
                cast("Any", coroutine), next(numbers), loop=loop, **options
            )
        )
        self._trace = blake2b(digest_size=8)
        self.lines: deque[str] = deque(maxlen=200)
        """The last lines of the trace, for whoever looks into a failure."""

    def time(self) -> float:
        return self._timers.now

    def tell(self, line: str) -> None:
        """Add to the trace."""
        timed = f"{self.time():.6f} {line}"
        self.lines.append(timed)
        self._trace.update(timed.encode())

    @property
    def trace(self) -> str:
        return self._trace.hexdigest()


class Clock:
    """What the modules under test get for `time`; a step of an engine may run ahead of the loop."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return self._loop.time() + self.ahead_s

    def time_ns(self) -> int:
        return int(self.monotonic() * 1e9)

    def sleep(self, seconds: float) -> None:
        raise AssertionError(f"somebody sleeps {seconds} s on the event loop")


@contextmanager
def simulated_time(loop: SimulatedLoop) -> Iterator[Clock]:
    """Give every module that looks at the clock the simulated one."""
    clock = Clock(loop)
    with pytest.MonkeyPatch.context() as patch:
        for module in ("gateway.link", "gateway.proxy", "replica.engine", "replica.server"):
            patch.setattr(f"{module}.time", clock)
        yield clock


class End:
    """One end of a connection; as much of a websocket as link and server use."""

    def __init__(self, may_speak: Callable[[], bool] = lambda: True) -> None:
        self.transport = self
        self.snapshots: dict[int, list[int]] = {}
        """The cache as of each frame sent from here."""
        self._may_speak = may_speak
        self._peer: End | None = None
        self._flying: deque[bytes] = deque()
        self._arrived: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._cut = asyncio.Event()
        self.lose_next = False

    def join(self, peer: "End") -> None:
        self._peer, peer._peer = peer, self

    async def send(self, data: bytes) -> None:
        if self._cut.is_set():
            raise ConnectionClosedError(None, None)
        if not self._may_speak():
            return
        if self.lose_next:
            self.lose_next = False
            return
        self._flying.append(data)
        asyncio.get_running_loop().call_later(LATENCY_S, self._land)

    def _land(self) -> None:
        if self._flying and self._peer is not None:
            self._peer._arrived.put_nowait(self._flying.popleft())

    async def recv(self) -> bytes:
        data = None if self._cut.is_set() else await self._arrived.get()
        if data is None:
            raise ConnectionClosedError(None, None)
        return data

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        return await self.recv()

    async def close(self, code: int = 1000, reason: str = "") -> None:
        assert code + len(reason) > 0
        self.abort()

    async def wait_closed(self) -> None:
        await self._cut.wait()

    def abort(self) -> None:
        """Cut the connection; what is on its way is lost, and both ends know at once."""
        for end in (self, self._peer):
            if end is not None and not end._cut.is_set():
                end._cut.set()
                end._flying.clear()
                end._arrived.put_nowait(None)


class TimedRunner(FakeRunner):
    """A fake model that takes its time: the clock runs ahead while it computes."""

    def __init__(self, facts: Facts, clock: Clock) -> None:
        super().__init__(facts.parallel, facts.context_tokens)
        self.clock = clock

    def decode(self, batch: Batch) -> list[Row]:
        self.clock.ahead_s += STEP_S + ROW_S * batch.rows
        return super().decode(batch)


class SteppedEngine(Engine):
    """The engine, its loop turned by the event loop instead of a thread."""

    def __init__(self, runner: TimedRunner, scheduler: Scheduler, kv_streams: KvStreams) -> None:
        self.results: list[StepResult] = []
        self.commanded = asyncio.Event()
        self._clock = runner.clock
        super().__init__(runner, scheduler, kv_streams, self.results.append)

    def send(self, command: Any) -> None:  # noqa: ANN401 - whatever the engine takes
        super().send(command)
        self.commanded.set()

    async def turn(self) -> StepResult | None:
        """Do what one turn of `run` does, and take as long as it would."""
        while self._scheduler.idle and self._inbox.empty():
            self.commanded.clear()
            await self.commanded.wait()
        news = News()
        for command in self._take_commands():
            self.obey(command, news)
        self.step(news)
        took_s, self._clock.ahead_s = self._clock.ahead_s, 0.0
        await asyncio.sleep(took_s)
        return self.results.pop() if self.results else None


class SimulatedReplica:
    """A replica process, from its start to its crash."""

    def __init__(self, facts: Facts, root: int, clock: Clock) -> None:
        self.facts = facts
        self.hung = False
        self.runner = TimedRunner(facts, clock)
        self.kv_streams = KvStreams(facts.parallel, facts.block_tokens, root, trimmable=True)
        limits = Limits(
            context_tokens=facts.context_tokens,
            vocab_tokens=self.runner.vocab_tokens,
            batch_tokens_max=8,
            shared_chunk_tokens_max=4,
            waiting_max=64,
        )
        self.scheduler = Scheduler(self.kv_streams, limits, self.runner.end_token_ids)
        self.engine = SteppedEngine(self.runner, self.scheduler, self.kv_streams)
        self.server = ReplicaServer(None)
        self.server.ready(self.engine, facts)
        self.ends: list[End] = []
        self._tasks: set[asyncio.Task[None]] = {asyncio.ensure_future(self._compute())}

    async def _compute(self) -> None:
        while True:
            result = await self.engine.turn()
            if self.hung:
                await asyncio.Event().wait()
            if result is not None:
                self.server.publish(result)
                if self.server._link is not None:
                    end = cast("End", self.server._link.socket)
                    end.snapshots[self.server._link.frames] = self.kv_streams.held_blocks()

    def accept(self) -> End:
        """Let a gateway connect; return its end."""
        ours, theirs = End(lambda: not self.hung), End()
        ours.join(theirs)
        self.ends.append(ours)
        self._tasks.add(asyncio.ensure_future(self.server._converse(cast("Any", ours))))
        return theirs

    def cut(self) -> None:
        """Break every connection; the process lives on."""
        for end in self.ends:
            end.abort()

    def lose_a_message(self) -> None:
        for end in self.ends:
            end.lose_next = True

    async def crash(self) -> None:
        self.hung = True
        for task in self._tasks:
            task.cancel()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def failures(self) -> list[BaseException]:
        """What broke in here by itself."""
        ended = [task for task in self._tasks if task.done() and not task.cancelled()]
        return [error for task in ended if (error := task.exception())]


class SimulatedAddress:
    """Where a replica listens, if one runs there now; stands for `gateway.link.Address`."""

    def __init__(self) -> None:
        self.replica: SimulatedReplica | None = None
        self.end: End | None = None
        """The gateway's end of the latest connection."""

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[End]:
        await asyncio.sleep(LATENCY_S)
        if self.replica is None:
            raise ConnectionRefusedError("nobody listens")
        if self.replica.hung:
            await asyncio.sleep(OPEN_S)
            raise TimeoutError("only the kernel answers")
        self.end = end = self.replica.accept()
        try:
            yield end
        finally:
            end.abort()

    def as_sent(self, seq: int) -> list[int]:
        """Return the cache as it was when the replica sent this frame."""
        assert self.end is not None
        assert self.end._peer is not None
        return self.end._peer.snapshots[seq]
