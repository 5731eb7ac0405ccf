"""Every countable number of a footprint, compared with the published architecture."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import pytest
import torch
from torch import nn

from gracetune.adapters import targets
from gracetune.adapters.attach import describe
from gracetune.adapters.trainable import select, trainable
from gracetune.config.families import FAMILIES, flavours
from gracetune.config.run_config import Adapter, Model
from gracetune.models.footprint import Footprint, FootprintBlock
from gracetune.models.registry import FOOTPRINTS, footprint_of, spec_of
from gracetune.planning.activations import RecomputePolicy, StepMethod, activations
from unit.models import published
from unit.models.meta_memory import (
    BF16,
    LoraLinear,
    RebuiltLinear,
    adapt,
    inference_peak,
    on_meta,
    parameters,
    train_step,
)

ALL = [footprint for family in FOOTPRINTS.values() for footprint in family]
FIRST = {family: footprints[0] for family, footprints in FOOTPRINTS.items()}
CODECS = {footprint.codec.name: footprint.codec for footprint in ALL}
ENCODERS = {encoder.name: encoder for footprint in ALL for encoder in footprint.encoders}


def name(footprint: Footprint) -> str:
    return f"{footprint.family}-{footprint.flavour}"


class TestRegistry:
    def test_every_flavour_has_a_footprint_in_the_order_of_the_names(self) -> None:
        assert list(FOOTPRINTS) == list(FAMILIES)
        for family in FAMILIES:
            assert [footprint.flavour for footprint in FOOTPRINTS[family]] == [f.name for f in flavours(family)]
            assert all(footprint.family == family for footprint in FOOTPRINTS[family])

    def test_two_experts_where_the_names_say_so(self) -> None:
        for footprint in ALL:
            flavour = next(f for f in flavours(footprint.family) if f.name == footprint.flavour)
            assert (len(footprint.denoisers) == 2) == flavour.dual_expert
            assert footprint.references == flavour.edits

    def test_a_flavour_is_found_by_name_by_weights_or_is_the_first(self) -> None:
        assert footprint_of(Model(family="wan", flavour="ti2v-5b-2.2"))[0].width == 3072
        assert footprint_of(Model(family="flux"))[0].flavour == "dev"
        by_weights = Model(family="wan", path="Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
        assert footprint_of(by_weights) == (FOOTPRINTS["wan"][3], None)

    def test_unknown_path_yields_a_stated_assumption(self) -> None:
        footprint, assumption = footprint_of(Model(family="wan", path="/models/mine"))
        assert footprint.flavour == "t2v-14b-2.2"
        assert assumption is not None
        assert "model.flavour" in assumption


# One flavour of those whose footprints say the same; that the models are the same too the full tests see.
DENOISERS = [*{(one.parameters, one.blocks): one for one in reversed(ALL)}.values()]


class TestParameters:
    @pytest.mark.parametrize("footprint", DENOISERS, ids=name)
    def test_of_the_denoiser_and_of_each_matrix(self, footprint: Footprint) -> None:
        self.check_denoiser(footprint)

    @pytest.mark.full
    @pytest.mark.parametrize("footprint", ALL, ids=name)
    def test_of_every_denoiser(self, footprint: Footprint) -> None:
        self.check_denoiser(footprint)

    def check_denoiser(self, footprint: Footprint) -> None:
        with on_meta():
            model = published.denoiser(footprint.family, footprint.flavour)
        assert parameters(model) == footprint.parameters
        assert conv_defaults(footprint) == conv_layers(model, footprint.family)
        for block in footprint.blocks:
            for linear in block.linears:
                if linear.conv_default:
                    continue
                found = [
                    module
                    for module in matching(model, block, f"*{linear.name}")
                    if (module.in_features, module.out_features) == (linear.inputs, linear.outputs)
                ]
                assert len(found) == block.count, linear.name
                assert all((module.bias is not None) == linear.bias for module in found), linear.name

    @pytest.mark.parametrize("encoder", ENCODERS)
    def test_of_the_encoders(self, encoder: str) -> None:
        with on_meta():
            model = published.ENCODERS[encoder]()
        assert parameters(model) == ENCODERS[encoder].parameters

    @pytest.mark.parametrize("codec", CODECS)
    def test_of_the_vaes(self, codec: str) -> None:
        with on_meta():
            model = published.VAES[codec].build()
        assert parameters(model) == CODECS[codec].parameters


def conv_defaults(footprint: Footprint) -> Counter[tuple[str, tuple[int, ...], bool]]:
    """What joins the targets where a rank for convolutions is given: name, shape of the weight, bias."""
    return Counter(
        (linear.name.rpartition(".")[2], (linear.outputs, linear.inputs, *linear.kernel), linear.bias)
        for block in footprint.blocks
        for linear in block.linears
        for _ in range(block.count)
        if linear.conv_default
    )


def conv_layers(model: nn.Module, family: str) -> Counter[tuple[str, tuple[int, ...], bool]]:
    patterns = spec_of(family).conv_targets
    paths = targets.select(describe(model), patterns).paths if patterns else ()
    layers = [(path.rpartition(".")[2], model.get_submodule(path)) for path in paths]
    return Counter((name, tuple(layer.weight.shape), layer.bias is not None) for name, layer in layers)


def matching(model: nn.Module, block: FootprintBlock, pattern: str) -> list[nn.Linear]:
    """Linear layers inside the repeated blocks; a U-Net has them deep inside, and at two widths."""
    start = {"transformers": "*attentions.*"}.get(block.name, f"{block.name}.")
    start = f"*{start}" if block.name.startswith("attentions") else start
    return [
        module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and fnmatchcase(path, f"{start}{pattern.removeprefix('*attentions.*.')}")
    ]


TEXT = {"sdxl": 77, "stable_audio": 130}
SIDE = {"sdxl": 128, "stable_audio": 32}
LORA = Adapter(kind="lora", rank=16)
EVERY = Adapter(kind="lora", rank=16, within=("transformer_blocks", "single_transformer_blocks", "layers"))
"""The modulation of the blocks too."""
LOKR = Adapter(kind="lokr", factor=16, full_rank=True)
FULL = Adapter(kind="full_finetune")


def layers(family: str, count: int | None) -> dict[str, Any]:
    """Constructor arguments for `count` blocks of each kind; a U-Net has to stay whole."""
    if count is None or family == "sdxl":
        return {}
    if family == "z_image":  # its refiners are not trained: no gradient reaches them
        return {"n_layers": count}
    return {"num_layers": count, **({"num_single_layers": count} if family == "flux" else {})}


def predicted(footprint: Footprint, case: Case, count: int | None) -> int:
    if count is not None and footprint.family != "sdxl":
        blocks = (one if "refiner" in one.name else replace(one, count=count) for one in footprint.blocks)
        footprint = replace(footprint, blocks=tuple(blocks))
    selection = select(footprint, case.adapter)
    side, text = SIDE.get(footprint.family, 64), TEXT.get(footprint.family, 512)
    image = side * side + (1 if footprint.family == "stable_audio" else 0)
    tokens = {"image": image, "text": text, "joint": image + text, "vision": footprint.vision_tokens}
    entries = activations(footprint, tokens, selection, case.method)
    entry = next(entry for entry in entries if entry.policy == case.policy)
    cast = 2 * sum(tensor.elements for tensor in trainable(footprint, selection, case.adapter))
    return entry.total(case.batch) + (cast if case.adapter.kind == "lora" and case.policy == "off" else 0)


def measured(footprint: Footprint, case: Case, count: int | None) -> int:
    """Peak of one step, not counting parameters, gradients and inputs."""
    family = footprint.family
    every = bool(case.adapter.within)
    targets = {linear.name for block in footprint.blocks for linear in block.linears if linear.default or every}
    with on_meta():
        model = published.denoiser(family, footprint.flavour, **layers(family, count))
        side, text = SIDE.get(family, 64), TEXT.get(family, 512)
        inputs = published.inputs(family, footprint.flavour, batch=case.batch, side=side, text=text)
        if case.adapter is not FULL:
            model.requires_grad_(False)
            copies = case.method.adapter_path == "reference"
            wrap = RebuiltLinear if case.adapter is LOKR else lambda base: LoraLinear(base, copies=copies)
            adapt(model, {target.removeprefix("attentions.*.") for target in targets}, wrap)
    return train_step(model, inputs, checkpointing=case.policy == "full").peak


@dataclass(frozen=True)
class Case:
    adapter: Adapter
    path: Literal["auto", "reference"]
    policy: RecomputePolicy
    batch: int = 2

    @property
    def method(self) -> StepMethod:
        return StepMethod(compiled=False, adapter_path=self.path, full_finetune=self.adapter is FULL)


@pytest.mark.usefixtures("gpu_kernels")
class TestEagerActivations:
    """The real forward and backward pass on the meta device, compared with the formula."""

    CASES = (Case(LORA, "reference", "off"), Case(LORA, "auto", "off"), Case(LORA, "auto", "full"),
             Case(FULL, "auto", "off"))  # fmt: skip
    IDS = ("reference", "auto", "checkpointed", "everything trained")

    @pytest.mark.parametrize("case", CASES, ids=IDS)
    def test_each_further_block(self, case: Case) -> None:
        self.check_further_blocks("wan", case)

    @pytest.mark.parametrize("family", ["qwen_image", "flux", "z_image", "stable_audio"])
    def test_each_further_block_of_others(self, family: str) -> None:
        self.check_further_blocks(family, self.CASES[1])

    @pytest.mark.parametrize("family", ["qwen_image", "flux", "z_image"])
    def test_each_further_block_with_its_modulation(self, family: str) -> None:
        self.check_further_blocks(family, Case(EVERY, "auto", "off"))

    @pytest.mark.full
    @pytest.mark.parametrize("family", ["qwen_image", "flux", "z_image", "stable_audio"])
    @pytest.mark.parametrize("case", [CASES[0], *CASES[2:]], ids=[IDS[0], *IDS[2:]])
    def test_each_further_block_of_others_further(self, family: str, case: Case) -> None:
        self.check_further_blocks(family, case)

    def check_further_blocks(self, family: str, case: Case) -> None:
        footprint = FIRST[family]
        grown = measured(footprint, case, 4) - measured(footprint, case, 2)
        expected = predicted(footprint, case, 4) - predicted(footprint, case, 2)
        assert expected == pytest.approx(grown, rel=0.01)

    @pytest.mark.full
    @pytest.mark.parametrize("case", CASES, ids=IDS)
    def test_a_unet(self, case: Case) -> None:
        tolerance = 0.3 if case.policy == "full" else 0.02  # that is 1 GiB, beside 5 GiB of weights
        assert predicted(FIRST["sdxl"], case, None) == pytest.approx(measured(FIRST["sdxl"], case, None), rel=tolerance)

    def test_rebuilt_weights_of_lycoris(self) -> None:
        case = Case(LOKR, "reference", "off", batch=1)
        grown = measured(FIRST["wan"], case, 4) - measured(FIRST["wan"], case, 2)
        assert predicted(FIRST["wan"], case, 4) - predicted(FIRST["wan"], case, 2) == pytest.approx(grown, rel=0.01)

    @pytest.mark.parametrize(
        "flavour", [*FOOTPRINTS["wan"][1:4], FOOTPRINTS["wan"][5], FOOTPRINTS["qwen_image"][4]], ids=name
    )
    def test_other_flavours(self, flavour: Footprint) -> None:
        case = Case(LORA, "auto", "off")
        grown = measured(flavour, case, 3) - measured(flavour, case, 2)
        assert predicted(flavour, case, 3) - predicted(flavour, case, 2) == pytest.approx(grown, rel=0.01)

    @pytest.mark.full
    @pytest.mark.parametrize(("policy", "adapter"), [("off", LORA), ("full", LORA), ("full", LOKR)])
    def test_a_whole_model(self, policy: RecomputePolicy, adapter: Adapter) -> None:
        case = Case(adapter, "reference", policy, batch=1)
        weights = 2 * FIRST["wan"].parameters
        assert weights + predicted(FIRST["wan"], case, None) == pytest.approx(
            weights + measured(FIRST["wan"], case, None), rel=0.02
        )


WITHOUT_HEAD = ("text encoder (Qwen3 8B)", "text encoder (Mistral Small 3)")
"""Language models whose prediction of the next token is not computed."""


class TestPasses:
    """VAEs and encoders without gradients: peak bytes."""

    @pytest.mark.parametrize("name", [name for name, vae in published.VAES.items() if name != "VAE (Oobleck)"])
    def test_one_frame(self, name: str) -> None:
        vae, side, codec = published.VAES[name], 512, CODECS[name]
        with on_meta(torch.float32):
            model = vae.build()
            frames = (1,) if vae.video or name == "VAE (Qwen-Image)" else ()
            image = torch.empty(1, 3, *frames, side, side)
            latents = torch.empty(1, vae.channels, *frames, side // vae.spatial, side // vae.spatial)
            encode = inference_peak(model, lambda: model.encode(image).latent_dist)
            decode = inference_peak(model, lambda: model.decode(latents))
        assert codec.encode == pytest.approx(encode / 4 / side**2, rel=0.01)
        assert codec.decode == pytest.approx(decode / 4 / side**2, rel=0.01)

    @pytest.mark.parametrize("name", ["VAE (Wan 2.1)", pytest.param("VAE (Wan 2.2)", marks=pytest.mark.full)])
    def test_seventeen_frames(self, name: str) -> None:
        vae, side, codec = published.VAES[name], 256, CODECS[name]
        with on_meta(torch.float32):
            model = vae.build()
            clip = torch.empty(1, 3, 17, side, side)
            latents = torch.empty(1, vae.channels, 5, side // vae.spatial, side // vae.spatial)
            encode = inference_peak(model, lambda: model.encode(clip).latent_dist)
            decode = inference_peak(model, lambda: model.decode(latents))
        assert codec.encode_video + 3 * 17 == pytest.approx(encode / 4 / side**2, rel=0.05)
        assert codec.decode_video + 3 * 17 == pytest.approx(decode / 4 / side**2, rel=0.05)

    def test_audio(self) -> None:
        length, codec = 2**19, CODECS["VAE (Oobleck)"]
        with on_meta(torch.float32):
            model = published.VAES["VAE (Oobleck)"].build()
            encode = inference_peak(model, lambda: model.encode(torch.empty(1, 2, length)).latent_dist)
            decode = inference_peak(model, lambda: model.decode(torch.empty(1, 64, length // 2048)))
        assert codec.encode == pytest.approx(encode / 4 / length, rel=0.02)
        # Weight-normed layers rebuild their weights, which a short clip feels: the declared number covers that.
        assert decode / 4 / length <= codec.decode <= 1.4 * decode / 4 / length

    @pytest.mark.usefixtures("gpu_kernels")
    @pytest.mark.parametrize("name", [name for name in ENCODERS if name.startswith("text encoder")])
    def test_text_encoders(self, name: str) -> None:
        encoder = ENCODERS[name]
        with on_meta(BF16):
            model = published.ENCODERS[name]().eval()
            words = torch.zeros(1, encoder.tokens, dtype=torch.long)
            options = {"output_hidden_states": True} if "Qwen" in name or name in WITHOUT_HEAD else {}
            used = model.model if name in WITHOUT_HEAD else model
            peak = inference_peak(model, lambda: used(words, **options))
        assert encoder.working * encoder.tokens == pytest.approx(peak, rel=0.1)
