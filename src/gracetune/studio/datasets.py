"""The data of a run: buckets, samples, dropped files, thumbnails and captions.

`gracetune data show` lists the samples in a child process; the list is kept until the run's config changes, for at most
ten minutes. Captions are read from their files for every request.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gracetune.config import load
from gracetune.config.dataset_config import Dataset
from gracetune.config.run_config import RunConfig
from gracetune.data.items import stem_of
from gracetune.errors import ConfigError
from gracetune.studio.caption_edits import CaptionEdits, CaptionFolder, why_not_editable
from gracetune.studio.commands import SlowWork, reject_errors
from gracetune.studio.replies import StudioError, integer, json_body, json_reply
from gracetune.studio.thumbnails import Thumbnails
from gracetune.telemetry.report.judged_losses import JudgedLosses, read_losses

if TYPE_CHECKING:
    from gracetune.studio.server import Studio

LISTING_LIMIT_S = 600.0
_FRESH_S = 600.0
_MOST_LISTINGS = 4
_MOST_ITEMS = 500
_PLAIN = re.compile(r"[\w-][\w.-]{0,80}", re.ASCII)


@dataclass(frozen=True)
class DatasetListing:
    """One dataset as `data show` lists it."""

    id: str
    """The id in URLs: the dataset's own, or a hash of it if that has other signs than letters, digits, - and _."""
    dataset: Dataset
    root: Path
    """The folder of its files; for a dataset of URLs, that of their copy."""
    shown: Mapping[str, Any]
    """The dataset in the JSON of `data show`."""
    items: Mapping[str, Mapping[str, Any]]
    """By key, in the order of their files."""

    @property
    def why_not_editable(self) -> str:
        return why_not_editable(self.dataset, self.root)

    @property
    def captions(self) -> CaptionFolder:
        return CaptionFolder(self.root, self.dataset.captions)

    def file(self, key: str) -> Path:
        """The media file of an item. Raises StudioError if a link leads out of the folder."""
        root = self.root.resolve()
        path = Path(root, self.item(key)["path"]).resolve()
        if not path.is_relative_to(root):
            raise StudioError(404, "a link out of the dataset", "a file in the dataset's folder", "remove the link")
        if not path.is_file():
            raise StudioError(404, f"{path.name}, which was removed", "a file of the dataset", "reload the page")
        return path

    def key_of_caption(self, file: str) -> str | None:
        """The key of the item with this caption file; None if it is no longer part of the dataset."""
        stem = stem_of(file)
        return next((key for key, item in self.items.items() if stem_of(item["path"]) == stem), None)

    def item(self, key: str) -> Mapping[str, Any]:
        if key not in self.items:
            raise StudioError(404, "no such item", "the key of an item in the list", "reload the list of items")
        return self.items[key]


@dataclass(frozen=True)
class RunListing:
    """All datasets of a run, and the sentences for the user."""

    datasets: Mapping[str, DatasetListing]
    notes: Sequence[str]
    stamp: tuple[int, int]
    """Time of change (ns) and size of the config that was listed."""
    made_s: float
    """By the monotonic clock."""


class RunData:
    """The data of runs. All methods block, some for as long as a command takes."""

    def __init__(self, studio: Studio) -> None:
        self._studio = studio
        self._commands = studio.commands
        self._mutex = threading.Lock()
        self._listings: OrderedDict[str, RunListing] = OrderedDict()
        self._making: dict[str, threading.Lock] = {}
        self.thumbnails = Thumbnails()
        self.edits = CaptionEdits(studio.folder / "captions")

    def overview(self, run_id: str, *, refresh: bool = False) -> dict[str, Any]:
        run = self._studio.runs.find(run_id)
        listing = self._listing(run_id, run.path, refresh=refresh)
        return {
            "datasets": [_overview(one) for one in listing.datasets.values()],
            "notes": list(listing.notes),
            "judged": read_losses(run.path) is not None,
        }

    def dataset(self, run_id: str, name: str) -> DatasetListing:
        listing = self._listing(run_id, self._studio.runs.find(run_id).path)
        if name not in listing.datasets:
            raise StudioError(404, "no such dataset", "the id of a dataset of the run", "GET api/runs/ID/data")
        return listing.datasets[name]

    def page(self, run_id: str, name: str, *, offset: int, limit: int, by_loss: bool) -> dict[str, Any]:
        """Some items of a dataset. `by_loss`: the highest loss after training first, items without a loss last."""
        dataset = self.dataset(run_id, name)
        judged = self.losses(run_id)
        keys = list(dataset.items)
        if by_loss:

            def loss(key: str) -> float:
                found = judged.losses.get((dataset.dataset.id, dataset.items[key]["path"]))
                return -found[1] if found is not None else float("inf")

            keys.sort(key=loss)
        return {
            "total": len(keys),
            "editable": not dataset.why_not_editable,
            "why": dataset.why_not_editable,
            "items": [self.item(run_id, dataset, key, judged) for key in keys[offset : offset + limit]],
        }

    def losses(self, run_id: str) -> JudgedLosses:
        return read_losses(self._studio.runs.find(run_id).path) or JudgedLosses()

    def item(self, run_id: str, dataset: DatasetListing, key: str, judged: JudgedLosses) -> dict[str, Any]:
        shown = dataset.item(key)
        sample = (dataset.dataset.id, shown["path"])
        before, after = judged.losses.get(sample, (None, None))
        has_image = dataset.dataset.dataset_type != "audio"
        return {
            "key": key,
            "file": shown["path"],
            "width": shown["width"],
            "height": shown["height"],
            "frames": shown["frames"],
            "bucket": shown["bucket"],
            **self._caption(dataset, shown),
            "thumbnail": f"api/runs/{run_id}/data/{dataset.id}/items/{key}/thumbnail" if has_image else None,
            "loss_before": before,
            "loss_after": after,
            "held_out": shown["held_out"],
            "notes": list(judged.findings.get(sample, ())),
        }

    def _caption(self, dataset: DatasetListing, shown: Mapping[str, Any]) -> dict[str, Any]:
        """The caption as its file has it; where it has no file of its own, as it is trained."""
        why = dataset.why_not_editable
        if not why:
            try:
                path = dataset.captions.file_of(shown["path"])
                text = dataset.captions.read(shown["path"])
                undo = self.edits.last(dataset.captions, shown["path"])
                file = str(path.relative_to(dataset.root.resolve()))
                return {"caption": text or "", "caption_file": file, "has_caption": text is not None,
                        "editable": True, "why": "", "undo": undo}  # fmt: skip
            except StudioError as error:
                why = f"{error.found}; {error.hint}"
        captions = shown["captions"]
        return {"caption": captions[0] if captions else "", "caption_file": None, "has_caption": bool(captions),
                "editable": False, "why": why, "undo": None}  # fmt: skip

    def editable(self, run_id: str, name: str) -> DatasetListing:
        dataset = self.dataset(run_id, name)
        if dataset.why_not_editable:
            raise StudioError(409, dataset.why_not_editable, "captions in text files of their own", "edit them there")
        return dataset

    # -- listing ------------------------------------------------------------------------------------------------------

    def _listing(self, run_id: str, run: Path, *, refresh: bool = False) -> RunListing:
        file = run / "config.yaml"
        try:
            found = file.stat()
        except OSError:
            raise StudioError(
                404, "no config.yaml in the run's folder", "a run that has begun", "wait until it has loaded its config"
            ) from None
        stamp = (found.st_mtime_ns, found.st_size)
        requested_s = time.monotonic()
        with self._mutex:
            making = self._making.setdefault(run_id, threading.Lock())
        with making:  # several tabs wait for one command
            with self._mutex:
                kept = self._listings.get(run_id)
            if kept is not None and kept.stamp == stamp:
                # A refresh takes only a listing that was made after this request, for another tab.
                is_fresh = requested_s - kept.made_s < (0 if refresh else _FRESH_S)
                if is_fresh:
                    return kept
            made = self._list(run, file, stamp)
            with self._mutex:
                self._listings[run_id] = made
                self._listings.move_to_end(run_id)
                while len(self._listings) > _MOST_LISTINGS:
                    self._listings.popitem(last=False)
            return made

    def _list(self, run: Path, file: Path, stamp: tuple[int, int]) -> RunListing:
        try:
            config = load(file, environment=self._studio.environment.without_memory_options()).config
        except ConfigError as error:
            raise StudioError.of(error, 409) from None
        folder = working_folder_of(run, config, self._studio.working_folder)
        answer = replace(self._commands, folder=folder).json(
            "data", "show", str(file), "--json", "--read-only", "--items",
            "--set", f"output_dir={json.dumps(str(run))}", timeout_s=LISTING_LIMIT_S,
        )  # fmt: skip
        reject_errors(answer)
        by_id = {dataset.id: dataset for dataset in config.datasets}
        held_out = {one["id"]: one for one in answer["held_out"]}
        found = [*answer["datasets"], *(one for name, one in held_out.items() if by_id[name].dataset_type == "eval")]
        listed = [
            _dataset_listing(by_id[one["id"]], one, held_out.get(one["id"], {}).get("items", ()), folder)
            for one in found
        ]
        return RunListing({one.id: one for one in listed}, answer["notes"], stamp, time.monotonic())


def working_folder_of(run: Path, config: RunConfig, otherwise: Path) -> Path:
    """The folder that a run was started in, against which the paths of its config are resolved.

    A relative output folder leads from there to the run. If it is absolute, the run's paths usually are.
    """
    output = Path(config.output_dir).expanduser()
    count = len(output.parts)
    if output.is_absolute() or not count or ".." in output.parts or run.parts[-count:] != output.parts:
        return otherwise
    return Path(*run.parts[:-count])


def _dataset_listing(
    dataset: Dataset, shown: Mapping[str, Any], held_out: Sequence[Mapping[str, Any]], folder: Path
) -> DatasetListing:
    is_eval = dataset.dataset_type == "eval"
    items = [{**one, "held_out": is_eval} for one in shown["items"]]
    if not is_eval:
        items += [{**one, "held_out": True} for one in held_out]
    items.sort(key=lambda one: one["path"])
    name = dataset.id if _PLAIN.fullmatch(dataset.id) else _hash(dataset.id)
    root = folder / Path(shown["path"]).expanduser()
    return DatasetListing(name, dataset, root, shown, {_hash(one["path"]): one for one in items})


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def _overview(one: DatasetListing) -> dict[str, Any]:
    shown = one.shown
    dropped = [
        {"file": file["path"], "reason": f"{group['reason']}: {file['detail']}" if file["detail"] else group["reason"]}
        for group in shown.get("dropped", ())
        for file in group["files"]
    ]
    dropped += [{"file": file["path"], "reason": file["reason"]} for file in shown.get("unreadable", ())]
    listed = sum(len(group["files"]) for group in shown.get("dropped", ()))
    left_out = sum(group["count"] for group in shown.get("dropped", ())) - listed
    more = [f"{left_out} more files were dropped; `gracetune data show` counts them by reason"] if left_out else []
    origins = [item["caption_origin"] for item in one.items.values()]
    return {
        "id": one.id,
        "name": one.dataset.id,
        "path": str(one.root),
        "media": one.dataset.dataset_type,
        "items": len(one.items),
        "held_out": sum(item["held_out"] for item in one.items.values()),
        "editable": not one.why_not_editable,
        "why": one.why_not_editable,
        "captions": {
            "count": sum(origin not in ("missing", "empty") for origin in origins),
            "missing": sum(origin in ("missing", "empty") for origin in origins),
        },
        "buckets": [
            {"name": bucket["name"], "width": bucket["width"], "height": bucket["height"], "frames": bucket["frames"],
             "items": bucket["samples"], "batches": bucket["batches"]}
            for bucket in shown.get("buckets", ())
        ],
        "dropped": dropped,
        "notes": [*shown.get("notes", ()), *more],
    }  # fmt: skip


# -- requests ---------------------------------------------------------------------------------------------------------


def routes(studio: Studio) -> list[Route]:
    data, slow = RunData(studio), SlowWork()

    async def overview(request: Request) -> Response:
        refresh = request.query_params.get("refresh") == "1"
        run = request.path_params["run"]
        return json_reply(await slow.run(lambda: data.overview(run, refresh=refresh)))

    async def items(request: Request) -> Response:
        sort = request.query_params.get("sort", "name")
        if sort not in ("name", "loss"):
            raise StudioError(400, f"sort={sort[:40]!r}", "name or loss", "sort=name")
        offset, limit = integer(request, "offset", 0, 0, 10**9), integer(request, "limit", 60, 1, _MOST_ITEMS)
        run, name = request.path_params["run"], request.path_params["dataset"]
        return json_reply(
            await slow.run(lambda: data.page(run, name, offset=offset, limit=limit, by_loss=sort == "loss"))
        )

    async def thumbnail(request: Request) -> Response:
        run, name, key = (request.path_params[part] for part in ("run", "dataset", "key"))
        jpeg = await slow.run(lambda: data.thumbnails.of(data.dataset(run, name).file(key)))
        return Response(jpeg, media_type="image/jpeg", headers={"cache-control": "private, max-age=60"})

    async def edit(request: Request) -> Response:
        run, name, key = (request.path_params[part] for part in ("run", "dataset", "key"))
        body = await json_body(request)
        text, was = body.get("text"), body.get("was", "")
        if not isinstance(text, str) or not isinstance(was, str | None):
            found = f"text of type {type(text).__name__}, was of type {type(was).__name__}"
            raise StudioError(400, found, "text, and what was shown before", '{"text": "a cat", "was": "a dog"}')

        def save() -> dict[str, Any]:
            dataset = data.editable(run, name)
            media = dataset.item(key)["path"]
            exists = dataset.captions.read(media) is not None
            undo = data.edits.save(dataset.captions, media, text, was if exists or was else None)
            return {"item": data.item(run, dataset, key, data.losses(run)), "undo": undo}

        return json_reply(await slow.run(save))

    async def undo(request: Request) -> Response:
        run, name = request.path_params["run"], request.path_params["dataset"]
        identifier = (await json_body(request)).get("undo")
        if not isinstance(identifier, str):
            found = f"undo of type {type(identifier).__name__}"
            raise StudioError(400, found, "the id that saving a caption returned", '{"undo": "..."}')

        def restore() -> dict[str, Any]:
            dataset = data.editable(run, name)
            key = dataset.key_of_caption(data.edits.undo(dataset.captions, identifier))
            return {"item": None if key is None else data.item(run, dataset, key, data.losses(run))}

        return json_reply(await slow.run(restore))

    base = "/api/runs/{run}/data"
    item = f"{base}/{{dataset}}/items/{{key}}"
    return [
        Route(base, overview),
        Route(f"{base}/{{dataset}}/items", items),
        Route(f"{item}/thumbnail", thumbnail),
        Route(f"{item}/caption", edit, methods=["PUT"]),
        Route(f"{base}/{{dataset}}/undo", undo, methods=["POST"]),
    ]
