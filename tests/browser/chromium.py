"""Where the browser of the tests is."""

from __future__ import annotations

import shutil
from pathlib import Path

PLACES = ("/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome")
"""Where scripts/install_browser.sh looks, too."""


def chromium() -> str | None:
    """Debian's Chromium or another one; None if there is none."""
    return next((name for name in PLACES if Path(name).exists()), shutil.which("chromium"))
