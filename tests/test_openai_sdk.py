"""The `openai` package, as most clients use it, against a real server."""

from collections.abc import AsyncIterator

import openai
import pytest
from openai import AsyncOpenAI

from gateway.proxy import QueueFullError
from tests.fakes_openai import MODEL, Bench, Script, serving

CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "é"}}\n</tool_call>'


class Sdk:
    """An SDK's client for one bench after the other."""

    def __init__(self, bench: Bench, url: str) -> None:
        self.bench = bench
        self.client = AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0)


async def connected(*scripts: Script) -> AsyncIterator[Sdk]:
    bench = Bench(*scripts, keys=["key"])
    async with serving(bench) as url:
        sdk = Sdk(bench, url)
        async with sdk.client:
            yield sdk


async def test_a_chat() -> None:
    async for sdk in connected(Script(["Hello", " world"], cached_tokens=3)):
        answer = await sdk.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}]
        )
        assert "Hello world" == answer.choices[0].message.content
        assert "stop" == answer.choices[0].finish_reason
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert 3 == answer.usage.prompt_tokens_details.cached_tokens


async def test_a_streamed_chat_with_usage() -> None:
    async for sdk in connected(Script(["Hel", "lo", " wörld"])):
        chunks = [
            chunk
            async for chunk in await sdk.client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Hi"}],
                stream=True,
                stream_options={"include_usage": True},
            )
        ]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert "Hello wörld" == text
        assert chunks[-1].usage is not None
        assert 12 == chunks[-1].usage.completion_tokens


async def test_two_choices() -> None:
    async for sdk in connected(Script(["one"]), Script(["two"])):
        answer = await sdk.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], n=2
        )
        assert ["one", "two"] == [choice.message.content for choice in answer.choices]


async def test_tool_calls_streamed_through_the_sdks_own_assembly() -> None:
    async for sdk in connected(Script(["Wait.\n", CALL[:30], CALL[30:], CALL])):
        async with sdk.client.chat.completions.stream(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            tools=[{"type": "function", "function": {"name": "find", "parameters": {}}}],
        ) as stream:
            choice = (await stream.get_final_completion()).choices[0]
        assert "tool_calls" == choice.finish_reason
        assert "Wait." == choice.message.content
        calls = choice.message.tool_calls or []
        assert [("find", '{"q": "é"}')] * 2 == [
            (call.function.name, call.function.arguments) for call in calls
        ]


async def test_a_completion_and_the_models() -> None:
    async for sdk in connected(Script([" world"])):
        answer = await sdk.client.completions.create(model=MODEL, prompt="Hello", logprobs=1)
        assert " world" == answer.choices[0].text
        assert answer.choices[0].logprobs is not None
        assert 6 == len(answer.choices[0].logprobs.tokens or [])
        assert [MODEL] == [model.id async for model in sdk.client.models.list()]


async def test_errors_become_the_sdks_exceptions() -> None:
    async for sdk in connected(Script(before=[QueueFullError("full", 4)])):
        chat = sdk.client.chat.completions
        with pytest.raises(openai.RateLimitError) as limited:
            await chat.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
        assert "4" == limited.value.response.headers["retry-after"]
        with pytest.raises(openai.NotFoundError) as missing:
            await chat.create(model="other", messages=[{"role": "user", "content": "Hi"}])
        assert "model_not_found" == missing.value.code
        with pytest.raises(openai.BadRequestError) as refused:
            await chat.create(
                model=MODEL, messages=[{"role": "user", "content": "Hi"}], temperature=3
            )
        assert "temperature" == refused.value.param
        with pytest.raises(openai.AuthenticationError):
            await sdk.client.with_options(api_key="wrong").models.list()
