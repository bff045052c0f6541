"""The control plane: who may get requests, and who is told when that changes."""

from typing import Any

import msgspec
import pytest

from gateway.control import Control, ReplicaState
from gateway.dispatch import Dispatcher, Ticket
from gateway.prefix_index import PrefixIndex
from gateway.routing import least_loaded
from gateway.supervisor import ProcessState
from replica.wire import EnginePhase, Heartbeat, Load, Stored
from tests.fakes_gateway import CONTEXT_TOKENS, FINGERPRINT, facts, frame, hello

A, B = "replica-0", "replica-1"


class Bench:
    """A control plane on a real dispatcher, with what it asked of others."""

    def __init__(self, *names: str) -> None:
        self.index = PrefixIndex()
        self.dispatcher = Dispatcher(least_loaded, self.index, queue_max=9)
        self.control = Control(
            [(name, node) for node, name in enumerate(names)],
            self.dispatcher,
            self.index,
            FINGERPRINT,
            CONTEXT_TOKENS,
        )
        self.wakes = 0
        self.ended: list[str] = []
        self.control.wake = self._woken
        self.control.end_process = self.ended.append

    def _woken(self) -> None:
        self.wakes += 1

    def states(self) -> list[ReplicaState]:
        return [replica.state for replica in self.control.replicas.values()]

    def fail(self, name: str) -> None:
        self.control.process_changed(name, ProcessState.FAILED, "it exited with 2")


def test_a_replica_starts_out_expected_and_without_slots() -> None:
    bench = Bench(A, B)

    assert [ReplicaState.STARTING, ReplicaState.STARTING] == bench.states()
    assert not bench.control.ready
    assert not bench.control.hopeless
    assert 0 == bench.dispatcher.slots
    assert [0, 1] == [replica.node for replica in bench.control.replicas.values()]


def test_a_connected_replica_gets_requests() -> None:
    bench = Bench(A)
    assert bench.dispatcher.submit(Ticket("waiting", (7,)))
    bench.control.connected(A, hello(7, about=facts(node=3, parallel=4), epoch=5))

    assert bench.control.ready
    assert 4 == bench.dispatcher.slots
    assert 1 == bench.wakes
    assert [7] == bench.index.held_blocks(A)
    row = bench.control.replicas[A]
    assert (ReplicaState.READY, 3, 5, 1) == (row.state, row.node, row.epoch, row.connections)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"model_fingerprint": "model-b"}, "another model"),
        ({"context_tokens": CONTEXT_TOKENS - 1}, "its --ctx 63 is below the gateway's 64"),
        ({"refusal": "only 3 % of its memory is local"}, "only 3 % of its memory is local"),
    ],
)
def test_a_replica_that_must_not_serve_is_refused(wrong: dict[str, Any], reason: str) -> None:
    bench = Bench(A)
    bench.control.connected(A, hello(7, about=facts(**wrong)))

    assert [ReplicaState.REFUSED] == bench.states()
    assert reason in bench.control.replicas[A].reason
    assert 0 == bench.dispatcher.slots
    assert not bench.control.ready
    assert [] == bench.index.held_blocks(A)
    assert bench.control.heard(A, frame(1, Stored([8]))), "a refused one is not reconnected"
    assert [] == bench.index.held_blocks(A)


def test_a_larger_context_than_asked_for_will_do() -> None:
    bench = Bench(A)
    bench.control.connected(A, hello(about=facts(context_tokens=CONTEXT_TOKENS + 1)))

    assert bench.control.ready


def test_the_refusal_of_the_last_hope_wakes_those_who_wait() -> None:
    """They would otherwise wait for the queue's timeout, minutes, for nobody."""
    bench = Bench(A)
    bench.control.connected(A, hello(about=facts(model_fingerprint="model-b")))

    assert bench.control.hopeless
    assert 1 == bench.wakes


def test_a_lost_replica_gets_nothing_more_and_is_expected_back() -> None:
    bench = Bench(A)
    bench.control.connected(A, msgspec.structs.replace(hello(7), load=Load(1, 2, 3)))
    assert Load(1, 2, 3) == bench.control.replicas[A].load
    bench.control.lost(A, "the socket broke", silent=False)

    assert [ReplicaState.STARTING] == bench.states()
    assert "the socket broke" == bench.control.replicas[A].reason
    assert 0 == bench.dispatcher.slots
    assert [] == bench.index.held_blocks(A)
    assert bench.control.replicas[A].facts is None
    assert Load(0, 0, 0) == bench.control.replicas[A].load
    assert [] == bench.ended, "one that merely hung up is not killed"
    assert not bench.control.hopeless


def test_a_silent_replica_is_ended() -> None:
    bench = Bench(A, B)
    bench.control.connected(B, hello())
    bench.control.lost(B, "silent for 2.0 s", silent=True)

    assert [B] == bench.ended


def test_a_returning_replica_serves_again_with_what_it_then_holds() -> None:
    bench = Bench(A)
    bench.control.connected(A, hello(7))
    bench.control.lost(A, "restart", silent=False)
    bench.control.connected(A, hello(8, epoch=2))

    row = bench.control.replicas[A]
    assert (ReplicaState.READY, "", 2, 2) == (row.state, row.reason, row.epoch, row.connections)
    assert [8] == bench.index.held_blocks(A)
    assert 2 == bench.wakes


def test_a_refused_replica_may_come_back_mended() -> None:
    bench = Bench(A)
    bench.control.connected(A, hello(about=facts(refusal="memory is elsewhere")))
    bench.control.lost(A, "restart", silent=False)
    assert [ReplicaState.STARTING] == bench.states()
    bench.control.connected(A, hello())

    assert bench.control.ready


def test_frames_keep_the_index_and_the_load() -> None:
    bench = Bench(A)
    bench.control.connected(A, hello(1))

    assert bench.control.heard(A, frame(1, Stored([2]), load=Load(1, 2, 3)))
    assert [1, 2] == bench.index.held_blocks(A)
    assert Load(1, 2, 3) == bench.control.replicas[A].load


def test_a_missing_frame_is_reported_and_counted() -> None:
    bench = Bench(A)
    bench.control.connected(A, hello(1))
    assert bench.control.heard(A, frame(1))
    assert 0 == bench.control.replicas[A].missed_frames

    assert not bench.control.heard(A, frame(3))
    assert 1 == bench.control.replicas[A].missed_frames


def test_heartbeats_tell_the_phase() -> None:
    bench = Bench(A)
    bench.control.connected(A, hello())
    bench.control.beat(A, Heartbeat(EnginePhase.PREFILL, 0.1))

    assert EnginePhase.PREFILL is bench.control.replicas[A].phase


def test_a_process_that_ended_for_good_is_not_expected_back() -> None:
    bench = Bench(A, B)
    bench.control.connected(A, hello())
    bench.fail(A)

    assert [ReplicaState.FAILED, ReplicaState.STARTING] == bench.states()
    assert "it exited with 2" == bench.control.replicas[A].reason
    assert 0 == bench.dispatcher.slots
    assert not bench.control.hopeless
    assert not bench.control.all_failed.is_set()


@pytest.mark.parametrize("failure_first", [True, False])
def test_a_failure_outlasts_the_loss_of_the_connection(*, failure_first: bool) -> None:
    """The socket and the process of one replica end together, and are heard of in any order."""
    bench = Bench(A)
    bench.control.connected(A, hello())
    if failure_first:
        bench.fail(A)
    bench.control.lost(A, "closed", silent=False)
    if not failure_first:
        bench.fail(A)

    assert [ReplicaState.FAILED] == bench.states()
    assert "it exited with 2" == bench.control.replicas[A].reason


def test_the_last_failure_wakes_those_who_wait_and_is_told() -> None:
    bench = Bench(A, B)
    bench.fail(A)
    assert not bench.control.all_failed.is_set()
    wakes = bench.wakes
    bench.fail(B)

    assert bench.control.hopeless
    assert bench.control.all_failed.is_set()
    assert wakes + 1 == bench.wakes


def test_refused_ones_leave_no_hope_but_the_server_goes_on() -> None:
    """A refused replica still lives and may come back mended; only dead ones end the server."""
    bench = Bench(A, B)
    bench.control.connected(B, hello(about=facts(refusal="memory is elsewhere")))
    bench.fail(A)

    assert bench.control.hopeless
    assert not bench.control.all_failed.is_set()


def test_a_backoff_is_a_reason_and_no_verdict() -> None:
    bench = Bench(A)
    bench.control.process_changed(A, ProcessState.RUNNING, "")
    bench.control.process_changed(A, ProcessState.BACKOFF, "killed by SIGKILL")

    assert [ReplicaState.STARTING] == bench.states()
    assert "killed by SIGKILL" == bench.control.replicas[A].reason


def test_a_draining_gateway_is_not_ready() -> None:
    bench = Bench(A)
    bench.control.connected(A, hello())
    bench.control.draining = True

    assert not bench.control.ready


def test_one_ready_replica_makes_the_gateway_ready() -> None:
    bench = Bench(A, B)
    bench.fail(A)
    bench.control.connected(B, hello())

    assert bench.control.ready
    assert not bench.control.hopeless
