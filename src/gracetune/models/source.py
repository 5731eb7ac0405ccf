"""The location of a model's weights: a folder in diffusers' layout, and single files for parts of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gracetune.config.families import find_flavour, flavours
from gracetune.config.path_status import PathStatus, inspect_path
from gracetune.config.run_config import Model
from gracetune.config.spelling import nearest
from gracetune.errors import ConfigError, Problem
from gracetune.models import hub_download as hub
from gracetune.storage.regular_files import read_small_file
from gracetune.storage.safetensors_headers import open_weights

INDEX = "model_index.json"
ASSISTANT_KEY = "model.assistant_adapter"
ASSISTANT_FILE = "pytorch_lora_weights.safetensors"
"""diffusers' file name for a LoRA."""
PICKLES = (".bin", ".ckpt", ".pt", ".pth", ".pkl")
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w.-]+")
_ADAPTER_KEY = re.compile(r"(^|\.|_)(lora|lokr|hada|oft|lora_magnitude_vector|dora)_|\.lora\.")
_FOREIGN_TEXT = ("text_encoders.", "cond_stage_model.")
"""Prefixes under which other tools pack text encoders into the denoiser's file."""
_LAYOUT = f"a folder in diffusers' layout ({INDEX} and one subfolder per part)"
_ANY = f"{_LAYOUT}, a hub id, or a single .safetensors file"


@dataclass(frozen=True)
class ModelSource:
    """The local files of a model. A hub id has been resolved to its downloaded snapshot."""

    name: str
    """As written by the user, for messages."""
    folder: Path
    """The folder in diffusers' layout: model_index.json and one subfolder per part."""
    single_file: Path | None = None
    """The denoiser's weights in one safetensors file of the original layout; `folder` still has the configuration.

    Other parts in the file (a VAE, text encoders) replace those in `folder`."""
    variant: str | None = None
    """`fp16` or similar: selects one of several weight files in a subfolder."""
    vae: Path | None = None
    """A folder that replaces the VAE's folder."""
    text_encoder: Path | None = None
    """A folder that replaces the text encoder's folder."""
    fingerprints: Path | None = None
    """The digest file (`fingerprint.py`). None computes digests every time."""

    def part(self, component: str) -> Path:
        """The folder of one part."""
        replaced = {"vae": self.vae, "text_encoder": self.text_encoder}.get(component)
        return replaced or self.folder / component


def read_json(path: Path) -> dict[str, Any]:
    """One of a model's configuration files. ConfigError if it cannot be read or is not a JSON object."""
    hint = "download it again, or check model.path"
    try:
        value = json.loads(read_small_file(path))
    except OSError as error:
        problem = Problem("model.path", error.strerror or str(error), "a readable file", "check model.path", str(path))
        raise ConfigError([problem]) from None
    except (ValueError, RecursionError) as error:  # RecursionError: brackets nested by the thousand
        raise ConfigError([Problem("model.path", f"invalid JSON: {error}", "JSON", hint, str(path))]) from None
    if not isinstance(value, dict):
        raise ConfigError([Problem("model.path", f"a {type(value).__name__}", "a JSON object", hint, str(path))])
    return value


def open_source(model: Model, fetch: hub.Fetch = hub.fetch) -> ModelSource:
    """Find the weights a config names. Downloads the missing files of a hub id unless the machine is offline."""
    vae = _open_part(model, "vae", model.vae_path, fetch)
    text_encoder = _open_part(model, "text_encoder", model.text_encoder_path, fetch)
    name = model.path or _published(model)
    address = hub.HubName.parse(name)
    found = None if address is not None else _find("model.path", name)
    if found is not None and model.revision is not None:
        with_path = f"{model.revision}, with {name}"
        expected = "a hub id in model.path: local files have no revisions"
        raise ConfigError([Problem("model.revision", with_path, expected, "remove model.revision")])
    single_file = None
    # The source is an address on the hub, a hub id, a local file, or a local folder.
    if address is not None:
        single_file, folder = _open_address(model, address, vae, fetch)
    elif found is None:
        folder = fetch("model.path", name, model.revision, model.variant)
    elif found.kind == "file":
        single_file = _checked_file(found.path)
        folder = _configuration_of(model, single_file, vae, fetch)
    else:
        folder = found.path
    _check_folder("model.path", folder)
    if single_file is not None:
        _check_one_denoiser(folder, single_file)
    if model.variant is not None and single_file is None:
        _check_variant(folder, model.variant)
    return ModelSource(name, folder, single_file, model.variant, vae, text_encoder)


def _open_address(
    model: Model, address: hub.HubName, vae: Path | None, fetch: hub.Fetch
) -> tuple[Path | None, Path]:  # fmt: skip
    """Open an `hf://` or web address, which names a model or one weight file of it. Returns (single file, folder)."""
    revision = model.revision or address.revision
    if address.file is None:
        return None, fetch("model.path", address.name, revision, model.variant)
    if not address.file.endswith(".safetensors"):
        expected = "a .safetensors file of the hub, or a whole model"
        raise ConfigError(
            [Problem("model.path", f"{address.file} of {address.name}", expected, "name the weights' file")]
        )
    file = _checked_file(fetch("model.path", address.name, revision, model.variant, address.file))
    return file, _configuration_of(model, file, vae, fetch)


def find_assistant(model: Model, fetch: hub.Fetch = hub.fetch) -> Path | None:
    """The file of `model.assistant_adapter`; None if the config names none. Downloads what a hub id lacks."""
    name = model.assistant_adapter
    if name is None:
        return None
    address = hub.HubName.parse(name)
    status = None if address is not None else _find(ASSISTANT_KEY, name)
    if status is None:
        address = address or hub.HubName(name)
        wanted = address.file or ASSISTANT_FILE
        file = fetch(ASSISTANT_KEY, address.name, address.revision, None, wanted)
        if not file.is_file():
            hint = f"name the file in the repository: --set {ASSISTANT_KEY}=hf://{address.name}/FILE.safetensors"
            raise ConfigError([Problem(ASSISTANT_KEY, f"{address.name}, which has no {wanted}", "a LoRA", hint)])
        return file
    file = status.path if status.kind == "file" else status.path / ASSISTANT_FILE
    if not file.is_file():
        hint = "give the .safetensors file of the LoRA"
        raise ConfigError(
            [Problem(ASSISTANT_KEY, f"{status.path}: {_describe_content(status.path)}", ASSISTANT_FILE, hint)]
        )
    return file


def elements_of(file: Path) -> int:
    """Number of elements in a weight file, from its header."""
    return sum(math.prod(entry.shape) for entry in open_weights(file).entries.values())


def assistant_elements(model: Model) -> int | None:
    """Elements of a local assistant adapter. None without one, or if its size is unknown without a download."""
    if model.assistant_adapter is None or inspect_path(model.assistant_adapter).kind not in ("file", "folder"):
        return None
    file = find_assistant(model)
    return None if file is None else elements_of(file)


def is_on_disk(model: Model) -> bool:
    """Whether everything a config names is on local disks, so that opening it downloads no weights."""
    names = (model.path or _published(model), model.vae_path, model.text_encoder_path, model.assistant_adapter)
    return all(inspect_path(name).kind in ("file", "folder") for name in names if name is not None)


def _published(model: Model) -> str:
    """The hub id of the published weights of the config's flavour, or of the family's first one."""
    known = flavours(model.family)
    flavour = known[0] if model.flavour is None else find_flavour(model.family, model.flavour)
    if flavour is None:
        names = [one.name for one in known]
        hint = f"--set model.flavour={nearest(model.flavour or '', names) or names[0]}"
        raise ConfigError([Problem("model.flavour", str(model.flavour), ", ".join(names), hint)])
    return flavour.weights


def _find(key: str, name: str) -> PathStatus | None:
    """The file or folder of this name; None if it can only be a hub id. ConfigError for anything else."""
    status = inspect_path(name)
    if status.kind in ("file", "folder"):
        return status
    if status.kind == "nothing" and _HUB_ID.fullmatch(name) and not name.endswith((".safetensors", *PICKLES)):
        return None
    raise ConfigError(
        [Problem(key, f"{name}, {status.words}", _ANY, f"check the spelling of {status.path.absolute()}")]
    )


def _open_part(model: Model, component: str, name: str | None, fetch: hub.Fetch) -> Path | None:
    """The folder of a part that `vae_path` or `text_encoder_path` names: its own, or inside a whole model's folder."""
    if name is None:
        return None
    key = f"model.{component}_path"
    found = _find(key, name)
    if found is not None and found.kind == "file":
        expected = "a folder with config.json and .safetensors weights, or a hub id"
        hint = "convert it with diffusers' from_single_file and save_pretrained, and give that folder"
        raise ConfigError([Problem(key, f"{name}, a file", expected, hint)])
    folder = fetch(key, name, None, model.variant) if found is None else found.path
    whole = (folder / INDEX).is_file() or not (folder / "config.json").is_file()
    part = folder / component if whole else folder
    if not (part / "config.json").is_file():
        expected = f"config.json and .safetensors weights in it, or in a subfolder {component}"
        raise ConfigError(
            [Problem(key, f"{folder}: {_describe_content(folder)}", expected, "give the folder that holds them")]
        )
    return part


# -- folders: each function recognizes one mistake, and returns what was found and a hint ------------------------------


def _check_folder(key: str, folder: Path) -> None:
    if (folder / INDEX).is_file():
        return
    for recognize in _WRONG_KINDS:
        found_and_hint = recognize(folder)
        if found_and_hint is not None:
            found, hint = found_and_hint
            raise ConfigError([Problem(key, f"{folder}: {found}", _LAYOUT, hint)])
    hint = "give the folder above the transformer (or unet), vae and text_encoder subfolders"
    raise ConfigError([Problem(key, f"{folder}: {_describe_content(folder)}", _LAYOUT, hint)])


def _adapter(folder: Path) -> tuple[str, str] | None:
    if not (folder / "adapter_config.json").is_file():
        return None
    return "an adapter saved by peft", f"--set adapter.init_from={folder}, and the base model as model.path"


def _one_part(folder: Path) -> tuple[str, str] | None:
    if not (folder / "config.json").is_file():
        return None
    parent = folder.absolute().parent
    above = f"--set model.path={parent}" if (parent / INDEX).is_file() else "give the folder of the whole model"
    return f"one part of a model ({folder.name}), not a whole one", above


def _hub_cache(folder: Path) -> tuple[str, str] | None:
    if not (folder / "snapshots").is_dir():
        return None
    hub_id = folder.name.removeprefix("models--").replace("--", "/")
    return "the hub's cache of a model", f"--set model.path={hub_id}"


def _part_folders(folder: Path) -> tuple[str, str] | None:
    parts = sorted(path.parent.name for path in folder.glob("*/config.json"))
    if not parts:
        return None
    return f"parts ({', '.join(parts)}) without {INDEX}", f"copy {INDEX} from the published model"


def _files_alone(folder: Path) -> tuple[str, str] | None:
    single = sorted(folder.glob("*.safetensors"))
    if single:
        return f"weights in a single file, {single[0].name}", f"--set model.path={single[0]}"
    pickles = _pickles(folder)
    if pickles:
        return f"pickled weights, {pickles[0].name}", "use the .safetensors files: a pickle can run any code"
    return None


_WRONG_KINDS: tuple[Callable[[Path], tuple[str, str] | None], ...] = (
    _adapter,
    _hub_cache,
    _part_folders,
    _one_part,
    _files_alone,
)


def _pickles(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in PICKLES)


def _describe_content(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"it holds {', '.join(names[:8])}{more}" if names else "it is empty"


def _check_variant(folder: Path, variant: str) -> None:
    """Reject a variant that no part has. A part without it uses its plain files, as in diffusers."""
    files = sorted(path.name for path in folder.glob("*/*.safetensors"))
    if any(hub.has_variant(name, variant) for name in files):
        return
    variants = sorted({found for name in files if (found := hub.variant_of(name)) is not None})
    expected = f"one of {', '.join(variants)}, or none" if variants else "none: this model has no variants"
    hint = f"--set model.variant={variants[0]}" if variants else "remove model.variant"
    raise ConfigError([Problem("model.variant", variant, expected, hint, str(folder))])


# -- single files -----------------------------------------------------------------------------------------------------


def _checked_file(path: Path) -> Path:
    """The path of a single file with weights that can be loaded; ConfigError otherwise."""
    if path.suffix in PICKLES:
        hint = "use the .safetensors file of the same model: a pickle can run any code when it is loaded"
        raise ConfigError([Problem("model.path", f"{path}, pickled weights", _ANY, hint)])
    if path.suffix != ".safetensors":
        raise ConfigError([Problem("model.path", f"{path}, a {path.suffix or 'nameless'} file", _ANY, "convert it")])
    names = open_weights(path).entries
    if names and all(_ADAPTER_KEY.search(name) or name.endswith("alpha") for name in names):
        hint = f"--set adapter.init_from={path}, and the base model as model.path"
        raise ConfigError([Problem("model.path", f"{path}, an adapter", _ANY, hint)])
    foreign = next((name for name in names if name.startswith(_FOREIGN_TEXT)), None)
    if foreign is not None:
        found = f"{path}, which also holds text encoders in an unsupported layout ({foreign})"
        hint = "use a file with only the denoiser; the text encoders then come from the model's folder"
        raise ConfigError([Problem("model.path", found, _ANY, hint)])
    return path


def _configuration_of(model: Model, file: Path, vae: Path | None, fetch: hub.Fetch) -> Path:
    """The folder of the whole model that a single file belongs to. It has the configuration, tokenizers and other
    parts.

    Searched in this order: the file's folder and the one above, the model `vae_path` belongs to, the published model.
    """
    near = [file.absolute().parent, file.absolute().parent.parent, *([vae.absolute().parent] if vae else [])]
    for folder in near:
        if (folder / INDEX).is_file():
            return folder
    published = _published(model)
    try:
        return fetch("model.path", published, model.revision if model.path is None else None, model.variant)
    except ConfigError as error:
        found = f"{file}: weights without a configuration; {error.problems[0].found}"
        expected = f"the other parts of the model next to the weights, as in {published}"
        hint = f"move the file into the folder of the whole model, or {error.problems[0].hint}"
        raise ConfigError([Problem("model.path", found, expected, hint)]) from None


def _check_one_denoiser(folder: Path, file: Path) -> None:
    second = read_json(folder / INDEX).get("transformer_2")
    if isinstance(second, list) and second[0] is not None:
        found = f"{file}: one file, but the model in {folder} has two denoisers"
        hint = f"store both in diffusers' layout and give that folder: --set model.path={folder}"
        raise ConfigError([Problem("model.path", found, "weights of both noise experts", hint)])
