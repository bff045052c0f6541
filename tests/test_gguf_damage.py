"""Damaged and hostile GGUF files: each is read or refused, soon, and with little memory."""

import os
import struct
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import gguf
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


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def packed(
    keys: Sequence[str] = (),
    tensors: Sequence[tuple[str, tuple[int, ...], int, int]] = (),
    weights: int = 0,
) -> bytes:
    """A llama by hand: more keys, all strings; tensors as name, shape, type and offset."""
    content = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), 1 + len(keys))
    content += string("general.architecture") + struct.pack("<I", 8) + string("llama")
    for key in keys:
        content += string(key) + struct.pack("<I", 8) + string("value")
    for name, shape, number, offset in tensors:
        content += string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        content += struct.pack("<IQ", number, offset)
    return content + bytes(-len(content) % 32 + weights)


F32, Q4_0 = 0, 2


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (packed(keys=["a", "a"]), "the metadata key 'a' twice"),
        (packed(keys=[""]), "or without a name"),
        (packed(tensors=[("t", (8,), F32, 0), ("t", (8,), F32, 32)]), "two tensors named 't'"),
        (packed(tensors=[("t", (8,), F32, 32)], weights=64), "at 32, where 0 is expected"),
        (packed(tensors=[("t", (8,), F32, 0), ("u", (8,), F32, 0)]), "at 0, where 32 is expected"),
        (packed(tensors=[("t", (33, 2), Q4_0, 0)]), "impossible shape (33, 2) for q4_0"),
        (packed(tensors=[("t", (1 << 40, 1 << 40), F32, 0)]), "impossible shape"),
        (packed(tensors=[("t", (1, 1, 1, 1, 1), F32, 0)]), "of 5 dimensions"),
        (packed(tensors=[("t" * 64, (8,), F32, 0)]), "names have 63 bytes"),
        (packed(tensors=[("t", (8,), 31, 0)]), "of type 31, which this llama.cpp does not have"),
        (packed(tensors=[("t", (8,), F32, 0)]), "has 128 of the 160 bytes that its 1 tensors need"),
    ],
)
def test_what_llama_cpp_would_refuse_is_refused(tmp_path: Path, content: bytes, found: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert found in refusal(path)


@pytest.mark.parametrize(("position", "what"), [(8, "tensors"), (16, "metadata keys")])
def test_a_count_has_a_limit_even_where_the_file_has_room(
    tmp_path: Path, position: int, what: str
) -> None:
    content = bytearray(packed(weights=1 << 20))
    struct.pack_into("<Q", content, position, 65_537)
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert f"claims to have 65,537 {what}, where 65,536 is the limit" in refusal(path)


def test_long_arrays_are_counted_and_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("short", list(range(1024)))
    writer.add_array("long", list(range(1025)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    header = gguf_header.read_header(path)
    assert tuple(range(1024)) == header.metadata["short"]
    assert gguf_header.Elements(1025) == header.metadata["long"]
    assert (1024, 1025, 0) == tuple(header.length(key) for key in ("short", "long", "absent"))


@cache
def tiny_bytes(directory: Path) -> bytes:
    return tiny_llama(directory / "for_bytes.gguf").read_bytes()


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


def judged(path: Path, content: bytes) -> None:
    """Read a file that may be anything: it is valid or refused, soon, and nothing else happens."""
    path.write_bytes(content)
    start = time.process_time()
    try:
        read_gguf(path)
    except ModelFileError as error:
        message = str(error)
    else:
        message = ""
    assert "\n" not in message
    assert time.process_time() - start < 1


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
    start = time.process_time()
    assert f"more than {gguf_header.STRINGS_MAX:,} strings" in refusal(path)
    assert time.process_time() - start < 1


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
