"""Plain completions: every form of prompt, continued as it is."""

import json
from typing import Any

import pytest

from gateway.openai.edge import EdgeLimits
from tests.fakes_openai import BOS, MODEL, Bench, Script

COMPLETIONS = "/v1/completions"


async def answer(bench: Bench, **fields: object) -> dict[str, Any]:
    response = await bench.post(COMPLETIONS, {"model": MODEL, **fields})
    assert 200 == response.status_code, response.text
    found: dict[str, Any] = response.json()
    return found


async def test_an_answer_has_openais_shape() -> None:
    found = await answer(Bench(Script([" world"], cached_tokens=2)), prompt="Hello")
    assert found.pop("id").startswith("cmpl-")
    assert found.pop("created") > 0
    choice = {"index": 0, "text": " world", "logprobs": None, "finish_reason": "stop"}
    assert found == {
        "object": "text_completion",
        "model": MODEL,
        "system_fingerprint": "fp_fake",
        "choices": [choice],
        "usage": {
            "prompt_tokens": 6,
            "completion_tokens": 6,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


async def test_a_stream_is_made_of_the_same_parts() -> None:
    request = {"prompt": "Hello", "stream": True, "stream_options": {"include_usage": True}}
    response = await Bench(Script([" wor", "ld"])).post(COMPLETIONS, request)
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert "[DONE]" == lines.pop()
    chunks = [json.loads(line) for line in lines]
    assert 6 == chunks.pop()["usage"]["completion_tokens"]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [" wor", "ld", ""] == [choice["text"] for choice in choices]
    assert [None, None, "stop"] == [choice["finish_reason"] for choice in choices]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[BOS, 97, 98]]),
        ("", [[BOS]]),
        (["a", "b"], [[BOS, 97], [BOS, 98]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98]], [[97], [98]]),
        (["a", [98]], [[BOS, 97], [98]]),
    ],
)
async def test_prompts_come_in_four_forms(prompt: object, expected: list[list[int]]) -> None:
    bench = Bench()
    found = await answer(bench, prompt=prompt)
    assert expected == [job.token_ids for job in bench.generator.jobs]
    assert sum(map(len, expected)) == found["usage"]["prompt_tokens"]
    assert list(range(len(expected))) == [choice["index"] for choice in found["choices"]]


async def test_each_prompt_is_counted_once_and_its_cached_tokens_too() -> None:
    scripts = [Script(["x"], cached_tokens=count) for count in (0, 2, 3, 1)]
    bench = Bench(*scripts)
    found = await answer(bench, prompt=[[97, 98, 99], [98, 99, 100, 101]], n=2)
    assert 4 == len(found["choices"])
    assert 7 == found["usage"]["prompt_tokens"]
    assert 1 == found["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert [97, 97, 98, 98] == [job.token_ids[0] for job in bench.generator.jobs]


async def test_logprobs_have_the_older_shape() -> None:
    bench = Bench(Script(["x", "y"]))
    logprobs = (await answer(bench, prompt="a", logprobs=1))["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["x", "y"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -1.0}, {"a": -1.0}],
        "text_offset": [0, 1],
    }


async def test_what_does_no_harm_is_accepted() -> None:
    await answer(Bench(), prompt="a", echo=False, best_of=1, suffix=None, logprobs=False)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "prompt", "missing"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": ["a", []]}, "prompt[1]", "empty"),
        ({"prompt": 5}, "prompt", "a text, or a list of tokens"),
        ({"prompt": [97, "a"]}, "prompt", "a text, or a list of tokens"),
        ({"prompt": [True]}, "prompt", "a text, or a list of tokens"),
        ({"prompt": ["a", 5]}, "prompt[1]", "a text, or a list of tokens"),
        ({"prompt": [258]}, "prompt", "0 to 257"),
        ({"prompt": [-1]}, "prompt", "0 to 257"),
        ({"prompt": ["a", "b", "c"]}, "prompt", "at most 2"),
        ({"prompt": "a", "echo": True}, "echo", "not supported"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
        ({"prompt": "a", "best_of": 3}, "best_of", "not supported"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"prompt": "a\x01"}, "prompt", "cannot be tokenized"),
    ],
)
async def test_what_cannot_be_served_is_refused(
    fields: dict[str, object], param: str, words: str
) -> None:
    bench = Bench(limits=EdgeLimits(prompts_max=2))
    response = await bench.post(COMPLETIONS, fields)
    error = response.json()["error"]
    assert (400, param) == (response.status_code, error["param"])
    assert words in error["message"]
    assert not bench.generator.jobs
