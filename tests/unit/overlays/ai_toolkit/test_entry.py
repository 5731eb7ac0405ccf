"""The overlay inside the stand-in: off by default, one block turns it on, removing the folder is the way back."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from gracetune.errors import ConfigError
from unit.overlays.ai_toolkit.checkouts import NAME, Checkout, checked_out

ALL = {
    "memory": {"use_uvm": True},
    "caches": {"latents": "memory", "text": "memory"},
    "automagic": True,
    "pair_files": True,
}
AUTOMAGIC = {"optimizer": "automagic", "lr": 1e-4, "steps": 6}


def methods(checkout: Checkout) -> dict[str, Any]:
    """Every function the overlay may wrap, as it is now."""
    found = {}
    for point in checkout.ours("points").POINTS:
        owner: Any = checkout.module(point.module)
        for step in point.path[:-1]:
            owner = getattr(owner, step)
        found[point.target] = inspect.getattr_static(owner, point.path[-1])
    return found


class TestOff:
    def test_losses_and_files_are_those_of_plain_ai_toolkit(self, tmp_path: Path) -> None:
        seen = []
        for overlay in (False, True):
            with checked_out(tmp_path / f"overlay-{overlay}", overlay=overlay) as checkout:
                process = checkout.run()
                assert (f"extensions.{NAME}" in sys.modules) is overlay
                names = sorted(path.name for path in checkout.output().iterdir())
                tensors = load_file(checkout.output() / "my_job.safetensors")
                seen.append((process.losses, names, {key: tensor.tolist() for key, tensor in tensors.items()}))
        assert seen[0] == seen[1]
        assert seen[0][1] == ["my_job.safetensors", "optimizer.pt"]

    def test_only_the_two_entry_hooks_are_there(self, checkout: Checkout) -> None:
        before = methods(checkout)
        checkout.run()
        changed = {target for target, function in methods(checkout).items() if function is not before[target]}
        points = checkout.ours("points")
        assert changed == {points.INIT.target, points.RUN.target}

    def test_asking_twice_wraps_once(self, checkout: Checkout) -> None:
        checkout.run()
        first = methods(checkout)
        checkout.run()
        assert methods(checkout) == first

    def test_heavy_parts_are_not_even_imported(self, checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in sys.modules if name.startswith(f"extensions.{NAME}.")]:
            monkeypatch.delitem(sys.modules, name)
        checkout.run()
        assert f"extensions.{NAME}.session" not in sys.modules


class TestOn:
    def test_all_features_train_and_every_hook_is_taken_off_again(self, checkout: Checkout) -> None:
        checkout.job(checkout.process())  # the entry hooks
        before = methods(checkout)
        process = checkout.run(ALL, train=AUTOMAGIC)
        assert len(process.losses) == 6
        assert methods(checkout) == before

    def test_hooks_are_taken_off_after_an_error_too_and_the_report_says_so(self, checkout: Checkout) -> None:
        job = checkout.job(checkout.process(ALL, train=AUTOMAGIC))
        before = methods(checkout)

        def fails() -> None:
            raise RuntimeError("disk on fire")

        job.process[0].before_loop = fails
        with pytest.raises(RuntimeError, match="disk on fire"):
            job.run()
        assert methods(checkout) == before
        report = json.loads((checkout.output() / "gracetune_overlay.json").read_text())
        assert report["outcome"] == "stopped by an error"

    def test_a_second_process_without_the_block_runs_plain(self, checkout: Checkout) -> None:
        job = checkout.job(
            checkout.process(ALL, train=AUTOMAGIC), checkout.process(training_folder=str(checkout.root / "second"))
        )
        job.run()
        ours, theirs = (type(process.optimizer).__name__ for process in job.process)
        assert (ours, theirs) == ("StagedAutomagic", "AdamW")

    def test_the_report_tells_what_each_feature_did(self, checkout: Checkout) -> None:
        checkout.run(ALL, train=AUTOMAGIC)
        report = json.loads((checkout.output() / "gracetune_overlay.json").read_text())
        assert (report["version"], report["outcome"]) == (1, "finished")
        features = report["features"]
        assert features["memory"]["available"] is False
        assert features["memory"]["why_not"] == "not available: this run has no GPU whose memory could overflow"
        assert features["caches"]["latents"]["files"] == 3
        assert features["caches"]["latents"]["hits"] == 6
        assert features["caches"]["text"]["files"] == 6
        assert [group["stage"] for group in features["automagic"]["groups"]] == ["high_noise", "low_noise"]
        assert features["pair_files"]["written"] == ["my_job_high_noise.safetensors", "my_job_low_noise.safetensors"]

    def test_what_cannot_be_had_is_said_aloud(self, checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
        checkout.run({"memory": {"use_uvm": True}})
        stated = capsys.readouterr().err
        assert "gracetune: memory: not available: this run has no GPU whose memory could overflow" in stated


class TestRejections:
    def test_a_process_that_does_not_train(self, checkout: Checkout) -> None:
        with pytest.raises(ConfigError) as caught:
            checkout.job({"type": "captioner", "gracetune": ALL})
        assert "config.process[0].gracetune" in str(caught.value)
        assert "a process that trains" in str(caught.value)

    def test_our_name_as_a_type(self, checkout: Checkout) -> None:
        with pytest.raises(ConfigError, match="write `type: diffusion_trainer`"):
            checkout.job({**checkout.process(ALL), "type": "gracetune"})

    def test_before_anything_is_written(self, checkout: Checkout) -> None:
        with pytest.raises(ConfigError):
            checkout.job(checkout.process({"memry": {}}))
        assert not checkout.output().exists()


class TestAnotherVersion:
    def test_every_missing_point_of_a_wanted_feature_is_listed(self, checkout: Checkout) -> None:
        model = checkout.module("extensions_built_in.diffusion_models.wan22.wan22_14b_model").Wan2214bModel
        del model.save_lora
        model.load_lora = lambda self, path: {}
        with pytest.raises(ConfigError) as caught:
            checkout.job(checkout.process({"pair_files": True}))
        text = str(caught.value)
        assert "Wan2214bModel.save_lora" in text
        assert "takes no file" in text
        assert "gracetune overlay check ai-toolkit" in text

    def test_a_point_nobody_asked_for_may_be_missing(self, checkout: Checkout) -> None:
        del checkout.module("extensions_built_in.diffusion_models.wan22.wan22_14b_model").Wan2214bModel.save_lora
        checkout.job(checkout.process({"caches": {"latents": "memory"}}))

    def test_a_missing_module_is_named(self, checkout: Checkout) -> None:
        hooks, points = checkout.ours("hooks"), checkout.ours("points")
        with pytest.raises(ConfigError, match=r"no module toolkit\.gone"):
            hooks.find_all([points.Point("toolkit.gone:f", "memory")])
        with pytest.raises(ConfigError, match=r"no class Gone in toolkit\.optimizer"):
            hooks.find_all([points.Point("toolkit.optimizer:Gone.f", "memory")])

    def test_where_a_run_cannot_be_wrapped_plain_jobs_go_on_and_others_are_rejected(
        self, checkout: Checkout, capsys: pytest.CaptureFixture[str]
    ) -> None:
        trainer = checkout.module("jobs.process.BaseSDTrainProcess").BaseSDTrainProcess
        trainer.run, trainer.begin = property(lambda self: self.begin), trainer.run
        process = checkout.run()
        assert len(process.losses) == 6
        assert "the overlay is OFF and a job with a `gracetune:` block is rejected" in capsys.readouterr().err
        with pytest.raises(ConfigError, match=r"BaseSDTrainProcess\.run"):
            checkout.run(ALL, train=AUTOMAGIC)

    def test_where_no_block_can_be_read_that_is_said(
        self, checkout: Checkout, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        base = checkout.module("jobs.process.BaseProcess").BaseProcess
        made = base.__init__

        def changed(self: Any, number: int, job: Any, settings: Any) -> None:
            made(self, number, job, settings)

        monkeypatch.setattr(base, "__init__", changed)
        assert len(checkout.run(train={"steps": 1}).losses) == 1
        stated = capsys.readouterr().err
        assert "the overlay is OFF and no `gracetune:` block is read" in stated
        assert "which takes no process_id and no config" in stated


class TestHooks:
    def test_what_is_inherited_is_inherited_again(self, checkout: Checkout) -> None:
        hooks, points = checkout.ours("hooks"), checkout.ours("points")
        trainer = checkout.module("extensions_built_in.sd_trainer").DiffusionTrainer
        point = points.Point("extensions_built_in.sd_trainer:DiffusionTrainer.save", "memory", ("step",))
        calls = []

        def around(original: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append((args[1:], kwargs))
            return "ours"

        with hooks.Hooks([(point, around)]):
            assert trainer.save("process", step=3) == "ours"
        assert calls == [((), {"step": 3})]
        assert "save" not in vars(trainer)

    def test_arguments_are_found_however_they_are_given(self, checkout: Checkout) -> None:
        argument = checkout.ours("hooks").argument

        def called(self: Any, file: Any, device: Any = "cpu", **more: Any) -> None: ...

        assert argument(called, "file", ("s", "a"), {}) == "a"
        assert argument(called, "file", ("s",), {"file": "b", "new": 1}) == "b"
        assert argument(called, "device", ("s", "a"), {}) == "cpu"
