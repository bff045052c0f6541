"""Settings: where they come from, who wins, and what is said of a wrong one."""

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from replica.config import (
    ConfigError,
    ReplicaSettings,
    arguments,
    child_environment,
    load,
    options,
    read_secret,
    unknown_variables,
)

NEEDED: dict[str, object] = {"model": "m.gguf", "listen": "unix:/run/r.sock"}


def loaded(
    given: dict[str, object] | None = None,
    file: Path | None = None,
    environment: dict[str, str] | None = None,
) -> ReplicaSettings:
    return load(ReplicaSettings, NEEDED | (given or {}), file=file, environment=environment or {})


def complaint(
    given: dict[str, object] | None = None,
    file: Path | None = None,
    environment: dict[str, str] | None = None,
) -> str:
    with pytest.raises(ConfigError) as raised:
        loaded(given, file, environment)
    message = str(raised.value)
    assert "\n" not in message
    return message


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "settings.toml"


# Who wins


def test_each_source_overrides_the_ones_before(toml: Path) -> None:
    toml.write_text('ctx = 1000\nparallel = 3\nreplica-id = "file"\ndegraded = "file"\n')
    environment = {"NUMASERVE_PARALLEL": "5", "NUMASERVE_REPLICA_ID": "environment"}
    settings = loaded({"replica_id": "command line"}, toml, environment)
    found = settings.kv_type, settings.ctx, settings.parallel, settings.replica_id
    assert ("f16", 1000, 5, "command line") == found
    assert "file" == settings.degraded


def test_an_option_that_was_not_used_overrides_nothing(toml: Path) -> None:
    toml.write_text("ctx = 1000\n")
    assert 1000 == loaded({"ctx": None}, toml).ctx
    assert 2000 == loaded({"ctx": None}, toml, {"NUMASERVE_CTX": "2000"}).ctx


def test_keys_of_a_file_may_have_dashes_or_underscores(toml: Path) -> None:
    toml.write_text('kv-type = "q8_0"\nmin_local_ratio = 0.5\nnodes = [1, 2]\n')
    settings = loaded(file=toml)
    assert ("q8_0", 0.5, (1, 2)) == (settings.kv_type, settings.min_local_ratio, settings.nodes)


def test_the_process_environment_is_read_if_no_other_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NUMASERVE_CTX", "77")
    assert 77 == load(ReplicaSettings, NEEDED).ctx


@pytest.mark.parametrize(("text", "numbers"), [("3", (3,)), ("0,2,4", (0, 2, 4)), ("1,2,", (1, 2))])
def test_lists_are_written_with_commas(text: str, numbers: tuple[int, ...]) -> None:
    assert numbers == loaded({"cpus": text}).cpus
    assert numbers == loaded(environment={"NUMASERVE_CPUS": text}).cpus


def test_settings_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        loaded().ctx = 5  # type: ignore[misc]


# What is wrong


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ctx", "many", "valid integer"),
        ("ctx", "31", "greater than or equal to 32"),
        ("ctx", str((1 << 20) + 1), "less than or equal to 1048576"),
        ("parallel", "0", "greater than or equal to 1"),
        ("parallel", "257", "less than or equal to 256"),
        ("kv_type", "q4_0", "'f16' or 'q8_0'"),
        ("min_local_ratio", "1.5", "less than or equal to 1"),
        ("min_local_ratio", "nan", "less than or equal to 1"),
        ("cpus", "0,-1", "numbered from 0"),
        ("nodes", "-1", "numbered from 0"),
        ("listen", "/run/r.sock", "neither unix:PATH nor tcp:HOST:PORT"),
        ("listen", "unix:", "neither unix:PATH nor tcp:HOST:PORT"),
        ("listen", "tcp:9000", "neither unix:PATH nor tcp:HOST:PORT"),
        ("listen", "tcp::9000", "neither unix:PATH nor tcp:HOST:PORT"),
        ("listen", "tcp:host:port", "neither unix:PATH nor tcp:HOST:PORT"),
        ("listen", "tcp:host:65536", "neither unix:PATH nor tcp:HOST:PORT"),
        ("log_format", "xml", "'text' or 'json'"),
        ("parent_pid", "me", "valid integer"),
        ("replica_id", "", "at least 1 character"),
    ],
)
def test_one_line_names_the_setting_its_origin_and_its_value(
    toml: Path, name: str, value: str, words: str
) -> None:
    option = "--" + name.replace("_", "-")
    said = complaint({name: value})
    assert said.startswith(f"{option}: {value!r}: ")
    assert words in said
    assert "alue error" not in said, "pydantic's own word"
    others = {key: wanted for key, wanted in NEEDED.items() if key != name}
    variable = f"NUMASERVE_{name.upper()}"
    with pytest.raises(ConfigError, match=rf"^{variable}: '"):
        load(ReplicaSettings, others, environment={variable: value})
    toml.write_text(f'{name} = "{value}"\n')
    with pytest.raises(ConfigError) as raised:
        load(ReplicaSettings, others, file=toml, environment={})
    assert str(raised.value).startswith(f"{name} in {toml}: {value!r}: ")


def test_a_list_with_a_word_in_it_is_wrong() -> None:
    assert complaint({"cpus": "0,x"}).startswith("--cpus: 'x': ")
    assert complaint({"nodes": ""}).startswith("--nodes: ")


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^--model is required$"):
        load(ReplicaSettings, {"listen": "unix:x"}, environment={})


def test_a_key_of_a_file_that_is_no_setting_is_refused(toml: Path) -> None:
    toml.write_text("ctxx = 1000\n")
    assert f"ctxx in {toml}: there is no such setting" == complaint(file=toml)


def test_a_file_that_cannot_be_read_is_refused(toml: Path) -> None:
    assert f"--config {toml}: No such file or directory" == complaint(file=toml)
    toml.write_text("ctx = = 3\n")
    assert complaint(file=toml).startswith(f"--config {toml}: not a TOML file: ")
    toml.write_bytes(b"ctx = \xff\n")
    assert complaint(file=toml).startswith(f"--config {toml}: not a TOML file: ")


def test_variables_that_no_setting_stands_for_are_found() -> None:
    environment = {"NUMASERVE_CTXX": "1", "NUMASERVE_CTX": "1", "NUMASERVE": "1", "PATH": "x"}
    known = set(ReplicaSettings.model_fields)
    assert ["NUMASERVE_CTXX"] == unknown_variables(known, environment)


# From one process to another

texts = st.text(st.characters(categories=("L", "N", "P", "Zs")), min_size=1)
numbers = st.lists(st.integers(0, 999), min_size=1, max_size=5).map(tuple)


@given(
    st.fixed_dictionaries(
        {
            "model": texts.map(lambda text: Path("/", text)),
            "listen": texts.map("unix:{}".format),
            "nodes": numbers,
        },
        optional={
            "ctx": st.integers(32, 1 << 20),
            "parallel": st.integers(1, 256),
            "kv_type": st.sampled_from(["f16", "q8_0"]),
            "min_local_ratio": st.floats(0, 1),
            "replica_id": texts,
            "fingerprint": texts,
            "cpus": numbers,
            "housekeeping_cpus": numbers,
            "degraded": texts,
            "secret_file": texts.map(Path),
            "parent_pid": st.integers(1, 1 << 22),
        },
    )
)
def test_arguments_give_another_process_the_same_settings(wanted: dict[str, Any]) -> None:
    """The supervisor decides everything for a replica and writes it on its command line."""
    settings = ReplicaSettings.model_validate(wanted)
    assert settings == parsed(arguments(settings.model_dump()))


def parsed(words: list[str]) -> ReplicaSettings:
    seen: list[ReplicaSettings] = []

    @click.command()
    @options(ReplicaSettings)
    def command(**given: object) -> None:
        seen.append(load(ReplicaSettings, given, environment={}))

    result = CliRunner().invoke(command, words)
    assert 0 == result.exit_code, result.output
    return seen[0]


def test_empty_settings_are_left_out_of_the_command_line() -> None:
    assert ["--ctx=64"] == arguments({"ctx": 64, "cpus": (), "degraded": "", "parent_pid": None})
    assert ["--ctx=0"] == arguments({"ctx": 0})


def test_every_setting_has_an_option_with_its_help() -> None:
    @click.command()
    @options(ReplicaSettings)
    def command(**_given: object) -> None:
        """Hold a model."""

    shown = CliRunner().invoke(command, ["--help"], terminal_width=200).output
    for name, field in ReplicaSettings.model_fields.items():
        assert f"--{name.replace('_', '-')} " in shown
        assert field.description is not None
        assert field.description in shown
    assert "--cpus N,N" in shown
    assert "--kv-type f16|q8_0" in shown
    assert "[default: 4096]" in shown
    assert "--model FILE" in shown
    assert "--min-local-ratio X" in shown


def test_our_settings_do_not_leak_into_processes_we_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMASERVE_CTX", "1")
    monkeypatch.setenv("ELSEWHERE", "2")
    environment = child_environment(OMP_WAIT_POLICY="active")
    assert "NUMASERVE_CTX" not in environment
    assert ("2", "active") == (environment["ELSEWHERE"], environment["OMP_WAIT_POLICY"])


# The secret


def test_a_secret_is_read_without_the_blanks_around_it(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("  s3cret word\n\n")
    assert "s3cret word" == read_secret(file)


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff\xfe"])
def test_a_secret_that_is_none_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        read_secret(file)
    assert str(raised.value).startswith(f"--secret-file {file}: ")
    assert "\n" not in str(raised.value)
