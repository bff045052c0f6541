"""Tool calls in a model's answer: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

The format of Hermes and Qwen models. Pure and incremental. A call is handed out whole once it is
closed, because only then is it known to be one: what is not well-formed stays content.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    index: int
    call_id: str
    name: str
    arguments: str
    """JSON text, as OpenAI has it."""


@dataclass(frozen=True, slots=True)
class Parsed:
    content: str
    calls: tuple[ToolCall, ...] = ()


class HermesParser:
    """Divides one completion's text into content and calls."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._held = ""
        """Outside a call: what may begin one, with the white space before it. Inside: its text."""
        self._inside = False
        self._searched = 0
        """Up to here the open call's text holds no end."""
        self.calls = 0

    def push(self, text: str) -> Parsed:
        """Take more text; return the content that may be shown and the calls now complete."""
        self._held += text
        content: list[str] = []
        calls: list[ToolCall] = []
        while self._inside_step(content, calls) if self._inside else self._outside_step(content):
            pass
        return Parsed("".join(content), tuple(calls))

    def finish(self) -> Parsed:
        """No more text follows. A whole call that was left open counts as one."""
        held, self._held = self._held, ""
        if not self._inside:
            between_calls = self.calls > 0 and held.isspace()
            return Parsed("" if between_calls else held)
        self._inside = False
        call = self._call(held)
        return Parsed("", (call,)) if call else Parsed(_OPEN + held)

    def _outside_step(self, content: list[str]) -> bool:
        """Look for the next call; True when one has been opened."""
        before, opened, after = self._held.partition(_OPEN)
        if opened:
            content.append(before.rstrip())
            self._held, self._inside, self._searched = after, True, 0
            return True
        shown = self._held[: len(self._held) - _begun_chars(self._held)].rstrip()
        content.append(shown)
        self._held = self._held[len(shown) :]
        return False

    def _inside_step(self, content: list[str], calls: list[ToolCall]) -> bool:
        """Look for the end of the open call; True when it has been closed."""
        end = self._held.find(_CLOSE, self._searched)
        if end < 0:
            self._searched = max(0, len(self._held) - len(_CLOSE) + 1)
            return False
        body, self._held = self._held[:end], self._held[end + len(_CLOSE) :]
        self._inside = False
        call = self._call(body)
        if call:
            calls.append(call)
        else:
            content.append(_OPEN + body + _CLOSE)
        return True

    def _call(self, body: str) -> ToolCall | None:
        try:
            value = msgspec.json.decode(body.strip())
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        if not isinstance(value, dict):
            return None
        name, arguments = value.get("name"), value.get("arguments", {})
        if not isinstance(name, str) or not name or not isinstance(arguments, dict | str):
            return None
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        self.calls += 1
        return ToolCall(self.calls - 1, self._new_id(), name, arguments)


def _begun_chars(text: str) -> int:
    """How many characters at the end of `text` may be the beginning of a call."""
    for size in range(min(len(text), len(_OPEN) - 1), 0, -1):
        if _OPEN.startswith(text[-size:]):
            return size
    return 0
