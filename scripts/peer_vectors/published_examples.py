"""The keys and values of the examples that a peer publishes for our families, for review.

    python scripts/peer_vectors/published_examples.py --peer CHECKOUT --out tests/golden/published/simpletuner

One file for each example lists every key of the config and of the files it names, with its value. What a reviewer added
to a key (`class` and what belongs to it) is kept. A key without a class is reported, and the exit status is 1: decide
what becomes of it, add the class, and run this again. Texts are replaced by our own; the flags inside them are kept.

The classes, as `tests/unit/fidelity/test_published_examples.py` checks them:

- acts: sets the native options in `sets`; where `sets` is empty, the config cannot be read the same without it
- note: a note of `config check` names it; `note` is a part of that note
- rejected: a problem of `config check` names it, or the key in `note` through which alone it acts
- off: at this value, beside the other keys, it asks for nothing, in the peer too: without it the config is the same

Two examples of SimpleTuner name a file of datasets that it does not publish. The rows of such a file are our own.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from common import PEERS

FAMILIES = ("flux", "qwen_image", "sdxl", "stable_audio", "wan")
WEIGHTS = ("black-forest-labs/FLUX.1-", "Qwen/Qwen-Image", "Wan-AI/Wan2.", "ai-toolkit/Wan2.")
WHOLE = ("tread_config", "distillation_config")
"""Mappings that are one value."""
TEXTS = ("validation_prompt", "validation_negative_prompt", "prompts", "prompt")
TEXT = "a text in place of theirs"
NAMED = ("data_backend_config", "lycoris_config")
"""Options of SimpleTuner that name a file of its examples."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="checkout of the peer")
    parser.add_argument("--out", type=Path, required=True, help="folder of the reviewed files")
    requested = parser.parse_args()
    lacking = 0
    for name, documents in examples(requested.peer):
        path = requested.out / f"{name}.json"
        reviewed = json.loads(path.read_text(encoding="utf-8"))["documents"] if path.is_file() else {}
        made = {place: with_classes(data, reviewed.get(place, {})) for place, data in documents.items()}
        unclassed = [(place, key) for place, keys in made.items() for key, row in keys.items() if "class" not in row]
        for place, key in unclassed:
            print(f"{path}: {place}: {key} has no class", file=sys.stderr)
        lacking += len(unclassed)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of(requested.peer.name, made), encoding="utf-8")
    return 1 if lacking else 0


def examples(peer: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name of each example of our families, and its documents by their paths; the config is the first."""
    if peer.name == "ai-toolkit":
        yield from _of_aitoolkit(peer)
    else:
        yield from _of_simpletuner(peer)


def _of_aitoolkit(peer: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    folder = peer / "config" / "examples"
    for path in sorted(folder.rglob("*.y*ml")):
        try:
            data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Numbers)
        except yaml.YAMLError:  # one of them is indented in two ways
            continue
        process = data["config"]["process"][0]
        weights = (process.get("model") or {}).get("name_or_path") or ""
        if process["type"] in ("sd_trainer", "diffusion_trainer") and weights.startswith(WEIGHTS):
            yield path.stem, {path.relative_to(peer).as_posix(): data}


class _Numbers(yaml.SafeLoader):
    """`1e-4` is a number, as ai-toolkit reads it."""


_Numbers.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _of_simpletuner(peer: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    folder = peer / "simpletuner" / "examples"
    for path in sorted(folder.glob("*/config.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:  # one of them has a comma too many
            continue
        if data.get("model_family") not in FAMILIES:
            continue
        documents = {path.relative_to(peer).as_posix(): data}
        for name in NAMED:
            if name in data:
                named = _beside(folder, data[name])
                documents[named.relative_to(peer).as_posix()] = json.loads(named.read_text()) if named.is_file() else []
        yield path.parent.name, documents


def _beside(folder: Path, value: str) -> Path:
    return folder / PurePosixPath(value).relative_to(PurePosixPath(*PurePosixPath(value).parts[:2]))


def with_classes(data: Any, reviewed: dict[str, Any]) -> dict[str, Any]:
    """A row for each key. The rows of a file that is not published are kept as they are."""
    rows = {key: {**reviewed.get(key, {}), "value": value} for key, value in flattened(data)}
    return rows or reviewed


def flattened(data: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by its key, written as our messages write it."""
    name = place.rpartition(".")[2]
    if isinstance(data, dict) and data and name not in WHOLE:
        for key, value in data.items():
            yield from flattened(value, f"{place}.{key}" if place else str(key))
    elif isinstance(data, list) and any(isinstance(item, dict) for item in data):
        for index, item in enumerate(data):
            yield from flattened(item, f"{place}[{index}]")
    elif place:
        yield place, _our_text(data) if name in TEXTS else data


def _our_text(value: Any) -> Any:
    """Flags stand behind a text: `a red kite --ctrl_img kite.jpg`."""
    if isinstance(value, list):
        return [_our_text(item) for item in value]
    if not isinstance(value, str) or not value:
        return value
    flags = re.search(r"\s+--\w+.*$", value)
    return TEXT + (flags[0] if flags else "")


def text_of(peer: str, documents: dict[str, Any]) -> str:
    """One line for each key."""
    places = []
    for place, rows in documents.items():
        lines = [f"   {json.dumps(key)}: {json.dumps(_ordered(row), ensure_ascii=False)}" for key, row in rows.items()]
        places.append(f"  {json.dumps(place)}: {{\n" + ",\n".join(lines) + "\n  }")
    head = f'{{\n "peer": {json.dumps(peer)},\n "commit": {json.dumps(PEERS[peer])},\n "documents": {{\n'
    return head + ",\n".join(places) + "\n }\n}\n"


def _ordered(row: dict[str, Any]) -> dict[str, Any]:
    order = ("value", "class", "sets", "note")
    return {name: row[name] for name in order if name in row}


if __name__ == "__main__":
    sys.exit(main())
