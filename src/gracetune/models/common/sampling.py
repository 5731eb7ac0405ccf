"""What the families that draw pictures ask of a request before a pipeline runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gracetune.errors import ConfigError, Problem
from gracetune.models.spec import SampleRequest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DEFAULT_SIDE = 1024
"""Pixels of a sample's side where the request names none: what all these weights were made for."""


def refuse(problems: Iterable[Problem]) -> None:
    """All of them at once, if there are any."""
    found = tuple(problems)
    if found:
        raise ConfigError(found)


def size_of(request: SampleRequest) -> tuple[int, int]:
    return request.width or DEFAULT_SIDE, request.height or DEFAULT_SIDE


def side_problems(width: int, height: int, multiple: int) -> Iterator[Problem]:
    """The pipelines round a side they cannot draw, or stop at it with an error of their own."""
    for name, side in (("width", width), ("height", height)):
        if side % multiple:
            near = max(1, round(side / multiple)) * multiple
            yield Problem(name, str(side), f"a multiple of {multiple}", str(near))


def reference_problems(
    request: SampleRequest, model: str, *, least: int = 0, most: int | None = 0
) -> Iterator[Problem]:
    """`most`: None where the model takes any number."""
    count = len(request.references)
    if most == 0 and count:
        hint = "remove them, or train a flavour that edits"
        yield Problem("references", f"{count}", f"none: {model} does not edit", hint)
    elif count < least:
        hint = "give every sample prompt the picture it is to change"
        yield Problem("references", "none", f"a picture for {model} to change", hint)
    elif most is not None and count > most:
        yield Problem("references", f"{count}", f"at most {most} for {model}", f"keep {most} of them")


# These are for families from outside, too.


def checked_size(request: SampleRequest, multiple: int) -> tuple[int, int]:
    """Width and height, or a refusal."""
    refuse(side_problems(*size_of(request), multiple))
    return size_of(request)


def refuse_references(request: SampleRequest, model: str) -> None:
    refuse(reference_problems(request, model))


def batched(pipeline: Any, entry: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A cached entry as a batch of one, where the pipeline works."""
    device: torch.device = pipeline._execution_device
    return {name: tensor[None].to(device) for name, tensor in entry.items()}
