"""The self-check of a run: training has an effect, and the saved files reproduce it.

An expert is checked after its first three applied steps: its denoiser's output for the first batch must differ from
what it was before the first step. A new adapter is the identity, so that was the base model's output, and the
difference is the adapter's effect. After a resume or with `init_from` it is what was learned since. Either way only the
adapter's values have changed, so they reach the output. Layers that still change nothing are named in a warning. The
first file of each expert is read back into the trained layers: every tensor must be the trained one in the file's
precision.

The output before the first step comes from the first batch (`first_batch.ReferenceBatch`). It runs twice anyway, which
shows the difference of two equal passes. The check adds one forward pass of a training step for each expert. It reuses
the step's graphs, so nothing is compiled or captured for it, and it takes the memory of a step at most. If the effect
of three steps is below the model's precision, one or two passes are added (`_FACTORS`). No random generator is
advanced, and all parameters are restored bit for bit.

A full fine-tune needs no pass: its weights must have changed, and some tensors of its file are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import torch
from torch import Tensor, nn

from gracetune.adapters.adapter_files import open_adapter
from gracetune.adapters.attach import Attached, LayerTensors
from gracetune.adapters.delta import MAGNITUDE
from gracetune.adapters.layer import local_shard
from gracetune.adapters.targets import matches_path
from gracetune.config.run_config import RunConfig
from gracetune.errors import GracetuneError, Problem
from gracetune.models.experts import next_expert
from gracetune.models.spec import ExpertName
from gracetune.optim.chunked_adamw import ChunkedAdamW
from gracetune.storage.safetensors_files import SafetensorError, open_tensors
from gracetune.telemetry.dispatcher import Telemetry
from gracetune.telemetry.events import SelfChecked, Warned
from gracetune.train.control import Control
from gracetune.train.first_batch import ReferenceBatch
from gracetune.train.hooks import Callback, RunStarts, StepEnds
from gracetune.train.job import EvaluatedModel, Pauses
from gracetune.train.output import DTYPES, MODEL_FILE, RunFolder, WrongFileError, from_format
from gracetune.train.state_parts import whole
from gracetune.train.view import View

T = TypeVar("T")

STEPS: Final = 3
"""Applied steps of an expert before its check: the first step of LoRA changes B alone, the second A too."""
_FACTORS: Final = (1.0, 2.0**10, 2.0**20)
"""The change of three warm-up steps may be below the precision of bf16. Then the adapter is amplified by these factors:
one that is connected to the model has an effect at some factor, any other at none."""
_NOISE: Final = 2.0
"""An effect is a change above this many times the difference of two equal passes. That difference is 0 where kernels
repeat their results bit for bit, as most kernels of forward passes do."""
_CLOSE: Final = 2.0**-12
"""The largest relative difference of a tensor read back from the trained one, rounded to the file's precision. They are
equal bit for bit unless a format stores them in another form, which is computed in float32."""
_COMPARED: Final = 16
"""Number of tensors of a full fine-tune that are read back."""
_SHOWN: Final = 8
"""Number of names that a message lists."""


@dataclass(eq=False)
class _Expert:
    """What is known about one expert's adapter."""

    steps: int = 0
    """Steps with a learning rate above 0."""
    steps_without_rate: int = 0
    """Steps with a learning rate of 0 that the config sets."""
    check_at: int = STEPS
    """The number of steps at which the device is read to see how many of them were applied."""
    applied: Tensor | None = None
    """On the device: steps that were not skipped and had a loss. A loss of 0 teaches nothing: all of the samples are
    masked, or the target is the base model's prediction and the adapter has learned nothing yet."""
    begins_as_base: bool = True
    """When this process began, the adapter changed nothing."""
    judged: bool = False
    effect: str = ""
    """A description of the adapter's effect, once it is checked."""
    file: str = ""
    """The difference between the file and the trained values as text, once it is checked."""
    sums: Tensor | None = None
    """Bit sums of a full fine-tune's tensors when the run began."""


class SelfCheck(Callback):
    """All ranks run the same passes and reach the same result, because a sharded model needs all of them."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, model: EvaluatedModel, example: ReferenceBatch, control: Control,
        pauses: Pauses, telemetry: Telemetry, view: View, *, steps: int,
    ) -> None:  # fmt: skip
        """`example` is the input of the passes. `steps` is the length of the whole run."""
        self._config, self._folder, self._telemetry, self._view = config, folder, telemetry, view
        self._model, self._example, self._control, self._pauses = model, example, control, pauses
        self._steps = steps
        self._is_full = config.adapter.is_full_finetune
        if self._is_full:
            example.release()
        self._experts = {name: _Expert() for name in model.trained_model.trained}
        self._rates: dict[ExpertName, float] = {}
        self._begins_anew = True
        self._is_over = False
        """The check is complete and reported, or the run is being stopped."""

    def start(self, begun: RunStarts) -> None:
        self._rates = _rates(self._model, "lr")
        self._begins_anew = begun.position.step == 0
        for name, expert in self._experts.items():
            if self._is_full:
                expert.sums = _bit_sums(self._model.trained_model.attached[name])
            else:
                expert.begins_as_base = not any(self._learned_layers(name).values())

    def step_ends(self, done: StepEnds) -> None:
        expert, rate = self._experts[done.expert], self._rates[done.expert]
        self._rates = _rates(self._model, "lr")  # the schedule is at the next step already
        if expert.judged or self._is_over:
            return
        if rate == 0:
            self._count_without_rate(done.expert, expert)
            return
        counts = (1.0 - done.skipped) * (done.loss != 0)
        expert.applied = counts if expert.applied is None else expert.applied + counts
        expert.steps += 1
        if expert.steps >= expert.check_at and not self._should_wait(done):
            with self._pauses.counted():
                self._judge(done, expert)

    def _should_wait(self, done: StepEnds) -> bool:
        """Whether to check later: if this expert leaves the device after this step, it would have to come back for the
        check."""
        every, trained_model = self._config.model.switch_experts_every, self._model.trained_model
        return (
            trained_model.host.moves
            and every > 1
            and next_expert(done.step - 1, every, trained_model.trained) is not None
        )

    def _count_without_rate(self, name: ExpertName, expert: _Expert) -> None:
        """A warm-up begins at 0 and rises; a rate that is 0 in the config stays 0."""
        expert.steps_without_rate += _rates(self._model, "initial_lr")[name] == 0
        if expert.steps_without_rate == STEPS:
            expected = "a rate above 0: at 0 nothing is learned, and the saved files change nothing"
            self._stop(Problem(f"optimizer.lr{_of(name)}", "0", expected, "--set optimizer.lr=1e-4"))

    def _stop(self, problem: Problem) -> None:
        self._is_over = True
        self._control.ask_to_stop("failed", str(problem))

    # -- the adapter ---------------------------------------------------------------------------------------------------

    def _judge(self, done: StepEnds, expert: _Expert) -> None:
        assert expert.applied is not None, "steps were counted"
        applied = self._model.runtime.highest(int(expert.applied.item()))
        if applied < STEPS:
            expert.check_at = expert.steps + STEPS - applied
            return
        expert.judged = True
        self._model.state.wait_for_updates()
        event = self._judge_weights(done, expert) if self._is_full else self._judge_adapter(done, expert)
        if event is None:
            return
        if event.idle:
            self._warn(
                f"self-check: {len(event.idle)} of {event.layers:,} layers{_of(done.expert)} have learned nothing "
                f"after {STEPS} steps, no gradient reaches them: {_listed(event.idle)}. "
                "--set 'adapter.exclude=[...]' omits them",
            )
        self._telemetry.emit(event)
        self._report_when_complete()

    def _judge_adapter(self, done: StepEnds, expert: _Expert) -> SelfChecked | None:
        learned = self._learned_layers(done.expert)
        idle = tuple(path for path, has_learned in learned.items() if not has_learned)
        if len(idle) == len(learned):
            self._stop(_nothing_learned(self._model, done, f"all {len(idle):,} layers are unchanged"))
            return None
        measured = self._with_room(lambda: self._measure(done.expert))
        if all(one.judged for one in self._experts.values()):
            self._example.release()
        if measured is None:
            return None
        change, factor = measured
        if not factor:
            self._stop(
                Problem(
                    _problem_key(done.expert),
                    "its values have changed, but the denoiser's output is the same as before the first step",
                    "an adapter that changes the denoiser's output",
                    "other layers: --set 'adapter.targets=[...]'; if these are the right ones, please report this",
                ),
            )
            return None
        expert.effect = f"by {change:.1e}"
        if factor > 1:
            expert.effect = f"by {change:.1e} at {factor:,.0f} times its strength (at its own: below the precision)"
        return SelfChecked(
            step=done.step, expert=done.expert, layers=len(learned), idle=idle, change=change, amplified=factor
        )

    def _learned_layers(self, name: ExpertName) -> dict[str, bool]:
        """By layer, whether it changes anything."""
        acting = self._model.trained_model.attached[name].zero_initialized()
        owners = [path for path, some in acting.items() for _ in some]
        largest = _read(self._model, _largest([one for some in acting.values() for one in some]))
        found = dict.fromkeys(acting, False)
        for path, value in zip(owners, largest, strict=True):
            found[path] |= value != 0
        return found

    def _measure(self, name: ExpertName) -> tuple[float, float]:
        """The relative change of the output, and the factor at which it shows; 0 where it shows at none."""
        before, noise = self._example.before(name)
        for factor in _FACTORS:
            with nullcontext() if factor == 1 else self._model.trained_model.attached[name].amplified(factor):
                now = self._predict(name)
            changed = (now.float() - before.float()).square().sum()
            read = _read(self._model, torch.stack([changed, noise, before.float().square().sum()]))
            change, least, size = map(math.sqrt, read)
            if not change <= _NOISE * least:  # NaN: fp16 overflows in this batch, which proves nothing
                return change / size if size > 0 else change, factor
        return 0.0, 0.0

    def _predict(self, name: ExpertName) -> Tensor:
        host = self._model.trained_model.host
        active = host.active
        try:
            denoiser: nn.Module = host.activate(name)
            found = self._example.predict(self._model.step, self._model.trained_model, denoiser, name)
            self._model.runtime.reshard(denoiser)  # values may change before the next pass, so no shard stays gathered
            return found
        finally:
            if active is not None:
                host.activate(active)

    def _judge_weights(self, done: StepEnds, expert: _Expert) -> SelfChecked | None:
        attached = self._model.trained_model.attached[done.expert]
        assert expert.sums is not None, "taken at the start"
        moved = dict(zip(attached.parameters(), _read(self._model, _bit_sums(attached) != expert.sums), strict=True))
        still = [name for name, value in moved.items() if value == 0 and not self._moved_below_rounding(attached, name)]
        if len(still) == len(moved):
            problem = _nothing_learned(self._model, done, f"all {len(moved):,} tensors are unchanged")
            if self._begins_anew:
                self._stop(problem)
            else:  # the last steps of a falling schedule may be too small for float32
                self._warn(str(problem))
            return None
        declared = (*self._model.trained_model.spec.untrained, *self._model.trained_model.facts.untrained)
        idle = tuple(name for name in still if not any(matches_path(pattern, name) for pattern in declared))
        expert.effect = f"in {len(moved) - len(still):,} of {len(moved):,} tensors"
        return SelfChecked(step=done.step, expert=done.expert, layers=len(moved), idle=idle)

    def _moved_below_rounding(self, attached: Attached, name: str) -> bool:
        """Whether the optimizer's master has changed, by less than a step of the 16-bit weight."""
        optimizer = self._model.state.optimizer
        return isinstance(optimizer, ChunkedAdamW) and optimizer.differs_from_weight(attached.parameters()[name])

    # -- the files -----------------------------------------------------------------------------------------------------

    def check_saved(self, files: Sequence[Path]) -> str | None:
        """Check the first file of every expert in this process. Return why one of them is wrong, or None."""
        for name, path in zip(self._model.trained_model.trained, files, strict=True):
            # The check ends early if there was no memory to check the first expert's file.
            if self._is_over or self._experts[name].file:
                continue
            try:
                self._check_file(name, self._experts[name], path)
            except WrongFileError as error:
                self._is_over = True
                return str(error)
        self._report_when_complete()
        return None

    def _check_file(self, name: ExpertName, expert: _Expert, path: Path) -> None:
        if self._is_full:
            difference: float | None = self._compare_tensors(name, path)
            expert.file = f"{difference:.1e}"
        else:
            values = self._read_back(name, path)
            difference = self._with_room(
                lambda: self._compare(name, path, _together(values, self._model.runtime.device))
            )
            if difference is None:
                return
            expert.file = f"{difference:.1e}"
        self._telemetry.emit(
            SelfChecked(
                step=self._model.state.position.step, expert=name, layers=self._layers(name),
                file=str(path.relative_to(self._folder.path)), file_difference=difference,
            )
        )  # fmt: skip

    def _layers(self, name: ExpertName) -> int:
        attached = self._model.trained_model.attached[name]
        return len(attached.parameters() if self._is_full else attached.zero_initialized())

    def _read_back(self, name: ExpertName, path: Path) -> LayerTensors:
        """Read the file as any program does.

        Rank 0 reads the file. The other ranks take part with their own values: with a sharded model these are replaced
        by rank 0's, otherwise their results are ignored (`_read`).
        """
        trained_model = self._model.trained_model
        attached = trained_model.attached[name]
        state, why = attached.state() if self._model.runtime.world_size > 1 else None, None
        if self._model.runtime.is_main:
            try:
                # Every tensor is compared with the trained one, which finds what the header's hash would.
                state = open_adapter(path, trained_model.facts.family, ignore_hash=True).state()
            except (GracetuneError, OSError) as error:
                why = str(error)
        for reason in self._model.runtime.all_of(why):
            raise _wrong(path, f"it cannot be read: {reason}")
        assert state is not None, "read, or this rank's own"
        state = from_format(trained_model, name, self._config.checkpoints.format, state)
        values: LayerTensors = {}
        try:
            values = attached.fitting(state)
        except GracetuneError as error:
            why = str(error)
        for reason in self._model.runtime.all_of(why):
            raise _wrong(path, f"it does not fit the model it was trained on: {reason}")
        return values

    def _compare(self, name: ExpertName, path: Path, values: LayerTensors) -> float:
        """The relative difference of the saved values from the trained ones.

        The saved values take the place of the trained ones in the same layers. Where every tensor is the trained one,
        rounded to the file's precision, the file changes the output as the trained adapter does: no pass is needed.
        """
        attached, dtype = self._model.trained_model.attached[name], DTYPES[self._config.checkpoints.save_dtype]
        with attached.holding(values) as own:
            saved = [local_shard(parameter.detach()) for parameter in attached.parameters().values()]
            trained = [own[one] for one in attached.parameters()]
            rounded = _rounded(own, dtype)
            norms = [*_norms(saved, rounded), *_norms(rounded), *_norms(saved, trained), *_norms(trained)]
        read = _read(self._model, torch.stack(norms).double().square())
        # For each tensor: |saved - rounded|^2, |rounded|^2, |saved - trained|^2, |trained|^2.
        columns = (read[column * len(own) : (column + 1) * len(own)] for column in range(4))
        squares = dict(zip(own, zip(*columns, strict=True), strict=True))
        # DoRA magnitudes for ComfyUI are converted with the trained factors and read back with the file's rounded ones.
        close = {True: max(_CLOSE, torch.finfo(dtype).eps), False: _CLOSE}
        wrong = [one for one, (off, size, *_) in squares.items() if not off <= close[_is_magnitude(one)] ** 2 * size]
        if wrong:
            raise _wrong(path, f"other values than the trained ones in {_listed(wrong)}")
        self._warn_of_lost(path, [one for one, (*_, off, size) in squares.items() if off > size / 4])
        changed, learned = (sum(one[column] for one in squares.values()) for column in (2, 3))
        return math.sqrt(changed / learned) if learned > 0 else 0.0

    def _warn_of_lost(self, path: Path, lost: Sequence[str]) -> None:
        """Small values underflow in fp16."""
        if lost:
            self._warn(
                f"self-check: {path.name} holds the trained values as {self._config.checkpoints.save_dtype}, in which "
                f"much of what is learned so far is lost in {_listed(lost)}: --set checkpoints.save_dtype=fp32",
            )

    def _compare_tensors(self, name: ExpertName, path: Path) -> float:
        """The largest relative difference of some of a full fine-tune's tensors, evenly chosen."""
        trained = self._model.trained_model.attached[name].parameters()
        every = math.ceil(len(trained) / _COMPARED)
        chosen = {one: whole(trained[one]) for one in [*trained][::every]}
        largest, why = 0.0, None
        if self._model.runtime.is_main:
            try:
                with open_tensors(path / MODEL_FILE) as file:
                    for one, tensor in chosen.items():
                        saved: Tensor = file.get_tensor(one)
                        wanted = tensor.to("cpu", saved.dtype).double()
                        wrong = float((saved.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))
                        if not wrong <= _CLOSE:
                            why = f"other values than the trained ones in {one}"
                        largest = max(largest, wrong)
            except (SafetensorError, OSError) as error:
                why = f"it cannot be read: {error}"
        for reason in self._model.runtime.all_of(why):
            raise _wrong(path, reason)
        return largest

    # -- what is shown -------------------------------------------------------------------------------------------------

    def _report_when_complete(self) -> None:
        """Report one line for the whole run, once the effect and the file of every expert are checked.

        At the end of the run the files suffice.
        """
        experts = self._experts.values()
        at_end = self._control.stop is not None or self._model.state.position.step >= self._steps
        if self._is_over or not all(one.file and (one.judged or at_end) for one in experts):
            return
        self._finish()
        for name, one in self._experts.items():
            if one.steps >= STEPS and not one.judged:
                self._warn(f"self-check: fewer than {STEPS} steps{_of(name)} had a loss above 0: nothing to learn")
        self._view.report(f"self-check: {self._effect_in_words()}; {self._files_in_words()}")

    def _finish(self) -> None:
        """Release what was kept for the check."""
        self._is_over = True
        self._example.release()

    def _effect_in_words(self) -> str:
        subject = "the weights have changed" if self._is_full else "the adapter changes the output"
        if not all(one.begins_as_base for one in self._experts.values()):
            subject = "training changes the output"
        if not any(one.judged for one in self._experts.values()):
            return f"fewer than {STEPS} steps to judge the adapter by"
        if len(self._experts) == 1:
            return f"{subject} {next(iter(self._experts.values())).effect} after {STEPS} steps"
        each = (f"{name}: {one.effect or 'too few steps'}" for name, one in self._experts.items())
        return f"{subject} after {STEPS} steps ({', '.join(each)})"

    def _files_in_words(self) -> str:
        several = len(self._experts) > 1
        files = "the saved files" if several else "the saved file"
        difference = f"(difference {', '.join(one.file for one in self._experts.values())})"
        if self._is_full:
            return f"tensors read back from {files} are the trained ones {difference}"
        return f"{files} {'reproduce' if several else 'reproduces'} it {difference}"

    def _warn(self, text: str) -> None:
        self._view.warn(text)
        self._telemetry.emit(Warned(message=text, step=self._model.state.position.step))

    def _with_room(self, check: Callable[[], T]) -> T | None:
        """The result of `check`; None if it runs out of memory twice, which ends the self-check. With several ranks the
        first time ends the run: the others would wait in a collective for ever."""
        for _ in range(2):
            try:
                return check()
            except torch.OutOfMemoryError:
                if self._model.runtime.world_size > 1:
                    raise
                self._model.step.release()
                torch.cuda.empty_cache()
        self._finish()
        self._warn("self-check: skipped, there is not enough free memory for one sample")
        return None


# -- numbers ----------------------------------------------------------------------------------------------------------


def _read(model: EvaluatedModel, values: Tensor) -> list[float]:
    """Read values from the device; this synchronizes. Values of sharded models are summed over the ranks."""
    read = values.double()
    if model.runtime.world_size > 1:
        if not model.runtime.is_sharded and not model.runtime.is_main:
            read.zero_()  # a replica repeats what rank 0 has, and has not read the file
        model.runtime.sum_(read)
    return [float(value) for value in read.tolist()]


def _largest(tensors: Sequence[Tensor]) -> Tensor:
    """[len(tensors)]: the largest absolute value of each tensor's local shard, with a few kernels for all of them."""
    parts = [local_shard(one.detach()) for one in tensors]
    return torch.stack(torch._foreach_norm([one if one.numel() else one.new_zeros(1) for one in parts], math.inf))


def _norms(tensors: Sequence[Tensor], others: Sequence[Tensor] | None = None) -> Sequence[Tensor]:
    """The norm of each tensor, or of its difference from the other, with a few kernels for all of them."""
    return torch._foreach_norm([*tensors] if others is None else torch._foreach_sub([*tensors], [*others]))


def _rounded(own: Mapping[str, Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The values rounded to the file's precision. DoRA magnitudes are not rounded."""
    chosen = [one for name, one in own.items() if not _is_magnitude(name)]
    saved, back = [torch.empty_like(one, dtype=dtype) for one in chosen], [*map(torch.empty_like, chosen)]
    torch._foreach_copy_(saved, chosen)
    torch._foreach_copy_(back, saved)
    rounded = iter(back)
    return [one if _is_magnitude(name) else next(rounded) for name, one in own.items()]


def _together(values: LayerTensors, device: torch.device) -> LayerTensors:
    """The values on the device. One copy for each dtype: a copy for each tensor takes several times as long."""
    places = [(path, name, tensor) for path, tensors in values.items() for name, tensor in tensors.items()]
    moved: dict[str, dict[str, Tensor]] = {path: {} for path in values}
    for dtype in {tensor.dtype for *_, tensor in places}:
        alike = [place for place in places if place[2].dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for *_, tensor in alike]).to(device)
        parts = flat.split([tensor.numel() for *_, tensor in alike])
        for (path, name, tensor), part in zip(alike, parts, strict=True):
            moved[path][name] = part.view(tensor.shape)
    return moved


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def _is_magnitude(name: str) -> bool:
    """Whether this is a DoRA magnitude, which every file holds in float32."""
    return name.endswith(f".{MAGNITUDE}")


def _bit_sums(attached: Attached) -> Tensor:
    """[number of parameters]: a checksum of each tensor's bits."""
    parts = [local_shard(parameter.detach()).contiguous() for parameter in attached.parameters().values()]
    words = {2: torch.int16, 4: torch.int32}
    return torch.stack([part.view(words[part.itemsize]).sum(dtype=torch.int64) for part in parts])


def _rates(model: EvaluatedModel, entry: str) -> dict[ExpertName, float]:
    """By expert: the `lr` of the next step, or the schedule's `initial_lr`."""
    optimizer = model.state.optimizer
    groups = zip(
        model.trained_model.trained, optimizer.param_groups, strict=True
    )  # `TrainedModel.groups`: one for each
    return {name: float(group[entry]) for name, group in groups}


# -- words ------------------------------------------------------------------------------------------------------------


def _of(name: ExpertName) -> str:
    return f" of {name}" if name else ""


def _problem_key(name: ExpertName) -> str:
    return f"self-check of the adapter{_of(name)} after {STEPS} steps"


def _nothing_learned(model: EvaluatedModel, done: StepEnds, found: str) -> Problem:
    norm = float(done.norm)
    if norm == 0:
        hint = "other layers: --set 'adapter.targets=[...]'; look at the datasets' masks and loss weights"
        return Problem(_problem_key(done.expert), f"{found}, and no gradient reaches them", "gradients above 0", hint)
    rate = _rates(model, "initial_lr")[done.expert]
    found = f"{found} (gradient norm {norm:.1e}, optimizer.lr {rate:g})"
    return Problem(
        _problem_key(done.expert), found, "layers that have changed", "a higher rate: --set optimizer.lr=1e-4"
    )


def _wrong(path: Path, found: str) -> WrongFileError:
    found = "; ".join(" ".join(line.split()) for line in found.splitlines())  # another error has several lines
    hint = (
        "the checkpoint is complete, and the same command resumes from it; another format may work: "
        "--set checkpoints.format=NAME; please report this"
    )
    return WrongFileError(str(Problem("self-check", found, "what was trained", hint, str(path))))
