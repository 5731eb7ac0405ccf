"""Where each kind of memory lives, by the nature of the machine. Pure: role and profile in, policy and reason out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gracetune.hardware.machine import ProfileName

Role = Literal["hot_weights", "activations", "cold_weights", "optimizer_state", "latent_cache", "text_cache"]
Place = Literal["device", "managed_host", "managed_device", "pinned_host", "shared_host", "host"]

TEXT_ON_DEVICE_SHARE = 0.02
"""Text embeddings this small a part of the GPU's memory are kept there: every step reads them."""


@dataclass(frozen=True)
class Placement:
    """Where, whether it must be brought to the GPU before use, and why."""

    place: Place
    moved_before_use: bool
    reason: str


_HOT = Placement("device", False, "used in every step")
_ONE_POOL = Placement("device", False, "one pool: there is nowhere else to move it")

_TABLE: dict[tuple[Role, ProfileName], Placement] = {
    ("cold_weights", "superchip"): Placement(
        "managed_host", True, "idle most of the time; prefetched over the coherent link"
    ),
    ("cold_weights", "discrete"): Placement("pinned_host", True, "idle most of the time; copied from pinned memory"),
    ("cold_weights", "integrated"): _ONE_POOL,
    # Offloaded optimizer state is not built: the planner must not count on it.
    ("optimizer_state", "superchip"): Placement("device", False, "read and written in every step"),
    ("optimizer_state", "discrete"): Placement("device", False, "read and written in every step"),
    ("optimizer_state", "integrated"): _ONE_POOL,
    ("latent_cache", "superchip"): Placement(
        "managed_host", True, "large and read once an epoch; gathered over the link"
    ),
    ("latent_cache", "discrete"): Placement(
        "pinned_host", True, "large and read once an epoch; copied from pinned memory"
    ),
    ("latent_cache", "integrated"): Placement("shared_host", False, "one pool: read in place"),
    ("text_cache", "superchip"): Placement("managed_host", True, "larger than 2 % of the GPU's memory"),
    ("text_cache", "discrete"): Placement("pinned_host", True, "copied from pinned memory"),
    ("text_cache", "integrated"): Placement("shared_host", False, "one pool: read in place"),
}


def place(
    role: Role, profile: ProfileName, *, size: int = 0, device_bytes: int | None = None, local_ranks: int = 1
) -> Placement:
    """The policy for one role. `local_ranks`: managed memory has no IPC, so ranks of one machine share pinned pages."""
    if profile == "cpu":
        return Placement("host", False, "no GPU: everything is in host memory")
    if role in ("hot_weights", "activations"):
        return _HOT
    chosen = _TABLE[role, profile]
    if role.endswith("_cache") and local_ranks > 1 and chosen.place in ("managed_host", "pinned_host"):
        return Placement("shared_host", True, f"one copy for {local_ranks} ranks, registered with each")
    fits_device = device_bytes is not None and size <= device_bytes * TEXT_ON_DEVICE_SHARE
    if role == "text_cache" and profile == "superchip" and fits_device:
        return Placement("managed_device", False, "small, and read in every step")
    return chosen
