"""Writes an adapter as tensors by key: what all formats have in common.

`write` is the whole of it. A format supplies a `Spelling` and one of the functions that name layers (`diffusers_stems`,
`original_stems`). All reasons why a file cannot be written are collected into one `CannotHoldError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gracetune.adapters.algorithms.assembly import LayerError, is_by_input
from gracetune.adapters.algorithms.low_rank import CORE, LYCORIS_NAMES, PEFT_NAMES
from gracetune.adapters.algorithms.matrices import is_finite
from gracetune.adapters.algorithms.registry import algorithm
from gracetune.adapters.delta import BASE_MAGNITUDE, MAGNITUDE, outputs
from gracetune.adapters.errors import CannotHoldError
from gracetune.adapters.formats import fused_layers
from gracetune.adapters.formats.layers import algorithm_names
from gracetune.adapters.state import AdapterState, Layer
from gracetune.config.registry import ALGORITHMS, FormatName
from gracetune.errors import Problem
from gracetune.models.keys import KeyMap
from gracetune.models.registry import KEY_MAPS

FileContents = tuple[dict[str, Tensor], dict[str, str]]
"""Tensors by key, and the entries that the format adds to the file's header."""

_FILE_NAMES = {"down": LYCORIS_NAMES, "A": PEFT_NAMES}
_ALWAYS_FP32 = tuple(name for kind in ALGORITHMS.ours for name in algorithm(kind).always_fp32)
"""Tensors that stay fp32 in the file. The names apply to layers of any algorithm, because LyCORIS files can have DoRA's
magnitudes on all of them."""
ALGORITHM_ENTRY = "gracetune.algorithm"
DORA_ENTRY, BY_BASE = "gracetune.dora", "base"
"""A header entry and its value: the row magnitudes of DoRA in the file (`dora_scale`) were converted for ComfyUI, which
divides by |W| where training divides by |W + D| (`delta.with_base_magnitude`)."""


@dataclass(frozen=True)
class Spelling:
    """How one format writes the tensors of a layer. `Stems` defines the keys."""

    format: FormatName
    lora: Literal["A", "down"]
    """`lora_A`, `lora_B` or `lora_down`, `lora_up`."""
    alpha: Callable[[Layer], float | None]
    rejection: Callable[[Layer, str, KeyMap], str | None]
    """Why the format cannot hold this layer at this path."""
    dora_by_base: bool = False
    """As in the format's record."""


@dataclass(frozen=True)
class Stem:
    """The part of a key that names a layer, without the tensor's name, and that layer."""

    name: str
    layer: Layer


Fault = tuple[str, str]
"""The path of a layer, and why a format cannot represent it or a program cannot load it."""
Stems = Callable[[AdapterState, KeyMap, list[Fault]], Iterator[Stem]]
"""Yields all layers of a state with the names of a format, and appends a fault for each layer it cannot name."""


def write(state: AdapterState, dtype: torch.dtype, spelling: Spelling, stems: Stems) -> FileContents:
    """The contents of a file. Raises `CannotHoldError` with every layer that the format cannot represent."""
    keys = KEY_MAPS[state.family]
    reject_what_does_not_fit(
        state,
        spelling.format,
        lambda layer, path: spelling.rejection(layer, path, keys),
        dora_by_base=spelling.dora_by_base,
    )
    tensors: dict[str, Tensor] = {}
    faults: list[Fault] = []
    for stem in stems(state, keys, faults):
        for name, tensor in _file_tensors(stem.layer, spelling.lora).items():
            tensors[f"{stem.name}.{name}"] = cast(tensor, dtype, f"{stem.name}.{name}", stem.layer)
        alpha = spelling.alpha(stem.layer)
        if alpha is not None:
            # Always fp32: in half precision a large alpha would become inf.
            tensors[f"{stem.name}.alpha"] = torch.tensor(alpha, dtype=torch.float32)
    if faults:
        raise cannot_hold(state, spelling.format, faults)
    return tensors, identity(state, spelling.format)


def diffusers_stems(prefix: str, separator: str) -> Stems:
    """Layers by diffusers' paths."""

    def stems(state: AdapterState, keys: KeyMap, faults: list[Fault]) -> Iterator[Stem]:
        for path, layer in state.layers.items():
            yield Stem(prefix.format(keys.component) + path.replace(".", separator), layer)

    return stems


def original_stems(prefix: str, separator: str) -> Stems:
    """Layers by the original model's names. Layers that the original model fuses into one matrix are joined.

    The family has a name for every layer: `write` has rejected the others before.
    """

    def stems(state: AdapterState, keys: KeyMap, faults: list[Fault]) -> Iterator[Stem]:
        done: set[str] = set()
        for path, layer in state.layers.items():
            original = keys.original(path)
            if original is None or original.name in done:
                continue
            done.add(original.name)
            name = prefix + original.name.replace(".", separator)
            if not original.mapped.fused:
                yield Stem(name, swap_row_halves(layer) if original.mapped.halves_swapped else layer)
                continue
            parts = {
                index: state.layers[part] for index, part in enumerate(original.mapped.paths) if part in state.layers
            }
            try:
                yield Stem(name, fused_layers.fuse(parts, original.mapped))
            except LayerError as fault:
                faults.append((original.mapped.paths[next(iter(parts))], str(fault)))

    return stems


def original_rejection(layer: Layer, path: str, keys: KeyMap) -> str | None:
    """Why the original model's layout cannot represent this layer. None if it can, or for an unknown layer."""
    original = keys.original(path)
    if original is None:
        return None
    if original.mapped.fused and not fused_layers.can_be_fused(layer):
        parts = ", ".join(part.rpartition(".")[2] for part in original.mapped.paths)
        only = "only plain LoRAs or differences of its parts can be joined"
        return f"{parts} are one matrix in the original model, and {only}"
    if original.mapped.halves_swapped and not algorithm(layer.algorithm).row_tensors:
        return "the rows of this layer are in another order in the original model, and this kind cannot be reordered"
    if original.mapped.halves_swapped and not {MAGNITUDE, BASE_MAGNITUDE}.isdisjoint(layer.tensors):
        return "the rows of this layer are in another order in the original model, and DoRA's cannot be reordered"
    return None


def check_layers_with(reason: Callable[[Layer, str, KeyMap], str | None]) -> Callable[[AdapterState], Iterator[Fault]]:
    """A check of whole states from a check of one layer. `reason` returns why a layer is at fault, or None."""

    def faults(state: AdapterState) -> Iterator[Fault]:
        keys = KEY_MAPS[state.family]
        for path, layer in state.layers.items():
            found = reason(layer, path, keys)
            if found is not None:
                yield path, found

    return faults


def reject_what_does_not_fit(
    state: AdapterState,
    format: FormatName,
    rejection: Callable[[Layer, str], str | None],
    *,
    dora_by_base: bool = False,
) -> None:
    """Raise `CannotHoldError` if the format cannot represent some layers, or if the family does not have them."""
    keys = KEY_MAPS[state.family]
    reasons = [(path, f"no layer of {state.family} is called this") for path in state.layers if not keys.has(path)]
    for path, layer in state.layers.items():
        reason = rejection(layer, path)
        if reason is None and not dora_by_base and BASE_MAGNITUDE in layer.tensors:
            reason = "its DoRA was converted for ComfyUI and means something else elsewhere: use the file it came from"
        if reason is not None:
            reasons.append((path, reason))
    if reasons:
        raise cannot_hold(state, format, reasons)


def cannot_hold(state: AdapterState, format: FormatName, reasons: Iterable[Fault]) -> CannotHoldError:
    """An error with one problem for each reason. Layers with the same reason share a problem."""
    by_reason: dict[str, list[str]] = {}
    for path, reason in reasons:
        by_reason.setdefault(reason, []).append(path)
    return CannotHoldError(
        Problem(
            key=f"{'+'.join(algorithm_names(state))} for {state.family} as {format}",
            found=f"{paths[0]}{f' and {len(paths) - 1} more layers' if paths[1:] else ''}: {reason}",
            expected=f"an adapter that the format {format} can represent",
            hint="another format, --lora-rank N (the nearest LoRA), or --merge-into MODEL",
        )
        for reason, paths in by_reason.items()
    )


def algorithms_in(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """The algorithms that the header lists (`identity`). Empty for files of other programs."""
    listed = metadata.get(ALGORITHM_ENTRY)
    return tuple(listed.split(",")) if listed else ()


def identity(state: AdapterState, format: FormatName) -> dict[str, str]:
    """Header entries that identify a file written by gracetune."""
    found = {
        "gracetune.family": state.family,
        ALGORITHM_ENTRY: ",".join(sorted(algorithm_names(state))),
        "gracetune.format": format,
    }
    if any(BASE_MAGNITUDE in layer.tensors for layer in state.layers.values()):
        found[DORA_ENTRY] = BY_BASE
    return found | ({"gracetune.stage": state.expert} if state.expert else {})


def cast(tensor: Tensor, dtype: torch.dtype, name: str, layer: Layer) -> Tensor:
    """Cast floating-point tensors to the file's precision. Raises `CannotHoldError` if a value would become inf."""
    if name.endswith((*_ALWAYS_FP32, *algorithm(layer.algorithm).always_fp32)):
        dtype = torch.float32
    if not tensor.is_floating_point():
        return tensor.detach().cpu().contiguous()
    result = tensor.detach().to("cpu", dtype).contiguous()
    if not is_finite(result) and is_finite(tensor):
        largest = tensor.abs().max().item()
        raise CannotHoldError(
            [
                Problem(
                    name,
                    f"values up to {largest:.3g}",
                    f"values of {dtype} (up to {torch.finfo(dtype).max:.3g})",
                    "bf16 or fp32: --set checkpoints.save_dtype=bf16; gracetune adapter convert FILE --dtype bf16",
                )
            ]
        )
    return result


def alpha_in(format: FormatName, layer: Layer) -> float | None:
    """The alpha to write, by the convention of the format; None if the file has none."""
    return algorithm(layer.algorithm).alpha_in(format, layer.alpha)


def row_magnitude(layer: Layer) -> Tensor | None:
    """DoRA's magnitudes if they belong to the weight's rows; None otherwise."""
    found, rows = layer.tensors.get(MAGNITUDE), outputs(layer)
    if found is None or rows is None or algorithm(layer.algorithm).magnitude_by_rows:
        return found
    return None if is_by_input(found, rows) else found


def _file_tensors(layer: Layer, lora: Literal["A", "down"]) -> Mapping[str, Tensor]:
    """The layer's tensors with the names and shapes of a file. Row magnitudes become [out, 1, ...]."""
    names = _FILE_NAMES["down" if CORE in layer.tensors else lora]  # a core is always down, mid, up
    spelled = {names.get(name, name): tensor for name, tensor in layer.tensors.items()}
    rows = spelled.pop(BASE_MAGNITUDE, row_magnitude(layer))
    if rows is not None:
        spelled[MAGNITUDE] = rows.reshape(-1, *(1,) * (_weight_dimensions(layer) - 1))
    return spelled


def _weight_dimensions(layer: Layer) -> int:
    """The number of dimensions of the layer's weight: a factor that includes the kernel has as many."""
    return max(2, *(tensor.ndim for tensor in layer.tensors.values()))


def swap_row_halves(layer: Layer) -> Layer:
    """The layer with the two halves of its output rows swapped."""
    rows = algorithm(layer.algorithm).row_tensors
    tensors = {
        name: torch.cat(tuple(reversed(tensor.chunk(2)))) if name in rows else tensor
        for name, tensor in layer.tensors.items()
    }
    return replace(layer, tensors=tensors)
