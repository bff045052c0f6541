"""Turn what `--model` says into a file on this machine: the demo, a path, or a download.

Knows where models come from and how they are named; not what is in them (`replica.gguf_file`).
Downloads are `huggingface_hub`'s: its cache, its progress bar, its settings (HF_HOME, HF_TOKEN,
HF_HUB_OFFLINE, HF_ENDPOINT), and a file that is in the cache is found without a network.
"""

import errno
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Literal

from replica.gguf_file import model_name, split_names

DEMO = "demo"
HUB_PREFIX = "hf:"
ANSWER_TIMEOUT_S = 5.0
_LISTED_MAX = 6
_HUB_PARTS_MIN = 3


class ModelSourceError(Exception):
    """The model cannot be had. The message is one line: the setting, what is wrong, the remedy."""

    def __init__(self, spec: str, found: str, remedy: str) -> None:
        super().__init__(f"--model {spec}: {found}; {remedy}")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model's file, which exists; whether it is a model is for `read_gguf` to say."""

    path: Path
    """The first file of a split model."""
    id: str
    """What clients call it, and `/v1/models` lists."""
    source: Literal["demo", "file", "hub"]


def resolve_model(
    spec: str, *, cache_dir: Path | None = None, endpoint: str | None = None
) -> ResolvedModel:
    """Find, or download, the model that `--model` names; raises `ModelSourceError`.

    `spec` is `demo`, a path, or `hf:ORG/REPO/FILE`. The hub's cache and address are those of
    huggingface_hub's own settings unless given.
    """
    if spec == DEMO:
        return _resolve_demo()
    if spec.startswith(HUB_PREFIX):
        return _resolve_hub(spec, cache_dir, endpoint)
    return _resolve_path(spec)


def _resolve_demo() -> ResolvedModel:
    path = Path(str(resources.files("replica.demo"))) / "demo.gguf"
    if not path.is_file():
        raise ModelSourceError(DEMO, f"{path} is missing", "install the package again")
    return ResolvedModel(path, DEMO, "demo")


def _resolve_path(spec: str) -> ResolvedModel:
    # Links are kept as they are: the parts of a split model find each other by name.
    path = Path(spec).expanduser().absolute()
    try:
        exists, beside = path.exists(), path.parent.is_dir()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelSourceError(repr(spec), reason, "check the path") from None
    if not exists:
        remedy = "check the name" if beside else f"check the path, {path.parent} is not there"
        if not beside and len(PurePosixPath(spec).parts) == _HUB_PARTS_MIN:
            remedy = f"for a file on the Hugging Face hub write {HUB_PREFIX}{spec}"
        raise ModelSourceError(spec, "there is no such file", remedy)
    return ResolvedModel(path, model_name(path.name), "file")


def _resolve_hub(spec: str, cache_dir: Path | None, endpoint: str | None) -> ResolvedModel:
    parts = spec.removeprefix(HUB_PREFIX).split("/")
    if len(parts) < _HUB_PARTS_MIN or "" in parts or not parts[-1].endswith(".gguf"):
        form = f"write {HUB_PREFIX}ORG/REPO/FILE.gguf"
        raise ModelSourceError(spec, "this does not name a file on the hub", form)
    repo, folder, name = "/".join(parts[:2]), parts[2:-1], parts[-1]
    paths = [
        _download(repo, "/".join([*folder, part]), cache_dir, endpoint)
        for part in split_names(name)
    ]
    return ResolvedModel(paths[0], "/".join([repo, *folder, model_name(name)]), "hub")


def _download(repo: str, file: str, cache_dir: Path | None, endpoint: str | None) -> Path:
    # Imported here: only who names a model on the hub has to wait for it.
    import huggingface_hub as hub  # noqa: PLC0415

    spec = f"{HUB_PREFIX}{repo}/{file}"
    unreachable = "it is not in the cache, and the hub cannot be reached"
    try:
        if not isinstance(hub.try_to_load_from_cache(repo, file, cache_dir), str):
            # Asked once, without the retries of a download, which take half a minute to give up.
            url = hub.hf_hub_url(repo, file, endpoint=endpoint)
            hub.get_hf_file_metadata(url, timeout=ANSWER_TIMEOUT_S, endpoint=endpoint)
        unreachable = "the download failed"
        return Path(hub.hf_hub_download(repo, file, cache_dir=cache_dir, endpoint=endpoint))
    except Exception as error:  # the HTTP library below it has errors of its own
        found, remedy = _explain(error, unreachable, repo, endpoint)
        raise ModelSourceError(spec, found, remedy) from error


def _explain(error: Exception, otherwise: str, repo: str, endpoint: str | None) -> tuple[str, str]:
    """Say what went wrong between us and the hub, and what to do about it."""
    from huggingface_hub import constants, errors  # noqa: PLC0415

    local = "or give the path of a file that is here"
    match error:
        case errors.GatedRepoError():
            found = f"{repo} is gated"
            remedy = f"accept its terms at {constants.ENDPOINT}/{repo}, then run `hf auth login`"
        case errors.RepositoryNotFoundError():
            found = f"there is no public repository {repo}"
            remedy = "check the name, or run `hf auth login` if it is private"
        case errors.RemoteEntryNotFoundError():
            found, remedy = f"{repo} has no such file", _listed_files(repo, endpoint)
        case errors.OfflineModeIsEnabled():
            found = "it is not in the cache, and HF_HUB_OFFLINE forbids a download"
            remedy = f"unset it, {local}"
        case OSError(errno=errno.ENOSPC):
            found, remedy = "the disk is full", "free some space, or set HF_HOME to a larger disk"
        case _:
            found = f"{otherwise} ({_first_line(error)})"
            remedy = f"check the network, {local}"
    return found, remedy


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _listed_files(repo: str, endpoint: str | None) -> str:
    """Name some GGUFs that a repository does have."""
    from huggingface_hub import HfApi  # noqa: PLC0415

    try:
        files = HfApi(endpoint=endpoint).list_repo_files(repo)
    except Exception:  # noqa: BLE001  # it would have been a courtesy
        return "check its name"
    names = [file for file in files if file.endswith(".gguf")]
    if not names:
        return "it has no GGUF at all"
    more = f" and {len(names) - _LISTED_MAX} more" if len(names) > _LISTED_MAX else ""
    return f"it has {', '.join(names[:_LISTED_MAX])}{more}"
