"""Settings of a replica, and how any command of this project gets its settings.

The only file of this package that reads the environment. A setting has one declaration, a field of
a pydantic model; its command line option, its `NUMASERVE_*` variable, its key in the TOML file and
its help all follow from it. Whatever is wrong is said in one line that names the setting, where it
came from, its value and the remedy, before anything starts.
"""

import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import click
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

ENVIRONMENT_PREFIX = "NUMASERVE_"
PORT_MAX = 65535

Model = TypeVar("Model", bound=BaseModel)


class ConfigError(Exception):
    """A setting is missing, unknown or wrong; the message is one line for the operator."""


def _comma_separated(value: object) -> object:
    return [part for part in value.split(",") if part] if isinstance(value, str) else value


def _address(value: str) -> str:
    kind, _, rest = value.partition(":")
    host, _, port = rest.rpartition(":")
    tcp = kind == "tcp" and host and port.isdecimal() and int(port) <= PORT_MAX
    if not tcp and not (kind == "unix" and rest):
        raise ValueError("this is neither unix:PATH nor tcp:HOST:PORT")
    return value


def _not_negative(value: tuple[int, ...]) -> tuple[int, ...]:
    if min(value, default=0) < 0:
        raise ValueError("nodes and CPUs are numbered from 0")
    return value


Integers = Annotated[
    tuple[int, ...], BeforeValidator(_comma_separated), AfterValidator(_not_negative)
]
"""A list of numbers, written `0,2,4` on the command line and in the environment."""
Texts = Annotated[tuple[str, ...], BeforeValidator(_comma_separated)]


class Settings(BaseModel):
    """Base of every settings model: complete, immutable, and without room for typing errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ModelSettings(Settings):
    """How the model is held in memory: the same for every replica of a machine."""

    ctx: int = Field(
        default=4096, ge=32, le=1 << 20, description="Tokens per sequence, prompt and answer."
    )
    parallel: int = Field(
        default=8, ge=1, le=256, description="Sequences a replica computes at once."
    )
    kv_type: Literal["f16", "q8_0"] = Field(
        default="f16", description="Type of a KV cache cell; q8_0 halves its memory."
    )
    max_itl_ms: float | None = Field(
        default=None,
        gt=0,
        description="Longest gap between two tokens of a stream while prompts are read. "
        "[default: 3.3 decode steps]",
    )
    speculation: Literal["auto", "off"] = Field(
        default="auto", description="auto: guess tokens from the text so far where that pays."
    )
    min_local_ratio: float = Field(
        default=0.99,
        ge=0.0,
        le=1.0,
        description="A replica with a smaller share of its memory on its own node does not serve.",
    )


class ReplicaSettings(ModelSettings):
    """What one replica process is told by whoever starts it."""

    model: Path = Field(description="The GGUF file (the first one of a split model).")
    listen: Annotated[str, AfterValidator(_address)] = Field(
        description="unix:PATH or tcp:HOST:PORT, where the gateway connects."
    )
    replica_id: str = Field(default="replica-0", min_length=1, description="Name of this replica.")
    fingerprint: str = Field(default="", description="Identity of the model; read if not given.")
    nodes: Integers = Field(
        default=(0,), min_length=1, description="NUMA nodes that hold its memory."
    )
    cpus: Integers = Field(default=(), description="CPUs that compute; default: all allowed.")
    threads: int | None = Field(
        default=None, ge=1, description="Computing threads. [default: what measures fastest]"
    )
    housekeeping_cpus: Integers = Field(
        default=(), description="CPUs for its event loop; default: those that compute."
    )
    log_format: Literal["text", "json"] = Field(default="text", description="How log lines look.")
    degraded: str = Field(default="", description="Why the placement is weaker than planned.")
    secret_file: Path | None = Field(
        default=None, description="File with the secret a gateway must show; needed with tcp:."
    )
    kv_store_fd: int | None = Field(
        default=None, description="Inherited descriptor of the store for KV snapshots."
    )
    parent_pid: int | None = Field(
        default=None, description="Die with this process: the supervisor that started the replica."
    )


def options(settings: type[BaseModel]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a click command one option per field of `settings`."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for name, field in reversed(settings.model_fields.items()):
            flag = "--" + name.replace("_", "-")
            default = "" if field.is_required() else _shown_default(field.default)
            text = f"{field.description}{default}"
            command = click.option(flag, name, default=None, metavar=_metavar(field), help=text)(
                command
            )
        return command

    return decorate


def arguments(values: Mapping[str, object]) -> list[str]:
    """Return the command line that gives a command these settings; empty ones are left out."""
    words = []
    for name, value in values.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        if value is not None and text:
            words.append(f"--{name.replace('_', '-')}={text}")
    return words


def load(
    settings: type[Model],
    given: Mapping[str, object],
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Model:
    """Merge defaults, TOML file, environment and command line, the later winning; validate.

    `given` holds command line options by field name, None where the option was not used. Raises
    `ConfigError`.
    """
    environment = os.environ if environment is None else environment
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for name, value in (_read_toml(file) if file else {}).items():
        values[name.replace("-", "_")] = value
        origins[name.replace("-", "_")] = f"{name} in {file}"
    for name in settings.model_fields:
        variable = ENVIRONMENT_PREFIX + name.upper()
        if variable in environment:
            values[name], origins[name] = environment[variable], variable
        if given.get(name) is not None:
            values[name], origins[name] = given[name], "--" + name.replace("_", "-")
    try:
        return settings.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_first_complaint(error, origins)) from None


def unknown_variables(known: set[str], environment: Mapping[str, str] | None = None) -> list[str]:
    """Return `NUMASERVE_*` variables that no setting in `known` (field names) stands for."""
    environment = os.environ if environment is None else environment
    return sorted(
        variable
        for variable in environment
        if variable.startswith(ENVIRONMENT_PREFIX)
        and variable.removeprefix(ENVIRONMENT_PREFIX).lower() not in known
    )


def read_secret(file: Path) -> str:
    """Return the shared secret in a file, without the blanks around it."""
    try:
        secret = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--secret-file {file}: {error}") from None
    if not secret:
        raise ConfigError(f"--secret-file {file}: the file is empty")
    return secret


def child_environment(**changes: str) -> dict[str, str]:
    """Return the environment for a process we start: ours, without our settings in it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ENVIRONMENT_PREFIX)}
    return kept | changes


def _read_toml(file: Path) -> dict[str, object]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file}: not a TOML file: {error}") from None


def _first_complaint(error: ValidationError, origins: Mapping[str, str]) -> str:
    """Say one problem well; the others show when this one is mended."""
    problem = error.errors(include_url=False)[0]
    name = str(problem["loc"][0]) if problem["loc"] else ""
    origin = origins.get(name, "--" + name.replace("_", "-"))
    if problem["type"] == "extra_forbidden":
        return f"{origin}: there is no such setting"
    if problem["type"] == "missing":
        return f"{origin} is required"
    message = problem["msg"].removeprefix("Value error, ")
    if not name:
        return message
    return f"{origin}: {problem['input']!r}: {message[0].lower()}{message[1:]}"


def _metavar(field: Any) -> str:  # noqa: ANN401  # pydantic's FieldInfo holds any annotation
    annotation = str(field.annotation)
    if "Literal" in annotation:
        return "|".join(choice.strip("' ") for choice in annotation[15:-1].split(","))
    for sign, metavar in (("Path", "FILE"), ("tuple[int", "N,N"), ("tuple", "TEXT,TEXT")):
        if sign in annotation:
            return metavar
    for sign, metavar in (("bool", "true|false"), ("int", "N"), ("float", "X")):
        if sign in annotation:
            return metavar
    return "TEXT"


def _shown_default(default: object) -> str:
    if default in (None, (), ""):
        return ""
    if isinstance(default, tuple):
        return f" [default: {','.join(map(str, default))}]"
    return f" [default: {default}]"
