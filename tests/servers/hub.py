"""A hub: the routes huggingface_hub uses, with repositories kept in memory, and faults on demand.

Files of 100 bytes and more are stored as LFS objects, as the hub does with large ones, and are redirected to a second
server, as the hub redirects to its content network. Every request is written down.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

LFS_FROM = 100
TOKEN = "hf_testtokenoftheowner00"
_TYPES = {"models": "model", "datasets": "dataset"}


@dataclass
class HubRepo:
    name: str
    kind: str
    files: dict[str, bytes] = field(default_factory=dict)
    private: bool = False
    gated: bool = False
    revisions: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Commits and tags of their own; `main` is `files`."""
    commits: list[str] = field(default_factory=list)
    """Messages of what was pushed to it."""

    @property
    def sha(self) -> str:
        text = json.dumps({path: hashlib.sha256(data).hexdigest() for path, data in sorted(self.files.items())})
        return hashlib.sha1(text.encode()).hexdigest()

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision in ("main", self.sha):
            return self.sha, self.files
        found = self.revisions.get(revision)
        if found is not None:
            return hashlib.sha1(revision.encode()).hexdigest(), found
        for name, files in self.revisions.items():
            if hashlib.sha1(name.encode()).hexdigest() == revision:
                return revision, files
        return None


@dataclass
class Faults:
    """What goes wrong, how often. Each fault is used up."""

    break_after: list[int] = field(default_factory=list)
    """The next answers with content are cut off after so many bytes."""
    corrupt: int = 0
    """So many answers with content have a wrong byte."""
    statuses: list[int] = field(default_factory=list)
    """The next requests for content are answered with these."""
    claimed_sizes: dict[str, int] = field(default_factory=dict)
    """Paths whose listed size is another one."""
    delay: float = 0.0
    """Seconds before each 64 KiB of content."""
    reject_uploads: int = 0
    """The status every upload is answered with."""


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    range: str | None
    authorization: str | None
    sent: int = 0


class HubServer:
    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], HubRepo] = {}
        self.faults = Faults()
        self.requests: list[Request] = []
        self.objects: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.connections: list[socket.socket] = []
        self._lock = threading.Lock()
        self._server = _server(self, _Hub)
        self._content = _server(self, _Content)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def content_url(self) -> str:
        return f"http://127.0.0.1:{self._content.server_port}"

    def dataset(self, name: str, files: Mapping[str, bytes], **options: Any) -> HubRepo:
        return self._add(name, "dataset", files, options)

    def model(self, name: str, files: Mapping[str, bytes], **options: Any) -> HubRepo:
        return self._add(name, "model", files, options)

    def _add(self, name: str, kind: str, files: Mapping[str, bytes], options: dict[str, Any]) -> HubRepo:
        repo = HubRepo(name, kind, dict(files), **options)
        self.repos[kind, name] = repo
        return repo

    def note(self, request: Request) -> None:
        with self._lock:
            self.requests.append(request)

    @property
    def sent(self) -> int:
        """Bytes of content."""
        return sum(request.sent for request in self.requests)

    def take(self, faults: list[Any]) -> Any:
        with self._lock:
            return faults.pop(0) if faults else None

    def take_corrupt(self) -> bool:
        with self._lock:
            self.faults.corrupt -= 1
            return self.faults.corrupt >= 0

    def close(self) -> None:
        """No connection outlives it."""
        for server in (self._server, self._content):
            server.shutdown()
            server.server_close()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def hub_server() -> Iterator[HubServer]:
    server = HubServer()
    try:
        yield server
    finally:
        server.close()


def _server(hub: HubServer, handler: type[_Handler]) -> ThreadingHTTPServer:
    made = type("Bound", (handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), made)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms for the client to confirm its headers
    hub: HubServer

    def setup(self) -> None:
        super().setup()
        self.hub.connections.append(self.connection)

    def log_message(self, *_: Any) -> None: ...

    def note(self, sent: int = 0) -> None:
        self.hub.note(
            Request(self.command, self.path, self.headers.get("Range"), self.headers.get("Authorization"), sent)
        )

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, data: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def answer_json(self, value: Any, headers: Mapping[str, str] | None = None) -> None:
        self.note()
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def reject(self, status: int, code: str, message: str = "") -> None:
        self.note()
        headers = {"X-Error-Code": code, "X-Error-Message": message or code, "Content-Type": "application/json"}
        self.answer(status, json.dumps({"error": message or code}).encode(), headers)

    def content(self, data: bytes, headers: Mapping[str, str]) -> None:
        """With ranges, and with the requested faults."""
        status = self.hub.take(self.hub.faults.statuses)
        if status is not None:
            self.note()
            self.answer(status, b"", headers)
            return
        start, end, code = 0, len(data), 200
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        extra: dict[str, str] = {"Accept-Ranges": "bytes"}
        if found:
            start, end, code = int(found[1]), min(len(data), int(found[2] or len(data) - 1) + 1), 206
            extra["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        chunk = bytearray(data[start:end])
        if chunk and self.hub.take_corrupt():
            chunk[len(chunk) // 2] ^= 0xFF
        self.send_response(code)
        for name, value in {**headers, **extra, "Content-Length": str(len(chunk))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            self.note()
            return
        stop = self.hub.take(self.hub.faults.break_after)
        sent = len(chunk) if stop is None else min(stop, len(chunk))
        for at in range(0, sent, 1 << 16):
            if self.hub.faults.delay:
                time.sleep(self.hub.faults.delay)
            self.wfile.write(chunk[at : min(sent, at + (1 << 16))])
        self.note(sent)
        if stop is not None:
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()


class _Content(_Handler):
    """The content network: objects by their digest, for clients with a signed address."""

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        data = self.hub.objects.get(address.path.strip("/"))
        if data is None or "signature" not in parse_qs(address.query):
            self.reject(403, "", "no valid signature")
            return
        self.content(data, {"ETag": f'"{address.path.strip("/")}"'})

    do_HEAD = do_GET  # noqa: N815 - http.server looks for this name


class _Hub(_Handler):
    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path == "/api/whoami-v2":
            known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            self.answer_json({"name": "owner", "type": "user"}) if known else self.reject(401, "", "Invalid token")
            return
        found = re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/revision/(.+?))?", path)
        tree = re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?", path)
        file = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if tree:
            self._tree(_TYPES[tree[1]], tree[2], tree[3], tree[4] or "")
        elif found:
            self._info(_TYPES[found[1]], found[2], found[3] or "main")
        elif file:
            self._file("dataset" if file[1] else "model", file[2], file[3], file[4])
        else:
            self.reject(404, "", f"no such route {path}")

    do_HEAD = do_GET  # noqa: N815 - http.server looks for this name

    def do_POST(self) -> None:
        path, data = unquote(urlsplit(self.path).path), self.body()
        paths = re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)/paths-info/([^/]+)", path)
        if paths:
            self._paths(_TYPES[paths[1]], paths[2], paths[3], data)
        elif self.hub.faults.reject_uploads:
            self.reject(self.hub.faults.reject_uploads, "", "uploads are refused")
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.reject(401, "", "Invalid credentials in Authorization header")
        elif path == "/api/validate-yaml":
            self.answer_json({"warnings": [], "errors": []})
        elif path == "/api/repos/create":
            self._create(json.loads(data))
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/(.+)", path):
            self._preupload(found[1], json.loads(data))
        elif found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            self._batch(json.loads(data))
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/(.+)", path):
            self._commit(found[1], data)
        else:
            self.reject(404, "", f"no such route {path}")

    def do_PUT(self) -> None:
        data = self.body()
        if self.hub.faults.reject_uploads:
            self.reject(self.hub.faults.reject_uploads, "", "uploads are refused")
            return
        self.hub.objects[urlsplit(self.path).path.rpartition("/")[2]] = data
        self.note()
        self.answer(200)

    # -- reading ------------------------------------------------------------------------------------------------------

    def _repo(self, kind: str, name: str) -> HubRepo | None:
        repo = self.hub.repos.get((kind, name))
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo is None or (repo.private and not known):
            # The hub does not say which of the two it is.
            self.reject(404 if known else 401, "RepoNotFound", "Repository not found")
            return None
        if repo.gated and not known:
            self.reject(401, "GatedRepo", "Access to this repository is restricted")
            return None
        return repo

    def _files(self, kind: str, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        repo = self._repo(kind, name)
        if repo is None:
            return None
        found = repo.at(revision)
        if found is None:
            self.reject(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return found

    def _info(self, kind: str, name: str, revision: str) -> None:
        found = self._files(kind, name, revision)
        if found is not None:
            sha, files = found
            siblings = [{"rfilename": path} for path in files]
            self.answer_json({"id": name, "sha": sha, "siblings": siblings, "private": False, "tags": []})

    def _tree(self, kind: str, name: str, revision: str, folder: str) -> None:
        found = self._files(kind, name, revision)
        if found is None:
            return
        inside = {path: data for path, data in found[1].items() if not folder or path.startswith(f"{folder}/")}
        if folder and not inside:
            self.reject(404, "EntryNotFound", f"{folder} does not exist")
            return
        query = parse_qs(urlsplit(self.path).query)
        entries = [self._entry(path, data) for path, data in sorted(inside.items())]
        at = int(query.get("cursor", ["0"])[0])
        page = entries[at : at + 1000]
        more = {}
        if at + 1000 < len(entries):
            location = f"{self.hub.url}{quote(urlsplit(self.path).path)}?recursive=True&cursor={at + 1000}"
            more["Link"] = f'<{location}>; rel="next"'
        self.answer_json(page, more)

    def _entry(self, path: str, data: bytes) -> dict[str, Any]:
        size = self.hub.faults.claimed_sizes.get(path, len(data))
        entry: dict[str, Any] = {"type": "file", "path": path, "size": size, "oid": _git_id(data)}
        if len(data) >= LFS_FROM or size != len(data):
            digest = hashlib.sha256(data).hexdigest()
            self.hub.objects[digest] = data
            entry |= {"lfs": {"oid": digest, "size": size, "pointerSize": 130}}
        return entry

    def _paths(self, kind: str, name: str, revision: str, data: bytes) -> None:
        found = self._files(kind, name, revision)
        if found is not None:
            requested = [unquote(one) for one in parse_qs(data.decode()).get("paths", [])] or json.loads(data)["paths"]
            self.answer_json([self._entry(path, found[1][path]) for path in requested if path in found[1]])

    def _file(self, kind: str, name: str, revision: str, path: str) -> None:
        found = self._files(kind, name, revision)
        if found is None:
            return
        sha, files = found
        if path not in files:
            self.reject(404, "EntryNotFound", f"{path} does not exist")
            return
        data = files[path]
        headers = {"X-Repo-Commit": sha}
        if len(data) < LFS_FROM and path not in self.hub.faults.claimed_sizes:
            self.content(data, {**headers, "ETag": f'"{_git_id(data)}"'})
            return
        digest = self._entry(path, data)["lfs"]["oid"]
        size = self.hub.faults.claimed_sizes.get(path, len(data))
        self.note()
        self.answer(302, b"", {
            **headers, "X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(size),
            "Location": f"{self.hub.content_url}/{digest}?signature=secret-of-the-network",
        })  # fmt: skip

    # -- writing ------------------------------------------------------------------------------------------------------

    def _create(self, wanted: Mapping[str, Any]) -> None:
        owner = wanted.get("organization") or "owner"
        name = f"{owner}/{wanted['name']}"
        if ("model", name) in self.hub.repos:
            self.note()
            self.answer(409, json.dumps({"url": f"{self.hub.url}/{name}"}).encode())
            return
        self.hub.created.append(dict(wanted))
        self.hub.model(name, {}, private=wanted.get("visibility") == "private")
        self.answer_json({"url": f"{self.hub.url}/{name}"})

    def _preupload(self, name: str, wanted: Mapping[str, Any]) -> None:
        if ("model", name) not in self.hub.repos:
            self.reject(404, "RepoNotFound")
            return
        modes = [
            {"path": one["path"], "uploadMode": "lfs" if one["size"] >= LFS_FROM else "regular", "shouldIgnore": False}
            for one in wanted["files"]
        ]
        self.answer_json({"files": modes})

    def _batch(self, wanted: Mapping[str, Any]) -> None:
        objects: list[dict[str, Any]] = []
        for one in wanted["objects"]:
            entry = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in self.hub.objects:
                entry["actions"] = {"upload": {"href": f"{self.hub.url}/objects/{one['oid']}", "header": {}}}
            objects.append(entry)
        self.answer_json({"transfer": "basic", "objects": objects})

    def _commit(self, name: str, data: bytes) -> None:
        repo = self.hub.repos["model", name]
        for line in data.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                repo.commits.append(value["summary"])
            elif item["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                repo.files[value["path"]] = self.hub.objects[value["oid"]]
        self.answer_json({"commitUrl": f"{self.hub.url}/{name}/commit/{repo.sha}", "commitOid": repo.sha})


def _git_id(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
