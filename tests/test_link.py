"""The link to a real replica server, and to partners that break the wire in every way."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path

import pytest
from numpy import float32
from numpy.typing import NDArray
from websockets.asyncio.server import ServerConnection, serve, unix_serve
from websockets.exceptions import ConnectionClosed

import gateway.link
from gateway.link import Address, ReplicaLink, ReplicaLostError
from replica.batch import Batch
from replica.engine import Engine, StepResult
from replica.kv_streams import KvStreams
from replica.limits import Limits
from replica.scheduler import Scheduler
from replica.server import ReplicaServer
from replica.wire import (
    WIRE_VERSION,
    Drain,
    EnginePhase,
    Finished,
    FinishReason,
    Generate,
    Heartbeat,
    Load,
    Output,
    Up,
    encode,
)
from tests.fakes import END_TOKEN_ID, FakeRunner, reference
from tests.fakes_gateway import CONTEXT_TOKENS, FACTS, GREEDY, Heard, eventually, frame, hello

SILENCE_MAX_S = 10.0
"""Nobody here is silent for so long, except in the tests about it."""
SHORT_SILENCE_S = 0.3
PARALLEL = 4


def request(name: str, *prompt: int, tokens_max: int = 8) -> Generate:
    token_ids = list(prompt) or [1, 2, 3]
    return Generate(name, token_ids, len(token_ids), tokens_max, GREEDY, ignore_eos=True)


async def collect(link: ReplicaLink, asked: Generate) -> tuple[list[int], Finished]:
    """Run a request to its end; return its tokens and the last word on it."""
    tokens: list[int] = []
    async with aclosing(link.generate(asked)) as said:
        async for each in said:
            if isinstance(each, Finished):
                return tokens, each
            tokens += each.token_ids
    raise AssertionError("a stream ended without Finished")


class GatedRunner(FakeRunner):
    """Computes so many batches as asked for, and the rest when let."""

    def __init__(self) -> None:
        super().__init__(PARALLEL, CONTEXT_TOKENS)
        self.gate = threading.Event()
        self.free_steps = 10**9
        self.begun = 0

    def decode(self, batch: Batch) -> list[NDArray[float32]]:
        self.begun += 1
        if self.begun > self.free_steps:
            assert self.gate.wait(30.0)
        return super().decode(batch)


class Served:
    """A real replica server with a real engine on a fake model."""

    def __init__(self, secret: str | None = None) -> None:
        self.runner = GatedRunner()
        self.server = ReplicaServer(secret)
        kv_streams = KvStreams(PARALLEL, 16, 7, trimmable=True)
        limits = Limits(
            context_tokens=CONTEXT_TOKENS,
            vocab_tokens=self.runner.vocab_tokens,
            batch_tokens_max=8,
            shared_chunk_tokens_max=4,
            waiting_max=64,
        )
        scheduler = Scheduler(kv_streams, limits, [END_TOKEN_ID])
        loop = asyncio.get_running_loop()

        def publish(result: StepResult) -> None:
            loop.call_soon_threadsafe(self.server.publish, result)

        self.engine = Engine(self.runner, scheduler, kv_streams, publish)

    def load(self) -> None:
        self.server.ready(self.engine, FACTS)

    @asynccontextmanager
    async def listening(self, address: str) -> AsyncIterator[None]:
        thread = threading.Thread(target=self.engine.run)
        async with self.server.listen(address):
            thread.start()
            try:
                yield
            finally:
                self.runner.gate.set()
                self.engine.send(Drain())
                await asyncio.to_thread(thread.join)


@asynccontextmanager
async def linked(
    url: str, secret: str | None = None, silence_max_s: float = SILENCE_MAX_S
) -> AsyncIterator[tuple[ReplicaLink, Heard]]:
    """Keep a link running for as long as the block; it must not end by itself."""
    heard = Heard()
    link = ReplicaLink("r0", Address(url, secret), heard, silence_max_s)
    task = asyncio.create_task(link.run())
    try:
        yield link, heard
    finally:
        assert not task.done(), "run never returns"
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/r.sock"


@pytest.fixture
async def served(url: str) -> AsyncIterator[Served]:
    replica = Served()
    replica.load()
    async with replica.listening(url):
        yield replica


@pytest.fixture
async def link(served: Served, url: str) -> AsyncIterator[tuple[ReplicaLink, Heard]]:
    assert served.server
    async with linked(url) as (made, heard):
        await eventually(lambda: heard.hellos, "a Hello")
        yield made, heard


Linked = tuple[ReplicaLink, Heard]


class TestRealReplica:
    async def test_it_greets_and_beats(self, link: Linked) -> None:
        _, heard = link
        assert [(WIRE_VERSION, FACTS, [])] == [(h.version, h.facts, h.blocks) for h in heard.hellos]
        await eventually(lambda: EnginePhase.IDLE in heard.phases, "a heartbeat")

    async def test_it_generates_what_it_would_alone(self, link: Linked) -> None:
        asked = request("a")
        tokens, finished = await collect(link[0], asked)

        assert reference(asked, CONTEXT_TOKENS) == tokens
        assert Finished("a", FinishReason.LENGTH, 3, 0, 8) == finished
        assert {} == link[0]._streams

    async def test_many_streams_do_not_mix(self, link: Linked) -> None:
        asked = [request(str(n), 1 + n % 5, 1 + n // 5) for n in range(40)]
        results = await asyncio.gather(*(collect(link[0], each) for each in asked))

        for each, (tokens, finished) in zip(asked, results, strict=True):
            assert reference(each, CONTEXT_TOKENS) == tokens
            assert each.request_id == finished.request_id
        assert [] == link[1].losses
        assert {} == link[0]._streams

    async def test_leaving_early_cancels(self, link: Linked, served: Served) -> None:
        """Otherwise the replica would compute for nobody, up to the last token."""
        served.runner.free_steps = 2
        async with aclosing(link[0].generate(request("a", tokens_max=50))) as said:
            await anext(said)
        await eventually(served.engine._inbox.qsize, "the Cancel, during a step")
        served.runner.gate.set()
        await eventually(lambda: link[1].frames[-1].load.running == 0, "an idle replica")

        finished = [each for frame in link[1].frames for each in frame.finished]
        assert [FinishReason.CANCELLED] == [each.reason for each in finished]
        assert {} == link[0]._streams

    async def test_leaving_after_the_end_cancels_nothing(self, link: Linked) -> None:
        posted = link[0]._outbox
        assert posted is not None
        await collect(link[0], request("a"))

        assert posted.empty()

    async def test_a_gateway_that_returns_gets_no_token_of_its_last_life(
        self, served: Served, url: str
    ) -> None:
        """
        The engine is in the middle of a step when the gateway connects anew and asks for the rest
        of the same request, under the same id. That step's token is not the next one it gets.
        """
        asked = request("a")
        whole = reference(asked, CONTEXT_TOKENS)
        served.runner.free_steps = 2
        received: list[int] = []
        async with linked(url) as (first, heard):
            await eventually(lambda: heard.hellos, "a Hello")
            async with aclosing(first.generate(asked)) as said:
                while len(received) < 2:
                    each = await anext(said)
                    assert isinstance(each, Output)
                    received += each.token_ids
                await eventually(lambda: served.runner.begun == 3, "a step to begin")
                first._outbox = None  # this gateway is dead and sends no Cancel
        rest = Generate("a", asked.token_ids + received, 3, 8, GREEDY, ignore_eos=True)
        async with linked(url) as (second, heard):
            await eventually(lambda: heard.hellos, "a Hello")
            going_on = asyncio.create_task(collect(second, rest))
            await eventually(lambda: second._outbox is not None and second._outbox.empty(), "sent")
            served.runner.gate.set()
            tokens, finished = await going_on

        assert whole == received + tokens
        assert FinishReason.LENGTH is finished.reason

    async def test_a_newer_gateway_takes_over(self, link: Linked, url: str) -> None:
        async with linked(url) as (_, heard):
            await eventually(lambda: heard.hellos, "a Hello for the second")
            await eventually(lambda: link[1].losses, "the first one's loss")

        reason, silent = link[1].losses[0]
        assert "another gateway has connected" in reason
        assert not silent


class TestConnecting:
    async def test_while_the_replica_loads_it_is_tried_again(
        self, url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG, "gateway.link")
        replica = Served()
        async with replica.listening(url), linked(url) as (_, heard):
            await eventually(lambda: "HTTP 503" in caplog.text, "a 503")
            assert [] == heard.hellos
            replica.load()
            await eventually(lambda: heard.hellos, "a Hello")

        assert [] == heard.losses, "what was never there cannot be lost"

    async def test_before_the_replica_listens_it_is_tried_again(
        self, url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG, "gateway.link")
        async with linked(url) as (_, heard):
            await eventually(lambda: "not reachable yet" in caplog.text, "a failure to connect")
            replica = Served()
            replica.load()
            async with replica.listening(url):
                await eventually(lambda: heard.hellos, "a Hello")

    async def test_over_tcp_the_secret_must_be_right(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        caplog.set_level(logging.DEBUG, "gateway.link")
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # not for our own replicas
        replica = Served(secret="right")  # noqa: S106 - a test's
        replica.load()
        async with serve(replica.server._converse, "127.0.0.1", 0) as spare:
            port = spare.sockets[0].getsockname()[1]
        url = f"tcp:127.0.0.1:{port}"
        async with replica.listening(url):
            for wrong in ("wrong", None):
                caplog.clear()
                async with linked(url, wrong) as (_, heard):
                    await eventually(lambda: "HTTP 401" in caplog.text, "a 401")
                    assert [] == heard.hellos
            async with linked(url, "right") as (link, heard):
                await eventually(lambda: heard.hellos, "a Hello")
                tokens, _ = await collect(link, request("a"))

        assert reference(request("a"), CONTEXT_TOKENS) == tokens

    async def test_without_a_connection_a_request_is_lost_at_once(self, url: str) -> None:
        async with linked(url) as (link, _):
            with pytest.raises(ReplicaLostError, match="r0 is not connected"):
                await collect(link, request("a"))
            assert {} == link._streams


Say = Callable[[ServerConnection], Awaitable[None]]


async def send(socket: ServerConnection, *messages: Up | bytes | str) -> None:
    for message in messages:
        await socket.send(message if isinstance(message, bytes | str) else encode(message))


async def stay(socket: ServerConnection) -> None:
    """Be a healthy, idle replica until the gateway leaves."""
    with suppress(ConnectionClosed):
        while True:
            await send(socket, Heartbeat(EnginePhase.IDLE, 0.0))
            await asyncio.sleep(0.02)


class Partner:
    """Something that listens where a replica should; says one thing per connection."""

    def __init__(self, *conversations: Say) -> None:
        self.conversations = list(conversations)
        self.connections = 0

    async def converse(self, socket: ServerConnection) -> None:
        self.connections += 1
        if self.conversations:
            await self.conversations.pop(0)(socket)
        else:
            await send(socket, hello())
        await stay(socket)

    @asynccontextmanager
    async def listening(self, url: str) -> AsyncIterator[None]:
        async with unix_serve(self.converse, url.removeprefix("unix:")):
            yield


def saying(*messages: Up | bytes | str) -> Say:
    async def say(socket: ServerConnection) -> None:
        await send(socket, *messages)

    return say


async def never(socket: ServerConnection) -> None:
    """Say nothing more; the gateway has to leave by itself."""
    await socket.wait_closed()


NONSENSE = [b"\xc1\xff garbage", b"", "text", encode(Load(0, 0, 0))]


class TestBrokenWire:
    @pytest.mark.parametrize("seqs", [(2,), (1, 3), (1, 1), (0,)])
    async def test_frames_out_of_order_start_anew(self, url: str, seqs: tuple[int, ...]) -> None:
        partner = Partner(saying(hello(), *(frame(seq) for seq in seqs)))
        async with partner.listening(url), linked(url) as (_, heard):
            await eventually(lambda: len(heard.hellos) == 2, "a second Hello")

        (reason, silent), *_ = heard.losses
        assert f"frame {seqs[-1]} came out of order" == reason
        assert not silent

    @pytest.mark.parametrize(
        "first",
        [
            hello(version=WIRE_VERSION + 1),
            hello(version=WIRE_VERSION - 1),
            Heartbeat(EnginePhase.IDLE, 0.0),
            frame(1),
            *NONSENSE,
        ],
    )
    async def test_who_does_not_greet_rightly_is_not_believed(
        self, url: str, first: Up | bytes | str
    ) -> None:
        partner = Partner(saying(first))
        async with partner.listening(url), linked(url) as (_, heard):
            await eventually(lambda: heard.hellos, "a right Hello, in the end")

        assert 2 == partner.connections
        assert [] == heard.losses

    @pytest.mark.parametrize("nonsense", NONSENSE)
    async def test_nonsense_ends_the_connection(self, url: str, nonsense: bytes | str) -> None:
        partner = Partner(saying(hello(), nonsense))
        async with partner.listening(url), linked(url) as (_, heard):
            await eventually(lambda: len(heard.hellos) == 2, "a second Hello")

        assert "not a message of wire version" in heard.losses[0][0]

    async def test_a_second_hello_ends_the_connection(self, url: str) -> None:
        partner = Partner(saying(hello(), hello()))
        async with partner.listening(url), linked(url) as (_, heard):
            await eventually(lambda: len(heard.hellos) == 2, "another connection")

        assert ("a second Hello", False) == heard.losses[0]

    async def test_who_never_greets_is_left(self, url: str) -> None:
        """A replica that hangs after the handshake must not hold its gateway for ever."""
        partner = Partner(never)
        async with partner.listening(url), linked(url, silence_max_s=0.05) as (_, heard):
            await eventually(lambda: heard.hellos, "a Hello from the second connection")

        assert [] == heard.losses

    @pytest.mark.parametrize("cut", ["abort", "close"])
    async def test_a_cut_ends_every_stream_and_connects_again(self, url: str, cut: str) -> None:
        cutting = asyncio.Event()

        async def say(socket: ServerConnection) -> None:
            await send(socket, hello(), frame(1))
            await cutting.wait()
            if cut == "abort":
                socket.transport.abort()
            else:
                await socket.close()

        async with Partner(say).listening(url), linked(url) as (link, heard):
            await eventually(lambda: heard.frames, "a frame")
            streams = [asyncio.create_task(collect(link, request(name))) for name in "abc"]
            await eventually(lambda: len(link._streams) == 3, "three streams")
            cutting.set()
            ends = await asyncio.gather(*streams, return_exceptions=True)
            assert [ReplicaLostError] * 3 == [type(end) for end in ends]
            assert {} == link._streams
            await eventually(lambda: len(heard.hellos) == 2, "a second Hello")

        assert not heard.losses[0][1], "who hung up is not silent"

    async def test_what_came_before_the_cut_is_still_heard(self, url: str) -> None:
        """A stream that has got its Finished has not lost anything."""

        async def say(socket: ServerConnection) -> None:
            await send(socket, hello())
            await socket.recv()
            outputs, last = [Output("a", [7])], [Finished("a", FinishReason.STOP, 3, 0, 1)]
            said = frame(1)
            await send(socket, type(said)(1, said.load, outputs, last))
            socket.transport.abort()

        async with Partner(say).listening(url), linked(url) as (link, heard):
            await eventually(lambda: heard.hellos, "a Hello")
            tokens, finished = await collect(link, request("a"))

        assert [7] == tokens
        assert FinishReason.STOP is finished.reason

    async def test_news_of_unknown_requests_is_nobodys(self, url: str) -> None:
        said = type(frame(1))(
            1, Load(0, 0, 0), [Output("x", [7])], [Finished("x", FinishReason.STOP, 3, 0, 1)]
        )
        partner = Partner(saying(hello(), said, frame(2)))
        async with partner.listening(url), linked(url) as (_, heard):
            await eventually(lambda: len(heard.frames) == 2, "both frames")

        assert [] == heard.losses


class TestSilence:
    async def test_who_stops_talking_is_lost_and_called_silent(self, url: str) -> None:
        async def say(socket: ServerConnection) -> None:
            await send(socket, hello())
            await never(socket)

        async with (
            Partner(say).listening(url),
            linked(url, silence_max_s=SHORT_SILENCE_S) as (link, heard),
        ):
            await eventually(lambda: heard.hellos, "a Hello")
            with pytest.raises(ReplicaLostError, match=r"r0: silent for \d"):
                await collect(link, request("a"))
            await eventually(lambda: len(heard.hellos) == 2, "a second Hello")

        (reason, silent), *_ = heard.losses
        assert "silent for" in reason
        assert silent

    async def test_heartbeats_are_enough(self, url: str) -> None:
        async with (
            Partner().listening(url),
            linked(url, silence_max_s=SHORT_SILENCE_S) as (_, heard),
        ):
            await eventually(lambda: len(heard.phases) > 40, "far more time than silence may last")

        assert [] == heard.losses


async def test_a_replica_that_reads_nothing_is_dropped(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    What cannot be sent cannot be kept for ever; dropping the connection ends the requests there.
    """
    monkeypatch.setattr(gateway.link, "OUTBOX_MAX", 4)
    enormous = [1] * 2_000_000  # more than the socket's buffers take

    async def say(socket: ServerConnection) -> None:
        socket.transport.pause_reading()
        await send(socket, hello())

    async with Partner(say).listening(url), linked(url) as (link, heard):
        await eventually(lambda: heard.hellos, "a Hello")
        streams = [asyncio.create_task(collect(link, request(str(n), *enormous))) for n in range(8)]
        ends = await asyncio.gather(*streams, return_exceptions=True)
        assert [ReplicaLostError] * 8 == [type(end) for end in ends]
        await eventually(lambda: len(heard.hellos) == 2, "a second Hello")

    assert ("more than 4 messages behind", False) == heard.losses[0]


def test_an_address_shows_its_secret_to_nobody_else() -> None:
    """It ends up in logs and tracebacks."""
    assert "hidden" not in repr(Address("tcp:h:1", "hidden"))
