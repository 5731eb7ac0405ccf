"""The report's instructions work when they are pasted: diffusers then predicts what was trained."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gracetune.adapters.adapter_files import save
from gracetune.adapters.loading_steps import loading_steps, newest_files
from gracetune.adapters.merge import merge_module
from gracetune.adapters.state import AdapterState, ExpertStage
from gracetune.models.registry import KEY_MAPS
from gracetune.telemetry.events import RunStarted
from runs.test_commands import gracetune
from unit.adapters.formats import making
from unit.adapters.formats.predicting import predict

TinyModel = Callable[[str, str], Path]
LYCORIS = ["diffusers with LyCORIS, first in a shell", "diffusers with LyCORIS"]


def saved(
    folder: Path, family: str, algorithm: str, format: Any, model: Path, experts: tuple[ExpertStage, ...] = ("",)
) -> list[AdapterState]:
    """Files of a run as `output.save_weights` names them."""
    shapes = making.in_blocks(making.layer_shapes(family, lambda *_: model))
    states = []
    for number, expert in enumerate(experts):
        state = making.state(family, shapes, algorithm, rank=2, expert=expert, seed=number)
        ending = f"_{expert}" if expert else ""
        save(folder / f"cats{ending}.safetensors", state, format, torch.float32)
        states.append(state)
    return states


def steps_for(folder: Path, family: str, algorithm: str, model: Path) -> dict[str, str]:
    started = RunStarted(run="cats", family=family, adapter=algorithm, model=str(model))
    return loading_steps(started, sorted(folder.glob("*.safetensors")))


def pasted(steps: dict[str, str]) -> Any:
    """Run the commands in the given order, then the code. Return the pipeline."""
    names: dict[str, Any] = {}
    for text in steps.values():
        if text.startswith("gracetune "):
            for line in text.splitlines():
                assert gracetune(*shlex.split(line)[1:]) == 0
        elif "import " in text:
            exec(text, names)  # what a user does with it
    return names["pipe"]


@pytest.mark.parametrize(
    ("family", "algorithm", "format", "programs"),
    [
        ("sdxl", "lora", "kohya", ["ComfyUI", "diffusers", "Other programs"]),
        ("sdxl", "lokr", "comfyui", ["ComfyUI", *LYCORIS]),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("sdxl", "lokr", "kohya", ["ComfyUI", *LYCORIS, "Other programs"]),
                ("sdxl", "lora", "comfyui", ["ComfyUI", "diffusers, first in a shell", "diffusers"]),
                ("sdxl", "lokr", "lycoris", ["ComfyUI", "diffusers with LyCORIS", "Other programs"]),
                ("flux", "lora", "comfyui", ["ComfyUI", "diffusers"]),
                ("flux", "dora", "diffusers", ["ComfyUI", "ComfyUI, in a shell", "diffusers"]),
                ("qwen_image", "lora", "kohya", ["ComfyUI", "diffusers", "Other programs"]),
                ("stable_audio", "lora", "comfyui", ["ComfyUI", "diffusers, first in a shell", "diffusers"]),
            )
        ),
    ],
)
def test_pasting_them_gives_what_was_trained(
    family: str, algorithm: str, format: str, programs: list[str], tiny_model: TinyModel, tmp_path: Path
) -> None:
    model = tiny_model(family, making.FLAVOURS[family])
    (state,) = saved(tmp_path, family, algorithm, format, model)
    steps = steps_for(tmp_path, family, algorithm, model)
    assert [*steps] == programs
    denoiser = getattr(pasted(steps), KEY_MAPS[family].component)
    ours = making.denoiser(family, model)
    base = predict(family, ours)
    merge_module(state, ours)
    torch.testing.assert_close(predict(family, denoiser), predict(family, ours), atol=2e-5, rtol=1e-5)
    assert (predict(family, ours) - base).abs().max() > 1e-3


@pytest.mark.full
@pytest.mark.parametrize(("algorithm", "format"), [("lora", "comfyui"), ("lokr", "lycoris")])
def test_both_experts_of_a_pair(algorithm: str, format: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("wan", "t2v-14b-2.2")
    states = saved(tmp_path, "wan", algorithm, format, model, ("high_noise", "low_noise"))
    steps = steps_for(tmp_path, "wan", algorithm, model)
    if format == "comfyui":
        assert "cats_high_noise.safetensors and cats_low_noise.safetensors into ComfyUI" in steps["ComfyUI"]
    pipe = pasted(steps)
    for component, state in zip(("transformer", "transformer_2"), states, strict=True):
        ours = making.denoiser("wan", model, component)
        merge_module(state, ours)
        found = predict("wan", getattr(pipe, component))
        torch.testing.assert_close(found, predict("wan", ours), atol=2e-5, rtol=1e-5)


def test_a_file_that_no_program_loads_has_a_lora_that_comes_close(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("sdxl", "base-1.0")
    saved(tmp_path, "sdxl", "ia3", "lycoris", model)
    steps = steps_for(tmp_path, "sdxl", "ia3", model)
    assert "does not load this file" in steps["diffusers"]
    (line,) = steps["diffusers, in a shell"].splitlines()
    assert gracetune(*shlex.split(line)[1:]) == 0
    assert (tmp_path / "cats_diffusers.safetensors").is_file()


def test_the_newest_files_of_the_run() -> None:
    names = [
        "cats_000000020.safetensors",
        "cats.safetensors",
        "dogs.safetensors",
        "finished-cats_000000030.safetensors",
    ]
    files = [Path(name) for name in names]
    assert newest_files("cats", files) == [Path("cats.safetensors")]
    assert newest_files("cats", files[:1]) == files[:1]
    pair = [Path(f"cats_{step:09}_{expert}.safetensors") for step in (9, 10) for expert in ("high_noise", "low_noise")]
    assert newest_files("cats", pair) == pair[2:]


def test_a_full_model_and_an_empty_run_have_no_instructions(tmp_path: Path) -> None:
    assert loading_steps(RunStarted(run="cats"), []) == {}
    whole = RunStarted(run="cats", adapter="full_finetune")
    assert loading_steps(whole, [tmp_path / "cats.safetensors"]) == {}
