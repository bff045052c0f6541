"""The control plane: what is known of every replica, and who may get requests.

Owns the table of replicas. Hears the links and the supervisor, keeps the prefix index and opens
and closes replicas at the dispatcher. Synchronous throughout: it decides, and calls a function
when somebody else has to act on it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from gateway.dispatch import Dispatcher
from gateway.prefix_index import PrefixIndex
from gateway.supervisor import ProcessState
from replica.wire import EnginePhase, Facts, Frame, Heartbeat, Hello, Load

log = logging.getLogger(__name__)

NO_LOAD = Load(0, 0, 0)


class ReplicaState(Enum):
    """What a replica is to the gateway."""

    STARTING = "starting"
    """Not connected, and expected to be soon."""
    READY = "ready"
    REFUSED = "refused"
    """Connected, but it must not serve: wrong model, or memory on the wrong node."""
    FAILED = "failed"
    """Its process has ended for good."""


@dataclass(slots=True)
class Replica:
    """One row of the table."""

    replica_id: str
    node: int
    state: ReplicaState = ReplicaState.STARTING
    reason: str = ""
    facts: Facts | None = None
    load: Load = NO_LOAD
    phase: EnginePhase = EnginePhase.LOADING
    epoch: int | None = None
    connections: int = 0
    missed_frames: int = 0


class Control:
    """Hears of everything that happens to replicas."""

    def __init__(
        self,
        replicas: Sequence[tuple[str, int]],
        dispatcher: Dispatcher,
        prefix_index: PrefixIndex,
        fingerprint: str,
        context_tokens: int,
    ) -> None:
        self.replicas = {name: Replica(name, node) for name, node in replicas}
        self._dispatcher = dispatcher
        self._prefix_index = prefix_index
        self._fingerprint = fingerprint
        self._context_tokens = context_tokens
        self.wake: Callable[[], None] = lambda: None
        """Called when something may now be placed."""
        self.count_cached: Callable[[Mapping[str, int]], None] = lambda _tokens: None
        """Called with the prompt tokens, by tier, that a replica need not compute."""
        self.end_process: Callable[[str], None] = lambda _replica_id: None
        """Called when a replica has fallen silent."""
        self.draining = False
        self.all_failed = asyncio.Event()
        """Set when every replica's process has ended for good."""

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be served."""
        return not self.draining and any(
            replica.state is ReplicaState.READY for replica in self.replicas.values()
        )

    @property
    def hopeless(self) -> bool:
        """Whether no replica can be expected to serve, however long one waits."""
        return all(
            replica.state in {ReplicaState.FAILED, ReplicaState.REFUSED}
            for replica in self.replicas.values()
        )

    def connected(self, replica_id: str, hello: Hello) -> None:
        replica = self.replicas[replica_id]
        replica.connections += 1
        replica.epoch = hello.epoch
        replica.facts = facts = hello.facts
        replica.node = facts.node
        replica.load = hello.load
        if objection := self._objection(facts):
            replica.state, replica.reason = ReplicaState.REFUSED, objection
            log.error("%s may not serve: %s", replica_id, objection)
            self.wake()  # it may have been the last hope of those who wait
            return
        replica.state, replica.reason = ReplicaState.READY, ""
        self._prefix_index.open(replica_id, hello)
        self._dispatcher.open(replica_id, facts.parallel)
        log.info("%s is ready: node %d, pid %d", replica_id, facts.node, facts.pid)
        self.wake()

    def _objection(self, facts: Facts) -> str | None:
        if facts.model_fingerprint != self._fingerprint:
            return "it holds another model than this gateway's --model"
        if facts.context_tokens < self._context_tokens:
            return f"its --ctx {facts.context_tokens} is below the gateway's {self._context_tokens}"
        return facts.refusal

    def heard(self, replica_id: str, frame: Frame) -> bool:
        replica = self.replicas[replica_id]
        replica.load = frame.load
        if frame.cached_tokens:
            self.count_cached(frame.cached_tokens)
        if replica.state is not ReplicaState.READY:
            return True
        if self._prefix_index.apply(replica_id, frame):
            return True
        replica.missed_frames += 1
        return False

    def beat(self, replica_id: str, heartbeat: Heartbeat) -> None:
        self.replicas[replica_id].phase = heartbeat.phase

    def lost(self, replica_id: str, reason: str, *, silent: bool) -> None:
        """The connection broke: nothing more is known of the replica."""
        replica = self.replicas[replica_id]
        self._dispatcher.close(replica_id)
        self._prefix_index.forget(replica_id)
        replica.facts = None
        replica.load = NO_LOAD
        if replica.state is not ReplicaState.FAILED:
            replica.state, replica.reason = ReplicaState.STARTING, reason
        if silent:
            self.end_process(replica_id)

    def process_changed(self, replica_id: str, state: ProcessState, reason: str) -> None:
        replica = self.replicas[replica_id]
        match state:
            case ProcessState.FAILED:
                replica.state, replica.reason = ReplicaState.FAILED, reason
                self._dispatcher.close(replica_id)
                if all(each.state is ReplicaState.FAILED for each in self.replicas.values()):
                    self.all_failed.set()
                self.wake()
            case ProcessState.BACKOFF:
                replica.reason = reason
            case ProcessState.RUNNING | ProcessState.STOPPED:
                pass
