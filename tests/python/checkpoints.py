"""What the tests of checkpoints share: an empty store, and all that a table holds."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recstore_ops import RecStoreClient, Table, _native, table_names
from recstore_ops.ops import operators

Contents = tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Any]]


def optimizer_name(optimizer: dict[str, Any]) -> str:
    return "-".join(str(value) for value in optimizer.values() if isinstance(value, str))


def drop_all_tables() -> None:
    """A save is about all tables of the process, those that other tests left included."""
    for name in table_names():
        RecStoreClient().drop(name)


def contents(name: str) -> Contents:
    """The ids of a table, rising; their rows and slots; and the counts that checkpoints hold."""
    table = Table.open(name)
    ids = operators.hashtable_ids(table.handle).sort().values
    slots = {slot: operators.hashtable_slot(table.handle, ids, slot) for slot, _ in _native.table_slots(name) or []}
    statistics = {key: value for key, value in table.statistics().items() if "bytes" not in key and key != "writes"}
    return ids, operators.emb_read(table.handle, ids, table.dim), slots, statistics


def assert_same(actual: Contents, expected: Contents) -> None:
    """Asserts that two tables are equal to the bit."""
    for one, other in [(actual[0], expected[0]), (actual[1], expected[1])]:
        assert torch.equal(one, other)
    assert actual[2].keys() == expected[2].keys()
    assert all(torch.equal(actual[2][slot], expected[2][slot]) for slot in expected[2])
    assert actual[3] == expected[3]


def snapshots_of(directory: Path) -> list[dict[str, Any]]:
    """The snapshots that a manifest lists."""
    return json.loads((directory / "manifest.json").read_bytes())["snapshots"]


def checksum_of(manifest: bytes) -> str:
    """The checksum that a manifest should have."""
    before, key, behind = manifest.rpartition(b'"checksum": "')
    return f"{zlib.crc32(before + key + b'00000000' + behind[8:]):08x}"


def write_manifest(directory: Path, snapshots: list[dict[str, Any]]) -> None:
    """Puts these snapshots in the place of a manifest's, with a checksum that is right."""
    manifest = {"format": "recstore-checkpoint", "version": 2, "snapshots": snapshots, "ended": [], "checksum": "-" * 8}
    text = json.dumps(manifest)
    (directory / "manifest.json").write_text(text.replace("-" * 8, checksum_of(text.encode())))
