"""Detects the family, expert, algorithm and format of a file, each with the evidence for it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from gracetune.adapters.algorithms.assembly import Convention
from gracetune.adapters.algorithms.registry import algorithm, algorithms
from gracetune.adapters.errors import UnclearFamilyError
from gracetune.adapters.formats.diffusers import HEADER_ENTRY
from gracetune.adapters.formats.names import LocatedKey, locate, split_key
from gracetune.adapters.formats.writing import algorithms_in
from gracetune.adapters.state import ExpertStage
from gracetune.config.registry import ALGORITHMS, FormatName
from gracetune.errors import Problem, short
from gracetune.models.keys import KeyMap
from gracetune.models.registry import KEY_MAPS

Spelled = FormatName | Literal["other"]

_HEADER_FIELDS = ("gracetune.family", "ss_base_model_version", "modelspec.architecture")
_EXPERT_IN_NAME = re.compile(r"(?:^|[_\-.])(high|low)_noise(?=$|[_\-.])")
_EXPERTS: tuple[ExpertStage, ExpertStage] = ("high_noise", "low_noise")
_SHOWN = 8


@dataclass(frozen=True)
class Detected:
    family: str
    experts: tuple[ExpertStage, ...]
    """Two if the file holds both experts; `("",)` if nothing names an expert."""
    algorithms: tuple[str, ...]
    format: Spelled
    evidence: tuple[str, ...]
    contradictions: tuple[str, ...] = ()
    """Evidence for another expert than the detected one."""

    @property
    def algorithm(self) -> str:
        return "+".join(self.algorithms) or "nothing"


def detect(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, name: str = "", family: str | None = None
) -> Detected:
    """Detect what the file is from its keys, header and name (without suffix). A given `family` is not checked."""
    stems = Counter(parts.stem for key in tensors if (parts := split_key(key)) is not None)
    if family is None:
        family, why = _family(tensors, stems, metadata)
    else:
        why = f"family: {family}, as requested"
    keys = KEY_MAPS[family]
    located = list(_located(stems, keys))
    evidence = _expert_evidence(located, metadata, name) if keys.experts else {}
    experts, expert_reasons = _experts(evidence)
    spelled, format_why = _format(tensors, located, metadata, keys)
    return Detected(
        keys.family,
        experts,
        _algorithms(tensors, metadata),
        spelled,
        (why, *expert_reasons, format_why),
        _contradictions(evidence, experts),
    )


def _located(stems: Mapping[str, int], names: KeyMap) -> dict[LocatedKey, int]:
    """The layers that the stems name, each with the number of its keys."""
    found: Counter[LocatedKey] = Counter()
    for stem, count in stems.items():
        located = locate(stem, names)
        if located is not None:
            found[located] += count
    return found


def _family(tensors: Mapping[str, Tensor], stems: Mapping[str, int], metadata: Mapping[str, str]) -> tuple[str, str]:
    keys = tuple(tensors)
    known = {family: _located(stems, names) for family, names in KEY_MAPS.items()}
    most = max(sum(located.values()) for located in known.values())
    if most == 0:
        hint = f"check that it is an adapter of {', '.join(KEY_MAPS)}"
        raise _unclear(_listed(keys) or "no tensors", "keys that name layers of one family", hint)
    best = [family for family, located in known.items() if sum(located.values()) == most]
    why = f"{most} of {len(keys)} keys name its layers"
    if len(best) > 1:
        claimed = [family for family in _claimed_families(metadata) if family in best]
        if claimed:
            best, why = claimed[:1], f"{why}, confirmed by the header"
    if len(best) > 1:
        within_depth = [
            family for family in best if not any(_too_deep(found, KEY_MAPS[family]) for found in known[family])
        ]
        if len(within_depth) == 1:
            best, why = within_depth, f"{why}, and no other family has as many blocks"
    if len(best) > 1:
        of_its_shapes = [family for family in best if _has_shapes_of(KEY_MAPS[family], tensors)]
        if len(of_its_shapes) == 1:
            best, why = of_its_shapes, f"{why}, and their shapes are its own"
    if len(best) == 1 and any(_too_deep(found, KEY_MAPS[best[0]]) for found in known[best[0]]):
        found = f"layers with the names of {best[0]}, in more blocks than any model of it has"
        raise _unclear(found, f"an adapter of {', '.join(KEY_MAPS)}", f"--family {best[0]}, if it is one all the same")
    if len(best) > 1:
        found = f"layers that {' and '.join(best)} have under the same names"
        raise _unclear(found, "one family", f"--family {best[0]}")
    return best[0], f"family: {best[0]}, {why}"


def _claimed_families(metadata: Mapping[str, str]) -> Iterable[str]:
    """The families whose marks are in the header. In one entry the longest mark comes first: `flux-2` before `flux`."""
    if metadata.get("gracetune.family") in KEY_MAPS:
        yield metadata["gracetune.family"]
    for entry in _HEADER_FIELDS:
        value = metadata.get(entry, "").lower()
        marks = {
            family: max((len(mark) for mark in keys.header_marks if mark in value), default=0)
            for family, keys in KEY_MAPS.items()
        }
        yield from sorted((family for family in marks if marks[family]), key=lambda family: -marks[family])


def _has_shapes_of(keys: KeyMap, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the file has LoRA layers of `KeyMap.shapes`, all with these shapes."""
    rows: dict[str, int] = {}
    columns: dict[str, int] = {}
    for key, tensor in tensors.items():
        parts = split_key(key)
        if parts is not None and tensor.ndim == 2:
            if parts.tensor == "lora_B.weight":
                rows[parts.stem] = tensor.shape[0]
            elif parts.tensor == "lora_A.weight":
                columns[parts.stem] = tensor.shape[1]
            elif parts.tensor == "diff":
                rows[parts.stem], columns[parts.stem] = tensor.shape
    found = []
    for stem in rows.keys() & columns.keys():
        located = locate(stem, keys)
        original = keys.original(located.mapped.paths[0]) if located is not None else None
        expected = keys.rows_by_columns(original.name) if original is not None else None
        if expected is not None:
            found.append(rows[stem] == expected * columns[stem])
    return bool(found) and all(found)


def _too_deep(found: LocatedKey, keys: KeyMap) -> bool:
    return any(keys.beyond_depth(path) for path in found.mapped.paths)


def _expert_evidence(
    located: list[LocatedKey], metadata: Mapping[str, str], name: str
) -> dict[str, tuple[ExpertStage, ...]]:
    """The experts that keys, header and file name state, the most trustworthy source first."""
    in_keys = {found.expert for found in located}
    evidence: dict[str, tuple[ExpertStage, ...]] = {}
    if len(in_keys) > 1:  # also for diffusers' pair, in whose keys only the second expert is marked
        evidence["its keys"] = _EXPERTS
    elif in_keys - {""}:
        evidence["its keys"] = tuple(in_keys)
    for expert in _EXPERTS:
        if metadata.get("gracetune.stage") == expert:
            evidence["its header"] = (expert,)
    in_name = _EXPERT_IN_NAME.findall(name)
    if in_name:  # the last match counts, because the run's own name may contain an expert
        evidence["its file's name"] = (_EXPERTS[0 if in_name[-1] == "high" else 1],)
    return evidence


def _experts(evidence: Mapping[str, tuple[ExpertStage, ...]]) -> tuple[tuple[ExpertStage, ...], tuple[str, ...]]:
    for source, experts in evidence.items():
        if len(experts) > 1:
            return experts, ("stage: keys of both experts",)
        return experts, (f"stage: {experts[0]}, by {source}",)
    return ("",), ()


def _contradictions(
    evidence: Mapping[str, tuple[ExpertStage, ...]], experts: tuple[ExpertStage, ...]
) -> tuple[str, ...]:
    """Sources that contradict the first one. A file of both experts may have any name."""
    if len(experts) > 1:
        return ()
    first = next(iter(evidence), "")
    return tuple(
        f"{first} says {experts[0]}, {source} {claimed[0]}"
        for source, claimed in evidence.items()
        if claimed[0] != experts[0]
    )


def _format(
    tensors: Mapping[str, Tensor], located: list[LocatedKey], metadata: Mapping[str, str], keys: KeyMap
) -> tuple[Spelled, str]:
    first = Counter(found.prefixes[0] if found.prefixes else "" for found in located)
    prefix = first.most_common(1)[0][0] if first else ""
    if any("$$" in key for key in tensors):
        return "other", "format: other, names joined with $$"
    if prefix.startswith("lycoris_"):
        return "lycoris", f"format: lycoris, keys begin with {prefix}"
    if prefix == "lora_unet_":
        return "kohya", "format: kohya, keys begin with lora_unet_"
    if prefix == "diffusion_model.":
        return "comfyui", "format: comfyui, keys begin with diffusion_model."
    plain = prefix in ("", "base_model.model.", "transformer.", "unet.", f"{keys.component}.")
    if not plain:
        return "other", f"format: other, keys begin with {prefix}"
    claimed = metadata.get("gracetune.format")
    kinds = set(_algorithms(tensors, metadata))
    with_alpha = any(key.endswith(".alpha") for key in tensors) or not all(
        algorithm(kind).trained_by_peft for kind in kinds
    )
    of_peft = prefix == "base_model.model."
    if (
        HEADER_ENTRY not in metadata
        and not of_peft
        and keys.comfyui_takes_ours
        and (claimed == "comfyui" or with_alpha)
    ):
        return "comfyui", f"format: comfyui, which takes {keys.component}.<path> for this family"
    return "diffusers", f"format: diffusers, keys begin with {prefix or 'the layer itself'}"


def _algorithms(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[str, ...]:
    """The algorithms by the keys, and by the header of our own files where algorithms share keys."""
    convention = Convention().with_header(algorithms_in(metadata))
    layers: dict[str, set[str]] = {}
    for key in tensors:
        parts = split_key(key)
        if parts:
            layers.setdefault(parts.stem, set()).add(parts.tensor)
    found = (kind for names in layers.values() if (kind := _kind(names)) is not None)
    return tuple(kind for kind, _ in Counter(map(convention.kind_of, found)).most_common())


def _kind(names: set[str]) -> str | None:
    ours = [record for record in algorithms() if record.name in ALGORITHMS.ours]
    for record in (*reversed(ours), *algorithms()):  # our algorithms take precedence over those of other packages
        if any(name.startswith(record.marks) for name in names):
            return record.name
    return None


def _unclear(found: str, expected: str, hint: str) -> UnclearFamilyError:
    return UnclearFamilyError([Problem("family", found, expected, hint)])


def _listed(keys: tuple[str, ...]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(map(short, keys[:_SHOWN])) + more
