#!/usr/bin/env python3
"""The trainer under the name the GH200 guides launch: the same as `gracetune train`.

accelerate launch --config_file config/accelerate_config_gh200.yaml \\
    train.py --config config/gh200_in_memory_example.json

Takes the flags of `gracetune train`, and SimpleTuner's options as --name value (--max_train_steps 10).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

try:
    from gracetune.cli.console import Session, start
    from gracetune.cli.train import run_training
    from gracetune.cli.train_flags import read_arguments
except ModuleNotFoundError as missing:
    sys.exit(f"train.py needs the module {missing.name}. Install gracetune first: pip install -e .")


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    if not given or "-h" in given or "--help" in given:
        print(__doc__)
        return 0 if given else 2

    def run(session: Session) -> int:
        launch = read_arguments(given)
        for note in launch.notes:
            print(note, file=sys.stderr)
        return run_training(launch.request, session.environment)

    return start(run)


if __name__ == "__main__":
    raise SystemExit(main())
