"""The replica's side of the wire: one WebSocket for the gateway, two plain GETs for probes.

Lives on the process's event loop, beside the engine's thread, and touches the engine only through
`send` and `progress`. It mirrors what the engine publishes, so that a connection can open with
the complete state; it knows no llama.cpp and decides nothing.
"""

import asyncio
import hmac
import http
import logging
import os
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from websockets.asyncio.server import Server, ServerConnection, serve, unix_serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from replica.engine import CancelAll, Engine, StepResult
from replica.scheduler import News
from replica.wire import (
    HEARTBEAT_S,
    WIRE_VERSION,
    Cancel,
    Drain,
    EnginePhase,
    Evicted,
    Facts,
    Frame,
    Generate,
    Heartbeat,
    Hello,
    Load,
    Stored,
    Up,
    decode_down,
    encode,
)

log = logging.getLogger(__name__)

FRAMES_PENDING_MAX = 4096
"""Messages a gateway may be behind before its connection is dropped; it then starts anew."""
MESSAGE_BYTES_MAX = 64 * 1024 * 1024
CLOSE_S = 1.0
"""What a gateway gets to read its last frames, and again to answer a close; then it is cut off."""
CLOSE_REPLACED = 4001
CLOSE_TOO_SLOW = 4002
CLOSE_NONSENSE = 4003

_SOCKET: dict[str, Any] = {
    "compression": None,  # tokens do not shrink, and a step should not wait for zlib
    "max_size": MESSAGE_BYTES_MAX,
    "ping_interval": None,  # the heartbeats say more
}


class ListenError(Exception):
    """The address cannot be listened on; the message says which and why."""


@dataclass(slots=True)
class Mirror:
    """The engine's published state, as of the last step heard."""

    load: Load = field(default_factory=lambda: Load(0, 0, 0))
    blocks: set[int] = field(default_factory=set)

    def apply(self, result: StepResult) -> None:
        self.load = result.load
        for event in result.events:
            match event:
                case Stored(blocks):
                    self.blocks.update(blocks)
                case Evicted(blocks):
                    self.blocks.difference_update(blocks)


class Link:
    """One gateway's connection: its number, an outbox with a limit, and the frame count."""

    def __init__(self, socket: ServerConnection, audience: int) -> None:
        self.socket = socket
        self.audience = audience
        self.outbox: asyncio.Queue[Up] = asyncio.Queue(FRAMES_PENDING_MAX)
        self.frames = 0
        self.overflowed = asyncio.Event()

    def post(self, message: Up) -> None:
        try:
            self.outbox.put_nowait(message)
        except asyncio.QueueFull:
            self.overflowed.set()


class ReplicaServer:
    """Serves the wire once `ready` has been called; answers probes from the start."""

    def __init__(self, secret: str | None) -> None:
        self._secret = secret
        self._epoch = time.time_ns()
        self._mirror = Mirror()
        self._link: Link | None = None
        self._audience = 0
        self._engine: Engine | None = None
        self._facts: Facts | None = None

    def ready(self, engine: Engine, facts: Facts) -> None:
        """The model is loaded: accept the gateway from now on."""
        self._engine, self._facts = engine, facts

    def publish(self, result: StepResult) -> None:
        """Pass one step on to the gateway. Called on the event loop, in the engine's order."""
        self._mirror.apply(result)
        if self._link is None:
            return
        # A step that began for the gateway before changes the cache, but its tokens are for nobody.
        news = result.news if result.audience == self._link.audience else News()
        self._link.frames += 1
        self._link.post(
            Frame(
                seq=self._link.frames,
                load=result.load,
                outputs=news.outputs,
                finished=news.finished,
                events=result.events,
                rows=result.rows,
                step_s=result.seconds,
                cached_tokens=result.cached_tokens,
            )
        )

    @asynccontextmanager
    async def listen(self, address: str) -> AsyncGenerator[Server]:
        """Listen on `unix:PATH` or `tcp:HOST:PORT` for as long as the block runs.

        Its end waits, but not for ever, until the gateway has heard everything. Raises
        `ListenError`.
        """
        kind, _, rest = address.partition(":")
        if kind == "unix":
            server = unix_serve(self._converse, rest, **_SOCKET, process_request=self._probe)
        else:
            host, _, port = rest.rpartition(":")
            host = host.strip("[]")  # of an IPv6 address
            server = serve(self._converse, host, int(port), **_SOCKET, process_request=self._probe)
        async with AsyncExitStack() as stack:
            try:
                listening = await stack.enter_async_context(server)
            except OSError as error:
                raise ListenError(f"cannot listen on {address}: {error}") from error
            yield listening
            if self._link is not None:
                await self._farewell(self._link)

    def status(self) -> dict[str, object]:
        """Return what `/status` shows."""
        phase = self._engine.progress.phase if self._engine else EnginePhase.LOADING
        facts = msgspec.to_builtins(self._facts) if self._facts else {"pid": os.getpid()}
        load = self._mirror.load
        return {
            "phase": phase.value,
            "connected": self._link is not None,
            "running": load.running,
            "waiting": load.waiting,
            "kv_used_tokens": load.kv_used_tokens,
            **facts,
        }

    def _probe(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer plain GETs; return None to let a WebSocket through."""
        if self._secret is not None and request.path != "/health":
            shown = request.headers.get("authorization", "")
            if not hmac.compare_digest(shown.encode(), f"Bearer {self._secret}".encode()):
                return connection.respond(http.HTTPStatus.UNAUTHORIZED, "wrong secret\n")
        match request.path:
            case "/health":
                return connection.respond(http.HTTPStatus.OK, "ok\n")
            case "/status":
                body = msgspec.json.encode(self.status()).decode()
                return connection.respond(http.HTTPStatus.OK, body + "\n")
            case "/wire" if self._engine is not None:
                return None
            case "/wire":
                return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "loading\n")
            case _:
                return connection.respond(http.HTTPStatus.NOT_FOUND, "no such path\n")

    async def _converse(self, socket: ServerConnection) -> None:
        """Serve one gateway until it leaves. A newer one takes over from an older one."""
        assert self._engine is not None
        assert self._facts is not None
        replaced = self._link
        link = self._link = Link(socket, self._next_audience(self._engine))
        hello = Hello(
            WIRE_VERSION, self._epoch, self._facts, sorted(self._mirror.blocks), self._mirror.load
        )
        link.post(hello)
        log.info("gateway connected")
        try:
            async with asyncio.TaskGroup() as group:
                if replaced is not None:
                    reason = "another gateway has connected"
                    group.create_task(_close(replaced.socket, CLOSE_REPLACED, reason))
                tasks = [
                    group.create_task(coroutine)
                    for coroutine in (self._send(link), self._beat(link), self._guard(link))
                ]
                await self._receive(link, self._engine)
                for task in tasks:
                    task.cancel()
        except* ConnectionClosed:
            pass  # the ordinary end; what follows is the same for every end
        finally:
            if self._link is link:
                self._link = None
                self._next_audience(self._engine)
            log.info("gateway gone")

    def _next_audience(self, engine: Engine) -> int:
        """Drop the requests of the gateway so far; return the number of the one to come."""
        self._audience += 1
        engine.send(CancelAll(self._audience))
        return self._audience

    async def _receive(self, link: Link, engine: Engine) -> None:
        async for data in link.socket:
            if self._link is not link:
                return  # replaced: what it still says would count as its successor's words
            try:
                message = decode_down(data if isinstance(data, bytes) else data.encode())
            except msgspec.MsgspecError as error:
                log.error("not a message of version %d: %s", WIRE_VERSION, error)  # noqa: TRY400
                await _close(link.socket, CLOSE_NONSENSE, "not a message of this wire version")
                return
            match message:
                case Generate() | Cancel() | Drain():
                    engine.send(message)

    async def _send(self, link: Link) -> None:
        while True:
            await link.socket.send(encode(await link.outbox.get()))
            link.outbox.task_done()

    async def _beat(self, link: Link) -> None:
        """Tell the engine's phase for as long as the engine, not just this loop, is alive."""
        assert self._engine is not None
        while True:
            progress = self._engine.progress
            ends_in_s = progress.ends_at - time.monotonic() if progress.ends_at else 0.0
            link.post(Heartbeat(progress.phase, ends_in_s))
            await asyncio.sleep(HEARTBEAT_S)

    async def _guard(self, link: Link) -> None:
        await link.overflowed.wait()
        log.error("the gateway is %d messages behind: dropping it", FRAMES_PENDING_MAX)
        await _close(link.socket, CLOSE_TOO_SLOW, "too many messages behind")

    async def _farewell(self, link: Link) -> None:
        heard = asyncio.ensure_future(link.outbox.join())
        left = asyncio.ensure_future(link.socket.wait_closed())
        await asyncio.wait({heard, left}, timeout=CLOSE_S, return_when=asyncio.FIRST_COMPLETED)
        heard.cancel()
        left.cancel()
        await _close(link.socket, CloseCode.GOING_AWAY, "this replica has drained")


async def _close(socket: ServerConnection, code: int, reason: str) -> None:
    """Close a connection whose other end may be deaf: a plain close waits for it without limit."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await socket.close(code, reason)
    except TimeoutError:
        log.warning("the gateway did not answer: cutting its connection")
    finally:
        socket.transport.abort()
