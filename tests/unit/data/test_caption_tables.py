"""Caption tables in common formats."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from gracetune.config.dataset_config import Captions, CaptionTable
from gracetune.data.caption_tables import CaptionEntry, TableKind, load_table, read_table
from gracetune.data.captions import WrittenCaption, open_captions
from gracetune.data.errors import DataError
from unit.data.media.generated import DictBackend

ROOT = "/data/cats"


def found(data: str | bytes, kind: TableKind, file: str, **options: Any) -> CaptionEntry | None:
    table = CaptionTable(**{"path": f"captions.{kind}", **options})
    return read_table(data.encode() if isinstance(data, str) else data, kind, table, ROOT).find(file)


CSV = 'filename,caption,w\na.jpg,"a cat, asleep",3\nsub/b.jpg,a dog,4\n'
JSONL = (
    '{"filename": "a.jpg", "caption": "a cat, asleep"}\n\n{"filename": "sub/b.jpg", "caption": ["a dog", "a hound"]}\n'
)


def test_csv() -> None:
    assert found(CSV, "csv", "a.jpg") == CaptionEntry(("a cat, asleep",))
    assert found(CSV, "csv", "sub/b.jpg") == CaptionEntry(("a dog",))
    assert found(CSV, "csv", "b.jpg") is None
    assert found("\ufeff" + CSV, "csv", "a.jpg") == CaptionEntry(("a cat, asleep",))
    assert found(CSV.replace(",", "\t").replace("\t asleep", ", asleep"), "csv", "a.jpg", path="c.TSV") == CaptionEntry(
        ("a cat, asleep",)
    )


def test_a_quoted_caption_may_have_lines() -> None:
    assert found('filename,caption\na.jpg,"a cat\nasleep"\n', "csv", "a.jpg") == CaptionEntry(("a cat\nasleep",))


def test_jsonl() -> None:
    assert found(JSONL, "jsonl", "a.jpg") == CaptionEntry(("a cat, asleep",))
    assert found(JSONL, "jsonl", "sub/b.jpg") == CaptionEntry(("a dog", "a hound"))
    odd = json.dumps({"filename": "a.jpg", "caption": "a\u2028b"}, ensure_ascii=False)
    assert found(odd, "jsonl", "a.jpg") == CaptionEntry(("a\u2028b",))


@pytest.mark.parametrize("content", [
    {"a.jpg": "a cat"},
    {"a.jpg": {"caption": "a cat", "other": 1}},
    [{"filename": "a.jpg", "caption": "a cat"}],
    {f"{ROOT}/a.jpg": "a cat"},
    {".\\a.jpg": "a cat"},
])  # fmt: skip
def test_json(content: Any) -> None:
    assert found(json.dumps(content), "json", "a.jpg") == CaptionEntry(("a cat",))


def test_names_alone_find_files_in_folders_and_paths_do_not() -> None:
    assert found('{"a.jpg": "a cat"}', "json", "sub/a.jpg") == CaptionEntry(("a cat",))
    assert found('{"other/a.jpg": "a cat"}', "json", "sub/a.jpg") is None
    assert found('{"a.jpg": "top", "sub/a.jpg": "below"}', "json", "sub/a.jpg") == CaptionEntry(("below",))


def test_identifiers_without_extension() -> None:
    table = "id,caption\na,a cat\nsub/v1.2,a dog\n"
    options = {"filename_column": "id", "identifier_includes_extension": False}
    assert found(table, "csv", "a.jpg", **options) == CaptionEntry(("a cat",))
    assert found(table, "csv", "sub/v1.2.png", **options) == CaptionEntry(("a dog",))


def test_several_rows_are_several_captions() -> None:
    assert found("filename,caption\na.jpg,one\na.jpg,two\n", "csv", "a.jpg") == CaptionEntry(("one", "two"))


def test_the_fallback_column() -> None:
    table = "filename,caption,tags\na.jpg,,cat\nb.jpg,a dog,dog\nc.jpg, ,\n"
    assert found(table, "csv", "a.jpg", fallback_caption_column="tags") == CaptionEntry(("cat",))
    assert found(table, "csv", "b.jpg", fallback_caption_column="tags") == CaptionEntry(("a dog",))
    assert found(table, "csv", "c.jpg", fallback_caption_column="tags") == CaptionEntry(())


def test_sizes() -> None:
    table = "filename,caption,w,h\na.jpg,a cat,640,480\n"
    options = {"width_column": "w", "height_column": "h"}
    assert found(table, "csv", "a.jpg", **options) == CaptionEntry(("a cat",), (640, 480))
    with pytest.raises(DataError, match=r"captions\.csv, line 2: the size is 'wide' x '480', expected whole numbers"):
        found(table.replace("640", "wide"), "csv", "a.jpg", **options)


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (
            CSV.replace("caption", "captions"),
            "csv",
            r"no column `caption`; the columns are filename, captions, w\. write `captions`",
        ),
        ("filename,caption\na.jpg,a cat, asleep\n", "csv", "line 2: more cells than columns; put captions with commas"),
        ('filename,caption\na.jpg,"a cat', "csv", "after line 1: unexpected end of data"),
        ("filename,caption\n,a cat\n", "csv", "line 2: `filename` is '', expected a file name"),
        ("", "csv", "the table has no rows"),
        ("filename,caption\n", "csv", "the table has no rows"),
        (b"filename,caption\na.jpg,caf\xe9\n", "csv", r"captions\.csv, line 2: not UTF-8"),
        ("{broken", "json", r"captions\.json: invalid JSON: "),
        ('"text"', "json", "str, expected an object"),
        ('{"filename": "a.jpg", "caption": "x"}\n[1]\n', "jsonl", "line 2: a list, expected an object"),
        ('{"filename": "a.jpg", "caption": 5}', "jsonl", "line 1: the caption is 5, expected text"),
        ('{"filename": "a.jpg", "caption": "\\ud83d"}', "jsonl", "half a character"),
        ('{"filename": 5, "caption": "x"}', "jsonl", "line 1: `filename` is 5"),
        ("[" * 100_000, "json", "nested too deeply"),
        ('{"a.jpg": ' + "[" * 900 + "]" * 900 + "}", "json", "list of lists"),
        ('{"a.jpg": ' + "9" * 5_000 + "}", "json", "invalid JSON"),
        ('{"a.jpg": ' + "{" + ", ".join(f'"k{one}": 1' for one in range(50_000)) + "}}", "json", "no column `caption`"),
        (json.dumps({"a.jpg": "x" * 40_000}), "json", "a caption of 40,000 characters; expected at most 32,768"),
        (json.dumps({"a.jpg": ["x"] * 1_001}), "json", "1,001 captions for one file; expected at most 1,000"),
        ('{"filename": "a.jpg", "caption": "x"}\n' * 1_001, "jsonl", "line 1001: 1,001 captions for one file"),
        ("filename,caption" + ",x" * 1_000 + "\n" + "a\n" * 10_000, "csv", "1,002 columns; expected at most 1,000"),
        ("filename,caption\na.jpg," + "x" * 140_000 + "\n", "csv", "field larger than field limit"),
    ],
)
def test_bad_tables_are_named_with_their_line(data: str | bytes, kind: TableKind, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        found(data, kind, "a.jpg")
    assert str(caught.value).startswith(f"captions.{kind}")


@pytest.mark.parametrize("side", ["Infinity", "NaN", "1e400", '"x"', "null", "[1]"])
def test_an_invalid_size(side: str) -> None:
    row = f'{{"filename": "a.jpg", "caption": "x", "w": {side}, "h": 5}}'
    with pytest.raises(DataError, match="expected whole numbers"):
        found(row, "jsonl", "a.jpg", width_column="w", height_column="h")


def test_a_table_in_the_datasets_folder_or_anywhere(tmp_path: Path) -> None:
    root = tmp_path / "cats"
    root.mkdir()
    backend = DictBackend({"captions.csv": CSV.encode()}, str(root))
    for path in ("captions.csv", "./captions.csv", str(root / "captions.csv")):
        assert load_table("csv", CaptionTable(path=path), backend).find("a.jpg") == CaptionEntry(("a cat, asleep",))
    outside = tmp_path / "elsewhere.csv"
    outside.write_text(CSV.replace("cat", "lion"))
    for path in (str(outside), str(root / ".." / "elsewhere.csv")):
        assert load_table("csv", CaptionTable(path=path), backend).find("a.jpg") == CaptionEntry(("a lion, asleep",))
    with pytest.raises(DataError, match=r"lost\.csv: no such table in .*cats or on this machine"):
        load_table("csv", CaptionTable(path="lost.csv"), backend)


def test_rows_may_use_the_full_path_of_a_relative_or_linked_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    monkeypatch.chdir(tmp_path)
    for name in (str(real / "a.jpg"), str(tmp_path / "link" / "a.jpg"), "link/a.jpg", "a.jpg"):
        table = read_table(json.dumps({name: "a cat"}).encode(), "json", CaptionTable(path="c.json"), "link")
        assert table.find("a.jpg") == CaptionEntry(("a cat",)), name


def test_a_book_with_a_table() -> None:
    backend = DictBackend({"captions.csv": CSV.encode()})
    options = Captions(strategy="csv", table=CaptionTable(path="captions.csv"), default="a picture")
    book = open_captions(options, backend, "datasets[0].captions")
    assert book.find("a.jpg") == WrittenCaption(("a cat, asleep",), "own")
    assert book.find("z.jpg") == WrittenCaption(("a picture",), "default")


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")
def test_parquet() -> None:
    import pyarrow
    import pyarrow.parquet

    columns = {
        "filename": ["a.jpg", "b.jpg", "c.jpg"],
        "caption": ["a cat", None, None],
        "tags": [None, ["dog", "hound"], None],
        "w": [640, 320, 1],
        "h": [480, 200, 1],
        "unused": [b"x", b"y", b"z"],
    }
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    data = sink.getvalue().to_pybytes()
    options = {"fallback_caption_column": "tags", "width_column": "w", "height_column": "h"}
    assert found(data, "parquet", "a.jpg", **options) == CaptionEntry(("a cat",), (640, 480))
    assert found(data, "parquet", "b.jpg", **options) == CaptionEntry(("dog", "hound"), (320, 200))
    assert found(data, "parquet", "c.jpg", **options) == CaptionEntry((), (1, 1))
    with pytest.raises(DataError, match="Parquet file is damaged"):
        found(data[: len(data) // 2], "parquet", "a.jpg")
    with pytest.raises(DataError, match="row 0: no column `text`"):
        found(data, "parquet", "a.jpg", caption_column="text")


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_parquet_without_pyarrow_says_what_to_install() -> None:
    with pytest.raises(DataError, match=r"captions\.parquet: .*type: pip install pyarrow"):
        found(b"PAR1", "parquet", "a.jpg")
