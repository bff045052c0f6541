"""The dispatcher under a seeded storm, and its promises one by one."""

import random
from dataclasses import dataclass, field

import pytest

from gateway.dispatch import Assignment, Dispatcher, Ticket
from gateway.prefix_index import PrefixIndex
from gateway.routing import Decision, least_loaded
from replica.wire import Stored
from tests.fakes_gateway import frame, hello

SLOTS = {"node0": 2, "node1": 3, "node2": 1}
QUEUE_MAX = 5


def dispatcher(*replicas: str, queue_max: int = QUEUE_MAX) -> Dispatcher:
    made = Dispatcher(least_loaded, PrefixIndex(), queue_max)
    for replica_id in replicas:
        made.open(replica_id, SLOTS[replica_id])
    return made


def ticket(name: str, *hashes: int) -> Ticket:
    return Ticket(name, hashes)


def placed(assignments: list[Assignment]) -> list[str]:
    return [assignment.request_id for assignment in assignments]


@dataclass
class Storm:
    """A dispatcher, and beside it a book of its own about what must be true."""

    rng: random.Random
    index: PrefixIndex = field(default_factory=PrefixIndex)
    open: dict[str, int] = field(default_factory=dict)
    resumed: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    placed: dict[str, str] = field(default_factory=dict)
    frames: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dispatcher = Dispatcher(least_loaded, self.index, QUEUE_MAX)

    def arrive(self, name: str) -> None:
        queued = len(self.waiting) + len(self.resumed)
        accepted = self.dispatcher.submit(ticket(name, self.rng.randrange(4)))
        assert accepted == (queued < QUEUE_MAX)
        if accepted:
            self.waiting.append(name)

    def end(self) -> None:
        known = [*self.placed, *self.waiting, *self.resumed]
        if not known:
            return
        gone = self.rng.choice(known)
        self.dispatcher.release(gone)
        self.placed.pop(gone, None)
        self.waiting = [name for name in self.waiting if name != gone]
        self.resumed = [name for name in self.resumed if name != gone]

    def lose(self) -> None:
        """Close a replica; what it was serving comes back, as the proxy does it."""
        if not self.open:
            return
        replica_id = self.rng.choice(sorted(self.open))
        self.dispatcher.close(replica_id)
        self.index.forget(replica_id)
        del self.open[replica_id]
        for name in [name for name, where in self.placed.items() if where == replica_id]:
            self.dispatcher.release(name)
            del self.placed[name]
            assert self.dispatcher.submit(ticket(name, 0), resumed=True)
            self.resumed.append(name)

    def close(self) -> None:
        """Close a replica that goes on serving what it has."""
        if self.open:
            replica_id = self.rng.choice(sorted(self.open))
            self.dispatcher.close(replica_id)
            del self.open[replica_id]

    def return_(self) -> None:
        replica_id = self.rng.choice(sorted(SLOTS))
        self.dispatcher.open(replica_id, SLOTS[replica_id])
        self.index.open(replica_id, hello())
        self.open[replica_id] = SLOTS[replica_id]
        self.frames[replica_id] = 0

    def cache(self) -> None:
        if self.open:
            replica_id = self.rng.choice(sorted(self.open))
            self.frames[replica_id] += 1
            stored = Stored([self.rng.randrange(4)])
            assert self.index.apply(replica_id, frame(self.frames[replica_id], stored))

    def assign(self) -> None:
        for assignment in self.dispatcher.assign():
            first = self.resumed or self.waiting
            assert first[0] == assignment.request_id, "resumed ones first, then in order of arrival"
            first.pop(0)
            replica_id = assignment.decision.replica_id
            assert replica_id in self.open
            assert assignment.request_id not in self.placed
            self.placed[assignment.request_id] = replica_id

    def check(self) -> None:
        serving = list(self.placed.values())
        for replica_id, slots in SLOTS.items():
            assert serving.count(replica_id) == self.dispatcher.inflight(replica_id)
            assert serving.count(replica_id) <= slots
        free = any(serving.count(name) < slots for name, slots in self.open.items())
        assert not (free and (self.waiting or self.resumed)), "one waits while a slot is free"
        assert len(self.waiting) + len(self.resumed) == self.dispatcher.queued
        assert len(self.placed) == self.dispatcher.running
        assert sum(self.open.values()) == self.dispatcher.slots


@pytest.mark.parametrize("seed", range(50))
def test_no_request_is_lost_doubled_or_sent_to_a_closed_replica(seed: int) -> None:
    storm = Storm(random.Random(seed))
    verbs = ["arrive"] * 5 + ["end"] * 3 + ["lose", "close", "return", "return", "cache"]
    for tick in range(400):
        match storm.rng.choice(verbs):
            case "arrive":
                storm.arrive(f"r{tick}")
            case "end":
                storm.end()
            case "lose":
                storm.lose()
            case "close":
                storm.close()
            case "return":
                storm.return_()
            case "cache":
                storm.cache()
        storm.assign()
        storm.check()


def test_requests_are_placed_in_order_of_arrival() -> None:
    queue = dispatcher()
    for name in "abcd":
        assert queue.submit(ticket(name))
    queue.open("node1", 3)

    assert ["a", "b", "c"] == placed(queue.assign())
    assert 1 == queue.queued


def test_nothing_is_assigned_twice() -> None:
    queue = dispatcher("node0")
    assert queue.submit(ticket("a"))

    assert ["a"] == placed(queue.assign())
    assert [] == placed(queue.assign())


def test_a_full_queue_refuses_and_changes_nothing() -> None:
    queue = dispatcher(queue_max=2)
    assert queue.submit(ticket("a"))
    assert queue.submit(ticket("b"))

    assert not queue.submit(ticket("c"))
    assert 2 == queue.queued
    queue.open("node1", 3)
    assert ["a", "b"] == placed(queue.assign())


def test_resumed_requests_are_never_refused_and_go_first() -> None:
    """
    They had their place already. Among themselves they keep their order: the one whose client
    has waited longest must not be the last to go on.
    """
    queue = dispatcher(queue_max=1)
    assert queue.submit(ticket("new"))
    for name in ("first", "second"):
        assert queue.submit(ticket(name), resumed=True)
    assert 3 == queue.queued
    queue.open("node1", 3)

    assert ["first", "second", "new"] == placed(queue.assign())


def test_resumed_requests_count_against_the_queue() -> None:
    queue = dispatcher(queue_max=1)
    assert queue.submit(ticket("resumed"), resumed=True)

    assert not queue.submit(ticket("new"))


def test_who_gives_up_waiting_leaves_the_queue() -> None:
    queue = dispatcher()
    for name in "abc":
        assert queue.submit(ticket(name))
    assert queue.submit(ticket("r"), resumed=True)
    queue.release("b")
    queue.release("r")
    queue.release("never heard of")
    queue.open("node1", 3)

    assert ["a", "c"] == placed(queue.assign())


def test_a_closed_replica_keeps_its_count_until_its_requests_end() -> None:
    """
    A replica that comes back must not get more than it can hold while old requests still end.
    """
    queue = dispatcher("node0")
    for name in "abc":
        assert queue.submit(ticket(name))
    queue.assign()
    queue.close("node0")
    queue.close("node0")
    assert 0 == queue.slots
    assert 2 == queue.inflight("node0")
    queue.open("node0", 2)
    assert [] == placed(queue.assign())
    queue.release("a")

    assert ["c"] == placed(queue.assign())
    assert 2 == queue.running


def test_a_replica_may_come_back_with_another_size() -> None:
    queue = dispatcher("node0")
    for name in "abcd":
        assert queue.submit(ticket(name))
    assert ["a", "b"] == placed(queue.assign())
    queue.open("node0", 3)

    assert ["c"] == placed(queue.assign())
    assert 3 == queue.slots


def test_equally_idle_replicas_take_turns() -> None:
    queue = dispatcher("node0", "node1")
    chosen = []
    for name in "abcd":
        assert queue.submit(ticket(name))
        chosen += [assignment.decision for assignment in queue.assign()]
        queue.release(name)

    assert [Decision(f"node{n}", "turn") for n in (0, 1, 0, 1)] == chosen


def test_the_cache_decides_among_equally_idle() -> None:
    index = PrefixIndex()
    queue = Dispatcher(least_loaded, index, QUEUE_MAX)
    for replica_id in ("node0", "node1"):
        queue.open(replica_id, 2)
        index.open(replica_id, hello(*([7, 8] if replica_id == "node1" else [7])))
    assert queue.submit(ticket("a", 7, 8))

    assert [Assignment("a", Decision("node1", "prefix"))] == queue.assign()


def test_a_burst_sharing_a_prefix_is_still_spread() -> None:
    """The hot spot of every cache-aware router: all requests open with the same system prompt."""
    index = PrefixIndex()
    queue = Dispatcher(least_loaded, index, queue_max=32)
    for replica_id in ("a", "b"):
        queue.open(replica_id, 16)
    index.open("a", hello(7))
    for number in range(32):
        assert queue.submit(ticket(str(number), 7))
    queue.assign()

    assert (16, 16) == (queue.inflight("a"), queue.inflight("b"))


def test_the_same_request_twice_is_our_bug() -> None:
    queue = dispatcher("node0")
    assert queue.submit(ticket("a"))
    queue.assign()
    with pytest.raises(AssertionError):
        queue.submit(ticket("a"))


@pytest.mark.parametrize("wrong", [0, -1])
def test_a_queue_or_a_replica_without_room_is_our_bug(wrong: int) -> None:
    with pytest.raises(AssertionError):
        dispatcher(queue_max=wrong)
    with pytest.raises(AssertionError):
        dispatcher().open("node0", wrong)


def test_a_policy_that_invents_a_replica_is_our_bug() -> None:
    queue = Dispatcher(lambda _: Decision("elsewhere", "only"), PrefixIndex(), QUEUE_MAX)
    queue.open("node0", 1)
    assert queue.submit(ticket("a"))
    with pytest.raises(AssertionError):
        queue.assign()


def test_a_repr_tells_the_state() -> None:
    queue = dispatcher("node0")
    for name in "abc":
        assert queue.submit(ticket(name))
    queue.assign()

    assert "<Dispatcher 1 queued, {'node0': 2} of {'node0': 2}>" == repr(queue)
