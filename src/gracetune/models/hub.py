"""A hub id turned into a folder on this machine, with only the files a diffusers model is loaded from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol

from gracetune.errors import ConfigError, Problem
from gracetune.storage.regular_files import read_small_file

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

_SHARD = re.compile(r"-\d{5}-of-\d{5}")
_SMALL = (".json", ".txt", ".model", ".jinja")
"""Configurations, tokenizers and their templates."""
_SERVER_ERRORS = 500


class Fetch(Protocol):
    def __call__(self, key: str, name: str, revision: str | None, variant: str | None) -> Path:
        """The folder of a hub id's snapshot. `key` is the setting that named it, for messages."""


def variant_of(file: str) -> str | None:
    """`fp16` of `model.fp16.safetensors`, `model.fp16-00001-of-00002.safetensors` and the older order of the two."""
    parts = _SHARD.sub("", PurePosixPath(file).name).removesuffix(".safetensors").split(".")
    return parts[-1] if len(parts) > 1 else None


def has_variant(file: str, variant: str) -> bool:
    return variant_of(file) == variant


def needed_files(names: Iterable[str], variant: str | None) -> list[str]:
    """Of all files in a repository: small ones of the root and of each part, and one set of weights for each part."""
    files = [name for name in names if name.count("/") <= 1]
    wanted = [name for name in files if name.endswith(_SMALL)]
    by_part: dict[str, list[str]] = {}
    for name in files:
        if name.endswith(".safetensors"):
            by_part.setdefault(str(PurePosixPath(name).parent), []).append(name)
    has_parts = any(name.count("/") == 1 for name in wanted) and "model_index.json" in files
    for part, weights in by_part.items():
        if part == "." and has_parts:
            continue  # the whole model once more, in one file of the original layout
        exact = [name for name in weights if variant is not None and has_variant(name, variant)]
        wanted += exact or [name for name in weights if variant_of(name) is None]
    return sorted(wanted)


def fetch(key: str, name: str, revision: str | None, variant: str | None) -> Path:
    """The snapshot of a hub id: downloaded or, where the hub cannot be reached, as it was downloaded before."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        names = HfApi().list_repo_files(name, revision=revision)
        return Path(snapshot_download(name, revision=revision, allow_patterns=needed_files(names, variant)))
    except HfHubHTTPError as error:
        if error.response.status_code >= _SERVER_ERRORS:
            return _downloaded_before(key, name, revision, f"it answered {error.response.status_code}")
        raise ConfigError([_refused(key, name, revision, error)]) from None
    except _unreachable() as error:
        return _downloaded_before(key, name, revision, str(error).strip().split("\n")[0].rstrip("."))


def _unreachable() -> tuple[type[Exception], ...]:
    """What a hub out of reach raises: OSError, and the base of whichever HTTP library huggingface_hub is built on."""
    from huggingface_hub.errors import HfHubHTTPError

    return tuple(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception))


def _downloaded_before(key: str, name: str, revision: str | None, why: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        cache = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
        at = f" at revision {revision}" if revision else ""
        found = (
            f"{name}{at}: no folder {Path(name).absolute()}, nothing in {cache}, and the hub is out of reach ({why})"
        )
        hint = f"hf download {name} on a machine with network, or give the model's folder: --set {key}=FOLDER"
        raise ConfigError([Problem(key, found, "a model on this machine, or a hub that answers", hint)]) from None
    lacking = _lacking_parts(folder)
    if lacking:
        found = f"{name}: {folder} lacks {', '.join(lacking)}, and the hub is out of reach ({why})"
        hint = f"hf download {name} on a machine with network"
        raise ConfigError([Problem(key, found, "a complete model", hint)])
    return folder


def _lacking_parts(folder: Path) -> list[str]:
    """Parts that model_index.json names and that were not downloaded: a download that was broken off."""
    index = folder / "model_index.json"
    if not index.is_file():
        return []
    parts = {name: value for name, value in json.loads(read_small_file(index)).items() if isinstance(value, list)}
    return [name for name, (library, _) in parts.items() if library is not None and not (folder / name).is_dir()]


def _refused(key: str, name: str, revision: str | None, error: HfHubHTTPError) -> Problem:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        hint = "accept its licence on its page, then: hf auth login"
        return Problem(key, f"{name}: the hub shows it only to those who accepted its licence", "access to it", hint)
    if isinstance(error, RepositoryNotFoundError):
        found = f"{name}: no folder {Path(name).absolute()}, and the hub knows no such model or hides it"
        return Problem(key, found, "a folder, or a hub id", "check the spelling; for a private model: hf auth login")
    if isinstance(error, RevisionNotFoundError):
        return Problem("model.revision", f"{revision} of {name}", "a branch, tag or commit of it", "remove it for main")
    return Problem(
        key, f"{name}: the hub answered {error.response.status_code}", "the model's files", "try again later"
    )
