"""Chat completions, as answers and as streams."""

import asyncio

import pytest

from tests.fakes_openai import BOS, CONTEXT_TOKENS, END, MODEL, Bench, Script
from tests.openai_asking import CHAT, answer, body, content_of, stream


async def test_an_answer_has_openais_shape() -> None:
    found = await answer(Bench(Script(["Hello", " world"], cached_tokens=7)))
    assert found.pop("id").startswith("chatcmpl-")
    assert found.pop("created") > 0
    prompt_tokens = len("<|im_start|>user\nHi") + 1 + len("\n<|im_start|>assistant\n") + 1
    assert found == {
        "object": "chat.completion",
        "model": MODEL,
        "system_fingerprint": "fp_fake",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello world", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 11,
            "total_tokens": prompt_tokens + 11,
            "prompt_tokens_details": {"cached_tokens": 7},
        },
    }


async def test_a_stream_begins_with_the_role_and_ends_with_the_reason() -> None:
    chunks = await stream(Bench(Script(["Hello", " world"])))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    expected = [{"role": "assistant", "content": ""}, {"content": "Hello"}, {"content": " world"}]
    assert [*expected, {}] == deltas
    assert [None, None, None, "stop"] == [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert {"chat.completion.chunk"} == {chunk["object"] for chunk in chunks}
    assert 1 == len({(chunk["id"], chunk["created"]) for chunk in chunks})
    assert all("usage" not in chunk for chunk in chunks)


async def test_streams_and_answers_tell_who_served_them() -> None:
    for streamed in (False, True):
        response = await Bench().post(CHAT, body(stream=streamed), {"x-request-id": "mine-1"})
        assert "r0" == response.headers["x-numaserve-replica"]
        assert "data-parallel" == response.headers["x-numaserve-mode"]
        assert "mine-1" == response.headers["x-request-id"]
        kind = "text/event-stream; charset=utf-8" if streamed else "application/json"
        assert kind == response.headers["content-type"]


@pytest.mark.parametrize("given", ["", "has space", "x" * 129, "tab\there"])
async def test_a_request_id_that_is_not_sane_is_replaced(given: str) -> None:
    response = await Bench().post(CHAT, body(), {"x-request-id": given})
    assert given != response.headers["x-request-id"]
    assert response.headers["x-request-id"].startswith("req-")


async def test_the_prompt_is_the_rendered_template_with_one_bos() -> None:
    expected = [BOS, *b"<|im_start|>user\nHi", END, *b"\n<|im_start|>assistant\n"]
    bench = Bench()
    await answer(bench)
    assert expected == bench.generator.jobs[0].token_ids
    bench = Bench(add_bos=False)
    await answer(bench)
    assert expected[1:] == bench.generator.jobs[0].token_ids
    bench = Bench(template="<s>{{ messages[0].content }}")
    await answer(bench)
    assert [BOS, *b"Hi"] == bench.generator.jobs[0].token_ids


async def test_text_parts_are_joined_and_a_developer_is_a_system() -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    bench = Bench(template=template, add_bos=False)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "c"}, {"role": "user", "content": parts}]
    await answer(bench, messages=messages)
    assert b"system:c;user:a\nb;" == bytes(bench.generator.jobs[0].token_ids)


async def test_templates_get_the_clients_variables_but_never_its_messages_from_there() -> None:
    template = "{{ messages[0].content }}{{ thinking }}{{ add_generation_prompt }}{{ tools }}"
    bench = Bench(template=template, add_bos=False)
    given = {"thinking": 1, "messages": 2, "tools": 3, "self": 4, "variables": 5}
    await answer(bench, chat_template_kwargs=given, add_generation_prompt=False)
    assert b"Hi1FalseNone" == bytes(bench.generator.jobs[0].token_ids)


async def test_usage_comes_last_and_only_when_asked_for() -> None:
    chunks = await stream(
        Bench(Script(["ab", "c"], cached_tokens=3)), stream_options={"include_usage": True}
    )
    assert [] == chunks[-1]["choices"]
    usage = chunks[-1]["usage"]
    assert 3 == usage["completion_tokens"]
    assert 3 == usage["prompt_tokens_details"]["cached_tokens"]
    assert {None} == {chunk["usage"] for chunk in chunks[:-1]}, "null, as OpenAI has it"


async def test_usage_with_every_chunk_counts_up() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(Bench(Script(["ab", "c"])), stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert [2, 2, 3, 3, 3] == counts


async def test_a_stop_string_ends_the_job_and_is_not_shown() -> None:
    script = Script(["Hello S", "TO", "P more", asyncio.Event()])
    bench = Bench(script)
    found = await answer(bench, stop=["STOP"])
    assert "Hello " == found["choices"][0]["message"]["content"]
    assert "stop" == found["choices"][0]["finish_reason"]
    assert len("Hello STOP") == found["usage"]["completion_tokens"]
    assert 1 == len(bench.generator.closed_early)
    bench = Bench(script)
    chunks = await stream(bench, stop="STOP")
    assert "Hello " == content_of(chunks)
    assert "stop" == chunks[-1]["choices"][0]["finish_reason"]
    assert 1 == len(bench.generator.closed_early)


async def test_cached_tokens_are_told_although_a_stop_string_came_first() -> None:
    bench = Bench(Script(["xSTOP", asyncio.Event()], cached_tokens=5))
    found = await answer(bench, stop="STOP")
    assert 5 == found["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 5 == bench.recorder.records[0].cached_tokens


async def test_held_text_is_sent_when_the_completion_ends() -> None:
    for steps in (["Hello S"], ["Hello S", "T"]):
        chunks = await stream(Bench(Script(steps)), stop="STOP")
        assert "".join(steps) == content_of(chunks)


async def test_characters_are_never_broken() -> None:
    data = "né€😀".encode()
    chunks = await stream(Bench(Script([bytes([byte]) for byte in data])))
    assert "né€😀" == content_of(chunks)
    assert ["", "n", "é", "€", "😀"] == [c["choices"][0]["delta"]["content"] for c in chunks[:-1]]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_the_length_is_limited_by_either_field(field: str) -> None:
    found = await answer(Bench(Script(["Hello", " world"])), **{field: 5})
    assert "Hello" == found["choices"][0]["message"]["content"]
    assert "length" == found["choices"][0]["finish_reason"]


async def test_the_length_is_what_the_context_leaves() -> None:
    for asked in (None, 5000):
        bench = Bench()
        await answer(bench, max_tokens=asked)
        job = bench.generator.jobs[0]
        assert CONTEXT_TOKENS == len(job.token_ids) + job.tokens_max


async def test_several_choices_run_at_once_with_seeds_of_their_own() -> None:
    bench = Bench(Script(["one"], cached_tokens=0), Script(["two", "2"], cached_tokens=9))
    found = await answer(bench, n=2, seed=5)
    assert ["one", "two2"] == [c["message"]["content"] for c in found["choices"]]
    assert [0, 1] == [c["index"] for c in found["choices"]]
    assert 7 == found["usage"]["completion_tokens"]
    assert len(bench.generator.jobs[0].token_ids) == found["usage"]["prompt_tokens"]
    assert 0 == found["usage"]["prompt_tokens_details"]["cached_tokens"], "one had to compute it"
    first, second = (job.sampling.seed for job in bench.generator.jobs)
    assert 5 == first
    assert first != second
    assert 2 == len({job.request_id for job in bench.generator.jobs})


async def test_streamed_choices_are_told_apart_by_their_index() -> None:
    chunks = await stream(Bench(Script(["a", "b"]), Script(["c", "d"])), n=2)
    assert "ab" == content_of(chunks, 0)
    assert "cd" == content_of(chunks, 1)
    for index in (0, 1):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert {"role": "assistant", "content": ""} == own[0]["delta"]
        assert "stop" == own[-1]["finish_reason"]


async def test_a_choice_that_has_stopped_frees_its_place_while_others_go_on() -> None:
    stopped = asyncio.Event()
    bench = Bench(Script(["STOP", asyncio.Event()]), Script([stopped, "more"]))
    task = asyncio.create_task(answer(bench, n=2, stop="STOP"))
    async with asyncio.timeout(10):
        while not bench.generator.closed_early:  # noqa: ASYNC110 - a list tells nobody
            await asyncio.sleep(0.001)
    assert 1 == len(bench.generator.running)
    stopped.set()
    assert ["", "more"] == [choice["message"]["content"] for choice in (await task)["choices"]]


async def test_every_token_may_be_kept_by_either_name() -> None:
    for top_k in (0, -1):
        bench = Bench()
        await answer(bench, top_k=top_k)
        assert 0 == bench.generator.jobs[0].sampling.top_k


async def test_a_seed_is_drawn_when_none_is_given() -> None:
    seeds = set()
    for fields in ({}, {"seed": None}, {"seed": -1}):
        bench = Bench()
        await answer(bench, **fields)
        seeds.add(bench.generator.jobs[0].sampling.seed)
    assert 3 == len(seeds)


async def test_every_sampling_field_reaches_the_replica() -> None:
    bench = Bench()
    await answer(
        bench,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=-7,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={"97": 5, "bc": -1, "100": False},
        ignore_eos=True,
    )
    job = bench.generator.jobs[0]
    sampling = job.sampling
    assert job.ignore_eos
    assert 2**64 - 7 == sampling.seed
    assert (0.5, 0.9, 40, 0.1) == (
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.min_p,
    )
    assert (0.25, -0.5, 1.5) == (
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repeat_penalty,
    )
    assert {97: 5.0, 98: -1.0, 99: -1.0, 100: float("-inf")} == sampling.logit_bias
    assert sampling.logprobs is None


async def test_absent_and_null_fields_have_openais_defaults() -> None:
    names = ("temperature", "top_p", "n", "stop", "max_tokens", "logit_bias", "stream", "tools")
    for fields in ({}, dict.fromkeys((*names, "stream_options", "response_format", "logprobs"))):
        bench = Bench()
        await answer(bench, **fields)
        sampling = bench.generator.jobs[0].sampling
        assert (1.0, 1.0, 0, 0.0) == (
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.min_p,
        )


async def test_bias_in_llama_servers_form() -> None:
    bench = Bench()
    await answer(bench, logit_bias=[[97, 1.5], ["b", False], ["99", -2]])
    assert {97: 1.5, 98: float("-inf"), 99: -2.0} == bench.generator.jobs[0].sampling.logit_bias


async def test_fields_of_other_servers_are_tolerated() -> None:
    await answer(
        Bench(),
        no_stop_trim=False,
        skip_special_tokens=True,
        separate_reasoning=True,
        continue_final_message=False,
        return_hidden_states=False,
        user="me",
        response_format={"type": "text"},
        parallel_tool_calls=True,
        store=False,
    )


async def test_logprobs_are_told_for_every_shown_token() -> None:
    found = await answer(Bench(Script(["é", "!"])), logprobs=True, top_logprobs=2)
    entries = found["choices"][0]["logprobs"]["content"]
    assert [[0xC3], [0xA9], [0x21]] == [entry["bytes"] for entry in entries]
    assert [-0.5] * 3 == [entry["logprob"] for entry in entries]
    assert ["a", "b"] == [top["token"] for top in entries[2]["top_logprobs"]]


async def test_tokens_of_a_stop_string_have_no_logprobs() -> None:
    found = await answer(Bench(Script(["abSTOP"])), logprobs=True, stop="STOP")
    entries = found["choices"][0]["logprobs"]["content"]
    assert ["a", "b"] == [entry["token"] for entry in entries]


async def test_streamed_logprobs_wait_for_the_text_they_belong_to() -> None:
    chunks = await stream(Bench(Script(["a", "S", "x", "STOP"])), logprobs=True, stop="STOP")
    told = [
        (choice["delta"]["content"], "".join(e["token"] for e in choice["logprobs"]["content"]))
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["logprobs"]
    ]
    assert [("a", "a"), ("Sx", "Sx")] == told
