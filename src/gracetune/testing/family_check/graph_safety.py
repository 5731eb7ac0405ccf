"""What would keep a training pass from being captured as a CUDA graph, as far as a machine without a GPU can tell.

A capture may neither read values on the host nor copy tensors that the host made (`train.cuda_graphs`). The denoiser
runs forward and backward on the meta device, whose tensors have no values: reading one is an error, and a tensor that
is made on the host is of another device, which shows where it is copied. What is made once and kept is allowed, so the
second pass counts.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gracetune.adapters.attach import describe
from gracetune.adapters.targets import select
from gracetune.testing.family_check.case import CheckFailedError, FamilyCase, listed

READS = frozenset(
    {
        torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default, torch.ops.aten.nonzero.default,
        torch.ops.aten.masked_select.default, torch.ops.aten._unique2.default, torch.ops.aten.equal.default,
    }
)  # fmt: skip
"""Operations whose result decides on the host: a number, a truth value, or the size of a tensor."""
_COPIES = frozenset({torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default})


def own_line() -> str:
    """The line that called torch: `file:line code`."""
    stack = [frame for frame in traceback.extract_stack() if not _is_of_torch(frame.filename)]
    return _spelled(stack[-1]) if stack else "unknown"


def _is_of_torch(file: str) -> bool:
    return file == __file__ or "torch" in Path(file).parts or file.startswith("<")


def _spelled(frame: traceback.FrameSummary) -> str:
    return f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} {frame.line}"


class HostReads(TorchDispatchMode):
    """Records the lines that convert a tensor to a Python number (`.item()`, `bool(...)`, `if tensor:`), or whose
    result has a size that depends on values. `.tolist()` is not seen, except on the meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS or (func is torch.ops.aten.index.Tensor and _has_mask(args[1])):
            self.lines.append(own_line())
        return func(*args, **(kwargs or {}))


def _has_mask(indexes: Any) -> bool:
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indexes)


@dataclass
class HostWork:
    """The lines of a pass on the meta device that a capture could not contain."""

    reads: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)
    """They copy a tensor that was made on the host."""


class _HostCopies(HostReads):
    def __init__(self, work: HostWork) -> None:
        super().__init__()
        self.lines, self._copies = work.reads, work.copies

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if _on_meta(result):
            given = [
                leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.device.type != "meta"
            ]
            # A number on the host is an argument of the kernel; a copy of it is not.
            if any(leaf.ndim > 0 or func in _COPIES for leaf in given) or func is torch.ops.aten.lift_fresh.default:
                self._copies.append(own_line())
        return result


class _HostValues(TorchFunctionMode):
    """Records the lines that make a tensor on the device from Python numbers: torch copies them from the host."""

    def __init__(self, work: HostWork) -> None:
        super().__init__()
        self._copies = work.copies

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        listed_indexes = func is Tensor.__getitem__ and any(isinstance(index, list) for index in _indexes(args[1]))
        if (
            func in (torch.tensor, torch.as_tensor) and _on_meta(result) and not isinstance(args[0], Tensor)
        ) or listed_indexes:
            self._copies.append(own_line())
        return result


def _indexes(given: Any) -> tuple[Any, ...]:
    return given if isinstance(given, tuple) else (given,)


def _on_meta(result: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.device.type == "meta" for leaf in tree_leaves(result))


def host_work(run: Callable[[], Tensor]) -> HostWork:
    """What a pass does on the host. `run` makes a prediction on the meta device."""
    work = HostWork()
    try:
        run()
        with _HostValues(work), _HostCopies(work):
            run().sum().backward()
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error).lower():
            raise
        stack = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_of_torch(frame.filename)]
        work.reads.append(_spelled(stack[-1]))
    return work


def host_work_of(case: FamilyCase, *seeds: int) -> tuple[str, ...]:
    """What training on items does on the host, with the tensors that a captured step gets: one sentence per line."""
    spec, facts, batch = case.spec, case.facts, case.batch(*seeds)
    denoiser = spec.build_denoiser(case.source, facts.experts[0])
    _train(denoiser, select(describe(denoiser), spec.default_targets, untrained=case.untrained).paths)
    noisy, level = (one.to("meta") for one in case.noisy(batch))
    needed = batch if spec.graph_inputs is None else spec.graph_inputs(batch)
    given = {name: tensor.to("meta") for name, tensor in needed.items()}
    work = host_work(lambda: spec.predict(denoiser, noisy, level, given, facts))
    faults = [f"reads a value: {line}" for line in work.reads] + [f"copies a value: {line}" for line in work.copies]
    return tuple(dict.fromkeys(faults))


def _train(denoiser: nn.Module, layers: tuple[str, ...]) -> None:
    denoiser.requires_grad_(False).train()
    for path in layers:
        denoiser.get_parameter(f"{path}.weight").requires_grad_(True)


def check(case: FamilyCase) -> str:
    """See the module. One item; captions of different lengths in a batch may need a mask, which is reported only."""
    alone, both = host_work_of(case, 0), host_work_of(case)
    if case.spec.graph_inputs is None:
        why = f": {listed(alone or both, 1)}" if alone or both else "; nothing here keeps it from it"
        return f"not captured, because SPEC has no graph_inputs{why}"
    if alone:
        raise CheckFailedError(
            listed(alone), "a pass that reads nothing on the host and copies nothing from it",
            "make such tensors once and keep them on the device, or set graph_inputs to None in SPEC",
        )  # fmt: skip
    if both:
        return f"yes, but not batches of captions of different lengths: {listed(both, 1)}"
    return "nothing is read on the host or copied from it, forward and backward"
