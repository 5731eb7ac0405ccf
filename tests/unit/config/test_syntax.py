from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.config.syntax import parse_env, read_document
from gracetune.config.yaml_syntax import one_line_yaml, parse_scalar
from gracetune.errors import ConfigError, Problem


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def only_problem(path: Path) -> Problem:
    with pytest.raises(ConfigError) as caught:
        read_document(path)
    (problem,) = caught.value.problems
    assert problem.file == str(path)
    return problem


def test_json_forgives_comments_and_trailing_commas_but_not_inside_text(tmp_path: Path) -> None:
    path = write(tmp_path, "a.json", '{"a": "// kept, ]", /* gone */ "b": [1, 2,], // gone\n "c": {"d": 1,},}')
    assert read_document(path).data == {"a": "// kept, ]", "b": [1, 2], "c": {"d": 1}}


@pytest.mark.parametrize(
    ("name", "text", "location"),
    [
        ("a.json", '{\n  "a": 1\n  "b": 2\n}', "line 3, column 3"),
        ("a.json", '{"a": // gone\n  }', "line 2, column 3"),
        ("a.yaml", "a: 1\n b: 2\n", "line 2, column 3"),
        ("a.toml", "a = 1\nb = \n", "line 2, column 5"),
        ("a.toml", 'a = "', "end of file"),
        ("a.env", "A=1\nnot an assignment\n", "line 2, column 1"),
        ("a.env", "A='open\n", "line 1, column 3"),
    ],
)
def test_broken_text_is_placed(tmp_path: Path, name: str, text: str, location: str) -> None:
    assert only_problem(write(tmp_path, name, text)).key == location


@pytest.mark.parametrize(
    ("name", "text"), [("a.json", '{"a": 1, "b": {"x": 1, "x": 2}}'), ("a.yaml", "b:\n  x: 1\n  x: 2\n")]
)
def test_a_key_given_twice_is_rejected(tmp_path: Path, name: str, text: str) -> None:
    problem = only_problem(write(tmp_path, name, text))
    assert problem.key == "x"
    assert "twice" in problem.found


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.json", '{"x": 1,\n "b": {"x": 1},\n "c": "\\"x\\": {",\n "\\u0078": 2}', 4),
        ("a.json", '[{"x": 1}, // "x": 0\n {"x": 1,\n\n "x": {}}]', 4),
        ("a.yaml", "? [a, b]\n: 1\nx: 1\ny: 2\nx: 3\n", 5),
    ],
)
def test_the_second_of_two_equal_keys_is_placed(tmp_path: Path, name: str, text: str, line: int) -> None:
    problem = only_problem(write(tmp_path, name, text))
    assert (problem.key, problem.found) == ("x", f"the key twice, again at line {line}")


def test_a_key_beside_a_merge_overrides_it(tmp_path: Path) -> None:
    text = "a:\n- &d {folder_path: x, resolution: 512}\n- {<<: *d, resolution: 1024}\n"
    assert read_document(write(tmp_path, "a.yaml", text)).data["a"][1] == {"folder_path": "x", "resolution": 1024}
    text = "x: &x {k: 1}\no: {a: &a {<<: *x, k: 2}}\nb: {<<: [*a, *x], k: 3}\n"
    data = read_document(write(tmp_path, "b.yaml", text)).data
    assert (data["o"]["a"], data["b"]) == ({"k": 2}, {"k": 3})
    twice = "x: &x {k: 1}\na: {<<: *x, k: 2, k: 3}\n"
    assert "twice" in only_problem(write(tmp_path, "c.yaml", twice)).found


def test_yaml_merge_keys_are_not_duplicates(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "base: &b {x: 1}\nother: {<<: *b, y: 2}\n")
    assert read_document(path).data["other"] == {"x": 1, "y": 2}


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.e-4", ".5e1", "+1e4", "-2e-3"])
def test_yaml_exponents_are_numbers(text: str) -> None:
    assert parse_scalar(text) == float(text)
    assert isinstance(parse_scalar(text), float)


@pytest.mark.parametrize("text", ["e4", "1e", "v1e5", "1e-4x"])
def test_text_that_only_resembles_a_number_stays_text(text: str) -> None:
    assert parse_scalar(text) == text


def test_env_files(tmp_path: Path) -> None:
    path = write(tmp_path, "a.env", "# comment\nexport A='x y'  # why\n\nB=\"1\"\nC=\n")
    assert read_document(path).data == {"A": "x y", "B": "1", "C": ""}


def test_env_files_add_to_what_they_have(tmp_path: Path) -> None:
    path = write(tmp_path, "a.env", "A=x\nA+=' $A'\nB=\"$A ${C}\"\nC+=1\n")
    assert read_document(path).data == {"A": "x $A", "B": "$A ${C}", "C": "1"}
    assert parse_env(path.read_text(), "a.env", {"C": "c"}.get) == {"A": "x $A", "B": "x $A c", "C": "1"}


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("a.yaml", "a:\n\tb: 1\n", "spaces"),
        ("a.yaml", "a: 1\n---\nb: 2\n", "one document"),
        ("a.env", "A = 1\n", "NAME=VALUE"),
    ],
)
def test_what_to_do_about_common_mistakes(tmp_path: Path, name: str, text: str, hint: str) -> None:
    assert hint in only_problem(write(tmp_path, name, text)).hint


@pytest.mark.parametrize("name", ["a.json", "a.yaml", "a.toml", "a.env"])
def test_an_empty_file_holds_nothing(tmp_path: Path, name: str) -> None:
    assert not read_document(write(tmp_path, name, "\n")).data


def test_why_a_file_cannot_be_read_is_said(tmp_path: Path) -> None:
    loop = tmp_path / "loop.json"
    loop.symlink_to(loop)
    assert "leads back to itself" in only_problem(loop).hint
    assert "shorten" in only_problem(tmp_path / f"{'x' * 300}.json").hint


ODD_YAML = [
    "a: !!timestamp soon", "a: !!bool maybe", 'a: !!int ""', 'a: !!float ""', "a: !!int x", "a: !!set {x, y}",
    "a: !!binary aGk=", "a: !!python/name:os.system x", "? {a: 1}\n: 2", "a: &a {b: *a}", "a: &a [*a]",
    "a: !!timestamp [1]", "a: .nan", "a: -.inf", "a: 1e999", '"\\ud800": 1', 'a: "\\udfff"', "yes: 1",
    f"a: 0x{'f' * 2000}", f"a: {'9' * 5000}", f"a: {'1:' * 4000}1", "a: 2025-13-40", "a: {<<: 3}",
]  # fmt: skip


@pytest.mark.parametrize("text", ODD_YAML)
def test_odd_yaml_is_plain_data_or_an_error(tmp_path: Path, text: str) -> None:
    try:
        document = read_document(write(tmp_path, "a.yaml", text))
    except ConfigError as error:
        assert all(problem.found and problem.expected and problem.hint for problem in error.problems)
    else:
        json.dumps(document.data, allow_nan=False).encode()
        assert document.problems or document.data == {"a": text.rpartition(" ")[2]}


def test_numbers_of_ten_thousand_digits(tmp_path: Path) -> None:
    digits = "9" * 10_000
    for name, text in (("a.toml", f"a = {digits}"), ("a.json", f'{{"a": {digits}}}'), ("a.yaml", f"a: {digits}")):
        assert "digits" in only_problem(write(tmp_path, name, text)).found


def test_dates_are_the_text_they_are_written_as(tmp_path: Path) -> None:
    assert read_document(write(tmp_path, "a.yaml", "a: 2025-01-01\n")).data == {"a": "2025-01-01"}
    assert read_document(write(tmp_path, "a.toml", "a = 2025-01-01\n")).data == {"a": "2025-01-01"}
    assert parse_scalar("2025-01-01") == "2025-01-01"


def test_a_few_aliases_cannot_fill_the_memory(tmp_path: Path) -> None:
    values = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    values += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert "more than" in only_problem(write(tmp_path, "values.yaml", "\n".join(values))).found
    merges = ["a0: &a0 {x: 1}"]
    merges += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 12)]
    assert "more than" in only_problem(write(tmp_path, "merges.yaml", "\n".join(merges))).found


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert only_problem(tmp_path / "missing.json").found == "no file there"
    assert "does not exist" in only_problem(tmp_path / "no folder" / "a.json").hint
    folder = tmp_path / "folder.json"
    folder.mkdir()
    assert only_problem(folder).found == "a directory"
    photos = tmp_path / "my photos"
    photos.mkdir()
    assert only_problem(photos).hint.endswith(f"gracetune init '{photos}'")
    (tmp_path / "my photos.yaml").touch()
    assert only_problem(photos).hint.endswith("my photos.yaml")
    (photos / "config.yaml").touch()
    assert only_problem(photos).hint.endswith(str(photos / "config.yaml"))
    latin = tmp_path / "latin.json"
    latin.write_bytes('{"a": "é"}'.encode("latin-1"))
    assert "UTF-8" in only_problem(latin).expected
    assert ".json" in only_problem(write(tmp_path, "a.txt", "{}")).expected


def test_absurd_nesting_is_an_error_not_a_crash(tmp_path: Path) -> None:
    assert "nesting" in only_problem(write(tmp_path, "deep.json", "[" * 100_000 + "]" * 100_000)).found
    assert "nesting" in only_problem(write(tmp_path, "deep.yaml", "[" * 20_000 + "]" * 20_000)).found


@given(st.sampled_from([".json", ".yaml", ".toml", ".env"]), st.text(max_size=200))
def test_any_text_parses_or_is_a_config_error(tmp_path_factory: pytest.TempPathFactory, suffix: str, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / f"any{suffix}"
    path.write_text(text, encoding="utf-8", newline="")
    try:
        read_document(path)
    except ConfigError as error:
        assert all(problem.found and problem.expected and problem.hint for problem in error.problems)


@pytest.mark.parametrize(
    "text", ["1e5", "=", "a\nb", "\x85", "yes", "~", "<<", "- a", "a: b # c", "{}", "'", '"', " x ", "é", "\u2028"]
)
def test_awkward_text_survives_yaml(text: str) -> None:
    assert "\n" not in one_line_yaml(text)
    assert parse_scalar(one_line_yaml(text)) == text


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(PLAIN)
def test_any_plain_value_survives_yaml(value: object) -> None:
    assert parse_scalar(one_line_yaml(value)) == value
