"""S3 buckets: s3fs against a real local server that speaks S3."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gracetune.config.dataset_config import StorageAccess
from gracetune.data.backends.errors import StorageError
from gracetune.data.backends.url import UrlBackend
from gracetune.data.backends.url_access import options_for
from gracetune.data.copies.errors import CopyError
from gracetune.storage import transfer
from unit.data.copies.sample_sources import (
    FROM_COLUMNS,
    config,
    copies,
    encoded_image,
    fetched,
    parquet,
    rows,
    shard,
    tar,
)

pytest.importorskip("s3fs", reason="s3:// needs the optional s3fs, which is not installed")
moto = pytest.importorskip("moto.server", reason="the tests' S3 server, moto, is not installed")
boto3 = pytest.importorskip("boto3")

KEYS = {"access_key_id": "AKIATESTTESTTESTTEST", "secret_access_key": "a-secret-of-the-tests"}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id=KEYS["access_key_id"],
                          aws_secret_access_key=KEYS["secret_access_key"])  # fmt: skip
    client.create_bucket(Bucket="pets")
    yield client
    for found in client.list_objects_v2(Bucket="pets").get("Contents", []):
        client.delete_object(Bucket="pets", Key=found["Key"])
    client.delete_bucket(Bucket="pets")


def put(client: Any, **files: bytes) -> None:
    for name, data in files.items():
        client.put_object(Bucket="pets", Key=name, Body=data, ACL="public-read")


def test_options_of_the_library() -> None:
    access = StorageAccess.model_validate({"region": "eu-west-1", "session_token": "t", "anonymous": True, **KEYS})
    assert options_for("s3", access) == {
        "key": KEYS["access_key_id"], "secret": KEYS["secret_access_key"], "token": "t", "anon": True,
        "client_kwargs": {"region_name": "eu-west-1"},
    }  # fmt: skip


@pytest.mark.full
def test_a_folder_of_a_bucket(bucket: Any, endpoint: str, tmp_path: Path) -> None:
    put(bucket, **{"cats/a.png": encoded_image(1), "cats/a.txt": b"a cat", "dogs/b.png": encoded_image(2)})
    storage = {"endpoint_url": endpoint, "region": "us-east-1", **KEYS}
    run = config(tmp_path, {"path": "s3://pets/cats", "storage": storage})
    plan, = copies(run).plans()  # fmt: skip
    assert plan.to_fetch == len(encoded_image(1)) + len(b"a cat")
    assert all(part.remote.digest and part.remote.digest.startswith("md5:") for part in plan.missing)
    assert fetched(run)["d0"] == {"a.png": ("a cat",)}
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*.json*"))
    assert KEYS["secret_access_key"].encode() not in written
    # In place, without a copy.
    backend = UrlBackend("s3://pets/cats", StorageAccess.model_validate(storage))
    assert backend.list() == ("a.png", "a.txt")
    assert backend.read("a.txt") == b"a cat"


@pytest.mark.full
def test_tables_and_archives_of_a_bucket(
    bucket: Any, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS["secret_access_key"])
    monkeypatch.setattr(transfer, "RANGE", 4096)
    noise = os.urandom(50_000)
    put(
        bucket,
        **{
            "t/0.parquet": parquet(rows(3)),
            "w/0.tar": tar(shard(2) | {"n.bin": noise}),
            "test/x.png": encoded_image(5),
        },
    )
    text = {"strategy": "jsonl", "table": {**FROM_COLUMNS, "caption_column": "text"}}
    found = fetched(config(tmp_path, {"path": "s3://pets/t", "captions": text}, {"path": "s3://pets/w/0.tar"}))
    assert sorted(found["d0"].values()) == [("caption 0",), ("caption 1",), ("caption 2",)]
    assert len(found["d1"]) == 2
    # Folders of a bucket are no splits, unless a split is requested.
    assert [*fetched(config(tmp_path, {"path": "s3://pets", "local_copy": {"format": "files"}}))["d0"]] == [
        "test/x.png"
    ]


@pytest.mark.full
def test_multipart_uploads_have_no_md5(bucket: Any, endpoint: str, tmp_path: Path) -> None:
    data = tar(shard(1) | {"n.bin": os.urandom(6 << 20)})
    upload = bucket.create_multipart_upload(Bucket="pets", Key="0.tar")["UploadId"]
    parts = []
    for number, chunk in enumerate((data[: 5 << 20], data[5 << 20 :]), start=1):
        done = bucket.upload_part(Bucket="pets", Key="0.tar", UploadId=upload, PartNumber=number, Body=chunk)
        parts.append({"ETag": done["ETag"], "PartNumber": number})
    bucket.complete_multipart_upload(Bucket="pets", Key="0.tar", UploadId=upload, MultipartUpload={"Parts": parts})
    run = config(tmp_path, {"path": "s3://pets", "storage": {"endpoint_url": endpoint, **KEYS}})
    plan, = copies(run).plans()  # fmt: skip
    assert plan.missing[0].remote.digest is None
    assert len(fetched(run)["d0"]) == 1


@pytest.mark.full
def test_rejected_requests(bucket: Any, endpoint: str, tmp_path: Path) -> None:
    storage = {"endpoint_url": endpoint}
    put(bucket, **{"a.png": encoded_image(1)})
    with pytest.raises(CopyError) as rejected:
        copies(config(tmp_path, {"path": "s3://pets", "storage": storage})).plans()
    assert "no credentials" in str(rejected.value)
    assert "AWS_ACCESS_KEY_ID" in str(rejected.value)
    with pytest.raises(CopyError) as rejected:
        copies(config(tmp_path, {"path": "s3://nobodys", "storage": {**storage, **KEYS}})).plans()
    assert "no data at this address" in str(rejected.value)
    with pytest.raises(CopyError) as rejected:
        copies(
            config(tmp_path, {"path": "s3://pets", "storage": {"endpoint_url": "http://127.0.0.1:9", **KEYS}})
        ).plans()
    assert "cannot be reached" in str(rejected.value)
    assert KEYS["secret_access_key"] not in str(rejected.value)
    # A public bucket needs no keys.
    assert fetched(config(tmp_path, {"path": "s3://pets", "storage": {**storage, "anonymous": True}}))["d0"]


@pytest.mark.full
def test_expired_keys(bucket: Any, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(bucket, **{"a.png": encoded_image(1)})
    run = config(tmp_path, {"path": "s3://pets", "storage": {"endpoint_url": endpoint, **KEYS}})
    with monkeypatch.context() as checked:
        # From now on the server checks keys, and these are not valid.
        checked.setattr("moto.settings.INITIAL_NO_AUTH_ACTION_COUNT", 0.0)
        checked.setattr("moto.core.responses.ActionAuthenticatorMixin.request_count", 1)
        with pytest.raises(CopyError) as rejected:
            copies(run).plans()
        assert "the storage denied access" in str(rejected.value)
        assert "keys may have expired: check AWS_ACCESS_KEY_ID" in str(rejected.value)
        assert KEYS["secret_access_key"] not in str(rejected.value)
        with pytest.raises(StorageError, match="cannot be listed"):
            UrlBackend("s3://pets", StorageAccess.model_validate({"endpoint_url": endpoint, **KEYS})).survey()
    assert fetched(run)["d0"]
