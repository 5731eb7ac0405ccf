"""`gracetune data`: show what a run will train on, before it starts, and caption images."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gracetune.cli.caption import caption
from gracetune.cli.command_groups import CommandGroup
from gracetune.cli.config import AllowUnsupported, AsJson, Overrides
from gracetune.cli.console import out, print_json, session
from gracetune.cli.judge import judge
from gracetune.config import Resolved
from gracetune.config.machine_checks import path_problems
from gracetune.config.run_config import RunConfig, Validation
from gracetune.errors import ConfigError, Problem
from gracetune.storage.folders import private_if_new

if TYPE_CHECKING:  # numpy, Pillow and FFmpeg are loaded by the command that needs them, not by every `--help`
    from gracetune.data.index import DataIndex
    from gracetune.data.index_builder import OnDataset
    from gracetune.data.sampler import Order, SampleGroup

app = typer.Typer(
    cls=CommandGroup, help="Look at the data of a run, and caption images.", no_args_is_help=True, add_completion=False
)
app.command()(caption)
app.command()(judge)

SHEET_SAMPLES = 12
ALL_SAMPLES = 300
"""Maximum number of thumbnails in all sheets together: with many buckets, each sheet shows fewer."""


@app.callback()
def data() -> None:
    """Look at the data of a run, and caption images."""


@app.command()
def show(
    context: typer.Context,
    config_file: Annotated[
        Path, typer.Argument(readable=False, metavar="CONFIG", help="A configuration file of any dialect.")
    ],
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for contact sheets; unset: data_show in output_dir.")
    ] = None,
    download: Annotated[
        bool,
        typer.Option(
            "--download", help="Download datasets from the hub and other URLs that are not on this machine yet."
        ),
    ] = False,
    no_sheets: Annotated[bool, typer.Option("--no-sheets", help="Make no contact sheets.")] = False,
    items: Annotated[bool, typer.Option("--items", help="With --json: list every sample too.")] = False,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Write nothing: no contact sheets, and no scan results for later.")
    ] = False,
    overrides: Overrides = None,
    allow_unsupported: AllowUnsupported = False,
    json_output: AsJson = False,
) -> None:
    """Print buckets, captions, and dropped files with the reason. Make a contact sheet of every bucket."""
    from gracetune.cli.data_view import Shown, as_json, print_data
    from gracetune.data.backends.pool import StagingCheck
    from gracetune.data.index_builder import build_index, scan_folder
    from gracetune.data.text_format import counted
    from gracetune.models.registry import geometry_of

    resolved = session(context).load(config_file, overrides, allow_unsupported=allow_unsupported)
    _check_folders(resolved)
    config = _with_copies(context, resolved.config, download=download, quiet=json_output)
    geometry, assumption = geometry_of(config.model)
    rehearsal = StagingCheck(config.datasets)
    with _progress(quiet=json_output) as on_scanned, private_if_new(Path(config.output_dir).expanduser()):
        index = build_index(
            config, geometry, open_backend=rehearsal.open, scans=scan_folder(config), saves_scans=not read_only,
            on_scanned=on_scanned,
        )  # fmt: skip
    order = index.order(config.training.batch_size)
    folder = output or Path(config.output_dir).expanduser() / "data_show"
    sheets, damaged = ({}, []) if no_sheets or read_only else make_sheets(index, order, folder)
    notes = [*([assumption] if assumption else []), *resolved.notes, *index.notes, *rehearsal.notes, *damaged]
    if not order.whole_epoch(0, order.batch_size, 0, 1).batches:
        periods = "; ".join(source.period for source in order.sources)
        notes.append(f"no dataset is active when the run begins, and it would stop at once: {periods}")
    if sheets:
        notes.append(f"{counted(len(sheets), 'contact sheet')} in {folder}")
    accumulated = config.training.gradient_accumulation_steps
    shown = Shown(
        index, order, accumulated, sheets=sheets, notes=tuple(notes), staged=rehearsal.estimates, lists_items=items
    )
    if json_output:
        print_json(as_json(shown))
    else:
        print_data(shown, out())


def _with_copies(context: typer.Context, config: RunConfig, *, download: bool, quiet: bool) -> RunConfig:
    """The config with the folders of copies in place of remote addresses.

    Without `download`, nothing is downloaded: the size of each missing copy is printed.
    """
    from gracetune.data.copies.local import Copies
    from gracetune.hub.access import HubAccess

    copies = Copies(config, HubAccess.of(session(context).environment))
    if download:
        from gracetune.cli.train_view import QuietView, TerminalView  # imports torch and diffusers

        with QuietView(is_rank_0=True) if quiet else TerminalView() as view:
            copies.make(report=view.report, warn=view.warn, on_fetched=view.on_download)
    elif not quiet:
        for plan in copies.plans():
            for line in plan.lines():
                print(line)
    return copies.localized()


def _check_folders(resolved: Resolved) -> None:
    """Reject missing folders of datasets, all at once. Weights and prompts are not needed here."""
    config = resolved.config
    nothing = {"path": None, "vae_path": None, "text_encoder_path": None}
    data_only = config.model_copy(
        update={
            "model": config.model.model_copy(update=nothing),
            "adapter": config.adapter.model_copy(update={"init_from": None}),
            "validation": Validation(),
        }
    )
    problems = path_problems(replace(resolved, config=data_only))
    if problems:
        raise ConfigError(dict.fromkeys(_with_our_hint(problem) for problem in problems))


def _with_our_hint(problem: Problem) -> Problem:
    """Replace a hint for `config check --no-paths`: this command needs the folders."""
    hint = problem.hint.removesuffix("; or check without folders: --no-paths")
    return replace(problem, hint=f"{hint}; or name another folder with --set 'datasets[N].path=FOLDER', counted from 0")


@contextmanager
def _progress(*, quiet: bool) -> Iterator[OnDataset]:
    """A progress bar on stderr while files are scanned, if stderr is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("looking at {task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        tasks = {}

        def show_files(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done, total=total)

        yield show_files


def make_sheets(index: DataIndex, order: Order, folder: Path) -> tuple[dict[tuple[int, str], str], list[str]]:
    """Write the contact sheet of every group. Also returns a sentence for every file that could not be decoded."""
    from gracetune.storage.atomic import write_file

    with _writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
    each = max(3, min(SHEET_SAMPLES, ALL_SAMPLES // max(1, len(order.groups))))
    sheets: dict[tuple[int, str], str] = {}
    damaged: list[str] = []

    def make(group: SampleGroup) -> tuple[bytes, list[str]]:
        return sheet_of(index, order, group, each)

    # Pillow releases the GIL, so threads make sheets in parallel.
    with ThreadPoolExecutor(4, thread_name_prefix="sheets") as pool:
        for group, (png, found) in zip(order.groups, pool.map(make, order.groups), strict=True):
            name = sheet_name(index, group)
            with _writing_to(folder):
                write_file(folder / name, png)
            sheets[group.source, group.name] = str(folder / name)
            damaged += found
    return sheets, damaged


@contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = Problem("--output", f"{folder}: {error.strerror}", "a folder that can be made and written to",
                          "choose another one with --output, or pass --no-sheets")  # fmt: skip
        raise ConfigError([problem]) from error


def sheet_of(index: DataIndex, order: Order, group: SampleGroup, most: int) -> tuple[bytes, list[str]]:
    """A PNG with evenly spaced samples of a group, and a sentence for every file that could not be decoded."""
    import io

    from gracetune.cli.data_view import rate_of, shape_label
    from gracetune.data.captions import variant_ref
    from gracetune.data.contact_sheet import contact_sheet
    from gracetune.data.text_format import counted

    found = index.datasets[group.source]
    count = min(most, len(group.samples))
    chosen = [group.samples[number * len(group.samples) // count] for number in range(count)]
    items = [found.items[number] for number in chosen]
    options = found.dataset.captions
    captions = [
        variant_ref(item.captions, options, index.seed, number, visit=0)
        for number, item in zip(chosen, items, strict=True)
    ]
    refs = [
        index.describe(found, item, index.appearance(found, item, 0, 0), caption)
        for item, caption in zip(items, captions, strict=True)
    ]
    title = f"{found.id} · {shape_label(group.shape, rate_of(index, found))}"
    every = counted(len(group.samples), "sample")
    some_of = f"{count} of {every}" if count < len(group.samples) else every
    size = order.size(group.source, order.batch_size)
    dark = "; what is dark counts less (mask)" if any(ref.mask is not None for ref in refs) else ""
    subtitle = f"{some_of}; {counted(group.total, 'visit')} an epoch, in batches of {size}{dark}"
    sheet = contact_sheet(index, refs, title, subtitle)
    buffer = io.BytesIO()
    sheet.image.save(buffer, "PNG")
    damaged = [f"dataset {found.id}: {one.path} cannot be decoded: {one.reason}" for one in sheet.damaged]
    return buffer.getvalue(), damaged


def sheet_name(index: DataIndex, group: SampleGroup) -> str:
    """A readable and unique file name for a group, such as `01_photos_1024x768.png`."""
    own, *others = group.shape
    shape = f"{own.audio_samples}x{own.audio_channels}" if own.audio_samples else f"{own.width}x{own.height}"
    frames = f"x{own.frames}" if own.frames > 1 else ""
    references = "".join(f"+{bucket.width}x{bucket.height}" for bucket in others)
    safe = re.sub(r"[^\w.-]+", "_", index.datasets[group.source].id).encode()[:100].decode(errors="ignore")
    return f"{group.source + 1:02}_{safe}_{shape}{frames}{references}.png"
