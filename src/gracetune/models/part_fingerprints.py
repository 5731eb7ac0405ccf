"""One fingerprint for each part of a model beside the weights that are trained: two runs are the same only with all.

Of a part with weights it covers every byte of them and its configuration; of a tokenizer or processor every file. Of
configurations alone (the scheduler, the denoisers' shape, the pipeline's own settings) it is the values themselves, so
that a message can name the one that changed. What only says who wrote a file does not count.

A denoiser that is not trained has its configuration here and not its weights: it works in samples alone, and reading
28 GB for those would delay every first start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import xxhash

from gracetune.models.common.encoding import files_digest, without_writers
from gracetune.models.fingerprint import fingerprint
from gracetune.models.layout import CONFIG, SCHEDULER, part_tensors, read_config, read_index
from gracetune.models.source import INDEX, ModelSource
from gracetune.models.spec import ModelFacts
from gracetune.storage.errors import WeightFileError
from gracetune.storage.os_errors import explained


def part_fingerprints(source: ModelSource, facts: ModelFacts) -> dict[str, str]:
    """By the name of the part, as in model_index.json; that file's own settings under its name."""
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
    pieces = [_text(read_config(source, component)), _weights(source, component)]
    return xxhash.xxh3_128_hexdigest("\n".join(pieces).encode())


def _weights(source: ModelSource, component: str) -> str:
    try:
        tensors = part_tensors(source, component)
    except WeightFileError:  # whoever needs them says so
        return "not there"
    return fingerprint(tensors, source.fingerprints) if tensors else "none"


def _text(config: Mapping[str, Any]) -> str:
    return json.dumps(without_writers(config), sort_keys=True)
