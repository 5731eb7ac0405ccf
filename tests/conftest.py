"""One environment for every test, whatever shell they are started from."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from servers.hub import HubServer

# A busy machine is no failing test. Under CI hypothesis loads a profile of its own, without deadlines and repeatable.
if not os.environ.get("CI"):
    settings.register_profile("patient", deadline=None)
    settings.load_profile("patient")

# Two threads on two busy cores made one sample 50 times slower; must be set before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Every model and dataset in the tests is made on the spot: a download attempt is a mistake and should fail at once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
# Help texts and tables are compared as text: one width, no colours.
os.environ["COLUMNS"] = "120"
os.environ["NO_COLOR"] = "1"
os.environ.pop("FORCE_COLOR", None)
# What scripts/setup_gh200_env.sh exports steers a run; here it would steer the tests.
for _name in [*os.environ]:
    if _name.startswith("GH200_UVM_") or _name in (
        "ACCELERATE_MIXED_PRECISION",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "SIMPLETUNER_GH200_ENABLE_UVM_HINTS",
    ):
        del os.environ[_name]


# Taken out of the environment: a process that a test starts runs everything in its arguments.
_HALF = os.environ.pop("TEST_HALF", "")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Under `make test` and `make test-full`, the files of the other half; see halves.py."""
    if not _HALF or collection_path.suffix != ".py" or collection_path.name == "conftest.py":
        return None
    from halves import half

    lane, _, number = _HALF.partition("-")
    return collection_path not in half(lane, int(number)) or None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("marked gpu: torch sees no CUDA GPU here")


_MODULES_SEEN = pytest.StashKey[int]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """Take what stays until the end, like imported modules, out of every later garbage collection.

    A run collects garbage when it closes its encoders. In a process that has torch, diffusers, transformers and all
    the tests loaded, that takes longer than a tiny run.
    """
    yield
    imported = len(sys.modules) - item.config.stash.get(_MODULES_SEEN, 0)
    last_of_its_file = nextitem is None or nextitem.path != item.path
    if item.get_closest_marker("gpu") is None and (imported > 20 or last_of_its_file):
        gc.collect()
        gc.freeze()
        item.config.stash[_MODULES_SEEN] = len(sys.modules)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """`tiny_model(family, flavour)`: the folder of that tiny model, built once for all tests. Do not write into it."""
    from gracetune.models.tiny import cached

    root = tmp_path_factory.mktemp("tiny-models")
    return lambda family, flavour: cached(family, flavour, root)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub on this machine, and an environment that leads to it. No user is logged in."""
    from huggingface_hub import constants

    from servers.hub import hub_server

    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # its storage is no part of this hub
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with hub_server() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture(scope="session")
def tiny_v_prediction(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny SDXL that predicts v, as noise schedules with a signal-free end need it."""
    from gracetune.models.sdxl.tiny import build_tiny

    folder = tmp_path_factory.mktemp("tiny-v-prediction") / "model"
    return build_tiny(folder, "base-1.0", prediction="v_prediction", zero_terminal_snr=True)
