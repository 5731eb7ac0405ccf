"""Hub datasets: tables, folders and archives, and the samples taken from them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from gracetune.data.copies.errors import CopyError
from servers.hub import TOKEN, HubServer
from unit.data.copies.sample_sources import (
    FROM_COLUMNS,
    captions,
    config,
    copies,
    encoded_image,
    fetched,
    parquet,
    rows,
    shard,
    tar,
    zipped,
)

NAME = "owner/pets"
PETS = f"hf://datasets/{NAME}"
TEXT = {"strategy": "jsonl", "table": {**FROM_COLUMNS, "caption_column": "text"}}


def rejection(run: Any) -> str:
    with pytest.raises(CopyError) as rejected:
        copies(run).plans()
    stated = str(rejected.value)
    assert all(word in stated for word in ("found", "expected", "try"))
    return stated


# -- formats ----------------------------------------------------------------------------------------------------------


def test_tables_with_images_and_captions(hub: HubServer, tmp_path: Path) -> None:
    hub.dataset(NAME, {
        "README.md": b"---\nlicense: mit\n---\n# Pets",
        "data/train-00000-of-00002.parquet": parquet(rows(5)),
        "data/train-00001-of-00002.parquet": parquet(rows(3, 5)),
        "data/test-00000-of-00001.parquet": parquet(rows(2, 90)),
    })  # fmt: skip
    run = config(tmp_path, {"path": PETS, "captions": TEXT})
    plan, = copies(run).plans()  # fmt: skip
    assert (plan.samples, plan.layout.format, len(plan.layout.parts)) == (8, "parquet", 2)
    assert plan.to_fetch == sum(part.remote.size or 0 for part in plan.layout.parts)
    found = fetched(run)["d0"]
    assert sorted(found.values()) == [(f"caption {number}",) for number in range(8)]
    assert all(path.startswith("unpacked/data/train-0000") for path in found)
    pixels = {Image.open(copies(run).localized().datasets[0].path + "/" + path).getpixel((0, 0))[0] for path in found}
    assert pixels == set(range(8))


def test_a_complete_copy_sends_no_request(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.dataset(NAME, {"train.parquet": parquet(rows(2))})
    run = config(tmp_path, {"path": PETS, "captions": TEXT})
    first = fetched(run)
    before = len(hub.requests)
    assert fetched(run) == first
    assert len(hub.requests) == before
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetched(run) == first


def test_a_folder_of_images_with_a_table(hub: HubServer, tmp_path: Path) -> None:
    table = 'file_name,prompt,score\na.png,a cat,0.9\nsub/b.png,"a dog, big",0.2\n'
    hub.dataset(
        NAME, {"a.png": encoded_image(1), "sub/b.png": encoded_image(2), "metadata.csv": table.encode(), "c.bin": b"no"}
    )
    run = config(
        tmp_path,
        {"path": PETS, "captions": {"strategy": "jsonl", "table": {**FROM_COLUMNS, "caption_column": "prompt"}}},
    )
    assert fetched(run)["d0"] == {"a.png": ("a cat",), "sub/b.png": ("a dog, big",)}
    better = config(tmp_path, {"path": PETS, "local_copy": {"filter": [{"column": "score", "minimum": 0.5}]}})
    assert [*fetched(better)["d0"]] == ["a.png"]


@pytest.mark.parametrize("name", ["metadata.jsonl", "data/metadata.jsonl"])
def test_rows_name_files_beside_their_table(hub: HubServer, tmp_path: Path, name: str) -> None:
    folder = name.rpartition("/")[0]
    table = "".join(json.dumps({"file_name": f"{n}.png", "text": f"caption {n}"}) + "\n" for n in range(2))
    inside = f"{folder}/" if folder else ""
    hub.dataset(NAME, {f"{inside}0.png": encoded_image(0), f"{inside}1.png": encoded_image(1), name: table.encode()})
    found = fetched(config(tmp_path, {"path": PETS, "captions": TEXT}))["d0"]
    assert found == {f"{inside}{n}.png": (f"caption {n}",) for n in range(2)}


def test_one_of_several_columns_of_files(hub: HubServer, tmp_path: Path) -> None:
    table = "before_file_name,after_file_name,text\nx/1.png,y/1.png,make it blue\n"
    hub.dataset(NAME, {"x/1.png": encoded_image(1), "y/1.png": encoded_image(2), "metadata.csv": table.encode()})
    run = config(tmp_path, {"path": PETS, "captions": TEXT, "local_copy": {"media_column": "after"}},
                 {"path": PETS, "local_copy": {"media_column": "before"}})  # fmt: skip
    assert fetched(run) == {"d0": {"y/1.png": ("make it blue",)}, "d1": {"x/1.png": ("",)}}


def test_text_files_beside_images_are_their_captions(hub: HubServer, tmp_path: Path) -> None:
    hub.dataset(NAME, {"a.png": encoded_image(1), "a.txt": b"a cat", ".hidden/x.png": encoded_image(2)})
    assert fetched(config(tmp_path, {"path": PETS}))["d0"] == {"a.png": ("a cat",)}


def test_archives(hub: HubServer, tmp_path: Path) -> None:
    hub.dataset(NAME, {
        "shards/00000.tar": tar(shard(3)), "shards/00001.tar.gz": tar(shard(2, 3), "w:gz"),
        "more.zip": zipped({"f/9.png": encoded_image(9), "f/metadata.csv": b"file_name,prompt\n9.png,prompt 9\n"}),
    })  # fmt: skip
    prompt = {"strategy": "jsonl", "table": {**FROM_COLUMNS, "caption_column": "prompt"}}
    found = fetched(config(tmp_path, {"path": PETS, "captions": prompt}, {"path": PETS}))
    assert sorted(found["d0"].values()) == [(f"prompt {number}",) for number in (0, 1, 2, 3, 4, 9)]
    assert found["d1"]["unpacked/shards/00001/000004.png"] == ("text 4",)  # of its text file
    default = config(tmp_path, {"path": PETS, "captions": {"strategy": "jsonl", "table": FROM_COLUMNS},
                                "local_copy": {"filter": [{"column": "score", "minimum": 2}]}})  # fmt: skip
    assert sorted(fetched(default)["d0"].values()) == [("text 2",), ("text 3",), ("text 4",)]


def test_the_index_of_a_shard_has_captions_too(hub: HubServer, tmp_path: Path) -> None:
    index = {"files": {"1.png": {"offset": 0, "length": 3, "captions": ["one", "uno"]}}}
    hub.dataset(NAME, {"s/0.tar": tar({"1.png": encoded_image(1)}), "s/0.json": json.dumps(index).encode()})
    run = config(tmp_path, {"path": PETS, "captions": {"strategy": "jsonl", "table": FROM_COLUMNS}})
    assert fetched(run)["d0"] == {"unpacked/s/0/1.png": ("one", "uno")}
    hub.dataset(NAME, {"s/0.tar": tar({"1.png": encoded_image(1)})})
    hub.dataset("owner/index", {"s/0.json": json.dumps(index).encode()})
    elsewhere = {"path": f"{PETS}/s", "captions": {"strategy": "jsonl", "table": FROM_COLUMNS},
                 "local_copy": {"index": "hf://datasets/owner/index/s"}}  # fmt: skip
    assert fetched(config(tmp_path, elsewhere))["d0"] == {"unpacked/0/1.png": ("one", "uno")}


def test_clips(hub: HubServer, tmp_path: Path) -> None:
    clip = b"\0\0\0\x18ftypmp42" + b"x" * 200
    hub.dataset(NAME, {"train.parquet": parquet([{"video": {"bytes": clip, "path": "a.mp4"}, "prompt": "it runs"}])})
    run = config(tmp_path, {"path": PETS, "dataset_type": "video"})
    copies(run).make()
    folder = Path(copies(run).localized().datasets[0].path)
    assert (folder / "unpacked/train/0000000.mp4").read_bytes() == clip
    assert json.loads((folder / "metadata.jsonl").read_text())["prompt"] == "it runs"


def test_images_side_by_side_are_cut(hub: HubServer, tmp_path: Path) -> None:
    pair = Image.new("RGB", (128, 64), (255, 0, 0))
    pair.paste((0, 0, 255), (64, 0, 128, 64))
    buffer = io.BytesIO()
    pair.save(buffer, "JPEG", quality=95)
    hub.dataset(
        NAME,
        {
            "train.parquet": parquet([{"image": buffer.getvalue(), "text": "edit"}]),
        },
    )
    run = config(tmp_path, *({"path": PETS, "captions": TEXT, "local_copy": {"tile": {"count": 2, "index": index}}}
                             for index in (0, 1)))  # fmt: skip
    assert fetched(run) == {
        "d0": {"unpacked/train/0000000.png": ("edit",)},
        "d1": {"unpacked/train/0000000.png": ("edit",)},
    }
    hub.dataset(NAME, {"a.jpg": buffer.getvalue(), "metadata.csv": b"file_name,text\na.jpg,edit\n"})
    as_file = config(tmp_path / "file", {"path": PETS, "captions": TEXT, "local_copy": {"tile": {"count": 2}}})
    assert fetched(as_file)["d0"] == {"a.png": ("edit",)}
    for dataset, colour in zip(copies(run).localized().datasets, ((254, 0, 0), (0, 0, 254)), strict=True):
        image = Image.open(f"{dataset.path}/unpacked/train/0000000.png")
        assert image.size == (64, 64)
        assert image.getpixel((32, 32)) == colour


# -- which samples ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "expected", "tables"),
    [
        ("train+test", [*range(9), 90, 91], 3), ("train[:3]", range(3), 1), ("train[50%:]", range(4, 9), 2),
        pytest.param("test", range(90, 92), 1, marks=pytest.mark.full),
        pytest.param("train[3:7]", range(3, 7), 2, marks=pytest.mark.full),
        pytest.param("train[-2:]", (7, 8), 1, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_splits_and_parts_of_them(hub: HubServer, tmp_path: Path, split: str, expected: Any, tables: int) -> None:
    hub.dataset(NAME, {
        "data/train-00000-of-00002.parquet": parquet(rows(5)),
        "data/train-00001-of-00002.parquet": parquet(rows(4, 5)),
        "data/test-00000-of-00001.parquet": parquet(rows(2, 90)),
    })  # fmt: skip
    run = config(tmp_path, {"path": PETS, "captions": TEXT, "local_copy": {"split": split}})
    plan, = copies(run).plans()  # fmt: skip
    assert len(plan.layout.parts) == tables  # a table that has none of the samples is not fetched
    found = fetched(run)["d0"]
    assert sorted(found.values()) == sorted((f"caption {number}",) for number in expected)


def test_subsets_of_the_dataset_card(hub: HubServer, tmp_path: Path) -> None:
    card = """---
configs:
- config_name: cats
  data_files: cats/*.parquet
- config_name: dogs
  data_files: [{split: train, path: "dogs/*"}]
---
"""
    hub.dataset(
        NAME, {"README.md": card.encode(), "cats/0.parquet": parquet(rows(1)), "dogs/0.parquet": parquet(rows(1, 7))}
    )
    stated = rejection(config(tmp_path, {"path": PETS}))
    assert "several subsets: cats, dogs" in stated
    assert "local_copy.subset=cats" in stated
    run = config(tmp_path, {"path": PETS, "captions": TEXT, "local_copy": {"subset": "dogs"}})
    assert [*fetched(run)["d0"].values()] == [("caption 7",)]
    assert "one of cats, dogs" in rejection(config(tmp_path, {"path": PETS, "local_copy": {"subset": "birds"}}))


def test_a_revision_and_a_folder(hub: HubServer, tmp_path: Path) -> None:
    old = {"a/0.png": encoded_image(0), "b/1.png": encoded_image(1)}
    hub.dataset(NAME, {"a/5.png": encoded_image(5)}, revisions={"v1": old})
    assert [*fetched(config(tmp_path, {"path": PETS}))["d0"]] == ["a/5.png"]
    assert [*fetched(config(tmp_path, {"path": f"{PETS}@v1"}))["d0"]] == ["a/0.png", "b/1.png"]
    assert [*fetched(config(tmp_path, {"path": f"{PETS}@v1/b"}))["d0"]] == ["1.png"]


def test_datasets_of_one_source_share_a_copy(hub: HubServer, tmp_path: Path) -> None:
    hub.dataset(NAME, {"a.png": encoded_image(0)})
    run = config(
        tmp_path,
        {"path": PETS},
        {"path": PETS, "resolution": 96.0},
        {"path": PETS, "type": "in_memory", "local_copy": {}},
    )
    found = copies(run)
    found.make()
    assert len({dataset.path for dataset in found.localized().datasets}) == 1
    assert sum("resolve" in request.path for request in hub.requests if request.method == "GET") == 1


def test_several_captions_and_values_inside_columns(hub: HubServer, tmp_path: Path) -> None:
    table = rows(1, meta={"long": "a long one", "tags": ["x", "y"]}, empty=None)
    hub.dataset(NAME, {"train.parquet": parquet(table)})

    def of(columns: Any, **more: Any) -> tuple[str, ...]:
        options = {"strategy": "jsonl", "table": {**FROM_COLUMNS, "caption_column": columns, **more}}
        return next(iter(fetched(config(tmp_path, {"path": PETS, "captions": options}))["d0"].values()))

    assert of(("text", "meta.long")) == ("caption 0", "a long one")
    assert of("meta.tags") == ("x", "y")
    assert of("empty", fallback_caption_column="text") == ("caption 0",)


# -- what is rejected, before anything is downloaded -------------------------------------------------------------------


def test_a_missing_column(hub: HubServer, tmp_path: Path) -> None:
    hub.dataset(NAME, {"train.parquet": parquet(rows(3, score=0.5))})
    stated = rejection(config(tmp_path, {"path": PETS, "local_copy": {"media_column": "imagee"}}))
    assert "no column `imagee` in train.parquet; the columns are image, text, score" in stated
    assert "local_copy.media_column=image" in stated
    other = {"strategy": "jsonl", "table": {**FROM_COLUMNS, "caption_column": "texts"}}
    assert "--set 'datasets[d0].captions.table.caption_column=text'" in rejection(
        config(tmp_path, {"path": PETS, "captions": other})
    )
    assert "no column `quality`" in rejection(
        config(tmp_path, {"path": PETS, "local_copy": {"filter": [{"column": "quality", "minimum": 1}]}})
    )
    assert "has the type string" in rejection(config(tmp_path, {"path": PETS, "local_copy": {"media_column": "text"}}))


def test_a_column_that_a_folders_table_lacks(hub: HubServer, tmp_path: Path) -> None:
    hub.dataset(NAME, {"a.png": encoded_image(1), "metadata.csv": b"file_name,prompt\na.png,x\n"})
    run = config(tmp_path, {"path": PETS, "captions": TEXT})
    with pytest.raises(CopyError, match=r"no column `text` in the dataset's tables; the columns are file_name, prompt"):
        copies(run).make()
    assert not any("a.png" in request.path for request in hub.requests)


def test_a_missing_split(hub: HubServer, tmp_path: Path) -> None:
    hub.dataset(NAME, {"data/test-00000-of-00001.parquet": parquet(rows(1))})
    stated = rejection(config(tmp_path, {"path": PETS}))
    assert "no split train" in stated
    assert "local_copy.split=test" in stated


def test_nothing_to_train_on(hub: HubServer, tmp_path: Path) -> None:
    hub.dataset(NAME, {"notes.pdf": b"x" * 300, "README.md": b"#"})
    assert "it holds 1 x .md, 1 x .pdf" in rejection(config(tmp_path, {"path": PETS}))
    hub.dataset(NAME, {"train.parquet": parquet([{"image": {"bytes": None, "path": "x"}, "text": "a"}])})
    # A column that is all empty has no type that says what it could hold.
    with pytest.raises(CopyError, match=r"no image in|has the type struct"):
        copies(config(tmp_path, {"path": PETS})).make()


def test_a_missing_and_a_private_dataset(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "has no such dataset, or it is private" in rejection(config(tmp_path, {"path": "hf://datasets/owner/none"}))
    hub.dataset(NAME, {"a.png": encoded_image(1)}, private=True)
    stated = rejection(config(tmp_path, {"path": PETS}))
    assert "https://huggingface.co/datasets/owner/pets" in stated
    assert "hf auth login" in stated
    assert fetched(config(tmp_path, {"path": PETS, "storage": {"token": TOKEN}}))["d0"]
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert fetched(config(tmp_path / "again", {"path": PETS}))["d0"]


def test_a_licence_and_a_revision(hub: HubServer, tmp_path: Path) -> None:
    hub.dataset(NAME, {"a.png": encoded_image(1)}, gated=True)
    assert "accept its licence on https://huggingface.co/datasets/owner/pets" in rejection(
        config(tmp_path, {"path": PETS})
    )
    hub.dataset(NAME, {"a.png": encoded_image(1)})
    assert "v9, which owner/pets does not have" in rejection(config(tmp_path, {"path": f"{PETS}@v9"}))


def test_a_disk_that_is_too_small(hub: HubServer, tmp_path: Path) -> None:
    hub.dataset(NAME, {"big.tar": tar(shard(1)), "small.tar": tar(shard(1, 1))})
    hub.faults.claimed_sizes["big.tar"] = 10**15
    found = copies(config(tmp_path, {"path": PETS}))
    with pytest.raises(CopyError) as rejected:
        found.check(found.plans())
    assert "where" in str(rejected.value)
    assert "local_copy.folder=FOLDER" in str(rejected.value)
    with pytest.raises(CopyError):
        found.make()
    assert hub.sent == 0


def test_memory_that_is_too_small(hub: HubServer, tmp_path: Path) -> None:
    hub.dataset(NAME, {"a.png": encoded_image(1)})
    found = copies(config(tmp_path, {"path": PETS, "type": "in_memory", "local_copy": {}}))
    with pytest.raises(CopyError, match="main memory, where 10 B is free"):
        found.check(found.plans(), memory_free=10)
    found.check(found.plans(), memory_free=10**9)


def test_copies_that_are_staged_share_the_memory(hub: HubServer, tmp_path: Path) -> None:
    hub.dataset(NAME, {"a.png": encoded_image(1)})
    hub.dataset("owner/dogs", {"a.png": encoded_image(2)})
    staged = {"type": "in_memory", "local_copy": {}}
    found = copies(config(tmp_path, {"path": PETS, **staged}, {"path": "hf://datasets/owner/dogs", **staged}))
    plans = found.plans()
    total = sum(plan.staged for plan in plans)
    found.check(plans, memory_free=total)
    with pytest.raises(CopyError, match="of it for other datasets"):
        found.check(plans, memory_free=total - 1)


# -- offline ----------------------------------------------------------------------------------------------------------


def test_offline_the_hubs_cache_is_read(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import snapshot_download

    hub.dataset(NAME, {"train.parquet": parquet(rows(2)), "README.md": b"# Pets"})
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run = config(tmp_path, {"path": PETS, "captions": TEXT})
    stated = rejection(run)
    assert "HF_HUB_OFFLINE=1 forbids access to the hub" in stated
    assert "hf download owner/pets --repo-type dataset" in stated
    assert hub.requests == []
    snapshot_download(NAME, repo_type="dataset", endpoint=hub.url)
    before = len(hub.requests)
    assert sorted(fetched(run)["d0"].values()) == [("caption 0",), ("caption 1",)]
    assert len(hub.requests) == before
    # What is in the cache is not downloaded again where the hub can be asked, either.
    monkeypatch.delenv("HF_HUB_OFFLINE")
    sent = hub.sent
    assert fetched(config(tmp_path / "other", {"path": PETS, "captions": TEXT}))
    assert hub.sent == sent


def test_a_hub_out_of_reach(hub: HubServer, tmp_path: Path) -> None:
    hub.close()
    assert "the hub is out of reach" in rejection(config(tmp_path, {"path": PETS}))


def test_local_archives_are_unpacked_too(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "0.tar").write_bytes(tar(shard(2)))
    run = config(tmp_path, {"path": str(folder), "local_copy": {}})
    assert sorted(fetched(run)["d0"].values()) == [("text 0",), ("text 1",)]
    (folder / "1.tar").write_bytes(tar(shard(1, 2)))
    (folder / "0.tar").unlink()
    assert sorted(fetched(run)["d0"].values()) == [("text 2",)]
    assert captions(copies(run).localized())
