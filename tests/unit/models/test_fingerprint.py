"""Every file that affects a result changes the fingerprint of its part, and of no other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from gracetune.config.run_config import Model
from gracetune.models import fingerprint as module
from gracetune.models.fingerprint import fingerprint, part_fingerprints
from gracetune.models.registry import spec_of
from gracetune.models.source import open_source
from gracetune.storage.safetensors_headers import WeightFileError, open_weights
from runs.made_runs import FLAVOURS

ANY_TIME = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def of(*files: Path, digest_file: Path | None = None) -> str:
    return fingerprint([one for file in files for one in open_weights(file).entries.values()], digest_file)


def written(file: Path, tensors: Mapping[str, Tensor], **metadata: str) -> Path:
    save_file(dict(tensors), file, metadata)
    return file


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Larger than one read: a table of many rows, and small tensors."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"table": torch.randn(700, 1000, generator=generator), "small": torch.randn(7, generator=generator)}
    file = written(tmp_path / "model.safetensors", tensors, format="pt")
    assert file.stat().st_size > 2 * module._CHUNK
    return file


@ANY_TIME
@given(position=st.integers(0, 2_800_027), bit=st.integers(0, 7))
def test_any_flipped_bit_changes_the_fingerprint(weights: Path, position: int, bit: int) -> None:
    before, start = of(weights), min(one.start for one in open_weights(weights).entries.values())
    with weights.open("r+b") as file:
        file.seek(start + position)
        byte = file.read(1)[0]
        file.seek(start + position)
        file.write(bytes([byte ^ 1 << bit]))
        file.flush()
        assert of(weights) != before
        file.seek(start + position)
        file.write(bytes([byte]))
    assert of(weights) == before


def test_replaced_row_of_an_embedding_table_changes_the_fingerprint(weights: Path, tmp_path: Path) -> None:
    tensors = load_file(weights)
    tensors["table"][333] += 0.01
    assert of(written(tmp_path / "other.safetensors", tensors, format="pt")) != of(weights)


def test_names_folders_shards_and_metadata_do_not_count(weights: Path, tmp_path: Path) -> None:
    tensors, blob = load_file(weights), tmp_path / "0123456789abcdef"  # how the hub's cache names files behind links
    blob.symlink_to(weights)
    (tmp_path / "deeper").mkdir()
    moved = Path(shutil.copyfile(weights, tmp_path / "deeper" / "b.safetensors"))
    shards = [written(tmp_path / f"{name}.safetensors", {name: tensors[name]}) for name in tensors]
    noted = written(tmp_path / "noted.safetensors", tensors, format="np", by="somebody")
    found = [of(weights), of(blob), of(moved), of(*shards), of(*reversed(shards)), of(noted)]
    assert len({*found}) == 1


def test_other_rewrites_change_the_fingerprint(weights: Path, tmp_path: Path) -> None:
    tensors = load_file(weights)
    ways = {
        "cast": {name: tensor.half() for name, tensor in tensors.items()},
        "renamed": {("other" if name == "small" else name): tensor for name, tensor in tensors.items()},
        "transposed": {**tensors, "table": tensors["table"].T.contiguous()},
        "reshaped": {**tensors, "table": tensors["table"].reshape(1000, 700)},
        "exchanged": {"small": tensors["table"], "table": tensors["small"]},
        "one left out": {"table": tensors["table"]},
    }
    found = {of(written(tmp_path / f"{way}.safetensors", rewritten)) for way, rewritten in ways.items()}
    assert len({*found, of(weights)}) == len(ways) + 1


# -- the digest file --------------------------------------------------------------------------------------------------


def test_digests_are_reused_while_the_file_is_unchanged(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, read = tmp_path / "new" / "fingerprints.json", []
    digest = module._digest
    monkeypatch.setattr(module, "_digest", lambda *given: read.append(given[1].name) or digest(*given))
    before = of(weights)
    assert sorted(read) == ["small", "table"]
    assert of(weights, digest_file=memory) == before
    read.clear()
    assert of(weights, digest_file=memory) == before
    assert read == []
    tensors = load_file(weights)
    tensors["table"][0] += 1
    written(weights, tensors, format="pt")
    assert of(weights, digest_file=memory) == of(weights) != before


def test_kept_digests_are_extended(weights: Path, tmp_path: Path) -> None:
    memory, entries = tmp_path / "fingerprints.json", open_weights(weights).entries
    fingerprint([entries["small"]], memory)
    assert of(weights, digest_file=memory) == of(weights)
    assert [*json.loads(memory.read_text())["files"][str(weights)]["tensors"]] == ["small", "table"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 1, "files": {}}', '{"version": 2, "files": {"a": 1}}'])
def test_unreadable_memory_is_rewritten(weights: Path, tmp_path: Path, content: str) -> None:
    memory = tmp_path / "fingerprints.json"
    memory.write_text(content)
    assert of(weights, digest_file=memory) == of(weights)
    assert json.loads(memory.read_text())["version"] == module.VERSION


def test_unwritable_memory_is_ignored(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert of(weights, digest_file=tmp_path / "file" / "fingerprints.json") == of(weights)


# -- rejections -------------------------------------------------------------------------------------------------------


def test_no_tensors_is_an_error(weights: Path) -> None:
    with pytest.raises(ValueError, match="no tensors"):
        fingerprint([])
    entries = [*open_weights(weights).entries.values()]
    weights.unlink()
    with pytest.raises(WeightFileError, match="No such file"):
        fingerprint(entries)


TinyModel = Callable[[str, str], Path]


def fingerprints(family: str, folder: Path) -> dict[str, str]:
    source = replace(open_source(Model(family=family, path=str(folder))), fingerprints=folder / "digests.json")
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
    for file in [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "digests.json"]:
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
