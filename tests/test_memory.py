"""The memory a model is predicted to take: arithmetic, and llama.cpp's own figures beside it."""

import json
import logging
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from replica.gguf_file import GgufFile, read_gguf
from replica.memory import DoesNotFitError, MemoryNeed, check_fit, predict_memory
from tests.gguf_samples import Shape, tiny_llama, tiny_recurrent, write_model

GIB = 1 << 30
MIB = 1 << 20

LLAMA_8B = Shape(
    layers=32,
    width=4096,
    heads=32,
    kv_heads=8,
    head_width=128,
    feed_forward=14336,
    vocabulary=1024,
    quantization="Q4_0",
    output_quantization="Q8_0",
)
QWEN_HALF_B = Shape(
    "qwen2",
    layers=24,
    width=896,
    heads=14,
    kv_heads=2,
    head_width=64,
    feed_forward=4864,
    vocabulary=151936,
    quantization="Q4_0",
)


def read(path: Path, shape: Shape) -> GgufFile:
    return read_gguf(write_model(path / "model.gguf", shape))


def need_of(**changes: int) -> MemoryNeed:
    parts = ("weights_bytes", "kv_bytes", "compute_bytes", "output_bytes", "overhead_bytes")
    return replace(MemoryNeed(**dict.fromkeys(parts, GIB)), **changes)


def test_an_8b_model_keeps_128_kib_per_token_and_sequence(tmp_path: Path) -> None:
    gguf = read(tmp_path, LLAMA_8B)
    need = predict_memory(gguf, context_tokens=4096, parallel=4)
    assert 4 * 4096 * (128 << 10) == need.kv_bytes


def test_room_is_rounded_up_as_llama_cpp_does(tmp_path: Path) -> None:
    """Each sequence's, not the sum: four contexts of 257 tokens are four of 512."""
    gguf = read(tmp_path, LLAMA_8B)
    rounded = predict_memory(gguf, context_tokens=512, parallel=4)
    assert rounded == predict_memory(gguf, context_tokens=257, parallel=4)
    assert rounded != predict_memory(gguf, context_tokens=256, parallel=4)


def test_q8_0_takes_34_bytes_where_f16_takes_64(tmp_path: Path) -> None:
    gguf = read(tmp_path, LLAMA_8B)
    f16 = predict_memory(gguf, context_tokens=4096, parallel=4)
    q8_0 = predict_memory(gguf, context_tokens=4096, parallel=4, kv_type="q8_0")
    assert f16.kv_bytes * 34 == q8_0.kv_bytes * 64


def test_a_tied_embedding_that_gets_repacked_counts_twice(tmp_path: Path) -> None:
    """Llama.cpp keeps it once to look rows up in, and once as the processor multiplies it."""
    tied = read_gguf(tiny_llama(tmp_path / "tied.gguf", quantization="Q4_0"))
    assert tied.tied_embedding is not None
    need = predict_memory(tied, context_tokens=256, parallel=1)
    assert tied.weights_bytes + 264 * 128 // 32 * 18 == need.weights_bytes


@pytest.mark.parametrize("output", ["", "F32"])
def test_other_embeddings_count_once(tmp_path: Path, output: str) -> None:
    gguf = read_gguf(tiny_llama(tmp_path / "tiny.gguf", output_quantization=output))
    assert (gguf.tied_embedding is None) == bool(output)
    need = predict_memory(gguf, context_tokens=256, parallel=1)
    assert gguf.weights_bytes == need.weights_bytes


def test_a_recurrent_state_does_not_grow_with_the_context(tmp_path: Path) -> None:
    """Per layer 16 x 256 of state and 3 x 256 of convolution, F32, for each sequence."""
    gguf = read_gguf(tiny_recurrent(tmp_path / "mamba.gguf"))
    for context_tokens in (256, 65536):
        need = predict_memory(gguf, context_tokens=context_tokens, parallel=3)
        assert 3 * 2 * (16 * 256 + 3 * 256) * 4 == need.kv_bytes


def test_the_books_on_a_long_cache_are_counted(tmp_path: Path) -> None:
    """26.7 MiB were measured beside 16 sequences of 32,768 tokens."""
    gguf = read(tmp_path, LLAMA_8B)
    short = predict_memory(gguf, context_tokens=256, parallel=16).overhead_bytes
    long = predict_memory(gguf, context_tokens=256 + 32768, parallel=16).overhead_bytes
    assert pytest.approx(27 * MIB, rel=0.05) == long - short


def test_the_total_is_the_sum_of_its_parts() -> None:
    assert need_of().total_bytes == 5 * GIB
    assert 7 * GIB == need_of(output_bytes=3 * GIB).total_bytes


def test_what_just_fits_is_not_refused() -> None:
    check_fit(need_of(), 5 * GIB, "node 0")
    with pytest.raises(DoesNotFitError):
        check_fit(need_of(), 5 * GIB - 1, "node 0")


def test_a_refusal_tells_every_figure_and_what_to_do() -> None:
    need = MemoryNeed(4 * GIB, 9 * GIB, GIB // 4, GIB // 4, GIB // 8)
    with pytest.raises(DoesNotFitError) as refused:
        check_fit(need, 8 * GIB, "node 1")
    assert str(refused.value) == (
        "the model does not fit node 1: it needs 13.62 GiB (weights 4.00, KV cache 9.00, "
        "compute buffers 0.50, the process 0.12) and 8.00 GiB are free; lower --ctx or "
        "--parallel, set --kv-type q8_0, choose a smaller quantization, or take several nodes for "
        "one replica with --domain socket or --mode span"
    )


def test_a_smaller_context_is_no_remedy_where_the_weights_alone_do_not_fit() -> None:
    with pytest.raises(DoesNotFitError) as refused:
        check_fit(need_of(weights_bytes=40 * GIB), 8 * GIB, "node 0")
    assert "--ctx" not in str(refused.value)
    assert "smaller quantization" in str(refused.value)


SHAPES = {
    "qwen2 0.5B": QWEN_HALF_B,
    "llama 8B": replace(LLAMA_8B, vocabulary=128256),
    "llama 70B": replace(
        LLAMA_8B, layers=80, width=8192, heads=64, feed_forward=28672, vocabulary=128256
    ),
    "mistral 24B": replace(LLAMA_8B, layers=40, width=5120, feed_forward=32768, vocabulary=131072),
    "qwen3 0.6B": replace(
        LLAMA_8B,
        architecture="qwen3",
        layers=28,
        width=1024,
        heads=16,
        feed_forward=3072,
        vocabulary=151936,
        output_quantization="",
    ),
    "qwen3 30B-A3B": Shape(
        "qwen3moe", 48, 2048, 32, 4, 128, 6144, 151936, 128, 8, 768, 0, "Q4_0", "Q8_0"
    ),
    "qwen3 235B-A22B": Shape(
        "qwen3moe", 94, 4096, 64, 4, 128, 12288, 151936, 128, 8, 1536, 0, "Q4_0", "Q8_0"
    ),
    "gemma3 1B": Shape("gemma3", 26, 1152, 4, 1, 256, 6912, 262144, 0, 0, 0, 512, "Q4_0"),
    "gemma3 27B": Shape("gemma3", 62, 5376, 32, 16, 128, 21504, 262144, 0, 0, 0, 1024, "Q4_0"),
    "mamba 2.8B": Shape("mamba", 64, 2560, 0, 0, 0, 0, 50280, quantization="Q4_0"),
}
SETTINGS = [(4096, 8, "f16", 512), (16384, 4, "q8_0", 512), (2048, 64, "f16", 128)]


@pytest.mark.model
@pytest.mark.parametrize("name", SHAPES)
def test_llama_cpp_reserves_what_was_predicted(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """
    KV cache and logits to the byte. The compute buffer is a fit: at most 6 % more than predicted
    (quantized KV with sliding windows), at most 25 % or 4 MiB less.
    """
    gguf = read(tmp_path, SHAPES[name])
    for context_tokens, parallel, kv_type, batch_tokens in SETTINGS:
        need = predict_memory(
            gguf,
            context_tokens=context_tokens,
            parallel=parallel,
            kv_type=kv_type,
            batch_tokens=batch_tokens,
        )
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "llama.cpp"):
            reserve(gguf.path, context_tokens, parallel, kv_type, batch_tokens)
        logged = caplog.text
        assert pytest.approx(sizes(r"output buffer size = *([\d.]+) MiB", logged), abs=0.01) == (
            need.output_bytes / MIB
        )
        cache = sizes(r" size = *([\d.]+) MiB \(", logged)
        assert pytest.approx(cache, abs=0.02) == need.kv_bytes / MIB
        compute = sizes(r"compute buffer size = *([\d.]+) MiB", logged)
        assert compute / 1.06 <= need.compute_bytes / MIB <= max(compute * 1.25, compute + 4)


def sizes(pattern: str, logged: str) -> float:
    return sum(float(size) for size in re.findall(pattern, logged))


def reserve(
    path: Path, context_tokens: int, parallel: int, kv_type: str, batch_tokens: int
) -> None:
    """Make a context as the engine does, with llama.cpp only counting what it would allocate."""
    from replica.ggml import open_library  # noqa: PLC0415  # only these tests need it

    llama = open_library()
    model_params = llama.llama_model_default_params()
    model_params.no_alloc = True
    model_params.load_mode = 0
    model = llama.llama_model_load_from_file(str(path).encode(), model_params)
    assert model
    params = llama.llama_context_default_params()
    params.n_ctx = context_tokens * parallel
    params.n_seq_max = params.n_outputs_max = parallel
    params.n_ubatch = params.n_batch = batch_tokens
    params.type_k = params.type_v = {"f16": 1, "q8_0": 8}[kv_type]
    params.flash_attn_type = 1
    params.kv_unified = False
    params.n_threads = params.n_threads_batch = 1
    context = llama.llama_init_from_model(model, params)
    assert context
    llama.llama_free(context)
    llama.llama_model_free(model)


MEASURE = """
import json, sys
from pathlib import Path
from replica.llama import Llama, LlamaOptions
llama = Llama(LlamaOptions(Path(sys.argv[1]), context_tokens=4096, parallel=4, threads=1))
fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({name: int(fields[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM")}))
"""


@pytest.mark.model
@pytest.mark.parametrize("quantization", ["Q4_0", "Q8_0"])
def test_a_loaded_model_takes_what_was_predicted(tmp_path: Path, quantization: str) -> None:
    """
    Of a whole process: never more, and at most a third less. What is missing from it is its
    server, its compute buffer (touched by the first long prompt), and the second embedding on
    processors that do not repack Q8_0.
    """
    gguf = read(tmp_path, replace(QWEN_HALF_B, quantization=quantization))
    need = predict_memory(gguf, context_tokens=4096, parallel=4)
    command = [sys.executable, "-c", MEASURE, str(gguf.path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    taken = json.loads(done.stdout.splitlines()[-1])["VmHWM"]
    assert taken <= need.total_bytes <= taken * 4 / 3
