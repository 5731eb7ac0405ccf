"""The list of what a release needs, for scripts/release.sh: CycloneDX 1.6 JSON on standard output.

    python scripts/sbom.py WHEEL [FILE...] > gracetune-0.1.0.cdx.json

Components are the packages that the wheel requires, directly and indirectly, in the versions that are installed here,
with the licences that their metadata states; and the wheel and the other files of the release, with their hashes. The
same installation and files give the same bytes.

Ours and not `cyclonedx-py`: that lists an environment, with the tools that happen to be in it, and not what a package
requires; it knows nothing of the release's own files; and it brings a dozen packages of its own.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import uuid
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SPECIFICATION = "1.6"
UNKNOWN = "unknown"
_LONGEST_NAME = 100
_CLASSIFIER = "License :: "


def main(arguments: list[str]) -> int:
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    wheel, *others = map(Path, arguments)
    root = metadata_of(wheel)
    try:
        installed = required(root.get_all("Requires-Dist") or [])
    except PackageNotFoundError as error:
        print(f"sbom: {error.name} is required and is not installed here: make environment", file=sys.stderr)
        return 1
    print(json.dumps(document(root, installed, [wheel, *others]), indent=2, ensure_ascii=False))
    return 0


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return HeaderParser().parsestr(archive.read(name).decode())


@dataclass
class Package:
    distribution: Distribution
    extras: set[str]

    def needs(self) -> list[Requirement]:
        return list(needed(self.distribution.requires or [], self.extras))


def required(lines: Iterable[str]) -> dict[str, Package]:
    """By normalized name: what these requirements need on this machine, and what that needs in turn."""
    found: dict[str, Package] = {}
    waiting = list(needed(lines, ()))
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        known = found.get(name)
        if known is not None and one.extras <= known.extras:
            continue
        extras = one.extras | (known.extras if known is not None else set())
        found[name] = Package(distribution(one.name), extras)
        waiting += found[name].needs()
    return dict(sorted(found.items()))


def needed(lines: Iterable[str], extras: Iterable[str]) -> Iterator[Requirement]:
    """Requirements that hold for this machine and these extras."""
    for line in lines:
        one = Requirement(line)
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield one


def document(root: Message, installed: dict[str, Package], files: list[Path]) -> dict[str, Any]:
    own = component("application", root["Name"], root["Version"], licences(root))
    refs = {name: reference(name, one.distribution.version) for name, one in installed.items()}
    content = {
        "metadata": {
            "component": own,
            "properties": [
                {"name": "gracetune:python", "value": platform.python_version()},
                {"name": "gracetune:platform", "value": f"{platform.system()} {platform.machine()}"},
            ],
        },
        "components": [
            *(
                component("library", name, one.distribution.version, licences(one.distribution.metadata))
                for name, one in installed.items()
            ),
            *(file_component(path) for path in sorted(files)),
        ],
        "dependencies": [
            {"ref": own["bom-ref"], "dependsOn": direct(needed(root.get_all("Requires-Dist") or [], ()), refs)},
            *({"ref": refs[name], "dependsOn": direct(one.needs(), refs)} for name, one in installed.items()),
        ],
    }
    # Named after its content, so that the same release gives the same document.
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(content, sort_keys=True))
    return {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPECIFICATION}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPECIFICATION,
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        **content,
    }


def direct(needs: Iterable[Requirement], refs: dict[str, str]) -> list[str]:
    return sorted({refs[canonicalize_name(one.name)] for one in needs})


def component(kind: str, name: str, version: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    purl = reference(name, version)
    return {"type": kind, "bom-ref": purl, "name": name, "version": version, "licenses": found, "purl": purl}


def reference(name: str, version: str) -> str:
    return f"pkg:pypi/{canonicalize_name(name)}@{quote(version)}"


def licences(metadata: Any) -> list[dict[str, Any]]:
    """As the package states them: an SPDX expression, else the classifiers, else the licence's name; never guessed."""
    expression = metadata.get("License-Expression")
    if expression:
        return [{"expression": expression}]
    classifiers = [line for line in metadata.get_all("Classifier") or [] if line.startswith(_CLASSIFIER)]
    names = [line.rpartition(" :: ")[2] for line in classifiers]
    if not names:
        first = (metadata.get("License") or "").strip().partition("\n")[0].strip()  # some have the whole text there
        names = [first] if 0 < len(first) <= _LONGEST_NAME else []
    return [{"license": {"name": name}} for name in names or [UNKNOWN]]


def file_component(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    hashes = (("SHA-256", hashlib.sha256(content)), ("SHA-512", hashlib.sha512(content)))
    return {
        "type": "file",
        "bom-ref": f"file:{path.name}",
        "name": path.name,
        "hashes": [{"alg": name, "content": digest.hexdigest()} for name, digest in hashes],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
