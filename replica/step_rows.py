"""Which rows a decode step gets besides one for each stream: guesses, and dummies that save time.

Pure; decided by the measured cost of a step.
"""

from collections.abc import Collection
from collections.abc import Sequence as Seq
from itertools import takewhile

from replica.batch import Cut
from replica.kv_streams import KvStreams
from replica.limits import Limits
from replica.lookup import DRAFT_MAX
from replica.sequence import Sequence
from replica.step_curve import StepCurve


def draft(
    sequence: Sequence, curve: StepCurve, limits: Limits, end_token_ids: Collection[int]
) -> tuple[int, ...]:
    """Guess what follows, as far ahead as makes tokens cheaper.

    A guess that is not worth a row is still remembered, to see whether it would have been right.
    """
    room = limits.context_tokens - len(sequence.token_ids)
    left = sequence.request.tokens_max - sequence.completion_tokens
    available = max(0, min(DRAFT_MAX, room - 1, left - 1))
    wanted = sequence.trust.length(curve.cost_s, available)
    guess = sequence.lookup.draft(sequence.token_ids, max(1, wanted))
    guess = list(takewhile(lambda token: token not in end_token_ids, guess))
    sequence.guess = guess[0] if guess else None
    return tuple(guess[:wanted])


def padding(
    active: Seq[int], kv_streams: KvStreams, curve: StepCurve, room_tokens: int
) -> tuple[Cut, ...]:
    """Choose the idle streams whose dummy rows make a step of the active ones cheaper."""
    held = {stream_id: kv_streams.holding(stream_id) for stream_id in range(kv_streams.parallel)}
    idle = [i for i, tokens in held.items() if i not in active and tokens < room_tokens]
    return tuple(Cut(stream_id, held[stream_id]) for stream_id in curve.filling(active, idle))
