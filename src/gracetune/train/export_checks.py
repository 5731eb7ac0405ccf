"""Whether a run's adapter files will be loaded right by the programs they are for. Asked in `preflight`: what a program
gets wrong follows from the layers' kinds and sizes, not from their values.
"""

from __future__ import annotations

from dataclasses import replace

from gracetune.adapters.formats.programs import loadable, misread_in, readable
from gracetune.adapters.formats.reading import by_base
from gracetune.adapters.formats.registry import FORMATS
from gracetune.adapters.state import AdapterState
from gracetune.config.export_formats import PROGRAMS, FormatName
from gracetune.config.run_config import Checkpoints
from gracetune.errors import ConfigError, Problem


def reject_misread_files(layout: AdapterState, checkpoints: Checkpoints) -> None:
    """`layout` is the adapter as it is trained, with or without values."""
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
        right = readable(_as_written(layout, name), name)
        hints += [f"--set checkpoints.for_program={one}, for {PROGRAMS[one]} alone"
                  for one in PROGRAMS if right[one] is None]  # fmt: skip
    found = f"{name}: {'; '.join(map(str, wrong))}"
    expected = "files that " + ", ".join(PROGRAMS[one.program] for one in wrong) + " would load as they were trained"
    hint = "; or ".join(hints[:3]) if hints else "--set adapter.kind=lora"
    raise ConfigError([Problem("checkpoints.format", found, expected, hint)])


def about_other_programs(layout: AdapterState, checkpoints: Checkpoints) -> tuple[str, ...]:
    """A note for files that are for one program, where others that the format is for get them wrong."""
    if checkpoints.for_program is None:
        return ()
    wrong = misread_in(_as_written(layout, checkpoints.format), checkpoints.format)
    return tuple(f"the files are for {PROGRAMS[checkpoints.for_program]}: {one}" for one in wrong)


def _as_written(layout: AdapterState, name: FormatName) -> AdapterState:
    """What a program has to load of it. A run measures DoRA's magnitudes against the base weights where they are for
    ComfyUI (`output.for_format`). Layers that no program loads are for training on: a note says so."""
    if FORMATS[name].keeps_all:
        return loadable(layout)
    if name != "comfyui":
        return layout
    return replace(layout, layers={path: by_base(layer) for path, layer in layout.layers.items()})
