"""Weights in a single file of the original layout, under the names of the authors; diffusers knows how to rename them.

diffusers' own `from_single_file` casts layers that must stay float32 to bfloat16, and only warns about missing tensors.
Only its renaming is therefore used here; the tensors are copied into memory that `models.loading` has allocated.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gracetune.errors import ConfigError, Problem
from gracetune.memory.weights.transfer_buffers import too_large_for
from gracetune.models.eight_bit_layers import Put
from gracetune.models.source import ModelSource
from gracetune.storage.safetensors_headers import TensorEntry, WeightFileError, open_weights, shortened

_DENOISERS = ("transformer", "unet")
_PREFIXES: Mapping[str, tuple[str, ...]] = {
    "vae": ("first_stage_model.", "vae."),
    "text_encoder": ("conditioner.embedders.0.",),
    "text_encoder_2": ("conditioner.embedders.1.",),
}
"""Prefixes of the other parts' tensor names. The text encoders are SDXL's two, as named in its whole checkpoints; files
with other text encoders are rejected when the source is opened."""
_OTHER_PARTS = tuple(prefix for prefixes in _PREFIXES.values() for prefix in prefixes)


def supplies(source: ModelSource, component: str) -> bool:
    """Whether this part's weights come from the single file."""
    if source.single_file is None or {"vae": source.vae, "text_encoder": source.text_encoder}.get(component):
        return False
    return component in _DENOISERS or (component in _PREFIXES and bool(tensors_of(source, component)))


def tensors_of(source: ModelSource, component: str) -> tuple[TensorEntry, ...]:
    """The tensors of the file that belong to this part."""
    assert source.single_file is not None
    entries = open_weights(source.single_file).entries.values()
    if component in _DENOISERS:
        return tuple(entry for entry in entries if not entry.name.startswith(_OTHER_PARTS))
    return tuple(entry for entry in entries if entry.name.startswith(_PREFIXES[component]))


def has_same_names(file: Path, destinations: Mapping[str, Tensor]) -> bool:
    """Whether the file has exactly the tensors of `destinations`, under diffusers' names. The faster loader can then be
    used, because nothing has to be renamed."""
    return open_weights(file).entries.keys() == destinations.keys()


def load(
    file: Path, cls: type[Any], config: Mapping[str, Any], destinations: Mapping[str, Tensor], put: Put
) -> None:  # fmt: skip
    """Copy the file's tensors into `destinations`. A destination on the meta device has no memory: `put` gets
    its name and tensor (`eight_bit_layers`). Raises WeightFileError for missing, unexpected and unfit tensors."""
    renamed = _renamed(file, cls, config)
    problems = shortened(_missing(file, cls, renamed, destinations)) + shortened(_surplus(file, renamed, destinations))
    problems += [
        Problem(name, f"shape {tuple(renamed[name].shape)}", f"shape {tuple(tensor.shape)}", _BELONG, str(file))
        for name, tensor in destinations.items()
        if name in renamed and renamed[name].shape != tensor.shape
    ][:8]
    if problems:
        raise WeightFileError(problems)
    with torch.no_grad():
        for name, tensor in destinations.items():
            if tensor.is_meta:
                put(name, renamed[name])
                continue
            bad = too_large_for(renamed[name], tensor.dtype)
            if bad is not None:
                expected = f"values up to {torch.finfo(tensor.dtype).max:g}, the largest {tensor.dtype} holds"
                hint = "--set model.base_precision=bf16"
                raise WeightFileError([Problem(name, f"the value {bad:g}", expected, hint, str(file))])
            tensor.copy_(renamed[name])


_BELONG = "check that this file belongs to model.family and model.flavour"


def _renamed(file: Path, cls: type[Any], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The file's tensors under diffusers' names."""
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    from gracetune.storage.safetensors_files import read_tensors

    known: dict[str, Any] | None = SINGLE_FILE_LOADABLE_CLASSES.get(cls.__name__)  # type: ignore[assignment]
    if known is None:
        hint = "give the model's folder in diffusers' layout as model.path"
        found = f"{file}, a single file in its authors' own layout"
        raise ConfigError([Problem("model.path", found, f"a layout diffusers reads for {cls.__name__}", hint)])
    open_weights(file)  # reports a broken file with our message
    tensors = read_tensors(file)  # memory-mapped, not read yet
    try:
        renamed: dict[str, Tensor] = known["checkpoint_mapping_fn"](config=dict(config), checkpoint=tensors)
    except (KeyError, IndexError, ValueError, RuntimeError) as error:
        # diffusers' renaming looks tensors up by name and fails on the first missing one.
        found = f"no layout diffusers knows for {cls.__name__} ({type(error).__name__}: {error})"
        raise WeightFileError(
            [Problem("names", found, "the layout the model was published in", _BELONG, str(file))]
        ) from None
    return renamed


def _missing(
    file: Path, cls: type[Any], renamed: Mapping[str, Tensor], destinations: Mapping[str, Tensor]
) -> list[Problem]:
    problems = []
    for position, name in enumerate(name for name in destinations if name not in renamed):
        near = difflib.get_close_matches(name, renamed, n=1) if position < 3 else []
        hint = f"is it {near[0]!r}?" if near else _BELONG
        problems.append(Problem(name, "no tensor of this name", f"all weights of {cls.__name__}", hint, str(file)))
    return problems


def _surplus(file: Path, renamed: Mapping[str, Tensor], destinations: Mapping[str, Tensor]) -> list[Problem]:
    return [
        Problem(name, "an unexpected tensor", "only this model's weights", _BELONG, str(file))
        for name in renamed
        if name not in destinations and not name.startswith(_OTHER_PARTS)
    ]


def load_text_encoder(source: ModelSource, component: str, cls: Any, dtype: torch.dtype) -> nn.Module:
    """A text encoder from a whole checkpoint in one file, as SDXL's are published."""
    from diffusers.loaders.single_file_utils import create_diffusers_clip_model_from_ldm

    from gracetune.storage.safetensors_files import read_tensors

    file = source.single_file
    assert file is not None
    open_weights(file)  # reports a broken file with our message
    # diffusers distinguishes the two encoders by their width. Their prefix in the file is unambiguous.
    (prefix,) = _PREFIXES[component]
    tensors = {name: tensor for name, tensor in read_tensors(file).items() if name.startswith(prefix)}
    try:
        model: nn.Module = create_diffusers_clip_model_from_ldm(
            cls, tensors, subfolder=component, config=str(source.folder), torch_dtype=dtype, local_files_only=True
        )
    except ValueError as error:
        problem = Problem(prefix, str(error), f"the weights of {cls.__name__}", _BELONG, str(file))
        raise WeightFileError([problem]) from None
    empty = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if empty:
        problems = [
            Problem(name, "no tensor of this name", f"all weights of {cls.__name__}", _BELONG, str(file))
            for name in empty[:8]
        ]
        raise WeightFileError(problems)
    return model
