"""Generate images, clips or audio during training: at the start, periodically, and on request.

A request is made with `gracetune validate-now RUN` or the signal SIGUSR1 (`requested.py`).
Validation does not change the training: all state it touches is restored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from PIL import Image
from torch import nn

from gracetune.checkpoint.state_parts import RandomState
from gracetune.checkpoint.store import CheckpointStore
from gracetune.config.run_config import RunConfig
from gracetune.errors import ConfigError
from gracetune.memory.reclaim import trim_heap
from gracetune.models.spec import PartPlacement, Sampled
from gracetune.telemetry.dispatcher import Telemetry
from gracetune.telemetry.events import SampleFile, ValidationDone, Warned
from gracetune.train.control import Control
from gracetune.train.hooks import Callback, RunEnds, RunStarts, StepEnds
from gracetune.train.job import EvaluatedModel, Pauses
from gracetune.train.output import RunFolder
from gracetune.train.prompts import Prompts
from gracetune.train.requested import TakenRequests
from gracetune.train.sample_files import NotWrittenError, contact_sheet, write_sample
from gracetune.train.sample_requests import ConfiguredSample, requests_of
from gracetune.train.view import View


class Sampling(Callback):
    def __init__(
        self, config: RunConfig, folder: RunFolder, model: EvaluatedModel, store: CheckpointStore, control: Control,
        pauses: Pauses, telemetry: Telemetry, view: View, *, room: Callable[[], int], prompts: Prompts | str,
        requested: TakenRequests,
    ) -> None:  # fmt: skip
        """`room` returns how much host memory may still be used. `prompts` holds the prompts' embeddings, or says why
        there are none."""
        self._config, self._folder, self._telemetry, self._view = config, folder, telemetry, view
        self._model, self._store, self._control, self._pauses = model, store, control, pauses
        self._room, self._prompts, self._requests = room, prompts, requested
        self._last_step: int | None = None
        """The step of the last validation in this process."""
        self._kept: Any = None
        """The pipeline of the previous validation. Its parts other than the trained denoisers are in host memory."""
        self._samples = requests_of(config)
        section = config.validation
        timed = section.at_start or section.every_steps or section.every_epochs
        if section.enabled and timed and not self._samples:
            view.warn("validation has no prompts: no samples are generated; add some under validation.prompts")
        if self._samples:
            view.report(f"samples: {prompts.reason if isinstance(prompts, Prompts) else prompts}")
            if not timed:
                view.report(
                    "validation.prompts without an interval: samples are generated on request only (gracetune "
                    "validate-now RUN); for more, set validation.every_steps"
                )

    def start(self, begun: RunStarts) -> None:
        """Generate samples at the start of the run, or those that a killed process still had to generate.

        The latter are tried once only, because generating them may be what killed the process.
        """
        step = begun.position.step
        owed = self._store.unfinished("sampling")
        is_owed = bool(self._model.runtime.highest(int(step in owed)))
        self._store.end_work("sampling", *owed)
        if is_owed or (self._config.validation.at_start and step == 0):
            self._generate(step, requested=False)

    def is_due(self, done: StepEnds) -> bool:
        """Whether a validation follows this step. `Saving` reads this too, to note the samples as unfinished work."""
        section = self._config.validation
        due = section.every_steps is not None and done.step % section.every_steps == 0
        if section.every_epochs is not None:
            due = due or any((ended.epoch + 1) % section.every_epochs == 0 for ended in done.epochs)
        return due and bool(self._samples)

    def step_ends(self, done: StepEnds) -> None:
        requested = self._requests.includes("validate")
        if requested and not self._samples:
            self._view.warn("a validation was requested, but the config has no validation.prompts")
        if requested or self.is_due(done):
            # `Saving` may just have rewound the run to before a failed step, so `done.step` can be too high.
            self._generate(self._model.state.position.step, requested=requested)
            self._store.end_work("sampling", done.step)

    def end(self, ended: RunEnds) -> None:
        """Generate the samples of the last epoch: the loop ends before the loader reports that epoch's end."""
        every, epochs = self._config.validation.every_epochs, self._config.training.epochs
        is_due = every is not None and epochs is not None and epochs % every == 0
        if is_due and ended.stop.kind == "finished" and self._last_step != ended.position.step:
            self._generate(ended.position.step, requested=False)
        self._kept = None

    def _generate(self, step: int, *, requested: bool) -> None:
        with self._pauses.counted():
            self._generate_all(step, requested=requested)

    def _generate_all(self, step: int, *, requested: bool) -> None:
        # All ranks generate with a sharded model. Otherwise rank 0 generates, and the others wait at
        # the next collective between steps, whose time limit is long.
        runtime = self._model.runtime
        if not self._samples or not (runtime.is_main or runtime.is_sharded):
            return
        self._last_step = step
        began = time.monotonic()
        self._model.step.release()  # the memory of captured CUDA graphs
        files: list[SampleFile] = []
        images: list[Image.Image] = []
        phase = self._view.phase(f"samples at step {step}")
        with self._warn_on_failure(step, "samples"), untouched(self._model), phase, self._pipeline() as pipeline:
            for number, sample in enumerate(self._samples):
                self._view.on_sample(step, number, len(self._samples))
                if self._has_to_stop():
                    self._view.report(
                        f"samples at step {step}: {len(self._samples) - number} left out, the run is stopping"
                    )
                    break
                with self._warn_on_failure(step, f"validation.prompts[{sample.prompt}]"):
                    sampled = self._sample(pipeline, sample)
                    if runtime.is_main:
                        files += self._write(step, number, sample, sampled)
                        images += sampled.frames[:1]
        if not runtime.is_main:
            return
        sheet = self._sheet(step, images)
        took = time.monotonic() - began
        event = ValidationDone(step=step, files=tuple(files), sheet=sheet, duration_s=took, requested=requested)
        self._telemetry.emit(event)

    def _has_to_stop(self) -> bool:
        """Whether the run should stop. A cluster scheduler leaves a minute or two, so the other samples are skipped.

        With a sharded model all ranks decide together, because they generate together.
        """
        should_stop, runtime = self._control.stop is not None, self._model.runtime
        return bool(runtime.highest(int(should_stop))) if runtime.is_sharded else should_stop

    def _sheet(self, step: int, images: list[Image.Image]) -> str | None:
        if len(images) < 2:
            return None
        path = self._folder.samples / f"{step:09d}_sheet.png"
        try:
            contact_sheet(path, images)
        except NotWrittenError as error:
            self._warn(step, str(error))
            return None
        return str(path.relative_to(self._folder.path))

    def _write(self, step: int, number: int, sample: ConfiguredSample, sampled: Sampled) -> list[SampleFile]:
        """Write one sample. If that fails, warn and continue training."""
        stem = self._folder.samples / f"{step:09d}_{number:02d}_seed{sample.request.seed}"
        try:
            path, kind = write_sample(stem, sampled, self._config.validation.fps)
        except NotWrittenError as error:
            self._warn(step, str(error))
            return []
        name = str(path.relative_to(self._folder.path))
        return [SampleFile(path=name, kind=kind, prompt=sample.request.prompt, seed=sample.request.seed)]

    def _warn(self, step: int, message: str) -> None:
        """Show a warning, and log it with its step: the event replaces the one without a step that the view queues."""
        self._view.warn(message)
        self._telemetry.emit(Warned(message=message, step=step))

    @contextmanager
    def _warn_on_failure(self, step: int, what: str) -> Iterator[None]:
        """Warn and continue training if something cannot be generated, for example if a reference image was removed.

        With a sharded model the error is raised: the other ranks would wait for this one for ever.
        """
        try:
            yield
        except (ConfigError, OSError) as error:
            if self._model.runtime.is_sharded:
                raise
            self._warn(step, f"{what}: not generated, and training continues: {error}")

    def _sample(self, pipeline: Any, sample: ConfiguredSample) -> Sampled:
        model, request = self._model, sample.with_images()
        if isinstance(self._prompts, Prompts):
            request = self._prompts.with_embeddings(request, model.trained_model.dtype)
        trained_model = model.trained_model
        with ExitStack() as stack:
            stack.enter_context(trained_model.evaluating(sample.strength))
            stack.enter_context(trained_model.unassisted())
            stack.enter_context(model.state.as_delivered())
            stack.enter_context(model.runtime.autocast())
            return trained_model.spec.sample(pipeline, request)

    @contextmanager
    def _pipeline(self) -> Iterator[Any]:
        """A diffusers pipeline with the trained denoisers.

        Its other parts (the VAE, and text encoders if the prompts' embeddings are not cached) stay in host memory until
        the next validation if there is room. If not, they are freed and read from disk again.
        """
        model = self._model
        trained_model = model.trained_model
        pipeline, self._kept = self._kept, None
        if pipeline is None:
            placement = PartPlacement(model.device, trained_model.dtype)
            load = (
                self._prompts.load_pipeline if isinstance(self._prompts, Prompts) else trained_model.spec.load_pipeline
            )
            pipeline = load(trained_model.source, trained_model.components(), placement, trained_model.facts)
        else:
            _move(_other_parts(pipeline, model), model.device)
        try:
            yield pipeline
            others = _other_parts(pipeline, model)
            if _host_bytes(others, model.device) < self._room() // model.runtime.local_world_size:
                _move(others, torch.device("cpu"))
                self._kept = pipeline
            del others
        finally:
            del pipeline
            trim_heap()
            if model.device.type == "cuda":
                torch.cuda.empty_cache()


def _other_parts(pipeline: Any, model: EvaluatedModel) -> list[nn.Module]:
    """The pipeline's modules other than the trained denoisers."""
    ours = {id(module) for module in model.trained_model.components().values()}
    return [part for part in pipeline.components.values() if isinstance(part, nn.Module) and id(part) not in ours]


def _move(parts: Iterable[nn.Module], device: torch.device) -> None:
    for part in parts:
        part.to(device)


def _host_bytes(parts: Iterable[nn.Module], device: torch.device) -> int:
    """Additional host memory needed to keep these parts; 0 on a CPU, where they are in host memory already."""
    if device.type == "cpu":
        return 0
    return sum(tensor.numel() * tensor.element_size() for part in parts for tensor in part.state_dict().values())


@contextmanager
def untouched(model: EvaluatedModel) -> Iterator[None]:
    """Restore all random generators and the active expert after the work inside."""
    generators = RandomState(model.device)
    before = generators.save()
    kept = {name: tensor.clone() for name, tensor in before.tensors.items()}
    host, active = model.trained_model.host, model.trained_model.host.active
    with ExitStack() as stack:
        for name in model.trained_model.trained:
            # A pipeline calls one expert after the other. A parked expert is activated when it is called.
            hook = host.module(name).register_forward_pre_hook(lambda *_, name=name: _activate(model, name))
            stack.callback(hook.remove)
        try:
            yield
        finally:
            if active is not None:
                host.activate(active)
            generators.load(before.json, kept)


def _activate(model: EvaluatedModel, name: str) -> None:
    model.trained_model.host.activate(name)
