"""docs/extending.md: the code on the page is the example's, and its traced footprint is its model's."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from unit.docs.targets import ROOT, rows, spans, text_of

TEXT = text_of("extending.md").partition("\n## Ten changes\n")[0]  # those: tests/runs/test_ten_changes.py
EXAMPLE = ROOT / "examples" / "extending"
PACKAGE = EXAMPLE / "gracetune_auraflow"
BLOCKS = re.findall(r"^`([\w./]+)`\n\n```\w+\n(.*?)^```$", TEXT, re.M | re.S)
NO_TORCH = ("names", "footprint", "keys")


@pytest.mark.parametrize(("file", "block"), BLOCKS, ids=[file for file, _ in BLOCKS])
def test_code_on_the_page_is_the_examples(file: str, block: str) -> None:
    assert block in (EXAMPLE / file).read_text()


def test_there_is_code_of_every_step_and_none_without_a_file() -> None:
    assert len(BLOCKS) == TEXT.count("```") // 2
    assert len(BLOCKS) >= 8


def test_the_table_lists_the_package() -> None:
    listed = {name: spans(row[1]) for row in rows(TEXT) for name in spans(row[0])}
    assert {*listed, "__init__.py"} == {path.name for path in PACKAGE.glob("*.py")}
    for file, names in listed.items():
        body = ast.parse((PACKAGE / file).read_text()).body
        defined = {node.name for node in body if isinstance(node, ast.FunctionDef)}
        defined |= {ast.unparse(node.targets[0]) for node in body if isinstance(node, ast.Assign)}
        assert {*names} <= defined, file


def test_the_familys_name_stands_in_one_place_of_the_package() -> None:
    files = {*PACKAGE.glob("*.py"), *(EXAMPLE / "tests").glob("*.py")}
    assert [file.name for file in files if '"auraflow"' in file.read_text()] == ["__init__.py"]


def test_what_configs_are_checked_with_imports_no_torch() -> None:
    code = f"import sys; sys.path[:0] = {[str(ROOT / 'src'), str(EXAMPLE)]!r}\n"
    code += "".join(f"import gracetune_auraflow.{module}\n" for module in NO_TORCH)
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-B", "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.full
@pytest.mark.parametrize("block", [0, 1], ids=["joint", "single"])
@pytest.mark.parametrize(
    ("kind", "path", "policy"),
    [
        ("lora", "reference", "off"),
        ("lora", "auto", "off"),
        ("lora", "auto", "full"),
        ("full_finetune", "auto", "off"),
    ],
)
def test_a_further_block_keeps_what_the_footprint_says(
    block: int, kind: Any, path: Any, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real class forward and backward on the meta device, with two blocks of each kind and with four of one."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    import torch
    from diffusers import AuraFlowTransformer2DModel
    from gracetune_auraflow.footprint import CAPTION_TOKENS, CAPTION_WIDTH, FOOTPRINTS, REGISTERS
    from gracetune_auraflow.published import build_published, example_inputs
    from gracetune_auraflow.spec import SPEC

    from gracetune.adapters import targets as layers
    from gracetune.adapters.attach import describe
    from gracetune.adapters.trainable import select, trainable
    from gracetune.config.run_config import Adapter
    from gracetune.planning.activations import StepMethod, activations
    from gracetune.planning.tracing.trace import trace
    from unit.models.meta_memory import LoraLinear, adapt, on_meta, train_step, use_gpu_kernels

    use_gpu_kernels(monkeypatch)
    adapter, side, batch = Adapter(kind=kind, rank=16), 64, 2
    full = kind == "full_finetune"
    published = build_published("v0.3")
    paths = layers.select(describe(published), SPEC.default_targets).paths
    blocks_alone = trace(published, SPEC.repeated_blocks, paths, example_inputs, compiled=False)
    footprint = replace(
        FOOTPRINTS[0], parameters=blocks_alone.parameters, width=blocks_alone.width, blocks=blocks_alone.blocks
    )

    def measured(counts: list[int]) -> int:
        with on_meta():
            model = AuraFlowTransformer2DModel(
                num_mmdit_layers=counts[0], num_single_dit_layers=counts[1], pos_embed_max_size=side**2
            )
            inputs = {
                "hidden_states": torch.empty(batch, 4, 2 * side, 2 * side),
                "encoder_hidden_states": torch.empty(batch, CAPTION_TOKENS, CAPTION_WIDTH),
                "timestep": torch.ones(batch),
            }
            if not full:
                model.requires_grad_(False)
                targets = {linear.name for one in footprint.blocks for linear in one.linears if linear.default}
                adapt(model, targets, lambda base: LoraLinear(base, copies=path == "reference"))
        return train_step(model, inputs, checkpointing=policy == "full").peak

    def predicted(counts: list[int]) -> int:
        blocks = tuple(replace(one, count=count) for one, count in zip(footprint.blocks, counts, strict=True))
        small = replace(footprint, blocks=blocks)
        text, selection = CAPTION_TOKENS + REGISTERS, select(small, adapter)
        tokens: Any = {"image": side**2, "text": text, "joint": side**2 + text, "vision": 0}
        method = StepMethod(compiled=False, adapter_path=path, full_finetune=full)
        entry = next(one for one in activations(small, tokens, selection, method) if one.policy == policy)
        copies = 2 * sum(tensor.elements for tensor in trainable(small, selection, adapter))
        return entry.total(batch) + (copies if not full and policy == "off" else 0)

    more = [4 if block == number else 2 for number in range(2)]
    assert predicted(more) - predicted([2, 2]) == pytest.approx(measured(more) - measured([2, 2]), rel=0.002)
