"""Downloads of the files a diffusers model needs, by hub id.

`gracetune.storage.transfer` downloads the weights into the hub's own cache, where huggingface_hub finds them, because
huggingface_hub's own downloads start over after the process was killed. huggingface_hub does everything else.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final, Protocol

from gracetune.config.dataset_config import StorageAccess
from gracetune.data.backends.url_access import HUB, UrlRanges, options_for
from gracetune.errors import ConfigError, Problem
from gracetune.hub.access import HubAccess, Repo, is_server_error, rejection, unreachable_errors, why, without_bars
from gracetune.storage.locks import lock, open_lock_file
from gracetune.storage.os_errors import problem_of
from gracetune.storage.regular_files import read_small_file
from gracetune.storage.transfer import (
    OnFetched,
    RemoteFile,
    RetryPolicy,
    TransferError,
    is_local_disk_error,
    resumable_bytes,
    transfer,
)
from gracetune.units import MIB, format_bytes

_SHARD = re.compile(r"-\d{5}-of-\d{5}")
_SMALL = (".json", ".txt", ".model", ".jinja")
"""Configurations, tokenizers and chat templates."""
_FILES_AT_ONCE: Final = 4
_REQUESTS: Final = 8
_RESERVE: Final = 64 * MIB
"""Bytes that stay free on the disk."""
_LARGEST: Final = 50 * 10**9
"""The largest file the hub serves by ranges. huggingface_hub downloads larger ones in another way."""
_SITES: Final = ("https://huggingface.co/", "https://hf.co/", "hf://")


class Fetch(Protocol):
    def __call__(self, key: str, name: str, revision: str | None, variant: str | None, file: str | None = None) -> Path:
        """The folder of a hub id's snapshot, or one file of it. `key` is the config key that named it, for messages."""


@dataclass(frozen=True)
class HubName:
    """A model on the hub as users write it: an id, a web address, or `hf://owner/name@revision/file`."""

    name: str
    revision: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """None if the text is not an address. A plain id is not one."""
        site = next((site for site in _SITES if text.startswith(site)), None)
        if site is None:
            return None
        parts = [part for part in text.removeprefix(site).partition("?")[0].split("/") if part]
        if len(parts) < 2:
            return None
        name, at, revision = f"{parts[0]}/{parts[1]}".partition("@")
        rest = parts[2:]
        if rest[:1] and rest[0] in ("blob", "resolve", "tree") and site != "hf://":
            revision, rest = (rest[1] if len(rest) > 1 else ""), rest[2:]
        given = revision if revision and (at or revision != "main") else None
        return cls(name, given, "/".join(rest) or None)


def variant_of(file: str) -> str | None:
    """`fp16` for `model.fp16.safetensors`, `model.fp16-00001-of-00002.safetensors` and
    `model-00001-of-00002.fp16...`."""
    parts = _SHARD.sub("", PurePosixPath(file).name).removesuffix(".safetensors").split(".")
    return parts[-1] if len(parts) > 1 else None


def has_variant(file: str, variant: str) -> bool:
    return variant_of(file) == variant


def needed_files(names: Iterable[str], variant: str | None) -> list[str]:
    """The files to download: small ones of the root and of each part, and one set of weights per part."""
    files = [name for name in names if name.count("/") <= 1]
    wanted = [name for name in files if name.endswith(_SMALL)]
    by_part: dict[str, list[str]] = {}
    for name in files:
        if name.endswith(".safetensors"):
            by_part.setdefault(str(PurePosixPath(name).parent), []).append(name)
    has_parts = any(name.count("/") == 1 for name in wanted) and "model_index.json" in files
    for part, weights in by_part.items():
        if part == "." and has_parts:
            continue  # the same model again as a single file in the original layout
        exact = [name for name in weights if variant is not None and has_variant(name, variant)]
        wanted += exact or [name for name in weights if variant_of(name) is None]
    return sorted(wanted)


@dataclass(frozen=True)
class HubFetcher:
    """Downloads the missing files of a hub id. If the hub is unreachable, an earlier download is used."""

    access: HubAccess = field(default_factory=HubAccess)
    report: Callable[[str], None] = lambda text: None
    on_fetched: Callable[[str], OnFetched] = lambda name: lambda done, total: None
    """Name of the model -> a function that gets the bytes done and in all, as the weights arrive."""
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)

    def __call__(self, key: str, name: str, revision: str | None, variant: str | None, file: str | None = None) -> Path:
        from huggingface_hub.errors import HfHubHTTPError

        repo = Repo(name, "model", revision)
        if self.access.offline is not None:
            return _downloaded_before(key, repo, variant, file, f"{self.access.offline} forbids access to the hub")
        try:
            return self._download(key, repo, variant, file)
        except HfHubHTTPError as error:
            if is_server_error(error):
                reason = f"the hub is out of reach (HTTP {error.response.status_code})"
                return _downloaded_before(key, repo, variant, file, reason)
            raise ConfigError([rejection(key, repo, error)]) from None
        except TransferError as error:
            hint = "start again: the file is downloaded anew"
            raise ConfigError([Problem(key, f"{repo.words}: {error.found}", error.expected, hint)]) from None
        except unreachable_errors() as error:
            if isinstance(error, OSError) and is_local_disk_error(error):
                raise ConfigError([_unwritable(key, repo, error)]) from error
            return _downloaded_before(key, repo, variant, file, f"the hub is out of reach ({why(error)})")

    def plan(self, name: str, revision: str | None, variant: str | None, file: str | None = None) -> DownloadPlan:
        """What a download would transfer. Requests only the hub's file listing; raises the hub's errors."""
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        repo, api = Repo(name, "model", revision), HfApi(endpoint=self.access.endpoint)
        commit = str(api.repo_info(name, revision=revision).sha)
        tree = api.list_repo_tree(name, recursive=True, revision=commit)
        files = {one.path: one for one in tree if isinstance(one, RepoFile)}
        wanted = [file] if file is not None else needed_files(files, variant)
        missing = {path: _remote(files[path]) for path in wanted if path in files}
        missing = {path: one for path, one in missing.items() if not _is_cached(repo, commit, path, one)}
        return DownloadPlan(repo, commit, tuple(wanted), _one_path_each(missing))

    def _download(self, key: str, repo: Repo, variant: str | None, file: str | None) -> Path:
        from huggingface_hub import snapshot_download

        plan = self.plan(repo.name, repo.revision, variant, file)
        if plan.missing:
            with _locked(repo):
                # Plan again: another process may have downloaded it while this one waited for the lock.
                plan = self.plan(repo.name, repo.revision, variant, file)
                plan.check(key)
                for line in plan.lines():
                    self.report(line)
                self._transfer(plan)
        with without_bars():
            wanted, endpoint = [*plan.wanted], self.access.endpoint
            folder = Path(
                snapshot_download(repo.name, revision=repo.revision, endpoint=endpoint, allow_patterns=wanted)
            )
        return folder if file is None else folder / file

    def _transfer(self, plan: DownloadPlan) -> None:
        """Download the plan's large files, several at a time, with one progress count."""
        large = {path: one for path, one in plan.missing.items() if plan.is_ours(path)}
        if not large:
            return
        files = self._files()
        counter = _Counter(sum(one.size or 0 for one in large.values()), self.on_fetched(plan.repo.name))
        with (
            ThreadPoolExecutor(_REQUESTS, thread_name_prefix="requests") as requests,
            ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="weights") as pool,
        ):
            # A thread per file assembles it; the range requests of all files share one pool.
            futures = [
                pool.submit(
                    transfer, plan.blob(path), plan.part(path), one,
                    UrlRanges(files, f"{plan.repo.name}@{plan.commit}/{path}", HUB, one), requests,
                    on_bytes=counter.add, retry_policy=self.retry_policy,
                )
                for path, one in large.items()
            ]  # fmt: skip
            try:
                for future in futures:
                    future.result()
            finally:
                counter.stop()
                pool.shutdown(wait=True, cancel_futures=True)

    def _files(self) -> Any:
        """The hub as an fsspec file system, which serves byte ranges."""
        from huggingface_hub import HfFileSystem

        access = None if self.access.endpoint is None else StorageAccess(endpoint_url=self.access.endpoint)
        return HfFileSystem(**options_for(HUB, access))


fetch: Final[Fetch] = HubFetcher()
"""The fetcher without progress messages."""


@dataclass(frozen=True)
class DownloadPlan:
    """The files of a model that are not on this machine yet."""

    repo: Repo
    commit: str
    wanted: tuple[str, ...]
    """Paths of all files that the model needs, on this machine or not."""
    missing: Mapping[str, RemoteFile]
    """One path per content: the hub's cache stores files of equal content once."""

    @property
    def size(self) -> int:
        """Bytes to download, not counting what an interrupted download left behind."""
        return sum((one.size or 0) - resumable_bytes(self.part(path), one) for path, one in self.missing.items())

    @property
    def free(self) -> int | None:
        """Free bytes on the disk of the hub's cache; None if unknown."""
        folder = self.repo.cache_folder
        while not folder.is_dir() and folder != folder.parent:
            folder = folder.parent
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            return None

    def is_ours(self, path: str) -> bool:
        """Whether `storage.transfer` downloads this file. Large files have the sha256 that names them in the hub's
        cache."""
        digest, size = self.missing[path].digest or "", self.missing[path].size or 0
        return digest.startswith("sha256:") and size <= _LARGEST

    def blob(self, path: str) -> Path:
        """The path of a file with this content in the hub's cache."""
        return _blob(self.repo, self.missing[path])

    def part(self, path: str) -> Path:
        blob = self.blob(path)
        return blob.with_name(f"{blob.name}.gracetune-part")

    def lines(self) -> list[str]:
        """What the download will transfer, for the log."""
        if not self.missing:
            return []
        free = "" if self.free is None else f", {format_bytes(self.free)} free"
        count = len(self.missing)
        what = f"{count} {'file' if count == 1 else 'files'}, {format_bytes(self.size)} to download"
        return [f"model {self.repo.words} ({self.commit[:12]}): {what} to {self.repo.cache_folder}{free}"]

    def check(self, key: str) -> None:
        free = self.free
        if free is not None and self.size + _RESERVE > free:
            found = f"{self.repo.words}: {format_bytes(self.size)} to download, where {format_bytes(free)} is free"
            hint = (
                f"export HF_HOME=FOLDER on a larger disk, or make room in {self.repo.cache_folder.parent}: hf cache rm"
            )
            raise ConfigError([Problem(key, found, "a disk with enough free space", hint)])


class _Counter:
    """Counts the bytes of all files together, and aborts the other transfers after one has failed."""

    def __init__(self, total: int, on_fetched: OnFetched) -> None:
        self._total, self._done, self._on_fetched = total, 0, on_fetched
        self._lock, self._stopped = threading.Lock(), False

    def add(self, count: int) -> None:
        if self._stopped:
            raise TransferError("a download that was stopped", "the whole file")
        with self._lock:
            self._done += count
            self._on_fetched(self._done, self._total)

    def stop(self) -> None:
        self._stopped = True


def _one_path_each(files: Mapping[str, RemoteFile]) -> dict[str, RemoteFile]:
    """One path for each content."""
    by_content: dict[str, str] = {}
    for path, one in files.items():
        by_content.setdefault(one.digest or path, path)
    return {path: files[path] for path in by_content.values()}


def _remote(file: Any) -> RemoteFile:
    digest = f"git:{file.blob_id}" if file.lfs is None else f"sha256:{file.lfs.sha256}"
    return RemoteFile(file.size, digest, file.blob_id)


def _blob(repo: Repo, remote: RemoteFile) -> Path:
    return repo.cache_folder / "blobs" / (remote.digest or "").partition(":")[2]


def _is_cached(repo: Repo, commit: str, path: str, remote: RemoteFile) -> bool:
    """Whether the file is in the cache, or at least its content: huggingface_hub creates the missing link."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(repo.name, path, revision=commit), str) or _blob(repo, remote).is_file()


@contextmanager
def _locked(repo: Repo) -> Iterator[None]:
    """Hold the model's download lock. One process downloads a model at a time; the others wait."""
    folder = repo.cache_folder.parent / ".locks" / repo.cache_folder.name
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = open_lock_file(folder / "gracetune.lock")
    try:
        lock(descriptor, exclusive=True, wait=True)
        yield
    finally:
        os.close(descriptor)


def _unwritable(key: str, repo: Repo, error: OSError) -> Problem:
    elsewhere, then = "export HF_HOME=FOLDER on another disk", "then start again: the download continues"
    return problem_of(error, f"{key}: {repo.words}", repo.cache_folder, elsewhere=elsewhere, then=then)


def _downloaded_before(key: str, repo: Repo, variant: str | None, file: str | None, reason: str) -> Path:
    """The snapshot of an earlier download, or an error that explains why the hub is not used (`reason`)."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError

    wanted = [file] if file is not None else _wanted_before(repo, variant)
    try:
        folder = Path(
            snapshot_download(repo.name, revision=repo.revision, local_files_only=True, allow_patterns=wanted)
        )
    except IncompleteSnapshotError as error:
        found = f"{repo.words}: {error.snapshot_path} is incomplete, and {reason}"
        raise ConfigError([Problem(key, found, "a complete model", _remedy(key, repo))]) from None
    except LocalEntryNotFoundError:
        found = f"{repo.words}: no folder {Path(repo.name).absolute()}, nothing in {repo.cache_folder}, and {reason}"
        expected = "a model on this machine, or a reachable hub"
        raise ConfigError([Problem(key, found, expected, _remedy(key, repo))]) from None
    lacking = _lacking_parts(folder)
    if lacking:
        found = f"{repo.words}: {folder} lacks {', '.join(lacking)}, and {reason}"
        raise ConfigError([Problem(key, found, "a complete model", _remedy(key, repo))])
    if file is not None and not (folder / file).is_file():
        found = f"{repo.words}: {folder} has no {file}, and {reason}"
        raise ConfigError([Problem(key, found, "the file", f"{repo.command} {file} on a machine with network")])
    return folder if file is None else folder / file


def _wanted_before(repo: Repo, variant: str | None) -> list[str] | None:
    """The files an earlier download was meant to fetch; None if the cache has no listing of the model."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        tree = get_cached_repo_tree(repo.name, revision=repo.revision)
    except CachedRepoTreeNotFoundError:
        return None
    return needed_files([one.path for one in tree], variant)


def _remedy(key: str, repo: Repo) -> str:
    typed = f"{key} FOLDER" if key.startswith("--") else f"--set {key}=FOLDER"
    return f"{repo.command} on a machine with network, or give the model's folder: {typed}"


def index_parts(index: Mapping[str, Any]) -> dict[str, tuple[str | None, str | None]]:
    """Part -> its library and class, from the content of model_index.json; None for a part that the model lacks.

    Options of the pipeline can be lists too (`text_encoder_select_layers`).
    """
    return {
        name: (value[0], value[1])
        for name, value in index.items()
        if isinstance(value, list) and len(value) == 2 and all(isinstance(one, str | None) for one in value)
    }


def _lacking_parts(folder: Path) -> list[str]:
    """Parts named in model_index.json that are missing, because a download was interrupted."""
    index = folder / "model_index.json"
    if not index.is_file():
        return []
    parts = index_parts(json.loads(read_small_file(index)))
    return [name for name, (library, _) in parts.items() if library is not None and not (folder / name).is_dir()]
