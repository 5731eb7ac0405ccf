"""Reads the tensors of a file in any format into states. Every key is understood or reported as a problem."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gracetune.adapters.algorithms.assembly import Convention, LayerError, NoScaleError
from gracetune.adapters.algorithms.matrices import is_finite
from gracetune.adapters.algorithms.registry import algorithm
from gracetune.adapters.delta import BASE_MAGNITUDE, MAGNITUDE
from gracetune.adapters.errors import (
    AdapterFileError,
    AlteredFileError,
    BrokenLayerError,
    MixedExpertsError,
    NotFiniteError,
    UnknownKeysError,
)
from gracetune.adapters.formats import fused_layers
from gracetune.adapters.formats.layers import assemble
from gracetune.adapters.formats.names import LocatedKey, is_of_text_encoder, locate, split_key
from gracetune.adapters.formats.writing import BY_BASE, DORA_ENTRY, algorithms_in, row_magnitude, swap_row_halves
from gracetune.adapters.state import AdapterState, ExpertStage, Layer
from gracetune.errors import Problem, short
from gracetune.models.keys import KeyMap
from gracetune.models.registry import KEY_MAPS

AlphaLookup = Callable[[str, int | None], float]
"""Returns a layer's alpha by path and rank, for files that store it beside the tensors. With a rank of None, it returns
the scale of an undecomposed change instead."""
_SHOWN = 12
_GIVE_ALPHA = (
    "give the folder with its adapter_config.json, or a checkpoint's file where it was written, beside its .json; "
    "else, if you know its alpha: gracetune adapter convert FILE --to comfyui --alpha ALPHA (DiffSynth-Studio trains "
    "with alpha = rank, {rank} here)"
)


@dataclass(frozen=True)
class AdapterContents:
    """The adapters in a file, and everything that is wrong with the file."""

    family: str
    states: Mapping[ExpertStage, AdapterState]
    unknown: tuple[str, ...] = ()
    """Keys that name no layer, or no tensor of an adapter."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """By layer: why its tensors do not form an adapter layer."""
    without_scale: Mapping[str, int] = field(default_factory=dict)
    """The broken layers that lack only an alpha, with their ranks."""
    not_finite: tuple[str, ...] = ()
    contradictions: tuple[str, ...] = ()
    """Contradictory statements about the expert."""
    altered: bool = False
    """Whether the tensors no longer match the hash that gracetune wrote into the header."""

    def checked(self, file: str | None = None) -> AdapterContents:
        """Returns itself, or raises the first error. `file` is named in the message."""
        for error in self.errors(file):
            raise error
        return self

    def errors(self, file: str | None = None) -> list[AdapterFileError]:
        found: list[AdapterFileError] = []
        if self.altered:
            found.append(AlteredFileError([_altered_problem(file)]))
        if self.unknown:
            found.append(UnknownKeysError([self._unknown_problem(file)]))
        if self.broken:
            found.append(BrokenLayerError(self._broken_problems(file)))
        if self.not_finite:
            problem = Problem(
                "weights",
                f"NaN or infinity in {_listed(self.not_finite)}",
                "finite numbers",
                "take an earlier checkpoint: the training run has diverged",
                file,
            )
            found.append(NotFiniteError([problem]))
        if self.contradictions:
            hint = "rename the file, or save it again with the program that wrote it"
            problems = [Problem("stage", text, "one expert", hint, file) for text in self.contradictions]
            found.append(MixedExpertsError(problems))
        return found

    def _broken_problems(self, file: str | None) -> list[Problem]:
        hint = "save it again where it was trained; it cannot be used as it is"
        broken = [(layer, why) for layer, why in self.broken.items() if layer not in self.without_scale]
        problems = [
            Problem(layer, why, "the complete tensors of one adapter layer", hint, file)
            for layer, why in broken[:_SHOWN]
        ]
        if self.without_scale:
            layers = sorted(self.without_scale)
            more = f"; the same for {len(layers) - 1} more layers" if layers[1:] else ""
            hint = _GIVE_ALPHA.format(rank=self.without_scale[layers[0]])
            problems.append(
                Problem(layers[0], self.broken[layers[0]] + more, "an alpha beside the tensors", hint, file)
            )
        return problems

    def _unknown_problem(self, file: str | None) -> Problem:
        text = any(map(is_of_text_encoder, self.unknown))
        hint = "it may be of another family: gracetune adapter inspect FILE --family NAME shows whether it fits"
        if text:
            leave_out = "gracetune adapter convert FILE --to comfyui --without-text-encoders"
            hint = f"layers of text encoders are not supported; {leave_out} writes a file without them"
        return Problem("keys", _listed(self.unknown), f"layers of {self.family} and tensors of an adapter", hint, file)


def _altered_problem(file: str | None) -> Problem:
    found = "the tensors are not those that gracetune wrote: their hash differs from sshs_model_hash"
    hint = (
        "copy or download it again; if you changed it yourself, gracetune adapter convert FILE --to comfyui "
        "--ignore-hash writes it anew"
    )
    return Problem("sshs_model_hash", found, "the hash of the tensors in this file", hint, file)


@dataclass
class _Gathered:
    """The tensors of one layer, collected key by key."""

    located: LocatedKey
    stem: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    alpha: float | None = None
    of_aitoolkit: bool = False
    """Whether it is a DoRA of a U-Net with ai-toolkit's names. Its files have no alpha, and its formula is DoRA's only
    for alpha = rank."""


def read_states(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    family: str,
    convention: Convention,
    alpha_of: AlphaLookup | None = None,
) -> AdapterContents:
    """The states in a file, by expert. The expert is empty if the keys name none."""
    keys = KEY_MAPS[family]
    convention = convention.with_header(algorithms_in(metadata))
    convention = replace(convention, dora_by_base=metadata.get(DORA_ENTRY) == BY_BASE)
    gathered, unknown, broken = _gather(tensors, keys)
    layers: dict[ExpertStage, dict[str, Layer]] = {}
    without_scale: dict[str, int] = {}
    for found in gathered:
        if found.stem in broken:
            continue
        try:
            parts = _layers(found, convention, alpha_of)
        except LayerError as fault:
            broken[found.stem] = str(fault)
            if isinstance(fault, NoScaleError):
                without_scale[found.stem] = fault.rank
            continue
        of_expert = layers.setdefault(found.located.expert, {})
        for path, layer in parts.items():
            if path in of_expert:
                broken[found.stem] = f"a second adapter for {path}"
                continue
            of_expert[path] = layer
    states = {
        expert: AdapterState(family, expert, {path: found[path] for path in keys.in_order(found)}, dict(metadata))
        for expert, found in layers.items()
    }
    return AdapterContents(family, states, tuple(unknown), broken, without_scale, not_finite(tensors))


def not_finite(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Keys of tensors with NaN or infinity. alpha is excluded: `checked_alpha` has its own rules."""
    return tuple(key for key, tensor in tensors.items() if not key.endswith("alpha") and not is_finite(tensor))


def _gather(tensors: Mapping[str, Tensor], keys: KeyMap) -> tuple[list[_Gathered], list[str], dict[str, str]]:
    unknown: list[str] = []
    broken: dict[str, str] = {}
    gathered: dict[tuple[ExpertStage, tuple[str, ...]], _Gathered] = {}
    located_stems: dict[str, LocatedKey | None] = {}
    for key in sorted(tensors):
        parts = split_key(key)
        if parts is not None and parts.stem not in located_stems:
            located_stems[parts.stem] = locate(parts.stem, keys)
        located = located_stems[parts.stem] if parts else None
        if parts is None or located is None:
            unknown.append(key)
            continue
        entry = gathered.setdefault((located.expert, located.mapped.paths), _Gathered(located, parts.stem))
        if parts.tensor == "alpha":
            if tensors[key].numel() != 1:
                broken[parts.stem] = f"an alpha of {tensors[key].numel()} numbers"
            elif tensors[key].dtype == torch.bool:
                broken[parts.stem] = "alpha is true or false: expected a number"
            elif entry.alpha is not None:
                broken[parts.stem] = f"two alphas, one of them {short(key)}"
            else:
                entry.alpha = _number(tensors[key])
            continue
        name, tensor = _canonical(parts.tensor, tensors[key])
        if name in entry.tensors:
            broken[parts.stem] = f"{name} twice, once as {short(key)}"
        entry.tensors[name] = tensor
        entry.of_aitoolkit |= key.endswith(".magnitude") and located.prefixes[:1] == ("lora_unet_",)
    return list(gathered.values()), unknown, broken


def _number(alpha: Tensor) -> float:
    """The shortest decimal number with this fp32 value: 0.1 instead of 0.10000000149."""
    exact, found = float(alpha), alpha.float().reshape(())
    return float(str(found.numpy())) if found.isfinite() else exact


def _canonical(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """The canonical name and shape of a tensor. PEFT's magnitudes of a convolution are [1, out, 1, 1]."""
    return ("dora_scale", tensor.reshape(-1)) if name == "magnitude" else (name, tensor)


def _layers(found: _Gathered, convention: Convention, alpha_of: AlphaLookup | None) -> dict[str, Layer]:
    mapped = found.located.mapped
    alpha = found.alpha
    rank_tensor = next((found.tensors[name] for name in _RANK_TENSORS if name in found.tensors), None)
    if alpha is None and alpha_of is not None and rank_tensor is not None and rank_tensor.ndim > 1:
        alpha = alpha_of(mapped.paths[0], rank_tensor.shape[0])
    if found.located.is_bare or found.of_aitoolkit:
        convention = replace(convention, without_alpha="undefined")
    layer = assemble(found.tensors, alpha, convention)
    if found.of_aitoolkit and layer.alpha != layer.rank:
        raise LayerError("ai-toolkit's DoRA with another alpha than its rank: its formula is not DoRA's then")
    if found.located.is_of_peft and "lokr_w1" in layer.tensors and layer.rank is None:
        layer = _scaled_by_peft(layer, mapped.paths[0], alpha_of)
    if convention.dora_by_base:
        layer = by_base(layer)
    if mapped.fused:
        return fused_layers.unfuse(layer, mapped)
    if mapped.halves_swapped:
        decomposed = not {MAGNITUDE, BASE_MAGNITUDE}.isdisjoint(layer.tensors)
        if not algorithm(layer.algorithm).row_tensors or decomposed:
            raise LayerError(f"{layer.algorithm} on a layer whose rows are in another order in diffusers")
        layer = swap_row_halves(layer)
    return {mapped.paths[0]: layer}


_RANK_TENSORS = ("lora_A.weight", "lokr_w2_b", "lokr_w1_b", "hada_w1_b")
"""Tensors with as many rows as the rank."""


def _scaled_by_peft(layer: Layer, path: str, alpha_of: AlphaLookup | None) -> Layer:
    """Multiply PEFT's alpha / r into the first factor. Only PEFT scales a LoKr whose factors are both whole."""
    if alpha_of is None:
        raise LayerError(
            "PEFT multiplies this LoKr by alpha / r, which are in its adapter_config.json: give the folder, or put "
            "that file beside adapter_model.safetensors"
        )
    first = layer.tensors["lokr_w1"]
    factor = alpha_of(path, None)
    if factor == 1.0:
        return layer
    return replace(layer, tensors={**layer.tensors, "lokr_w1": (first.float() * factor).to(first.dtype)})


def by_base(layer: Layer) -> Layer:
    """The DoRA with its row magnitudes as `dora_base_scale`, that is relative to the base weight's norms."""
    magnitude = row_magnitude(layer)
    if magnitude is None:
        return layer
    others = {name: tensor for name, tensor in layer.tensors.items() if name != MAGNITUDE}
    return replace(layer, tensors={**others, BASE_MAGNITUDE: magnitude})


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(short, names[:_SHOWN])) + more


def dtype_of(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The precision that most elements of the file's weights have."""
    sizes: dict[torch.dtype, int] = {}
    for key, tensor in tensors.items():
        if tensor.is_floating_point() and not key.endswith("alpha"):
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else torch.float32
