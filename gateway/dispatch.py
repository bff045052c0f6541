"""The request queue and the one function that matches it to replicas.

Nothing here waits, so between two awaits of the caller the state is always whole. `assign` is
called after every change; waking the assigned requests, and giving up on time, are the caller's.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.prefix_index import PrefixIndex
from gateway.routing import Candidate, Decision, Policy


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request's place in the queue."""

    request_id: str
    block_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """A ticket's end of waiting."""

    request_id: str
    decision: Decision


class Dispatcher:
    """Owns the queue and the count of what runs where."""

    def __init__(self, policy: Policy, prefix_index: PrefixIndex, queue_max: int) -> None:
        assert queue_max > 0
        self._policy = policy
        self._prefix_index = prefix_index
        self._queue_max = queue_max
        self._queue: deque[Ticket] = deque()
        self._resumed: deque[Ticket] = deque()
        """In front of the queue, in the order in which they came back."""
        self._slots: dict[str, int] = {}
        self._placed: dict[str, str] = {}
        self._inflight: dict[str, int] = {}
        self._decisions = 0
        self._chosen_at: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<Dispatcher {self.queued} queued, {self._inflight} of {self._slots}>"

    def open(self, replica_id: str, slots: int) -> None:
        """Let this replica have up to `slots` requests at once."""
        assert slots > 0
        self._slots[replica_id] = slots

    def close(self, replica_id: str) -> None:
        """Send no more to this replica; what it is already serving runs on."""
        self._slots.pop(replica_id, None)

    def submit(self, ticket: Ticket, *, resumed: bool = False) -> bool:
        """Queue the ticket. False means the queue is full and the client must be told so.

        A resumed request had its place already: it goes before all new ones, behind those that
        came back earlier, and is never refused.
        """
        assert ticket.request_id not in self._placed
        if resumed:
            self._resumed.append(ticket)
            return True
        if self.queued >= self._queue_max:
            return False
        self._queue.append(ticket)
        return True

    def release(self, request_id: str) -> None:
        """Forget a request that ended, wherever it had got to."""
        replica_id = self._placed.pop(request_id, None)
        if replica_id is None:
            for queue in (self._resumed, self._queue):
                for ticket in [each for each in queue if each.request_id == request_id]:
                    queue.remove(ticket)
        else:
            self._inflight[replica_id] -= 1

    def assign(self) -> list[Assignment]:
        """Place what can be placed, in order of arrival."""
        assignments: list[Assignment] = []
        while queue := self._resumed or self._queue:
            candidates = self._candidates(queue[0].block_hashes)
            if not candidates:
                break
            ticket = queue.popleft()
            decision = self._policy(candidates)
            assert decision.replica_id in self._slots
            self._placed[ticket.request_id] = decision.replica_id
            self._inflight[decision.replica_id] = self.inflight(decision.replica_id) + 1
            self._decisions += 1
            self._chosen_at[decision.replica_id] = self._decisions
            assignments.append(Assignment(ticket.request_id, decision))
        return assignments

    def inflight(self, replica_id: str) -> int:
        return self._inflight.get(replica_id, 0)

    @property
    def queued(self) -> int:
        return len(self._resumed) + len(self._queue)

    @property
    def running(self) -> int:
        return len(self._placed)

    @property
    def slots(self) -> int:
        """Of all open replicas together."""
        return sum(self._slots.values())

    def _candidates(self, hashes: Sequence[int]) -> list[Candidate]:
        return [
            Candidate(
                replica_id=replica_id,
                inflight=self.inflight(replica_id),
                slots=slots,
                matched_blocks=self._prefix_index.matched_blocks(replica_id, hashes),
                chosen_at=self._chosen_at.get(replica_id, 0),
            )
            for replica_id, slots in self._slots.items()
            if self.inflight(replica_id) < slots
        ]
