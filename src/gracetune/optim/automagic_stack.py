"""Stacked Automagic state for parameters of one shape and one param group.

Every state entry of a stack is one tensor, so a step is a few passes over all its parameters. The update here runs on
every device. `CudaStack` implements the same arithmetic in Triton kernels, with about the memory traffic of fused AdamW
(Triton ships with torch for CUDA).

The kernels read gradients and write parameters in place, through a table of their addresses. Unlike
`Stack.step`, they stack nothing, so a step needs almost no extra memory. They pass over the gradients four times: row
means, column means, RMS, update. Every sum has a fixed order, so two runs give the same bits.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from gracetune.adapters.layer import local_shard
from gracetune.errors import GracetuneError
from gracetune.optim.element_rates import RateGrid

NO_SIGN = 2
"""Value of the last sign (otherwise 0 or 1) before the first update."""
TINY = torch.finfo(torch.float32).tiny
_CHUNKS = {"cpu": 1 << 18}
_CHUNK = 1 << 24
"""Elements processed at a time: 64 MiB of float32 on a GPU, about the size of the caches on a CPU."""


@dataclass(frozen=True)
class UpdateRule:
    """The settings of one param group that every step uses."""

    grid: RateGrid
    beta2: float
    eps: float
    clip: float
    weight_decay: float


@dataclass(frozen=True)
class Sharding:
    """The first dimension is sharded over a process group (FSDP2). Shards may differ in length."""

    group: dist.ProcessGroup

    def sum(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=self.group)
        return tensor


def sharding_of(parameter: Tensor) -> Sharding | None:
    """The sharding of `parameter`; None if every process holds it whole."""
    if not isinstance(parameter, DTensor) or all(
        isinstance(placement, Replicate) for placement in parameter.placements
    ):
        return None
    if parameter.device_mesh.ndim != 1 or parameter.placements != (Shard(0),):
        raise GracetuneError(
            f"Automagic supports parameters that are sharded along their first dimension over one process group; "
            f"this one has {parameter.placements} over a mesh of {parameter.device_mesh.ndim} dimensions. "
            "Use FSDP2's own sharding, or another optimizer"
        )
    return Sharding(parameter.device_mesh.get_group())


@dataclass(eq=False)
class Stack:
    """n parameters and their state.

    `rates` and `signs` are [n, *shape]. `moments` holds the second moments: for matrices their means over columns
    (`row`, [n, *shape[:-1]]) and over rows (`col`, [n, *shape[:-2], shape[-1]]), for vectors `square`, [n, *shape].
    """

    parameters: list[Tensor]
    names: list[str]
    sharding: Sharding | None
    rates: Tensor
    signs: Tensor
    moments: dict[str, Tensor]

    @classmethod
    def of(cls, parameters: Sequence[Tensor], names: Sequence[str], lr: float, rule: UpdateRule) -> Self:
        first = local_shard(parameters[0])
        n, shape, device = len(parameters), first.shape, first.device

        def zeros(*size: int) -> Tensor:
            return torch.zeros((n, *size), dtype=torch.float32, device=device)

        moments = {"square": zeros(*shape)}
        if len(shape) >= 2:
            moments = {"row": zeros(*shape[:-1]), "col": zeros(*shape[:-2], shape[-1])}
        return cls(
            list(parameters),
            list(names),
            sharding_of(parameters[0]),
            rates=torch.full((n, *shape), rule.grid.stored(lr), dtype=rule.grid.dtype, device=device),
            signs=torch.full((n, *shape), NO_SIGN, dtype=torch.uint8, device=device),
            moments=moments,
        )

    @property
    def shape(self) -> torch.Size:
        """Shape of this process's part of each parameter."""
        return self.rates.shape[1:]

    @property
    def whole_shape(self) -> torch.Size:
        return self.parameters[0].shape

    def entries(self) -> dict[str, Tensor]:
        return {**self.moments, "rate": self.rates, "sign": self.signs}

    def read_rates(self, rule: UpdateRule) -> Tensor:
        """[n, *shape], float32."""
        return rule.grid.read(self.rates)

    @torch.no_grad()
    def put_rates(self, at: int, rates: Tensor, rule: UpdateRule) -> None:
        """Store the rates of parameter number `at`, or of this process's part of it."""
        self.rates[at].copy_(rule.grid.store(rates))

    def with_gradients(self) -> list[int]:
        """Indices of the parameters that have a gradient."""
        return [at for at, parameter in enumerate(self.parameters) if parameter.grad is not None]

    @torch.no_grad()
    def step(self, active: list[int], rule: UpdateRule, bad: Tensor | None = None) -> None:
        """Update the parameters numbered `active`.

        If the device flag `bad` is 1, nothing changes (`optim.step_skipping`).
        """
        # Chunk by the whole shape: processes with unequal shards must issue the same all-reduces, or they deadlock.
        most = _CHUNKS.get(self.rates.device.type, _CHUNK)
        for some in _chunks(active, max(1, most // max(1, math.prod(self.whole_shape)))):
            parameters = [local_shard(self.parameters[at]) for at in some]
            gradients = [local_shard(gradient) for at in some if (gradient := self.parameters[at].grad) is not None]
            entries, write_back = self._views(some)
            before = None if bad is None else {name: entry.clone() for name, entry in entries.items()}
            stacked = torch.stack([gradient.float() for gradient in gradients])
            weights = torch.stack([weight.float() for weight in parameters]) if rule.weight_decay != 0 else None
            changes = self._advance(stacked, weights, entries, rule)
            if bad is not None and before is not None:
                changes = torch.where(bad > 0, 0.0, changes)
                for name, entry in entries.items():
                    entry.copy_(torch.where(bad > 0, before[name], entry))
            write_back()
            _subtract(parameters, changes)

    def _views(self, some: list[int]) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """State of some parameters: views if their indices are consecutive, otherwise copies and how to write them."""
        first, last = some[0], some[-1]
        if last - first + 1 == len(some):
            return {name: entry[first : last + 1] for name, entry in self.entries().items()}, lambda: None
        indices = torch.tensor(some, device=self.rates.device)
        picked = {name: entry[indices] for name, entry in self.entries().items()}

        def write_back() -> None:
            for name, entry in self.entries().items():
                entry[indices] = picked[name]

        return picked, write_back

    def _advance(self, gradients: Tensor, weights: Tensor | None, state: dict[str, Tensor], rule: UpdateRule) -> Tensor:
        """What to subtract from the parameters. Overwrites `gradients` with it and updates `state`."""
        update = self._normalised(gradients, state, rule)
        squares = self._summed(update.square().reshape(len(update), -1).sum(1))
        rms = (squares / math.prod(self.whole_shape)).sqrt()
        damping = (rms / rule.clip).clamp(min=1.0).reciprocal()

        positive = (update > 0).to(torch.uint8)
        rates = self._move_rates(positive, state, rule)
        state["sign"].copy_(positive)
        update.mul_(per_parameter(damping, update))
        if weights is not None:
            update.add_(weights, alpha=rule.weight_decay)
        return update.mul_(rates)

    def _move_rates(self, positive: Tensor, state: dict[str, Tensor], rule: UpdateRule) -> Tensor:
        """Bump the rates, store them in `state`, and return them in float32."""
        last = state["sign"]
        units = rule.grid.moved(state["rate"], agrees=last == positive, fresh=last == NO_SIGN)
        state["rate"].copy_(units - rule.grid.bias)
        return rule.grid.rates(units)

    def _normalised(self, gradients: Tensor, state: dict[str, Tensor], rule: UpdateRule) -> Tensor:
        """Divide `gradients` in place by the root of the second moment (factored for two or more dimensions)."""
        squares = gradients.square()
        if "square" in state:
            moment = _averaged(state["square"], squares, rule)
            return gradients.mul_(moment.clamp(min=TINY).rsqrt())
        rows, columns = self.whole_shape[-2:]
        # A sharded matrix holds only some rows here, so sums over rows need an all-reduce. With more dimensions whole
        # matrices are sharded, and nothing has to be summed.
        over_shards = self._summed if len(self.whole_shape) == 2 else _unchanged
        row = _averaged(state["row"], squares.sum(-1) / columns, rule)
        col = _averaged(state["col"], over_shards(squares.sum(-2)) / rows, rule)
        mean = over_shards(row.sum(-1, keepdim=True)) / rows
        gradients.mul_((row / mean).clamp(min=TINY).rsqrt().unsqueeze(-1))
        return gradients.mul_(col.clamp(min=TINY).rsqrt().unsqueeze(-2))

    def _summed(self, tensor: Tensor) -> Tensor:
        return tensor if self.sharding is None else self.sharding.sum(tensor)


def per_parameter(values: Tensor, like: Tensor) -> Tensor:
    """Reshape [n] to [n, 1, ...], to broadcast against `like`."""
    return values.reshape(-1, *(1,) * (like.ndim - 1))


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _averaged(moment: Tensor, squares: Tensor, rule: UpdateRule) -> Tensor:
    return moment.mul_(rule.beta2).add_(squares + rule.eps, alpha=1.0 - rule.beta2)


def _subtract(parameters: list[Tensor], changes: Tensor) -> None:
    if parameters[0].dtype == torch.float32:
        torch._foreach_sub_(parameters, list(changes.unbind()))
        return
    for parameter, change in zip(parameters, changes, strict=True):
        parameter.copy_(parameter.float() - change)


def _chunks(active: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(active), size):
        yield active[start : start + size]


def stack_key(parameter: Tensor) -> tuple[Any, ...]:
    """Parameters with equal keys can share a stack."""
    part = local_shard(parameter)
    return tuple(part.shape), tuple(parameter.shape), part.dtype, part.device, isinstance(parameter, DTensor)


_VECTOR = 16
"""Bytes of one vectorized load."""
_OLDEST = (8, 0)
"""Lowest compute capability for which Triton supports bf16."""


def kernels_for(parameter: Tensor, fused: bool | None) -> bool:
    """Whether to use the kernels for `parameter`. ValueError if `fused` is True and they cannot run."""
    part = local_shard(parameter)
    can = (
        part.is_cuda
        and part.ndim >= 2
        and part.numel() > 0
        and part.is_contiguous()
        and part.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and sharding_of(parameter) is None
        and importlib.util.find_spec("triton") is not None
        and torch.cuda.get_device_capability(part.device) >= _OLDEST
    )
    if fused and not can and part.ndim >= 2 and part.numel() > 0:
        raise ValueError(
            f"fused: needs whole, contiguous parameters on a CUDA GPU of capability {_OLDEST} or newer, and Triton; "
            f"this one is {part.dtype} on {part.device}. Leave `fused` out to take what fits"
        )
    return can and fused is not False


@dataclass(eq=False)
class _Addresses:
    """A device table of numbers (addresses or indices), uploaded again only when one of them changes."""

    known: list[int] = field(default_factory=list)
    table: Tensor | None = None
    aligned: bool = False
    """Whether every address allows 16-byte loads."""

    def of(self, tensors: list[Tensor]) -> Tensor:
        return self.numbers([tensor.data_ptr() for tensor in tensors], tensors[0].device)

    def numbers(self, numbers: list[int], device: torch.device) -> Tensor:
        if self.table is None or numbers != self.known:
            self.known, self.table = numbers, torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)
            self.aligned = all(number % _VECTOR == 0 for number in numbers)
        return self.table


@dataclass(eq=False)
class CudaStack(Stack):
    """A stack of parameters with two or more dimensions, each seen as `lead` matrices of R x C."""

    _parameter_addresses: _Addresses = field(default_factory=_Addresses)
    _gradients: _Addresses = field(default_factory=_Addresses)
    _slots: _Addresses = field(default_factory=_Addresses)
    _good: Tensor | None = None
    """A zero flag on the device, for steps that are called without `bad`."""

    @torch.no_grad()
    def step(self, active: list[int], rule: UpdateRule, bad: Tensor | None = None) -> None:
        parameters = [local_shard(self.parameters[at]) for at in active]
        # The list keeps contiguous copies alive until the kernels are queued.
        dtype = parameters[0].dtype
        gradients = [
            _plain(local_shard(gradient), dtype) for at in active if (gradient := self.parameters[at].grad) is not None
        ]
        device = parameters[0].device
        # Tests run the same code on a CPU with Triton's interpreter.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self._launch(parameters, gradients, active, rule, self._flag(bad, device))

    def _flag(self, bad: Tensor | None, device: torch.device) -> Tensor:
        if bad is not None:
            return bad
        if self._good is None:
            self._good = torch.zeros((), device=device)
        return self._good

    def _launch(
        self, parameters: list[Tensor], gradients: list[Tensor], active: list[int], rule: UpdateRule, bad: Tensor
    ) -> None:  # fmt: skip
        from gracetune.kernels import automagic as kernels  # needs Triton

        device = parameters[0].device
        slots = self._slots.numbers(active, device)
        addresses, grads = self._parameter_addresses.of(parameters), self._gradients.of(gradients)
        dtype = parameters[0].dtype
        aligned = self._parameter_addresses.aligned and self._gradients.aligned
        shapes = kernels.KernelShape.of(self.shape, len(active), aligned=aligned and _is_even(self.shape, dtype))
        row, col = self.moments["row"], self.moments["col"]
        kernels.average_rows(grads, slots, row, bad, shapes, dtype, beta2=rule.beta2, eps=rule.eps)
        kernels.average_columns(grads, slots, col, bad, shapes, dtype, beta2=rule.beta2, eps=rule.eps)
        # The kernels read moments by position among the active parameters, so others are selected out first.
        whole = len(active) == len(self.parameters)
        row, col = (row, col) if whole else (row[slots], col[slots])
        by_row = (row / row.mean(-1, keepdim=True)).clamp_(min=TINY).rsqrt_()
        by_col = col.clamp(min=TINY).rsqrt_()
        partial = kernels.square_sums(grads, by_row, by_col, shapes, dtype)
        rms = (partial.sum(-1) / self.shape.numel()).sqrt_()
        damping = rms.div_(rule.clip).clamp_(min=1.0).reciprocal_()
        grid = rule.grid
        kernels.move(
            addresses, grads, slots, by_row, by_col, damping, bad, self.rates, self.signs, shapes, dtype,
            unit=grid.unit, bump=grid.bump, lowest=grid.lowest, highest=grid.highest, bias=grid.bias,
            min_lr=grid.limits.min_lr, max_lr=grid.limits.max_lr, weight_decay=rule.weight_decay, no_sign=NO_SIGN,
        )  # fmt: skip


def _plain(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """`gradient` in `dtype` and contiguous.

    The check comes first: a no-op call per parameter adds up to a slow step.
    """
    return gradient if gradient.dtype is dtype and gradient.is_contiguous() else gradient.to(dtype).contiguous()


def _is_even(shape: torch.Size, dtype: torch.dtype) -> bool:
    """Whether every matrix of an aligned tensor starts at an aligned address."""
    return len(shape) == 2 or shape[-2] * shape[-1] * dtype.itemsize % _VECTOR == 0
