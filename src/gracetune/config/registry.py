"""The names that a config can choose from: trackers, export formats, optimizers, adapter kinds and dataset backends.

A `Registry` finds records by name: ours from a table, those of other installed packages from an entry point group. Both
are entry points: a name, and the record's location as `module:NAME`. Names are read once, when gracetune starts. A
record is imported only when it is needed, so a broken package stops only the runs that use it, and `config` can list
what a higher layer defines without importing it: the layer order forbids `config` to import `optim` or `adapters`.
Records of optimizers and adapter algorithms do not import torch, which keeps `config check` fast.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol, TypeVar, runtime_checkable

from pydantic import AfterValidator, BaseModel, ValidationError

from gracetune.errors import ConfigError, Problem
from gracetune.telemetry.dispatcher import Tracker

T = TypeVar("T")
FOREIGN_ERRORS: Final = (Exception, SystemExit)
"""What importing another package can raise. It runs that project's code, so any error is theirs to fix, and none may
end a command that does not use the package."""


@dataclass(frozen=True)
class Registry:
    what: str
    """The kind of record in messages, such as `optimizer`."""
    group: str
    """The entry point group that other packages use."""
    ours: Mapping[str, str]
    """Name -> `module:NAME`."""
    installed: tuple[EntryPoint, ...]

    @classmethod
    def find(cls, what: str, group: str, ours: Mapping[str, str]) -> Registry:
        """A registry of our records and of those that installed packages offer now."""
        return cls(what, group, ours, tuple(entry_points(group=group)))

    @property
    def names(self) -> tuple[str, ...]:
        """Every name once, ours first."""
        return tuple(dict.fromkeys((*self.ours, *(point.name for point in self.installed))))

    def load_as(self, name: str, kind: type[T]) -> T:
        """Load a record and check that it is of this class or protocol."""
        record = self.load(name)
        if not isinstance(record, kind):
            raise self.rejected(name, repr(record), f"a record of the class {kind.__name__}")
        return record

    def load(self, name: str) -> Any:
        """Load a record. Raises ConfigError if it cannot be imported, or if two packages use its name."""
        if name not in self.names:
            raise KeyError(name)
        self.check_unique(name)
        if name in self.ours:
            return EntryPoint(name, self.ours[name], self.group).load()
        (point,) = self._points(name)
        try:
            with redirect_stdout(sys.stderr):  # stdout is reserved for --json
                return point.load()
        except FOREIGN_ERRORS as error:
            found = f"{point.value} cannot be imported: {type(error).__name__}: {error}"
            raise self.rejected(name, found, "module:NAME, the record in a module of that package") from error

    def check_unique(self, name: str) -> None:
        """Raise ConfigError if two packages use this name. Nothing is imported."""
        points = self._points(name)
        if len(points) + (name in self.ours) > 1:
            by = [f"{point.value} ({point.dist.name if point.dist else 'unknown distribution'})" for point in points]
            location = ", ".join([*(["gracetune itself"] if name in self.ours else []), *by])
            raise self.rejected(name, f"several called {name}: {location}", "one")

    def _points(self, name: str) -> list[EntryPoint]:
        return [point for point in self.installed if point.name == name]

    def rejected(self, name: str, found: str, expected: str) -> ConfigError:
        hint = f"fix or `pip uninstall` the package whose entry point in {self.group} is called {name}"
        return ConfigError(
            [Problem(f"the installed {self.what} {name}", found, expected, f"{hint} (docs/extending.md)")]
        )


# -- trackers ----------------------------------------------------------------------------------------------------------

TRACKERS: Final[Registry] = Registry.find(
    "tracker",
    "gracetune.trackers",
    {
        "tensorboard": "gracetune.telemetry.sinks.tensorboard:TRACKER",
        "wandb": "gracetune.telemetry.sinks.wandb:TRACKER",
    },
)
"""For `logging.trackers`. The records are in `telemetry/sinks/`."""
_TRACKER_NAMES: Final[tuple[str, ...]] = TRACKERS.names


def tracker(name: str) -> Tracker:
    return TRACKERS.load_as(name, Tracker)


def _importable_tracker(name: str) -> str:
    """Load the record now, so that `config check` reports a broken package."""
    tracker(name)
    return name


if TYPE_CHECKING:
    TrackerName = str  # a type checker cannot know which packages are installed
else:
    TrackerName = Annotated[Literal[_TRACKER_NAMES], AfterValidator(_importable_tracker)]


# -- export formats ----------------------------------------------------------------------------------------------------

EXPORT_FORMATS: Final[Registry] = Registry.find(
    "export format",
    "gracetune.export_formats",
    {
        "comfyui": "gracetune.adapters.formats.comfyui:FORMAT",
        "diffusers": "gracetune.adapters.formats.diffusers:FORMAT",
        "kohya": "gracetune.adapters.formats.kohya:FORMAT",
        "lycoris": "gracetune.adapters.formats.lycoris:FORMAT",
    },
)
"""For `checkpoints.format`. The records are in `adapters/formats/`."""
FORMAT_NAMES: Final[tuple[str, ...]] = EXPORT_FORMATS.names
PROGRAMS: Final[dict[str, str]] = {
    "comfyui": "ComfyUI",
    "diffusers": "diffusers",
    "musubi": "musubi-tuner",
    "sd-scripts": "sd-scripts",
    "lycoris": "LyCORIS",
}
"""The programs that load adapter files -> their own spelling. The records say which files each one loads correctly."""


def _importable_format(name: str) -> str:
    """Let `config check` report a broken package. Our own records import torch, so they are not imported here."""
    EXPORT_FORMATS.check_unique(name)
    if name not in EXPORT_FORMATS.ours:
        EXPORT_FORMATS.load(name)
    return name


if TYPE_CHECKING:
    FormatName = str  # a type checker cannot know which packages are installed
    Program = str
else:
    Program = Literal[tuple(PROGRAMS)]
    FormatName = Annotated[Literal[FORMAT_NAMES], AfterValidator(_importable_format)]


# -- optimizers --------------------------------------------------------------------------------------------------------

OPTIMIZERS: Final[Registry] = Registry.find(
    "optimizer",
    "gracetune.optimizers",
    {
        "adamw": "gracetune.optim.optimizers.adamw:RECORD",
        "adamw_8bit": "gracetune.optim.optimizers.adamw_8bit:RECORD",
        "adafactor": "gracetune.optim.optimizers.adafactor:RECORD",
        "torch_adafactor": "gracetune.optim.optimizers.torch_adafactor:RECORD",
        "lion": "gracetune.optim.optimizers.lion:RECORD",
        "prodigy": "gracetune.optim.optimizers.prodigy:RECORD",
        "prodigy_plus_schedule_free": "gracetune.optim.optimizers.prodigy_plus_schedule_free:RECORD",
        "automagic": "gracetune.optim.optimizers.automagic:RECORD",
    },
)
"""For `optimizer.name`. The records are in `optim/optimizers/`, one file each."""
OPTIMIZER_NAMES: Final[tuple[str, ...]] = OPTIMIZERS.names


@runtime_checkable
class KnowsOwnKeys(Protocol):
    """The attribute of an optimizer's record that config reads (`gracetune.optim.record.OptimizerRecord`)."""

    @property
    def own_keys(self) -> tuple[str, ...]: ...


def reads_key(optimizer: str, key: str) -> bool:
    """Whether this optimizer reads `key`, a key of the `optimizer` section that only some optimizers read."""
    return key in _optimizer_record(optimizer).own_keys


def _optimizer_record(name: str) -> KnowsOwnKeys:
    found: KnowsOwnKeys = OPTIMIZERS.load_as(name, KnowsOwnKeys)  # type: ignore[type-abstract]
    return found


def _importable_optimizer(name: str) -> str:
    """Load the record now, so that `config check` reports a broken package."""
    _optimizer_record(name)
    return name


if TYPE_CHECKING:
    OptimizerName = str  # a type checker cannot know which packages are installed
else:
    OptimizerName = Annotated[Literal[OPTIMIZER_NAMES], AfterValidator(_importable_optimizer)]


# -- adapter kinds -----------------------------------------------------------------------------------------------------

FULL_FINETUNE: Final = "full_finetune"
"""The `adapter.kind` that trains the weights themselves, without an adapter. No algorithm can have this name."""
ALGORITHMS: Final[Registry] = Registry.find(
    "adapter algorithm",
    "gracetune.adapters",
    {  # Order matters: a later algorithm may have all tensors of an earlier one, so files are matched from the end.
        "lora": "gracetune.adapters.algorithms.lora:ALGORITHM",
        "dora": "gracetune.adapters.algorithms.dora:ALGORITHM",
        "lokr": "gracetune.adapters.algorithms.lokr:ALGORITHM",
        "loha": "gracetune.adapters.algorithms.loha:ALGORITHM",
        "locon": "gracetune.adapters.algorithms.locon:ALGORITHM",
        "ia3": "gracetune.adapters.algorithms.ia3:ALGORITHM",
        "diag_oft": "gracetune.adapters.algorithms.diag_oft:ALGORITHM",
        "full_delta": "gracetune.adapters.algorithms.full_delta:ALGORITHM",
    },
)
"""For `adapter.kind`. The records are in `adapters/algorithms/`, one file each."""
ALGORITHM_NAMES: Final[tuple[str, ...]] = tuple(name for name in ALGORITHMS.names if name != FULL_FINETUNE)


@runtime_checkable
class AdapterAlgorithm(Protocol):
    """The attributes of a record that config reads. `adapters.algorithms.record.Algorithm` documents them."""

    @property
    def name(self) -> str: ...

    @property
    def lycoris_name(self) -> str | None: ...

    @property
    def own_options(self) -> tuple[str, ...]: ...

    @property
    def rank_is_width(self) -> bool: ...

    @property
    def is_lora(self) -> bool: ...

    @property
    def loadable(self) -> bool: ...


def algorithms() -> Iterator[AdapterAlgorithm]:
    """Yield every usable record, in the order of `ALGORITHM_NAMES`. Each is imported when it is reached, ours first."""
    for name in ALGORITHM_NAMES:
        with suppress(ConfigError):
            yield checked_record(name)


def kind_of_algo(algo: Any) -> str | None:
    """The `adapter.kind` of what LyCORIS calls `algo`, in its files and in `adapter.by_module`; None if unknown.

    Other packages are imported only if none of our algorithms has the name.
    """
    wanted = algo.strip().lower() if isinstance(algo, str) else None
    if wanted is None:
        return None
    return next((record.name for record in algorithms() if record.lycoris_name == wanted), None)


def is_lora(kind: str) -> bool:
    """Whether adapters of this kind are LoRA in every program. False for a kind that cannot be loaded."""
    with suppress(ConfigError):
        return kind in ALGORITHM_NAMES and checked_record(kind).is_lora
    return False


def lycoris_names() -> tuple[str, ...]:
    """LyCORIS' names of all algorithms."""
    return tuple(dict.fromkeys(record.lycoris_name for record in algorithms() if record.lycoris_name is not None))


def is_loadable(algorithm: str) -> bool:
    """Whether some program loads layers of this algorithm from a file. False for algorithms of other packages."""
    return algorithm in ALGORITHMS.ours and checked_record(algorithm).loadable


def checked_record(name: str) -> AdapterAlgorithm:
    """Load a record by name. Raises ConfigError if an installed package's record is broken or has another name."""
    found: AdapterAlgorithm = ALGORITHMS.load_as(name, AdapterAlgorithm)  # type: ignore[type-abstract]
    if found.name != name:
        raise ALGORITHMS.rejected(name, f"an algorithm called {found.name}", f"name = {name!r} in its class")
    return found


def _with_record(kind: str) -> str:
    """Load the record now, so that `config check` reports a broken package, not a run after hours of caching."""
    if kind != FULL_FINETUNE:
        checked_record(kind)
    return kind


if TYPE_CHECKING:
    AdapterKind = str  # a type checker cannot know which packages are installed
else:
    AdapterKind = Annotated[Literal[(*ALGORITHM_NAMES, FULL_FINETUNE)], AfterValidator(_with_record)]


# -- dataset backends --------------------------------------------------------------------------------------------------

BACKENDS_GROUP: Final = "gracetune.backends"
BACKENDS: Final[Registry] = Registry.find(
    "dataset backend",
    BACKENDS_GROUP,
    {
        "local": "gracetune.data.backends.local:BACKEND",
        "in_memory": "gracetune.data.staging.stager:BACKEND",
        "url": "gracetune.data.backends.url:BACKEND",
    },
)
"""For the `type` of a dataset. The options of an installed backend are in a section of the dataset with the same name.
The record's own pydantic model validates them."""


@runtime_checkable
class TakesOptions(Protocol):
    """The attributes of a backend's record that config reads."""

    @property
    def name(self) -> str: ...

    @property
    def options(self) -> type[BaseModel] | None: ...


@dataclass(frozen=True)
class InvalidOption:
    path: tuple[str | int, ...]
    found: Any
    expected: str


def is_installed(name: str) -> bool:
    """Whether another package provides this backend."""
    return name in BACKENDS.names and name not in BACKENDS.ours


def validated(name: str, given: Mapping[str, Any]) -> tuple[BaseModel | None, list[InvalidOption]]:
    """Validate a dataset's options with the model of an installed backend.

    Returns the validated options, or None and what is wrong with them; None and an empty list if the backend has no
    options and none are given. Raises ConfigError if the package does not provide a backend of this name.
    """
    record: TakesOptions = BACKENDS.load_as(name, TakesOptions)  # type: ignore[type-abstract]
    if record.name != name:
        raise BACKENDS.rejected(name, f"a backend called {record.name}", f"a DatasetBackend called {name}")
    if record.options is None:
        unknown = [InvalidOption((key,), given[key], "nothing: this backend takes no options") for key in given]
        return None, unknown
    try:
        return record.options.model_validate(dict(given)), []
    except ValidationError as error:
        return None, [InvalidOption(one["loc"], one["input"], one["msg"]) for one in error.errors()]


def _unique(name: str) -> str:
    BACKENDS.check_unique(name)
    return name


if TYPE_CHECKING:
    BackendName = str  # a type checker cannot know which packages are installed
else:
    BackendName = Annotated[Literal[BACKENDS.names], AfterValidator(_unique)]
