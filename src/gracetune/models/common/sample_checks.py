"""Checks of a sample request that the image families share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gracetune.errors import ConfigError, Problem
from gracetune.models.spec import SampleRequest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DEFAULT_SIDE = 1024
"""Side in pixels of a sample whose request names none: the size all these weights were trained for."""


def reject(problems: Iterable[Problem]) -> None:
    """Raise ConfigError with all problems at once, if there are any."""
    found = tuple(problems)
    if found:
        raise ConfigError(found)


def size_of(request: SampleRequest) -> tuple[int, int]:
    """Width and height of the request, with the default for missing ones."""
    return request.width or DEFAULT_SIDE, request.height or DEFAULT_SIDE


def side_problems(width: int, height: int, multiple: int) -> Iterator[Problem]:
    """Sides that the pipeline would round, or reject with an error of its own."""
    for name, side in (("width", width), ("height", height)):
        if side % multiple:
            near = max(1, round(side / multiple)) * multiple
            yield Problem(name, str(side), f"a multiple of {multiple}", str(near))


def reference_problems(
    request: SampleRequest, model: str, *, least: int = 0, most: int | None = 0
) -> Iterator[Problem]:
    """Too few or too many references. `most` is None for models that support any number."""
    count = len(request.references)
    if most == 0 and count:
        hint = "remove them, or train a flavour that edits"
        yield Problem("references", f"{count}", f"none: {model} does not edit", hint)
    elif count < least:
        hint = "give every sample prompt the image to edit"
        yield Problem("references", "none", f"an image for {model} to edit", hint)
    elif most is not None and count > most:
        yield Problem("references", f"{count}", f"at most {most} for {model}", f"keep {most} of them")


# Also part of the interface for families in other packages.


def checked_size(request: SampleRequest, multiple: int) -> tuple[int, int]:
    """Width and height; ConfigError if the model does not support them."""
    reject(side_problems(*size_of(request), multiple))
    return size_of(request)


def reject_references(request: SampleRequest, model: str) -> None:
    """ConfigError if the request has references."""
    reject(reference_problems(request, model))


def batched(pipeline: Any, entry: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A cached entry as a batch of one, on the pipeline's device."""
    device: torch.device = pipeline._execution_device
    return {name: tensor[None].to(device) for name, tensor in entry.items()}
