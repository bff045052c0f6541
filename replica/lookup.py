"""Guess a text's next tokens from the text itself, and learn how good the guesses are.

Pure. Answers often repeat runs of their prompt: names, code, quoted sentences. A run of the last
`NGRAM` tokens that has occurred before is taken to go on as it did then. A guess costs rows in a
decode step and saves steps where it is right; it never changes what is drawn, because a draw
depends on the row, the seed and the index alone.
"""

from collections.abc import Callable, Sequence

NGRAM = 3
"""Tokens that must recur before their continuation is guessed."""
DRAFT_MAX = 7
"""Guessed tokens per step: with the newest one they fill a tile of eight rows."""
TRUST_FIRST = 0.3
"""Taken for the share of right guesses before any was checked."""
SMOOTHING = 0.1


class Lookup:
    """Where the runs of one sequence's tokens last occurred. Grows with the sequence."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = NGRAM

    def draft(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Return up to `count` tokens that followed the last `NGRAM` tokens the last time."""
        # The run that ends the text is indexed only once it has a continuation.
        for end in range(self._indexed, len(token_ids)):
            self._ends[tuple(token_ids[end - NGRAM : end])] = end
        self._indexed = max(self._indexed, len(token_ids))
        if len(token_ids) < NGRAM:
            return []
        follows = self._ends.get(tuple(token_ids[-NGRAM:]))
        return [] if follows is None else list(token_ids[follows : follows + count])


class Trust:
    """How often guesses were right, and so how many are worth their rows."""

    def __init__(self) -> None:
        self._right = TRUST_FIRST

    @property
    def right(self) -> float:
        """The share of guessed tokens that were drawn, given that those before them were."""
        return self._right

    def observe(self, guessed: int, right: int) -> None:
        """Learn from one draft of which the first `right` tokens were drawn."""
        assert 0 <= right <= guessed
        for index in range(min(right + 1, guessed)):
            self._right += SMOOTHING * ((index < right) - self._right)

    def length(self, cost_s: Callable[[int], float], available: int) -> int:
        """Return how many guesses make tokens cheapest, by the cost of a step of so many rows."""
        best, best_rate = 0, 1.0 / cost_s(1)
        expected, chance = 1.0, 1.0
        for length in range(1, available + 1):
            chance *= self._right
            expected += chance
            rate = expected / cost_s(length + 1)
            if rate > best_rate:
                best, best_rate = length, rate
        return best
