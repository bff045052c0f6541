"""One completion as it grows: tokens in, what the client may be shown of them out.

Pure. Knows neither HTTP nor how an answer is written down.
"""

from dataclasses import dataclass

from gateway.openai.edge import Vocabulary
from gateway.openai.text import TextStream
from gateway.openai.tools import HermesParser, Parsed, ToolCall
from gateway.proxy import Tokens
from replica.wire import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token with its probabilities, once all of its text has been shown."""

    token_id: int
    logprobs: TokenLogprobs
    start: int
    """Where its text begins, in characters of the completion."""
    end: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What became visible."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    tokens: tuple[ShownToken, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.calls or self.tokens)


class Choice:
    """One of a request's completions."""

    def __init__(  # noqa: PLR0913 - each is one field of the request
        self,
        index: int,
        vocab: Vocabulary,
        *,
        stops: tuple[str, ...] = (),
        skip_leading_space: bool = False,
        parser: HermesParser | None = None,
        one_call: bool = False,
    ) -> None:
        self.index = index
        self.completion_tokens = 0
        self.finish_reason: str | None = None
        """Set once, when nothing more will be shown."""
        self._vocab = vocab
        self._stream = TextStream(stops, skip_leading_space=skip_leading_space)
        self._parser = parser
        self._one_call = one_call
        self._unshown: list[ShownToken] = []

    def push(self, event: Tokens) -> Delta:
        """Take new tokens. Sets `finish_reason` when a stop string ended the text."""
        assert self.finish_reason is None
        stream, parts = self._stream, []
        for position, token_id in enumerate(event.token_ids):
            self.completion_tokens += 1
            start = stream.decoded_chars
            parts.append(stream.push(self._vocab.piece(token_id)))
            if event.logprobs is not None:
                logprobs = event.logprobs[position]
                self._unshown.append(ShownToken(token_id, logprobs, start, stream.decoded_chars))
            if stream.stopped:
                return self._end("stop", "".join(parts))
        text = "".join(parts)
        if self._parser is None:
            return Delta(text, (), self._shown_tokens())
        parsed = self._parser.push(text)
        if self._one_call and parsed.calls:
            self.finish_reason = "tool_calls"
            parsed = Parsed(parsed.content, parsed.calls[:1])
        return Delta(parsed.content, parsed.calls, self._shown_tokens())

    def finish(self, reason: str) -> Delta:
        """The replica has nothing more; show what was held back."""
        assert self.finish_reason is None
        return self._end(reason, self._stream.finish())

    def _end(self, reason: str, text: str) -> Delta:
        """Set the reason, once the last text has shown whether there was a tool call."""
        calls: tuple[ToolCall, ...] = ()
        if self._parser is not None:
            parsed, rest = self._parser.push(text), self._parser.finish()
            text, calls = parsed.content + rest.content, parsed.calls + rest.calls
            calls = calls[:1] if self._one_call else calls
            if self._parser.calls > 0 and reason == "stop":
                reason = "tool_calls"
        self.finish_reason = reason
        return Delta(text, calls, self._shown_tokens())

    def _shown_tokens(self) -> tuple[ShownToken, ...]:
        """Return the tokens that are now shown; at the end all, but those of a stop string."""
        if not self._unshown:
            return ()
        shown_chars = self._stream.shown_chars
        if self.finish_reason is None:
            count = sum(token.end <= shown_chars for token in self._unshown)
        elif self._stream.stopped:
            count = sum(token.start < shown_chars for token in self._unshown)
        else:
            count = len(self._unshown)
        shown, self._unshown = tuple(self._unshown[:count]), self._unshown[count:]
        return shown
