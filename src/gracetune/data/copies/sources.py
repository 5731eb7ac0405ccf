"""Sources of copies: the hub, any other URL, or a local folder whose archives and tables are unpacked."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol
from urllib.parse import unquote

from gracetune.config.dataset_config import Dataset, StorageAccess
from gracetune.data.backend import survey
from gracetune.data.backends.local import LocalBackend
from gracetune.data.backends.url import UrlBackend
from gracetune.data.backends.url_access import UrlRanges, explain
from gracetune.data.copies.errors import CopyError
from gracetune.errors import Problem
from gracetune.hub.access import HubAccess, Repo, is_server_error, rejection, unreachable_errors, why
from gracetune.storage.transfer import RangeReader, RemoteFile, is_local_disk_error

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_HUB = re.compile(
    r"hf://(?P<kind>datasets/)?(?P<name>[^/@]+/[^/@]+)(@(?P<revision>refs/(?:convert/[\w.-]+|pr/\d+)|[^/]+))?"
    r"(/(?P<folder>.*))?"
)


class CopySource(Protocol):
    @property
    def address(self) -> str:
        """The address for messages, without credentials."""
        ...

    @property
    def revision(self) -> str | None:
        """The commit of all files; None if the storage has no commits."""
        ...

    def files(self) -> Mapping[str, RemoteFile]: ...

    def cached(self, path: str) -> Path | None:
        """The path of the file if it is on this disk already."""
        ...

    def ranges(self, path: str) -> RangeReader:
        """A reader of parts of the file."""
        ...

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn the exceptions of the storage's library into CopyError."""
        ...


@dataclass(frozen=True)
class HubAddress:
    """`hf://datasets/owner/name@revision/folder`."""

    repo: Repo
    folder: str = ""

    @classmethod
    def parse(cls, address: str) -> HubAddress | None:
        """Parse an address; None if it is not one of the hub. Raises CopyError if it is malformed."""
        if not address.startswith("hf://"):
            return None
        found = _HUB.fullmatch(address)
        if found is None:
            problem = Problem(address, "not a valid hub address", "hf://datasets/OWNER/NAME", "check the spelling")
            raise CopyError(problem)
        revision = None if found["revision"] is None else unquote(found["revision"])
        repo = Repo(found["name"], "dataset" if found["kind"] else "model", revision)
        return cls(repo, (found["folder"] or "").strip("/"))


def open_source(dataset: Dataset, hub: HubAccess, *, revision: str | None = None) -> CopySource:
    """Open the source of a dataset's copy. `revision` is the commit that an earlier start used."""
    if "://" not in dataset.path:
        return FolderSource(dataset.path)
    address = HubAddress.parse(dataset.path)
    if address is None:
        return UrlSource(dataset, UrlBackend(dataset.path, dataset.storage))
    with _hub_explained(dataset, address.repo, hub):
        if hub.offline is not None:
            return _from_hub_cache(dataset, address, f"{hub.offline} forbids access to the hub")
        return _from_hub(dataset, address, hub, revision)


class UrlSource:
    """A URL of any protocol that fsspec supports."""

    def __init__(self, dataset: Dataset, backend: UrlBackend, revision: str | None = None) -> None:
        self._dataset, self._backend, self._revision = dataset, backend, revision
        self._files: Mapping[str, RemoteFile] | None = None

    @property
    def address(self) -> str:
        return self._dataset.path

    @property
    def revision(self) -> str | None:
        return self._revision

    def files(self) -> Mapping[str, RemoteFile]:
        if self._files is None:
            with self.explained():
                self._files = self._backend.remote_files()
        return self._files

    def cached(self, path: str) -> Path | None:
        return None

    def ranges(self, path: str) -> UrlRanges:
        return self._backend.ranges(path, self.files()[path])

    @contextmanager
    def explained(self) -> Iterator[None]:
        try:
            yield
        except self._backend.errors as error:
            if is_local_disk_error(error):
                raise
            key = f"dataset {self._dataset.id}: {self.address}"
            raise CopyError(explain(key, self._backend.protocol, error)) from error


class HubSource(UrlSource):
    """One commit of a hub repository. Files that `hf download` has cached are taken from the cache."""

    def __init__(self, dataset: Dataset, address: HubAddress, hub: HubAccess, commit: str) -> None:
        kind = "datasets/" if address.repo.kind == "dataset" else ""
        folder = f"/{address.folder}" if address.folder else ""
        access = dataset.storage or StorageAccess()
        if access.endpoint_url is None and hub.endpoint is not None:
            access = access.model_copy(update={"endpoint_url": hub.endpoint})
        backend = UrlBackend(f"hf://{kind}{address.repo.name}@{commit}{folder}", access)
        super().__init__(dataset, backend, commit)
        self._hub_address, self._hub = address, hub

    def cached(self, path: str) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        repo = self._hub_address.repo
        inside = f"{self._hub_address.folder}/{path}" if self._hub_address.folder else path
        found = try_to_load_from_cache(repo.name, inside, revision=self.revision, repo_type=repo.kind)
        return Path(found) if isinstance(found, str) else None

    @contextmanager
    def explained(self) -> Iterator[None]:
        with super().explained(), _hub_explained(self._dataset, self._hub_address.repo, self._hub):
            yield


class FolderSource:
    """A folder of this machine, or a single file."""

    def __init__(self, folder: str | Path, *, address: str | None = None, revision: str | None = None) -> None:
        root = Path(folder).expanduser()
        self._only = root.name if root.is_file() else None
        self._root = root.parent if self._only else root
        self._address, self._revision = address or str(folder), revision

    @property
    def address(self) -> str:
        return self._address

    @property
    def revision(self) -> str | None:
        return self._revision

    def files(self) -> Mapping[str, RemoteFile]:
        # A snapshot in the hub's cache consists of links to files outside of it, which LocalBackend would reject.
        if self._revision is not None:
            paths = [path for path in sorted(self._root.rglob("*")) if path.is_file()]
            found = {str(path.relative_to(self._root)): path for path in paths}
            return {path: RemoteFile(file.stat().st_size) for path, file in found.items()}
        listed = survey(LocalBackend(self._root)).files
        chosen = listed if self._only is None else {self._only: listed[self._only]}
        return {path: RemoteFile(stat.size, tag=str(stat.modified_ns)) for path, stat in chosen.items()}

    def cached(self, path: str) -> Path | None:
        return self._root / path

    def ranges(self, path: str) -> RangeReader:
        raise NotImplementedError(f"{path} is on this disk already")

    @contextmanager
    def explained(self) -> Iterator[None]:
        yield


def open_file(source: CopySource, path: str) -> BinaryIO:
    """A seekable stream of a file that transfers only what is read. For footers and dataset cards."""
    local_file = source.cached(path)
    if local_file is not None:
        return local_file.open("rb")
    size = source.files()[path].size or 0
    return io.BufferedReader(_Ranged(source.ranges(path), size), buffer_size=1 << 16)


class _Ranged(io.RawIOBase):
    """A raw stream that reads ranges of a remote file."""

    def __init__(self, reader: RangeReader, size: int) -> None:
        self._reader, self._size, self._at = reader, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        target = memoryview(buffer).cast("B")
        end = min(self._size, self._at + len(target))
        data = self._reader.read(self._at, end) if end > self._at else b""
        target[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at


# -- the hub ----------------------------------------------------------------------------------------------------------


def _from_hub(dataset: Dataset, address: HubAddress, hub: HubAccess, revision: str | None) -> CopySource:
    from huggingface_hub import HfApi

    access = dataset.storage or StorageAccess()
    token = access.token
    api = HfApi(endpoint=access.endpoint_url or hub.endpoint, token=token)
    repo = address.repo
    try:
        info: Any = api.repo_info(repo.name, revision=revision or repo.revision, repo_type=repo.kind)
    except unreachable_errors() as error:
        if is_unreachable(error):
            return _from_hub_cache(dataset, address, f"the hub is out of reach ({why(error)})")
        raise
    return HubSource(dataset, address, hub, info.sha)


def is_unreachable(error: Exception) -> bool:
    """Whether the hub did not answer, or answered with a server error."""
    from huggingface_hub.errors import HfHubHTTPError

    return is_server_error(error) or not isinstance(error, HfHubHTTPError)


def _from_hub_cache(dataset: Dataset, address: HubAddress, reason: str) -> CopySource:
    """The hub's local cache as the source. Raises CopyError with `reason` if it holds no complete snapshot."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repo = address.repo
    try:
        folder = Path(snapshot_download(repo.name, repo_type=repo.kind, revision=repo.revision, local_files_only=True))
    except LocalEntryNotFoundError:
        found = f"{repo.words}: {reason}, and there is no complete copy in {repo.cache_folder}"
        hint = f"{repo.command} on a machine with network access, then copy its hub cache here (HF_HOME)"
        raise CopyError.of(dataset.id, found=found, expected="a hub that answers", hint=hint) from None
    return FolderSource(folder / address.folder, address=dataset.path, revision=folder.name)


@contextmanager
def _hub_explained(dataset: Dataset, repo: Repo, hub: HubAccess) -> Iterator[None]:
    """Turn the hub's errors about the repository into CopyError."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except HFValidationError as error:
        found = f"{repo.name}: {why(error)}"
        hint = "check the spelling"
        raise CopyError.of(dataset.id, found=found, expected="an id such as OWNER/NAME", hint=hint) from error
    except FileNotFoundError as error:
        # fsspec wraps the hub's error, which is the cause and has the real reason.
        if isinstance(error.__cause__, HfHubHTTPError):
            raise CopyError(rejection(f"dataset {dataset.id}", repo, error.__cause__)) from error
        raise
    except HfHubHTTPError as error:
        if is_server_error(error):
            raise
        raise CopyError(rejection(f"dataset {dataset.id}", repo, error)) from error
