"""What a run would do with a config, in numbers and words that can be compared: one probe for each part of a run.

A probe gives the same answer for the same config, and another one where the part would do something else.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from contextlib import chdir
from dataclasses import asdict
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from gracetune.adapters.attach import attach
from gracetune.adapters.formats.record import FORMATS
from gracetune.adapters.safetensors_file import write as write_tensors
from gracetune.cache.batches import Batch
from gracetune.cache.folders import cache_folders
from gracetune.cache.session import needs
from gracetune.config.run_config import RunConfig
from gracetune.data.backends.in_memory import InMemoryBackend
from gracetune.data.backends.pool import BackendPool, sharing_notes
from gracetune.data.copies.local import Copies
from gracetune.data.index_builder import build_index
from gracetune.data.loader import Loader
from gracetune.data.refs import BatchRef, Bucket, CaptionRef, SampleRef
from gracetune.diffusion.noise import sample_noise
from gracetune.diffusion.weighting import huber_delta, sample_losses
from gracetune.hub.access import HubAccess
from gracetune.memory.governor import PressureLimits
from gracetune.models.encoders import encoders_of
from gracetune.models.experts import expert_for_step, trained_experts
from gracetune.models.fact_overrides import facts_of
from gracetune.models.registry import footprint_of, geometry_of, spec_of
from gracetune.models.source import open_source
from gracetune.models.spec import PartPlacement, Sampled
from gracetune.optim.averages import EmaWeights
from gracetune.optim.batch_ramp import ramp_of
from gracetune.optim.build import build_optimizer
from gracetune.optim.record import ParamGroup
from gracetune.optim.schedules import build_schedule
from gracetune.planning.dataset_facts import survey
from gracetune.planning.estimate import estimate
from gracetune.planning.plan import plan
from gracetune.telemetry.sinks.jsonl import read_log
from gracetune.train.gradients import FlatGradients, GradientClipping, gradient_factor
from gracetune.train.planning import PlannedRun, choose, compiles
from gracetune.train.sample_files import write_sample
from gracetune.train.sample_requests import requests_of
from gracetune.train.training_state import length_of
from gracetune.train.view import CollectingView
from gracetune.units import MIB
from runs.made_runs import run
from unit.data.backends.helpers import this_machine
from unit.data.copies.sample_sources import tar
from unit.data.folders import image, write
from unit.data.media.generated import audio_bytes, every, tone, video_bytes
from unit.hardware.machines import load

CPU = torch.device("cpu")
Probe = Callable[[RunConfig], Any]


def digest(value: Any) -> str:
    """A digest of any result of a probe."""
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.detach().float().cpu().numpy().tobytes()).hexdigest()[:16]
    if isinstance(value, np.ndarray):
        return hashlib.sha256(value.tobytes()).hexdigest()[:16]
    if isinstance(value, dict):
        return json.dumps({str(key): digest(one) for key, one in value.items()})
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return "[" + ",".join(map(digest, value)) + "]"
    return repr(value)


def make_files(root: Path) -> Path:
    """Images of several sizes with captions, masks and references; clips and audio."""
    files: dict[str, bytes | str] = {}
    sizes = [(64, 64), (96, 64), (64, 96), (160, 64), (200, 200)]
    rows = ["file,text,other,w,h"]
    for number in range(10):
        width, height = sizes[number % len(sizes)]
        name = f"{number:02}"
        files[f"pictures/{name}.png"] = image(width, height, seed=number)
        if number == 7:
            files[f"pictures/{name}.txt"] = ""
        elif number != 3:
            files[f"pictures/{name}.txt"] = f"tag {number}, red, green, blue\nanother line {number}"
        files[f"pictures/{name}.caption"] = f"a caption of its own {number}"
        rows.append(f"{name}.png,{'' if number == 4 else f'row {number}'},other {number},{width},{height}")
        files[f"masks/{name}.png"] = image(width, height, seed=50 + number)
        files[f"references/{name}.png"] = image(width, height, seed=90 + number)
    files["pictures/plain.csv"] = "\n".join(rows)
    files["pictures/second.csv"] = "\n".join(rows).replace("row", "second")
    files["pictures/stems.csv"] = "\n".join(rows).replace(".png", "")
    files["pictures/10.jpg"] = image(64, 64, seed=10, kind="JPEG")
    for number in range(4):
        files[f"few/{number}.png"], files[f"few/{number}.txt"] = image(64, 64, seed=number), f"picture {number}"
    for number, width in enumerate((300, 304, 310)):
        files[f"alike/{number}.png"] = image(width, 200, seed=number)
    files["kohya/3_a dog/a.png"], files["kohya/1_a cat/b.png"] = image(64, 64, seed=1), image(64, 64, seed=2)
    files["alpha/a.png"] = _with_alpha()
    files["alpha/a.txt"] = "with an alpha channel"
    files["damaged/a.png"], files["damaged/b.png"] = image(64, 64, seed=1), b"no picture"
    for number, count in enumerate((9, 30, 90)):
        files[f"clips/{number}.mp4"] = video_bytes(every(1 / 25, count), size=(64, 48))
        files[f"clips/{number}.txt"] = f"clip {number}"
        sound = tone(200 + number, 1.2 + 2 * number, 44_100)
        files[f"sounds/{number}.wav"] = audio_bytes(np.stack([sound, sound]), 44_100)
        files[f"sounds/{number}.txt"] = f"sound {number}"
    for number, split in enumerate(("train", "train", "test")):
        members = {
            f"{number}.png": image(128, 64, seed=number), f"{number}.other.png": image(64, 64, seed=20 + number),
            f"{number}.json": json.dumps({"score": number, "kind": "cat", "weight": 1 - number}).encode(),
        }  # fmt: skip
        files[f"archives/{split}/{number}.tar"] = tar(members)
    files["archives/train/plain.png"] = image(64, 64, seed=33)
    files["indexes/train/0.json"] = json.dumps({"files": {"0.png": {"captions": "from an index"}}})
    return write(root, files)


def _with_alpha() -> bytes:
    import io

    from PIL import Image

    image = Image.new("RGBA", (64, 64), (200, 10, 10, 255))
    image.putalpha(Image.linear_gradient("L").resize((64, 64)))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


# -- data --------------------------------------------------------------------------------------------------------------


def local_copy(config: RunConfig) -> Any:
    """The files and rows of a copy, and its folder."""
    copies = Copies(config, HubAccess())
    copies.make()
    folder = Path(copies.localized().datasets[0].path)
    content = {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
               for path in sorted(folder.rglob("*")) if path.is_file()}  # fmt: skip
    return [content, str(folder.parent.parent)]


def data(config: RunConfig) -> Any:
    """Everything the loader yields in three epochs, a decoded sample of each dataset, and the report of staging."""
    geometry, _ = geometry_of(config.model)
    with BackendPool(config.datasets, machine=this_machine()) as pool:
        index = build_index(config, geometry, open_backend=pool.open)
        loader = Loader(index, batch_size=config.training.batch_size, epochs=3)
        batches = [loader.next_batch(step=number) for number in range(45)]
        first = [one.samples[0] for one in batches if isinstance(one, BatchRef)][:3]
        staged = [
            (one.report.compression, one.report.stored, one.report.threads, one.report.files)
            for one in pool.opened
            if isinstance(one, InMemoryBackend) and one.report is not None
        ]
        decoded = [
            {name: digest(part) for name, part in vars(index.load(ref)).items() if isinstance(part, torch.Tensor)}
            for ref in first
        ]
        names = [(found.id, found.dropped, found.notes, found.unreadable) for found in index.datasets]
        held = [[(item.path, item.captions) for item in found.items] for found in index.held_out]
        return batches, decoded, names, held, staged, [*sharing_notes(pool.folders)]


def caches(config: RunConfig) -> Any:
    """What would be cached, in which folder, and by which encoder."""
    geometry, _ = geometry_of(config.model)
    encoders = encoders_of(config, CPU)
    index = build_index(config, geometry)
    places = cache_folders(config)
    wanted = needs(config, index, encoders, places, epoch=0)
    return (
        [(item.key, str(item.folder)) for item in wanted.latents],
        [(item.key, str(item.folder)) for item in wanted.texts],
        encoders.options,
        str(encoders.placement),
    )


# -- the model ---------------------------------------------------------------------------------------------------------


@cache
def _denoiser(path: str, family: str, flavour: str | None) -> Any:
    model = RunConfig.model_validate(
        {"name": "x", "output_dir": "x", "datasets": [], "training": {"max_steps": 1},
         "model": {"family": family, "flavour": flavour, "path": path, "base_precision": "fp32"}}
    ).model  # fmt: skip
    spec, source = spec_of(family), open_source(model)
    facts = spec.inspect(source)
    return spec, facts, spec.load_denoiser(source, facts.experts[0], PartPlacement(CPU, torch.float32))


def adapter(config: RunConfig) -> Any:
    """The adapter's layers, shapes and first values, and what each layer adds to an input."""
    spec, facts, denoiser = _denoiser(config.model.path, config.model.family, config.model.flavour)
    attached = attach(
        denoiser, config.adapter, family=spec.family, expert=facts.experts[0].name,
        default_targets=spec.default_targets,
        conv_targets=spec.conv_targets,
        untrained=(*spec.untrained, *facts.untrained), seed=config.training.seed,
    )  # fmt: skip
    try:
        if config.adapter.init_from is not None:
            from gracetune.adapters.adapter_files import open_adapter

            for state in open_adapter(Path(config.adapter.init_from), spec.family).states():
                attached.load(state)
        begun = {name: (tuple(one.shape), digest(one)) for name, one in attached.parameters().items()}
        generator = torch.Generator().manual_seed(0)
        if config.adapter.kind == "full_finetune":
            return sorted(begun), attached.alphas
        before = {name: one.detach().clone() for name, one in attached.parameters().items()}
        with torch.no_grad():
            for parameter in attached.parameters().values():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        denoiser.train()
        effects = {}
        for path in [*attached.alphas][:2] + [*attached.alphas][-2:]:
            layer = denoiser.get_submodule(path)
            torch.manual_seed(0)
            effects[path] = layer(_input_of(layer, generator))
        with torch.no_grad():
            for name, parameter in attached.parameters().items():
                parameter.copy_(before[name])
        return begun, attached.alphas, digest(effects)
    finally:
        attached.detach()


def _input_of(layer: nn.Module, generator: torch.Generator) -> torch.Tensor:
    weight = next(one for name, one in layer.named_parameters() if name.endswith("weight") and "lora" not in name)
    shape = (2, weight.shape[1]) if weight.dim() == 2 else (1, weight.shape[1], 8, 8)
    return torch.randn(shape, generator=generator)


def model(config: RunConfig) -> Any:
    """Which weights are read, their values, and the order of the experts."""
    spec, source = spec_of(config.model.family), open_source(config.model)
    facts = facts_of(config, spec, source)
    trained = trained_experts(config.model.experts, facts)
    turns = [expert_for_step(step, config.model.switch_experts_every, trained) for step in range(8)]
    folders = (source.variant, str(source.folder), str(source.vae), str(source.text_encoder))
    return facts, trained, turns, folders, encoders_of(config, CPU).options


# -- learning ----------------------------------------------------------------------------------------------------------


def optimizer(config: RunConfig) -> Any:
    """The weights after five steps with given gradients, and the learning rates of these steps."""
    groups = [
        ParamGroup(name, name, {f"{name}.w": nn.Parameter(torch.linspace(-1, 1, 32).reshape(8, 4))})  # type: ignore[arg-type]
        for name in ("high_noise", "low_noise")
    ]
    made = build_optimizer(config.optimizer, groups)
    total = config.training.max_steps or 20
    scheduled = build_schedule(made, config.schedule, optimizer_name=config.optimizer.name, total=total)
    generator, seen = torch.Generator().manual_seed(1), []
    for _ in range(20):
        for group in groups:
            for parameter in group.parameters.values():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        made.step()
        scheduled.scheduler.step()
        seen.append([group["lr"] for group in made.param_groups])
    return seen, [digest(one) for group in groups for one in group.parameters.values()]


def objective(config: RunConfig) -> Any:
    """Noise levels, noise, losses and their weights."""
    from gracetune.train.step import TrainingGoal

    spec, source = spec_of(config.model.family), open_source(config.model)
    facts = facts_of(config, spec, source)
    goal = TrainingGoal.from_config(config.objective, facts, trained_experts(config.model.experts, facts))
    generator = torch.Generator().manual_seed(2)
    clean, answer, wanted = (torch.randn(6, 4, 8, 8, generator=generator) for _ in range(3))
    levels = {name: sampler.levels(3, range(40), 64) for name, sampler in goal.levels.items()}
    level = torch.linspace(0.05, 0.95, 6)
    noise = sample_noise(clean, config.objective, 3, range(6))
    delta = huber_delta(config.objective, facts.schedule, level)
    return (
        levels,
        digest(noise.added),
        digest(noise.target),
        digest(sample_losses(answer, wanted, config.objective, delta=delta)),
        digest(torch.as_tensor(goal.weighting.weights(facts.schedule, level))),
        str(facts.schedule),
        _message_to(spec, facts) if config.model.family == "flux" else None,
    )


def _message_to(spec: Any, facts: Any) -> Any:
    """The guidance that a denoiser gets in a training step."""
    given: dict[str, Any] = {}

    class Listening(nn.Module):
        def forward(self, **inputs: Any) -> tuple[torch.Tensor]:
            given.update(inputs)
            return (inputs["hidden_states"],)

    batch = {"prompt_embeds": torch.zeros(1, 2, 4), "pooled_prompt_embeds": torch.zeros(1, 4)}
    spec.predict(Listening(), torch.zeros(1, 4, 4, 4), torch.full((1,), 0.5), batch, facts)
    return given["guidance"].tolist()


def learning(config: RunConfig) -> Any:
    """Batches of every step, clipping and averaging."""
    training = config.training
    steps = [*islice(ramp_of(training, 1).step_batches(), 30)]
    factor = gradient_factor(training.accumulation, micro_batches=4, samples=4)
    weights = {"a": nn.Parameter(torch.ones(8))}
    gradients = FlatGradients(weights, None)
    gradients.open()
    (weights["a"] * torch.linspace(0.1, 5.0, 8)).sum().backward()
    gradients.collect()
    norm = float(gradients.finish(factor, GradientClipping(training.grad_clip, training.max_grad_norm)))
    ema, averages = EmaWeights.from_config(weights, training.ema), []
    for number in range(4):
        with torch.no_grad():
            weights["a"] += number
        if ema is not None:
            ema.update()
            averages.append({name: digest(one) for name, one in ema.averages.items()})
    return steps, digest(weights["a"].grad), norm, averages


def skipped_tokens(config: RunConfig) -> Any:
    """The denoiser's prediction for one batch in a training step."""
    from gracetune.models.token_routing import install
    from gracetune.train.trained_model import router_of

    spec, source = spec_of(config.model.family), open_source(config.model)
    facts = facts_of(config, spec, source)
    denoiser = spec.load_denoiser(source, facts.experts[0], PartPlacement(CPU, torch.float32))
    install(denoiser, config.model.family)
    router = router_of(config, spec, facts, denoiser)
    assert router is not None
    generator = torch.Generator().manual_seed(0)
    latents, text = torch.randn(1, 16, 2, 8, 8, generator=generator), torch.randn(1, 6, 32, generator=generator)
    sample = SampleRef("d", "0.png", "0", Bucket(64, 64), None, CaptionRef(""))
    batch = Batch(BatchRef((sample,), Bucket(64, 64), (4,), 0, 1), {"latents": latents, "prompt_embeds": text})
    answer = router.spec.predict(denoiser, latents, torch.full((1,), 0.5), router.routed(batch).tensors, facts)
    return digest(answer)


def choices(config: RunConfig) -> Any:
    """How denoisers would be executed, with the reasons, and the memory plan on a GH200."""
    footprint, _ = footprint_of(config.model)
    machine = load("gh200-numa")
    demand = estimate(config, footprint, survey(config), compiled=compiles(config, "cuda"))
    planned = PlannedRun(demand, plan(demand, machine, disk_free=None))
    _, lines = choose(config, planned, spec_of(config.model.family).attention, CPU, torch.float32)
    limits = PressureLimits.from_options(config.memory, host_reserve=MIB)
    return lines, digest(str(planned.plan)), limits


def plans(config: RunConfig) -> Any:
    """The memory plans on a GH200, from batches that fit to batches that do not."""
    footprint, _ = footprint_of(config.model)
    found = []
    for size in (64, 128, 256, 384, 512):
        larger = config.model_copy(update={"training": config.training.model_copy(update={"batch_size": size})})
        found.append(plan(estimate(larger, footprint, survey(larger), compiled=True), load("gh200-numa")))
    return digest(str(found))


def samples(config: RunConfig) -> Any:
    return requests_of(config)


# -- whole runs --------------------------------------------------------------------------------------------------------

_CLOCKS = ("_s", "_ms", "time", "hours", "bytes", "memory", "per_second", "host", "git", "version", "eta")


EXPECTED_TEXT = ("latents", "texts", "deterministic")
"""Printed lines about choices that have no other visible effect."""

_NOT_COMPARED = ("config", "run", "tiers", "summary")
"""Fields of events with the changed option, a random name, or the memory that is free at the moment (`Planned`)."""


def whole_run(config: RunConfig) -> Any:
    """The result of a run in a new folder: files, and events without times and facts of the machine."""
    with TemporaryDirectory() as folder, chdir(folder):
        return _left_by(config)


def second_run(config: RunConfig) -> Any:
    """The result of a run in the folder of an earlier one."""
    with TemporaryDirectory() as folder, chdir(folder):
        shorter = config.training.model_copy(update={"max_steps": 2})
        keeping = config.checkpoints.model_copy(update={"every_steps": 1, "resume": "latest"})
        _left_by(config.model_copy(update={"training": shorter, "checkpoints": keeping}))
        return _left_by(config)


def _left_by(config: RunConfig) -> Any:
    view = CollectingView()
    result = run(config, view)
    folder = Path()
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    plain = [_plain_name(name) for name in files]
    # Not their bytes: a file's metadata may repeat the config.
    tensors = {path.name: load_file(path) for path in result.files if path.suffix == ".safetensors"}
    events = []
    for log in sorted(folder.rglob("events*.jsonl")):
        for record in read_log(log).merged():
            name = type(record.event).__name__
            if name != "MemorySampled":  # times and sizes
                values = {key: value for key, value in _plain(record.event).items() if key not in _NOT_COMPARED}
                events.append((name, values))
    stated = [re.sub(r"[0-9.]+ \w+/?s?", "", one) for one in view.lines if one.startswith(EXPECTED_TEXT)]
    held = {name: {key: (str(one.dtype), digest(one)) for key, one in found.items()} for name, found in tensors.items()}
    return result.step, plain, events, view.warnings, digest(held), stated


def _plain(event: Any) -> dict[str, Any]:
    values = asdict(event) if hasattr(event, "__dataclass_fields__") else event.model_dump()
    return {key: value for key, value in values.items() if not key.endswith(_CLOCKS)}


def _plain_name(name: str) -> str:
    """Names without their random parts, which files of the cache and of TensorBoard have."""
    return re.sub(r"[0-9a-f]{16,}|tfevents.*", "*", name)


def clip_file(config: RunConfig) -> Any:
    """A clip, written like a generated sample."""
    frames = tuple(Image.new("RGB", (32, 32), (number * 20, 0, 0)) for number in range(5))
    with TemporaryDirectory() as folder:
        path, kind = write_sample(Path(folder) / "clip", Sampled(frames=frames, fps=16.0), config.validation.fps)
        return kind, hashlib.sha256(path.read_bytes()).hexdigest()


def write_adapter(config: RunConfig, path: Path) -> None:
    """An adapter file of the config's kind and layers, with values that differ from a new adapter's."""
    spec, facts, denoiser = _denoiser(config.model.path, config.model.family, config.model.flavour)
    attached = attach(denoiser, config.adapter, family=spec.family, expert=facts.experts[0].name,
                      default_targets=spec.default_targets, seed=77)  # fmt: skip
    tensors, metadata = FORMATS["diffusers"].write(attached.state(), torch.float32)
    attached.detach()
    write_tensors(path, tensors, metadata)


def length(config: RunConfig) -> Any:
    geometry, _ = geometry_of(config.model)
    index = build_index(config, geometry)
    training = config.training
    return length_of(
        index,
        ramp_of(training, 1),
        batch_size=training.batch_size,
        max_steps=training.max_steps,
        epochs=training.epochs,
    )
