"""Settings of the gateway's commands. How they are read is `replica.config`'s business."""

import os
import tempfile
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from replica.config import ConfigError, Integers, ModelSettings, Settings, Texts
from replica.wire import HEARTBEAT_S

MIB = 1024 * 1024
PORT_MAX = 65535
SECONDS_MAX = 7 * 24 * 3600
"""Of any timeout: event loops cannot count to infinity."""
SILENCE_MIN_S = 4 * HEARTBEAT_S
"""With less patience every replica would be lost, and killed, for a late heartbeat."""
SOCKET_PATH_BYTES_MAX = 107
"""What the kernel takes for the path of a Unix socket."""
RUNTIME_BASE_BYTES_MAX = 50
"""Leaves room below it for a directory with our pid in its name, and a socket per replica."""


class PlacementSettings(Settings):
    """Where replicas go. Also what `numaserve topology` takes."""

    nodes: Integers | None = Field(default=None, description="NUMA nodes to use. [default: all]")
    domain: Literal["node", "socket"] = Field(
        default="node", description="What a replica gets: a NUMA node, or all nodes of a socket."
    )
    virtual_nodes: int | None = Field(
        default=None, ge=1, description="Divide the cores into N pretend nodes, to try things out."
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        description="Computing threads per replica. [default: what measures fastest]",
    )


class EdgeSettings(Settings):
    """The public surface and its limits."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(default=8080, ge=0, le=PORT_MAX, description="Port; 0 takes a free one.")
    model: str = Field(
        default="demo", description="demo, a path to a GGUF file, or hf:OWNER/REPO/FILE."
    )
    api_key_file: Path | None = Field(
        default=None, description="File with one API key per line; without it no key is needed."
    )
    queue_max: int = Field(default=256, ge=1, description="Requests that may wait for a replica.")
    queue_timeout: float = Field(
        default=300.0, gt=0, le=SECONDS_MAX, description="Longest wait, in seconds."
    )
    request_timeout: float = Field(
        default=3600.0, gt=0, le=SECONDS_MAX, description="Longest life of a request, in seconds."
    )
    body_max: int = Field(default=8 * MIB, ge=1024, description="Largest request body, in bytes.")
    drain_timeout: float = Field(
        default=30.0,
        ge=0,
        le=SECONDS_MAX,
        description="Seconds running requests get after SIGTERM.",
    )
    silence_max: float = Field(
        default=2.0,
        ge=SILENCE_MIN_S,
        le=SECONDS_MAX,
        description="Seconds without a sign of life until a replica is lost.",
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="How log lines look; one line per request either way."
    )


class UpSettings(ModelSettings, PlacementSettings, EdgeSettings):
    """Everything `numaserve up` takes."""

    huge_pages: bool = Field(
        default=True, description="Ask the kernel for huge pages for weights and KV cells."
    )
    kv_store_mib: int = Field(
        default=1024, ge=0, description="Shared memory for KV snapshots, in MiB; 0 for none."
    )

    mode: Literal["auto", "single", "data-parallel", "span"] = Field(
        default="auto",
        description="single: one replica; data-parallel: one per node; span: one over all nodes.",
    )


class GatewaySettings(EdgeSettings):
    """Everything `numaserve gateway` takes."""

    replica: Texts = Field(
        description="Where replicas listen: unix:PATH or tcp:HOST:PORT, separated by commas."
    )
    secret_file: Path | None = Field(
        default=None, description="File with the secret that tcp: replicas ask for."
    )
    ctx: int = Field(default=4096, ge=32, description="Tokens per sequence, as the replicas have.")

    @field_validator("replica")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for address in value:
            kind, _, rest = address.partition(":")
            if kind == "unix" and 0 < len(os.fsencode(rest)) <= SOCKET_PATH_BYTES_MAX:
                continue
            if kind != "tcp" or not _is_host_and_port(rest):
                raise ValueError(f"{address!r} is neither unix:PATH nor tcp:HOST:PORT")
        if not value:
            raise ValueError("name at least one replica")
        return value


class StatusSettings(Settings):
    """Everything `numaserve status` takes."""

    url: str = Field(default="http://127.0.0.1:8080", description="The server to ask.")
    api_key_file: Path | None = Field(default=None, description="File whose first key is shown.")


def read_keys(file: Path | None) -> frozenset[str]:
    """Return the keys in a file, one per line; `#` begins a comment line."""
    if file is None:
        return frozenset()
    try:
        lines = [line.strip() for line in file.read_text().splitlines()]
    except OSError as error:
        raise ConfigError(f"--api-key-file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file {file}: not a text file") from None
    keys = frozenset(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"--api-key-file {file}: it holds no key; write one per line")
    if not all(key.isascii() and key.isprintable() for key in keys):
        raise ConfigError(f"--api-key-file {file}: a key has printable ASCII letters only")
    return keys


def runtime_base() -> Path:
    """Return where this user's short-lived sockets belong."""
    candidates = (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir())
    for candidate in candidates:
        # After `su` the variable often still names the directory of another user.
        usable = os.access(candidate, os.W_OK | os.X_OK) and Path(candidate).is_dir()
        if usable and len(os.fsencode(candidate)) <= RUNTIME_BASE_BYTES_MAX:
            return Path(candidate)
    raise ConfigError(
        f"no directory for sockets: {' and '.join(filter(None, candidates))} cannot be written, or "
        f"have more than {RUNTIME_BASE_BYTES_MAX} letters; set XDG_RUNTIME_DIR to one that will do"
    )


def _is_host_and_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host.replace(":", "/")
    named = bool(bare) and not set(bare) & set("/@?#[] ")
    return named and port.isascii() and port.isdecimal() and 0 < int(port) <= PORT_MAX
