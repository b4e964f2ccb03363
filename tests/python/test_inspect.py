"""`inspect_table`: what it reports of a table, and that looking changes nothing."""

from __future__ import annotations

import io
import math
from collections.abc import Callable

import pytest
import torch
from optimizer_kinds import REGISTRY
from rich.console import Console

from recstore_ops import DistEmbedding, RecStoreClient, SparseOptimizer, inspect_table, table_statistics
from recstore_ops.inspect import RowNorms, TableReport

pytestmark = pytest.mark.tier("quick")

TableName = Callable[[], str]


def printed(report: TableReport) -> str:
    stream = io.StringIO()
    report.print(Console(file=stream, width=200))
    return stream.getvalue()


def trained(name: str, ids: list[int], optimizer: str = "adam") -> DistEmbedding:
    """Rows of ones, then one step with the gradient 1."""
    module = DistEmbedding(None, 4, name, optimizer=optimizer, initializer={"kind": "constant", "value": 1.0})
    module(torch.tensor(ids)).sum().backward()
    SparseOptimizer(modules=[module]).step()
    return module


def test_a_report_has_name_configuration_and_statistics(table_name: TableName) -> None:
    module = trained(table_name(), [3, 7])
    report = inspect_table(module.name)
    assert (report.name, report.dim, report.config.optimizer["kind"]) == (module.name, 4, "adam")
    assert report.statistics == table_statistics(module.name)
    assert report.rows == []


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [
        (kind, {slot["name"]: slot["width"] or 4 for slot in rule["slots"] if slot["with"] is None})
        for kind, rule in REGISTRY.items()
    ],
)
def test_slots_and_bytes_of_a_row(optimizer: str, slots: dict[str, int], table_name: TableName) -> None:
    report = inspect_table(trained(table_name(), [3], optimizer).name)
    assert (report.slots, report.bytes_per_row) == (slots, (4 + sum(slots.values())) * 4)


def test_norms_are_over_the_rows(table_name: TableName) -> None:
    module = DistEmbedding(None, 2, table_name())
    RecStoreClient().push(module.name, torch.tensor([1, 2]), torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    assert inspect_table(module.name).norms == RowNorms(rows=2, minimum=1.0, mean=3.0, maximum=5.0)


def test_norms_of_a_large_table_are_over_a_sample(table_name: TableName) -> None:
    module = DistEmbedding(None, 1, table_name())
    RecStoreClient().push(module.name, torch.arange(100), torch.arange(100.0).unsqueeze(1))
    norms = inspect_table(module.name, sample=30).norms
    assert norms == RowNorms(rows=25, minimum=0.0, mean=48.0, maximum=96.0)


def test_a_table_without_rows_has_no_norms(table_name: TableName) -> None:
    module = DistEmbedding(None, 2, table_name())
    report = inspect_table(module.name)
    assert report.norms is None
    assert "no rows" in printed(report)


def test_norms_show_that_a_row_is_not_finite(table_name: TableName) -> None:
    module = DistEmbedding(None, 1, table_name(), nan_policy="allow")
    RecStoreClient().push(module.name, torch.tensor([1, 2]), torch.tensor([[1.0], [math.nan]]))
    norms = inspect_table(module.name).norms
    assert norms is not None
    assert math.isnan(norms.maximum)


def test_rows_of_ids_come_in_the_order_asked_for(table_name: TableName) -> None:
    module = trained(table_name(), [3, -7])
    for ids in ([-7, 5, 3], torch.tensor([[-7, 5, 3]])):
        rows = inspect_table(module.name, ids).rows
        assert [(row.id, row.is_stored) for row in rows] == [(-7, True), (5, False), (3, True)]
        assert torch.equal(rows[0].values, module(torch.tensor(-7)))
        assert rows[1].values.tolist() == [1.0] * 4
        assert rows[1].slots == {}
        # One Adam step with the gradient 1 and betas (0.9, 0.999), rounded to float32.
        assert rows[2].slots["exp_avg"].tolist() == pytest.approx([0.1] * 4)
        assert rows[2].slots["exp_avg_sq"].tolist() == pytest.approx([1e-3] * 4)


def test_looking_changes_nothing(table_name: TableName) -> None:
    module = trained(table_name(), [3])
    module(torch.tensor([4])).sum().backward()
    before, trace = table_statistics(module.name), module._trace
    inspect_table(module.name, [3, 5])
    assert table_statistics(module.name) == before
    assert torch.equal(module._trace[0][1], trace[0][1])


def test_an_unknown_table_is_named() -> None:
    with pytest.raises(KeyError, match='there is no table "absent"'):
        inspect_table("absent")


def test_ids_and_sample_are_checked(table_name: TableName) -> None:
    module = DistEmbedding(10, 2, table_name())
    with pytest.raises(TypeError, match="ids must be int64"):
        inspect_table(module.name, torch.tensor([0.5]))
    with pytest.raises(IndexError, match="10"):
        inspect_table(module.name, [10])
    with pytest.raises(ValueError, match="sample must be at least 1"):
        inspect_table(module.name, sample=0)


def test_a_report_prints_as_plain_tables(table_name: TableName) -> None:
    name = f"[red]{table_name()}"
    text = printed(inspect_table(trained(name, [3]).name, [3, 5]))
    assert f'table "{name}"' in text
    assert "exp_avg [4], exp_avg_sq [4]" in text
    assert "adam, lr 0.01" in text
    row = next(line for line in text.splitlines() if line.lstrip().startswith("3 "))
    assert "yes" in row
    assert "0.99 0.99 0.99 0.99" in row
    assert "0.1 0.1 0.1 0.1" in row
