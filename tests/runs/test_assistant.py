"""Runs with an assistant adapter: it is active in training, and absent from generated images and saved files."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gracetune.adapters.adapter_files import open_adapter, save
from gracetune.adapters.assistant import as_assistant, assist
from gracetune.adapters.attach import attach
from gracetune.adapters.merge import merge_into, merge_module
from gracetune.adapters.state import AdapterState
from gracetune.checkpoint.manifest import read_manifest
from gracetune.config.environment import Environment
from gracetune.config.rules import broken_rules
from gracetune.config.run_config import Adapter, RunConfig
from gracetune.errors import ConfigError, GracetuneError
from gracetune.models.registry import spec_of
from gracetune.models.source import ASSISTANT_FILE, ModelSource
from gracetune.models.spec import EightBitLayers, PartPlacement
from gracetune.train.run import RunOptions, train
from gracetune.train.view import CollectingView
from runs.made_runs import FLAVOURS, TinyModel, config_for, run
from runs.test_resume import Interrupting, losses
from servers.hub import HubServer
from unit.models.model_inputs import answer

CPU = torch.device("cpu")
FLAVOUR = "schnell"
TARGETS = ("attn.to_q", "attn.to_v")
SAMPLES: dict[str, Any] = {
    "steps": 2, "width": 64, "height": 64, "every_steps": 2, "prompts": [{"prompt": "a cat", "seed": 5}]
}  # fmt: skip


def assistant_state(tiny_model: TinyModel, *, seed: int = 0, rank: int = 3, family: str = "flux") -> AdapterState:
    """An assistant on all of the family's layers, with values that change the prediction."""
    flavour = FLAVOUR if family == "flux" else FLAVOURS[family]
    spec, source = spec_of(family), ModelSource("tiny", tiny_model(family, flavour))
    denoiser = spec.load_denoiser(source, spec.inspect(source).experts[0], PartPlacement(CPU, torch.float32))
    options = Adapter.model_validate({"kind": "lora", "rank": rank})
    attached = attach(denoiser, options, family=family, default_targets=spec.default_targets, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in attached.parameters().values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return attached.state()


@pytest.fixture(scope="module")
def assistant(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a LoRA, as diffusers saves it."""
    folder = tmp_path_factory.mktemp("assistant")
    save(folder / ASSISTANT_FILE, assistant_state(tiny_model), "diffusers", torch.float32)
    return folder


def schnell(tiny_model: TinyModel, root: Path, assistant: str | Path | None, **sections: Any) -> RunConfig:
    model = {"assistant_adapter": None if assistant is None else str(assistant), **sections.pop("model", {})}
    training = {"max_steps": 2, **sections.pop("training", {})}
    adapter = {"targets": TARGETS, **sections.pop("adapter", {})}
    sections = {
        **sections,
        "checkpoints": {"save_dtype": "fp32", "every_steps": None, **sections.get("checkpoints", {})},
    }
    return config_for(
        "flux", tiny_model, root, flavour=FLAVOUR, model=model, training=training, adapter=adapter, **sections
    )


def learned(config: RunConfig) -> list[float]:
    return [loss for _, _, loss, _ in losses(config)]


def exported(config: RunConfig) -> Path:
    (file,) = Path(config.output_dir).glob("*.safetensors")
    return file


def images(config: RunConfig, step: int) -> list[bytes]:
    return [file.read_bytes() for file in sorted((Path(config.output_dir) / "samples").glob(f"{step:09d}_*.png"))]


def rejected(config: RunConfig) -> str:
    """The run is rejected before anything is written."""
    with pytest.raises(ConfigError) as raised:
        run(config)
    written = {file.name for file in Path(config.output_dir).rglob("*")}
    assert written <= {"cache", "gracetune-fingerprints.json"}
    return str(raised.value)


def test_training_is_that_of_a_base_with_the_assistant_merged(
    tiny_model: TinyModel, tmp_path: Path, assistant: Path
) -> None:
    merged = shutil.copytree(tiny_model("flux", FLAVOUR), tmp_path / "merged")
    shutil.rmtree(merged / "transformer")
    state = open_adapter(assistant / ASSISTANT_FILE, "flux").state()
    merge_into(state, tiny_model("flux", FLAVOUR) / "transformer", merged / "transformer")
    heard = CollectingView()
    under = schnell(tiny_model, tmp_path / "under", assistant)
    plain = schnell(tiny_model, tmp_path / "plain", None)
    whole = schnell(tiny_model, tmp_path / "whole", None, model={"path": str(merged)})
    run(under, heard)
    run(plain)
    run(whole)
    assert learned(under) == pytest.approx(learned(whole), rel=1e-5)
    assert abs(learned(under)[0] - learned(plain)[0]) > 1e-3
    ours, theirs = load_file(exported(under)), load_file(exported(whole))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.allclose(tensor, theirs[name], atol=2e-4), name
    line = f"assistant adapter: {ASSISTANT_FILE} on {len(state.layers)} layers"
    assert any(stated.startswith(line) for stated in heard.lines)


def test_samples_and_the_file_are_of_the_model_without_it(
    tiny_model: TinyModel, tmp_path: Path, assistant: Path
) -> None:
    under = schnell(tiny_model, tmp_path / "under", assistant, validation=SAMPLES, adapter={"rank": 2})
    run(under)
    (found,) = images(under, 2)
    state = open_adapter(exported(under), "flux").state()
    assert all(path.endswith(TARGETS) for path in state.layers)
    assert {layer.rank for layer in state.layers.values()} == {2}
    # The plain base with the exported file: its first samples, before a step is taken.
    samples = {**SAMPLES, "every_steps": None, "at_start": True}
    adapter = {"rank": 2, "init_from": str(exported(under))}
    again = schnell(
        tiny_model, tmp_path / "again", None, validation=samples, adapter=adapter, training={"max_steps": 1}
    )
    run(again)
    assert images(again, 0) == [found]
    other = schnell(
        tiny_model, tmp_path / "other", None, validation=samples, training={"max_steps": 1}, adapter={"rank": 2}
    )
    run(other)
    assert images(other, 0) != [found]


@pytest.mark.parametrize("family", ["z_image", pytest.param("krea2", marks=pytest.mark.full)])
def test_turbo_is_trained_under_its_assistant_only(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """A DoRA with samples, stopped and resumed: equal to the uninterrupted run. diffusers loads its file."""
    from diffusers import DiffusionPipeline

    file, folder = tmp_path / "assistant.safetensors", tiny_model(family, "turbo")
    state = assistant_state(tiny_model, family=family)
    save(file, state, "comfyui", torch.float32)  # as ai-toolkit writes it, with `diffusion_model.`
    assert {name.split(".")[0] for name in load_file(file)} == {"diffusion_model"}

    def turbo(name: str, **model: Any) -> RunConfig:
        return config_for(
            family, tiny_model, tmp_path / name, flavour="turbo", model=model, adapter={"kind": "dora", "rank": 2},
            training={"max_steps": 4, "batch_size": 2}, validation=SAMPLES,
            checkpoints={"every_steps": 2, "format": "diffusers", "save_dtype": "fp32"},
        )  # fmt: skip

    for flavour in ("turbo", None):
        assert "distilled" in rejected(turbo("rejected", flavour=flavour))
    whole, stopped = (turbo(name, assistant_adapter=str(file)) for name in ("whole", "stopped"))
    heard = CollectingView()
    run(whole, heard)
    assert any(line.startswith("assistant adapter: ") for line in heard.lines)
    run(stopped, Interrupting(2))
    run(stopped)
    assert learned(stopped) == learned(whole)
    final = [Path(config.output_dir) / "tiny.safetensors" for config in (stopped, whole)]
    assert final[0].read_bytes() == final[1].read_bytes()
    assert images(stopped, 4) == images(whole, 4) != images(whole, 2)
    pipeline = DiffusionPipeline.from_pretrained(folder, text_encoder=None, tokenizer=None, vae=None)
    pipeline.load_lora_weights(final[1])
    loaded = {path for path, module in pipeline.transformer.named_modules() if hasattr(module, "lora_A")}
    assert loaded == set(open_adapter(final[1], family).state().layers)


def test_another_one_is_another_run(tiny_model: TinyModel, tmp_path: Path, assistant: Path) -> None:
    config = schnell(tiny_model, tmp_path, assistant, checkpoints={"every_steps": 1})
    run(config)
    identity = read_manifest(Path(config.output_dir) / "checkpoints" / "checkpoint-2").metadata.identity
    assert "part assistant_adapter" in identity
    second = tmp_path / "second.safetensors"
    save(second, assistant_state(tiny_model, seed=1), "diffusers", torch.float32)
    for name in (str(second), None):
        model = config.model.model_copy(update={"assistant_adapter": name})
        longer = config.training.model_copy(update={"max_steps": 3})
        with pytest.raises(GracetuneError) as raised:
            run(config.model_copy(update={"model": model, "training": longer}))
        assert "part assistant_adapter was" in str(raised.value)
    assert run(config.model_copy(update={"training": longer})).step == 3


def test_what_is_no_assistant_of_this_model(tiny_model: TinyModel, tmp_path: Path, assistant: Path) -> None:
    """The problem is found before anything is loaded or written."""
    made: dict[str, tuple[Path, str]] = {}

    def add(name: str, tensors: Mapping[str, torch.Tensor], words: str) -> None:
        save_file(dict(tensors), tmp_path / f"{name}.safetensors")
        made[name] = (tmp_path / f"{name}.safetensors", words)

    good = load_file(assistant / ASSISTANT_FILE)
    first = next(name for name in good if name.endswith("attn.to_q.lora_A.weight"))
    add("narrow", {**good, first: good[first][:, :-1].clone()}, "inputs, the layer has")
    add("elsewhere", {key.replace("blocks.0.", "blocks.7."): one for key, one in good.items()}, "no such layer")
    save(tmp_path / "sdxl.safetensors", assistant_state(tiny_model, family="sdxl"), "diffusers", torch.float32)
    made["sdxl"] = (tmp_path / "sdxl.safetensors", "it may be of another family")
    stem = "transformer.single_transformer_blocks.0.attn.to_q"
    lokr = {f"{stem}.lokr_w1": torch.ones(2, 2), f"{stem}.lokr_w2": torch.ones(16, 16)}
    add("lokr", lokr, "LoRA of linear layers")
    (tmp_path / "torn.safetensors").write_bytes((assistant / ASSISTANT_FILE).read_bytes()[:-100])
    made["torn"] = (tmp_path / "torn.safetensors", "torn.safetensors")
    made["empty"] = (tmp_path / "empty", ASSISTANT_FILE)
    made["empty"][0].mkdir()
    made["missing"] = (tmp_path / "missing.safetensors", "which does not exist")
    for name, (path, words) in made.items():
        message = rejected(schnell(tiny_model, tmp_path / name / "run", path))
        assert words in message, name
        assert "model.assistant_adapter" in message or name in ("torn", "sdxl"), name


def test_models_with_two_denoisers_take_none(tiny_model: TinyModel, tmp_path: Path) -> None:
    file = tmp_path / "wan.safetensors"
    save(file, assistant_state(tiny_model, family="wan"), "diffusers", torch.float32)
    config = config_for("wan", tiny_model, tmp_path, model={"assistant_adapter": str(file)})
    assert "a model with one denoiser" in rejected(config)
    (broken,) = [one for one in broken_rules(config) if one.path == ("model", "assistant_adapter")]
    assert broken.expected == "a model with one denoiser"
    whole = schnell(tiny_model, tmp_path, file, adapter={"kind": "full_finetune", "targets": ()})
    (broken,) = [one for one in broken_rules(whole) if one.path == ("model", "assistant_adapter")]
    assert broken.expected == "an adapter to train beside it"


@pytest.mark.full
def test_from_a_hub(tiny_model: TinyModel, tmp_path: Path, assistant: Path, hub: HubServer) -> None:
    hub.model("owner/adapter", {ASSISTANT_FILE: (assistant / ASSISTANT_FILE).read_bytes(), "README.md": b"# It"})
    hub.model("owner/other", {"lora.safetensors": (assistant / ASSISTANT_FILE).read_bytes()})
    found = []
    for number, name in enumerate(("owner/adapter", "hf://owner/other/lora.safetensors", str(assistant))):
        config = schnell(tiny_model, tmp_path / str(number), name)
        train(config, environment=Environment.capture(), options=RunOptions(), view=CollectingView())
        found.append(learned(config))
    assert found[0] == found[1] == found[2]
    lacking = schnell(tiny_model, tmp_path / "lacking", "owner/other")
    with pytest.raises(ConfigError, match=r"has no pytorch_lora_weights[\s\S]*hf://owner/other/FILE"):
        train(lacking, environment=Environment.capture(), options=RunOptions(), view=CollectingView())


@pytest.mark.parametrize("held", ["fp8", "int8"])
def test_weights_in_8_bits_are_rounded_without_it(tiny_model: TinyModel, assistant: Path, held: Any) -> None:
    """Switched on and off on 8-bit layers, the assistant changes the output as it does on bf16 layers."""
    spec, source = spec_of("flux"), ModelSource("tiny", tiny_model("flux", "dev"))  # the same blocks
    path = assistant / ASSISTANT_FILE
    file = as_assistant(path, open_adapter(path, "flux").state(), "flux")

    def loaded(eight_bits: EightBitLayers | None) -> torch.nn.Module:
        placement = PartPlacement(CPU, torch.bfloat16, eight_bits=eight_bits)
        return spec.load_denoiser(source, spec.inspect(source).experts[0], placement)

    bits, plain = loaded(EightBitLayers(spec.default_targets, kind=held)), loaded(None)
    before, exact = answer(bits, torch.bfloat16), answer(plain, torch.bfloat16)
    handle = assist(bits, file, CPU, torch.bfloat16)
    with handle.absent():
        assert torch.equal(answer(bits, torch.bfloat16), before)
    merge_module(file.state, plain)
    ours, theirs = (
        answer(bits, torch.bfloat16).float() - before.float(),
        answer(plain, torch.bfloat16).float() - exact.float(),
    )
    assert torch.nn.functional.cosine_similarity(ours.flatten().float(), theirs.flatten().float(), dim=0) > 0.97
    assert not any("assistant" in name for name in bits.state_dict())
