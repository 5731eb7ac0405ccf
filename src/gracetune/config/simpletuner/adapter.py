"""What is trained: SimpleTuner's LoRA options and the LyCORIS file."""

from __future__ import annotations

from collections.abc import Mapping

from gracetune.config.adapter_kinds import by_lycoris_name
from gracetune.config.draft import Draft
from gracetune.config.simpletuner.values import (
    PEER,
    Converter,
    Options,
    as_flag,
    as_list,
    as_number,
    is_number,
    is_off,
    read_sidecar,
)
from gracetune.config.spelling import misspelt
from gracetune.config.syntax import Document

_ATTENTION = ("to_k", "to_q", "to_v", "to_out.0")
_CONTEXT = ("add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")
_CONTEXT_FEED_FORWARD = ("ff_context.net.0.proj", "ff_context.net.2")
_FEED_FORWARD = ("ff.net.0.proj", "ff.net.2", *_CONTEXT_FEED_FORWARD, "proj_mlp", "proj_out")

_FLUX_TARGETS: dict[str, tuple[str, ...]] = {
    "mmdit": _ATTENTION,
    "all": (*_ATTENTION, *_CONTEXT),
    "context": _CONTEXT,
    "context+ffs": (*_CONTEXT, *_CONTEXT_FEED_FORWARD),
    "all+ffs": (*_ATTENTION, *_CONTEXT, *_FEED_FORWARD),
    "all+ffs+embedder": ("x_embedder", *_ATTENTION, *_CONTEXT, *_FEED_FORWARD),
    "ai-toolkit": (*_ATTENTION, *_CONTEXT, *_FEED_FORWARD, "norm.linear", "norm1.linear", "norm1_context.linear"),
    "tiny": ("single_transformer_blocks.7.proj_out", "single_transformer_blocks.20.proj_out"),
    "nano": ("single_transformer_blocks.7.proj_out",),
}
_TARGETS = {"wan": _ATTENTION, "qwen_image": _ATTENTION, "sdxl": _ATTENTION}


def read_adapter(options: Options, draft: Draft, family: str) -> None:
    kind = options.get("model_type")
    if kind == "full":
        draft.put(("adapter", "kind"), "full_finetune", options.origin("model_type"))
        return
    if kind is None:
        draft.missing(("adapter", "kind"), "model_type", "lora or full", f"add {options.line('model_type', 'lora')}")
        return
    if kind != "lora":
        options.problem(draft, "model_type", "lora or full", "write `lora`")
        return
    draft.put(("adapter", "kind"), "lora", options.origin("model_type"))
    options.put(draft, "init_lora", ("adapter", "init_from"))
    lora_type = options.take("lora_type") or "standard"
    if lora_type == "standard":
        _lora(options, draft, family)
    elif lora_type == "lycoris":
        _lycoris_file(options, draft)
    else:
        options.problem(draft, "lora_type", "standard or lycoris", "write `standard`")


def _lora(options: Options, draft: Draft, family: str) -> None:
    options.put(draft, "lora_rank", ("adapter", "rank"), as_number)
    options.put(draft, "lora_alpha", ("adapter", "alpha"), as_number)
    options.put(draft, "lora_dropout", ("adapter", "dropout"), as_number)
    draft.default(("adapter", "dropout"), 0.1, PEER, "lora_dropout")
    if options.switch(draft, "use_dora"):
        draft.put(("adapter", "kind"), "dora", options.origin("use_dora"))
    options.put(draft, "lora_format", ("checkpoints", "format"))
    draft.default(("checkpoints", "format"), "diffusers", PEER, "lora_format")
    _lora_targets(options, draft, family)


def _lora_targets(options: Options, draft: Draft, family: str) -> None:
    if "peft_lora_target_modules" in options:
        _named_targets(options, draft)
    elif family == "flux":
        _flux_targets(options, draft)
    elif family in _TARGETS:
        draft.default(("adapter", "targets"), list(_TARGETS[family]), PEER)


def _flux_targets(options: Options, draft: Draft) -> None:
    name = options.get("flux_lora_target")
    if name is None:
        draft.default(("adapter", "targets"), list(_FLUX_TARGETS["all"]), PEER, "flux_lora_target")
    elif isinstance(name, str) and name in _FLUX_TARGETS:
        draft.put(("adapter", "targets"), list(_FLUX_TARGETS[name]), options.origin("flux_lora_target"))
    else:
        options.refuse(draft, "flux_lora_target", f"one of {', '.join(_FLUX_TARGETS)}", "choose one of them")


def _named_targets(options: Options, draft: Draft) -> None:
    """A list, a JSON list in a string, or a file that holds one."""
    value = options.get("peft_lora_target_modules")
    if isinstance(value, str) and not value.lstrip().startswith("["):
        document = read_sidecar(draft, options, "peft_lora_target_modules", "a JSON list of module names")
        if document is not None:
            origin = Options({}, {}, document.name).origin("(list)")
            draft.put(("adapter", "targets"), document.data, origin)
    else:
        options.put(draft, "peft_lora_target_modules", ("adapter", "targets"), as_list)


_LOCON = {"lora": "locon", "locon": "locon"}
"""LyCORIS has two names for it."""
_ALGORITHMS = {**_LOCON, **by_lycoris_name(), **_LOCON}
_FULL_DIMENSION = 10000
"""The dimension people write when they mean that nothing should be decomposed."""

_LYCORIS_ROWS: dict[str, tuple[str, Converter]] = {
    "linear_dim": ("rank", as_number),
    "linear_alpha": ("alpha", as_number),
    "conv_dim": ("conv_rank", as_number),
    "conv_alpha": ("conv_alpha", as_number),
    "dropout": ("dropout", as_number),
    "factor": ("factor", as_number),
    "full_matrix": ("full_rank", as_flag),
    "decompose_both": ("decompose_both", as_flag),
    "multiplier": ("strength", as_number),
}
_LYCORIS_HARMLESS = ("bypass_mode", "wd_on_output", "warn_on_unmatched")
_LYCORIS_REFUSED: dict[str, str] = {
    "rank_dropout": "only plain dropout is implemented",
    "module_dropout": "only plain dropout is implemented",
    "use_tucker": "Tucker decomposition of convolutions is not implemented",
    "use_cp": "Tucker decomposition of convolutions is not implemented",
    "use_conv_cp": "Tucker decomposition of convolutions is not implemented",
    "use_scalar": "a trained scalar is not implemented",
    "train_norm": "norm layers stay frozen",
    "rescaled": "rescaled OFT is not implemented",
    "constraint": "constrained OFT is not implemented",
    "constrain": "constrained OFT is not implemented",
    "unbalanced_factorization": "LoKr's unbalanced split is not implemented",
    "rs_lora": "rank-stabilised scaling is not implemented",
    "block_size": "DyLoRA is not implemented",
    "tlora_min_rank": "T-LoRA is not implemented",
    "tlora_alpha": "T-LoRA is not implemented",
    "train_llm_adapter": "only the diffusion model is adapted",
    "preset": "name modules in apply_preset instead",
}
_LYCORIS_KNOWN = ("algo", "dora_wd", "apply_preset", *_LYCORIS_ROWS, *_LYCORIS_HARMLESS, *_LYCORIS_REFUSED)


def _lycoris_file(options: Options, draft: Draft) -> None:
    named = options
    if "lycoris_config" not in options:
        default = {**options.values, "lycoris_config": "config/lycoris_config.json"}
        named = Options(default, options.written, options.file)
    document = read_sidecar(draft, named, "lycoris_config", "a LyCORIS JSON file")
    if document is None:
        return
    if not isinstance(document.data, Mapping):
        draft.problem("(file)", document.data, "a mapping of LyCORIS options", 'start with {"algo": "lokr", …}',
                      document.name)  # fmt: skip
        return
    _lycoris(document, draft)
    draft.default(("checkpoints", "format"), "lycoris", PEER)


def _lycoris(document: Document, draft: Draft) -> None:
    lycoris = Options.block(document.data, document.name, "")
    for name in lycoris.values:
        if name not in _LYCORIS_KNOWN:
            lycoris.problem(draft, name, "an option of LyCORIS", misspelt(name, _LYCORIS_KNOWN))
        elif name in _LYCORIS_REFUSED and not is_off(lycoris.get(name)):
            lycoris.refuse(draft, name, _LYCORIS_REFUSED[name])
    for name, (field, convert) in _LYCORIS_ROWS.items():
        lycoris.put(draft, name, ("adapter", field), convert)
    _algorithm(lycoris, draft)
    _full_dimension(lycoris, draft)
    _preset(lycoris, draft)


def _algorithm(lycoris: Options, draft: Draft) -> None:
    algorithm = lycoris.get("algo")
    kind = _ALGORITHMS.get(algorithm.strip().lower()) if isinstance(algorithm, str) else None
    if algorithm is None:
        draft.problem("algo", None, f"one of {', '.join(_ALGORITHMS)}", 'add "algo": "lokr"', lycoris.file)
    elif kind is None:
        lycoris.refuse(draft, "algo", f"one of {', '.join(_ALGORITHMS)}", "choose one of them")
    else:
        draft.put(("adapter", "kind"), kind, lycoris.origin("algo"))
    if lycoris.is_on("dora_wd"):
        if kind == "locon":
            draft.put(("adapter", "kind"), "dora", lycoris.origin("dora_wd"))
        else:
            lycoris.refuse(draft, "dora_wd", "weight decomposition is implemented for lora alone")


def _full_dimension(lycoris: Options, draft: Draft) -> None:
    dimension = as_number(lycoris.get("linear_dim"))
    if is_number(dimension) and dimension >= _FULL_DIMENSION and draft.get(("adapter", "kind")) == "lokr":
        draft.put(("adapter", "full_rank"), True, lycoris.origin("linear_dim"))


_PRESET_REFUSED = ("name_algo_map",)
_PRESET_HARMLESS = (
    "enable_conv", "lora_prefix", "use_fnmatch", "unet_target_module", "unet_target_name",
    "text_encoder_target_module", "text_encoder_target_name",
)  # fmt: skip
_PRESET_KNOWN = ("target_module", "target_name", "module_algo_map", "exclude_name", *_PRESET_REFUSED, *_PRESET_HARMLESS)


def _preset(lycoris: Options, draft: Draft) -> None:
    preset = lycoris.get("apply_preset")
    if preset is None or preset == {}:
        draft.refuse("apply_preset", preset, "modules to adapt: without them LyCORIS wraps every layer of the model",
                     'add "apply_preset": {"target_module": ["Attention", "FeedForward"]}', lycoris.file)  # fmt: skip
        return
    if not isinstance(preset, Mapping):
        lycoris.problem(draft, "apply_preset", "a mapping with target_module", 'write {"target_module": ["Attention"]}')
        return
    block = Options.block(preset, lycoris.file, "apply_preset.")
    for name in block.values:
        if name not in _PRESET_KNOWN:
            block.problem(draft, name, "a key of a LyCORIS preset", misspelt(name, _PRESET_KNOWN))
        elif name in _PRESET_REFUSED and block.get(name):
            block.refuse(draft, name, "options by module name are not implemented; use module_algo_map")
    _targets(block, draft)
    block.put(draft, "exclude_name", ("adapter", "exclude"), as_list)
    if "module_algo_map" in block:
        _by_module(block, draft)


def _targets(block: Options, draft: Draft) -> None:
    modules, names = as_list(block.get("target_module")), as_list(block.get("target_name"))
    if isinstance(modules, list) and isinstance(names, list):
        draft.put(("adapter", "targets"), [*modules, *names], block.origin("target_module"))
    elif modules is not None:
        block.put(draft, "target_module", ("adapter", "targets"), as_list)
    else:
        block.put(draft, "target_name", ("adapter", "targets"), as_list)


_PER_MODULE = (
    "algo",
    "dim",
    "linear_dim",
    "alpha",
    "linear_alpha",
    "factor",
    "full_matrix",
    "decompose_both",
    "dropout",
)


def _by_module(block: Options, draft: Draft) -> None:
    table = block.get("module_algo_map")
    for module, settings in table.items() if isinstance(table, Mapping) else ():
        for name in settings if isinstance(settings, Mapping) else ():
            if name not in _PER_MODULE:
                draft.problem(f"{block.key('module_algo_map')}.{module}.{name}", settings[name],
                              f"one of {', '.join(_PER_MODULE)}", misspelt(name, _PER_MODULE), block.file)  # fmt: skip
    block.put(draft, "module_algo_map", ("adapter", "by_module"))
