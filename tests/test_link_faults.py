"""The link to partners that break the wire in every way they can."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from socket import AF_UNIX
from socket import socket as UnixSocket  # noqa: N812 - a partner's is called socket here

import pytest
from websockets.asyncio.server import ServerConnection, unix_serve
from websockets.exceptions import ConnectionClosed

import gateway.link
from gateway.link import ReplicaLostError
from replica.wire import (
    WIRE_VERSION,
    EnginePhase,
    Finished,
    FinishReason,
    Heartbeat,
    Load,
    Output,
    Up,
    encode,
)
from tests.fakes_gateway import eventually, frame, hello
from tests.fakes_link import collect, linked, request

SHORT_SILENCE_S = 0.3


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/r.sock"


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

    async def test_after_the_loss_a_request_is_lost_at_once(self, url: str) -> None:
        """It must not wait for a connection that may never come."""

        async def say(socket: ServerConnection) -> None:
            await send(socket, hello())
            socket.transport.abort()

        async with linked(url) as (link, heard):
            async with Partner(say).listening(url):
                await eventually(lambda: heard.losses, "a loss")
            await eventually(lambda: len(heard.hellos) == len(heard.losses), "the last loss")
            with pytest.raises(ReplicaLostError, match="r0 is not connected"):
                await collect(link, request("a"))

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

    async def test_who_never_greets_is_silent(self, url: str) -> None:
        """A replica that hangs after the handshake must not hold its gateway for ever."""
        async with Partner(never).listening(url), linked(url, silence_max_s=0.05) as (_, heard):
            await eventually(lambda: heard.hellos, "a Hello from the second connection")

        assert [("it listens, but does not answer", True)] == heard.losses

    async def test_who_listens_but_never_answers_is_silent(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """
        As a replica that hangs while nobody is connected: only its kernel answers. The supervisor
        has to hear of it, for nothing else would ever end it.
        """
        monkeypatch.setattr(gateway.link, "OPEN_S", 0.05)
        with UnixSocket(AF_UNIX) as hung:
            hung.bind(url.removeprefix("unix:"))
            hung.listen()
            async with linked(url) as (_, heard):
                await eventually(lambda: heard.losses, "a loss")

        assert ("it listens, but does not answer", True) == heard.losses[0]
        assert [] == heard.hellos

    async def test_silence_counts_from_the_hello(self, url: str) -> None:
        """Not from what was heard in an earlier life, or never."""

        async def say(socket: ServerConnection) -> None:
            await send(socket, hello())
            await asyncio.sleep(SHORT_SILENCE_S / 2)

        async with (
            Partner(say).listening(url),
            linked(url, silence_max_s=SHORT_SILENCE_S) as (_, heard),
        ):
            await eventually(lambda: heard.phases, "a heartbeat")

        assert [] == heard.losses

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
        beats = len(heard.phases)
        await eventually(lambda: len(heard.phases) > beats + 5, "peace")

    assert [("more than 4 messages behind", False)] == heard.losses
