"""Check that the programs an adapter file is made for will load it correctly.

`reject_misread_files` runs in `preflight`: what a program misreads depends on the types and shapes of the layers, not
on their values.
"""

from __future__ import annotations

from dataclasses import replace

from gracetune.adapters.formats.programs import misread_in, reasons_by_program, without_unloadable_layers
from gracetune.adapters.formats.reading import by_base
from gracetune.adapters.formats.record import FORMATS
from gracetune.adapters.state import AdapterState
from gracetune.config.registry import PROGRAMS, FormatName
from gracetune.config.run_config import Checkpoints
from gracetune.errors import ConfigError, Problem


def reject_misread_files(layout: AdapterState, checkpoints: Checkpoints) -> None:
    """Raise ConfigError if a program that the format is made for would misread the files.

    `layout` is the adapter as it is trained, with or without values. The hints name formats and programs that work.
    """
    program, name = checkpoints.for_program, checkpoints.format
    wrong = misread_in(_as_written(layout, name), name, program)
    if not wrong:
        return
    others = [other for other in FORMATS if FORMATS[other].made_for
              and not misread_in(_as_written(layout, other), other, program)]  # fmt: skip
    hints = [f"--set checkpoints.format={other}" for other in others]
    if program is not None:
        hints += [] if misread_in(_as_written(layout, name), name) else ["--set checkpoints.for_program=null"]
    else:
        right = reasons_by_program(_as_written(layout, name), name)
        hints += [f"--set checkpoints.for_program={one}, for {PROGRAMS[one]} alone"
                  for one in PROGRAMS if right[one] is None]  # fmt: skip
    found = f"{name}: {'; '.join(map(str, wrong))}"
    expected = "files that " + ", ".join(PROGRAMS[one.program] for one in wrong) + " would load as they were trained"
    hint = "; or ".join(hints[:3]) if hints else "--set adapter.kind=lora"
    raise ConfigError([Problem("checkpoints.format", found, expected, hint)])


def about_other_programs(layout: AdapterState, checkpoints: Checkpoints) -> tuple[str, ...]:
    """Notes for files made for one program: other programs that read the format but would misread these files."""
    if checkpoints.for_program is None:
        return ()
    wrong = misread_in(_as_written(layout, checkpoints.format), checkpoints.format)
    return tuple(f"the files are for {PROGRAMS[checkpoints.for_program]}: {one}" for one in wrong)


def _as_written(layout: AdapterState, name: FormatName) -> AdapterState:
    """The layers as the file stores them for other programs.

    Only names and shapes count here. Some formats store DoRA's magnitudes relative to the base weights, under another
    name (`by_base`); `output.for_format` converts the values. A format that keeps everything also stores layers that no
    program loads, for further training; they are left out here.
    """
    if FORMATS[name].keeps_all:
        return without_unloadable_layers(layout)
    if not FORMATS[name].dora_by_base:
        return layout
    return replace(layout, layers={path: by_base(layer) for path, layer in layout.layers.items()})
