"""A checkpoint's tensors can be read as an adapter, at the strength with which they were trained, or are rejected."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gracetune.adapters.adapter_files import open_adapter
from gracetune.adapters.errors import BrokenLayerError
from gracetune.cli.main import main
from gracetune.errors import ConfigError
from runs.made_runs import TinyModel, config_for, run

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
        assert "nothing says how this adapter is scaled" in " ".join((captured.out + captured.err).split())
    with pytest.raises(BrokenLayerError, match="--alpha"):
        open_adapter(alone, "flux").state()
    given = open_adapter(alone, "flux", alpha=2.0).state()
    whole = open_adapter(folder / "parameters.safetensors", "flux").state()
    assert {layer.scale for layer in given.layers.values()} == {layer.scale for layer in whole.layers.values()} == {0.5}
    next_run = {"kind": "lora", "rank": 4, "init_from": str(alone)}
    with pytest.raises(ConfigError, match="nothing says how this adapter is scaled"):
        run(config_for("flux", tiny_model, tmp_path / "next", **SECTIONS, adapter=next_run))
