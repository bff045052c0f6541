"""The data plane's queue: who waits, who goes first, and who is sent away with a true word."""

import asyncio
from contextlib import aclosing

import pytest

from gateway.proxy import (
    RETRY_AFTER_S,
    GenerationFailedError,
    JobEvent,
    NoReplicaError,
    Placed,
    QueueFullError,
    QueueTimeoutError,
)
from replica.wire import FinishReason
from tests.fakes_gateway import Course, ProxyBench, assert_whole, long_job, replica, until


class TestQueue:
    """One replica with one slot, and a job that holds it until told otherwise."""

    async def occupied(self, *, queue_max: int = 8, queue_timeout_s: float = 60.0) -> ProxyBench:
        self.gate = asyncio.Event()
        busy = replica(Course(gate=self.gate), slots=1)
        bench = ProxyBench(busy, queue_max=queue_max, queue_timeout_s=queue_timeout_s)
        self.holder = bench.start(long_job("holder"))
        await until(lambda: busy.running)
        return bench

    async def test_who_waits_is_served_in_order(self) -> None:
        bench = await self.occupied()
        waiting = [bench.start(long_job(name)) for name in "abc"]
        await until(lambda: bench.dispatcher.queued == 3)
        self.gate.set()
        await asyncio.gather(self.holder, *waiting)

        served = [request.request_id for request in bench.replicas["r0"].requests]
        assert ["holder", "a", "b", "c"] == served
        bench.assert_at_rest()

    async def test_a_full_queue_refuses_and_says_when_to_return(self) -> None:
        bench = await self.occupied(queue_max=2)
        waiting = [bench.start(long_job(name)) for name in "ab"]
        await until(lambda: bench.dispatcher.queued == 2)
        bench.proxy._learn(10.0)
        bench.proxy._learn(20.0)
        with pytest.raises(QueueFullError) as refused:
            await bench.run(long_job("c"))

        # Two wait, each for about 11 s of the one slot.
        assert pytest.approx(22.0) == refused.value.retry_after_s
        self.gate.set()
        for asked, events in zip("ab", await asyncio.gather(*waiting), strict=True):
            assert_whole(long_job(asked), events)
        await self.holder
        bench.assert_at_rest()

    async def test_more_slots_mean_less_to_wait(self) -> None:
        bench = await self.occupied(queue_max=2)
        waiting = [bench.start(long_job(name)) for name in "ab"]
        await until(lambda: bench.dispatcher.queued == 2)
        assert RETRY_AFTER_S == bench.proxy.retry_after_s(), "nothing is known yet"
        bench.proxy._learn(10.0)
        bench.dispatcher.open("r9", 4)

        assert pytest.approx(10.0 * 2 / 5) == bench.proxy.retry_after_s()
        bench.dispatcher.close("r9")
        bench.dispatcher.close("r0")
        assert RETRY_AFTER_S == bench.proxy.retry_after_s()
        for task in (*waiting, self.holder):
            task.cancel()
        await asyncio.gather(*waiting, self.holder, return_exceptions=True)
        bench.assert_at_rest()

    async def test_nobody_is_told_to_return_at_once(self) -> None:
        bench = ProxyBench(replica())
        await bench.run(long_job())

        assert 1.0 == bench.proxy.retry_after_s()

    async def test_waiting_has_a_limit(self) -> None:
        bench = await self.occupied(queue_timeout_s=0.01)
        with pytest.raises(
            QueueTimeoutError, match=r"no replica was free within 0.01 s"
        ) as refused:
            await bench.run(long_job("late"))

        assert RETRY_AFTER_S == refused.value.retry_after_s
        assert 0 == bench.dispatcher.queued
        self.gate.set()
        await self.holder
        bench.assert_at_rest()

    async def test_waiting_for_no_open_replica_is_told_as_such(self) -> None:
        bench = ProxyBench(queue_timeout_s=0.01)
        with pytest.raises(NoReplicaError, match="no replica can serve"):
            await bench.run(long_job())
        bench.assert_at_rest()

    async def test_a_resumed_job_that_finds_nobody_in_time_fails(self) -> None:
        """Tokens have been sent: this can no longer be a 503."""
        bench = await self.occupied(queue_timeout_s=0.01)
        lost = replica(Course(lost_after=2), slots=1)
        bench.replicas["r1"] = lost
        bench.dispatcher.open("r1", 1)
        async with aclosing(bench.proxy.generate(long_job("lost"))) as events:
            assert Placed("r1", "data-parallel") == await anext(events)
            bench.dispatcher.close("r1")
            with pytest.raises(GenerationFailedError, match="no other came in time"):
                async for _ in events:
                    pass
        self.gate.set()
        await self.holder
        bench.assert_at_rest()

    async def test_a_resumed_job_goes_before_those_who_wait(self) -> None:
        bench = await self.occupied(queue_max=1)
        lost = replica(Course(lost_after=2), slots=1)
        bench.replicas["r1"] = lost
        bench.dispatcher.open("r1", 1)
        events = bench.proxy.generate(long_job("lost"))
        said: list[JobEvent] = [await anext(events)]
        bench.dispatcher.close("r1")
        waiting = bench.start(long_job("waiting"))
        await until(lambda: bench.dispatcher.queued == 1)

        async def go_on() -> None:
            said.extend([event async for event in events])

        going_on = asyncio.create_task(go_on())
        await until(lambda: bench.dispatcher.queued == 2)
        self.gate.set()
        await asyncio.gather(self.holder, waiting, going_on)

        assert_whole(long_job("lost"), said)
        served = [request.request_id for request in bench.replicas["r0"].requests]
        assert ["holder", "lost", "waiting"] == served
        bench.assert_at_rest()

    async def test_a_client_that_leaves_while_waiting_frees_its_place(self) -> None:
        bench = await self.occupied(queue_max=1)
        leaving = bench.start(long_job("leaving"))
        await until(lambda: bench.dispatcher.queued == 1)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving

        assert 0 == bench.dispatcher.queued
        waiting = bench.start(long_job("next"))
        self.gate.set()
        assert_whole(long_job("next"), await waiting)
        await self.holder
        bench.assert_at_rest()

    async def test_cancelled_in_the_tick_it_is_placed_it_gives_its_slot_on(self) -> None:
        """
        No storm hits this one: the job has its slot but not yet woken, and its client leaves. The
        next in the queue must get the slot, though nothing else will ever happen here.
        """
        bench = ProxyBench(replica(slots=1))
        first = bench.proxy.generate(long_job("first"))
        await anext(first)
        leaving = bench.start(long_job("leaving"))
        waiting = bench.start(long_job("waiting"))
        await until(lambda: bench.dispatcher.queued == 2)
        await first.aclose()
        assert 1 == bench.dispatcher.queued, "the slot went to the job that now leaves"
        leaving.cancel()

        assert_whole(long_job("waiting"), await waiting)
        assert leaving.cancelled()
        bench.assert_at_rest()

    async def test_cancelled_before_a_wake_it_is_not_in_its_way(self) -> None:
        """The other order: cancelled first, then given the slot in the same tick."""
        bench = ProxyBench(replica(slots=1))
        first = bench.proxy.generate(long_job("first"))
        await anext(first)
        leaving = bench.start(long_job("leaving"))
        waiting = bench.start(long_job("waiting"))
        await until(lambda: bench.dispatcher.queued == 2)
        leaving.cancel()
        await first.aclose()

        assert_whole(long_job("waiting"), await waiting)
        assert leaving.cancelled()
        bench.assert_at_rest()


class TestNobody:
    async def test_hopeless_from_the_start(self) -> None:
        bench = ProxyBench()
        bench.hopeless = True
        with pytest.raises(NoReplicaError, match="no replica can serve") as refused:
            await bench.run(long_job())

        assert RETRY_AFTER_S == refused.value.retry_after_s
        bench.assert_at_rest()

    async def test_hopelessness_wakes_everybody(self) -> None:
        bench = ProxyBench()
        waiting = [bench.start(long_job(name)) for name in "abc"]
        await until(lambda: bench.dispatcher.queued == 3)
        bench.hopeless = True
        bench.proxy.wake()
        errors = await asyncio.gather(*waiting, return_exceptions=True)

        assert [NoReplicaError] * 3 == [type(error) for error in errors]
        bench.assert_at_rest()

    async def test_hopelessness_after_a_loss_is_a_failure(self) -> None:
        bench = ProxyBench(replica(Course(lost_after=2)))
        events = bench.proxy.generate(long_job())
        await anext(events)
        bench.dispatcher.close("r0")
        bench.hopeless = True
        with pytest.raises(GenerationFailedError):
            async for _ in events:
                pass
        bench.assert_at_rest()

    async def test_cancelled_in_the_tick_all_hope_goes(self) -> None:
        bench = ProxyBench()
        leaving = bench.start(long_job())
        await until(lambda: bench.dispatcher.queued)
        bench.hopeless = True
        bench.proxy.wake()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)

        assert leaving.cancelled()
        bench.assert_at_rest()


class TestDraining:
    async def test_new_jobs_are_refused(self) -> None:
        bench = ProxyBench(replica())
        bench.proxy.draining = True
        with pytest.raises(NoReplicaError, match="shutting down"):
            await bench.run(long_job())
        bench.assert_at_rest()

    async def test_a_running_job_may_still_lose_its_replica(self) -> None:
        bench = ProxyBench(replica(Course(lost_after=2)), replica())
        events = bench.proxy.generate(long_job())
        said = [await anext(events)]
        bench.proxy.draining = True
        said += [event async for event in events]

        assert_whole(long_job(), said)
        bench.assert_at_rest()

    async def test_who_waited_before_is_served(self) -> None:
        gate = asyncio.Event()
        bench = ProxyBench(replica(Course(gate=gate), slots=1))
        holder, waiting = bench.start(long_job("holder")), bench.start(long_job("waiting"))
        await until(lambda: bench.dispatcher.queued == 1)
        bench.proxy.draining = True
        gate.set()

        assert_whole(long_job("waiting"), await waiting)
        await holder

    async def test_idle_comes_with_the_end_of_the_last_job(self) -> None:
        gate = asyncio.Event()
        bench = ProxyBench(replica(Course(gate=gate), slots=1))
        await bench.proxy.idle()
        jobs = [bench.start(long_job(name)) for name in "ab"]
        await until(lambda: bench.dispatcher.queued == 1)
        idle = asyncio.create_task(bench.proxy.idle())
        gate.set()
        await jobs[0]
        assert not idle.done(), "one still runs"
        await jobs[1]
        await idle

    async def test_idle_also_after_failures(self) -> None:
        bench = ProxyBench(replica(Course(finished=(FinishReason.FAILED, "broken"))))
        with pytest.raises(GenerationFailedError):
            await bench.run(long_job())

        await bench.proxy.idle()
