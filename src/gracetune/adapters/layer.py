"""One adapted layer of a living model: what `Attached` is made of, whichever library made the layer.

Whoever wants another forward writes another one of these (`fast.layer` is one); nothing else has to know.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from gracetune.adapters.algorithms.registry import algorithm as record_of
from gracetune.adapters.state import Layer


def registered(name: str) -> str:
    """A parameter's name inside a module must not have a dot in it; `lora_up.weight` has."""
    return name.replace(".", "_")


class AttachedLayer(ABC):
    def __init__(self, path: str, algorithm: str, alpha: float, rank: int | None) -> None:
        self.path = path
        self.algorithm = algorithm
        self.record = record_of(algorithm)
        self.alpha = 1.0 if rank is None else alpha
        self.rank = rank

    @abstractmethod
    def parameters(self) -> dict[str, nn.Parameter]:
        """By the names of `adapters.state`. Asked for anew each time: FSDP replaces parameters."""

    @abstractmethod
    def set_strength(self, strength: float) -> None:
        """0 is exactly the base layer, without the adapter's work."""

    @abstractmethod
    def remove(self, model: nn.Module) -> None:
        """The model's layer is again what it was."""

    @property
    def constants(self) -> Mapping[str, Tensor]:
        """Tensors of a file that are not trained."""
        return {name: torch.tensor(value) for name, value in self.record.constants.items()}

    @property
    def scale(self) -> float:
        return 1.0 if self.rank is None else self.alpha / self.rank

    def shapes(self) -> dict[str, torch.Size]:
        """Of the tensors as `state` gives and `load` takes them."""
        return {name: parameter.shape for name, parameter in self.parameters().items()}

    def state(self) -> Layer:
        """A copy on the CPU, in fp32. With sharded parameters a collective: every rank has to call it."""
        shapes = self.shapes()
        tensors = {name: _whole(parameter).reshape(shapes[name]) for name, parameter in self.parameters().items()}
        return Layer(self.algorithm, {**tensors, **self.constants}, self.alpha, self.rank)

    def layout(self) -> Layer:
        """The same without values: for layers that are not loaded."""
        tensors = {name: torch.empty(shape, device="meta") for name, shape in self.shapes().items()}
        return Layer(self.algorithm, {**tensors, **self.constants}, self.alpha, self.rank)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Names and shapes have been checked."""
        for name, parameter in self.parameters().items():
            tensor = tensors[name].to(parameter.device, parameter.dtype).reshape(parameter.shape)
            if isinstance(parameter, DTensor):
                tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
            parameter.copy_(tensor)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that may be spread over several; writing to it writes to the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(parameter: Tensor) -> Tensor:
    tensor = parameter.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.to("cpu", torch.float32, copy=True).contiguous()
