"""The data plane: every job is told everything, once, whatever happens to its replica."""

import asyncio
import random
from collections.abc import AsyncGenerator

import pytest

from gateway.link import ReplicaLostError
from gateway.proxy import Done, GenerationFailedError, Job, JobEvent, Placed, Tokens
from replica.blocks import BLOCK_TOKENS, block_hashes
from replica.wire import Finished, FinishReason, Generate, Output, TokenLogprobs
from tests.fakes_gateway import (
    GREEDY,
    ROOT,
    TOKENS_MAX,
    Course,
    FakeReplica,
    ProxyBench,
    assert_whole,
    expected,
    hello,
    job,
    long_job,
    replica,
    short_job,
    until,
)

DRAINING = (FinishReason.REFUSED, "this replica is draining")


@pytest.mark.parametrize("asked", [long_job(), short_job()], ids=["length", "stop"])
async def test_a_job_is_placed_generated_and_done(asked: Job) -> None:
    bench = ProxyBench(replica(Course(cached_tokens=2)))
    events = await bench.run(asked)

    assert_whole(asked, events)
    assert Placed("r0", "data-parallel") == events[0]
    first, *later = [event for event in events if isinstance(event, Tokens)]
    assert 2 == first.cached_tokens
    assert {None} == {event.cached_tokens for event in later}
    assert 2 == getattr(events[-1], "cached_tokens", None)
    assert {"r0": len(expected(asked))} == bench.counts.generated_tokens
    assert ["only"] == bench.counts.reasons
    assert 0 == bench.proxy.recoveries
    bench.assert_at_rest()


async def test_what_was_asked_reaches_the_replica() -> None:
    bench = ProxyBench(replica())
    asked = Job("x", [5, 6, 7], 4, GREEDY, ignore_eos=True)
    await bench.run(asked)

    assert [Generate("x", [5, 6, 7], 3, 4, GREEDY, ignore_eos=True)] == bench.replicas[
        "r0"
    ].requests


async def test_a_job_without_tokens_is_still_placed_and_done() -> None:
    bench = ProxyBench(replica(Course(finished=(FinishReason.STOP, None))))

    assert [Placed("r0", "data-parallel"), Done("stop", 0)] == await bench.run(long_job())


async def test_logprobs_are_passed_on() -> None:
    class WithLogprobs(FakeReplica):
        async def generate(self, request: Generate) -> AsyncGenerator[Output | Finished]:
            yield Output(request.request_id, [7], [TokenLogprobs(-0.5, [(7, -0.5)])], 0)
            yield Finished(request.request_id, FinishReason.STOP, 1, 0, 1)

    events = await ProxyBench(WithLogprobs()).run(long_job())

    assert Tokens([7], [TokenLogprobs(-0.5, [(7, -0.5)])], 0) == events[1]


@pytest.mark.parametrize("index", range(TOKENS_MAX + 1))
async def test_a_lost_replica_changes_no_token(index: int) -> None:
    """Lost at any token, the job goes on elsewhere: nothing repeated, nothing missing."""
    bench = ProxyBench(replica(Course(lost_after=index)), replica())
    asked = long_job()
    events = await bench.run(asked)

    assert_whole(asked, events)
    assert Placed("r0", "data-parallel") == events[0]
    if index < TOKENS_MAX:
        continued = Generate(
            "job", asked.token_ids + expected(asked)[:index], 2, TOKENS_MAX, GREEDY
        )
        assert [continued] == bench.replicas["r1"].requests
        assert 1 == bench.proxy.recoveries
    bench.assert_at_rest()


@pytest.mark.parametrize("asked", [long_job(), short_job()], ids=["length", "stop"])
async def test_a_loss_between_the_last_token_and_its_news_changes_nothing(asked: Job) -> None:
    """
    The limit is reached and nothing is left to ask for; or the model stops, and will say so again.
    """
    bench = ProxyBench(replica(Course(lost_before_finished=True)), replica())

    assert_whole(asked, await bench.run(asked))
    bench.assert_at_rest()


async def test_a_job_may_lose_its_replica_and_return_to_it() -> None:
    bench = ProxyBench(replica(Course(lost_after=3), slots=1))

    assert_whole(long_job(), await bench.run(long_job()))
    assert {"r0": TOKENS_MAX} == bench.counts.generated_tokens


async def test_cached_tokens_are_those_of_the_first_replica_heard() -> None:
    """Usage counts the prompt once: what the second replica had of it is its own affair."""
    bench = ProxyBench(
        replica(Course(lost_after=2, cached_tokens=1)), replica(Course(cached_tokens=9))
    )
    events = await bench.run(long_job())

    assert [1] == [
        event.cached_tokens
        for event in events
        if isinstance(event, Tokens) and event.cached_tokens is not None
    ]
    assert 1 == getattr(events[-1], "cached_tokens", None)


async def test_cached_tokens_come_with_the_first_token_also_from_the_second_replica() -> None:
    bench = ProxyBench(replica(Course(lost_after=0)), replica(Course(cached_tokens=2)))
    events = await bench.run(long_job())

    assert 2 == getattr(events[1], "cached_tokens", None)
    assert 2 == getattr(events[-1], "cached_tokens", None)


@pytest.mark.parametrize("indices", [(0, 0), (2, 1), (5, 0)])
async def test_a_job_that_loses_two_replicas_fails(indices: tuple[int, int]) -> None:
    """It may be the one that kills them."""
    lost = [replica(Course(lost_after=index)) for index in indices]
    bench = ProxyBench(*lost, replica())
    with pytest.raises(GenerationFailedError, match="2 replicas were lost"):
        await bench.run(long_job())

    assert [] == bench.replicas["r2"].requests
    bench.assert_at_rest()


async def test_a_replica_not_connected_is_a_loss() -> None:
    class Unconnected(FakeReplica):
        async def generate(self, request: Generate) -> AsyncGenerator[Output | Finished]:
            raise ReplicaLostError(f"r0 is not connected: {request.request_id}")
            yield

    bench = ProxyBench(Unconnected(), replica())

    assert_whole(long_job(), await bench.run(long_job()))


async def test_who_is_refused_goes_elsewhere() -> None:
    """A draining replica takes nothing more; to its gateway it looks like the idlest of all."""
    bench = ProxyBench(replica(*[Course(finished=DRAINING)] * 9), replica(slots=1))
    held = asyncio.Event()
    bench.replicas["r1"].courses.append(Course(gate=held))
    first, second = bench.start(long_job("first")), bench.start(long_job("second"))
    await until(lambda: bench.replicas["r1"].running)
    held.set()

    for asked, events in (("first", await first), ("second", await second)):
        assert_whole(long_job(asked), events)
    assert 1 == len(bench.replicas["r0"].requests), "nobody is sent where one was refused"
    assert 1 == bench.proxy.recoveries
    bench.assert_at_rest()


async def test_a_refusal_is_no_loss() -> None:
    """During a rolling restart several replicas drain: that must not fail anybody."""
    draining = [replica(Course(finished=DRAINING)) for _ in range(3)]
    bench = ProxyBench(*draining, replica())

    assert_whole(long_job(), await bench.run(long_job()))


async def test_refused_by_all_a_job_waits_for_one_to_return() -> None:
    bench = ProxyBench(replica(Course(finished=DRAINING)))
    running = bench.start(long_job())
    await until(lambda: bench.dispatcher.queued)
    bench.dispatcher.open("r0", 2)
    bench.proxy.wake()

    assert_whole(long_job(), await running)


@pytest.mark.parametrize(
    ("finished", "message"),
    [
        ((FinishReason.FAILED, "the logits are no numbers"), "the logits are no numbers"),
        ((FinishReason.CANCELLED, None), "the replica gave the request up"),
    ],
)
async def test_what_a_replica_gives_up_fails(
    finished: tuple[FinishReason, str | None], message: str
) -> None:
    bench = ProxyBench(replica(Course(finished=finished)), replica())
    with pytest.raises(GenerationFailedError, match=message):
        await bench.run(long_job())

    assert [] == bench.replicas["r1"].requests, "it would fail there as well"
    bench.assert_at_rest()


async def test_a_known_prompt_goes_where_it_is_known() -> None:
    bench = ProxyBench(replica(), replica())
    prompt = [token % 9 for token in range(2 * BLOCK_TOKENS)]
    bench.index.open("r0", hello(*block_hashes(prompt, BLOCK_TOKENS, ROOT + 1)))
    bench.index.open("r1", hello(*block_hashes(prompt, BLOCK_TOKENS, ROOT)))
    events = await bench.run(job("known", *prompt))

    assert Placed("r1", "data-parallel") == events[0]
    assert ["prefix"] == bench.counts.reasons


class TestClosing:
    async def test_before_anything_is_heard(self) -> None:
        bench = ProxyBench(replica())
        await bench.proxy.generate(long_job()).aclose()
        bench.assert_at_rest()

    async def test_when_placed_it_never_starts(self) -> None:
        bench = ProxyBench(replica())
        events = bench.proxy.generate(long_job())
        await anext(events)
        assert 1 == bench.dispatcher.running
        await events.aclose()

        assert [] == bench.replicas["r0"].requests
        bench.assert_at_rest()

    @pytest.mark.parametrize("heard", range(1, TOKENS_MAX + 1))
    async def test_in_the_middle_it_is_cancelled(self, heard: int) -> None:
        bench = ProxyBench(replica())
        events = bench.proxy.generate(long_job())
        for _ in range(1 + heard):
            await anext(events)
        await events.aclose()

        assert ["job"] == bench.replicas["r0"].cancelled
        bench.assert_at_rest()

    async def test_after_done_there_is_nothing_to_cancel(self) -> None:
        bench = ProxyBench(replica())
        events = bench.proxy.generate(long_job())
        while not isinstance(await anext(events), Done):
            pass
        await events.aclose()

        assert [] == bench.replicas["r0"].cancelled
        bench.assert_at_rest()

    async def test_a_cancelled_task_frees_the_slot_for_the_next(self) -> None:
        never = asyncio.Event()
        bench = ProxyBench(replica(Course(gate=never), slots=1))
        leaving = bench.start(long_job("leaving"))
        await until(lambda: bench.replicas["r0"].running)
        waiting = bench.start(long_job("waiting"))
        await until(lambda: bench.dispatcher.queued)
        leaving.cancel()

        assert_whole(long_job("waiting"), await waiting)
        assert ["leaving"] == bench.replicas["r0"].cancelled
        bench.assert_at_rest()


@pytest.mark.parametrize("seed", range(40))
async def test_a_storm_of_losses_and_leaving_clients(seed: int) -> None:
    """Whatever is lost, refused and cancelled: who stays gets its tokens, and all slots return."""
    rng = random.Random(seed)
    bench = ProxyBench(*(FakeReplica(slots) for slots in (1, 2, 3)), queue_max=100)
    for fake in bench.replicas.values():
        for _ in range(60):
            fake.courses.append(Course(lost_after=rng.choice([None] * 6 + [0, 2, 5])))
    tasks: dict[str, asyncio.Task[list[JobEvent]]] = {}
    left: set[str] = set()
    for number in range(60):
        tasks[str(number)] = bench.start(long_job(str(number)))
        for _ in range(rng.randrange(6)):
            await asyncio.sleep(0)
        if rng.random() < 0.5:
            gone = rng.choice([name for name, task in tasks.items() if not task.done()] or ["0"])
            tasks[gone].cancel()
            left.add(gone)
    results = await asyncio.gather(*tasks.values(), return_exceptions=True)

    for name, result in zip(tasks, results, strict=True):
        match result:
            case list():
                assert_whole(long_job(name), result)
            case asyncio.CancelledError():
                assert name in left
            case _:
                assert isinstance(result, GenerationFailedError), result
    bench.assert_at_rest()
