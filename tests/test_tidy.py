"""The rules of this code base that no linter knows."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path for package in ("gateway", "replica") for path in (ROOT / package).rglob("*.py")
)
FUNCTION_LINES_MAX = 50
FILE_LINES_MAX = 400
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
READS_ENVIRONMENT = {"environ", "environb", "getenv", "getenvb"}
LLAMA = ROOT / "replica/ggml.py"
"""Opens llama.cpp's library; everybody else gets it from there."""

each_source = pytest.mark.parametrize(
    "path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES]
)


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def names_used(path: Path) -> Iterator[str]:
    """Every attribute and every imported name."""
    for node in ast.walk(tree(path)):
        match node:
            case ast.Attribute(attr=name):
                yield name
            case ast.ImportFrom(names=aliases):
                yield from (alias.name for alias in aliases)


def modules_imported(path: Path) -> Iterator[str]:
    """Every module imported, also one asked for by a name in a string."""
    for node in ast.walk(tree(path)):
        match node:
            case ast.Import(names=aliases):
                yield from (alias.name for alias in aliases)
            case ast.ImportFrom(module=str(module)):
                yield module
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield module


def test_there_are_files_in_every_package() -> None:
    """A glob that finds nothing would make every other test here pass."""
    folders = {path.parent.relative_to(ROOT).as_posix() for path in SOURCES}

    assert {"gateway", "gateway/openai", "replica"} <= folders


@each_source
def test_a_file_says_what_it_is_for(path: Path) -> None:
    docstring = ast.get_docstring(tree(path))

    assert docstring
    assert docstring.partition("\n")[0].rstrip().endswith((".", ":", "?"))


@each_source
def test_a_file_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= FILE_LINES_MAX


@each_source
def test_functions_are_short(path: Path) -> None:
    functions = [
        node
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}

    assert {} == {name: lines for name, lines in lengths.items() if lines > FUNCTION_LINES_MAX}


@each_source
def test_a_name_tells_the_job(path: Path) -> None:
    assert path.stem not in VAGUE_NAMES
    assert path.parent.name not in VAGUE_NAMES


@each_source
def test_only_config_reads_the_environment(path: Path) -> None:
    if path.stem != "config":
        assert READS_ENVIRONMENT.isdisjoint(names_used(path))


@each_source
def test_only_one_file_opens_llama_cpp(path: Path) -> None:
    """It loads a library with global state. import-linter sees no names in strings."""
    if path != LLAMA:
        assert not [m for m in modules_imported(path) if m.partition(".")[0] == "llama_cpp"]


@each_source
def test_nothing_runs_without_its_asserts(path: Path) -> None:
    """`-O` would take our invariants away."""
    text = path.read_text()

    assert "PYTHONOPTIMIZE" not in text
    assert '"-O"' not in text


def test_every_module_is_on_a_layer() -> None:
    """A file on no layer may import anything; a layer without a file holds nothing up."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = [
        contract
        for contract in settings["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers"
    ]
    containers = {contract["containers"][0] for contract in contracts}
    layered = {
        f"{contract['containers'][0]}.{name.strip()}"
        for contract in contracts
        for layer in contract["layers"]
        for name in layer.split("|")
    }
    modules = {module_name(path) for path in SOURCES if not _is_inside_a_leaf(path, containers)}

    assert {"gateway", "gateway.openai", "replica"} == containers
    assert modules - {"gateway", "replica"} == layered
    assert all(contract["exhaustive"] for contract in contracts)


def _is_inside_a_leaf(path: Path, containers: set[str]) -> bool:
    """Whether the file's package is on a layer as a whole."""
    package = module_name(path).rpartition(".")[0]
    return bool(package) and package not in containers
