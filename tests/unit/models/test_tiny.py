"""The built-in tiny models: ordinary folders that diffusers' own pipelines load and run."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage
from hypothesis import given
from hypothesis import strategies as st

from gracetune.config.families import FAMILIES, find_flavour, flavours
from gracetune.errors import ConfigError
from gracetune.models import tiny
from gracetune.models.common.tiny_parts import TinyWeights, clip_tokenizer, save, t5_tokenizer
from gracetune.models.footprint import AudioLatents
from gracetune.models.hub_download import index_parts
from gracetune.models.qwen_image.tiny import qwen_tokenizer
from gracetune.models.registry import FOOTPRINTS, geometry, spec_of
from gracetune.testing import tiny_models
from unit.models.model_inputs import as_tensor
from unit.models.tiny_samples import ALL, DENOISERS, ONE_EACH, Recorder, load, sample, small_references

__all__ = ["small_references"]

TinyModel = Callable[[str, str], Path]
every_flavour = pytest.mark.parametrize(("family", "flavour"), ALL)
every_family = pytest.mark.parametrize(("family", "flavour"), ONE_EACH)

T5, CLIP, QWEN = t5_tokenizer(), clip_tokenizer(), qwen_tokenizer()

# The last text stream of Qwen-Image ends in nothing.
UNREACHED = {
    "qwen_image": (
        "transformer_blocks.1.attn.to_add_out.*",
        "transformer_blocks.1.attn.add_q_proj.*",
        "transformer_blocks.1.attn.norm_added_q.*",
        "transformer_blocks.1.txt_mlp.*",
    )
}


def contents(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@every_family
def test_the_same_bytes_every_time(family: str, flavour: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    again = tiny.build(family, flavour, tmp_path / "again")
    assert torch.equal(torch.get_rng_state(), state)
    found = contents(again)
    assert found == contents(tiny_model(family, flavour))
    assert any(name.endswith(".safetensors") for name in found)
    assert sum(path.stat().st_size for path in again.rglob("*")) < 5e6


@pytest.mark.full
def test_the_same_bytes_in_another_process(tiny_model: TinyModel, tmp_path: Path) -> None:
    named = [("wan", "t2v-14b-2.2"), ("qwen_image", "edit-2509"), ("sdxl", "base-1.0"), ("stable_audio", "open-1.0")]
    program = "from pathlib import Path\nfrom gracetune.models.tiny import build\n"
    program += f"for family, flavour in {named}: build(family, flavour, Path(family))"
    environment = os.environ | {"PYTHONHASHSEED": "12345", "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, env=environment, capture_output=True)
    for family, flavour in named:
        assert contents(tmp_path / family) == contents(tiny_model(family, flavour))


def test_another_seed_gives_other_weights_of_the_same_kind(tiny_model: TinyModel, tmp_path: Path) -> None:
    one, other = contents(tiny_model("flux", "dev")), contents(tiny.build("flux", "dev", tmp_path / "other", seed=1))
    assert one.keys() == other.keys()
    assert {name for name in one if one[name] != other[name]} == {n for n in one if n.endswith(".safetensors")}


@every_family
@pytest.mark.usefixtures("small_references")
def test_built_and_reloaded_models_generate_the_same(
    family: str, flavour: str, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Any] = []
    monkeypatch.setattr(f"gracetune.models.{family}.tiny.save", lambda pipeline, *_, **__: built.append(pipeline))
    tiny.build(family, flavour, tmp_path / "unwritten")
    built[0].set_progress_bar_config(disable=True)
    read = load(tiny_model(family, flavour))
    assert type(read) is type(built[0])
    generated = sample(read, family, flavour)
    assert np.isfinite(generated).all()
    assert 0.01 < generated.std() < 10
    for name, part in built[0].components.items():
        if isinstance(part, torch.nn.Module):
            stored = read.components[name].state_dict()
            assert stored.keys() == part.state_dict().keys()
            assert all(torch.equal(weight, stored[key]) for key, weight in part.state_dict().items())
    # Weights mapped from a file lie at other addresses, where the CPU's kernels add up in another order.
    np.testing.assert_allclose(generated, sample(built[0], family, flavour), rtol=1e-4, atol=1e-5)
    assert not np.array_equal(generated, sample(read, family, flavour, prompt="something else"))


@every_flavour
def test_it_is_the_pipeline_of_the_published_weights(family: str, flavour: str, tiny_model: TinyModel) -> None:
    index = json.loads((tiny_model(family, flavour) / "model_index.json").read_text())
    published = find_flavour(family, flavour)
    assert published is not None
    assert (index.get("transformer_2", [None])[0] is not None) is published.dual_expert
    for library, _ in index_parts(index).values():
        assert library in ("diffusers", "transformers", "stable_audio", None)


@every_flavour
def test_shapes_match_the_family(family: str, flavour: str, tiny_model: TinyModel) -> None:
    vae = load(tiny_model(family, flavour)).vae
    latents = next(footprint for footprint in FOOTPRINTS[family] if footprint.flavour == flavour).latents
    requested = geometry(family, flavour)
    with torch.no_grad():
        if isinstance(latents, AudioLatents):
            assert vae.config.sampling_rate == requested.sample_rate
            sound = torch.zeros(1, requested.channels or 0, 3 * (requested.audio_multiple or 0))
            assert vae.encode(sound).latent_dist.mean.shape[2] == 3  # fewer channels than published, see its recipe
            return
        side, frames = requested.side_multiple, requested.frame_step + 1
        video = torch.zeros(1, 3, *((frames,) if requested.makes == "video" else ()), side, side)
        if type(vae) is AutoencoderKLQwenImage:  # a video VAE that sees one frame
            video = video[:, :, None]
        shape = vae.encode(video).latent_dist.mean.shape
    assert (shape[1], shape[-1], shape[-2]) == (latents.channels, side // latents.spatial, side // latents.spatial)
    if requested.makes == "video":
        assert shape[2] == 1 + (frames - 1) // latents.temporal


@every_family
@pytest.mark.usefixtures("small_references")
def test_gradients_reach_every_parameter(family: str, flavour: str, tiny_model: TinyModel) -> None:
    pipeline = load(tiny_model(family, flavour))
    recorder = Recorder().watch(pipeline)
    # At the smallest side the bottom of SDXL is one pixel, and attention over one thing has no choice to learn.
    sides = {} if geometry(family, flavour).makes == "audio" else {"width": 64, "height": 64}
    sample(pipeline, family, flavour, **sides)
    for name, calls in recorder.calls.items():
        module = pipeline.components[name]
        as_tensor(module(**calls[0] | {"return_dict": False})[0]).square().mean().backward()
        trained = {key: p for key, p in module.named_parameters() if p.requires_grad}
        without = {key for key, p in trained.items() if p.grad is None or not p.grad.any()}
        supported = UNREACHED.get(family, ())
        assert without == {key for key in trained if any(fnmatch(key, pattern) for pattern in supported)}
        assert all(p.grad.isfinite().all() for p in module.parameters() if p.grad is not None)


@pytest.mark.parametrize(("flavour", "boundary"), [("t2v-14b-2.2", 875), ("i2v-14b-2.2", 900)])
@pytest.mark.parametrize("steps", [2, 5])
def test_both_experts_are_used(flavour: str, boundary: float, steps: int, tiny_model: TinyModel) -> None:
    pipeline = load(tiny_model("wan", flavour))
    recorder = Recorder().watch(pipeline)
    sample(pipeline, "wan", flavour, steps=steps, guidance_scale=1.0)
    high, low = ([float(call["timestep"].max()) for call in recorder.calls[name]] for name in DENOISERS[:2])
    timesteps = pipeline.scheduler.timesteps
    assert high == [float(t) for t in timesteps if t >= boundary]
    assert low == [float(t) for t in timesteps if t < boundary]
    assert high
    assert low
    experts = [dict(pipeline.components[name].named_parameters()) for name in DENOISERS[:2]]
    assert all(not torch.equal(weight, experts[1][key]) for key, weight in experts[0].items())


@pytest.mark.parametrize("flavour", ["edit-2509", "edit-2511"])
@pytest.mark.usefixtures("small_references")
def test_several_references(flavour: str, tiny_model: TinyModel) -> None:
    pipeline = load(tiny_model("qwen_image", flavour))
    recorder = Recorder().watch(pipeline)
    generated = [sample(pipeline, "qwen_image", flavour, references=count) for count in (1, 3)]
    tokens = [call["hidden_states"].shape[1] for call in recorder.calls["transformer"]]
    assert tokens == [1 + 4] * 2 + [1 + 3 * 4] * 2  # one token to draw, four of each reference; two steps each
    assert not np.array_equal(*generated)


def test_the_5b_generates_from_an_image_too(tiny_model: TinyModel) -> None:
    from diffusers import WanImageToVideoPipeline

    pipeline = WanImageToVideoPipeline.from_pretrained(tiny_model("wan", "ti2v-5b-2.2"))
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline.config.expand_timesteps
    assert np.isfinite(sample(pipeline, "wan", "ti2v-5b-2.2")).all()


def test_v_prediction(tiny_v_prediction: Path, tiny_model: TinyModel) -> None:
    pipeline = load(tiny_v_prediction)
    assert pipeline.scheduler.config.prediction_type == "v_prediction"
    assert pipeline.scheduler.config.rescale_betas_zero_snr
    generated = sample(pipeline, "sdxl", "base-1.0")
    assert np.isfinite(generated).all()
    plain = load(tiny_model("sdxl", "base-1.0"))
    assert plain.scheduler.config.prediction_type == "epsilon"
    assert not np.array_equal(generated, sample(plain, "sdxl", "base-1.0"))


@given(st.text(min_size=1))
def test_tokenizers_encode_every_text(text: str) -> None:
    for tokenizer in (T5, CLIP):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.unk_token_id not in ids
        assert max(ids, default=0) < len(tokenizer)
    assert QWEN.decode(QWEN(text).input_ids) == QWEN.backend_tokenizer.normalizer.normalize_str(text)


def test_tokenizers_reload_from_their_files(tiny_model: TinyModel) -> None:
    text = "Ein roter Kater, 猫 🐈, naïve ﷽"
    sdxl, flux = load(tiny_model("sdxl", "base-1.0")), load(tiny_model("flux", "dev"))
    assert sdxl.tokenizer(text).input_ids == CLIP(text).input_ids
    assert flux.tokenizer_2(text).input_ids == T5(text).input_ids
    assert T5.decode(T5(text).input_ids, skip_special_tokens=True) == text
    assert sdxl.tokenizer_2.pad_token_id == 0
    assert sdxl.tokenizer.pad_token_id == sdxl.tokenizer.eos_token_id
    assert flux.tokenizer_2("a", padding="max_length", max_length=3).input_ids[1:] == [1, 0]


@pytest.mark.parametrize("flavour", ["t2i", "edit", "edit-2509"])
def test_templates_have_the_length_the_pipelines_cut_off(flavour: str, tiny_model: TinyModel) -> None:
    pipeline = load(tiny_model("qwen_image", flavour))
    before, _ = pipeline.prompt_template_encode.split("{}")
    before = before.removesuffix("<|vision_start|><|image_pad|><|vision_end|>")
    assert len(pipeline.tokenizer(before).input_ids) == pipeline.prompt_template_encode_start_idx


def test_cached_builds_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: tiny_models.cached("flux", "schnell", tmp_path), range(4)))
    assert len(folders) == 1
    assert [*tmp_path.iterdir()] == [*folders]  # nothing half-built beside it
    folder = folders.pop()
    before = (folder / "model_index.json").stat()
    assert tiny_models.cached("flux", "schnell", tmp_path) == folder
    assert (folder / "model_index.json").stat() == before
    assert tiny_models.cached("flux", "schnell", tmp_path, seed=1) != folder


def test_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    class FullDisk:
        def save_pretrained(self, save_directory: str, /) -> None:
            (Path(save_directory) / "half.safetensors").write_bytes(b"half")
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        save(FullDisk(), tmp_path / "model")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("family", "flavour", "expected_text"),
    [
        ("wann", "t2v-14b-2.2", r"model\.family\n  found     wann\n  expected  wan, .*\n  try       wan$"),
        ("wan", "t2v-14b-2.3", r"model\.flavour\n  found     t2v-14b-2\.3\n(.*\n)+  try       t2v-14b-2\.2$"),
        ("sdxl", "xyz", r"found     xyz\n  expected  base-1\.0\n  try       base-1\.0$"),
    ],
)
@pytest.mark.parametrize("call", [tiny.build, lambda f, n, folder: tiny.cached(f, n, folder)])
def test_unknown_names_are_rejected(
    call: Callable[..., Path], family: str, flavour: str, expected_text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=expected_text):
        call(family, flavour, tmp_path / "model")
    assert not [*tmp_path.iterdir()]


def test_nonempty_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(ConfigError, match="is not empty"):
        tiny.build("flux", "schnell", tmp_path)
    with pytest.raises(ConfigError, match="is not empty"):
        tiny.build("flux", "schnell", tmp_path / "mine.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    (tmp_path / "mine.txt").unlink()
    assert (tiny.build("flux", "schnell", tmp_path) / "model_index.json").is_file()


def test_every_family_is_listed_without_loading_torch() -> None:
    program = "import sys, gracetune.models.tiny, gracetune.testing.tiny_models\n"
    program += "from gracetune.models.registry import KEY_MAPS\n"
    program += "from gracetune.models.registry import FOOTPRINTS, GEOMETRIES\n"
    program += "assert all(len([*parts.values()]) == len(parts) for parts in (FOOTPRINTS, GEOMETRIES, KEY_MAPS))\n"
    program += "print(sorted({'torch', 'diffusers', 'transformers', 'tokenizers'} & {*sys.modules}))"
    answer = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert answer.stdout == "[]\n"


def test_builders_reject_unknown_flavours(tmp_path: Path) -> None:
    for family in FAMILIES:
        with pytest.raises(KeyError, match="nothing"):
            spec_of(family).build_tiny(tmp_path / family, "nothing", seed=0)
        assert flavours(family)


def test_modules_continue_one_stream_of_numbers() -> None:
    def two(seed: int) -> list[torch.Tensor]:
        weights = TinyWeights(seed)
        return [weights.build(lambda: torch.nn.Linear(4, 4)).weight.detach() for _ in range(2)]

    first, second = two(0)
    assert not torch.equal(first, second)
    assert all(torch.equal(*pair) for pair in zip(two(0), (first, second), strict=True))
    assert not torch.equal(two(1)[0], first)


def test_a_scale_that_is_one_number_gets_a_value() -> None:
    class Gate(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.scale = (torch.nn.Parameter(torch.tensor(value)) for value in (0.0, 2.0))

    built = TinyWeights(0).build(Gate)
    assert 0 < abs(built.gate.item()) < 0.1
    assert built.scale.item() != 2.0
