"""The two parts of check_aarch64.sh that are easier in Python.

wheel_table.py requirements     what `make demo` asks for on an aarch64 machine, one a line
wheel_table.py table REPORT     pip's installation report as a table; exits 1 if an entry would not run there
"""

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlparse

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Row:
    package: str
    version: str
    tag: str
    runs: bool


def requirements() -> list[str]:
    """Markers are settled here, because pip would settle them for the machine it runs on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [Requirement(line) for line in [*project["dependencies"], *project["optional-dependencies"]["dev"]]]
    target = {"platform_machine": "aarch64", "platform_system": "Linux", "sys_platform": "linux"}
    chosen = [one for one in wanted if one.marker is None or one.marker.evaluate(target)]
    return [str(one).partition(";")[0] for one in chosen]


def row(entry: dict[str, Any]) -> Row:
    """One entry of pip's report. A wheel's tag is the last three parts of its file name: python, abi, platform."""
    name, version = entry["metadata"]["name"], entry["metadata"]["version"]
    file = PurePosixPath(unquote(urlparse(entry["download_info"]["url"]).path))
    if file.suffix != ".whl":
        return Row(name, version, f"no wheel, only {file.name}", runs=False)
    python, abi, platforms = file.stem.split("-")[-3:]
    runs = all(platform == "any" or platform.endswith("_aarch64") for platform in platforms.split("."))
    return Row(name, version, f"{python}-{abi}-{platforms}", runs)


def rows(report: dict[str, Any]) -> list[Row]:
    return sorted((row(entry) for entry in report["install"]), key=lambda found: found.package.lower())


def table(found: list[Row]) -> str:
    wide = max((len(one.package) for one in found), default=0)
    lines = [
        f"{'ok' if one.runs else 'MISSING':<7}  {one.package:<{wide}}  {one.version:<16}  {one.tag}" for one in found
    ]
    missing = sum(not one.runs for one in found)
    return "\n".join([*lines, f"{len(found)} packages, {missing} without an aarch64 wheel"])


def main(arguments: list[str]) -> int:
    match arguments:
        case ["requirements"]:
            print("\n".join(requirements()))
            return 0
        case ["table", path]:
            found = rows(json.loads(Path(path).read_text(encoding="utf-8")))
            print(table(found))
            return 0 if found and all(one.runs for one in found) else 1
    print("usage: wheel_table.py requirements | table REPORT", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
