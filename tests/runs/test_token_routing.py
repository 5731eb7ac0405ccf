"""Token routing in complete runs, started from SimpleTuner's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gracetune.errors import ConfigError
from gracetune.models.token_routing import RoutedBlock
from gracetune.train.view import CollectingView
from runs.made_runs import FLAVOURS, TinyModel, config_for, images, run
from runs.test_commands import gracetune
from runs.test_dialects import trained
from runs.test_resume import Interrupting, assert_same_end, losses

ROUTES = {"wan": (0, -1), "flux": (1, -2), "qwen_image": (-2, -1)}
SIDE = 64
TOKENS = (SIDE // 16) ** 2


def simpletuner_file(family: str, tiny_model: TinyModel, root: Path, **changes: Any) -> Path:
    entries = [{"id": "cats", "type": "local", "instance_data_dir": str(images(root / "pictures")),
                "caption_strategy": "textfile", "resolution": SIDE, "resolution_type": "pixel"}]  # fmt: skip
    (root / "data.json").write_text(json.dumps(entries))
    first, last = ROUTES[family]
    config = {"model_family": family, "model_type": "lora", "lora_rank": 4, "output_dir": str(root / "run"),
              "pretrained_model_name_or_path": str(tiny_model(family, FLAVOURS[family])), "optimizer": "torch-adamw",
              "learning_rate": 1e-3, "max_train_steps": 3, "num_train_epochs": 0, "train_batch_size": 2,
              "mixed_precision": "no", "data_backend_config": str(root / "data.json"), "seed": 5,
              "validation_disable": True, "aspect_bucket_alignment": 16,
              "tread_config": {"routes": [{"selection_ratio": 0.5, "start_layer_idx": first, "end_layer_idx": last}]},
              **changes}  # fmt: skip
    (root / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return root / "config.json"


@pytest.mark.parametrize("family", [*ROUTES])
def test_a_simpletuner_file_with_tread_config_trains(
    family: str,
    tiny_model: TinyModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks in the route get half of the tokens in every training step. No other pass is routed."""
    seen: list[tuple[int, int]] = []
    original = RoutedBlock.run_routed

    def through(self: RoutedBlock, run: Any, inputs: Any, named: Any) -> Any:
        def watched(*given: Any, **others: Any) -> Any:
            seen.append((given[0] if given else others["hidden_states"]).shape[:2])
            return run(*given, **others)

        return original(self, watched, inputs, named)

    monkeypatch.setattr(RoutedBlock, "run_routed", through)
    plain = ["--set", "model.vae_path=null", "--set", f"model.flavour={FLAVOURS[family]}", "--set",
             "model.base_precision=fp32", "--set", "logging.every_steps=1"]  # fmt: skip
    message, events = trained(capsys, str(simpletuner_file(family, tiny_model, tmp_path)), *plain)
    assert message["step"] == 3
    assert set(seen) == {(2, TOKENS // 2)}
    experts = 2 if family == "wan" else 1
    judged = experts == 1  # after three steps of an expert: with two experts, neither has had as many
    passes = 2 * experts + 3 + judged
    assert len(seen) == 2 * passes, (
        "two blocks; two passes of the first batch for each expert, the steps, the self-check"
    )
    routed = [event["loss"] for event in events if event["kind"] == "StepDone"]
    path = simpletuner_file(family, tiny_model, tmp_path, tread_config=None)
    _, events = trained(capsys, str(path), *plain, "--set", f"output_dir={tmp_path / 'plain'}")
    whole = [event["loss"] for event in events if event["kind"] == "StepDone"]
    assert all(one != other for one, other in zip(routed, whole, strict=True))
    assert max(abs(one - other) / other for one, other in zip(routed, whole, strict=True)) < 0.5
    assert any(bool(one.abs().max() > 0) for name, one in load_file(message["files"][0]).items() if "lora_B" in name)


def routed(*routes: tuple[float, int, int]) -> dict[str, Any]:
    return {"routes": [dict(zip(("skip_ratio", "first_block", "last_block"), one, strict=True)) for one in routes]}


@pytest.mark.parametrize("family", ["wan", "flux"])
def test_a_resumed_run_keeps_the_same_tokens(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "training": {"max_steps": 4, "batch_size": 2, "gradient_checkpointing": "full",
                     "token_routing": routed((0.5, 0, 0), (0.25, 1, -1))},
        "checkpoints": {"every_steps": 4},
    }  # fmt: skip
    whole = config_for(family, tiny_model, tmp_path / "whole", **sections)
    run(whole)
    parts = config_for(family, tiny_model, tmp_path / "parts", **sections)
    assert run(parts, Interrupting(at=2)).step == 2
    run(parts)
    assert_same_end(whole, parts, step=4)
    assert losses(whole) == losses(parts)


def test_a_ratio_of_0_is_the_plain_run_bit_for_bit_and_held_out_losses_are_never_routed(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """The learning rate is 0, so that the held-out losses of all runs are those of the same model."""
    own = {"id": "train", "path": str(images(tmp_path / "train")), "resolution": 64.0}
    held_out = {"id": "held", "path": str(images(tmp_path / "held", 2)), "resolution": 64.0, "dataset_type": "eval"}
    found = {}
    for name, routing in {"plain": {}, "zero": routed((0.0, 0, -1)), "half": routed((0.5, 0, -1))}.items():
        config = config_for(
            "qwen_image", tiny_model, tmp_path / name, datasets=[own, held_out], validation={"loss_every_steps": 2},
            training={"max_steps": 2, "token_routing": routing}, optimizer={"lr": 0.0},
            checkpoints={"every_steps": 2},
        )  # fmt: skip
        view = CollectingView()
        run(config, view)
        log = (Path(config.output_dir) / "logs" / "events.jsonl").read_text().splitlines()
        held = [event["losses"] for event in map(json.loads, log) if event["kind"] == "HeldOutLoss"]
        found[name] = (losses(config), held)
    assert found["zero"] == found["plain"]
    assert found["half"][1] == found["plain"][1]
    assert found["half"][1], "there are held-out losses"
    assert found["half"][0] != found["plain"][0]


@pytest.mark.parametrize(
    ("family", "routing", "expected"),
    [
        ("flux", routed((0.5, 2, 9)), "one of the model's 4 blocks: 0 to 3, or -4 to -1"),
        ("wan", routed((0.5, 0, 1), (0.5, 1, 1)), "without overlaps"),
    ],
)
def test_routes_the_model_cannot_have_are_rejected_before_anything_is_loaded(
    family: str, routing: dict[str, Any], expected: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    config = config_for(family, tiny_model, tmp_path, training={"max_steps": 1, "token_routing": routing})
    with pytest.raises(ConfigError) as error:
        run(config)
    (problem,) = error.value.problems
    assert problem.key.startswith("training.token_routing.routes[")
    assert expected in problem.expected
    assert not [*(tmp_path / "out").rglob("shards")], "nothing was encoded"


def test_a_family_without_routes_is_rejected_by_the_check(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_for("sdxl", tiny_model, tmp_path)
    document = config.model_dump(mode="json", exclude_unset=True)
    document |= {"gracetune": 1}
    document["training"]["token_routing"] = routed((0.5, 0, 1))
    (tmp_path / "config.json").write_text(json.dumps(document))
    assert gracetune("config", "check", str(tmp_path / "config.json")) != 0
    stated = capsys.readouterr()
    text = " ".join((stated.out + stated.err).split())
    assert "training.token_routing.routes" in text
    assert "only tokens of wan, qwen_image, flux can skip blocks" in text


@pytest.mark.full
def test_masked_samples_keep_their_tokens_in_a_whole_run(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Half of each image is masked: at a ratio of 0.9 that half goes through the blocks."""
    from PIL import Image

    folder = images(tmp_path / "pictures")
    (tmp_path / "masks").mkdir()
    for file in folder.glob("*.png"):
        mask = Image.new("L", (SIDE, SIDE), 0)
        mask.paste(255, (0, 0, SIDE, SIDE // 2))
        mask.save(tmp_path / "masks" / file.name)
    data = [{"id": "d", "path": str(folder), "resolution": 64.0, "mask": {"path": str(tmp_path / "masks")}}]
    training = {"max_steps": 2, "token_routing": routed((0.9, 0, -1))}
    config = config_for("flux", tiny_model, tmp_path, datasets=data, training=training)
    view = CollectingView()
    assert run(config, view).step == 2
    assert all(loss > 0 for _, _, loss, _ in losses(config))


@pytest.mark.full
@pytest.mark.parametrize("family", ["wan", "flux", "qwen_image"])
def test_a_compiled_routed_run_learns_what_an_eager_one_learns(
    family: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    found = []
    for compiled in ("off", "on"):
        training = {"max_steps": 2, "batch_size": 2, "compile": compiled, "token_routing": routed((0.5, 0, -1))}
        config = config_for(family, tiny_model, tmp_path / compiled, training=training)
        torch._dynamo.reset()
        run(config)
        found.append(losses(config))
    torch._dynamo.reset()
    for eager, compiled_ in zip(*found, strict=True):
        assert eager[2:] == pytest.approx(compiled_[2:], rel=1e-4)
