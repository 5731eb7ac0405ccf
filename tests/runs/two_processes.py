"""One of several processes that do some runs together, because importing torch takes longer than a run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from rich.console import Console

from gracetune.cli.estimate_view import print_plan
from gracetune.config import Environment, load
from gracetune.hardware import Machine
from gracetune.train.planning import PlannedRun
from gracetune.train.run import RunOptions, train
from gracetune.train.view import View


class Printing(View):
    def report(self, text: str) -> None:
        print(text, flush=True)

    def planned(self, planned: PlannedRun, machine: Machine) -> None:
        print_plan(planned.demand, planned.plan, machine, planned.demand.assumptions, Console(width=200))

    def warn(self, text: str) -> None:
        super().warn(text)
        print(text, flush=True)


def main() -> None:
    """argv: a JSON list of [config file, launcher variables, steps after which it is interrupted, or null]."""
    for number, (file, variables, stop_after) in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        os.environ.update({**variables, "MASTER_PORT": str(int(os.environ["MASTER_PORT"]) + bool(number))})
        environment = Environment.capture()
        overrides = [] if stop_after is None else [f"training.max_steps={stop_after}"]
        config = load(Path(file), environment=environment, overrides=overrides).config
        train(config, environment=environment, options=RunOptions(), view=Printing())
        for name in variables:
            del os.environ[name]


if __name__ == "__main__":
    main()
