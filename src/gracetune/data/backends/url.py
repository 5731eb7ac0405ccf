"""The backend of URLs, for every protocol fsspec supports: s3://, gs://, https://, archives and others.

The libraries for the protocols are optional.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, Final
from urllib.parse import quote, unquote

from gracetune.config.dataset_config import StorageAccess
from gracetune.data.backend import FileStat, LeftOut, Listing
from gracetune.data.backends.errors import StorageError, problem_text
from gracetune.data.backends.paths import checked, printable
from gracetune.data.backends.record import DatasetBackend
from gracetune.data.backends.storage import BackendHandle, SourceHandle, Storage, unlisted_reason
from gracetune.data.backends.stream import stream_over
from gracetune.data.backends.url_access import (
    WEB,
    UrlRanges,
    error_types,
    options_for,
    remote_file,
    status_of,
    words,
)
from gracetune.data.errors import MissingFileError, UnreadableMediaError
from gracetune.redaction import redact
from gracetune.storage.transfer import RemoteFile

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

PACKAGES: Final = {
    "s3": "s3fs", "s3a": "s3fs",
    "gs": "gcsfs", "gcs": "gcsfs",
    "http": "aiohttp", "https": "aiohttp",
    "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs",
    "oss": "ossfs", "oci": "ocifs",
    "hf": "huggingface_hub",
    "sftp": "paramiko", "ssh": "paramiko", "smb": "smbprotocol",
}  # fmt: skip
_LOCAL: Final = frozenset(["file", "local"])
_ARCHIVES: Final = frozenset(["zip", "tar", "libarchive"])
_SINGLE_FILES: Final = frozenset([".tar", ".tgz", ".gz", ".zip", ".parquet", ".csv", ".tsv", ".jsonl", ".json"])
_REQUESTS_AT_ONCE: Final = 16
_MODIFIED: Final = ("mtime", "LastModified", "last_modified", "updated", "modified", "date_time", "created")


class UrlBackend(Storage):
    """The files below a URL. `gracetune.data.backend.Backend` describes the methods.

    The protocol's library manages credentials and connections.
    """

    def __init__(self, url: str, access: StorageAccess | None = None) -> None:
        self._url, self._access = url, access
        protocols = [part.partition("://")[0] for part in url.split("::")]
        self._protocol = protocols[0]
        _reject_local(url, protocols)
        if access is not None and access.signature is not None and not is_single_file(url):
            raise _with_query(url)
        self._errors = error_types(protocols)
        self._fs, self._base = self._connect(protocols)
        self._alone: str | None = None
        """The file's name, if the URL is that of a single file. Set by `remote_files`."""

    def _connect(self, protocols: Sequence[str]) -> tuple[Any, str]:
        """fsspec's file system, and the URL's path in it."""
        import fsspec  # type: ignore[import-untyped]

        try:
            fs, base = fsspec.core.url_to_fs(self._url, **options_for(self._protocol, self._access))
        except ImportError as error:
            package = next((PACKAGES[protocol] for protocol in protocols if protocol in PACKAGES), None)
            hint = f"pip install {package}" if package else str(error)
            found = f"the library for {'::'.join(protocols)}:// is not installed"
            raise StorageError(problem_text(self._url, found=found, expected=package or "it", hint=hint)) from error
        except ValueError as error:
            raise StorageError(
                problem_text(
                    self._url,
                    found=str(error),
                    expected="a URL such as s3://bucket/folder, gs://bucket/folder or https://host/folder",
                    hint="check the spelling; for a folder of this machine write `type: local`",
                )
            ) from error
        except self._errors as error:
            raise StorageError(f"{self._url} cannot be opened: {words(error)}") from error
        return fs, str(base).rstrip("/")

    @property
    def root(self) -> str:
        return self._url

    def handle(self) -> BackendHandle:
        if self._access is not None:  # a handle is plain text and must not contain credentials
            return super().handle()
        return SourceHandle(kind="url", root=self._url)

    def survey(self) -> Listing:
        """Every file below the URL, from a single listing of the storage."""
        try:
            self._fs.invalidate_cache()
            if self._protocol in WEB:  # `find` treats a server that does not answer as an empty folder; `ls` raises
                self._fs.ls(self._base, detail=False)
            found = self._fs.find(self._base, detail=True)
        except self._errors as error:
            raise StorageError(f"{self._url} cannot be listed: {words(error)}") from error
        files: dict[str, FileStat] = {}
        left_out: list[LeftOut] = []
        for name, info in found.items():
            path = self._relative(name)
            reason = "it lies outside the URL" if path is None else unlisted_reason(path)
            if path is None or reason is not None:
                left_out.append(LeftOut(printable(path or name), f"{reason}"))
            else:
                files[path] = self._facts(path, info)
        return Listing(dict(sorted(files.items())), tuple(left_out))

    # -- for copies ---------------------------------------------------------------------------------------------------

    @property
    def protocol(self) -> str:
        return self._protocol

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """The exceptions that the protocol's library raises."""
        return self._errors

    def remote_files(self) -> dict[str, RemoteFile]:
        """The remote description of every file by its path. The URL may be that of a single file. Raises `errors`."""
        self._fs.invalidate_cache()
        alone = self._base.rpartition("/")[2]
        if self._protocol in WEB and is_single_file(alone):
            self._alone = unquote(alone)
            return {self._alone: remote_file(self._protocol, self._fs.info(self._full(self._alone)))}
        if self._protocol in WEB:
            self._fs.ls(self._base, detail=False)
        found = self._fs.find(self._base, detail=True)
        if [*found] == [self._base]:
            self._alone = alone
            return {alone: remote_file(self._protocol, found[self._base])}
        paths = {
            name: path for name in found if (path := self._relative(name)) is not None and not unlisted_reason(path)
        }
        if self._protocol in WEB:  # an HTML page of links has no file sizes: request each file's headers
            with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
                found = dict(zip(paths, pool.map(self._fs.info, paths), strict=True))
        return {path: remote_file(self._protocol, found[name]) for name, path in sorted(paths.items())}

    def ranges(self, path: str, remote: RemoteFile) -> UrlRanges:
        """A reader of parts of the file."""
        return UrlRanges(self._fs, self._full(path), self._protocol, remote)

    # -----------------------------------------------------------------------------------------------------------------

    def stat(self, path: str) -> FileStat:
        with self._reading(path):
            return self._facts(path, self._info(path))

    def _info(self, path: str) -> dict[str, Any]:
        info: dict[str, Any] = self._fs.info(self._full(path))
        if info.get("type") != "file":
            raise MissingFileError(f"{path} in {self._url} is not a file")
        return info

    def read(self, path: str) -> memoryview:
        with self._reading(path):
            return memoryview(self._fs.cat_file(self._full(path)))

    def open(self, path: str) -> BinaryIO:
        if self._protocol in WEB:  # many web servers support no range requests, or do not report a file's length
            return stream_over(self.read(path))
        with self._reading(path):
            file = self._fs.open(self._full(path), "rb")
        return io.BufferedReader(_Remote(file, self._errors))

    @contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        """Turn the library's exceptions into MissingFileError or UnreadableMediaError."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, KeyError) as error:  # KeyError: archives
            if isinstance(error.__cause__, self._errors) and not _means_missing(error.__cause__):
                # fsspec also raises FileNotFoundError if the server does not answer.
                raise UnreadableMediaError(path, words(error.__cause__)) from error
            raise MissingFileError(f"{path} does not exist in {self._url}") from error
        except self._errors as error:
            raise UnreadableMediaError(path, words(error)) from error

    def _full(self, path: str) -> str:
        name = checked(path, self._url)
        if name == self._alone:
            signature = None if self._access is None else self._access.signature
            return self._base if signature is None else f"{self._base}?{signature}"
        # In a web address a `?`, `#` or `%` of a file name must be escaped.
        name = quote(name) if self._protocol in WEB else name
        return f"{self._base}/{name}" if self._base else name

    def _relative(self, name: str) -> str | None:
        """The path below the URL of a name that fsspec lists; None if it lies elsewhere."""
        base = f"{self._base}/" if self._base else ""
        if not name.startswith(base):
            return None
        path = name[len(base) :]
        return unquote(path) if self._protocol in WEB else path

    def _facts(self, path: str, info: dict[str, Any]) -> FileStat:
        size = info.get("size")
        if size is None:  # some web servers do not report it
            size = len(self._fs.cat_file(self._full(path)))
        return FileStat(size=int(size), modified_ns=_modified_ns(info))


BACKEND: Final = DatasetBackend("url", open=lambda opening: UrlBackend(opening.dataset.path, opening.dataset.storage))


def is_single_file(name: str) -> bool:
    """Whether a name is that of a table or an archive rather than a folder."""
    return PurePosixPath(name).suffix.lower() in _SINGLE_FILES


class _Remote(io.RawIOBase):
    """A raw stream over an fsspec file that raises OSError, like other streams."""

    def __init__(self, file: Any, errors: tuple[type[Exception], ...]) -> None:
        self._file, self._errors = file, errors

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        target = memoryview(buffer).cast("B")
        try:
            data = self._file.read(len(target))
        except self._errors as error:
            raise OSError(words(error)) from error
        target[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        self._file.close()
        super().close()


def _reject_local(url: str, protocols: Sequence[str]) -> None:
    """Reject local files, for which `LocalBackend` checks links. Local archives are accepted."""
    if "://" not in url:
        raise StorageError(
            problem_text(
                url, found="not a URL", expected="a URL such as s3://bucket/folder", hint="for a folder: type: local"
            )
        )
    if _LOCAL.intersection(protocols) and protocols[0] not in _ARCHIVES:
        raise StorageError(
            problem_text(
                url, found="a folder of this machine", expected="remote storage", hint="type: local, with its path"
            )
        )
    if protocols[0] in WEB and ("?" in url or "#" in url):
        raise _with_query(url)


def _with_query(url: str) -> StorageError:
    found, expected = "a web address with ? or #", "the address of a folder, an archive or a table"
    return StorageError(
        problem_text(redact(url), found=found, expected=expected, hint="remove everything from ? or # on")
    )


def _modified_ns(info: dict[str, Any]) -> int:
    """The modification time; 0 if unknown. Each storage has its own name and type for it."""
    for key in _MODIFIED:
        value = info.get(key)
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value)
            except ValueError:
                continue
        if isinstance(value, datetime):
            value = value.timestamp()
        if isinstance(value, int | float) and value > 0:
            return int(value * 1e9)
    return 0


def _means_missing(error: Exception) -> bool:
    return isinstance(error, FileNotFoundError) or status_of(error) in (404, 410)
