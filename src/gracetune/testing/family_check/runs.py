"""Encoding, compilation, generated samples, and a run of the trainer that is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gracetune.config.environment import Environment
from gracetune.config.run_config import RunConfig
from gracetune.models.footprint import AudioLatents, SampleShape
from gracetune.models.spec import EncodeOptions, PartPlacement, Sampled
from gracetune.storage.safetensors_files import read_tensors
from gracetune.testing.family_check.case import CAPTIONS, CPU, FamilyCase, difference, listed, random_image, require
from gracetune.train.blocks import prepare_blocks
from gracetune.train.run import RunOptions, train
from gracetune.train.sample_files import write_sample
from gracetune.train.view import View

TOLERANCE = 1e-4
_HALF = PartPlacement(torch.device("cpu"), torch.bfloat16)


def check_encoding(case: FamilyCase) -> str:
    """Entries are complete and finite, do not depend on the rest of their batch, and their ids name what they do."""
    batched = case.texts(0, 1)
    for seed, text in enumerate(batched):
        _same_entry(text, case.texts(seed)[0], f"caption {seed}")
    latents = case.latent_encoder.encode([case.item(0), case.item(1)])
    for seed, entry in enumerate(latents):
        _same_entry(entry, case.latent_encoder.encode([case.item(seed)])[0], f"item {seed}")
    for name, tensor in case.entry(0).items():
        finite = bool(tensor.float().isfinite().all())
        require(finite, f"{name} with values that are not finite", "finite values", "compute it in float32")
    for name in ("latents", "prompt_embeds"):
        require(name in case.entry(0), f"{', '.join(case.entry(0))}", name, "name tensors as gracetune.cache.encoder")
    same = torch.equal(case.entry(0)["prompt_embeds"], case.entry(1)["prompt_embeds"])
    require(not same, "the same embedding for two captions", "different ones", "encode the prompt's text")
    _check_latents(case, case.entry(0)["latents"])
    _check_ids(case)
    shapes = {name: [*tensor.shape] for name, tensor in case.entry(0).items()}
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())


def _same_entry(one: Mapping[str, Tensor], other: Mapping[str, Tensor], what: str) -> None:
    require(one.keys() == other.keys(), f"{what}: other tensors in a batch", "the same", "encode items one by one")
    for name, tensor in one.items():
        off = difference(tensor, other[name])
        require(
            off <= TOLERANCE, f"{what}: {name} differs by {off:.1e} in a batch", f"at most {TOLERANCE:g}",
            "remove padding from entries, and let no item depend on the others",
        )  # fmt: skip


def _check_latents(case: FamilyCase, latents: Tensor) -> None:
    """The latents have the sides and frames that a plan counts. Tiny VAEs may have fewer channels."""
    planned = case.footprint.latents
    if isinstance(planned, AudioLatents):
        expected = planned.columns(SampleShape(seconds=case.seconds))
    else:
        shape = SampleShape(*case.size, frames=case.frames)
        expected = planned.planes(shape) * planned.area(shape)
    found = latents[0].numel()
    require(
        found == expected, f"latents {[*latents.shape]}: {found} per channel", f"{expected}, as in the footprint",
        "correct `latents` in footprint.py, or the encoder",
    )  # fmt: skip


def _check_ids(case: FamilyCase) -> None:
    """Whatever changes an entry changes its encoder's id."""
    spec, options = case.spec, case.encode_options
    variants = [
        (placement, one)
        for placement in (CPU, _HALF)
        for one in (options, replace(options, posterior="sample"), replace(options, tiling=True))
    ]
    ids = [spec.load_latent_encoder(case.source, *one).id for one in variants]
    ids += [spec.load_text_encoder(case.source, placement).id for placement in (CPU, _HALF)]
    require(
        len({*ids}) == len(ids), f"{len({*ids})} ids of {len(ids)} encoders", "one for each precision and option",
        "name the dtype, the posterior and tiling in `settings` of the ids",
    )  # fmt: skip
    again = spec.load_latent_encoder(case.source, CPU, EncodeOptions(**{**vars(options), "slicing": True})).id
    require(again == ids[0], "another id with slicing", "the same: it changes no values", "leave slicing out of the id")


def check_compilation(case: FamilyCase) -> str:
    """Compiled blocks, and blocks that are computed again in the backward pass, give the same gradients."""
    expected = _gradients(case, case.denoiser())
    graphs = 0
    for checkpointing, compiled in ((True, False), (False, True)):
        denoiser = case.denoiser()
        # Without a code generator: the graphs and gradients are those of a GPU, and no C++ compiler is needed.
        done = prepare_blocks(
            denoiser, case.spec.repeated_blocks, checkpointing=checkpointing, compiled=compiled, backend="aot_eager"
        )
        require(done.blocks > 0, f"no block of {case.spec.repeated_blocks}", "classes of blocks", "correct SPEC")
        found = _gradients(case, denoiser)
        for name in expected.keys() | found.keys():  # compiled blocks give zeros to what eager ones give nothing
            zero = torch.zeros(1)
            off = _apart(found.get(name, zero), expected.get(name, zero))
            require(
                off <= TOLERANCE, f"{'compiled' if compiled else 'checkpointed'}: {name} differs by {off:.1e}",
                f"at most {TOLERANCE:g}", "look for values that a block keeps between calls",
            )  # fmt: skip
        graphs += done.stats.graphs
    torch._dynamo.reset()
    return f"{done.blocks} blocks in {graphs} graphs, the same prediction and gradients; with checkpointing too"


def _apart(one: Tensor, other: Tensor) -> float:
    """`difference`, where a single zero is as many as needed."""
    shape = torch.broadcast_shapes(one.shape, other.shape)
    return difference(one.expand(shape), other.expand(shape))


def _gradients(case: FamilyCase, denoiser: nn.Module) -> dict[str, Tensor]:
    """The prediction, and the gradients of the blocks' parameters."""
    denoiser.requires_grad_(True)
    denoiser.train()
    prediction = case.predict(denoiser)
    prediction.float().square().mean().backward()
    found = {name: one.grad for name, one in denoiser.named_parameters() if one.grad is not None}
    return {"the prediction": prediction.detach(), **found}


def check_sampling(case: FamilyCase) -> str:
    """Samples have the requested size, follow the prompt and repeat themselves; other requests are rejected or not."""
    spec, request = case.spec, case.request()
    spec.check_sample(request, case.facts)
    sampled = spec.sample(case.pipeline, request)
    _check_size(case, sampled)
    again, other = (spec.sample(case.pipeline, replace(request, prompt=prompt)) for prompt in CAPTIONS)
    require(
        _is_same(sampled, again), "another sample for the same request", "the same", "seed the pipeline's generator"
    )
    require(not _is_same(sampled, other), "the same sample for another prompt", "another one", "pass the prompt on")
    write_sample(case.work / "sample", sampled, case.geometry.default_fps)
    if sampled.audio is not None:
        return f"audio {[*sampled.audio.shape]} at {sampled.sample_rate} Hz"
    width, height = sampled.frames[0].size
    return f"{len(sampled.frames)} x {width} x {height}"


def _check_size(case: FamilyCase, sampled: Sampled) -> None:
    if sampled.audio is not None:
        found, expected = sampled.audio.shape[-1], round(case.seconds * (sampled.sample_rate or 0))
        require(abs(found - expected) <= 1, f"{found} audio samples", f"{expected}", "cut the audio to `seconds`")
        return
    sizes = [frame.size for frame in sampled.frames]
    require(
        sizes == [case.size] * case.frames, f"{len(sizes)} frames of {listed([str(one) for one in {*sizes}])}",
        f"{case.frames} of {case.size}", "pass width, height and frames on in `sample`",
    )  # fmt: skip


def _is_same(one: Sampled, other: Sampled) -> bool:
    if one.audio is not None and other.audio is not None:
        return torch.equal(one.audio, other.audio)
    return [frame.tobytes() for frame in one.frames] == [frame.tobytes() for frame in other.frames]


# -- runs --------------------------------------------------------------------------------------------------------------


def write_items(case: FamilyCase, folder: Path, count: int = 2) -> Path:
    """Images or audio with captions. A family of clips trains on images too."""
    folder.mkdir(parents=True)
    for seed in range(count):
        sampled = Sampled(frames=(random_image(case.size, seed),))
        if case.geometry.makes == "audio":
            sampled = Sampled(audio=case.item(seed).audio, sample_rate=case.geometry.sample_rate)
        write_sample(folder / f"{seed}", sampled)
        (folder / f"{seed}.txt").write_text(CAPTIONS[seed], encoding="utf-8")
    return folder


def config_of(case: FamilyCase, folder: Path, data: Path, steps: int) -> RunConfig:
    dataset: dict[str, Any] = {"id": "items", "path": str(data)}
    if case.geometry.makes == "audio":
        dataset |= {"dataset_type": "audio", "audio": {"duration_interval": 0.1}}
    else:
        dataset["resolution"] = float(case.size[1])
    return RunConfig.model_validate(
        {
            "name": "check",
            "output_dir": str(folder),
            "model": {
                "family": case.family, "flavour": case.flavour.name, "path": str(case.folder),
                "base_precision": "fp32",
            },
            "datasets": [dataset],
            "adapter": {"kind": "lora", "rank": 4},
            "training": {"max_steps": steps, "mixed_precision": "fp32", "seed": 3},
            "optimizer": {"lr": 1e-3},
            "checkpoints": {"every_steps": None, "save_dtype": "fp32", "format": "diffusers"},
        }
    )  # fmt: skip


STEPS = 4


def check_resume(case: FamilyCase) -> str:
    """A run that is stopped half way and resumed ends bit for bit as one that was not stopped."""
    data = write_items(case, case.work / "data")
    results = []
    for name, steps in (("whole", (STEPS,)), ("parted", (STEPS // 2, STEPS))):
        for most in steps:
            config = config_of(case, case.work / name, data, most)
            result = train(config, environment=Environment({}), options=RunOptions(), view=View())
        results.append(result.files)
    tensors = 0
    for one, other in zip(*results, strict=True):
        whole, parted = read_tensors(one), read_tensors(other)
        different = [key for key in whole if not torch.equal(whole[key], parted[key])]
        require(
            not different, f"{one.name}: {listed(different)} differ after resuming", "the same bits",
            "let `predict` and the encoders be functions of their arguments alone",
        )  # fmt: skip
        tensors += len(whole)
    return f"{tensors} tensors after {STEPS} steps, bit for bit"
