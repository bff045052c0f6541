"""Models in real shapes with random weights, written once and kept.

Speed depends on a model's dimensions and on how its weights are stored, hardly on their values. So
quantized blocks are filled with random bytes under one scale that keeps activations near 1. What
such a model says is noise, but noise that can be read back: every token it can choose has its
number as text, so a conversation can be continued from its tokens.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tests import gguf_samples
from tests.gguf_samples import Shape

SHAPES = {
    "0.5B": Shape(layers=24, width=896, heads=14, kv_heads=2, head_width=64, feed_forward=4864),
    "1B": Shape(layers=16, width=2048, heads=32, kv_heads=8, head_width=64, feed_forward=8192),
    "tiny": Shape(),  # to try the script out
}
QUANTIZATIONS = ("Q4_0", "Q8_0")
FIRST_PLAIN_TOKEN = 258
"""The ones before it are single bytes and control tokens: never chosen, never in a prompt."""

_UNIFORM_DEVIATION = {"Q4_0": 16 / 12**0.5, "Q8_0": 256 / 12**0.5}
_NORMAL, _CONTROL = 1, 3
_WRITTEN_TOKEN = re.compile(r" t(\d+)")


def parse_name(name: str) -> tuple[str, str]:
    """Split `0.5B-Q4_0` into shape and quantization."""
    shape, _, quantization = name.partition("-")
    if shape not in SHAPES or quantization not in QUANTIZATIONS:
        known = ", ".join(f"{shape}-{kind}" for shape in SHAPES for kind in QUANTIZATIONS)
        raise ValueError(f"there is no model {name!r}; known are {known}")
    return shape, quantization


def model_file(folder: Path, name: str, vocabulary: int) -> Path:
    """Return the model of this name, written now if it is not there yet."""
    size, quantization = parse_name(name)
    path = folder / f"{size}-{quantization}-{vocabulary}.gguf"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    shape = replace(
        SHAPES[size],
        vocabulary=vocabulary,
        quantization=quantization,
        output_quantization=quantization,
    )
    _write(unfinished, shape)
    return unfinished.rename(path)


def token_ids(text: str) -> list[int]:
    """Return the tokens a model of ours meant with this text."""
    return [int(number) for number in _WRITTEN_TOKEN.findall(text)]


def _write(path: Path, shape: Shape) -> None:
    writer = gguf.GGUFWriter(path, shape.architecture)
    gguf_samples._write_facts(writer, shape)
    _write_vocabulary(writer, shape.vocabulary)
    random = np.random.default_rng(0)
    for name, dimensions, type_name in gguf_samples._tensors(shape):
        kind = gguf.GGMLQuantizationType[type_name]
        weights = _MAKERS[type_name](random, dimensions)
        if name == "output.weight":
            # Logits of zero never win, so every token chosen is one that can be read back.
            weights[:FIRST_PLAIN_TOKEN] = 0
        writer.add_tensor(name, weights, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_vocabulary(writer: Any, size: int) -> None:  # noqa: ANN401  # gguf is untyped here
    tokens = [*gguf_samples._byte_letters(), "<|begin|>", "<|end|>"]
    assert FIRST_PLAIN_TOKEN == len(tokens) < size
    tokens += [f"Ġt{number}" for number in range(FIRST_PLAIN_TOKEN, size)]
    kinds = [_NORMAL] * size
    kinds[gguf_samples.BOS] = kinds[gguf_samples.EOS] = _CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(list(gguf_samples.MERGES))
    writer.add_bos_token_id(gguf_samples.BOS)
    writer.add_eos_token_id(gguf_samples.EOS)
    writer.add_add_bos_token(value=False)
    writer.add_chat_template(gguf_samples.CHAT_TEMPLATE)


def _ones(_random: np.random.Generator, dimensions: tuple[int, ...]) -> NDArray[np.float32]:
    return np.ones(dimensions, np.float32)


def _blocks(
    type_name: str,
) -> Callable[[np.random.Generator, tuple[int, ...]], NDArray[np.uint8]]:
    """Return a maker of rows of blocks: half a float as the scale, then the quantized values."""
    values, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]

    def make(random: np.random.Generator, dimensions: tuple[int, ...]) -> NDArray[np.uint8]:
        rows, width = dimensions
        scale = np.float16(1 / _UNIFORM_DEVIATION[type_name] / width**0.5)
        count = rows * width // values
        blocks = np.frombuffer(random.bytes(count * block_bytes), np.uint8).copy()
        blocks = blocks.reshape(count, block_bytes)
        blocks[:, :2] = np.frombuffer(scale.tobytes(), np.uint8)
        return blocks.reshape(rows, width // values * block_bytes)

    return make


_MAKERS: dict[str, Callable[..., NDArray[Any]]] = {
    "F32": _ones,  # the weights of norms are all that is stored as it is
    "Q4_0": _blocks("Q4_0"),
    "Q8_0": _blocks("Q8_0"),
}
