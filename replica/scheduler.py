"""Decide what the next llama_decode call computes, and what its result means.

Knows sequences and streams; knows no llama.cpp, no clock and no wire beyond its messages. Each
call of `schedule` describes one llama_decode: either a decode step (one row for every decoding
sequence) or one chunk of one prompt. With split KV streams llama.cpp computes the two in separate
passes anyhow, and apart they can be ordered: tokens of running streams come first, prompts take
turns with them and with each other.
"""

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from replica.batch import Batch, Chunk, Cut, Move, Restore, Save
from replica.kv_streams import KvStreams
from replica.limits import Limits, objection
from replica.pace import Pace
from replica.prefixes import Prefixes, Snapshots
from replica.sampling import Drawn, Sampler, SamplingError
from replica.sequence import Phase, Sequence
from replica.step_rows import draft, padding
from replica.wire import EnginePhase, Finished, FinishReason, Generate, Load, Output


@dataclass(slots=True)
class News:
    """What clients should hear."""

    outputs: list[Output] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)


class Scheduler:
    """Owns every sequence from submission to its one `Finished`."""

    def __init__(
        self,
        kv_streams: KvStreams,
        limits: Limits,
        end_token_ids: Seq[int],
        pace: Pace | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        assert 0 < limits.shared_chunk_tokens_max <= limits.batch_tokens_max
        self.pace = pace or Pace()
        self.prefixes = Prefixes(kv_streams, snapshots)
        self._kv_streams = kv_streams
        self._limits = limits
        self._end_token_ids = frozenset(end_token_ids)
        self._waiting: deque[Sequence] = deque()
        self._prefilling: deque[Sequence] = deque()
        self._decoding: list[Sequence] = []
        self._moves: list[Move] = []
        self._prompt_is_next = True
        self._draining = False

    def __repr__(self) -> str:
        return (
            f"<Scheduler {len(self._waiting)} waiting, {len(self._prefilling)} prefilling, "
            f"{len(self._decoding)} decoding>"
        )

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._prefilling or self._decoding)

    @property
    def drained(self) -> bool:
        return self._draining and self.idle

    @property
    def load(self) -> Load:
        running = len(self._prefilling) + len(self._decoding)
        return Load(running, len(self._waiting), self._kv_streams.used_tokens)

    def submit(self, request: Generate) -> Finished | None:
        """Take the request, or say at once why it cannot be served.

        Of two requests with one id, a fault of whoever sent them, neither is served: what is said
        of an id must be about one request, and end with one `Finished`.
        """
        if sequence := self._find(request.request_id):
            why = f"request id {request.request_id} was used twice"
            return self._finish(sequence, FinishReason.FAILED, why)
        if error := objection(request, self._limits):
            return _rejected(request, FinishReason.FAILED, error)
        if refusal := self._refusal():
            return _rejected(request, FinishReason.REFUSED, refusal)
        prompt = request.token_ids[: request.prompt_tokens]
        completion = request.token_ids[request.prompt_tokens :]
        sampler = Sampler(
            request.sampling,
            sorted(self._end_token_ids),
            ignore_eos=request.ignore_eos,
            prompt=prompt,
            completion=completion,
        )
        self._waiting.append(Sequence(request, sampler))
        return None

    def drain(self) -> None:
        """Take nothing more."""
        self._draining = True

    def cancel(self, request_id: str) -> Finished | None:
        """Drop the request wherever it is; None if it has already finished."""
        sequence = self._find(request_id)
        return self._finish(sequence, FinishReason.CANCELLED) if sequence else None

    def cancel_all(self) -> None:
        """Drop every request."""
        for sequence in self._all():
            self._finish(sequence, FinishReason.CANCELLED)

    def schedule(self) -> Batch | None:
        """Describe the next llama_decode, or None when there is nothing to compute.

        While streams decode, a chunk of a prompt is followed by a decode step; while several
        prompts wait, each gets a chunk in turn, so a short one is not stuck behind a long one.
        """
        self._admit()
        if self._prefilling and (self._prompt_is_next or not self._decoding):
            self._prompt_is_next = False
            return self._prefill()
        self._prompt_is_next = True
        if not self._decoding:
            return None
        return self._decode(sorted(self._decoding, key=_stream_id))

    def commit(self, batch: Batch, drawn: Seq[Seq[Drawn] | SamplingError]) -> News:
        """Fold the tokens drawn from a batch back in, in the order of `batch.sampled`.

        Behind a draft there may be several: the guesses that were right, and one more.
        """
        news = News()
        sampled = batch.sampled
        assert len(sampled) == len(drawn)
        for chunk in batch.chunks:
            self._compute(chunk.sequence, chunk.size)
        for chunk, draws in zip(sampled, drawn, strict=True):
            sequence = chunk.sequence
            if sequence.phase is Phase.PREFILL:
                self._prefilling.remove(sequence)
                self._decoding.append(sequence)
                sequence.move(Phase.DECODE)
            if isinstance(draws, SamplingError):
                self._cut_back(sequence)
                failed = self._finish(sequence, FinishReason.FAILED, str(draws))
                news.finished.append(failed)
            else:
                self._extend(chunk, draws, news)
        return news

    def give_up(self, batch: Batch) -> None:
        """Forget a batch that was aborted: nobody knows how much of it llama.cpp has done."""
        for chunk in batch.chunks:
            sequence = chunk.sequence
            self._cut_back(sequence)
            assert sequence.stream_id is not None
            sequence.computed_tokens = self._kv_streams.holding(sequence.stream_id)
            sequence.cached_tokens = min(sequence.cached_tokens, sequence.computed_tokens)

    def rest(self) -> Save | None:
        """Return what is worth saving while there is nothing else to do."""
        return self.prefixes.rest() if self.idle else None

    def restore_failed(self, restore: Restore) -> None:
        """Read the prompt after all: its snapshot was none."""
        self.prefixes.restore_failed(restore, self._prefilling)

    def _refusal(self) -> str | None:
        """Return why nothing is taken that another replica may well serve."""
        if self._draining:
            return "this replica is draining"
        if len(self._waiting) >= self._limits.waiting_max + self._kv_streams.free:
            return f"{len(self._waiting)} requests already wait in this replica"
        return None

    def _admit(self) -> None:
        """Give waiting requests streams, in order, but for those that gain by waiting."""
        for sequence in list(self._waiting):
            if self._kv_streams.free == 0:
                return
            if self.prefixes.gains_by_waiting(sequence, self._prefilling):
                continue
            moves = self.prefixes.lease(sequence, may_save=self._may_save)
            assert moves is not None
            self._moves += moves
            self._waiting.remove(sequence)
            sequence.move(Phase.PREFILL)
            self._prefilling.append(sequence)

    def _may_save(self, tokens: int) -> bool:
        """Whether a snapshot now costs no running stream more than a decode step, as measured."""
        if not self._decoding:
            return True
        seconds = self.pace.expect_save(tokens)
        step_s = self.pace.expect(EnginePhase.DECODE, len(self._decoding))
        return seconds is not None and seconds <= step_s

    def _decode(self, sequences: list[Sequence]) -> Batch:
        """Describe a step; guesses only for one stream, or unequal rows would take extra passes."""
        curve, trimmable = self.pace.curve, self._kv_streams.trimmable
        guess: tuple[int, ...] = ()
        dummies: tuple[Cut, ...] = ()
        if curve is not None and trimmable:
            if len(sequences) == 1 and self._limits.guess:
                guess = draft(sequences[0], curve, self._limits, self._end_token_ids)
            if not guess:
                active = [_stream_id(sequence) for sequence in sequences]
                dummies = padding(active, self._kv_streams, curve, self._limits.context_tokens)
        chunks = [Chunk(sequence, 1, guess) for sequence in sequences]
        return Batch(EnginePhase.DECODE, chunks, self._take_moves(), dummies)

    def _prefill(self) -> Batch:
        sequence = self._prefilling[0]
        self._prefilling.rotate(-1)
        limits = self._limits
        longest = limits.batch_tokens_max
        if self._decoding:
            fitting = self.pace.chunk_tokens(len(self._decoding), limits.gap_max_s)
            longest = min(longest, fitting or limits.shared_chunk_tokens_max)
        chunk = Chunk(sequence, min(sequence.pending_tokens, longest))
        return Batch(EnginePhase.PREFILL, [chunk], self._take_moves())

    def _take_moves(self) -> list[Move]:
        moves, self._moves = self._moves, []
        return moves

    def _compute(self, sequence: Sequence, size: int) -> None:
        """Record that the next tokens of a sequence are now in its stream."""
        assert sequence.stream_id is not None
        start = sequence.computed_tokens
        self._kv_streams.append(sequence.stream_id, sequence.token_ids[start : start + size])
        sequence.computed_tokens += size

    def _cut_back(self, sequence: Sequence) -> None:
        """Drop what a stream holds beyond its books."""
        assert sequence.stream_id is not None
        keep = self._kv_streams.forget(sequence.stream_id)
        self._moves.append(Cut(sequence.stream_id, keep))

    def _extend(self, chunk: Chunk, draws: Seq[Drawn], news: News) -> None:
        """Append drawn tokens; all but the last were guessed, and so are computed already."""
        sequence = chunk.sequence
        assert 0 < len(draws) <= 1 + len(chunk.draft)
        self._learn(chunk, draws)
        kept = [draw for draw in draws if draw.token_id not in self._end_token_ids]
        sequence.token_ids += [draw.token_id for draw in kept]
        if len(draws) > 1:
            self._compute(sequence, len(draws) - 1)
        if len(chunk.draft) >= len(draws):
            self._cut_back(sequence)
        if kept:
            news.outputs.append(_output(sequence, kept))
            sequence.heard = True
        if len(kept) < len(draws):
            news.finished.append(self._finish(sequence, FinishReason.STOP))
            return
        full = len(sequence.token_ids) == self._limits.context_tokens
        if full or sequence.completion_tokens == sequence.request.tokens_max:
            news.finished.append(self._finish(sequence, FinishReason.LENGTH))

    def _learn(self, chunk: Chunk, draws: Seq[Drawn]) -> None:
        """See whether guesses were right, also one that was not worth a row."""
        sequence = chunk.sequence
        if chunk.draft:
            sequence.trust.observe(len(chunk.draft), len(draws) - 1)
        elif sequence.guess is not None:
            sequence.trust.observe(1, int(draws[0].token_id == sequence.guess))
        sequence.guess = None

    def _finish(
        self, sequence: Sequence, reason: FinishReason, error: str | None = None
    ) -> Finished:
        match sequence.phase:
            case Phase.WAITING:
                self._waiting.remove(sequence)
            case Phase.PREFILL:
                self._prefilling.remove(sequence)
            case Phase.DECODE:
                self._decoding.remove(sequence)
            case Phase.FINISHED:
                raise AssertionError(sequence)
        sequence.move(Phase.FINISHED)
        sequence.finish_reason = reason
        if sequence.stream_id is not None:
            self._kv_streams.release(sequence.stream_id)
        return Finished(
            request_id=sequence.request_id,
            reason=reason,
            prompt_tokens=sequence.request.prompt_tokens,
            cached_tokens=sequence.cached_tokens,
            completion_tokens=sequence.completion_tokens,
            error=error,
        )

    def _find(self, request_id: str) -> Sequence | None:
        return next((s for s in self._all() if s.request_id == request_id), None)

    def _all(self) -> list[Sequence]:
        return [*self._waiting, *self._prefilling, *self._decoding]


def _stream_id(sequence: Sequence) -> int:
    assert sequence.stream_id is not None
    return sequence.stream_id


def _output(sequence: Sequence, draws: Seq[Drawn]) -> Output:
    logprobs = [draw.logprobs for draw in draws if draw.logprobs is not None]
    cached_tokens = None if sequence.heard else sequence.cached_tokens
    token_ids = [draw.token_id for draw in draws]
    return Output(sequence.request_id, token_ids, logprobs or None, cached_tokens)


def _rejected(request: Generate, reason: FinishReason, error: str) -> Finished:
    return Finished(request.request_id, reason, request.prompt_tokens, 0, 0, error)
