"""The client's side of one request: its id, its body, and noticing that it has left.

A handler that awaits is not told that its client has gone, so whatever waits here listens.
"""

import asyncio
import re
import secrets
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from gateway.openai.errors import BodyTooLargeError, InvalidRequestError

T = TypeVar("T")

_DISCARD_BYTES_MAX = 64 * 2**20
_DISCARD_S = 10.0

_SANE_ID = re.compile(r"[!-~]{1,128}")


class ClientGoneError(Exception):
    """The client has closed the connection; nobody is left to answer."""


def request_id(scope: Scope) -> str:
    """Return the id the client gave this request, or a new one if it gave none that is sane."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _SANE_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"


async def read_body(scope: Scope, receive: Receive, bytes_max: int) -> bytes:
    """Return the whole body, or refuse it as soon as it is known to be too large."""
    headers = Headers(scope=scope)
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > bytes_max:
        if "expect" not in headers:
            await _discard(receive)
        raise _too_large(bytes_max)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size > bytes_max:
            await _discard(receive)
            raise _too_large(bytes_max)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def _discard(receive: Receive) -> None:
    """Read on and keep nothing: who is cut off while sending may never see why."""
    size = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            while size < _DISCARD_BYTES_MAX:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body", False):  # complete, or the client has left
                    return


def _too_large(bytes_max: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The body is larger than {bytes_max} bytes; send less.")


def decode_json(body: bytes) -> object:
    """Read a body as JSON."""
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        message = "The body is nested too deeply."
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        message = f"The body is not valid JSON: {error}."
    raise InvalidRequestError(message)


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`, or cancel it and raise as soon as the client leaves."""
    job = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({job, left}, return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise ClientGoneError
        return job.result()
    finally:
        job.cancel()
        left.cancel()
        await asyncio.gather(job, left, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
