"""Take our blocks out of upstream's config loaders, and activate the features they request.

Upstream drops unknown mappings from JSON and TOML and rejects them elsewhere, so we remove ours before they reach its
parser. Every config format ends in `helpers["cmd"]`, whose result has the other values that we need.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from gracetune_simpletuner import caches, in_memory, memory, ramp, telling
from gracetune_simpletuner.errors import stopping
from gracetune_simpletuner.hooks import Around, Target, check_reads
from gracetune_simpletuner.options import read_options, split_arguments, split_mapping
from gracetune_simpletuner.overlay import Overlay
from gracetune_simpletuner.points import hooks_of


def actions(overlay: Overlay) -> dict[str, Callable[[ModuleType], None]]:
    """Module -> action to run after upstream has imported it."""
    wrappers = _wrappers(overlay)
    found: dict[str, Callable[[ModuleType], None]] = {}
    for hook in hooks_of("raw_config"):
        target = Target.parse(hook.target)

        def act(module: ModuleType, hook: Any = hook) -> None:
            with stopping():
                overlay.installer.wrap_in(module, hook, wrappers[hook.target])

        found[target.module] = act
    return found


def _wrappers(overlay: Overlay) -> dict[str, Around]:
    mapping, parse, datasets = (partial(one, overlay) for one in (_take_blocks, _parsed, _load_configuration))
    names = [hook.target for hook in hooks_of("raw_config")]
    return dict(zip(names, (mapping, mapping, parse, datasets), strict=True))


def _take_blocks(overlay: Overlay, original: Any, mapping: Any, *arguments: Any, **options: Any) -> Any:
    rest, ours = split_mapping(mapping)
    overlay.blocks |= ours
    return original(rest if ours else mapping, *arguments, **options)


def _parsed(overlay: Overlay, original: Any, *arguments: Any, **options: Any) -> Any:
    with stopping():
        arguments, options = _without_blocks(overlay, arguments, options)
    config = original(*arguments, **options)
    if config is not None:
        with stopping():
            _decide(overlay, config)
    return config


def _without_blocks(
    overlay: Overlay, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Remove our options from the first argument or `input_args`, which is a list for env files."""
    given = arguments[0] if arguments else options.get("input_args")
    if not isinstance(given, list):
        return arguments, options
    rest, ours = split_arguments(given)
    overlay.blocks |= ours
    return ((rest, *arguments[1:]), options) if arguments else (arguments, options | {"input_args": rest})


def _decide(overlay: Overlay, config: Any) -> None:
    check_reads("config", config)
    overlay.output_dir = Path(config.output_dir)
    requested = read_options(
        overlay.blocks,
        overlay.environment,
        batch_size=int(config.train_batch_size),
        accumulation=int(config.gradient_accumulation_steps),
        file="config",
    )
    overlay.options = requested
    if not requested.wants_anything:
        return
    overlay.start_telling()
    for note in requested.notes:
        overlay.note(note, event="note")
    telling.activate(overlay)
    layer = memory.activate(overlay)
    if requested.wants_caches:
        caches.activate(overlay, layer)
    if requested.ramp.enabled:
        ramp.activate(overlay, config)


def _load_configuration(overlay: Overlay, original: Any, *arguments: Any, **options: Any) -> Any:
    datasets = original(*arguments, **options)
    with stopping():
        return in_memory.take_datasets(overlay, datasets)
