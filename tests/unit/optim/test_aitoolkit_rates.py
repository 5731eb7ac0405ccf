from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gracetune.optim.aitoolkit_rates import NotImportableError, import_rates, read_rates
from gracetune.optim.automagic import Automagic

NAMES = ["high.a", "high.b"]
SHAPES = [(4, 6), (3,)]


def quantised(rates: torch.Tensor) -> dict[str, Any]:
    """As ai-toolkit keeps them: one scale for a tensor, a byte for an element."""
    scale = float(rates.max()) / 127
    return {"quantized": (rates / scale).round().to(torch.int8), "scale": scale, "orig_dtype": torch.float32}


def written(folder: Path, names: list[str] | None = None, **changes: Any) -> Path:
    draw = torch.Generator().manual_seed(0)
    state = {
        at: {
            "step": 7,
            "lr_mask": quantised(torch.rand(shape, generator=draw) * 1e-4 + 1e-5),
            "last_polarity": torch.rand(shape, generator=draw) > 0.5,
            "avg_lr": torch.tensor(5e-5),
            "RMS": torch.tensor(0.1),
        }
        for at, shape in enumerate(SHAPES)
    }
    group: dict[str, Any] = {"params": [0, 1], "lr": 1e-6, "eps": (1e-30, 1e-3)}
    if names is not None:
        group["param_names"] = names
    path = folder / "optimizer.pt"
    torch.save({"state": state, "param_groups": [group], **changes}, path)
    return path


def optimizer() -> Automagic:
    return Automagic(
        [(name, torch.zeros(shape, requires_grad=True)) for name, shape in zip(NAMES, SHAPES, strict=True)]
    )


@pytest.mark.parametrize("inside", [True, False])
def test_rates_and_signs_go_where_their_names_are(tmp_path: Path, inside: bool) -> None:
    path = written(tmp_path, NAMES if inside else None)
    target = optimizer()
    assert import_rates(target, path, None if inside else NAMES) == 2
    saved = torch.load(path, weights_only=True)["state"]
    state = target.named_state()
    for at, name in enumerate(NAMES):
        expected = saved[at]["lr_mask"]["quantized"].float() * saved[at]["lr_mask"]["scale"]
        unit = state.json["units"][name]
        found = (state.tensors[f"{name}:rate"].double() + 32768) * unit
        torch.testing.assert_close(found, expected.double(), rtol=1e-5, atol=unit)
        assert torch.equal(state.tensors[f"{name}:sign"].bool(), saved[at]["last_polarity"])


def test_without_names_it_is_refused_and_nothing_changed(tmp_path: Path) -> None:
    target = optimizer()
    before = target.named_state()
    with pytest.raises(NotImportableError, match="2 parameters by number only") as caught:
        import_rates(target, written(tmp_path))
    assert "Start without it" in str(caught.value)
    assert all(torch.equal(before.tensors[key], now) for key, now in target.named_state().tensors.items())


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["high.a"], "2 parameters, but 1 names"),
        (["x", "x"], "but 1 names"),
        (["high.a", "other"], "missing (1): high.b"),
    ],
)
def test_names_that_do_not_fit_are_refused(tmp_path: Path, names: list[str], words: str) -> None:
    with pytest.raises(NotImportableError) as caught:
        import_rates(optimizer(), written(tmp_path), names)
    assert words in str(caught.value)


def test_other_shapes_are_refused(tmp_path: Path) -> None:
    target = Automagic([(name, torch.zeros(9, requires_grad=True)) for name in NAMES])
    with pytest.raises(NotImportableError, match=r"different \(2\)"):
        import_rates(target, written(tmp_path, NAMES))


def test_another_optimizers_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "optimizer.pt"
    torch.save({"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": [{"params": [0]}]}, path)
    with pytest.raises(NotImportableError, match="not Automagic's state"):
        read_rates(path, ["a"])
    torch.save([1, 2], path)
    with pytest.raises(NotImportableError, match="a list"):
        read_rates(path, ["a"])
    torch.save({"weights": 1}, path)
    with pytest.raises(NotImportableError, match="no optimizer's state"):
        read_rates(path, ["a"])


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("evil-was-here"),))


def test_a_file_that_would_run_code_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state": Evil(), "param_groups": []}, tmp_path / "optimizer.pt")
    with pytest.raises(NotImportableError, match="cannot be read safely"):
        read_rates(tmp_path / "optimizer.pt", ["a"])
    assert not (tmp_path / "evil-was-here").exists()


@pytest.mark.parametrize("content", [b"", b"not a file of torch", b"PK\x03\x04 broken"])
def test_broken_and_missing_files_are_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "optimizer.pt"
    with pytest.raises(NotImportableError, match="no such file"):
        read_rates(path)
    path.write_bytes(content)
    with pytest.raises(NotImportableError, match="cannot be read safely"):
        read_rates(path)
