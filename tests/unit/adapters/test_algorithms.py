"""Every record of an adapter algorithm is consistent, and complete: nothing outside it names the algorithm."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gracetune.adapters import algorithms as package
from gracetune.adapters.algorithms.record import Algorithm
from gracetune.adapters.algorithms.registry import algorithm, algorithms
from gracetune.adapters.attach import attach, describe
from gracetune.adapters.formats.detection import detect
from gracetune.adapters.formats.record import FORMATS
from gracetune.adapters.targets import ADAPTABLE
from gracetune.adapters.targets import select as select_modules
from gracetune.adapters.trainable import select, trainable
from gracetune.config.registry import ALGORITHM_NAMES, ALGORITHMS
from gracetune.config.run_config import Adapter
from gracetune.models.footprint import Footprint, FootprintBlock, FootprintLinear
from gracetune.models.registry import FOOTPRINTS, KEY_MAPS, spec_of
from unit.adapters.denoisers import TinyModel
from unit.adapters.formats.making import CLASSES, FLAVOURS
from unit.docs.targets import text_of

ALL = pytest.mark.parametrize("record", algorithms(), ids=lambda record: record.name)
SHARED = {"record", "registry", "assembly", "matrices", "low_rank", "__init__"}


def test_every_file_of_the_folder_is_registered() -> None:
    files = {path.stem for path in Path(package.__path__[0]).glob("*.py")}
    assert files - SHARED == set(ALGORITHMS.ours)
    assert ALGORITHM_NAMES[: len(ALGORITHMS.ours)] == tuple(ALGORITHMS.ours)


def test_records_import_no_torch() -> None:
    """Checking a config reads the records before any model code is imported."""
    source = Path(package.__path__[0]).parents[2]
    code = f"import sys; sys.path.insert(0, {str(source)!r})\n"
    code += "from gracetune.adapters.algorithms.registry import algorithms\nalgorithms()\n"
    code += "sys.exit(bool({'torch', 'peft', 'lycoris'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-B", "-c", code], timeout=60, check=False).returncode == 0


@ALL
@pytest.mark.parametrize("path", ["auto", "reference"])
@pytest.mark.parametrize("kernel", [(), (3, 3)], ids=["linear", "conv"])
def test_what_is_trained_is_what_the_record_says(record: Algorithm, path: Any, kernel: tuple[int, ...]) -> None:
    layer = nn.Conv2d(12, 20, kernel) if kernel else nn.Linear(12, 20)
    adapter = Adapter(kind=record.name, rank=2, factor=4, targets=("0",))
    model = nn.Sequential(layer)
    attached = attach(model, adapter, family="wan", default_targets=(), seed=0, adapter_path=path)
    (state,) = attached.state().layers.values()
    found = {name: tuple(tensor.shape) for name, tensor in state.tensors.items()}
    shapes = record.shapes(FootprintLinear("0", 12, 20, "x", kernel=tuple(kernel)), adapter)
    assert found == {**shapes, **dict.fromkeys(record.constants, ())}
    zero = {name for name, tensor in state.tensors.items() if not tensor.any()} - record.constants.keys()
    assert zero == record.zero_at_first & found.keys()
    assert record.misfit(state.tensors, tuple(layer.weight.shape)) is None
    assert record.outputs(state.tensors) in (20, None)
    assert record.columns(state.tensors) in (12 * (9 if kernel else 1), None)


@ALL
def test_a_files_algorithm_is_detected_by_its_tensors(record: Algorithm) -> None:
    """It is written in the format that holds every algorithm, and read again as the same layer."""
    model = nn.ModuleDict(
        {"blocks": nn.ModuleList([nn.ModuleDict({"attn1": nn.ModuleDict({"to_q": nn.Linear(8, 8)})})])}
    )
    adapter = Adapter(kind=record.name, rank=2, targets=("to_q",))
    attached = attach(model, adapter, family="wan", default_targets=(), seed=0)
    state = attached.state()
    tensors, header = FORMATS["lycoris"].write(state, torch.float32)
    (read,) = FORMATS["lycoris"].read(tensors, header, "wan").checked().states.values()
    (written,), (again,) = state.layers.values(), read.layers.values()
    assert again.algorithm == record.name
    assert again.tensors.keys() == written.tensors.keys()
    assert detect(tensors, header, family="wan").algorithms == (record.name,)


@ALL
def test_the_documentation_names_it(record: Algorithm) -> None:
    assert f"`{record.name}`" in text_of("adapters.md")


@ALL
def test_depends_on_weight_matches_the_implemented_method(record: Algorithm) -> None:
    """A record implements either `added` or `changed`, and `depends_on_weight` states which."""
    own = type(record)
    assert (own.changed is not Algorithm.changed) == record.depends_on_weight
    assert (own.added is not Algorithm.added) != record.depends_on_weight


def test_names_are_unique() -> None:
    lycoris = [record.lycoris_name for record in algorithms() if record.lycoris_name is not None]
    assert len(set(lycoris)) == len(lycoris)
    options = [option for record in algorithms() for option in record.own_options]
    assert len(set(options)) == len(options)
    assert set(options) <= Adapter.model_fields.keys()


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="no adapter algorithm is called registry: there are lora, dora"):
        algorithm("registry")


def tiny_denoiser(family: str, tiny_model: TinyModel) -> nn.Module:
    folder = tiny_model(family, FLAVOURS[family]) / KEY_MAPS[family].component
    with torch.device("meta"):
        model: nn.Module = CLASSES[family].from_config(CLASSES[family].load_config(folder))
    return model


INSIDE = ("ModuleList", "Sequential", "GELU", "GEGLU", "SwiGLU")
"""Modules between a layer and the one that footprints and presets name."""


def footprint_of(model: nn.Module, family: str) -> Footprint:
    """The footprint a family would declare for this model, with each layer as a block of its own."""
    modules, spec = describe(model), spec_of(family)
    kinds = {path: info for path, info in modules.items() if info.kind in ADAPTABLE}
    default = set(select_modules(modules, spec.default_targets, untrained=spec.untrained).paths)
    conv = set(select_modules(modules, spec.conv_targets).paths) if spec.conv_targets else set()
    blocks = []
    for path, info in kinds.items():
        layer: Any = model.get_submodule(path)
        outputs, inputs, *kernel = layer.weight.shape
        owner = next(
            name for name in info.owners if name not in ("ModuleList", "Sequential", "GELU", "GEGLU", "SwiGLU")
        )
        parent, _, name = path.rpartition(".")
        linear = FootprintLinear(name, inputs, outputs, "x", owner, bias=layer.bias is not None,
        default=path in default,
                        conv_default=path in conv, kernel=tuple(kernel))  # fmt: skip
        blocks.append(FootprintBlock(parent, 1, (), (), (), (linear,)))
    return replace(FOOTPRINTS[family][0], blocks=tuple(blocks))


SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"conv_rank": 3},
    {"targets": ("Attention",)},
    {"targets": ("to_q", "*to_out*"), "exclude": ("*.1.*",)},
    {"exclude": ("to_k",)},
    {"by_module": {"FeedForward": {"algo": "LoHa", "dim": 1}}},
)
"""Names, classes by their older names too, exclusions and options by class."""
OTHER_FEED_FORWARD = {"krea2": "Krea2SwiGLU"}
"""Family -> the class of its feed-forward, if it is not `FeedForward`."""


EACH_ONCE = [(name, SETTINGS[place % len(SETTINGS)]) for place, name in enumerate(ALGORITHM_NAMES)]


@pytest.mark.parametrize(
    "cases",
    [EACH_ONCE, pytest.param([*product(ALGORITHM_NAMES, SETTINGS)], marks=pytest.mark.full)],
    ids=["each once", "all"],
)
@pytest.mark.parametrize("family", FLAVOURS)
def test_the_planner_counts_what_is_attached(
    family: str, cases: list[tuple[str, dict[str, Any]]], tiny_model: TinyModel
) -> None:
    """Algorithms and ways to choose layers, on every family's tiny model."""
    model = tiny_denoiser(family, tiny_model)
    footprint, spec = footprint_of(model, family), spec_of(family)
    for name, settings in cases:
        by_module = {OTHER_FEED_FORWARD.get(family, cls): one for cls, one in settings.get("by_module", {}).items()}
        adapter = Adapter(kind=name, rank=2, **settings | {"by_module": by_module})
        attached = attach(
            model, adapter, family=family, default_targets=spec.default_targets, conv_targets=spec.conv_targets,
            untrained=spec.untrained, seed=0,
        )  # fmt: skip
        assert attached.selection is not None
        chosen = select(footprint, adapter)
        counted = sum(tensor.elements for tensor in trainable(footprint, chosen, adapter))
        assert len(chosen.targets) == len(attached.selection.paths), (name, settings)
        assert counted == sum(one.numel() for one in attached.parameters().values()), (name, settings)
        attached.detach()
