"""llama.cpp's own server, built from the very llama.cpp that our binding carries."""

import importlib.metadata
import os
import subprocess
import sys
import tarfile
from pathlib import Path

BINDING = "llama-cpp-python"
CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_UI=OFF",
)


class BuildError(Exception):
    """llama-server could not be built; the message names the log."""


def llama_server(cache: Path) -> Path:
    """Return the program, built now if it is not there yet: that takes minutes, once."""
    version = importlib.metadata.version(BINDING)
    folder = cache / f"llama-server-{version}"
    program = folder / "build/bin/llama-server"
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        source = _source(folder, version)
        log = folder / "build.log"
        build = str(folder / "build")
        _run(log, "cmake", "-S", str(source), "-B", build, *CMAKE_OPTIONS)
        jobs = str(len(os.sched_getaffinity(0)))
        _run(log, "cmake", "--build", build, "--target", "llama-server", "--parallel", jobs)
    assert program.exists()
    return program


def _source(folder: Path, version: str) -> Path:
    """Return llama.cpp's folder in the binding's source archive."""
    found = sorted(folder.glob("*.tar.gz"))
    if not found:
        _run(
            folder / "build.log",
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"),
            *("--dest", str(folder), f"{BINDING}=={version}"),
        )
        found = sorted(folder.glob("*.tar.gz"))
    with tarfile.open(found[0]) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.glob("*/vendor/llama.cpp")
    return source


def _run(log: Path, *command: str) -> None:
    with log.open("a") as output:
        done = subprocess.run(command, stdout=output, stderr=output, check=False)
    if done.returncode:
        raise BuildError(f"{command[0]} ended with {done.returncode}: see {log}")
