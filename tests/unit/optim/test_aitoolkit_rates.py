from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from gracetune.optim.aitoolkit_rates import NotImportableError, read_rates
from gracetune.optim.automagic import Automagic

SHAPES = {"high_noise/a": (4, 6), "high_noise/b": (3,), "low_noise/a": (4, 6), "low_noise/b": (3,)}
"""Our names in the order of the file: the high-noise expert comes first."""
LORA: dict[str, Any] = {"kind": "lora", "single_expert": False}


def quantized(rates: torch.Tensor) -> dict[str, Any]:
    """Rates as ai-toolkit stores them: one byte per element and one scale per tensor."""
    scale = float(rates.max()) / 127
    return {"quantized": (rates / scale).round().to(torch.int8), "scale": scale, "orig_dtype": torch.float32}


def written(folder: Path, shapes: Mapping[str, tuple[int, ...]] = SHAPES, groups: int = 1, **changes: Any) -> Path:
    """One param group, as upstream; two, as the fork creates for two experts."""
    draw = torch.Generator().manual_seed(0)
    state = {
        at: {
            "step": 7,
            "lr_mask": quantized(torch.rand(shape, generator=draw) * 1e-4 + 1e-5),
            "last_polarity": torch.rand(shape, generator=draw) > 0.5,
            "avg_lr": torch.tensor(5e-5),
            "RMS": torch.tensor(0.1),
        }
        for at, shape in enumerate(shapes.values())
    }
    each = len(shapes) // groups
    made = [
        {"params": [*range(each * at, each * (at + 1))], "lr": 1e-6, "eps": (1e-30, 1e-3)} for at in range(groups)
    ]  # fmt: skip
    path = folder / "optimizer.pt"
    torch.save({"state": state, "param_groups": made, **changes}, path)
    return path


@pytest.mark.parametrize("groups", [1, 2])
def test_rates_and_signs_get_our_names_in_the_files_order(tmp_path: Path, groups: int) -> None:
    path = written(tmp_path, groups=groups)
    found = read_rates(path, SHAPES, **LORA)
    target = Automagic([(name, torch.zeros(shape, requires_grad=True)) for name, shape in SHAPES.items()])
    target.load_rates(found.rates, found.signs)
    saved = torch.load(path, weights_only=True)["state"]
    state = target.named_state()
    for at, name in enumerate(SHAPES):
        expected = saved[at]["lr_mask"]["quantized"].float() * saved[at]["lr_mask"]["scale"]
        unit = state.json["units"][name]
        stored = (state.tensors[f"{name}:rate"].double() + 32768) * unit
        torch.testing.assert_close(stored, expected.double(), rtol=1e-5, atol=unit)
        assert torch.equal(state.tensors[f"{name}:sign"].bool(), saved[at]["last_polarity"])
    assert str(found).startswith("4 parameters start with the rates of")


@pytest.mark.parametrize(
    ("shapes", "options", "words"),
    [
        ({"a": (4, 6)}, {}, "found 4 parameters; expected the 1 that this run trains"),
        (dict(reversed(SHAPES.items())), {}, "parameters of other sizes"),
        (SHAPES, {"single_expert": True}, "their expert is unknown"),
        (SHAPES, {"kind": "dora"}, "kind dora; expected one of kind lora or lokr"),
    ],
)
def test_rates_that_match_no_parameter_are_rejected(
    tmp_path: Path, shapes: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(NotImportableError, match=words) as caught:
        read_rates(written(tmp_path), shapes, **{**LORA, **options})
    assert "--set optimizer.rates_from=null" in str(caught.value)


def test_another_optimizers_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "optimizer.pt"
    torch.save({"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": [{"params": [0]}]}, path)
    with pytest.raises(NotImportableError, match="no usable lr_mask for parameter 0"):
        read_rates(path, {"a": (2,)}, **LORA)
    torch.save([1, 2], path)
    with pytest.raises(NotImportableError, match="a list"):
        read_rates(path, SHAPES, **LORA)
    torch.save({"weights": 1}, path)
    with pytest.raises(NotImportableError, match="no optimizer state"):
        read_rates(path, SHAPES, **LORA)


@pytest.mark.parametrize(
    ("entry", "group", "words"),
    [
        (7, {"params": [0]}, "no state of parameter 0"),
        ({"lr_mask": {}}, {"params": [0]}, "no usable lr_mask for parameter 0"),
        ({"lr_mask": torch.tensor([1e-5, torch.nan])}, {"params": [0]}, "no usable lr_mask for parameter 0"),
        ({"lr_mask": torch.rand(2), "last_polarity": torch.ones(3)}, {"params": [0]}, "parameters of other sizes"),
        ({"lr_mask": torch.rand(2)}, {"lr": 1e-4}, "a group without a list of its parameters"),
        ({"lr_mask": torch.rand(2)}, {"params": [[0]]}, "a group without a list of its parameters"),
    ],
)
def test_a_malformed_file_is_rejected(tmp_path: Path, entry: object, group: object, words: str) -> None:
    path = tmp_path / "optimizer.pt"
    torch.save({"state": {0: entry}, "param_groups": [group]}, path)
    with pytest.raises(NotImportableError, match=words):
        read_rates(path, {"a": (2,)}, **LORA)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("evil-was-here"),))


def test_code_in_a_file_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state": Evil(), "param_groups": []}, tmp_path / "optimizer.pt")
    with pytest.raises(NotImportableError, match="cannot be read safely"):
        read_rates(tmp_path / "optimizer.pt", SHAPES, **LORA)
    assert not (tmp_path / "evil-was-here").exists()


@pytest.mark.parametrize("content", [b"", b"not a file of torch", b"PK\x03\x04 broken"])
def test_errors_name_broken_and_missing_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "optimizer.pt"
    with pytest.raises(NotImportableError, match="no such file"):
        read_rates(path, SHAPES, **LORA)
    path.write_bytes(content)
    with pytest.raises(NotImportableError, match="cannot be read safely"):
        read_rates(path, SHAPES, **LORA)
