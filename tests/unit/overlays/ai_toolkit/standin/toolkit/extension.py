from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class Extension:
    name: str = ""
    uid: str = ""

    @classmethod
    def get_process(cls) -> Any: ...


def get_all_extensions() -> list[Any]:
    modules = [
        importlib.import_module(f"{folder}.{found.name}")
        for folder in ("extensions", "extensions_built_in")
        for found in pkgutil.iter_modules([str(ROOT / folder)])
    ]
    return [each for module in modules for each in getattr(module, "AI_TOOLKIT_EXTENSIONS", [])]


def get_all_extensions_process_dict() -> dict[str, Any]:
    return {each.uid: each.get_process() for each in get_all_extensions()}
