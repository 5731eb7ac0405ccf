"""What the families that draw pictures ask of a request before a pipeline runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gracetune.errors import ConfigError, Problem
from gracetune.models.spec import SampleRequest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DEFAULT_SIDE = 1024
"""Pixels of a sample's side where the request names none: what all these weights were made for."""


def checked_size(request: SampleRequest, multiple: int) -> tuple[int, int]:
    """Width and height. The pipelines round a side they cannot draw, or stop at it with an error of their own."""
    width, height = request.width or DEFAULT_SIDE, request.height or DEFAULT_SIDE
    problems = []
    for name, side in (("width", width), ("height", height)):
        if side % multiple:
            near = max(1, round(side / multiple)) * multiple
            problems.append(Problem(f"the sample's {name}", str(side), f"a multiple of {multiple}", str(near)))
    if problems:
        raise ConfigError(problems)
    return width, height


def batched(pipeline: Any, entry: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A cached entry as a batch of one, where the pipeline works."""
    device: torch.device = pipeline._execution_device
    return {name: tensor[None].to(device) for name, tensor in entry.items()}


def refuse_references(request: SampleRequest, model: str) -> None:
    if request.references:
        hint = "remove them, or train a flavour that edits"
        raise ConfigError([_problem(f"{len(request.references)}", f"none: {model} does not edit", hint)])


def need_references(request: SampleRequest, model: str, *, most: int | None) -> None:
    """`most`: None where the model takes any number."""
    count = len(request.references)
    if count == 0:
        hint = "give every sample prompt the picture it is to change"
        raise ConfigError([_problem("none", f"a picture for {model} to change", hint)])
    if most is not None and count > most:
        raise ConfigError([_problem(f"{count}", f"at most {most} for {model}", f"keep {most} of them")])


def _problem(found: str, expected: str, hint: str) -> Problem:
    return Problem("the sample's references", found, expected, hint)
