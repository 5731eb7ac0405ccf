"""Loading one part of a model from its folder: its configuration builds the module, one copy fills it.

`load_component` returns what diffusers' `from_pretrained(torch_dtype=...)` returns, tensor for tensor, with these
differences: a missing or unexpected tensor is an error instead of a warning, tied parameters stay tied, the weights are
never in host memory as a whole on their way to a GPU, and the result is frozen.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils.weight_norm import WeightNorm
from transformers.utils import logging

from gracetune.errors import ConfigError, Problem
from gracetune.memory.weights.loading import Progress, load_into
from gracetune.models import eight_bit_layers as eight_bits
from gracetune.models import single_file
from gracetune.models.attention import apply_attention
from gracetune.models.eight_bit_layers import Put, eight_bit_weights, put_into
from gracetune.models.eight_bit_linear import check_fp8
from gracetune.models.layout import CONFIG, part_config, read_config, weight_file
from gracetune.models.progress_bars import without_bars
from gracetune.models.source import ModelSource
from gracetune.models.spec import EightBitLayers, PartPlacement
from gracetune.storage.safetensors_headers import WeightFileError, WeightFiles, open_weights

RandomFill = Callable[[nn.Module, Mapping[str, Tensor]], None]
"""Initializes tensors of a model in place, by name, with values that come from no file."""


# -- building ---------------------------------------------------------------------------------------------------------


Adjust = Callable[[nn.Module], None]
"""Modifies a model so that it computes the same result in another way."""


def build_component(
    source: ModelSource, component: str, cls: type[Any], *, adjust: Adjust | None = None
) -> nn.Module:  # fmt: skip
    """The part on the meta device: names and shapes without memory. Use `load_component` for a part with weights."""
    config = part_config(source, component, cls)
    with torch.device("meta"), _config_errors(source, component, cls):
        model: nn.Module = cls.from_config(config)
    if adjust is not None:
        adjust(model)
    return model.requires_grad_(False).eval()


@contextmanager
def _config_errors(source: ModelSource, component: str, cls: type[Any]) -> Iterator[None]:
    """Turn the exceptions a class raises for an unusable configuration into ConfigError."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        expected = f"a configuration of {cls.__name__} with values that fit together"
        file, hint = str(source.part(component) / CONFIG), "download this file again"
        raise ConfigError([Problem("the configuration", str(error), expected, hint, file)]) from error


@contextmanager
def _parameters_on_meta(dtype: torch.dtype) -> Iterator[None]:
    """Modules built in this context have their parameters on meta, and compute everything else (RoPE tables) for real.

    With everything on meta, such tables would have no values, and some are not buffers that could be found and filled.
    """
    builder = threading.get_ident()

    def to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or threading.get_ident() != builder:
            return None  # registered before: a tied parameter has to stay the same object
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    before = torch.get_default_dtype()
    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[]):  # constructors use the global generator; the caller's must not advance
            yield
    finally:
        torch.set_default_dtype(before)
        hook.remove()


# -- loading ----------------------------------------------------------------------------------------------------------


def load_component(
    source: ModelSource,
    component: str,
    cls: type[Any],
    placement: PartPlacement,
    *,
    progress: Progress | None = None,
    random_fill: RandomFill | None = None,
    adjust: Adjust | None = None,
) -> nn.Module:
    """A diffusers model, frozen and in eval mode, with its weights read directly to `placement.device`.

    With `random_fill` no weight is read; `random_fill` initializes the weights instead, and everything else is the
    same. `progress` is called only while a file with diffusers' names is read.

    Layers that the class keeps in float32 stay in float32. With `placement.eight_bits` the weights of the layers it
    names are quantized to 8 bits while they are read, so they are never in memory as a whole in another precision.

    On the meta device nothing is read. That is enough to ask an encoder for its id.
    """
    if placement.device.type == "meta":
        return build_component(source, component, cls, adjust=adjust)
    config = part_config(source, component, cls)
    with _parameters_on_meta(placement.dtype), _config_errors(source, component, cls):
        model: Any = cls.from_config(config)
    quantized: frozenset[str] = frozenset()
    if placement.eight_bits is not None:
        if placement.eight_bits.kind == "fp8":
            check_fp8(placement.device)
        quantized = eight_bit_weights(model, placement.eight_bits, _in_fp32(cls))
    destinations = _allocate(model, cls, placement.dtype, placement.device, quantized)
    put = put_into(model, placement.eight_bits or EightBitLayers(()), placement.device)
    file = source.single_file if single_file.supplies(source, component) else None
    if random_fill is not None:
        _fill_random(model, destinations, random_fill, placement.device, put)
    elif file is not None and not single_file.has_same_names(file, destinations):
        single_file.load(file, cls, config, destinations, put)
    else:
        weights = open_weights(file or weight_file(source, component))
        _fill(model, cls, weights, destinations, placement.device, put, progress)
    _finish(model, placement.device)
    model.register_to_config(_name_or_path=str(source.part(component)))
    if adjust is not None:
        adjust(model)
    if placement.attention is not None:
        apply_attention(model, placement.attention)
    loaded: nn.Module = model.requires_grad_(False).eval()
    return loaded


def _in_fp32(cls: type[Any]) -> list[str]:
    """Names of the modules that this class keeps in float32, whatever its dtype."""
    kept = cls._keep_in_fp32_modules or []
    return [kept] if isinstance(kept, str) else kept


def _allocate(
    model: nn.Module, cls: type[Any], dtype: torch.dtype, device: torch.device, quantized: Collection[str] = ()
) -> dict[str, Tensor]:
    """Allocate every parameter and saved buffer on `device`. Returns them by name; a tied one has several names.

    The tensors named in `quantized` stay on meta: `put` gets them as they are read, and quantizes them.
    """
    kept = _in_fp32(cls)

    def dtype_of(name: str, tensor: Tensor) -> torch.dtype:
        if not tensor.is_floating_point():
            return tensor.dtype
        return dtype if set(kept).isdisjoint(name.split(".")) else torch.float32

    destinations: dict[str, Tensor] = {}
    filled: dict[int, Tensor] = {}
    for name, old in model.state_dict(keep_vars=True).items():
        if name in quantized:
            destinations[name] = old
            continue
        if id(old) not in filled:
            new = torch.empty(old.shape, dtype=dtype_of(name, old), device=device)
            filled[id(old)] = nn.Parameter(new, requires_grad=False) if isinstance(old, nn.Parameter) else new
        destinations[name] = filled[id(old)]
    for module in model.modules():
        for owned in (module._parameters, module._buffers):
            for name, tensor in owned.items():
                if tensor is not None and id(tensor) in filled:
                    owned[name] = filled[id(tensor)]  # type: ignore[assignment]
    return destinations


def _fill_random(
    model: nn.Module, destinations: Mapping[str, Tensor], random_fill: RandomFill, device: torch.device, put: Put
) -> None:
    """Initialize the weights with `random_fill`. Those that become 8-bit layers are on meta and are done one by one."""
    random_fill(model, {name: tensor for name, tensor in destinations.items() if not tensor.is_meta})
    for name, tensor in destinations.items():
        if tensor.is_meta:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            random_fill(model, {name: whole})
            put(name, whole)


def _fill(
    model: Any, cls: type[Any], weights: WeightFiles, destinations: Mapping[str, Tensor], device: torch.device,
    put: Put,
    progress: Progress | None,
) -> None:  # fmt: skip
    """Read the weights from the file. All problems are found and reported before anything is read."""
    weights = _with_todays_names(model, weights)
    ignored = cls._keys_to_ignore_on_load_unexpected or []
    # Unexpected tensors that the class declares as ignorable, and the other names of tied parameters, are skipped. All
    # other unexpected ones stay in `entries`, so that `load_into` reports them.
    surplus = {name for name in weights.entries if name not in destinations}
    admitted = {name for name in surplus if any(re.search(pattern, name) for pattern in ignored)}
    wanted = _one_name_each(destinations, weights)
    left_out = admitted | (destinations.keys() - wanted.keys())
    entries = {name: entry for name, entry in weights.entries.items() if name not in left_out}
    quantizable = {name: one for name, one in wanted.items() if one.is_meta and eight_bits.readable(weights, name, one)}
    # A weight that cannot be quantized stays here, so that `load_into` reports it together with all other problems.
    at_once = {
        name: torch.empty(one.shape, dtype=one.dtype) if one.is_meta else one
        for name, one in wanted.items()
        if name not in quantizable
    }
    rest = replace(weights, entries={name: entry for name, entry in entries.items() if name not in quantizable})
    counting = _in_all(progress, sum(entry.size for entry in entries.values()))
    load_into(rest, at_once, progress=counting)
    eight_bits.read(weights, quantizable, device, put, counting)


def _in_all(progress: Progress | None, total: int) -> Progress:
    """One progress count over several loads, each of which starts at 0."""
    before = 0

    def count(done: int, of: int) -> None:
        nonlocal before
        if progress is not None:
            progress(before + done, total)
        if done == of:
            before += done

    return count


def _one_name_each(destinations: Mapping[str, Tensor], weights: WeightFiles) -> dict[str, Tensor]:
    """One name for each tied parameter: the one that the file has. Files keep only one, and which one differs."""
    names: dict[int, str] = {}
    for name, tensor in destinations.items():
        known = names.get(id(tensor))
        if known is None or (known not in weights.entries and name in weights.entries):
            names[id(tensor)] = name
    return {name: destinations[name] for name in names.values()}


def _with_todays_names(model: Any, weights: WeightFiles) -> WeightFiles:
    """Rename the attention layers of files written by early diffusers releases, as diffusers does for unsharded
    ones."""
    if len(weights.files) != 1:
        return weights
    names = {name: name for name in weights.entries}
    model._fix_state_dict_keys_on_load(names)
    return replace(weights, entries={new: replace(weights.entries[old], name=new) for new, old in names.items()})


def _finish(model: nn.Module, device: torch.device) -> None:
    """Fill what files do not store: tables computed by constructors, and weights that weight norm derives."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm):
                setattr(module, hook.name, hook.compute_weight(module).detach())


# -- transformers models -----------------------------------------------------------------------------------------------


def load_text_model(source: ModelSource, component: str, cls: Any, placement: PartPlacement) -> nn.Module:
    """A transformers model, frozen and in eval mode. transformers reads it, because it knows the tensor names of older
    releases. Tensors it does not use are ignored: text encoders are often published inside larger models.

    On the meta device nothing is read, as in `load_component`."""
    read_config(source, component)  # reports broken JSON with our message, before transformers reads it
    if placement.device.type == "meta":
        with torch.device("meta"):
            return _frozen(cls(cls.config_class.from_pretrained(str(source.part(component)), local_files_only=True)))
    if single_file.supplies(source, component):
        model = single_file.load_text_encoder(source, component, cls, placement.dtype)
        return _frozen(model.to(placement.device))
    folder = source.part(component)
    file = weight_file(source, component)
    options: dict[str, Any] = {"dtype": placement.dtype, "local_files_only": True, "use_safetensors": True}
    options["ignore_mismatched_sizes"] = True  # reported below with all other problems, instead of raised alone
    if source.variant is not None and f".{source.variant}" in file.name:
        options["variant"] = source.variant
    if placement.device.type != "cpu":
        options["device_map"] = {"": placement.device}
    open_weights(file)  # reports a broken file with our message, before transformers reads it
    with without_bars(logging):
        model, info = cls.from_pretrained(str(folder), output_loading_info=True, **options)
    _check_complete(info, cls, file)
    return _frozen(model)


def _check_complete(info: Mapping[str, Any], cls: Any, file: Path) -> None:
    """`info` is the loading info of `from_pretrained`: missing and mismatched keys."""
    hint = "check that these weights belong to this model, and model.text_encoder_path"
    problems = [
        Problem(name, "no tensor of this name", f"all weights of {cls.__name__}", hint, str(file))
        for name in sorted(info["missing_keys"])[:8]
    ]
    problems += [
        Problem(name, f"shape {tuple(found)}", f"shape {tuple(wanted)}, as config.json says", hint, str(file))
        for name, found, wanted in sorted(info["mismatched_keys"])[:8]
    ]
    if problems:
        raise WeightFileError(problems)


def _frozen(model: Any) -> nn.Module:
    frozen: nn.Module = model.requires_grad_(False).eval()
    return frozen
