"""The header of a file describes that file correctly."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gracetune.adapters import metadata
from gracetune.adapters import safetensors_file as files
from gracetune.adapters.adapter_files import open_adapter, save
from gracetune.adapters.formats.record import FORMATS
from gracetune.adapters.svd import state_to_lora
from unit.adapters.formats import making

SHAPES = {"blocks.0.attn1.to_q": (16, 16), "blocks.1.attn1.to_q": (16, 16)}
ABOUT = metadata.About(title="my adapter", date="2026-11-15T12:00:00Z", training={"steps": 100, "lr": 1e-4})


def test_a_header_says_what_the_file_is(tmp_path: Path) -> None:
    state = making.state("wan", SHAPES, "lokr", expert="high_noise", rank=2, alpha=4.0, options=("decomposed",))
    path = save(tmp_path / "a.safetensors", state, "comfyui", torch.bfloat16, ABOUT)
    found = files.read(path).metadata
    content = path.read_bytes()
    data = hashlib.sha256(content[8 + int.from_bytes(content[:8], "little") :]).hexdigest()
    expected = {
        "format": "pt",
        "ss_network_module": "lycoris.kohya",
        "ss_network_dim": "2",
        "ss_network_alpha": "4",
        "ss_base_model_version": "wan_2.2_14b",
        "ss_output_name": "my adapter",
        "modelspec.title": "my adapter",
        "modelspec.date": "2026-11-15T12:00:00Z",
        "modelspec.architecture": "wan2.2/lokr",
        "modelspec.implementation": "diffusers",
        "modelspec.sai_model_spec": metadata.SPECIFICATION,
        "modelspec.hash_sha256": f"0x{data}",
        "sshs_model_hash": data,
        "gracetune.stage": "high_noise",
        "gracetune.family": "wan",
        "gracetune.format": "comfyui",
    }
    assert expected.items() <= found.items()
    assert json.loads(found["ss_network_args"]) == {"algo": "lokr"}
    assert json.loads(found["gracetune.training"]) == {"steps": 100, "lr": 1e-4}


def test_a_plain_lora_is_kohyas_own_kind(tmp_path: Path) -> None:
    found = files.read(save(tmp_path / "a.safetensors", making.state("wan", SHAPES, "lora"), "kohya", torch.float32))
    assert found.metadata["ss_network_module"] == "networks.lora"
    assert "ss_network_args" not in found.metadata


def test_a_version_nobody_knows_is_not_written(tmp_path: Path) -> None:
    """A Wan adapter without an expert may be for 2.1 or for the 5B model."""
    found = files.read(save(tmp_path / "a.safetensors", making.state("wan", SHAPES, "lora"), "kohya", torch.float32))
    assert "ss_base_model_version" not in found.metadata
    assert found.metadata["modelspec.architecture"] == "wan/lora"


def test_both_files_of_a_pair_have_hashes_of_their_own(tmp_path: Path) -> None:
    """ai-toolkit writes the hashes of the unsplit file into both."""
    hashes = set()
    for seed, expert in enumerate(("high_noise", "low_noise")):
        state = making.state("wan", SHAPES, "lora", seed=seed, expert=expert)
        path = save(tmp_path / metadata.file_name("x", expert), state, "comfyui", torch.float32)
        hashes.add(files.read(path).metadata["sshs_model_hash"])
    assert len(hashes) == 2


def test_training_entries_survive_a_conversion(tmp_path: Path) -> None:
    state = making.state("wan", SHAPES, "lora", expert="low_noise")
    first = save(tmp_path / "a.safetensors", state, "diffusers", torch.float32, ABOUT)
    second = save(tmp_path / "b.safetensors", open_adapter(first).state(), "kohya", torch.bfloat16)
    before, after = files.read(first).metadata, files.read(second).metadata
    for key in ("modelspec.title", "modelspec.date", "gracetune.training", "gracetune.stage", "ss_base_model_version"):
        assert after[key] == before[key]
    assert "lora_adapter_metadata" not in after
    assert after["gracetune.format"] == "kohya"
    assert after["sshs_model_hash"] != before["sshs_model_hash"]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("x", ""), "x.safetensors"),
        (("x", "high_noise"), "x_high_noise.safetensors"),
        (("x", "low_noise", 250), "x_000000250_low_noise.safetensors"),
        (("x", "", 1000), "x_000001000.safetensors"),
    ],
)
def test_file_names(arguments, name: str) -> None:
    assert metadata.file_name(*arguments) == name


def test_the_other_file_of_a_pair() -> None:
    high, low = Path("out/x_000000250_high_noise.safetensors"), Path("out/x_000000250_low_noise.safetensors")
    assert metadata.other_expert_file(high) == low
    assert metadata.other_expert_file(low) == high
    assert metadata.other_expert_file(Path("x.safetensors")) is None


def test_the_dora_entry_is_not_carried_over_to_other_files() -> None:
    state = replace(making.state("wan", SHAPES, "lora"), metadata={"gracetune.dora": "base", "modelspec.title": "x"})
    found = metadata.header(state, *FORMATS["comfyui"].write(state, torch.float32))
    assert "gracetune.dora" not in found
    assert found["modelspec.title"] == "x"


def test_a_lora_made_of_a_lokr_is_called_one(tmp_path: Path) -> None:
    state = making.state("wan", SHAPES, "lokr", expert="high_noise")
    opened = open_adapter(save(tmp_path / "a.safetensors", state, "comfyui", torch.float32, ABOUT)).state()
    lora = state_to_lora(opened, 2, lambda path: SHAPES[path]).state
    found = files.read(save(tmp_path / "b.safetensors", lora, "comfyui", torch.float32)).metadata
    assert found["modelspec.architecture"] == "wan2.2/lora"
    assert (found["modelspec.title"], found["ss_network_module"]) == ("my adapter", "networks.lora")
