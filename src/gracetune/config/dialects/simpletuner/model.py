"""Reads the model: SimpleTuner's families and flavours, the weights' precision, and the assistant adapter."""

from __future__ import annotations

from typing import Any

from gracetune.config.dialects.peer_file import PeerBlock, let_plan_choose_precision
from gracetune.config.dialects.simpletuner.files import line
from gracetune.config.dialects.simpletuner.keys import WITHOUT_EFFECT, family_of
from gracetune.config.dialects.table import Key, KeyRule, KeyTable
from gracetune.config.dialects.values import as_flag, as_number, choice, is_off, name_set
from gracetune.config.draft import describe
from gracetune.config.families import FAMILIES, find_flavour, flavours, names_of, readable_names
from gracetune.config.family_names import DefaultVae, Flavour
from gracetune.config.spelling import misspelt
from gracetune.errors import ConfigError

OTHER_FAMILIES = name_set("""
    ace_step anima auraflow boogu_image bria chroma cosmos cosmos2image cosmos3 deepfloyd ernie flux3_image
    heartmula hidream hunyuanvideo ideogram infinitetalk kandinsky5-image kandinsky5-video kandinsky5_image
    kandinsky5_video kolors longcat_image longcat_video ltxvideo ltxvideo2 lumina2 mageflow minimaxh3
    minimaxmusic moss_image omnigen pixart pixart_sigma sana sanavideo sd1x sd2x sd3 stable_cascade wan_s2v
    z_image_omni zlab_i1
""")
"""Families that SimpleTuner trains and gracetune does not."""


def read_family(options: PeerBlock) -> str | None:
    """Return the family; "" if it is missing or misspelt; None for a model that only SimpleTuner trains.

    After None the reader stops: the rest of the file is about that model, and would only cause more problems.
    """
    if family_of(options):
        options.assign(("model", "family"), family_of(options), "model_family")
        try:
            names_of(family_of(options))
        except ConfigError as error:  # the family is from an installed package that is broken
            options.draft.problems += error.problems
            return None
        return family_of(options)
    value = options.get("model_family")
    family = value.strip().lower() if isinstance(value, str) else value
    options.draft.reported_missing |= {("model",), ("model", "family")}
    if family is None:
        hint = f"add {line(options, 'model_family', FAMILIES[0])}, for example"
        options.draft.missing(("model", "family"), "model_family", f"one of {', '.join(FAMILIES)}", hint)
        return ""
    is_other = isinstance(family, str) and family in OTHER_FAMILIES
    hint = "train this model with SimpleTuner itself"
    options.problem("model_family", f"one of the families we train: {', '.join(FAMILIES)}",
                    hint if is_other else misspelt(family, FAMILIES, "choose one of them"))  # fmt: skip
    return None if is_other else ""


def reject_untrained_flavour(options: PeerBlock, family: str) -> bool:
    """Report a flavour that only SimpleTuner trains. Returns whether the file names one; the reader then stops."""
    if options.get("model_flavour") not in names_of(family).simpletuner.untrained_flavours:
        return False
    options.problem("model_flavour", f"a flavour we train: {', '.join(_flavour_names(family))}",
                    "choose one of them, or train this one with SimpleTuner itself")  # fmt: skip
    return True


def _flavour_names(family: str) -> list[str]:
    """Return the names of all flavours, SimpleTuner's first, then ours."""
    names = names_of(family)
    return list(dict.fromkeys([*names.simpletuner.flavours, *(known.name for known in names.flavours)]))


def is_image_to_video(options: PeerBlock, family: str) -> bool:
    flavour = find_flavour(family, str(options.draft.get(("model", "flavour"))))
    return flavour is not None and flavour.from_image


def _flavour(options: PeerBlock, family: str) -> None:
    given = options.take("model_flavour")
    if not family:
        return  # the family is missing or misspelt, and reported
    if given is None:
        _flavour_not_given(options, family)
        return
    found, expert = _find_flavour(family, given)
    if found is None:
        ours = _flavour_names(family)
        hint = misspelt(given, ours, "choose one of them")
        options.problem("model_flavour", f"one of {', '.join(ours)}", hint)
        return
    options.assign(("model", "flavour"), found.name, "model_flavour")
    if expert:
        _one_expert(options, expert)
    rejected = names_of(family).simpletuner.rejected_flavours.get(found.name)
    if rejected is not None and not options.is_on(rejected.unless):
        options.reject("model_flavour", rejected.why, rejected.hint)


def _one_expert(options: PeerBlock, expert: str) -> None:
    options.assign(("model", "experts"), expert, "model_flavour")
    options.note(
        f"{options.key('model_flavour')}: the {expert}-noise expert is trained, on its own share of the timesteps. "
        "SimpleTuner 4.10 takes the folder `transformer_2` for `-high` and `transformer` for `-low`, which diffusers "
        "uses the other way round, and samples timesteps from the whole range"
    )


def expert_shift(options: PeerBlock, family: str) -> float | None:
    """Return the flow shift that SimpleTuner forces for a single expert, whatever the file says, or None."""
    shift = names_of(family).simpletuner.forced_expert_shifts.get(options.draft.get(("model", "flavour")))
    if options.draft.get(("model", "experts")) is None or shift is None:
        return None
    if options.take("flow_schedule_shift") not in (None, shift):
        options.note(f"{options.key('flow_schedule_shift')}: SimpleTuner trains this flavour at {shift:g}; so do we")
    return shift


def _find_flavour(family: str, given: Any) -> tuple[Flavour | None, str]:
    """Find a flavour by SimpleTuner's name or ours. Returns it and the single expert that its name selects, or ""."""
    if not isinstance(given, str):
        return None, ""
    name, _, expert = given.strip().lower().rpartition("-")
    both_experts = find_flavour(family, name) if expert in ("high", "low") else None
    if both_experts is not None and both_experts.dual_expert:
        return both_experts, expert
    text = given.strip().lower()
    return find_flavour(family, names_of(family).simpletuner.flavours.get(text, text)), ""


def _flavour_not_given(options: PeerBlock, family: str) -> None:
    path = options.get("pretrained_model_name_or_path")
    if path is not None:
        weights = str(path).strip().lower()
        known = next((flavour for flavour in flavours(family) if flavour.weights.lower() == weights), None)
        if known is not None:
            options.assign(("model", "flavour"), known.name, "pretrained_model_name_or_path")
        return
    names = names_of(family).simpletuner
    default = names.default_flavour
    if default is None:
        return
    found, _ = _find_flavour(family, default)
    if found is None:
        expected = f"a flavour: SimpleTuner would take {default}, which we do not train"
        options.draft.problem("model_flavour", None, expected, f"choose one of {', '.join(names.flavours)}")
    else:
        options.default(("model", "flavour"), found.name, "model_flavour")


def _parts(options: PeerBlock, family: str) -> None:
    vae = options.get("pretrained_vae_model_name_or_path")
    names = names_of(family).simpletuner
    if names.vae is not None:
        options.default(("model", "vae_path"), names.vae.weights, "pretrained_vae_model_name_or_path")
    if vae is not None and vae == options.get("pretrained_model_name_or_path"):
        options.take("pretrained_vae_model_name_or_path")
    elif (other := _of_another_family(vae, family)) is not None:
        options.take("pretrained_vae_model_name_or_path")
        options.note(f"{options.key('pretrained_vae_model_name_or_path')}: {other.title} does not fit {family}; "
                     "the model's own is used, as in SimpleTuner")  # fmt: skip
    else:
        options.put("pretrained_vae_model_name_or_path", ("model", "vae_path"))
    encoder = names.text_encoder_option
    if encoder and options.get(encoder) != options.get("pretrained_model_name_or_path"):
        options.put(encoder, ("model", "text_encoder_path"))


_ASSISTANT = "assistant_lora_path assistant_lora_strength assistant_lora_inference_strength disable_assistant_lora"


def _assistant(options: PeerBlock, family: str) -> None:
    """Read the assistant adapter. SimpleTuner uses one only to train an adapter for a distilled flavour."""
    given = [name for name in _ASSISTANT.split() if options.take(name) is not None]
    default = _default_assistant(options, family) if family else None
    if default is None or options.get("model_type") == "full" or options.is_on("disable_assistant_lora"):
        options.list_unused(WITHOUT_EFFECT, *(name for name in given if not is_off(options.get(name), None)))
        return
    for name, plain in (("assistant_lora_strength", 1), ("assistant_lora_inference_strength", 0)):
        if as_number(options.get(name)) not in (None, plain):
            why = "an assistant adapter has its full strength in training, and none in samples"
            options.reject(name, why, f"write {plain}, or remove it")
    if is_off(options.get("assistant_lora_path"), None):
        options.default(("model", "assistant_adapter"), default, "assistant_lora_path")
    else:
        options.put("assistant_lora_path", ("model", "assistant_adapter"))


def _default_assistant(options: PeerBlock, family: str) -> str | None:
    """The assistant of the file's flavour, by SimpleTuner's name for it or by ours."""
    names, ours = names_of(family).simpletuner, str(options.draft.get(("model", "flavour")))
    theirs = str(options.get("model_flavour") or names.default_flavour).strip().lower()
    found, _ = _find_flavour(family, theirs)
    is_trained = found is not None and found.name == ours
    return (names.assistants.get(theirs) if is_trained else None) or names.assistants.get(ours)


def _of_another_family(vae: Any, family: str) -> DefaultVae | None:
    others = (names.simpletuner.vae for names in readable_names() if names.family != family)
    return next((one for one in others if one is not None and isinstance(vae, str) and one.mark in vae), None)


_MIXED = {"no": "fp32"}
_FP8 = name_set("fp8-torchao fp8wo-torchao fp8-quanto fp8uz-quanto fp8-native fp8-transformerengine fp8-sdnq fp8")
_FEW_BITS = name_set("""
    int8-quanto int4-quanto int2-quanto int8-torchao int8dq-torchao int8dq-int4-torchao int8-sdnq uint8-sdnq int6-sdnq
    int5-sdnq uint5-sdnq uint4-sdnq uint3-sdnq uint2-sdnq nf4-bnb int4-torchao fp8-int4-torchao
""")
_SIXTEEN_BITS = name_set("int16-sdnq uint16-sdnq fp16-sdnq")
_PLAIN = ("bf16", "fp16", "fp32")


def _precision(options: PeerBlock, family: str) -> None:
    mixed = choice(_MIXED)(options.get("mixed_precision"))
    if mixed == "fp8":
        options.reject("mixed_precision", "training arithmetic is bf16, fp16 or fp32", 'write "bf16"')
    else:
        options.put("mixed_precision", ("training", "mixed_precision"), choice(_MIXED))
    given = options.take("base_model_precision")
    base = given if given is None or isinstance(given, str) else describe(given)
    if base is None or base == "no_change":
        if mixed in ("fp16", "fp32"):  # frozen weights are held in the training precision
            options.assign(("model", "base_precision"), mixed, "mixed_precision")
    elif base in _PLAIN:
        options.put("base_model_precision", ("model", "base_precision"))
    elif base in _FP8:
        options.assign(("model", "base_precision"), "fp8", "base_model_precision")
        options.note(f"{options.key('base_model_precision')}: base weights are held in fp8 by gracetune itself, "
                   f"not by {str(base).partition('-')[2] or 'a library'}; they round a little differently")  # fmt: skip
    elif base in _FEW_BITS:
        let_plan_choose_precision(options, "base_model_precision", str(base))
    elif base in _SIXTEEN_BITS:
        held = mixed if mixed in ("fp16", "fp32") else "bf16"
        options.assign(("model", "base_precision"), held, "base_model_precision")
        options.note(f"{options.key('base_model_precision')}: base weights are held in {held}, not in {base}")
    else:
        hint = misspelt(given, [*_FP8, *_FEW_BITS, *_SIXTEEN_BITS, *_PLAIN, "no_change"], 'write "no_change"')
        options.problem("base_model_precision", "no_change, or one of SimpleTuner's precisions", hint)
    full = options.get("model_type") == "full"
    if full and options.draft.get(("model", "base_precision")) in ("fp8", "auto"):
        options.problem("base_model_precision", "no_change: a full fine-tune trains the weights themselves",
                        f'write "no_change", or train an adapter: {line(options, "model_type", "lora")}')  # fmt: skip


MODEL: KeyTable[str] = KeyTable(
    Key("pretrained_model_name_or_path", ("model", "path")),
    Key("revision", ("model", "revision")),
    Key("variant", ("model", "variant")),
    Key("vae_enable_tiling", ("model", "vae_tiling"), as_flag),
    Key("vae_enable_slicing", ("model", "vae_slicing"), as_flag),
    KeyRule(_flavour, "model_family model_flavour"),
    KeyRule(_parts, "pretrained_vae_model_name_or_path qwen_text_encoder_model_name_or_path"),
    KeyRule(_precision, "mixed_precision base_model_precision"),
    KeyRule(_assistant, _ASSISTANT),
)
