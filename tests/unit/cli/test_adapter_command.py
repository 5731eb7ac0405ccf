"""`gracetune adapter`: every result and every error, on real files of tiny models."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gracetune.adapters.adapter_files import open_adapter, save
from gracetune.adapters.delta import apply
from gracetune.adapters.state import AdapterState
from gracetune.cli.main import main
from unit.adapters.formats import making
from unit.adapters.formats.predicting import predict

TinyModel = Callable[[str, str], Path]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as done:
        main(["adapter", *map(str, arguments)])
    captured = capsys.readouterr()
    return int(done.value.code or 0), captured.out, captured.err


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    code, out, _ = run(capsys, *arguments, "--json")
    return code, json.loads(out)


def adapter(tiny_model: TinyModel, family: str = "wan", kind: str = "lora", **more: Any) -> AdapterState:
    shapes = making.in_blocks(making.layer_shapes(family, tiny_model))
    return making.state(family, shapes, kind, **more)


@pytest.fixture
def file(tiny_model: TinyModel, tmp_path: Path) -> Path:
    state = adapter(tiny_model, expert="high_noise")
    return save(tmp_path / "mine_high_noise.safetensors", state, "comfyui", torch.bfloat16)


# -- inspect ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", making.FLAVOURS)
@pytest.mark.parametrize("kind", making.ALGORITHMS)
def test_inspect_knows_every_family_and_algorithm(family, kind, tiny_model, tmp_path, capsys) -> None:
    state = adapter(tiny_model, family, kind, rank=2, alpha=3.0)
    path = save(tmp_path / "x.safetensors", state, "lycoris", torch.bfloat16)
    code, found = answer(capsys, "inspect", path)
    report = found["files"][0]
    assert code == 0
    assert (report["family"], report["algorithm"], report["format"]) == (family, kind, "lycoris")
    assert report["adapters"][0]["layers"] == len(state.layers)
    decomposed = kind in ("lora", "dora", "loha", "locon")
    assert report["adapters"][0]["ranks"] == {"2" if decomposed else "full": len(state.layers)}
    assert report["adapters"][0]["alphas"] == {"3" if decomposed else "full": len(state.layers)}
    assert 0 < report["adapters"][0]["norm"]["smallest"] <= report["adapters"][0]["norm"]["largest"]


def test_inspect_prints_norms_of_the_changes(tiny_model, tmp_path, capsys) -> None:
    """The norm is that of the complete weight change, computed without materializing it."""
    from gracetune.adapters import delta
    from gracetune.adapters.statistics import change_norm

    shapes = making.layer_shapes("sdxl", tiny_model)
    for kind, options, rank in (
        ("lora", (), 2),
        ("locon", ("tucker",), 2),
        ("loha", ("tucker",), 2),
        ("loha", (), 1),
        ("loha", (), 7),
        ("lokr", ("both",), 2),
        ("lokr", ("tucker",), 2),
        ("lokr", (), 2),
        ("full_delta", (), 2),
    ):
        for path, layer in making.state("sdxl", shapes, kind, options=options, rank=rank).layers.items():
            expected = float(delta.delta(layer, shapes[path]).double().norm())
            assert change_norm(layer) == pytest.approx(expected, rel=1e-5)


def test_inspect_shows_what_is_empty_or_broken(file, tmp_path, capsys) -> None:
    tensors = load_file(file)
    zero, broken = sorted(key for key in tensors if "lora_B" in key)[:2]
    tensors[zero].zero_()
    tensors[broken][0, 0] = torch.nan
    save_file(tensors, tmp_path / "odd.safetensors")
    code, out, _ = run(capsys, "inspect", tmp_path / "odd.safetensors")
    assert code == 1
    assert zero in out
    assert broken in out
    code, found = answer(capsys, "inspect", tmp_path / "odd.safetensors")
    report = found["files"][0]
    assert (report["not_finite"], report["zero"], report["usable"]) == ([broken], [zero], False)
    (found,) = report["adapters"]
    assert len(found["unchanged_layers"]) == len(found["not_finite_layers"]) == 1
    assert found["unchanged_layers"] != found["not_finite_layers"]


def test_inspect_counts_no_layer_it_rejects(file, tmp_path, capsys) -> None:
    tensors = load_file(file)
    up = sorted(key for key in tensors if "lora_B" in key)[0]
    stem = up.removesuffix(".lora_B.weight")
    whole = len([key for key in tensors if "lora_B" in key])
    for name, alpha in (("three", torch.ones(3)), ("infinite", torch.tensor(torch.inf))):
        save_file(tensors | {f"{stem}.alpha": alpha}, tmp_path / f"{name}.safetensors")
        code, found = answer(capsys, "inspect", tmp_path / f"{name}.safetensors")
        report = found["files"][0]
        assert (code, report["refused_layers"]) == (1, [stem])
        assert report["adapters"][0]["layers"] == whole - 1
    assert "rejected" in run(capsys, "inspect", tmp_path / "three.safetensors")[1]


def test_inspect_a_file_without_a_finite_layer(file, tmp_path, capsys) -> None:
    tensors = {key: value if key.endswith("alpha") else value * torch.nan for key, value in load_file(file).items()}
    save_file(tensors, tmp_path / "nan.safetensors")
    code, out, _ = run(capsys, "inspect", tmp_path / "nan.safetensors")
    assert code == 1
    assert "no layer is finite" in out
    assert "unchanged" not in out


def test_inspect_goes_on_after_a_bad_file(file, tmp_path, capsys) -> None:
    (tmp_path / "bad.pt").write_bytes(b"\x80\x04nonsense")
    code, out, err = run(capsys, "inspect", tmp_path / "bad.pt", file)
    assert code == 1
    assert "pickle" in err
    assert "high_noise" in out
    code, found = answer(capsys, "inspect", tmp_path / "bad.pt", file)
    assert "pickle" in found["files"][0]["error"]
    assert found["files"][1]["stages"] == ["high_noise"]


# -- convert ----------------------------------------------------------------------------------------------------------


def test_convert_there_and_back(file, tmp_path, capsys) -> None:
    code, out, _ = run(capsys, "convert", file, "--to", "kohya")
    existing = tmp_path / "mine_kohya_high_noise.safetensors"
    assert code == 0
    assert str(existing) in out.replace("\n", "")
    code, found = answer(capsys, "convert", existing, "--to", "comfyui", "--output", tmp_path / "back.safetensors")
    assert code == 0
    assert found["written"][0]["stage"] == "high_noise"
    assert (tmp_path / "back.safetensors").read_bytes() == file.read_bytes()


def test_convert_never_overwrites(file, tmp_path, capsys) -> None:
    taken = tmp_path / "taken.safetensors"
    taken.write_text("mine")
    code, _, err = run(capsys, "convert", file, "--to", "kohya", "--output", taken)
    assert (code, taken.read_text()) == (1, "mine")
    assert "a name that is free" in err
    code, _, err = run(capsys, "convert", file, "--to", "comfyui", "--output", file)
    assert code == 1


def test_convert_to_another_precision(file, tmp_path, capsys) -> None:
    assert run(capsys, "convert", file, "--to", "lycoris", "-o", tmp_path / "x.safetensors", "--dtype", "fp16")[0] == 0
    kept = {value.dtype for key, value in load_file(tmp_path / "x.safetensors").items() if not key.endswith("alpha")}
    assert kept == {torch.float16}


def test_convert_rejects_a_lokr_for_diffusers_and_offers_a_lora(tiny_model, tmp_path, capsys) -> None:
    """It is rejected as it is. A LoRA of sufficient rank is exact; for a lower rank the error is printed."""
    state = adapter(tiny_model, "wan", "lokr")
    path = save(tmp_path / "lokr.safetensors", state, "comfyui", torch.float32)
    code, _, err = run(capsys, "convert", path, "--to", "diffusers")
    assert code == 1
    assert "--lora-rank" in err
    code, found = answer(
        capsys, "convert", path, "--to", "diffusers", "--lora-rank", 256, "-o", tmp_path / "all.safetensors"
    )
    assert code == 0
    assert found["written"][0]["relative_error"] < 1e-5
    code, out, _ = run(capsys, "convert", path, "--to", "diffusers", "--lora-rank", 2)
    assert code == 0
    assert "misses" in out
    assert open_adapter(tmp_path / "lokr_diffusers.safetensors").detected.algorithm == "lora"


def test_convert_asks_for_the_base_model_if_the_change_depends_on_its_weights(tiny_model, tmp_path, capsys) -> None:
    path = save(tmp_path / "dora.safetensors", adapter(tiny_model, "wan", "dora"), "kohya", torch.float32)
    code, _, err = run(capsys, "convert", path, "--to", "comfyui", "--lora-rank", 64)
    assert code == 1
    assert "--model" in err
    folder = tiny_model("wan", "t2v-1.3b-2.1")
    arguments = ("convert", path, "--to", "comfyui", "--lora-rank", 64, "--model", folder)
    code, found = answer(capsys, *arguments)
    assert code == 0
    assert found["written"][0]["relative_error"] < 1e-4


def test_convert_of_a_dora_for_comfyui_needs_the_base_model(tiny_model, tmp_path, capsys) -> None:
    """With the base weights it is exact; without them it is rejected with a hint."""
    folder = tiny_model("wan", "t2v-1.3b-2.1")
    state = adapter(tiny_model, "wan", "dora")
    path = save(tmp_path / "dora.safetensors", state, "diffusers", torch.bfloat16)
    code, _, err = run(capsys, "convert", path, "--to", "comfyui")
    assert code == 1
    assert "--model MODEL" in err
    code, found = answer(capsys, "convert", path, "--to", "comfyui", "--model", folder)
    assert (code, found["written"][0]["algorithms"]) == (0, ["dora"])
    written = open_adapter(tmp_path / "dora_comfyui.safetensors").state()
    base = making.denoiser("wan", folder)
    for name, layer in open_adapter(path).state().layers.items():
        weight = base.get_submodule(name).weight
        torch.testing.assert_close(apply(written.layers[name], weight), apply(layer, weight), atol=1e-5, rtol=1e-5)
    code, _, err = run(capsys, "convert", tmp_path / "dora_comfyui.safetensors", "--to", "diffusers")
    assert code == 1
    assert "the file it came from" in err
    code, _, err = run(capsys, "convert", path, "--to", "comfyui", "--model", tiny_model("wan", "ti2v-5b-2.2"),
                       "-o", tmp_path / "other.safetensors")  # fmt: skip
    assert "Traceback" not in err


def test_a_file_with_contradictory_experts_is_rejected(file, tmp_path, capsys) -> None:
    renamed = file.rename(tmp_path / "mine_low_noise.safetensors")
    for more in (("inspect", renamed), ("convert", renamed, "--to", "kohya"),
                 ("verify", renamed, "--flavour", "t2v-14b-2.2")):  # fmt: skip
        code, out, err = run(capsys, *more)
        assert code == 1
        assert "its header says high_noise, its file's name low_noise" in " ".join((out + err).split())


def test_names_from_a_file_do_not_control_the_terminal(file, tmp_path, capsys) -> None:
    tensors = load_file(file) | {"diffusion_model.\x1b[2J[bold]x.lora_A.weight": torch.ones(2, 2)}
    save_file(tensors, tmp_path / "odd.safetensors", {"ss_output_name": "\x1b]0;title\x07"})
    for more in (("inspect",), ("convert", "--to", "kohya"), ("verify", "--flavour", "t2v-1.3b-2.1")):
        code, out, err = run(capsys, more[0], tmp_path / "odd.safetensors", *more[1:])
        assert code == 1
        assert "\x1b" not in out + err
        assert "[bold]x" in "".join((out + err).split())


def test_convert_splits_a_file_of_both_experts(tiny_model, tmp_path, capsys) -> None:
    tensors = {}
    for number, stage in (("1", "high_noise"), ("2", "low_noise")):
        for path, layer in adapter(tiny_model, seed=int(number), expert=stage).layers.items():
            tensors |= {
                f"transformer.transformer_{number}.{path}.{name}": value for name, value in layer.tensors.items()
            }
    save_file(tensors, tmp_path / "both.safetensors")
    code, _, err = run(capsys, "convert", tmp_path / "both.safetensors", "--to", "comfyui")
    assert code == 1
    assert "--split" in err
    taken = tmp_path / "both_comfyui_low_noise.safetensors"
    taken.write_bytes(b"")
    assert run(capsys, "convert", tmp_path / "both.safetensors", "--to", "comfyui", "--split")[0] == 1
    assert not (tmp_path / "both_comfyui_high_noise.safetensors").exists(), "nothing is written if one name is taken"
    taken.unlink()
    code, found = answer(capsys, "convert", tmp_path / "both.safetensors", "--to", "comfyui", "--split")
    assert code == 0
    names = [Path(one["path"]).name for one in found["written"]]
    assert names == ["both_comfyui_high_noise.safetensors", "both_comfyui_low_noise.safetensors"]
    for name, stage in zip(names, ("high_noise", "low_noise"), strict=True):
        assert open_adapter(tmp_path / name).state().expert == stage


@pytest.mark.parametrize("spelled", ["lora_te1_{}.lora_down.weight", "text_encoder_2.{}.lora_A.weight"])
def test_convert_leaves_text_encoders_out(spelled, tiny_model, tmp_path, capsys) -> None:
    clean = save(tmp_path / "clean.safetensors", adapter(tiny_model, "sdxl"), "kohya", torch.float32)
    text = {spelled.format(f"text_model_{number}"): torch.ones(2, 8) for number in range(3)}
    save_file(load_file(clean) | text, tmp_path / "both.safetensors")
    code, _, err = run(capsys, "convert", tmp_path / "both.safetensors", "--to", "kohya")
    assert code == 1
    assert "--without-text-encoders" in err
    arguments = ("convert", tmp_path / "both.safetensors", "--to", "kohya", "--without-text-encoders", "--output")
    code, out, _ = run(capsys, *arguments, tmp_path / "one.safetensors")
    assert code == 0
    assert "3 layers of text encoders left out" in out
    ours, theirs = load_file(tmp_path / "one.safetensors"), load_file(clean)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    code, found = answer(capsys, *arguments, tmp_path / "two.safetensors")
    assert (code, len(found["left_out"])) == (0, 3)
    save_file(text, tmp_path / "only.safetensors")
    code, _, err = run(capsys, "convert", tmp_path / "only.safetensors", "--to", "kohya", "--without-text-encoders")
    assert code == 1
    assert "of text encoders only" in err


def test_convert_merges_into_a_model(tiny_model, tmp_path, capsys) -> None:
    folder = tiny_model("wan", "t2v-14b-2.2")
    state = adapter(tiny_model, "wan", "lokr", expert="low_noise")
    path = save(tmp_path / "x_low_noise.safetensors", state, "comfyui", torch.float32)
    out = tmp_path / "merged"
    code, found = answer(capsys, "convert", path, "--merge-into", folder, "--output", out)
    assert code == 0
    assert found["written"][0]["path"] == str(out / "transformer_2")
    merged = predict("wan", making.CLASSES["wan"].from_pretrained(out / "transformer_2"))
    base = making.denoiser("wan", folder, "transformer_2")
    assert not torch.allclose(merged, predict("wan", base))
    from gracetune.adapters.merge import merge_module

    merge_module(state, base)
    torch.testing.assert_close(merged, predict("wan", base), atol=1e-5, rtol=1e-5)
    code, _, err = run(capsys, "convert", path, "--merge-into", folder, "--output", out)
    assert code == 1, "a second time the folder is taken"
    assert err


@pytest.mark.parametrize(
    ("arguments", "expected_text"),
    [
        ((), "--to"),
        (("--to", "comfyui", "--output", "x.bin"), ".safetensors"),
        (("--to", "comfyui", "--family", "wann"), "--family wan"),
        (("--merge-into", "nowhere"), "--output"),
        (("--merge-into", "x", "--output", "y", "--to", "kohya"), "one of them"),
        (("--merge-into", "x", "--output", "y", "--dtype", "fp16"), "keeps the model's precision"),
        (("--merge-into", "x", "--output", "y", "--split"), "remove --split"),
        (("--to", "comfyui", "--model", "MODEL"), "nothing that needs it"),
        (("--to", "comfyui", "--output", "a" * 300 + ".safetensors"), "too long"),
        (("--merge-into", "/nowhere/at/all", "--output", "y"), "nowhere"),
    ],
)
def test_convert_rejects_unusable_options(
    arguments, expected_text, file, capsys, tiny_model, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [str(tiny_model("wan", "t2v-14b-2.2")) if one == "MODEL" else one for one in arguments]
    code, _, err = run(capsys, "convert", file, *arguments)
    assert code == 1
    assert expected_text in err
    assert "Traceback" not in err


def test_convert_asks_for_alpha_if_the_file_has_no_scale(tiny_model, tmp_path, capsys) -> None:
    """The error says what to type. With --alpha the file is written; --alpha is rejected if the file has a scale."""
    state = adapter(tiny_model, rank=2, alpha=1.0)
    bare = {f"{path}.{name}": one for path, layer in state.layers.items() for name, one in layer.tensors.items()}
    save_file(bare, tmp_path / "bare.safetensors")
    code, _, err = run(capsys, "convert", tmp_path / "bare.safetensors", "--to", "comfyui")
    assert code == 1
    assert "--alpha ALPHA (DiffSynth-Studio trains with alpha = rank, 2 here)" in " ".join(err.split())
    code, _ = answer(capsys, "convert", tmp_path / "bare.safetensors", "--to", "comfyui", "--alpha", "1")
    assert code == 0
    again = open_adapter(tmp_path / "bare_comfyui.safetensors").state()
    assert {layer.scale for layer in again.layers.values()} == {0.5}
    for path, layer in state.layers.items():
        assert torch.equal(again.layers[path].tensors["lora_A.weight"], layer.tensors["lora_A.weight"])
    for given, more, expected_text in (
        ("bare", ("--alpha", "nan"), "a number above 0"),
        ("bare", ("--alpha", "0"), "a number above 0"),
        ("bare", ("--alpha", "2e6"), "at most 1,000,000"),
        ("bare_comfyui", ("--alpha", "2"), "alphas in the file"),
    ):
        code, _, err = run(capsys, "convert", tmp_path / f"{given}.safetensors", "--to", "kohya", *more)
        assert code == 1
        assert expected_text in err
    save_file({f"transformer.{key}": value for key, value in bare.items()}, tmp_path / "published.safetensors")
    code, _, err = run(capsys, "convert", tmp_path / "published.safetensors", "--to", "kohya", "--alpha", "2")
    assert code == 1
    assert "a file that defines its scale" in err


def test_a_changed_file_of_ours_is_rejected(file, tmp_path, capsys) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    changed = tmp_path / "changed_high_noise.safetensors"
    changed.write_bytes(content)
    for more in (("inspect",), ("convert", "--to", "kohya"), ("verify", "--flavour", "t2v-14b-2.2")):
        code, out, err = run(capsys, more[0], changed, *more[1:])
        assert code == 1
        assert "the tensors are not those that gracetune wrote" in " ".join((out + err).split())
    code, found = answer(capsys, "inspect", changed)
    assert found["files"][0]["adapters"], "it is shown all the same"
    code, _ = answer(capsys, "convert", changed, "--to", "kohya", "--ignore-hash")
    assert code == 0
    (again,) = tmp_path.glob("changed_kohya*")
    assert run(capsys, "inspect", again)[0] == 0


def test_a_wrong_hash_of_another_program_is_a_note(file, tmp_path, capsys) -> None:
    save_file(load_file(file), tmp_path / "theirs.safetensors", {"sshs_model_hash": "0" * 64})
    code, out, _ = run(capsys, "inspect", tmp_path / "theirs.safetensors")
    assert code == 0
    assert "note" in out
    assert "sshs_model_hash" in out
    _, out, _ = run(capsys, "verify", tmp_path / "theirs.safetensors", "--flavour", "t2v-14b-2.2")
    assert "sshs_model_hash" in out
    code, found = answer(capsys, "convert", tmp_path / "theirs.safetensors", "--to", "kohya")
    assert code == 0
    assert len(found["notes"]) == 1


# -- verify -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", making.FLAVOURS)
def test_verify_against_a_folder(family, tiny_model, tmp_path, capsys) -> None:
    state = adapter(tiny_model, family, "lokr", expert="high_noise" if family == "wan" else "")
    path = save(tmp_path / "x.safetensors", state, "lycoris", torch.float32)
    code, found = answer(capsys, "verify", path, "--model", tiny_model(family, making.FLAVOURS[family]))
    assert code == 0, found
    assert found["adapters"][0]["matched"] == len(state.layers)
    code, out, _ = run(capsys, "verify", path, "--model", tiny_model(family, making.FLAVOURS[family]))
    assert f"{len(state.layers)} layers" in out


@pytest.mark.full
@pytest.mark.parametrize("family", ["wan", "flux"])
def test_verify_prints_only_its_result(family, tiny_model, tmp_path) -> None:
    """In a separate process, because transformers warns once, at its first import."""
    state = adapter(tiny_model, family, "lora")
    path = save(tmp_path / "x.safetensors", state, "lycoris", torch.float32)
    command = [sys.executable, "-m", "gracetune.cli.main", "adapter", "verify", path, "--json", "--model"]
    done = subprocess.run([*command, tiny_model(family, making.FLAVOURS[family])], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["ok"]


def test_verify_lists_what_does_not_fit(file, tmp_path, capsys) -> None:
    """A tiny adapter against the published model: every layer has another size."""
    code, found = answer(capsys, "verify", file, "--flavour", "t2v-1.3b-2.1")
    report = found["adapters"][0]
    assert (code, found["ok"], report["matched"]) == (1, False, 0)
    assert "the layer has 1536" in report["mismatched"][0]
    assert report["left_out"], "blocks 2 to 29 have no adapter"


def test_verify_a_published_size(tmp_path, capsys) -> None:
    shapes = {f"blocks.{block}.attn1.to_q": (1536, 1536) for block in range(30)}
    good = save(tmp_path / "good.safetensors", making.state("wan", shapes, "lora"), "comfyui", torch.bfloat16)
    assert answer(capsys, "verify", good, "--flavour", "t2v-1.3b-2.1")[0] == 0
    too_many = shapes | {"blocks.30.attn1.to_q": (1536, 1536)}
    bad = save(tmp_path / "bad.safetensors", making.state("wan", too_many, "lora"), "comfyui", torch.bfloat16)
    code, found = answer(capsys, "verify", bad, "--flavour", "t2v-1.3b-2.1")
    assert code == 1
    assert found["adapters"][0]["unexpected"] == ["blocks.30.attn1.to_q"]


# -- the list of bad input -------------------------------------------------------------------------------------


def broken(name: str, file: Path, folder: Path) -> Path:
    tensors, path = dict(load_file(file)), folder / f"{name.replace(' ', '_')}.safetensors"
    first = sorted(key for key in tensors if "lora_B" in key)[0]
    if name == "truncated":
        path.write_bytes(file.read_bytes()[:-10])
        return path
    if name == "pickle":
        torch.save(tensors, path)
        return path
    if name == "wrong rank":
        tensors[first] = torch.cat([tensors[first], tensors[first]], dim=1)
    elif name == "unknown layer":
        tensors["diffusion_model.blocks.0.self_attn.z.lora_B.weight"] = tensors[first].clone()
    elif name == "nan":
        tensors[first] = tensors[first] * torch.nan
    elif name == "alpha missing":
        tensors = {
            f"lycoris_{key.removeprefix('diffusion_model.').replace('.', '_', key.count('.') - 3)}": value
            for key, value in tensors.items()
            if not key.endswith("alpha") and "self_attn.q" in key
        }
    save_file(tensors, path)
    return path


@pytest.mark.parametrize(
    ("name", "expected_text"),
    [
        ("truncated", "bytes"),
        ("pickle", "pickle"),
        ("wrong rank", "rank"),
        ("unknown layer", "blocks.0.self_attn.z"),
        ("nan", "NaN"),
        ("alpha missing", "no alpha"),
    ],
)
@pytest.mark.parametrize("command", ["convert", "verify", "inspect"])
def test_bad_input_is_rejected_by_name(command, name, expected_text, file, tmp_path, capsys) -> None:
    path = broken(name, file, tmp_path)
    more = {"convert": ("--to", "comfyui"), "verify": ("--flavour", "t2v-1.3b-2.1"), "inspect": ()}[command]
    code, out, err = run(capsys, command, path, *more)
    assert code == 1
    assert expected_text in out + err
    assert "Traceback" not in err
    assert not list(tmp_path.glob("*_comfyui*"))


def test_an_adapter_of_another_family(file, tiny_model, capsys) -> None:
    code, _, err = run(capsys, "verify", file, "--model", tiny_model("sdxl", "base-1.0"))
    assert code == 1
    assert "Traceback" not in err
    code, _, err = run(capsys, "verify", file, "--flavour", "dev")
    assert code == 1
    assert "is of flux" in err
    code, _, err = run(capsys, "convert", file, "--to", "kohya", "--family", "sdxl")
    assert code == 1
    assert "layers of sdxl" in err


def test_an_empty_file(tmp_path, capsys) -> None:
    save_file({}, tmp_path / "empty.safetensors")
    for more in ((), ("--family", "wan")):
        code, _, err = run(capsys, "convert", tmp_path / "empty.safetensors", "--to", "kohya", *more)
        assert code == 1
        assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [(), ("--model", "x", "--flavour", "y"), ("--flavour", "t2v-99b")])
def test_verify_rejects_unusable_options(arguments, file, capsys) -> None:
    code, _, err = run(capsys, "verify", file, *arguments)
    assert code == 1
    assert "Traceback" not in err


# -- programs ---------------------------------------------------------------------------------------------------------


def test_convert_chooses_the_format_that_a_program_loads_correctly(tiny_model, tmp_path, capsys) -> None:
    path = save(tmp_path / "x.safetensors", adapter(tiny_model, kind="lokr"), "lycoris", torch.float32)
    for program, format in (("comfyui", "comfyui"), ("musubi", "kohya"), ("lycoris", "lycoris")):
        output = tmp_path / f"for_{program}.safetensors"
        code, found = answer(capsys, "convert", path, "--for", program, "--output", output)
        assert code == 0
        (written,) = found["written"]
        assert written["format"] == open_adapter(output).detected.format == format
        assert written["programs"][program] is None
    _, out, _ = run(capsys, "convert", path, "--for", "musubi")
    assert "loads as it was trained in ComfyUI, musubi-tuner" in out
    code, _, err = run(capsys, "convert", path, "--for", "diffusers")
    assert code == 1
    assert "nothing else" in err
    assert "--for comfyui or musubi or lycoris" in err
    code, _, err = run(capsys, "convert", path, "--for", "sd-scripts")
    assert code == 1
    assert "an adapter for wan, whose files sd-scripts does not read" in err
    code, _, err = run(capsys, "convert", path, "--for", "somebody")
    assert code == 2


def test_convert_for_a_program_with_a_lora_or_a_model(tiny_model, tmp_path, capsys) -> None:
    lokr = save(tmp_path / "x.safetensors", adapter(tiny_model, kind="lokr"), "lycoris", torch.float32)
    code, found = answer(capsys, "convert", lokr, "--for", "diffusers", "--lora-rank", "4")
    assert code == 0
    assert found["written"][0]["format"] == "diffusers"
    state = adapter(tiny_model, kind="dora", expert="high_noise")
    dora = save(tmp_path / "y.safetensors", state, "diffusers", torch.float32)
    code, _, err = run(capsys, "convert", dora, "--for", "comfyui")
    assert code == 1
    assert "with --model MODEL" in err
    model = tiny_model("wan", "t2v-14b-2.2")
    code, found = answer(capsys, "convert", dora, "--for", "comfyui", "--model", model)
    assert code == 0
    assert [found["written"][0][key] for key in ("format", "algorithms")] == ["comfyui", ["dora"]]


@pytest.mark.parametrize(
    ("family", "kind", "options", "format", "alone"),
    [
        ("wan", "dora", (), "kohya", ""),
        ("wan", "diag_oft", (), "kohya", "comfyui"),
        ("wan", "full_delta", (), "kohya", "comfyui"),
        ("wan", "ia3", (), "kohya", ""),
        ("wan", "lokr", ("both",), "kohya", "comfyui"),
        ("qwen_image", "dora", (), "lycoris", "lycoris"),
        ("flux", "full_delta", ("bias",), "lycoris", "lycoris"),
    ],
)
def test_convert_writes_no_file_that_the_program_loads_incorrectly(
    family, kind, options, format, alone, tiny_model, tmp_path, capsys
) -> None:
    state = adapter(tiny_model, family, kind, options=options)
    path = save(tmp_path / "x.safetensors", state, "lycoris", torch.float32)
    code, _, err = run(capsys, "convert", path, "--to", format, "--family", family)
    assert code == 1
    assert "as it was trained" in err
    assert [*tmp_path.iterdir()] == [path]
    if alone:
        assert f"--to {format} --for {alone}" in " ".join(err.split())
        assert run(capsys, "convert", path, "--to", format, "--for", alone, "--family", family, "-o",
                   tmp_path / "y.safetensors")[0] == 0  # fmt: skip


def test_a_difference_of_flux_with_biases_for_comfyui(tiny_model, tmp_path, capsys) -> None:
    """ComfyUI splits matrices and loads no bias into a part, so whole matrices and biases are written."""
    state = adapter(tiny_model, "flux", "full_delta", options=("bias",))
    path = save(tmp_path / "x.safetensors", state, "lycoris", torch.float32)
    assert run(capsys, "convert", path, "--for", "comfyui", "--family", "flux")[0] == 0
    file = tmp_path / "x_comfyui.safetensors"
    assert "diffusion_model.double_blocks.0.img_attn.qkv.diff_b" in load_file(file)
    again = open_adapter(file, "flux").state()
    assert again.layers.keys() == state.layers.keys()
    for name, layer in state.layers.items():
        assert all(torch.equal(layer.tensors[key], again.layers[name].tensors[key]) for key in layer.tensors)
    code, found = answer(capsys, "inspect", file, "--family", "flux")
    assert code == 0
    assert found["files"][0]["programs"]["comfyui"] is None


def test_verify_and_inspect_name_the_programs(tiny_model, tmp_path, capsys) -> None:
    model = tiny_model("wan", "t2v-14b-2.2")
    path = save(tmp_path / "x.safetensors", adapter(tiny_model, kind="lokr"), "kohya", torch.float32)
    code, found = answer(capsys, "verify", path, "--model", model)
    assert code == 0
    assert [name for name, reason in found["programs"].items() if reason is None] == ["comfyui", "musubi"]
    assert found["programs"]["diffusers"] == "it does not read kohya files of wan"
    _, out, _ = run(capsys, "verify", path, "--model", model)
    assert "right in" in out
    assert "ComfyUI, musubi-tuner" in out
    dora = save(tmp_path / "y.safetensors", adapter(tiny_model, kind="dora"), "kohya", torch.float32)
    _, found = answer(capsys, "inspect", dora)
    assert all(found["files"][0]["programs"].values())
    assert "ignores DoRA's magnitudes" in found["files"][0]["programs"]["musubi"]
    tensors = {f"transformer.{key}": value for key, value in load_file(path).items()}
    save_file(tensors, tmp_path / "z.safetensors")
    _, found = answer(capsys, "inspect", tmp_path / "z.safetensors")
    assert found["files"][0]["programs"] == {}  # other names than ours: what reads them is not known
