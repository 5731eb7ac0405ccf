"""Move modules to storage/, hostmem/ and data/staging/, and rewrite every reference to them.

    python scripts/move_modules_host.py

Moves a file with `git mv` where it is still at its old place, then replaces its old name in all tracked files: dotted
names, `from package import module`, and paths. Running it again changes nothing, so a branch that started before the
move can run it, commit, and merge.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

MODULES = {
    "durable": "storage.atomic",
    "cache.locks": "storage.locks",
    "checkpoint.files": "storage.checksums",
    "memory.weights.files": "storage.safetensors_headers",
    "data.draws": "seeded_random",
    "data.backends.arena": "hostmem.segment_writer",
    "data.backends.segment": "hostmem.segment",
    "data.backends.compression": "hostmem.compression",
    "data.backends.numa": "hostmem.numa",
    "data.backends.share": "hostmem.sharing",
    "cache.slabs": "cache.residence",
    "memory.hint": "hostmem.hint",
    "memory.pages": "hostmem.pages",
    "data.backends.estimate": "data.staging.estimate",
    "data.backends.guard": "data.staging.guard",
    "data.backends.progress": "data.staging.progress",
    "data.backends.rehearsal": "data.staging.rehearsal",
    "data.backends.report": "data.staging.report",
    "data.backends.selection": "data.staging.selection",
    "data.backends.stager": "data.staging.stager",
    "data.backends.staging": "data.staging.copying",
}
"""Below gracetune: old name -> new name."""

NAMES = {
    **dict.fromkeys(
        ["cache.locks", "storage.locks"],
        dict.fromkeys(["is_temporary", "sweep", "temporary_name", "unfinished", "write_file"], "storage.atomic"),
    ),
    "memory.weights.destinations": {"TORCH_DTYPES": "storage.safetensors_files"},
    "adapters.layer": {"seeded": "seeded_random"},
    "memory.errors": {"WeightFileError": "storage.errors"},
    "data.backends.errors": {"StagingError": "hostmem.errors"},
    "data.backends.handle": {"SegmentHandle": "hostmem.segment"},
    "memory.sensors": {"HostReading": "hostmem.sensors", "HostSensor": "hostmem.sensors"},
    "cache.slabs": {
        "MemorySlab": "hostmem.slab",
        "Slab": "hostmem.slab",
        "view_for_gpu": "hostmem.slab",
        "ManagedSlab": "memory.managed_slab",
    },
}
"""Module -> names that left it -> where each is now."""

TESTS = {
    "tests/unit/test_durable.py": "tests/unit/storage/test_atomic.py",
    "tests/unit/memory/test_weight_files.py": "tests/unit/storage/test_safetensors_headers.py",
    "tests/unit/data/test_draws.py": "tests/unit/test_seeded_random.py",
    "tests/unit/data/backends/test_arena.py": "tests/unit/hostmem/test_segments.py",
    "tests/unit/data/backends/test_compression.py": "tests/unit/hostmem/test_compression.py",
    "tests/unit/data/backends/test_numa.py": "tests/unit/hostmem/test_numa.py",
}

PACKAGES = {
    "src/gracetune/storage": "Atomic writes, locks, and safetensors headers and writes.",
    "src/gracetune/hostmem": "Host memory.",
    "src/gracetune/data/staging": "Staging: a dataset's files are copied into host memory before training.",
}
"""Docstring of a package's __init__.py, where there is none yet."""

TEXT = (".py", ".md", ".toml", ".txt", ".sh", ".yml", ".yaml", ".cfg", ".c")
UNTOUCHED = ("scripts/move_modules_host.py", "docs/LOG.md", "tests/golden/")


def main() -> None:
    paths = {f"src/gracetune/{_path(old)}": f"src/gracetune/{_path(new)}" for old, new in MODULES.items()} | TESTS
    for folder, docstring in PACKAGES.items():
        start = ROOT / folder / "__init__.py"
        start.parent.mkdir(parents=True, exist_ok=True)
        if not start.exists():
            start.write_text(f'"""{docstring}"""\n')
    for old, new in paths.items():
        if (ROOT / old).exists():
            (ROOT / new).parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["git", "mv", old, new], cwd=ROOT, check=True)
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in tracked.splitlines():
        if name.endswith(TEXT) and not name.startswith(UNTOUCHED):
            _rewrite(ROOT / name)


def _path(module: str) -> str:
    return f"{module.replace('.', '/')}.py"


def _rewrite(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    changed = text
    for module, moved in NAMES.items():
        changed = _import_from_new_homes(changed, module, moved)
        for name, home in moved.items():
            changed = re.sub(rf"\bgracetune\.{re.escape(module)}\.{name}\b", f"gracetune.{home}.{name}", changed)
    for old, new in MODULES.items():
        changed = re.sub(rf"\bgracetune\.{re.escape(old)}\b(?!\.py)", f"gracetune.{new}", changed)
        changed = re.sub(rf"`{re.escape(old)}`" if "." in old else r"(?!)", f"`{new}`", changed)
        changed = re.sub(rf"(?<![\w.-]){re.escape(_path(old))}\b" if "." in old else r"(?!)", _path(new), changed)
        changed = re.sub(rf"gracetune/{re.escape(_path(old))}\b", f"gracetune/{_path(new)}", changed)
        package, _, module = old.rpartition(".")
        target, _, renamed = new.rpartition(".")
        pattern = rf"^([ \t]*)from gracetune\.{re.escape(package)} import {module}$"
        imported = renamed if module == renamed else f"{renamed} as {module}"
        changed = re.sub(pattern, rf"\1from gracetune.{target} import {imported}", changed, flags=re.MULTILINE)
    for old, new in TESTS.items():
        changed = changed.replace(old, new).replace(old.removeprefix("tests/"), new.removeprefix("tests/"))
    if changed != text:
        file.write_text(changed, encoding="utf-8")


def _import_from_new_homes(text: str, module: str, moved: dict[str, str]) -> str:
    def split(found: re.Match[str]) -> str:
        names = [name.strip() for name in found[2].strip("()").split(",") if name.strip()]
        if not moved.keys() & {name.split()[0] for name in names}:
            return found[0]
        homes: dict[str, list[str]] = {}
        for name in names:
            homes.setdefault(moved.get(name.split()[0], module), []).append(name)
        lines = (f"{found[1]}from gracetune.{home} import {', '.join(inside)}\n" for home, inside in homes.items())
        return "".join(lines)

    pattern = rf"^([ \t]*)from gracetune\.{re.escape(module)} import (\([^)#]*\)|[^\n(#]*)\n"
    return re.sub(pattern, split, text, flags=re.MULTILINE)


if __name__ == "__main__":
    main()
