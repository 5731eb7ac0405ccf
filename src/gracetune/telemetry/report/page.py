"""report.html: one self-contained page. It loads nothing from elsewhere, and every text in it is escaped."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gracetune.telemetry import number_format
from gracetune.telemetry.curves import Series, evenly_spaced_indices, moving_average
from gracetune.telemetry.events import MemorySampled
from gracetune.telemetry.report.plots import TABLE_ROWS, Plot, figure
from gracetune.telemetry.report.run_history import RunHistory, loss_facts, moment
from gracetune.telemetry.report.sample_images import SampleCell, SampleGrid, link_to, thumbnail
from gracetune.telemetry.report.sections import ReportSection
from gracetune.telemetry.report.style import STYLE
from gracetune.telemetry.schema import plain

# The page can load nothing, even if escaping failed and a text held markup.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_MEMORY_UNITS = ("_bytes",)


def page(
    history: RunHistory,
    *,
    images: SampleGrid,
    how_to_load: Mapping[str, str],
    outputs: Sequence[str],
    folder: Path,
    added: Iterable[ReportSection] = (),
) -> str:
    name = history.start.run or "a run without a name"
    sections = [
        ("Samples through time", _samples(images)),
        ("How to load the result", _loading(how_to_load, outputs, folder)),
        *((section.title, _added(section, folder)) for section in added),
        ("Loss", _plots(_loss_plots(history), 0) + _held_out(history)),
        ("Speed", _plots(_speed_plots(history), 100) + _preparation(history)),
        ("Learning rate and batch", _plots(_rate_plots(history), 200)),
        ("Memory", _memory(history)),
        ("Memory plan", _plan(history)),
        ("Transitions", _transitions(history)),
        ("Prefetch and cache statistics", _counters(history)),
        ("Self-check", _self_checks(history)),
        ("Checkpoints", _checkpoints(history)),
        ("Warnings", _warnings(history)),
        ("Versions", _mapping(history.start.versions, "package", "version")),
        ("Configuration", _configuration(history.start.config)),
    ]
    body = "".join(f"<section><h2>{_text(title)}</h2>{content}</section>" for title, content in sections if content)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_text(_POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(name)} · gracetune</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n"
        f'<a class="skip" href="#content">To the content</a>\n<header>{_head(history, name)}</header>\n'
        f'<main id="content">{body}</main>\n<footer><p>{_text(_source(history))}</p></footer>\n</body>\n</html>\n'
    )


# -- the top ----------------------------------------------------------------------------------------------------------


def _head(history: RunHistory, name: str) -> str:
    start = history.start
    about = " · ".join(part for part in (start.family, start.adapter, start.model, start.machine) if part)
    outcome = {"unknown": "No end"}.get(history.outcome, history.outcome.capitalize())
    reason = f": {history.reason}" if history.reason else ""
    return (
        f'<h1>{_text(name)}</h1><p class="note">{_text(about)}</p>'
        f'<p class="outcome">{_text(outcome + reason)}</p><dl class="tiles">{_tiles(history)}</dl>'
    )


def _tiles(history: RunHistory) -> str:
    total = "" if history.start.total_steps is None else f" of {history.start.total_steps:,}"
    share = history.steps.data_wait_share
    tiles = [("Steps", f"{history.step:,}{total}")]
    last = history.steps.last
    if last is not None:
        tiles += [("Examples", f"{last.samples:,}"), ("Epochs", f"{last.epoch + 1:,}")]
    for expert in history.experts:
        smooth = loss_facts(history.steps.losses(expert))["last_smoothed"]
        label = f"Loss, smoothed{f' ({expert})' if expert else ''}"
        tiles.append((label, number_format.UNKNOWN if smooth is None else number_format.number(smooth)))
    tiles += [
        ("Pace", number_format.pace(history.seconds_per_step) if history.seconds_per_step else number_format.UNKNOWN)
    ]
    tiles += [] if share is None else [("Waiting for data", f"{share:.1%}")]
    tiles += [(f"Peak, {tier}", number_format.size(owners["total"])) for tier, owners in history.memory.peaks.items()]
    tiles += [("Time", number_format.duration(history.active_s)), ("Starts", f"{len(history.starts)}")]
    return "".join(f"<div><dt>{_text(label)}</dt><dd>{_text(value)}</dd></div>" for label, value in tiles)


def _source(history: RunHistory) -> str:
    began, ended = moment(history.began_s), moment(history.ended_s)
    lines = f"Made from the run's event log. The run began at {began}; the last event is from {ended}."
    if history.unreadable:
        numbers = ", ".join(f"{number} ({why[:60]})" for number, why in history.unreadable[:5])
        lines += f" {len(history.unreadable)} lines of the log could not be read: {numbers}."
    return lines


# -- plots ------------------------------------------------------------------------------------------------------------


def _plots(plots: Iterable[Plot], first_id: int) -> str:
    figures = "".join(figure(plot, first_id + number) for number, plot in enumerate(plots))
    return f'<div class="plots">{figures}</div>' if figures else ""


def _loss_plots(history: RunHistory) -> list[Plot]:
    series = []
    for expert in history.experts:
        points, name = history.steps.losses(expert), expert or "loss"
        series += [Series(f"{name}, each", points, faint=True), Series(name, moving_average(points))]
    markers = [(event.step, f"{event.before or 'start'} to {event.after}") for event in history.switches]
    markers += [(start.resumed_step, "resumed") for start in history.starts if start.resumed_step is not None]
    missing = sum(int(loss_facts(history.steps.losses(expert))["not_finite"] or 0) for expert in history.experts)
    note = f"{missing} losses are non-finite (NaN or infinite)." if missing else ""
    held_out = [
        Series(expert or "held out", tuple((one.step, one.mean) for one in history.held_out if one.stage == expert))
        for expert in dict.fromkeys(one.stage for one in history.held_out)
    ]
    return [
        Plot("Training loss; the heavy line is smoothed", tuple(series), markers=tuple(markers), note=note),
        Plot("Held-out loss at fixed noise levels", tuple(held_out)),
    ]


def _speed_plots(history: RunHistory) -> list[Plot]:
    def milliseconds(value: float) -> str:
        return number_format.duration(value / 1000) if value else "0"

    return [
        Plot(
            "Step time",
            (
                Series("step", history.steps.step_ms),
                Series("of which waiting for data", history.steps.data_wait_ms),
            ),
            unit=milliseconds,
        )
    ]


def _rate_plots(history: RunHistory) -> list[Plot]:
    rates = tuple(Series(group, history.steps.rates(group)) for group in history.steps.rate_groups)
    norms = Series("norm", history.steps.norms)
    plots = [Plot("Learning rate", rates), Plot("Gradient norm before clipping", (norms,))]
    if len({batch for _, batch in history.batches}) > 1:
        plots.append(Plot("Effective batch, all processes", (Series("samples", history.batches),), stairs=True))
    return plots


def _memory(history: RunHistory) -> str:
    plots = []
    for tier, owners in history.memory.peaks.items():
        series = tuple(Series(owner, _held(history.kept_memory, tier, owner)) for owner in owners if owner != "total")
        capacity = history.kept_memory[-1].capacity_bytes.get(tier)
        note = "" if capacity is None else f"The tier holds {number_format.size(capacity)}."
        plots.append(
            Plot(
                f"{tier}: memory in use, by owner", series, unit=number_format.size, base=1024, stacked=True, note=note
            )
        )
    reclaimed = tuple((one.step, f"{one.extent} reclamation") for one in history.reclamations)
    plots.append(Plot("Memory stage", (Series("memory stage", history.memory_stages),), stairs=True, markers=reclaimed))
    ahead = Series("batches", history.look_ahead_depths)
    plots.append(Plot("Batches brought to the GPU ahead of their step", (ahead,), stairs=True))
    rows = [
        (tier, owner, number_format.size(most))
        for tier, owners in history.memory.peaks.items()
        for owner, most in owners.items()
    ]
    return _plots(plots, 300) + _table("Peak memory by owner", ("tier", "owner", "peak"), rows)


def _held(samples: Sequence[MemorySampled], tier: str, owner: str) -> tuple[tuple[float, float], ...]:
    return tuple((one.step, float(one.used_bytes.get(tier, {}).get(owner, 0))) for one in samples)


def _plan(history: RunHistory) -> str:
    """What was planned before the run: each kind of memory, its largest consumers, and what differs from the config."""
    plan = history.plan
    if plan is None:
        return ""
    if plan.mismatch:
        return f"<p>{_text(plan.mismatch)}</p>"

    def size(value: int | None) -> str:
        return number_format.UNKNOWN if value is None else number_format.size(value)

    tiers = [(one.label, size(one.peak_bytes), size(one.budget_bytes), one.why) for one in plan.tiers]
    labels = {one.name: one.label for one in plan.tiers}
    largest = sorted(plan.lines, key=lambda line: -line.bytes)
    lines = [
        (one.owner, labels.get(one.tier, one.tier), size(one.bytes), ", ".join(one.phases), one.why) for one in largest
    ]
    changes = [(one.key, one.before, one.after, size(one.saves_bytes), one.why) for one in plan.changes]
    return (
        f"<p>{_text(f'{plan.verdict}: {plan.summary}')}</p>"
        + _table("Kinds of memory", ("memory", "planned peak", "usable", "reason"), tiers)
        + _table("Consumers", ("owner", "memory", "size", "phases", "reason"), lines)
        + _table("Differences from the config", ("key", "before", "after", "saves", "reason"), changes)
    )


# -- tables -----------------------------------------------------------------------------------------------------------


def _transitions(history: RunHistory) -> str:
    def size(value: int | None) -> str:
        return number_format.UNKNOWN if value is None else number_format.size(value)

    head = ("step", "before", "after", "reason")
    experts = [(f"{one.step:,}", one.before or "start", one.after, one.reason) for one in history.switches]
    batches = [
        (f"{one.step:,}", "start" if one.before is None else f"{one.before:,}", f"{one.after:,}", one.reason)
        for one in history.batch_changes
    ]
    memory = [(f"{one.step:,}", str(one.before), str(one.after), one.reason) for one in history.memory_changes]
    arena = [
        (f"{one.step:,}", size(one.before_bytes), size(one.after_bytes), one.reason) for one in history.arena_changes
    ]
    reclaimed = [
        (f"{one.step:,}", one.extent, size(one.released_bytes), size(one.demoted_bytes),
         number_format.duration(one.duration_ms / 1000), one.reason)
        for one in history.reclamations
    ]  # fmt: skip
    depths = [(f"{one.step:,}", str(one.before), str(one.after), one.reason) for one in history.look_ahead]
    requests = [(f"{one.step:,}", one.request, one.source) for one in history.requests]
    reclaimed_head = ("step", "extent", "GPU memory returned", "moved to main memory", "training paused", "reason")
    return "".join(
        (
            _table("Experts", head, experts),
            _table("Effective batch", head, batches),
            _table("Memory stage", head, memory),
            _table("Overflow arena", head, arena),
            _table("Reclamations", reclaimed_head, reclaimed),
            _table("Batches brought to the GPU ahead of their step", head, depths),
            _table("Requests to the run", ("step", "request", "source"), requests),
        )
    )


def _preparation(history: RunHistory) -> str:
    """Bars of the last process: where its time went before it trained."""
    parts = {name: value for name, value in history.start.preparation_s.items() if math.isfinite(value) and value >= 0}
    total, longest = sum(parts.values()), max(parts.values(), default=0.0)
    if not longest:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{_text(name)}</th><td class="end">{_text(number_format.duration(value))}</td>'
        f'<td class="share"><span class="bar" style="width: {100 * value / longest:.1f}%"></span></td></tr>'
        for name, value in parts.items()
    )
    caption = f"Before training: {number_format.duration(total)}"
    if len(history.starts) > 1:
        caption += f" (the last of {len(history.starts)} starts)"
    table = f'<table class="bars"><caption>{_text(caption)}</caption><tbody>{rows}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _held_out(history: RunHistory) -> str:
    rows = [
        (f"{one.step:,}", one.stage, level, number_format.number(loss))
        for one in history.held_out
        for level, loss in one.losses.items()
    ]
    return _table("Held-out loss by noise level", ("step", "expert", "noise level", "loss"), rows)


def _self_checks(history: RunHistory) -> str:
    rows = []
    for one in history.self_checks:
        what = one.file or f"after the first steps, {one.layers:,} layers"
        found = f"{len(one.idle)} layers have learned nothing" if one.idle else "every layer has learned something"
        if one.change is not None:
            times = f" at {one.amplified:,.0f} times its strength" if one.amplified != 1 else ""
            found = f"the adapter changes the output by {one.change:.1e}{times}; {found}"
        if one.file_difference is not None:
            found = f"reproduces what was trained, difference {one.file_difference:.1e}"
        rows.append((f"{one.step:,}", one.expert, what, found))
    return _table(
        "Training has an effect, and the first saved file reproduces it",
        ("step", "expert", "checked", "found"),
        rows,
    )


def _counters(history: RunHistory) -> str:
    if not history.kept_memory:
        return ""
    last = history.kept_memory[-1]
    rows = []
    for name, value in sorted(last.counters.items()):
        highest = history.memory.highest[name]
        unit: Callable[[float], str] = number_format.size if name.endswith(_MEMORY_UNITS) else number_format.number
        rows.append((name, unit(value), unit(highest)))
    missing = [(name, why) for name, why in sorted(last.unavailable.items())]
    return _table("Counters at the end", ("counter", "last", "highest"), rows) + _table(
        "Counters that this machine does not provide", ("counter", "reason"), missing
    )


def _checkpoints(history: RunHistory) -> str:
    rows = [
        (
            f"{one.step:,}",
            one.path,
            number_format.size(one.size_bytes),
            number_format.duration(one.snapshot_ms / 1000),
            number_format.duration(one.write_ms / 1000),
            ", ".join(one.removed),
        )
        for one in history.checkpoints
    ]
    head = ("step", "folder", "size", "training paused", "written in", "deleted afterwards")
    return _table("Checkpoints written", head, rows)


def _warnings(history: RunHistory) -> str:
    counted: dict[str, list[int | None]] = {}
    for one in history.warnings:
        counted.setdefault(one.message, []).append(one.step)
    rows = [
        ("" if steps[0] is None else f"{steps[0]:,}", f"{len(steps)}", message) for message, steps in counted.items()
    ]
    return _table("Warnings", ("first step", "times", "message"), rows)


def _mapping(values: Mapping[str, str], key: str, value: str) -> str:
    return _table("", (key, value), sorted(values.items()))


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    columns = [number for number in range(len(head)) if any(row[number] for row in rows)]  # without empty ones
    head, rows = [head[number] for number in columns], [[row[number] for number in columns] for row in rows]
    shown = [rows[index] for index in evenly_spaced_indices(len(rows), TABLE_ROWS)]
    if len(shown) < len(rows):
        caption = f"{caption} ({len(shown)} of {len(rows):,} rows; all are in logs/events.jsonl)"
    titles = "".join(f'<th scope="col">{_text(title)}</th>' for title in head)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in shown)
    named = f"<caption>{_text(caption)}</caption>" if caption else ""
    return f'<div class="scroll"><table>{named}<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


# -- samples, loading, configuration ----------------------------------------------------------------------------------


def _samples(images: SampleGrid) -> str:
    parts = [f'<p class="note">{_text(note)}</p>' for note in images.notes]
    sheets = ", ".join(f'<a href="{_text(link)}">step {step:,}</a>' for step, link in images.sheets)
    parts += [f"<p>Contact sheets: {sheets}</p>"] if sheets else []
    for row in images.rows:
        seed = "" if row.seed is None else f" (seed {row.seed})"
        cells = "".join(_cell(cell) for cell in row.cells)
        parts.append(f'<h3>{_text((row.prompt or "without a prompt") + seed)}</h3><ul class="samples">{cells}</ul>')
    return "".join(parts)


def _cell(cell: SampleCell) -> str:
    label = f"step {cell.step:,}"
    if cell.link is None:
        return f"<li>{_text(f'{label}: {cell.file.path} is not in the run')}</li>"
    content = _text(f"{label}: {cell.file.kind}")
    if cell.image is not None:
        description = _text(f"{cell.file.prompt or 'sample'}, {label}")
        content = f'<img src="{_text(cell.image)}" alt="{description}" loading="lazy">{_text(label)}'
    return f'<li><a href="{_text(cell.link)}">{content}</a></li>'


def _added(section: ReportSection, folder: Path) -> str:
    """A section that a command has added."""
    parts = [f"<p>{_text(note)}</p>" for note in section.notes]
    for card in section.cards:
        cells = "".join(_image(path, label, folder) for path, label in card.images)
        parts.append(f"<h3>{_text(card.title)}</h3>")
        parts += [f"<p>{_text(card.text)}</p>"] if card.text else []
        parts += [f'<ul class="samples">{cells}</ul>'] if cells else []
    return "".join(parts)


def _image(path: str, label: str, folder: Path) -> str:
    link = link_to(path, folder)
    if link is None:
        return f"<li>{_text(f'{label}: {path} is not in the run')}</li>"
    image = thumbnail(folder / path)
    content = "" if image is None else f'<img src="{_text(image)}" alt="{_text(label or path)}" loading="lazy">'
    return f'<li><a href="{_text(link)}">{content}{_text(label)}</a></li>'


def _loading(how_to_load: Mapping[str, str], outputs: Sequence[str], folder: Path) -> str:
    if not outputs and not how_to_load:
        return "<p>The run left no result.</p>"
    entries = []
    for path in outputs:
        link, name = link_to(path, folder), _text(path)
        entries.append(f"<li>{name}</li>" if link is None else f'<li><a href="{_text(link)}">{name}</a></li>')
    programs = "".join(f"<h3>{_text(name)}</h3><pre>{_text(text)}</pre>" for name, text in how_to_load.items())
    return f"<ul>{''.join(entries)}</ul>{programs}" if entries else programs


def _configuration(config: Mapping[str, Any]) -> str:
    if not config:
        return ""
    text = json.dumps(plain(config), indent=2, ensure_ascii=False, default=str)
    return f"<details><summary>As it was resolved</summary><pre>{_text(text)}</pre></details>"


def _text(value: str) -> str:
    # A lone surrogate (from a file name that is not UTF-8) cannot be encoded as UTF-8.
    return html.escape(value.encode("utf-8", "backslashreplace").decode(), quote=True)
