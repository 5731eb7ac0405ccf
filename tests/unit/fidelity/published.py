"""The examples that the peers publish, rebuilt from reviewed tables of their keys, and what the readers do with them.

`scripts/peer_vectors/published_examples.py` writes the tables and explains them. They are the only input: no file of a
peer is needed to rebuild a config that has all of an example's keys and values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from gracetune.config import Environment, Resolved, load
from gracetune.config.draft import dotted
from gracetune.errors import ConfigError, Problem

FOLDER = Path(__file__).parents[2] / "golden" / "published"
ROOT = "config.process[0]."
"""Left out where a note lists keys of an ai-toolkit job."""
ENTRY = re.compile(r"^\[\d+\]\.")
"""Left out where a note lists keys of a dataset file."""
STEP = re.compile(r"\[(\d+)\]|\.?([^.\[\]]+)")
REJECTED = {
    "flux.peft-controlnet-lora": "controlnet",
    "sdxl.peft-controlnet-lora": "controlnet",
    "wan2.1-t2v-1.3b-480p-141g.peft-lora+anyflow": "distillation_method",
}
"""Examples of what is not implemented, and the key that requires it."""


@dataclass(frozen=True)
class Row:
    """One key of one document of an example."""

    document: str
    key: str
    value: Any
    kind: str
    sets: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Example:
    name: str
    peer: str
    documents: tuple[str, ...]
    """Paths inside the peer's repository; the first is the config."""
    rows: tuple[Row, ...]

    def without(self, row: Row) -> Example:
        return replace(self, rows=tuple(one for one in self.rows if one is not row))

    def write(self, folder: Path) -> Path:
        """The config, beside the files it names, at the paths they have in the peer's repository."""
        for document in self.documents:
            if not any(row.document == document for row in self.rows):
                continue  # a file that is not published
            path = folder / document
            path.parent.mkdir(parents=True, exist_ok=True)
            data = rebuilt({row.key: row.value for row in self.rows if row.document == document})
            path.write_text(yaml.safe_dump(data) if path.suffix != ".json" else json.dumps(data), encoding="utf-8")
        return folder / self.documents[0]

    @property
    def is_rejected(self) -> bool:
        return any(row.kind == "rejected" for row in self.rows)


def examples() -> dict[str, Example]:
    found = {}
    for path in sorted(FOLDER.glob("*/*.json")):
        table = json.loads(path.read_text(encoding="utf-8"))
        rows = [
            Row(document, key, row["value"], row["class"], tuple(row.get("sets", ())), row.get("note", ""))
            for document, keys in table["documents"].items()
            for key, row in keys.items()
        ]
        found[path.stem] = Example(path.stem, table["peer"], tuple(table["documents"]), tuple(rows))
    return found


def rebuilt(values: Mapping[str, Any]) -> Any:
    """A document from its values by key, such as `[0].video.num_frames`."""
    root: dict[str, Any] = {}
    for key, value in values.items():
        node = root
        steps = [int(at) if at else name for at, name in STEP.findall(key)]
        for step in steps[:-1]:
            node = node.setdefault(step, {})
        node[steps[-1]] = value
    return _with_lists(root)


def _with_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    inside = {key: _with_lists(value) for key, value in node.items()}
    return [inside[at] for at in sorted(inside)] if inside and all(isinstance(key, int) for key in inside) else inside


@dataclass(frozen=True)
class Outcome:
    """What `config check` has to say about an example."""

    resolved: Resolved | None
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    @property
    def config(self) -> Any:
        return None if self.resolved is None else self.resolved.config

    def sets(self, row: Row) -> set[str]:
        """The native options that got their value from this key."""
        if self.resolved is None:
            return set()
        origins = self.resolved.origins.items()
        return {
            dotted(path) for path, origin in origins
            if origin.kind == "file" and is_part(origin.key, row.key) and origin.location.endswith(row.document)
        }  # fmt: skip

    def notes_about(self, row: Row) -> list[str]:
        """Notes that name the key or a mapping it is in: whole, or without its place where keys are listed."""
        return [note for note in self.notes if any(_names(note, key) for key in (row.key, *_around(row.key)))]

    def problems_about(self, row: Row) -> list[Problem]:
        return [problem for problem in self.problems if is_part(row.key, problem.key)]


def is_part(key: str, whole: str) -> bool:
    return key == whole or key.startswith((f"{whole}.", f"{whole}["))


def _around(key: str) -> list[str]:
    """The mappings that a key is in, without the ones that every key of a file is in."""
    parts = key.removeprefix(ROOT).split(".")
    prefix = ROOT if key.startswith(ROOT) else ""
    return [prefix + ".".join(parts[:count]) for count in range(1, len(parts)) if not parts[count - 1].endswith("]")]


def _names(note: str, key: str) -> bool:
    listed = re.escape(ENTRY.sub("", key.removeprefix(ROOT)))
    whole = rf"(^|[ `]){re.escape(key)}($|[ `:,])"
    return re.search(whole, note) is not None or re.search(f": ([^:]*, )?{listed}(,|$)", note) is not None


def read(example: Example, folder: Path, *, allow_unsupported: bool = False) -> Outcome:
    path = example.write(folder)
    try:
        resolved = load(path, environment=Environment({}), allow_unsupported=allow_unsupported)
    except ConfigError as error:
        return Outcome(None, tuple(error.problems), tuple(getattr(error, "notes", ())))
    return Outcome(resolved, (), resolved.notes)
