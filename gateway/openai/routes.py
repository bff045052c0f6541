"""The OpenAI routes, and errors in OpenAI's shape for everything beside them.

`install` is all an application needs to call.
"""

from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.openai.chat import plan_chat
from gateway.openai.completions import plan_completion
from gateway.openai.connection import request_id
from gateway.openai.edge import Edge
from gateway.openai.errors import (
    ApiError,
    InvalidRequestError,
    MethodNotAllowedError,
    ModelNotFoundError,
    RouteNotFoundError,
    told,
)
from gateway.openai.exchange import Exchange

CHAT_ROUTE = "/v1/chat/completions"
COMPLETIONS_ROUTE = "/v1/completions"

_CHAT: dict[str, object] = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
_COMPLETION: dict[str, object] = {"prompt": "Once upon a time", "max_tokens": 32}


def install(app: FastAPI, edge: Edge) -> None:
    """Give an application the OpenAI routes, and its errors OpenAI's shape."""
    app.include_router(build_router(edge))
    app.add_exception_handler(HTTPException, _tell_http_error)
    app.add_exception_handler(RequestValidationError, _tell_invalid)
    app.add_exception_handler(ApiError, _tell)
    app.add_exception_handler(Exception, _tell)


def build_router(edge: Edge) -> APIRouter:
    """Return the OpenAI routes."""
    router = APIRouter(tags=["OpenAI"])

    async def chat() -> Response:
        return Exchange(edge, CHAT_ROUTE, plan_chat)

    async def completions() -> Response:
        return Exchange(edge, COMPLETIONS_ROUTE, plan_completion)

    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(edge)]})

    async def model(request: Request, model_id: str) -> Response:
        if model_id != edge.model_id:
            message = f"The model '{model_id}' does not exist; this server has '{edge.model_id}'."
            error = ModelNotFoundError(message, "model")
            return error.response({"x-request-id": request_id(request.scope)})
        return JSONResponse(_model(edge))

    router.add_api_route(
        CHAT_ROUTE, chat, methods=["POST"], response_model=None, openapi_extra=_body(_CHAT)
    )
    router.add_api_route(
        COMPLETIONS_ROUTE,
        completions,
        methods=["POST"],
        response_model=None,
        openapi_extra=_body(_COMPLETION),
    )
    router.add_api_route("/v1/models", models, methods=["GET"], response_model=None)
    router.add_api_route("/v1/models/{model_id:path}", model, methods=["GET"], response_model=None)
    return router


def _model(edge: Edge) -> dict[str, object]:
    return {
        "id": edge.model_id,
        "object": "model",
        "created": edge.created,
        "owned_by": "numaserve",
        "max_model_len": edge.context_tokens,
    }


def _body(example: dict[str, object]) -> dict[str, Any]:
    """Describe a body that the route reads itself, for /docs."""
    content = {"application/json": {"schema": {"type": "object"}, "example": example}}
    return {"requestBody": {"required": True, "content": content}}


async def _tell(request: Request, error: Exception) -> Response:
    return told(error).response({"x-request-id": request_id(request.scope)})


async def _tell_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:]) or None
    return await _tell(request, InvalidRequestError(f"'{param}': {first['msg']}.", param))


async def _tell_http_error(request: Request, error: Exception) -> Response:
    """Answer what the framework refused: no such route, not that method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}"
    headers = {**(error.headers or {}), "x-request-id": request_id(request.scope)}
    if error.status_code == HTTPStatus.NOT_FOUND:
        return RouteNotFoundError(f"Unknown route: {what}.").response(headers)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = headers.get("Allow", "another method")
        message = f"{what}: this route takes {allowed}."
        return MethodNotAllowedError(message).response(headers)
    body = {"message": error.detail, "type": "http_error", "param": None, "code": None}
    return JSONResponse({"error": body}, status_code=error.status_code, headers=headers)
