"""The assistant adapter: a frozen LoRA that is active during training and disabled when samples are generated.

Training a model that was distilled to a few steps destroys its distillation. An assistant adapter undoes the
distillation first, so the trained adapter does not learn to undo it. Without the assistant, the trained adapter then
works on the model as it was published.

    y = x W^T + s (x A^T) B^T        inside `absent`: y = x W^T

The assistant is computed beside its layer instead of being merged into the weight. Therefore `absent` gives the
published model bit for bit, and 8-bit weights are quantized without it. Its tensors are non-persistent buffers: they
get no gradient and are not part of any `state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gracetune.adapters.algorithms.registry import algorithm
from gracetune.adapters.delta import misfit
from gracetune.adapters.state import AdapterState, Layer
from gracetune.errors import ConfigError, Problem
from gracetune.models.eight_bit_linear import Fp8Linear, Int8Linear
from gracetune.models.source import ASSISTANT_KEY

_SHOWN: Final = 8
_DOWN, _UP = "lora_A.weight", "lora_B.weight"


class Assisted(nn.Linear):
    """A linear layer with an assistant. `assist` changes a layer's class to a subclass of this one, in place."""

    assistant_down: Tensor
    """[rank, in]"""
    assistant_up: Tensor
    """[out, rank], already multiplied by alpha / rank"""
    assisting: bool

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        if not self.assisting:
            return result
        added = F.linear(F.linear(x.to(self.assistant_down.dtype), self.assistant_down), self.assistant_up)
        return result + added.to(result.dtype)


class AssistedLinear(Assisted):
    pass


class AssistedFp8Linear(Assisted, Fp8Linear):
    pass


class AssistedInt8Linear(Assisted, Int8Linear):
    pass


_KINDS: Final[Mapping[type[nn.Module], type[Assisted]]] = {
    nn.Linear: AssistedLinear,
    Fp8Linear: AssistedFp8Linear,
    Int8Linear: AssistedInt8Linear,
}


@dataclass(frozen=True, eq=False)
class Assistant:
    """The assistant adapter of one denoiser."""

    layers: Sequence[Assisted]
    file: Path

    @property
    def line(self) -> str:
        return (
            f"assistant adapter: {self.file.name} on {len(self.layers):,} layers while the adapter is trained; samples "
            "are generated without it"
        )

    @contextmanager
    def absent(self) -> Iterator[None]:
        """Inside, the layers compute the published model's output."""
        self._set(False)
        try:
            yield
        finally:
            self._set(True)

    def _set(self, assisting: bool) -> None:
        for layer in self.layers:
            layer.assisting = assisting


@dataclass(frozen=True, eq=False)
class AssistantFile:
    """A file that holds plain LoRA for a single denoiser. `assist` checks whether it fits the model."""

    path: Path
    state: AdapterState


def as_assistant(path: Path, state: AdapterState, family: str) -> AssistantFile:
    """Check that the file's adapter can be an assistant for this family. `state` is the content of the file."""
    problems = [_problem(f"made for {state.family}", f"one for {family}", path)] if state.family != family else []
    if state.expert:
        problems.append(_problem(f"of the {state.expert} expert", "one of a model with a single denoiser", path))
    others = sorted({layer.algorithm for layer in state.layers.values() if _factors(layer) is None})
    if others:
        problems.append(_problem(f"layers of {', '.join(others)}", "LoRA of linear layers", path))
    if problems:
        raise ConfigError(problems)
    return AssistantFile(path, state)


def assist(denoiser: nn.Module, file: AssistantFile, device: torch.device, dtype: torch.dtype) -> Assistant:
    """Add the assistant to the model's layers. Call it before an adapter is attached to them.

    If any layer does not fit, a `ConfigError` lists them and the model stays unchanged.
    """
    modules = dict(denoiser.named_modules())
    problems = [
        _problem(f"{path}: {why}", "layers of this model", file.path)
        for path, layer in file.state.layers.items()
        if (why := _unfit(modules.get(path), layer)) is not None
    ]
    if problems:
        more = [_problem(f"{len(problems) - _SHOWN:,} more", "layers of this model", file.path)]
        raise ConfigError(problems[:_SHOWN] + (more if len(problems) > _SHOWN else []))
    return Assistant(
        [_assist_layer(modules[path], layer, device, dtype) for path, layer in file.state.layers.items()], file.path
    )


def _unfit(module: nn.Module | None, layer: Layer) -> str | None:
    if module is None:
        return "no such layer"
    if not isinstance(module, nn.Linear) or type(module) not in _KINDS:
        return f"a {type(module).__name__}, and an assistant adapter is for linear layers"
    return misfit(layer, (module.out_features, module.in_features))


def _assist_layer(module: nn.Module, layer: Layer, device: torch.device, dtype: torch.dtype) -> Assisted:
    factors = _factors(layer)
    assert factors is not None, "`as_assistant` has checked this"
    down, up = factors
    # The class changes in place: references to the layer, its parameters and its hooks stay valid.
    module.__class__ = _KINDS[type(module)]
    assert isinstance(module, Assisted)
    module.assisting = True
    for name, tensor in (("assistant_down", down.float()), ("assistant_up", up.float() * layer.scale)):
        module.register_buffer(name, tensor.to(device, dtype).contiguous(), persistent=False)
    return module


def _factors(layer: Layer) -> tuple[Tensor, Tensor] | None:
    """The down and up matrices of a plain LoRA on a linear layer; None for anything else."""
    tensors = layer.tensors if layer.algorithm == "lora" else algorithm("lora").renamed(layer.algorithm, layer.tensors)
    if tensors is None or tensors.keys() != {_DOWN, _UP} or any(one.dim() != 2 for one in tensors.values()):
        return None
    return tensors[_DOWN], tensors[_UP]


def _problem(found: str, expected: str, path: Path) -> Problem:
    return Problem(ASSISTANT_KEY, found, expected, "give another file, or remove it", str(path))
