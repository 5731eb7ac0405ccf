"""Every option of our own dialect, section by section, with its description and default.

docs/options.md and the studio's form are made from this. The descriptions are those of the schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gracetune.config.dataset_config import BACKEND_SECTIONS
from gracetune.config.draft import Path
from gracetune.config.run_config import RunConfig


@dataclass(frozen=True)
class OptionSection:
    """One section of a config. The path of a list of sections ends with 0."""

    path: Path
    kind: type[BaseModel]
    description: str

    @property
    def written(self) -> str:
        """The path for people: `datasets[].crop`."""
        return ".".join(str(part) for part in self.path).replace(".0", "[]")

    def fields(self) -> Iterator[tuple[Path, FieldInfo]]:
        """The path and the field of each option and each inner section; without those of installed backends."""
        for name, field in self.kind.model_fields.items():
            if name not in BACKEND_SECTIONS:
                yield inner_path(self.path, name, field), field


def option_sections() -> Iterator[OptionSection]:
    """The whole file as the first section, with an empty path; then every section below it."""
    yield OptionSection((), RunConfig, "")
    yield from _below((), RunConfig)


def _below(path: Path, section: type[BaseModel]) -> Iterator[OptionSection]:
    for name, field in section.model_fields.items():
        inner = section_of(field)
        if inner is not None:
            inside = inner_path(path, name, field)
            yield OptionSection(inside, inner, one_line(field.description or inner.__doc__ or ""))
            yield from _below(inside, inner)


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field holds, or the one that its list holds; None for an option."""
    kinds = [field.annotation, *get_args(field.annotation)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def inner_path(path: Path, name: str, field: FieldInfo) -> Path:
    is_list = section_of(field) is not None and get_origin(field.annotation) is tuple
    return (*path, name, 0) if is_list else (*path, name)


def default_of(field: FieldInfo) -> Any:
    """The default as JSON has it; None if the option is unset or required."""
    if field.is_required():
        return None
    value = field.get_default(call_default_factory=True)
    return list(value) if isinstance(value, tuple) else value


def one_line(text: str) -> str:
    return " ".join(text.split())
