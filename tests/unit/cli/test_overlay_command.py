"""`gracetune overlay check | run`."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gracetune.cli.main import main
from gracetune.cli.overlay import OverlayName
from gracetune.integrations.upstreams import UPSTREAMS
from unit.integrations.stand_in import RECORDED, build, recorded

SIMPLETUNER = RECORDED / "simpletuner-4.10.1.json"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["overlay", *arguments])
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def checked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code, text, _ = run(capsys, "check", *arguments, "--json")
    value: dict[str, Any] = json.loads(text)
    return code, value


class TestCheck:
    def test_stdout_holds_only_the_documented_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, value = checked(capsys, "simpletuner", "--source", str(SIMPLETUNER))
        assert (code, value["upstream"], value["version"]) == (0, "simpletuner", "4.10.1")
        point = next(one for one in value["points"] if one["name"] == "data.create_backend")
        assert point["status"] == "present"
        assert point["file"] == "simpletuner/helpers/data_backend/builders/local.py"
        assert point["line"] == 18
        assert point["needed_for"]

    def test_a_tree_of_code(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        build(recorded("simpletuner-4.10.1"), tmp_path)
        code, text, _ = run(capsys, "check", "simpletuner", "--source", str(tmp_path))
        assert code == 0
        assert "SimpleTuner of unknown version" in text
        assert "everything needed is there" in text
        assert "simpletuner" not in sys.modules

    def test_exits_1_if_a_needed_point_is_gone(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, text, _ = run(capsys, "check", "simpletuner", "--source", str(RECORDED / "simpletuner-3.3.4.json"))
        assert code == 1
        assert "missing" in text
        assert "does not fit this version" in text
        assert "simpletuner.helpers.audio.load:load_audio_from_video" in text
        code, value = checked(capsys, "simpletuner", "--source", str(RECORDED / "simpletuner-3.3.4.json"))
        assert (code, value["ok"]) == (1, False)

    def test_exits_1_if_a_needed_point_is_out_of_reach(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        build(recorded("simpletuner-4.10.1"), tmp_path)
        (tmp_path / "simpletuner/helpers/training/trainer.py").rename(tmp_path / "simpletuner/trainer.py")
        code, text, _ = run(capsys, "check", "simpletuner", "--source", str(tmp_path))
        assert code == 1
        assert "needed points gone, changed or out of reach" in text
        assert "moved simpletuner/trainer.py" in text
        code, value = checked(capsys, "simpletuner", "--source", str(tmp_path))
        assert (code, value["ok"]) == (1, False)

    def test_ai_toolkit(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, value = checked(capsys, "ai-toolkit", "--source", str(RECORDED / "ai-toolkit-0.2.7.json"))
        assert (code, value["upstream"], value["version"]) == (1, "ai-toolkit", "0.2.7")

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["simpletuner"], ["no distribution 'simpletuner'", "pip install simpletuner"]),
            (["simpletuner", "--source", "/nowhere/at/all"], ["nothing there", "expected", "try"]),
            (["simpletuner", "--source", "/nowhere.json"], ["cannot be read"]),
            (["ai-toolkit", "--source", str(SIMPLETUNER)], ["facts of simpletuner, not of ai-toolkit"]),
        ],
    )
    def test_what_cannot_be_checked_is_an_error(
        self, capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
    ) -> None:
        for output in ([], ["--json"]):
            code, text, error = run(capsys, "check", *arguments, *output)
            assert code == 1
            assert json.loads(text)["ok"] is False if output else text == ""
            assert all(word in error for word in words)

    def test_the_help_names_the_upstreams(self) -> None:
        assert [name.value for name in OverlayName] == [*UPSTREAMS]

    def test_another_upstream_is_a_usage_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, _, error = run(capsys, "check", "kohya")
        assert code == 2
        assert "simpletuner" in error

    def test_imports_no_torch(self) -> None:
        code = (
            "import sys\nfrom gracetune.cli.main import main\n"
            f"try:\n    main(['overlay', 'check', 'simpletuner', '--source', {str(SIMPLETUNER)!r}])\n"
            "except SystemExit as end:\n    sys.exit(end.code or 'torch' in sys.modules)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr

    @pytest.mark.full
    def test_the_installed_upstream_is_checked(self, capsys: pytest.CaptureFixture[str]) -> None:
        try:
            version = importlib.metadata.version("simpletuner")
        except importlib.metadata.PackageNotFoundError:
            pytest.skip("no SimpleTuner in this environment (it needs Python 3.12; scripts/test_upstream_features.sh)")
        code, value = checked(capsys, "simpletuner")
        assert (code, value["version"]) == (0, version)


class TestRun:
    def test_the_error_names_what_to_install(self, capsys: pytest.CaptureFixture[str]) -> None:
        for arguments in (["simpletuner", "--", "train"], ["simpletuner", "--off", "--", "train", "--x", "1"]):
            code, _, error = run(capsys, "run", *arguments)
            assert code == 1
            assert "simpletuner" in error
            assert "pip install" in error

    def test_ai_toolkit_is_started_by_its_own_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, _, error = run(capsys, "run", "ai-toolkit", "--", "job.yaml")
        assert code == 1
        assert "its own command" in error

    def test_passes_arguments_and_exit_code_through(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A stand-in package with upstream's name is started in a separate process."""
        package = tmp_path / "simpletuner"
        package.mkdir()
        (package / "__init__.py").write_text("")
        received = tmp_path / "received.json"
        (package / "__main__.py").write_text(
            f"import json, sys\njson.dump(sys.argv[1:], open({str(received)!r}, 'w'))\nsys.exit(7)\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        code, _, _ = run(capsys, "run", "simpletuner", "--off", "--", "train", "--off", "--json", "a b")
        assert code == 7
        assert json.loads(received.read_text()) == ["train", "--off", "--json", "a b"]
