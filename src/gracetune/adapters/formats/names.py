"""Splits a key of an adapter file into expert, layer and tensor.

A key is `<prefixes><layer><suffix>`. Programs differ in all three parts, and some stack prefixes
(`transformer.transformer_1.`). So prefixes are removed one at a time until the rest is a layer the family knows.
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
    "pipe.dit.",  # DiffSynth-Studio, unless it is configured to remove this prefix
)
_EXPERT = re.compile(r"transformer_?([12])[._]|(high_noise|low_noise)/")  # the second form: our own checkpoints
_EXPERT_NAMES: dict[str, ExpertStage] = {
    "1": "high_noise",
    "2": "low_noise",
    "high_noise": "high_noise",
    "low_noise": "low_noise",
}
_LONGEST = 1_000
"""Longer keys are not parsed. The longest layer name is less than half as long."""
_TEXT_ENCODERS = ("lora_te", "text_encoder")
_BARE_PREFIXES = ("base_model.model.", "high_noise/", "low_noise/", "pipe.dit.")


@dataclass(frozen=True)
class SplitKey:
    """A key, split into the part that names the layer and the tensor."""

    stem: str
    """What is before the tensor's name, with prefixes. `$$` is a dot, and repeated dots or underscores are one."""
    tensor: str
    """The tensor's name in the records of the algorithms, such as `lora_A.weight`, `lokr_w1` or `alpha`. LoRA's
    matrices have the names A and B, however the file names them. PEFT's magnitudes of DoRA are `magnitude`."""


@dataclass(frozen=True)
class LocatedKey:
    expert: ExpertStage
    """Empty if the key names no expert."""
    mapped: MappedLayers
    prefixes: tuple[str, ...]

    @property
    def is_bare(self) -> bool:
        """Whether the key has no prefix of a training program, as in files of PEFT. There is then no convention for the
        scale of a layer without alpha."""
        return not self.prefixes or self.prefixes[0] in _BARE_PREFIXES

    @property
    def is_of_peft(self) -> bool:
        """Whether the key has the prefix of a model that PEFT wraps."""
        return self.prefixes[:1] == ("base_model.model.",)


@lru_cache(maxsize=8192)
def split_key(key: str) -> SplitKey | None:
    """Split a key. None if its ending names no tensor of an adapter."""
    if len(key) > _LONGEST:
        return None
    cleaned = _cleaned(key)
    for pattern, name in _ENDINGS:
        found = pattern.fullmatch(cleaned)
        if found:
            groups = {group: value for group, value in found.groupdict().items() if group != "stem"}
            return SplitKey(found["stem"], name.format(**groups))
    return None


def is_of_text_encoder(key: str) -> bool:
    return key.startswith(_TEXT_ENCODERS)


def _cleaned(key: str) -> str:
    """The key with plain separators. ai-toolkit writes `$$` for dots during training, and some tools double a separator
    when they join names."""
    return re.sub(r"_{2,}", "_", re.sub(r"\.{2,}", ".", key.replace("$$", ".")))


@lru_cache(maxsize=8192)  # detection and reading both locate every name of a file
def locate(stem: str, keys: KeyMap) -> LocatedKey | None:
    """The layer that a stem names; None if it names none, or if different prefixes lead to different layers."""
    found = list(_without_prefixes(stem, keys, "", ()))
    if not found:
        return None
    meanings = {(located.expert, located.mapped.paths) for located in found}
    return found[0] if len(meanings) == 1 else None


def _without_prefixes(stem: str, keys: KeyMap, expert: ExpertStage, prefixes: tuple[str, ...]) -> Iterator[LocatedKey]:
    """Every layer that remains after some prefixes are removed. `expert` is the one named by the prefixes so far."""
    mapped = _find(stem, keys)
    if mapped is not None:
        yield LocatedKey(expert, mapped, prefixes)
        return
    found = _EXPERT.match(stem) if keys.experts and not expert else None
    if found:
        yield from _without_prefixes(
            stem[found.end() :], keys, _EXPERT_NAMES[found[1] or found[2]], (*prefixes, found[0])
        )
    for prefix in _PREFIXES:
        if stem.startswith(prefix) and prefix not in prefixes:
            yield from _without_prefixes(stem[len(prefix) :], keys, expert, (*prefixes, prefix))


def _find(stem: str, keys: KeyMap) -> MappedLayers | None:
    """The layer of a name, also in old diffusers files: these insert `processor` before an attention's layers and write
    `to_out` for `to_out.0`."""
    mapped = keys.find(stem)
    if mapped is not None or not ("processor" in stem or stem.endswith("to_out")):
        return mapped
    plain = stem.replace(".processor.", ".").replace("_processor_", "_")
    zero = (f"{plain}.0", f"{plain}_0") if plain.endswith("to_out") else ()
    return next((found for name in (plain, *zero) if (found := keys.find(name)) is not None), None)
