"""Everything the overlays hold on to is looked for by the check, as needed; and nothing else is called needed."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from gracetune.integrations.upstreams import AI_TOOLKIT, SIMPLETUNER

OVERLAYS = Path(__file__).parents[3] / "overlays"
LISTS = {
    "simpletuner": OVERLAYS / "simpletuner/src/gracetune_simpletuner/points.py",
    "ai-toolkit": OVERLAYS / "ai_toolkit/gracetune_overlay/points.py",
}


@pytest.fixture(params=LISTS)
def points(request: pytest.FixtureRequest) -> ModuleType:
    """The overlay's list, loaded by itself: the packages around it may need another Python."""
    name = f"points_of_{request.param.replace('-', '_')}"
    spec = importlib.util.spec_from_file_location(name, LISTS[request.param])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up there
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


def targets(module: ModuleType) -> set[str]:
    """Of upstream's own names; what belongs to a library that upstream uses is not upstream's to move."""
    if hasattr(module, "HOOKS"):
        named = {hook.target for hook in module.HOOKS} | set(module.USES)
    else:
        defined = {point.defined for point in module.POINTS if point.defined}
        named = {point.target for point in module.POINTS} | defined
    ours = ("simpletuner.", "toolkit.", "jobs.", "extensions_built_in.")
    return {target.partition("[")[0] for target in named if target.startswith(ours)}


def test_every_name_an_overlay_holds_on_to_is_a_needed_point(points: ModuleType) -> None:
    upstream = SIMPLETUNER if hasattr(points, "HOOKS") else AI_TOOLKIT
    held = targets(points)
    assert held
    needed = {point.location for point in upstream.points if point.needed}
    assert held - needed == set()


def test_what_is_called_needed_is_held_on_to(points: ModuleType) -> None:
    upstream = SIMPLETUNER if hasattr(points, "HOOKS") else AI_TOOLKIT
    held = targets(points)
    modules = {target.partition(":")[0] for target in held}
    for point in upstream.points:
        if not point.needed or point.location in held:
            continue
        # What remains: a module or class around held names, calls inside one, what an imported name stands for, and
        # how ai-toolkit finds extensions at all.
        around = any(target.startswith(f"{point.location}.") for target in held) or point.module in modules
        stands_for = any(target.endswith(f":{point.target}") for target in held)
        assert around or stands_for or point.module == "toolkit.extension", point.location


@pytest.mark.parametrize("file", LISTS.values(), ids=LISTS)
def test_the_lists_import_nothing_but_the_standard_library(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
            assert all(name.partition(".")[0] in sys.stdlib_module_names for name in names)
