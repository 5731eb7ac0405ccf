"""The output folder of a run, and the trained weights in it.

<output_dir>/
  <name>[_<step>][_high_noise|_low_noise].safetensors    adapters; with a step until the run is finished
  <name>[_<step>]/<component>/                           weights of a full fine-tune, in diffusers' layout
  finished-<name>_<step>…     the result of a run that was extended; never removed automatically
  set-aside-<name>_<step>…    weights of steps after the one that a run was resumed or restarted from
  config.yaml      the resolved config, from which the run can be started again
  checkpoints/     state to resume from   samples/   generated in validation
  report.html, report.json   what happened in the run     report/   sections that commands add
  logs/            events, TensorBoard    cache/     latents and embeddings, unless configured elsewhere
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from gracetune import __version__
from gracetune.adapters.adapter_files import open_adapter, save
from gracetune.adapters.delta import BASE_MAGNITUDE, MAGNITUDE, with_base_magnitude, with_trained_magnitude
from gracetune.adapters.errors import CannotHoldError
from gracetune.adapters.fast.modules import HoldsWeightOtherwise
from gracetune.adapters.formats.record import FORMATS
from gracetune.adapters.metadata import About, file_name
from gracetune.adapters.state import AdapterState, ExpertStage
from gracetune.adapters.verification import shapes_of, verify
from gracetune.checkpoint.folder import temporary_folder
from gracetune.config.native import has_secrets
from gracetune.config.native import write as write_native
from gracetune.config.registry import FULL_FINETUNE, AdapterKind, FormatName
from gracetune.config.run_config import RunConfig
from gracetune.errors import ConfigError, GracetuneError, Problem
from gracetune.models.spec import Expert, ExpertName
from gracetune.storage.atomic import (
    check_writable,
    is_temporary,
    new_folder,
    sweep_folders,
    sync_folder,
    write_file,
    write_new,
)
from gracetune.storage.folders import make_private_folder
from gracetune.storage.os_errors import explain, explained, problem_of
from gracetune.storage.safetensors_files import file_chunks
from gracetune.train.export_checks import about_other_programs
from gracetune.train.state_parts import whole
from gracetune.train.trained_model import TrainedModel

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CONFIG = "config.yaml"
ADAPTER = ".safetensors"
_ELSEWHERE = "--set output_dir=FOLDER"
MODEL_FILE = "diffusion_pytorch_model.safetensors"
"""The weights of a component in diffusers' layout."""
_MODEL_FILES = {"config.json", MODEL_FILE}


class WrongFileError(GracetuneError):
    """A file that the run wrote does not hold what was trained."""


@dataclass(frozen=True)
class RunFolder:
    """The paths in a run's output folder, and the operations on its weights."""

    path: Path
    name: str
    """The run's name, with which its files begin."""

    @classmethod
    def of(cls, config: RunConfig) -> RunFolder:
        return cls(Path(config.output_dir).expanduser().absolute(), config.name)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def check(self) -> None:
        """Raise ConfigError if the folder is not writable. Leaves no trace: a rejected run creates no folder."""
        with self.config_errors(), temporary_folder(self.path):
            check_writable(self.path)

    @contextmanager
    def provisional(self) -> Iterator[None]:
        """Inside, the folder exists if it can be created. It is private from the start, even if the process is killed.

        Afterwards it is removed if it is empty, and so are the empty parents that were created for it.
        """
        missing: list[Path] = []
        with suppress(OSError):  # `check` reports it
            missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
            make_private_folder(self.path)
        try:
            yield
        finally:
            for path in missing:
                with suppress(OSError):  # it is not empty, or was not created
                    path.rmdir()

    def make_private(self) -> None:
        """Make a folder that was just created accessible to its owner only (`storage/folders.py`)."""
        with self.config_errors():
            make_private_folder(self.path)

    def make(self, config: RunConfig) -> None:
        """Create the folder and write the resolved config, secrets included, so that a run can be started from it."""
        with self.config_errors():
            for folder in (self.samples, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
            mode = 0o600 if has_secrets(config) else 0o644
            write_file(self.path / CONFIG, write_native(config).encode(), mode=mode)

    @contextmanager
    def config_errors(self) -> Iterator[None]:
        """Inside, an OSError becomes a ConfigError about `output_dir`. For use before training starts."""
        try:
            yield
        except OSError as error:
            raise ConfigError([problem_of(error, "output_dir", self.path, elsewhere=_ELSEWHERE, then="")]) from error

    def explained(self, what: str) -> AbstractContextManager[None]:
        """Inside, an OSError becomes a FileError. `what` says what was not written, renamed or removed."""
        then = "then run the same command again: it resumes from the last checkpoint"
        return explained(what, self.path, elsewhere=_ELSEWHERE, then=then)

    def adapter(self, expert: str, step: int | None = None) -> Path:
        return self.path / file_name(self.name, cast(ExpertStage, expert), step)

    def model(self, step: int | None = None) -> Path:
        return self.path / (self.name if step is None else f"{self.name}_{step:09d}")

    def results(self, experts: Iterable[str], step: int | None = None) -> list[Path]:
        """All paths that the weights of a run may have, final or of a step."""
        return [*(self.adapter(expert, step) for expert in experts), self.model(step)]

    def steps(self) -> list[int]:
        """The steps of which the folder holds weights."""
        of_a_step = re.compile(rf"{re.escape(self.name)}_(\d{{9,}})")
        inside = self.path.iterdir() if self.path.is_dir() else ()
        return sorted({int(found[1]) for path in inside if (found := of_a_step.match(path.name))})

    def final_files(self, experts: Iterable[Expert], kind: AdapterKind) -> list[Path]:
        """The paths of the final weights."""
        whole = kind == FULL_FINETUNE
        return [self.model() / one.component if whole else self.adapter(one.name) for one in experts]

    def has_all(self, files: Iterable[Path]) -> bool:
        """Whether all of the files exist."""
        with self.config_errors():
            return all(path.exists() for path in files)

    def reject_finished(self, experts: Iterable[str]) -> None:
        """Raise ConfigError if the folder holds the result of a finished run, which a new run would have to replace."""
        with self.config_errors():
            finished = [path for path in self.results(experts) if _is_result(path)]
        if finished:
            hint = "--set output_dir=FOLDER or --set name=NAME; or move the file away"
            raise ConfigError([Problem("output_dir", f"{finished[0].name}, the result of a run that ended here",
                                       "a folder without it", hint, str(self.path))])  # fmt: skip

    def set_aside(self, experts: Iterable[str], after: int) -> list[str]:
        """Rename weights of steps after `after`, because the run will write its own under these names."""
        notes = []
        with self.explained("weights of later steps not renamed"):
            for path in (path for step in self.steps() if step > after for path in self.results(experts, step)):
                if _is_result(path):
                    kept = _rename("set-aside", path)
                    notes.append(f"{path.name} lies after the step this run begins at; it is now called {kept.name}")
        return notes

    def move_finished(self, experts: Iterable[str], step: int) -> list[str]:
        """Rename the result of a finished run that is extended, so that `remove_step` never removes it."""
        notes = []
        with self.explained("the result not renamed"):
            for old, new in zip(self.results(experts), self.results(experts, step), strict=True):
                if _is_result(old):
                    kept = _rename("finished", old, new.name)
                    notes.append(f"{old.name} was the result at step {step}: it is now called {kept.name}")
        return notes

    def remove_step(self, experts: Iterable[Expert], step: int | None) -> list[str]:
        """Remove the weights of a step, or the final ones (None). Return notes about what could not be removed."""
        experts, notes = [*experts], []
        try:
            for path in (self.adapter(one.name, step) for one in experts):
                if path.is_file() and not path.is_symlink():
                    path.unlink()
            _remove_model(self.model(step), [one.component for one in experts])
        except OSError as error:
            which = "final weights" if step is None else f"weights of step {step}"
            notes.append(f"{which} could not be removed: {explain(error, self.path).found}")
        return notes

    def model_folders(self) -> list[Path]:
        """The folders of full fine-tunes that this run has written or renamed, of any step."""
        ours = re.compile(rf"((set-aside|finished)-(\d+-)?)?{re.escape(self.name)}(_\d{{9,}})?")
        inside = self.path.iterdir() if self.path.is_dir() else ()
        return [path for path in inside if ours.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]


def _is_result(path: Path) -> bool:
    """Whether weights are at this path. A folder with temporary files only, or with a file's name, does not count."""
    if path.is_dir():
        return path.suffix != ADAPTER and any(not is_temporary(inside.name) for inside in path.iterdir())
    return path.is_file()


def _rename(why: str, path: Path, name: str | None = None) -> Path:
    """Rename to `<why>-<name>`, or to `<why>-2-<name>` and so on if that exists."""
    name, number = name or path.name, 1
    target = path.with_name(f"{why}-{name}")
    while target.exists() or target.is_symlink():
        number += 1
        target = path.with_name(f"{why}-{number}-{name}")
    return path.rename(target)


def _remove_model(folder: Path, components: Iterable[str]) -> None:
    """Remove the components, and then the folder if it is empty. Components with unknown files are kept."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for component in components:
        part = folder / component
        if part.is_dir() and not part.is_symlink() and {path.name for path in part.iterdir()} <= _MODEL_FILES:
            shutil.rmtree(part)
    if not any(folder.iterdir()):
        folder.rmdir()


def save_weights(
    trained_model: TrainedModel, config: RunConfig, folder: RunFolder, step: int, *, final: bool, write: bool
) -> list[Path]:  # fmt: skip
    """Write the weights of all experts and return their paths. Existing files of the same step are kept.

    Every rank calls this, because sharded weights are gathered; only the rank with `write` writes.
    """
    named = None if final else step
    paths = []
    for expert in trained_model.trained:
        if config.adapter.is_full_finetune:
            path = folder.model(named) / _component(trained_model, expert)
            with folder.explained(f"{path.relative_to(folder.path)} not written"):
                _save_model(trained_model.host.module(expert), path, DTYPES[config.checkpoints.save_dtype], write=write)
        else:
            path = folder.adapter(expert, named)
            state = for_format(trained_model, expert, config.checkpoints.format)
            with folder.explained(f"{path.name} not written"):
                if write and not path.exists():
                    _save_adapter(path, state, config, step)
        paths.append(path)
    return paths


@torch.no_grad()
def for_format(trained_model: TrainedModel, expert: ExpertName, name: FormatName) -> AdapterState:
    """An expert's adapter as readers of that format expect it. With a sharded model this is a collective.

    ComfyUI expects DoRA's magnitudes relative to the base weights, so they are converted here, where the base weights
    are loaded (`delta.with_base_magnitude`).
    """
    state = trained_model.attached[expert].state()
    if not FORMATS[name].dora_by_base or not any(MAGNITUDE in layer.tensors for layer in state.layers.values()):
        return state
    denoiser = trained_model.host.module(expert)
    layers = {path: with_base_magnitude(layer, base_weight(denoiser, path)) for path, layer in state.layers.items()}
    return replace(state, layers=layers)


@torch.no_grad()
def from_format(trained_model: TrainedModel, expert: ExpertName, name: FormatName, state: AdapterState) -> AdapterState:
    """The inverse of `for_format`: the adapter of a file, as it is trained. With a sharded model, a collective."""
    if not FORMATS[name].dora_by_base:
        return state
    ending, denoiser = f".{MAGNITUDE}", trained_model.host.module(expert)
    paths = [own.removesuffix(ending) for own in trained_model.attached[expert].parameters() if own.endswith(ending)]
    layers = dict(state.layers)
    for path in paths:  # equal on every rank, whatever the file holds, because `base_weight` is a collective
        weight = base_weight(denoiser, path)
        if path in layers:
            layers[path] = with_trained_magnitude(layers[path], weight)
    return replace(state, layers=layers)


def base_weight(denoiser: nn.Module, path: str) -> torch.Tensor:
    """The base weight of an adapted layer. Adapter modules that replace a layer keep it as `base_layer`."""
    layer = denoiser.get_submodule(path)
    base: Any = dict(layer.named_children()).get("base_layer", layer)
    held: torch.Tensor = base.plain_weight() if isinstance(base, HoldsWeightOtherwise) else base.weight
    return whole(held)


def checkpoint_bytes(shapes: Iterable[Sequence[int]], *, has_masters: bool) -> int:
    """Approximate size of a checkpoint with trained parameters of these shapes.

    It holds four values for each parameter: the weight, two optimizer averages and the exported weight. Each takes at
    most four bytes, because trained parameters are in float32 (`gradients.FlatGradients`). An optimizer with masters
    of 16-bit weights saves those too, and the weight takes two bytes.
    """
    return (2 + 4 * 4 if has_masters else 4 * 4) * sum(math.prod(shape) for shape in shapes)


def check_format(trained_model: TrainedModel, config: RunConfig) -> tuple[str, ...]:
    """Check, before the first step, that the export format can hold the adapters. Return notes about the files."""
    if config.adapter.is_full_finetune:
        return ()
    dtype, name = DTYPES[config.checkpoints.save_dtype], config.checkpoints.format
    by_base = False
    try:
        for expert in trained_model.trained:
            state = for_format(trained_model, expert, name)
            FORMATS[name].write(state, dtype)
            by_base = by_base or any(BASE_MAGNITUDE in layer.tensors for layer in state.layers.values())
    except CannotHoldError as error:
        others = [name for name in FORMATS if _holds(name, trained_model, dtype)]
        hint = f"--set checkpoints.format={others[0]}" if others else "--set adapter.kind=lora"
        found = f"{config.checkpoints.format}: {error.problems[0].found}"
        expected = f"one of {', '.join(others)}" if others else "a kind of adapter that some format can represent"
        raise ConfigError([Problem("checkpoints.format", found, expected, hint)]) from None
    about = about_other_programs(trained_model.attached[trained_model.trained[0]].state(), config.checkpoints)
    return (_FOR_COMFYUI_ALONE, *about) if by_base else about


_FOR_COMFYUI_ALONE = (
    "DoRA's magnitudes are written as ComfyUI reads them, measured against this base model: files for ComfyUI alone. "
    "For diffusers, or to start another run from: --set checkpoints.format=diffusers"
)


def _holds(name: FormatName, trained_model: TrainedModel, dtype: torch.dtype) -> bool:
    try:
        for expert in trained_model.trained:
            FORMATS[name].write(for_format(trained_model, expert, name), dtype)
    except CannotHoldError:
        return False
    return True


def _save_adapter(path: Path, state: AdapterState, config: RunConfig, step: int) -> None:
    training = {
        "steps": step,
        "adapter": config.adapter.kind,
        "optimizer": config.optimizer.name,
        "lr": config.optimizer.lr,
        "seed": config.training.seed,
        "gracetune": __version__,
    }
    about = About(title=path.stem, date=datetime.now(UTC).strftime("%Y-%m-%d"), training=training)
    save(path, state, config.checkpoints.format, DTYPES[config.checkpoints.save_dtype], about)


def _component(trained_model: TrainedModel, expert: ExpertName) -> str:
    return next(one.component for one in trained_model.facts.experts if one.name == expert)


def _save_model(denoiser: nn.Module, folder: Path, dtype: torch.dtype, *, write: bool) -> None:
    """Write a component's folder in diffusers' layout, atomically."""
    tensors = {name: whole(tensor) for name, tensor in denoiser.state_dict().items()}
    if not write or folder.exists():
        return
    kept = cast(Any, denoiser)._keep_in_fp32_modules or []
    kept = {kept} if isinstance(kept, str) else set(kept)

    def cast_to(name: str, tensor: torch.Tensor) -> torch.Tensor:
        keep = not tensor.is_floating_point() or not kept.isdisjoint(name.split("."))
        # Tensors of the right type stay where they are: the file is written tensor by tensor.
        return tensor if keep or tensor.dtype == dtype else tensor.to("cpu", dtype)

    folder.parent.mkdir(parents=True, exist_ok=True)
    sync_folder(folder.parent.parent)
    sweep_folders(folder.parent)  # temporary folders of a killed process; the run's lock keeps other runs out
    with new_folder(folder) as temporary:
        cast(Any, denoiser).save_config(str(temporary))
        saved = {name: cast_to(name, tensor) for name, tensor in tensors.items()}
        write_new(temporary / MODEL_FILE, file_chunks(saved, {"format": "pt"}))


def verify_weights(trained_model: TrainedModel, config: RunConfig, paths: Iterable[Path]) -> list[str]:
    """Read every file back as any program would, and compare its layers with the model's. Return a line for each file.

    Raises GracetuneError if a file does not fit. The weights of a full fine-tune are not checked here.
    """
    if config.adapter.is_full_finetune:
        return []
    lines = []
    experts = {expert.name: expert for expert in trained_model.facts.experts}
    for path, name in zip(paths, trained_model.trained, strict=True):
        lines.append(_verified(path, trained_model, experts[name]))
    return lines


def _verified(path: Path, trained_model: TrainedModel, expert: Expert) -> str:
    opened = open_adapter(path, trained_model.facts.family)
    shapes = shapes_of(trained_model.spec.build_denoiser(trained_model.source, expert))
    reports = verify(opened.reading, {cast(ExpertStage, expert.name): shapes})
    wrong = [report for report in reports if not report.ok]
    if wrong:
        found = wrong[0]
        first = [*found.missing, *found.unexpected, *found.mismatched, *found.not_finite, "no layer at all"][0]
        raise GracetuneError(f"{path} was written and does not fit its own model: {first}. Please report this")
    matched = sum(len(report.matched) for report in reports)
    return f"{path.name}: {matched} layers, all of them fit"
