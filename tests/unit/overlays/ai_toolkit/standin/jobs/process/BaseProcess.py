# ruff: noqa: N999 (ai-toolkit's name)
from __future__ import annotations

from typing import Any


class BaseProcess:
    def __init__(self, process_id: int, job: Any, config: Any) -> None:
        self.process_id, self.job, self.config = process_id, job, config

    def run(self) -> None: ...
