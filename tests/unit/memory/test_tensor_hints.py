from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracetune.hostmem.hint import HINT_PAGE, Hint, both, not_applied, together
from gracetune.memory.managed import ManagedHeap
from gracetune.memory.native import HOST
from gracetune.memory.tensor_hints import KEY_HINTS, is_dense, prefer, prefetch, tensors_with_hints


@pytest.fixture
def heap(bench) -> ManagedHeap:
    return ManagedHeap(bench.uvm, 0, lambda: None)


def test_a_whole_managed_tensor(heap: ManagedHeap) -> None:
    buffer = heap.empty((4 * HINT_PAGE,), torch.uint8)
    assert prefer(heap.uvm, buffer.cpu(), "device") == Hint(True, 4 * HINT_PAGE, "prefers the device")
    assert buffer.state().preferred == 0
    assert prefetch(heap.uvm, buffer.cpu(), "host", stream_of=lambda _device: 3).bytes == 4 * HINT_PAGE
    assert buffer.state().last_prefetch == HOST


def test_a_view_with_an_offset_hints_its_own_pages_only(heap: ManagedHeap, bench) -> None:
    buffer = heap.empty((8 * HINT_PAGE,), torch.uint8)
    bench.fake.clear()
    hint = prefer(heap.uvm, buffer.cpu()[HINT_PAGE + 5 : 4 * HINT_PAGE + 9], "device")
    assert (hint.applied, hint.bytes) == (True, 2 * HINT_PAGE)
    assert "share pages" in hint.reason
    advice = bench.fake.journal("cuMemAdvise")
    assert len(advice) == 2
    assert all(f"bytes={2 * HINT_PAGE}" in line or f"size={2 * HINT_PAGE}" in line for line in advice), advice


def test_a_view_inside_one_page_is_rejected(heap: ManagedHeap) -> None:
    hint = prefer(heap.uvm, heap.empty((4 * HINT_PAGE,), torch.uint8).cpu()[10:20], "device")
    assert not hint
    assert "shares its page" in hint.reason


def test_parameters_and_transposed_views_are_dense(heap: ManagedHeap) -> None:
    view = heap.empty((HINT_PAGE, 8), torch.float32).cpu()
    assert prefer(heap.uvm, torch.nn.Parameter(view), "host")
    assert prefer(heap.uvm, view.t(), "host")
    hint = prefer(heap.uvm, view[:, :4], "host")
    assert not hint
    assert "not contiguous" in hint.reason


def test_other_tensors_get_a_reason(heap: ManagedHeap) -> None:
    cases = {
        "CPU tensor": torch.zeros(10),
        "no bytes": torch.zeros(0),
        "meta tensor": torch.zeros(3, device="meta"),
        "sparse tensor": torch.eye(3).to_sparse(),
        "nested": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    }
    for reason, tensor in cases.items():
        for hint in (prefer(heap.uvm, tensor, "host"), prefetch(heap.uvm, tensor, "host", stream_of=lambda _device: 3)):
            assert not hint
            assert hint.bytes == 0
            assert reason in hint.reason


def test_a_rejection_of_the_driver_is_named(heap: ManagedHeap, bench) -> None:
    view = heap.empty((HINT_PAGE,), torch.uint8).cpu()
    bench.fake.fail("cuMemAdvise_v2", 801)
    assert "cuMemAdvise_v2" in prefer(heap.uvm, view, "host").reason
    bench.fake.fail("cuMemPrefetchAsync_v2", 1)
    assert "cuMemPrefetchAsync_v2" in prefetch(heap.uvm, view, "host", stream_of=lambda _device: 3).reason
    bench.fake.fail("cuPointerGetAttribute", 700)
    assert "cuPointerGetAttribute" in prefer(heap.uvm, view, "host").reason


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms())
def test_dense_means_every_byte_once(shape: list[int], random: Any) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)
    tensor = torch.zeros([shape[i] for i in order]).permute([order.index(i) for i in range(len(shape))])
    assert is_dense(tuple(tensor.shape), tensor.stride())
    wide = torch.zeros([*shape, 2])[..., 0]
    assert is_dense(tuple(wide.shape), wide.stride()) == (wide.numel() == 1)
    repeated = torch.zeros(1).expand(3)
    assert not is_dense(tuple(repeated.shape), repeated.stride())


class Named(NamedTuple):
    pooled_embeds: torch.Tensor
    other: torch.Tensor


@dataclass(slots=True)
class Embeds:
    text_embeds: torch.Tensor
    pooled_embeds: torch.Tensor
    other: torch.Tensor


def test_the_batch_is_walked_whatever_its_shape() -> None:
    t = [torch.zeros(1) for _ in range(12)]
    batch = {
        "latents": t[0],
        "prompt_embeds": [t[1], {"deep": t[2]}],
        "audio_features": {"mel": t[3]},
        "conditioning": Embeds(t[4], t[5], t[6]),
        "unknown": t[7],
        "latents_again": {"latents": t[0]},
        "latent_group": {"latents": {"attention_mask": t[8]}},
        "named": Named(pooled_embeds=t[9], other=t[10]),
        "cross_attention_mask": t[11],
        "text": "a string",
        "count": 3,
        "nothing": None,
    }
    found = {name: key_hint for name, _, key_hint in tensors_with_hints(batch)}
    assert set(found) == {"latents", "prompt_embeds.0", "prompt_embeds.1.deep", "audio_features.mel",
                          "conditioning.text_embeds", "conditioning.pooled_embeds",
                          "latent_group.latents.attention_mask", "named.pooled_embeds",
                          "cross_attention_mask"}  # fmt: skip
    assert (found["latents"].home, found["latents"].prefetch) == ("host", False)
    assert (found["audio_features.mel"].home, found["audio_features.mel"].prefetch) == ("host", True)
    assert found["latent_group.latents.attention_mask"].home == "device"
    assert {"latents", "text_embeddings", "waveform"} <= set(KEY_HINTS)


def test_hints_add_up() -> None:
    done, rejected = Hint(True, 8, "moved"), not_applied("too small")
    assert together([done, rejected, done]) == Hint(True, 16, "moved; too small")
    assert not together([])
    assert both(done, rejected) == Hint(True, 8, "moved; too small")
    assert not both(rejected, rejected)
