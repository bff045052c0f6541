"""Damaged and hostile GGUF files: each is read or refused, soon, and with little memory."""

import os
import struct
import time
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from replica import gguf_header
from replica.gguf_file import ModelFileError, read_gguf
from tests.gguf_samples import Shape, tiny_llama, write_model


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as refused:
        read_gguf(path)
    return str(refused.value)


@cache
def tiny_bytes(directory: Path) -> bytes:
    return tiny_llama(directory / "for_bytes.gguf").read_bytes()


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


def judged(path: Path, content: bytes) -> None:
    """Read a file that may be anything: it is valid or refused, soon, and nothing else happens."""
    path.write_bytes(content)
    start = time.perf_counter()
    try:
        read_gguf(path)
    except ModelFileError as error:
        message = str(error)
    else:
        message = ""
    assert "\n" not in message
    assert time.perf_counter() - start < 1


@settings(deadline=None)
@given(length=st.integers(0, 1_323_295))
def test_every_truncation_is_refused(scratch: Path, length: int) -> None:
    content = tiny_bytes(scratch)
    path = scratch / "truncated.gguf"
    path.write_bytes(content[: min(length, len(content) - 1)])
    assert refusal(path)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6000), st.integers(0, 255)), min_size=1, max_size=4))
def test_no_damage_to_a_header_gets_past_as_another_error(
    scratch: Path, changes: list[tuple[int, int]]
) -> None:
    content = bytearray(tiny_bytes(scratch))
    for position, value in changes:
        content[position] = value
    judged(scratch / "damaged.gguf", bytes(content))


HUGE = [0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


@settings(max_examples=300, deadline=None)
@given(position=st.integers(4, 6000), value=st.sampled_from(HUGE))
@example(position=8, value=2**64 - 1)
@example(position=16, value=2**64 - 1)
@example(position=24, value=2**40)
def test_no_count_or_length_is_believed(scratch: Path, position: int, value: int) -> None:
    content = bytearray(tiny_bytes(scratch))
    struct.pack_into("<Q", content, position, value)
    judged(scratch / "hostile.gguf", bytes(content))


def test_a_long_list_of_nothing_is_not_walked_to_its_end(tmp_path: Path) -> None:
    """A file of zeros can claim any number of empty strings, and have the room for them."""
    path = tmp_path / "zeros.gguf"
    key = struct.pack("<Q1sIIQ", 1, b"a", 9, 8, 2**33)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + key)
    os.truncate(path, 2**40)
    start = time.perf_counter()
    assert f"more than {gguf_header.STRINGS_MAX:,} strings" in refusal(path)
    assert time.perf_counter() - start < 1


def test_a_header_may_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "zeros.gguf"
    key = struct.pack("<Q1sIQ", 1, b"a", 8, 2**39)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + key)
    os.truncate(path, 2**40)
    assert "a header of more than 256 MiB" in refusal(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 0),
        ("llama.block_count", 513),
        ("llama.block_count", 2**32 - 1),
        ("llama.embedding_length", 0),
        ("llama.expert_count", 1025),
        ("general.alignment", 24),
    ],
)
def test_numbers_that_would_abort_llama_cpp_are_refused(
    tmp_path: Path, key: str, value: int
) -> None:
    """Its asserts take the whole process down, with nothing that an operator could read."""
    path = tiny_llama(tmp_path / "tiny.gguf")
    content = bytearray(path.read_bytes())
    position = content.find(key.encode())
    if position < 0:
        path = write_model(tmp_path / "more.gguf", Shape(), metadata={key: value})
    else:
        struct.pack_into("<I", content, position + len(key) + 4, value)
        path.write_bytes(content)
    message = refusal(path)
    assert f"{key} = {value}" in message
