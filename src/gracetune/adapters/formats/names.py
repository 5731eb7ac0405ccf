"""A key of a file taken apart: which expert, which layer, which tensor.

A key is `<prefixes><layer><suffix>`. Programs differ in all three, and some stack prefixes
(`transformer.transformer_1.`), so prefixes are peeled off until what remains is a layer the family knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from gracetune.adapters.algorithms.registry import algorithms
from gracetune.adapters.state import ExpertStage
from gracetune.models.keys import KeyMap, MappedLayers

_TENSORS = dict.fromkeys(("alpha", *(name for record in algorithms() for name in record.file_tensors)))
_SUFFIXES: tuple[tuple[str, str], ...] = (
    *(spelling for record in algorithms() for spelling in record.spellings),
    (rf"\.(?P<name>{'|'.join(map(re.escape, _TENSORS))})", "{name}"),
)
_ENDINGS = tuple((re.compile(rf"(?P<stem>.+?){pattern}"), name) for pattern, name in _SUFFIXES)

_PREFIXES = (
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "diffusion_model_",
    "lora_unet_",
    "lora_transformer_",
    "lycoris_unet_",
    "lycoris_",
    "lora_",
    "transformer.",
    "unet.",
    "unet_",
    "pipe.dit.",  # DiffSynth-Studio, where it is not told to leave it out
)
_EXPERT = re.compile(r"transformer_?([12])[._]|(high_noise|low_noise)/")  # the second: our own checkpoints
_EXPERT_NAMES: dict[str, ExpertStage] = {
    "1": "high_noise",
    "2": "low_noise",
    "high_noise": "high_noise",
    "low_noise": "low_noise",
}
_LONGEST = 1_000
"""Characters of a key: no layer's name has half as many."""
_TEXT_ENCODERS = ("lora_te", "text_encoder")
_NO_COMPONENT = ("base_model.model.", "high_noise/", "low_noise/", "pipe.dit.")


@dataclass(frozen=True)
class Split:
    """A key without its spelling of the tensor."""

    stem: str
    tensor: str
    """`lora_A.weight`, `lokr_w1`, `alpha`: the names of `algorithms/`, LoRA's throughout; PEFT's `magnitude`."""


@dataclass(frozen=True)
class LocatedKey:
    expert: ExpertStage
    """Empty where the key does not say."""
    mapped: MappedLayers
    prefixes: tuple[str, ...]

    @property
    def is_bare(self) -> bool:
        """Named by a library that knows layers and no programs: no convention gives such a key a scale."""
        return not self.prefixes or self.prefixes[0] in _NO_COMPONENT

    @property
    def is_of_peft(self) -> bool:
        """Named as PEFT names the layers of a model it wraps."""
        return self.prefixes[:1] == ("base_model.model.",)


@lru_cache(maxsize=8192)
def split(key: str) -> Split | None:
    """None for a key that ends like no tensor of an adapter."""
    if len(key) > _LONGEST:
        return None
    tidy = _tidy(key)
    for pattern, name in _ENDINGS:
        found = pattern.fullmatch(tidy)
        if found:
            groups = {group: value for group, value in found.groupdict().items() if group != "stem"}
            return Split(found["stem"], name.format(**groups))
    return None


def is_of_text_encoder(key: str) -> bool:
    return key.startswith(_TEXT_ENCODERS)


def _tidy(key: str) -> str:
    """ai-toolkit writes `$$` for dots while it trains, and some tools double a separator where they join names."""
    return re.sub(r"_{2,}", "_", re.sub(r"\.{2,}", ".", key.replace("$$", ".")))


@lru_cache(maxsize=8192)  # of one file each name is asked for by who recognises it and by who reads it
def locate(stem: str, keys: KeyMap) -> LocatedKey | None:
    """The layer a stem names. Never two: what is peeled off first wins only if the rest agrees."""
    found = list(_peeled(stem, keys, "", ()))
    if not found:
        return None
    meanings = {(located.expert, located.mapped.paths) for located in found}
    return found[0] if len(meanings) == 1 else None


def _peeled(stem: str, keys: KeyMap, own: ExpertStage, prefixes: tuple[str, ...]) -> Iterator[LocatedKey]:
    mapped = _find(stem, keys)
    if mapped is not None:
        yield LocatedKey(own, mapped, prefixes)
        return
    expert = _EXPERT.match(stem) if keys.experts and not own else None
    if expert:
        yield from _peeled(stem[expert.end() :], keys, _EXPERT_NAMES[expert[1] or expert[2]], (*prefixes, expert[0]))
    for prefix in _PREFIXES:
        if stem.startswith(prefix) and prefix not in prefixes:
            yield from _peeled(stem[len(prefix) :], keys, own, (*prefixes, prefix))


def _find(stem: str, keys: KeyMap) -> MappedLayers | None:
    """diffusers once put `processor` in front of an attention's layers, and left the 0 of `to_out.0` out."""
    mapped = keys.find(stem)
    if mapped is not None or not ("processor" in stem or stem.endswith("to_out")):
        return mapped
    plain = stem.replace(".processor.", ".").replace("_processor_", "_")
    zero = (f"{plain}.0", f"{plain}_0") if plain.endswith("to_out") else ()
    return next((found for name in (plain, *zero) if (found := keys.find(name)) is not None), None)
