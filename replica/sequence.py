"""One request's life inside the engine."""

from dataclasses import dataclass, field
from enum import Enum, auto

from replica.lookup import Lookup, Trust
from replica.sampling import Sampler
from replica.wire import FinishReason, Generate


class Phase(Enum):
    """What a sequence needs next."""

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    FINISHED = auto()


TRANSITIONS: frozenset[tuple[Phase, Phase]] = frozenset(
    {
        (Phase.WAITING, Phase.PREFILL),
        (Phase.WAITING, Phase.FINISHED),
        (Phase.PREFILL, Phase.DECODE),
        (Phase.PREFILL, Phase.FINISHED),
        (Phase.DECODE, Phase.FINISHED),
    }
)


@dataclass(eq=False, slots=True)
class Sequence:
    """A request, the tokens it has so far, and how far the KV cache has followed them.

    A sequence in DECODE always has exactly one token that is not yet computed: its newest.
    """

    request: Generate
    sampler: Sampler
    token_ids: list[int] = field(init=False)
    phase: Phase = Phase.WAITING
    stream_id: int | None = None
    cached_tokens: int = 0
    tier: str = "stream"
    """Where the cached tokens came from."""
    computed_tokens: int = 0
    finish_reason: FinishReason | None = None
    heard: bool = False
    """Whether a first token has been published."""
    lookup: Lookup = field(default_factory=Lookup)
    trust: Trust = field(default_factory=Trust)
    awaits_prefix: bool = False
    """Whether another sequence is reading a prompt that begins as this one does."""
    guess: int | None = None
    """What the next token was thought to be, without a row to show for it."""

    def __post_init__(self) -> None:
        assert 0 < self.request.prompt_tokens <= len(self.request.token_ids)
        self.token_ids = list(self.request.token_ids)

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request.request_id} {self.phase.name} stream={self.stream_id} "
            f"{self.computed_tokens}/{len(self.token_ids)}>"
        )

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids) - self.request.prompt_tokens

    @property
    def pending_tokens(self) -> int:
        """Tokens known but not yet in the KV cache."""
        return len(self.token_ids) - self.computed_tokens

    def move(self, phase: Phase) -> None:
        """Take one step of the table; any other is our bug."""
        assert (self.phase, phase) in TRANSITIONS, f"{self!r} to {phase.name}"
        self.phase = phase
