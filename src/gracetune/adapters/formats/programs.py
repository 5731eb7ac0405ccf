"""Which programs load an adapter file correctly, that is with the effect it was trained with.

The records of the formats list what each program gets wrong. Every format is made for certain programs. `--to FORMAT`,
and `checkpoints.format` of a run, write a file that all of those load correctly if they support the model. `--for
PROGRAM`, and `checkpoints.for_program`, write one that this program loads correctly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gracetune.adapters.delta import BASE_MAGNITUDE
from gracetune.adapters.errors import CannotHoldError
from gracetune.adapters.formats.layers import algorithm_names
from gracetune.adapters.formats.record import FORMATS
from gracetune.adapters.formats.writing import Fault
from gracetune.adapters.state import AdapterState
from gracetune.config.registry import EXPORT_FORMATS, PROGRAMS, FormatName, Program, is_loadable
from gracetune.errors import Problem
from gracetune.models.registry import KEY_MAPS


@dataclass(frozen=True)
class Misread:
    """Why a program would load an adapter wrongly, or not at all."""

    program: Program
    reason: str

    def __str__(self) -> str:
        name = PROGRAMS[self.program]
        return self.reason if self.reason.startswith(name) else f"{name}: {self.reason}"


def programs_of(family: str, format: FormatName) -> tuple[Program, ...]:
    """The programs that know the family's keys in files of this format."""
    record = FORMATS[format]
    also = KEY_MAPS[family].also_read_by
    return tuple(name for name in record.readers if name in record.all_families or (format, name) in also)


def misread_by(state: AdapterState, format: FormatName, program: Program) -> Misread | None:
    """Why the program would load a file of this format wrongly; None if it loads it correctly."""
    if program not in programs_of(state.family, format):
        return Misread(program, f"it does not read {format} files of {state.family}")
    if not FORMATS[format].dora_by_base and any(BASE_MAGNITUDE in layer.tensors for layer in state.layers.values()):
        return Misread(program, "its DoRA was converted for ComfyUI: use the file it came from")
    faults = list(FORMATS[format].readers[program](state))
    return Misread(program, _describe(faults)) if faults else None


def reasons_by_program(state: AdapterState, format: FormatName) -> dict[Program, str | None]:
    """For every program: None if it loads a file of this format correctly, otherwise the reason. Empty for a format of
    another package, about which nothing is known."""
    if not FORMATS[format].readers:
        return {}
    found = {program: misread_by(state, format, program) for program in PROGRAMS}
    return {program: None if wrong is None else wrong.reason for program, wrong in found.items()}


def misread_in(state: AdapterState, format: FormatName, program: Program | None = None) -> list[Misread]:
    """Why this state should not be written in this format: for one program, or for all that the format is made for."""
    if program is not None:
        wrong = misread_by(state, format, program)
        return [] if wrong is None else [wrong]
    record, known = FORMATS[format], programs_of(state.family, format)
    if record.keeps_all:
        state = without_unloadable_layers(state)
    made_for = [one for one in record.made_for if one in known]
    return [wrong for one in made_for if (wrong := misread_by(state, format, one)) is not None]


def reject_misread(state: AdapterState, format: FormatName, program: Program | None = None) -> None:
    """Raise `CannotHoldError` if `misread_in` finds a reason, with the formats and programs that work."""
    wrong = misread_in(state, format, program)
    if not wrong:
        return
    right = [name for name in formats_for(state) if name != format]
    hints = [f"--to {' or '.join(right)}"] if right else []
    alone = (
        [one for one, reason in reasons_by_program(state, format).items() if reason is None] if program is None else []
    )
    if alone:
        hints.append(f"--to {format} --for {alone[0]} for {PROGRAMS[alone[0]]} alone")
    hints.append("--lora-rank N (the nearest LoRA), or --merge-into MODEL")
    programs = ", ".join(PROGRAMS[one.program] for one in wrong)
    raise CannotHoldError(
        [
            Problem(
                key=f"{'+'.join(algorithm_names(state))} for {state.family} as {format}",
                found="; ".join(map(str, wrong)),
                expected=f"an adapter that {programs} would load from a {format} file as it was trained",
                hint="; ".join(hints),
            )
        ]
    )


def formats_for(state: AdapterState, program: Program | None = None) -> list[FormatName]:
    """The formats that all programs they are made for load correctly, or that the given program loads correctly."""
    names: Iterable[FormatName] = FORMATS
    if program is not None:
        names = sorted(EXPORT_FORMATS.ours, key=lambda name: name != program)
    return [name for name in names if FORMATS[name].made_for and not misread_in(state, name, program)]


def choose_format(state: AdapterState, program: Program) -> FormatName:
    """The format that this program loads correctly. Raises `CannotHoldError` with the reasons if there is none."""
    found = formats_for(state, program)
    if found:
        return found[0]
    known = [name for name in EXPORT_FORMATS.ours if program in programs_of(state.family, name)]
    wrong = {str(one): None for name in known for one in misread_in(state, name, program)}
    others = [one for one in PROGRAMS if formats_for(state, one)]
    hint = "--lora-rank N (the nearest LoRA), or --merge-into MODEL"
    raise CannotHoldError(
        [
            Problem(
                key=f"--for {program}",
                found="; ".join(wrong)
                or f"an adapter for {state.family}, whose files {PROGRAMS[program]} does not read",
                expected=f"an adapter that {PROGRAMS[program]} would load as it was trained",
                hint=f"--for {' or '.join(others)}; {hint}" if others else hint,
            )
        ]
    )


def without_unloadable_layers(state: AdapterState) -> AdapterState:
    """The state without layers that no program loads. Such layers are saved for further training only."""
    layers = {path: layer for path, layer in state.layers.items() if is_loadable(layer.algorithm)}
    return AdapterState(state.family, state.expert, layers, state.metadata)


def _describe(faults: Iterable[Fault]) -> str:
    by_reason: dict[str, list[str]] = {}
    for path, reason in faults:
        by_reason.setdefault(reason, []).append(path)
    return "; ".join(
        f"{reason} ({paths[0]}{f' and {len(paths) - 1} more layers' if paths[1:] else ''})"
        for reason, paths in by_reason.items()
    )
