"""`Kept.compiled` of the footprints, compared with torch.compile's own partitioner on the real block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.transformers import transformer_wan
from diffusers.models.transformers.stable_audio_transformer import StableAudioDiTBlock
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock
from torch import nn

from gracetune.adapters.computation import Computation
from gracetune.adapters.fast import products
from gracetune.adapters.fast.modules import LoraLinear as FastLora
from gracetune.adapters.trainable import select
from gracetune.config.run_config import Adapter
from gracetune.models.footprint import FootprintBlock
from gracetune.models.qwen_image.attention import QwenPairwiseAttention
from gracetune.models.registry import FOOTPRINTS
from gracetune.models.wan import blocks as wan_attention
from gracetune.models.wan.blocks import use_pairwise_attention
from gracetune.models.z_image.attention import ZImagePairwiseAttention
from gracetune.planning.activations import BUDGETS, RecomputePolicy, StepMethod, activations
from gracetune.train.blocks import list_costly_operations
from unit.models.compiled_memory import FLASH, kept_by_compiler, split_by_compiler, use_flash_attention
from unit.models.meta_memory import BF16, LoraLinear, adapt

BATCH = 2


def empty(*shape: int, dtype: torch.dtype = BF16, gradient: bool = False) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, requires_grad=gradient)


def residual(tokens: int, width: int) -> torch.Tensor:
    return empty(BATCH, tokens, width, gradient=True)


def rotation(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return empty(*shape, dtype=torch.float32), empty(*shape, dtype=torch.float32)


@dataclass(frozen=True)
class Case:
    family: str
    block: int
    build: Callable[[], nn.Module]
    call: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    tokens: int = 4096
    text: int = 512


def _two_streams() -> tuple[Any, ...]:
    return residual(4096, 3072), residual(512, 3072)


def _by_pairs(block: QwenImageTransformerBlock) -> nn.Module:
    block.attn.set_processor(cast(Any, QwenPairwiseAttention)())
    return block


def _z_image() -> nn.Module:
    block = ZImageTransformerBlock(0, 3840, 30, 30, 1e-5, True)
    block.attention.set_processor(cast(Any, ZImagePairwiseAttention)())
    return block


WAN = Case(
    "wan", 0, lambda: WanTransformerBlock(5120, 13824, 40, cross_attn_norm=True),
    lambda: ((residual(4096, 5120), empty(BATCH, 512, 5120), empty(BATCH, 6, 5120), rotation(1, 4096, 1, 128)), {}),
)  # fmt: skip
OTHERS = {
    "flux double": Case(
        "flux", 0, lambda: FluxTransformerBlock(3072, 24, 128),
        lambda: ((*_two_streams(), empty(BATCH, 3072)), {"image_rotary_emb": rotation(4608, 128)}),
    ),
    "flux single": Case(
        "flux", 1, lambda: FluxSingleTransformerBlock(3072, 24, 128),
        lambda: ((*_two_streams(), empty(BATCH, 3072)), {"image_rotary_emb": rotation(4608, 128)}),
    ),
    "qwen": Case(
        "qwen_image", 0, lambda: _by_pairs(QwenImageTransformerBlock(3072, 24, 128)),
        lambda: (
            (*_two_streams(), None, empty(BATCH, 3072)),
            {"image_rotary_emb": tuple(empty(count, 64, 2, dtype=torch.float32) for count in (4096, 512))},
        ),
    ),
    "z image": Case(
        "z_image", -1, _z_image,
        lambda: (
            (residual(4608, 3840), None, empty(BATCH, 4608, 64, 2, dtype=torch.float32), empty(BATCH, 256)), {},
        ),
    ),
    "stable audio": Case(
        "stable_audio", 0, lambda: StableAudioDiTBlock(1536, 24, 12, 64, cross_attention_dim=768),
        lambda: (
            (residual(1025, 1536),),
            {"encoder_hidden_states": empty(BATCH, 130, 768), "rotary_embedding": rotation(1025, 32)},
        ),
        tokens=1025, text=130,
    ),
    "sdxl": Case(
        "sdxl", -1, lambda: BasicTransformerBlock(1280, 20, 64, cross_attention_dim=2048),
        lambda: ((residual(1024, 1280),), {"encoder_hidden_states": empty(BATCH, 77, 2048)}),
        tokens=1024, text=77,
    ),
}  # fmt: skip


def block_of(case: Case) -> FootprintBlock:
    return FOOTPRINTS[case.family][0].blocks[case.block]


def adapted(case: Case, wrap: Callable[[nn.Linear], nn.Module] = LoraLinear) -> nn.Module:
    torch.set_default_dtype(BF16)
    try:
        block = case.build()
    finally:
        torch.set_default_dtype(torch.float32)
    holder = nn.ModuleDict({"block": block.requires_grad_(False)})
    adapt(holder, {linear.name for linear in block_of(case).linears if linear.default}, wrap)
    return block


def predicted(case: Case, policy: RecomputePolicy = "off") -> int:
    """One block with LoRA on every matrix, alone in its model."""
    from dataclasses import replace

    block = replace(block_of(case), count=1)
    footprint = replace(FOOTPRINTS[case.family][0], blocks=(block,))
    image = int(case.tokens / block.tokens)
    tokens = {"image": image, "text": case.text, "joint": case.tokens + case.text, "vision": 0}
    method = StepMethod(compiled=True, adapter_path="auto")
    found = activations(footprint, tokens, select(footprint, Adapter(kind="lora")), method)
    return BATCH * next(one.kept for one in found if one.policy == policy)


@pytest.mark.usefixtures("opaque_attention")
class TestCompiledBlocks:
    @pytest.mark.full
    def test_wan(self) -> None:
        kept = kept_by_compiler(lambda: adapted(WAN), lambda _block: WAN.call(), batch=BATCH)
        assert predicted(WAN) == pytest.approx(kept, rel=0.01)

    @pytest.mark.full
    @pytest.mark.parametrize("name", OTHERS)
    def test_other_families(self, name: str) -> None:
        case = OTHERS[name]
        kept = kept_by_compiler(lambda: adapted(case), lambda _block: case.call(), batch=BATCH)
        assert predicted(case) == pytest.approx(kept, rel=0.01)


def fused_wan(case: Case) -> nn.Module:
    """Wan with our own layers, which on a GPU add the frozen product to the adapter's."""

    def wrapped(linear: nn.Linear) -> nn.Module:
        down, up = torch.empty(16, linear.in_features), torch.empty(linear.out_features, 16)
        factors = {"lora_A.weight": down, "lora_B.weight": up}
        return FastLora(linear, factors, Computation("low rank", ""), scale=1.0, dropout=0.0)

    block = adapted(case, wrapped).train()
    use_pairwise_attention(block)
    return block


@pytest.mark.full
class TestProductsOnto:
    """The compiler assumes that recomputing an opaque operation is free unless it has a flop formula."""

    @pytest.mark.parametrize(("policy", "most"), [("off", 6), ("half", 10), ("quarter", 12), ("tenth", 13)])
    def test_budget_recomputes_only_what_it_must(
        self, monkeypatch: pytest.MonkeyPatch, policy: RecomputePolicy, most: int
    ) -> None:
        use_flash_attention(monkeypatch)
        monkeypatch.setattr(wan_attention, "dispatch_attention_fn", transformer_wan.dispatch_attention_fn)
        monkeypatch.setattr(products, "use_half_kernels", lambda x: x.dtype == BF16)
        with list_costly_operations():
            kept, backward = split_by_compiler(
                lambda: fused_wan(WAN), lambda _block: WAN.call(), batch=BATCH, budget=float(BUDGETS[policy])
            )
        assert 0.6 * predicted(WAN, policy) < kept < 1.08 * predicted(WAN, policy)
        own = [node for node in backward.nodes if node.target is torch.ops.gracetune.products.default]
        assert 6 <= len(own) <= most, "six for the inputs' gradients; thirteen are all there are"


@pytest.mark.full
class TestBudgets:
    @pytest.fixture(autouse=True)
    def _flash(self, monkeypatch: pytest.MonkeyPatch) -> None:
        use_flash_attention(monkeypatch)

    @pytest.mark.parametrize("policy", ["half", "quarter", "tenth"])
    @pytest.mark.parametrize("case", [WAN, OTHERS["flux single"], OTHERS["sdxl"]])
    def test_part_is_saved(self, case: Case, policy: RecomputePolicy) -> None:
        budget = float(BUDGETS[policy])
        kept = kept_by_compiler(lambda: adapted(case), lambda _block: case.call(), batch=BATCH, budget=budget)
        assert 0.75 * predicted(case, policy) < kept < 1.08 * predicted(case, policy)

    @pytest.mark.parametrize(("policy", "repeated"), [("tenth", [512]), ("nothing", [512, 4096])])
    def test_costliest_operations_are_not_recomputed(self, policy: Any, repeated: list[int]) -> None:
        """A tenth saves self-attention; cross-attention to the caption is recomputed."""
        budget = float(BUDGETS.get(policy, 0))
        _, backward = split_by_compiler(lambda: adapted(WAN), lambda _block: WAN.call(), batch=BATCH, budget=budget)
        keys = [node.args[1].meta["val"].shape[2] for node in backward.nodes if node.target is FLASH]
        assert sorted(keys) == repeated
