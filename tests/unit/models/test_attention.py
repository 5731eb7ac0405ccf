from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from diffusers import (
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    StableAudioDiTModel,
    UNet2DConditionModel,
    WanTransformer3DModel,
)
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch.nn.attention import SDPBackend, sdpa_kernel

from gracetune.config.run_config import Training
from gracetune.errors import ConfigError
from gracetune.models import attention
from gracetune.models.attention import (
    BACKENDS,
    AttentionFacts,
    AttentionName,
    apply_attention,
    attention_facts,
    choose_attention,
)
from gracetune.models.loading import load_component
from gracetune.models.source import ModelSource
from gracetune.models.spec import PartPlacement
from unit.models.model_inputs import answer

CPU = torch.device("cpu")
TinyModel = Callable[[str, str], Path]
NO_PACKAGES = {"flash_attn_2": "not installed", "flash_attn_3": "not installed"}


def gpu(capability: tuple[int, int] = (9, 0), dtype: torch.dtype = torch.bfloat16, **options: Any) -> AttentionFacts:
    return AttentionFacts("cuda", dtype, capability, **options)


def test_names_exist_in_the_config_and_in_diffusers() -> None:
    assert get_args(AttentionName) == get_args(Training.model_fields["attention"].annotation)
    assert {"auto", *BACKENDS} == set(get_args(AttentionName))
    assert set(BACKENDS.values()) <= {name.value for name in AttentionBackendName}


# -- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "backend", "reason"),
    [
        (gpu(lacking=NO_PACKAGES), "_native_cudnn", "compute capability 9.0"),
        (gpu((10, 0)), "_native_cudnn", "compute capability 10.0"),
        (gpu((8, 0)), None, "compute capability 8.0"),
        (gpu(masked=True), None, "uses attention masks"),
        (gpu(dtype=torch.float32), None, "supports float16 and bfloat16 only"),
        (gpu(lacking={"cudnn": "torch does not support it here"}), None, "torch does not support it here"),
        (AttentionFacts("cpu", torch.bfloat16), None, "no CUDA GPU"),
    ],
)
def test_what_auto_chooses(facts: AttentionFacts, backend: str | None, reason: str) -> None:
    choice = choose_attention("auto", facts)
    assert choice.backend == backend
    assert reason in choice.reason


@pytest.mark.parametrize("requested", [*BACKENDS])
def test_supported_requests_are_used(requested: AttentionName) -> None:
    assert choose_attention(requested, gpu()).backend == BACKENDS[requested]


@pytest.mark.parametrize(
    ("requested", "facts", "why"),
    [
        ("cudnn", gpu(lacking={"cudnn": "torch does not support it here"}), "torch does not support it here"),
        ("flash", gpu(masked=True), "uses attention masks"),
        ("flash", gpu(dtype=torch.float32), "bfloat16 only, not torch.float32"),
        ("flash_attn_2", gpu((7, 5)), "needs compute capability 8.0"),
        ("flash_attn_2", gpu(dispatched=False), "calls torch's attention directly"),
        ("flash_attn_3", gpu((10, 0)), "compute capability 9.x; this GPU has compute capability 10.0"),
        ("flash_attn_3", gpu(masked=True), "uses attention masks"),
        ("flash_attn_3", gpu(lacking=NO_PACKAGES), "not installed"),
        ("flash_attn_2", AttentionFacts("cpu", torch.bfloat16), "only on a CUDA GPU"),
        ("cudnn", attention_facts(CPU, torch.bfloat16), "only on a CUDA GPU"),
        ("efficient", attention_facts(CPU, torch.float32), "only on a CUDA GPU"),
    ],
)
def test_unsupported_requests_are_rejected_with_alternatives(
    requested: AttentionName, facts: AttentionFacts, why: str
) -> None:
    with pytest.raises(ConfigError) as rejected:
        choose_attention(requested, facts)
    (problem,) = rejected.value.problems
    assert why in problem.found
    possible = problem.expected.removeprefix("one of ").split(", ")
    assert requested not in possible
    assert {"auto", "sdpa", "math"} <= set(possible)
    for name in possible:
        choose_attention(name, facts)  # type: ignore[arg-type]
    assert problem.hint == "--set training.attention=auto"


def test_a_package_that_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    lacking = attention_facts(CPU, torch.bfloat16).lacking
    assert lacking["flash_attn_2"] == "flash_attn cannot be imported: undefined symbol: _ZN3c10"
    assert lacking["flash_attn_3"] == "the package flash_attn_interface is not installed"


# -- applying the choice ----------------------------------------------------------------------------------------------


@pytest.fixture
def used_kernels(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Which kernels (flash, math) were allowed at each call of torch's attention."""
    seen = []
    original = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append((torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()))
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    return seen


MODELS: list[tuple[str, str, str, Any]] = [
    ("wan", "t2v-14b-2.2", "transformer", WanTransformer3DModel),
    ("flux", "dev", "transformer", FluxTransformer2DModel),
    ("sdxl", "base-1.0", "unet", UNet2DConditionModel),
    ("stable_audio", "open-1.0", "transformer", StableAudioDiTModel),
]
MASKED = ("qwen_image", "t2i", "transformer", QwenImageTransformer2DModel)
KERNELS = [("_native_math", (False, True)), ("_native_flash", (True, False)), ("native", (True, True))]
CASES = [(*model, *kernel) for model in MODELS for kernel in KERNELS] + [(*MASKED, *KERNELS[0]), (*MASKED, *KERNELS[2])]


@pytest.mark.parametrize(("family", "flavour", "component", "cls", "backend", "allowed"), CASES)
def test_models_run_on_the_chosen_kernel(
    tiny_model: TinyModel,
    used_kernels: list[tuple[bool, bool]],
    family: str,
    flavour: str,
    component: str,
    cls: Any,
    backend: str,
    allowed: tuple[bool, bool],
) -> None:
    source = ModelSource("tiny", tiny_model(family, flavour))
    plain = load_component(source, component, cls, PartPlacement(CPU, torch.float32))
    model = load_component(source, component, cls, PartPlacement(CPU, torch.float32, backend))
    torch.testing.assert_close(answer(model, torch.float32), answer(plain, torch.float32), atol=1e-3, rtol=1e-3)
    calls = len(used_kernels) // 2
    assert calls > 0
    assert set(used_kernels[:calls]) == {allowed}
    assert set(used_kernels[calls:]) == {(True, True)}, "the other model keeps its own"
    assert _AttentionBackendRegistry.get_active_backend()[0] == AttentionBackendName.NATIVE


@pytest.mark.parametrize(("family", "flavour", "component", "cls"), MODELS[:2])
def test_cudnn_gets_the_models_tensors_without_copies(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, family: str, flavour: str, component: str, cls: Any
) -> None:
    seen = []
    original = torch.nn.functional.scaled_dot_product_attention

    def watched(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        only_cudnn = torch.backends.cuda.cudnn_sdp_enabled() and not torch.backends.cuda.math_sdp_enabled()
        seen.append((only_cudnn, query.is_contiguous()))
        with sdpa_kernel(SDPBackend.MATH):  # there is no cuDNN here
            return original(query, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    source = ModelSource("tiny", tiny_model(family, flavour))
    model = load_component(source, component, cls, PartPlacement(CPU, torch.float32, "_native_cudnn"))
    answer(model, torch.float32)
    assert set(seen) == {(True, False)}, "[B, tokens, heads, width], turned and not copied"
    seen.clear()
    apply_attention(model, "native")
    answer(model, torch.float32)
    assert {only_cudnn for only_cudnn, _ in seen} == {False}


def test_a_unets_kernel_can_be_changed_and_released(
    tiny_model: TinyModel, used_kernels: list[tuple[bool, bool]]
) -> None:
    source = ModelSource("tiny", tiny_model("sdxl", "base-1.0"))
    unet: Any = load_component(source, "unet", UNet2DConditionModel, PartPlacement(CPU, torch.float32))
    processors = {name: type(processor) for name, processor in unet.attn_processors.items()}
    for backend, allowed in (
        ("_native_math", (False, True)),
        ("_native_flash", (True, False)),
        ("native", (True, True)),
    ):
        apply_attention(unet, backend)
        used_kernels.clear()
        answer(unet, torch.float32)
        assert set(used_kernels) == {allowed}
        for name, processor in unet.attn_processors.items():
            assert isinstance(processor, processors[name])
            given = inspect.signature(processor.__call__).parameters
            assert given.keys() == inspect.signature(processors[name]().__call__).parameters.keys()
    assert {name: type(processor) for name, processor in unet.attn_processors.items()} == processors


def test_gradients_through_a_bound_unet(tiny_model: TinyModel) -> None:
    source = ModelSource("tiny", tiny_model("sdxl", "base-1.0"))
    gradients = []
    for backend in (None, "_native_math"):
        unet: Any = load_component(source, "unet", UNet2DConditionModel, PartPlacement(CPU, torch.float32, backend))
        unet.enable_gradient_checkpointing()
        unet.train()
        inputs = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        pooled = unet.config.projection_class_embeddings_input_dim - 6 * unet.config.addition_time_embed_dim
        added = {"text_embeds": torch.ones(1, pooled), "time_ids": torch.ones(1, 6)}
        text = torch.ones(1, 6, unet.config.cross_attention_dim)
        unet(inputs, torch.tensor([500]), text, added_cond_kwargs=added, return_dict=False)[0].square().sum().backward()
        gradients.append(inputs.grad)
    torch.testing.assert_close(*gradients, atol=1e-3, rtol=1e-3)


def test_a_package_for_a_model_that_does_not_dispatch(tiny_model: TinyModel) -> None:
    source = ModelSource("tiny", tiny_model("sdxl", "base-1.0"))
    with pytest.raises(ConfigError, match="which calls torch's attention directly"):
        load_component(source, "unet", UNet2DConditionModel, PartPlacement(CPU, torch.float32, "flash"))


def test_flash_attention_3_replaces_torchs_flash_kernel(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers' own call of it cannot be trained through: it registers no backward pass."""
    from diffusers.models import attention_dispatch

    assert "register_autograd" not in inspect.getsource(attention_dispatch), "look at it again: diffusers may train it"
    requested: list[str] = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", requested.append)
    source = ModelSource("tiny", tiny_model("wan", "t2v-14b-2.2"))
    model: Any = load_component(
        source, "transformer", WanTransformer3DModel, PartPlacement(CPU, torch.float32, "_flash_3")
    )
    assert requested == ["FA3"]
    assert model.blocks[0].attn1.processor._attention_backend == "_native_flash"


def test_every_kernel_has_torchs_name() -> None:
    assert set(attention._KERNELS.values()) == {
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    }
