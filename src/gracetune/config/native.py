"""Our own dialect: YAML whose keys are `RunConfig`'s own, exactly what `gracetune config show` prints.

The first key is `gracetune: 1`, the version of the format; it tells this dialect from the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gracetune.config.draft import OUR_DEFAULT, Draft, Origin, Path, dotted, visible
from gracetune.config.environment import Environment
from gracetune.config.run_config import RunConfig
from gracetune.config.syntax import Document, one_line_yaml

VERSION_KEY = "gracetune"
VERSION = 1


def looks_like(data: Any) -> bool:
    return isinstance(data, Mapping) and VERSION_KEY in data


def read(document: Document, draft: Draft, _environment: Environment) -> None:
    version = document.data[VERSION_KEY]
    if version != VERSION or isinstance(version, bool):
        draft.problem(VERSION_KEY, version, f"format version {VERSION}", f"write `{VERSION_KEY}: {VERSION}`")
    for key, value in document.data.items():
        if key != VERSION_KEY:
            kept = _without_retired(value, draft) if key == "cache" and isinstance(value, Mapping) else value
            draft.put_tree((str(key),), kept, Origin("file", str(key), document.name))


def _without_retired(cache: Mapping[Any, Any], draft: Draft) -> dict[Any, Any]:
    """Configs of earlier runs have every key there was; this one was never read."""
    if cache.get("image_embeds_dir") is not None:
        draft.note("cache.image_embeds_dir: never had an effect, and is gone; latents have cache.vae_cache_dir")
    return {key: value for key, value in cache.items() if key != "image_embeds_dir"}


def write(config: RunConfig, origins: Mapping[Path, Origin] | None = None) -> str:
    """The config as this dialect, each value followed by where it came from when `origins` are given."""
    lines: list[tuple[str, str]] = [(f"{VERSION_KEY}: {VERSION}", "")]
    _write_mapping(config.model_dump(mode="json"), (), "", lines, origins)
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
        here = (*path, key)
        label = f"{indent}{one_line_yaml(key)}:"
        if _is_section(value):
            lines.append((label, ""))
            _write_mapping(value, here, f"{indent}  ", lines, origins)
        elif isinstance(value, list) and value and all(_is_section(item) for item in value):
            lines.append((label, ""))
            for index, item in enumerate(value):
                start = len(lines)
                _write_mapping(item, (*here, index), f"{indent}  ", lines, origins)
                text, origin = lines[start]
                lines[start] = (f"{indent}- {text[len(indent) + 2 :]}", origin)
        else:
            # Keys and file names may hold line breaks; a comment must not.
            origin = visible(str(_origin(here, origins))) if origins is not None else ""
            lines.append((f"{label} {one_line_yaml(value)}", origin))


def _is_section(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value)


def _origin(path: Path, origins: Mapping[Path, Origin]) -> Origin:
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return origins[path[:length]]
    return OUR_DEFAULT


def flat(config: RunConfig, origins: Mapping[Path, Origin]) -> dict[str, dict[str, str]]:
    """The origin of every leaf by its dotted name, for `config show --json`."""
    lines: dict[str, dict[str, str]] = {}
    _flatten(config.model_dump(mode="json"), (), origins, lines)
    return lines


def _flatten(value: Any, path: Path, origins: Mapping[Path, Origin], out: dict[str, dict[str, str]]) -> None:
    if _is_section(value):
        for key, item in value.items():
            _flatten(item, (*path, key), origins, out)
    elif isinstance(value, list) and value and all(_is_section(item) for item in value):
        for index, item in enumerate(value):
            _flatten(item, (*path, index), origins, out)
    else:
        origin = _origin(path, origins)
        out[dotted(path)] = {"kind": origin.kind, "where": origin.where, "key": origin.key}
