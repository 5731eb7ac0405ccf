"""`gracetune adapter inspect | convert | verify | pick`: look into adapter files, convert, check and compare them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from gracetune.cli.command_groups import CommandGroup
from gracetune.cli.config import AsJson
from gracetune.cli.console import out, print_error, print_json, spinner
from gracetune.cli.streams import ignore_lost_stdout
from gracetune.config.families import FAMILIES, flavours
from gracetune.config.registry import FORMAT_NAMES, FULL_FINETUNE, PROGRAMS
from gracetune.config.spelling import nearest
from gracetune.errors import ConfigError, GracetuneError, Problem

if TYPE_CHECKING:  # torch and diffusers are loaded by the command that needs them, not by every `--help`
    import torch

    from gracetune.adapters.adapter_files import OpenedAdapter
    from gracetune.adapters.state import AdapterState, ExpertStage
    from gracetune.adapters.verification import Base, Weight
    from gracetune.cli.adapter_view import Converted

_LARGEST_ALPHA = 1e6
app = typer.Typer(
    cls=CommandGroup,
    help="Look into adapter files, check them, convert them.",
    no_args_is_help=True,
    add_completion=False,
)


if TYPE_CHECKING:
    To = str
    For = str
else:  # enums of the names in the records, so that typer rejects any other value
    For = StrEnum("For", [(f"PROGRAM_{number}", name) for number, name in enumerate(PROGRAMS)])
    To = StrEnum("To", [(f"FORMAT_{number}", name) for number, name in enumerate(FORMAT_NAMES)])


class Precision(StrEnum):
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


File = Annotated[Path, typer.Argument(readable=False, metavar="FILE", help="A safetensors file, or a PEFT folder.")]
FamilyName = Annotated[
    str | None, typer.Option("--family", metavar="NAME", help="Name the family if the keys fit more than one.")
]


@app.command()
def inspect(
    files: Annotated[list[Path], typer.Argument(readable=False, metavar="FILE...", help="Safetensors files.")],
    family: FamilyName = None,
    as_json: AsJson = False,
) -> None:
    """Print family, expert, algorithm, rank, format and norms. Exit 1 if anything in a file is wrong."""
    from gracetune.adapters.adapter_files import open_adapter
    from gracetune.cli.adapter_view import inspection_json, print_inspection

    reports, failed = [], False
    for path in files:
        try:
            report = inspection_json(open_adapter(path, _family(family)))
        except GracetuneError as error:
            failed = True
            reports.append({"file": str(path), "error": str(error)})
            if not as_json:
                print_error(error)
            continue
        failed = failed or not report["usable"]
        reports.append(report)
        if not as_json:
            print_inspection(report, out())
    if as_json:
        print_json({"files": reports})
    raise typer.Exit(1 if failed else 0)


@app.command()
def convert(
    file: File,
    to: Annotated[
        To | None, typer.Option("--to", metavar="FORMAT", help=f"Format to write: {', '.join(FORMAT_NAMES)}.")
    ] = None,
    program: Annotated[
        For | None,
        typer.Option(
            "--for",
            metavar="PROGRAM",
            help=f"Write the format that this program loads correctly, or fail: {', '.join(PROGRAMS)}.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", readable=False, metavar="PATH", help="The file to write; with --merge-into, the folder."
        ),
    ] = None,
    dtype: Annotated[
        Precision | None,
        typer.Option(metavar="DTYPE", help="Precision to write: bf16, fp16 or fp32; unset: that of the file."),
    ] = None,
    lora_rank: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Write the closest LoRA of this rank.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The base model, if its weights are needed: see docs/adapters.md."),
    ] = None,
    merge_into: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Merge into this model's weights; write them to the folder --output."),
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(metavar="X", help="The alpha of all layers, if the file does not have it.")
    ] = None,
    ignore_hash: Annotated[
        bool, typer.Option("--ignore-hash", help="Accept a file of gracetune that was changed after it was written.")
    ] = False,
    split: Annotated[bool, typer.Option("--split", help="Write two files if the file holds both experts.")] = False,
    without_text_encoders: Annotated[
        bool, typer.Option("--without-text-encoders", help="Leave out the layers of text encoders.")
    ] = False,
    family: FamilyName = None,
    as_json: AsJson = False,
) -> None:
    """Write an adapter in another format, as a LoRA, or merged into a model's weights. Never overwrite a file."""
    from gracetune.adapters.adapter_files import open_adapter
    from gracetune.cli.adapter_view import conversions_json, print_conversions

    ignore_lost_stdout()
    others = {
        "--to": to,
        "--for": program,
        "--lora-rank": lora_rank,
        "--model": model,
        "--dtype": dtype,
        "--split": split or None,
    }
    _reject_contradictions(merge_into, output, others)
    opened = open_adapter(
        file,
        _family(family),
        without_text_encoders=without_text_encoders,
        alpha=None if alpha is None else _positive(alpha),
        ignore_hash=ignore_hash,
    )
    states = opened.states() if split or merge_into else [opened.state()]
    if merge_into is not None:
        assert output is not None
        written = _merge(states, merge_into, output)
    else:
        target_format = _TargetFormat(None if to is None else str(to), None if program is None else str(program))
        written = _convert(opened, states, target_format, output, dtype, lora_rank, model)
    if as_json:
        print_json(conversions_json(written, opened.left_out, opened.notes))
    else:
        print_conversions(written, out())
        for note in opened.notes:
            out().print(f"    note: {note}")
        if without_text_encoders:
            out().print(f"    {len(opened.left_out)} layers of text encoders left out")


@app.command()
def verify(
    file: File,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="The model's folder or hub id.")] = None,
    family: FamilyName = None,
    flavour: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Check against a published model instead of --model. It need not be on this machine."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check that an adapter fits a model: list missing, unexpected and mismatched layers. Exit 1 on any mismatch.

    A file of gracetune that was changed after it was written is rejected.
    """
    from gracetune.adapters.adapter_files import open_adapter
    from gracetune.adapters.verification import Base, published_shapes
    from gracetune.adapters.verification import verify as verify_reading
    from gracetune.cli.adapter_view import print_verified, verified_json

    if (model is None) == (flavour is None):
        found = "neither" if model is None else "both"
        raise ConfigError([Problem("--model, --flavour", found, "one of them", "--model FOLDER")])
    opened = open_adapter(file, _family(family))
    opened.reject_altered()
    found = opened.detected.family
    if model is not None:
        against, shapes = model, Base(found, model).shapes()
    else:
        assert flavour is not None
        _reject_other_family(found, flavour)
        against, shapes = f"{found} {flavour}", published_shapes(found, flavour)
    reports = verify_reading(opened.reading, cast("dict[ExpertStage, dict[str, tuple[int, ...]]]", shapes))
    if as_json:
        print_json(verified_json(opened, against, reports))
    else:
        print_verified(opened, against, reports, out())
    raise typer.Exit(0 if all(report.ok for report in reports) else 1)


@app.command()
def pick(
    run_folder: Annotated[Path, typer.Argument(readable=False, metavar="RUN", help="The run's output folder.")],
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The base model, to measure the drift; unset: the one of the run."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the checkpoints of a run, and recommend one with the reason.

    Shows held-out loss, drift from the base model (the size of the change relative to the weights), and samples side by
    side in the report. Without a held-out loss there is no recommendation.
    """
    from gracetune.adapters.checkpoint_choice import compare_checkpoints
    from gracetune.adapters.loading_steps import loading_steps
    from gracetune.cli.pick_view import as_section, choice_json, print_choice
    from gracetune.telemetry.report import write_report
    from gracetune.telemetry.report.run_history import read_history
    from gracetune.telemetry.report.sections import write_section
    from gracetune.telemetry.report.write import LOG_FILE
    from gracetune.telemetry.sinks.jsonl import LogReader
    from gracetune.train.run_requests import is_running

    folder = run_folder.expanduser().absolute()
    history = read_history(LogReader(folder / LOG_FILE))
    with spinner("reading the checkpoints and the base model", visible=not as_json):
        base, without_base = _base_weight(history.start.family, model, history.start.model)
        choice = compare_checkpoints(history, folder, base, without_base=without_base)
    if not choice.candidates:
        kind = history.start.adapter or "an unknown kind"
        expected = f"adapter files of the run {history.start.run}"
        hint = "a lower checkpoints.every_steps saves more files"
        if history.start.adapter == FULL_FINETUNE:
            hint = "full fine-tunes are not compared: look at the samples in the report"
        found = "; ".join(choice.notes) or f"none ({kind})"
        raise ConfigError([Problem("RUN", found, expected, hint, str(folder))])
    write_section(folder, "checkpoints", as_section(choice))
    report = write_report(folder, loading_steps, running=is_running(folder)).html
    if as_json:
        print_json(choice_json(choice, report))
    else:
        print_choice(choice, report, out())


# -- parts of convert -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TargetFormat:
    """The options `--to` and `--for`. At least one of them is set."""

    format: str | None
    program: str | None

    def choose(self, state: AdapterState) -> str:
        """The format to write. Raises ConfigError if the program of `--for` would load it incorrectly."""
        from gracetune.adapters.formats.programs import choose_format, reject_misread

        if self.format is None:
            assert self.program is not None
            return choose_format(state, self.program)
        reject_misread(state, self.format, self.program)
        return self.format

    def is_comfyui(self) -> bool:
        return self.format == "comfyui" or (self.format is None and self.program == "comfyui")


def _convert(
    opened: OpenedAdapter,
    states: list[AdapterState],
    target_format: _TargetFormat,
    output: Path | None,
    dtype: Precision | None,
    lora_rank: int | None,
    model: str | None,
) -> list[Converted]:
    from gracetune.adapters.adapter_files import save
    from gracetune.adapters.formats.programs import reasons_by_program
    from gracetune.cli.adapter_view import Converted

    base = _base(states[0].family, model) if model is not None else None
    # ComfyUI needs DoRA magnitudes that were computed from the base weights.
    needs_base = [target_format.is_comfyui() and _has_magnitudes(state) for state in states]
    if base is not None and lora_rank is None and not any(needs_base):
        hint = "remove --model, or add --lora-rank N"
        raise ConfigError([Problem("--model", "nothing that needs it", "a DoRA for ComfyUI, or --lora-rank", hint)])
    precision = _precision(opened, dtype)
    conversions = []
    for state, converts_magnitudes in zip(states, needs_base, strict=True):
        error = None
        if lora_rank is not None:
            state, error = _as_lora(state, lora_rank, base)
        elif base is not None and converts_magnitudes:
            state = _with_base_magnitudes(state, base)
        to = target_format.choose(state)
        target = _target(opened.file.path, state, to, output, several=len(states) > 1)
        conversions.append(Converted(state, str(target), to, error, reasons_by_program(state, to)))
    taken = [one.path for one in conversions if Path(one.path).exists()]
    if taken:
        hint = "move it away, or choose another name with --output"
        raise ConfigError([Problem("output file", "a file of this name", "a name that is free", hint, taken[0])])
    for one in conversions:  # only now, so that an error in the second expert writes nothing
        save(Path(one.path), one.state, one.format, precision)
    return conversions


def _as_lora(state: AdapterState, rank: int, base: Base | None) -> tuple[AdapterState, float]:
    from gracetune.adapters.delta import flat_shape, needs_weight
    from gracetune.adapters.svd import state_to_lora

    if base is not None:
        conversion = state_to_lora(state, rank, base.weight(state.expert))
        return conversion.state, conversion.error
    shapes = {path: flat_shape(layer) for path, layer in state.layers.items() if not needs_weight(layer)}
    unknown = [path for path in state.layers if shapes.get(path) is None]
    if unknown:
        found = f"{len(unknown)} layers whose change or shape depends on the weights, such as {unknown[0]}"
        raise ConfigError([Problem("--lora-rank", found, "the base model", "--model FOLDER")])
    conversion = state_to_lora(state, rank, lambda path: shapes[path] or ())
    return conversion.state, conversion.error


def _has_magnitudes(state: AdapterState) -> bool:
    """Whether the adapter has DoRA magnitudes. ComfyUI needs them computed from the base weights."""
    return any("dora_scale" in layer.tensors for layer in state.layers.values())


def _with_base_magnitudes(state: AdapterState, base: Base) -> AdapterState:
    from gracetune.adapters.delta import misfit, with_base_magnitude

    weight, layers = base.weight(state.expert), {}
    for path, layer in state.layers.items():
        found = weight(path)
        unfit = misfit(layer, found.shape)
        if unfit is not None:
            raise ConfigError([Problem(path, unfit, "a layer of the base model's size", "--model FOLDER")])
        layers[path] = with_base_magnitude(layer, found)
    return replace(state, layers=layers)


def _merge(states: list[AdapterState], model: str, output: Path) -> list[Converted]:
    from gracetune.adapters.merge import merge_into
    from gracetune.cli.adapter_view import Converted

    base = _base(states[0].family, model)
    targets = [output / base.expert(state.expert).component for state in states]
    taken = [target for target in targets if target.exists()]
    if taken:  # checked for both experts before writing the first, which takes minutes
        raise ConfigError([Problem("--output", f"{taken[0]} exists", "a folder without it", "another --output")])
    for state, target in zip(states, targets, strict=True):
        merge_into(state, base.folder(state.expert), target)
    return [Converted(state, str(target), "merged", None, {}) for state, target in zip(states, targets, strict=True)]


def _base(family: str, model: str) -> Base:
    from gracetune.adapters.verification import Base

    return Base(family, model)


def _base_weight(family: str, given: str | None, of_run: str) -> tuple[Callable[[ExpertStage], Weight] | None, str]:
    """A function that reads the base model's weights, or None and the reason. Nothing is downloaded."""
    from gracetune.config.run_config import Model
    from gracetune.models.source import is_on_disk

    name = given or of_run
    try:
        if not name or not is_on_disk(Model(family=family, path=name)):
            found = f"{name or 'the base model'} is not a folder on this machine"
            if given:
                raise ConfigError([Problem("--model", found, "a folder in diffusers' layout", "--model FOLDER")])
            return None, f"{found}; give one with --model FOLDER"
        base = _base(family, name)
        base.folder(cast("ExpertStage", base.experts[0].name))
    except ConfigError as error:
        if given:
            raise
        return None, f"the base model cannot be read: {error.problems[0].found}"
    return cache(base.weight), ""


def _target(file: Path, state: AdapterState, to: str, output: Path | None, *, several: bool) -> Path:
    """The file to write: --output, or a file beside the source. The name of an expert's file ends in the expert."""
    from gracetune.adapters.safetensors_file import SUFFIX

    chosen = output or file.with_name(f"{_without_expert(file.stem)}_{to}{SUFFIX}")
    if chosen.suffix != SUFFIX:
        raise ConfigError([Problem("--output", str(chosen), f"a name ending in {SUFFIX}", f"{chosen}{SUFFIX}")])
    if not state.expert or (output is not None and not several):
        return chosen
    return chosen.with_name(f"{_without_expert(chosen.stem)}_{state.expert}{SUFFIX}")


def _without_expert(stem: str) -> str:
    return stem.removesuffix("_high_noise").removesuffix("_low_noise")


def _precision(opened: OpenedAdapter, dtype: Precision | None) -> torch.dtype:
    import torch

    from gracetune.adapters.formats.reading import dtype_of

    if dtype is not None:
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype.value]
    found = dtype_of(opened.file.tensors)
    return found if found in (torch.bfloat16, torch.float16) else torch.float32


def _family(name: str | None) -> str | None:
    if name is None or name in FAMILIES:
        return name
    hint = f"--family {nearest(name, FAMILIES) or FAMILIES[0]}"
    raise ConfigError([Problem("--family", name, ", ".join(FAMILIES), hint)])


def _positive(alpha: float) -> float:
    if not 0 < alpha <= _LARGEST_ALPHA:  # also rejects NaN
        expected = f"a number above 0 and at most {_LARGEST_ALPHA:,.0f}"
        raise ConfigError([Problem("--alpha", f"{alpha:g}", expected, "--alpha 16")])
    return alpha


def _reject_other_family(found: str, flavour: str) -> None:
    owners = [family for family in FAMILIES if any(known.name == flavour for known in flavours(family))]
    if owners and found not in owners:
        hint = "give the file of that model, or another --flavour"
        raise ConfigError([Problem("--flavour", f"{flavour} is of {owners[0]}", f"a flavour of {found}", hint)])


def _reject_contradictions(merge_into: str | None, output: Path | None, others: Mapping[str, object]) -> None:
    """Reject options that would have no effect."""
    given = [name for name, value in others.items() if value is not None]
    if merge_into is None:
        if "--to" not in given and "--for" not in given:
            expected = f"a format ({', '.join(FORMAT_NAMES)}), or --for with a program ({', '.join(PROGRAMS)})"
            raise ConfigError([_missing("--to", expected, "--to comfyui")])
        return
    if given:
        hint = f"remove {', '.join(given)}: merging takes the adapter as it is, and keeps the model's precision"
        raise ConfigError([Problem("--merge-into", f"together with {', '.join(given)}", "one of them", hint)])
    if output is None:
        raise ConfigError([_missing("--output", "the folder to write the merged weights into", "--output merged")])


def _missing(key: str, expected: str, hint: str) -> Problem:
    return Problem(key, "not given", expected, hint)
