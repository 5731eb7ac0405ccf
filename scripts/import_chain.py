"""Print the longest chain of imports between modules of gracetune, one module per line.

    python scripts/import_chain.py

Each module imports the one below it. Only imports that run when a module is loaded count: not those inside functions,
and not those under TYPE_CHECKING. Modules that import each other are printed on one line and count as one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import grimp

SRC = Path(__file__).resolve().parents[1] / "src"
Imports = Mapping[str, set[str]]


def imports_at_load(package: str) -> Imports:
    """Each module -> the modules of the package it imports when it is loaded."""
    sys.path.insert(0, str(SRC))  # where grimp looks for the package
    graph = grimp.build_graph(package, exclude_type_checking_imports=True, cache_dir=None)
    found: dict[str, set[str]] = {}
    for module in graph.modules:
        late = _lines_of_functions(module)
        found[module] = {
            imported
            for imported in graph.find_modules_directly_imported_by(module)
            if any(
                detail["line_number"] not in late
                for detail in graph.get_import_details(importer=module, imported=imported)
            )
        }
    return found


def _lines_of_functions(module: str) -> set[int]:
    path = SRC.joinpath(*module.split("."))
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_bytes())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {line for node in functions for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def longest_chain(imports: Imports) -> list[frozenset[str]]:
    """From the module that needs most to one that needs none. One entry is a module, or all modules of a cycle."""
    cycles = _cycles(imports)

    @cache
    def chain(start: frozenset[str]) -> tuple[frozenset[str], ...]:
        following = {cycles[imported] for module in start for imported in imports[module]} - {start}
        return (start, *longest(following))

    def longest(starts: Iterable[frozenset[str]]) -> tuple[frozenset[str], ...]:
        chains: list[tuple[frozenset[str], ...]] = [chain(one) for one in sorted(starts, key=sorted)]
        return max(chains, key=len, default=())

    return list(longest(set(cycles.values())))


def _cycles(imports: Imports) -> dict[str, frozenset[str]]:
    """Each module -> every module that it imports and that imports it, through whatever others; itself included."""
    below = {module: _reached(module, imports) for module in imports}
    return {module: frozenset(other for other in below[module] if module in below[other]) for module in imports}


def _reached(start: str, imports: Imports) -> set[str]:
    found, waiting = {start}, [start]
    while waiting:
        new = imports[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def main() -> int:
    found = longest_chain(imports_at_load("gracetune"))
    print(f"{len(found)} modules in the longest chain of imports")
    for cycle in found:
        print(f"  {', '.join(sorted(cycle))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
