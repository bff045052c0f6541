"""Tools: offered to the model through its template, and called in its answers."""

import asyncio
import json

from tests.fakes_openai import Bench, Script
from tests.openai_asking import answer, content_of, stream

CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "é"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


async def test_tool_calls_are_told_from_content() -> None:
    script = Script(["Let me see.\n", CALL[:20], CALL[20:], "\n", CALL])
    choice = (await answer(Bench(script), tools=[TOOL]))["choices"][0]
    assert "tool_calls" == choice["finish_reason"]
    assert "Let me see." == choice["message"]["content"]
    calls = choice["message"]["tool_calls"]
    assert 2 == len({call["id"] for call in calls})
    assert ["function", "function"] == [call["type"] for call in calls]
    assert {"name": "find", "arguments": '{"q": "é"}'} == calls[0]["function"]

    chunks = await stream(Bench(script), tools=[TOOL])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    streamed = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [0, 1] == [call["index"] for call in streamed]
    assert calls[0]["function"] == streamed[0]["function"]
    assert "Let me see." == content_of(chunks)
    assert "tool_calls" == chunks[-1]["choices"][0]["finish_reason"]


async def test_an_answer_of_calls_only_has_no_content() -> None:
    message = (await answer(Bench(Script([CALL])), tools=[TOOL]))["choices"][0]["message"]
    assert message["content"] is None


async def test_one_call_is_all_when_the_client_wants_no_more() -> None:
    bench = Bench(Script([CALL + CALL, asyncio.Event()]))
    choice = (await answer(bench, tools=[TOOL], parallel_tool_calls=False))["choices"][0]
    assert 1 == len(choice["message"]["tool_calls"])
    assert "tool_calls" == choice["finish_reason"]
    assert 1 == len(bench.generator.closed_early)


async def test_text_that_is_no_call_is_content() -> None:
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        choice = (await answer(Bench(Script([CALL])), **fields))["choices"][0]
        assert (CALL, "stop") == (choice["message"]["content"], choice["finish_reason"])
    broken = "<tool_call>oops</tool_call>"
    choice = (await answer(Bench(Script([broken])), tools=[TOOL]))["choices"][0]
    assert (broken, "stop") == (choice["message"]["content"], choice["finish_reason"])


async def test_a_call_that_was_cut_off_is_a_matter_of_length() -> None:
    choice = (await answer(Bench(Script([CALL, CALL])), tools=[TOOL], max_tokens=80))["choices"][0]
    assert "length" == choice["finish_reason"]


async def test_tools_reach_the_template_as_the_client_wrote_them() -> None:
    bench = Bench(template="{{ tools[0] | tojson }}", add_bos=False)
    await answer(bench, tools=[TOOL])
    assert TOOL == json.loads(bytes(bench.generator.jobs[0].token_ids))


async def test_earlier_calls_reach_the_template_as_objects() -> None:
    bench = Bench(template="{{ messages[0].tool_calls[0].function.arguments.q }}", add_bos=False)
    function = {"name": "find", "arguments": '{"q": "é"}'}
    call = {"id": "c1", "type": "function", "function": function}
    await answer(bench, messages=[{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert "é".encode() == bytes(bench.generator.jobs[0].token_ids)
