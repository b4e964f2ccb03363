"""The checkpoints of format 1 in `rust/recstore/tests/fixtures/checkpoint_v1` are read to the bit for ever."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import drop_all_tables
from torch import Tensor

from recstore_ops import _native, checkpoint, inspect_checkpoint, table_names
from recstore_ops.ops import operators
from recstore_ops.table.table import Table

FIXTURES = Path(__file__).parents[2] / "rust" / "recstore" / "tests" / "fixtures" / "checkpoint_v1"
EXPECTED_OF = {"chain": "chain", "zstd": "chain", "shards": "shards"}

pytestmark = [
    pytest.mark.tier("quick"),
    pytest.mark.embedded_only("the fixtures are of one process's tables"),
]


@pytest.fixture(autouse=True)
def _empty_store() -> Iterator[None]:
    drop_all_tables()
    yield
    drop_all_tables()


def expected_of(directory: str) -> dict[str, Any]:
    return json.loads((FIXTURES / f"{EXPECTED_OF[directory]}.json").read_text(encoding="utf-8"))


def words(values: Tensor) -> str:
    """A row as the fixtures write it down: the bits of its floats in hexadecimal."""
    return " ".join(f"{word & 0xFFFFFFFF:08x}" for word in values.float().view(torch.int32).flatten().tolist())


def assert_table(name: str, recorded: dict[str, Any]) -> None:
    table = Table.open(name)
    ids = operators.hashtable_ids(table.handle)
    assert sorted(ids.tolist()) == sorted(int(number) for number in recorded["rows"])
    assert (_native.table_slots(name) or []) == [tuple(slot) for slot in recorded["slots"]]
    slots = [operators.hashtable_slot(table.handle, ids, slot) for slot, _ in recorded["slots"]]
    columns = [operators.emb_read(table.handle, ids, table.dim), *slots]
    for place, number in enumerate(ids.tolist()):
        assert [words(column[place]) for column in columns] == recorded["rows"][str(number)], (name, number)
    for number, row in recorded["initial"].items():
        assert words(operators.emb_read(table.handle, torch.tensor([int(number)]), table.dim)) == row
    statistics = table.statistics()
    assert {key: statistics[key] for key in recorded["statistics"]} == recorded["statistics"]


@pytest.mark.parametrize("directory", EXPECTED_OF)
def test_load_reads_them_to_the_bit(directory: str) -> None:
    expected = expected_of(directory)
    report = checkpoint.load(FIXTURES / directory, progress=False)
    assert report.metadata == expected["metadata"]
    assert table_names() == sorted(report.tables)
    for name in table_names():
        assert_table(name, expected["tables"][name])
    assert len(table_names()) == {"chain": 15, "zstd": 7, "shards": 2}[directory]


def test_one_more_step_gives_what_is_written_down() -> None:
    expected = expected_of("chain")
    checkpoint.load(FIXTURES / "chain", progress=False)
    for name, (ids, gradients) in expected["step"].items():
        table = Table.open(name)
        operators.emb_update(table.handle, torch.tensor(ids), torch.tensor(gradients).view(len(ids), table.dim))
        assert_table(name, expected["after"][name])


@pytest.mark.parametrize("directory", EXPECTED_OF)
def test_inspect_checkpoint_describes_them(directory: str) -> None:
    expected = expected_of(directory)
    report = inspect_checkpoint(FIXTURES / directory)
    assert [snapshot.metadata["snapshot"] for snapshot in report.snapshots] == (
        [1, 2] if directory == "shards" else [1, 2, 3]
    )
    for name, saved in report.tables.items():
        recorded = expected["tables"][name]
        assert (saved.table.dim, list(saved.table.slots.items())) == (
            recorded["dim"],
            [tuple(slot) for slot in recorded["slots"]],
        )
        assert saved.table.statistics["rows"] == len(recorded["rows"])
    assert_shown(directory, "counted and lru", expected["tables"]["counted and lru"]["rows"])


def assert_shown(directory: str, name: str, recorded: dict[str, list[str]]) -> None:
    shown = inspect_checkpoint(FIXTURES / directory, name, [int(number) for number in recorded]).tables[name].table.rows
    assert len(shown) == len(recorded) > 0
    for row in shown:
        assert row.is_stored
        assert [words(row.values), *(words(slot) for slot in row.slots.values())] == recorded[str(row.id)]


def test_inspect_checkpoint_needs_no_update_rule_of_another_program() -> None:
    recorded = json.loads((FIXTURES / "own.json").read_text(encoding="utf-8"))["tables"]["own"]
    table = inspect_checkpoint(FIXTURES / "own").tables["own"].table
    assert table.config.optimizer == {"kind": "rule", "name": "own", "lr": 0.25}
    assert list(table.slots.items()) == [tuple(slot) for slot in recorded["slots"]]
    assert_shown("own", "own", recorded["rows"])
    with pytest.raises(RuntimeError, match='the update rule "own" is not registered with this store'):
        checkpoint.load(FIXTURES / "own", progress=False)
