"""docs/seed-map.md: every name and section of the five documents has a row, and every row leads somewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gracetune.config import Environment, load
from unit.docs import seeds
from unit.docs.targets import ROOT, imported, named, problems, rows, spans, text_of

TEXT = text_of("seed-map.md")
NAMES = [row for row in rows(TEXT) if len(row) == 3]
PROMISES = [row for row in rows(TEXT) if len(row) == 2]
ABSENT = "not here"

with_seeds = pytest.mark.skipif(
    not seeds.present(),
    reason=f"the five documents are not at {seeds.FOLDER.relative_to(ROOT.parent)} beside the clone",
)


@pytest.mark.parametrize("row", NAMES + PROMISES, ids=lambda row: row[0][:60])
def test_a_row_leads_somewhere_or_says_why_not(row: list[str]) -> None:
    assert problems(" ".join(row[1:])) == []
    assert named(row[1]) or row[1].startswith((ABSENT, "see ")), "neither a place nor a reason"


@pytest.mark.full
def test_python_names_can_be_imported() -> None:
    for kind, name in named(TEXT):
        if kind == "Python":
            assert imported(name) is not None, name


def test_a_name_has_one_row() -> None:
    listed = [name for row in NAMES for name in spans(row[0])]
    assert {name for name in listed if listed.count(name) > 1} == set()


@with_seeds
def test_every_name_in_code_has_a_row() -> None:
    listed = {name for row in NAMES for name in spans(row[0])}
    assert seeds.names() - listed == set(), "names without a row"
    assert listed - seeds.names() == set(), "rows of names that no document has"


@with_seeds
def test_every_section_has_a_row() -> None:
    promised = [row[0] for row in PROMISES]
    missing = [one for one in seeds.sections() if not any(text.startswith(f"{one} ") for text in promised)]
    assert missing == []
    third = " ".join(text for text in promised if text.startswith("003"))
    assert [title for title in seeds.contents() if title not in third] == []


@with_seeds
def test_the_documents_text_is_not_copied() -> None:
    """No ten words in a row are theirs."""
    theirs = " ".join(" ".join(text.split()) for text in seeds.texts().values()).lower()
    ours = " ".join(cell for row in PROMISES + NAMES for cell in row if not spans(cell)).lower().split()
    runs = (" ".join(ours[start : start + 10]) for start in range(len(ours) - 9))
    assert [run for run in runs if run in theirs] == []


# -- the documents' own configurations, read --------------------------------------------------------------------------


def _simpletuner() -> dict[str, Any]:
    """The blocks of 000 in one file, with the least that SimpleTuner asks for beside them."""
    blocks = [
        json.loads(text if text.strip().startswith("{") else f"{{{text}}}") for text in seeds.blocks("000", "json")
    ]
    dataset = next(block for block in blocks if "instance_data_dir" in block)
    given = {key: value for block in blocks if block is not dataset for key, value in block.items()}
    return {
        "model_family": "flux", "model_type": "lora", "lora_type": "standard", "output_dir": "out",
        "optimizer": "adamw_bf16", "learning_rate": 1e-4, "max_train_steps": 10, "num_train_epochs": 0,
        "train_batch_size": 1, "gradient_accumulation_steps": 2, "mixed_precision": "bf16",
        "attention_mechanism": "flash-attn-3", **given, "datasets": [{**dataset, "caption_strategy": "filename"}],
    }  # fmt: skip


def _aitoolkit() -> dict[str, Any]:
    """The settings of 002 in the example that follows them."""
    job: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "wan22_t2v_automagic.yaml").read_text())
    process = job["config"]["process"][0]
    for text in seeds.blocks("002", "yaml"):
        block = yaml.safe_load(text)
        process["datasets"][0] |= block.get("dataset", {})
        process["optimizer"] |= {key: _number(value) for key, value in block.get("optimizer", {}).items()}
        process["train"] |= {**block.get("train", {}), "mixed_precision": "bf16"}  # the document has both
    limits = {"lr_bump": 1e-6, "min_lr": 1e-7, "max_lr": 1e-3}
    experts = {f"{stage}_noise_{key}": value for stage in ("high", "low") for key, value in limits.items()}
    process["optimizer"] = {**limits, **experts, **process["optimizer"]}
    return job


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and value[0].isdigit() else value


def _reached(config: dict[str, Any], file: Path, variables: dict[str, str]) -> set[tuple[str, str]]:
    """(our key, the last word of the key it was read from) for every value."""
    file.write_text(json.dumps(config))
    resolved = load(file, environment=Environment(variables))
    found = set()
    for path, origin in resolved.origins.items():
        ours = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
        found.add((ours.replace("[0]", "[]"), str(origin).replace("]", "").split()[-1].split(".")[-1]))
    return found


@with_seeds
def test_the_documents_own_configs_reach_the_keys_of_their_rows(tmp_path: Path) -> None:
    ratio = {"PYTORCH_CUDA_ALLOC_CONF": "use_uvm:True,uvm_oversubscription_ratio:3.0,uvm_access_pattern:gpu_first"}
    reached = _reached(_simpletuner(), tmp_path / "simpletuner.json", ratio)
    reached |= _reached(_aitoolkit(), tmp_path / "job.json", {})
    spelled = {name for _, name in reached}
    wrong = []
    for row in NAMES:
        keys = [name for kind, name in named(row[1]) if kind == "key"]
        for name in spans(row[0]):
            written = name.removeprefix("--")
            if keys and written in spelled and not any((key, written) in reached for key in keys):
                wrong.append(f"{name}: {[pair for pair in reached if pair[1] == written]}, and the row says {keys}")
    assert wrong == []
    assert len({name for row in NAMES for name in spans(row[0]) if name in spelled}) > 25, "they are really read"
    assert ("memory.use_uvm", "PYTORCH_CUDA_ALLOC_CONF") in reached
