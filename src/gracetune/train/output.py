"""What a run leaves behind: its folder, and the trained weights in it.

<output_dir>/
  <name>[_<step>][_high_noise|_low_noise].safetensors    adapters; with a step while the run goes on
  <name>[_<step>]/<component>/                           the same of a full fine-tune, in diffusers' layout
  finished-<name>_<step>…     the result of a run that was made longer; nothing removes it
  set-aside-<name>_<step>…    of steps after the one that a run went back to, or began anew from
  config.yaml      the resolved configuration; a run can be started from it again
  checkpoints/     to go on from          samples/   drawn in validation
  logs/            events, TensorBoard    cache/     latents and embeddings, unless put elsewhere
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
from gracetune.adapters.delta import BASE_MAGNITUDE, MAGNITUDE, measured_by_adapted, measured_by_base
from gracetune.adapters.errors import CannotHoldError
from gracetune.adapters.fast.modules import HoldsWeightOtherwise
from gracetune.adapters.formats.registry import FORMATS
from gracetune.adapters.metadata import About, file_name
from gracetune.adapters.state import AdapterState, ExpertStage
from gracetune.adapters.verification import shapes_of, verify
from gracetune.checkpoint.folder import temporary_folder
from gracetune.config.adapter_kinds import AdapterKind
from gracetune.config.export_formats import FormatName
from gracetune.config.native import has_secrets
from gracetune.config.native import write as write_native
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
"""Of a component in diffusers' layout."""
_MODEL_FILES = {"config.json", MODEL_FILE}


class WrongFileError(GracetuneError):
    """A file that the run wrote does not hold what was trained."""


@dataclass(frozen=True)
class RunFolder:
    path: Path
    name: str
    """Of the run: what its files are called after."""

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
        """ConfigError where nothing can be written: said before the model is loaded, not when there is a result.

        Leaves no trace: a run that is refused has made no folder.
        """
        with self.refusing(), temporary_folder(self.path):
            check_writable(self.path)

    @contextmanager
    def provisional(self) -> Iterator[None]:
        """Inside, the folder exists if it can be made: private from its first moment, even if the process is killed.
        Afterwards an empty one is gone, with the empty folders that were made above it."""
        missing: list[Path] = []
        with suppress(OSError):  # `check` reports it
            missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
            make_private_folder(self.path)
        try:
            yield
        finally:
            for path in missing:
                with suppress(OSError):  # it holds something now, or was not made
                    path.rmdir()

    def make_private(self) -> None:
        """A new folder, or one that was made a moment ago (`storage/folders.py`)."""
        with self.refusing():
            make_private_folder(self.path)

    def make(self, config: RunConfig) -> None:
        """The folder and the resolved configuration in it, secrets included: a run can be started from it."""
        with self.refusing():
            for folder in (self.samples, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
            mode = 0o600 if has_secrets(config) else 0o644
            write_file(self.path / CONFIG, write_native(config).encode(), mode=mode)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Before the run has trained anything, what cannot be written is a matter of its settings."""
        try:
            yield
        except OSError as error:
            raise ConfigError([problem_of(error, "output_dir", self.path, elsewhere=_ELSEWHERE, then="")]) from error

    def explained(self, what: str) -> AbstractContextManager[None]:
        """An OSError inside becomes a FileError. `what` could not be written, renamed or removed."""
        then = "then run the same command again: it goes on from the last checkpoint"
        return explained(what, self.path, elsewhere=_ELSEWHERE, then=then)

    def adapter(self, expert: str, step: int | None = None) -> Path:
        return self.path / file_name(self.name, cast(ExpertStage, expert), step)

    def model(self, step: int | None = None) -> Path:
        return self.path / (self.name if step is None else f"{self.name}_{step:09d}")

    def results(self, experts: Iterable[str], step: int | None = None) -> list[Path]:
        """All names under which a finished run leaves its weights."""
        return [*(self.adapter(expert, step) for expert in experts), self.model(step)]

    def steps(self) -> list[int]:
        """Of which there is something in the folder."""
        of_a_step = re.compile(rf"{re.escape(self.name)}_(\d{{9,}})")
        inside = self.path.iterdir() if self.path.is_dir() else ()
        return sorted({int(found[1]) for path in inside if (found := of_a_step.match(path.name))})

    def final_files(self, experts: Iterable[Expert], kind: AdapterKind) -> list[Path]:
        """Of a run that comes to its end."""
        whole = kind == "full_finetune"
        return [self.model() / one.component if whole else self.adapter(one.name) for one in experts]

    def exist(self, files: Iterable[Path]) -> bool:
        """All of them."""
        with self.refusing():
            return all(path.exists() for path in files)

    def reject_finished(self, experts: Iterable[str]) -> None:
        """A run that begins anew must not find the result of another one in its way after hours."""
        with self.refusing():
            finished = [path for path in self.results(experts) if _is_result(path)]
        if finished:
            hint = "--set output_dir=FOLDER or --set name=NAME; or move the file away"
            raise ConfigError([Problem("output_dir", f"{finished[0].name}, the result of a run that ended here",
                                       "a folder without it", hint, str(self.path))])  # fmt: skip

    def set_aside(self, experts: Iterable[str], after: int) -> list[str]:
        """Weights of later steps than the run begins at: it will write its own under these names."""
        notes = []
        with self.explained("weights of later steps not renamed"):
            for path in (path for step in self.steps() if step > after for path in self.results(experts, step)):
                if _is_result(path):
                    kept = _kept("set-aside", path)
                    notes.append(f"{path.name} lies after the step this run begins at; it is now called {kept.name}")
        return notes

    def move_finished(self, experts: Iterable[str], step: int) -> list[str]:
        """A finished run that goes on: its result stays a result, out of reach of `remove_step`."""
        notes = []
        with self.explained("the result not renamed"):
            for old, new in zip(self.results(experts), self.results(experts, step), strict=True):
                if _is_result(old):
                    kept = _kept("finished", old, new.name)
                    notes.append(f"{old.name} was the result at step {step}: it is now called {kept.name}")
        return notes

    def remove_step(self, experts: Iterable[Expert], step: int | None) -> list[str]:
        """The weights of a step, or the final ones, and nothing else. What could not be removed stays, with a note."""
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
        """Those that this run makes or has renamed, of any step."""
        ours = re.compile(rf"((set-aside|finished)-(\d+-)?)?{re.escape(self.name)}(_\d{{9,}})?")
        inside = self.path.iterdir() if self.path.is_dir() else ()
        return [path for path in inside if ours.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]


def _is_result(path: Path) -> bool:
    """A folder that only holds what a killed process left is none, nor one with the name of a file."""
    if path.is_dir():
        return path.suffix != ADAPTER and any(not is_temporary(inside.name) for inside in path.iterdir())
    return path.is_file()


def _kept(why: str, path: Path, name: str | None = None) -> Path:
    """Renamed to `<why>-<name>`; a second one of that name becomes `<why>-2-<name>`."""
    name, number = name or path.name, 1
    target = path.with_name(f"{why}-{name}")
    while target.exists() or target.is_symlink():
        number += 1
        target = path.with_name(f"{why}-{number}-{name}")
    return path.rename(target)


def _remove_model(folder: Path, components: Iterable[str]) -> None:
    """The components; the folder with them, unless something else is in it."""
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
    """All experts' files. Every rank calls it; the one that is told to writes. A file of the same step stays."""
    named = None if final else step
    paths = []
    for expert in trained_model.trained:
        if config.adapter.kind == "full_finetune":
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
    """An expert's adapter as that format's readers understand it. A collective where the model is shared out.

    ComfyUI measures DoRA's magnitudes against the base weights, which are at hand here (`delta.measured_by_base`).
    """
    state = trained_model.attached[expert].state()
    if name != "comfyui" or not any(MAGNITUDE in layer.tensors for layer in state.layers.values()):
        return state
    denoiser = trained_model.host.module(expert)
    layers = {path: measured_by_base(layer, base_weight(denoiser, path)) for path, layer in state.layers.items()}
    return replace(state, layers=layers)


@torch.no_grad()
def from_format(trained_model: TrainedModel, expert: ExpertName, name: FormatName, state: AdapterState) -> AdapterState:
    """The inverse of `for_format`: what a file holds, as it is trained. A collective where the model is shared out."""
    if name != "comfyui":
        return state
    ending, denoiser = f".{MAGNITUDE}", trained_model.host.module(expert)
    paths = [own.removesuffix(ending) for own in trained_model.attached[expert].parameters() if own.endswith(ending)]
    layers = dict(state.layers)
    for path in paths:  # the same on every rank, whatever the file holds
        weight = base_weight(denoiser, path)
        if path in layers:
            layers[path] = measured_by_adapted(layers[path], weight)
    return replace(state, layers=layers)


def base_weight(denoiser: nn.Module, path: str) -> torch.Tensor:
    """Of a layer below its adapter: modules that take a layer's place keep it as their `base_layer`."""
    layer = denoiser.get_submodule(path)
    base: Any = dict(layer.named_children()).get("base_layer", layer)
    held: torch.Tensor = base.plain_weight() if isinstance(base, HoldsWeightOtherwise) else base.weight
    return whole(held)


def checkpoint_bytes(shapes: Iterable[Sequence[int]]) -> int:
    """About what one checkpoint takes: the weights, two averages of an optimizer, and the file to load.

    Of trained parameters with these shapes, which are all in float32 (`gradients.FlatGradients`).
    """
    return 4 * 4 * sum(math.prod(shape) for shape in shapes)


def check_format(trained_model: TrainedModel, config: RunConfig) -> tuple[str, ...]:
    """Whether the adapters fit into their files' format: asked before the first step, not after the last.

    What there is to say about such files.
    """
    if config.adapter.kind == "full_finetune":
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
        expected = f"one of {', '.join(others)}" if others else "a kind of adapter that some format has a place for"
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
    """A component's folder in diffusers' layout; appears whole and on disk, or not at all."""
    tensors = {name: whole(tensor) for name, tensor in denoiser.state_dict().items()}
    if not write or folder.exists():
        return
    kept = cast(Any, denoiser)._keep_in_fp32_modules or []
    kept = {kept} if isinstance(kept, str) else set(kept)

    def cast_to(name: str, tensor: torch.Tensor) -> torch.Tensor:
        keep = not tensor.is_floating_point() or not kept.isdisjoint(name.split("."))
        return tensor.to("cpu", tensor.dtype if keep else dtype).contiguous()

    folder.parent.mkdir(parents=True, exist_ok=True)
    sync_folder(folder.parent.parent)
    sweep_folders(folder.parent)  # of a process that was killed here; the run's lock keeps others out
    with new_folder(folder) as temporary:
        cast(Any, denoiser).save_config(str(temporary))
        saved = {name: cast_to(name, tensor) for name, tensor in tensors.items()}
        write_new(temporary / MODEL_FILE, file_chunks(saved, {"format": "pt"}))


def verify_weights(trained_model: TrainedModel, config: RunConfig, paths: Iterable[Path]) -> list[str]:
    """Read every file again as anyone would, and lay it beside the model. A line for each; a wrong one raises."""
    if config.adapter.kind == "full_finetune":
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
