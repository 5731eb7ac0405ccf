"""A checkpoint's tensors can be read as an adapter, at the strength with which they were trained, or are rejected."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from gracetune.adapters.adapter_files import open_adapter
from gracetune.adapters.errors import BrokenLayerError
from gracetune.checkpoint.manifest import MANIFEST, _checksum
from gracetune.cli.main import main
from gracetune.errors import ConfigError, GracetuneError
from runs.made_runs import TinyModel, changed, config_for, run

SECTIONS: dict[str, Any] = {
    "training": {"max_steps": 2},
    "optimizer": {"lr": 1e-2},
    "checkpoints": {"every_steps": 2, "save_dtype": "fp32"},
}


@pytest.mark.parametrize(
    ("family", "kind", "averaged"), [("flux", "lora", False), ("wan", "lora", True), ("wan", "lokr", False)]
)
def test_a_checkpoint_is_converted_at_its_true_strength(
    family: str, kind: str, averaged: bool, tiny_model: TinyModel, tmp_path: Path
) -> None:
    training = {**SECTIONS["training"], "ema": {"enabled": averaged, "decay": 0.5}}
    adapter = {"kind": kind, "rank": 4, "alpha": 2.0}
    config = config_for(family, tiny_model, tmp_path, **{**SECTIONS, "training": training, "adapter": adapter})
    result = run(config)
    folder = Path(config.output_dir) / "checkpoints" / "checkpoint-2"
    written = tmp_path / "converted.safetensors"
    file = folder / ("ema.safetensors" if averaged else "parameters.safetensors")
    with pytest.raises(SystemExit) as done:
        main(["adapter", "convert", str(file), "--to", "comfyui", "--output", str(written), "--split"])
    assert not done.value.code
    assert len(result.files) == (2 if family == "wan" else 1)
    for path in result.files:
        theirs = open_adapter(path).state()
        ours = open_adapter(tmp_path / f"converted_{theirs.expert}.safetensors" if theirs.expert else written).state()
        assert (ours.expert, list(ours.layers)) == (theirs.expert, list(theirs.layers))
        assert kind != "lora" or {layer.scale for layer in ours.layers.values()} == {0.5}
        for name, layer in theirs.layers.items():
            assert ours.layers[name].scale == layer.scale
            for tensor, expected in layer.tensors.items():
                assert torch.equal(ours.layers[name].tensors[tensor], expected)


def test_a_checkpoints_tensors_alone_are_rejected(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the JSON file that holds the alphas, the strength is unknown."""
    config = config_for("flux", tiny_model, tmp_path, **SECTIONS, adapter={"kind": "lora", "rank": 4, "alpha": 2.0})
    run(config)
    folder = Path(config.output_dir) / "checkpoints" / "checkpoint-2"
    alone = shutil.copy(folder / "parameters.safetensors", tmp_path / "parameters.safetensors")
    model = str(tiny_model("flux", "dev"))
    for command in (["inspect"], ["convert", "--to", "kohya"], ["verify", "--model", model]):
        with pytest.raises(SystemExit) as done:
            main(["adapter", command[0], str(alone), "--family", "flux", *command[1:]])
        assert done.value.code == 1
        captured = capsys.readouterr()
        assert "no other information about the scale of this adapter" in " ".join((captured.out + captured.err).split())
    with pytest.raises(BrokenLayerError, match="--alpha"):
        open_adapter(alone, "flux").state()
    given = open_adapter(alone, "flux", alpha=2.0).state()
    whole = open_adapter(folder / "parameters.safetensors", "flux").state()
    assert {layer.scale for layer in given.layers.values()} == {layer.scale for layer in whole.layers.values()} == {0.5}
    next_run = {"kind": "lora", "rank": 4, "init_from": str(alone)}
    with pytest.raises(ConfigError, match="no other information about the scale of this adapter"):
        run(config_for("flux", tiny_model, tmp_path / "next", **SECTIONS, adapter=next_run))


def of_version(folder: Path, part: str, version: int) -> None:
    """Change the version of a state part in a checkpoint, as a release that writes that version would."""
    file = folder / f"{part}.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": version}))
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["checksum"]
    data = file.read_bytes()
    manifest["files"][file.name] = {"size": len(data), "checksum": xxhash.xxh3_128_hexdigest(data)}
    (folder / MANIFEST).write_text(json.dumps({**manifest, "checksum": _checksum(manifest)}))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_folder_of_another_release_is_rejected_by_name_and_stays_as_it_is(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    config = config_for("sdxl", tiny_model, tmp_path, **SECTIONS)
    run(config)
    out, whole = Path(config.output_dir), tmp_path / "whole"
    shutil.copytree(out, whole)
    longer = changed(config, "training", max_steps=3)
    checkpoint, cache = out / "checkpoints" / "checkpoint-2", out / "cache" / "latents" / "gracetune-cache.json"
    mark = '{"format": "gracetune-cache", "version": 2}'
    cases: dict[str, Callable[[], object]] = {
        r"the checkpoint's optimizer has version 2; this release reads version 1\. Resume with": lambda: of_version(
            checkpoint, "optimizer", 2
        ),
        "the checkpoint's position has version 0; this release reads version 1": lambda: of_version(
            checkpoint, "position", 0
        ),
        "(?s)cache format 2, written by a newer gracetune.*cache format 1.*update gracetune": lambda: cache.write_text(
            mark
        ),
    }
    for message, change in cases.items():
        shutil.rmtree(out)
        shutil.copytree(whole, out)
        change()
        before = contents(out / "checkpoints") | contents(out / "cache")
        with pytest.raises(GracetuneError, match=message):
            run(longer)
        assert contents(out / "checkpoints") | contents(out / "cache") == before
        assert (out / "tiny.safetensors").is_file()
    shutil.rmtree(out)
    shutil.copytree(whole, out)
    log = out / "logs" / "events.jsonl"
    log.write_text(log.read_text().replace('"v":2', '"v":1'))  # a log of the first version is read and continued
    run(longer)
    report = json.loads((out / "report.json").read_text())
    assert report["unreadable_lines"] == []
    assert report["outcome"] == "finished"
