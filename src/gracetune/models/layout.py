"""A model folder in diffusers' layout: its configuration files, its weight files, and checks for completeness.

Everything is checked before any weight is loaded, and all problems are reported together.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gracetune.errors import ConfigError, Problem
from gracetune.models import single_file
from gracetune.models.source import INDEX, PICKLES, ModelSource, read_json
from gracetune.storage.safetensors_headers import TensorEntry, WeightFileError, open_weights

CONFIG, TOKENIZER, SCHEDULER = "config.json", "tokenizer_config.json", "scheduler_config.json"
"""The file that identifies a part of each kind."""

_VOCABULARIES = (("tokenizer.json",), ("spiece.model",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
"""One of these sets must be present. Without any, transformers builds a tokenizer with an empty vocabulary."""
_DIFFUSERS_STEM = "diffusion_pytorch_model"
_TRANSFORMERS_STEM = "model"


# -- configuration ----------------------------------------------------------------------------------------------------


def read_index(source: ModelSource) -> dict[str, Any]:
    """model_index.json: the pipeline's class, its options, and the class of each part."""
    return read_json(source.folder / INDEX)


def read_config(source: ModelSource, component: str, file: str = CONFIG) -> dict[str, Any]:
    return read_json(source.part(component) / file)


def part_config(source: ModelSource, component: str, cls: type[Any]) -> dict[str, Any]:
    """The configuration of a diffusers model, with the class's defaults for keys that the file leaves out.

    ConfigError if the file belongs to another class, holds quantized weights, or was written by a later diffusers
    release and has settings that this class does not know.
    """
    config = read_config(source, component)
    file = str(source.part(component) / CONFIG)
    named = config.get("_class_name", cls.__name__)
    if named != cls.__name__:
        hint = "check model.family, and that model.path, model.vae_path and their parts belong together"
        raise ConfigError([Problem(f"the {component}'s class", str(named), cls.__name__, hint, file)])
    quantized = config.get("quantization_config")
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        found = f"weights quantized by {method or 'an unnamed method'}"
        hint = "use the model's unquantized weights, and --set model.base_precision=fp8 to store them in 8 bits"
        raise ConfigError([Problem("quantization_config", found, "unquantized weights", hint, file)])
    parameters = inspect.signature(cls.__init__).parameters
    unknown = sorted(key for key in config if key not in parameters and not key.startswith("_"))
    # Files written before this release may have settings that were removed since. Those have no effect any more.
    if unknown and _is_later(str(config.get("_diffusers_version", ""))):
        found = f"{', '.join(unknown)}, written by diffusers {config['_diffusers_version']}"
        expected = f"only settings that {cls.__name__} of diffusers {version('diffusers')} has"
        raise ConfigError([Problem("settings", found, expected, "pip install --upgrade diffusers", file)])
    defaults = {name: one.default for name, one in parameters.items() if one.default is not inspect.Parameter.empty}
    return {**defaults, **config}


def _is_later(written: str) -> bool:
    """Whether the file was written by a later release than ours. Only numbers count: `0.43.0.dev0` reads as 0.43.0."""
    theirs, ours = (re.findall(r"\d+", text)[:3] for text in (written, version("diffusers")))
    return [*map(int, theirs)] > [*map(int, ours)]


# -- does the folder fit the family? -----------------------------------------------------------------------------------


def pipeline_name(source: ModelSource, family: str, known: Mapping[str, object]) -> str:
    """The pipeline class in model_index.json. ConfigError if it is not one of `known`."""
    name = read_index(source).get("_class_name")
    if isinstance(name, str) and name in known:
        return name
    found = "no _class_name" if name is None else f"the parts of a {name}"
    hint = "set model.family to the family of these weights, or model.path to other weights"
    file = str(source.folder / INDEX)
    raise ConfigError([Problem("model.path", found, f"{family}: {', '.join(known)}", hint, file)])


def require_parts(source: ModelSource, parts: Mapping[str, str]) -> None:
    """`parts`: component -> a file its folder must have. A tokenizer must have its vocabulary too."""
    problems = [problem for part, file in parts.items() for problem in _lacking(source.part(part), part, file)]
    if problems:
        raise ConfigError(problems)


def _lacking(folder: Path, part: str, file: str) -> Iterator[Problem]:
    hint = "download the whole model again"
    if not (folder / file).is_file():
        found = f"{part} without {file}" if folder.is_dir() else f"no folder {part}"
        yield Problem("model.path", found, f"{file} in the folder {part}", hint, str(folder))
    elif file == TOKENIZER and not any(all((folder / name).is_file() for name in names) for names in _VOCABULARIES):
        expected = ", or ".join(" and ".join(names) for names in _VOCABULARIES)
        yield Problem("model.path", f"{part} without its vocabulary", expected, hint, str(folder))


# -- weights ----------------------------------------------------------------------------------------------------------


def weight_file(source: ModelSource, component: str) -> Path:
    """The file to read a part's weights from: one .safetensors file, or the index of several.

    Parts without the source's variant use their plain files, as in diffusers. `open_source` has checked that at least
    one part has the variant.
    """
    folder = source.part(component)
    for variant in [source.variant, None] if source.variant else [None]:
        for stem in (_DIFFUSERS_STEM, _TRANSFORMERS_STEM):
            found = next((path for path in _candidates(folder, stem, variant) if path.is_file()), None)
            if found is not None:
                return found
    raise WeightFileError([_no_weights(folder)])


def part_tensors(source: ModelSource, component: str) -> tuple[TensorEntry, ...]:
    """All tensors a part is loaded from, wherever they are stored. Its fingerprint covers these."""
    if single_file.supplies(source, component):
        return single_file.tensors_of(source, component)
    return tuple(open_weights(weight_file(source, component)).entries.values())


def _candidates(folder: Path, stem: str, variant: str | None) -> Iterator[Path]:
    middle = f".{variant}" if variant else ""
    yield folder / f"{stem}.safetensors.index{middle}.json"
    if variant:
        yield folder / f"{stem}{middle}.safetensors.index.json"  # the name older diffusers releases wrote
    yield folder / f"{stem}{middle}.safetensors"


def _no_weights(folder: Path) -> Problem:
    expected = f"{_DIFFUSERS_STEM}.safetensors, {_TRANSFORMERS_STEM}.safetensors, or the index of several such files"
    if not folder.is_dir():
        return Problem("weights", "no such folder", expected, "check model.path", str(folder))
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles and not any(name.endswith(".safetensors") for name in names):
        hint = "use the .safetensors files of the same model: a pickle can run any code when it is loaded"
        return Problem("weights", f"only pickled weights ({pickles[0]})", expected, hint, str(folder))
    found = ", ".join(names[:8]) or "an empty folder"
    return Problem("weights", found, expected, "download this part again, or set model.variant", str(folder))
