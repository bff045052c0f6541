"""The tables copied from llama.cpp, beside the library that is installed."""

import ctypes
import importlib.metadata
import re
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from replica.gguf_file import read_gguf
from replica.llama_cpp_tables import (
    HYBRID,
    LLAMA_CPP_PYTHON_VERSION,
    OTHER_ARCHITECTURES,
    RECURRENT,
    SLIDING_WINDOW,
    TENSOR_TYPES,
    TEXT_ARCHITECTURES,
)
from tests.gguf_samples import (
    Shape,
    tiny_llama,
    tiny_moe,
    tiny_recurrent,
    tiny_sliding_window,
    write_model,
)


def test_the_tables_are_of_the_installed_llama_cpp() -> None:
    """After an upgrade: go through the sources that the tables name, then change the version."""
    installed = importlib.metadata.version("llama-cpp-python")
    assert installed == LLAMA_CPP_PYTHON_VERSION


def test_the_tables_agree_with_each_other() -> None:
    assert not TEXT_ARCHITECTURES & OTHER_ARCHITECTURES.keys()
    assert TEXT_ARCHITECTURES >= RECURRENT | HYBRID | SLIDING_WINDOW
    assert not RECURRENT & HYBRID


def test_every_architecture_of_the_gguf_package_is_known() -> None:
    """But the ones it can write and llama.cpp cannot run."""
    theirs = set(gguf.MODEL_ARCH_NAMES.values())
    unknown = theirs - TEXT_ARCHITECTURES - OTHER_ARCHITECTURES.keys()
    assert unknown <= {"gptj", "mmproj"}


def library(name: str) -> Path:
    package = importlib.metadata.distribution("llama-cpp-python").locate_file("llama_cpp")
    return Path(str(package)) / "lib" / name


@pytest.mark.model
def test_tensor_types_are_those_of_the_library() -> None:
    ggml = ctypes.CDLL(str(library("libggml-base.so.0")))
    ggml.ggml_type_name.restype = ctypes.c_char_p
    ggml.ggml_type_size.restype = ctypes.c_size_t
    ggml.ggml_blck_size.restype = ctypes.c_int64
    theirs = {
        number: (
            ggml.ggml_type_name(number).decode(),
            ggml.ggml_blck_size(number),
            ggml.ggml_type_size(number),
        )
        for number in range(max(TENSOR_TYPES) + 1)
        if ggml.ggml_blck_size(number)
    }
    assert theirs == TENSOR_TYPES


@pytest.mark.model
def test_the_library_has_the_architectures_that_are_let_through(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """But not gptj, of which it knows the name only; the real loader is asked."""
    from replica.ggml import open_library  # noqa: PLC0415  # only these tests need it

    llama = open_library()
    params = llama.llama_model_default_params()
    params.vocab_only = True
    path = tmp_path / "model.gguf"
    for name in [*TEXT_ARCHITECTURES, "gptj"]:
        write_model(path, Shape(name, layers=1))
        if model := llama.llama_model_load_from_file(str(path).encode(), params):
            llama.llama_model_free(model)
    assert ["gptj"] == re.findall(
        r"(?:unknown|unsupported) model architecture: '(.*)'", caplog.text
    )


@pytest.mark.model
@pytest.mark.parametrize(
    "write", [tiny_llama, tiny_moe, tiny_sliding_window, tiny_recurrent], ids=lambda f: f.__name__
)
def test_what_is_accepted_loads_in_llama_cpp(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    from replica.ggml import open_library  # noqa: PLC0415  # only this test needs it

    llama = open_library()
    model = read_gguf(write(tmp_path / "model.gguf"))
    loaded = llama.llama_model_load_from_file(
        str(model.path).encode(), llama.llama_model_default_params()
    )
    assert loaded
    try:
        vocabulary = llama.llama_model_get_vocab(loaded)
        assert llama.llama_vocab_n_tokens(vocabulary) == model.n_vocab
        assert llama.llama_model_n_layer(loaded) == model.n_layers
        assert llama.llama_model_size(loaded) == model.weights_bytes
        assert llama.llama_model_is_recurrent(loaded) == (model.kind == "recurrent")
        assert (llama.llama_model_n_swa(loaded) > 0) == (model.kind == "sliding-window")
    finally:
        llama.llama_model_free(loaded)
