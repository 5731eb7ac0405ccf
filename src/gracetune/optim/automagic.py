"""Automagic: an optimizer without momentum, with a factored second moment and a learning rate per element.

    v    <- beta2 v + (1 - beta2)(g^2 + eps)     kept as row and column means for >= 2-D, whole for 1-D
    u     = g / sqrt(v), then divided by max(1, RMS(u) / clip_threshold)
    lr    = lr + lr_bump where u has the sign it had in this parameter's last update, lr - lr_bump where not,
            kept within [min_lr, max_lr]
    p    <- p - lr (u + weight_decay p)

The first update of a parameter has no previous sign and leaves its rates at `lr`. A step skips parameters without a
gradient, such as those of the inactive expert; their next update is compared with their own last one. With `lr` 0
nothing is trained. `lr_bump`, `min_lr` and `max_lr` are set per param group, so each noise expert can have its own.
The state is saved by parameter name (`named_state`); `state_dict()` does not contain it.

`rates="upstream"` keeps the rates as ai-toolkit does: 8-bit integers with one scale per parameter tensor, the tensor's
largest rate / 127. Storing rounds away a
bump below half a unit, so with the default limits rates stop following the signs after some 250 bumps. The first update
of a tensor counts as following one that increased every element. Both change the result, and are useful only to compare
a run with ai-toolkit. The default, `rates: exact`, loses no bump (`optim/element_rates.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from gracetune.optim.automagic_stack import CudaStack, Stack, UpdateRule, kernels_for, per_parameter, stack_key
from gracetune.optim.element_rates import BIAS_16, RateGrid, RateLimits
from gracetune.optim.named_state import NamedState, StateMismatchError, by_parameter, differences, key_of

_SCALE = "scale"
"""State entry of 8-bit rates only (`UpstreamStack`)."""
_REMEDY = "resume with the adapter and optimizer the state was saved with, or start anew (--resume none)"


class Automagic(Optimizer):
    """The optimizer described in this module. Saving and loading need named parameters: [("blocks.0…", p), …]."""

    _step_supports_amp_scaling = True
    """torch's marker for optimizers that skip a step while `found_inf` is 1 (`optim.step_skipping`)."""
    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Any,
        lr: float = 1e-6,
        lr_bump: float = 1e-6,
        min_lr: float = 1e-7,
        max_lr: float = 1e-3,
        eps: float | tuple[float, ...] = 1e-30,
        clip_threshold: float = 1.0,
        beta2: float = 0.999,
        weight_decay: float = 0.0,
        fused: bool | None = None,
        rates: Literal["exact", "upstream"] = "exact",
    ) -> None:
        """`eps` may be a pair, as in ai-toolkit; the second number is unused.

        `fused` selects our Triton kernels; None uses them wherever they can run.
        """
        if rates not in ("exact", "upstream"):
            raise ValueError(f"rates {rates!r}: exact or upstream")
        if rates == "upstream" and fused:
            raise ValueError("fused: kernels of our own have exact rates only; leave `fused` out, or `rates`")
        self._stacks: list[tuple[dict[str, Any], UpdateRule, Stack]] = []
        """(param group, its settings, parameters of one shape)"""
        self._fused, self._rates = fused, rates
        defaults = {
            "lr": lr,
            "lr_bump": lr_bump,
            "min_lr": min_lr,
            "max_lr": max_lr,
            "eps": eps[0] if isinstance(eps, tuple | list) else eps,
            "clip_threshold": clip_threshold,
            "beta2": beta2,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        rule = _rule(group)
        names = group.get("param_names", [""] * len(group["params"]))
        # Parameters of equal shape, dtype and device share a stack, so a step is a few passes over large tensors.
        alike: dict[tuple[Any, ...], list[tuple[Tensor, str]]] = {}
        for parameter, name in zip(group["params"], names, strict=True):
            alike.setdefault(stack_key(parameter), []).append((parameter, name))
        for members in alike.values():
            parameters, own_names = zip(*members, strict=True)
            stack = self._stack_class(parameters[0]).of(parameters, own_names, group["lr"], rule)
            self._stacks.append((group, rule, stack))

    def _stack_class(self, parameter: Tensor) -> type[Stack]:
        if self._rates == "upstream":
            return UpstreamStack
        return CudaStack if kernels_for(parameter, self._fused) else Stack

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, rule, stack in self._stacks:
            active = stack.with_gradients()
            if active and group["lr"] > 0:
                stack.step(active, rule, self.found_inf)
        return loss

    def learning_rates(self) -> dict[str, Tensor]:
        """Mean rate of each param group, by its `name` or index.

        The tensors stay on the device; reading one synchronizes.
        """
        sums: dict[str, tuple[Tensor, int]] = {}
        for group, rule, stack in self._stacks:
            number = next(at for at, other in enumerate(self.param_groups) if other is group)
            name = str(group.get("name", number))
            total, count = stack.read_rates(rule).sum(), stack.rates.numel()
            if name in sums:
                total, count = total + sums[name][0], count + sums[name][1]
            sums[name] = total, count
        return {name: total / max(1, count) for name, (total, count) in sums.items()}

    def state_tensors(self) -> list[Tensor]:
        """All state tensors, as this process holds them (its shard, if parameters are sharded)."""
        return [tensor for _group, _rule, stack in self._stacks for tensor in stack.entries().values()]

    # -- state by name ------------------------------------------------------------------------------------------------

    def named_state(self) -> NamedState:
        """Copies of the whole state. With sharded parameters this is a collective: every process must call it."""
        tensors = {}
        units = {}
        for name, stack, at, rule in self._members():
            units[name] = rule.grid.unit
            for entry, stacked in stack.entries().items():
                tensors[key_of(name, entry)] = _gathered(stacked[at], entry, stack, at)
        return NamedState(tensors, {"optimizer": "automagic", "units": units})

    @torch.no_grad()
    def load_named_state(self, state: NamedState) -> None:
        """Load strictly: names and shapes must match exactly, otherwise it raises and changes nothing.

        Rates saved with another bump or other limits are converted to the nearest unit of this run's grid.
        """
        if state.json.get("optimizer") != "automagic":
            raise StateMismatchError(
                f"this is the state of {state.json.get('optimizer')!r}, not of automagic; {_REMEDY}"
            )
        wanted = {
            key_of(name, entry): _whole_size(entry, stack)
            for name, stack, _at, _rule in self._members()
            for entry in stack.entries()
            if entry != _SCALE
        }
        saved = by_parameter(state.tensors)
        found = {
            key_of(name, entry): tuple(tensor.shape)
            for name, entries in saved.items()
            for entry, tensor in entries.items()
            if entry != _SCALE  # present only if the rates were saved in 8 bits
        }
        wrong = differences(wanted, found)
        if wrong:
            raise StateMismatchError(f"this optimizer state is of other parameters:\n{wrong}\n{_REMEDY}")
        for name, stack, at, rule in self._members():
            for entry, stacked in stack.entries().items():
                if entry not in ("rate", _SCALE):
                    stacked[at].copy_(_own_part(saved[name][entry], entry, stack, at))
            self._load_rate(saved[name], state.json["units"][name], stack, at, rule)

    def _load_rate(self, saved: Mapping[str, Tensor], unit: float, stack: Stack, at: int, rule: UpdateRule) -> None:
        """Copy stored rates bit by bit if both sides use the same format; otherwise convert them through float64."""
        stored = saved["rate"]
        if _SCALE in saved and _SCALE in stack.moments:
            stack.rates[at].copy_(_own_part(stored, "rate", stack, at))
            stack.moments[_SCALE][at].copy_(saved[_SCALE])
        elif _SCALE in saved or _SCALE in stack.moments:
            rates = stored.double() * saved[_SCALE] if _SCALE in saved else (stored.double() + _bias(stored)) * unit
            stack.put_rates(at, _own_part(rates, "rate", stack, at), rule)
        else:
            stack.rates[at].copy_(_own_part(_restored(stored, unit, rule.grid), "rate", stack, at))

    @torch.no_grad()
    def load_rates(self, rates: Mapping[str, Tensor], signs: Mapping[str, Tensor]) -> None:
        """Set the learning rates, and the last signs, of the named parameters to those of another run."""
        for name, stack, at, rule in self._members():
            if name in rates:
                stack.put_rates(at, _own_part(rates[name], "rate", stack, at), rule)
            if name in signs:
                stack.signs[at].copy_(_own_part(signs[name].to(torch.uint8), "sign", stack, at))

    def _members(self) -> Iterator[tuple[str, Stack, int, UpdateRule]]:
        """Every parameter: its name, its stack, its index in the stack, and the settings of its param group."""
        for _group, rule, stack in self._stacks:
            for at, name in enumerate(stack.names):
                if not name:
                    raise ValueError("Automagic was built without parameter names: give it (name, parameter) pairs")
                yield name, stack, at, rule

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load group options only. accelerate calls this once in `prepare`, with an empty state."""
        if state_dict.get("state"):
            raise ValueError("Automagic's state is loaded by name: load_named_state()")
        super().load_state_dict(state_dict)
        # torch replaces the group dicts, so every stack is linked to its new one.
        by_first = {id(group["params"][0]): group for group in self.param_groups}
        self._stacks = [
            (now := by_first[id(group["params"][0])], _rule(now), stack) for group, _rule_before, stack in self._stacks
        ]


def _rule(group: dict[str, Any]) -> UpdateRule:
    beta2, eps, clip = group["beta2"], group["eps"], group["clip_threshold"]
    if not 0 <= beta2 < 1 or not eps > 0 or not clip > 0 or group["weight_decay"] < 0 or group["lr"] < 0:
        raise ValueError(
            "expected beta2 in [0, 1), eps > 0, clip_threshold > 0, lr >= 0 and weight_decay >= 0; found beta2 "
            f"{beta2}, eps {eps}, clip_threshold {clip}, lr {group['lr']} and weight_decay {group['weight_decay']}"
        )
    grid = RateGrid.of(RateLimits(group["lr_bump"], group["min_lr"], group["max_lr"]))
    return UpdateRule(grid, beta2, eps, clip, group["weight_decay"])


def _restored(stored: Tensor, unit: float, grid: RateGrid) -> Tensor:
    if unit == grid.unit and stored.dtype == grid.dtype:
        return stored
    return grid.store((stored.double() + _bias(stored)) * unit)


def _bias(stored: Tensor) -> int:
    return BIAS_16 if stored.dtype == torch.int16 else 0


def _whole_size(entry: str, stack: Stack) -> tuple[int, ...]:
    """Shape of a state entry of one unsharded parameter."""
    shape = tuple(stack.whole_shape)
    if entry == _SCALE:
        return ()
    if entry == "row":
        return shape[:-1]
    return (*shape[:-2], shape[-1]) if entry == "col" else shape


def _is_sharded(entry: str, stack: Stack) -> bool:
    """Whether each process holds only its part of `entry`.

    The column means of a matrix and the scale of 8-bit rates are whole everywhere: FSDP2 shards the first dimension.
    """
    return stack.sharding is not None and entry != _SCALE and not (entry == "col" and len(stack.whole_shape) == 2)


def _gathered(value: Tensor, entry: str, stack: Stack, at: int) -> Tensor:
    if not _is_sharded(entry, stack):
        return value.detach().clone()
    parameter = stack.parameters[at]
    assert isinstance(parameter, DTensor)
    size = torch.Size(_whole_size(entry, stack))
    stride = torch.empty(size, device="meta").stride()
    # Neither gloo nor NCCL sends 16-bit integers.
    sent = value.to(torch.int32) if value.dtype == torch.int16 else value
    sharded = DTensor.from_local(sent, parameter.device_mesh, [Shard(0)], shape=size, stride=stride)
    return sharded.full_tensor().to(value.dtype, copy=True)


def _own_part(value: Tensor, entry: str, stack: Stack, at: int) -> Tensor:
    """This process's shard of a whole state tensor."""
    value = value.to(stack.rates.device)
    if not _is_sharded(entry, stack):
        return value
    parameter = stack.parameters[at]
    assert isinstance(parameter, DTensor)
    parts = value.chunk(parameter.device_mesh.size())  # the split of Shard(0); the last processes may get nothing
    rank = parameter.device_mesh.get_local_rank()
    return parts[rank] if rank < len(parts) else value[:0]


_LARGEST = 127
"""The stored value of a tensor's largest rate."""


@dataclass(eq=False)
class UpstreamStack(Stack):
    """A stack whose `rates` are int8; `moments["scale"]`, [n], is the learning rate of one unit."""

    @classmethod
    def of(cls, parameters: Sequence[Tensor], names: Sequence[str], lr: float, rule: UpdateRule) -> Self:
        stack = super().of(parameters, names, lr, rule)
        stack.rates = torch.full_like(stack.rates, _LARGEST, dtype=torch.int8)
        stack.moments["scale"] = torch.full((len(names),), lr / _LARGEST, device=stack.rates.device)
        stack.signs.zero_()
        return stack

    def read_rates(self, rule: UpdateRule) -> Tensor:
        return self.rates.float() * per_parameter(self.moments["scale"], self.rates)

    @torch.no_grad()
    def put_rates(self, at: int, rates: Tensor, rule: UpdateRule) -> None:
        state = {"rate": self.rates[at : at + 1], "scale": self.moments["scale"][at : at + 1]}
        self._store(rates[None].to(self.rates.device, torch.float32), state)

    def _move_rates(self, positive: Tensor, state: dict[str, Tensor], rule: UpdateRule) -> Tensor:
        limits = rule.grid.limits
        rates = state["rate"].float() * per_parameter(state["scale"], state["rate"])
        bumps = torch.where(state["sign"] == positive, limits.lr_bump, -limits.lr_bump)
        rates.add_(bumps).clamp_(limits.min_lr, limits.max_lr)
        self._store(rates, state)
        return rates

    def _store(self, rates: Tensor, state: dict[str, Tensor]) -> None:
        size = math.prod(rates.shape[1:])
        largest = rates.reshape(len(rates), -1).amax(1) if size else torch.zeros_like(state["scale"])
        if self.sharding is not None:  # all shards of a tensor share its scale
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.sharding.group)
        state["scale"].copy_(largest / _LARGEST)
        state["rate"].copy_((rates / per_parameter(state["scale"], rates)).round().clamp(-_LARGEST, _LARGEST))
