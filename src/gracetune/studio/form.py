"""The form of a new run: every option of the config schema by section, the families, and the presets."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic.fields import FieldInfo
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gracetune.config.draft import Path, dotted
from gracetune.config.families import readable_names
from gracetune.config.option_listing import default_of, one_line, option_sections, section_of
from gracetune.config.pydantic_errors import accepted, choices, expectation
from gracetune.proposal.presets import presets
from gracetune.studio.replies import json_reply

_OFTEN = (
    "name", "output_dir", "model.family", "model.flavour", "model.path", "datasets[0].id", "datasets[0].path",
    "datasets[0].captions.trigger_word", "adapter.kind", "training.max_steps", "training.seed",
    "validation.every_steps", "checkpoints.every_steps",
)  # fmt: skip
"""Options that most configs set, besides those that a preset sets."""
_PATHS = ("path", "dir", "folder", "init_from")
_OF_PRESETS = "dataset."
"""Presets write the options of the first dataset under this name."""


def routes() -> list[Route]:
    return [Route("/api/form", _form)]


async def _form(_request: Request) -> Response:
    return json_reply(form())


@cache
def form() -> dict[str, Any]:
    """The form as JSON. It depends on the installed packages only, so it is made once."""
    return {
        "families": [
            {"name": names.family, "flavours": [one.name for one in names.flavours]} for names in readable_names()
        ],
        "presets": [{"name": one.name, "media": one.media, "title": one.title} for one in presets().values()],
        "groups": _groups(),
    }


def _groups() -> list[dict[str, Any]]:
    common = common_options()
    groups = []
    for section in option_sections():
        fields = [_field(path, field, common) for path, field in section.fields() if section_of(field) is None]
        if fields:
            title = section.written or "Run"
            groups.append({"title": title, "help": section.description, "path": dotted(section.path), "fields": fields})
    return groups


def common_options() -> frozenset[str]:
    """The dotted names of the options that a new user sees first."""
    of_presets = {
        key for one in presets().values() for model in one.models for key in one.options_of(*model.split("/", 1))
    }
    ours = (f"datasets[0].{key[len(_OF_PRESETS) :]}" if key.startswith(_OF_PRESETS) else key for key in of_presets)
    return frozenset({*_OFTEN, *ours})


def _field(path: Path, field: FieldInfo, common: frozenset[str]) -> dict[str, Any]:
    name = str(path[-1])
    return {
        "path": dotted(path),
        "label": name.replace("_", " "),
        "help": one_line(field.description or ""),
        "type": _type(path),
        "choices": choices(path),
        "expects": expectation(path),
        "default": default_of(field),
        "required": field.is_required(),
        "common": dotted(path) in common,
    }


def _type(path: Path) -> str:
    """The kind of control. Options with values of several kinds are text, which is read as YAML."""
    if choices(path):
        return "choice"
    kinds = {str(option.get("type", "")) for option in accepted(path)}
    if kinds == {"string"}:
        name = str(path[-1])
        return "path" if name.split("_")[-1] in _PATHS or name in _PATHS else "string"
    if kinds == {"integer", "number"}:
        return "number"
    simple = {"integer": "integer", "number": "number", "boolean": "boolean", "array": "list"}
    return simple.get(kinds.pop(), "string") if len(kinds) == 1 else "string"
