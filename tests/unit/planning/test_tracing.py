"""Traced footprints: what real models keep on a CPU, the declared tables, and the cache."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gracetune.adapters.trainable import select
from gracetune.config.families import PACKAGES, flavours
from gracetune.config.run_config import Adapter
from gracetune.models import footprint_tables
from gracetune.models.footprint import BudgetShare, FootprintBlock, FootprintKept, FootprintLinear
from gracetune.models.footprint_tables import TracedTable, as_json, from_json
from gracetune.models.registry import FOOTPRINTS, example_inputs_of, spec_of
from gracetune.models.source import ModelSource
from gracetune.models.spec import Expert
from gracetune.models.wan import footprint as wan_footprint
from gracetune.planning.activations import StepMethod, activations
from gracetune.planning.tracing.families import trace_family
from gracetune.planning.tracing.store import versions, with_blocks
from gracetune.planning.tracing.trace import TraceError, trace
from gracetune.testing.family_check.activations import EAGER, LORA, planned, planned_and_real
from gracetune.testing.family_check.case import FamilyCase

PADS_ITS_TOKENS = "z_image"
"""Its denoiser pads images and captions to multiples of 32 tokens. At other sizes tensors do not show their stream."""
FAMILIES = [family for family in FOOTPRINTS if not PACKAGES.is_installed(family)]
FULL = Adapter(kind="full_finetune")
REGENERATED = [("wan", "t2v-1.3b-2.1"), ("flux2", "klein-base-4b"), ("krea2", "raw"), ("stable_audio", "open-1.0")]
EAGER_FULL = replace(EAGER, full_finetune=True)


def tiny_source(family: str, tiny_model: Callable[[str, str], Path]) -> tuple[ModelSource, Expert]:
    source = ModelSource("tiny", tiny_model(family, FOOTPRINTS[family][0].flavour))
    return source, spec_of(family).inspect(source).experts[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_keep_on_a_cpu_what_the_trace_says(
    family: str, tiny_model: Callable[[str, str], Path], tmp_path: Path
) -> None:
    flavour = flavours(family)[0]
    case = FamilyCase(spec_of(family), flavour, tiny_model(family, flavour.name), tmp_path)
    plan, real = planned_and_real(case)
    assert plan == pytest.approx(real, rel=0.02)


def test_what_cannot_be_traced_is_rejected(tiny_model: Callable[[str, str], Path]) -> None:
    """Padding that the family does not declare, and classes that the model does not have."""
    spec, (source, expert) = spec_of(PADS_ITS_TOKENS), tiny_source(PADS_ITS_TOKENS, tiny_model)
    for classes, multiple in ((spec.repeated_blocks, 1), (("NoSuchBlock",), spec.token_multiple)):
        with pytest.raises(TraceError):
            trace(
                spec.build_denoiser(source, expert), classes, (), example_inputs_of(PADS_ITS_TOKENS),
                multiple=multiple, device="cpu", compiled=False,
            )  # fmt: skip


@pytest.mark.full
def test_a_footprint_without_blocks_is_traced_once_and_then_read_without_torch(tmp_path: Path) -> None:
    declared = FOOTPRINTS["stable_audio"][0]
    bare = replace(declared, parameters=0, width=0, blocks=())
    traced = with_blocks(bare, tmp_path)
    assert (traced.parameters, traced.width) == (declared.parameters, declared.width)
    assert [(block.name, block.count) for block in traced.blocks] == [("transformer_blocks.*", 24)]
    (file,) = (tmp_path / "footprints").iterdir()
    assert {*json.loads(file.read_text())["versions"]} == {"torch", "diffusers"}
    code = (
        "import sys; from dataclasses import replace; from pathlib import Path\n"
        "from gracetune.models.registry import FOOTPRINTS\n"
        "from gracetune.planning.tracing.store import with_blocks\n"
        "bare = replace(FOOTPRINTS['stable_audio'][0], parameters=0, width=0, blocks=())\n"
        f"print(with_blocks(bare, Path({str(tmp_path)!r})).blocks)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(traced.blocks)), done.stderr
    file.write_text("{}")
    assert with_blocks(bare, tmp_path) == traced, "a damaged file is written again"
    assert json.loads(file.read_text())["format"] == 1


@pytest.mark.full
@pytest.mark.parametrize(("family", "flavour"), REGENERATED)
def test_the_packages_tables_are_what_a_trace_gives(family: str, flavour: str) -> None:
    """Other versions of torch and diffusers may keep something else; scripts/trace_footprints.py writes the files."""
    file = Path(footprint_tables.__file__).parent / family / footprint_tables.FILE
    written = json.loads(file.read_text())
    footprint = next(one for one in FOOTPRINTS[family] if one.flavour == flavour)
    traced, table = trace_family(footprint), from_json(written["tables"][flavour])
    if written["versions"] == versions():
        assert traced == table
    for method in (EAGER, EAGER_FULL, replace(EAGER, compiled=True)):
        adapter = FULL if method.full_finetune else LORA
        sizes = [
            planned(replace(footprint, blocks=blocks), adapter, method) for blocks in (traced.blocks, table.blocks)
        ]
        assert sizes[0] == pytest.approx(sizes[1], rel=0.02)


def test_a_table_survives_its_file() -> None:
    block = FootprintBlock(
        name="blocks.*", count=2, tokens=Fraction(1, 4),
        kept=(FootprintKept("x", 8, "text", "scales", fp32=True, eager=False),),
        enters=(FootprintKept("residual", 8),), working=(),
        linears=(FootprintLinear("to_q", 8, 8, "x", "Attention", scales="text", kernel=(1, 1), around=("Block",)),),
        budgets=(BudgetShare(1024, 0.25, 0.3),),
    )  # fmt: skip
    table = TracedTable(64, 8, (block,))
    assert from_json(json.loads(json.dumps(as_json(table)))) == table


def test_a_budgets_share_is_that_of_the_nearest_traced_size() -> None:
    shares = tuple(BudgetShare(image, 0.25, share) for image, share in ((1024, 0.2), (4096, 0.3)))
    block = FootprintBlock("blocks.*", 1, (), (), (), budgets=shares)
    assert [block.share_under(0.25, image) for image in (0, 1024, 2000, 2100, 99_999)] == [0.2, 0.2, 0.2, 0.3, 0.3]
    assert block.share_under(0.1, 1024) is None


WAN = [footprint.flavour for footprint in FOOTPRINTS["wan"]]


@pytest.mark.parametrize("flavour", WAN)
def test_wans_declared_and_traced_tables_agree(flavour: str) -> None:
    """The table in the package, eager and compiled. With an image encoder, the compiler keeps less than is declared."""
    declared = next(one for one in FOOTPRINTS["wan"] if one.flavour == flavour)
    table = footprint_tables.tables_beside(wan_footprint.__file__)[flavour]
    assert (table.parameters, table.width) == (declared.parameters, declared.width)
    tokens: Any = {"image": 4096, "text": 512, "joint": 4608, "vision": declared.vision_tokens}
    for adapter, compiled in ((LORA, False), (FULL, False), (LORA, True)):
        method = StepMethod(compiled=compiled, adapter_path="auto", full_finetune=adapter is FULL)
        sizes = [
            activations(one, tokens, select(one, adapter), method)[0].kept
            for one in (declared, replace(declared, blocks=table.blocks))
        ]
        assert sizes[1] == pytest.approx(sizes[0], rel=0.01 if declared.vision_tokens else 0.004)


def test_a_block_that_is_not_proportional_to_its_tokens_is_rejected() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            return x + (x @ x.transpose(1, 2)).softmax(-1) @ x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x: Tensor, return_dict: bool = False) -> tuple[Tensor]:
            for block in self.blocks:
                x = block(x)
            return (x,)

    def inputs(_model: nn.Module, *, batch: int, rows: int, columns: int, text: int) -> dict[str, Tensor]:
        return {"x": torch.empty(batch, rows * columns, 8)}

    with torch.device("meta"):
        model = Model()
    with pytest.raises(TraceError, match=r"blocks\.\* with nothing trained"):
        trace(model, ("Block",), ("blocks.0.linear", "blocks.1.linear"), inputs, compiled=False)
