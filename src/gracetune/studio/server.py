"""The studio's server: its pages, its address, and how it starts and stops."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from gracetune import __version__
from gracetune.config.environment import Environment
from gracetune.errors import GracetuneError
from gracetune.studio.access import Access, AccessRules
from gracetune.studio.commands import CommandRunner
from gracetune.studio.feeds import Feeds
from gracetune.studio.job_files import JobFiles
from gracetune.studio.job_queue import JobQueue
from gracetune.studio.replies import StudioError, error_reply, json_reply, os_error_reply
from gracetune.studio.run_list import RunList

STATIC = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".json": "application/json",
    ".svg": "image/svg+xml", ".png": "image/png", ".txt": "text/plain", ".md": "text/plain", ".map": "application/json",
}  # fmt: skip


@dataclass(frozen=True)
class Studio:
    """What all pages share."""

    root: Path
    """The folder whose runs are shown; its real path."""
    control: bool
    """Whether changes are allowed."""
    environment: Environment
    runs: RunList
    prefix: str = ""
    """As in `AccessRules`: the path below which a reverse proxy shows the studio."""
    machine: str = ""
    """The machine in one line."""
    started_s: float = field(default_factory=time.time)
    working_folder: Path = field(default_factory=Path.cwd)
    """Where the studio was started: relative paths in new configs are resolved against it."""
    feeds: Feeds = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "feeds", Feeds(self.runs))

    @property
    def folder(self) -> Path:
        """The studio's own files, of the queue and of captions that can be undone."""
        return self.root / ".studio"

    @cached_property
    def commands(self) -> CommandRunner:
        return CommandRunner(self.environment, self.working_folder)

    @cached_property
    def queue(self) -> JobQueue:
        return JobQueue(JobFiles(self.folder / "queue"), self.runs, self.environment, self.working_folder)


def routes(studio: Studio) -> list[BaseRoute]:
    """The routes of all pages."""
    # These modules name `Studio` in their signatures, so they are imported here and not above.
    from gracetune.studio import actions, datasets, form, job_queue, machine_pages, new_run, run_pages

    async def about(request: Request) -> Response:
        return json_reply(
            {
                "version": __version__,
                "root": str(studio.root),
                "control": studio.control,
                "started_s": studio.started_s,
                "working_folder": str(studio.working_folder),
                "machine": studio.machine,
                "prefix": studio.prefix,
            }
        )

    return [
        Route("/api/studio", about),
        *run_pages.routes(studio),
        *datasets.routes(studio),
        *form.routes(),
        *new_run.routes(studio),
        *job_queue.routes(studio.queue, control=studio.control),
        *machine_pages.routes(studio),
        *actions.routes(studio),
        Route("/{path:path}", _static),
    ]


def application(studio: Studio, rules: AccessRules) -> ASGIApp:
    """All pages behind the access rules. Errors become JSON replies."""
    app = Starlette(
        routes=routes(studio),
        exception_handlers={
            StudioError: _studio_error, GracetuneError: _own_error, OSError: _os_error, HTTPException: _http_error,
        },
    )  # fmt: skip
    return Access(app, rules)


async def _static(request: Request) -> Response:
    """A file of the pages; `index.html` for the folder itself."""
    name = request.path_params["path"] or "index.html"
    parts = name.split("/")
    file = STATIC.joinpath(*parts)
    is_inside = len(name) < 200 and all(part and part not in (".", "..") and "\0" not in part for part in parts)
    if not is_inside or not name.isascii() or file.suffix not in _TYPES or not file.is_file():
        raise StudioError(404, "no such page", "a page of the studio", "open the studio's first page")
    return FileResponse(file, media_type=_TYPES[file.suffix], headers={"cache-control": "no-cache"})


async def _studio_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, StudioError)
    return error_reply(error)


async def _own_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GracetuneError)
    return error_reply(StudioError.of(error))


async def _os_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OSError)
    return os_error_reply(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_reply(
        StudioError(error.status_code, error.detail, "a request of the studio's pages", "see docs/studio.md")
    )


@dataclass(frozen=True)
class ListenAddress:
    """Where the server listens."""

    host: str = "127.0.0.1"
    port: int = 0
    certificate: Path | None = None
    key: Path | None = None

    @property
    def scheme(self) -> str:
        return "https" if self.certificate is not None else "http"

    def link(self, prefix: str, token: str) -> str:
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        host = f"[{shown}]" if ":" in shown else shown
        return f"{self.scheme}://{host}:{self.port}{prefix}/?token={token}"


def listen(address: ListenAddress) -> socket.socket:
    """The listening socket. Raises OSError, for example if the port is in use."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((address.host, address.port))
        listening.listen(128)
    except OSError:
        listening.close()
        raise
    os.set_inheritable(listening.fileno(), False)
    return listening


class StudioServer(uvicorn.Server):
    """A server that ends its streams when it stops: browsers keep them open for ever.

    Of `address` it uses only certificate and key: give `serve` the socket that `listen` returned.
    """

    def __init__(self, studio: Studio, rules: AccessRules, address: ListenAddress) -> None:
        super().__init__(
            uvicorn.Config(
                application(studio, rules),
                log_level="warning", access_log=False, lifespan="off", proxy_headers=False, server_header=False,
                ws="none", http="h11", loop="asyncio", timeout_graceful_shutdown=2, limit_concurrency=256,
                ssl_certfile=address.certificate, ssl_keyfile=address.key,
            )
        )  # fmt: skip
        self._studio = studio

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._studio.feeds.close()
        self._studio.commands.close()
        await super().shutdown(sockets)
