"""API keys: who may use the server. Pure ASGI, so that streams are not wrapped in anything."""

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.openai.connection import request_id
from gateway.openai.errors import UnauthorizedError

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Probes and scrapers have no keys."""

_WEBSOCKET_POLICY_VIOLATION = 1008


class ApiKeys:
    """Lets requests pass that carry one of the keys. Without keys, all pass."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not self._digests or self._admits(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _WEBSOCKET_POLICY_VIOLATION})
        else:
            error = UnauthorizedError(
                "No valid API key. Send one as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'."
            )
            response = error.response({"x-request-id": request_id(scope)})
            await response(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        if scope["path"] in OPEN_PATHS:
            return True
        headers = Headers(scope=scope)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(given)
        # All are compared, and as digests, so that time tells nothing about any key.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
