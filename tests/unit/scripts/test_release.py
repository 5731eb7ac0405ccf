"""A release is built from the commit alone, and its list names everything that it needs."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gracetune import __version__

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SPDX = re.compile(r"[A-Za-z0-9.+-]+(?: (?:AND|OR|WITH) [A-Za-z0-9.+-]+)*")


def of(text: str) -> Any:
    """The metadata of a package, as importlib gives it."""

    class Stated(Distribution):
        def read_text(self, filename: str) -> str | None:
            return text if filename == "METADATA" else None

        def locate_file(self, path: Any) -> Path:
            return Path(path)

    return Stated().metadata


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ("License-Expression: MIT OR Apache-2.0", [{"expression": "MIT OR Apache-2.0"}]),
        ("License: BSD\nClassifier: License :: OSI Approved :: MIT License", [{"license": {"name": "MIT License"}}]),
        ("License: Apache 2.0", [{"license": {"name": "Apache 2.0"}}]),
        ("License: " + "x" * 200, [{"license": {"name": "unknown"}}]),
        ("Classifier: Topic :: Software Development", [{"license": {"name": "unknown"}}]),
    ],
)
def test_a_licence_is_what_the_package_states(sbom: ModuleType, metadata: str, expected: list[Any]) -> None:
    assert sbom.licences(of(f"Metadata-Version: 2.4\nName: a\nVersion: 1\n{metadata}\n")) == expected


def test_requirements_are_followed_through_extras_and_markers(sbom: ModuleType) -> None:
    found = sbom.required(["transformers>=5", "pytest; python_version < '3'", "pytest; extra == 'dev'"])
    assert {"transformers", "huggingface-hub", "safetensors"} <= found.keys()
    assert "pytest" not in found


def test_what_is_required_and_not_installed_is_named(tmp_path: Path) -> None:
    wheel = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a-1.dist-info/METADATA", "Name: a\nVersion: 1\nRequires-Dist: no-such-package-here\n")
    done = subprocess.run([sys.executable, ROOT / "scripts/sbom.py", wheel], capture_output=True, text=True)
    assert done.returncode == 1
    assert "no-such-package-here is required and is not installed here" in done.stderr


# -- a whole release --------------------------------------------------------------------------------------------------


def released(checkout: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["bash", checkout / "scripts/release.sh", "--python", sys.executable, folder]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone: this checkout may have changes that no commit has."""
    folder = tmp_path_factory.mktemp("release") / "checkout"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", folder], check=True)
    return folder


@pytest.fixture(scope="module")
def release(checkout: Path) -> Path:
    folder = checkout.parent / "dist"
    done = released(checkout, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.full
class TestRelease:
    def test_holds_the_files_and_their_checksums(self, release: Path) -> None:
        names = {path.name for path in release.iterdir()}
        assert {f"gracetune-{__version__}.tar.gz", f"gracetune-{__version__}.cdx.json", "SHA256SUMS"} < names
        assert len(names) == 4
        for line in (release / "SHA256SUMS").read_text().splitlines():
            digest, name = line.split()
            assert hashlib.sha256((release / name).read_bytes()).hexdigest() == digest

    def test_the_wheel_is_the_package(self, release: Path) -> None:
        (wheel,) = release.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = set(archive.namelist())
        assert "gracetune/memory/native/_uvm.so" in names
        assert {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")} <= names
        with tarfile.open(release / f"gracetune-{__version__}.tar.gz") as archive:
            assert not [name for name in archive.getnames() if name.endswith((".so", ".pyc"))]

    def test_lists_every_requirement_and_the_files(self, release: Path) -> None:
        found = json.loads((release / f"gracetune-{__version__}.cdx.json").read_text())
        libraries = {one["name"]: one for one in found["components"] if one["type"] == "library"}
        for line in PROJECT["dependencies"]:
            name = canonicalize_name(Requirement(line).name)
            assert libraries[name]["version"] == distribution(name).version
        assert not {"pytest", "ruff", "mypy", "hypothesis"} & libraries.keys(), "tools are no part of it"
        refs = {entry["ref"]: entry["dependsOn"] for entry in found["dependencies"]}
        for name, one in libraries.items():
            needs = [Requirement(line) for line in distribution(name).requires or []]
            plain = {canonicalize_name(need.name) for need in needs if need.marker is None}
            assert plain <= libraries.keys(), name
            assert {libraries[need]["bom-ref"] for need in plain} <= set(refs[one["bom-ref"]])
        for one in (one for one in found["components"] if one["type"] == "file"):
            content = (release / one["name"]).read_bytes()
            digests = {entry["alg"]: entry["content"] for entry in one["hashes"]}
            assert digests == {"SHA-256": hashlib.sha256(content).hexdigest(),
                               "SHA-512": hashlib.sha512(content).hexdigest()}  # fmt: skip

    def test_the_list_is_cyclonedx(self, release: Path) -> None:
        """The fields that the schema of 1.6 requires, and their forms."""
        found = json.loads((release / f"gracetune-{__version__}.cdx.json").read_text())
        assert (found["bomFormat"], found["specVersion"], found["version"]) == ("CycloneDX", "1.6", 1)
        assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", found["serialNumber"])
        everything = [found["metadata"]["component"], *found["components"]]
        refs = [one["bom-ref"] for one in everything]
        assert len(set(refs)) == len(refs)
        for one in everything:
            assert one["type"] in ("application", "library", "file")
            assert one["name"]
            if one["type"] == "file":
                continue
            assert re.fullmatch(r"pkg:pypi/[a-z0-9.-]+@[A-Za-z0-9.%!-]+", one["purl"])
            assert one["licenses"]
            for licence in one["licenses"]:
                assert set(licence) in ({"expression"}, {"license"})
                assert SPDX.fullmatch(licence["expression"]) if "expression" in licence else licence["license"]["name"]
            assert not (len(one["licenses"]) > 1 and "expression" in one["licenses"][0])
        for entry in found["dependencies"]:
            assert {entry["ref"], *entry["dependsOn"]} <= set(refs)

    def test_the_same_files_give_the_same_list(self, release: Path) -> None:
        files = [*release.glob("*.whl"), *release.glob("*.tar.gz")]
        command = [sys.executable, ROOT / "scripts/sbom.py", *files]
        again = subprocess.run(command, capture_output=True, check=True).stdout
        assert again == (release / f"gracetune-{__version__}.cdx.json").read_bytes()

    def test_is_rejected_over_another_and_of_uncommitted_changes(self, checkout: Path, release: Path) -> None:
        done = released(checkout, release)
        assert done.returncode == 1
        assert "holds a release" in done.stderr
        (checkout / "stray.txt").write_text("")
        done = released(checkout, checkout.parent / "third")
        assert done.returncode == 1
        assert "no commit has" in done.stderr
        assert not (checkout.parent / "third").exists()
