"""Move modules to where MOVES says, and rewrite every reference to them: imports, dotted names, paths, docs, tests.

    python scripts/move_modules.py

Safe to run again, and on a branch that was begun before the moves: what has moved already is left alone. To take a
branch over the moves, commit, merge the branch that has them (git follows the renames), then run this for what the
branch itself added under old names. ruff, if it is installed, then sorts the imports of the files that changed.

Nothing else is edited. docs/LOG.md, recorded results and test data keep the names of their time.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGE: Final = "src/gracetune"

MOVES: Final = {
    # planning: above models, adapters and optim
    "memory.planning.footprint": "models.footprint",
    "memory.planning.adapter_paths": "adapters.computation",
    "memory.planning.trainable": "adapters.trainable",
    "memory.planning": "planning",
    # kernels in one place
    "adapters.fast.mixing": "kernels.lokr_mixing",
    "adapters.fast.thin": "kernels.low_rank",
    "adapters.fast.onto": "kernels.fused_products",
    "models.wan.norming": "kernels.fused_norm",
    "models.wan.turning": "kernels.fused_rope",
    "models.e4m3": "kernels.e4m3",
    "models.fp8_rows": "kernels.fp8_rows",
    "optim.automagic_kernels": "kernels.automagic",
    # what `gracetune bench` measures
    "cache.bench": "bench.cache",
    "cache.gpu_bench": "bench.cache_gpu",
    "data.bench": "bench.data",
    "data.loader_bench": "bench.loader",
    "memory.bench": "bench.memory",
    "memory.bench_row": "bench.row",
    "memory.spill_bench": "bench.overflow",
    "models.load_bench": "bench.loading",
    "optim.bench": "bench.optim",
    "cli.bench_results": "bench.results",
    "train.bench": "bench.step",
    # baselines: capture and compare
    "telemetry.baseline": "baselines.baseline",
    "telemetry.baseline_text": "baselines.text",
    "telemetry.regression": "baselines.regression",
    "train.baseline": "baselines.capture",
    "train.probing": "baselines.machine_probe",
}
"""Module or package -> its new name, both below gracetune. A package takes along what is not listed by itself."""

INTO_PACKAGES: Final = ("kernels",)
"""Modules that become the `__init__.py` of a package of the same name."""

TEST_MOVES: Final = {
    "unit/memory/test_adapter_paths": "unit/adapters/test_computation",
    "unit/memory/test_estimate_adapters": "unit/adapters/test_trainable",
    "unit/memory/test_estimate": "unit/planning/test_estimate",
    "unit/memory/test_estimate_command": "unit/planning/test_estimate_command",
    "unit/memory/test_estimate_measured": "unit/planning/test_estimate_measured",
    "unit/memory/test_estimate_samples": "unit/planning/test_estimate_samples",
    "unit/memory/test_estimate_sampling": "unit/planning/test_estimate_sampling",
    "unit/memory/test_plan": "unit/planning/test_plan",
    "unit/memory/test_plan_processes": "unit/planning/test_plan_processes",
    "unit/memory/test_plan_properties": "unit/planning/test_plan_properties",
    "unit/cache/test_bench": "unit/bench/test_cache",
    "unit/data/test_bench": "unit/bench/test_data",
    "unit/models/test_load_bench": "unit/bench/test_loading",
    "unit/optim/test_bench": "unit/bench/test_optim",
    "unit/train/bench": "unit/bench/step",
    "unit/telemetry/made_baselines": "unit/baselines/made_baselines",
    "unit/telemetry/test_baseline": "unit/baselines/test_baseline",
    "unit/telemetry/test_regression": "unit/baselines/test_regression",
    "unit/train/test_probing": "unit/baselines/test_machine_probe",
}
"""The same for files and folders below tests."""

NEW_PACKAGES: Final = {
    f"{PACKAGE}/baselines": "Baselines: capture what a short run costs, and compare two of them.",
    f"{PACKAGE}/bench": "Everything `gracetune bench` measures.",
    "tests/unit/baselines": "",
    "tests/unit/bench": "",
    "tests/unit/planning": "",
}
"""Folder -> docstring of its `__init__.py`."""

TEXT: Final = {".py", ".md", ".toml", ".txt", ".sh", ".yaml", ".yml", ".json", ".cfg", ".ini", ""}
UNTOUCHED: Final = (
    ".git-blame-ignore-revs",
    "benchmarks/results/",
    "docs/LOG.md",
    "scripts/move_modules.py",
    "tests/fixtures/",
    "tests/golden/",
    "tests/unit/scripts/test_move_modules.py",
)


def main() -> int:
    for old, new in _file_moves():
        _move(old, new)
    for folder, docstring in NEW_PACKAGES.items():
        _make_package(ROOT / folder, docstring)
    changed = [path for path in _files() if _rewrite(path)]
    _sort_imports(path for path in changed if path.suffix == ".py")
    print(f"{len(changed)} files rewritten")
    return 0


# -- files ------------------------------------------------------------------------------------------------------------


def _file_moves() -> Iterable[tuple[Path, Path]]:
    """Files first, then what is left in a folder that moves as a whole."""
    pairs = [(f"{PACKAGE}/{old.replace('.', '/')}", f"{PACKAGE}/{new.replace('.', '/')}") for old, new in MOVES.items()]
    pairs += [(f"tests/{old}", f"tests/{new}") for old, new in TEST_MOVES.items()]
    for old, new in pairs:
        yield ROOT / f"{old}.py", ROOT / f"{new}.py"
    for old, new in pairs:
        for path in sorted((ROOT / old).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path, ROOT / new / path.relative_to(ROOT / old)
    for name in INTO_PACKAGES:
        yield ROOT / PACKAGE / f"{name}.py", ROOT / PACKAGE / name / "__init__.py"


def _move(old: Path, new: Path) -> None:
    if not old.exists():
        return
    if new.exists():
        sys.exit(
            f"both exist: {old.relative_to(ROOT)} and {new.relative_to(ROOT)}. Merge them, delete the first, repeat"
        )
    new.parent.mkdir(parents=True, exist_ok=True)
    if _git("ls-files", "--", str(old)):
        _git("mv", str(old), str(new))
    else:
        old.rename(new)
    print(f"{old.relative_to(ROOT)} -> {new.relative_to(ROOT)}")
    _remove_if_empty(old.parent)


def _remove_if_empty(folder: Path) -> None:
    if folder.exists() and all(entry.name == "__pycache__" for entry in folder.iterdir()):
        shutil.rmtree(folder)


def _make_package(folder: Path, docstring: str) -> None:
    file = folder / "__init__.py"
    if folder.exists() and not file.exists():
        file.write_text(f'"""{docstring}"""\n' if docstring else "")
        _git("add", str(file))


def _files() -> list[Path]:
    names = _git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    return [
        ROOT / name
        for name in dict.fromkeys(names)
        if not name.startswith(UNTOUCHED) and Path(name).suffix in TEXT and (ROOT / name).is_file()
    ]


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


# -- references -------------------------------------------------------------------------------------------------------


def _rewrite(path: Path) -> bool:
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        return False
    new = rewritten(text, is_python=path.suffix == ".py")
    if new != text:
        path.write_text(new)
    return new != text


def rewritten(text: str, *, is_python: bool) -> str:
    if is_python:
        text = _split_imports(text)
    for replace in _REPLACEMENTS:
        text = replace(text)
    return text


def _split_imports(text: str) -> str:
    """`from gracetune.data import bench` names its module in two parts."""
    moves = {f"gracetune.{old}": f"gracetune.{new}" for old, new in MOVES.items()}
    lines = text.splitlines(keepends=True)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.module]
    for node in sorted(nodes, key=lambda node: node.lineno, reverse=True):
        if not any(f"{node.module}.{alias.name}" in moves for alias in node.names):
            continue
        assert node.end_lineno is not None
        statements = []
        stay = [alias for alias in node.names if f"{node.module}.{alias.name}" not in moves]
        if stay:
            statements.append(ast.unparse(ast.ImportFrom(node.module, stay, 0)))
        for alias in node.names:
            new = moves.get(f"{node.module}.{alias.name}")
            if new is not None:
                above, _, leaf = new.rpartition(".")
                name = alias.asname or alias.name
                statements.append(f"from {above} import {leaf}" + (f" as {name}" if name != leaf else ""))
        before = lines[node.lineno - 1].encode()[: node.col_offset].decode()
        after = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
        joined = "; ".join(statements) if before.strip() else f"\n{before}".join(statements)
        lines[node.lineno - 1 : node.end_lineno] = [before + joined + after]
    return "".join(lines)


def _replacing(names: Mapping[str, str], pattern: str) -> Callable[[str], str]:
    """Replace NAME in the pattern by what a name has become; the longest name that fits."""
    either = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    compiled = re.compile(pattern.replace("NAME", f"(?P<name>{either})"))

    def replace(found: re.Match[str]) -> str:
        start, end = found.span("name")
        whole, begin = found[0], found.start()
        return whole[: start - begin] + names[found["name"]] + whole[end - begin :]

    return lambda text: compiled.sub(replace, text)


_PATHS: Final = {old.replace(".", "/"): new.replace(".", "/") for old, new in MOVES.items()}
_REPLACEMENTS: Final = (
    _replacing(MOVES, r"(?<![\w.])gracetune\.NAME(?![\w])"),
    _replacing(MOVES, r"(?<=`)NAME(?![\w])"),  # `memory.planning.plan`, as docs and docstrings write it
    _replacing(_PATHS, r"(?<![\w/.-])(?:(?:\.\./)*(?:src/)?gracetune/)?NAME(?=\.py\b|/)"),
    _replacing(TEST_MOVES, r"(?<![\w.-])NAME(?=\.py\b|/)"),
    _replacing(
        {old.replace("/", "."): new.replace("/", ".") for old, new in TEST_MOVES.items()}, r"(?<![\w.])NAME(?![\w])"
    ),
)


def _sort_imports(paths: Iterable[Path]) -> None:
    names = [str(path) for path in paths]
    beside = Path(sys.executable).parent / "ruff"
    ruff = str(beside) if beside.exists() else shutil.which("ruff")
    if ruff is None:
        print("no ruff here: run `ruff check --select I --fix` and `ruff format` where there is one")
    elif names:
        subprocess.run([ruff, "check", "--quiet", "--select", "I", "--fix", *names], cwd=ROOT, check=False)
        subprocess.run([ruff, "format", "--quiet", *names], cwd=ROOT, check=False)


if __name__ == "__main__":
    sys.exit(main())
