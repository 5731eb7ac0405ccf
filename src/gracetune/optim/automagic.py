"""Automagic: no momentum, a factored second moment, and a learning rate for every element.

    v    <- beta2 v + (1 - beta2)(g^2 + eps)     kept as row and column means for >= 2-D, whole for 1-D
    u     = g / sqrt(v), then divided by max(1, RMS(u) / clip_threshold)
    lr    = lr + lr_bump where u has the sign it had in this parameter's last update, lr - lr_bump where not,
            kept within [min_lr, max_lr]
    p    <- p - lr (u + weight_decay p)

A first update has no last sign and leaves the rates at `lr`. A parameter without a gradient (the expert whose turn it
is not) is left out of a step, and its next update is compared with its own last one. An `lr` of 0 trains nothing.
`lr_bump`, `min_lr` and `max_lr` may differ between param groups, which is how each noise expert gets its own.
`rates="upstream"` keeps the rates as ai-toolkit does, in 8 bits (`automagic_upstream`).
The state is saved by parameter name; `state_dict()` holds none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from gracetune.optim.automagic_cuda import CudaStack, kernels_for
from gracetune.optim.automagic_stack import Stack, UpdateRule, stack_key
from gracetune.optim.automagic_upstream import UpstreamStack
from gracetune.optim.element_rates import BIAS_16, RateGrid, RateLimits
from gracetune.optim.named_state import NamedState, StateMismatchError, by_parameter, differences, key_of

_SCALE = "scale"
"""The entry that only rates in 8 bits have."""
_REMEDY = "resume with the adapter and optimizer the state was saved with, or start anew (--resume none)"


class Automagic(Optimizer):
    """Give parameters with their names, [("blocks.0…", p), …], to save and load state."""

    _step_supports_amp_scaling = True
    """torch's name for an optimizer that leaves a step out where `found_inf` is 1 (`optim.step_skipping`)."""
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
        """`eps` may be a pair, as in ai-toolkit, whose second number is not used. `fused`: kernels of our own; None
        takes them where they can run."""
        if rates not in ("exact", "upstream"):
            raise ValueError(f"rates {rates!r}: exact or upstream")
        if rates == "upstream" and fused:
            raise ValueError("fused: kernels of our own have exact rates only; leave `fused` out, or `rates`")
        self._stacks: list[tuple[dict[str, Any], UpdateRule, Stack]] = []
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
        alike: dict[tuple[Any, ...], list[tuple[Tensor, str]]] = {}
        for parameter, name in zip(group["params"], names, strict=True):
            alike.setdefault(stack_key(parameter), []).append((parameter, name))
        for members in alike.values():
            parameters, called = zip(*members, strict=True)
            stack = self._kind_for(parameters[0]).of(parameters, called, group["lr"], rule)
            self._stacks.append((group, rule, stack))

    def _kind_for(self, parameter: Tensor) -> type[Stack]:
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
        """The mean rate of each param group, by its `name` or number; on the device, for whoever logs it."""
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
        """What is kept beside the parameters, as this process holds it."""
        return [tensor for _group, _rule, stack in self._stacks for tensor in stack.entries().values()]

    # -- state by name ------------------------------------------------------------------------------------------------

    def named_state(self) -> NamedState:
        """Copies, whole also where parameters are sharded (then every process has to call this)."""
        tensors = {}
        units = {}
        for name, stack, at, rule in self._members():
            units[name] = rule.grid.unit
            for entry, stacked in stack.entries().items():
                tensors[key_of(name, entry)] = _gathered(stacked[at], entry, stack, at)
        return NamedState(tensors, {"optimizer": "automagic", "units": units})

    @torch.no_grad()
    def load_named_state(self, state: NamedState) -> None:
        """Every parameter has to find its own state, and no state may be left over; otherwise nothing is changed.

        Rates saved with another bump or limit are taken over as rates, to the nearest unit.
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
            if entry != _SCALE  # of rates in 8 bits; the others have none
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
        """Rates in 8 bits keep every bit where they stay in 8 bits; otherwise they are taken over as rates."""
        stored = saved["rate"]
        if _SCALE in saved and _SCALE in stack.moments:
            stack.rates[at].copy_(_own_part(stored, "rate", stack, at))
            stack.moments[_SCALE][at].copy_(saved[_SCALE])
        elif _SCALE in saved or _SCALE in stack.moments:
            rates = stored.double() * saved[_SCALE] if _SCALE in saved else (stored.double() + _bias(stored)) * unit
            stack.put_rates(at, _own_part(rates, "rate", stack, at), rule)
        else:
            stack.rates[at].copy_(_own_part(_on_grid(stored, unit, rule.grid), "rate", stack, at))

    @torch.no_grad()
    def load_rates(self, rates: Mapping[str, Tensor], signs: Mapping[str, Tensor]) -> None:
        """Take over learning rates (and last signs) of another run, for the named parameters."""
        for name, stack, at, rule in self._members():
            if name in rates:
                stack.put_rates(at, _own_part(rates[name], "rate", stack, at), rule)
            if name in signs:
                stack.signs[at].copy_(_own_part(signs[name].to(torch.uint8), "sign", stack, at))

    def _members(self) -> Iterator[tuple[str, Stack, int, UpdateRule]]:
        for _group, rule, stack in self._stacks:
            for at, name in enumerate(stack.names):
                if not name:
                    raise ValueError("Automagic was built without parameter names: give it (name, parameter) pairs")
                yield name, stack, at, rule

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Options of the groups only; accelerate does this once on the way in."""
        if state_dict.get("state"):
            raise ValueError("Automagic's state is loaded by name: load_named_state()")
        super().load_state_dict(state_dict)
        # torch makes new group dicts; the stacks keep following theirs.
        by_first = {id(group["params"][0]): group for group in self.param_groups}
        self._stacks = [
            (now := by_first[id(group["params"][0])], _rule(now), stack) for group, _rule_before, stack in self._stacks
        ]


def _rule(group: dict[str, Any]) -> UpdateRule:
    beta2, eps, clip = group["beta2"], group["eps"], group["clip_threshold"]
    if not 0 <= beta2 < 1 or not eps > 0 or not clip > 0 or group["weight_decay"] < 0 or group["lr"] < 0:
        raise ValueError(
            f"beta2 {beta2} from 0 to below 1, eps {eps} and clip_threshold {clip} above 0, "
            f"lr {group['lr']} and weight_decay {group['weight_decay']} from 0"
        )
    grid = RateGrid.of(RateLimits(group["lr_bump"], group["min_lr"], group["max_lr"]))
    return UpdateRule(grid, beta2, eps, clip, group["weight_decay"])


def _on_grid(stored: Tensor, unit: float, grid: RateGrid) -> Tensor:
    if unit == grid.unit and stored.dtype == grid.dtype:
        return stored
    return grid.store((stored.double() + _bias(stored)) * unit)


def _bias(stored: Tensor) -> int:
    return BIAS_16 if stored.dtype == torch.int16 else 0


def _whole_size(entry: str, stack: Stack) -> tuple[int, ...]:
    shape = tuple(stack.whole_shape)
    if entry == _SCALE:
        return ()
    if entry == "row":
        return shape[:-1]
    return (*shape[:-2], shape[-1]) if entry == "col" else shape


def _is_cut(entry: str, stack: Stack) -> bool:
    """Whether each process has only a part: all but the column means of a matrix, and a tensor's one scale."""
    return stack.sharding is not None and entry != _SCALE and not (entry == "col" and len(stack.whole_shape) == 2)


def _gathered(value: Tensor, entry: str, stack: Stack, at: int) -> Tensor:
    if not _is_cut(entry, stack):
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
    value = value.to(stack.rates.device)
    if not _is_cut(entry, stack):
        return value
    parameter = stack.parameters[at]
    assert isinstance(parameter, DTensor)
    parts = value.chunk(parameter.device_mesh.size())  # as Shard(0) cuts; the last processes may have nothing
    rank = parameter.device_mesh.get_local_rank()
    return parts[rank] if rank < len(parts) else value[:0]
