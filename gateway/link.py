"""The gateway's side of the wire: one connection to one replica, made again whenever it breaks.

Turns frames into per-request streams and tells a listener what else it hears, in order. Decides
nothing about replicas and knows no text; whether a silent replica is killed is the supervisor's
business, this file only stops believing in it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
from websockets.asyncio.client import ClientConnection, connect, unix_connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage

from replica.wire import (
    WIRE_VERSION,
    Cancel,
    Down,
    Finished,
    Frame,
    Generate,
    Heartbeat,
    Hello,
    Output,
    Up,
    decode_up,
    encode,
)

log = logging.getLogger(__name__)

CONNECT_AGAIN_S = 0.1
OPEN_S = 10.0
"""What a partner that listens gets to answer the handshake; one that loads answers it, too."""
WATCH_S = 0.05
"""How often the silence of a replica is looked at."""
OUTBOX_MAX = 4096
MESSAGE_BYTES_MAX = 64 * 1024 * 1024


class ReplicaLostError(Exception):
    """The connection ended in the middle of a request."""


class WireError(Exception):
    """The partner speaks another version, or lost a frame: start the connection anew."""


class SilentError(WireError):
    """The partner has stopped talking; healthy replicas never do."""


class Listener(Protocol):
    """Who hears what a link hears. Called on the event loop; must not wait."""

    def connected(self, replica_id: str, hello: Hello) -> None: ...

    def heard(self, replica_id: str, frame: Frame) -> bool:
        """Return False when a frame is missing: the link then reconnects."""
        ...

    def beat(self, replica_id: str, heartbeat: Heartbeat) -> None: ...

    def lost(self, replica_id: str, reason: str, *, silent: bool) -> None:
        """The connection is over; `silent` when the replica simply stopped talking.

        A silent one may be lost without having been connected.
        """
        ...


@dataclass(frozen=True, slots=True)
class Address:
    """`unix:PATH`, or `tcp:HOST:PORT` with the secret it asks for."""

    url: str
    secret: str | None = field(default=None, repr=False)

    def connect(self) -> connect:
        headers = {"authorization": f"Bearer {self.secret}"} if self.secret else {}
        kind, _, rest = self.url.partition(":")
        if kind == "unix":
            return unix_connect(
                str(Path(rest)),
                uri="ws://replica/wire",
                compression=None,
                max_size=MESSAGE_BYTES_MAX,
                ping_interval=None,
                open_timeout=OPEN_S,
                additional_headers=headers,
            )
        return connect(
            f"ws://{rest}/wire",
            compression=None,
            max_size=MESSAGE_BYTES_MAX,
            ping_interval=None,
            open_timeout=OPEN_S,
            additional_headers=headers,
            proxy=None,
        )


class ReplicaLink:
    """Keeps one replica connected for as long as `run` runs, and carries requests to it."""

    def __init__(
        self, replica_id: str, address: Address, listener: Listener, silence_max_s: float
    ) -> None:
        self.replica_id = replica_id
        self._address = address
        self._listener = listener
        self._silence_max_s = silence_max_s
        self._outbox: asyncio.Queue[Down] | None = None
        self._streams: dict[str, asyncio.Queue[Output | Finished | ReplicaLostError]] = {}
        self._heard_at = 0.0
        self._overflowed = False
        self._unreachable = ""

    async def run(self) -> None:
        """Connect, converse, and begin again; never returns."""
        while True:
            end = await self._connection()
            if end is not None:
                log.warning("%s: connection lost: %s", self.replica_id, end)
                silent = isinstance(end, SilentError)
                self._listener.lost(self.replica_id, str(end), silent=silent)
            await asyncio.sleep(CONNECT_AGAIN_S)

    async def generate(self, request: Generate) -> AsyncGenerator[Output | Finished]:
        """Yield what the replica says about a request, up to and including its `Finished`.

        Raises `ReplicaLostError` when the connection breaks first. Leaving early cancels.
        """
        if self._outbox is None:
            raise ReplicaLostError(f"{self.replica_id} is not connected")
        assert request.request_id not in self._streams
        stream: asyncio.Queue[Output | Finished | ReplicaLostError] = asyncio.Queue()
        self._streams[request.request_id] = stream
        finished = False
        try:
            self._post(request)
            while not finished:
                heard = await stream.get()
                if isinstance(heard, ReplicaLostError):
                    finished = True
                    raise heard
                finished = isinstance(heard, Finished)
                yield heard
        finally:
            del self._streams[request.request_id]
            if not finished:
                self._post(Cancel(request.request_id))

    def _post(self, message: Down) -> None:
        if self._outbox is None:
            return
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self._overflowed = True  # `_watch` ends the connection, and with it all requests

    async def _connection(self) -> Exception | None:
        """Have one connection from beginning to end; return why it ended.

        None when there never was one, unless somebody listened but did not answer: a replica that
        hangs while nobody is connected would otherwise be waited for, for ever.
        """
        greeted = False
        end: Exception = WireError("closed by the replica")
        try:
            async with self._address.connect() as socket:
                try:
                    async with asyncio.timeout(self._silence_max_s):
                        hello = self._greet(await socket.recv())
                    greeted = True
                    self._outbox, self._overflowed = asyncio.Queue(OUTBOX_MAX), False
                    self._listener.connected(self.replica_id, hello)
                    await self._converse(socket, self._outbox)
                finally:
                    # No closing handshake: the other side may be hung, or not a replica at all,
                    # and until it had answered, requests would still be sent its way.
                    socket.transport.abort()
        except TimeoutError:
            end = SilentError("it listens, but does not answer")
        except (OSError, InvalidHandshake, InvalidMessage, ConnectionClosed, WireError) as error:
            end = error
        finally:
            self._outbox = None
            self._end_streams(str(end))
        if greeted or isinstance(end, SilentError):
            self._unreachable = ""
            return end
        if str(end) != self._unreachable:
            self._unreachable = str(end)
            log.debug("%s: not reachable yet: %s", self.replica_id, end)
        return None

    def _greet(self, data: str | bytes) -> Hello:
        hello = _decode(data)
        if not isinstance(hello, Hello) or hello.version != WIRE_VERSION:
            raise WireError(f"not a replica of wire version {WIRE_VERSION}")
        return hello

    async def _converse(self, socket: ClientConnection, outbox: asyncio.Queue[Down]) -> None:
        """Run the three directions of a connection until the first of them ends."""
        self._heard_at = time.monotonic()
        directions = (_send(socket, outbox), self._watch(), self._receive(socket))
        tasks = [asyncio.create_task(direction) for direction in directions]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _receive(self, socket: ClientConnection) -> None:
        async for data in socket:
            self._heard_at = time.monotonic()
            self._hear(_decode(data))

    def _hear(self, message: Up) -> None:
        match message:
            case Frame():
                if not self._listener.heard(self.replica_id, message):
                    raise WireError(f"frame {message.seq} came out of order")
                for output in message.outputs:
                    if stream := self._streams.get(output.request_id):
                        stream.put_nowait(output)
                for finished in message.finished:
                    if stream := self._streams.get(finished.request_id):
                        stream.put_nowait(finished)
            case Heartbeat():
                self._listener.beat(self.replica_id, message)
            case Hello():
                raise WireError("a second Hello")

    async def _watch(self) -> None:
        """Give the replica up when it is silent for too long while this loop was awake."""
        woke_at = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_S)
            now = time.monotonic()
            lagged = now - woke_at > 2 * WATCH_S
            woke_at = now
            if self._overflowed:
                raise WireError(f"more than {OUTBOX_MAX} messages behind")
            if not lagged and now - self._heard_at > self._silence_max_s:
                raise SilentError(f"silent for {now - self._heard_at:.1f} s")

    def _end_streams(self, reason: str) -> None:
        for stream in self._streams.values():
            stream.put_nowait(ReplicaLostError(f"{self.replica_id}: {reason}"))


async def _send(socket: ClientConnection, outbox: asyncio.Queue[Down]) -> None:
    while True:
        await socket.send(encode(await outbox.get()))


def _decode(data: str | bytes) -> Up:
    try:
        message: Up = decode_up(data if isinstance(data, bytes) else data.encode())
    except msgspec.MsgspecError as error:
        raise WireError(f"not a message of wire version {WIRE_VERSION}: {error}") from None
    return message
