"""Says how it was started."""

import json
import os
import sys

print(
    json.dumps(
        {"arguments": sys.argv[1:], "extra": os.environ.get("ACCELERATE_EXTRA_ARGS"), "path": os.environ["PATH"]}
    )
)
sys.exit(int(os.environ.get("STAND_IN_EXIT", "0")))
