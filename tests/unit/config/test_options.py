"""Every option there is, so that adding one is a visible act: few good dials are worth more than many knobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_origin

from pydantic import BaseModel

from gracetune.config.run_config import RunConfig

LISTED = Path(__file__).parents[2] / "golden" / "options.txt"


def options(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        several = "[]" if get_origin(field.annotation) is tuple else ""
        if inner is None:
            yield f"{prefix}{name}"
        else:
            yield from options(inner, f"{prefix}{name}{several}.")


def test_the_options_are_those_of_the_list() -> None:
    """A new one belongs into tests/golden/options.txt, beside the reason for it in the commit."""
    assert [*options(RunConfig)] == LISTED.read_text().splitlines()


def sections(section: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield section
    for field in section.model_fields.values():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from sections(kind)


def test_every_option_is_described() -> None:
    fields = [(section, name) for section in sections(RunConfig) for name in section.model_fields]
    assert [
        f"{section.__name__}.{name}" for section, name in fields if not section.model_fields[name].description
    ] == []
