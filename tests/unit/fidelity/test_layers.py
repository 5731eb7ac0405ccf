"""An ai-toolkit job adapts the layers that ai-toolkit adapts, and the plan counts them."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gracetune.adapters.attach import Attached, attach
from gracetune.adapters.formats.record import FORMATS
from gracetune.adapters.state import AdapterState
from gracetune.adapters.trainable import select
from gracetune.config.run_config import RunConfig
from gracetune.models.registry import FOOTPRINTS, build_published, spec_of
from unit.adapters.formats import making
from unit.config import aitoolkit_jobs
from unit.fidelity.peers import ARCHS, recorded

CASES = recorded("aitoolkit", "layers")
PARTS_OF_A_UNET = ("resnets.0", "up_blocks")
"""Words that a footprint does not know: it lists the kinds of blocks of a U-Net, not their places."""
MOST_EXPENSIVE = ("qwen_image_edit_plus", "wan22_14b_i2v")
LOCATION = {"flux": {"schnell": "black-forest-labs/FLUX.1-schnell"},
         "wan21": {"t2v-1.3b-2.1": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"}}  # fmt: skip


def name_of(case: dict[str, Any]) -> str:
    network = {**case["network"], **case["network"].get("network_kwargs", {})}
    chosen = [f"{key}={value}" for key, value in network.items() if key not in ("linear", "network_kwargs")]
    return "-".join([case["flavour"], *chosen]).replace(" ", "")


def config_of(case: dict[str, Any], folder: Path) -> RunConfig:
    weights = LOCATION.get(case["arch"], {}).get(case["flavour"], ARCHS[case["arch"]][0])
    train = {"noise_scheduler": "ddpm" if case["arch"] == "sdxl" else "flowmatch", "steps": 100, "lr": 1e-4}
    control = {"control_path": "/data/before"} if "edit" in case["arch"] or "kontext" in case["arch"] else {}
    document = aitoolkit_jobs.job(
        model={"name_or_path": weights, "arch": case["arch"]}, train={**train, "dtype": "bf16"},
        datasets=aitoolkit_jobs.dataset(**control), sample=None, network=case["network"],
    )  # fmt: skip
    return aitoolkit_jobs.read(folder, document).config


def attached_to(config: RunConfig, denoiser: nn.Module) -> Attached:
    """As a run attaches it, with the layers that no gradient reaches (the last block of Qwen-Image has four)."""
    spec = spec_of(config.model.family)
    return attach(
        denoiser, config.adapter, family=config.model.family, default_targets=spec.default_targets,
        conv_targets=spec.conv_targets, untrained=spec.untrained, seed=0,
    )  # fmt: skip


def counted(names: Iterable[str]) -> dict[str, Any]:
    """As `scripts/peer_vectors/aitoolkit_layers.py` counts names."""
    names = sorted(names)
    shapes = Counter(re.sub(r"(?<=[._])[0-9]+(?=[._])", "*", name) for name in names)
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()
    return {"names": dict(sorted(shapes.items())), "count": len(names), "sha256": digest}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.full] if case["arch"] in MOST_EXPENSIVE else []) for case in CASES],
    ids=name_of,
)
def test_layers_of_an_ai_toolkit_job(case: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(case, tmp_path)
    assert config.model.flavour == case["flavour"]
    with torch.device("meta"):
        attached = attached_to(config, build_published(config.model.family, case["flavour"]))
    assert attached.selection is not None
    found = counted(attached.selection.paths)
    for part in ("layers", "expert 1", "expert 2"):
        assert found == case.get(part, found)
    footprint = next(one for one in FOOTPRINTS[config.model.family] if one.flavour == case["flavour"])
    words = case["network"].get("network_kwargs", {}).get("only_if_contains", [])
    if not set(words) & set(PARTS_OF_A_UNET):
        chosen = select(footprint, config.adapter)
        assert (sum(target.count for target in chosen.targets), chosen.unmatched) == (found["count"], ())
        elements = sum(tensor.elements for target in chosen.targets for tensor in target.tensors())
        assert elements == sum(parameter.numel() for parameter in attached.parameters().values())


def adapter_of(case: dict[str, Any], folder: Path) -> AdapterState:
    """An adapter of the job's layers, with random values."""
    config = config_of(case, folder)
    with torch.device("meta"):
        model = build_published(config.model.family, case["flavour"])
        attached = attached_to(config, model)
    assert attached.selection is not None
    paths = attached.selection.paths
    attached.detach()
    shapes = {path: tuple(model.get_submodule(path).weight.shape) for path in paths}
    return making.state(config.model.family, shapes, "lora", rank=1, alpha=1.0)


FILES = [case for case in CASES if "file" in case and case["arch"] in ("flux", "qwen_image", "sdxl", "wan21_i2v")
         and case["flavour"] != "schnell"]  # fmt: skip


@pytest.mark.parametrize("case", FILES, ids=name_of)
def test_files_with_these_layers(case: dict[str, Any], tmp_path: Path) -> None:
    """Ours for ComfyUI has the keys of ai-toolkit's, which we read. Every format keeps every layer."""
    state = adapter_of(case, tmp_path)
    for format in ("comfyui", "diffusers", "kohya"):
        file, header = FORMATS[format].write(state, torch.float32)
        again = FORMATS[format].read(file, header, state.family).checked().states[""]
        assert list(again.layers) == list(state.layers)
        for path, layer in state.layers.items():
            for name, tensor in layer.tensors.items():
                torch.testing.assert_close(again.layers[path].tensors[name], tensor, atol=1e-6, rtol=1e-6)
    file, _ = FORMATS["comfyui"].write(state, torch.float32)
    if case["arch"] == "sdxl":  # ai-toolkit writes diffusers' names with kohya's prefix; ours are the published model's
        tensors = {"lora_down.weight": "lora_A.weight", "lora_up.weight": "lora_B.weight"}
        file = {
            f"lora_unet_{path.replace('.', '_')}.{theirs}": layer.tensors[ours]
            for path, layer in state.layers.items()
            for theirs, ours in tensors.items()
        }
        file |= {f"lora_unet_{path.replace('.', '_')}.alpha": torch.tensor(1.0) for path in state.layers}
        read = FORMATS["kohya"].read(file, {}, state.family).checked().states[""]
        assert list(read.layers) == list(state.layers)
    assert counted(file) == case["file"]
