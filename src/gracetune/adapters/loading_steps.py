"""How to load a run's adapter in other programs, found by reading the files that the run wrote.

Which program reads which file is in the records of the formats (`formats/programs.py`). Every code block and every
command can be pasted as it is; a test runs them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from gracetune.adapters.adapter_files import OpenedAdapter, open_adapter
from gracetune.adapters.formats.programs import formats_for
from gracetune.adapters.state import AdapterState
from gracetune.config.families import FAMILIES, names_of
from gracetune.config.registry import FULL_FINETUNE, PROGRAMS
from gracetune.errors import GracetuneError
from gracetune.models.hub_download import HubName
from gracetune.models.registry import KEY_MAPS
from gracetune.telemetry.events import RunStarted

_LORA_RANK = 64
_HEADER = """
def header_and_tensors(path):
    with safe_open(path, "pt") as file:
        config = json.loads(file.metadata()["lora_adapter_metadata"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    return [{name.removeprefix("COMPONENT."): value for name, value in part.items()} for part in (config, tensors)]

"""


def loading_steps(start: RunStarted, files: Sequence[Path]) -> dict[str, str]:
    """Program -> instructions or code for the newest of the run's adapter files. Empty if there are none."""
    newest = newest_files(start.run, files)
    if not newest or start.adapter == FULL_FINETUNE:
        return {}
    try:
        opened = [open_adapter(path, start.family if start.family in FAMILIES else None) for path in newest]
        states = [one.state() for one in opened]
    except GracetuneError as error:
        return {newest[0].name: f"The file cannot be read: {error}"}
    reasons = _reasons(opened)
    if not reasons:  # a format of another package
        return {}
    found = _for_comfyui(newest, states, reasons["comfyui"], start.model)
    found |= _for_diffusers(newest, states, reasons, {one.detected.format for one in opened}, start.model)
    others = [PROGRAMS[one] for one in ("musubi", "sd-scripts", "lycoris") if reasons[one] is None]
    if others:
        found["Other programs"] = f"{' and '.join(others)} load{'s' if len(others) == 1 else ''} this file too."
    return found


def newest_files(run: str, files: Sequence[Path]) -> list[Path]:
    """The final file of the run, or the one of its last step. For a model with two experts, both files."""
    found = files_by_step(run, files)
    return found[max(found)] if found else []


def files_by_step(run: str, files: Sequence[Path]) -> dict[float, list[Path]]:
    """The run's adapter files by the step in their names; infinity is the final one. Two experts have two files."""
    named = re.compile(rf"{re.escape(run)}(?:_(\d{{9,}}))?(?:_high_noise|_low_noise)?\.safetensors")
    found: dict[float, list[Path]] = {}
    for path in sorted(files):
        if (match := named.fullmatch(path.name)) is not None:
            found.setdefault(float(match[1] or "inf"), []).append(path)
    return dict(sorted(found.items()))


def _reasons(opened: Sequence[OpenedAdapter]) -> dict[str, str | None]:
    """For every program: None if it loads all files correctly, otherwise the reason. Empty if this is unknown."""
    found = [one.programs() for one in opened]
    if not all(found):
        return {}
    return {name: next((one[name] for one in found if one[name] is not None), None) for name in found[0]}


def _for_comfyui(
    files: Sequence[Path], states: Sequence[AdapterState], reason: str | None, model: str
) -> dict[str, str]:
    if reason is not None:
        return _converted("ComfyUI", "comfyui", files, states, reason, model)
    names = " and ".join(path.name for path in files)
    nodes = 'Add a "Load LoRA (Model Only)" node behind the model loader.'
    if any(state.expert for state in states):
        nodes = (
            'Add one "Load LoRA (Model Only)" node behind each model loader: the high_noise file behind the high-noise '
            "model, the low_noise file behind the low-noise model."
        )
    text = f"Copy {names} into ComfyUI's folder models/loras. {nodes} Strength 1.0 is what was trained."
    return {"ComfyUI": text}


def _for_diffusers(
    files: Sequence[Path], states: Sequence[AdapterState], reasons: Mapping[str, str | None], formats: set[str],
    model: str,
) -> dict[str, str]:  # fmt: skip
    if reasons["diffusers"] is None:
        return {"diffusers": _diffusers_code(files, states, model)}
    if all(formats_for(state, "diffusers") for state in states):
        converted = [path.with_name(f"{path.stem}_diffusers.safetensors") for path in files]
        return {
            "diffusers, first in a shell": _commands("--for diffusers", files, converted),
            "diffusers": _diffusers_code(converted, states, model),
        }
    # Other formats name the layers of the original model, and LyCORIS finds none of them in diffusers' model.
    if reasons["lycoris"] is None and formats == {"lycoris"}:
        return {"diffusers with LyCORIS": _lycoris_code(files, states, model)}
    if all(formats_for(state, "lycoris") for state in states):
        converted = [path.with_name(f"{path.stem}_lycoris.safetensors") for path in files]
        return {
            "diffusers with LyCORIS, first in a shell": _commands("--for lycoris", files, converted),
            "diffusers with LyCORIS": _lycoris_code(converted, states, model),
        }
    return _converted("diffusers", "diffusers", files, states, reasons["diffusers"], model)


def _converted(
    name: str, program: str, files: Sequence[Path], states: Sequence[AdapterState], reason: str, model: str
) -> dict[str, str]:
    """A command that writes a file for the program: the same adapter if possible, otherwise a LoRA that is close."""
    converted = [path.with_name(f"{path.stem}_{program}.safetensors") for path in files]
    if all(formats_for(state, program) for state in states):
        return {f"{name}, in a shell": _commands(f"--for {program}", files, converted)}
    close = f"--for {program} --lora-rank {_LORA_RANK}"
    base = f" --model {shlex.quote(model)}" if model else ""
    return {
        name: f"{name} does not load this file: {reason}. The command below writes the nearest LoRA.",
        f"{name}, in a shell": _commands(close + base, files, converted),
    }


def _commands(options: str, files: Sequence[Path], converted: Sequence[Path]) -> str:
    return "\n".join(
        f"gracetune adapter convert {shlex.quote(str(path))} {options} --output {shlex.quote(str(target))}"
        for path, target in zip(files, converted, strict=True)
    )


def _diffusers_code(files: Sequence[Path], states: Sequence[AdapterState], model: str) -> str:
    keys = KEY_MAPS[states[0].family]
    if not keys.pipeline_loads_lora:
        return _peft_code(files[0], states[0], model)
    imports, pipe = _pipeline(states[0].family, model)
    lines = [*imports, "", pipe]
    for path, state in zip(files, states, strict=True):
        second = ", load_into_transformer_2=True" if state.expert == "low_noise" else ""
        adapter = f", adapter_name={state.expert!r}" if state.expert else ""
        lines.append(f"pipe.load_lora_weights({str(path.parent)!r}, weight_name={path.name!r}{adapter}{second})")
    return "\n".join(lines)


def _peft_code(file: Path, state: AdapterState, model: str) -> str:
    """For families whose pipeline has no `load_lora_weights`."""
    component = KEY_MAPS[state.family].component
    imports, pipe = _pipeline(state.family, model)
    return "\n".join(
        [
            "import json",
            *imports,
            "from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict",
            "from safetensors import safe_open",
            _HEADER.replace("COMPONENT", component),
            pipe,
            f"config, tensors = header_and_tensors({str(file)!r})",
            f"inject_adapter_in_model(LoraConfig(**config), pipe.{component})",
            f"set_peft_model_state_dict(pipe.{component}, tensors)",
        ]
    )


def _lycoris_code(files: Sequence[Path], states: Sequence[AdapterState], model: str) -> str:
    imports, pipe = _pipeline(states[0].family, model)
    lines = [*imports, "from lycoris import create_lycoris_from_weights", "", pipe]
    for path, state in zip(files, states, strict=True):
        component = KEY_MAPS[state.family].component + ("_2" if state.expert == "low_noise" else "")
        lines += [
            f"network, _ = create_lycoris_from_weights(1.0, {str(path)!r}, pipe.{component})",
            "network.apply_to()",
        ]
    return "\n".join(lines)


def _pipeline(family: str, model: str) -> tuple[list[str], str]:
    """The import lines, and the line that loads the base model."""
    address = HubName.parse(model) if model else None
    file = model if address is None else address.file
    if file is not None and file.endswith(".safetensors") and names_of(family).pipelines:
        pipeline = names_of(family).pipelines[0]
        return [f"from diffusers import {pipeline}"], f"pipe = {pipeline}.from_single_file({model!r})"
    name = (model or "MODEL") if address is None else address.name
    return ["from diffusers import DiffusionPipeline"], f"pipe = DiffusionPipeline.from_pretrained({name!r})"
