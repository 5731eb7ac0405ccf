from __future__ import annotations

from typing import Any

from toolkit.extension import get_all_extensions_process_dict


class ExtensionJob:
    def __init__(self, config: dict[str, Any]) -> None:
        self.name = config["name"]
        classes = get_all_extensions_process_dict()
        self.process = [classes[each["type"]](number, self, each) for number, each in enumerate(config["process"])]

    def run(self) -> None:
        for process in self.process:
            process.run()
