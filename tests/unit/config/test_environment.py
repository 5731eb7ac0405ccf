from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.config.environment import (
    Environment,
    claim_allocator_options,
    memory_settings,
    torch_accepts_uvm_options,
)
from gracetune.config.memory_options import OPTION_NAMES, AllocConf, max_split_bytes, split_alloc_conf

SEED = "use_uvm:True,uvm_oversubscription_ratio:5.0,uvm_access_pattern:gpu_first"
CUDA = "PYTORCH_CUDA_ALLOC_CONF"


def test_the_seeds_string_is_taken_apart() -> None:
    split = split_alloc_conf(SEED, CUDA)
    assert split.options == {"use_uvm": True, "uvm_oversubscription_ratio": 5.0, "uvm_access_pattern": "gpu_first"}
    assert (split.rest, split.problems) == ("", ())


def test_the_rest_is_left_exactly_as_it_was() -> None:
    text = "max_split_size_mb:512, roundup_power2_divisions:[256:1,512:2,>:4],use_uvm:True,expandable_segments: True"
    split = split_alloc_conf(text, CUDA)
    assert split.rest == "max_split_size_mb:512, roundup_power2_divisions:[256:1,512:2,>:4],expandable_segments: True"


@pytest.mark.parametrize(
    ("text", "expected", "hint"),
    [
        ("uvm_oversubscription_ratio:5.0x", "without a unit", "uvm_oversubscription_ratio:5.0"),
        ("uvm_oversubscription_ratio:inf", "finite", "uvm_oversubscription_ratio:5.0"),
        ("uvm_oversubscription_ratio:nan", "finite", "uvm_oversubscription_ratio:5.0"),
        ("uvm_oversubscription_ratio:1.0", "greater than 1", "uvm_oversubscription_ratio:5.0"),
        ("use_uvm", "use_uvm:VALUE", "colon"),
        ("use_uvm=True", "use_uvm:VALUE", "colon"),
        ("use_uvm:true", "capital", "use_uvm:True"),
        ("Use_UVM:True", "use_uvm", "write use_uvm:True"),
        ("uvm_acess_pattern:gpu_first", "uvm_access_pattern", "write uvm_access_pattern:gpu_first"),
        ("uvm_access_pattern:gpu-first", "one of gpu_first", "uvm_access_pattern:gpu_first"),
        ("uvm_stage1_threshold:1.0", "between 0 and 1", "0.10"),
        ("uvm_stage1_min_bytes:-1", "whole number", "uvm_stage1_min_bytes:0"),
        ("uvm_stage1_min_bytes:1GiB", "whole number", "uvm_stage1_min_bytes:1073741824"),
        ("uvm_stage1_min_bytes:1e9", "whole number", "uvm_stage1_min_bytes:1000000000"),
        (f"uvm_stage1_min_bytes:{'9' * 5000}", "whole number", "uvm_stage1_min_bytes:0"),
        ("USE_UVM:true", "use_uvm", "write use_uvm:True"),
        ("USE_UVM:false", "use_uvm", "write use_uvm:False"),
        ("use_uvmm:True", "use_uvm", "write use_uvm:True"),
        ("uvm_stage1_min_byte:1e9", "uvm_stage1_min_bytes", "write uvm_stage1_min_bytes:1000000000"),
        ("use_uvm:True,use_uvm:False", "once", "keep one"),
    ],
)
def test_errors_say_what_to_type(text: str, expected: str, hint: str) -> None:
    (problem,) = split_alloc_conf(text, CUDA).problems
    assert problem.key == CUDA
    assert expected in problem.expected
    assert hint in problem.hint


@given(st.text(max_size=80))
def test_any_string_is_parsed_and_nothing_of_ours_is_left(text: str) -> None:
    split = split_alloc_conf(text, CUDA)
    again = split_alloc_conf(split.rest, CUDA)
    assert (again.options, again.problems, again.rest) == ({}, (), split.rest)


def test_gh200_variables_beat_the_string_and_switch_uvm_on() -> None:
    found = memory_settings(
        Environment({CUDA: "uvm_oversubscription_ratio:5.0", "GH200_UVM_OVERSUBSCRIPTION_RATIO": "3.0"})
    )
    assert found.problems == ()
    assert found.settings["uvm_oversubscription_ratio"].value == 3.0
    assert found.settings["uvm_oversubscription_ratio"].variable == "GH200_UVM_OVERSUBSCRIPTION_RATIO"
    assert found.settings["use_uvm"].value is True


def test_a_gh200_variable_beats_use_uvm_false_in_the_string() -> None:
    found = memory_settings(Environment({CUDA: "use_uvm:False", "GH200_UVM_ACCESS_PATTERN": "balanced"}))
    assert (found.settings["use_uvm"].value, found.settings["use_uvm"].variable) == (True, "GH200_UVM_ACCESS_PATTERN")


def test_an_empty_variable_is_as_good_as_unset() -> None:
    variables = {"GH200_UVM_ACCESS_PATTERN": "", "GH200_UVM_STAGE1_THRESHOLD": "  ", "GH200_UVM_NONSENSE": ""}
    found = memory_settings(Environment({**variables, CUDA: "use_uvm:False"}))
    assert found.problems == ()
    assert found.settings["use_uvm"].value is False


def test_a_near_miss_is_not_left_for_pytorch_to_stumble_over() -> None:
    environ = {CUDA: "use_uvmm:True,max_split_size_mb:512"}
    claim_allocator_options(environ, torch_takes_them=False)
    assert environ == {CUDA: "max_split_size_mb:512"}


@pytest.mark.parametrize(
    "name",
    ["max_split_size_mb", "expandable_segments", "garbage_collection_threshold", "backend", "roundup_power2_divisions",
     "pinned_use_cuda_host_register", "pinned_num_register_threads", "release_lock_on_cudamalloc", "use_cuda"],
)  # fmt: skip
def test_pytorchs_own_options_are_never_taken_for_ours(name: str) -> None:
    assert split_alloc_conf(f"{name}:1", CUDA) == AllocConf({}, f"{name}:1", ())


def test_the_newer_variable_wins_as_it_does_in_pytorch() -> None:
    found = memory_settings(
        Environment({CUDA: "uvm_stage1_threshold:0.2", "PYTORCH_ALLOC_CONF": "uvm_stage1_threshold:0.3"})
    )
    assert found.settings["uvm_stage1_threshold"].value == 0.3


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("ON", True), ("0", False), ("no", False)])
def test_the_hints_switch(text: str, value: bool) -> None:
    found = memory_settings(Environment({"SIMPLETUNER_GH200_ENABLE_UVM_HINTS": text}))
    assert found.settings["enable_uvm_hints"].value is value


def test_misspelt_variables_and_values_are_reported() -> None:
    environment = Environment({"GH200_UVM_ACCES_PATTERN": "x", "SIMPLETUNER_GH200_ENABLE_UVM_HINTS": "maybe",
                               "GH200_UVM_STAGE1_THRESHOLD": "2"})  # fmt: skip
    problems = {problem.key: problem for problem in memory_settings(environment).problems}
    assert "GH200_UVM_ACCESS_PATTERN" in problems["GH200_UVM_ACCES_PATTERN"].hint
    assert problems["GH200_UVM_STAGE1_THRESHOLD"].hint == "export GH200_UVM_STAGE1_THRESHOLD=0.10"
    assert "1 or 0" in problems["SIMPLETUNER_GH200_ENABLE_UVM_HINTS"].expected


def test_claiming_leaves_pytorch_what_it_understands() -> None:
    environ = {CUDA: f"max_split_size_mb:512,{SEED}", "PYTORCH_ALLOC_CONF": "use_uvm:True", "OTHER": "use_uvm:True"}
    lines = claim_allocator_options(environ, torch_takes_them=False)
    assert environ == {CUDA: "max_split_size_mb:512", "OTHER": "use_uvm:True"}
    assert len(lines) == 2
    assert claim_allocator_options(environ, torch_takes_them=False) == []


def test_a_patched_pytorch_keeps_its_string() -> None:
    environ = {CUDA: SEED}
    assert claim_allocator_options(environ, torch_takes_them=True) == []
    assert environ == {CUDA: SEED}


def test_an_untouched_string_is_not_rewritten() -> None:
    environ = {CUDA: "max_split_size_mb:512,"}
    assert claim_allocator_options(environ, torch_takes_them=False) == []
    assert environ == {CUDA: "max_split_size_mb:512,"}


def test_a_patched_build_is_known_by_its_library(tmp_path: Path) -> None:
    assert torch_accepts_uvm_options() is False  # the stock build of this environment
    library = tmp_path / "lib" / "libc10_cuda.so"
    library.parent.mkdir()
    assert torch_accepts_uvm_options(tmp_path) is False
    library.write_bytes(b"\x7fELF...max_split_size_mb\0use_uvm\0")
    assert torch_accepts_uvm_options(tmp_path) is False
    library.write_bytes(b"\x7fELF...uvm_oversubscription_ratio\0")
    assert torch_accepts_uvm_options(tmp_path) is True


def test_every_option_has_a_variable() -> None:
    values = {"uvm_oversubscription_ratio": "2", "uvm_access_pattern": "balanced", "uvm_stage1_threshold": "0.2",
              "uvm_stage1_min_bytes": "1024"}  # fmt: skip
    found = memory_settings(Environment({f"GH200_{name.upper()}": value for name, value in values.items()}))
    assert set(found.settings) == set(OPTION_NAMES)
    assert found.problems == ()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("", None),
        ("expandable_segments:True", None),
        ("a:[b:1,c:2], max_split_size_mb: 512 ,x:1", 512 << 20),
        ("max_split_size_mb:x", None),
    ],
)
def test_the_largest_block_that_is_split(text: str, size: int | None) -> None:
    assert max_split_bytes(text) == size
