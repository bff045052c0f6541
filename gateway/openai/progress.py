"""How far one request has got: its completions, its usage, and what is recorded of it.

Takes the events of its jobs one by one. Pure but for telling the observer.
"""

from dataclasses import dataclass

import msgspec

from gateway.openai.choice import Choice, Delta
from gateway.openai.edge import Observer, RequestRecord
from gateway.openai.plan import Plan
from gateway.proxy import Done, JobEvent, Placed, Tokens


@dataclass(slots=True)
class Outcome:
    """How a request ended, as far as is known; the record is made of it."""

    request_id: str
    route: str
    started: float
    code: int = 499
    name: str = "client_gone"
    ttft_s: float | None = None
    progress: "Progress | None" = None

    def record(self, now: float) -> RequestRecord:
        progress = self.progress
        return RequestRecord(
            request_id=self.request_id,
            route=self.route,
            replica_id=progress.replica_ids[0] if progress and progress.replica_ids else None,
            mode=progress.mode if progress else None,
            code=self.code,
            outcome=self.name,
            prompt_tokens=sum(progress.plan.prompt_tokens) if progress else 0,
            cached_tokens=progress.cached_tokens if progress else 0,
            completion_tokens=progress.completion_tokens if progress else 0,
            ttft_s=self.ttft_s,
            duration_s=now - self.started,
            finish_reasons=progress.finish_reasons if progress else (),
        )


class Progress:
    """The completions of a plan, growing."""

    def __init__(self, plan: Plan, outcome: Outcome, observer: Observer) -> None:
        self.plan = plan
        self.replica_ids: list[str] = []
        """Those that work on it, in order of appearance."""
        self.mode: str | None = None
        self._outcome = outcome
        self._observer = observer
        self._last_token: list[float | None] = [None] * len(plan.choices)
        self._cached: dict[int, int] = {}
        """Per prompt: the fewest cached tokens of any of its jobs, since one had to compute."""
        self._running = len(plan.choices)
        outcome.progress = self

    @property
    def speaking(self) -> bool:
        """Whether there is anything to tell the client yet."""
        return self._running < len(self.plan.choices) or self._outcome.ttft_s is not None

    @property
    def over(self) -> bool:
        return self._running == 0

    @property
    def completion_tokens(self) -> int:
        return sum(choice.completion_tokens for choice in self.plan.choices)

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached.values())

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        return tuple(c.finish_reason for c in self.plan.choices if c.finish_reason is not None)

    @property
    def usage(self) -> bytes:
        """Return `,"usage":{…}`."""
        prompt_tokens, completion_tokens = sum(self.plan.prompt_tokens), self.completion_tokens
        return b',"usage":' + msgspec.json.encode(
            {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
                "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            }
        )

    def take(self, index: int, event: JobEvent, now: float) -> Delta:
        """Fold in what a job said; return what the client may see of it."""
        choice = self.plan.choices[index]
        assert choice.finish_reason is None
        match event:
            case Placed(replica_id, mode):
                self._place(replica_id, mode)
                return Delta()
            case Tokens():
                self._time(index, len(event.token_ids), now)
                if event.cached_tokens is not None:
                    self._count_cached(choice, event.cached_tokens)
                delta = choice.push(event)
            case Done(reason, cached_tokens):
                self._count_cached(choice, cached_tokens)
                delta = choice.finish(reason)
        self._running -= choice.finish_reason is not None
        return delta

    def _place(self, replica_id: str, mode: str) -> None:
        self.mode = self.mode or mode
        if replica_id not in self.replica_ids:
            self.replica_ids.append(replica_id)

    def _time(self, index: int, count: int, now: float) -> None:
        before = self._last_token[index]
        self._last_token[index] = now
        if before is not None:
            self._observer.on_tokens(now - before, count)
        elif self._outcome.ttft_s is None:
            self._outcome.ttft_s = now - self._outcome.started
            self._observer.on_first_token(self._outcome.ttft_s)

    def _count_cached(self, choice: Choice, cached_tokens: int) -> None:
        per_prompt = len(self.plan.choices) // len(self.plan.prompt_tokens)
        prompt = choice.index // per_prompt
        self._cached[prompt] = min(cached_tokens, self._cached.get(prompt, cached_tokens))
