"""How many threads to compute with, while others may want the same cores.

Pure; learns from the durations of decode steps. All threads meet at a barrier after every
operation, hundreds of times a step, so a neighbour that takes one core slows the whole step to that
core's pace, and fewer threads are faster. Whether they are is found by trying, for a few steps.
"""

from collections import deque
from enum import Enum, auto
from statistics import median

WINDOW_STEPS = 6
"""Steps that make a judgement."""
SLOW = 1.3
"""Slower than this, against the undisturbed machine, is worth a trial of fewer threads."""
BETTER = 0.92
"""A trial must take at most this share of the time to be kept."""
TRIAL_FIRST_S = 1.0
TRIAL_MAX_S = 30.0
"""Between trials; doubled by each that was in vain."""


class _Phase(Enum):
    """What the next steps are for."""

    STEADY = auto()
    TRIAL = auto()


class ThreadTuner:
    """Chooses a number of threads from 1 to `most`; the caller applies it."""

    def __init__(self, most: int) -> None:
        assert most > 0
        self.threads = most
        self._most = most
        self._phase = _Phase.STEADY
        self._window: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._before = 0.0
        self._before_threads = most
        self._pause_s = TRIAL_FIRST_S
        self._next_trial = 0.0
        self._upwards = False

    def observe(self, slowness: float, now: float) -> int:
        """Take in a step's duration against what it takes undisturbed; return the threads to use.

        `now` is in seconds, on any clock that does not go back.
        """
        assert slowness > 0
        self._window.append(slowness)
        if len(self._window) == WINDOW_STEPS:
            if self._phase is _Phase.TRIAL:
                self._judge(median(self._window), now)
            elif now >= self._next_trial:
                self._consider(median(self._window))
        return self.threads

    def _consider(self, slowness: float) -> None:
        """Begin a trial where it may help: of fewer threads when slow, of more when not at most."""
        fewer = slowness > SLOW and self.threads > 1
        more = self.threads < self._most
        if not (fewer or more):
            return
        self._upwards = more and (not fewer or not self._upwards)
        self._before, self._before_threads = slowness, self.threads
        self.threads += 1 if self._upwards else -1
        self._phase = _Phase.TRIAL
        self._window.clear()

    def _judge(self, slowness: float, now: float) -> None:
        """Keep what was tried if it was better, else go back and wait longer for the next."""
        if slowness <= BETTER * self._before:
            self._pause_s = TRIAL_FIRST_S
        else:
            self.threads = self._before_threads
            self._pause_s = min(2 * self._pause_s, TRIAL_MAX_S)
        self._next_trial = now + self._pause_s
        self._phase = _Phase.STEADY
        self._window.clear()
