"""Files of a run for the browser: only regular files inside the run's folder, whole or in parts.

Files of a run are not trusted. Text and scripts are sent as plain text, a report is sandboxed, and what a browser does
not show is a download.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from gracetune.storage.regular_files import open_regular
from gracetune.studio.replies import StudioError

_CHUNK = 1 << 20
_SHOWN = {
    ".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp", ".gif": "image/gif",
    ".mp4": "video/mp4", ".webm": "video/webm", ".wav": "audio/wav", ".flac": "audio/flac", ".mp3": "audio/mpeg",
    ".ogg": "audio/ogg", ".html": "text/html; charset=utf-8",
    **dict.fromkeys((".txt", ".json", ".jsonl", ".yaml", ".yml", ".md", ".log", ".csv"), "text/plain; charset=utf-8"),
}  # fmt: skip
_SANDBOX = (
    "sandbox allow-popups; default-src 'none'; img-src 'self' data:; media-src 'self'; style-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


@dataclass(frozen=True)
class OpenFile:
    """An open file. The caller closes the descriptor."""

    descriptor: int
    name: str
    size: int
    modified_ns: int


def open_inside(folder: Path, inner: str) -> OpenFile:
    """Open a regular file whose real path is inside the folder's real path. Raises StudioError for any other.

    Hidden files are not sent: the folder may be a project with secrets, or hold the studio's own files.
    """
    missing = StudioError(404, "no such file in this run", "a file of the run", "reload the page")
    if "\0" in inner or len(inner) > 4096:
        raise missing
    try:
        root = folder.resolve(strict=True)
        path = (root / inner.lstrip("/")).resolve(strict=True)
        if not _may_be_sent(path, root):
            raise missing
        descriptor = open_regular(path)
    except (OSError, RuntimeError, UnicodeError):  # absent, a loop of links, a folder, a device, or not permitted
        raise missing from None
    # A part of the path may have been replaced by a link meanwhile: look where the open file is.
    found, opened = os.fstat(descriptor), Path(f"/proc/self/fd/{descriptor}").readlink()
    if not _may_be_sent(opened, root) or _is_secret(opened, found.st_mode):
        os.close(descriptor)
        raise missing
    return OpenFile(descriptor, path.name, found.st_size, found.st_mtime_ns)


def _may_be_sent(path: Path, root: Path) -> bool:
    """Whether a real path is inside the folder and no part of it below the folder is hidden."""
    return path.is_relative_to(root) and not any(part.startswith(".") for part in path.relative_to(root).parts)


def _is_secret(path: Path, mode: int) -> bool:
    """Whether this is a config that holds secrets: only its owner may read it, which is how runs mark them."""
    return path.suffix in (".yaml", ".yml") and not mode & 0o044


async def file_reply(request: Request, folder: Path, inner: str) -> Response:
    """The reply to a request for a file of a folder."""
    file = await anyio.to_thread.run_sync(open_inside, folder, inner)
    try:
        headers = _headers(file)
        if request.headers.get("if-none-match") == headers["etag"]:
            os.close(file.descriptor)
            return Response(status_code=304, headers=headers)
        begin, end, status = _part(request.headers.get("range"), request.headers.get("if-range"), headers["etag"], file)
    except StudioError:
        os.close(file.descriptor)
        raise
    if status == 206:
        headers["content-range"] = f"bytes {begin}-{end - 1}/{file.size}"
    headers["content-length"] = str(end - begin)
    return StreamingResponse(_chunks(file, begin, end, send=request.method != "HEAD"), status, headers)


def _headers(file: OpenFile) -> dict[str, str]:
    suffix = Path(file.name).suffix.lower()
    headers = {
        "content-type": _SHOWN.get(suffix, "application/octet-stream"),
        "accept-ranges": "bytes",
        "etag": f'"{file.size:x}-{file.modified_ns:x}"',
        "cache-control": "private, no-cache",
        "content-security-policy": _SANDBOX,
    }
    if suffix not in _SHOWN:
        name = quote(file.name.encode("utf-8", "surrogateescape"))
        headers["content-disposition"] = f"attachment; filename*=UTF-8''{name}"
    return headers


def _part(wanted: str | None, if_range: str | None, etag: str, file: OpenFile) -> tuple[int, int, int]:
    """First byte, end and status. A range that we do not understand is ignored, as HTTP allows."""
    found = _RANGE.fullmatch(wanted.strip()) if wanted else None
    if found is None or (if_range is not None and if_range != etag) or not (found[1] or found[2]):
        return 0, file.size, 200
    if not found[1]:
        begin, end = max(0, file.size - int(found[2])), file.size
    else:
        begin, end = int(found[1]), min(file.size, int(found[2]) + 1 if found[2] else file.size)
    if begin >= end:
        raise StudioError(416, f"{wanted[:60] if wanted else ''}", f"a part of {file.size} bytes", "bytes=0-")
    return begin, end, 206


async def _chunks(file: OpenFile, begin: int, end: int, *, send: bool) -> AsyncIterator[bytes]:
    try:
        while send and begin < end:
            chunk = await anyio.to_thread.run_sync(os.pread, file.descriptor, min(_CHUNK, end - begin), begin)
            if not chunk:  # it became shorter; the connection ends with fewer bytes than announced
                return
            begin += len(chunk)
            yield chunk
    finally:
        os.close(file.descriptor)
