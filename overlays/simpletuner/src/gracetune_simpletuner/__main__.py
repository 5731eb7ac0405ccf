"""`python -m gracetune_simpletuner TRAIN_PY [ARGUMENTS]`: run upstream's train.py with the overlay installed.

accelerate starts this module in every process of a launch; see `gracetune.integrations.launch`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from gracetune.extension import Environment, claim_allocator_options, torch_accepts_uvm_options
from gracetune_simpletuner import raw_config
from gracetune_simpletuner.errors import stopping
from gracetune_simpletuner.hooks import AfterImport, check_modules
from gracetune_simpletuner.options import split_arguments
from gracetune_simpletuner.overlay import Launch, Overlay
from gracetune_simpletuner.points import hooks_of


def install(arguments: list[str]) -> tuple[Overlay, list[str]]:
    """Register the overlay to attach when upstream is imported; returns it and the arguments for upstream."""
    environment = Environment.capture()
    overlay = Overlay(environment, Launch.of(environment))
    rest, overlay.blocks = split_arguments(arguments)
    check_modules(hooks_of("raw_config"))
    for line in claim_allocator_options(torch_takes_them=torch_accepts_uvm_options()):
        overlay.note(line, event="allocator")
    sys.meta_path.insert(0, AfterImport(raw_config.actions(overlay)))
    return overlay, rest


def main() -> None:
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        sys.stderr.write("usage: python -m gracetune_simpletuner TRAIN_PY [ARGUMENTS]\n")
        raise SystemExit(2)
    script = sys.argv[1]
    with stopping():
        _, rest = install(sys.argv[2:])
    sys.argv = [script, *rest]
    sys.path[0] = str(Path(script).parent)  # Python puts a script's folder here
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
