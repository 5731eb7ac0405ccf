"""The pages of runs: the list, one run, its curves, log and files, comparisons; and the streams that keep them live.

A page that follows a run opens the stream first and then fetches the curves, so that it misses no step; it may get a
step twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from gracetune.studio.feeds import Feed, Message, stream
from gracetune.studio.log_lines import mapping
from gracetune.studio.machine_memory import MachineMemory
from gracetune.studio.replies import StudioError, integer, json_reply
from gracetune.studio.run_details import details, log_lines
from gracetune.studio.run_files import file_reply
from gracetune.studio.run_list import RunEntry
from gracetune.studio.run_memory import memory_page
from gracetune.studio.run_series import config_differences, series

if TYPE_CHECKING:
    from gracetune.studio.server import Studio

POINTS = 2000
MOST_COMPARED = 100
_POINTS_TOGETHER = 24_000
"""Points of all compared runs: a screen shows no more of them, however many runs there are."""
Value = TypeVar("Value")


def routes(studio: Studio) -> list[BaseRoute]:
    runs, machine = studio.runs, MachineMemory()

    async def listed(request: Request) -> Response:
        return json_reply({"runs": await anyio.to_thread.run_sync(runs.rows)})

    async def followed_list(request: Request) -> Response:
        return _streamed(studio, studio.feeds.of_list(), [])

    async def detailed(request: Request) -> Response:
        return await _in_thread(request, lambda run: details(runs, run, control=studio.control))

    async def curves(request: Request) -> Response:
        points = integer(request, "points", POINTS, 10, 4 * POINTS)
        return await _in_thread(request, lambda run: _series(run, points))

    async def followed(request: Request) -> Response:
        run = await anyio.to_thread.run_sync(runs.find, request.path_params["id"])
        row = await anyio.to_thread.run_sync(runs.row, run)
        return _streamed(studio, studio.feeds.of_run(run), [("status", row)])

    async def memory(request: Request) -> Response:
        return await _in_thread(request, lambda run: memory_page(run, machine, process=runs.process_of(run)))

    async def log(request: Request) -> Response:
        most = integer(request, "lines", 200, 1, POINTS)
        return await _in_thread(request, lambda run: log_lines(run, most))

    async def file(request: Request) -> Response:
        run = await anyio.to_thread.run_sync(runs.find, request.path_params["id"])
        return await file_reply(request, run.path, request.path_params["path"])

    async def compared(request: Request) -> Response:
        names = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 1 <= len(names) <= MOST_COMPARED:
            hint = "api/compare?run=ID&run=ID"
            raise StudioError(400, f"{len(names)} runs", f"1 to {MOST_COMPARED} runs", hint)
        points = min(integer(request, "points", POINTS // 2, 10, POINTS), _POINTS_TOGETHER // len(names))
        return json_reply(await anyio.to_thread.run_sync(lambda: _comparison(studio, names, points)))

    async def _in_thread(request: Request, make: Callable[[RunEntry], Value]) -> Response:
        name = request.path_params["id"]
        return json_reply(await anyio.to_thread.run_sync(lambda: make(runs.find(name))))

    return [
        Route("/api/runs", listed),
        Route("/api/runs/stream", followed_list),
        Route("/api/runs/{id}", detailed),
        Route("/api/runs/{id}/series", curves),
        Route("/api/runs/{id}/stream", followed),
        Route("/api/runs/{id}/memory", memory),
        Route("/api/runs/{id}/log", log),
        Route("/api/runs/{id}/files/{path:path}", file),
        Route("/api/compare", compared),
    ]


def _streamed(studio: Studio, feed: Feed, first: list[Message]) -> Response:
    studio.feeds.check_room()
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}  # the latter for nginx
    return StreamingResponse(stream(feed, first), media_type="text/event-stream", headers=headers)


def _series(run: RunEntry, points: int) -> dict[str, Any]:
    run.log.update()
    return series(run.log, points)


def _comparison(studio: Studio, names: list[str], points: int) -> dict[str, Any]:
    found = [studio.runs.find(name) for name in names]
    curves = {run.id: _series(run, points) for run in found}
    configs = {run.id: mapping(run.log.last("RunStarted").get("config")) for run in found}
    return {
        "runs": [studio.runs.row(run) for run in found],
        "series": curves,
        "differences": config_differences(configs),
    }
