"""How long steps take, learned from the steps themselves. Pure: the caller brings the times."""

from replica.step_curve import StepCurve
from replica.wire import EnginePhase

SMOOTHING = 0.2
"""Weight of the newest step in the running mean."""
GAP_STEPS = 3.3
"""While prompts are read, the gap between two tokens of a stream is this many decode steps long,
unless a limit is given in seconds: above 3, so that reading gets most of the time, and below 4."""
CHUNK_STEP_TOKENS = 16
"""Chunks are multiples of this: llama.cpp's kernels work in tiles."""


class Pace:
    """Expected duration of a step by its phase and rows, in seconds."""

    def __init__(self, curve: StepCurve | None = None) -> None:
        """`curve`, where one was measured, is what a step costs by its rows when nothing else runs.

        It is not learned any further: it says which rows are cheap, not how fast they are today.
        """
        self.curve = curve
        self._decode_s: dict[int, float] = {}
        self._prefill_row_s: float | None = None
        self._save_token_s: float | None = None

    def observe(self, phase: EnginePhase, rows: int, seconds: float) -> None:
        assert rows > 0
        if phase is EnginePhase.DECODE:
            self._decode_s[rows] = _mean(self._decode_s.get(rows), seconds)
        else:
            self._prefill_row_s = _mean(self._prefill_row_s, seconds / rows)

    def observe_save(self, tokens: int, seconds: float) -> None:
        assert tokens > 0
        self._save_token_s = _mean(self._save_token_s, seconds / tokens)

    def expect_save(self, tokens: int) -> float | None:
        """Return what a snapshot of so many tokens will take; None before one was made."""
        return None if self._save_token_s is None else self._save_token_s * tokens

    def expect(self, phase: EnginePhase, rows: int) -> float:
        """Return the best guess; 0 when nothing comparable has been seen."""
        if phase is EnginePhase.PREFILL:
            return rows * (self._prefill_row_s or 0.0)
        if not self._decode_s:
            return 0.0
        nearest = min(self._decode_s, key=lambda seen: (abs(seen - rows), seen))
        return self._decode_s[nearest] * max(1.0, rows / nearest)

    def chunk_tokens(self, streams: int, gap_max_s: float | None) -> int | None:
        """Return how much of a prompt may be read between two steps of so many streams.

        None when too little has been seen to say.
        """
        decode_s = self.expect(EnginePhase.DECODE, streams)
        if not self._prefill_row_s or not decode_s:
            return None
        gap_s = GAP_STEPS * decode_s if gap_max_s is None else gap_max_s
        tokens = int((gap_s - decode_s) / self._prefill_row_s)
        return max(CHUNK_STEP_TOKENS, tokens - tokens % CHUNK_STEP_TOKENS)


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + SMOOTHING * (value - mean)
