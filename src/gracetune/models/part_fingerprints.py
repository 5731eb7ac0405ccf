"""A fingerprint of each part of a model besides the trained weights. Two runs match only if all of them match.

A part with weights is fingerprinted by every byte of them and its configuration; a tokenizer or processor by all its
files. Plain configurations (the scheduler, the denoisers' shape, the pipeline's settings) are kept as values, so that
a message can name the one that changed. Keys that only record which program wrote a file are ignored.

For a denoiser only the configuration is fingerprinted, even one that is not trained: such a denoiser only affects
generated samples, and reading its 28 GB would delay every first start.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from gracetune.models.fingerprint import fingerprint
from gracetune.models.layout import CONFIG, SCHEDULER, part_tensors, read_config, read_index
from gracetune.models.source import INDEX, ModelSource
from gracetune.models.spec import ModelFacts
from gracetune.storage.os_errors import explained
from gracetune.storage.safetensors_headers import WeightFileError

_WRITERS = ("_name_or_path", "_diffusers_version", "transformers_version", "torch_dtype", "dtype", "architectures")
"""Keys of a config file that record which program wrote it, not what the part does."""


def part_fingerprints(source: ModelSource, facts: ModelFacts) -> dict[str, str]:
    """Fingerprint by part name, as in model_index.json. That file's own settings are under its file name."""
    index = read_index(source)
    denoisers = {expert.component for expert in facts.experts}
    parts = [name for name, value in index.items() if isinstance(value, list) and value[-1] is not None]
    settings = {name: value for name, value in index.items() if not name.startswith("_") and name not in parts}
    found = {name: _denoiser(source, name) if name in denoisers else _part(source, name) for name in sorted(parts)}
    return {**found, INDEX: _text({name: value for name, value in settings.items() if not isinstance(value, list)})}


def _denoiser(source: ModelSource, component: str) -> str:
    return _text(read_config(source, component))


def _part(source: ModelSource, component: str) -> str:
    folder = source.part(component)
    with explained("model.path", folder, access="read", elsewhere="set model.path to another copy"):
        if not folder.is_dir():
            return "not there"
        if (folder / SCHEDULER).is_file():
            return _text(read_config(source, component, SCHEDULER))
        if not (folder / CONFIG).is_file():
            return files_digest(folder)
    texts = [_text(read_config(source, component)), _weights(source, component)]
    return xxhash.xxh3_128_hexdigest("\n".join(texts).encode())


def _weights(source: ModelSource, component: str) -> str:
    try:
        tensors = part_tensors(source, component)
    except WeightFileError:  # reported by the code that loads this part
        return "not there"
    return fingerprint(tensors, source.fingerprints) if tensors else "none"


def _text(config: Mapping[str, Any]) -> str:
    return json.dumps(without_writers(config), sort_keys=True)


def without_writers(value: Any) -> Any:
    """A configuration without the keys that record its writer. Nested models (as in Qwen2.5-VL) have nested
    configurations with such keys of their own."""
    if not isinstance(value, dict):
        return value
    return {key: without_writers(one) for key, one in value.items() if key not in _WRITERS}


def files_digest(folder: Path) -> str:
    """A digest of the names and content of a folder's files, for small ones such as a tokenizer's or a processor's.

    Hidden files are skipped: they belong to file browsers or git.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")):
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
