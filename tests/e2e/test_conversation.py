"""The OpenAI SDK talks to the demo model through the gateway and two pinned replicas."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.server import Server

pytestmark = pytest.mark.e2e

QUESTIONS = (
    "Hello! Who are you?",
    "What is a crossover?",
    "Why should a replica be pinned to a NUMA node?",
)
PROMPTS = tuple(
    f"{question} {tail}".strip()
    for question in (
        "What is a NUMA node?",
        "Why pin a replica?",
        "What does TTFT mean?",
        "Count from 3 to 9.",
        "Name three colours.",
        "What is a KV cache?",
        "Tell me a joke.",
        "How do I start the server?",
    )
    for tail in ("", "Please be brief.")
)


def converse(client: openai.OpenAI, *, stream: bool) -> list[str]:
    """Hold a conversation of three turns, greedily; return the answers."""
    messages: list[Any] = []
    answers = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        if stream:
            chunks = client.chat.completions.create(
                model="demo", messages=messages, temperature=0, max_tokens=200, stream=True
            )
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        else:
            whole = client.chat.completions.create(
                model="demo", messages=messages, temperature=0, max_tokens=200
            )
            assert whole.choices[0].finish_reason == "stop"
            text = whole.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        answers.append(text)
    return answers


def test_a_streamed_conversation_says_what_an_unstreamed_one_says(client: openai.OpenAI) -> None:
    streamed = converse(client, stream=True)

    assert all(streamed)
    assert "crossover" in streamed[1].lower() or "concurren" in streamed[1].lower()
    assert streamed == converse(client, stream=False)


def test_a_follow_up_turn_is_continued_in_place(client: openai.OpenAI) -> None:
    """The second turn's prompt begins with the first's tokens, and those are not computed."""
    messages: list[Any] = [{"role": "user", "content": "What is the ladder of modes?"}]
    first = client.chat.completions.create(model="demo", messages=messages, temperature=0)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "Thank you!"},
    ]
    second = client.chat.completions.create(model="demo", messages=messages, temperature=0)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None

    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens


async def complete(client: httpx.AsyncClient, prompt: str) -> str:
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": 64,
        "stream": True,
    }
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line async for line in response.aiter_lines()]
    assert lines[-2:] == ["data: [DONE]", ""]
    return "".join(strip_identity(line) for line in lines[:-2])


def strip_identity(line: str) -> str:
    """Cut a chunk down to what was generated."""
    return line.partition('"choices":')[2]


async def test_sixteen_streams_at_once_each_get_what_they_get_alone(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        alone = [await complete(client, prompt) for prompt in PROMPTS]
        together = await asyncio.gather(*(complete(client, prompt) for prompt in PROMPTS))

    assert len(PROMPTS) == 16
    assert alone == together


async def test_the_load_is_shared_by_both_replicas(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        bodies = [
            {"prompt": f"{number} sheep", "max_tokens": 32, "ignore_eos": True}
            for number in range(8)
        ]
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=body) for body in bodies)
        )

    assert {"replica-0", "replica-1"} == {a.headers["x-numaserve-replica"] for a in answers}
    assert {"data-parallel"} == {answer.headers["x-numaserve-mode"] for answer in answers}


def test_a_seed_repeats_a_sampled_answer(client: openai.OpenAI) -> None:
    answers = {
        client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Tell me a joke."}],
            temperature=1.5,
            seed=7,
            max_tokens=40,
        )
        .choices[0]
        .message.content
        for _ in range(3)
    }

    assert 1 == len(answers)


def test_a_tool_is_called_and_its_result_is_told(client: openai.OpenAI) -> None:
    tools: list[Any] = [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "Get the current weather in a city",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}},
                    "required": ["city"],
                },
            },
        }
    ]
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    asked = client.chat.completions.create(
        model="demo", messages=messages, tools=tools, temperature=0
    )
    choice = asked.choices[0]
    assert choice.finish_reason == "tool_calls", choice
    assert choice.message.tool_calls is not None
    call = choice.message.tool_calls[0]

    assert call.type == "function"
    assert "get_weather" == call.function.name
    assert "Oslo" in call.function.arguments


def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Count from 1 to 9."}],
        temperature=0,
        stop=["7"],
    )
    text = answer.choices[0].message.content or ""

    assert "stop" == answer.choices[0].finish_reason
    assert "6" in text
    assert "7" not in text
