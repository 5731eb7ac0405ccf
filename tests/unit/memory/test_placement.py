from __future__ import annotations

from itertools import product
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.hardware.machine import ProfileName
from gracetune.memory.arena import LARGE_UNIT, SMALL_SEGMENT, SMALLEST_LARGE, arena_shape, slot_policy
from gracetune.memory.placement import Role, choose_placement
from gracetune.memory.transport import LinkSpeeds, ManagedSpeeds, TransportPath, choose_transport
from gracetune.units import GIB, MIB


@pytest.mark.parametrize(("role", "profile"), list(product(get_args(Role), get_args(ProfileName))))
def test_every_role_has_a_place_and_a_reason_on_every_machine(role: Role, profile: ProfileName) -> None:
    placement = choose_placement(role, profile)
    assert placement.reason
    if profile in ("cpu", "integrated"):
        assert not placement.moved_before_use
    if profile != "superchip":
        assert not placement.kind.startswith("managed")


def test_the_table_of_the_design() -> None:
    assert choose_placement("cold_weights", "superchip").kind == "managed_host"
    assert choose_placement("cold_weights", "discrete").kind == "pinned_host"
    assert choose_placement("latent_cache", "superchip").kind == "managed_host"
    assert choose_placement("latent_cache", "superchip", local_ranks=4).kind == "shared_host"
    assert choose_placement("latent_cache", "discrete", local_ranks=4).kind == "shared_host"
    assert choose_placement("text_cache", "superchip", size=GIB, device_bytes=96 * GIB).kind == "managed_device"
    assert choose_placement("text_cache", "superchip", size=3 * GIB, device_bytes=96 * GIB).kind == "managed_host"
    assert choose_placement("text_cache", "superchip", size=1).kind == "managed_host", (
        "unknown device memory is not guessed"
    )
    assert choose_placement("optimizer_state", "superchip").kind == "device", "offloading it is not built"


@given(st.integers(0, 64 * GIB), st.one_of(st.none(), st.integers(1, 2 * GIB)))
def test_the_arena_is_divided_without_loss(size: int, max_split: int | None) -> None:
    shape = arena_shape(size, max_split)
    assert size - shape.bytes < SMALLEST_LARGE + LARGE_UNIT
    assert shape.bytes <= size
    assert all(block % LARGE_UNIT == 0 and block >= SMALLEST_LARGE for block in shape.large_blocks)
    if max_split is None:
        assert len(shape.large_blocks) <= 1
    elif max_split > SMALLEST_LARGE:  # torch allows no smaller value
        assert all(block < max_split for block in shape.large_blocks)


def test_small_requests_get_room_of_their_own() -> None:
    assert arena_shape(4 * GIB).small_segments * SMALL_SEGMENT == 128 * MIB
    assert arena_shape(400 * GIB).small_segments * SMALL_SEGMENT == 256 * MIB
    assert arena_shape(0).bytes == 0


def test_access_patterns() -> None:
    assert slot_policy("gpu_first", 0, 1).preferred == "device"
    assert slot_policy("balanced", 0, 1).preferred == "none"
    assert slot_policy("cpu_first", 0, 1).preferred == "host"
    assert all(slot_policy(pattern, 0, 1).accessed_by_device for pattern in ("gpu_first", "balanced", "cpu_first"))


def speeds(gather: float, hidden: float) -> LinkSpeeds:
    return LinkSpeeds(
        TransportPath(55, 0.93), 55.0, ManagedSpeeds(TransportPath(gather, hidden), TransportPath(49, 0.9), 13.0)
    )


@pytest.mark.parametrize(
    ("profile", "measured", "transport"),
    [
        ("cpu", None, "in_place"),
        ("integrated", speeds(60, 1.0), "in_place"),
        ("discrete", None, "pinned_copy"),
        ("superchip", None, "pinned_copy"),
        ("discrete", speeds(56, 1.0), "pinned_copy"),
        ("superchip", speeds(50, 0.95), "managed_gather"),
        ("superchip", speeds(50, 0.02), "pinned_copy"),
        ("superchip", speeds(20, 0.95), "pinned_copy"),
    ],
)
def test_the_measurement_decides(profile: ProfileName, measured: LinkSpeeds | None, transport: str) -> None:
    choice = choose_transport(profile, measured)
    assert choice.transport == transport
    assert choice.reason
