"""Bytes of tokens to text that may be shown: whole characters, and never past a stop string.

Pure. However the bytes are cut into pieces, the texts handed out, joined, are the same. Knows no
token, no vocabulary and no HTTP.
"""

import codecs
from collections import deque
from collections.abc import Iterable

_new_decoder = codecs.getincrementaldecoder("utf-8")


class StopMatcher:
    """Finds the first stop string that is completed, one character after the other.

    An automaton in the manner of Aho and Corasick: `node` stands for the longest end of the text
    so far that begins a stop string, and its depth is how much must be held back.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fallback = [0]
        self._match_chars = [0]
        """Per node: length of the longest stop string that ends there; 0 is none."""
        for stop in stops:
            assert stop, "an empty stop string would end every text before it began"
            self._add(stop)
        self._link()
        self._node = 0

    @property
    def held_chars(self) -> int:
        """How many of the last characters may still turn out to be part of a stop string."""
        return self._depth[self._node]

    def feed(self, text: str) -> tuple[int, int] | None:
        """Return where in `text` a stop string is complete, and its length; None if nowhere."""
        node = self._node
        for position, char in enumerate(text, start=1):
            while node and char not in self._next[node]:
                node = self._fallback[node]
            node = self._next[node].get(char, 0)
            if self._match_chars[node]:
                self._node = node
                return position, self._match_chars[node]
        self._node = node
        return None

    def _add(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self._next[node]:
                self._next[node][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._fallback.append(0)
                self._match_chars.append(0)
            node = self._next[node][char]
        self._match_chars[node] = len(stop)

    def _link(self) -> None:
        """Give every node its fallback: the longest shorter end that also begins a stop string."""
        waiting = deque(self._next[0].values())
        while waiting:
            node = waiting.popleft()
            if not self._match_chars[node]:
                self._match_chars[node] = self._match_chars[self._fallback[node]]
            for char, child in self._next[node].items():
                fallback = self._fallback[node]
                while fallback and char not in self._next[fallback]:
                    fallback = self._fallback[fallback]
                self._fallback[child] = self._next[fallback].get(char, 0)
                waiting.append(child)


class TextStream:
    """The text of one completion as it grows."""

    def __init__(self, stops: Iterable[str] = (), *, skip_leading_space: bool = False) -> None:
        stops = tuple(stops)
        self._matcher = StopMatcher(stops) if stops else None
        self._decoder = _new_decoder("replace")
        self._skip_space = skip_leading_space
        self._held = ""
        self.decoded_chars = 0
        """Characters decoded so far, shown or held."""
        self.shown_chars = 0
        self.stopped = False
        """A stop string was found. Nothing more is shown, and nothing more may be pushed."""

    def push(self, piece: bytes) -> str:
        """Take the bytes of the next token; return the text that may now be shown."""
        assert not self.stopped
        text = self._decoder.decode(piece)
        if self._skip_space and text:
            text = text.removeprefix(" ")
            self._skip_space = False
        if not text:
            return ""
        self.decoded_chars += len(text)
        if self._matcher is not None:
            text = self._hold_back(self._matcher, text)
        self.shown_chars += len(text)
        return text

    def finish(self) -> str:
        """Return what was held back, since no more text follows.

        The first bytes of a character whose rest never came are dropped.
        """
        text, self._held = self._held, ""
        assert not (text and self.stopped)
        self.shown_chars += len(text)
        return text

    def _hold_back(self, matcher: StopMatcher, text: str) -> str:
        found = matcher.feed(text)
        if found is not None:
            position, stop_chars = found
            self.stopped = True
            text = self._held + text[:position]
            self._held = ""
            return text[: len(text) - stop_chars]
        text = self._held + text
        shown_chars = len(text) - matcher.held_chars
        self._held = text[shown_chars:]
        return text[:shown_chars]
