"""What the engine relies on: the same promises of the fake and of llama.cpp on small models.

llama.cpp's results depend a little on how tokens are batched, because the kernels for few and for
many rows round differently (up to 0.011 was measured here, of logits that span 6). Results are
compared within `ROUNDING`; a wrong token in the cache moves them by far more.
"""

import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from replica.batch import AbortedError, Batch, Chunk, Copy, Cut, DecodeError, Move
from replica.engine import Engine, StepResult
from replica.kv_streams import KvStreams
from replica.limits import Limits
from replica.llama import Llama, LlamaOptions, ModelLoadError
from replica.sampling import Sampler
from replica.scheduler import News, Scheduler
from replica.sequence import Sequence
from replica.wire import Cancel, EnginePhase, FinishReason, Generate
from tests.fakes import GREEDY, FakeRunner, Row
from tests.gguf_samples import EOS, tiny_llama, tiny_moe, tiny_recurrent, tiny_sliding_window

ROUNDING = 0.03
ROOM_TOKENS = 512
BATCH_TOKENS_MAX = 512
VOCAB_TOKENS = 264
WRITERS: dict[str, Callable[[Path], Path]] = {
    "dense": tiny_llama,
    "moe": tiny_moe,
    "sliding-window": tiny_sliding_window,
    "recurrent": tiny_recurrent,
}
REAL = [pytest.param(kind, marks=pytest.mark.model) for kind in WRITERS]
ALL = ["fake", "fake-recurrent", *REAL]
TRIMMABLE = ["fake", *REAL[:-1]]
RECURRENT = ["fake-recurrent", REAL[-1]]

Make = Callable[..., "Memory"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: write(folder / f"{kind}.gguf") for kind, write in WRITERS.items()}


@pytest.fixture
def make(kind: str, models: dict[str, Path]) -> Iterator[Make]:
    """Return a maker of runners of one kind, closed when the test ends."""
    made: list[FakeRunner | Llama] = []

    def maker(parallel: int = 1, batch_tokens_max: int = BATCH_TOKENS_MAX) -> Memory:
        made.append(runner_of(kind, models, parallel, batch_tokens_max))
        return Memory(made[-1], parallel)

    yield maker
    for runner in made:
        runner.close()


def runner_of(
    kind: str, models: dict[str, Path], parallel: int, batch_tokens_max: int
) -> FakeRunner | Llama:
    if kind.startswith("fake"):
        return FakeRunner(
            parallel,
            ROOM_TOKENS,
            batch_tokens_max=batch_tokens_max,
            trimmable=kind == "fake",
            vocab_tokens=VOCAB_TOKENS,
        )
    options = LlamaOptions(
        models[kind], ROOM_TOKENS, parallel, threads=1, batch_tokens_max=batch_tokens_max
    )
    return Llama(options)


@dataclass
class Memory:
    """A runner, spoken to in streams and tokens."""

    runner: FakeRunner | Llama
    parallel: int

    def decode(
        self,
        *chunks: Chunk,
        truncate: list[tuple[int, int]] | None = None,
        moves: Seq[Move] = (),
    ) -> list[Row]:
        for move in [*moves, *(Cut(*cut) for cut in truncate or [])]:
            assert self.runner.move(move)
        batch = Batch(EnginePhase.PREFILL, list(chunks), [])
        return [row.copy() for row in self.runner.decode(batch)]

    def read(self, stream_id: int, token_ids: list[int], keep: int = 0, step: int = 512) -> Row:
        """Compute what comes after `token_ids`, the first `keep` of which are in the stream."""
        truncate = [(stream_id, keep)]
        for start in range(keep, len(token_ids), step):
            size = min(step, len(token_ids) - start)
            rows = self.decode(chunk(token_ids, stream_id, start, size), truncate=truncate)
            truncate = []
            assert (start + size == len(token_ids)) == len(rows)
        (row,) = rows
        return row


def chunk(token_ids: list[int], stream_id: int, start: int = 0, size: int | None = None) -> Chunk:
    request = Generate("request", token_ids, len(token_ids), 10_000, GREEDY)
    sampler = Sampler(GREEDY, [], ignore_eos=False, prompt=token_ids, completion=[])
    sequence = Sequence(request, sampler)
    sequence.stream_id, sequence.computed_tokens = stream_id, start
    return Chunk(sequence, len(token_ids) - start if size is None else size)


def words(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 256, count)]


def same(expected: Row, row: Row) -> None:
    np.testing.assert_allclose(row, expected, rtol=0, atol=ROUNDING)
    assert good(expected, int(row.argmax()))


def good(expected: Row, token_id: int) -> bool:
    """Whether greedy may have drawn this token: nothing is better by more than rounding."""
    return bool(expected[token_id] >= expected.max() - 2 * ROUNDING)


def distance(one: Row, other: Row) -> float:
    return float(np.abs(one - other).max())


each_kind = pytest.mark.parametrize("kind", ALL)
each_trimmable = pytest.mark.parametrize("kind", TRIMMABLE)
each_width = pytest.mark.parametrize("parallel", [1, 4])


# What is computed


@each_kind
@each_width
def test_its_facts(make: Make, parallel: int, kind: str) -> None:
    memory = make(parallel)
    row = memory.read(0, words(3))
    assert (VOCAB_TOKENS,) == row.shape
    assert np.float32 == row.dtype
    assert np.isfinite(row).all()
    assert VOCAB_TOKENS == memory.runner.vocab_tokens
    assert BATCH_TOKENS_MAX == memory.runner.batch_tokens_max
    assert ("recurrent" not in kind) == memory.runner.trimmable
    if not kind.startswith("fake"):
        assert [EOS] == memory.runner.end_token_ids


@each_kind
def test_every_token_before_matters(make: Make) -> None:
    """Otherwise these tests could not tell a right cache from a wrong one."""
    memory, prompt = make(), words(60)
    row = memory.read(0, prompt)
    for place in (0, 20, 58, 59):
        changed = [*prompt[:place], prompt[place] ^ 1, *prompt[place + 1 :]]
        assert distance(row, memory.read(0, changed)) > 3 * ROUNDING


@each_kind
def test_the_order_of_tokens_matters(make: Make) -> None:
    memory, prompt = make(), words(60)
    swapped = [prompt[1], prompt[0], *prompt[2:]]
    assert distance(memory.read(0, prompt), memory.read(0, swapped)) > 3 * ROUNDING


@each_kind
@each_width
@pytest.mark.parametrize("step", [1, 7, 64, 299])
def test_chunks_add_up_to_the_whole(make: Make, parallel: int, step: int) -> None:
    """Beyond a window of 64 tokens, and beyond the 256 after which cells are counted anew."""
    memory, prompt = make(parallel), words(300)
    whole = memory.read(parallel - 1, prompt)
    same(whole, memory.read(0, prompt, step=step))


@each_kind
def test_streams_of_one_batch_do_not_meet(make: Make) -> None:
    memory = make(4)
    prompts = [words(count, seed=count) for count in (5, 130, 200, 33)]
    alone = [memory.read(0, prompt) for prompt in prompts]
    truncate = [(stream_id, 0) for stream_id in range(4)]
    rows = memory.decode(*(chunk(p, i) for i, p in enumerate(prompts)), truncate=truncate)
    for expected, row in zip(alone, rows, strict=True):
        same(expected, row)
    longer = [[*prompt, 65 + index] for index, prompt in enumerate(prompts)]
    rows = memory.decode(*(chunk(p, i, len(p) - 1) for i, p in enumerate(longer)))
    for prompt, row in zip(longer, rows, strict=True):
        same(memory.read(0, prompt), row)


@each_kind
def test_rows_come_for_those_that_are_complete_and_in_their_order(make: Make) -> None:
    memory = make(4)
    prompts = [words(count, seed=count) for count in (9, 8, 7)]
    alone = [memory.read(3, prompt) for prompt in prompts]
    rows = memory.decode(
        chunk(prompts[0], 0),
        chunk(prompts[1], 1, 0, 4),
        chunk(prompts[2], 2),
    )
    assert 2 == len(rows)
    same(alone[0], rows[0])
    same(alone[2], rows[1])
    assert [] == memory.decode(chunk(prompts[1], 1, 4, 2))


@each_kind
def test_streams_far_apart_share_a_batch(make: Make) -> None:
    memory, prompt = make(4), words(20)
    alone = memory.read(2, prompt)
    for row in memory.decode(chunk(prompt, 0), chunk(prompt, 3)):
        same(alone, row)


@each_kind
def test_a_row_may_be_used_up(make: Make) -> None:
    """The sampler writes into it."""
    memory, prompt = make(), words(20)
    expected = memory.read(0, [*prompt, 7])
    memory.runner.move(Cut(0, 0))
    batch = Batch(EnginePhase.PREFILL, [chunk(prompt, 0)], [])
    (row,) = memory.runner.decode(batch)
    row[:] = np.nan
    same(expected, memory.read(0, [*prompt, 7], keep=20))


@each_kind
def test_a_stream_can_be_filled_to_its_room_and_no_further(make: Make) -> None:
    memory, prompt = make(2), words(ROOM_TOKENS)
    beside = words(10, seed=1)
    expected = memory.read(0, beside)
    whole = memory.read(1, prompt)
    same(whole, memory.read(0, prompt, step=100))
    with pytest.raises(AssertionError):
        memory.decode(chunk([*prompt, 1], 1, ROOM_TOKENS))
    same(expected, memory.read(0, beside))


# What is reused


@pytest.mark.parametrize("kind", TRIMMABLE)
@each_width
@pytest.mark.parametrize("keep", [1, 63, 64, 65, 200, 299])
def test_a_prefix_is_reused_after_another_ending(make: Make, parallel: int, keep: int) -> None:
    memory, prompt = make(parallel), words(300)
    whole = memory.read(0, prompt)
    memory.read(0, prompt[:keep] + words(90, seed=1))
    same(whole, memory.read(0, prompt, keep=keep))


@each_kind
@each_width
def test_a_stream_is_continued_from_its_end(make: Make, parallel: int) -> None:
    memory, prompt = make(parallel), words(200)
    whole = memory.read(0, prompt)
    memory.read(0, prompt[:150])
    same(whole, memory.read(0, prompt, keep=150))


@each_kind
@each_width
def test_nothing_is_left_of_a_stream_that_was_emptied(make: Make, parallel: int) -> None:
    memory, prompt = make(parallel), words(40)
    last = parallel - 1
    fresh = memory.read(last, prompt)
    for _ in range(3):
        memory.read(last, words(400, seed=1))
        same(fresh, memory.read(last, prompt))


@each_kind
def test_cutting_one_stream_leaves_the_others(make: Make) -> None:
    memory, prompt = make(4), words(50)
    expected = memory.read(0, [*prompt, 9])
    for stream_id in range(4):
        memory.read(stream_id, prompt)
    memory.decode(chunk(words(5), 2), truncate=[(2, 0)])
    for stream_id in (0, 1, 3):
        same(expected, memory.read(stream_id, [*prompt, 9], keep=50))


@each_kind
def test_several_streams_are_cut_before_one_batch(make: Make) -> None:
    memory = make(4)
    for stream_id in range(4):
        memory.read(stream_id, words(30, seed=stream_id))
    prompts = {1: words(20, seed=8), 3: words(25, seed=9)}
    rows = memory.decode(
        *(chunk(prompt, stream_id) for stream_id, prompt in prompts.items()),
        truncate=[(3, 0), (1, 0)],
    )
    for prompt, row in zip(prompts.values(), rows, strict=True):
        same(memory.read(0, prompt), row)


# What is refused


@each_kind
@pytest.mark.parametrize("start", [0, 9, 11])
def test_gaps_and_overlaps_are_refused(make: Make, start: int) -> None:
    memory = make(2)
    memory.read(1, words(10))
    with pytest.raises(DecodeError):
        memory.decode(chunk(words(20), 1, start))


@each_kind
@pytest.mark.parametrize("token_id", [-1, VOCAB_TOKENS, 2**31 - 1])
def test_tokens_outside_the_vocabulary_are_refused(make: Make, token_id: int) -> None:
    with pytest.raises(DecodeError):
        make().decode(chunk([1, token_id], 0))


@each_kind
@pytest.mark.parametrize("stream_ids", [[2], [-1], [1, 0], [0, 0], [0, 1, 2]])
def test_stream_ids_ascend_within_what_there_is(make: Make, stream_ids: list[int]) -> None:
    """llama.cpp ends the process for an id it has no stream for."""
    with pytest.raises(AssertionError):
        make(2).decode(*(chunk(words(3), stream_id) for stream_id in stream_ids))


@each_kind
@pytest.mark.parametrize("cut", [(2, 0), (-1, 0), (0, 4), (0, -1)])
def test_cuts_of_what_is_not_there_are_refused(make: Make, cut: tuple[int, int]) -> None:
    memory = make(2)
    memory.read(0, words(3))
    with pytest.raises(AssertionError):
        memory.decode(chunk(words(1), 1), truncate=[cut])


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_state_that_cannot_be_cut_back_is_not(make: Make) -> None:
    memory = make()
    memory.read(0, words(10))
    with pytest.raises(DecodeError):
        memory.decode(chunk(words(10), 0, 5), truncate=[(0, 5)])


@each_kind
def test_a_batch_has_a_length_and_a_limit(make: Make) -> None:
    """llama.cpp ends the process for a longer one."""
    memory = make(2, batch_tokens_max=64)
    same(memory.read(0, words(64), step=32), memory.read(1, words(64), step=64))
    for chunks in ([], [chunk(words(65), 0)], [chunk(words(60), 0), chunk(words(5), 1)]):
        with pytest.raises(AssertionError):
            memory.decode(*chunks, truncate=[(0, 0), (1, 0)])


@each_kind
def test_there_may_be_more_streams_than_tokens_in_a_chunk(make: Make) -> None:
    memory = make(8, batch_tokens_max=4)
    rows = memory.decode(*(chunk([stream_id], stream_id) for stream_id in range(8)))
    for stream_id, row in enumerate(rows):
        same(memory.read(0, [stream_id]), row)


# All of it together


class Crowd:
    """An engine on a runner, and what became of each request."""

    def __init__(self, memory: Memory) -> None:
        self.prompts: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        runner = memory.runner
        kv_streams = KvStreams(memory.parallel, 16, 1, trimmable=runner.trimmable)
        limits = Limits(ROOM_TOKENS, VOCAB_TOKENS, 64, 16, 100)
        self.scheduler = Scheduler(kv_streams, limits, runner.end_token_ids)
        self.engine = Engine(runner, self.scheduler, kv_streams, self.publish)
        self.news = News()

    def publish(self, result: StepResult) -> None:
        for output in result.news.outputs:
            self.tokens[output.request_id] += output.token_ids
        self.reasons.update({f.request_id: f.reason for f in result.news.finished})

    def ask(self, name: str, prompt: list[int]) -> None:
        self.prompts[name], self.tokens[name] = prompt, []
        self.engine.obey(Generate(name, prompt, len(prompt), 12, GREEDY), self.news)

    def run(self, turns_max: int) -> None:
        for _ in range(turns_max):
            self.engine.step(self.news)
            self.news = News()
            if self.scheduler.idle:
                return


@each_kind
@each_width
def test_the_engine_draws_what_would_be_drawn_alone(make: Make, parallel: int) -> None:
    """
    Prompts that share prefixes come in a crowd, are chunked, cancelled and served from cache; then
    each token is compared with logits computed anew.
    """
    crowd, system = Crowd(make(parallel, batch_tokens_max=64)), words(70)
    for number in range(6):
        crowd.ask(str(number), system[: 70 - 9 * number] + words(11 * number, seed=number))
    crowd.run(turns_max=6)
    crowd.engine.obey(Cancel("1"), crowd.news)
    crowd.run(turns_max=14)
    crowd.ask("again", [*crowd.prompts["0"], *crowd.tokens["0"], 65, 66])
    crowd.run(turns_max=1000)
    assert set(crowd.prompts) == set(crowd.reasons)
    fresh = make(1)
    for name, prompt in crowd.prompts.items():
        completion = crowd.tokens[name]
        for place, token_id in enumerate(completion):
            assert good(fresh.read(0, prompt + completion[:place]), token_id)
        if crowd.reasons[name] is FinishReason.LENGTH:
            assert 12 == len(completion)


# Loading


@pytest.mark.model
def test_a_file_llama_cpp_cannot_load_is_an_error_with_a_name(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelLoadError, match=r"could not load .*broken\.gguf"):
        Llama(LlamaOptions(broken, 256, 1, threads=1))


@pytest.mark.model
def test_a_model_of_any_name_is_loaded(tmp_path: Path) -> None:
    odd = tmp_path / "ünï\udcff code.gguf"
    tiny_llama(tmp_path / "tiny.gguf").rename(odd)
    Llama(LlamaOptions(odd, 256, 1, threads=1)).close()


@pytest.mark.model
def test_kv_cells_of_eight_bits_are_near_enough(models: dict[str, Path]) -> None:
    prompt = words(100)
    rows = []
    for kv_type in ("f16", "q8_0"):
        llama = Llama(LlamaOptions(models["dense"], 256, 2, threads=1, kv_type=kv_type))
        rows.append(Memory(llama, 2).read(1, prompt))
        llama.close()
    assert 0 < distance(*rows) < 0.2


@pytest.mark.model
def test_a_context_that_llama_cpp_cannot_make_is_an_error_with_a_reason(tmp_path: Path) -> None:
    """Rows of eight-bit blocks need 32 values, which this model's heads do not have."""
    odd = tiny_llama(tmp_path / "odd.gguf", head_width=24)
    with pytest.raises(ModelLoadError, match="could not make a context"):
        Llama(LlamaOptions(odd, 256, 1, threads=1, kv_type="q8_0"))


@pytest.mark.model
def test_layers_with_a_window_forget_nothing_that_a_cut_may_need(models: dict[str, Path]) -> None:
    """Without `swa_full` they keep the window and a batch: too little for a prompt this long."""
    llama = Llama(LlamaOptions(models["sliding-window"], 2048, 1, threads=1))
    memory, prompt = Memory(llama, 1), words(1500)
    expected = memory.read(0, prompt[:200])
    memory.read(0, prompt)
    same(expected, memory.read(0, prompt[:200], keep=150))
    llama.close()


@pytest.mark.model
def test_the_library_is_one_for_the_process(models: dict[str, Path]) -> None:
    one = Llama(LlamaOptions(models["dense"], 256, 1, threads=1))
    other = Llama(LlamaOptions(models["moe"], 256, 1, threads=1))
    rows = [Memory(llama, 1).read(0, words(9)) for llama in (one, other, one)]
    same(rows[0], rows[2])
    assert distance(rows[0], rows[1]) > ROUNDING
    one.close()
    other.close()


# Moves, padding and guesses


@each_kind
def test_a_copy_goes_on_as_its_source_would(make: Make) -> None:
    memory, prompt = make(4), words(70)
    expected = memory.read(0, prompt)
    memory.read(1, prompt[:60])
    memory.read(2, words(9, seed=5))
    memory.runner.move(Copy(1, 2, 60))
    batch = Batch(EnginePhase.PREFILL, [chunk(prompt, 2, start=60)], [])
    (row,) = memory.runner.decode(batch)

    same(expected, row.copy())
    same(expected, memory.read(1, prompt, keep=60))


@pytest.mark.parametrize("kind", ["fake", *REAL[:2]])
def test_a_copy_may_be_shorter_than_its_source(make: Make) -> None:
    memory, prompt = make(4), words(70)
    expected = memory.read(0, prompt)
    assert memory.runner.copies_prefixes
    memory.read(3, [*prompt[:50], *words(40, seed=7)])
    memory.runner.move(Copy(3, 1, 50))
    batch = Batch(EnginePhase.PREFILL, [chunk(prompt, 1, start=50)], [])
    (row,) = memory.runner.decode(batch)

    same(expected, row)


@each_trimmable
def test_dummy_rows_leave_no_trace(make: Make) -> None:
    memory, prompt = make(4), words(40)
    expected = memory.read(0, [*prompt, 7])
    for stream_id in (1, 2, 3):
        memory.read(stream_id, prompt)
    row_chunk = chunk([*prompt, 7], 2, start=40)
    (row,) = memory.runner.decode(
        Batch(EnginePhase.DECODE, [row_chunk], [], (Cut(1, 40), Cut(3, 40)))
    )

    same(expected, row.copy())
    for stream_id in (1, 3):
        (row,) = memory.decode(chunk([*prompt, 7], stream_id, start=40))
        same(expected, row)


@each_trimmable
def test_every_row_behind_a_guess_has_its_logits(make: Make) -> None:
    memory, prompt, draft = make(2), words(30), words(5, seed=3)
    expected = [memory.read(0, [*prompt, *draft[:right]]) for right in range(6)]
    memory.read(1, prompt[:29])
    rows = memory.decode(replace(chunk(prompt, 1, start=29), draft=tuple(draft)))

    assert 6 == len(rows)
    for one, other in zip(expected, rows, strict=True):
        same(one, other)


def test_a_copy_of_a_sliding_window_is_whole_or_nothing(
    models: dict[str, Path],
) -> None:
    """What lies outside the window is not copied, so a shorter prefix could not go on from it."""
    llama = Llama(LlamaOptions(models["sliding-window"], ROOM_TOKENS, 2, threads=1))

    assert llama.trimmable
    assert not llama.copies_prefixes
    llama.close()


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind != REAL[2]])
def test_a_copy_is_cut_back_as_its_source_would_be(make: Make) -> None:
    """The engine goes on to use it like any other stream; hence none is made of a window's."""
    memory, prompt = make(2), words(300)
    expected = memory.read(0, prompt)
    memory.read(1, words(30, seed=1))
    memory.decode(chunk([*prompt, 7], 1, start=300), moves=[Copy(0, 1, 300)])
    if memory.runner.trimmable:
        same(memory.read(0, prompt[:200]), memory.read(1, prompt[:200], keep=199))
    same(expected, memory.read(1, prompt))


@pytest.mark.parametrize("kind", REAL)
def test_after_an_abort_it_goes_on_from_what_is_kept(make: Make) -> None:
    memory, prompt, beside = make(2), words(500), words(20, seed=1)
    whole, expected = memory.read(0, prompt), memory.read(0, [*beside, 7])
    keep = 100 if memory.runner.trimmable else 0
    memory.read(0, prompt[:100])
    memory.read(1, beside)
    with aborting(memory.runner), pytest.raises(AbortedError):
        memory.decode(chunk(prompt, 0, start=100))
    same(whole, memory.read(0, prompt, keep=keep))
    same(expected, memory.read(1, [*beside, 7], keep=20))


@contextmanager
def aborting(runner: FakeRunner | Llama) -> Iterator[None]:
    """Abort all the time: a decode forgets whatever came before it began."""
    over = threading.Event()

    def abort() -> None:
        while not over.is_set():
            runner.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@each_kind
def test_an_abort_that_comes_between_batches_does_nothing(make: Make) -> None:
    memory, prompt = make(), words(20)
    expected = memory.read(0, prompt)
    memory.runner.abort()
    same(expected, memory.read(0, prompt))


@pytest.mark.parametrize("kind", REAL[:-1])
def test_trials_of_steps_and_prompts_leave_nothing(make: Make) -> None:
    memory, prompt = make(4), words(50)
    assert isinstance(memory.runner, Llama)
    expected = memory.read(2, prompt)
    for rows in (1, 4):
        memory.runner.try_step(rows)
    memory.runner.try_prompt(128)
    same(expected, memory.read(2, prompt))
