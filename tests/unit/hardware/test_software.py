from __future__ import annotations

from pathlib import Path

import pytest

from gracetune.hardware.software import (
    is_at_least,
    parse_minimums,
    parse_torch_version,
    read_software,
    read_torch,
    release_numbers,
)


def test_torch_version_files() -> None:
    text = "from typing import Optional\n__version__ = '2.13.0+cu130'\ndebug = False\ncuda: Optional[str] = '13.0'\n"
    assert parse_torch_version(text + "hip: Optional[str] = None\n") == {"__version__": "2.13.0+cu130", "cuda": "13.0"}
    assert parse_torch_version("__version__ = (") == {}
    assert parse_torch_version("\0") == {}


def test_a_missing_torch_is_no_error(tmp_path: Path) -> None:
    assert read_torch(None) == {}
    assert read_torch(tmp_path) == {}


def test_what_is_read_is_what_torch_says_of_itself() -> None:
    import torch

    found = read_software()
    assert (found.torch, found.torch_cuda) == (torch.__version__, torch.version.cuda)


@pytest.mark.parametrize(
    ("version", "minimum", "enough"),
    [
        ("2.11.0a0+nv25.10", "2.11", True),
        ("2.11", "2.11.0.dev0", True),
        ("2.10.9", "2.11", False),
        ("2.9.1", "2.11", False),
        ("3", "2.11", True),
        ("garbage", "2.11", False),
        ("1.0", "0", True),
    ],
)
def test_versions_compare_by_their_numbers(version: str, minimum: str, enough: bool) -> None:
    assert is_at_least(version, minimum) is enough


def test_release() -> None:
    assert release_numbers("5.22.2rc1") == (5, 22, 2)
    assert release_numbers("v5") == ()


def test_minimums_come_from_requirement_lines() -> None:
    lines = [
        "torch>=2.11.0.dev0",
        "Lycoris_LoRA >= 4.1",
        "rich",
        "wandb>=1; extra == 'wandb'",
        "a<3,>=2; python_version>'3'",
    ]
    assert parse_minimums(lines) == {"torch": "2.11.0.dev0", "lycoris-lora": "4.1", "rich": "0", "a": "2"}
