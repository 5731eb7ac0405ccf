"""An ai-toolkit extension: put this folder into a checked-out ai-toolkit's `extensions/`.

ai-toolkit imports every folder there and calls `get_process` of each extension before it builds a job. We install two
pass-through hooks at that moment. Nothing else happens unless a process of the job has a `gracetune:` block.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from toolkit.extension import Extension

if find_spec("gracetune") is None:
    raise ImportError(
        "the gracetune overlay is here, but gracetune is not installed in this Python\n"
        f"  try  install gracetune (the overlay's README says how), or remove {Path(__file__).parent}"
    )


class GracetuneExtension(Extension):
    uid = "gracetune"
    name = "gracetune overlay"

    @classmethod
    def get_process(cls) -> type[Any]:
        from .entry import NotAProcess, open_entry

        open_entry()
        return NotAProcess


AI_TOOLKIT_EXTENSIONS = [GracetuneExtension]
