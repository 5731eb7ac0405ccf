"""`predict` against the steps of diffusers' own pipeline.

The pipeline generates a sample while its denoiser and its scheduler are watched. `predict` then gets the same latents
at the same noise level, with the entries of our encoders. It has to pass the denoiser the same tensors, and to return
what the pipeline passes its scheduler.

A pipeline packs latents in its own way. The packing is found by passing `predict` a number for each element: the
numbers that arrive at the denoiser show where each element goes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_leaves_with_path

from gracetune.models.spec import Expert
from gracetune.testing.family_check.case import CheckFailedError, FamilyCase, difference, require

TOLERANCE = 1e-4
"""Largest difference as a share of the largest value, in float32."""
_INPUT_TOLERANCE = 5e-4
"""The same for inputs: pipelines encode references in an order of operations of their own."""
_LEVELS = (0.25, 0.75)
_BISECTIONS = 60


@dataclass
class DenoiserCalls:
    """The inputs and outputs of a denoiser, call by call."""

    inputs: list[dict[str, Any]] = field(default_factory=list)
    """By the names of the parameters of `forward`."""
    outputs: list[Tensor] = field(default_factory=list)


@contextmanager
def watched(denoiser: nn.Module) -> Iterator[DenoiserCalls]:
    calls = DenoiserCalls()
    names = [*inspect.signature(denoiser.forward).parameters]

    def note(_module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        calls.inputs.append({**dict(zip(names, given, strict=False)), **named})
        calls.outputs.append(output[0])

    hook = denoiser.register_forward_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        hook.remove()


class _CalledError(Exception):
    """Ends `predict` when it calls the denoiser."""


@contextmanager
def _stopped(denoiser: nn.Module, seen: dict[str, Any]) -> Iterator[None]:
    """Inside, a call of the denoiser notes its inputs and ends the block."""
    names = [*inspect.signature(denoiser.forward).parameters]

    def stop(_module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.update({**dict(zip(names, given, strict=False)), **named})
        raise _CalledError

    hook = denoiser.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        yield
    except _CalledError:
        pass
    finally:
        hook.remove()


@dataclass(frozen=True)
class PipelineStep:
    """One step of the pipeline: a call of the denoiser, and what the scheduler then got."""

    component: str
    inputs: Mapping[str, Any]
    prediction: Tensor


def pipeline_steps(case: FamilyCase) -> list[PipelineStep]:
    """The steps of diffusers' pipeline for the first item, without guidance."""
    pipeline, steps = case.pipeline, []
    scheduler = pipeline.scheduler
    calls: list[tuple[str, dict[str, Any]]] = []
    step = scheduler.step

    def noted(prediction: Tensor, *given: Any, **named: Any) -> Any:
        require(
            len(calls) == 1, f"{len(calls)} calls of the denoiser in one step", "one, because the guidance is 1",
            "let `sample` pass the request's guidance to the pipeline",
        )  # fmt: skip
        component, inputs = calls.pop()
        steps.append(PipelineStep(component, inputs, prediction.clone()))
        return step(prediction, *given, **named)

    with ExitStack() as stack:
        for expert in case.facts.experts:
            denoiser = pipeline.components[expert.component]
            names = [*inspect.signature(denoiser.forward).parameters]

            def note(
                _module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], component: str = expert.component,
                names: list[str] = names,
            ) -> None:  # fmt: skip
                inputs = {**dict(zip(names, given, strict=False)), **named}
                calls.append((component, torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, inputs)))

            stack.callback(denoiser.register_forward_pre_hook(note, with_kwargs=True).remove)
        scheduler.step = noted
        stack.callback(delattr, scheduler, "step")
        case.spec.sample(pipeline, case.request())
    require(bool(steps), "no step", "steps of the pipeline's scheduler", "let `sample` run the pipeline it is given")
    return steps


@dataclass(frozen=True)
class _Packing:
    """Where `predict` puts the elements of noisy latents, and how the denoiser's time depends on the level."""

    argument: str
    places: Tensor
    """Flat places in the argument."""
    elements: Tensor
    """The flat element of the latents at each place."""
    time: str

    @classmethod
    def find(cls, case: FamilyCase, denoiser: nn.Module, batch: Mapping[str, Tensor], shape: torch.Size) -> _Packing:
        """`shape` is that of the noisy latents."""
        numbers = torch.arange(1, shape.numel() + 1, dtype=torch.float32).reshape(shape)
        low, high = (torch.full((len(numbers),), level) for level in _LEVELS)
        once = _inputs(case, denoiser, numbers, low, batch)
        negated = _inputs(case, denoiser, -numbers, low, batch)
        later = _inputs(case, denoiser, numbers, high, batch)
        for name in once:
            one, other = _flat(once[name]), _flat(negated[name])
            if one is None or other is None or one.shape != other.shape:
                continue
            places = ((one == -other) & (one != 0)).nonzero().flatten()
            if len(places) == 0:
                continue
            elements = one[places].long() - 1
            whole = len(places) == numbers.numel() and bool((elements.sort().values == torch.arange(len(places))).all())
            require(
                whole, f"{len(places)} of {numbers.numel()} elements of `noisy` in {name}", "each element once",
                "pass the denoiser all noisy latents, unchanged",
            )  # fmt: skip
            return cls(name, places, elements, _time(once, later, skip=name))
        raise CheckFailedError(
            "no argument of the denoiser that has the values of `noisy`", "the noisy latents, unchanged",
            "pass `noisy` to the denoiser in `predict`",
        )  # fmt: skip

    def ours(self, value: Tensor, shape: torch.Size) -> Tensor:
        """The latents in a denoiser's argument, in our layout."""
        made = torch.empty(shape.numel())
        made[self.elements] = value[self.places]
        return made.reshape(shape)


def _inputs(
    case: FamilyCase, denoiser: nn.Module, noisy: Tensor, level: Tensor, batch: Mapping[str, Tensor]
) -> dict[str, Any]:
    """What `predict` passes the denoiser."""
    seen: dict[str, Any] = {}
    with torch.no_grad(), _stopped(denoiser, seen):
        case.spec.predict(denoiser, noisy, level, batch, case.facts)
    return seen


def _flat(value: Any) -> Tensor | None:
    """All elements of an argument's tensors in one dimension; None without tensors."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return torch.cat([tensor.flatten().float() for tensor in tensors]) if tensors else None


def _time(one: Mapping[str, Any], other: Mapping[str, Any], *, skip: str) -> str:
    """The argument that depends on the noise level."""
    for name in one:
        early, late = _flat(one[name]), _flat(other[name])
        if name != skip and early is not None and late is not None and not torch.equal(early, late):
            return name
    raise CheckFailedError(
        "no argument of the denoiser that depends on `level`", "the model time of the level",
        "pass the denoiser `facts.schedule.model_time(level)`",
    )  # fmt: skip


def _level(case: FamilyCase, time: float) -> Tensor:
    """The noise level of a model time, by bisection: the time grows or falls with the level."""

    def time_at(level: float) -> float:
        return float(case.facts.schedule.model_time(torch.tensor([level]))[0])

    low, high = 0.0, 1.0
    grows = time_at(high) > time_at(low)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if (time_at(middle) < time) == grows:
            low = middle
        else:
            high = middle
    nearest = min((low, high), key=lambda level: abs(time_at(level) - time))
    require(
        abs(time_at(nearest) - time) <= TOLERANCE * max(1.0, abs(time)),
        f"the model time {time:g} in the pipeline; the schedule has {time_at(nearest):g} at the level {nearest:g}",
        "a noise level with that model time", "correct the schedule in `inspect`",
    )  # fmt: skip
    return torch.tensor([nearest])


def check(case: FamilyCase) -> str:
    """See the module."""
    steps, batch = pipeline_steps(case), case.batch(0)
    denoisers = {expert.component: case.denoiser(expert) for expert in case.facts.experts}
    shape = _shape(case, batch["latents"], steps[0].prediction)
    packing = _Packing.find(case, denoisers[steps[0].component], batch, shape)
    worst = 0.0
    for step in steps:
        denoiser, theirs = denoisers[step.component], _flat(step.inputs[packing.argument])
        assert theirs is not None
        noisy = packing.ours(theirs, shape)
        times = _flat(step.inputs[packing.time])
        assert times is not None
        level = _level(case, float(times[-1]))
        expert = _expert(case, float(level))
        require(
            expert.component == step.component, f"the pipeline calls {step.component} at the level {float(level):g}",
            expert.component, "correct the experts' ranges in `inspect`",
        )  # fmt: skip
        with torch.no_grad(), watched(denoiser) as ours:
            prediction = case.spec.predict(denoiser, noisy, level, batch, case.facts)
        compare_inputs(ours.inputs[0], step.inputs)
        expected = step.prediction.flatten().float()
        require(
            prediction.shape == noisy.shape, f"a prediction {[*prediction.shape]}", f"{[*noisy.shape]}, as `noisy`",
            "unpack the denoiser's output in `predict`",
        )  # fmt: skip
        require(
            expected.numel() == noisy.numel(), f"{expected.numel()} predicted elements in the pipeline",
            f"{noisy.numel()}, as many as latents", "generate samples without guidance where it is 1",
        )  # fmt: skip
        off = difference(prediction.flatten()[packing.elements], expected)
        require(
            off <= TOLERANCE, f"a prediction that differs by {off:.1e} of the largest value", f"at most {TOLERANCE:g}",
            "return in `predict` what the pipeline passes its scheduler: sign, order and scale",
        )  # fmt: skip
        worst = max(worst, off)
    return f"{len(steps)} steps of {type(case.pipeline).__name__}, difference {worst:.1e}"


def _shape(case: FamilyCase, latents: Tensor, prediction: Tensor) -> torch.Size:
    """The shape of the pipeline's latents in our layout. Pipelines for audio generate the longest audio and cut it."""
    if case.geometry.makes != "audio":
        return latents.shape
    rows = latents.shape[:-1]
    return torch.Size((*rows, prediction.numel() // rows.numel()))


def _expert(case: FamilyCase, level: float) -> Expert:
    """The expert of a noise level; `experts` are sorted from the highest noise to the lowest."""
    return next((one for one in case.facts.experts if level >= one.lowest), case.facts.experts[-1])


def compare_inputs(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """CheckFailedError if two calls pass a denoiser different tensors.

    A tensor may have one value where the other has it for every item or token, and lack the dimension of the one item.
    A mask of nothing but ones is as none. Padding that the pipeline masks may be left out, with the mask.
    """
    mine, others = (dict(_named(call)) for call in (ours, theirs))
    masks = [mask for name, mask in others.items() if "mask" in name and name not in mine and mask.shape[:-1] == (1,)]
    for mask in masks:
        others = {name: _without_padding(tensor, mask[0].bool(), mine.get(name)) for name, tensor in others.items()}
    for name in sorted(mine.keys() | others.keys()):
        one, other = mine.get(name), others.get(name)
        if one is None or other is None:
            given = other if one is None else one
            assert given is not None
            masked = "mask" in name and bool(given.bool().all())
            require(
                masked, f"{name} is {'missing' if one is None else 'passed'}", "what the pipeline passes",
                f"{'pass' if one is None else 'leave out'} {name} in `predict`",
            )  # fmt: skip
            continue
        if (1, *one.shape) == other.shape:
            other = other[0]
        if one.shape != other.shape and 1 in (one.unique().numel(), other.unique().numel()):
            one, other = one.flatten()[-1:], other.flatten()[-1:]
        off = difference(one, other)
        sizes = f"{[*one.shape]} and {[*other.shape]} in the pipeline"
        found = sizes if one.shape != other.shape else f"a difference of {off:.1e} of the largest value"
        require(off <= _INPUT_TOLERANCE, f"{name}: {found}", "what the pipeline passes", f"correct {name} in `predict`")


def _without_padding(tensor: Tensor, mask: Tensor, ours: Tensor | None) -> Tensor:
    """Without the tokens that `mask` [tokens] leaves out, if that gives our number of tokens. Text comes first."""
    if ours is None:
        kept = mask.nonzero().flatten()
        return tensor.index_select(-1, kept) if tensor.shape[-1] == mask.numel() else tensor
    longer = [place for place, (a, b) in enumerate(zip(ours.shape, tensor.shape, strict=False)) if a != b]
    if len(longer) != 1 or tensor.shape[longer[0]] - ours.shape[longer[0]] != int((~mask).sum()):
        return tensor
    behind = torch.ones(tensor.shape[longer[0]] - mask.numel(), dtype=torch.bool)
    return tensor.index_select(longer[0], torch.cat([mask, behind]).nonzero().flatten())


def _named(call: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for path, leaf in tree_leaves_with_path(dict(call)):
        if isinstance(leaf, Tensor):
            yield ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path), leaf
