"""The data requirements of a family, derived from its footprint so that no number is written twice."""

from __future__ import annotations

from gracetune.config.families import find_flavour
from gracetune.data.geometry import Geometry
from gracetune.models.footprint import AudioLatents, Footprint


def geometry_from(
    footprint: Footprint, *, halved: int = 1, fps: float | None = None, channels: int | None = None
) -> Geometry:
    """What the data pipeline must deliver for a footprint's latents.

    `halved` is the factor by which a U-Net downsamples its latents, `fps` the frame rate of the weights, `channels` the
    number of audio channels.
    """
    flavour = find_flavour(footprint.family, footprint.flavour)
    if flavour is None:
        raise ValueError(f"{footprint.family} has no flavour {footprint.flavour}")
    latents = footprint.latents
    if isinstance(latents, AudioLatents):
        return Geometry(
            makes=flavour.makes,
            sample_rate=latents.sample_rate,
            channels=channels,
            audio_multiple=latents.hop,
            max_audio_seconds=latents.longest_seconds,
        )
    return Geometry(
        makes=flavour.makes,
        side_multiple=latents.spatial * latents.patch * halved,
        least_multiple=latents.spatial * latents.patch,
        frame_step=latents.temporal,
        default_frames=latents.default_frames,
        default_fps=fps,
    )
