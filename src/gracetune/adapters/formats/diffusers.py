"""The format of diffusers and PEFT: keys are `<component>.<diffusers path>.lora_A.weight`.

alpha is in the header's `lora_adapter_metadata`. Without that entry, diffusers loads every layer with a scale of 1,
whatever alpha it was trained with. Keys without the component are PEFT's own; their scale is in `adapter_config.json`,
or unknown (`formats.reading`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gracetune.adapters.algorithms.assembly import Convention, LayerError, checked_alpha
from gracetune.adapters.algorithms.low_rank import PEFT_NAMES
from gracetune.adapters.algorithms.registry import algorithm
from gracetune.adapters.formats.layers import common_alpha, common_rank, is_in_a_block, is_plain_lora
from gracetune.adapters.formats.reading import AdapterContents, AlphaLookup, read_states
from gracetune.adapters.formats.record import Format
from gracetune.adapters.formats.writing import (
    FileContents,
    cast,
    check_layers_with,
    identity,
    reject_what_does_not_fit,
    row_magnitude,
)
from gracetune.adapters.safetensors_file import PEFT_CONFIG
from gracetune.adapters.state import AdapterState, Layer
from gracetune.errors import short
from gracetune.models.keys import KeyMap
from gracetune.models.registry import KEY_MAPS

HEADER_ENTRY = "lora_adapter_metadata"
_REPEATS, _NESTED = re.compile(r"[*+{]|(?<!\()\?"), re.compile(r"\)[*+{?]")
"""A quantifier (not the ? of a group's options), and a quantifier behind a group."""
_WITH_PLAIN_ALPHA = ("LOKR", "LOHA")
"""PEFT's adapter types whose configs have the key `alpha` instead of `lora_alpha`."""
_MOST_REPEATS, _LONGEST_PATTERN = 2, 2_000
_MOST_PATTERNS, _MOST_REPEATING = 2_000, 16
"""Limits on the header's regular expressions, because every layer is matched against every pattern and a hostile file
could make that take forever. Our own files have one pattern for each layer, without repeats."""


def write(state: AdapterState, dtype: torch.dtype) -> FileContents:
    keys = KEY_MAPS[state.family]
    reject_what_does_not_fit(state, "diffusers", lambda layer, path: rejection(layer))
    tensors: dict[str, Tensor] = {}
    for path, layer in state.layers.items():
        stem = f"{keys.component}.{path}"
        for name, tensor in _spelled(layer).items():
            tensors[f"{stem}.{name}"] = cast(tensor, dtype, f"{stem}.{name}", layer)
    config = {f"{keys.component}.{name}": value for name, value in _config(state).items()}
    return tensors, identity(state, "diffusers") | {HEADER_ENTRY: json.dumps(config, sort_keys=True)}


def read(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], family: str) -> AdapterContents:
    return read_states(tensors, metadata, family, Convention(), alpha_lookup_in(metadata, KEY_MAPS[family].component))


def rejection(layer: Layer) -> str | None:
    reason = algorithm(layer.algorithm).rejection("diffusers", layer.tensors)
    if reason is not None:
        return reason
    if "dora_scale" in layer.tensors and row_magnitude(layer) is None:
        return "PEFT's DoRA has a magnitude for each output, this one for each input"
    return None


def _wrong_in_comfyui(layer: Layer, path: str, keys: KeyMap) -> str | None:
    if not is_plain_lora(layer):
        return "ComfyUI loads only LoRA from files of diffusers: it does not read their magnitudes"
    if layer.alpha != layer.rank:
        return "ComfyUI ignores the alpha in the header of a file of diffusers"
    return None


def not_converted(layer: Layer, path: str, keys: KeyMap) -> str | None:
    """Why diffusers' converter for other programs' files rejects a layer. `kohya` and `comfyui` files go through it."""
    if not is_plain_lora(layer):
        return "diffusers converts only LoRA from other programs' files"
    if not is_in_a_block(path):
        return "diffusers converts only layers of blocks from other programs' files"
    return None


misread_by_converter = check_layers_with(not_converted)


def _spelled(layer: Layer) -> dict[str, Tensor]:
    names = {**PEFT_NAMES, "dora_scale": "lora_magnitude_vector"}
    spelled = {names.get(name, name): tensor for name, tensor in layer.tensors.items()}
    if "lora_magnitude_vector" in spelled:
        kernel = spelled["lora_A.weight"].ndim - 2
        rows = spelled["lora_magnitude_vector"].reshape(-1)
        spelled["lora_magnitude_vector"] = rows.reshape(1, -1, *(1,) * kernel) if kernel else rows
    return spelled


def _config(state: AdapterState) -> dict[str, Any]:
    """The entries of a `LoraConfig` that loading needs. `^` makes a pattern match the whole path only."""
    rank, alpha = common_rank(state), common_alpha(state)
    ranks = {f"^{path}": layer.rank for path, layer in state.layers.items() if layer.rank != rank}
    alphas = {f"^{path}": _number(layer.alpha) for path, layer in state.layers.items() if layer.alpha != alpha}
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": _number(alpha or 0.0),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "target_modules": _targets(state),
        "use_dora": any("dora_scale" in layer.tensors for layer in state.layers.values()),
        "bias": "none",
    }


def _targets(state: AdapterState) -> list[str] | str:
    """The paths as a list, or as a regular expression if one of them is a top-level name.

    PEFT matches an entry of a list as a suffix of paths, so a top-level `proj_out` would match in every block.
    """
    paths = sorted(state.layers)
    if all("." in path for path in paths):
        return paths
    return "|".join(re.escape(path) for path in paths)


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value


# -- reading ----------------------------------------------------------------------------------------------------------


def alpha_lookup_in(metadata: Mapping[str, str], component: str) -> AlphaLookup | None:
    """The lookup of a layer's alpha, from the header or PEFT's config beside the file. None if neither has one.

    If one of them exists but cannot be read, the returned function raises `LayerError`: a scale of 1 would be a guess.
    """
    text = metadata.get(HEADER_ENTRY) or metadata.get(PEFT_CONFIG)
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: thousands of nested brackets
        found = None
    if not isinstance(found, dict):
        return _unreadable
    config = {name.removeprefix(f"{component}."): value for name, value in found.items()}
    has_plain_alpha = config.get("peft_type") in _WITH_PLAIN_ALPHA
    alpha = config.get("alpha" if has_plain_alpha else "lora_alpha")
    if alpha is None:
        return None
    values = [config.get(key) for key in ("alpha_pattern", "rank_pattern")]
    alphas, ranks = (value if isinstance(value, dict) else {} for value in values)
    if any(len(one) > _MOST_PATTERNS or sum(map(_repeats, one)) > _MOST_REPEATING for one in (alphas, ranks)):
        return _too_many_patterns
    alpha_of, rank_of = _by_pattern("alpha_pattern", alphas, alpha), _by_pattern("rank_pattern", ranks, config.get("r"))
    rank_stabilised = config.get("use_rslora") is True

    def alpha_or_scale(path: str, rank: int | None) -> float:
        value = checked_alpha(alpha_of(path), " in the header")
        if rank is None:  # the scale of an undecomposed LoKr instead (`reading.AlphaLookup`)
            return value / _checked_rank(rank_of(path))
        return value * (math.sqrt(rank) if rank_stabilised else 1.0)

    return alpha_or_scale


def _by_pattern(entry: str, values: Mapping[str, Any], otherwise: object) -> Callable[[str], object]:
    """A function that returns the value of the first pattern a path matches, as PEFT does."""
    given = {text: _compiled(text) for text in values}

    def value(path: str) -> object:
        for text, pattern in given.items():
            if pattern is None:
                raise LayerError(f"the header's {entry} {short(text, 40)} cannot be followed")
            if pattern.fullmatch(path):
                return values[text]
        return otherwise

    return value


def _repeats(pattern: str) -> bool:
    return bool(_REPEATS.search(pattern))


def _checked_rank(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise LayerError(f"r in adapter_config.json is {short(repr(value), 20)}: expected a whole number above 0")


def _unreadable(path: str, rank: int | None) -> float:
    raise LayerError(f"no alpha: {HEADER_ENTRY} in the header, or adapter_config.json beside it, is no JSON object")


def _too_many_patterns(path: str, rank: int | None) -> float:
    most = f"{_MOST_PATTERNS:,} entries, or {_MOST_REPEATING} that repeat something"
    raise LayerError(f"the header's alpha_pattern or rank_pattern has more than {most}")


def _compiled(pattern: str) -> re.Pattern[str] | None:
    """PEFT's pattern, a regular expression for the end of a path. None if it is invalid or could take forever."""
    if len(pattern) > _LONGEST_PATTERN or len(_REPEATS.findall(pattern)) > _MOST_REPEATS or _NESTED.search(pattern):
        return None
    try:
        return re.compile(rf"(.*\.)?({pattern})")
    except (re.error, OverflowError):
        return None


FORMAT = Format(
    write,
    read,
    readers={
        "diffusers": check_layers_with(lambda layer, path, keys: rejection(layer)),
        "comfyui": check_layers_with(_wrong_in_comfyui),
    },
    made_for=("diffusers",),
    all_families=("diffusers",),
)
