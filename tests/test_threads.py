"""The number of threads follows the neighbours."""

from collections.abc import Callable

from replica.threads import TRIAL_MAX_S, WINDOW_STEPS, ThreadTuner

STEP_S = 0.02


class Machine:
    """Steps whose slowness depends on the threads in use."""

    def __init__(self, most: int) -> None:
        self.tuner = ThreadTuner(most)
        self.now = 0.0
        self.used: list[int] = []

    def run(self, seconds: float, slowness: Callable[[int], float]) -> None:
        end = self.now + seconds
        while self.now < end:
            slow = slowness(self.tuner.threads)
            self.used.append(self.tuner.threads)
            self.now += STEP_S * slow
            self.tuner.observe(slow, self.now)


def undisturbed(threads: int) -> float:
    return 4 / threads


def neighbour(threads: int) -> float:
    """One core of four is half taken: whoever uses all four waits for it."""
    return 3.0 if threads == 4 else 4 / threads


def test_an_undisturbed_machine_never_tries_fewer() -> None:
    machine = Machine(4)
    machine.run(60, undisturbed)

    assert {4} == set(machine.used)


def test_a_busy_neighbour_is_left_its_core() -> None:
    machine = Machine(4)
    machine.run(5, neighbour)

    assert 3 == machine.tuner.threads


def test_when_the_neighbour_has_gone_all_cores_are_used_again() -> None:
    machine = Machine(4)
    machine.run(20, neighbour)
    machine.run(2 * TRIAL_MAX_S + 5, undisturbed)

    assert 4 == machine.tuner.threads


def test_what_fewer_threads_do_not_mend_costs_few_trials() -> None:
    """A long context is slow, too: trials grow rare."""
    machine = Machine(4)
    machine.run(120, lambda threads: 2.0 * 4 / threads)
    trials = sum(threads != 4 for threads in machine.used)

    assert 4 == machine.tuner.threads
    assert trials <= 8 * WINDOW_STEPS


def test_a_single_thread_stays_one() -> None:
    machine = Machine(1)
    machine.run(10, lambda _threads: 9.0)

    assert {1} == set(machine.used)


def test_one_slow_step_is_no_reason() -> None:
    tuner = ThreadTuner(4)
    for index in range(100):
        tuner.observe(9.0 if index % 10 == 0 else 1.0, index * STEP_S)

        assert 4 == tuner.threads
