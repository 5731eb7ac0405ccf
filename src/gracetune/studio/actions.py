"""What a page may do to a run: sample, save, stop, resume. The same request files as the command line's are used."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gracetune.config import load
from gracetune.studio.replies import StudioError, json_reply
from gracetune.train.run_requests import REQUESTS, RequestName, RequestSource, create

if TYPE_CHECKING:
    from gracetune.studio.server import Studio

_BUTTONS: dict[str, RequestName] = {"sample": "validate", "save": "save", "stop": "stop"}
"""Action of the pages -> request to the run."""
_CAN_RESUME = ("stopped", "failed", "stale")


def allowed_actions(run: Path, state: str, *, control: bool) -> dict[str, dict[str, Any]]:
    """For each action whether it is possible now, and if not, why."""
    whys = dict.fromkeys(_BUTTONS, "" if state in ("running", "preparing") else "no run is active here")
    whys["resume"] = "" if state in _CAN_RESUME else f"the run is {state}"
    if not whys["resume"] and not (run / "config.yaml").is_file():
        whys["resume"] = "the run's config.yaml was removed"
    if not control:
        whys = dict.fromkeys(whys, "the studio only shows; start it with --control")
    return {name: {"allowed": not why, "why": why} for name, why in whys.items()}


def routes(studio: Studio) -> list[BaseRoute]:
    async def act(request: Request) -> Response:
        run = studio.runs.find(request.path_params["id"])
        action = request.path_params["action"]
        state = await anyio.to_thread.run_sync(studio.runs.state, run)
        known = allowed_actions(run.path, state, control=studio.control)
        if action not in known:
            raise StudioError(404, f"the action {action[:40]!r}", ", ".join(known), "use one of them")
        if not known[action]["allowed"]:
            raise StudioError(409, known[action]["why"], "a run that can do this", "reload the page")
        if action == "resume":
            return json_reply({"message": await anyio.to_thread.run_sync(_resume, studio, run.path)})
        wanted = REQUESTS[_BUTTONS[action]]
        await anyio.to_thread.run_sync(create, run.path, wanted, RequestSource.STUDIO)
        return json_reply({"message": f"requested: {wanted.promise}"})

    return [Route("/api/runs/{id}/actions/{action}", act, methods=["POST"])]


def _resume(studio: Studio, run: Path) -> str:
    """Put the run's own config into the queue. It resumes from the last checkpoint."""
    file = run / "config.yaml"
    output = load(file, environment=studio.environment).config.output_dir
    # A run folder that was moved or copied has a config that names another folder.
    if Path(output).expanduser().resolve() != run:
        hint = f"gracetune train {shlex.quote(str(file))} --set output_dir={shlex.quote(str(run))}"
        raise StudioError(409, f"a config that writes to {output}", f"output_dir: {run}", hint)
    added = studio.queue.add(file)
    return f"{added['name']} is in the queue and resumes from its last checkpoint"
