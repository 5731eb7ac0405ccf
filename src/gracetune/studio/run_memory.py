"""The memory page of a run: what is used and by whom, what was planned, what moved and why."""

from __future__ import annotations

from typing import Any

from gracetune.studio.run_list import RunEntry


def memory_page(run: RunEntry, *, is_active: bool) -> dict[str, Any]:
    run.log.update()
    return {}
