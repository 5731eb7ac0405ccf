"""Pair files for Wan 2.2: one adapter file per noise expert, with correct keys.

ai-toolkit splits a state by `.transformer_1.` and the like in its keys. It drops keys that match neither expert, and
writes hashes of both experts together. Here every key is assigned to an expert; if that fails, all keys are saved in
one file, with a message that says why. Each file has its own hashes. A pair is read in any key format that gracetune
knows, and returned in the format that ai-toolkit expects.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from gracetune.extension import (
    FORMATS,
    AdapterState,
    ConfigError,
    ExpertStage,
    GracetuneError,
    Problem,
    open_adapter,
    save_adapter,
    sync_folder,
    write_adapter_tensors,
)

from .hooks import Around, Function, argument
from .points import LOAD_LORA, SAVE_LORA, Point

FAMILY: Final = "wan"
EXPERTS: Final[tuple[ExpertStage, ...]] = ("high_noise", "low_noise")
_SUFFIX: Final = ".safetensors"
_PREFIX: Final = "diffusion_model."
_UP: Final = ("lora_B.weight", "lora_up.weight")


def trained_experts(model: Any) -> tuple[ExpertStage, ...]:
    requested = zip(EXPERTS, (model.train_high_noise, model.train_low_noise), strict=True)
    return tuple(stage for stage, trained in requested if trained)


def pair_of(file: Path) -> dict[ExpertStage, Path]:
    """The paths of both files, from either of them or from the path without an expert."""
    stem = file.name.removesuffix(_SUFFIX)
    for stage in EXPERTS:
        stem = stem.removesuffix(f"_{stage}")
    return {stage: file.with_name(f"{stem}_{stage}{_SUFFIX}") for stage in EXPERTS}


def parted(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], trained: tuple[ExpertStage, ...]
) -> dict[ExpertStage, AdapterState]:
    """Split tensors by expert. If only one expert is trained, keys without an expert belong to it."""
    reading = FORMATS["comfyui"].read(tensors, metadata, FAMILY).checked()
    states: dict[ExpertStage, AdapterState] = {}
    for expert, state in reading.states.items():
        if not expert and len(trained) > 1:
            found = f"{len(state.layers)} layers that tell no expert, such as {next(iter(state.layers))}"
            hint = "train one expert at a time (model_kwargs: train_low_noise: false), and tell us about this version"
            raise ConfigError([Problem("adapter", found, "layers of transformer_1 or transformer_2", hint)])
        owner = expert or trained[0]
        states[owner] = replace(state, expert=owner)
    return states


def write_pair(
    tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str], trained: tuple[ExpertStage, ...]
) -> list[Path]:
    """Write a file per expert. Existing files are replaced, as in ai-toolkit."""
    states = parted(tensors, metadata, trained)
    names = pair_of(file)
    written = []
    for stage, state in states.items():
        temporary = save_adapter(file.with_name(f".{uuid.uuid4().hex}{_SUFFIX}"), state, "comfyui", _dtype(tensors))
        written.append(temporary.replace(names[stage]))
    sync_folder(file.parent)
    return written


def _write_whole(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str]) -> Path:
    """Write both experts to one file with unchanged keys, which ai-toolkit loads as a combined adapter."""
    temporary = write_adapter_tensors(file.with_name(f".{uuid.uuid4().hex}{_SUFFIX}"), tensors, metadata)
    whole = temporary.replace(file.with_name(f"{file.stem}_both_experts{_SUFFIX}"))
    sync_folder(file.parent)
    return whole


def _dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype of most tensors, which is the precision that ai-toolkit chose for the file."""
    floating = Counter(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    return floating.most_common(1)[0][0]


def read_pair(file: Path, trained: tuple[ExpertStage, ...]) -> dict[str, Tensor]:
    """Read a pair in the key format of `Wan2214bModel.load_lora`: with the expert in the keys if both are trained."""
    names = pair_of(file)
    missing = [names[stage] for stage in trained if not names[stage].is_file()]
    if missing:
        hint = "put the file of the other expert beside it, or train only the one that is there (model.model_kwargs)"
        wanted = f"a file for each expert that is trained: {', '.join(trained)}"
        raise ConfigError([Problem(str(file), f"no {missing[0].name}", wanted, hint)])
    combined: dict[str, Tensor] = {}
    for stage in trained:
        state = open_adapter(names[stage], FAMILY).state()
        tensors, _ = FORMATS["comfyui"].write(_folded(state), torch.float32)
        expert = f"transformer_{EXPERTS.index(stage) + 1}." if len(trained) > 1 else ""
        combined |= {key.replace(_PREFIX, f"{_PREFIX}{expert}", 1): tensor for key, tensor in tensors.items()}
    return combined


def _folded(state: AdapterState) -> AdapterState:
    """Fold the scale of a LoRA into its weights. ai-toolkit assumes that alpha equals the rank."""
    layers = {}
    for path, layer in state.layers.items():
        up = next((name for name in _UP if name in layer.tensors), None)
        if up is not None and layer.rank is not None and layer.alpha != layer.rank:
            scaled = {**layer.tensors, up: layer.tensors[up].float() * layer.scale}
            layer = replace(layer, tensors=scaled, alpha=float(layer.rank))
        layers[path] = layer
    return replace(state, layers=layers)


class PairFeature:
    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._written: list[str] = []
        self._read: list[str] = []
        self._unparted: list[str] = []
        self._left: list[str] = []

    def open(self, process: Any) -> None:
        """Nothing to open: `save_lora` receives the model."""

    def hooks(self) -> list[tuple[Point, Around]]:
        return [(SAVE_LORA, self._save), (LOAD_LORA, self._load)]

    def _save(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        requested = {name: argument(original, name, args, kwargs) for name in SAVE_LORA.parameters}
        model, file = args[0], Path(requested["output_path"])
        if not model.network.network_config.split_multistage_loras or file.suffix != _SUFFIX:
            if not self._left:
                self._report(
                    f"pair_files: {file.name} is left to ai-toolkit: it is no safetensors file, or "
                    "network.split_multistage_loras is false"
                )
            self._left.append(file.name)
            return original(*args, **kwargs)
        metadata = {str(name): str(value) for name, value in (requested["metadata"] or {}).items()}
        try:
            written = write_pair(requested["state_dict"], file, metadata, trained_experts(model))
        except GracetuneError as error:  # never lose hours of training: save the state as it is
            written = [_write_whole(requested["state_dict"], file, metadata)]
            self._report(f"pair_files: not parted by expert; every key as it is in {written[0].name}, because\n{error}")
            self._unparted.append(written[0].name)
            return None
        self._written += [path.name for path in written]
        return None

    def _load(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        file = Path(argument(original, "file", args, kwargs))
        if not file.name.endswith(tuple(f"_{stage}{_SUFFIX}" for stage in EXPERTS)):
            self._left.append(file.name)
            return original(*args, **kwargs)
        self._read.append(file.name)
        return read_pair(file, trained_experts(args[0]))

    def report(self) -> dict[str, Any]:
        return {
            "written": self._written,
            "read": self._read,
            "not_parted": self._unparted,
            "left_to_ai_toolkit": self._left,
        }

    def close(self) -> None:
        pass
