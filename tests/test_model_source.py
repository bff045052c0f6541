"""What --model may say. The hub is a server on this machine that answers as the real one does."""

import errno
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from gateway.model_source import ModelSourceError, ResolvedModel, resolve_model
from replica.gguf_file import read_gguf
from tests.gguf_samples import tiny_llama

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.ThreadingHTTPServer):
    """A hub with public repositories, and one for each way to be refused."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Page)
        self.files: dict[str, bytes] = {}
        """By ORG/REPO/FILE."""
        self.downloads = 0
        self.broken = False

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Page(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        if "/resolve/" in self.path:
            self.server.downloads += 1
        self.answer()

    def answer(self) -> None:
        if self.path.startswith("/api/models/"):
            repo = "/".join(self.path.split("/")[3:5])
            self.reply_listing(repo)
            return
        repo, _, file = self.path[1:].partition("/resolve/main/")
        if repo == "org/gated":
            self.reply(403, {"X-Error-Code": "GatedRepo"})
        elif not any(name.startswith(repo + "/") for name in self.server.files):
            self.reply(404, {"X-Error-Code": "RepoNotFound"})
        elif (content := self.server.files.get(f"{repo}/{file}")) is None:
            self.reply(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        else:
            etag = hashlib.sha256(content).hexdigest()
            self.reply(200, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, content)

    def reply_listing(self, repo: str) -> None:
        files = self.server.files
        names = [name.removeprefix(repo + "/") for name in files if name.startswith(repo + "/")]
        tree = [{"type": "file", "path": name, "size": 1, "oid": COMMIT} for name in names]
        self.reply(200, {"Content-Type": "application/json"}, json.dumps(tree).encode())

    def reply(self, status: int, headers: dict[str, str], content: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:100] if self.server.broken else content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub() as hub:
        model = tiny_llama(tmp_path / "for_hub.gguf").read_bytes()
        hub.files["org/repo/tiny-q4_0.gguf"] = model
        hub.files["org/repo/folder/tiny-f16.gguf"] = model
        for part in (1, 2):
            hub.files[f"org/repo/split-0000{part}-of-00002.gguf"] = model
        hub.files["org/other/README.md"] = b"# no model here"
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def refusal(spec: str, cache_dir: Path | None = None, endpoint: str | None = None) -> str:
    with pytest.raises(ModelSourceError) as refused:
        resolve_model(spec, cache_dir=cache_dir, endpoint=endpoint)
    message = str(refused.value)
    assert "\n" not in message
    assert message.startswith("--model ")
    assert "; " in message, "a remedy follows what is wrong"
    return message


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "tiny-q4_0.gguf")
    assert ResolvedModel(path, "tiny-q4_0", "file") == resolve_model(str(path))


def test_a_path_may_be_relative_or_begin_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    monkeypatch.chdir(tmp_path)
    assert path == resolve_model("tiny.gguf").path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert path == resolve_model("~/tiny.gguf").path


def test_a_split_model_is_called_by_what_its_parts_share(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "big-00002-of-00003.gguf")
    assert resolve_model(str(path)).id == "big"


def test_links_are_not_followed(tmp_path: Path) -> None:
    """In the hub's cache every file is a link whose target is called by its hash."""
    target = tiny_llama(tmp_path / "5ca1ab1e")
    link = tmp_path / "model.gguf"
    link.symlink_to(target)
    assert ResolvedModel(link, "model", "file") == resolve_model(str(link))


def test_a_path_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    assert "check the name" in refusal(str(tmp_path / "absent.gguf"))
    assert f"{tmp_path / 'absent'} is not there" in refusal(str(tmp_path / "absent" / "m.gguf"))
    assert refusal("a\0b")
    assert refusal("n" * 5000)


def test_a_forgotten_hub_prefix_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "write hf:org/repo/m.gguf" in refusal("org/repo/m.gguf")


def test_the_demo_is_the_file_in_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("gateway.model_source.resources.files", lambda _package: tmp_path)
    assert "install the package again" in refusal("demo")
    path = tiny_llama(tmp_path / "demo.gguf")
    assert ResolvedModel(path, "demo", "demo") == resolve_model("demo")


@pytest.mark.parametrize("spec", ["hf:", "hf:m.gguf", "hf:org/m.gguf", "hf:org/repo/", "hf:a//b/c"])
def test_a_hub_name_must_have_all_its_parts(spec: str) -> None:
    assert "write hf:ORG/REPO/FILE.gguf" in refusal(spec)


def test_a_file_is_downloaded_once_and_then_found_without_the_hub(hub: Hub, cache: Path) -> None:
    spec = "hf:org/repo/tiny-q4_0.gguf"
    first = resolve_model(spec, cache_dir=cache, endpoint=hub.endpoint)
    assert ("org/repo/tiny-q4_0", "hub") == (first.id, first.source)
    assert read_gguf(first.path).architecture == "llama"
    assert first == resolve_model(spec, cache_dir=cache, endpoint=hub.endpoint)
    assert hub.downloads == 1

    hub.shutdown()
    hub.server_close()
    assert first == resolve_model(spec, cache_dir=cache, endpoint=hub.endpoint)


def test_a_file_may_lie_in_a_folder(hub: Hub, cache: Path) -> None:
    spec = "hf:org/repo/folder/tiny-f16.gguf"
    model = resolve_model(spec, cache_dir=cache, endpoint=hub.endpoint)
    assert model.id == "org/repo/folder/tiny-f16"
    assert model.path.is_file()


def test_all_parts_of_a_split_model_are_downloaded(hub: Hub, cache: Path) -> None:
    spec = "hf:org/repo/split-00002-of-00002.gguf"
    model = resolve_model(spec, cache_dir=cache, endpoint=hub.endpoint)
    assert ("split-00001-of-00002.gguf", "org/repo/split") == (model.path.name, model.id)
    assert model.path.with_name("split-00002-of-00002.gguf").is_file()


def test_a_wrong_file_name_is_answered_with_the_right_ones(hub: Hub, cache: Path) -> None:
    message = refusal("hf:org/repo/tiny.gguf", cache, hub.endpoint)
    assert "org/repo has no such file; it has " in message
    assert "tiny-q4_0.gguf" in message
    assert "no GGUF at all" in refusal("hf:org/other/tiny.gguf", cache, hub.endpoint)


def test_an_unknown_repository_is_named(hub: Hub, cache: Path) -> None:
    message = refusal("hf:org/absent/m.gguf", cache, hub.endpoint)
    assert "no public repository org/absent" in message


def test_a_gated_repository_says_where_to_ask(hub: Hub, cache: Path) -> None:
    message = refusal("hf:org/gated/m.gguf", cache, hub.endpoint)
    assert "accept its terms" in message
    assert "hf auth login" in message


def test_a_hub_out_of_reach_is_reported_without_waiting(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub library alone would retry for half a minute."""
    hub.shutdown()
    hub.server_close()
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    message = refusal("hf:org/repo/tiny-q4_0.gguf", cache, hub.endpoint)
    assert "not in the cache, and the hub cannot be reached (ConnectError" in message
    assert waited == []


def test_a_download_that_breaks_off_is_an_error(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the hub library's own retries, between which the test does not wait."""
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    hub.broken = True
    message = refusal("hf:org/repo/tiny-q4_0.gguf", cache, hub.endpoint)
    assert "the download failed" in message


def test_a_full_disk_is_named(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", full)
    assert "the disk is full" in refusal("hf:org/repo/tiny-q4_0.gguf", cache, hub.endpoint)


ASK = """
import sys
from pathlib import Path
from gateway.model_source import ModelSourceError, resolve_model
try:
    print(resolve_model("hf:org/repo/tiny-q4_0.gguf", cache_dir=Path(sys.argv[1])).path)
except ModelSourceError as error:
    print(error)
"""


def ask(cache: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(cache)],
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def test_the_hub_library_keeps_its_own_settings(hub: Hub, cache: Path) -> None:
    """It reads them when it is imported: HF_ENDPOINT for a mirror, HF_HUB_OFFLINE for no hub."""
    offline = ask(cache, HF_HUB_OFFLINE="1", HF_ENDPOINT=hub.endpoint)
    assert "not in the cache, and HF_HUB_OFFLINE forbids a download" in offline
    path = ask(cache, HF_ENDPOINT=hub.endpoint)
    assert Path(path).is_file()
    assert path == ask(cache, HF_HUB_OFFLINE="1")
