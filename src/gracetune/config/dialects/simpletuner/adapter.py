"""Reads the adapter: SimpleTuner's LoRA options and its LyCORIS file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gracetune.config.dialects.peer_file import PeerBlock
from gracetune.config.dialects.simpletuner.files import line, read_sidecar
from gracetune.config.dialects.simpletuner.keys import Off
from gracetune.config.dialects.table import (
    Always,
    IsFalse,
    Key,
    KeyRule,
    KeyTable,
    apply,
    check,
    noted,
    read_elsewhere,
    rejected,
    report_unknown_keys,
)
from gracetune.config.dialects.values import as_flag, as_list, as_number, is_number
from gracetune.config.draft import Draft, Origin
from gracetune.config.families import names_of
from gracetune.config.family_names import LoraTargets
from gracetune.config.registry import FULL_FINETUNE, kind_of_algo, lycoris_names


def _adapter(options: PeerBlock, family: str) -> None:
    kind = options.get("model_type")
    if kind == "full":
        options.assign(("adapter", "kind"), FULL_FINETUNE, "model_type")
        return
    if kind is None:
        hint = f"add {line(options, 'model_type', 'lora')}"
        options.draft.missing(("adapter", "kind"), "model_type", "lora or full", hint)
        return
    if kind != "lora":
        options.problem("model_type", "lora or full", "write `lora`")
        return
    options.assign(("adapter", "kind"), "lora", "model_type")
    options.put("init_lora", ("adapter", "init_from"))
    lora_type = options.take("lora_type") or "standard"
    if lora_type == "standard":
        apply(options, LORA, family)
    elif lora_type == "lycoris":
        _lycoris_file(options)
    else:
        options.problem("lora_type", "standard or lycoris", "write `standard`")


ADAPTER: KeyTable[str] = KeyTable(KeyRule(_adapter, "model_type init_lora lora_type lycoris_config"))


def _dora(options: PeerBlock, family: str) -> None:
    if options.switch("use_dora"):
        options.assign(("adapter", "kind"), "dora", "use_dora")


def _lora_targets(options: PeerBlock, family: str) -> None:
    if "peft_lora_target_modules" in options:
        _named_targets(options)
    else:
        _family_targets(options, names_of(family).simpletuner.targets)


def _family_targets(options: PeerBlock, targets: LoraTargets) -> None:
    name = options.get(targets.option) if targets.option else None
    if name is None:
        if targets.default:
            options.default(("adapter", "targets"), list(targets.default), targets.option)
    elif isinstance(name, str) and name in targets.groups:
        options.assign(("adapter", "targets"), list(targets.groups[name]), targets.option)
    else:
        options.reject(targets.option, f"one of {', '.join(targets.groups)}", "choose one of them")


def _named_targets(options: PeerBlock) -> None:
    """Read the targets: a list, a JSON list in a string, or a file with one."""
    value = options.get("peft_lora_target_modules")
    if isinstance(value, str) and not value.lstrip().startswith("["):
        document = read_sidecar(options, "peft_lora_target_modules", "a JSON list of module names")
        if document is not None:
            options.draft.put(("adapter", "targets"), document.data, Origin("file", "(list)", document.name))
    else:
        options.put("peft_lora_target_modules", ("adapter", "targets"), as_list)


LORA: KeyTable[str] = KeyTable(
    Key("lora_rank", ("adapter", "rank"), as_number),
    Key("lora_alpha", ("adapter", "alpha"), as_number),
    Key("lora_dropout", ("adapter", "dropout"), as_number, default=0.1),
    KeyRule(_dora, "use_dora"),
    Key("lora_format", ("checkpoints", "format"), default="diffusers"),
    KeyRule(_lora_targets, "peft_lora_target_modules flux_lora_target"),
)
"""Options with `lora_type: standard`."""

_LOCON = {"lora": "locon", "locon": "locon"}
"""LyCORIS' two names for LoCon."""
_FULL_DIMENSION = 10000
"""From this dimension on, LoKr keeps its second factor whole. People write such numbers to get that."""


def _lycoris_file(options: PeerBlock) -> None:
    named = options
    if "lycoris_config" not in options:
        named = replace(options, values={**options.values, "lycoris_config": "config/lycoris_config.json"}, used=set())
    document = read_sidecar(named, "lycoris_config", "a LyCORIS JSON file")
    if document is None:
        return
    if not isinstance(document.data, Mapping):
        options.draft.problem("(file)", document.data, "a mapping of LyCORIS options", 'start with {"algo": "lokr", …}',
                              document.name)  # fmt: skip
        return
    lycoris = replace(options.without_nulls(document.data, ""), elsewhere=document.name)
    check(lycoris, LYCORIS)
    apply(lycoris, LYCORIS, None)
    options.default(("checkpoints", "format"), "lycoris")
    options.default(("checkpoints", "for_program"), "lycoris")


def settle_program(draft: Draft) -> None:
    """Unset `for_program` if the user chose a format: its files are for every program that reads that format.

    By default, the files of a LyCORIS run in SimpleTuner are for LyCORIS.
    """
    program, format = ("checkpoints", "for_program"), ("checkpoints", "format")
    own, chosen = draft.origins.get(program), draft.origins.get(format)
    if own is not None and own.kind == "default" and (chosen is None or chosen.kind != "default"):
        draft.put(program, None, own)


def _algorithm(lycoris: PeerBlock, _: None) -> None:
    algorithm = lycoris.get("algo")
    kind = _kind_of(algorithm)
    if algorithm is None:
        lycoris.problem("algo", f"one of {', '.join(_names())}", 'add "algo": "lokr"')
    elif kind is None:
        lycoris.reject("algo", f"one of {', '.join(_names())}", "choose one of them")
    else:
        lycoris.assign(("adapter", "kind"), kind, "algo")
    if lycoris.is_on("dora_wd"):
        if as_flag(lycoris.get("wd_on_output")) is False:
            lycoris.reject("wd_on_output", "true: magnitudes of a layer's inputs are not trained here")
        if kind == "locon":
            lycoris.assign(("adapter", "kind"), "dora", "dora_wd")
        else:
            lycoris.reject("dora_wd", "weight decomposition is implemented for lora alone")


def _kind_of(algorithm: object) -> str | None:
    name = algorithm.strip().lower() if isinstance(algorithm, str) else ""
    return _LOCON.get(name) or kind_of_algo(name)


def _names() -> tuple[str, ...]:
    return tuple(dict.fromkeys((*_LOCON, *lycoris_names())))


def _full_dimension(lycoris: PeerBlock, _: None) -> None:
    dimension = as_number(lycoris.get("linear_dim"))
    if is_number(dimension) and dimension >= _FULL_DIMENSION and lycoris.draft.get(("adapter", "kind")) == "lokr":
        lycoris.assign(("adapter", "full_rank"), True, "linear_dim")


def _preset(lycoris: PeerBlock, _: None) -> None:
    preset = lycoris.get("apply_preset")
    if preset is None or (isinstance(preset, Mapping) and _names_no_targets(preset)):
        lycoris.reject("apply_preset", "modules to adapt: without them LyCORIS wraps every layer of the model",
                       'add "apply_preset": {"target_module": ["Attention", "FeedForward"]}')  # fmt: skip
        return
    if not isinstance(preset, Mapping):
        lycoris.problem("apply_preset", "a mapping with target_module", 'write {"target_module": ["Attention"]}')
        return
    block = lycoris.without_nulls(preset, "apply_preset")
    check(block, PRESET)
    apply(block, PRESET, None)


def _names_no_targets(preset: Mapping[str, Any]) -> bool:
    """Whether the preset leaves LyCORIS's own targets. One with unknown keys may name targets that are misspelt."""
    is_known = all(name in PRESET.keys for name in preset)
    return is_known and preset.get("target_module") is None and preset.get("target_name") is None


def _targets(block: PeerBlock, _: None) -> None:
    modules, names = as_list(block.get("target_module")), as_list(block.get("target_name"))
    if isinstance(modules, list) and isinstance(names, list):
        block.assign(("adapter", "targets"), [*modules, *names], "target_module")
    elif modules is not None:
        block.put("target_module", ("adapter", "targets"), as_list)
    else:
        block.put("target_name", ("adapter", "targets"), as_list)


def _by_module(block: PeerBlock, _: None) -> None:
    table = block.get("module_algo_map")
    for module, settings in table.items() if isinstance(table, Mapping) else ():
        if isinstance(settings, Mapping):
            key_path = f"{block.key('module_algo_map')}.{module}"
            values = {str(name): value for name, value in settings.items()}
            report_unknown_keys(replace(block, values=values, key_path=key_path), PER_MODULE)
    block.put("module_algo_map", ("adapter", "by_module"))


def _not_implemented(names: str, why: str) -> tuple[Key, ...]:
    return tuple(rejected(name, Off(), why) for name in names.split())


LYCORIS: KeyTable[None] = KeyTable(
    Key("linear_dim", ("adapter", "rank"), as_number),
    Key("linear_alpha", ("adapter", "alpha"), as_number),
    Key("conv_dim", ("adapter", "conv_rank"), as_number),
    Key("conv_alpha", ("adapter", "conv_alpha"), as_number),
    Key("dropout", ("adapter", "dropout"), as_number),
    Key("factor", ("adapter", "factor"), as_number),
    Key("full_matrix", ("adapter", "full_rank"), as_flag),
    Key("decompose_both", ("adapter", "decompose_both"), as_flag),
    Key("multiplier", ("adapter", "strength"), as_number),
    KeyRule(_algorithm, "algo dora_wd wd_on_output"),
    KeyRule(_full_dimension, "linear_dim"),
    KeyRule(_preset, "apply_preset"),
    *_not_implemented("rank_dropout module_dropout", "only plain dropout is implemented"),
    *_not_implemented("use_tucker use_cp use_conv_cp", "Tucker decomposition of convolutions is not implemented"),
    *_not_implemented("use_scalar", "a trained scalar is not implemented"),
    *_not_implemented("train_norm", "norm layers stay frozen"),
    *_not_implemented("rescaled", "rescaled OFT is not implemented"),
    *_not_implemented("constraint constrain", "constrained OFT is not implemented"),
    *_not_implemented("unbalanced_factorization", "LoKr's unbalanced split is not implemented"),
    *_not_implemented("rs_lora", "rank-stabilised scaling is not implemented"),
    *_not_implemented("block_size", "DyLoRA is not implemented"),
    *_not_implemented("tlora_min_rank tlora_alpha", "T-LoRA is not implemented"),
    *_not_implemented("train_llm_adapter", "only the diffusion model is adapted"),
    *_not_implemented("preset", "name modules in apply_preset instead"),
    *noted("speed alone", "bypass_mode warn_on_unmatched", unless=Always()),
    expected="an option of LyCORIS",
)
"""The file that `lycoris_config` names."""

PRESET: KeyTable[None] = KeyTable(
    KeyRule(_targets, "target_module target_name"),
    Key("exclude_name", ("adapter", "exclude"), as_list),
    KeyRule(_by_module, "module_algo_map"),
    rejected("name_algo_map", IsFalse(), "options by module name are not implemented; use module_algo_map"),
    *noted(
        "LyCORIS's own names",
        """
        enable_conv lora_prefix use_fnmatch unet_target_module unet_target_name text_encoder_target_module
        text_encoder_target_name
        """,
        unless=Always(),
    ),
    expected="a key of a LyCORIS preset",
)
PER_MODULE: KeyTable[None] = KeyTable(
    *read_elsewhere("algo dim linear_dim alpha linear_alpha factor full_matrix decompose_both dropout")
)
