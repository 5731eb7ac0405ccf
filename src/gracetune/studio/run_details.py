"""Everything about one run that is not a curve: files, samples, warnings, and which actions are possible."""

from __future__ import annotations

import json
import os
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gracetune.storage.regular_files import read_small_file
from gracetune.studio.actions import allowed_actions
from gracetune.studio.log_lines import Fields, items, mapping, number, text, whole
from gracetune.studio.run_list import RunEntry, RunList
from gracetune.studio.run_rows import file_url

_MOST_FILES = 500
_LARGEST_REPORT = 32 << 20
_RESULTS = (".safetensors", ".html")
_PLAYED = ("video", "audio")
"""Kinds of samples with an element of their own in the page; all others are images."""


def details(runs: RunList, run: RunEntry, *, control: bool) -> dict[str, Any]:
    """The page of one run. Reads its log up to the end."""
    run.log.update()
    log, row = run.log, runs.row(run)
    start, end = log.last("RunStarted") or mapping(run.summary.first), log.last("RunEnded")
    removed = {text(name) for one in log.events("CheckpointWritten") for name in items(one.get("removed"))}
    checkpoints = [_checkpoint(run, one) for one in log.events("CheckpointWritten")]
    return {
        "row": row,
        "config": mapping(start.get("config")),
        "plan": _without_head(log.last("Planned")) or None,
        "versions": mapping(start.get("versions")),
        "adapter_format": text(start.get("adapter_format"), 40),
        "outputs": _outputs(run, end),
        "how_to_load": mapping(end.get("how_to_load")) or _from_report(run.path),
        "experts": list(dict.fromkeys(text(one.get("after"), 40) for one in log.events("StageSwitched", 100))),
        "checkpoints": [one for one in checkpoints if Path(one["path"]).name not in removed and one.pop("exists")],
        "validations": [_validation(run, one) for one in log.events("ValidationDone")],
        "warnings": [
            {"step": whole(one.get("step")), "time_s": number(one.get("time_s")), "message": text(one.get("message"))}
            for one in log.events("Warned")
        ],
        "self_checks": [_without_head(one) for one in log.events("SelfChecked")],
        "switches": [_without_head(one) for one in log.events("StageSwitched", 500)],
        "batch_changes": [_without_head(one) for one in log.events("EffectiveBatchChanged", 500)],
        "requests": [_without_head(one) for one in log.events("RequestServed")],
        "unreadable_lines": log.unreadable,
        "actions": allowed_actions(run.path, row["state"], control=control),
        "folder": str(run.path),
    }


def log_lines(run: RunEntry, most: int) -> dict[str, Any]:
    """The latest events as lines of text."""
    run.log.update()
    return {"source": "logs/events.jsonl", "lines": [_in_one_line(one) for one in run.log.latest(most)]}


def _without_head(event: Fields) -> Fields:
    return {name: value for name, value in event.items() if name not in ("v", "kind")}


def _checkpoint(run: RunEntry, event: Fields) -> dict[str, Any]:
    path = text(event.get("path"), 4096)
    facts = _facts(run.path / path) if _is_inside(path) else None
    return {
        "step": whole(event.get("step")),
        "path": path,
        "bytes": whole(event.get("size_bytes")),
        "exists": facts is not None and stat.S_ISDIR(facts.st_mode),
    }


def _outputs(run: RunEntry, end: Fields) -> list[dict[str, Any]]:
    """The files to download: the results that the run names, and other weights and reports in its folder."""
    named = [text(name, 4096) for name in items(end.get("outputs"))[:_MOST_FILES]]
    try:
        inside = sorted(one.name for one in run.path.iterdir() if one.suffix in _RESULTS)
    except OSError:
        inside = []
    found = []
    for name in dict.fromkeys([*named, *inside[:_MOST_FILES]]):
        path = run.path / name
        if _is_inside(name) and (facts := _facts(path)) is not None and stat.S_ISREG(facts.st_mode):
            found.append({"name": name, "url": file_url(run.id, name), "bytes": facts.st_size})
    return found


def _facts(path: Path) -> os.stat_result | None:
    """None if nothing is there. A log may name files that cannot exist. Links are not followed."""
    try:
        return path.lstat()
    except (OSError, ValueError):
        return None


def _is_inside(name: str) -> bool:
    """Whether a path of an event can be one inside the run's folder."""
    return "\0" not in name and not name.startswith("/") and ".." not in name.split("/")


def _from_report(run: Path) -> dict[str, str]:
    """How to load the result, as the run's report describes it."""
    try:
        report = mapping(json.loads(read_small_file(run / "report.json", _LARGEST_REPORT)))
    except (OSError, ValueError, RecursionError):
        return {}
    return {str(name): text(lines, 20_000) for name, lines in mapping(report.get("how_to_load")).items()}


def _validation(run: RunEntry, event: Fields) -> dict[str, Any]:
    return {
        "step": whole(event.get("step")),
        "time_s": number(event.get("time_s")),
        "requested": event.get("requested") is True,
        "duration_s": number(event.get("duration_s")),
        "files": [
            {
                "url": file_url(run.id, text(one.get("path"), 4096)),
                "kind": one.get("kind") if one.get("kind") in _PLAYED else "image",
                "prompt": text(one.get("prompt"), 20_000),
                "seed": whole(one.get("seed")),
            }
            for one in map(mapping, items(event.get("files"))[:_MOST_FILES])
        ],
    }


def _in_one_line(event: Fields) -> str:
    time_s = number(event.get("time_s"))
    fields = [
        f"{name}={_shown(value)}" for name, value in event.items() if name not in ("v", "kind", "time_s", "config")
    ]
    return " ".join([_clock(time_s), text(event.get("kind"), 40), *fields])[:4000]


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | dict | list) else str(value)


def _clock(time_s: float | None) -> str:
    try:
        return datetime.fromtimestamp(time_s or 0.0, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return "unknown time"
