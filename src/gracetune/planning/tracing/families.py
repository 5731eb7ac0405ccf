"""Traces of the published denoisers of a family."""

from __future__ import annotations

from gracetune.adapters.attach import describe
from gracetune.adapters.targets import select
from gracetune.errors import ConfigError, Problem
from gracetune.models.footprint import Footprint, PixelLatents
from gracetune.models.footprint_tables import TracedTable
from gracetune.models.registry import build_published, example_inputs_of, spec_of
from gracetune.planning.tracing.trace import TraceError, trace


def trace_family(footprint: Footprint, *, compiled: bool = True) -> TracedTable:
    """Trace the denoiser of a footprint's flavour, built from its published configuration without weights.

    ConfigError if its blocks cannot be expressed as a footprint.
    """
    spec, model = spec_of(footprint.family), build_published(footprint.family, footprint.flavour)
    if spec.adjust is not None:
        spec.adjust(model)
    layers = select(describe(model), spec.default_targets, untrained=spec.untrained).paths
    # Weights that read an image encoder's output separate it from the caption by the caption's length.
    text = footprint.text.tokens if footprint.vision_tokens else None
    inputs = example_inputs_of(footprint.family)
    clips = isinstance(footprint.latents, PixelLatents) and footprint.latents.temporal > 1
    try:
        return trace(
            model, spec.repeated_blocks, layers, inputs, text=text, multiple=spec.token_multiple, clips=clips,
            compiled=compiled,
        )  # fmt: skip
    except TraceError as error:
        expected = "blocks whose memory is proportional to their tokens"
        hint = f"list the blocks in the footprint of {footprint.family} (docs/extending.md)"
        raise ConfigError([Problem(f"the trace of {footprint.flavour}", str(error), expected, hint)]) from error
