"""Tensors that do not form a layer are rejected by name. Scales follow the convention of the file."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from torch import Tensor

from gracetune.adapters import delta
from gracetune.adapters.delta import misfit
from gracetune.adapters.errors import BrokenLayerError, CannotHoldError, NotFiniteError, UnknownKeysError
from gracetune.adapters.formats.record import FORMATS
from gracetune.adapters.state import AdapterState
from gracetune.adapters.statistics import norms
from gracetune.adapters.verification import verify
from unit.adapters.formats import making

STEM = "diffusion_model.blocks.0.self_attn.q"


def lora(rank: int = 2, up_rank: int | None = None) -> dict[str, Tensor]:
    return {f"{STEM}.lora_A.weight": torch.ones(rank, 8), f"{STEM}.lora_B.weight": torch.ones(8, up_rank or rank)}


def loha(side: int = 8, rank: int = 2) -> dict[str, Tensor]:
    sizes = {"hada_w1_a": (side, rank), "hada_w1_b": (rank, side), "hada_w2_a": (side, rank), "hada_w2_b": (rank, side)}
    return {f"{STEM}.{name}": torch.ones(size, dtype=torch.bfloat16) for name, size in sizes.items()}


def read(tensors: dict[str, Tensor], format: str = "comfyui"):
    return FORMATS[format].read(tensors, {}, "wan").checked("file.safetensors")


@pytest.mark.parametrize(
    ("tensors", "expected_text"),
    [
        (lora(2, 3), "rank 2"),
        ({f"{STEM}.lora_A.weight": torch.ones(2, 8)}, "without lora_B.weight"),
        ({f"{STEM}.alpha": torch.tensor(1.0)}, "without any tensor to scale"),
        ({f"{STEM}.dora_scale": torch.ones(8)}, "dora_scale without"),
        ({f"{STEM}.lokr_w1": torch.ones(2, 2)}, "neither lokr_w2"),
        ({f"{STEM}.lokr_w1": torch.ones(2, 2), f"{STEM}.lokr_w2_a": torch.ones(4, 2)}, "neither lokr_w2"),
        (lora() | {f"{STEM}.lokr_w1": torch.ones(2, 2)}, "LoKr together with"),
        (lora() | {f"{STEM}.diff": torch.ones(8, 8)}, "more than one kind"),
        (lora() | {f"{STEM}.alpha": torch.tensor(math.inf).half()}, "alpha is inf"),
        (lora() | {f"{STEM}.alpha": torch.tensor(math.nan)}, "alpha is NaN"),
        (lora() | {f"{STEM}.alpha": torch.tensor(True)}, "alpha is true or false"),
        (lora() | {f"{STEM}.alpha": torch.tensor(1e300, dtype=torch.float64)}, "alpha is above 3.4e"),
        (lora() | {f"{STEM}.alpha": torch.ones(0)}, "an alpha of 0 numbers"),
        (lora() | {f"{STEM}.alpha": torch.ones(3)}, "an alpha of 3 numbers"),
        (lora() | {f"{STEM}.dora_scale": torch.ones(5, 1)}, "dora_scale 5x1 for 8 outputs"),
        (lora() | {f"{STEM}.dora_scale": torch.ones(1, 5)}, "dora_scale 1x5 for 8 outputs"),
        ({f"{STEM}.hada_w1_a": torch.ones(8, 2)}, "without hada_w1_b"),
        ({f"{STEM}.oft_blocks": torch.ones(2, 2, 4, 4)}, "square blocks"),
        ({f"{STEM}.oft_blocks": torch.ones(2, 4, 4), f"{STEM}.alpha": torch.tensor(0.1)}, "constraint"),
        ({f"{STEM}.weight": torch.ones(8, 8)}, "no tensor of an adapter"),
        ({f"{STEM}.diff_b": torch.ones(8)}, "diff_b without diff"),
        ({f"{STEM}.lora_A.weight": torch.ones(2), f"{STEM}.lora_B.weight": torch.ones(2)}, "not the shape"),
        ({f"{STEM}.lora_A.weight": torch.ones(0, 8), f"{STEM}.lora_B.weight": torch.ones(8, 0)}, "is empty"),
        ({key: value.reshape(*value.shape, 1, 1, 1, 1) for key, value in lora().items()}, "not the shape"),
        (loha() | {f"{STEM}.dora_scale": torch.ones(5, 1)}, "dora_scale 5x1 for 8 outputs"),
        (loha() | {f"{STEM}.dora_scale": torch.ones(2, 4)}, "one number for each channel"),
        (
            loha() | {f"{STEM}.hada_t1": torch.ones(2, 2, 1, 1, 1, 1), f"{STEM}.hada_t2": torch.ones(2, 2)},
            "not the shape",
        ),
        ({f"{STEM}.diff": torch.ones(8, 8), f"{STEM}.diff_b": torch.ones(4)}, "diff_b of 4 for 8 outputs"),
        ({f"{STEM}.weight": torch.ones(2, 4), f"{STEM}.on_input": torch.tensor(0)}, "one number for each channel"),
        ({f"{STEM}.weight": torch.ones(8), f"{STEM}.on_input": torch.tensor(math.nan)}, "0 or 1"),
        (loha(1 << 17), "131,072 x 131,072: no model has"),
        ({f"{STEM}.weight": torch.ones(8), f"{STEM}.on_input": torch.ones(2)}, "one number"),
        (lora() | {"lora_unet_blocks_0_self_attn_q.lora_down.weight": torch.ones(2, 8)}, "twice"),
        ({key: value.to(torch.int8) for key, value in lora().items()}, "lora_A.weight holds torch.int8"),
        ({f"{STEM}.diff": torch.ones(8, 8, dtype=torch.bool)}, "diff holds torch.bool"),
    ],
)
def test_broken_layers(tensors: dict[str, Tensor], expected_text: str) -> None:
    with pytest.raises(BrokenLayerError, match=expected_text) as error:
        read(tensors)
    assert error.value.problems[0].file == "file.safetensors"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_weights(value: float) -> None:
    tensors = lora()
    tensors[f"{STEM}.lora_B.weight"][3, 1] = value
    with pytest.raises(NotFiniteError, match=f"{STEM}.lora_B.weight"):
        read(tensors)


@pytest.mark.parametrize(
    "key",
    [
        "diffusion_model.blocks.0.self_attn.nonsense.lora_A.weight",
        "lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight",
        f"{STEM}.lora_C.weight",
        f"{STEM}.lora_B.bias",
        "diffusion_model.blocks.00.self_attn.q.lora_A.weight",
        "diffusion_model.blocks.\N{FULLWIDTH DIGIT ZERO}.self_attn.q.lora_A.weight",
        "diffusion_model.blocks.\N{ARABIC-INDIC DIGIT ZERO}.self_attn.q.lora_A.weight",
        "diffusion_model.blocks.#.self_attn.q.lora_A.weight",
    ],
)
def test_keys_that_name_nothing_are_listed(key: str) -> None:
    """Only the one way in which a number is written names a block: no two keys of a file are the same layer's."""
    with pytest.raises(UnknownKeysError) as error:
        read(lora() | {key: torch.ones(2, 8)})
    assert key in error.value.problems[0].found


@pytest.mark.parametrize("key", ["diffusion_model." + "9" * 5_000 + ".lora_A.weight", "x" * 1_000_000, "a\n\x1b[2Jb"])
def test_a_key_is_shown_on_one_line_and_short(key: str) -> None:
    with pytest.raises(UnknownKeysError) as error:
        read(lora() | {key: torch.ones(2, 8)})
    for line in str(error.value).splitlines():
        assert len(line) < 400
        assert line.isprintable()
    assert len(str(error.value).splitlines()) == 4


def test_an_alpha_that_is_missing() -> None:
    """ComfyUI, diffusers and kohya mean a scale of 1; LyCORIS and PEFT's bare file mean nothing anyone could know."""
    for format in ("comfyui", "kohya", "diffusers"):
        assert read(lora(), format).states[""].layers["blocks.0.attn1.to_q"].scale == 1.0
    with pytest.raises(BrokenLayerError, match="no alpha"):
        read({key.replace(STEM, "lycoris_blocks_0_attn1_to_q"): value for key, value in lora().items()}, "lycoris")
    with pytest.raises(BrokenLayerError, match="no alpha"):
        read({key.replace(STEM, "base_model.model.blocks.0.attn1.to_q"): v for key, v in lora().items()}, "diffusers")


@pytest.mark.parametrize("prefix", ["", "base_model.model.", "high_noise/"])
@pytest.mark.parametrize("format", ["comfyui", "diffusers"])
def test_keys_that_begin_with_the_layer_have_no_scale_of_their_own(prefix: str, format: str) -> None:
    """One message for all layers, with what to type; an alpha beside the tensors, or PEFT's config, is enough."""
    one = {"lora_A.weight": torch.ones(4, 8), "lora_B.weight": torch.ones(8, 4)}
    stems = [f"{prefix}blocks.{block}.attn1.to_q" for block in range(20)]
    tensors = {f"{stem}.{name}": value for stem in stems for name, value in one.items()}
    with pytest.raises(BrokenLayerError, match="scale of this adapter; the same for 19 more") as rejected:
        read(tensors, format)
    (problem,) = rejected.value.problems
    assert "--alpha ALPHA (DiffSynth-Studio trains with alpha = rank, 4 here)" in problem.hint
    with_alpha = tensors | {f"{stem}.alpha": torch.tensor(2.0) for stem in stems}
    (state,) = read(with_alpha, format).states.values()
    assert {layer.scale for layer in state.layers.values()} == {0.5}
    if format == "diffusers":
        reading = FORMATS["diffusers"].read(tensors, {"gracetune.adapter_config": '{"lora_alpha": 2}'}, "wan").checked()
        assert {layer.scale for state in reading.states.values() for layer in state.layers.values()} == {0.5}


@pytest.mark.parametrize(("family", "key"), [
    ("wan", "transformer.blocks.0.attn1.to_q"), ("wan", "transformer_2.blocks.0.attn1.to_q"),
    ("wan", "diffusion_model.blocks.0.self_attn.q"), ("flux", "transformer.transformer_blocks.0.attn.to_q"),
    ("qwen_image", "transformer.transformer_blocks.0.attn.to_q"),
    ("sdxl", "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"),
    ("stable_audio", "transformer.transformer_blocks.0.attn1.to_q"),
])  # fmt: skip
def test_a_published_files_prefix_means_a_scale_of_one(family: str, key: str) -> None:
    tensors = {f"{key}.lora_A.weight": torch.ones(4, 8), f"{key}.lora_B.weight": torch.ones(8, 4)}
    (state,) = FORMATS["diffusers"].read(tensors, {}, family).checked().states.values()
    assert [layer.scale for layer in state.layers.values()] == [1.0]


@pytest.mark.parametrize("alpha", [0.1, 1.0, 0.3333333, 16.0, 1e-3, 12345.678])
def test_an_alpha_is_the_number_that_was_written(alpha: float) -> None:
    state = making.state("wan", {"blocks.0.attn1.to_q": (8, 8)}, "lora", alpha=alpha)
    for format in FORMATS:
        tensors, header = FORMATS[format].write(state, torch.float16)
        found = FORMATS[format].read(tensors, header, "wan").checked().states[""]
        assert found.layers["blocks.0.attn1.to_q"].alpha == alpha


@pytest.mark.parametrize("format", FORMATS)
def test_layers_of_unlike_rank_and_alpha(format: str) -> None:
    """One of them with a scale of 1, and names of which one is the end of another: each keeps its own."""
    made = {
        path: making.state("flux", {path: (8, 8)}, "lora", rank=rank, alpha=alpha).layers[path]
        for path, rank, alpha in (
            ("single_transformer_blocks.0.proj_out", 2, 2.0),
            ("transformer_blocks.0.attn.to_out.0", 2, 3.0),
            ("proj_out", 4, 1.0),
        )
    }
    tensors, header = FORMATS[format].write(AdapterState("flux", "", made), torch.float32)
    found = FORMATS[format].read(tensors, header, "flux").checked().states[""].layers
    assert {path: (one.rank, one.alpha) for path, one in found.items()} == {
        path: (one.rank, one.alpha) for path, one in made.items()
    }
    if format == "diffusers":  # PEFT looks ranks up in its config before it has seen a tensor
        config = json.loads(header["lora_adapter_metadata"])
        patterns = config["transformer.rank_pattern"]
        ranks = {path: patterns.get(get_pattern_key(patterns, path), config["transformer.r"]) for path in made}
        assert ranks == {path: one.rank for path, one in made.items()}
        wanted = LoraConfig(target_modules=config["transformer.target_modules"])
        paths = [*made, "single_transformer_blocks.1.proj_out"]
        assert [path for path in paths if check_target_module_exists(wanted, path)] == [*made]


def test_a_bias_follows_its_rows_into_the_original_order() -> None:
    """Flux' final norm has shift and scale the other way round there; its bias would otherwise be that of the other."""
    state = making.state("flux", {"norm_out.linear": (8, 4)}, "full_delta", options=("bias",))
    tensors, header = FORMATS["kohya"].write(state, torch.float32)
    layer = state.layers["norm_out.linear"]
    for name in ("diff", "diff_b"):
        own = layer.tensors[name]
        written = tensors[f"lora_unet_final_layer_adaLN_modulation_1.{name}"]
        assert torch.equal(written, torch.cat((own[4:], own[:4])))
    again = FORMATS["kohya"].read(tensors, header, "flux").checked().states[""].layers["norm_out.linear"]
    assert all(torch.equal(again.tensors[name], own) for name, own in layer.tensors.items())


@pytest.mark.parametrize("alpha", [9999999999.0, math.inf])
def test_ai_toolkits_alpha_of_a_whole_lokr(alpha: float) -> None:
    tensors = {
        f"{STEM}.lokr_w1": torch.ones(2, 2),
        f"{STEM}.lokr_w2": torch.ones(4, 4),
        f"{STEM}.alpha": torch.tensor(alpha).half(),
    }
    layer = read(tensors).states[""].layers["blocks.0.attn1.to_q"]
    assert (layer.alpha, layer.rank, layer.scale) == (1.0, None, 1.0)


def test_no_alpha_we_write_can_become_infinite(tiny_model) -> None:
    shapes = {"blocks.0.attn1.to_q": (16, 16)}
    for algorithm in ("lora", "lokr", "loha", "locon"):
        state = making.state("wan", shapes, algorithm, alpha=1e9, options=("decomposed",))
        for format in FORMATS:
            try:
                tensors, _ = FORMATS[format].write(state, torch.float16)
            except CannotHoldError:
                continue
            assert all(value.dtype == torch.float32 for key, value in tensors.items() if key.endswith("alpha"))
            assert all(value.isfinite().all() for value in tensors.values())


def test_values_too_large_for_half_precision_are_rejected() -> None:
    state = making.state("wan", {"blocks.0.attn1.to_q": (16, 16)}, "lora")
    state.layers["blocks.0.attn1.to_q"].tensors["lora_B.weight"][0, 0] = 1e6
    with pytest.raises(CannotHoldError, match="bf16"):
        FORMATS["comfyui"].write(state, torch.float16)
    FORMATS["comfyui"].write(state, torch.bfloat16)


def test_a_layer_the_family_does_not_have_is_not_written() -> None:
    for format in FORMATS:
        with pytest.raises(CannotHoldError, match="no layer of wan"):
            FORMATS[format].write(making.state("wan", {"blocks.0.attn9.to_q": (8, 8)}, "lora"), torch.float32)


def test_parts_of_one_matrix_must_agree() -> None:
    first = making.state("stable_audio", {"transformer_blocks.0.attn1.to_q": (8, 8)}, "lora", rank=2)
    second = making.state("stable_audio", {"transformer_blocks.0.attn1.to_k": (8, 8)}, "lora", rank=3)
    both = AdapterState("stable_audio", "", {**first.layers, **second.layers})
    with pytest.raises(CannotHoldError, match="different ranks"):
        FORMATS["comfyui"].write(both, torch.float32)
    FORMATS["diffusers"].write(both, torch.float32)


STEMS = (
    STEM,
    "lora_unet_blocks_0_self_attn_q",
    "transformer_1.blocks.0.attn1.to_q",
    "lycoris_blocks_1_attn1_to_q",
    "x",
)
SUFFIXES = (
    "lora_A.weight", "lora_B.weight", "lora_down.weight", "lora_up.weight", "lora_mid.weight", "dora_scale", "alpha",
    "lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2", "hada_w1_a", "hada_w1_b",
    "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2", "oft_blocks", "rescale", "diff", "diff_b", "weight", "on_input",
    "lora_magnitude_vector", "nonsense",
)  # fmt: skip


@given(
    st.dictionaries(
        st.tuples(st.sampled_from(STEMS), st.sampled_from(SUFFIXES)),
        st.lists(st.integers(0, 4), max_size=4),
        min_size=1,
        max_size=8,
    )
)
def test_every_key_of_a_file_is_read_or_reported(shapes: dict[tuple[str, str], list[int]]) -> None:
    """No combination of known names and odd shapes ends in anything but a reading."""
    tensors = {f"{stem}.{suffix}": torch.ones(shape) for (stem, suffix), shape in shapes.items()}
    for format in FORMATS:
        found = FORMATS[format].read(tensors, {}, "wan")
        explained = len(found.unknown) + len(found.broken) + sum(len(state.layers) for state in found.states.values())
        assert explained > 0
        for report in verify(found, {"": {"blocks.0.attn1.to_q": (8, 8), "blocks.1.attn1.to_q": (4, 4)}}):
            assert report.expert in ("", "high_noise")
        for state in found.states.values():
            norms(state)


KINDS = {
    "lora": ("lora_A.weight", "lora_B.weight"),
    "locon": ("lora_down.weight", "lora_up.weight", "lora_mid.weight"),
    "dora": ("lora_A.weight", "lora_B.weight", "dora_scale"),
    "lokr": ("lokr_w1", "lokr_w2_a", "lokr_w2_b"),
    "tucker": ("lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
    "loha": ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),
    "oft": ("oft_blocks", "rescale"),
    "ia3": ("weight", "on_input"),
    "full": ("diff", "diff_b"),
}


@settings(max_examples=400)
@given(kind=st.sampled_from(sorted(KINDS)), data=st.data())
def test_what_fits_can_be_applied(kind: str, data: st.DataObject) -> None:
    """All tensors of a kind, of shapes that agree or do not: a layer that is read and fits a weight has an effect."""
    sizes = st.lists(st.sampled_from([1, 2, 2, 2, 3, 4]), min_size=0 if kind in ("ia3", "oft") else 1, max_size=3)
    values = {name: torch.full(data.draw(sizes, label=name), 0.5) for name in KINDS[kind]}
    for other in ("double_blocks.0.img_attn.qkv", "final_layer.adaLN_modulation.1"):  # fused, and in another order
        found = FORMATS["kohya"].read({f"{other}.{name}": tensor for name, tensor in values.items()}, {}, "flux")
        assert found.broken or found.states
    tensors = {f"{STEM}.{name}": tensor for name, tensor in values.items()}
    for state in FORMATS["comfyui"].read(tensors, {}, "wan").states.values():
        norms(state)
        for layer in state.layers.values():
            for shape in ((2, 2), (4, 4), (2, 4), (4, 2), (8, 2), (2, 2, 2), (4, 2, 2, 1)):
                if misfit(layer, shape) is None:
                    assert delta.apply(layer, torch.ones(shape)).shape == shape


@pytest.mark.parametrize(
    ("config", "expected_text"),
    [
        ({"lora_alpha": 1, "alpha_pattern": {"to_q": "x"}}, 'is the text "x"'),
        ({"lora_alpha": 1, "alpha_pattern": {"to_q": None}}, "is None: expected a number"),
        ({"lora_alpha": 1, "alpha_pattern": {"to_q": True}}, "is true: expected a number"),
        ({"lora_alpha": 10**400}, "is above 3.4e"),
        ({"lora_alpha": math.inf}, "is infinite"),
        ({"lora_alpha": math.nan}, "is NaN"),
        ({"lora_alpha": "8"}, 'alpha in the header is the text "8"'),
        ({"lora_alpha": True}, "alpha in the header is true"),
        ({"lora_alpha": 1, "alpha_pattern": {"(": 2}}, "cannot be followed"),
        ({"lora_alpha": 1, "alpha_pattern": {"([a-z0-9_.]+)+!": 2}}, "cannot be followed"),
        ({"lora_alpha": 1, "alpha_pattern": {".*.*.*.*.*!": 2}}, "cannot be followed"),
        ({"lora_alpha": 1, "alpha_pattern": {".?" * 24 + "." * 8 + "!": 2}}, "cannot be followed"),
        ({"lora_alpha": 1, "alpha_pattern": {f".*{number}": 2 for number in range(17)}}, "more than 2,000 entries"),
        ({"lora_alpha": 1, "alpha_pattern": {f"x{number}": 2 for number in range(2_001)}}, "more than 2,000 entries"),
    ],
)
def test_a_header_whose_alpha_is_no_number(config: dict[str, object], expected_text: str) -> None:
    """A header must not take forever either: its patterns are regular expressions."""
    tensors = {f"transformer.blocks.0.attn1.to_q.lora_{side}.weight": torch.ones(4, 4) for side in "AB"}
    header = {"lora_adapter_metadata": json.dumps({f"transformer.{name}": value for name, value in config.items()})}
    with pytest.raises(BrokenLayerError, match=expected_text):
        FORMATS["diffusers"].read(tensors, header, "wan").checked()
    tensors = {key: torch.tensor(1.0) for key in tensors}
    with pytest.raises(BrokenLayerError, match="not the shape"):
        FORMATS["diffusers"].read(tensors, header, "wan").checked()


@pytest.mark.parametrize("entry", ["lora_adapter_metadata", "gracetune.adapter_config"])
@pytest.mark.parametrize("text", ["{nope", "[1]", "null", "[" * 100_000, '{"lora_alpha": 8' + "0" * 5_000 + "}"])
def test_a_header_that_cannot_be_read_is_no_scale_of_1(text: str, entry: str) -> None:
    tensors = {f"transformer.blocks.0.attn1.to_q.lora_{side}.weight": torch.ones(4, 4) for side in "AB"}
    with pytest.raises(BrokenLayerError, match="no alpha: lora_adapter_metadata"):
        FORMATS["diffusers"].read(tensors, {entry: text}, "wan").checked()
    message = {**tensors, "transformer.blocks.0.attn1.to_q.alpha": torch.tensor(2.0)}
    layer = FORMATS["diffusers"].read(message, {entry: text}, "wan").checked().states[""].layers["blocks.0.attn1.to_q"]
    assert layer.scale == 0.5


def test_a_header_of_another_part_says_nothing_of_this_one() -> None:
    """As diffusers reads it: without an alpha for the transformer its scale is 1."""
    tensors = {f"transformer.blocks.0.attn1.to_q.lora_{side}.weight": torch.ones(4, 4) for side in "AB"}
    header = {"lora_adapter_metadata": json.dumps({"text_encoder.lora_alpha": 2})}
    state = FORMATS["diffusers"].read(tensors, header, "wan").checked().states[""]
    assert state.layers["blocks.0.attn1.to_q"].scale == 1.0


@pytest.mark.parametrize("format", ["comfyui", "kohya", "lycoris", "diffusers"])
def test_lengths_of_rows_keep_their_precision(format: str) -> None:
    """In bf16 they have steps of four thousandths, and training moves them by less."""
    shapes = {"blocks.0.attn1.to_q": (16, 16)}
    state = making.state("wan", shapes, "dora")
    layer = state.layers["blocks.0.attn1.to_q"]
    if format == "comfyui":
        layer = delta.with_base_magnitude(layer, torch.eye(16))
        state = AdapterState("wan", "", {"blocks.0.attn1.to_q": layer})
    tensors, _ = FORMATS[format].write(state, torch.bfloat16)
    magnitudes = next(value for key, value in tensors.items() if key.endswith(("dora_scale", "magnitude_vector")))
    own = layer.tensors.get("dora_scale", layer.tensors.get("dora_base_scale"))
    assert own is not None
    assert torch.equal(magnitudes.flatten(), own.flatten())
    assert {value.dtype for key, value in tensors.items() if key.endswith(".weight")} == {torch.bfloat16}
