"""A model's vocabulary: text to tokens, tokens to bytes, and the texts that belong to it.

Loads a GGUF's metadata and none of its weights. Gives bytes, never text: a token may end in the
middle of a character. Refuses stretches of text that would overflow llama.cpp's stack.
"""

import ctypes
import re
import threading
from pathlib import Path
from typing import Any, Self

from replica.ggml import open_library

RUN_CHARS_MAX = 2**18
"""The longest stretch, in characters, of text without (or of nothing but) white space."""

_RUN_CHARS_SAFE = 4096
"""Up to this stretch any thread's own stack is enough."""
_RUN_STACK_BYTES = 1024
"""Of stack per character. llama.cpp splits the text of many models with a `std::regex` that
recurses once per matched character; up to 500 bytes were measured."""
_STACK_BYTES_MIN = 2**22

_LONG_RUN = re.compile(rf"(?<!\S)\S{{{_RUN_CHARS_SAFE},}}|(?<!\s)\s{{{_RUN_CHARS_SAFE},}}")

_PRESERVED = frozenset({b"<tool_call>", b"</tool_call>", b"<think>", b"</think>"})
"""Control tokens in some models, but part of the answer in all of them."""

_SPACE_PREFIX_KEY = b"tokenizer.ggml.add_space_prefix"


class VocabError(Exception):
    """The file holds no vocabulary that llama.cpp can read."""


class UntokenizableError(Exception):
    """This text cannot be tokenized safely; the message may be shown to whoever sent it."""


class Vocab:
    """The vocabulary of one GGUF file. `tokenize` may be called from any thread."""

    def __init__(self, llama: Any, model: Any) -> None:  # noqa: ANN401 - the binding is untyped
        self._llama = llama
        self._model = model
        self._vocab = llama.llama_model_get_vocab(model)
        self.n_tokens = int(llama.llama_vocab_n_tokens(self._vocab))
        self.piece_bytes_max = 1
        """The longest text of one token: no text has fewer tokens than its length over this."""
        self._pieces = self._read_pieces()
        self.bos_id = self._known_id(llama.llama_vocab_bos(self._vocab))
        self.eos_id = self._known_id(llama.llama_vocab_eos(self._vocab))
        self.bos = self._text(self.bos_id)
        self.eos = self._text(self.eos_id)
        self.add_bos = bool(llama.llama_vocab_get_add_bos(self._vocab)) and self.bos_id is not None
        self.chat_template = self._template(None)
        self.tool_template = self._template(b"tool_use")
        """A template of its own for requests with tools; few models have one."""
        self.leading_space = self._reads_leading_space()
        """A text begins with a space that nobody wrote (SentencePiece)."""

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read the vocabulary of a GGUF file, with or without weights."""
        llama = open_library()
        params = llama.llama_model_default_params()
        params.vocab_only = True
        model = llama.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            message = f"{path} is not a GGUF file that llama.cpp can read; see the log for why"
            raise VocabError(message)
        if int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))) == 0:
            llama.llama_model_free(model)
            message = f"{path} holds no vocabulary"
            raise VocabError(message)
        return cls(llama, model)

    def close(self) -> None:
        """Free llama.cpp's part. Pieces and texts can still be read, `tokenize` cannot be used."""
        if self._model is not None:
            self._llama.llama_model_free(self._model)
        self._model = self._vocab = None

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the tokens of a text.

        `add_special` adds what the model wants around a text (BOS); `parse_special` reads
        `<|im_end|>` and its like as the tokens they name.
        """
        run = max((len(found.group()) for found in _LONG_RUN.finditer(text)), default=0)
        if run > RUN_CHARS_MAX:
            message = f"holds {run} characters without a break; at most {RUN_CHARS_MAX} can be read"
            raise UntokenizableError(message)
        if run == 0:
            return self._tokenize(text, add_special, parse_special)
        tokens: list[int] = []

        def work() -> None:
            tokens.extend(self._tokenize(text, add_special, parse_special))

        _run_on_stack(work, _STACK_BYTES_MIN + run * _RUN_STACK_BYTES)
        return tokens

    def piece(self, token_id: int) -> bytes:
        """Return the bytes a token stands for. Control tokens stand for none."""
        return self._pieces[token_id]

    def is_end(self, token_id: int) -> bool:
        """Whether the model says with this token that it has finished."""
        assert 0 <= token_id < self.n_tokens
        assert self._vocab is not None, "closed"
        return bool(self._llama.llama_vocab_is_eog(self._vocab, token_id))

    def _tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:  # noqa: FBT001 - as llama.cpp
        assert self._vocab is not None, "closed"
        data = text.encode()
        room = len(data) + 8
        while True:
            buffer = (ctypes.c_int32 * room)()
            count = self._llama.llama_tokenize(
                self._vocab, data, len(data), buffer, room, add_special, parse_special
            )
            if count >= 0:
                return buffer[:count]
            assert -count > room, "llama.cpp asked for no more room than it had"
            room = -count

    def _read_pieces(self) -> list[bytes]:
        to_piece, vocab = self._llama.llama_token_to_piece, self._vocab
        room = 256
        buffer = ctypes.create_string_buffer(room)
        pieces = []
        for token_id in range(self.n_tokens):
            size = to_piece(vocab, token_id, buffer, room, 0, False)  # noqa: FBT003 - C
            if size < 0:
                room = -size
                buffer = ctypes.create_string_buffer(room)
                size = to_piece(vocab, token_id, buffer, room, 0, False)  # noqa: FBT003 - C
            piece = text = buffer.raw[:size]
            if not piece:
                text = self._llama.llama_vocab_get_text(vocab, token_id) or b""
                piece = text if text in _PRESERVED else b""
            self.piece_bytes_max = max(self.piece_bytes_max, len(text))
            pieces.append(piece)
        return pieces

    def _known_id(self, token_id: int) -> int | None:
        return token_id if 0 <= token_id < self.n_tokens else None

    def _text(self, token_id: int | None) -> str:
        if token_id is None:
            return ""
        text: bytes = self._llama.llama_vocab_get_text(self._vocab, token_id) or b""
        return text.decode("utf-8", "replace")

    def _template(self, name: bytes | None) -> str | None:
        text: bytes | None = self._llama.llama_model_chat_template(self._model, name)
        return text.decode("utf-8", "replace") if text else None

    def _reads_leading_space(self) -> bool:
        if self._llama.llama_vocab_type(self._vocab) != self._llama.LLAMA_VOCAB_TYPE_SPM:
            return False
        buffer = ctypes.create_string_buffer(8)
        size = self._llama.llama_model_meta_val_str(self._model, _SPACE_PREFIX_KEY, buffer, 8)
        return size < 0 or buffer.value != b"false"


_stack_size_lock = threading.Lock()
"""`threading.stack_size` is the process's; it is set for the moment of one start only."""


def _run_on_stack(work: Any, stack_bytes: int) -> None:  # noqa: ANN401
    """Run `work` on a thread with this much stack. Only what it touches becomes memory."""
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures.append(error)

    with _stack_size_lock:
        before = threading.stack_size(stack_bytes)
        try:
            thread = threading.Thread(target=guarded, name="tokenize")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if failures:
        raise failures[0]
