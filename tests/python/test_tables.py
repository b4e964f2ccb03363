"""What holds a model's tables in training: the store, or `nn.Embedding` with the same initial rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from recstore_ops import table_names, table_statistics
from recstore_ops.training import Batch, NnTables, StoreTables, Vocabulary

pytestmark = pytest.mark.tier("quick")

TableName = Callable[[], str]


def block(*ids: int) -> Batch:
    return Batch(ids=torch.tensor(ids, dtype=torch.int64), labels=torch.zeros(len(ids)))


def test_both_start_with_the_same_rows(table_name: TableName) -> None:
    name = table_name()
    vocabulary = Vocabulary([block(2**62, -5, 7), block(7, 0)])
    theirs = NnTables(vocabulary.ids, name, seed=3)("v", 4, 0.1)
    assert f"{name}/v" not in table_names()
    ours = StoreTables(name, "adam", seed=3)("v", 4, 0.1)
    batch = block(7, 2**62, 7)
    assert torch.equal(ours(batch.ids).detach(), theirs(vocabulary.places(batch.ids)).detach())
    assert table_statistics(f"{name}/v")["rows"] == 0
    assert isinstance(theirs, nn.Embedding)
    assert theirs.sparse
    assert theirs.weight.requires_grad


@pytest.mark.parametrize("std", [0.0, 0.5])
def test_a_table_without_a_deviation_starts_at_zero(table_name: TableName, std: float) -> None:
    rows = StoreTables(table_name(), "sgd")("w", 2, std)(torch.arange(100)).detach()
    assert bool((rows == 0).all()) == (std == 0.0)


def test_the_vocabulary_has_every_id_once() -> None:
    vocabulary = Vocabulary([block(3, -(2**63), 3), block(), block(2**63 - 1, 0, -1)])
    assert vocabulary.ids.tolist() == [-(2**63), -1, 0, 3, 2**63 - 1]
    assert len(vocabulary) == 5
    assert vocabulary.places(block(0, 3, -1).ids).tolist() == [2, 3, 1]


@pytest.mark.tier("all")
def test_many_blocks_are_merged_on_the_way() -> None:
    blocks = (
        Batch(ids=torch.arange(start, start + 300_000), labels=torch.zeros(0)) for start in range(0, 3_000_000, 100_000)
    )
    assert torch.equal(Vocabulary(blocks).ids, torch.arange(3_200_000))


def test_no_rows_have_an_empty_vocabulary() -> None:
    assert len(Vocabulary([])) == 0
