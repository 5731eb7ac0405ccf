"""Every file that affects a result changes the fingerprint of its part, and of no other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gracetune.config.run_config import Model
from gracetune.models.fingerprint import part_fingerprints
from gracetune.models.registry import spec_of
from gracetune.models.source import open_source
from runs.made_runs import FLAVOURS

TinyModel = Callable[[str, str], Path]


def fingerprints(family: str, folder: Path) -> dict[str, str]:
    source = replace(open_source(Model(family=family, path=str(folder))), fingerprints=folder / "remembered.json")
    return part_fingerprints(source, spec_of(family).inspect(source))


def change(file: Path) -> None:
    if file.suffix == ".json":
        values = json.loads(file.read_bytes())
        values["changed"] = not values.get("changed", False)
        file.write_text(json.dumps(values))
    else:
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)


@pytest.mark.parametrize("family", FLAVOURS)
def test_each_file_counts_for_its_part(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model(family, FLAVOURS[family]), folder)
    before = fingerprints(family, folder)
    assert {"vae", "text_encoder", "tokenizer", "scheduler", "model_index.json"} <= before.keys()
    denoisers = {
        one.component for one in spec_of(family).inspect(open_source(Model(family=family, path=str(folder)))).experts
    }
    for file in [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "remembered.json"]:
        part = file.relative_to(folder).parts[0]
        kept = file.read_bytes()
        change(file)
        now = fingerprints(family, folder)
        file.write_bytes(kept)
        weights_elsewhere = part in denoisers and file.suffix == ".safetensors"  # a trained one's are in `model`
        unused = file.name == "generation_config.json"  # encoders generate nothing
        expected = set() if weights_elsewhere or unused else {part}
        assert {name for name in before if now.get(name) != before[name]} == expected, file
    assert fingerprints(family, folder) == before


def test_writer_keys_and_unrelated_files_do_not_count(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("flux", "dev"), folder)
    before = fingerprints("flux", folder)
    for file in ("vae/config.json", "scheduler/scheduler_config.json", "model_index.json", "text_encoder/config.json"):
        values = json.loads((folder / file).read_bytes())
        written = {"_diffusers_version": "0.1.0", "transformers_version": "4.0", "_name_or_path": "elsewhere"}
        (folder / file).write_text(json.dumps({**values, **written}))
    (folder / "vae" / "README.md").write_text("notes")
    (folder / "tokenizer" / ".DS_Store").write_text("the file browser's")
    assert fingerprints("flux", folder) == before
