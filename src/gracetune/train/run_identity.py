"""The identity of a run. A run does not resume from a checkpoint of another model or another adapter.

`model` holds the fingerprint of the trained denoisers' weights. `part <name>` holds the fingerprint of each other part
of the model: VAE, text encoders, tokenizers, scheduler, assistant adapter. Checkpoints of earlier releases have no such
parts; the fingerprints of their parts count as unknown.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import xxhash

from gracetune.adapters.assistant import AssistantFile
from gracetune.checkpoint.manifest import PART, Metadata
from gracetune.config.native import shareable
from gracetune.config.run_config import RunConfig
from gracetune.data.index import DataIndex
from gracetune.hardware import Machine
from gracetune.models.experts import trained_experts
from gracetune.models.fingerprint import fingerprint, part_fingerprints
from gracetune.models.layout import part_tensors
from gracetune.models.source import ASSISTANT_KEY, ModelSource
from gracetune.models.spec import ModelFacts
from gracetune.redaction import redact_values
from gracetune.storage.safetensors_headers import open_weights

_NOT_THE_ADAPTER = {"strength", "init_from", "dropout"}
"""Adapter settings that may differ after a resume, because the saved tensors keep their meaning."""


def identity_of(
    config: RunConfig, source: ModelSource, facts: ModelFacts, assistant: AssistantFile | None = None
) -> dict[str, str]:  # fmt: skip
    trained = trained_experts(config.model.experts, facts)
    parts = {expert.component for expert in facts.experts if expert.name in trained}
    adapter = redact_values(config.adapter.model_dump(mode="json", exclude=_NOT_THE_ADAPTER, exclude_defaults=True))
    return {
        "name": config.name,
        "model": f"{facts.family} {facts.flavour}, weights {_weights(source, sorted(parts))}",
        "adapter": json.dumps({"kind": config.adapter.kind, **adapter}, sort_keys=True),
        **{f"{PART}{name}": found for name, found in part_fingerprints(source, facts).items()},
        **(
            {} if assistant is None else {f"{PART}{ASSISTANT_KEY.rpartition('.')[2]}": _content(source, assistant.path)}
        ),
    }


def _content(source: ModelSource, file: Path) -> str:
    return fingerprint(open_weights(file).entries.values(), source.fingerprints)


def _weights(source: ModelSource, components: Iterable[str]) -> str:
    tensors = [tensor for component in components for tensor in part_tensors(source, component)]
    return fingerprint(tensors, source.fingerprints)


def metadata_of(config: RunConfig, identity: Mapping[str, str], index: DataIndex, machine: Machine) -> Metadata:
    text = json.dumps(shareable(config), sort_keys=True)  # without secrets: a digest can be matched against guesses
    versions = {name: version for name, version in machine.software.libraries.items() if version is not None}
    versions |= {"torch": machine.software.torch or "unknown", "python": machine.software.python or "unknown"}
    return Metadata(identity, xxhash.xxh3_128_hexdigest(text.encode()), index.fingerprint.as_json(), versions)
