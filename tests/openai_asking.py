"""Asks a bench for chat completions, as answers and as streams."""

import json
from typing import Any

from tests.fakes_openai import MODEL, Bench

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Hi"}


def body(**fields: object) -> dict[str, Any]:
    return {"model": MODEL, "messages": [USER], **fields}


async def answer(bench: Bench, **fields: object) -> dict[str, Any]:
    response = await bench.post(CHAT, body(**fields))
    assert 200 == response.status_code, response.text
    found: dict[str, Any] = response.json()
    return found


async def stream(bench: Bench, **fields: object) -> list[dict[str, Any]]:
    response = await bench.post(CHAT, body(stream=True, **fields))
    assert 200 == response.status_code, response.text
    return events(response.text)


def events(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.split("\n\n") if line]
    assert "data: [DONE]" == lines[-1]
    assert text.count("[DONE]") == 1
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def content_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )
