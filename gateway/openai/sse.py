"""How answers are written: what is around their parts, and the events of a stream.

What is the same in every chunk is written once per answer, so that relaying a token costs little
more than escaping its text.
"""

import msgspec

from gateway.openai.progress import Progress
from gateway.proxy import JobEvent

EVENT_END = b"data: [DONE]\n\n"
KEEPALIVE = b": still working\n\n"
NO_USAGE = b',"usage":null'
"""What chunks before the last carry when usage was asked for."""


class Envelope:
    """What is the same around all chunks of one answer, written once."""

    def __init__(
        self, *, answer_id: str, kind: str, created: int, model: str, fingerprint: str
    ) -> None:
        head = {
            "id": answer_id,
            "object": kind,
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._body = msgspec.json.encode(head)[:-1] + b',"choices":['
        self._event = b"data: " + self._body

    def event(self, entry: bytes, usage: bytes = b"") -> bytes:
        """Return one server-sent event; `usage` is `,"usage":…` or nothing."""
        return b"".join((self._event, entry, b"]", usage, b"}\n\n"))

    def answer(self, entries: list[bytes], usage: bytes) -> bytes:
        return b"".join((self._body, b",".join(entries), b"]", usage, b"}"))


class StreamWriter:
    """Turns the events of a request's jobs into server-sent events."""

    def __init__(self, progress: Progress, envelope: Envelope) -> None:
        self._progress = progress
        self._form = progress.plan.form
        self._envelope = envelope
        self._opened: set[int] = set()

    def write(self, index: int, event: JobEvent, now: float) -> list[bytes]:
        """Return what the client is sent because of this event; often nothing."""
        choice = self._progress.plan.choices[index]
        if choice.finish_reason is not None:
            return []  # it had been said before we could stop it
        delta = self._progress.take(index, event, now)
        if not delta and choice.finish_reason is None:
            return []
        entries: list[bytes] = []
        if index not in self._opened:
            self._opened.add(index)
            entries += self._form.opening(index)
        if delta:
            entries += self._form.delta(index, delta)
        if choice.finish_reason is not None:
            entries.append(self._form.closing(index, choice.finish_reason))
        usage = self._usage()
        return [self._envelope.event(entry, usage) for entry in entries]

    def end(self) -> list[bytes]:
        """Return the last events, once all completions have ended."""
        assert self._progress.over
        if not self._progress.plan.include_usage:
            return [EVENT_END]
        return [self._envelope.event(b"", self._progress.usage), EVENT_END]

    def _usage(self) -> bytes:
        plan = self._progress.plan
        if plan.continuous_usage:
            return self._progress.usage
        return NO_USAGE if plan.include_usage else b""
