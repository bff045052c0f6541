"""What can go wrong, as OpenAI's clients are told: `{"error": {message, type, param, code}}`.

    ApiError
    ├── InvalidRequestError 400      the client's; `param` names the field
    │   └── ContextLengthError
    ├── UnauthorizedError 401
    ├── ModelNotFoundError 404
    ├── RouteNotFoundError 404
    ├── MethodNotAllowedError 405
    ├── BodyTooLargeError 413
    ├── OverloadedError 429          ours for now; Retry-After says when to come back
    ├── GenerationError 500          ours; it had started and cannot be finished
    ├── UnavailableError 503         ours for now
    └── RequestTimeoutError 504

Messages name the field, the value and the remedy. They never hold more than a glimpse of a value.
"""

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import ClassVar

import msgspec
from starlette.responses import Response

from gateway.proxy import (
    GenerationFailedError,
    NoReplicaError,
    QueueFullError,
    QueueTimeoutError,
    RefusedError,
)

_GLIMPSE_CHARS = 60


class ApiError(Exception):
    """An error the client is told about."""

    status: ClassVar[HTTPStatus] = HTTPStatus.INTERNAL_SERVER_ERROR
    kind: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    @property
    def headers(self) -> Mapping[str, str]:
        return {}

    @property
    def name(self) -> str:
        """One word for it, for logs and metrics."""
        return self.code or self.kind

    def body(self) -> bytes:
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def response(self, headers: Mapping[str, str]) -> Response:
        return Response(
            self.body(),
            status_code=self.status,
            headers={**headers, **self.headers},
            media_type="application/json",
        )


class InvalidRequestError(ApiError):
    status = HTTPStatus.BAD_REQUEST
    kind = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    code = "context_length_exceeded"


class UnauthorizedError(ApiError):
    status = HTTPStatus.UNAUTHORIZED
    kind = "authentication_error"
    code = "invalid_api_key"

    @property
    def headers(self) -> Mapping[str, str]:
        return {"www-authenticate": "Bearer"}


class ModelNotFoundError(ApiError):
    status = HTTPStatus.NOT_FOUND
    kind = "invalid_request_error"
    code = "model_not_found"


class RouteNotFoundError(ApiError):
    status = HTTPStatus.NOT_FOUND
    kind = "invalid_request_error"
    code = "unknown_url"


class MethodNotAllowedError(ApiError):
    status = HTTPStatus.METHOD_NOT_ALLOWED
    kind = "invalid_request_error"
    code = "method_not_allowed"


class BodyTooLargeError(ApiError):
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    kind = "invalid_request_error"
    code = "request_too_large"

    @property
    def headers(self) -> Mapping[str, str]:
        return {"connection": "close"}  # the rest of the body will not be read


class _RetryLaterError(ApiError):
    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self._retry_after_s = retry_after_s

    @property
    def headers(self) -> Mapping[str, str]:
        return {"retry-after": str(max(1, math.ceil(self._retry_after_s)))}


class OverloadedError(_RetryLaterError):
    status = HTTPStatus.TOO_MANY_REQUESTS
    kind = "rate_limit_error"
    code = "overloaded"


class UnavailableError(_RetryLaterError):
    status = HTTPStatus.SERVICE_UNAVAILABLE
    kind = "unavailable_error"
    code = "no_replica"


class GenerationError(ApiError):
    code = "generation_failed"


class RequestTimeoutError(ApiError):
    status = HTTPStatus.GATEWAY_TIMEOUT
    kind = "timeout_error"
    code = "request_timeout"


_REFUSALS: dict[type[RefusedError], type[_RetryLaterError]] = {
    QueueFullError: OverloadedError,
    QueueTimeoutError: OverloadedError,
    NoReplicaError: UnavailableError,
}


def told(error: Exception) -> ApiError:
    """Return what the client is told of an error. What we did not foresee keeps its secrets."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RefusedError):
        answer = _REFUSALS.get(type(error), UnavailableError)
        return answer(str(error), error.retry_after_s)
    if isinstance(error, GenerationFailedError):
        return GenerationError(str(error))
    return ApiError("Internal error. The server's log says more under this request's id.")


def glimpse(value: object) -> str:
    """Show a value of the client's in a message."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _GLIMPSE_CHARS else f"{text[:_GLIMPSE_CHARS]}…"
