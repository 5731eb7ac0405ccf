"""gracetune's Automagic in place of ai-toolkit's. Options per expert apply to every kind of adapter.

The options of `train.optimizer_params` are `lr_bump`, `min_lr`, `max_lr`, each also with the prefix `high_noise_` or
`low_noise_` for one expert, and `beta2`, `clip_threshold`, `eps`, `weight_decay`. Parameters are grouped by expert and
named after their layers, so a resumed state either matches its layers or is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from gracetune.extension import (
    Automagic,
    ConfigError,
    ExpertStage,
    NamedState,
    Problem,
    RateGrid,
    RateLimits,
    StateMismatchError,
    misspelt,
)

from .hooks import Around, Function, argument
from .points import OPTIMIZER, Point

LIMITS: Final = ("lr_bump", "min_lr", "max_lr")
EXPERTS: Final[tuple[ExpertStage, ...]] = ("high_noise", "low_noise")
OPTIONS: Final = ("beta2", "clip_threshold", "eps", "weight_decay")
_STAGE_LIMITS: Final = tuple(f"{stage}_{limit}" for stage in EXPERTS for limit in LIMITS)
_EXPERT: Final = re.compile(r"(?:^|[._])transformer_?(?P<number>[12])[._]")
_TOO_HIGH: Final = 1e-3
_UPSTREAM_START: Final = 1e-6
"""ai-toolkit replaces an `lr` above 1e-3 by 1e-6, and so do we."""
STATE_KEY: Final = "gracetune_automagic"
STATE_VERSION: Final = 1


class StagedAutomagic(Automagic):
    """Automagic with ai-toolkit's interface: the whole state in `state_dict`, and a mean learning rate."""

    def get_avg_learning_rate(self) -> float:
        means = self.learning_rates()
        return sum(float(mean) for mean in means.values()) / max(1, len(means))

    def state_dict(self) -> dict[str, Any]:
        named = self.named_state()
        own = {"version": STATE_VERSION, "tensors": dict(named.tensors), "json": dict(named.json)}
        return super().state_dict() | {STATE_KEY: own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load strictly: if anything does not match, raise and change nothing."""
        own = state_dict.get(STATE_KEY)
        if own is None:
            raise StateMismatchError(
                "optimizer.pt holds the state of ai-toolkit's own optimizer, whose rates belong to numbers, not to "
                "layers: rates start anew\n  try  move optimizer.pt away, or go on without `automagic` in `gracetune:`"
            )
        if own["version"] != STATE_VERSION:
            raise StateMismatchError(
                f"optimizer.pt has version {own['version']} of our state, this gracetune reads {STATE_VERSION}\n"
                "  try  the gracetune it was written with"
            )
        self.load_named_state(NamedState(own["tensors"], own["json"]))
        super().load_state_dict({name: value for name, value in state_dict.items() if name != STATE_KEY})


@dataclass(frozen=True)
class Trained:
    """Names and experts of the trained parameters."""

    experts: tuple[ExpertStage, ...]
    """The trained experts; empty for models without experts."""
    names: Mapping[int, str]
    """Parameter names by `id(parameter)`, from their layers."""

    @classmethod
    def of(cls, process: Any) -> Trained:
        network, model = process.network, process.sd
        names = {}
        if network is not None:
            for module in network.get_all_modules():
                for name, parameter in module.named_parameters():
                    names[id(parameter)] = f"{module.lora_name}.{name}".replace("$$", ".")
        experts: tuple[ExpertStage, ...] = ()
        if getattr(model, "is_multistage", False):
            trained = (getattr(model, f"train_{stage}", True) for stage in EXPERTS)
            experts = tuple(stage for stage, requested in zip(EXPERTS, trained, strict=True) if requested)
        return cls(experts, names)

    def stage(self, name: str) -> ExpertStage | None:
        """The expert of a parameter; None if the model has experts and the name does not say which."""
        if not self.experts:
            return ""
        marked = _EXPERT.search(name)
        if marked is not None:
            return EXPERTS[int(marked["number"]) - 1]
        return self.experts[0] if len(self.experts) == 1 else None


@dataclass
class Group:
    stage: ExpertStage
    lr: float
    members: list[tuple[str, Tensor]] = field(default_factory=list)


def grouped(params: Iterable[Any], start: float, trained: Trained, location: str) -> list[Group]:
    """ai-toolkit's param groups, split by expert. Parameters outside the layers (embeddings) belong to no expert."""
    groups: list[Group] = []
    lost: list[str] = []
    entries = list(params)
    if entries and not isinstance(entries[0], Mapping):
        entries = [{"params": entries}]
    for number, entry in enumerate(entries):
        lr = start if entry.get("lr") is None else float(entry["lr"])
        by_expert: dict[ExpertStage, Group] = {}
        for index, parameter in enumerate(entry["params"]):
            name = trained.names.get(id(parameter))
            stage = "" if name is None else trained.stage(name)
            if stage is None:
                lost.append(str(name))
                continue
            group = by_expert.setdefault(stage, Group(stage, lr))
            group.members.append((name or f"group{number}.{index}", parameter))
        groups += by_expert.values()
    if lost:
        found = f"{lost[0]}{f' and {len(lost) - 1} more' if lost[1:] else ''}, which belongs to no expert"
        hint = "write `automagic: false` in `gracetune:`, and tell us about this version"
        raise ConfigError(
            [Problem(f"{location}.train.optimizer", found, "layers of transformer_1 or transformer_2", hint)]
        )
    return groups


def limits_of(stage: ExpertStage, options: Mapping[str, Any], location: str) -> RateLimits:
    """The limits of the expert; unset ones come from the shared options, then from Automagic's defaults."""
    default = RateLimits()
    chosen = {}
    for name, usual in zip(LIMITS, (default.lr_bump, default.min_lr, default.max_lr), strict=True):
        own = options.get(f"{stage}_{name}") if stage else None
        value = own if own is not None else options.get(name)
        chosen[name] = usual if value is None else float(value)
    try:
        limits = RateLimits(**chosen)
        RateGrid.of(limits)
    except ValueError as error:
        found = ", ".join(f"{name} {value:g}" for name, value in chosen.items())
        expected = "all above 0, min_lr at most max_lr, and max_lr at most a billion bumps"
        key = f"{location}.train.optimizer_params"
        raise ConfigError([Problem(key, f"{stage or 'all'}: {found}", expected, "change one of them")]) from error
    return limits


def problems_of(options: Mapping[str, Any], trained: Trained, location: str) -> list[Problem]:
    known = (*LIMITS, *_STAGE_LIMITS, *OPTIONS)
    problems = []
    for name, value in options.items():
        key = f"{location}.train.optimizer_params.{name}"
        if name in ("do_paramiter_swapping", "paramiter_swapping_factor"):
            if name == "do_paramiter_swapping" and value:
                problems.append(
                    Problem(key, repr(value), "false: every parameter is trained in every step", "remove it")
                )
        elif name not in known:
            hint = misspelt(name, known, "remove it")
            problems.append(Problem(key, repr(value), f"one of {', '.join(known)}", hint))
        elif name in _STAGE_LIMITS and not any(name.startswith(stage) for stage in trained.experts):
            expert = "high_noise" if name.startswith("high_noise") else "low_noise"
            problems.append(Problem(key, repr(value), f"an option of what is trained; {expert} is not", "remove it"))
        elif not _is_number(value) and not (name == "eps" and _all_numbers(value)):
            problems.append(Problem(key, repr(value), "a number", f"write for example `{name}: 1.0e-06`"))
    return problems


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _all_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(_is_number(each) for each in value)


def build(
    params: Iterable[Any], lr: float, options: Mapping[str, Any], trained: Trained, location: str
) -> StagedAutomagic:
    problems = problems_of(options, trained, location)
    if problems:
        raise ConfigError(problems)
    start = _UPSTREAM_START if lr > _TOO_HIGH else lr
    members = []
    for number, group in enumerate(grouped(params, start, trained, location)):
        limits = limits_of(group.stage, options, location)
        members.append(
            {
                "params": group.members,
                "name": f"{number}:{group.stage}" if group.stage else str(number),
                "stage": group.stage,
                "lr": min(group.lr, start) if lr > _TOO_HIGH else group.lr,
                "lr_bump": limits.lr_bump,
                "min_lr": limits.min_lr,
                "max_lr": limits.max_lr,
            }
        )
    if not members:
        hint = "look at `network`: which layers does it choose?"
        raise ConfigError([Problem(f"{location}.network", "nothing to train", "at least one trained layer", hint)])
    rest = {name: options[name] for name in OPTIONS if options.get(name) is not None}
    try:
        return StagedAutomagic(members, lr=start, **rest)
    except ValueError as error:
        given = ", ".join(f"{name}={value}" for name, value in rest.items())
        problem = Problem(
            f"{location}.train.optimizer_params", given, "values Automagic takes", f"change them: {error}"
        )
        raise ConfigError([problem]) from error


class AutomagicFeature:
    def __init__(self, location: str, report: Callable[[str], None]) -> None:
        self._location, self._report = location, report
        self._process: Any = None
        self._groups: list[dict[str, Any]] = []

    def open(self, process: Any) -> None:
        self._process = process

    def hooks(self) -> list[tuple[Point, Around]]:
        return [(OPTIMIZER, self._get_optimizer)]

    def _get_optimizer(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        requested = {name: argument(original, name, args, kwargs) for name in OPTIMIZER.parameters}
        if str(requested["optimizer_type"]).lower() != "automagic":
            return original(*args, **kwargs)  # a trainer that builds a second optimizer of its own
        lr = float(requested["learning_rate"])
        trained = Trained.of(self._process)
        optimizer = build(requested["params"], lr, requested["optimizer_params"] or {}, trained, self._location)
        if lr > _TOO_HIGH:
            self._report(f"train.lr: {lr:g} is too high a start for Automagic; it becomes 1e-06, as in ai-toolkit")
        self._groups = [
            {name: group[name] for name in ("name", "stage", "lr", *LIMITS)} | {"parameters": len(group["params"])}
            for group in optimizer.param_groups
        ]
        for group in self._groups:
            rates = f"lr {group['lr']:g}, bump {group['lr_bump']:g}, from {group['min_lr']:g} to {group['max_lr']:g}"
            self._report(f"automagic: {group['stage'] or 'all'}: {group['parameters']} tensors, {rates}")
        return optimizer

    def report(self) -> dict[str, Any]:
        return {"groups": self._groups}

    def close(self) -> None:
        self._process = None
