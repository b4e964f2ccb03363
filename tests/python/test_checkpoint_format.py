"""A checkpoint is what docs/checkpoint_format.md says: read here by that document, without the package."""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from checkpoints import checksum_of, contents, drop_all_tables, optimizer_name
from optimizer_kinds import FORMS

from recstore_ops import DistEmbedding, RecStoreClient, SparseOptimizer, Table, checkpoint, table_names

pytestmark = pytest.mark.tier("quick")

DOCUMENT = (Path(__file__).parents[2] / "docs" / "checkpoint_format.md").read_text(encoding="utf-8")
COMPRESSED = DOCUMENT.split("### Compressed files")[1].split("\n## ")[0]
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "I8", "float8_e4m3fn": "F8_E4M3"}
BYTES = {"I64": 8, "F32": 4, "U32": 4, "BF16": 2, "F16": 2, "I8": 1, "F8_E4M3": 1}

Row = tuple[np.ndarray, dict[str, np.ndarray]]


@pytest.fixture(autouse=True)
def _empty_store() -> Iterator[None]:
    drop_all_tables()
    yield
    drop_all_tables()


def documented_keys(heading: str) -> set[str]:
    """The keys of an object: the first column of the table under its heading."""
    section = re.split(r"\n#+ ", DOCUMENT.split(f"# {heading}\n")[1])[0]
    return set(re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE))


def slots_of(config: dict[str, Any], dim: int) -> list[tuple[str, int]]:
    """The slots of a table and their widths, as the document's table has them."""
    optimizer = config["optimizer"]
    (cell,) = re.findall(rf"^\|[^|]*`{optimizer['kind']}`[^|]* \| (.*) \|$", DOCUMENT, flags=re.MULTILINE)
    always, *further = cell.split("; with ")
    listed = always + "".join(clause for clause in further if holds(clause, optimizer))
    if "ema_decay" in config:
        listed += DOCUMENT.split("| any, with `ema_decay` in `config` |")[1].split("|")[0]
    if optimizer.get("catch_up") and optimizer.get("momentum"):
        listed = DOCUMENT.split("instead of `momentum_buffer`")[1].split("|")[0]
    elif optimizer.get("catch_up"):
        listed += DOCUMENT.split("| any, with `catch_up` in `optimizer`, without `momentum` |")[1].split("|")[0]
    return [(name, dim if width == "dim" else int(width)) for name, width in re.findall(r"`(\w+)` (dim|1|2)", listed)]


def holds(clause: str, optimizer: dict[str, Any]) -> bool:
    """Whether an optimizer has the option that a clause begins with: its value, or one above zero."""
    key, _, value = clause.split("`")[1].partition(": ")
    return optimizer.get(json.loads(key)) == json.loads(value) if value else optimizer.get(key, 0) > 0


def as_numbers(content: bytes, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (np.frombuffer(content, "<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E4M3":
        return torch.tensor(bytearray(content), dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    return np.frombuffer(content, {"I64": "<i8", "F32": "<f4", "U32": "<u4", "F16": "<f2", "I8": "<i1"}[dtype])


def expected_tensors(table: dict[str, Any], file: dict[str, Any]) -> dict[str, tuple[str, list[int]]]:
    rows, config = file["rows"], table["config"]
    deleted = {"deleted_ids": ("I64", [file["deleted"]])} if table["is_delta"] else {}
    slots = {f"slot.{name}": ("F32", [rows, width]) for name, width in slots_of(config, table["dim"])}
    kinds = {"admission": {"ids": "I64", "counts": "U32"}, "eviction": {"ids": "I64"}}
    state = {
        f"{part}.{name}": (dtype, [file["state"].pop(f"{part}.{name}")])
        for part, tensors in kinds.items()
        if part in config
        for name, dtype in tensors.items()
    }
    columns_of_rows = {
        "rows": (DTYPES[config["dtype"]], table["dim"]),
        **({"rows.scale": ("F32", 1)} if BYTES[DTYPES[config["dtype"]]] == 1 else {}),
        **{f"slot.{name}": ("F32", width) for name, width in slots_of(config, table["dim"])},
    }
    if "shared_rows" in config.get("admission", {}):
        for name, (dtype, width) in columns_of_rows.items():
            elements = file["state"].pop(f"admission.shared.{name}")
            assert elements in (0, config["admission"]["shared_rows"] * width)
            state[f"admission.shared.{name}"] = (dtype, [elements // width, width])
        state = dict(sorted(state.items(), key=lambda tensor: tensor[0].startswith("eviction.")))
    assert not file["state"]
    usage = {f"usage.{name}": ("I64", [rows]) for name in ("step", "count") if "eviction" in config}
    kind = DTYPES[config["dtype"]]
    columns = {
        **deleted,
        **state,
        "ids": ("I64", [rows]),
        "rows": (kind, [rows, table["dim"]]),
        **({"rows.scale": ("F32", [rows, 1])} if BYTES[kind] == 1 else {}),
        **slots,
        **usage,
    }
    return dict(sorted(columns.items(), key=lambda column: -BYTES[column[1][0]]))


def decompressed(content: bytes, file: dict[str, Any]) -> bytes:
    """The plain file, each frame by itself."""
    compressed = file["compressed"]
    assert set(compressed) == set(re.findall(r"^\| `(\w+)` \|", COMPRESSED, flags=re.MULTILINE))
    assert (compressed["kind"], set(compressed["frames"])) == ("zstd", set(file["checksums"]))
    begins = sorted(compressed["frames"].values())
    assert begins[0] == compressed["frames"]["header"] == 0
    frames = [content[begin:end] for begin, end in zip(begins, [*begins[1:], len(content)], strict=True)]
    plain = b"".join(pa.CompressedInputStream(pa.BufferReader(frame), "zstd").read() for frame in frames)
    assert len(plain) == compressed["bytes"]
    return plain


def read_file(directory: Path, table: dict[str, Any], file: dict[str, Any]) -> dict[str, np.ndarray]:
    assert set(file) - {"compressed"} == documented_keys("A file")
    content = (directory / file["file"]).read_bytes()
    assert len(content) == file["bytes"]
    if "compressed" in file:
        content = decompressed(content, file)
    (length,) = struct.unpack("<Q", content[:8])
    header, tensors = content[8 : 8 + length], content[8 + length :]
    assert length % 8 == 0
    assert zlib.crc32(header) == file["checksums"]["header"]
    described = json.loads(header)
    expected = expected_tensors(table, file)
    assert list(described) == list(expected)
    assert set(file["checksums"]) == {"header", *expected}
    found, last = {}, 0
    for name, (dtype, shape) in expected.items():
        begin, end = described[name].pop("data_offsets")
        assert described[name] == {"dtype": dtype, "shape": shape}
        assert (begin, end - begin) == (last, BYTES[dtype] * int(np.prod(shape)))
        assert zlib.crc32(tensors[begin:end]) == file["checksums"][name]
        found[name] = as_numbers(tensors[begin:end], dtype).reshape(shape)
        last = end
    assert last == len(tensors)
    return found


def read_manifest(directory: Path) -> list[dict[str, Any]]:
    text = (directory / "manifest.json").read_bytes()
    manifest = json.loads(text)
    assert checksum_of(text) == manifest["checksum"]
    assert set(manifest) == documented_keys("The manifest")
    assert (manifest["format"], manifest["version"]) == ("recstore-checkpoint", 2)
    for snapshot in manifest["snapshots"]:
        assert set(snapshot) == documented_keys("A snapshot")
        assert set(snapshot["lineage"]) == documented_keys("A lineage")
        names = [table["name"] for table in snapshot["tables"]]
        assert names == sorted(names)
        for table in snapshot["tables"]:
            assert set(table) == documented_keys("A table")
            optimizer = table["config"]["optimizer"]
            decays = optimizer.get("catch_up") and not optimizer.get("momentum")
            absent = set() if decays else {"idle_kept"}
            assert set(table["progress"]) == documented_keys("The progress of a table") - absent
    return manifest["snapshots"]


def chain_of(snapshots: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest snapshot and those it follows, the oldest first."""
    by_id = {snapshot["id"]: snapshot for snapshot in snapshots}
    chain = [snapshots[-1]]
    while chain[0]["parent"] is not None:
        chain.insert(0, by_id[chain[0]["parent"]])
    return chain


def read_rows(directory: Path, chain: list[dict[str, Any]], name: str) -> dict[int, Row]:
    parts = [table for snapshot in chain for table in snapshot["tables"] if table["name"] == name]
    first = max(place for place, table in enumerate(parts) if not table["is_delta"])
    rows: dict[int, Row] = {}
    for table in parts[first:]:
        for file in table["shards"]:
            tensors = read_file(directory, table, file)
            for deleted in tensors.get("deleted_ids", np.empty(0)):
                rows.pop(int(deleted), None)
            ids = tensors["ids"].tolist()
            assert len(set(ids)) == len(ids)
            slots = {slot: column for slot, column in tensors.items() if slot.startswith("slot.")}
            embeddings = tensors["rows"].astype(np.float32) * tensors.get("rows.scale", np.float32(1))
            for place, number in enumerate(ids):
                rows[number] = embeddings[place], {slot: column[place] for slot, column in slots.items()}
    return rows


def left_of(slots: dict[str, np.ndarray], progress: dict[str, Any]) -> np.float32:
    """What the steps since the row's last one left of it."""
    if "idle_kept" not in progress:
        return np.float32(1)
    (fraction, exponent), now = slots["slot.idle_kept"], progress["idle_kept"]
    if (fraction, exponent) == (np.float32(now["fraction"]), now["exponent"]):
        return np.float32(1)
    return np.float32(now["fraction"] / float(fraction) * 2.0 ** (now["exponent"] - exponent))


def velocity_left(slots: dict[str, np.ndarray], saved: dict[str, Any]) -> float:
    """What the steps since a row's last one left of its velocity."""
    millions, rest = (int(number) for number in slots["slot.idle_step"])
    return saved["config"]["optimizer"]["momentum"] ** (saved["progress"]["step"] - millions * 2**24 - rest)


def coasted(slots: dict[str, np.ndarray], saved: dict[str, Any]) -> np.ndarray | float:
    """What momentum took from a row in the steps since its last one."""
    if "slot.velocity" not in slots:
        return 0.0
    momentum = saved["config"]["optimizer"]["momentum"]
    return np.float32(momentum * (1 - velocity_left(slots, saved)) / (1 - momentum)) * slots["slot.velocity"]


def settled(slots: dict[str, np.ndarray], saved: dict[str, Any]) -> dict[str, np.ndarray]:
    """The slots of a row as they are read: as if its last step had been its table's."""
    now, step = saved["progress"].get("idle_kept"), saved["progress"]["step"]
    if now is not None:
        return {**slots, "slot.idle_kept": np.array([now["fraction"], now["exponent"]], np.float32)}
    if "slot.velocity" not in slots:
        return slots
    velocity = np.float32(velocity_left(slots, saved)) * slots["slot.velocity"]
    return {"slot.velocity": velocity, "slot.idle_step": np.array(divmod(step, 2**24), np.float32)}


def assert_read_as_stored(directory: Path) -> None:
    """Reads the newest snapshot of a directory, and compares it with all tables of the process."""
    chain = chain_of(read_manifest(directory))
    assert [table["name"] for table in chain[-1]["tables"]] == table_names()
    for saved in chain[-1]["tables"]:
        ids, rows, slots, statistics = contents(saved["name"])
        table = Table.open(saved["name"])
        found = read_rows(directory, chain, saved["name"])
        assert sorted(found) == ids.tolist()
        for place, number in enumerate(ids.tolist()):
            row, own_slots = found[number]
            row = row * left_of(own_slots, saved["progress"]) - coasted(own_slots, saved)
            assert np.array_equal(row, rows[place].numpy())
            own_slots = settled(own_slots, saved)
            assert own_slots.keys() == {f"slot.{slot}" for slot in slots}
            assert all(np.array_equal(own_slots[f"slot.{slot}"], slots[slot][place].numpy()) for slot in slots)
        del saved["progress"]["sweep"]
        saved["progress"].pop("idle_kept", None)
        assert {key: statistics[key] for key in saved["progress"]} == saved["progress"]
        assert statistics["rows"] == len(found)
        assert saved["dim"] == table.dim
        config = {
            key: value for key, value in asdict(table.config).items() if value is not None or key == "num_embeddings"
        }
        assert saved["config"].keys() == config.keys()
        for key, value in config.items():
            assert saved["config"][key] == (value if not isinstance(value, tuple) else list(value))


def step(modules: list[DistEmbedding], ids: torch.Tensor) -> None:
    for module in modules:
        module(ids).float().square().sum().backward()
    SparseOptimizer().step(modules)


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES], ids=str)
def test_checkpoints_read_by_the_document_hold_what_the_tables_do(dtype: torch.dtype, tmp_path: Path) -> None:
    modules = [
        DistEmbedding(None, 3, f"{optimizer_name(optimizer)}/é {number}", optimizer=optimizer, dtype=dtype)
        for number, optimizer in enumerate(FORMS)
        if dtype == torch.float32 or "catch_up" not in optimizer
    ]
    modules.insert(1, DistEmbedding(None, 3, "averaged", optimizer="adam", dtype=dtype, ema_decay=0.5))
    step(modules, torch.arange(-10, 11))
    checkpoint.save(tmp_path, metadata={"epoch": 1})
    assert_read_as_stored(tmp_path)
    client = RecStoreClient()
    for module in modules:
        client.delete(module.name, torch.tensor([0, 1, 2]))
    step(modules[1:], torch.tensor([2, 2**62, -(2**63)]))
    checkpoint.save(tmp_path, kind="delta", metadata=[], compression="zstd")
    assert_read_as_stored(tmp_path)
    client.drop(modules[0].name)
    modules[0] = DistEmbedding(None, 5, modules[0].name, optimizer="adam", dtype=dtype)
    client.drop(modules.pop().name)
    step([*modules, DistEmbedding(9, 1, "new")], torch.arange(9))
    client.set_learning_rate("new", 0.1 + 0.2)
    checkpoint.save(tmp_path, kind="delta")
    assert_read_as_stored(tmp_path)
    snapshots = read_manifest(tmp_path)
    assert [snapshot["parent"] for snapshot in snapshots] == [None, snapshots[0]["id"], snapshots[1]["id"]]
    assert [snapshot["metadata"] for snapshot in snapshots] == [{"epoch": 1}, [], None]


def test_what_admission_and_eviction_remember_is_as_the_document_says(tmp_path: Path) -> None:
    counted = {"kind": "count", "threshold": 3}
    modules = [
        DistEmbedding(None, 2, "counted", admission=counted, eviction={"ttl": 1, "interval": 2, "delay": 2}),
        DistEmbedding(None, 2, "sketched", admission={"kind": "sketch", "threshold": 2, "epsilon": 0.3, "delta": 0.3}),
    ]
    RecStoreClient().push("counted", torch.tensor([90, 91]), torch.ones(2, 2))
    for ids in ([5, 3], [5], [4, 5, 4], [5]):
        step(modules, torch.tensor(ids))
    assert_read_as_stored_after_save(tmp_path)
    snapshot = read_manifest(tmp_path)[-1]
    counted_table, sketched_table = snapshot["tables"]
    # 90 and 91 were written before the first step; the sweep after the fourth sees them unseen for three.
    assert counted_table["progress"]["sweep"] == {"began": 4, "leaves": 6}
    tensors = read_file(tmp_path, counted_table, counted_table["shards"][0])
    usage = zip(*(tensors[name].tolist() for name in ("ids", "usage.step", "usage.count")), strict=True)
    assert sorted(usage) == [(5, 4, 2), (90, 1, 0), (91, 1, 0)]
    assert tensors["eviction.ids"].tolist() == [90, 91]
    assert dict(zip(tensors["admission.ids"].tolist(), tensors["admission.counts"].tolist(), strict=True)) == {
        3: 1,
        4: 1,
    }
    tensors = read_file(tmp_path, sketched_table, sketched_table["shards"][0])
    # Two rows of ten counters; 5 was counted until it had a row.
    assert tensors["admission.counts"].shape == (20,)
    assert tensors["admission.counts"].max() == 2
    assert len(tensors["admission.ids"]) == 0


def splitmix64(z: int, first: int = 0x9E3779B97F4A7C15) -> int:
    z = (z + first) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return z ^ (z >> 31)


def shared_row_of(id: int, name: str, seed: int, count: int) -> int:
    fnv = 0xCBF29CE484222325
    for byte in name.encode():
        fnv = ((fnv ^ byte) * 0x100000001B3) & (2**64 - 1)
    of_table = splitmix64(fnv ^ (seed * 0x9E3779B97F4A7C15 & (2**64 - 1)), first=0)
    return splitmix64(id & (2**64 - 1) ^ of_table) % count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_shared_rows_are_as_the_document_says(tmp_path: Path, dtype: torch.dtype) -> None:
    admission = {"kind": "count", "threshold": 3, "shared_rows": 5}
    module = DistEmbedding(None, 2, "shared", optimizer="adam", dtype=dtype, seed=3, admission=admission)
    checkpoint.save(tmp_path)
    (untrained,) = read_manifest(tmp_path)[-1]["tables"]
    assert read_file(tmp_path, untrained, untrained["shards"][0])["admission.shared.rows"].shape == (0, 2)
    for ids in ([5, -3], [5], [4, 5, 4]):
        step([module], torch.tensor(ids))
    assert_read_as_stored_after_save(tmp_path)
    (table,) = read_manifest(tmp_path)[-1]["tables"]
    tensors = read_file(tmp_path, table, table["shards"][0])
    rows = tensors["admission.shared.rows"].astype(np.float32) * tensors.get("admission.shared.rows.scale", 1)
    ids = [-3, 4, 17, 2**62]
    found = module(torch.tensor(ids)).detach().float().numpy()
    np.testing.assert_array_equal(rows[[shared_row_of(id, "shared", 3, 5) for id in ids]], found)
    assert tensors["admission.shared.slot.exp_avg"].shape == (5, 2)
    assert np.abs(tensors["admission.shared.slot.exp_avg"]).max() > 0


def assert_read_as_stored_after_save(directory: Path) -> None:
    checkpoint.save(directory)
    assert_read_as_stored(directory)


def test_the_document_names_the_files_of_a_directory(tmp_path: Path) -> None:
    name = "a/é" + "x" * 80
    DistEmbedding(None, 2, name)
    report = checkpoint.save(tmp_path)
    assert re.fullmatch("[0-9a-f]{16}", report.snapshot)
    file = f"{report.snapshot}-000-a__{'x' * 61}.safetensors"
    assert {path.name for path in tmp_path.iterdir()} == {"manifest.json", ".lock", file}
    assert (tmp_path / ".lock").stat().st_size == 0


def test_files_of_other_names_are_left_alone(tmp_path: Path) -> None:
    DistEmbedding(None, 2, "t")
    checkpoint.save(tmp_path)
    mine = {"model.safetensors", "0123456789abcdef-notes.txt", "0123456789abcde-t.safetensors"}
    mine |= {"0123456789abcdef-000-t.safetensors"}
    for name in mine:
        (tmp_path / name).write_text("")
    report = checkpoint.save(tmp_path)
    expected = {*mine, "manifest.json", ".lock", f"{report.snapshot}-000-t.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == expected


def changed_manifest(directory: Path, change: Any) -> None:
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    text = json.dumps(manifest)
    path.write_text(text.replace(manifest["checksum"], checksum_of(text.encode())))


def test_a_manifest_that_was_changed_is_refused(tmp_path: Path) -> None:
    DistEmbedding(None, 2, "t")
    checkpoint.save(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace('"step": 0', '"step": 1'))
    with pytest.raises(RuntimeError, match=f"{path}: it was changed: its checksum is another"):
        checkpoint.load(tmp_path)


def first_file(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["snapshots"][0]["tables"][0]["shards"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda manifest: manifest.update(format="x"), 'expected the format "recstore-checkpoint", got "x"'),
        (lambda manifest: manifest.update(version=3), "this release reads the versions 1 to 2, the checkpoint has 3"),
        (lambda manifest: manifest.update(more=1), "unknown field `more`"),
        (lambda manifest: manifest["snapshots"][0].pop("created"), "missing field `created`"),
        (lambda manifest: manifest["snapshots"].pop(0), "which is missing: the chain has a gap"),
        (lambda manifest: manifest["snapshots"][0].update(parent=manifest["snapshots"][1]["id"]), "follows itself"),
        (lambda manifest: manifest["snapshots"][0]["tables"].clear(), 'lacks the table "t"'),
        (lambda manifest: manifest["snapshots"][0]["tables"][0].update(is_delta=True), "no full snapshot of the table"),
        (lambda manifest: first_file(manifest).update(file="../x.safetensors"), "is not the name of a file"),
        (lambda manifest: first_file(manifest)["state"].update({"eviction.ids": 10**9}), "it cannot hold"),
        (lambda manifest: first_file(manifest).update(bytes=1), "expected 1 bytes, got"),
        (lambda manifest: first_file(manifest).update(rows=3), 'expected the tensor "ids" as I64 [3], got I64 [2]'),
        (lambda manifest: first_file(manifest)["checksums"].update(rows=1), '"rows" was changed: its checksum is'),
        (lambda manifest: first_file(manifest)["checksums"].pop("ids"), 'the manifest has no checksum of "ids"'),
        (lambda manifest: manifest["snapshots"].clear(), "there is no checkpoint here"),
    ],
)
def test_what_a_reader_must_check_is_checked(change: Any, message: str, tmp_path: Path) -> None:
    DistEmbedding(None, 2, "t")
    RecStoreClient().push("t", torch.tensor([1, 2]), torch.ones(2, 2))
    checkpoint.save(tmp_path)
    checkpoint.save(tmp_path, kind="delta")
    changed_manifest(tmp_path, change)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize(("ids", "message"), [([5, 5], "the id 5 comes twice"), ([1, 9], "id 9 at position 1")])
def test_ids_of_a_file_are_checked(ids: list[int], message: str, tmp_path: Path) -> None:
    DistEmbedding(9, 2, "t")
    RecStoreClient().push("t", torch.tensor([1, 2]), torch.ones(2, 2))
    checkpoint.save(tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    content = path.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    column = struct.pack("<2q", *ids)
    path.write_bytes(content[:start] + column + content[start + len(column) :])
    changed_manifest(tmp_path, lambda manifest: first_file(manifest)["checksums"].update(ids=zlib.crc32(column)))
    with pytest.raises(RuntimeError, match=f"{path}: .*{message}"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_pipe_in_the_place_of_a_file_is_named_and_holds_nobody_up(tmp_path: Path, compression: Any) -> None:
    DistEmbedding(None, 2, "t")
    checkpoint.save(tmp_path, compression=compression)
    for path in [tmp_path / "manifest.json", *tmp_path.glob("*.safetensors*")]:
        text = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(RuntimeError, match=f"{path.name}: it is a FIFO, not a regular file"):
            checkpoint.load(tmp_path)
        if path.name != "manifest.json":
            (found,) = checkpoint.verify(tmp_path).findings
            assert (found.kind, found.file, found.message) == ("damaged", path.name, "it is a FIFO, not a regular file")
        path.unlink()
        path.write_bytes(text)
    checkpoint.load(tmp_path)
