"""Small GGUF files with random weights, written when a test asks for one.

`tiny_llama` and its siblings load in a real llama.cpp within a tenth of a second and compute
tokens, senseless ones. `write_model` without a seed leaves a hole where the weights belong: a file
of any real model's shape and size, which takes no time and no disk.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

BYTE_TOKENS = 256
BOS, EOS = 256, 257
WORDS = ("Ġt", "Ġth", "Ġthe")
MERGES = ("Ġ t", "Ġt h", "Ġth e")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
)
_NORMAL, _CONTROL = 1, 3
_CONTEXT_TOKENS = 4096


@dataclass(frozen=True)
class Shape:
    """A transformer's dimensions, and how its weights are stored."""

    architecture: str = "llama"
    layers: int = 2
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_width: int = 32
    feed_forward: int = 256
    vocabulary: int = 264
    experts: int = 0
    experts_used: int = 0
    expert_width: int = 0
    sliding_window: int = 0
    quantization: str = "F32"
    output_quantization: str = ""
    """Of the output matrix; empty: the embedding serves as one."""


def tiny_llama(path: Path, *, seed: int = 0, **changes: Any) -> Path:  # noqa: ANN401
    """Write a dense model of 0.3 M weights; `changes` are fields of `Shape`."""
    return write_model(path, replace(Shape(), **changes), seed=seed)


def tiny_moe(path: Path, *, seed: int = 0) -> Path:
    """Write a mixture of four experts, two of them used."""
    shape = Shape("qwen3moe", experts=4, experts_used=2, expert_width=64)
    return write_model(path, shape, seed=seed)


def tiny_sliding_window(path: Path, *, seed: int = 0) -> Path:
    """Write a gemma3: every layer but the sixth looks back 64 tokens only."""
    return write_model(path, Shape("gemma3", layers=6, sliding_window=64), seed=seed)


def tiny_recurrent(path: Path, *, seed: int = 0) -> Path:
    """Write a mamba, which has a state instead of a KV cache."""
    return write_model(path, Shape("mamba", heads=0, kv_heads=0, head_width=0), seed=seed)


def write_model(
    path: Path,
    shape: Shape,
    *,
    seed: int | None = None,
    metadata: Mapping[str, int | str | bool | list[int] | list[bool]] | None = None,
) -> Path:
    """Write a model with random weights, or with a hole for them if there is no seed.

    `metadata` is written last, under the keys as they are given, and wins.
    """
    writer = gguf.GGUFWriter(path, shape.architecture)
    _write_facts(writer, shape)
    _write_vocabulary(writer, shape.vocabulary)
    for key, value in (metadata or {}).items():
        for written in writer.kv_data:
            written.pop(key, None)
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    if seed is None:
        _write_hole(writer, path, shape)
    else:
        _write_weights(writer, shape, seed)
    return path


def _write_facts(writer: Any, shape: Shape) -> None:  # noqa: ANN401  # gguf is untyped here
    writer.add_name(f"random {shape.architecture}")
    writer.add_block_count(shape.layers)
    writer.add_context_length(_CONTEXT_TOKENS)
    writer.add_embedding_length(shape.width)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType[f"{_FILE_TYPES.get(shape.quantization, 'ALL_F32')}"])
    if shape.architecture == "mamba":
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_inner_size(2 * shape.width)
        writer.add_ssm_state_size(16)
        writer.add_ssm_time_step_rank(8)
        return
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_width)
    writer.add_value_length(shape.head_width)
    writer.add_rope_dimension_count(shape.head_width)
    if shape.sliding_window:
        writer.add_sliding_window(shape.sliding_window)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_used)
        writer.add_expert_feed_forward_length(shape.expert_width)


_FILE_TYPES = {"F16": "MOSTLY_F16", "Q4_0": "MOSTLY_Q4_0", "Q8_0": "MOSTLY_Q8_0"}


def _write_vocabulary(writer: Any, size: int) -> None:  # noqa: ANN401
    """Write a byte-level BPE: every byte, two control tokens, a word; fillers up to `size`."""
    tokens = [*_byte_letters(), "<|begin|>", "<|end|>", *WORDS]
    tokens += [f"<|unused {number}|>" for number in range(len(tokens), size)]
    kinds = [_NORMAL] * BYTE_TOKENS + [_CONTROL] * 2 + [_NORMAL] * len(WORDS)
    kinds += [_CONTROL] * (size - len(kinds))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens[:size])
    writer.add_token_types(kinds[:size])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(value=False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _byte_letters() -> list[str]:
    """Return GPT-2's letter for every byte: printable ones are themselves."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(hidden)) for byte in range(256)]


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield name, dimensions (rows first) and type of every tensor."""
    yield "token_embd.weight", (shape.vocabulary, shape.width), shape.quantization
    yield "output_norm.weight", (shape.width,), "F32"
    if shape.output_quantization:
        yield "output.weight", (shape.vocabulary, shape.width), shape.output_quantization
    layer = _mamba_layer if shape.architecture == "mamba" else _layer
    for number in range(shape.layers):
        for name, dimensions in layer(shape):
            plain = len(dimensions) == 1 or "ssm" in name or "gate_inp" in name
            yield f"blk.{number}.{name}", dimensions, "F32" if plain else shape.quantization


def _layer(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, query, key = (
        shape.width,
        shape.heads * shape.head_width,
        shape.kv_heads * shape.head_width,
    )
    yield "attn_norm.weight", (width,)
    yield "ffn_norm.weight", (width,)
    yield "attn_q.weight", (query, width)
    yield "attn_k.weight", (key, width)
    yield "attn_v.weight", (key, width)
    yield "attn_output.weight", (width, query)
    if shape.architecture == "qwen2":
        yield "attn_q.bias", (query,)
        yield "attn_k.bias", (key,)
        yield "attn_v.bias", (key,)
    if shape.architecture in ("qwen3", "qwen3moe", "gemma3"):
        yield "attn_q_norm.weight", (shape.head_width,)
        yield "attn_k_norm.weight", (shape.head_width,)
    if shape.architecture == "gemma3":
        yield "post_attention_norm.weight", (width,)
        yield "post_ffw_norm.weight", (width,)
    if shape.experts:
        experts, inner = shape.experts, shape.expert_width
        yield "ffn_gate_inp.weight", (experts, width)
        yield "ffn_gate_exps.weight", (experts, inner, width)
        yield "ffn_up_exps.weight", (experts, inner, width)
        yield "ffn_down_exps.weight", (experts, width, inner)
    else:
        yield "ffn_gate.weight", (shape.feed_forward, width)
        yield "ffn_up.weight", (shape.feed_forward, width)
        yield "ffn_down.weight", (width, shape.feed_forward)


def _mamba_layer(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner = shape.width, 2 * shape.width
    yield "attn_norm.weight", (width,)
    yield "ssm_in.weight", (2 * inner, width)
    yield "ssm_conv1d.weight", (inner, 4)
    yield "ssm_conv1d.bias", (inner,)
    yield "ssm_x.weight", (8 + 2 * 16, inner)
    yield "ssm_dt.weight", (inner, 8)
    yield "ssm_dt.bias", (inner,)
    yield "ssm_a", (inner, 16)
    yield "ssm_d", (inner,)
    yield "ssm_out.weight", (width, inner)


def _write_weights(writer: Any, shape: Shape, seed: int) -> None:  # noqa: ANN401
    random = np.random.default_rng(seed)
    for name, dimensions, type_name in _tensors(shape):
        weights = random.standard_normal(dimensions, np.float32) / np.sqrt(dimensions[-1])
        if name.endswith("norm.weight"):
            weights = np.ones(dimensions, np.float32)
        if name.endswith("ssm_a"):
            # A state that grows ends in NaN, one that fades at once would forget its tokens.
            weights = -np.exp(weights) / 20
        kind = gguf.GGMLQuantizationType[type_name]
        writer.add_tensor(name, gguf.quants.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_hole(writer: Any, path: Path, shape: Shape) -> None:  # noqa: ANN401
    size = 0
    for name, dimensions, type_name in _tensors(shape):
        kind = gguf.GGMLQuantizationType[type_name]
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        tensor_bytes = int(np.prod(dimensions)) // block * block_bytes
        stored = gguf.quants.quant_shape_to_byte_shape(dimensions, kind)
        dtype = np.dtype(np.float32 if type_name == "F32" else np.uint8)
        writer.add_tensor_info(
            name, dimensions if type_name == "F32" else stored, dtype, tensor_bytes, raw_dtype=kind
        )
        size += -(-tensor_bytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    (file,) = writer.fout
    writer.write_padding(file, file.tell())
    start = file.tell()
    writer.close()
    os.truncate(path, start + size)
