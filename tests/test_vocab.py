"""A vocabulary read from a real GGUF by the real llama.cpp."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest

from replica.vocab import RUN_CHARS_MAX, UntokenizableError, Vocab, VocabError

CONTROL, NORMAL, USER_DEFINED = (
    gguf.TokenType.CONTROL,
    gguf.TokenType.NORMAL,
    gguf.TokenType.USER_DEFINED,
)
BOS, IM_START, IM_END, CALL, MINE = range(256, 261)
HE = 261
TEMPLATE = "{{ bos_token }}{{ messages[0].content }}"


def byte_characters() -> list[str]:
    """The printable stand-ins that byte-level BPE writes for the 256 bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    names = {byte: chr(byte) for byte in shown}
    names |= {byte: chr(256 + position) for position, byte in enumerate(hidden)}
    return [names[byte] for byte in range(256)]


def write_gguf(path: Path, *, add_bos: bool = True, pre: str = "gpt-2") -> Path:
    """Write a model without weights: 256 bytes, some special tokens and one merge."""
    tokens = [
        *byte_characters(),
        "<s>",
        "<|im_start|>",
        "<|im_end|>",
        "<tool_call>",
        "[mine]",
        "he",
    ]
    kinds = [NORMAL] * 256 + [CONTROL] * 4 + [USER_DEFINED, NORMAL]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(IM_END)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vocab]:
    found = Vocab.load(write_gguf(tmp_path_factory.mktemp("vocab") / "tiny.gguf"))
    yield found
    found.close()


@pytest.mark.parametrize("text", ["", "hello", "né€😀", "a\x00b", " \n\t", "<|im_start|>"])
def test_text_survives_the_way_to_tokens_and_back(vocab: Vocab, text: str) -> None:
    tokens = vocab.tokenize(text, add_special=False, parse_special=False)
    assert text.encode() == b"".join(map(vocab.piece, tokens))


def test_merges_are_applied(vocab: Vocab) -> None:
    assert [HE, ord("y")] == vocab.tokenize("hey", add_special=False, parse_special=False)


def test_special_tokens_are_read_only_when_asked(vocab: Vocab) -> None:
    text = "<|im_start|>he"
    assert [IM_START, HE] == vocab.tokenize(text, add_special=False, parse_special=True)
    assert IM_START not in vocab.tokenize(text, add_special=False, parse_special=False)
    assert [BOS, HE] == vocab.tokenize("he", add_special=True, parse_special=False)


def test_control_tokens_stand_for_nothing_but_the_marks_of_calls_stay(vocab: Vocab) -> None:
    assert [b"", b"", b""] == [vocab.piece(token) for token in (BOS, IM_START, IM_END)]
    assert b"<tool_call>" == vocab.piece(CALL)
    assert b"[mine]" == vocab.piece(MINE)
    assert len("<|im_start|>") == vocab.piece_bytes_max


def test_the_model_is_known_to_end_with_its_own_token(vocab: Vocab) -> None:
    assert vocab.is_end(IM_END)
    assert not vocab.is_end(HE)


def test_the_vocabulary_describes_itself(vocab: Vocab) -> None:
    assert (262, "<s>", "<|im_end|>") == (vocab.n_tokens, vocab.bos, vocab.eos)
    assert (BOS, IM_END) == (vocab.bos_id, vocab.eos_id)
    assert TEMPLATE == vocab.chat_template
    assert vocab.tool_template is None
    assert vocab.add_bos
    assert not vocab.leading_space


def test_a_model_may_want_no_bos(tmp_path: Path) -> None:
    vocab = Vocab.load(write_gguf(tmp_path / "none.gguf", add_bos=False))
    assert not vocab.add_bos
    vocab.close()


@pytest.mark.parametrize("character", ["a", " ", "!", "é"])
def test_a_long_run_does_not_overflow_llama_cpps_stack(tmp_path: Path, character: str) -> None:
    """Of this many characters a quarter is enough to kill the process without precautions."""
    vocab = Vocab.load(write_gguf(tmp_path / "deep.gguf", pre="deepseek-llm"))
    text = f"<|im_start|>x {character * 160_000} x"
    tokens = vocab.tokenize(text, add_special=False, parse_special=True)
    assert text[12:].encode() == b"".join(map(vocab.piece, tokens))
    assert 0 == threading.stack_size(), "the process's other threads keep their ordinary stacks"
    vocab.close()


def test_a_run_without_end_is_refused(vocab: Vocab) -> None:
    for character in "x ":
        with pytest.raises(UntokenizableError, match=str(RUN_CHARS_MAX)):
            vocab.tokenize(
                f"a{character * (RUN_CHARS_MAX + 1)}", add_special=False, parse_special=False
            )


def test_a_file_that_is_no_model_is_refused_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "no.gguf"
    path.write_bytes(b"nonsense" * 100)
    with (
        caplog.at_level(logging.WARNING, "llama.cpp"),
        pytest.raises(VocabError, match=r"no\.gguf"),
    ):
        Vocab.load(path)
    assert caplog.records
    with pytest.raises(VocabError):
        Vocab.load(tmp_path / "missing.gguf")


def test_closing_twice_does_no_harm(tmp_path: Path) -> None:
    vocab = Vocab.load(write_gguf(tmp_path / "close.gguf"))
    vocab.close()
    vocab.close()
    assert b"he" == vocab.piece(HE)
