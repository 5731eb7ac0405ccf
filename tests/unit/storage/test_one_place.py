"""Only storage/ makes files durable, locks them, and reads or writes safetensors files."""

from __future__ import annotations

import ast
from pathlib import Path

import gracetune

PACKAGE = Path(gracetune.__file__).parent
CALLS = {"os.fsync", "os.fdatasync", "os.replace", "os.rename", "os.link", "fcntl.flock", "fcntl.lockf", "os.lockf"}
MODULES = {"safetensors", "tempfile.NamedTemporaryFile", "tempfile.mkstemp"}


def used(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module.partition(".")[0], *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
    return found


def test_no_other_folder_does_what_storage_does() -> None:
    others = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "storage"]
    found = {
        str(path.relative_to(PACKAGE)): sorted(used(ast.parse(path.read_text())) & (CALLS | MODULES)) for path in others
    }
    assert len(others) > 300
    assert {path: names for path, names in found.items() if names} == {}
