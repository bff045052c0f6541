"""What goes wrong is told in OpenAI's shape, with the field, the value and the remedy."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from gateway.openai.edge import EdgeLimits
from gateway.proxy import (
    GenerationFailedError,
    NoReplicaError,
    QueueFullError,
    QueueTimeoutError,
)
from tests.fakes_openai import CONTEXT_TOKENS, MODEL, Bench, Script

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "find"}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": None}, "messages", "required"),
        ({"messages": []}, "messages", "must not be empty"),
        ({"messages": "Hi"}, "messages", "must be a list"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role", "required"),
        ({"messages": [{"role": "king", "content": "Hi"}]}, "messages[0].role", "'assistant'"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "needs a 'content'"),
        ({"messages": [USER, 5]}, "messages[1]", "must be an object"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
            "text only",
        ),
        ({"messages": [{"role": "user", "content": "\x01"}]}, "messages", "cannot be tokenized"),
        ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
        ({"temperature": "1"}, "temperature", '"1"'),
        ({"top_p": -0.1}, "top_p", "greater than or equal to 0"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens", "a whole number"),
        ({"n": 3}, "n", "at most 2"),
        ({"seed": 2**64}, "seed", "less than"),
        ({"stop": ["a"] * 5}, "stop", "at most 4"),
        ({"stop": ""}, "stop", "1 to 9"),
        ({"stop": "x" * 10}, "stop", "1 to 9"),
        ({"stop": ["a", 5]}, "stop[1]", "must be a string"),
        ({"stop": 5}, "stop", "a string, or it must be a list"),
        ({"logit_bias": {"9999": 1}}, "logit_bias", "0 to 257"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "-100 to 100"),
        ({"logit_bias": [[1, True]]}, "logit_bias", "false to ban"),
        ({"logit_bias": [[1]]}, "logit_bias", "pairs"),
        ({"logit_bias": [[1.5, 1]]}, "logit_bias", "0 to 257"),
        ({"logit_bias": {str(i): 1 for i in range(5)}}, "logit_bias", "at most 4"),
        ({"top_logprobs": 2}, "top_logprobs", "needs 'logprobs'"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "'stream': true"),
        ({"stream": True, "stream_options": 5}, "stream_options", "must be an object"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported yet"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "not supported yet"),
        ({"tools": [TOOL], "tool_choice": TOOL}, "tool_choice", "not supported yet"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"continue_final_message": True}, "continue_final_message", "not supported"),
    ],
)
async def test_bad_fields_are_named(fields: dict[str, object], param: str, words: str) -> None:
    limits = EdgeLimits(choices_max=2, stops_max=4, stop_chars_max=9, logit_bias_max=4)
    bench = Bench(limits=limits)
    response = await bench.post(CHAT, {"messages": [USER], **fields})
    error = response.json()["error"]
    assert (400, param) == (response.status_code, error["param"])
    assert "invalid_request_error" == error["type"]
    assert words in error["message"]
    assert not bench.generator.jobs


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"nonsense", b'{"a": NaN}', b"\xff", b'{"a": "\\ud800"}', b"[" * 100_000, b"[]"],
)
async def test_a_body_that_is_no_json_object_is_refused(content: bytes) -> None:
    response = await Bench().request("POST", CHAT, content=content)
    assert 400 == response.status_code
    assert "The body" in response.json()["error"]["message"]


async def test_a_prompt_longer_than_the_context_is_told_both_lengths() -> None:
    length = len("<|im_start|>user\n\n<|im_start|>assistant\n") + 2 + CONTEXT_TOKENS
    cases = [("x" * CONTEXT_TOKENS, f"has {length}"), ("x" * 20 * CONTEXT_TOKENS, "has at least 2")]
    for content, words in cases:
        response = await Bench().post(CHAT, {"messages": [{"role": "user", "content": content}]})
        error = response.json()["error"]
        assert (400, "context_length_exceeded") == (response.status_code, error["code"])
        assert f"{CONTEXT_TOKENS} tokens" in error["message"]
        assert words in error["message"]


async def test_a_prompt_that_leaves_no_room_for_a_token_is_too_long() -> None:
    path = "/v1/completions"
    assert 400 == (await Bench().post(path, {"prompt": [97] * CONTEXT_TOKENS})).status_code
    assert 200 == (await Bench().post(path, {"prompt": [97] * (CONTEXT_TOKENS - 1)})).status_code


async def test_an_unknown_model_is_told_which_exist() -> None:
    response = await Bench().post(CHAT, {"model": "gpt-9", "messages": [USER]})
    error = response.json()["error"]
    assert (404, "model_not_found") == (response.status_code, error["code"])
    assert "gpt-9" in error["message"]
    assert MODEL in error["message"]


async def test_a_template_can_refuse_in_its_own_words() -> None:
    bench = Bench(template="{{ raise_exception('roles must alternate') }}")
    response = await bench.post(CHAT, {"messages": [USER]})
    assert 400 == response.status_code
    assert "roles must alternate" in response.json()["error"]["message"]


async def test_tools_need_a_template_that_knows_them() -> None:
    bench = Bench(template="{{ messages[0].content }}")
    response = await bench.post(CHAT, {"messages": [USER], "tools": [TOOL]})
    assert (400, "tools") == (response.status_code, response.json()["error"]["param"])


async def test_unknown_routes_and_methods_get_the_same_shape() -> None:
    bench = Bench()
    missing = await bench.request("GET", "/v1/nothing")
    assert (404, "unknown_url") == (missing.status_code, missing.json()["error"]["code"])
    assert "GET /v1/nothing" in missing.json()["error"]["message"]
    wrong = await bench.request("GET", CHAT)
    assert (405, "method_not_allowed") == (wrong.status_code, wrong.json()["error"]["code"])
    assert "POST" == wrong.headers["allow"]
    for response in (missing, wrong):
        assert response.headers["x-request-id"]


async def test_models_are_listed_and_described() -> None:
    bench = Bench()
    listed = (await bench.request("GET", "/v1/models")).json()
    assert ["list", MODEL] == [listed["object"], listed["data"][0]["id"]]
    described = await bench.request("GET", f"/v1/models/{MODEL}")
    assert listed["data"][0] == described.json()
    missing = await bench.request("GET", "/v1/models/other/one")
    assert (404, "model_not_found") == (missing.status_code, missing.json()["error"]["code"])


async def chunks(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b" " * 100


async def test_a_large_body_is_refused_with_and_without_its_length() -> None:
    bench = Bench(limits=EdgeLimits(body_bytes_max=1000))
    for content in (b" " * 1001, chunks(11)):
        response = await bench.request("POST", CHAT, content=content)
        error = response.json()["error"]
        assert (413, "request_too_large") == (response.status_code, error["code"])
        assert "1000 bytes" in error["message"]
    assert 400 == (await bench.request("POST", CHAT, content=chunks(10))).status_code


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (QueueFullError("full", 2.2), 429, "overloaded", "3"),
        (QueueTimeoutError("waited", 0.0), 429, "overloaded", "1"),
        (NoReplicaError("nobody", 5.0), 503, "no_replica", "5"),
        (GenerationFailedError("broke"), 500, "generation_failed", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_have_a_status_of_their_own(
    error: Exception, status: int, code: str, retry_after: str | None, *, stream: bool
) -> None:
    bench = Bench(Script(before=[error]))
    response = await bench.post(CHAT, {"messages": [USER], "stream": stream})
    assert (status, code) == (response.status_code, response.json()["error"]["code"])
    assert str(error) == response.json()["error"]["message"]
    assert retry_after == response.headers.get("retry-after")
    assert (status, code) == (bench.recorder.records[0].code, bench.recorder.records[0].outcome)


async def test_a_failure_before_the_first_token_is_still_a_status() -> None:
    bench = Bench(Script([GenerationFailedError("broke")]))
    assert 500 == (await bench.post(CHAT, {"messages": [USER], "stream": True})).status_code


async def test_one_refused_choice_refuses_them_all() -> None:
    bench = Bench(Script([asyncio.Event()]), Script(before=[QueueFullError("full", 1)]))
    assert 429 == (await bench.post(CHAT, {"messages": [USER], "n": 2})).status_code
    assert 2 == len(bench.generator.closed_early)


async def test_a_failure_after_the_first_token_is_an_event_and_the_last() -> None:
    bench = Bench(Script(["Hello", GenerationFailedError("broke")]))
    response = await bench.post(CHAT, {"messages": [USER], "stream": True})
    assert 200 == response.status_code
    lines = [line for line in response.text.split("\n\n") if line]
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert ("broke", "generation_failed") == (error["message"], error["code"])
    assert "[DONE]" not in response.text
    assert "Hello" in lines[-2]
    record = bench.recorder.records[0]
    assert (200, "generation_failed", 5) == (record.code, record.outcome, record.completion_tokens)


async def test_a_failure_is_told_without_a_comment_before_it() -> None:
    later = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, later.set)
    bench = Bench(Script(["Hello", later, GenerationFailedError("broke")]))
    response = await bench.post(CHAT, {"messages": [USER], "stream": True})
    assert "broke" in response.text
    assert ": still working" not in response.text


async def test_a_request_may_not_take_for_ever() -> None:
    for stream in (False, True):
        bench = Bench(Script([asyncio.Event()]), limits=EdgeLimits(request_timeout_s=0.01))
        response = await bench.post(CHAT, {"messages": [USER], "stream": stream})
        error = response.json()["error"]
        assert (504, "request_timeout") == (response.status_code, error["code"])
        assert 1 == len(bench.generator.closed_early)


async def test_a_stream_that_takes_too_long_ends_with_an_error() -> None:
    bench = Bench(Script(["Hello", asyncio.Event()]), limits=EdgeLimits(request_timeout_s=0.05))
    response = await bench.post(CHAT, {"messages": [USER], "stream": True})
    assert "Hello" in response.text
    assert "request_timeout" in response.text
    assert "[DONE]" not in response.text


async def test_what_nobody_foresaw_keeps_its_secrets(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(Script(before=[KeyError("secret")]))
    response = await bench.post(CHAT, {"messages": [USER]})
    assert (500, "server_error") == (response.status_code, response.json()["error"]["type"])
    assert "secret" not in response.text
    assert "secret" in caplog.text


async def test_silence_in_a_stream_is_filled_with_comments() -> None:
    """And a comment must not cost the stream any of its tokens."""
    more = asyncio.Event()
    bench = Bench(Script(["a", more, "b"]), limits=EdgeLimits(keepalive_s=0.01))
    asyncio.get_running_loop().call_later(0.1, more.set)
    response = await bench.post(CHAT, {"messages": [USER], "stream": True})
    lines = [line for line in response.text.split("\n\n") if line]
    assert ": still working" in lines
    assert all(line.startswith(("data: ", ": ")) for line in lines)
    texts = [json.loads(line[6:]) for line in lines[:-1] if line.startswith("data: ")]
    assert ["", "a", "b", None] == [t["choices"][0]["delta"].get("content") for t in texts]
    assert "data: [DONE]" == lines[-1]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "key-1"}, 401),
        ({"authorization": "Bearer key-1"}, 200),
        ({"authorization": "bearer key-2"}, 200),
        ({"x-api-key": "key-2"}, 200),
        ({"x-api-key": ""}, 401),
    ],
)
async def test_keys_are_asked_for_where_there_are_any(headers: dict[str, str], status: int) -> None:
    bench = Bench(keys=["key-1", "key-2"])
    response = await bench.post(CHAT, {"messages": [USER]}, headers)
    assert status == response.status_code
    if status == 401:
        assert "invalid_api_key" == response.json()["error"]["code"]
        assert "Bearer" == response.headers["www-authenticate"]
        assert not bench.generator.jobs


async def test_probes_need_no_key() -> None:
    bench = Bench(keys=["key"])

    @bench.api.get("/health")
    async def health() -> str:
        return "ok"

    assert 200 == (await bench.request("GET", "/health")).status_code
    assert 401 == (await bench.request("GET", "/v1/models")).status_code
    assert 401 == (await bench.request("GET", "/v1/nothing")).status_code


async def test_every_request_is_recorded_once() -> None:
    bench = Bench(Script(["Hello", " world"], cached_tokens=4))
    await bench.post(CHAT, {"messages": [USER]}, {"x-request-id": "mine"})
    await bench.post(CHAT, {"messages": []})
    await bench.request("POST", CHAT, content=b"{")
    good, bad, worse = bench.recorder.records
    assert ("mine", CHAT, "r0", "data-parallel", 200, "ok") == (
        good.request_id,
        good.route,
        good.replica_id,
        good.mode,
        good.code,
        good.outcome,
    )
    assert (4, 11, ("stop",)) == (good.cached_tokens, good.completion_tokens, good.finish_reasons)
    assert good.ttft_s is not None
    assert 0 <= good.ttft_s <= good.duration_s
    assert (400, "invalid_request_error", None, None) == (
        bad.code,
        bad.outcome,
        bad.replica_id,
        bad.ttft_s,
    )
    assert 400 == worse.code
    assert (1, 6) == (bench.recorder.first_tokens, bench.recorder.later_tokens)
