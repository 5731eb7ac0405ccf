"""Our own dialect: YAML with the keys of `RunConfig`, as `gracetune config show` prints it.

The first key is `gracetune: 1`, the version of the format, by which the dialect is recognized. An ai-toolkit or
SimpleTuner file can have the same sections in a `gracetune` block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gracetune.config.draft import OUR_DEFAULT, Draft, Origin, Path, describe, dotted
from gracetune.config.environment import Environment
from gracetune.config.run_config import RunConfig
from gracetune.config.syntax import Document
from gracetune.config.yaml_syntax import one_line_yaml
from gracetune.errors import visible
from gracetune.redaction import Redactor, redact_values

VERSION_KEY = "gracetune"
VERSION = 1


def looks_like(data: Any) -> bool:
    """Whether data is of this dialect. A mapping under the key is a block in another dialect's file (`read_block`)."""
    return isinstance(data, Mapping) and VERSION_KEY in data and not isinstance(data[VERSION_KEY], Mapping)


def read(document: Document, draft: Draft, _environment: Environment) -> None:
    _sections(document.data, draft, "", document.name)


def read_block(value: Any, key: str, file: str, draft: Draft) -> None:
    """Read the `gracetune` block of another dialect's file, whose sections override the rest of the file.

    Lists of sections (`datasets`) are merged entry by entry. A note names each value that the block overrides.
    """
    if not isinstance(value, Mapping):
        expected = "sections of our own dialect, such as `memory` or `cache`"
        draft.problem(key, value, expected, f"write `{VERSION_KEY}: {{memory: {{use_uvm: true}}}}`", file)
        return
    before = {
        path: (draft.get(path), origin) for path, origin in draft.origins.items() if origin.kind == "file"
    }  # fmt: skip
    _sections(value, draft, f"{key}.", file)
    for path, (old, origin) in before.items():
        now, new = draft.get(path), draft.origin(path)
        if new is not None and new != origin and now != old:
            before_it = describe(old, origin.key)
            draft.note(f"{new.key}: {describe(now, new.key)} takes the place of `{origin.key}` ({before_it})")


def _sections(data: Mapping[Any, Any], draft: Draft, prefix: str, file: str) -> None:
    version = data.get(VERSION_KEY, VERSION)
    if version != VERSION or isinstance(version, bool):
        key = f"{prefix}{VERSION_KEY}"
        newer = isinstance(version, int) and not isinstance(version, bool) and version > VERSION
        hint = f"write `{VERSION_KEY}: {VERSION}`" + ", or update gracetune if a newer release wrote it" * newer
        draft.problem(key, version, f"format version {VERSION}", hint, file)
    for key, value in data.items():
        if key != VERSION_KEY:
            kept = _without_retired(value, draft) if key == "cache" and isinstance(value, Mapping) else value
            path, value = written_out((str(key),), kept)
            draft.put_tree(path, value, Origin("file", f"{prefix}{key}", file))


_NAMED_BY = {"adapter": "kind", "optimizer": "name", "schedule": "name"}
"""Sections that can be written as one name."""


def written_out(path: Path, value: Any) -> tuple[Path, Any]:
    """Expand the short form of a value, also of one that a flag sets. Returns its path and the value.

    Short forms are a name for `adapter`, `optimizer` and `schedule`; a folder, a list of folders or one dataset without
    a list for `datasets`; and texts for `validation.prompts`.
    """
    match path:
        case (str(section),) if section in _NAMED_BY and isinstance(value, str):
            return (section, _NAMED_BY[section]), value
        case ("datasets",) if isinstance(value, str | Mapping | list) and value:
            return path, [_dataset(one) for one in (value if isinstance(value, list) else [value])]
        case ("datasets", int()):
            return path, _dataset(value)
        case ("validation",) if isinstance(value, Mapping) and "prompts" in value:
            return path, {**value, "prompts": _prompts(value["prompts"])}
        case ("validation", "prompts"):
            return path, _prompts(value)
        case ("validation", "prompts", int()):
            return path, _prompt(value)
    return path, value


def _dataset(value: Any) -> Any:
    """Expand a folder's path to a dataset that is named after the folder."""
    if not isinstance(value, str):
        return value
    return {"id": value.rstrip("/").rpartition("/")[2] or value, "path": value}


def _prompts(value: Any) -> Any:
    return (
        [_prompt(one) for one in ([value] if isinstance(value, str) else value)]
        if isinstance(value, str | list)
        else value
    )


def _prompt(value: Any) -> Any:
    return {"prompt": value} if isinstance(value, str) else value


def _without_retired(cache: Mapping[Any, Any], draft: Draft) -> dict[Any, Any]:
    """Drop `image_embeds_dir`, which was never used. Saved configs of earlier runs have every key, also this one."""
    if cache.get("image_embeds_dir") is not None:
        draft.note("cache.image_embeds_dir: never had an effect, and was removed; latents have cache.vae_cache_dir")
    return {key: value for key, value in cache.items() if key != "image_embeds_dir"}


def shareable(config: RunConfig) -> dict[str, Any]:
    """Return the configuration without secrets, to show to others. `write` and `config.yaml` keep them."""
    shown: dict[str, Any] = redact_values(config.model_dump(mode="json"))
    return shown


def has_secrets(config: RunConfig) -> bool:
    return shareable(config) != config.model_dump(mode="json")


def write(config: RunConfig) -> str:
    """Write the complete config in this dialect. A run can be started from the result."""
    return write_values(config.model_dump(mode="json"))


def show(config: RunConfig, origins: Mapping[Path, Origin], redactor: Redactor) -> str:
    """Write the config without secrets, and with a comment on the origin of each value."""
    return write_values(redactor.redact_values(config.model_dump(mode="json")), origins)


def write_values(values: Mapping[str, Any], origins: Mapping[Path, Origin] | None = None) -> str:
    """Write sections, which need not be complete."""
    lines: list[tuple[str, str]] = [(f"{VERSION_KEY}: {VERSION}", "")]
    _write_mapping(values, (), "", lines, origins)
    width = min(max((len(text) for text, origin in lines if origin), default=0), 60)
    return "".join(f"{f'{text:<{width}}  # {origin}' if origin else text}\n" for text, origin in lines)


def _write_mapping(
    mapping: Mapping[str, Any],
    path: Path,
    indent: str,
    lines: list[tuple[str, str]],
    origins: Mapping[Path, Origin] | None,
) -> None:
    for key, value in mapping.items():
        inner = (*path, key)
        label = f"{indent}{one_line_yaml(key)}:"
        if _is_section(value):
            lines.append((label, ""))
            _write_mapping(value, inner, f"{indent}  ", lines, origins)
        elif isinstance(value, list) and value and all(_is_section(item) for item in value):
            lines.append((label, ""))
            for index, item in enumerate(value):
                start = len(lines)
                _write_mapping(item, (*inner, index), f"{indent}  ", lines, origins)
                text, origin = lines[start]
                lines[start] = (f"{indent}- {text[len(indent) + 2 :]}", origin)
        else:
            # Keys and file names can have line breaks, but a comment must not.
            origin = visible(str(origin_of(inner, origins))) if origins is not None else ""
            lines.append((f"{label} {one_line_yaml(value)}", origin))


def _is_section(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value)


def origin_of(path: Path, origins: Mapping[Path, Origin]) -> Origin:
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return origins[path[:length]]
    return OUR_DEFAULT


def flat(config: RunConfig, origins: Mapping[Path, Origin]) -> dict[str, dict[str, str]]:
    """Map the dotted name of every value to its origin, for `config show --json`."""
    found = {}
    for path, _ in leaves(config.model_dump(mode="json")):
        origin = origin_of(path, origins)
        found[dotted(path)] = {"kind": origin.kind, "where": origin.location, "key": origin.key}
    return found


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value below a section, with its path. Lists of sections are entered, other lists are one value."""
    if _is_section(value):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list) and value and all(_is_section(item) for item in value):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value
