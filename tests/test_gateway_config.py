"""What an operator can set wrongly, and the one line that says so before anything starts."""

import json
import logging
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway.__main__ import main
from gateway.config import (
    EdgeSettings,
    GatewaySettings,
    PlacementSettings,
    UpSettings,
    read_keys,
    runtime_base,
)
from replica.config import ConfigError, arguments, load


def run(*words: str, environment: Mapping[str, str] | None = None) -> Result:
    """Run a command in this process; its own settings must not leak into ours."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    try:
        return CliRunner().invoke(main, words, env=environment, prog_name="numaserve")
    finally:
        root.handlers, root.level = handlers, level


def assert_refused(result: Result, *words: str) -> None:
    """Exit code 2 and one line on stderr, with these words in it."""
    assert 2 == result.exit_code, result.output
    assert "" == result.stdout
    (line,) = result.stderr.splitlines()
    for word in words:
        assert word in line


def load_gateway(**given: object) -> GatewaySettings:
    return load(GatewaySettings, given, environment={})


COMMANDS = ("up", "gateway", "replica", "status", "topology")


class TestHelp:
    def test_the_command_says_what_it_is_for(self) -> None:
        result = run("--help")

        assert 0 == result.exit_code
        assert "Serve a language model from every NUMA node" in result.output
        assert set(COMMANDS) <= set(result.output.split())

    @pytest.mark.parametrize("command", COMMANDS)
    def test_every_command_says_what_it_is_for(self, command: str) -> None:
        result = run(command, "--help")

        assert 0 == result.exit_code
        lines = result.output.splitlines()
        assert f"Usage: numaserve {command} [OPTIONS]" == lines[0]
        assert lines[2].strip().endswith((".", "and"))
        assert len(lines[2].split()) > 5

    @pytest.mark.parametrize("command", COMMANDS)
    def test_every_option_is_explained(self, command: str) -> None:
        for parameter in main.commands[command].params:
            assert getattr(parameter, "help", None), f"{command} {parameter.name}"

    def test_up_has_the_options_of_the_contract(self) -> None:
        words = set(run("up", "--help").output.split())

        assert words >= {
            "--model", "--host", "--port", "--nodes", "--domain", "--virtual-nodes", "--mode",
            "--ctx", "--parallel", "--threads", "--api-key-file", "--config",
        }  # fmt: skip

    def test_the_version_is_told(self) -> None:
        assert 0 == run("--version").exit_code


class TestUpRefuses:
    @pytest.mark.parametrize(
        ("words", "complaint"),
        [
            (["--port", "70000"], "--port: '70000': input should be less than or equal to 65535"),
            (["--port", "-1"], "--port: '-1'"),
            (["--port", "http"], "--port: 'http': input should be a valid integer"),
            (["--host", ""], "--host: ''"),
            (["--nodes", "0,x"], "--nodes: 'x'"),
            (["--nodes", "7"], "--nodes 7: there is no NUMA node 7"),
            (["--virtual-nodes", "0"], "--virtual-nodes: '0'"),
            (["--threads", "0"], "--threads: '0'"),
            (["--domain", "rack"], "--domain: 'rack': input should be 'node' or 'socket'"),
            (["--mode", "turbo"], "--mode: 'turbo'"),
            (["--ctx", "31"], "--ctx: '31'"),
            (["--parallel", "0"], "--parallel: '0'"),
            (["--kv-type", "q2"], "--kv-type: 'q2'"),
            (["--min-local-ratio", "1.1"], "--min-local-ratio: '1.1'"),
            (["--queue-max", "0"], "--queue-max: '0'"),
            (["--queue-timeout", "0"], "--queue-timeout: '0'"),
            (["--queue-timeout", "inf"], "--queue-timeout: 'inf'"),
            (["--queue-timeout", "nan"], "--queue-timeout: 'nan'"),
            (["--request-timeout", "1e300"], "--request-timeout: '1e300'"),
            (["--drain-timeout", "-1"], "--drain-timeout: '-1'"),
            (["--drain-timeout", "inf"], "--drain-timeout: 'inf'"),
            (["--silence-max", "0.19"], "--silence-max: '0.19'"),
            (["--silence-max", "inf"], "--silence-max: 'inf'"),
            (["--body-max", "10"], "--body-max: '10'"),
            (["--log-format", "xml"], "--log-format: 'xml'"),
            (["--api-key-file", "/absent"], "--api-key-file /absent: No such file or directory"),
            (["--config", "/absent"], "--config /absent: No such file or directory"),
            (["--model", "/absent.gguf"], "/absent.gguf"),
            (["--host", "192.0.2.1"], "--host must be an address of this machine"),
            (["--host", "a" * 70], "--host"),
        ],
    )
    def test_an_impossible_value_in_one_line(self, words: list[str], complaint: str) -> None:
        assert_refused(run("up", "--port=0", *words), "numaserve up: ", complaint)

    def test_a_port_in_use(self) -> None:
        """Before any replica is started and any model is read."""
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            result = run("up", "--port", str(port), "--model", "/absent.gguf")

        assert_refused(
            result, f"--port {port}: Address already in use", "choose another with --port"
        )

    def test_an_unknown_variable(self) -> None:
        """A slip of the pen must not silently mean the default."""
        result = run("up", environment={"NUMASERVE_PROT": "80"})

        assert_refused(result, "NUMASERVE_PROT: there is no such setting; see numaserve up --help")

    def test_a_wrong_variable_is_named_as_such(self) -> None:
        assert_refused(run("up", environment={"NUMASERVE_PORT": "http"}), "NUMASERVE_PORT: 'http'")

    def test_an_unknown_key_in_the_file(self, tmp_path: Path) -> None:
        file = tmp_path / "numaserve.toml"
        file.write_text("prot = 80\n")

        assert_refused(
            run("up", "--config", str(file)), f"prot in {file}: there is no such setting"
        )

    def test_a_wrong_value_in_the_file(self, tmp_path: Path) -> None:
        file = tmp_path / "numaserve.toml"
        file.write_text('virtual-nodes = "many"\n')

        assert_refused(run("up", "--config", str(file)), f"virtual-nodes in {file}: 'many'")

    @pytest.mark.parametrize("content", [b"port = ", b"\xff\xfe"])
    def test_a_file_that_is_no_toml(self, tmp_path: Path, content: bytes) -> None:
        file = tmp_path / "numaserve.toml"
        file.write_bytes(content)

        assert_refused(run("up", "--config", str(file)), f"--config {file}: not a TOML file")

    def test_a_wrong_key_file_before_the_model_is_looked_for(self, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        file.write_text("# none yet\n\n")

        result = run("up", "--port=0", "--api-key-file", str(file), "--model", "/absent.gguf")
        assert_refused(result, f"--api-key-file {file}: it holds no key")


class TestGatewayRefuses:
    @pytest.mark.parametrize(
        "address",
        [
            "replica:8000",
            "unix:",
            "unix:" + "x" * 108,
            "tcp:",
            "tcp:host",
            "tcp::8000",
            "tcp:host:",
            "tcp:host:http",
            "tcp:host:0",
            "tcp:host:65536",
            "tcp:host:-1",
            "tcp:host:²",
            "tcp:host:\uff18\uff10",
            "tcp:::1:8000",
            "tcp:[]:8000",
            "tcp:user@host:8000",
            "tcp:host/path:8000",
            "http://host:8000",
        ],
    )
    def test_an_address_nobody_can_have(self, address: str) -> None:
        """The link would fail with a traceback, or try for ever."""
        assert_refused(
            run("gateway", "--replica", address), "--replica", "neither unix:PATH nor tcp:HOST:PORT"
        )

    def test_no_address_at_all(self) -> None:
        assert_refused(run("gateway"), "--replica is required")
        assert_refused(run("gateway", "--replica", ","), "name at least one replica")

    def test_an_unreadable_secret(self) -> None:
        words = ["--replica", "tcp:h:1", "--port", "0", "--secret-file", "/absent"]
        words += ["--model", "/absent.gguf"]  # which may take minutes to fetch: it comes later

        assert_refused(run("gateway", *words), "--secret-file /absent")


def test_good_addresses_are_taken_as_they_are() -> None:
    addresses = ("unix:/run/a.sock", "tcp:host:1", "tcp:10.0.0.1:65535", "tcp:[::1]:8000")

    assert addresses == load_gateway(replica=",".join(addresses)).replica


def test_the_command_line_outranks_the_environment_and_that_the_file(tmp_path: Path) -> None:
    file = tmp_path / "numaserve.toml"
    file.write_text("port = 1\nctx = 100\nqueue-max = 7\nnodes = [0, 2]\n")
    environment = {"NUMASERVE_PORT": "2", "NUMASERVE_CTX": "200", "OTHER": "x"}
    settings = load(UpSettings, {"port": "3"}, file=file, environment=environment)

    assert (3, 200, 7) == (settings.port, settings.ctx, settings.queue_max)
    assert (0, 2) == settings.nodes


def test_the_defaults_are_those_of_the_contract() -> None:
    settings = load(UpSettings, {}, environment={})

    assert ("127.0.0.1", 8080, "demo") == (settings.host, settings.port, settings.model)
    assert ("auto", "node", None) == (settings.mode, settings.domain, settings.nodes)
    assert settings.api_key_file is None


@pytest.mark.parametrize("settings", [UpSettings, GatewaySettings, PlacementSettings])
def test_what_is_told_on_a_command_line_is_heard_as_it_was(
    settings: type[EdgeSettings | PlacementSettings],
) -> None:
    """`arguments` is how a process started by us gets its settings."""
    values: dict[str, object] = {}
    if "replica" in settings.model_fields:
        values["replica"] = ("unix:/a b", "tcp:h:1")
    if "nodes" in settings.model_fields:
        values["nodes"] = (0, 2)
    made = load(settings, values, environment={})
    words = arguments(made.model_dump())
    given = {
        name.removeprefix("--").replace("-", "_"): value
        for name, _, value in (word.partition("=") for word in words)
    }

    assert made == load(settings, given, environment={})


class TestKeys:
    def test_no_file_means_no_keys(self) -> None:
        assert frozenset() == read_keys(None)

    def test_one_per_line_between_comments_and_blanks(self, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        file.write_text("# ours\n alpha \n\nbeta\r\n#gamma\n")

        assert {"alpha", "beta"} == read_keys(file)

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            (b"", "it holds no key"),
            (b"# alpha\n\n", "it holds no key"),
            (b"\xff\xfe\x00", "not a text file"),
            ("clé".encode(), "printable ASCII"),
            (b"al\x07pha", "printable ASCII"),
        ],
    )
    def test_a_file_without_usable_keys(
        self, tmp_path: Path, content: bytes, complaint: str
    ) -> None:
        """A server that was to be protected must not start open."""
        file = tmp_path / "keys"
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=complaint) as refused:
            read_keys(file)

        assert str(file) in str(refused.value)
        assert "pha" not in str(refused.value).replace(str(file), ""), "a key is not shown"

    def test_a_directory(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="Is a directory"):
            read_keys(tmp_path)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_a_file_of_somebody_else(self, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        file.write_text("alpha")
        file.chmod(0)
        with pytest.raises(ConfigError, match="Permission denied"):
            read_keys(file)


class TestRuntimeBase:
    @pytest.fixture(autouse=True)
    def _temporary(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tempfile.tempdir", "/tmp")  # noqa: S108 - not written to

    def test_the_sessions_own_directory_comes_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/var")

        assert Path("/var") == runtime_base()

    @pytest.mark.parametrize(
        "unusable", ["", "/absent", "/etc/passwd", "/bin/sh", "/proc/" + "." * 60]
    )
    def test_an_unusable_one_is_passed_over(
        self, monkeypatch: pytest.MonkeyPatch, unusable: str
    ) -> None:
        """As `su` leaves it behind; without this the server would end in a traceback."""
        monkeypatch.setenv("XDG_RUNTIME_DIR", unusable)

        assert Path("/tmp") == runtime_base()  # noqa: S108 - not written to

    def test_a_path_too_long_for_sockets_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Replicas would start, fail to listen, and start again, for ever."""
        long = tmp_path / ("x" * 60)
        long.mkdir()
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        monkeypatch.setattr("tempfile.tempdir", str(long))
        with pytest.raises(ConfigError, match="set XDG_RUNTIME_DIR"):
            runtime_base()

    def test_the_longest_base_still_has_room_for_a_socket(self) -> None:
        thirty_years = 10**11 - 1  # of uptime, in clock ticks
        name = f"numaserve-{2**22}-{thirty_years}-abcdefgh/replica-255.sock"

        assert 50 + 1 + len(name) <= 107


@contextmanager
def answering(body: bytes, status: int = 200) -> Iterator[str]:
    """Serve one document on every path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class TestStatus:
    def test_nobody_there(self) -> None:
        result = run("status", "--url", "http://127.0.0.1:1")

        assert 1 == result.exit_code
        assert "numaserve status: http://127.0.0.1:1/admin/status: " in result.stderr
        assert 1 == len(result.stderr.splitlines())

    @pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"mode": null}', b"\xff"])
    def test_somebody_else_there(self, body: bytes) -> None:
        with answering(body) as url:
            result = run("status", "--url", url)

        assert 1 == result.exit_code
        assert "what answers there is not numaserve" in result.stderr
        assert 1 == len(result.stderr.splitlines())

    def test_a_refusal(self) -> None:
        with answering(b"{}", 401) as url:
            result = run("status", "--url", url)

        assert 1 == result.exit_code
        assert "401" in result.stderr.splitlines()[0]

    def test_a_status_is_shown(self) -> None:
        row = {
            "id": "replica-0", "node": 1, "state": "ready", "reason": None, "pid": 5,
            "cpus": [0, 1, 2, 5], "running": 1, "kv_used_tokens": 3, "kv_capacity_tokens": 9,
            "memory_local_ratio": 0.995, "degraded": "memory is not bound", "restarts": 0,
        }  # fmt: skip
        document = {
            "mode": "single", "mode_reason": "one placement domain", "concurrency": 1,
            "waiting": 0, "replicas": [row],
        }  # fmt: skip
        with answering(json.dumps(document).encode()) as url:
            table, raw = run("status", "--url", url + "/"), run("status", "--url", url, "--json")

        assert 0 == table.exit_code
        for shown in ("single (one placement domain)", "replica-0", "ready", "0-2,5", "99.5%"):
            assert shown in table.stdout
        assert "replica-0: memory is not bound" in table.stdout
        assert document == json.loads(raw.stdout)
