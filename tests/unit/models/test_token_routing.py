"""Token routing: which tokens are kept, that they keep their positions, and that the others pass unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gracetune.cache.batches import Batch
from gracetune.config.families import FAMILIES, names_of
from gracetune.config.run_config import Model
from gracetune.config.token_routes import Route, TokenRoute, resolve_routes
from gracetune.data.refs import BatchRef, Bucket, CaptionRef, MaskRef, SampleRef
from gracetune.errors import ConfigError
from gracetune.models.activation_parking import ActivationParking, HostClock
from gracetune.models.parking import InlineLane
from gracetune.models.registry import footprint_of, spec_of
from gracetune.models.source import open_source
from gracetune.models.spec import ModelFacts, ModelSpec, PartPlacement
from gracetune.models.token_routing import KEPT, TokenRouter, block_lists, install, kept_tokens, put_back, select_tokens
from gracetune.train.blocks import prepare_blocks

TinyModel = Callable[[str, str], Path]
CPU = torch.device("cpu")
ROUTED = [("wan", "t2v-14b-2.2"), ("flux", "dev"), ("qwen_image", "t2i")]
SIDE = 8
"""Of the latents: 4 x 4 tokens, and in two frames 32."""


@dataclass
class Tiny:
    """A family's tiny denoiser in fp32, so that equal means equal."""

    spec: ModelSpec
    facts: ModelFacts
    denoiser: Any

    def latents(self, indexes: tuple[int, ...]) -> Tensor:
        frames = (2,) if self.spec.family == "wan" else ()
        return torch.stack([_values(index, "latents", 16, *frames, SIDE, SIDE) for index in indexes])

    def batch(self, indexes: tuple[int, ...], *, masks: Tensor | None = None) -> Batch:
        config = self.denoiser.config
        width = config.text_dim if self.spec.family == "wan" else config.joint_attention_dim
        tensors = {
            "latents": self.latents(indexes),
            "prompt_embeds": torch.stack([_values(index, "text", 6, width) for index in indexes]),
        }
        if self.spec.family == "flux":
            pooled = config.pooled_projection_dim
            tensors["pooled_prompt_embeds"] = torch.stack([_values(index, "pooled", pooled) for index in indexes])
        if masks is not None:
            tensors["loss_mask"] = masks
        refs = tuple(
            SampleRef("d", f"{index}.png", str(index), Bucket(64, 64), None, CaptionRef(""),
                      mask=None if masks is None else MaskRef("m", "mask.png", "0"))
            for index in indexes
        )  # fmt: skip
        return Batch(BatchRef(refs, Bucket(64, 64), indexes, 0, len(indexes)), tensors)

    def router(self, *routes: Route, seed: int = 0) -> TokenRouter:
        return TokenRouter(self.spec, routes, self.facts, seed)

    def answer(self, batch: Batch, spec: ModelSpec | None = None) -> Tensor:
        """Noise and level do not depend on the routing."""
        noisy = batch.tensors["latents"]
        level = torch.full((len(noisy),), 0.5)
        return (spec or self.spec).predict(self.denoiser, noisy, level, batch.tensors, self.facts)

    @property
    def blocks(self) -> list[nn.Module]:
        return [block for blocks in block_lists(self.denoiser, self.spec.family) for block in blocks]


def _values(index: int, name: str, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * index + len(name)))


def opened(tiny_model: TinyModel, family: str, flavour: str) -> Tiny:
    spec = spec_of(family)
    source = open_source(Model(family=family, path=str(tiny_model(family, flavour))))
    facts = spec.inspect(source)
    denoiser = spec.load_denoiser(source, facts.experts[0], PartPlacement(CPU, torch.float32))
    install(denoiser, family)
    return Tiny(spec, facts, denoiser)


@pytest.fixture(params=ROUTED, ids=[family for family, _ in ROUTED])
def tiny(request: pytest.FixtureRequest, tiny_model: TinyModel) -> Tiny:
    return opened(tiny_model, *request.param)


# -- the routes of a config --------------------------------------------------------------------------------------------


def route(skip: float, first: int, last: int) -> TokenRoute:
    return TokenRoute(skip_ratio=skip, first_block=first, last_block=last)


def test_numbers_from_the_end_and_routes_that_skip_nothing() -> None:
    found = resolve_routes([route(0.5, 2, 5), route(0.0, 6, 7), route(0.25, -4, -1)], 40)
    assert found == (Route(2, 5, 0.5), Route(36, 39, 0.25))


@pytest.mark.parametrize(
    ("routes", "key", "expected"),
    [
        ([(0.5, 2, 40)], "routes[0].last_block", "one of the model's 40 blocks: 0 to 39, or -40 to -1"),
        ([(0.5, -41, 3)], "routes[0].first_block", "one of the model's 40 blocks"),
        ([(0.5, 5, 2)], "routes[0]", "a first block that is not after the last one"),
        ([(0.5, 0, 4), (0.5, 4, 6)], "routes[1]", "in the order of their blocks, without overlaps"),
        ([(0.5, 8, 9), (0.5, 1, 2)], "routes[1]", "in the order of their blocks, without overlaps"),
    ],
)
def test_unsupported_routes_are_rejected(routes: list[Any], key: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_routes([route(*one) for one in routes], 40)
    (problem,) = error.value.problems
    assert problem.key == f"training.token_routing.{key}"
    assert expected in problem.expected
    assert problem.hint


def test_a_family_that_names_its_blocks_says_how_they_are_routed(tiny_model: TinyModel) -> None:
    able = {family for family in FAMILIES if names_of(family).routed_blocks}
    assert able == {family for family in FAMILIES if spec_of(family).token_routing is not None}
    assert able == {family for family, _ in ROUTED}


def test_the_footprints_count_the_blocks_of_the_lists(tiny: Tiny) -> None:
    """The planner resolves routes with its own number of blocks."""
    footprint, _ = footprint_of(Model(family=tiny.spec.family))
    lists = names_of(tiny.spec.family).routed_blocks
    assert [block.name for block in footprint.blocks] == [f"{name}.*" for name in lists]


# -- which tokens ------------------------------------------------------------------------------------------------------


def test_a_samples_tokens_depend_on_the_seed_its_index_and_the_route_alone(tiny: Tiny) -> None:
    routes = (Route(0, 0, 0.5), Route(1, 1, 0.5))
    together = tiny.router(*routes).routed(tiny.batch((3, 8))).tensors
    alone = tiny.router(*routes).routed(tiny.batch((8,))).tensors
    first, second = (together[KEPT.format(number)] for number in (0, 1))
    assert torch.equal(first[1:], alone[KEPT.format(0)])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, second)
    other = tiny.router(*routes, seed=1).routed(tiny.batch((3, 8))).tensors
    assert not torch.equal(first, other[KEPT.format(0)])
    assert torch.equal(first, first.sort().values)
    assert all(len(row.unique()) == len(row) for row in first)


@pytest.mark.parametrize(("ratio", "kept"), [(0.1, 14), (0.25, 12), (0.5, 8), (0.97, 1)])
def test_the_number_of_kept_tokens_depends_on_the_shape_alone(ratio: float, kept: int, tiny_model: TinyModel) -> None:
    flux = opened(tiny_model, "flux", "dev")
    for index in range(5):
        chosen = flux.router(Route(0, 0, ratio)).routed(flux.batch((index,))).tensors[KEPT.format(0)]
        assert chosen.shape == (1, kept)


def test_masked_tokens_are_always_kept(tiny: Tiny) -> None:
    """Tokens with more than half of their pixels inside the mask, even if they exceed the budget."""
    masks = torch.zeros(2, 1, *tiny.latents((0, 1)).shape[2:])
    masks[0, ..., :2, :2] = 1.0
    masks[0, ..., 2:4, 0] = 1.0
    masks[0, ..., 4, 4:6] = 0.9
    masks[1, ..., :6] = 1.0
    frames = 2 if tiny.spec.family == "wan" else 1
    chosen = tiny.router(Route(0, 0, 0.5)).routed(tiny.batch((0, 1), masks=masks)).tensors[KEPT.format(0)]
    assert chosen.shape == (2, 12 * frames)
    inside = torch.tensor([16 * frame + 4 * row + column for frame in range(frames) for row in range(4)
                           for column in range(3)])  # fmt: skip
    assert torch.equal(chosen[1], inside)
    first = tiny.router(Route(0, 0, 0.5)).routed(tiny.batch((0,), masks=masks[:1])).tensors[KEPT.format(0)][0]
    assert len(first) == 8 * frames
    assert {0, *([16] if frames == 2 else [])} <= set(first.tolist())
    unmasked = tiny.router(Route(0, 0, 0.5)).routed(tiny.batch((0,))).tensors[KEPT.format(0)][0]
    assert len({*first.tolist()} & {*unmasked.tolist()}) >= 8 * frames - frames, "the others as without a mask"


def test_a_clean_first_frame_is_always_kept(tiny_model: TinyModel) -> None:
    wan = opened(tiny_model, "wan", "ti2v-5b-2.2")
    channels = wan.denoiser.config.in_channels
    latents = torch.zeros(1, channels, 3, 4, 4)
    batch = wan.batch((0,))
    given = {**batch.tensors, "latents": latents, "condition": latents[:, :, :1]}
    chosen = wan.router(Route(0, 0, 0.5)).routed(Batch(batch.ref, given)).tensors[KEPT.format(0)]
    assert chosen.shape == (1, 6)
    assert chosen[0, :4].tolist() == [0, 1, 2, 3]
    routed = wan.router(Route(0, 0, 0.5))
    answer = wan.answer(routed.routed(Batch(batch.ref, given)), routed.spec)
    assert answer.shape == latents.shape
    assert bool(answer.isfinite().all())


def test_random_orders_with_tokens_that_are_never_dropped() -> None:
    orders = np.array([[3, 1, 0, 2], [0, 1, 2, 3]])
    nothing = np.zeros((2, 4), dtype=np.bool_)
    assert kept_tokens(orders, 2, nothing).tolist() == [[1, 3], [0, 1]]
    forced = np.array([[False, False, True, False], [False, True, True, True]])
    assert kept_tokens(orders, 2, forced).tolist() == [[1, 2, 3], [1, 2, 3]]


# -- rows --------------------------------------------------------------------------------------------------------------


def test_rows_are_selected_and_put_back_with_their_gradients() -> None:
    x = torch.randn(2, 5, 3, requires_grad=True)
    kept = torch.tensor([[0, 3], [2, 4]])
    rows = select_tokens(x, kept)
    assert torch.equal(rows[1], x[1, [2, 4]])
    assert torch.equal(select_tokens(x[:1], kept)[1], x[0, [2, 4]])
    whole = put_back(x, kept, 2 * rows)
    assert torch.equal(whole[0], x[0] * torch.tensor([2.0, 1, 1, 2, 1])[:, None])
    (gradient,) = torch.autograd.grad(whole.sum(), x)
    assert torch.equal(gradient[1], torch.tensor([1.0, 1, 2, 1, 2])[:, None].expand(5, 3))


# -- through the blocks ------------------------------------------------------------------------------------------------


def _rows(value: Any, kept: list[int], text: int, name: str, family: str) -> Any:
    """A block's argument for the kept tokens of one sample, by plain indexing."""
    if name == "hidden_states":
        return value[:, kept]
    if name == "rotary_emb":
        return tuple(table[:, kept] for table in value)
    if name == "image_rotary_emb" and family == "flux":
        return tuple(table[[*range(text), *(text + number for number in kept)]] for table in value)
    if name == "image_rotary_emb":
        return value[0][kept], value[1]
    return value


def by_hand(tiny: Tiny, index: int, route: Route, kept: list[int]) -> Tensor:
    """The prediction for one sample: routed blocks are called here with plain indexing, the others by the model."""
    family, blocks, before = tiny.spec.family, tiny.blocks, {}
    names = ["hidden_states", "encoder_hidden_states"]

    def stop(block: nn.Module, inputs: Any, named: Mapping[str, Any]) -> Any:
        """Before the route's first block: run the whole route here, and skip this block."""
        order = [*cast(Any, block.forward).__code__.co_varnames[1 : 1 + len(inputs)]]
        before.update({**dict(zip(order, inputs, strict=True)), **named})

    removed = [blocks[route.first].register_forward_pre_hook(stop, with_kwargs=True)]
    tiny.answer(tiny.batch((index,)))
    removed.pop().remove()
    text = before["encoder_hidden_states"].shape[1]
    state = {name: before[name] for name in names}
    for block in blocks[route.first : route.last + 1]:
        given = {**before, **state}
        small = {name: _rows(value, kept, text, name, family) for name, value in given.items()}
        answer = block(**small)
        image = answer if family == "wan" else answer[1]
        whole = given["hidden_states"].clone()
        whole[:, kept] = image
        state["hidden_states"] = whole
        if family != "wan":
            state["encoder_hidden_states"] = answer[0]

    def replace_answer(block: nn.Module, inputs: Any, output: Any) -> Any:
        whole = state["hidden_states"]
        return whole if family == "wan" else (state["encoder_hidden_states"], whole)

    hook = blocks[route.last].register_forward_hook(replace_answer)
    try:
        return tiny.answer(tiny.batch((index,)))
    finally:
        hook.remove()


def spans(tiny: Tiny) -> Iterator[tuple[int, int]]:
    last = len(tiny.blocks) - 1
    yield 0, last
    yield 0, 0
    yield last, last
    yield 1, last


def test_kept_tokens_keep_their_positions(tiny: Tiny) -> None:
    for first, last in {*spans(tiny)}:
        path = Route(first, last, 0.5)
        router = tiny.router(path)
        batch = router.routed(tiny.batch((3, 8)))
        answer = tiny.answer(batch, router.spec)
        for number, index in enumerate((3, 8)):
            kept = batch.tensors[KEPT.format(0)][number].tolist()
            torch.testing.assert_close(answer[number : number + 1], by_hand(tiny, index, path, kept))
            alone = tiny.answer(router.routed(tiny.batch((index,))), router.spec)
            torch.testing.assert_close(answer[number : number + 1], alone)
        assert not torch.allclose(answer, tiny.answer(batch)), "the blocks do something"


def test_blocks_in_a_route_see_fewer_tokens_and_the_others_all_of_them(tiny: Tiny) -> None:
    seen: list[int] = []
    for block in tiny.blocks:
        block.register_forward_pre_hook(
            lambda block, inputs, named: seen.append((inputs[0] if inputs else named["hidden_states"]).shape[1]),
            with_kwargs=True,
        )
    total, last = (32 if tiny.spec.family == "wan" else 16), len(tiny.blocks) - 1
    router = tiny.router(Route(0, 0, 0.25), Route(last, last, 0.5))
    batch = router.routed(tiny.batch((0, 1)))
    tiny.answer(batch, router.spec)
    assert seen == [3 * total // 4, *[total] * (last - 1), total // 2]
    seen.clear()
    with torch.no_grad():
        tiny.answer(batch, router.spec)
    assert seen == [total] * len(tiny.blocks), "no route without gradients"
    seen.clear()
    tiny.answer(tiny.batch((0, 1)), router.spec)
    assert seen == [total] * len(tiny.blocks), "a batch that says nothing: held-out data"


def test_captured_inputs_include_the_kept_tokens(tiny: Tiny) -> None:
    router = tiny.router(Route(0, 0, 0.25))
    batch = router.routed(tiny.batch((0, 1))).tensors
    assert tiny.spec.graph_inputs is not None
    assert router.spec.graph_inputs is not None
    given = {*router.spec.graph_inputs(batch)}
    assert given == {*tiny.spec.graph_inputs(tiny.batch((0, 1)).tensors), KEPT.format(0)}


def test_bypassing_tokens_are_unchanged(tiny: Tiny) -> None:
    found: dict[str, Tensor] = {}
    total, last = (32 if tiny.spec.family == "wan" else 16), len(tiny.blocks) - 1
    router = tiny.router(Route(0, last, 0.5))
    batch = router.routed(tiny.batch((0, 1)))
    embedding = tiny.denoiser.get_submodule(
        {"wan": "patch_embedding", "flux": "x_embedder", "qwen_image": "img_in"}[tiny.spec.family]
    )
    embedding.register_forward_hook(lambda module, inputs, output: found.update(into=output))
    tiny.denoiser.norm_out.register_forward_pre_hook(lambda module, inputs: found.update(behind=inputs[0]))
    tiny.answer(batch, router.spec)
    into = found["into"].flatten(2).transpose(1, 2) if tiny.spec.family == "wan" else found["into"]
    same = (into == found["behind"]).all(dim=-1)
    for number, kept in enumerate(batch.tensors[KEPT.format(0)].tolist()):
        assert {token for token in range(total) if not same[number, token]} == {*kept}


def test_a_ratio_too_small_for_one_token_is_the_plain_step_bit_for_bit(tiny: Tiny) -> None:
    router = tiny.router(Route(0, 0, 0.01))
    batch = router.routed(tiny.batch((0, 1)))
    assert not [name for name in batch.tensors if name.startswith("token_routing")]
    assert torch.equal(tiny.answer(batch, router.spec), tiny.answer(tiny.batch((0, 1))))


def _parked() -> ActivationParking:
    home = lambda size: torch.empty(size, dtype=torch.uint8)  # noqa: E731
    return ActivationParking(CPU, InlineLane(), HostClock(), home, least=0)


@pytest.mark.parametrize("parked", [False, True], ids=["repeated", "parked"])
def test_checkpointed_blocks_keep_the_same_tokens(tiny: Tiny, parked: bool) -> None:
    """Values and gradients of a routed pass equal those without checkpointing, to the last bit."""
    last = len(tiny.blocks) - 1
    router = tiny.router(Route(0, 0, 0.5), Route(1, last, 0.25))
    batch = router.routed(tiny.batch((0, 1)))
    weights = [block_parameters(block) for block in tiny.blocks]
    for one in weights:
        one.requires_grad_(True)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(tiny.answer(batch, router.spec).square().sum(), weights)

    tiny.denoiser.train()
    plain = gradients()
    calls: list[tuple[int, ...]] = []
    for block in tiny.blocks:
        block.register_forward_pre_hook(
            lambda block, inputs, named: calls.append((inputs[0] if inputs else named["hidden_states"]).shape),
            with_kwargs=True,
        )
    prepare_blocks(
        tiny.denoiser, tiny.spec.repeated_blocks, checkpointing=True, compiled=False, routed=True,
        parking=_parked() if parked else None,
    )  # fmt: skip
    again = gradients()
    assert len(calls) == 2 * len(tiny.blocks)
    assert sorted(calls[: len(tiny.blocks)]) == sorted(calls[len(tiny.blocks) :])
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


def block_parameters(block: nn.Module) -> nn.Parameter:
    return next(one for name, one in block.named_parameters() if name.endswith("to_q.weight"))


def test_compiled_blocks_equal_eager_ones(tiny: Tiny) -> None:
    last = len(tiny.blocks) - 1
    router = tiny.router(Route(0, last, 0.5))
    batches = [router.routed(tiny.batch(indexes)) for indexes in ((0, 1), (2, 3))]
    tiny.denoiser.train()
    eager = [tiny.answer(batch, router.spec) for batch in batches]
    torch._dynamo.reset()
    prepared = prepare_blocks(
        tiny.denoiser, tiny.spec.repeated_blocks, checkpointing=False, compiled=True, shapes="few", routed=True,
        backend="aot_eager",
    )  # fmt: skip
    for batch, wanted in zip(batches, eager, strict=True):
        torch.testing.assert_close(tiny.answer(batch, router.spec), wanted)
    # One for each kind of block. FLUX.1's first block with one stream gets other strides than those behind it.
    assert prepared.stats.graphs == {"wan": 1, "flux": 3, "qwen_image": 1}[tiny.spec.family]
    torch._dynamo.reset()
