"""What is said of a model's file before it is loaded: its facts, or why it cannot be served."""

import os
import shutil
import struct
import time
from pathlib import Path

import gguf
import pytest

from replica.gguf_file import (
    SAMPLE_BYTES,
    SAMPLES,
    ModelFileError,
    model_name,
    read_gguf,
    split_names,
)
from tests.gguf_samples import (
    Shape,
    tiny_llama,
    tiny_moe,
    tiny_recurrent,
    tiny_sliding_window,
    write_model,
)


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as refused:
        read_gguf(path)
    message = str(refused.value)
    assert str(path) in message
    assert "\n" not in message
    assert "; " in message, "a remedy follows what is wrong"
    return message


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "tiny.gguf")


def test_a_dense_model_is_described(tiny: Path) -> None:
    model = read_gguf(tiny)
    assert ("llama", "attention", "random llama", "F32") == (
        model.architecture,
        model.kind,
        model.name,
        model.quantization,
    )
    assert (2, 128, 256, 4096, 264) == (
        model.n_layers,
        model.n_embd,
        model.n_ff,
        model.n_ctx_train,
        model.n_vocab,
    )
    assert ((4, 4), (2, 2)) == (model.n_heads, model.n_kv_heads)
    assert model.has_chat_template
    assert tiny.stat().st_size == model.file_bytes
    assert (tiny,) == model.parts


def test_sizes_agree_with_the_reader_of_the_gguf_package(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf", quantization="Q4_0", output_quantization="Q8_0")
    theirs = gguf.GGUFReader(path)
    ours = read_gguf(path)
    assert sum(int(tensor.n_bytes) for tensor in theirs.tensors) == ours.weights_bytes
    assert len(theirs.tensors) == ours.tensor_count
    del theirs


def test_kinds_tell_how_the_past_is_held(tmp_path: Path) -> None:
    """The engine cuts a cache back to a prefix only where that is possible."""
    kinds = {
        "attention": tiny_moe(tmp_path / "moe.gguf"),
        "sliding-window": tiny_sliding_window(tmp_path / "window.gguf"),
        "recurrent": tiny_recurrent(tmp_path / "mamba.gguf"),
    }
    for kind, path in kinds.items():
        assert kind == read_gguf(path).kind
    without = write_model(tmp_path / "gemma.gguf", Shape("gemma3", layers=6))
    assert read_gguf(without).kind == "attention"


def test_experts_are_counted(tmp_path: Path) -> None:
    model = read_gguf(tiny_moe(tmp_path / "moe.gguf"))
    assert (4, 2, 64) == (model.n_experts, model.n_experts_used, model.n_ff_expert)


def test_a_large_vocabulary_is_read_in_well_under_a_second(tmp_path: Path) -> None:
    """Not a race, but the difference between a header and the gguf package's four seconds."""
    path = write_model(tmp_path / "large.gguf", Shape(vocabulary=262144))
    start = time.process_time()
    assert read_gguf(path).n_vocab == 262144
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("content", "found", "remedy"),
    [
        (b"", "is empty", "download or copy it again"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer", "git lfs pull"),
        (b"<!DOCTYPE html><html><head>", "is a web page", "download link"),
        (b'\x10\x00\x00\x00\x00\x00\x00\x00{"__metadata__"', "safetensors", "convert_hf_to_gguf"),
        (b"PK\x03\x04archive/data.pkl", "PyTorch checkpoint", "convert_hf_to_gguf"),
        (b"tjgg\x03\x00\x00\x00", "is a GGML file", "GGUF"),
        (b"\x1f\x8b\x08", "gzip", "unpack"),
        (b"hello, world", "is not a GGUF file: it begins with b'hello, w'", ".gguf"),
        (b"GGUF", "ends after 4 bytes, inside its header", "download or copy it again"),
        (struct.pack("<4sI", b"GGUF", 1), "is GGUF version 1", "newer file"),
        (struct.pack("<4sI", b"GGUF", 4), "is GGUF version 4", "truncated or damaged"),
        (struct.pack(">4sI", b"GGUF", 3), "big-endian", "little-endian"),
    ],
)
def test_what_is_no_model_is_recognised(
    tmp_path: Path, content: bytes, found: str, remedy: str
) -> None:
    message = refusal(written(tmp_path / "model.gguf", content))
    assert found in message
    assert remedy in message


def test_a_path_without_a_file_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "absent.gguf")


def test_a_directory_is_refused_with_the_models_in_it(tmp_path: Path, tiny: Path) -> None:
    assert tiny.name in refusal(tmp_path)


def test_a_pipe_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "not a regular file" in refusal(tmp_path / "pipe.gguf")


def test_a_truncated_download_is_refused_with_both_sizes(tiny: Path) -> None:
    """The header is whole, so only the sum of its tensors shows what is missing."""
    size = tiny.stat().st_size
    os.truncate(tiny, size - 1000)
    message = refusal(tiny)
    assert f"has {size - 1000:,} of the {size:,} bytes" in message
    assert "incomplete" in message


@pytest.mark.parametrize(
    ("architecture", "found"),
    [
        ("gptj", "does not support"),
        ("bert", "an encoder for embeddings"),
        ("t5encoder", "an encoder for embeddings"),
        ("clip", "projector"),
        ("llada", "diffusion"),
        ("wavtokenizer-dec", "speech"),
    ],
)
def test_what_cannot_produce_text_is_refused(tmp_path: Path, architecture: str, found: str) -> None:
    message = refusal(write_model(tmp_path / "model.gguf", Shape(architecture)))
    assert found in message
    assert repr(architecture) in message


@pytest.mark.parametrize("facts", [{"llama.pooling_type": 3}, {"llama.attention.causal": False}])
def test_an_embedding_model_of_a_text_architecture_is_refused(
    tmp_path: Path, facts: dict[str, int | str | bool]
) -> None:
    path = write_model(tmp_path / "model.gguf", Shape(), metadata=facts)
    assert "embeddings or ranking" in refusal(path)


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "lora.gguf", Shape(), metadata={"general.type": "adapter"})
    assert "'adapter'" in refusal(path)


def test_a_vocabulary_without_weights_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "no tensors" in refusal(path)


def split(directory: Path, shape: Shape, parts: int, seed: int | None = 0) -> list[Path]:
    """Write a model in several files, as llama-gguf-split does: the first has the metadata."""
    whole = write_model(directory / "whole.gguf", shape, seed=seed)
    paths = [directory / name for name in split_names(f"m-00001-of-{parts:05}.gguf")]
    facts = {"split.count": parts}
    write_model(paths[0], shape, seed=seed, metadata=facts | {"split.no": 0})
    for number, path in enumerate(paths[1:], 1):
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", parts)
        writer.add_tensor(f"blk.{number}.extra", gguf.GGUFReader(whole).tensors[0].data.copy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    whole.unlink()
    return paths


def test_any_part_of_a_split_model_stands_for_the_whole(tmp_path: Path) -> None:
    paths = split(tmp_path, Shape(), 3)
    models = [read_gguf(path) for path in paths]
    assert all(model == models[0] for model in models)
    assert tuple(paths) == models[0].parts
    assert paths[0] == models[0].path
    assert sum(path.stat().st_size for path in paths) == models[0].file_bytes


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    paths = split(tmp_path, Shape(), 3)
    paths[1].unlink()
    message = refusal(paths[0])
    assert "1 of 3 files are missing" in message
    assert paths[1].name in message


def test_parts_in_the_wrong_order_are_refused(tmp_path: Path) -> None:
    paths = split(tmp_path, Shape(), 3)
    shutil.copy(paths[2], paths[1])
    assert "is not part 2 of 3" in refusal(paths[1])


def test_a_renamed_first_part_is_refused(tmp_path: Path) -> None:
    paths = split(tmp_path, Shape(), 2)
    assert "but not named so" in refusal(paths[0].rename(tmp_path / "model.gguf"))


def test_a_file_is_called_by_its_name_without_ending_or_part() -> None:
    assert model_name("m-00002-of-00003.gguf") == "m"
    assert model_name("m-q4_0.gguf") == "m-q4_0"
    assert ["m.gguf"] == split_names("m.gguf")
    assert ["m-00001-of-00000.gguf"] == split_names("m-00001-of-00000.gguf")


def test_a_fingerprint_is_of_the_bytes_not_of_the_place(tmp_path: Path, tiny: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    copy = elsewhere / "other.gguf"
    shutil.copy(tiny, copy)
    assert read_gguf(tiny).fingerprint == read_gguf(copy).fingerprint


def test_other_weights_of_the_same_shape_have_another_fingerprint(tmp_path: Path) -> None:
    """The cache of one model restores silently into another of its shape; only this tells."""
    prints = {
        read_gguf(tiny_llama(tmp_path / f"{seed}.gguf", seed=seed)).fingerprint for seed in range(4)
    }
    assert len(prints) == 4


def test_a_fingerprint_reaches_from_the_first_weight_to_the_last(tmp_path: Path) -> None:
    """In a file that is too large to be read whole, and in all of a small one."""
    path = write_model(tmp_path / "large.gguf", Shape(width=4096, layers=1))
    model = read_gguf(path)
    assert 2 * SAMPLES * SAMPLE_BYTES < model.weights_bytes
    for position in (-1, -model.weights_bytes, -model.weights_bytes // 63 * 32):
        with path.open("r+b") as file:
            file.seek(position, os.SEEK_END)
            file.write(b"\x01")
        assert model.fingerprint != read_gguf(path).fingerprint
        model = read_gguf(path)


def test_metadata_and_every_part_count_for_the_fingerprint(tmp_path: Path) -> None:
    """A changed tokenizer or rope is another model; so is another second file."""
    plain, other = (
        read_gguf(write_model(tmp_path / "m.gguf", Shape(), seed=0, metadata={"note": note}))
        for note in ("this", "that")
    )
    assert plain.fingerprint != other.fingerprint

    paths = split(tmp_path, Shape(width=4096, layers=1), 2, seed=None)
    before = read_gguf(paths[0]).fingerprint
    with paths[1].open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    assert before != read_gguf(paths[0]).fingerprint


def test_a_change_anywhere_in_a_small_model_changes_its_fingerprint(tiny: Path) -> None:
    model = read_gguf(tiny)
    content = bytearray(tiny.read_bytes())
    for position in range(len(content) - model.weights_bytes, len(content), 50_021):
        content[position] ^= 1
        tiny.write_bytes(content)
        assert model.fingerprint != read_gguf(tiny).fingerprint
        content[position] ^= 1
