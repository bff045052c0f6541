"""The replica's side of the wire: real sockets, the real engine on its thread, the fake llama.cpp.

The model alone is missing, so that a test can stop it in the middle of a step.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import pytest
from websockets.asyncio.client import ClientConnection, connect, unix_connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from replica import server as server_module
from replica.batch import Batch
from replica.engine import CancelAll, Engine, StepResult
from replica.kv_streams import KvStreams
from replica.limits import Limits
from replica.scheduler import News, Scheduler
from replica.server import (
    CLOSE_NONSENSE,
    CLOSE_REPLACED,
    CLOSE_TOO_SLOW,
    FRAMES_PENDING_MAX,
    ReplicaServer,
)
from replica.wire import (
    WIRE_VERSION,
    Cancel,
    Down,
    Drain,
    EnginePhase,
    Evicted,
    Facts,
    Finished,
    FinishReason,
    Frame,
    Generate,
    Heartbeat,
    Hello,
    Load,
    Output,
    Sampling,
    Stored,
    Up,
    decode_up,
    encode,
)
from tests.fakes import END_TOKEN_ID, VOCAB_TOKENS, FakeRunner, Row, reference

CONTEXT_TOKENS = 256
PATIENCE_S = 20.0
LONG = Sampling(1, temperature=0.0, logit_bias={END_TOKEN_ID: -100.0})
FACTS = Facts("replica-7", 1, 4711, [2, 3], 2, "print", CONTEXT_TOKENS, 2, 16, 1.0)

T = TypeVar("T")


async def soon(work: Awaitable[T]) -> T:
    """What does not happen at all must fail, and not hang."""
    async with asyncio.timeout(PATIENCE_S):
        return await work


async def until(condition: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not condition():  # noqa: ASYNC110 - the server has no event to wait for
            await asyncio.sleep(0.001)

    await soon(wait())


class GatedRunner(FakeRunner):
    """Waits before every batch while its gate is closed; closes it after `stop_after` batches."""

    def __init__(self) -> None:
        super().__init__(2, CONTEXT_TOKENS, batch_tokens_max=64)
        self.gate = threading.Event()
        self.gate.set()
        self.inside = threading.Event()
        self.stop_after: int | None = None

    async def stopped(self) -> None:
        """Wait until a batch stands before the closed gate."""
        assert await asyncio.to_thread(self.inside.wait, PATIENCE_S)

    def decode(self, batch: Batch) -> list[Row]:
        if len(self.phases) == self.stop_after:
            self.gate.clear()
        if not self.gate.is_set():
            self.inside.set()
        assert self.gate.wait(PATIENCE_S)
        return super().decode(batch)


class Replica:
    """A replica without its process: engine and server, joined as `replica.__main__` does."""

    def __init__(self, folder: Path, secret: str | None = None) -> None:
        self.path = str(folder / "replica.sock")
        self.runner = GatedRunner()
        self.kv_streams = KvStreams(2, 16, 1, trimmable=True)
        limits = Limits(CONTEXT_TOKENS, VOCAB_TOKENS, 64, 16, 4)
        scheduler = Scheduler(self.kv_streams, limits, [END_TOKEN_ID])
        self.server = ReplicaServer(secret)
        self.engine = Engine(self.runner, scheduler, self.kv_streams, self.publish)
        self.loop = asyncio.get_running_loop()
        self.thread = threading.Thread(target=self.engine.run, daemon=True)

    def publish(self, result: StepResult) -> None:
        self.loop.call_soon_threadsafe(self.server.publish, result)

    def ready(self) -> None:
        self.server.ready(self.engine, FACTS)
        self.thread.start()

    async def end(self) -> None:
        self.runner.gate.set()
        if self.thread.ident is not None:
            self.engine.send(CancelAll(0))
            self.engine.send(Drain())
            await asyncio.to_thread(self.thread.join, PATIENCE_S)
            assert not self.thread.is_alive()

    async def get(self, path: str, **headers: str) -> httpx.Response:
        transport = httpx.AsyncHTTPTransport(uds=self.path)
        async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
            return await client.get(path, headers=headers)

    def connect(self, **options: Any) -> connect:  # noqa: ANN401 - websockets' own
        return unix_connect(self.path, uri="ws://replica/wire", max_queue=None, **options)


@asynccontextmanager
async def serving(folder: Path, secret: str | None = None) -> AsyncIterator[Replica]:
    replica = Replica(folder, secret)
    async with replica.server.listen(f"unix:{replica.path}"):
        try:
            yield replica
        finally:
            await replica.end()


@pytest.fixture
async def replica(tmp_path: Path) -> AsyncIterator[Replica]:
    async with serving(tmp_path) as replica:
        replica.ready()
        yield replica


async def heard(socket: ClientConnection) -> Up:
    data = await soon(socket.recv())
    assert isinstance(data, bytes)
    message: Up = decode_up(data)
    return message


async def hello_of(socket: ClientConnection) -> Hello:
    hello = await heard(socket)
    assert isinstance(hello, Hello)
    return hello


async def closed(socket: ClientConnection) -> int | None:
    """Listen to the end; return the code the connection was closed with."""

    async def listen() -> None:
        async for _ in socket:
            pass

    with suppress(ConnectionClosed):
        await soon(listen())
    return socket.close_code


async def say(socket: ClientConnection, *messages: Down) -> None:
    for message in messages:
        await socket.send(encode(message))


def generate(request_id: str, prompt: list[int], tokens_max: int = 6) -> Generate:
    return Generate(request_id, prompt, len(prompt), tokens_max, LONG)


async def frames_until(socket: ClientConnection, *request_ids: str) -> list[Frame]:
    """Everything said from here on, until these requests have ended."""
    frames: list[Frame] = []
    missing = set(request_ids)
    while missing:
        message = await heard(socket)
        if isinstance(message, Frame):
            frames.append(message)
            missing -= {finished.request_id for finished in message.finished}
    return frames


def outputs(frames: list[Frame], request_id: str) -> list[int]:
    said = [o for frame in frames for o in frame.outputs if o.request_id == request_id]
    return [token_id for output in said for token_id in output.token_ids]


def ends(frames: list[Frame]) -> dict[str, FinishReason]:
    return {end.request_id: end.reason for frame in frames for end in frame.finished}


# Probes


async def test_while_it_loads_it_is_alive_and_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path) as replica:
        assert (200, "ok\n") == ((await replica.get("/health")).status_code, "ok\n")
        status = (await replica.get("/status")).json()
        assert ("loading", False, 0) == (status["phase"], status["connected"], status["running"])
        with pytest.raises(InvalidStatus) as refused:
            async with replica.connect():
                pass
        assert 503 == refused.value.response.status_code


async def test_the_status_shows_facts_load_and_phase(replica: Replica) -> None:
    idle = (await replica.get("/status")).json()
    assert msgspec.to_builtins(FACTS).items() <= idle.items()
    assert ("idle", False) == (idle["phase"], idle["connected"])
    replica.runner.gate.clear()
    async with replica.connect() as socket:
        await hello_of(socket)
        await say(socket, generate("a", [1, 2, 3], 2))
        await replica.runner.stopped()
        busy = (await replica.get("/status")).json()
        assert ("prefill", True) == (busy["phase"], busy["connected"])
        replica.runner.gate.set()
        await frames_until(socket, "a")
        await until(lambda: replica.server.status()["phase"] == "idle")
        assert 4 == (await replica.get("/status")).json()["kv_used_tokens"]


async def test_other_paths_do_not_exist(replica: Replica) -> None:
    assert 404 == (await replica.get("/metrics")).status_code


async def test_the_wire_is_a_websocket(replica: Replica) -> None:
    assert 426 == (await replica.get("/wire")).status_code


@pytest.mark.parametrize("shown", [None, "Bearer wrong", "Bearer", "s3cret", "Bearer s3cret2"])
async def test_a_wrong_secret_opens_nothing_but_health(tmp_path: Path, shown: str | None) -> None:
    async with serving(tmp_path, "s3cret") as replica:
        replica.ready()
        headers = {} if shown is None else {"authorization": shown}
        assert 200 == (await replica.get("/health", **headers)).status_code
        for path in ("/status", "/wire", "/nothing"):
            assert 401 == (await replica.get(path, **headers)).status_code
        with pytest.raises(InvalidStatus) as refused:
            async with replica.connect(additional_headers=headers):
                pass
        assert 401 == refused.value.response.status_code


async def test_a_secret_in_strange_letters_is_wrong(tmp_path: Path) -> None:
    async with serving(tmp_path, "s3cret") as replica:
        replica.ready()
        reader, writer = await asyncio.open_unix_connection(replica.path)
        secret = b"Bearer s3cr\xe9t\xff"
        writer.write(b"GET /status HTTP/1.1\r\nHost: replica\r\nAuthorization: " + secret)
        writer.write(b"\r\n\r\n")
        assert b"HTTP/1.1 401 Unauthorized" == (await soon(reader.readline())).strip()
        writer.close()
        await writer.wait_closed()


async def test_the_right_secret_opens_everything(tmp_path: Path) -> None:
    async with serving(tmp_path, "s3cret") as replica:
        replica.ready()
        headers = {"authorization": "Bearer s3cret"}
        assert 200 == (await replica.get("/status", **headers)).status_code
        async with replica.connect(additional_headers=headers) as socket:
            assert FACTS == (await hello_of(socket)).facts


async def test_it_listens_on_tcp_too(tmp_path: Path, unused_tcp_port: int) -> None:
    replica = Replica(tmp_path, "s3cret")
    async with replica.server.listen(f"tcp:127.0.0.1:{unused_tcp_port}"):
        replica.ready()
        headers = {"authorization": "Bearer s3cret"}
        url = f"ws://127.0.0.1:{unused_tcp_port}/wire"
        async with connect(url, additional_headers=headers, proxy=None) as socket:
            assert WIRE_VERSION == (await hello_of(socket)).version
        await replica.end()


# The conversation


async def test_a_request_is_answered_in_frames_without_a_gap(replica: Replica) -> None:
    asked = [generate("a", [1, 2, 3]), generate("b", [4, 5])]
    async with replica.connect() as socket:
        await hello_of(socket)
        await say(socket, *asked)
        frames = await frames_until(socket, "a", "b")
    assert list(range(1, len(frames) + 1)) == [frame.seq for frame in frames]
    for request in asked:
        assert reference(request, CONTEXT_TOKENS) == outputs(frames, request.request_id)
    assert {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH} == ends(frames)
    assert Load(0, 0, 3 + 5 + 2 + 5) == frames[-1].load
    assert 3 + 5 + 2 + 5 == sum(frame.rows for frame in frames)
    assert all(frame.step_s > 0 for frame in frames if frame.rows)


async def test_a_connection_opens_with_the_complete_state(replica: Replica) -> None:
    """Whoever follows the events from a Hello knows the cache exactly."""
    known: set[int] = set()
    for number in range(4):
        async with replica.connect() as socket:
            hello = await hello_of(socket)
            assert sorted(known) == hello.blocks
            assert Load(0, 0, replica.kv_streams.used_tokens) == hello.load
            await say(socket, generate("a", [number + 1] * 40, 3))
            for frame in await frames_until(socket, "a"):
                for event in frame.events:
                    if isinstance(event, Stored):
                        known.update(event.blocks)
                    else:
                        known.difference_update(event.blocks)
            assert replica.kv_streams.held_blocks() == sorted(known)


async def test_every_connection_counts_its_frames_from_one(replica: Replica) -> None:
    for name in ("a", "b"):
        async with replica.connect() as socket:
            hello = await hello_of(socket)
            await say(socket, generate(name, [1, 2]))
            frames = await frames_until(socket, name)
        assert 1 == frames[0].seq
        assert replica.server._epoch == hello.epoch


async def test_a_cancelled_request_ends_and_the_other_goes_on(replica: Replica) -> None:
    async with replica.connect() as socket:
        await hello_of(socket)
        replica.runner.gate.clear()
        stays = generate("stays", [4, 5], 30)
        await say(socket, generate("leaves", [1, 2, 3], 30), stays, Cancel("leaves"))
        await say(socket, Cancel("never there"))
        replica.runner.gate.set()
        frames = await frames_until(socket, "stays", "leaves")
    assert {"stays": FinishReason.LENGTH, "leaves": FinishReason.CANCELLED} == ends(frames)
    assert reference(stays, CONTEXT_TOKENS) == outputs(frames, "stays")


async def test_heartbeats_come_in_the_middle_of_a_step(replica: Replica) -> None:
    """They tell the engine's phase; that a loop still turns beside it would mean nothing."""
    async with replica.connect() as socket:
        await hello_of(socket)
        idle = await heard(socket)
        assert isinstance(idle, Heartbeat)
        assert (EnginePhase.IDLE, 0.0) == (idle.phase, idle.step_ends_in_s)
        replica.runner.gate.clear()
        await say(socket, generate("a", [1, 2, 3], 2))
        beats: list[Heartbeat] = []
        while len(beats) < 3:
            message = await heard(socket)
            assert isinstance(message, Heartbeat)
            if message.phase is EnginePhase.PREFILL:
                beats.append(message)
        assert beats[2].step_ends_in_s < beats[1].step_ends_in_s < 0, "it is later and later"
        replica.runner.gate.set()
        await frames_until(socket, "a")


@pytest.mark.parametrize(
    "nonsense", [b"\x00", b"", "words", encode(Heartbeat(EnginePhase.IDLE, 0))]
)
async def test_a_message_without_sense_closes_the_connection(
    replica: Replica, nonsense: bytes | str
) -> None:
    async with replica.connect() as socket:
        await hello_of(socket)
        await say(socket, generate("a", [1, 2], 200))
        await socket.send(nonsense)
        assert CLOSE_NONSENSE == await closed(socket)
    async with replica.connect() as socket:
        await hello_of(socket)
        request = generate("a", [1, 2])
        await say(socket, request)
        assert reference(request, CONTEXT_TOKENS) == outputs(await frames_until(socket, "a"), "a")


async def test_a_gateway_that_leaves_takes_its_requests_with_it(replica: Replica) -> None:
    replica.runner.stop_after = 3
    async with replica.connect() as socket:
        await hello_of(socket)
        await say(socket, *(generate(str(n), [n + 1, 2], 250) for n in range(3)))
        await replica.runner.stopped()
        await until(lambda: replica.server.status()["running"] == 2)
        socket.transport.abort()
    await until(lambda: not replica.server.status()["connected"])
    replica.runner.gate.set()
    await until(lambda: replica.server.status()["running"] == 0)
    assert 0 == replica.server.status()["waiting"]
    assert 4 == len(replica.runner.phases), "the step that ran is the last"


# Two gateways


async def test_a_newer_gateway_takes_over(replica: Replica) -> None:
    async with replica.connect() as old, replica.connect() as new:
        await hello_of(old)
        await hello_of(new)
        assert CLOSE_REPLACED == await closed(old)
        request = generate("a", [1, 2])
        await say(new, request)
        assert reference(request, CONTEXT_TOKENS) == outputs(await frames_until(new, "a"), "a")


async def test_the_same_id_from_a_newer_gateway_is_another_request(replica: Replica) -> None:
    """
    A gateway that has lost its connection comes again with its requests, under their old ids,
    while the replica may still be computing them for the old connection. A token of that step must
    not be told as the new one's.
    """
    replica.runner.stop_after = 3
    async with replica.connect() as old:
        await hello_of(old)
        await say(old, generate("a", [1, 2], 200))
        await replica.runner.stopped()
        async with replica.connect() as new:
            await hello_of(new)
            request = generate("a", [1, 2], 5)
            await say(new, request)
            replica.runner.gate.set()
            frames = await frames_until(new, "a")
    assert reference(request, CONTEXT_TOKENS) == outputs(frames, "a")
    assert {"a": FinishReason.LENGTH} == ends(frames)
    assert list(range(1, len(frames) + 1)) == [frame.seq for frame in frames]


async def test_what_a_replaced_gateway_still_says_is_not_obeyed(replica: Replica) -> None:
    """It would count as its successor's wish."""
    async with replica.connect() as old:
        await hello_of(old)
        old.transport.pause_reading()  # it cannot know yet that it has been replaced
        new = await replica.connect()
        await hello_of(new)
        request = generate("a", [1, 2])
        replica.runner.gate.clear()
        await say(new, request)
        await say(old, Cancel("a"), Drain())
        async with asyncio.timeout(PATIENCE_S):
            await replica.get("/health")  # what was said has been read by now
        replica.runner.gate.set()
        assert reference(request, CONTEXT_TOKENS) == outputs(await frames_until(new, "a"), "a")
        again = generate("b", [1, 2])
        await say(new, again)
        assert {"b": FinishReason.LENGTH} == ends(await frames_until(new, "b"))
        await new.close()
        old.transport.abort()


async def test_of_gateways_that_come_at_once_the_last_one_stays(replica: Replica) -> None:
    sockets = await asyncio.gather(*(replica.connect() for _ in range(5)))
    await until(lambda: sum(socket.close_code is None for socket in sockets) == 1)
    (last,) = (socket for socket in sockets if socket.close_code is None)
    request = generate("a", [1, 2])
    await say(last, request)
    assert reference(request, CONTEXT_TOKENS) == outputs(await frames_until(last, "a"), "a")
    await last.close()


# Gateways that do not listen


def large_result(number: int) -> StepResult:
    """News that fills a socket's buffers soon."""
    events = [Stored(list(range(number * 1000, number * 1000 + 1000)))]
    return StepResult(News(), list(events), Load(0, 0, number), 1, 0.001, 0)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "CLOSE_S", 0.05)


async def deafen(replica: Replica, socket: ClientConnection) -> None:
    """Let the socket's reader stop, and fill what lies between until a write waits for it."""
    socket.transport.pause_reading()
    link = replica.server._link
    assert link is not None
    number = 0
    while link.outbox.qsize() < 50:
        replica.server.publish(large_result(number))
        number += 1
        await asyncio.sleep(0)


@pytest.mark.usefixtures("hasty")
async def test_a_deaf_gateway_does_not_keep_the_next_one_out(replica: Replica) -> None:
    deaf = await replica.connect()
    await hello_of(deaf)
    await deafen(replica, deaf)
    async with replica.connect() as new:
        hello = await hello_of(new)
        assert replica.server._mirror.blocks == set(hello.blocks)
        await say(new, generate("a", [1, 2]))
        await frames_until(new, "a")
    deaf.transport.abort()


@pytest.mark.usefixtures("hasty")
async def test_a_gateway_too_far_behind_is_dropped(replica: Replica) -> None:
    deaf = await replica.connect()
    await hello_of(deaf)
    await deafen(replica, deaf)
    for number in range(FRAMES_PENDING_MAX + 1):
        replica.server.publish(
            StepResult(News(), [Evicted([number])], Load(0, 0, number), 1, 0.001, 0)
        )
    await until(lambda: not replica.server.status()["connected"])
    deaf.transport.abort()
    async with replica.connect() as again:
        hello = await hello_of(again)
        assert replica.server._mirror.blocks == set(hello.blocks)


async def test_a_gateway_that_is_only_slow_is_told_why_it_is_dropped(replica: Replica) -> None:
    async with replica.connect() as slow:
        await hello_of(slow)
        for number in range(FRAMES_PENDING_MAX + 1):
            result = StepResult(News(), [], Load(0, 0, number), 1, 0.001, 0)
            replica.server.publish(result)
        assert CLOSE_TOO_SLOW == await closed(slow)


@pytest.mark.usefixtures("hasty")
async def test_a_deaf_gateway_that_talks_nonsense_is_dropped(replica: Replica) -> None:
    deaf = await replica.connect()
    await hello_of(deaf)
    await deafen(replica, deaf)
    await deaf.send(b"\x00")
    await until(lambda: not replica.server.status()["connected"])
    deaf.transport.abort()


# The end


async def test_a_drain_finishes_what_runs_and_refuses_what_comes(tmp_path: Path) -> None:
    async with serving(tmp_path) as replica:
        replica.ready()
        async with replica.connect() as socket:
            await hello_of(socket)
            replica.runner.gate.clear()
            runs = generate("runs", [1, 2, 3])
            await say(socket, runs, Drain(), generate("late", [1]))
            replica.runner.gate.set()
            frames = await frames_until(socket, "runs", "late")
            assert {"runs": FinishReason.LENGTH, "late": FinishReason.REFUSED} == ends(frames)
            assert reference(runs, CONTEXT_TOKENS) == outputs(frames, "runs")
            await asyncio.to_thread(replica.thread.join, PATIENCE_S)
            assert not replica.thread.is_alive()


async def test_at_the_end_a_slow_gateway_hears_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    The last Finished must not be lost between the engine's end and the socket's; and when all is
    said, nothing more is waited for.
    """
    monkeypatch.setattr(server_module, "CLOSE_S", 3600.0)
    async with asyncio.TaskGroup() as group:
        async with serving(tmp_path) as replica:
            replica.ready()
            socket = await replica.connect()
            await hello_of(socket)
            await deafen(replica, socket)
            audience = replica.server._audience
            news = News([Output("a", [1])], [Finished("a", FinishReason.STOP, 1, 0, 1)])
            replica.server.publish(StepResult(news, [], Load(0, 0, 0), 1, 0.001, audience))
            listening = group.create_task(frames_until(socket, "a"))
            asyncio.get_running_loop().call_later(0.01, socket.transport.resume_reading)
        frames = await listening
    assert {"a": FinishReason.STOP} == ends(frames)
    await socket.close()


@pytest.mark.usefixtures("hasty")
async def test_a_deaf_gateway_does_not_hold_up_the_end(tmp_path: Path) -> None:
    async def begin_and_end() -> ClientConnection:
        async with serving(tmp_path) as replica:
            replica.ready()
            deaf = await replica.connect()
            await hello_of(deaf)
            await deafen(replica, deaf)
        return deaf

    (await soon(begin_and_end())).transport.abort()
