"""A run whose files a program would misread is rejected before anything is encoded, with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gracetune.config.run_config import Adapter, Checkpoints, Model, RunConfig
from gracetune.errors import ConfigError
from gracetune.models.registry import spec_of
from gracetune.models.source import open_source
from gracetune.train.export_checks import about_other_programs
from gracetune.train.trained_model import check_adapter
from unit.adapters.formats import making

TinyModel = Callable[[str, str], Path]
WRONG: list[tuple[str, dict[str, Any], str, str, str]] = [
    ("wan", {"kind": "dora", "rank": 2}, "kohya", "musubi-tuner ignores DoRA's magnitudes",
     "checkpoints.format=comfyui; or --set checkpoints.format=diffusers"),
    ("wan", {"kind": "diag_oft", "rank": 4}, "kohya", "ignores diag_oft", "for_program=comfyui"),
    ("wan", {"kind": "full_delta"}, "kohya", "ignores full_delta", "for_program=comfyui"),
    ("wan", {"kind": "ia3"}, "kohya", "ComfyUI does not support", "checkpoints.format=lycoris"),
    ("wan", {"kind": "lokr", "rank": 1, "decompose_both": True}, "kohya", "first factor is decomposed",
     "checkpoints.format=comfyui"),
    ("wan", {"kind": "lora", "rank": 2, "by_module": {"FeedForward": {"algo": "lokr"}}}, "kohya", "one kind of adapter",
     "checkpoints.format=comfyui"),
    ("wan", {"kind": "lokr", "full_rank": True, "targets": ["patch_embedding"]}, "kohya", "2-d convolutions only",
     "for_program=musubi"),
    ("flux", {"kind": "full_delta"}, "lycoris", "does not load a bias", "checkpoints.format=comfyui"),
    ("flux", {"kind": "diag_oft", "rank": 4, "targets": ["norm_out.linear"]}, "lycoris", "reorders the rows",
     "for_program=lycoris"),
    ("sdxl", {"kind": "dora", "rank": 2}, "lycoris", "norm of the base weight", "for_program=lycoris"),
]  # fmt: skip


def checked(tiny_model: TinyModel, family: str, adapter: dict[str, Any], **checkpoints: Any) -> None:
    spec = spec_of(family)
    source = open_source(Model(family=family, path=str(tiny_model(family, making.FLAVOURS[family]))))  # type: ignore[arg-type]
    config = RunConfig.model_validate(
        {
            "name": "n", "output_dir": "o", "model": {"family": family}, "datasets": [{"id": "d", "path": "p"}],
            "training": {"max_steps": 1}, "adapter": adapter, "checkpoints": checkpoints,
        }
    )  # fmt: skip
    check_adapter(config, spec, source, spec.inspect(source))


@pytest.mark.parametrize(("family", "adapter", "format", "expected_text", "hint"), WRONG)
def test_files_that_a_program_reads_wrongly(
    family, adapter, format, expected_text, hint, tiny_model: TinyModel
) -> None:
    with pytest.raises(ConfigError) as rejected:
        checked(tiny_model, family, adapter, format=format)
    (problem,) = rejected.value.problems
    assert problem.key == "checkpoints.format"
    assert expected_text in problem.found
    assert f"--set checkpoints.{hint}" in problem.hint or f"--set {hint}" in problem.hint
    settings = dict(
        one.split("=") for one in problem.hint.split("; or ")[0].removeprefix("--set checkpoints.").split(", for ")[:1]
    )
    checked(tiny_model, family, adapter, **{"format": format, **settings})


@pytest.mark.parametrize(
    ("adapter", "format", "program"),
    [
        ({"kind": "dora", "rank": 2}, "comfyui", "comfyui"),
        ({"kind": "dora", "rank": 2}, "diffusers", "diffusers"),
        ({"kind": "dora", "rank": 2}, "lycoris", "lycoris"),
        ({"kind": "lokr", "rank": 2}, "kohya", "musubi"),
        ({"kind": "full_finetune"}, "kohya", "musubi"),
    ],
)
def test_files_for_one_program(adapter, format, program, tiny_model: TinyModel) -> None:
    checked(tiny_model, "wan", adapter, format=format, for_program=program)
    if adapter["kind"] == "full_finetune":
        return
    for other in {"sd-scripts"} | ({"musubi"} if adapter["kind"] == "dora" else {"lycoris"}):
        with pytest.raises(ConfigError):
            checked(tiny_model, "wan", adapter, format=format, for_program=other)


def test_a_note_names_the_programs_that_files_for_one_are_not_for(tiny_model: TinyModel) -> None:
    state = making.state("sdxl", making.in_blocks(making.layer_shapes("sdxl", tiny_model)), "dora")
    (note,) = about_other_programs(state, Checkpoints(format="lycoris", for_program="lycoris"))
    assert note.startswith("the files are for LyCORIS: ComfyUI divides")
    assert about_other_programs(state, Checkpoints(format="diffusers", for_program="diffusers")) == ()
    assert about_other_programs(state, Checkpoints(format="diffusers")) == ()


def test_every_kind_has_a_format(tiny_model: TinyModel) -> None:
    for kind in making.ALGORITHMS:
        adapter = Adapter(kind=kind, rank=2).model_dump(exclude_defaults=True) | {"kind": kind}
        checked(tiny_model, "wan", adapter, format="lycoris")
        # A SimpleTuner job's files are for LyCORIS. (IA)3 is for training on: no program loads it.
        if kind != "full_delta":
            checked(tiny_model, "wan", adapter, format="lycoris", for_program="lycoris")


def test_a_program_that_does_not_read_a_format_at_all(tiny_model: TinyModel) -> None:
    with pytest.raises(ConfigError) as rejected:
        checked(tiny_model, "wan", {"kind": "lokr", "rank": 2}, format="comfyui", for_program="lycoris")
    (problem,) = rejected.value.problems
    assert "--set checkpoints.format=lycoris" in problem.hint
    assert "--set checkpoints.for_program=null" in problem.hint
