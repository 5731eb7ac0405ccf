#!/usr/bin/env python3
"""The trainer under the path the GH200 guides launch: the same as train.py and `gracetune train`.

accelerate launch --config_file config/accelerate_config_gh200.yaml \\
    simpletuner/train.py --config config/your_config.json

This folder has no __init__.py, so an installed SimpleTuner is still the one that `import simpletuner` finds.
"""

from __future__ import annotations

import sys

try:
    from gracetune.cli.train_flags import main
except ModuleNotFoundError as missing:
    sys.exit(f"simpletuner/train.py needs the module {missing.name}. Install gracetune first: pip install -e .")

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], help=__doc__))
