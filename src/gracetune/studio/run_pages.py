"""The pages of runs: the list, one run, its series, log and files, comparisons; and the streams that keep them live."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gracetune.studio.replies import json_reply

if TYPE_CHECKING:
    from gracetune.studio.server import Studio


def routes(studio: Studio) -> list[BaseRoute]:
    async def runs(request: Request) -> Response:
        return json_reply({"runs": await anyio.to_thread.run_sync(studio.runs.rows)})

    return [Route("/api/runs", runs)]
