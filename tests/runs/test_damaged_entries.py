"""Cache entries that are damaged when a run reads them: encoded again, and the run ends as if nothing had happened."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from faults.commands import Commands
from faults.injection import Fault
from gracetune.cache.encode_passes import EncodeMemoryError
from gracetune.cache.store import DiskStore
from gracetune.cli.train_view import print_result
from gracetune.config.run_config import RunConfig
from gracetune.errors import Problem
from gracetune.train.view import CollectingView
from runs.launched import write_config
from runs.made_runs import TinyModel, changed, config_for, images, run
from runs.test_processes import half, run_two
from runs.test_resume import losses

HELD_OUT = {"loss_every_steps": 2}


def config_of(tiny_model: TinyModel, root: Path, name: str = "out", **cache: Any) -> RunConfig:
    """Two epochs over four images, and one held out; every run of a root has the same caches. Entries are encoded one
    at a time, so that those encoded again have the same bits."""
    data = {"id": "pictures", "path": str(images(root / "pictures", 4)), "resolution": 64.0}
    held_out = {"id": "held", "path": str(images(root / "held", 1)), "resolution": 64.0, "dataset_type": "eval"}
    return config_for(
        "flux", tiny_model, root, output_dir=str(root / name), datasets=[data, held_out], validation=HELD_OUT,
        training={"max_steps": 8},
        cache={"cache_dir": str(root / "cache"), "vae_batch_size": 1, "text_encoder_batch_size": 1, **cache},
    )  # fmt: skip


def flip(store: Path, *, every: int = 1) -> int:
    """Flip one bit of every `every`-th entry. Return how many entries that are."""
    damaged = 0
    with DiskStore.open(store, writable=False) as opened:
        for number, (shard, entry) in enumerate(sorted(opened.stored(), key=lambda pair: pair[1].key)):
            if number % every == 0:
                path = opened.shards_folder / shard
                raw = bytearray(path.read_bytes())
                raw[entry.start] ^= 1
                path.write_bytes(raw)
                damaged += 1
    return damaged


def truncate(store: Path) -> None:
    for path in (store / "shards").iterdir():
        path.write_bytes(path.read_bytes()[:-64])


class Meanwhile(CollectingView):
    """Calls a function after a step."""

    def __init__(self, at: int, do: Callable[[], object]) -> None:
        super().__init__()
        self.at, self.do = at, do

    def on_step(self, step: int, steps: int) -> None:
        if step == self.at:
            self.do()


@pytest.mark.parametrize("kind", ["disk", pytest.param("memory", marks=pytest.mark.full)])
def test_damaged_entries_are_encoded_again(kind: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """Some entries are damaged before the run, those of the held-out image too; then whole files during training."""
    whole = config_of(tiny_model, tmp_path, "whole", vae_cache_type=kind, text_cache_type=kind)
    run(whole)
    cache = tmp_path / "cache"
    damaged = flip(cache / "latents", every=2) + flip(cache / "text", every=2)
    config = whole.model_copy(update={"output_dir": str(tmp_path / "damaged")})

    def more() -> None:
        truncate(cache / "latents")
        flip(cache / "text")

    view = Meanwhile(3, more)
    assert run(config, view).step == 8
    assert losses(config) == losses(whole)
    message = "\n".join([*view.warnings, *view.lines])
    assert damaged > 3
    if kind == "disk":
        assert re.search("cache entr(y is|ies are) damaged", message)
        assert "encoded again; the run continues" in message
    else:
        assert "encoded again: they were damaged on the disk" in message
    for store in ("latents", "text"):  # what was encoded again is whole
        with DiskStore.open(cache / store, writable=False) as opened:
            keys = opened.keys()
            assert all(opened.read(key) for key in keys)


@pytest.mark.full
def test_a_file_that_cannot_be_decoded_any_more_is_left_out(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = config_of(tiny_model, tmp_path)
    config = config.model_copy(
        update={"datasets": tuple(one.model_copy(update={"corrupt_threshold": 0.5}) for one in config.datasets)}
    )

    def ruin() -> None:
        whole = (tmp_path / "pictures" / "03.png").read_bytes()
        (tmp_path / "pictures" / "03.png").write_bytes(whole[: len(whole) // 2])
        flip(tmp_path / "cache" / "latents")

    view = Meanwhile(1, ruin)
    assert run(config, view).step == 8
    assert [line for line in view.warnings if line.startswith("left out, unreadable: 03.png of pictures")]


def test_a_run_that_has_to_stop_is_saved_and_the_same_command_goes_on(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no room for the encoder beside the model. The next start encodes before it loads the model."""
    whole = config_of(tiny_model, tmp_path, "whole")
    run(whole)
    config = whole.model_copy(update={"output_dir": str(tmp_path / "stopped")})

    def reject(*_: Any, **__: Any) -> None:
        raise EncodeMemoryError(Problem("encoding", "out of memory", "memory", "free some"))

    with monkeypatch.context() as patched:
        patched.setattr("gracetune.cache.session.build", reject)
        stopped = run(config, Meanwhile(3, lambda: flip(tmp_path / "cache" / "latents")))
    assert stopped.stop is not None
    assert stopped.stop.kind == "failed"
    assert 3 <= stopped.step < 8
    assert "could not be encoded again: encoding" in stopped.stop.reason
    print_result(Console(), stopped, config, None)
    assert "      found     out of memory\n" in capsys.readouterr().out, "each row of an error is a line"
    view = CollectingView()
    assert run(config, view).step == 8
    assert any("encoded again: they were damaged on the disk" in line for line in view.lines)
    assert losses(config) == losses(whole)


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with Commands() as found:
        yield found


@pytest.mark.full
@pytest.mark.parametrize("operation", ["read", "open"])
def test_a_disk_that_fails_to_read(operation: Any, commands: Commands, tiny_model: TinyModel, tmp_path: Path) -> None:
    whole = config_of(tiny_model, tmp_path, "whole")
    run(whole)
    config = whole.model_copy(update={"output_dir": str(tmp_path / "failing")})
    file = write_config(config, tmp_path / "c.yaml")
    once = Fault(str(tmp_path / "cache/latents/shards/*"), operation, errno.EIO, after=1, times=1)
    ended = commands.run(["train", str(file)], faults=[once])
    assert ended.code == 0, ended.errors
    assert "Traceback" not in ended.errors
    assert losses(config) == losses(whole)


@pytest.mark.full
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_cache_that_is_gone_for_good(number: int, commands: Commands, tiny_model: TinyModel, tmp_path: Path) -> None:
    """The cache cannot be read or written any more. The run is saved, and resumes once the disk is back."""
    whole = changed(config_of(tiny_model, tmp_path, "whole"), "training", max_steps=20)
    run(whole)
    config = whole.model_copy(update={"output_dir": str(tmp_path / "gone")})
    file = write_config(config, tmp_path / "c.yaml")
    reads = tmp_path / "reads"
    below = str(tmp_path / "cache/*")
    assert commands.run(["train", str(file)], faults=[Fault(below, "read", "list")], log=reads).code == 0
    for path in sorted((tmp_path / "gone").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    count = len(reads.read_text().splitlines())
    gone = [Fault(below, "read", number, after=count - 30), Fault(f"{below}/shards/*", "write", number)]
    ended = commands.run(["train", str(file)], faults=gone)
    assert ended.code == 1, ended.errors
    assert "Traceback" not in ended.errors
    assert "stopped and saved at step" in ended.out, ended.errors
    ended = commands.run(["train", str(file)])
    assert ended.code == 0, ended.errors
    assert losses(config) == losses(whole)


@pytest.mark.full
def test_two_processes_repair_what_they_read(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Each repairs its own entries. A file that can no longer be decoded is left out by both."""
    config = config_of(tiny_model, tmp_path, "whole")
    alone = changed(config, "training", max_steps=6, batch_size=2)
    run(alone)
    flip(tmp_path / "cache" / "latents", every=2)
    flip(tmp_path / "cache" / "text")
    stated = run_two([(half(alone, tmp_path / "shared"), {}, None)], tmp_path)
    assert "encoded again; the run continues" in stated
    for mine, other in zip(losses(half(alone, tmp_path / "shared")), losses(alone), strict=True):
        assert mine[2:] == pytest.approx(other[2:], rel=2e-5)
    whole = (tmp_path / "pictures" / "02.png").read_bytes()
    (tmp_path / "pictures" / "02.png").write_bytes(whole[:200] + bytes(100) + whole[300:])  # its header is sound
    flip(tmp_path / "cache" / "latents")
    tolerant = tuple(one.model_copy(update={"corrupt_threshold": 0.5}) for one in alone.datasets)
    damaged = half(alone, tmp_path / "left-out").model_copy(update={"datasets": tolerant})
    stated = run_two([(damaged, {}, None)], tmp_path)
    assert "left out, unreadable: 02.png of pictures" in stated
