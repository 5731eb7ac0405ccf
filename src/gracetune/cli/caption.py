"""`gracetune data caption`: write captions for a folder of images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gracetune.captioning.kinds import KINDS, STYLES, Style
from gracetune.cli.config import AsJson
from gracetune.cli.console import mark, out, print_json, session, shown
from gracetune.errors import ConfigError, MachineError, Problem

if TYPE_CHECKING:
    from gracetune.captioning.folder import CaptionedFolder, CaptionTask
    from gracetune.cli.console import Session

INTERRUPTED = 3
_NAMED = 10
"""Skipped images that are named one by one."""


def caption(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of images.", readable=False)],
    model: Annotated[
        str,
        typer.Option(
            metavar="M", help=f"{', '.join(kind.name for kind in KINDS)}, or a folder or hub id of such a model."
        ),
    ] = KINDS[0].name,
    style: Annotated[str, typer.Option(metavar="S", help=f"Style: {', '.join(STYLES)}.")] = STYLES[0],
    trigger: Annotated[str | None, typer.Option(metavar="W", help="Trigger word, put into every caption.")] = None,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Images per batch.")] = 4,
    device: Annotated[str, typer.Option(metavar="D", help="auto, cpu, cuda or cuda:N.")] = "auto",
    json_output: AsJson = False,
) -> None:
    """Write a caption file beside each image that has none. Existing files stay as they are."""
    from gracetune.captioning.folder import CaptionedFolder, plan_captions
    from gracetune.cli.library_output import libraries_quiet
    from gracetune.cli.streams import ignore_lost_stdout
    from gracetune.train.control import Control, listening

    ignore_lost_stdout()
    chosen = _style(style)
    task, result = plan_captions(folder), CaptionedFolder()
    try:
        with listening(Control()), libraries_quiet():
            if task.missing:
                _write(task, model, chosen, trigger, batch, device, session(context), result, quiet=json_output)
    except KeyboardInterrupt:
        typer.echo(
            f"interrupted: {len(result.written)} captions are written; run the same command again to continue", err=True
        )
        raise typer.Exit(INTERRUPTED) from None
    if json_output:
        print_json(_as_json(folder, task, result))
    else:
        _print(folder, task, result)
    if task.missing and result.skipped and not (result.written or result.kept):
        raise typer.Exit(1)


def _style(name: str) -> Style:
    for style in STYLES:
        if style == name.lower():
            return style
    from gracetune.config.spelling import nearest

    raise ConfigError([Problem("--style", name, ", ".join(STYLES), f"--style {nearest(name, STYLES) or STYLES[0]}")])


def _write(
    task: CaptionTask,
    model: str,
    style: Style,
    trigger: str | None,
    batch: int,
    device: str,
    started: Session,
    result: CaptionedFolder,
    *,
    quiet: bool,
) -> None:
    import torch

    from gracetune.captioning.caption_model import caption_device, open_caption_model
    from gracetune.captioning.folder import write_captions
    from gracetune.hub.access import HubAccess

    place = caption_device(device)
    with _progress(quiet=quiet) as show:
        _report(f"{len(task.missing)} images to caption with {model} on {place}", quiet=quiet)
        opened = open_caption_model(
            model, style, place, HubAccess.of(started.environment), report=lambda text: _report(text, quiet=quiet),
            on_fetched=lambda name: lambda done, total: show(f"downloading {name}", done, total),
        )  # fmt: skip
        try:
            write_captions(
                task, opened, style, trigger=trigger, batch=batch, result=result,
                on_done=lambda done, total: show("captioning", done, total),
            )  # fmt: skip
        except torch.OutOfMemoryError:
            hint = f"--batch {batch // 2}" if batch > 1 else "a smaller model, or --device cpu"
            done = f"{len(result.written)} captions are written; run the command again with"
            raise MachineError(f"not enough GPU memory for batches of {batch} on {place}: {done} {hint}") from None


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr, if stderr is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        tasks = {}

        def show(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done, total=total)

        yield show


def _report(text: str, *, quiet: bool) -> None:
    if not quiet:
        typer.echo(shown(text), err=True)


def _print(folder: Path, task: CaptionTask, result: CaptionedFolder) -> None:
    from gracetune.data.text_format import counted

    console = out()
    for one in result.skipped[:_NAMED]:
        console.print(f"{mark(console, ok=False)} {shown(one.path)}: {shown(one.reason)}")
    if len(result.skipped) > _NAMED:
        console.print(f"{mark(console, ok=False)} and {len(result.skipped) - _NAMED} more")
    kept = task.kept + result.kept
    parts = [f"{counted(len(result.written), 'caption')} written", f"{kept} kept"]
    parts += [f"{counted(len(result.skipped), 'image')} skipped"] * bool(result.skipped)
    console.print(f"{mark(console, ok=not result.skipped)} {shown(str(folder))}: {', '.join(parts)}")
    if result.cut:
        console.print(f"note  {counted(result.cut, 'caption')} longer than the style allows: cut at a sentence or tag")
    if task.sharing:
        few = f"{shown(task.sharing[0])} shares its caption file with another image of the same name"
        more = f" ({len(task.sharing)} such images)" if len(task.sharing) > 1 else ""
        console.print(f"note  {few}{more}")


def _as_json(folder: Path, task: CaptionTask, result: CaptionedFolder) -> dict[str, object]:
    return {
        "ok": not result.skipped,
        "folder": str(folder),
        "written": [*result.written],
        "kept": task.kept + result.kept,
        "skipped": [{"path": one.path, "reason": one.reason} for one in result.skipped],
        "cut": result.cut,
        "sharing": [*task.sharing],
    }
