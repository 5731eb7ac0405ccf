"""`gracetune data judge`: find images that are likely mislabelled or memorised, duplicates, and small images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gracetune.cli.config import AsJson
from gracetune.cli.console import out, print_json, session, shown, spinner
from gracetune.config.path_status import inspect_path
from gracetune.errors import ConfigError, Problem

if TYPE_CHECKING:
    from gracetune.telemetry.report.sections import ReportSection
    from gracetune.train.judgement import DataFinding, Judgement

_LISTED = 12
"""Findings of each kind that are printed. `--json` lists all."""


def judge(
    context: typer.Context,
    run_folder: Annotated[Path, typer.Argument(readable=False, metavar="RUN", help="The run's output folder.")],
    most: Annotated[
        int, typer.Option("--most", metavar="N", min=1, help="Judge at most N images, evenly chosen.")
    ] = 500,
    as_json: AsJson = False,
) -> None:
    """After a run, find images that are likely mislabelled or memorised, duplicates, and images that are too small.

    Measures the loss of each image at fixed noise, with the weights before training and with those of the last
    checkpoint, from the run's own config and caches. The report gets a section with thumbnails. --json
    lists all images.
    """
    import contextlib
    import sys

    from gracetune.train.run_requests import is_running

    folder = run_folder.expanduser().absolute()
    file = folder / "config.yaml"
    if inspect_path(file).kind != "file":
        found = "no config.yaml in it" if folder.is_dir() else "no such folder"
        raise ConfigError([Problem("RUN", found, "the output folder of a run", "check the path", str(folder))])
    if is_running(folder):
        hint = "wait until it ends; `gracetune report` shows a running one"
        raise ConfigError([Problem("RUN", "a run that is still active", "a run that has ended", hint, str(folder))])
    started = session(context)
    config = started.load(file, [f"output_dir={json.dumps(str(folder))}"]).config
    with contextlib.redirect_stdout(sys.stderr), spinner("loading PyTorch and diffusers", visible=not as_json):
        from gracetune.adapters.loading_steps import loading_steps
        from gracetune.cli.library_output import libraries_quiet
        from gracetune.cli.train_view import QuietView, TerminalView
        from gracetune.telemetry.report import write_report
        from gracetune.telemetry.report.judged_losses import write_losses
        from gracetune.telemetry.report.sections import FOLDER, write_section
        from gracetune.train.judging import judge_run

    thumbnails = Path(FOLDER) / "judged"
    shows = QuietView(is_rank_0=True) if as_json else TerminalView()
    with contextlib.redirect_stdout(sys.stderr), libraries_quiet(), shows as view:
        judgement, names = judge_run(
            config, environment=started.environment, view=view, most=most, thumbnail_folder=folder / thumbnails
        )
    images = {number: str(thumbnails / name) for number, name in names.items()}
    write_section(folder, "judgement", as_section(judgement, images))
    write_losses(folder, judgement_json(judgement))
    report = write_report(folder, loading_steps).html
    if as_json:
        print_json({**judgement_json(judgement), "report": str(report)})
    else:
        print_judgement(judgement, report)


def print_judgement(judgement: Judgement, report: Path) -> None:
    from gracetune.train.judgement import TITLES

    console = out()
    console.print(shown(_summary(judgement)))
    for kind, title in TITLES.items():
        findings = [one for one in judgement.findings if one.kind == kind]
        console.print(f"[bold]{title}[/]: {len(findings) or 'none'}")
        for one in findings[:_LISTED]:
            paths = ", ".join(judgement.samples[number].path for number in one.samples)
            console.print(f"    {shown(f'{paths}: {one.reason}')}")
        if len(findings) > _LISTED:
            console.print(f"    and {len(findings) - _LISTED} more (--json lists all)")
    for note in judgement.notes:
        console.print(shown(f"note: {note}"))
    console.print(f"thumbnails: {shown(str(report))}")


def judgement_json(judgement: Judgement) -> dict[str, Any]:
    first, last = judgement.mean
    held_out = judgement.held_out
    return {
        "step": judgement.step,
        "mean_loss": {"first": first, "last": last},
        "held_out_loss": None if held_out is None else {"first": held_out[0], "last": held_out[1]},
        "findings": [
            {
                "kind": one.kind,
                "images": [judgement.samples[number].path for number in one.samples],
                "dataset": judgement.samples[one.samples[0]].dataset,
                "reason": one.reason,
            }
            for one in judgement.findings
        ],
        "images": [
            {
                "dataset": one.dataset,
                "path": one.path,
                "caption": one.caption,
                "first_loss": one.first,
                "last_loss": one.last,
                "improvement": one.improvement,
                "caption_gain": one.caption_gain,
                "enlarged": one.enlarged,
            }
            for one in sorted(judgement.samples, key=lambda one: -one.last)
        ],
        "notes": list(judgement.notes),
    }


def as_section(judgement: Judgement, images: dict[int, str]) -> ReportSection:
    """The contact sheet: a card for each kind of finding, with the thumbnails of the images."""
    from gracetune.telemetry.report.sections import ReportCard, ReportSection
    from gracetune.train.judgement import TITLES

    cards = []
    for kind, title in TITLES.items():
        findings = [one for one in judgement.findings if one.kind == kind]
        if findings:
            cells = tuple(cell for one in findings for cell in _cells(one, judgement, images))
            cards.append(ReportCard(f"{title}: {len(findings)}", "", cells))
    notes = (_summary(judgement), *([] if cards else ["No image stands out."]), *judgement.notes)
    return ReportSection("Data: what the losses of single images show", notes, tuple(cards))


def _cells(finding: DataFinding, judgement: Judgement, images: dict[int, str]) -> list[tuple[str, str]]:
    return [
        (images[number], f"{judgement.samples[number].path}: {finding.reason}")
        for number in finding.samples
        if number in images
    ]


def _summary(judgement: Judgement) -> str:
    first, last = judgement.mean
    text = (
        f"{len(judgement.samples)} images: mean loss {first:.4g} before training, {last:.4g} at step {judgement.step:,}"
    )
    if judgement.held_out is None:
        return f"{text}; held-out images: none"
    before, after = judgement.held_out
    return f"{text}; held-out images: {before:.4g} before, {after:.4g} after"
