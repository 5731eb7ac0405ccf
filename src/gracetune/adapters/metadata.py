"""The header of an adapter file, which identifies the file to other programs.

ss_*         kohya's fields, which ComfyUI and the web interfaces show
sshs_*       kohya's hashes of the file's tensors
modelspec.*  Stability AI's model specification
gracetune.*  identifies files written by gracetune
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from gracetune.adapters.algorithms.record import Algorithm
from gracetune.adapters.algorithms.registry import algorithm
from gracetune.adapters.formats.diffusers import HEADER_ENTRY
from gracetune.adapters.formats.layers import algorithm_names, common_alpha, common_rank
from gracetune.adapters.formats.writing import ALGORITHM_ENTRY, DORA_ENTRY
from gracetune.adapters.safetensors_file import PEFT_CONFIG, SUFFIX, data_hash, legacy_hash
from gracetune.adapters.state import AdapterState, ExpertStage
from gracetune.models.registry import KEY_MAPS

SPECIFICATION = "1.0.1"
_ARCHITECTURE = "modelspec.architecture"
_NEVER_CARRIED_OVER = (
    "sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256", HEADER_ENTRY, PEFT_CONFIG, "gracetune.family",
    ALGORITHM_ENTRY, "gracetune.format", "gracetune.stage", DORA_ENTRY, "ss_network_module", "ss_network_dim",
    "ss_network_alpha", "ss_network_args",
)  # fmt: skip
"""Entries that describe a single file. They are computed for each file and never copied from another."""


@dataclass(frozen=True)
class About:
    """Header entries that only the caller knows."""

    title: str = ""
    date: str = ""
    """ISO 8601. The caller provides it instead of the clock, so that the same adapter gives the same file."""
    base_version: str = ""
    """kohya's name of the base model, if it is not the family's usual one."""
    architecture: str = ""
    training: Mapping[str, Any] = field(default_factory=dict)
    """A summary of the run, such as steps, learning rate and data. Written as JSON."""


def header(
    state: AdapterState, tensors: Mapping[str, Tensor], of_format: Mapping[str, str], about: About | None = None
) -> dict[str, str]:
    """The complete header. Entries about training are carried over from `state.metadata`; `about` overrides them."""
    about = about or About()
    carried = {name: value for name, value in state.metadata.items() if name not in _NEVER_CARRIED_OVER}
    if "/" in carried.get(_ARCHITECTURE, ""):  # `<model>/<algorithm>`; a LoKr may have become a LoRA
        carried[_ARCHITECTURE] = f"{carried[_ARCHITECTURE].rpartition('/')[0]}/{algorithm_names(state)[0]}"
    found = {"format": "pt", **_defaults(state), **carried, **_network(state), **_from_caller(about), **of_format}
    found = {name: value for name, value in found.items() if value}
    kept = {name: value for name, value in found.items() if name.startswith("ss_")}
    digest = data_hash(tensors)
    found["modelspec.hash_sha256"] = f"0x{digest}"
    found["sshs_model_hash"] = digest
    found["sshs_legacy_hash"] = legacy_hash(tensors, kept)
    return found


def _defaults(state: AdapterState) -> dict[str, str]:
    keys = KEY_MAPS[state.family]
    architecture, version = keys.architecture or keys.family, keys.base_version
    if state.expert and keys.of_experts is not None:
        architecture, version = keys.of_experts
    return {
        "ss_base_model_version": version,
        "modelspec.sai_model_spec": SPECIFICATION,
        _ARCHITECTURE: f"{architecture}/{algorithm_names(state)[0]}",
        "modelspec.implementation": "diffusers",
    }


def _network(state: AdapterState) -> dict[str, str]:
    kinds = algorithm_names(state)
    rank, alpha = common_rank(state), common_alpha(state)
    own = algorithm(kinds[0]).kohya_module if len(kinds) == 1 else Algorithm.kohya_module
    found = {"ss_network_module": own}
    if rank is not None and alpha is not None:
        found |= {"ss_network_dim": str(rank), "ss_network_alpha": f"{alpha:g}"}
    if own == Algorithm.kohya_module:
        found["ss_network_args"] = json.dumps({"algo": kinds[0]})
    return found


def _from_caller(about: About) -> dict[str, str]:
    training = json.dumps(about.training, sort_keys=True, default=str) if about.training else ""
    found = {
        "ss_output_name": about.title,
        "modelspec.title": about.title,
        "modelspec.date": about.date,
        "ss_base_model_version": about.base_version,
        _ARCHITECTURE: about.architecture,
        "gracetune.training": training,
    }
    return {name: value for name, value in found.items() if value}


def file_name(name: str, expert: ExpertStage, step: int | None = None) -> str:
    """`<name>[_<step>][_high_noise].safetensors`. The step has nine digits, so that names sort by step."""
    parts = [name, *([f"{step:09d}"] if step is not None else []), *([expert] if expert else [])]
    return "_".join(parts) + SUFFIX


def other_expert_file(path: Path) -> Path | None:
    """The path of the other expert's file of a pair. None if the file name does not end with an expert."""
    for expert, other in (("high_noise", "low_noise"), ("low_noise", "high_noise")):
        if path.stem.endswith(f"_{expert}"):
            return path.with_name(f"{path.stem.removesuffix(expert)}{other}{path.suffix}")
    return None
