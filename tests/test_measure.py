"""What is measured at start, on a machine whose every step takes a known time."""

from replica.measure import BUDGET_S, PROMPT_TOKENS, best_threads, measure, rows_to_measure
from replica.wire import EnginePhase


class Clockwork:
    """Work that takes exactly the time it should."""

    def __init__(self, row_s: float = 0.001) -> None:
        self.now = 0.0
        self.row_s = row_s
        self.threads = 1
        self.steps: list[int] = []

    def clock(self) -> float:
        return self.now

    def use(self, threads: int) -> None:
        self.threads = threads

    def step(self, rows: int) -> None:
        """Bound by bandwidth, which three threads exhaust and more only fight for."""
        self.steps.append(rows)
        self.now += (0.01 + self.row_s * rows) / min(self.threads, 3) * (1 + 0.01 * self.threads)

    def prompt(self, tokens: int) -> None:
        self.now += 0.0005 * tokens / min(self.threads, 3)


def test_the_curve_is_what_steps_take() -> None:
    machine = Clockwork()
    pace = measure(machine.step, machine.prompt, 8, machine.clock)
    assert pace.curve is not None

    assert abs(pace.curve.cost_s(8) - 0.018 * 1.01) < 1e-9
    assert abs(pace.expect(EnginePhase.DECODE, 1) - 0.011 * 1.01) < 1e-9
    assert abs(pace.expect(EnginePhase.PREFILL, PROMPT_TOKENS) - 0.064) < 1e-9


def test_a_slow_machine_is_measured_once_and_no_longer() -> None:
    machine = Clockwork(row_s=1.0)
    measure(machine.step, machine.prompt, 4, machine.clock)

    assert machine.now > BUDGET_S
    assert [1, 1, 2, 3, 4] == machine.steps


def test_every_number_of_rows_up_to_a_tile_is_measured_and_the_most_there_can_be() -> None:
    assert [1, 2, 3] == rows_to_measure(3)
    assert [*range(1, 9), 10, 12, 13] == rows_to_measure(13)
    assert 64 == rows_to_measure(64)[-1]


def test_threads_that_only_fight_for_bandwidth_are_left_out() -> None:
    machine = Clockwork()

    assert 3 == best_threads(4, machine.use, machine.step, machine.prompt, machine.clock)
    assert 3 == machine.threads


def test_one_core_has_one_thread() -> None:
    machine = Clockwork()

    assert 1 == best_threads(1, machine.use, machine.step, machine.prompt, machine.clock)
