"""Access to the libraries behind fsspec: their options, the meaning of their errors, and reading in ranges."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Final

from gracetune.config.dataset_config import StorageAccess
from gracetune.errors import Problem
from gracetune.redaction import redact
from gracetune.storage.transfer import RANGE, RemoteFile, is_local_disk_error
from gracetune.units import MIB

S3: Final = frozenset(["s3", "s3a"])
WEB: Final = frozenset(["http", "https"])
HUB: Final = "hf"

# Exceptions that the libraries raise besides OSError, as (module, class).
LIBRARY_ERRORS: Final = {
    **dict.fromkeys(WEB, (("aiohttp", "ClientError"),)),
    **dict.fromkeys(S3, (("botocore.exceptions", "BotoCoreError"), ("botocore.exceptions", "ClientError"))),
    **dict.fromkeys(("gs", "gcs"), (("gcsfs.retry", "HttpError"), ("google.auth.exceptions", "GoogleAuthError"))),
    # huggingface_hub 1 is built on httpx, later versions on httpx2.
    HUB: (("httpx2", "HTTPError"), ("httpx", "HTTPError"), ("huggingface_hub.errors", "HFValidationError")),
    **dict.fromkeys(("az", "abfs", "abfss"), (("azure.core.exceptions", "AzureError"),)),
    "oss": (("oss2.exceptions", "OssError"),),
    "oci": (("oci.exceptions", "ServiceError"), ("oci.exceptions", "ClientError")),
    **dict.fromkeys(("sftp", "ssh"), (("paramiko", "SSHException"),)),
    "smb": (("smbprotocol.exceptions", "SMBException"),),
    "zip": (("zipfile", "BadZipFile"),),
    "tar": (("tarfile", "TarError"),),
}
_MD5 = re.compile(r"[0-9a-f]{32}")
_RETRIED = (408, 425, 429)
"""Client errors worth a retry: request timeout, too early, too many requests."""


def error_types(protocols: Sequence[str]) -> tuple[type[Exception], ...]:
    """The exceptions of the protocols' libraries. A library that is not installed cannot raise any."""
    found: list[type[Exception]] = [OSError]
    for protocol in protocols:
        for module, name in LIBRARY_ERRORS.get(protocol, ()):
            try:
                found.append(vars(import_module(module))[name])
            except ImportError:
                continue
    return tuple(found)


def options_for(protocol: str, access: StorageAccess | None) -> dict[str, Any]:
    """The options that fsspec passes to the library of a protocol."""
    if protocol == HUB:
        # Skip fsspec's cache of file system objects: an old one would return outdated listings.
        chosen = {} if access is None else _given(endpoint=access.endpoint_url, token=access.token)
        return {**chosen, "skip_instance_cache": True}
    if access is None:
        return {}
    if protocol in S3:
        keys = _given(key=access.access_key_id, secret=access.secret_access_key, token=access.session_token)
        region = {"client_kwargs": {"region_name": access.region}} if access.region else {}
        anonymous = {"anon": True} if access.anonymous else {}
        return {**keys, **_given(endpoint_url=access.endpoint_url), **region, **anonymous}
    if protocol in WEB and (access.user or access.password):
        login = f"{access.user}:{access.password or ''}" if access.user else f"{access.password}:"
        basic = base64.b64encode(login.encode()).decode()
        return {"client_kwargs": {"headers": {"Authorization": f"Basic {basic}"}}}
    return {}


def _given(**values: str | None) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def remote_file(protocol: str, info: Mapping[str, Any]) -> RemoteFile:
    """The remote description of a file, from fsspec's `info`."""
    size = info.get("size")
    size = None if size is None else int(size)
    if protocol == HUB:
        lfs, blob = info.get("lfs"), info.get("blob_id")
        digest = f"sha256:{lfs.sha256}" if lfs else f"git:{blob}" if blob else None
        return RemoteFile(size, digest, blob)
    tag = str(info.get("ETag") or info.get("etag") or "").strip('"') or None
    if protocol in S3 and tag is not None and _MD5.fullmatch(tag):
        # The ETag of an unencrypted object that was uploaded in one part is its MD5. Encrypted ones only look alike, so
        # `transfer` fetches the file twice if the digest differs, and accepts it if both downloads are equal.
        return RemoteFile(size, f"md5:{tag}", tag, sure=False)
    when = info.get("Last-Modified") or info.get("LastModified") or info.get("mtime") or info.get("created")
    return RemoteFile(size, tag=tag or (None if when is None else str(when)))


class UrlRanges:
    """Reads parts of one fsspec file (implements `gracetune.storage.transfer.RangeReader`)."""

    def __init__(self, fs: Any, name: str, protocol: str, remote: RemoteFile) -> None:
        self._fs, self._name, self._protocol, self._remote = fs, name, protocol, remote
        self._seeks: bool | None = None if protocol in WEB else True

    @property
    def can_seek(self) -> bool:
        """Whether the server supports range requests. For web servers a trial request finds out."""
        if self._seeks is None:
            self._seeks = (self._remote.size or 0) > 1 and self._try_range()
        return self._seeks

    def _try_range(self) -> bool:
        try:
            return len(self._web_range(1, 2)) == 1
        except ValueError:  # fsspec raises this if the server sent the whole file
            return False

    def read(self, start: int, end: int) -> bytes:
        if self._protocol in WEB:
            return self._web_range(start, end)
        # Without a cache: fsspec's default one reads more than requested.
        options = {"cache_type": "none"} if self._protocol == HUB else {}
        data: bytes = self._fs.cat_file(self._name, start=start, end=end, **options)
        return data

    def _web_range(self, start: int, end: int) -> bytes:
        size = self._remote.size
        with self._fs.open(self._name, "rb", cache_type="none", block_size=RANGE, size=size) as file:
            file.seek(start)
            data: bytes = file.read(end - start)
        return data

    def stream(self) -> Iterator[bytes]:
        options = {"block_size": 0} if self._protocol in WEB else {}
        with self._fs.open(self._name, "rb", **options) as file:
            while data := file.read(MIB):
                yield data

    def is_final(self, error: Exception) -> bool:
        return is_final(error)


def is_final(error: Exception) -> bool:
    """Whether the same request would always fail again."""
    if _is_denial(error) or _lacks_credentials(error):
        return True
    status = status_of(error)
    if status:
        return 400 <= status < 500 and status not in _RETRIED
    if isinstance(error, FileNotFoundError):
        cause = error.__cause__
        return cause is None or not isinstance(cause, Exception) or is_final(cause)
    return is_local_disk_error(error)


def _is_denial(error: Exception) -> bool:
    """Whether access is denied. gcsfs raises a plain OSError for status 403, with only its text to tell."""
    return isinstance(error, PermissionError) or (isinstance(error, OSError) and str(error).startswith("Forbidden: "))


def _lacks_credentials(error: Exception) -> bool:
    try:
        library = import_module("botocore.exceptions")
    except ImportError:  # not installed, so it cannot have raised the error
        return False
    return isinstance(
        error, (library.NoCredentialsError, library.PartialCredentialsError, library.CredentialRetrievalError)
    )


def status_of(error: BaseException) -> int:
    """The HTTP status of an error, or 0. Each library stores it in a different attribute."""
    values = vars(error)
    response = values.get("response")
    if isinstance(response, Mapping):  # botocore
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    found = values.get("status") or values.get("code") or getattr(response, "status_code", 0)  # gcsfs: code
    return int(found) if isinstance(found, int) or (isinstance(found, str) and found.isdecimal()) else 0


def words(error: BaseException) -> str:
    """The first line of a library's error message, without credentials."""
    return redact(f"{error}".strip().split("\n")[0] or type(error).__name__)


def explain(key: str, protocol: str, error: Exception) -> Problem:
    """Explain an error of the storage as a whole: it is unreachable, or denies access."""
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else None
    status = status_of(error) or (status_of(cause) if cause is not None else 0)
    reason = words(cause or error)
    if _lacks_credentials(cause or error):
        hint = "export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or storage: {anonymous: true} for a public bucket"
        return Problem(key, "no credentials", "credentials, or public data", hint)
    if _is_denial(error) or status in (401, 403):
        denial = f"{status}, {reason}" if status else reason
        return Problem(key, f"the storage denied access: {denial}", "permission to read it", _login(protocol))
    # fsspec also raises FileNotFoundError if the server does not answer.
    if status in (404, 410) or (isinstance(error, FileNotFoundError) and (cause is None or bool(status))):
        hint = "check the spelling of the address; private data also looks missing without credentials"
        return Problem(key, f"there is no data at this address: {reason}", "data", hint)
    hint = "check the address and the network, then start again: the download continues where it stopped"
    return Problem(key, f"the storage cannot be reached: {reason}", "storage that answers", hint)


def _login(protocol: str) -> str:
    if protocol in S3:
        return "keys may have expired: check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN"
    if protocol == HUB:
        return "hf auth login"
    login = "--set 'datasets[N].storage.user=…' --set 'datasets[N].storage.password=…'"
    return f"{login}, or a new address if its signature has expired"
