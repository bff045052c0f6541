"""The engine on a fake llama.cpp, whose every token betrays a cache used wrongly."""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from replica.batch import Batch, Cut, DecodeError
from replica.blocks import block_hashes
from replica.engine import CancelAll, Command, Engine, StepResult
from replica.kv_streams import KvStreams
from replica.limits import Limits
from replica.pace import Pace
from replica.scheduler import News, Scheduler
from replica.step_curve import StepCurve
from replica.wire import (
    Cancel,
    Drain,
    EnginePhase,
    Evicted,
    Finished,
    FinishReason,
    Generate,
    Load,
    Sampling,
    Stored,
    decode_down,
    encode,
)
from tests.fakes import END_TOKEN_ID, GREEDY, VOCAB_TOKENS, FakeRunner, Row, reference

BLOCK_TOKENS = 2
ROOT = 7
CONTEXT_TOKENS = 96
SYSTEM = [1 + number % 7 for number in range(70)]
STEPS_MAX = 5_000


def seeded(seed: int) -> Sampling:
    return Sampling(seed, temperature=1.0)


class Bench:
    """An engine with everything it published gathered per request, checked as it comes."""

    def __init__(
        self,
        parallel: int = 2,
        *,
        chunk_tokens_max: tuple[int, int] = (8, 4),
        waiting_max: int = 100,
        trimmable: bool = True,
        curve: StepCurve | None = None,
    ) -> None:
        """The longest chunks of a prompt are those alone, and those beside streams."""
        alone, shared = chunk_tokens_max
        self.runner = FakeRunner(
            parallel, CONTEXT_TOKENS, batch_tokens_max=alone, trimmable=trimmable
        )
        self.kv_streams = KvStreams(parallel, BLOCK_TOKENS, ROOT, trimmable=trimmable)
        limits = Limits(CONTEXT_TOKENS, VOCAB_TOKENS, alone, shared, waiting_max)
        self.scheduler = Scheduler(self.kv_streams, limits, self.runner.end_token_ids, Pace(curve))
        self.engine = Engine(self.runner, self.scheduler, self.kv_streams, self.publish)
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.finished: dict[str, Finished] = {}
        self.results: list[StepResult] = []
        self.mirror: set[int] = set()

    def publish(self, result: StepResult) -> None:
        self.results.append(result)
        for output in result.news.outputs:
            assert output.request_id not in self.finished, "nothing follows a Finished"
            assert output.token_ids
            assert output.logprobs is None or len(output.logprobs) == len(output.token_ids)
            self.tokens[output.request_id] += output.token_ids
        for finished in result.news.finished:
            assert finished.request_id not in self.finished, "everything ends once"
            self.finished[finished.request_id] = finished
        for event in result.events:
            match event:
                case Stored(blocks):
                    assert self.mirror.isdisjoint(blocks)
                    self.mirror.update(blocks)
                case Evicted(blocks):
                    assert self.mirror.issuperset(blocks)
                    self.mirror.difference_update(blocks)

    def turn(self, *commands: Command) -> None:
        """One turn of the loop, and a look at the books behind it."""
        news = News()
        for command in commands:
            self.engine.obey(command, news)
        self.engine.step(news)
        self.check()

    def run_until_idle(self) -> None:
        for _ in range(STEPS_MAX):
            if self.scheduler.idle:
                return
            self.turn()
        raise AssertionError("the engine never became idle")

    def serve(self, *requests: Generate) -> None:
        self.turn(*requests)
        self.run_until_idle()

    def check(self) -> None:
        """Compare what the engine believes with what the cells hold."""
        cells = [list(held) for held in self.runner.cells]
        for move in self.scheduler._moves:
            assert isinstance(move, Cut)
            del cells[move.stream_id][move.keep :]
        truth = {name for held in cells for name in block_hashes(held, BLOCK_TOKENS, ROOT)}
        assert sorted(truth) == sorted(self.mirror) == self.kv_streams.held_blocks()
        assert cells == [self.kv_streams.tokens_of(index) for index in range(len(cells))]
        load = self.scheduler.load
        assert sum(map(len, cells)) == load.kv_used_tokens
        assert len(cells) - self.kv_streams.free == load.running
        if self.results:
            assert load == self.results[-1].load, "whoever listens knows the load"
        assert self.scheduler.idle == (load.running == load.waiting == 0)

    def answer(self, request_id: str) -> tuple[list[int], FinishReason]:
        return self.tokens[request_id], self.finished[request_id].reason


def generate(
    request_id: str, prompt: list[int], tokens_max: int = 6, sampling: Sampling = GREEDY
) -> Generate:
    return Generate(request_id, prompt, len(prompt), tokens_max, sampling)


def alone(request: Generate) -> list[int]:
    return reference(request, CONTEXT_TOKENS)


def ending(request: Generate, completion: list[int]) -> FinishReason:
    """How a request must end that was let run."""
    cut = len(completion) == request.tokens_max
    full = len(request.token_ids) + len(completion) == CONTEXT_TOKENS
    return FinishReason.LENGTH if cut or full else FinishReason.STOP


# Properties

# Few different tokens, so that prompts share prefixes; some long enough for many chunks.
prompts = st.one_of(
    st.lists(st.integers(1, 2), min_size=1, max_size=6),
    # Long enough in common to be copied, or to be waited for.
    st.builds(
        lambda shared, own: SYSTEM[:shared] + own,
        st.integers(20, 70),
        st.lists(st.integers(1, 3), min_size=1, max_size=5),
    ),
    st.lists(st.just(1), min_size=1, max_size=CONTEXT_TOKENS - 1),
    st.lists(st.integers(1, 31), min_size=1, max_size=25),
)
samplings = st.one_of(
    st.just(GREEDY),
    st.builds(seeded, st.integers(0, 3)),
    st.just(Sampling(5, temperature=0.8, top_p=0.9, repeat_penalty=1.3, frequency_penalty=0.4)),
    st.just(Sampling(6, temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)),
    # Texts that repeat themselves: always, or so often that some guesses are right.
    st.just(Sampling(7, temperature=0.0, logit_bias={1: 100.0})),
    st.builds(lambda seed: Sampling(seed, logit_bias={1: 4.0, 2: 4.0}), st.integers(0, 9)),
    st.just(Sampling(8, 0.0, frequency_penalty=1.5, logit_bias={1: 9.0, 2: 9.0})),
)
requests = st.builds(
    lambda prompt, tokens_max, sampling, ignore_eos: Generate(
        "", prompt, len(prompt), tokens_max, sampling, ignore_eos
    ),
    prompts,
    st.integers(1, 16),
    samplings,
    st.booleans(),
)


# Where more rows cost little, texts are guessed and gaps are filled.
curves = st.one_of(
    st.none(),
    st.just(StepCurve(dict.fromkeys(range(1, 9), 1.0))),
    st.lists(st.floats(0.1, 2.0), min_size=1, max_size=8).map(
        lambda costs: StepCurve(dict(enumerate(costs, start=1)))
    ),
)


@st.composite
def benches(draw: st.DrawFn, curves: st.SearchStrategy[StepCurve | None] = curves) -> Bench:
    longest = draw(st.integers(1, 12))
    return Bench(
        draw(st.integers(1, 4)),
        chunk_tokens_max=(longest, draw(st.integers(1, longest))),
        trimmable=draw(st.booleans()),
        curve=draw(curves),
    )


def named(request: Generate, request_id: str) -> Generate:
    return Generate(
        request_id,
        request.token_ids,
        request.prompt_tokens,
        request.tokens_max,
        request.sampling,
        request.ignore_eos,
    )


@given(benches(), st.lists(requests, min_size=1, max_size=8), st.data())
@settings(max_examples=200)
def test_company_and_cache_never_change_the_tokens(
    bench: Bench, wanted: list[Generate], data: st.DataObject
) -> None:
    """Packed, chunked or served from cache: each gets exactly what it would have got alone."""
    numbered = [named(request, str(number)) for number, request in enumerate(wanted)]
    for request in numbered:
        bench.turn(request)
        for _ in range(data.draw(st.integers(0, 6))):
            bench.turn()
    bench.run_until_idle()
    for request in numbered:
        completion = alone(request)
        expected = completion, ending(request, completion)
        assert expected == bench.answer(request.request_id)
    assert sum(result.rows for result in bench.results) == bench.runner.rows
    assert bench.scheduler.load == Load(0, 0, sum(map(len, bench.runner.cells)))


@given(
    benches(),
    st.lists(
        st.one_of(
            requests,
            requests,
            st.builds(Cancel, st.integers(0, 12).map(str)),
            st.integers(0, 10),
            st.none(),
        ),
        min_size=1,
        max_size=30,
    ),
    st.data(),
)
@settings(max_examples=200)
def test_each_request_ends_once_and_undamaged_whatever_is_cancelled(
    bench: Bench, actions: list[Generate | Cancel | int | None], data: st.DataObject
) -> None:
    """
    Cancelled ones leave no trace in the others' tokens, nor in the cache's books. Nor do batches
    that llama.cpp gave up: a number is how many tokens of the next one it computes.
    """
    asked: dict[str, Generate] = {}
    cancelled: set[str] = set()
    pending: list[Command] = []
    for action in actions:
        if isinstance(action, Generate):
            request = named(action, str(len(asked)))
            asked[request.request_id] = request
            pending.append(request)
        elif isinstance(action, int):
            bench.runner.abort_after = action
        elif action is not None:
            pending.append(action)
            if action.request_id in asked:
                cancelled.add(action.request_id)
        if action is None or data.draw(st.booleans()):
            bench.turn(*pending)
            pending = []
    bench.turn(*pending)
    bench.run_until_idle()

    assert set(asked) == set(bench.finished)
    for name, request in asked.items():
        tokens, reason = bench.answer(name)
        completion = alone(request)
        if reason is FinishReason.CANCELLED:
            assert name in cancelled
            assert completion[: len(tokens)] == tokens
        else:
            assert (completion, ending(request, completion)) == (tokens, reason)
        assert len(tokens) == bench.finished[name].completion_tokens


@given(benches(), prompts, samplings)
@settings(max_examples=50)
def test_a_request_resumed_at_any_cut_goes_on_as_if_undisturbed(
    bench: Bench, prompt: list[int], sampling: Sampling
) -> None:
    """It brings its completion behind its prompt; here half of it may even be cached."""
    whole = generate("whole", prompt, 9, sampling)
    completion = alone(whole)
    for cut in range(min(len(completion) + 1, 9)):
        tokens = prompt + completion[:cut]
        if len(tokens) == CONTEXT_TOKENS:
            continue  # it has ended there
        resumed = Generate(str(cut), tokens, len(prompt), 9, sampling)
        bench.serve(resumed)
        assert (completion[cut:], ending(whole, completion)) == bench.answer(str(cut))
        finished = bench.finished[str(cut)]
        assert (len(prompt), len(completion)) == (
            finished.prompt_tokens,
            finished.completion_tokens,
        )
        assert finished.cached_tokens <= len(prompt)


@given(benches(curves=st.none()), st.lists(requests, min_size=1, max_size=6))
def test_every_computed_token_is_accounted_for(bench: Bench, wanted: list[Generate]) -> None:
    """`cached_tokens` is exact: prompt and completion minus it are the rows really computed."""
    for number, request in enumerate(wanted):
        before = bench.runner.rows
        bench.serve(named(request, str(number)))
        finished = bench.finished[str(number)]
        computed = bench.runner.rows - before
        stopped = finished.reason is FinishReason.STOP
        fed = finished.prompt_tokens + finished.completion_tokens - (not stopped)
        assert fed - finished.cached_tokens == computed


def received(request: Generate) -> Generate:
    """The request as it comes out of the wire."""
    message = decode_down(encode(request))
    assert isinstance(message, Generate)
    return message


odd_numbers = st.one_of(st.integers(-(2**63), 2**64 - 1), st.integers(-2, 40))
odd_floats = st.one_of(st.floats(), st.sampled_from([0.0, 1.0, -1.0, 1e-30, 1e30, math.nan]))


@given(
    st.builds(
        Generate,
        st.text(max_size=3),
        st.lists(odd_numbers, max_size=6),
        odd_numbers,
        odd_numbers,
        st.builds(
            Sampling,
            odd_numbers,
            odd_floats,
            odd_floats,
            odd_numbers,
            odd_floats,
            odd_floats,
            odd_floats,
            odd_floats,
            st.dictionaries(odd_numbers, odd_floats, max_size=3),
            st.none() | odd_numbers,
        ),
    ),
)
@settings(max_examples=300)
def test_no_request_however_senseless_ends_the_engine(request: Generate) -> None:
    """Only this request fails: the other's tokens are the usual ones."""
    assume(request.request_id != "sound")
    bench = Bench()
    sound = generate("sound", [1, 2], 4)
    bench.serve(sound, received(request))
    assert alone(sound) == bench.tokens["sound"]
    assert request.request_id in bench.finished


@pytest.mark.parametrize("value", [-1, -0.5, math.nan, math.inf, 1e30, 1e300, 2**64 - 1])
@pytest.mark.parametrize("field", Sampling.__struct_fields__)
def test_no_field_of_a_sampling_ends_the_engine(field: str, value: float) -> None:
    strange: dict[str, Any] = {field: {3: value} if field == "logit_bias" else value}
    odd = generate("odd", [1], 2, Sampling(**{"seed": 1, **strange}))
    try:
        odd = received(odd)
    except msgspec.ValidationError:
        return  # the wire lets no fraction through where a whole number belongs
    bench = Bench()
    sound = generate("sound", [1, 2], 4)
    bench.serve(odd, sound)
    assert alone(sound) == bench.tokens["sound"]
    assert "odd" in bench.finished


# The cache


def test_a_repeated_prompt_computes_only_its_last_token() -> None:
    bench = Bench(parallel=1)
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    bench.serve(generate("first", prompt, 1))
    before = bench.runner.rows
    bench.serve(generate("again", prompt, 1))
    assert 1 == bench.runner.rows - before
    assert 7 == bench.finished["again"].cached_tokens


def test_a_conversation_goes_on_where_it_ended() -> None:
    bench = Bench(parallel=2)
    first = generate("first", [1, 2, 3], 4, Sampling(1, logit_bias={END_TOKEN_ID: -100.0}))
    bench.serve(first)
    history = [1, 2, 3, *bench.tokens["first"]]
    bench.serve(generate("second", [*history, 9, 9], 2))
    cached = bench.finished["second"].cached_tokens
    assert len(history) - 1 == cached, "the last token was drawn and never computed"


def test_a_state_that_cannot_be_cut_is_reused_only_from_its_end() -> None:
    bench = Bench(parallel=1, trimmable=False)
    bench.serve(generate("first", [1, 2, 3], 1))
    bench.serve(generate("diverges", [1, 2, 9], 1))
    bench.serve(generate("extends", [1, 2, 9, 8], 1))
    assert [0, 0, 3] == [f.cached_tokens for f in bench.finished.values()]


def test_a_cancelled_prompt_can_be_continued_from_where_it_was() -> None:
    bench = Bench(parallel=1, chunk_tokens_max=(4, 4))
    prompt = [*range(1, 20)]
    bench.turn(generate("left", prompt))
    bench.turn()
    bench.turn(Cancel("left"))
    request = generate("again", prompt)
    bench.serve(request)
    assert 8 == bench.finished["again"].cached_tokens
    assert alone(request) == bench.tokens["again"]


def test_cancelled_in_the_turn_it_came_it_touches_no_stream() -> None:
    bench = Bench()
    bench.turn(generate("a", [1, 2, 3]), Cancel("a"))
    assert FinishReason.CANCELLED is bench.finished["a"].reason
    assert 0 == bench.runner.rows


def test_an_id_is_free_again_in_the_turn_it_was_cancelled() -> None:
    bench = Bench()
    bench.turn(generate("a", [1, 2, 3]))
    bench.turn(Cancel("a"))
    del bench.finished["a"], bench.tokens["a"]
    request = generate("a", [4, 5])
    bench.serve(request)
    assert alone(request) == bench.tokens["a"]


def test_guesses_change_no_draw() -> None:
    """
    Two tokens in random turns: about every second guess is right, and some are followed by the
    end. Each token has its own place in the random stream, also the ones drawn in one step.
    """
    bench = Bench(curve=StepCurve(dict.fromkeys(range(1, 9), 1.0)))
    for seed in range(30):
        bias = {END_TOKEN_ID: 4.0, 1: 8.0, 2: 8.0}
        request = generate(str(seed), [1, 2, 1], 40, Sampling(seed, logit_bias=bias, logprobs=1))
        bench.serve(request)
        completion = alone(request)
        assert (completion, ending(request, completion)) == bench.answer(str(seed))
    told = [len(output.token_ids) for result in bench.results for output in result.news.outputs]
    assert {1, 2, 3} <= set(told)
    reasons = {finished.reason for finished in bench.finished.values()}
    assert {FinishReason.STOP, FinishReason.LENGTH} == reasons


def test_after_an_abort_a_state_that_cannot_be_cut_begins_anew() -> None:
    bench = Bench(parallel=1, trimmable=False)
    bench.serve(generate("first", [1, 2, 3], 1))
    request = generate("second", [1, 2, 3, 4, 5], 3)
    bench.runner.abort_after = 1
    bench.serve(request)
    assert alone(request) == bench.tokens["second"]
    assert 0 == bench.finished["second"].cached_tokens


# Ends


def test_a_full_context_ends_with_length() -> None:
    bench = Bench()
    prompt = [3] * (CONTEXT_TOKENS - 2)
    request = Generate("a", prompt, len(prompt), 100, GREEDY, ignore_eos=True)
    bench.serve(request)
    assert (alone(request), FinishReason.LENGTH) == bench.answer("a")
    assert 2 == len(bench.tokens["a"])


def test_an_end_that_the_prompt_has_shown_is_still_the_end() -> None:
    """Chat prompts are full of end tokens, and what follows them there must not be drawn on."""
    bench = Bench(curve=StepCurve(dict.fromkeys(range(1, 9), 1.0)))
    first_three_then_end = Sampling(
        1, temperature=0.0, frequency_penalty=20.0, logit_bias={3: 50.0, END_TOKEN_ID: 40.0}
    )
    bench.serve(generate("a", [1, 2, 3, END_TOKEN_ID, 5, 6, 1, 2], 9, first_three_then_end))
    assert ([3], FinishReason.STOP) == bench.answer("a")


@pytest.mark.parametrize("room", range(1, 10))
def test_guesses_end_where_the_context_ends(room: int) -> None:
    bench = Bench(curve=StepCurve(dict.fromkeys(range(1, 9), 1.0)))
    repeats = Sampling(1, temperature=0.0, logit_bias={1: 100.0})
    bench.serve(generate("a", [1] * (CONTEXT_TOKENS - room), 100, repeats))
    assert ([1] * room, FinishReason.LENGTH) == bench.answer("a")


@pytest.mark.parametrize("tokens_max", range(1, 10))
def test_guesses_end_where_the_request_ends(tokens_max: int) -> None:
    bench = Bench(curve=StepCurve(dict.fromkeys(range(1, 9), 1.0)))
    repeats = Sampling(1, temperature=0.0, logit_bias={1: 100.0})
    bench.serve(generate("a", [1] * 9, tokens_max, repeats))
    assert ([1] * tokens_max, FinishReason.LENGTH) == bench.answer("a")


def test_without_end_tokens_it_runs_to_its_length() -> None:
    """The same request stops where it may; the end token is neither told nor counted."""
    biased = Sampling(1, temperature=0.0, logit_bias={END_TOKEN_ID: 100.0})
    bench = Bench()
    bench.serve(generate("stops", [1, 2], 5, biased))
    assert ([], FinishReason.STOP) == bench.answer("stops")
    assert 0 == bench.finished["stops"].completion_tokens
    bench.serve(Generate("ignores", [1, 2], 2, 5, biased, ignore_eos=True))
    tokens, reason = bench.answer("ignores")
    assert (5, FinishReason.LENGTH) == (len(tokens), reason)
    assert END_TOKEN_ID not in tokens


def test_logits_that_are_no_numbers_fail_their_request_alone() -> None:
    bench = Bench()
    bench.runner.nan_after = (7, 7)
    sound = generate("sound", [1, 2])
    bench.serve(generate("broken", [7, 7]), sound)
    assert FinishReason.FAILED is bench.finished["broken"].reason
    assert "nan" in (bench.finished["broken"].error or "")
    assert alone(sound) == bench.tokens["sound"]


def test_logits_that_stop_being_numbers_fail_a_running_request_alone() -> None:
    bench = Bench()
    broken, sound = generate("broken", [5], sampling=seeded(1)), generate("sound", [1, 2])
    completion = alone(broken)
    bench.runner.nan_after = (5, *completion[:2])
    bench.serve(broken, sound)
    assert (completion[:2], FinishReason.FAILED) == bench.answer("broken")
    assert alone(sound) == bench.tokens["sound"]


def test_logits_that_stop_being_numbers_behind_a_right_guess_cost_no_token() -> None:
    bench = Bench(curve=StepCurve(dict.fromkeys(range(1, 9), 1.0)))
    repeats = Sampling(1, temperature=0.0, logit_bias={1: 100.0})
    for tokens in range(8):
        bench.runner.nan_after = (*[1] * 9, *[1] * tokens, 1)
        name = str(tokens)
        bench.serve(Generate(name, [1] * 10, 10, 20, repeats))
        assert ([1] * tokens, FinishReason.FAILED) == bench.answer(name)
    assert any(size > 1 for chunks in bench.runner.sizes[20:] for _, size in chunks)


# Order


@given(benches(), st.lists(requests, min_size=2, max_size=8))
def test_after_every_chunk_the_streams_get_their_token(
    bench: Bench, wanted: list[Generate]
) -> None:
    """Wherever somebody decodes, a second chunk in a row would stall them."""
    decoding: list[bool] = []
    for number, request in enumerate(wanted):
        bench.engine.obey(named(request, str(number)), News())
    while not bench.scheduler.idle:
        decoding.append(bool(bench.scheduler._decoding))
        bench.turn()
    steps = list(zip(bench.runner.phases, decoding, bench.runner.sizes, strict=True))
    for (phase, busy, sizes), (following, busy_then, _) in pairwise(steps):
        if phase is EnginePhase.PREFILL and busy:
            assert sizes[0][1] <= bench.scheduler._limits.batch_tokens_max
        if phase is EnginePhase.PREFILL and busy_then:
            assert EnginePhase.DECODE is following


def test_a_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    bench = Bench(chunk_tokens_max=(4, 4))
    bench.turn(generate("long", [1] * 36, 1), generate("short", [2] * 4, 1))
    bench.run_until_idle()
    assert ["short", "long"] == list(bench.finished)


# Commands and what is heard of them


def test_a_cancel_beside_a_running_request_is_heard() -> None:
    bench = Bench()
    stays = generate("stays", [1, 2], 8, Sampling(1, 0.0, logit_bias={END_TOKEN_ID: -100.0}))
    bench.turn(stays, generate("leaves", [3, 4], 8))
    bench.turn(Cancel("leaves"))
    assert FinishReason.CANCELLED is bench.finished["leaves"].reason
    assert 1 == len(bench.results[-1].news.finished)
    assert 0 < bench.results[-1].rows, "and the step went on"
    bench.run_until_idle()
    assert alone(stays) == bench.tokens["stays"]


def test_a_refusal_beside_a_running_request_is_heard() -> None:
    bench = Bench(parallel=1, waiting_max=0)
    bench.turn(generate("runs", [1, 2]))
    bench.turn(generate("refused", [1]))
    assert FinishReason.REFUSED is bench.finished["refused"].reason


def test_a_command_without_any_work_is_answered() -> None:
    bench = Bench()
    bench.turn(generate("wrong", []))
    assert FinishReason.FAILED is bench.finished["wrong"].reason
    assert 0 == bench.results[-1].rows


def test_nothing_is_published_when_nothing_has_changed() -> None:
    bench = Bench()
    bench.turn(Cancel("nobody"))
    bench.turn(CancelAll(1))
    assert [] == bench.results
    bench.serve(generate("a", [1, 2]))
    told = len(bench.results)
    bench.turn()
    assert told == len(bench.results)


def test_a_step_tells_its_rows_and_its_seconds() -> None:
    bench = Bench(chunk_tokens_max=(4, 4))
    bench.serve(generate("a", [1] * 6, 2))
    assert [4, 2, 1] == [result.rows for result in bench.results]
    assert all(result.seconds > 0 for result in bench.results)


def test_drawn_tokens_and_commands_share_one_result() -> None:
    bench = Bench()
    bench.turn(generate("a", [1, 2]), generate("wrong", []))
    (result,) = bench.results
    assert ["a"] == [output.request_id for output in result.news.outputs]
    assert ["wrong"] == [finished.request_id for finished in result.news.finished]


def test_of_a_gateway_that_left_nothing_more_is_said() -> None:
    """The next one may use its request ids again, and must not hear the old ones' tokens."""
    bench = Bench(parallel=1)
    bench.turn(generate("a", [1, 2, 3]), generate("b", [4]))
    bench.turn(Cancel("b"), CancelAll(1))
    assert "b" not in bench.finished
    assert Load(0, 0, 3) == bench.results[-1].load, "but that the replica is free, is"
    assert [0, 1] == [result.audience for result in bench.results]
    bench.tokens.clear()
    request = generate("a", [5, 6])
    bench.serve(request)
    assert alone(request) == bench.tokens["a"]
    assert {1} == {result.audience for result in bench.results[1:]}


def test_the_engine_says_what_it_is_doing_and_until_when() -> None:
    seen: list[tuple[EnginePhase, int]] = []
    bench = Bench(parallel=1, chunk_tokens_max=(4, 4))
    bench.scheduler.pace.observe(EnginePhase.PREFILL, 1, 1000.0)
    bench.scheduler.pace.observe(EnginePhase.DECODE, 1, 7000.0)
    decode = bench.runner.decode

    def watched(batch: Batch) -> list[Row]:
        progress = bench.engine.progress
        seen.append((progress.phase, round((progress.ends_at - time.monotonic()) / 1000)))
        return decode(batch)

    bench.runner.decode = watched  # type: ignore[method-assign]
    assert EnginePhase.IDLE is bench.engine.progress.phase
    bench.serve(generate("a", [1] * 6, 2))
    reading, decoding = EnginePhase.PREFILL, EnginePhase.DECODE
    assert [reading, reading, decoding] == [phase for phase, _ in seen]
    expected_s = [thousands for _, thousands in seen]
    assert (4, 7) == (expected_s[0], expected_s[2])
    assert bench.scheduler.pace.expect(EnginePhase.PREFILL, 1) < 1000, "it learns from its steps"
    assert bench.scheduler.pace.expect(EnginePhase.DECODE, 1) < 7000


# The loop on its own thread


class Running:
    """`Engine.run` on a thread of its own; commands go in and results come out."""

    def __init__(self, parallel: int = 2) -> None:
        self.bench = Bench(parallel)
        self.results: SimpleQueue[StepResult] = SimpleQueue()
        self.engine = Engine(
            self.bench.runner, self.bench.scheduler, self.bench.kv_streams, self.results.put
        )
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.engine.run()
        except BaseException as error:  # noqa: BLE001 - handed to whoever joins
            self.error = error

    def until(self, reached: Callable[[Bench], bool]) -> None:
        while not reached(self.bench):
            self.bench.publish(self.results.get(timeout=10))

    def join(self) -> None:
        self.thread.join(timeout=10)
        assert not self.thread.is_alive()
        while not self.results.empty():
            self.bench.publish(self.results.get())


def test_the_loop_works_from_the_first_command_to_the_drain() -> None:
    """It sleeps without work, wakes for a command, and never sleeps while there is work."""
    running = Running()
    asked = [generate(str(number), [1, 2, number + 3], 6) for number in range(4)]
    for request in asked[:2]:
        running.engine.send(request)
        running.until(lambda bench, name=request.request_id: name in bench.finished)  # type: ignore[misc]
    for request in asked[2:]:
        running.engine.send(request)
    running.engine.send(Drain())
    running.engine.send(generate("late", [1]))
    running.join()
    assert running.error is None
    assert FinishReason.REFUSED is running.bench.finished["late"].reason
    for request in asked:
        assert alone(request) == running.bench.tokens[request.request_id]


def test_an_idle_engine_drains_at_once() -> None:
    running = Running()
    running.engine.send(Drain())
    running.join()
    assert running.error is None


def test_an_engine_with_nothing_to_do_sleeps() -> None:
    """Every turn of the loop has a command to obey or a batch to compute."""
    running = Running()
    turns, schedule = [0], running.bench.scheduler.schedule

    def counted() -> Batch | None:
        turns[0] += 1
        return schedule()

    running.bench.scheduler.schedule = counted  # type: ignore[method-assign]
    for name in ("a", "b"):
        running.engine.send(generate(name, [1], 1))
        running.until(lambda bench, name=name: name in bench.finished)  # type: ignore[misc]
    running.engine.send(Drain())
    running.join()
    commands, batches = 3, len(running.bench.runner.phases)
    assert turns[0] <= commands + batches


def test_a_batch_that_llama_cpp_refuses_ends_the_loop() -> None:
    """The cache can no longer be trusted; the process must end, and does so by this."""
    running = Running()
    running.engine.send(generate("a", [1, 2, 3], 1))
    running.until(lambda bench: "a" in bench.finished)
    running.bench.runner.cells[0].append(9)
    running.bench.runner.trimmable = False
    running.engine.send(generate("b", [1, 2, 3, 4]))
    running.join()
    assert isinstance(running.error, DecodeError)
    assert ["a"] == list(running.bench.finished)


def test_a_prompt_that_is_cancelled_is_not_read_to_its_end() -> None:
    """Only its own cancel stops the step, which may take seconds on a large model."""
    running = Running()
    runner, inside = running.bench.runner, threading.Event()
    decode = runner.decode

    def held(batch: Batch) -> list[Row]:
        inside.set()
        assert runner.aborted.wait(10)
        runner.abort_after = 3
        return decode(batch)

    runner.decode = held  # type: ignore[method-assign]
    running.engine.send(generate("long", [1, 2, 3, 4, 5, 6, 7, 8]))
    assert inside.wait(10)
    running.engine.send(Cancel("another"))
    assert not runner.aborted.is_set()
    running.engine.send(Cancel("long"))
    running.until(lambda bench: "long" in bench.finished)
    assert FinishReason.CANCELLED is running.bench.finished["long"].reason
    runner.decode = decode  # type: ignore[method-assign]
    request = generate("again", [1, 2, 3, 4, 9])
    running.engine.send(request)
    running.engine.send(Drain())
    running.join()
    assert alone(request) == running.bench.tokens["again"]
    assert 0 == running.bench.finished["again"].cached_tokens


def test_a_decode_step_is_not_stopped_by_a_cancel() -> None:
    """The others would lose their tokens, or wait for them twice."""
    running = Running()
    runner, decode = running.bench.runner, running.bench.runner.decode
    aborted: list[bool] = []

    def watched(batch: Batch) -> list[Row]:
        if batch.phase is EnginePhase.DECODE and not aborted:
            running.engine.send(Cancel("a"))
            aborted.append(runner.aborted.is_set())
        return decode(batch)

    runner.decode = watched  # type: ignore[method-assign]
    running.engine.send(generate("a", [1, 2], 20))
    running.until(lambda bench: "a" in bench.finished)
    running.engine.send(Drain())
    running.join()
    assert [False] == aborted


def test_an_engine_whose_listener_fails_ends_too() -> None:
    bench = Bench()

    def deaf(_result: StepResult) -> None:
        raise RuntimeError("nobody can hear this")

    engine = Engine(bench.runner, bench.scheduler, bench.kv_streams, deaf)
    engine.send(generate("a", [1]))
    with pytest.raises(RuntimeError):
        engine.run()
