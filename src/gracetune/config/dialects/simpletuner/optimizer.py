"""Reads SimpleTuner's optimizers, and maps each to the one of ours that does the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gracetune.config.dialects.peer_file import PeerBlock
from gracetune.config.dialects.simpletuner.files import line
from gracetune.config.dialects.table import KeyRule, KeyTable
from gracetune.config.dialects.values import as_flag, as_number, from_json, name_set
from gracetune.config.registry import OPTIMIZER_NAMES
from gracetune.config.spelling import misspelt


@dataclass(frozen=True)
class OptimizerMatch:
    """One of our optimizers with a SimpleTuner optimizer's own defaults. None leaves our optimizer's default."""

    name: str
    betas: tuple[float, float] | None = (0.9, 0.999)
    eps: float | None = 1e-6
    weight_decay: float | None = 0.01
    nearly: str = ""
    """How ours differs, for the note; empty if it does not."""
    adam: bool = False
    """Whether SimpleTuner's is Adam, which equals AdamW only without weight decay."""


_MASTER = "weights are kept in fp32 beside the bf16 ones, where SimpleTuner corrects for bf16's rounding"
_EXACT_STATE = "its state is kept in full precision"
_PAGED = "its state is placed by gracetune's memory plan instead of paged"
_LION = OptimizerMatch("lion", betas=(0.9, 0.99), eps=None, weight_decay=0.0)

MATCHES: dict[str, OptimizerMatch] = {
    "adamw_bf16": OptimizerMatch("adamw", nearly=_MASTER),
    "torch-adamw": OptimizerMatch("adamw", eps=1e-8),
    "optimi-adamw": OptimizerMatch("adamw", betas=(0.9, 0.99), weight_decay=0.0, nearly=_MASTER),
    "bnb-adamw": OptimizerMatch("adamw"),
    "bnb-adamw-paged": OptimizerMatch("adamw", nearly=_PAGED),
    "bnb-adamw8bit": OptimizerMatch("adamw_8bit"),
    "bnb-adamw8bit-paged": OptimizerMatch("adamw_8bit", nearly=_PAGED),
    "ao-adamw8bit": OptimizerMatch("adamw_8bit", nearly="bitsandbytes quantizes its state instead of torchao"),
    "adamw8bit": OptimizerMatch("adamw_8bit"),
    "torch-adam": OptimizerMatch("adamw", eps=1e-8, weight_decay=0.0, adam=True),
    "optimi-adam": OptimizerMatch("adamw", betas=(0.9, 0.99), weight_decay=0.0, nearly=_MASTER, adam=True),
    "bnb-adam": OptimizerMatch("adamw", eps=1e-8, weight_decay=0.0, adam=True),
    "bnb-adam8bit": OptimizerMatch("adamw_8bit", eps=1e-8, weight_decay=0.0, adam=True),
    "torch-adafactor": OptimizerMatch("torch_adafactor", betas=None, eps=None, weight_decay=0.0),
    "adafactor": OptimizerMatch("adafactor", betas=None, eps=None, weight_decay=None),
    "optimi-lion": replace(_LION, nearly=_MASTER),
    "bnb-lion": _LION,
    "bnb-lion-paged": replace(_LION, nearly=_PAGED),
    "bnb-lion8bit": replace(_LION, nearly=_EXACT_STATE),
    "bnb-lion8bit-paged": replace(_LION, nearly=_EXACT_STATE),
    "prodigy": OptimizerMatch("prodigy_plus_schedule_free", betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0),
}

OTHERS = name_set("""
    torch-sgd torch-radam torch-nadam torch-rmsprop torch-adagrad torch-adadelta torch-adamax torch-asgd
    torch-sparseadam adamw_schedulefree adamw_schedulefree+aggressive adamw_schedulefree+no_kahan soap muon
    ao-adamw4bit ao-adamfp8 ao-adamwfp8 optimi-stableadamw optimi-radam optimi-ranger optimi-adan optimi-sgd
    bnb-adagrad bnb-adagrad8bit sdnq-adamw sdnq-adamw+no_quant sdnq-adafactor sdnq-came sdnq-lion sdnq-muon
    sdnq-muon+quantized_matmul bnb-ademamix bnb-ademamix8bit bnb-ademamix-paged bnb-ademamix8bit-paged dadaptation
""")
"""SimpleTuner's optimizers without an equivalent among ours."""

_PERFORMANCE = ("foreach", "fused", "kahan_sum", "min_8bit_size", "use_kahan", "gradient_release")
"""Settings that change speed or rounding, not the update rule."""


def is_prodigy(options: PeerBlock) -> bool:
    name = options.get("optimizer")
    return isinstance(name, str) and name.strip().lower() == "prodigy"


def _rate(options: PeerBlock, family: str) -> None:
    """Read the learning rate. SimpleTuner's Prodigy uses 1 and ignores `learning_rate`; only `optimizer_config` can
    change it."""
    path = ("optimizer", "lr")
    if is_prodigy(options):
        options.assign(path, 1.0, "optimizer")
        if "learning_rate" in options:
            options.note(
                f"{options.key('learning_rate')}: not used, as in SimpleTuner: Prodigy finds its own rate, times 1"
            )
            options.take("learning_rate")
        return
    options.put("learning_rate", path, as_number)
    options.default(path, 4e-7, "learning_rate")


def _optimizer(options: PeerBlock, family: str) -> None:
    given = options.get("optimizer")
    name = given.strip().lower() if isinstance(given, str) else given
    if name is None:
        hint = f"add {line(options, 'optimizer', 'adamw_bf16')}"
        options.draft.missing(("optimizer", "name"), "optimizer", "an optimizer's name", hint)
        return
    match = MATCHES.get(name) if isinstance(name, str) else None
    if match is None:
        _unmatched(options, name)
        return
    options.assign(("optimizer", "name"), match.name, "optimizer")
    settings = _settings(options)
    _betas(options)
    if name == "prodigy" and as_number(options.get("prodigy_steps")) != 0:
        options.put("prodigy_steps", ("optimizer", "options", "prodigy_steps"), as_number)
    if match.adam and settings.get("weight_decay") not in (None, 0, 0.0):
        options.reject("optimizer_config", "no weight_decay: Adam adds it to the gradient, AdamW does not",
                       'choose "adamw_bf16", or remove weight_decay')  # fmt: skip
    _defaults(options, match)
    if match.nearly:
        options.note(f"{options.key('optimizer')}: {given} is trained with our {match.name}; {match.nearly}")


def _unmatched(options: PeerBlock, name: Any) -> None:
    if name in OPTIMIZER_NAMES:
        options.put("optimizer", ("optimizer", "name"))
        _settings(options)
        _betas(options)
    elif isinstance(name, str) and name in OTHERS:
        options.reject("optimizer", f"an optimizer we have: {', '.join(MATCHES)}", 'write "adamw_bf16"')
    else:
        hint = misspelt(name, [*MATCHES, *OPTIMIZER_NAMES, *OTHERS], 'write "adamw_bf16"')
        options.problem("optimizer", f"one of {', '.join(MATCHES)}", hint)


def _defaults(options: PeerBlock, match: OptimizerMatch) -> None:
    if match.betas is not None:
        options.default(("optimizer", "betas"), list(match.betas), "optimizer")
    if match.eps is not None:
        options.default(("optimizer", "eps"), match.eps, "optimizer")
    if match.weight_decay is not None:
        options.default(("optimizer", "weight_decay"), match.weight_decay, "optimizer")


def _betas(options: PeerBlock) -> None:
    first, second = as_number(options.take("optimizer_beta1")), as_number(options.take("optimizer_beta2"))
    if (first is None) != (second is None):
        given, missing = ("optimizer_beta1", "optimizer_beta2")[:: 1 if second is None else -1]
        options.problem(given, f"`{missing}` next to it", f"add `{missing}`, or remove `{options.key(given)}`")
    elif first is not None:
        options.assign(("optimizer", "betas"), [first, second], "optimizer_beta1")


def _settings(options: PeerBlock) -> dict[str, Any]:
    """Read `optimizer_config`: `eps=1e-6,weight_decay=0.01`, or the same as a mapping."""
    value = from_json(options.take("optimizer_config"))
    settings: dict[str, Any] = {}
    if isinstance(value, dict):
        settings = {str(name): item for name, item in value.items()}
    elif isinstance(value, str):
        for part in value.split(","):
            name, equals, text = part.partition("=")
            if not equals or not name.strip():
                options.problem("optimizer_config", "name=value, name=value, …", "write eps=1e-6, for example")
                return {}
            settings[name.strip()] = _setting(text.strip())
    elif value is not None:
        options.problem("optimizer_config", "name=value, name=value, …", "write eps=1e-6, for example")
    for name, item in settings.items():
        if name not in _PERFORMANCE:
            own = ("weight_decay", "eps", "betas", "lr")
            path = ("optimizer", name) if name in own else ("optimizer", "options", name)
            location = options.origin("optimizer_config")
            options.draft.put(path, item, replace(location, key=f"{location.key}.{name}"))
    return settings


def _setting(text: str) -> Any:
    if text.lower() == "none":
        return None
    flag = as_flag(text) if text.lower() in ("true", "false") else text
    return as_number(flag)


OPTIMIZER: KeyTable[str] = KeyTable(
    KeyRule(_rate, "learning_rate"),
    KeyRule(_optimizer, "optimizer optimizer_config optimizer_beta1 optimizer_beta2 prodigy_steps"),
)
