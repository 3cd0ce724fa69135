"""Models of the Hugging Face hub that are in its cache on this machine: their names, where they are, which are whole.

Needs no network; `hub_pull.py` brings them. Knows nothing of what is inside a model file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bifolio.protos.errors import ConfigError

REQUIRED = ("config.json", "tokenizer.json")
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"

# ORG/NAME, then @ and a branch, tag or commit, then : and a .gguf file of the repository
_NAME = re.compile(r"(?P<repo>\w[\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<file>[\w./ +=-]+))?")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A directory of safetensors in a repository, or with `file` one GGUF file of it."""

    repo: str
    revision: str | None = None  # None: the repository's main branch
    file: str | None = None

    def __str__(self) -> str:
        return self.repo + (f"@{self.revision}" if self.revision else "") + (f":{self.file}" if self.file else "")


@dataclass(frozen=True, slots=True)
class Cached:
    """A model of which the cache has at least a part."""

    model: HubModel
    path: Path
    bytes: int
    whole: bool


def parse(source: str) -> HubModel | None:
    """None for what cannot be the name of a model on the hub. ConfigError for a file that is no .gguf file."""
    match = _NAME.fullmatch(source)
    if match is None:
        return None
    model = HubModel(match["repo"], match["revision"], match["file"])
    if ".." in source:
        raise ConfigError(f"{source}: a name on the hub has no '..'")
    if model.file is not None and not model.file.endswith(".gguf"):
        raise ConfigError(
            f"{source}: {model.file} is no .gguf file; allowed: ORG/NAME:FILE.gguf, or ORG/NAME for safetensors"
        )
    return model


def find(model: HubModel) -> Path:
    """The .gguf file or the model directory in the cache, whole; ConfigError says how to bring it."""
    path = cached(model, model.file or "config.json")
    if path is not None and model.file is not None:
        return path
    if path is not None and is_whole(path.parent):
        return path.parent
    ggufs = sorted({each.name for folder in _snapshots(model) for each in folder.glob("*.gguf")})
    if model.file is None and path is None and ggufs:
        raise ConfigError(f"of {model} only {', '.join(ggufs)} is here; name it: {model}:{ggufs[0]}")
    partial = model.file is None and (path is not None or any(not is_whole(each) for each in _snapshots(model)))
    what = "is not whole" if partial else "is not here yet (it is no path, nor in the Hugging Face cache)"
    raise ConfigError(f"{model} {what}; bring it with: bifolio models pull {model}")


def cached(model: HubModel, file: str, commit: str | None = None) -> Path | None:
    """One file of the repository in the cache, at `commit` or else at the model's revision."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(model.repo, file, revision=commit or model.revision)
    except HFValidationError as error:
        raise ConfigError(f"{model.repo!r} is no name of a repository: {error}") from error
    return Path(path) if isinstance(path, str) else None


def is_whole(folder: Path) -> bool:
    """Whether everything is there without which no model can be served."""
    from bifolio.replicas.model_files import safetensors_files

    try:
        return all((folder / name).is_file() for name in REQUIRED) and bool(safetensors_files(folder))
    except ConfigError:  # a weight file is missing, or the index is no index
        return False


def folder_of(model: HubModel) -> Path:
    """Where the cache keeps the repository: blobs/, refs/ and snapshots/."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=model.repo, repo_type="model")


def list_cached() -> Iterator[Cached]:
    """What can be served, or could if it were whole. The cache is shared: everything else in it is left out."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in sorted((each for each in repos if each.repo_type == "model"), key=lambda each: each.repo_id):
        for state in sorted(repo.revisions, key=lambda each: -each.last_modified):
            model = HubModel(repo.repo_id, _revision(state.refs, state.commit_hash))
            files = {each.file_path.relative_to(state.snapshot_path).as_posix(): each for each in state.files}
            if _is_ours(state.snapshot_path):
                yield Cached(model, state.snapshot_path, state.size_on_disk, is_whole(state.snapshot_path))
            for name in sorted(each for each in files if each.endswith(".gguf")):
                gguf = HubModel(model.repo, model.revision, name)
                yield Cached(gguf, files[name].file_path, files[name].size_on_disk, whole=True)


def _is_ours(folder: Path) -> bool:
    """By its configuration: an architecture that is served here."""
    from bifolio.replicas.model_files import model_config

    try:
        model_config(folder)
    except ConfigError:
        return False
    return True


def _revision(refs: frozenset[str], commit: str) -> str | None:
    """The shortest way to name a snapshot so that `find` finds it."""
    return None if "main" in refs else min(refs, default=commit)


def _snapshots(model: HubModel) -> list[Path]:
    folder = folder_of(model) / "snapshots"
    return list(folder.iterdir()) if folder.is_dir() else []
