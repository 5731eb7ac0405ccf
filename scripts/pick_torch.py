"""Reuse the machine's CUDA build of torch, or install our own? For bootstrap.sh; needs only the standard library.

pick_torch.py decide          run by the machine's Python: whether its torch is worth keeping, and why
pick_torch.py constraints     run by .venv's Python: constraints.txt, adapted to what the machine brings along

Rented machines carry vendor builds that no index has: pip must never replace one, nor the libraries tuned to it.
"""

from __future__ import annotations

import contextlib
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?>=([0-9][^\s,;]*)")
_PIN = re.compile(r"([A-Za-z0-9._-]+)==(\S+)")


@dataclass(frozen=True)
class Decision:
    """Whether to reuse the torch of the running interpreter."""

    reuse: bool
    reason: str
    pth_lines: tuple[str, ...] = ()
    """For a .pth file that leads .venv to it, if it lives in a virtual environment of its own."""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def release(version: str) -> tuple[int, ...]:
    """`2.11.0a0+vendor.7` -> (2, 11, 0): a vendor's snapshot from just before a release counts as that release."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def at_least(version: str, bound: str) -> bool:
    """Compared as release numbers of equal length, so that 2.11 counts as 2.11.0."""
    have, want = release(version), release(bound.removesuffix(".dev0"))
    width = max(len(have), len(want))
    return have + (0,) * (width - len(have)) >= want + (0,) * (width - len(want))


def lower_bounds(pyproject: Path) -> dict[str, str]:
    """Name -> lower bound of every requirement, development tools included."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    lines = [*project.get("dependencies", []), *project.get("optional-dependencies", {}).get("dev", [])]
    bounds: dict[str, str] = {}
    for line in lines:
        match = _REQUIREMENT.match(line)
        if match is None:
            raise SystemExit(f"{pyproject}: found requirement {line!r}, expected name>=version first")
        bounds[canonical(match[1])] = match[2]
    return bounds


def decide(bound: str) -> Decision:
    """Import torch in this very interpreter: a build that does not import is not a build to keep."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # some builds greet on import; stdout is our answer
            import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of the build is missing
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return Decision(False, "no torch here")
        return Decision(False, f"the torch here does not import ({' '.join(str(error).split())})")
    version, cuda = str(torch.__version__), torch.version.cuda
    if cuda is None:
        return Decision(False, f"the torch here ({version}) has no CUDA")
    if not at_least(version, bound):
        return Decision(False, f"the torch here ({version}) is older than {bound.removesuffix('.dev0')}")
    if "torch" not in {canonical(found.metadata["Name"] or "") for found in metadata.distributions()}:
        return Decision(False, f"the torch here ({version}) has no package metadata, so pip would not see it")
    return Decision(True, f"torch {version} with CUDA {cuda} is already here", _pth_lines())


def _pth_lines() -> tuple[str, ...]:
    """A venv made with `--system-site-packages` sees the packages of the base Python, never those of another venv."""
    if sys.prefix == sys.base_prefix:
        return ()
    folders = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    return tuple(f"import site; site.addsitedir({folder!r})" for folder in folders)


def brought_along() -> dict[str, str]:
    """Name -> version of what this interpreter sees outside its own prefix, unless something inside shadows it."""
    outside: dict[str, str] = {}
    own: set[str] = set()
    for distribution in metadata.distributions():
        name = canonical(distribution.metadata["Name"] or "")
        inside = Path(str(distribution.locate_file(""))).resolve().is_relative_to(Path(sys.prefix).resolve())
        if inside:
            own.add(name)
        elif name not in own:
            outside.setdefault(name, distribution.version)
    return outside


def adapt(pins: str, bounds: Mapping[str, str], outside: Mapping[str, str]) -> list[str]:
    """Our pins, but the machine's torch stays exactly as it is, and its other packages stay where new enough."""
    adapted = []
    for line in pins.splitlines():
        match = _PIN.fullmatch(line.strip())
        if match is None:
            continue  # a comment or an empty line
        name = canonical(match[1])
        if name not in outside:
            adapted.append(line)
        elif name == "torch":
            adapted.append(f"torch=={outside[name]}")
        elif name in bounds and not at_least(outside[name], bounds[name]):
            adapted.append(line)
    return adapted


def main(arguments: list[str]) -> int:
    bounds = lower_bounds(ROOT / "pyproject.toml")
    if arguments == ["decide"]:
        decision = decide(bounds["torch"])
        print("reuse" if decision.reuse else "install", decision.reason, *decision.pth_lines, sep="\n")
        return 0
    if arguments == ["constraints"]:
        pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
        print("\n".join(adapt(pins, bounds, brought_along())))
        return 0
    print("usage: pick_torch.py decide | constraints", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
