"""The denoiser's blocks in training: compiled graphs, kept activations, gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from gracetune.adapters.attach import Attached, attach
from gracetune.bench.step.job import PRESETS, StepJob, config_of
from gracetune.bench.step.random_data import random_data
from gracetune.bench.step.random_model import make_model
from gracetune.config.run_config import Adapter
from gracetune.models.activation_parking import ActivationParking, HostClock
from gracetune.models.attention import _with_kernel
from gracetune.models.parking import InlineLane
from gracetune.models.registry import spec_of
from gracetune.models.source import ModelSource
from gracetune.models.spec import ModelFacts, PartPlacement
from gracetune.train.blocks import Preparation, list_costly_operations, prepare_blocks
from gracetune.train.planning import shapes_of

TinyModel = Callable[[str, str], Path]
CPU = torch.device("cpu")
SPEC = spec_of("wan")
BUCKETS = ((4, 4), (4, 6), (6, 4), (6, 6), (8, 4), (8, 8))
"""Height and width of latents: square and not square, two of them with the same number of tokens."""


class Wan:
    """A tiny Wan with a LoRA on some layers, in fp32 so that results can be compared exactly."""

    def __init__(
        self, folder: Path, targets: tuple[str, ...] = ("blocks.*.attn1.to_q",), attention: str | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        source = ModelSource("tiny", folder)
        self.facts: ModelFacts = SPEC.inspect(source)
        placement = PartPlacement(CPU, torch.float32, attention)
        self.denoiser: Any = SPEC.load_denoiser(source, self.facts.experts[0], placement)
        self.attached: Attached = attach(
            self.denoiser, Adapter(kind="lora", rank=2, targets=targets), family="wan", expert="high_noise",
            default_targets=(), seed=0,
        )  # fmt: skip
        self.denoiser.train()
        given = {"checkpointing": False, "compiled": False, **options}
        self.prepared: Preparation = prepare_blocks(self.denoiser, SPEC.repeated_blocks, **given)

    def loss(self, height: int = 4, width: int = 4, batch: int = 1) -> Tensor:
        generator = torch.Generator().manual_seed(batch)
        latents = torch.randn(batch, 16, 1, height, width, generator=generator)
        caption = torch.randn(batch, 512, self.denoiser.config.text_dim, generator=generator)
        level = torch.linspace(0.2, 0.8, batch)
        return SPEC.predict(self.denoiser, latents, level, {"prompt_embeds": caption}, self.facts).square().sum()

    def gradients(self, **shape: int) -> list[Tensor]:
        for parameter in self.attached.parameters().values():
            parameter.grad = None
            parameter.data = parameter.data + 0.01  # lora_B starts at 0, which would hide the effect of A
        self.loss(**shape).backward()
        found = [parameter.grad for parameter in self.attached.parameters().values()]
        return [one for one in found if one is not None]


@pytest.fixture
def wan_folder(tiny_model: TinyModel) -> Iterator[Path]:
    torch._dynamo.reset()
    yield tiny_model("wan", "t2v-14b-2.2")
    torch._dynamo.reset()


def passes(wan: Wan, batches: tuple[int, ...]) -> list[int]:
    """The number of graphs after each shape."""
    graphs = []
    for height, width in BUCKETS:
        for batch in batches:
            wan.loss(height, width, batch).backward()
            graphs.append(wan.prepared.stats.graphs)
    return graphs


class _Table(nn.Module):
    """A table of positions like Wan's: built by height and width, and returned as a view."""

    def forward(self, height: int, width: int) -> Tensor:
        rows = torch.arange(float(height)).view(height, 1, 1).expand(height, width, 4)
        columns = torch.arange(float(width)).view(1, width, 1).expand(height, width, 4)
        return torch.cat([rows, columns], dim=-1).reshape(1, height * width, 8)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x)) * table


class _Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = _Table()
        self.blocks = nn.ModuleList(_Block() for _ in range(4))

    def forward(self, height: int, width: int) -> Tensor:
        x, table = torch.ones(2, height * width, 8), self.table(height, width)
        for block in self.blocks:
            x = block(x, table)
        return x.sum()


def test_a_kernel_set_around_attention_costs_no_graphs(wan_folder: Path) -> None:
    """The math kernel is set in the same way as cuDNN's: all blocks then share one class of attention processors."""
    through_torch = Wan(wan_folder, attention="_native_math")
    for module in through_torch.denoiser.modules():
        if hasattr(module, "processor"):
            module.processor = _with_kernel(module.processor, SDPBackend.MATH)
    prepared = prepare_blocks(
        through_torch.denoiser, SPEC.repeated_blocks, checkpointing=False, compiled=True, backend="eager"
    )
    with torch.no_grad():
        through_torch.loss()
    assert prepared.blocks > 1
    assert prepared.stats.graphs == 1


def test_the_compilers_list_of_costly_operations_is_completed_and_restored() -> None:
    from torch._functorch import partitioners

    attention = torch.ops.aten._scaled_dot_product_cudnn_attention
    with list_costly_operations():
        known = partitioners.get_default_op_list().compute_intensive_ops
        assert {attention, torch.ops.gracetune.products, torch.ops.aten.mm} <= set(known)
    assert torch.ops.gracetune.products not in partitioners.get_default_op_list().compute_intensive_ops


class TestMechanism:
    """The same tests as below, on small blocks that compile quickly."""

    def test_four_blocks_and_six_buckets_have_two_graphs(self) -> None:
        torch._dynamo.reset()
        denoiser = _Denoiser()
        prepared = prepare_blocks(denoiser, ["_Block"], checkpointing=False, compiled=True, backend="eager")
        for height, width in BUCKETS:
            denoiser(height, width).backward()
            assert prepared.stats.graphs == 2
        assert prepared.blocks == 4
        assert prepared.stats.seconds > 0
        second = _Denoiser()
        found = prepare_blocks(second, ["_Block"], checkpointing=False, compiled=True, backend="eager")
        second(4, 6).backward()
        assert found.stats.graphs == 0, "another expert has the same graphs"

    def test_python_floats_are_constants_of_a_graph(self) -> None:
        """By default torch turns them into CPU inputs of a graph with dynamic shapes."""

        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight, self.scale = nn.Parameter(torch.ones(4)), 0.25

            def forward(self, x: Tensor) -> Tensor:
                return functional.dropout(self.weight * x * self.scale, p=self.scale)

        inputs: list[tuple[int, ...]] = []

        def recorded(graph: Any, given: Any) -> Any:
            inputs.extend(tuple(one.shape) for one in given if isinstance(one, Tensor))
            return graph.forward

        torch._dynamo.register_backend(name="recorded")(recorded)
        torch._dynamo.reset()
        denoiser = nn.Sequential(Scaled())
        prepare_blocks(denoiser, ["Scaled"], checkpointing=False, compiled=True, backend="recorded")
        denoiser(torch.ones(3, 4))
        assert sorted(len(shape) for shape in inputs) == [1, 2], "the weight and x"

    def test_a_budget_is_set_only_while_a_graph_is_compiled(self) -> None:
        torch._dynamo.reset()
        before = torch._functorch.config.activation_memory_budget
        kept = []
        for budget in (None, 0.0):
            torch._dynamo.reset()
            denoiser = _Denoiser()
            prepare_blocks(
                denoiser, ["_Block"], checkpointing=False, compiled=True, budget=budget, shapes="one",
                backend="aot_eager",
            )  # fmt: skip
            with counted() as saved:
                denoiser(4, 4)
            kept.append(saved.bytes)
            assert torch._functorch.config.activation_memory_budget == before
        assert kept[1] < kept[0]


@pytest.mark.full
class TestGraphs:
    def test_one_for_the_first_block_and_one_for_all_others_in_every_bucket(self, wan_folder: Path) -> None:
        """The first block needs its own graph, because its input needs no gradient."""
        wan = Wan(wan_folder, compiled=True, shapes="several", backend="eager")
        assert passes(wan, (2,)) == [2] * len(BUCKETS)
        assert wan.prepared.blocks == 2
        assert wan.prepared.stats.seconds > 0
        assert not torch._dynamo.utils.counters["graph_break"]

    @pytest.mark.parametrize("targets", [SPEC.default_targets, ("blocks.*.attn1.to_q",)])
    def test_a_batch_of_one_has_its_own_and_no_bucket_has(self, wan_folder: Path, targets: tuple[str, ...]) -> None:
        wan = Wan(wan_folder, targets, compiled=True, shapes="several", backend="eager")
        assert passes(wan, (1, 2)) == [2, *[4] * (2 * len(BUCKETS) - 1)]

    def test_after_the_first_shape_all_others_share_one_more_graph(self, wan_folder: Path) -> None:
        wan = Wan(wan_folder, compiled=True, shapes="one", backend="eager")
        assert passes(wan, (2,)) == [2, *[4] * (len(BUCKETS) - 1)]


@pytest.mark.full
class TestWhatIsComputed:
    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_gradients_are_those_of_plain_blocks(self, wan_folder: Path, checkpointing: bool) -> None:
        plain = Wan(wan_folder).gradients(batch=2)
        ours = Wan(wan_folder, compiled=True, checkpointing=checkpointing, shapes="one", backend="aot_eager")
        for found, wanted in zip(ours.gradients(batch=2), plain, strict=True):
            assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))

    @pytest.mark.parametrize("compiled", [False, True])
    def test_gradients_are_the_same_bits_with_parked_inputs(self, wan_folder: Path, compiled: bool) -> None:
        options: dict[str, Any] = {"checkpointing": True, "compiled": compiled, "shapes": "one", "backend": "aot_eager"}
        new_home: Callable[[int], Tensor] = lambda size: torch.empty(size, dtype=torch.uint8)  # noqa: E731
        parking = ActivationParking(CPU, InlineLane(), HostClock(), new_home, least=64)
        found = Wan(wan_folder, parking=parking, **options).gradients(batch=2)
        wanted = Wan(wan_folder, **options).gradients(batch=2)
        assert parking.stats.parked_bytes > 0
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))

    def test_the_budget_limits_kept_activations_and_stays_local(self, wan_folder: Path) -> None:
        before = torch._functorch.config.activation_memory_budget
        kept = {}
        for budget in (None, 0.0):
            torch._dynamo.reset()
            wan = Wan(wan_folder, compiled=True, budget=budget, shapes="one", backend="aot_eager")
            with counted() as saved:
                wan.loss(8, 8, 2)
            kept[budget] = saved.bytes
            assert torch._functorch.config.activation_memory_budget == before
        assert kept[0.0] < 0.7 * kept[None]


class _Saved:
    bytes = 0


@contextmanager
def counted() -> Iterator[_Saved]:
    """Bytes kept for the backward pass, without parameters. Shared memory counts once."""
    saved, seen = _Saved(), set[int]()

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor.untyped_storage().data_ptr() not in seen:
            seen.add(tensor.untyped_storage().data_ptr())
            saved.bytes += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


class _Watch(TorchDispatchMode):
    """Records every operation and the tensors it creates."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.operations.append(func.overloadpacket.__name__)
        for tensor in torch.utils._pytree.tree_leaves(made):
            if isinstance(tensor, Tensor):
                self.dtypes.add(tensor.dtype)
        return made


class TestWansBlocks:
    """Properties of diffusers' code that we rely on. These tests fail if a release changes them."""

    def test_positions_are_real_numbers_in_single_precision(self, wan_folder: Path) -> None:
        wan, seen = Wan(wan_folder), _Watch()
        for block in wan.denoiser.blocks:
            block.register_forward_pre_hook(lambda *_: seen.__enter__() and None)
            block.register_forward_hook(lambda *_: seen.__exit__(None, None, None))
        wan.loss(4, 6, 2)
        assert len(seen.operations) > 100
        assert not {dtype for dtype in seen.dtypes if dtype.is_complex or dtype == torch.float64}

    def test_modulation_is_one_for_each_sample(self, wan_folder: Path) -> None:
        wan = Wan(wan_folder)
        given: list[tuple[int, ...]] = []
        for block in wan.denoiser.blocks:
            block.register_forward_pre_hook(lambda _, args: given.append(tuple(args[2].shape)))
        width = wan.denoiser.config.num_attention_heads * wan.denoiser.config.attention_head_dim
        wan.loss(8, 8, 3)
        assert given == [(3, 6, width)] * 2

    def test_what_is_kept_does_not_hold_it_for_each_token(self, wan_folder: Path) -> None:
        wan = Wan(wan_folder)
        width = wan.denoiser.config.num_attention_heads * wan.denoiser.config.attention_head_dim
        shapes: list[torch.Size] = []
        pack: Callable[[Tensor], Tensor] = lambda tensor: (shapes.append(tensor.shape), tensor)[1]  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            wan.loss(8, 8, 2)
        assert shapes
        assert not [shape for shape in shapes if len(shape) == 4 and shape[-2:] == (6, width)]


def test_shapes_are_counted_over_all_datasets(tmp_path: Path) -> None:
    model = make_model(PRESETS["wan14b"], tmp_path / "model", "tiny")
    job = StepJob("wan14b", smoke=True)
    index = random_data(job, config_of(job, model.source.folder, tmp_path), model, pinned=False).index
    assert shapes_of(index) == 1
    first = index.datasets[0]
    other = replace(first.items[0], bucket=replace(first.items[0].bucket, width=64, height=128))
    assert shapes_of(replace(index, datasets=(first, replace(first, items=(other,))))) == 2
