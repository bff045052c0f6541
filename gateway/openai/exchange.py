"""One request and its answer, from the first byte read to the last byte sent.

A Starlette response that does all its work when it is sent, because only there does it hold both
ends of the connection: it hears the client leave, at any time, and knows whether the headers have
gone. They go after the first token, so that everything before it can still be a proper error.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.openai.connection import (
    ClientGoneError,
    decode_json,
    read_body,
    request_id,
    unless_gone,
)
from gateway.openai.edge import Edge
from gateway.openai.errors import ApiError, RequestTimeoutError, told
from gateway.openai.fanout import Fanout
from gateway.openai.plan import Plan, Whole
from gateway.openai.progress import Outcome, Progress
from gateway.openai.sse import KEEPALIVE, Envelope, StreamWriter

log = logging.getLogger(__name__)

_LAST_WORD_S = 1.0
"""How long a client that does not read may take to be told of an error in its stream."""

_EVENT_STREAM = b"text/event-stream; charset=utf-8"

Planner = Callable[[Edge, object], Awaitable[Plan]]


class Exchange(Response):
    """Answers one request to generate text."""

    def __init__(self, edge: Edge, route: str, planner: Planner) -> None:
        super().__init__()
        self._edge = edge
        self._route = route
        self._planner = planner
        self._sending = False
        """The headers of a successful answer have gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request, and record it once however it ends."""
        loop = asyncio.get_running_loop()
        outcome = Outcome(request_id(scope), self._route, loop.time())
        try:
            with suppress(ClientGoneError):
                error: ApiError | None = None
                try:
                    body = await read_body(scope, receive, self._edge.limits.body_bytes_max)
                except ApiError as refused:
                    error = refused
                else:
                    error = await unless_gone(receive, self._serve(body, outcome, send))
                if error is not None:
                    await self._tell(error, outcome, scope, receive, send)
        except asyncio.CancelledError:
            outcome.name = "server_stopped"
            raise
        finally:
            self._edge.observe.on_request(outcome.record(loop.time()))

    async def _serve(self, body: bytes, outcome: Outcome, send: Send) -> ApiError | None:
        """Do the work; return what went wrong."""
        limit_s = self._edge.limits.request_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                plan = await self._planner(self._edge, decode_json(body))
                progress = Progress(plan, outcome, self._edge.observe)
                async with Fanout(self._edge.generator, plan.jobs) as fanout:
                    if plan.stream:
                        await self._stream(progress, fanout, outcome, send)
                    else:
                        await self._answer(progress, fanout, outcome, send)
        except TimeoutError:
            message = f"The request took longer than {limit_s:g} s; ask for fewer tokens."
            return RequestTimeoutError(message)
        except Exception as error:
            known = told(error)
            if type(known) is ApiError:
                log.exception("%s: not foreseen", outcome.request_id)
            return known
        outcome.name = "ok"
        return None

    async def _answer(
        self, progress: Progress, fanout: Fanout, outcome: Outcome, send: Send
    ) -> None:
        """Wait for all completions, then answer at once."""
        plan, clock = progress.plan, asyncio.get_running_loop().time
        wholes = [Whole(choice) for choice in plan.choices]
        while not progress.over:
            for index, event in await fanout.next(self._edge.limits.keepalive_s):
                if plan.choices[index].finish_reason is not None:
                    continue  # it had been said before we could stop it
                wholes[index].add(progress.take(index, event, clock()))
                if plan.choices[index].finish_reason is not None:
                    fanout.drop(index)
        entries = [plan.form.whole(whole) for whole in wholes]
        body = self._envelope(plan, plan.form.kind).answer(entries, progress.usage)
        await self._start(progress, outcome, send, (b"application/json", len(body)))
        await send({"type": "http.response.body", "body": body})

    async def _stream(
        self, progress: Progress, fanout: Fanout, outcome: Outcome, send: Send
    ) -> None:
        """Send what becomes visible as it does, and a comment when nothing has for long."""
        writer = StreamWriter(
            progress, self._envelope(progress.plan, progress.plan.form.chunk_kind)
        )
        clock = asyncio.get_running_loop().time
        while not progress.over:
            events = await fanout.next(self._edge.limits.keepalive_s)
            now = clock()
            parts = []
            for index, event in events:
                parts += writer.write(index, event, now)
                if progress.plan.choices[index].finish_reason is not None:
                    fanout.drop(index)
            if not self._sending:
                if not progress.speaking:
                    continue
                await self._start(progress, outcome, send, (_EVENT_STREAM, None))
            if progress.over:
                parts += writer.end()
            data = b"".join(parts) if events else KEEPALIVE
            if data:
                more = not progress.over
                await send({"type": "http.response.body", "body": data, "more_body": more})

    def _envelope(self, plan: Plan, kind: str) -> Envelope:
        edge = self._edge
        return Envelope(
            answer_id=plan.answer_id,
            kind=kind,
            created=int(time.time()),
            model=edge.model_id,
            fingerprint=edge.fingerprint,
        )

    async def _start(
        self, progress: Progress, outcome: Outcome, send: Send, content: tuple[bytes, int | None]
    ) -> None:
        """Send the headers: from here on the request has succeeded, or fails within its stream."""
        kind, size = content
        headers = [
            (b"content-type", kind),
            (b"x-request-id", outcome.request_id.encode()),
            (b"x-numaserve-replica", ",".join(progress.replica_ids).encode()),
            (b"x-numaserve-mode", (progress.mode or "").encode()),
        ]
        if size is None:
            headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        else:
            headers.append((b"content-length", str(size).encode()))
        outcome.code = 200
        self._sending = True
        message: Message = {"type": "http.response.start", "status": 200, "headers": headers}
        await send(message)

    async def _tell(
        self, error: ApiError, outcome: Outcome, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send an error: as the answer, or as the last event of a stream, which gets no [DONE]."""
        outcome.name = error.name
        if not self._sending:
            outcome.code = error.status
            await error.response({"x-request-id": outcome.request_id})(scope, receive, send)
            return
        last = b"data: " + error.body() + b"\n\n"
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORD_S):
                await send({"type": "http.response.body", "body": last})
