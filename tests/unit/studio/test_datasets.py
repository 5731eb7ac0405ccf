"""The data of a run through the API: listing, pages of items, thumbnails, captions."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from gracetune.config import native
from gracetune.config.run_config import RunConfig
from gracetune.studio.datasets import working_folder_of
from gracetune.studio.replies import StudioError
from gracetune.studio.thumbnails import LARGEST_IMAGE, SIDE, Thumbnails
from gracetune.telemetry.report.judged_losses import read_losses, write_losses
from unit.data.folders import images, write
from unit.data.media.generated import every, video_bytes
from unit.studio.clients import StudioClient, client_of


def run_folder(root: Path, *datasets: dict[str, Any], name: str = "cats", output: str = "") -> Path:
    """The folder of a run that has begun, as far as its data needs it."""
    folder = root / "runs" / name
    config = RunConfig.model_validate(
        {
            "name": name,
            "output_dir": output or str(folder),
            "model": {"family": "sdxl", "flavour": "base-1.0"},
            "training": {"max_steps": 10, "batch_size": 2},
            "datasets": [{"resolution": 64.0, **one} for one in datasets],
        }
    )
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "events.jsonl").touch()
    (folder / "config.yaml").write_text(native.write(config))
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run of three datasets, and a file that must stay secret."""
    root = tmp_path_factory.mktemp("studio")
    write(root / "photos", {**images(5), "005.png": "no image", "006.png": images(1)["000.png"]})
    (root / "secret.txt").write_text("secret")
    write(root / "named", {f"a red cat {number}.png": content for number, content in enumerate(images(2).values())
                           if isinstance(content, bytes)})  # fmt: skip
    run_folder(
        root,
        {"id": "photos", "path": str(root / "photos"), "held_out": 1, "corrupt_threshold": 0.5},
        {"id": "named/ones", "path": str(root / "named"), "captions": {"strategy": "filename"}},
    )
    return root


@pytest.fixture(scope="module")
def client(root: Path) -> StudioClient:
    return client_of(root / "runs")


@pytest.fixture(scope="module")
def base(client: StudioClient) -> str:
    (run,) = client.get("runs")["runs"]
    return f"runs/{run['id']}/data"


def test_the_overview_has_buckets_captions_and_dropped_files(client: StudioClient, base: str, root: Path) -> None:
    found = client.get(base)
    photos, named = found["datasets"]
    assert (photos["id"], photos["path"], photos["items"], photos["held_out"]) == ("photos", str(root / "photos"), 6, 1)
    assert photos["editable"]
    assert photos["captions"] == {"count": 5, "missing": 1}
    assert sum(bucket["items"] for bucket in photos["buckets"]) == 5
    assert {"name", "width", "height", "frames", "items", "batches"} == {*photos["buckets"][0]}
    assert [one["file"] for one in photos["dropped"]] == ["005.png"]
    assert (named["name"], named["editable"]) == ("named/ones", False)
    assert "/" not in named["id"]
    assert "file names" in named["why"]
    assert not found["judged"]


def test_items_come_in_pages(client: StudioClient, base: str) -> None:
    first = client.get(f"{base}/photos/items?limit=4")
    rest = client.get(f"{base}/photos/items?offset=4&limit=4")
    assert (first["total"], len(first["items"]), len(rest["items"])) == (6, 4, 2)
    files = [item["file"] for item in [*first["items"], *rest["items"]]]
    assert files == ["000.png", "001.png", "002.png", "003.png", "004.png", "006.png"]
    item = first["items"][1]
    assert (item["width"], item["height"], item["caption"], item["caption_file"]) == (96, 64, "picture 1", "001.txt")
    assert rest["items"][1]["caption"] == ""
    assert not rest["items"][1]["has_caption"]
    (named, _) = client.get(f"{base}/{client.get(base)['datasets'][1]['id']}/items")["items"]
    assert (named["caption"], named["editable"]) == ("a red cat 0", False)


def test_losses_sort_items_and_findings_are_notes(client: StudioClient, base: str, root: Path) -> None:
    images_ = [{"dataset": "photos", "path": f"{number:03}.png", "first_loss": 1.0, "last_loss": number / 10}
               for number in range(3)]  # fmt: skip
    finding = {"kind": "duplicate", "dataset": "photos", "images": ["000.png"], "reason": "twice"}
    write_losses(root / "runs" / "cats", {"images": images_, "findings": [finding]})
    items = client.get(f"{base}/photos/items?sort=loss")["items"]
    assert [item["file"] for item in items][:4] == ["002.png", "001.png", "000.png", "003.png"]
    assert (items[2]["loss_before"], items[2]["loss_after"], items[2]["notes"]) == (1.0, 0.0, ["duplicate: twice"])
    assert client.get(base)["judged"]
    file = root / "runs" / "cats" / "report" / "judged" / "losses.json"
    file.write_text('{"format": "gracetune-judged-losses", "version": 1, "images": [{}]}')
    assert read_losses(root / "runs" / "cats") is None
    assert not client.get(base)["judged"]


def test_a_caption_is_saved_and_undone(client: StudioClient, base: str, root: Path) -> None:
    (item,) = client.get(f"{base}/photos/items?limit=1")["items"]
    path = f"{base}/photos/items/{item['key']}/caption"
    saved = client.put(path, {"text": "a cat <script>", "was": item["caption"]})
    assert (root / "photos" / "000.txt").read_text() == saved["item"]["caption"] == "a cat <script>"
    status, error = client.rejected("PUT", path, {"text": "again", "was": item["caption"]})
    assert (status, error["expected"]) == (409, "the caption that was shown")
    undone = client.post(f"{base}/photos/undo", {"undo": saved["undo"]})
    assert undone["item"] == item
    assert (root / "photos" / "000.txt").read_text() == "picture 0"
    missing = client.get(f"{base}/photos/items?offset=5")["items"][0]
    new = client.put(f"{base}/photos/items/{missing['key']}/caption", {"text": "the last", "was": ""})
    assert new["item"]["has_caption"]
    client.post(f"{base}/photos/undo", {"undo": new["undo"]})
    assert not (root / "photos" / "006.txt").exists()


def test_captions_are_not_written_through_links_or_without_control(client: StudioClient, base: str, root: Path) -> None:
    item = client.get(f"{base}/photos/items?offset=5")["items"][0]
    (root / "photos" / "006.txt").symlink_to(root / "secret.txt")
    shown = client.get(f"{base}/photos/items?offset=5")["items"][0]
    assert "secret" not in (shown["caption"], shown["why"])
    assert not shown["editable"]
    for was in ("secret", "", None):
        body = {"text": "gone", "was": was}
        assert client.rejected("PUT", f"{base}/photos/items/{item['key']}/caption", body)[0] == 409
    assert (root / "secret.txt").read_text() == "secret"
    (root / "photos" / "006.txt").unlink()
    reading = client_of(root / "runs", control=False)
    path = f"{base}/photos/items/{item['key']}/caption"
    assert reading.rejected("PUT", path, {"text": "x", "was": ""})[0] == 403
    other = client.get(base)["datasets"][1]["id"]
    key = client.get(f"{base}/{other}/items")["items"][0]["key"]
    assert client.rejected("PUT", f"{base}/{other}/items/{key}/caption", {"text": "x", "was": ""})[0] == 409


def test_thumbnails_are_small_jpegs(client: StudioClient, base: str, root: Path) -> None:
    (item,) = client.get(f"{base}/photos/items?limit=1")["items"]
    reply = client.http.get(f"/{item['thumbnail']}")
    assert reply.headers["content-type"] == "image/jpeg"
    assert Image.open(io.BytesIO(reply.content)).size == (64, 64)
    (root / "photos" / "000.png").rename(root / "photos" / "away")
    (root / "photos" / "000.png").symlink_to(root / "photos" / "away")
    assert client.http.get(f"/{item['thumbnail']}").status_code == 200
    (root / "photos" / "000.png").unlink()
    (root / "photos" / "000.png").symlink_to(root / "secret.txt")
    assert client.http.get(f"/{item['thumbnail']}").status_code == 404
    (root / "photos" / "000.png").unlink()
    (root / "photos" / "away").rename(root / "photos" / "000.png")


@pytest.mark.parametrize(
    "path",
    ["nothing/data", "ID/data/nothing/items", "ID/data/photos/items/nothing/thumbnail",
     "ID/data/photos/items?sort=size", "ID/data/photos/items?offset=x", "ID/data/..%2f..%2f/items"],
)  # fmt: skip
def test_what_is_not_there_is_an_error(path: str, client: StudioClient, base: str) -> None:
    client.rejected("GET", f"runs/{path}".replace("ID", base.split("/")[1]))


def test_a_folder_that_is_gone_is_an_error_of_the_command(tmp_path: Path) -> None:
    run_folder(tmp_path, {"id": "photos", "path": str(tmp_path / "gone")})
    client = client_of(tmp_path / "runs")
    (run,) = client.get("runs")["runs"]
    status, error = client.rejected("GET", f"runs/{run['id']}/data")
    assert (status, "gone" in error["found"]) == (422, True)


def test_relative_paths_are_resolved_where_the_run_was_started(tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {"name": "a", "output_dir": "runs/a", "model": {"family": "sdxl"}, "training": {"max_steps": 1},
         "datasets": [{"id": "d", "path": "d"}]}
    )  # fmt: skip
    assert working_folder_of(tmp_path / "x" / "runs" / "a", config, Path("/y")) == tmp_path / "x"
    assert working_folder_of(tmp_path / "x" / "moved", config, Path("/y")) == Path("/y")


# -- thumbnails -------------------------------------------------------------------------------------------------------


def decoded(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def test_thumbnails_of_unusual_images(tmp_path: Path) -> None:
    thumbnails = Thumbnails()
    Image.new("RGB", (1600, 800), "red").save(tmp_path / "wide.png")
    assert decoded(thumbnails.of(tmp_path / "wide.png")).size == (SIDE, SIDE // 2)
    Image.new("RGBA", (50, 50), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert decoded(thumbnails.of(tmp_path / "clear.png")).getpixel((5, 5)) == (255, 255, 255)
    Image.new("I;16", (50, 50), 65535).save(tmp_path / "deep.png")
    assert decoded(thumbnails.of(tmp_path / "deep.png")).getpixel((5, 5)) == (255, 255, 255)
    turned = Image.Exif()
    turned[274] = 6
    Image.new("RGB", (600, 300)).save(tmp_path / "turned.jpg", exif=turned)
    assert decoded(thumbnails.of(tmp_path / "turned.jpg")).size == (200, 400)
    Image.new("CMYK", (60, 30)).save(tmp_path / "print.jpg")
    Image.new("P", (60, 30)).save(tmp_path / "table.gif")
    for name in ("print.jpg", "table.gif"):
        assert decoded(thumbnails.of(tmp_path / name)).size == (60, 30)
    (tmp_path / "clip.mp4").write_bytes(video_bytes(every(0.04, 5)))
    assert max(decoded(thumbnails.of(tmp_path / "clip.mp4")).size) <= SIDE


def test_hostile_files_cost_little(tmp_path: Path) -> None:
    thumbnails = Thumbnails()
    huge = io.BytesIO()
    Image.new("1", (12_000, 12_000)).save(huge, "PNG")
    files = {"bomb.png": huge.getvalue(), "cut.png": huge.getvalue()[:100], "none.png": b"", "text.mp4": b"no clip",
             "late.jpg": b"\xff\xd8\xff\xe0" + os.urandom(5000), "page.png": b"<svg onload=alert(1)>"}  # fmt: skip
    write(tmp_path, dict(files))
    with (tmp_path / "large.png").open("wb") as large:
        large.truncate(LARGEST_IMAGE + 1)
    os.mkfifo(tmp_path / "pipe.png")
    began = time.monotonic()
    for name in (*files, "large.png"):
        with pytest.raises(StudioError):
            thumbnails.of(tmp_path / name)
    with pytest.raises(OSError, match="regular file"):
        thumbnails.of(tmp_path / "pipe.png")
    assert time.monotonic() - began < 20
