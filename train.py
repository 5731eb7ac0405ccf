#!/usr/bin/env python3
"""The trainer under the name the GH200 guides launch: the same as `gracetune train`.

accelerate launch --config_file config/accelerate_config_gh200.yaml \\
    train.py --config config/gh200_in_memory_example.json

Takes the flags of `gracetune train`, and SimpleTuner's options as --name value (--max_train_steps 10). A config that is
not there is looked for in config/.
"""

from __future__ import annotations

import sys

try:
    from gracetune.cli.train_flags import main
except ModuleNotFoundError as missing:
    sys.exit(f"train.py needs the module {missing.name}. Install gracetune first: pip install -e .")

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], help=__doc__))
