"""The memory demand of a config on a machine, before its weights are downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gracetune.config.run_config import RunConfig
from gracetune.hardware import Machine
from gracetune.models.registry import footprint_of
from gracetune.models.source import assistant_elements
from gracetune.planning.dataset_facts import DatasetFacts, survey
from gracetune.planning.demand import Demand
from gracetune.planning.estimate import estimate
from gracetune.planning.processes import ONE_PROCESS, Processes
from gracetune.planning.tracing.store import with_blocks


def demand_of(
    config: RunConfig, machine: Machine, samples: int | None, processes: Processes = ONE_PROCESS,
    known: Mapping[str, DatasetFacts] | None = None, *, option: str | None = None, cache: Path | None = None,
) -> tuple[Demand, str | None]:  # fmt: skip
    """The demand, and what was assumed about the model.

    `option` is the command-line option that sets `samples`, if the command has one. `cache` is gracetune's cache
    folder, where a traced footprint is kept.
    """
    footprint, assumption = footprint_of(config.model)
    footprint = with_blocks(footprint, cache)
    compiled = config.training.compile != "off" and machine.profile.value != "cpu"
    facts = survey(config, samples, known, option=option)
    elements = assistant_elements(config.model)
    demand = estimate(config, footprint, facts, compiled=compiled, processes=processes, assistant_elements=elements)
    return demand, assumption
