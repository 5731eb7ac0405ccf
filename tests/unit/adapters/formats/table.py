"""The table of docs/adapters.md, made by trying every cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from gracetune.adapters.delta import with_base_magnitude
from gracetune.adapters.errors import CannotHoldError
from gracetune.adapters.formats.programs import misread_by
from gracetune.adapters.formats.record import FORMATS
from gracetune.config.registry import PROGRAMS
from unit.adapters.formats import making

NOTES = {
    "ComfyUI divides DoRA's magnitudes by the norm of the base weight instead of the adapted one": "a",
    "ComfyUI does not support (IA)3": "b",
    "diffusers loads LoRA and DoRA for this family, nothing else": "c",
    "are one matrix in the original model, and only plain LoRAs or differences of its parts can be joined": "d",
}


def made(tiny_model: Callable[[str, str], Path]) -> str:
    lines = [f"| family | algorithm | {' | '.join(FORMATS)} |", f"|---|---|{'---|' * len(FORMATS)}"]
    for family in making.FLAVOURS:
        shapes = making.in_blocks(making.layer_shapes(family, tiny_model))
        for algorithm in making.ALGORITHMS:
            state = making.state(family, shapes, algorithm)
            cells = [cell(format, state, shapes) for format in FORMATS]
            lines.append(f"| {family} | {algorithm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def measured(state, shapes):
    layers = {path: with_base_magnitude(layer, torch.ones(shapes[path])) for path, layer in state.layers.items()}
    return replace(state, layers=layers)


def cell(format, state, shapes) -> str:
    """`tested` if it can be written, read, and written again to the same bytes; otherwise the note with the reason."""
    try:
        tensors, header = FORMATS[format].write(state, torch.bfloat16)
    except CannotHoldError as error:
        reasons = {problem.found.partition(": ")[2] for problem in error.problems}
        (note,) = {note for reason in reasons for text, note in NOTES.items() if text in reason}
        if note != "a":
            return f"rejected ({note})"
        outcome = cell(format, measured(state, shapes), shapes)
        return "with `--model` (a)" if outcome == "tested" else outcome
    again = FORMATS[format].read(tensors, header, state.family).checked().states[""]
    written, second = FORMATS[format].write(again, torch.bfloat16)
    assert second == header
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[key], tensor) for key, tensor in tensors.items())
    return "tested"


def of_programs(tiny_model: Callable[[str, str], Path]) -> str:
    """The formats that each program reads correctly, by the records of the formats."""
    lines = [f"| family | algorithm | {' | '.join(PROGRAMS.values())} |", f"|---|---|{'---|' * len(PROGRAMS)}"]
    for family in making.FLAVOURS:
        shapes = making.one_of_each(making.in_blocks(making.layer_shapes(family, tiny_model)))
        for algorithm in making.ALGORITHMS:
            options = ("bias",) if algorithm == "full_delta" else ()
            rank = min(min(shape[:2]) for shape in shapes.values()) if algorithm == "lokr" else 2
            state = as_trained(making.state(family, shapes, algorithm, options=options, rank=rank))
            cells = [formats_right_in(program, state, shapes) for program in PROGRAMS]
            lines.append(f"| {family} | {algorithm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def as_trained(state):
    """The state with alpha at half the rank. With alpha = rank, a lost alpha would go unnoticed."""
    layers = {path: replace(one, alpha=one.rank / 2 if one.rank else 1.0) for path, one in state.layers.items()}
    return replace(state, layers=layers)


def formats_right_in(program, state, shapes) -> str:
    right = []
    for format in FORMATS:
        if misread_by(state, format, program) is None:
            right.append(f"`{format}`")
        elif format == "comfyui" and misread_by(measured(state, shapes), format, program) is None:
            right.append("`comfyui` with `--model`")
    return ", ".join(right) or "–"
