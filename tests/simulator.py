"""A whole serving machine in one thread and no real time: same seed, same run.

Everything from the proxy to the replicas' KV streams runs unchanged, the tasks of links and
servers included. Only the clock, the sockets and the model are simulated.
"""

import asyncio
import random
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from gateway.control import Control, ReplicaState
from gateway.dispatch import Dispatcher
from gateway.link import ReplicaLink
from gateway.prefix_index import PrefixIndex
from gateway.proxy import GenerationFailedError, Job, JobEvent, Proxy, RefusedError
from gateway.routing import least_loaded
from gateway.supervisor import ProcessState
from replica.blocks import block_hashes
from replica.wire import Frame, Hello, Sampling
from tests.fakes_gateway import CONTEXT_TOKENS, FACTS, FINGERPRINT, ROOT, Counts
from tests.simulated_parts import (
    Clock,
    SimulatedAddress,
    SimulatedLoop,
    SimulatedReplica,
    simulated_time,
)

SILENCE_MAX_S = 0.3
QUEUE_TIMEOUT_S = 60.0
ARRIVALS_S = 0.8
"""All clients have come by then."""
PATIENCE_S = 0.15
"""Of a client that leaves, on average."""
RESTART_S = 0.3
SETTLE_S = 3.0
"""Longer than a lost connection, or a hung replica, takes to be noticed and mended."""


class Witness(Control):
    """The control plane, with a look at the truth behind every frame."""

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        names = [(name, node) for node, name in enumerate(machine.addresses)]
        super().__init__(names, machine.dispatcher, machine.index, FINGERPRINT, CONTEXT_TOKENS)

    def connected(self, replica_id: str, hello: Hello) -> None:
        self._machine.loop.tell(f"{replica_id} connected, {len(hello.blocks)} blocks")
        super().connected(replica_id, hello)

    def heard(self, replica_id: str, frame: Frame) -> bool:
        self._machine.loop.tell(f"{replica_id} frame {frame.seq} {frame.outputs} {frame.finished}")
        whole = super().heard(replica_id, frame)
        if whole:
            truth = self._machine.addresses[replica_id].as_sent(frame.seq)
            assert truth == self._machine.index.held_blocks(replica_id)
        return whole

    def lost(self, replica_id: str, reason: str, *, silent: bool) -> None:
        self._machine.loop.tell(f"{replica_id} lost: {reason}")
        super().lost(replica_id, reason, silent=silent)


@dataclass(frozen=True)
class Faults:
    """How often things go wrong, per replica and second; and the share of clients that leave."""

    crash: float = 0.0
    cut: float = 0.0
    hang: float = 0.0
    lost_message: float = 0.0
    leaving: float = 0.0
    slow: float = 0.0
    """Share of clients that take their time between tokens."""


@dataclass
class Story:
    """What one client asked for and heard."""

    job: Job
    events: list[JobEvent] = field(default_factory=list)
    ending: str = ""


class Machine:
    """A gateway, its replicas, their misfortunes, and the clients."""

    def __init__(self, seed: int, faults: Faults, *, replicas: int, queue_max: int = 1000) -> None:
        self.rng = random.Random(seed)
        self.faults = faults
        self.loop = cast("SimulatedLoop", asyncio.get_running_loop())
        self.addresses = {f"node{number}": SimulatedAddress() for number in range(replicas)}
        self.index = PrefixIndex()
        self.dispatcher = Dispatcher(least_loaded, self.index, queue_max)
        self.control = Witness(self)
        self.links = {
            name: ReplicaLink(name, cast("Any", address), self.control, SILENCE_MAX_S)
            for name, address in self.addresses.items()
        }
        self.counts = Counts()
        self.proxy = Proxy(
            self.dispatcher,
            self.links,
            self.counts,
            root=ROOT,
            mode=lambda: "data-parallel",
            hopeless=lambda: self.control.hopeless,
            queue_timeout_s=QUEUE_TIMEOUT_S,
        )
        self.control.wake = self.proxy.wake
        self.control.end_process = self.kill
        self.stories: list[Story] = []
        self.crashes = 0
        self._restarts: set[asyncio.Task[None]] = set()

    async def run(self, clock: Clock, requests: int) -> None:
        """Serve so many clients to their ends, then see that nothing is left of them."""
        self._clock = clock
        for name, address in self.addresses.items():
            address.replica = self._new_replica(name)
        loops = [asyncio.ensure_future(link.run()) for link in self.links.values()]
        luck = [asyncio.ensure_future(self._misfortune(name)) for name in self.addresses]
        await asyncio.gather(*(self._client(number) for number in range(requests)))
        await self.proxy.idle()
        for task in luck:
            task.cancel()
        await asyncio.gather(*luck, return_exceptions=True)
        await asyncio.sleep(SETTLE_S)
        await asyncio.gather(*self._restarts)
        assert not any(loop.done() for loop in loops), "a link's loop never returns"
        self._check_rest()
        for task in loops:
            task.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        for address in self.addresses.values():
            assert address.replica is not None
            await address.replica.crash()

    # The clients.

    async def _client(self, number: int) -> None:
        story = Story(self._job(number))
        self.stories.append(story)
        slow, leaves = self._chance(self.faults.slow), self._chance(self.faults.leaving)
        await asyncio.sleep(self.rng.uniform(0.0, ARRIVALS_S))
        listening = asyncio.ensure_future(self._listen(story, slow=slow))
        if leaves:
            self.loop.call_later(self.rng.expovariate(1 / PATIENCE_S), listening.cancel)
        try:
            await listening
            story.ending = "done"
        except asyncio.CancelledError:
            story.ending = "left"
        except (RefusedError, GenerationFailedError) as error:
            story.ending = type(error).__name__
        self.loop.tell(f"{story.job.request_id} {story.ending}")

    async def _listen(self, story: Story, *, slow: bool) -> None:
        async with aclosing(self.proxy.generate(story.job)) as events:
            async for event in events:
                assert not story.ending
                self.loop.tell(f"{story.job.request_id} {event}")
                story.events.append(event)
                if slow:
                    await asyncio.sleep(self.rng.uniform(0.0, 0.05))

    def _job(self, number: int) -> Job:
        """Ask something; many prompts begin alike, as with system prompts and conversations."""
        opening = [1 + self.rng.randrange(3)] * 16 + [1 + self.rng.randrange(2)] * 16
        prompt = opening[: self.rng.choice((3, 16, 32))]
        prompt += [1 + self.rng.randrange(30) for _ in range(self.rng.randrange(1, 6))]
        temperature = self.rng.choice((0.0, 1.0))
        sampling = Sampling(seed=number, temperature=temperature, frequency_penalty=0.5)
        return Job(f"r{number}", prompt, self.rng.randrange(1, 16), sampling)

    def _chance(self, share: float) -> bool:
        return self.rng.random() < share

    # The replicas and what befalls them.

    def _new_replica(self, name: str) -> SimulatedReplica:
        facts = msgspec.structs.replace(FACTS, replica_id=name)
        return SimulatedReplica(facts, ROOT, self._clock)

    async def _misfortune(self, name: str) -> None:
        faults = self.faults
        kinds = {
            "crash": faults.crash,
            "cut": faults.cut,
            "hang": faults.hang,
            "lose": faults.lost_message,
        }
        total = sum(kinds.values())
        while total:
            await asyncio.sleep(self.rng.expovariate(total))
            (kind,) = self.rng.choices(list(kinds), list(kinds.values()))
            replica = self.addresses[name].replica
            if replica is None or replica.hung:
                continue
            self.loop.tell(f"{name} {kind}")
            match kind:
                case "crash":
                    self.kill(name)
                case "cut":
                    replica.cut()
                case "hang":
                    replica.hung = True
                case "lose":
                    replica.lose_a_message()

    def kill(self, name: str) -> None:
        """End a process; another takes its place, as the supervisor does it."""
        replica, self.addresses[name].replica = self.addresses[name].replica, None
        if replica is not None:
            self.crashes += 1
            self._restarts.add(asyncio.ensure_future(self._restart(name, replica)))

    async def _restart(self, name: str, dead: SimulatedReplica) -> None:
        assert [] == dead.failures()
        await dead.crash()
        self.control.process_changed(name, ProcessState.BACKOFF, "killed")
        await asyncio.sleep(self.rng.uniform(0.05, RESTART_S))
        self.addresses[name].replica = self._new_replica(name)
        self.control.process_changed(name, ProcessState.RUNNING, "")

    # What must be true in the end.

    def _check_rest(self) -> None:
        assert 0 == self.dispatcher.running
        assert 0 == self.dispatcher.queued
        assert {} == self.proxy._placements
        for name, address in self.addresses.items():
            replica = address.replica
            assert replica is not None
            assert [] == replica.failures()
            assert not replica.hung, "somebody noticed, and it was started again"
            assert ReplicaState.READY is self.control.replicas[name].state
            assert {} == self.links[name]._streams
            assert replica.scheduler.idle
            assert replica.facts.parallel == replica.kv_streams.free
            truth = set[int]()
            for cells in replica.runner.cells:
                truth.update(block_hashes(cells, replica.facts.block_tokens, ROOT))
            assert sorted(truth) == self.index.held_blocks(name)


@dataclass(frozen=True)
class Report:
    """What a run came to."""

    stories: list[Story]
    trace: str
    recoveries: int
    crashes: int
    connections: int
    missed_frames: int
    computed_tokens: int


def simulate(
    seed: int, faults: Faults, *, replicas: int = 2, requests: int = 20, queue_max: int = 1000
) -> Report:
    """Run one machine from its start to the end of its last client."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        loop = cast("SimulatedLoop", runner.get_loop())

        async def whole(clock: Clock) -> Report:
            machine = Machine(seed, faults, replicas=replicas, queue_max=queue_max)
            await machine.run(clock, requests)
            rows = machine.control.replicas.values()
            return Report(
                stories=machine.stories,
                trace=loop.trace,
                recoveries=machine.proxy.recoveries,
                crashes=machine.crashes,
                connections=sum(row.connections for row in rows),
                missed_frames=sum(row.missed_frames for row in rows),
                computed_tokens=sum(
                    address.replica.runner.rows
                    for address in machine.addresses.values()
                    if address.replica is not None
                ),
            )

        with simulated_time(loop) as clock:
            return runner.run(whole(clock))
