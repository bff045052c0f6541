"""The `numaserve` command: every subcommand, and the one place where errors become exit codes."""

import errno
import json
import logging
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
import httpx
import uvloop
from rich.console import Console

import replica.__main__
from gateway import app, startup
from gateway.config import (
    EdgeSettings,
    GatewaySettings,
    PlacementSettings,
    StatusSettings,
    UpSettings,
    read_keys,
)
from gateway.model_source import ModelSourceError
from gateway.openai.template import TemplateInvalidError
from gateway.serve import EXIT_CONFIGURATION, EXIT_FAILED, EXIT_OK
from gateway.status import render
from gateway.topology_table import topology_command
from replica.binding import BindingError
from replica.config import ConfigError, Settings, load, options, unknown_variables
from replica.gguf_file import ModelFileError
from replica.logs import configure
from replica.memory import DoesNotFitError
from replica.placement import PlacementError
from replica.topology import TopologyError
from replica.vocab import VocabError

Model = TypeVar("Model", bound=Settings)
Result = TypeVar("Result")

OPERATOR_ERRORS = (
    BindingError,
    ConfigError,
    DoesNotFitError,
    ModelFileError,
    ModelSourceError,
    PlacementError,
    TemplateInvalidError,
    TopologyError,
    VocabError,
)
"""What the operator can mend: one line on stderr, and exit code 2."""

STATUS_TIMEOUT_S = 5.0

config_file = click.option(
    "--config",
    type=click.Path(path_type=Path),
    default=None,
    metavar="FILE.toml",
    envvar="NUMASERVE_CONFIG",
    help="Settings from a file; the environment and the command line override it.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


@click.group(context_settings={"max_content_width": 100})
@click.version_option(package_name="numaserve")
def main() -> None:
    """Serve a language model from every NUMA node of this machine as one OpenAI endpoint.

    Every option can also be set as NUMASERVE_NAME in the environment. Exit codes: 0 ended well,
    1 failed, 2 a setting or the model is wrong, 3 stopped before every request had finished.
    """


@main.command()
@config_file
@options(UpSettings)
def up(config: Path | None, **given: object) -> None:
    """Start the gateway and a pinned replica per NUMA node, and keep them running."""
    settings = _settings(UpSettings, given, config)
    configure(settings.log_format, process="gateway")
    with _listen(settings) as listener:
        found = _or_exit(lambda: app.machine(settings))
        startup.announce(settings, found, listener)
        sys.exit(_or_exit(lambda: uvloop.run(app.run_up(settings, found, listener))))


@main.command()
@config_file
@options(GatewaySettings)
def gateway(config: Path | None, **given: object) -> None:
    """Start the gateway alone, in front of replicas that run elsewhere."""
    settings = _settings(GatewaySettings, given, config)
    configure(settings.log_format, process="gateway")
    with _listen(settings) as listener:
        sys.exit(_or_exit(lambda: uvloop.run(app.run_gateway(settings, listener))))


@main.command()
@config_file
@options(PlacementSettings)
@click.option(
    "--sysfs-root",
    type=click.Path(path_type=Path),
    default=None,
    metavar="DIR",
    help="Read another machine's files: a directory with its sys/ and proc/.",
)
@as_json
def topology(
    config: Path | None, sysfs_root: Path | None, *, as_json: bool, **given: object
) -> None:
    """Show this machine's nodes, cores and memory, and where replicas would go."""
    settings = _settings(PlacementSettings, given, config)
    sys.exit(
        topology_command(
            sysfs_root,
            nodes=settings.nodes,
            domain=settings.domain,
            virtual_nodes=settings.virtual_nodes,
            threads=settings.threads,
            as_json=as_json,
        )
    )


@main.command()
@options(StatusSettings)
@as_json
def status(*, as_json: bool, **given: object) -> None:
    """Show what a running server is doing: mode, replicas, load and memory."""
    settings = _settings(StatusSettings, given, None)
    keys = _or_exit(lambda: read_keys(settings.api_key_file))
    headers = {"authorization": f"Bearer {min(keys)}"} if keys else {}
    url = settings.url.rstrip("/") + "/admin/status"
    try:
        response = httpx.get(url, headers=headers, timeout=STATUS_TIMEOUT_S)
        response.raise_for_status()
        document = response.json()
        shown = json.dumps(document, indent=2) if as_json else render(document)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        sys.stderr.write(f"numaserve status: {url}: {error}\n")
        sys.exit(EXIT_FAILED)
    except (ValueError, LookupError, TypeError):
        sys.stderr.write(f"numaserve status: {url}: what answers there is not numaserve\n")
        sys.exit(EXIT_FAILED)
    if isinstance(shown, str):
        sys.stdout.write(shown + "\n")
    else:
        Console().print(shown)
    sys.exit(EXIT_OK)


main.add_command(replica.__main__.main, "replica")


def _settings(model: type[Model], given: dict[str, Any], config: Path | None) -> Model:
    """Read the settings, or end with one line about the first that is wrong."""
    known = {"config", *UpSettings.model_fields, *GatewaySettings.model_fields}
    for variable in unknown_variables(known | {*StatusSettings.model_fields}):
        _refuse(f"{variable}: there is no such setting; see numaserve {_command()} --help")
    return _or_exit(lambda: load(model, given, file=config))


def _listen(settings: EdgeSettings) -> socket.socket:
    """Take the port before anything else is started."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        remedy = (
            "stop what uses it or choose another with --port"
            if error.errno in {errno.EADDRINUSE, errno.EACCES}
            else "--host must be an address of this machine"
        )
        _refuse(f"--host {settings.host} --port {settings.port}: {error.strerror}; {remedy}")
    except UnicodeError:
        listener.close()
        _refuse(f"--host {settings.host!r} is no name of a host")
    return listener


def _or_exit(work: Callable[[], Result]) -> Result:
    try:
        return work()
    except OPERATOR_ERRORS as error:
        _refuse(str(error))


def _refuse(message: str) -> NoReturn:
    logging.shutdown()
    sys.stderr.write(f"numaserve {_command()}: {message}\n")
    sys.exit(EXIT_CONFIGURATION)


def _command() -> str:
    context = click.get_current_context(silent=True)
    return context.info_name or "" if context else ""


if __name__ == "__main__":
    main()
