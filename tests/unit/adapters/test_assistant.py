"""An assistant beside a model's layers: on, off, below every kind of adapter, in compiled graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gracetune.adapters.assistant import AssistantFile, assist
from gracetune.adapters.attach import attach
from gracetune.adapters.merge import merge_module
from gracetune.adapters.state import AdapterState, Layer
from gracetune.config.run_config import Adapter
from gracetune.errors import ConfigError
from gracetune.models.eight_bit_linear import Fp8Linear, Int8Linear

CPU = torch.device("cpu")
WIDTH = 32


def model(form: str = "plain") -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(2):
        layer: nn.Linear = nn.Linear(WIDTH, WIDTH)
        if form != "plain":
            layer = (Fp8Linear if form == "fp8" else Int8Linear)(layer.weight, layer.bias)
        layers += [layer, nn.LayerNorm(WIDTH)]
    return nn.Sequential(*layers).requires_grad_(False)


def assistant(paths: tuple[str, ...] = ("0", "2"), width: int = WIDTH) -> AssistantFile:
    def layer(seed: int) -> Layer:
        generator = torch.Generator().manual_seed(seed)
        down, up = (torch.randn(shape, generator=generator) * 0.3 for shape in ((3, width), (width, 3)))
        return Layer("lora", {"lora_A.weight": down, "lora_B.weight": up}, alpha=1.5, rank=3)

    return AssistantFile(Path("a.safetensors"), AdapterState("wan", "", {path: layer(int(path)) for path in paths}))


def rows() -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))


def test_it_equals_a_merged_one_and_leaves_no_trace() -> None:
    ours, merged = model(), model()
    plain = ours(rows())
    handle = assist(ours, assistant(), CPU, torch.float32)
    merge_module(assistant().state, merged)
    assert torch.allclose(ours(rows()), merged(rows()), atol=1e-5)
    assert not torch.allclose(ours(rows()), plain, atol=1e-2)
    with handle.absent():
        assert torch.equal(ours(rows()), plain)
    assert torch.allclose(ours(rows()), merged(rows()), atol=1e-5)
    assert ours.state_dict().keys() == merged.state_dict().keys()
    assert {name for name, _ in ours.named_parameters()} == {name for name, _ in merged.named_parameters()}


@pytest.mark.parametrize("form", ["plain", "fp8", "int8"])
def test_compiled_graphs_follow_the_switch(form: str) -> None:
    ours = model(form)
    handle = assist(ours, assistant(), CPU, torch.float32)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    x = rows().requires_grad_()
    found: dict[bool, tuple[Tensor, Tensor]] = {}
    for _ in range(2):
        for on in (True, False):
            handle._set(on)
            wanted = torch.autograd.grad(ours(x).square().sum(), x)[0]
            answer = compiled(x)
            gradient = torch.autograd.grad(answer.square().sum(), x)[0]
            assert torch.allclose(answer, ours(x), atol=1e-5)
            assert torch.allclose(gradient, wanted, atol=1e-4)
            found[on] = (answer.detach(), gradient)
    assert not torch.allclose(found[True][0], found[False][0], atol=1e-2)


@pytest.mark.parametrize("kind", ["lora", "dora", "locon", "loha", "lokr", "ia3", "diag_oft", "full_delta"])
@pytest.mark.parametrize("path", ["auto", "reference"])
def test_every_adapter_is_trained_above_it(kind: str, path: Any) -> None:
    """The trained adapter's change is the same with and without the assistant, because its file is used without."""
    ours, other = model(), model()
    handle = assist(ours, assistant(), CPU, torch.float32)
    options = Adapter.model_validate({"kind": kind, "rank": 2, "targets": ["Linear"]})
    attached = [
        attach(one, options, family="wan", default_targets=("Linear",), seed=3, adapter_path=path)
        for one in (ours, other)
    ]
    with torch.no_grad():
        for mine, theirs in zip(*(one.parameters().values() for one in attached), strict=True):
            mine.add_(torch.randn(mine.shape, generator=torch.Generator().manual_seed(mine.numel())) * 0.1)
            theirs.copy_(mine)
    ours(rows()).square().mean().backward()
    grads = [one.grad for one in attached[0].parameters().values()]
    assert all(one is not None and bool(one.isfinite().all()) for one in grads)
    assert any(bool(one.abs().sum()) for one in grads if one is not None)
    assert not any(one.requires_grad for name, one in ours.named_buffers() if "assistant" in name)
    with handle.absent():
        assert torch.allclose(ours(rows()), other(rows()), atol=1e-5)
    state = attached[0].state()
    assert set(state.layers) == {"0", "2"}
    assert not any("assistant" in name for layer in state.layers.values() for name in layer.tensors)


def test_what_does_not_fit_changes_nothing() -> None:
    ours = model()
    with pytest.raises(ConfigError) as raised:
        assist(ours, assistant(("0", "1", *map(str, range(20, 32)))), CPU, torch.float32)
    problems = raised.value.problems
    assert "a LayerNorm, and an assistant adapter is for linear layers" in problems[0].found
    assert problems[-1].found == "5 more"
    assert type(ours[0]) is nn.Linear
    with pytest.raises(ConfigError, match="16 outputs, the layer has 32"):
        assist(ours, assistant(("0",), width=16), CPU, torch.float32)
