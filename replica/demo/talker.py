"""Talks to a GGUF file through llama.cpp, one conversation at a time.

For checking a model: no server and no batching. It samples as plainly as possible (greedy, or
temperature alone), so that a score is the model's own. Loads through the replica's `ggml`.
"""
# ruff: noqa: ANN401, FBT003  # the binding is untyped, and C has no keywords

import ctypes
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from replica.demo.conversation import Conversation, render
from replica.ggml import open_library

CONTEXT = 4096
ANSWER_TOKENS_MAX = 700
PIECE_BYTES_MAX = 256


class Reply(NamedTuple):
    """What the model said, and whether it stopped by itself."""

    text: str
    stopped: bool


class Talker:
    """A loaded model; close it, or use it as a context."""

    def __init__(self, llama: Any, model: Any, context: Any) -> None:
        self._llama, self._model, self._context = llama, model, context
        self._vocab = llama.llama_model_get_vocab(model)
        self._size = llama.llama_vocab_n_tokens(self._vocab)
        self._cached: list[int] = []

    @classmethod
    def load(cls, path: Path, threads: int = 1) -> Self:
        """Load a model with room for one conversation."""
        llama = open_library()
        model = llama.llama_model_load_from_file(
            str(path).encode(), llama.llama_model_default_params()
        )
        if not model:
            message = f"llama.cpp cannot load {path}"
            raise ValueError(message)
        params = llama.llama_context_default_params()
        params.n_ctx = params.n_batch = CONTEXT
        params.n_threads = params.n_threads_batch = threads
        context = llama.llama_init_from_model(model, params)
        assert context, "a context of this size must fit in memory"
        return cls(llama, model, context)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the model; it cannot be used any more."""
        self._llama.llama_free(self._context)
        self._llama.llama_model_free(self._model)

    def metadata(self, key: str) -> str:
        """A value of the file's header; empty when there is none."""
        buffer = ctypes.create_string_buffer(16384)
        self._llama.llama_model_meta_val_str(self._model, key.encode(), buffer, len(buffer))
        return buffer.value.decode()

    def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """The tokens of a text."""
        data = text.encode()
        tokens = (ctypes.c_int32 * (len(data) + 8))()
        count = self._llama.llama_tokenize(
            self._vocab,
            data,
            len(data),
            tokens,
            len(tokens),
            False,
            special,
        )
        assert count >= 0, "no text has more tokens than bytes"
        return list(tokens[:count])

    def detokenize(self, tokens: list[int]) -> bytes:
        """The bytes of tokens; special ones have none."""
        return b"".join(self._piece(token) for token in tokens)

    def _piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(PIECE_BYTES_MAX)
        size = self._llama.llama_token_to_piece(
            self._vocab,
            token,
            buffer,
            PIECE_BYTES_MAX,
            0,
            False,
        )
        assert size >= 0, "a token is longer than any this model has"
        return buffer.raw[:size]

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        """Logits of the token that follows; what is shared with the call before is kept."""
        shared = 0
        for known, token in zip(self._cached, tokens[:-1], strict=False):
            if known != token:
                break
            shared += 1
        self._llama.llama_memory_seq_rm(self._llama.llama_get_memory(self._context), 0, shared, -1)
        new = (ctypes.c_int32 * (len(tokens) - shared))(*tokens[shared:])
        code = self._llama.llama_decode(
            self._context, self._llama.llama_batch_get_one(new, len(new))
        )
        assert code == 0, f"llama_decode returned {code}"
        self._cached = list(tokens)
        pointer = self._llama.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(pointer, (self._size,)).copy()

    def reply(self, conversation: Conversation, temperature: float, random: Random) -> Reply:
        """The answer to a conversation that ends with a user's or a tool's message."""
        text = render(conversation.messages, conversation.tools, add_generation_prompt=True)
        tokens = self.tokenize(text)
        said: list[int] = []
        while len(said) < ANSWER_TOKENS_MAX and len(tokens) + len(said) < CONTEXT:
            token = choose(self.logits(tokens + said), temperature, random)
            if self._llama.llama_vocab_is_eog(self._vocab, token):
                return Reply(self.detokenize(said).decode("utf-8", "replace"), stopped=True)
            said.append(token)
        return Reply(self.detokenize(said).decode("utf-8", "replace"), stopped=False)


def choose(logits: NDArray[np.float32], temperature: float, random: Random) -> int:
    """The likeliest token, or one drawn by its probability at this temperature."""
    if temperature == 0:
        return int(logits.argmax())
    scaled = (logits - logits.max()).astype(np.float64) / temperature
    sums = np.exp(scaled).cumsum()
    return min(int(np.searchsorted(sums, random.random() * sums[-1])), len(logits) - 1)
