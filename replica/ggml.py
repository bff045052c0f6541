"""Opens llama.cpp once per process: its log, its CPU kernels, its global state.

Whoever needs llama.cpp calls `open_library` before anything else of `llama_cpp`, and gets its
low-level module back; it may be called any number of times. This file knows no model.
"""

import ctypes
import importlib
import logging
import os
from functools import cache
from pathlib import Path
from typing import Any

_log = logging.getLogger("llama.cpp")

_LEVELS = {
    1: logging.DEBUG,
    2: logging.DEBUG,  # its info is pages per loaded model: detail to everyone but a debugger
    3: logging.WARNING,
    4: logging.ERROR,
}
"""ggml_log_level as ggml.h has it; the binding's own table is of an older llama.cpp."""
_CONTINUED = 5
"""Not a level: this text belongs to the line before it."""

_LINE_CHARS_MAX = 4096


class _LogLines:
    """Joins llama.cpp's fragments to lines, and hands them to Python's logging."""

    def __init__(self) -> None:
        self._level = logging.DEBUG
        self._pending = ""

    def __call__(self, level: int, text: bytes | None, _user_data: object) -> None:
        if level != _CONTINUED:
            self._level = _LEVELS.get(level, logging.DEBUG)
        self._pending += (text or b"").decode("utf-8", "replace")
        *lines, self._pending = self._pending.split("\n")
        if len(self._pending) > _LINE_CHARS_MAX:
            lines, self._pending = [*lines, self._pending], ""
        for line in lines:
            if line.strip(" ."):  # the dots are its progress bar
                _log.log(self._level, "%s", line)


@cache
def _log_callback(llama: Any) -> Any:  # noqa: ANN401 - the binding is untyped
    """What llama.cpp calls for every fragment. Cached, because C does not keep it alive."""
    return llama.llama_log_callback(_LogLines())


@cache
def open_library() -> Any:  # noqa: ANN401 - the binding is untyped
    """The low-level binding `llama_cpp.llama_cpp`, ready to load models."""
    # Read when the library is loaded. Its backtrace starts a debugger on the dying process, which
    # would then look alive to its supervisor.
    os.putenv("GGML_NO_BACKTRACE", "1")
    llama = importlib.import_module("llama_cpp.llama_cpp")
    llama.llama_log_set(_log_callback(llama), ctypes.c_void_p(None))
    libraries = Path(llama._lib._name).parent  # noqa: SLF001 - the binding tells it nowhere else
    package = Path(str(llama.__file__)).parent
    _load_backends(libraries, (libraries, package.parent / "bin"))
    llama.llama_backend_init()
    return llama


def _load_backends(libraries: Path, directories: tuple[Path, ...]) -> None:
    """Load the best of the CPU kernels that were built as libraries of their own, if any were.

    They register themselves with the `libggml` that `libllama` is linked to. That is the one named
    by its soname: the file without a number is a copy, with a second and useless registry.
    """
    soname = libraries / "libggml.so.0"
    if not soname.exists():
        return
    ggml = ctypes.CDLL(str(soname))
    if ggml.ggml_backend_reg_count() > 0:
        return
    for directory in directories:
        if any(directory.glob("libggml-cpu*.so")):
            ggml.ggml_backend_load_all_from_path(os.fsencode(directory))
            break
    if ggml.ggml_backend_reg_count() == 0:
        _log.warning("no CPU kernels for llama.cpp found beside %s; models cannot load", libraries)
