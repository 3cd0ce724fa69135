"""Brings a model from the Hugging Face hub into the hub's own cache: only the files that are read here.

The library does the transfer, and obeys HF_HOME, HF_HUB_CACHE, HF_ENDPOINT and HF_TOKEN. What can go wrong becomes one
ConfigError. Weights come last and the branch's pointer after them, so what was whole stays in use until the new is.
"""

from __future__ import annotations

import fnmatch
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bifolio.protos.errors import ConfigError

from .hub import INDEX, REQUIRED, WEIGHTS, HubModel, cached, find, folder_of

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

Progress = Callable[[int, int], None]  # bytes done, bytes in all

_OPTIONAL = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template*.jinja",
    "chat_template*.json",
)


def pull(model: HubModel, progress: Progress) -> Path:
    """Brings what is missing and returns where the model is. Without anything to bring `progress` is not called."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the HTTP library that it uses

    try:
        return _pull(model, progress)
    except (OSError, HTTPError, ValueError) as error:
        raise _refusal(model, error) from error
    except (TypeError, AttributeError, LookupError, RecursionError) as error:  # what a liar's answer leads to
        raise _nonsense(error) from error


def _pull(model: HubModel, progress: Progress) -> Path:
    info = _ask(model)
    sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
    if not (isinstance(info.sha, str) and all(isinstance(size, int) for size in sizes.values())):
        raise TypeError("no commit, or sizes that are no numbers")
    if model.file is not None:
        _require_gguf(model, sizes)
        wanted = [model.file]
    else:
        _require_directory(model, sizes)
        config = _bring(model, "config.json", info.sha)
        _require_architecture(model, config.parent)
        wanted = _wanted(sizes) + _weights(model, sizes, info.sha)
    missing = [name for name in wanted if cached(model, name, info.sha) is None]
    if missing:
        with _watched(folder_of(model) / "blobs", sum(sizes[name] for name in missing), progress):
            for name in missing:
                _bring(model, name, info.sha)
    _bring(model, model.file or "config.json", model.revision)  # the branch points to what is whole now
    return find(model)


def _ask(model: HubModel) -> ModelInfo:
    from huggingface_hub import HfApi, constants

    return HfApi().model_info(
        model.repo, revision=model.revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
    )


def _bring(model: HubModel, file: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(model.repo, file, revision=revision))


def _require_gguf(model: HubModel, names: dict[str, int]) -> None:
    if model.file not in names:
        raise ConfigError(f"{model.repo} has no file {model.file}; {_ggufs(names) or 'it has no .gguf file at all'}")


def _require_directory(model: HubModel, names: dict[str, int]) -> None:
    """Before anything is brought: a repository we could not read is refused."""
    lacks = [name for name in REQUIRED if name not in names]
    if INDEX not in names and WEIGHTS not in names:
        lacks.append(WEIGHTS)
    if not lacks:
        return
    because = f"{model} has no {' and no '.join(lacks)}"
    if ggufs := _ggufs(names):
        raise ConfigError(f"{because}; {ggufs}; name one: bifolio models pull {model}:FILE.gguf")
    if WEIGHTS in lacks and any(name.endswith((".bin", ".pth", ".pt")) for name in names):
        raise ConfigError(f"{because}; weights in .bin and .pth files are not read, they can hold code")
    raise ConfigError(f"{because}; a repository that can be served has config.json, tokenizer.json and safetensors")


def _ggufs(names: dict[str, int]) -> str:
    found = sorted(name for name in names if name.endswith(".gguf"))
    return f"it has {', '.join(found[:20])}{f' and {len(found) - 20} more' if found[20:] else ''}" if found else ""


def _require_architecture(model: HubModel, folder: Path) -> None:
    """Before gigabytes come: by the configuration alone."""
    from bifolio.replicas.model_files import model_config

    try:
        model_config(folder)
    except ConfigError as error:
        raise ConfigError(f"{model} cannot be served, and no weights were brought: {error.message}") from error


def _wanted(names: dict[str, int]) -> list[str]:
    """Everything but the weights."""
    optional = [name for name in sorted(names) if any(fnmatch.fnmatchcase(name, each) for each in _OPTIONAL)]
    return [name for name in optional if "/" not in name] + list(REQUIRED)


def _weights(model: HubModel, names: dict[str, int], commit: str) -> list[str]:
    """The shards the index names, or the one file. Other safetensors are copies in another format."""
    if INDEX not in names:
        return [WEIGHTS]
    try:
        shards = sorted(set(json.loads(_bring(model, INDEX, commit).read_text("utf-8"))["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{model}: its {INDEX} names no weights ({type(error).__name__}: {error})") from error
    if lost := [name for name in shards if name not in names]:
        raise ConfigError(f"{model} has no {', '.join(lost)}, which its {INDEX} names; the repository is not whole")
    return shards


@contextmanager
def _watched(blobs: Path, total: int, progress: Progress) -> Iterator[None]:
    """Reports how the blobs grow, whatever the library transfers them with. Its own bars stay away."""
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is False:  # the user asked for the library's bars
        yield
        progress(total, total)
        return
    disable_progress_bars()
    before, ended = _size(blobs), threading.Event()

    def watch() -> None:
        done = 0
        while not ended.wait(0.1):
            done = max(done, min(_size(blobs) - before, total))
            progress(done, total)

    watcher = threading.Thread(target=watch, daemon=True)
    progress(0, total)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    progress(total, total)


def _size(folder: Path) -> int:
    total = 0
    for path in folder.iterdir() if folder.is_dir() else ():
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # just renamed
            pass
    return total


def _refusal(model: HubModel, error: BaseException) -> ConfigError:
    """One line for what the library raises."""
    from huggingface_hub import constants, errors

    hub, reason = constants.ENDPOINT, _first_line(error)
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if isinstance(error, errors.GatedRepoError):
        return ConfigError(
            f"{model.repo} is gated; ask for access on {hub}/{model.repo}, and set HF_TOKEN to a token of that account"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ConfigError(
            f"{hub} shows no repository {model.repo}; check the name, or set HF_TOKEN if it is private or gated"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(f"{model.repo} has no revision {model.revision}; give a branch, a tag or a whole commit id")
    if status in (401, 403):
        return ConfigError(f"{hub} refuses the token for {model.repo} ({reason}); check HF_TOKEN")
    if status is not None:
        return ConfigError(f"{hub} answers {status} for {model} ({reason}); try again later, or check HF_ENDPOINT")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return ConfigError(f"{model} is not fetched while HF_HUB_OFFLINE is set; unset it, or serve what is here")
    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        return _refusal(model, error.__cause__)
    if isinstance(error, errors.FileMetadataError | json.JSONDecodeError):
        return _nonsense(error)
    if isinstance(error, errors.HFValidationError):
        return ConfigError(f"{model.repo!r} is no name of a repository: {reason}")
    if isinstance(error, errors.HTTPError):  # type: ignore[attr-defined]
        return ConfigError(
            f"asking {hub} for {model} failed ({type(error).__name__}: {reason}); check the network, "
            "and HF_ENDPOINT and HTTPS_PROXY if you set them"
        )
    return ConfigError(f"{model} cannot be brought into {constants.HF_HUB_CACHE}: {reason}")


def _nonsense(error: BaseException) -> ConfigError:
    from huggingface_hub import constants

    return ConfigError(
        f"{constants.ENDPOINT} does not answer as a Hugging Face hub does ({_first_line(error)}); check HF_ENDPOINT"
    )


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
