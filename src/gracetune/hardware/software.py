"""Versions of Python, torch and other required libraries, without importing them.

Importing torch takes seconds and may initialize CUDA. Its version and the CUDA version it was built for are parsed from
the text of `torch/version.py`.
"""

from __future__ import annotations

import ast
import importlib.util
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from gracetune.hardware.machine import Software

MINIMUM_TORCH = "2.11"
"""Checked separately, because it also applies to a source tree that is not installed. Keep it equal to
pyproject.toml."""
REPORTED = (
    "accelerate",
    "cuda-bindings",
    "diffusers",
    "lycoris-lora",
    "peft",
    "pydantic",
    "safetensors",
    "transformers",
)
"""Libraries that every report lists, required or not."""


def read_software() -> Software:
    torch = read_torch(_torch_folder())
    libraries = sorted({*REPORTED, *minimum_versions()} - {"torch"})
    return Software(
        python=platform.python_version(),
        torch=torch.get("__version__") or installed_version("torch"),
        torch_cuda=torch.get("cuda"),
        torch_hip=torch.get("hip"),
        libraries={name: installed_version(name) for name in libraries},
    )


def installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def minimum_versions() -> dict[str, str]:
    """The minimum versions of required libraries, from gracetune's package metadata (pyproject.toml).

    Empty if gracetune runs from a source tree without installation. Requirements of optional extras are left out.
    """
    try:
        requirements = metadata.requires("gracetune") or []
    except metadata.PackageNotFoundError:
        return {}
    return parse_minimums(requirements)


def parse_minimums(requirements: list[str]) -> dict[str, str]:
    """`["torch>=2.11", "wandb>=0.17; extra == 'wandb'"]` -> `{"torch": "2.11"}`."""
    found: dict[str, str] = {}
    for requirement in requirements:
        specifier, _, marker = requirement.partition(";")
        match = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", specifier)
        minimum = re.search(r">=\s*([0-9][0-9A-Za-z.]*)", specifier)
        if match is not None and "extra" not in marker:
            found[re.sub(r"[-_.]+", "-", match[1]).lower()] = minimum[1] if minimum else "0"
    return found


def release_numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: `2.11.0a0+nv25.10` -> (2, 11, 0).

    Letters are ignored, because vendor pre-releases such as 2.11.0a0 have all features of 2.11 that gracetune needs.
    """
    match = re.match(r"[0-9]{1,9}(?:\.[0-9]{1,9})*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def is_at_least(version: str, minimum: str) -> bool:
    found, wanted = release_numbers(version), release_numbers(minimum)
    width = max(len(found), len(wanted))
    return found + (0,) * (width - len(found)) >= wanted + (0,) * (width - len(wanted))


def _torch_folder() -> Path | None:
    spec = importlib.util.find_spec("torch")  # locates a top-level package without importing it
    return Path(spec.origin).parent if spec and spec.origin else None


def read_torch(folder: Path | None) -> Mapping[str, str]:
    if folder is None:
        return {}
    try:
        return parse_torch_version((folder / "version.py").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return {}


def parse_torch_version(text: str) -> dict[str, str]:
    """The string constants assigned at the top of `torch/version.py`."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # ast raises all four for malformed input
        return {}
    found: dict[str, str] = {}
    for statement in module.body:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        else:
            continue
        if isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str):
            found |= {target.id: statement.value.value for target in targets if isinstance(target, ast.Name)}
    return found
