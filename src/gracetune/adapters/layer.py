"""The interface of one adapted layer. `attach.Attached` is a model with all of its adapted layers.

Each way to compute an adapter is a subclass: `peft_lora.PeftLayer`, `lycoris.LycorisLayer`, `fast.modules.FastLayer`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from gracetune.adapters.algorithms.registry import algorithm as record_of
from gracetune.adapters.state import Layer


def parameter_name(name: str) -> str:
    """The name under which a tensor such as `lora_up.weight` is registered in its module. torch allows no dots."""
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
        """The trained parameters, by the names of `adapters.state`. Do not keep them: FSDP replaces parameters."""

    @abstractmethod
    def set_strength(self, strength: float) -> None:
        """Scale the adapter's effect. 0 is exactly the base layer and skips the adapter's computation."""

    @abstractmethod
    def remove(self, model: nn.Module) -> None:
        """Restore the model's original layer."""

    @property
    def constants(self) -> Mapping[str, Tensor]:
        """Untrained flag tensors, which files of this algorithm contain."""
        return {name: torch.tensor(value) for name, value in self.record.constants.items()}

    @property
    def scale(self) -> float:
        return 1.0 if self.rank is None else self.alpha / self.rank

    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of the tensors that `state` returns and `load` expects."""
        return {name: parameter.shape for name, parameter in self.parameters().items()}

    def state(self) -> Layer:
        """A copy on the CPU, in fp32. With sharded parameters this is a collective: every rank must call it."""
        shapes = self.shapes()
        tensors = {name: _full_tensor(parameter).reshape(shapes[name]) for name, parameter in self.parameters().items()}
        return Layer(self.algorithm, {**tensors, **self.constants}, self.alpha, self.rank)

    def layout(self) -> Layer:
        """Like `state`, but with meta tensors: it works before the model's weights are loaded."""
        tensors = {name: torch.empty(shape, device="meta") for name, shape in self.shapes().items()}
        return Layer(self.algorithm, {**tensors, **self.constants}, self.alpha, self.rank)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy values into the parameters. The caller has checked names and shapes (`load_checks`)."""
        for name, parameter in self.parameters().items():
            tensor = tensors[name].to(parameter.device, parameter.dtype).reshape(parameter.shape)
            if isinstance(parameter, DTensor):
                tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
            parameter.copy_(tensor)


def local_shard(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor that may be distributed. It shares memory with the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _full_tensor(parameter: Tensor) -> Tensor:
    """A full fp32 copy on the CPU, gathered from all ranks if the parameter is sharded."""
    tensor = parameter.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.to("cpu", torch.float32, copy=True).contiguous()
