"""What a notebook shows of objects: tables of HTML, well-formed, escaped, with the figures of the objects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from html_tables import Shown
from training_runs import train_new

from recstore_ops import (
    DistEmbedding,
    HashTable,
    RecStoreClient,
    SparseOptimizer,
    Table,
    checkpoint,
    inspect_checkpoint,
    inspect_table,
    table_statistics,
)
from recstore_ops.config.html_table import Figures, html_table
from recstore_ops.training import TrainingConfig

pytestmark = pytest.mark.tier("quick")

TableName = Callable[[], str]


def trained(name: str) -> DistEmbedding:
    module = DistEmbedding(None, 4, name, optimizer={"kind": "adagrad", "lr": 0.5})
    module(torch.arange(1500)).sum().backward()
    SparseOptimizer(modules=[module]).step()
    return module


@pytest.mark.parametrize("show", [lambda module: module, lambda module: module.table], ids=["module", "Table"])
def test_a_table_shows_configuration_and_statistics(
    show: Callable[[DistEmbedding], Any], table_name: TableName
) -> None:
    name = f"{table_name()} <script>&"
    rows = Shown(show(trained(name))).rows
    assert rows[0] == [f'table "{name}"', ""]
    for row in (["dim", "4"], ["rows", "1,500"], ["optimizer", "adagrad, lr 0.5"], ["num embeddings", "none"]):
        assert row in rows
    RecStoreClient().drop(name)


def test_a_hash_table_shows_its_table(table_name: TableName) -> None:
    table = HashTable(2, name=table_name())
    assert Shown(table).rows == Shown(table.table).rows


def test_a_table_that_was_dropped_says_so(table_name: TableName) -> None:
    table = Table(table_name(), 3)
    RecStoreClient().drop(table.name)
    assert Shown(table).rows[-1] == ["statistics", f'table "{table.name}" was dropped']


def test_statistics_are_a_dictionary_that_shows_itself(table_name: TableName) -> None:
    statistics = table_statistics(trained(table_name()).name)
    assert isinstance(statistics, dict)
    assert repr(statistics) == repr(dict(statistics))
    assert ["rows", "1,500"] in Shown(statistics).rows
    assert len(Shown(statistics).rows) == len(statistics) + 1


def test_a_report_of_a_table_shows_its_rows(table_name: TableName) -> None:
    report = inspect_table(trained(table_name()).name, [3, -1])
    stored, absent = Shown(report).rows[-2:]
    assert stored[:2] == ["3", "yes"]
    assert (absent[:2], absent[3]) == (["-1", "no"], "-")
    assert "id" not in [row[0] for row in Shown(inspect_table(report.name)).rows]


def test_saves_loads_and_checkpoints_show_what_they_hold(table_name: TableName, tmp_path: Path) -> None:
    for other in RecStoreClient().data_name_list():
        RecStoreClient().drop(other)
    name = trained(table_name()).name
    saved = checkpoint.save(tmp_path)
    assert ["rows", "1,500"] in Shown(saved).rows
    assert [name, "1,500"] in Shown(checkpoint.load(tmp_path)).rows
    RecStoreClient().drop(name)
    for other in RecStoreClient().data_name_list():
        RecStoreClient().drop(other)
    head, snapshot, of_tables, table = Shown(inspect_checkpoint(tmp_path)).rows
    assert (head[0], snapshot[:2]) == (f"snapshots of {tmp_path}", [saved.snapshot, "full"])
    assert of_tables == ["table", "dim", "optimizer", "rows"]
    assert (table[0], table[1], table[3]) == (name, "4", "1,500")


def test_cells_are_escaped() -> None:
    assert "<b>" not in html_table(["<b>"], [["<b>"]])
    assert Shown(Figures({"<b>": "&amp;"})).rows == [["", ""], ["<b>", "&amp;"]]


def test_evaluations_show_their_figures_and_stay_a_list(small_files: Path, table_name: TableName) -> None:
    config = TrainingConfig(train=(small_files / "train.libfm",), epochs=2)
    records = train_new(config, table_name())
    head, first, second = Shown(records).rows
    assert isinstance(records, list)
    assert head[:4] == ["epoch", "step", "train loss", "validation logloss"]
    assert [first[0], second[0]] == ["1", "2"]
    assert second[2] == f"{records[1].train_loss:.4f}"
