"""Checkpoints in object stores and compressed ones, from Python."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import safetensors.torch
import torch
from checkpoints import assert_same, contents, drop_all_tables

from recstore_ops import DistEmbedding, RecStoreClient, checkpoint, get_kv_client

pytestmark = pytest.mark.tier("quick")

IDS = torch.arange(500)


@pytest.fixture(autouse=True)
def _empty_store() -> Iterator[None]:
    drop_all_tables()
    yield
    drop_all_tables()


@pytest.fixture
def client() -> RecStoreClient:
    DistEmbedding(None, 4, "t", optimizer="adam")
    get_kv_client().push("t", IDS, IDS[:, None].expand(-1, 4) / 7)
    return get_kv_client()


def test_a_url_of_files_is_saved_to_and_loaded_from(client: RecStoreClient, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/deep/model"
    assert not checkpoint.save(url, metadata=1, progress=False).is_delta
    client.push("t", IDS[:3], torch.ones(3, 4))
    assert client.save_async(url, kind="delta", metadata=2).result().rows == 3
    expected = contents("t")
    drop_all_tables()
    assert client.load(url, progress=False).metadata == 2
    assert_same(contents("t"), expected)
    names = {path.name for path in (tmp_path / "deep" / "model").iterdir()}
    assert {"manifest-0000000001.json", "manifest-0000000002.json"} < names
    checkpoint.load(url, shard=(1, 2))
    assert bool((checkpoint.shard_of(contents("t")[0], 2) == 1).all())


def test_what_is_wrong_with_a_url_is_told(client: RecStoreClient, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/model"
    with pytest.raises(RuntimeError, match=rf"{url}: there is no checkpoint here"):
        checkpoint.load(url)
    for place, options, message in [
        ("gs://bucket/model", {}, r"expected a URL of s3:// or file://, got gs://"),
        (url, {"region": "x"}, r"file:// has no storage option \"region\""),
        ("s3://bucket/model", {"regoin": "x"}, r"s3:// has no storage option \"regoin\""),
        (str(tmp_path), {"region": "x"}, r"storage_options are for URLs; .* is a directory"),
    ]:
        for call in (client.save, client.load):
            with pytest.raises(ValueError, match=message):
                call(place, storage_options=options)
    wrong: Any = {"timeout": 3}
    with pytest.raises(TypeError, match=r"storage_options are strings by their names, got 'timeout': int"):
        checkpoint.save("s3://bucket/model", storage_options=wrong)
    for name, call in [
        ("compact", lambda: checkpoint.compact(url)),
        ("commit", lambda: checkpoint.commit(url, checkpoint.new_snapshot_name(), 1)),
        ("save_part", lambda: checkpoint.save_part(url, checkpoint.new_snapshot_name(), 0, 1)),
    ]:
        with pytest.raises(ValueError, match=f"{name} needs a directory, got {url}"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_an_object_store_that_does_not_answer_is_named(client: RecStoreClient) -> None:
    options = {
        "region": "eu-west-1",
        "endpoint": "http://127.0.0.1:9",
        "allow_http": "true",
        "access_key_id": "x",
        "secret_access_key": "y",
        "timeout": "1s",
    }
    before = contents("t")
    with pytest.raises(RuntimeError, match="checkpoint: s3://bucket/model: the object"):
        client.load("s3://bucket/model", storage_options=options)
    assert_same(contents("t"), before)


@pytest.mark.parametrize("compression", ["zstd", ("zstd", 1), ("zstd", 19)])
def test_compressed_files_hold_the_plain_ones(client: RecStoreClient, tmp_path: Path, compression: Any) -> None:
    plain = checkpoint.save(tmp_path / "plain")
    report = client.save(tmp_path / "zstd", compression=compression)
    assert report.bytes < plain.bytes
    expected = contents("t")
    shard = json.loads((tmp_path / "zstd" / "manifest.json").read_text())["snapshots"][0]["tables"][0]["shards"][0]
    assert shard["compressed"]["level"] == (3 if compression == "zstd" else compression[1])
    with pa.CompressedInputStream(pa.OSFile(str(tmp_path / "zstd" / shard["file"])), "zstd") as stream:
        data = stream.read()
    assert len(data) == shard["compressed"]["bytes"]
    (file,) = (tmp_path / "plain").glob("*.safetensors")
    tensors = safetensors.torch.load(data)
    of_plain = safetensors.torch.load_file(file)
    assert all(torch.equal(tensors[name], of_plain[name]) for name in of_plain)
    drop_all_tables()
    checkpoint.load(tmp_path / "zstd")
    assert_same(contents("t"), expected)
    checkpoint.save_async(tmp_path / "zstd", kind="auto", compression=compression).result()
    checkpoint.compact(tmp_path / "zstd")
    assert [path.suffix for path in (tmp_path / "zstd").glob("*.safetensors*")] == [".zst"]


@pytest.mark.parametrize("compression", ["gzip", ("zstd", 0), ("zstd", 20), ("zstd", True), ("zstd", 1.0)])
def test_other_compressions_are_refused(client: RecStoreClient, tmp_path: Path, compression: Any) -> None:
    with pytest.raises(ValueError, match=r'compression must be None, "zstd" or \("zstd", level\)'):
        client.save(tmp_path, compression=compression)
    assert list(tmp_path.iterdir()) == []


def test_a_compressed_file_that_was_cut_is_named(client: RecStoreClient, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, compression="zstd")
    before = contents("t")
    (file,) = tmp_path.glob("*.safetensors.zst")
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(RuntimeError, match=f"{file.name}: expected .* bytes"):
        checkpoint.load(tmp_path)
    assert_same(contents("t"), before)
