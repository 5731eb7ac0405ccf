"""Instructions for loading a run's files in ComfyUI and diffusers, derived from the file names."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from gracetune.telemetry.events import RunStarted

_HIGH, _LOW = "_high_noise.safetensors", "_low_noise.safetensors"
_PEFT_KINDS = ("lora", "dora")


def find_outputs(run_folder: Path) -> tuple[str, ...]:
    """The adapter files in a run's folder, for a run whose `RunEnded` names no outputs."""
    found = [*run_folder.glob("*.safetensors"), *run_folder.glob("adapters/*.safetensors")]
    return tuple(sorted(path.relative_to(run_folder).as_posix() for path in found))


def how_to_load(start: RunStarted, outputs: Sequence[str], run_folder: Path) -> dict[str, str]:
    """Program -> instructions; empty if the run has no adapter file."""
    files = _newest([name for name in outputs if name.endswith(".safetensors")])
    if not files or start.adapter == "full_finetune":
        return {}
    return {"ComfyUI": _comfyui(files), "diffusers": _diffusers(start, files, run_folder)}


def _newest(files: list[str]) -> list[str]:
    """The last pair of expert files, or the last file. The others are from earlier steps."""
    if not files:
        return []
    last = files[-1]
    for ending, other in ((_HIGH, _LOW), (_LOW, _HIGH)):
        if last.endswith(ending):
            pair = last.removesuffix(ending) + other
            return sorted({last, pair} & set(files))
    return [last]


def _comfyui(files: list[str]) -> str:
    names = " and ".join(PurePosixPath(name).name for name in files)
    text = f"Copy {names} into ComfyUI's folder models/loras. "
    if any(name.endswith((_HIGH, _LOW)) for name in files):
        return text + (
            'Add one "Load LoRA (Model Only)" node behind each model loader: the high_noise file behind the high-noise '
            "model, the low_noise file behind the low-noise model. Strength 1.0 is what was trained."
        )
    return text + 'Add a "Load LoRA (Model Only)" node behind the model loader. Strength 1.0 is what was trained.'


def _diffusers(start: RunStarted, files: list[str], run_folder: Path) -> str:
    if start.adapter and start.adapter not in _PEFT_KINDS:
        model = f" --model {shlex.quote(start.model)}" if start.model else ""
        lines = [f"diffusers loads LoRA files only, and this is {start.adapter}. Make the closest LoRA of it:", ""]
        lines += [
            f"    gracetune adapter convert {shlex.quote(str(run_folder / name))} --to diffusers --lora-rank 64{model}"
            for name in files
        ]
        return "\n".join([*lines, "", "or merge it into the model's weights with --merge-into MODEL --output FOLDER."])
    lines = [
        "    from diffusers import DiffusionPipeline",
        "",
        f"    pipe = DiffusionPipeline.from_pretrained({start.model or 'MODEL'!r})",
    ]
    for name in files:
        path = run_folder / name
        second = ", load_into_transformer_2=True" if name.endswith(_LOW) else ""
        lines.append(f"    pipe.load_lora_weights({str(path.parent)!r}, weight_name={path.name!r}{second})")
    return "\n".join(lines)
