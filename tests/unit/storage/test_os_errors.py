from __future__ import annotations

import errno
import os
import resource
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.storage.atomic import temporary_name, write_file
from gracetune.storage.os_errors import FileError, explain, explained, problem_of

PLACE = Path("/data/my run")
KNOWN = {
    errno.ENOSPC: "full", errno.EDQUOT: "full", errno.EFBIG: "full", errno.EACCES: "forbidden",
    errno.EPERM: "forbidden", errno.EROFS: "forbidden", errno.ENOTDIR: "in_the_way", errno.EISDIR: "in_the_way",
    errno.ELOOP: "in_the_way", errno.ENOENT: "absent", errno.EIO: "broken", errno.ESTALE: "unreachable",
    errno.ENAMETOOLONG: "limit", errno.EMFILE: "limit",
}  # fmt: skip


def error_of(number: int, filename: Path | None = None) -> OSError:
    return OSError(number, os.strerror(number), *([] if filename is None else [str(filename)]))


@pytest.mark.parametrize("number", KNOWN)
def test_each_error_has_its_own_message(number: int) -> None:
    cause = explain(error_of(number), PLACE)
    assert cause.kind == KNOWN[number]
    assert cause.found == f"{os.strerror(number)} ({errno.errorcode[number]})"
    others = [explain(error_of(other), PLACE).remedy for other in KNOWN if other != number]
    assert cause.remedy not in others


@given(number=st.sampled_from([*errno.errorcode, 0, 9999]), name=st.text(min_size=1, max_size=20))
def test_every_error_has_a_remedy_that_can_be_typed(number: int, name: str) -> None:
    path = PLACE / name.replace("\0", "")
    problem = problem_of(error_of(number, path), "report", PLACE, elsewhere="set output_dir to another disk")
    assert problem.file == str(PLACE)
    assert problem.found.startswith(os.strerror(number))
    assert "{" not in problem.expected + problem.hint.replace(shlex.quote(str(path)), "").replace(str(path), "")
    assert problem.hint.endswith("or set output_dir to another disk; then run the same command again")


def test_the_message_names_the_file_of_the_error() -> None:
    assert explain(error_of(errno.EIO, PLACE / "logs" / "a"), PLACE).found.endswith("(EIO), at logs/a")
    assert explain(error_of(errno.EIO, Path("/elsewhere")), PLACE).found.endswith(", at /elsewhere")
    assert explain(error_of(errno.EIO, PLACE / temporary_name()), PLACE).found.endswith("(EIO)")
    gone = PLACE / temporary_name()
    assert problem_of(error_of(errno.EROFS, gone), "file", gone).file == str(PLACE)
    assert explain(error_of(errno.EROFS, gone), gone).remedy.startswith("look at `findmnt -T '/data/my run'`")
    inside = PLACE / temporary_name() / "state.json"
    assert explain(error_of(errno.EIO, inside), PLACE).found.endswith("(EIO), at state.json")
    assert explain(error_of(errno.EACCES, inside), PLACE).remedy.startswith("`namei -l '/data/my run'`")
    assert "'/data/my run/a file'" in explain(error_of(errno.EACCES, PLACE / "a file"), PLACE).remedy


def test_an_error_without_a_number() -> None:
    assert explain(OSError("the server said no"), PLACE).found == "the server said no"


def test_reading_is_not_called_writing() -> None:
    assert explain(error_of(errno.EACCES), PLACE, access="read").expected == "permission to read"


# -- real errors ------------------------------------------------------------------------------------------------------


def too_large(folder: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        write_file(folder / "a", b"x" * 200)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def too_many(folder: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        write_file(folder / "a", b"x")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def below_a_file(folder: Path) -> None:
    (folder / "file").touch()
    write_file(folder / "file" / "a", b"x")


def onto_a_folder(folder: Path) -> None:
    (folder / "a").mkdir()
    write_file(folder / "a", b"x")


def through_a_circle(folder: Path) -> None:
    (folder / "one").symlink_to(folder / "two")
    (folder / "two").symlink_to(folder / "one")
    write_file(folder / "one" / "a", b"x")


@pytest.mark.parametrize(
    ("fail", "expected"),
    [
        (too_large, "a limit that allows files of this size"),
        (too_many, "fewer open files"),
        (below_a_file, "a folder at each part of the path"),
        (onto_a_folder, "a file, not a folder"),
        (through_a_circle, "links without a cycle"),
        (lambda folder: write_file(folder / "gone" / "a", b"x"), "a file or folder that exists"),
        (lambda folder: write_file(folder / ("a" * 300), b"x"), "a shorter name"),
    ],
)
def test_a_real_error(tmp_path: Path, fail: Callable[[Path], None], expected: str) -> None:
    with pytest.raises(FileError) as caught, explained("samples", tmp_path):
        fail(tmp_path)
    assert caught.value.problem.key == "samples"
    assert caught.value.problem.expected == expected
    assert isinstance(caught.value.__cause__, OSError)


def test_a_folder_that_nobody_may_change(tmp_path: Path) -> None:
    changed = subprocess.run(["chattr", "+i", tmp_path], capture_output=True, text=True, check=False)
    if changed.returncode != 0:
        pytest.skip(f"chattr is not permitted here: {changed.stderr.strip()}")
    try:
        with pytest.raises(FileError, match="lsattr"), explained("samples", tmp_path):
            write_file(tmp_path / "a", b"x")
    finally:
        subprocess.run(["chattr", "-i", tmp_path], check=True)
