"""Finding an upstream's code in whatever a user points at, and its version."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from gracetune.integrations.points import Upstream
from gracetune.integrations.trees import UpstreamError, open_tree, version_of
from gracetune.integrations.upstreams import AI_TOOLKIT, SIMPLETUNER
from unit.integrations.stand_in import build, recorded


def version(source: Path | None, upstream: Upstream = SIMPLETUNER) -> str | None:
    with open_tree(upstream, source) as (tree, _):
        return version_of(tree, upstream)


def package(root: Path, *, expected_text: str | None = None) -> Path:
    (root / "simpletuner/helpers").mkdir(parents=True)
    (root / "simpletuner/__init__.py").write_text(
        "" if expected_text is None else f"x = 1\n__version__ = {expected_text!r}\n"
    )
    return root


def dist_info(root: Path, name: str, version: str) -> None:
    folder = root / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n\nText\nVersion: 9\n")


def wheel(folder: Path, file: Path) -> Path:
    with zipfile.ZipFile(file, "w") as archive:
        for one in sorted(folder.rglob("*")):
            if one.is_file():
                archive.write(one, one.relative_to(folder).as_posix())
    return file


class TestWhereItLies:
    def test_a_checkout(self, tmp_path: Path) -> None:
        assert version(package(tmp_path, expected_text="4.1.0")) == "4.1.0"

    def test_a_checkout_with_its_code_in_src(self, tmp_path: Path) -> None:
        package(tmp_path / "src", expected_text="4.2.0")
        assert version(tmp_path) == "4.2.0"

    def test_the_package_itself(self, tmp_path: Path) -> None:
        assert version(package(tmp_path, expected_text="4.3.0") / "simpletuner") == "4.3.0"

    def test_an_environment(self, tmp_path: Path) -> None:
        package(tmp_path / "lib/python3.12/site-packages", expected_text="4.4.0")
        assert version(tmp_path) == "4.4.0"

    def test_a_wheel(self, tmp_path: Path) -> None:
        root = package(tmp_path / "code")
        (root / "simpletuner/helpers/one.py").write_text("x = 1\n")
        dist_info(root, "simpletuner", "4.5.0")
        file = wheel(root, tmp_path / "simpletuner-4.5.0-py3-none-any.whl")
        assert version(file) == "4.5.0"
        with open_tree(SIMPLETUNER, file) as (tree, _):
            assert sorted(tree.files("simpletuner")) == ["simpletuner/__init__.py", "simpletuner/helpers/one.py"]
            assert tree.read("simpletuner/helpers/one.py") == b"x = 1\n"

    def test_ai_toolkit_in_a_distribution_of_that_name(self, tmp_path: Path) -> None:
        build(recorded("ai-toolkit-0.2.7"), tmp_path / "ostris_ai_toolkit")
        dist_info(tmp_path, "ostris_ai_toolkit", "0.2.7")
        assert version(tmp_path, AI_TOOLKIT) == "0.2.7"

    def test_what_is_installed_here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        package(tmp_path)
        dist_info(tmp_path, "simpletuner", "4.6.0")
        monkeypatch.syspath_prepend(str(tmp_path))
        assert version(None) == "4.6.0"
        assert "simpletuner" not in sys.modules

    def test_what_is_installed_here_from_a_checkout(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        dist_info(tmp_path / "site", "simpletuner", "4.7.0")
        package(tmp_path / "checkout", expected_text="4.7.1")
        for folder in ("site", "checkout"):
            monkeypatch.syspath_prepend(str(tmp_path / folder))
        assert version(None) == "4.7.1"
        assert "simpletuner" not in sys.modules

    def test_what_lies_in_an_environment_inside_a_checkout_is_not_its_code(self, tmp_path: Path) -> None:
        root = build(recorded("ai-toolkit-public-files"), tmp_path)
        for folder in ("toolkit/venv", "toolkit/.hidden", "toolkit/node_modules", "toolkit/__pycache__"):
            (root / folder).mkdir()
            (root / folder / "theirs.py").write_text("def get_optimizer(): ...\n")
        with open_tree(AI_TOOLKIT, root) as (tree, _):
            assert not [file for file in tree.files("toolkit") if file.endswith("theirs.py")]

    def test_a_link_that_goes_in_circles_is_not_followed(self, tmp_path: Path) -> None:
        root = package(tmp_path)
        (root / "simpletuner/helpers/again").symlink_to(root / "simpletuner")
        with open_tree(SIMPLETUNER, root) as (tree, _):
            assert list(tree.files("simpletuner")) == ["simpletuner/__init__.py"]


class TestVersion:
    def test_what_the_code_says_comes_first(self, tmp_path: Path) -> None:
        dist_info(package(tmp_path, expected_text="4.9.9"), "simpletuner", "4.1.0")
        assert version(tmp_path) == "4.9.9"

    def test_metadata_of_others_is_not_its(self, tmp_path: Path) -> None:
        dist_info(package(tmp_path), "simpletuner_tools", "1.0")
        assert version(tmp_path) is None

    def test_a_project_file_says_it(self, tmp_path: Path) -> None:
        package(tmp_path)
        (tmp_path / "pyproject.toml").write_text('[project]\nname = "simpletuner"\nversion = "4.0.1"\n')
        assert version(tmp_path) == "4.0.1"

    @pytest.mark.parametrize(
        "text",
        ['[project]\nname = "other"\nversion = "1"\n', "[project", 'project = "x"\n',
         '[project]\nname = "simpletuner"\ndynamic = ["version"]\n'],
    )  # fmt: skip
    def test_unknown_stays_unknown(self, text: str, tmp_path: Path) -> None:
        package(tmp_path)
        (tmp_path / "simpletuner/__init__.py").write_text("__version__ = compute()\n")
        (tmp_path / "pyproject.toml").write_text(text)
        assert version(tmp_path) is None

    def test_a_module_that_is_no_python_says_nothing(self, tmp_path: Path) -> None:
        package(tmp_path)
        (tmp_path / "simpletuner/__init__.py").write_bytes(b"\xff(")
        assert version(tmp_path) is None


class TestRejections:
    def rejected(self, source: Path | None, *words: str, upstream: Upstream = SIMPLETUNER) -> None:
        with pytest.raises(UpstreamError) as error, open_tree(upstream, source):
            pass
        for word in ("found", "expected", "try", *words):
            assert word in str(error.value)

    def test_nothing_there(self, tmp_path: Path) -> None:
        self.rejected(tmp_path / "absent", "nothing there")

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        self.rejected(tmp_path / "empty", "an empty folder", "simpletuner/helpers/")

    def test_a_folder_of_something_else(self, tmp_path: Path) -> None:
        for name in ("a", "b", "c", "d", "e", "f"):
            (tmp_path / "other" / name).mkdir(parents=True)
        self.rejected(tmp_path / "other", "a folder with a, b, c, d and 2 more")

    def test_another_package_beside_it(self, tmp_path: Path) -> None:
        package(tmp_path, expected_text="4.0.0")
        (tmp_path / "torch").mkdir()
        self.rejected(tmp_path / "torch", "an empty folder")

    def test_a_file_that_is_no_wheel(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("text")
        self.rejected(tmp_path / "file", "neither a folder nor a wheel")

    def test_a_cut_off_wheel(self, tmp_path: Path) -> None:
        file = wheel(package(tmp_path / "code", expected_text="4.0.0"), tmp_path / "cut.whl")
        file.write_bytes(file.read_bytes()[:-30])
        self.rejected(file, "neither a folder nor a wheel")

    def test_a_wheel_of_something_else(self, tmp_path: Path) -> None:
        (tmp_path / "code/other").mkdir(parents=True)
        (tmp_path / "code/other/__init__.py").write_text("")
        self.rejected(wheel(tmp_path / "code", tmp_path / "other.whl"), "an archive with other")

    def test_not_installed(self) -> None:
        self.rejected(None, "no distribution 'simpletuner'", "--source", "pip install simpletuner")
        self.rejected(None, "no distribution", "checkout", upstream=AI_TOOLKIT)

    def test_a_damaged_file_in_a_wheel_is_that_files_fault(self, tmp_path: Path) -> None:
        root = package(tmp_path / "code", expected_text="4.0.0")
        (root / "simpletuner/helpers/one.py").write_text("x = 1\n")
        file = wheel(root, tmp_path / "bad.whl")
        data = file.read_bytes()
        at = data.index(b"__version__ =")
        file.write_bytes(data[:at] + b"X" + data[at + 1 :])
        with open_tree(SIMPLETUNER, file) as (tree, _), pytest.raises(OSError, match="damaged"):
            tree.read("simpletuner/__init__.py")

    @pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
    def test_a_name_no_file_can_have(self, name: str) -> None:
        self.rejected(Path(name), "nothing")
