"""Ids that come as numbers of Python or numpy: no other numbers are taken for them, and then nothing changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    KVWorker,
    RecStoreClient,
    embedding,
    embedding_bag,
    forget,
    inspect_checkpoint,
    inspect_table,
    table_names,
    table_statistics,
)
from recstore_ops.ops import operators
from recstore_ops.table.checks import as_ids

pytestmark = pytest.mark.tier("quick")

WRONG = {
    "float": [1.9],
    "whole float": [1.0],
    "truth value": [True],
    "one of several": [0, 2.5],
    "text": ["1"],
    "none": [None],
    "list in a list": [[1], [2.5]],
    "numpy floats": np.array([1.9]),
    "numpy truth values": np.array([True]),
    "numpy float": [np.float32(1.0)],
    "numpy truth value": [np.bool_(True)],
    "numpy objects": np.array([1.9, 2], dtype=object),
    "tensor": torch.tensor([1.9]),
    "tensor of truth values": torch.tensor([True]),
    "tensor in a list": [torch.tensor(1.5)],
    "truth value as a tensor": [torch.tensor(True)],
}

READ_AND_WRITTEN: dict[str, Callable[[DistEmbedding, Any], Any]] = {
    "weight[ids]": lambda module, ids: module.weight[ids],
    "weight[ids] = rows": lambda module, ids: module.weight.__setitem__(ids, torch.ones(1, 2)),
    "inspect_table": lambda module, ids: inspect_table(module.name, ids=ids),
    "as_ids": lambda module, ids: as_ids(ids),
}
"""The calls that take ids of any of these forms."""


@pytest.fixture
def module(table_name: Callable[[], str]) -> DistEmbedding:
    module = DistEmbedding(10, 2, table_name())
    module.weight[[1]] = torch.ones(1, 2)
    return module


@pytest.mark.parametrize("ids", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("call", READ_AND_WRITTEN)
def test_ids_that_are_no_integers_are_refused(call: str, ids: Any, module: DistEmbedding) -> None:
    with pytest.raises(TypeError, match=r"^ids must be (integers, got|int64, uint64, .*, got)"):
        READ_AND_WRITTEN[call](module, ids)
    assert module.ids().tolist() == [1]
    assert module.weight[[1]].tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("ids", WRONG.values(), ids=WRONG)
def test_keys_that_are_no_integers_are_refused(ids: Any, table_name: Callable[[], str]) -> None:
    with KVWorker(table_name(), 1) as worker:
        for call in (
            lambda: worker.push(ids, torch.ones(len(ids), 1)),
            lambda: worker.pull(ids),
            lambda: worker.push_pull(ids, torch.ones(len(ids), 1)),
        ):
            with pytest.raises(TypeError, match=r"^ids must be "):
                call()
        assert worker.num_pending() == 0
        assert table_statistics(worker.name)["rows"] == 0


@pytest.mark.parametrize("ids", WRONG.values(), ids=WRONG)
def test_ids_of_saved_tables_are_refused(ids: Any, module: DistEmbedding, tmp_path: Path) -> None:
    RecStoreClient().save(tmp_path)
    with pytest.raises(TypeError, match=r"^ids must be "):
        forget(tmp_path, table=module.name, ids=ids)
    with pytest.raises(TypeError, match=r"^ids must be "):
        inspect_checkpoint(tmp_path, module.name, ids)


OF_PADDING: dict[str, Callable[[str, Any], Any]] = {
    "DistEmbedding": lambda name, ids: DistEmbedding(None, 2, name, padding_idx=ids),
    "DistEmbeddingBag": lambda name, ids: DistEmbeddingBag(None, 2, name, padding_idx=ids),
}


@pytest.mark.parametrize(
    "ids", [*WRONG.values(), 2.5, True, "1"], ids=[*WRONG, "one float", "one truth value", "one text"]
)
@pytest.mark.parametrize("make", OF_PADDING)
def test_padding_that_is_no_integer_is_refused(make: str, ids: Any, table_name: Callable[[], str]) -> None:
    name = table_name()
    with pytest.raises(TypeError, match=r"^padding_idx must be an integer, or several, got "):
        OF_PADDING[make](name, ids)
    assert name not in table_names()


@pytest.mark.parametrize("padding", [2.5, True, [0, 2.5], [True]])
def test_padding_of_the_functional_forms_is_refused(padding: Any, module: DistEmbedding) -> None:
    ids = torch.tensor([[1, 2]])
    for call in (
        lambda: embedding(ids, module.table, padding_idx=padding),
        lambda: embedding_bag(ids, module.table, padding_idx=padding),
    ):
        with pytest.raises(TypeError, match=r"^padding_idx must be an integer, or several, got "):
            call()


@pytest.mark.parametrize("keep", [[1.9], [True], ["1"], [None], [2**63]])
def test_ids_that_never_leave_are_integers(keep: Any, table_name: Callable[[], str]) -> None:
    name = table_name()
    with pytest.raises(ValueError, match=re.escape(f'table "{name}": invalid table configuration: invalid ')):
        DistEmbedding(None, 2, name, eviction={"ttl": 3, "keep": keep})
    assert name not in table_names()


@pytest.mark.parametrize("ids", [[2**63], [-(2**63) - 1], 2**64])
def test_integers_that_are_no_int64_are_refused(ids: Any, module: DistEmbedding) -> None:
    for call in READ_AND_WRITTEN.values():
        with pytest.raises(ValueError, match=rf"^an id must be from {-(2**63)} to {2**63 - 1}, got -?\d+$"):
            call(module, ids)
    with KVWorker(module.name, 1) as worker, pytest.raises(ValueError, match=r"^an id must be from "):
        worker.pull(ids)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([3, -7], [3, -7]),
        ((5,), [5]),
        (4, 4),
        (range(2, 5), [2, 3, 4]),
        ([], []),
        ([[1, 2], [3, 4]], [[1, 2], [3, 4]]),
        (np.int16(6), 6),
        (np.array([[1], [2]], dtype=np.uint32), [[1], [2]]),
        (np.array(9), 9),
        ([np.int64(1), torch.tensor(2), 3], [1, 2, 3]),
        ((id for id in (8, 9)), [8, 9]),
        (torch.tensor([1, 2], dtype=torch.int16), [1, 2]),
        ([-(2**63), 2**63 - 1], [-(2**63), 2**63 - 1]),
    ],
)
def test_integers_of_any_type_are_ids(given: Any, expected: Any) -> None:
    ids = as_ids(given)
    assert ids.dtype == torch.int64
    assert ids.tolist() == expected


def test_unsigned_ids_stand_for_their_bits(module: DistEmbedding, table_name: Callable[[], str]) -> None:
    table = DistEmbedding(None, 2, table_name())
    table.weight[[-1]] = torch.ones(1, 2)
    weight: Any = table.weight
    assert weight[np.array([2**64 - 1], dtype=np.uint64)].tolist() == [[1.0, 1.0]]
    assert inspect_table(table.name, ids=np.array([2**64 - 1], dtype=np.uint64)).rows[0].is_stored


def test_lists_of_several_lengths_are_refused(module: DistEmbedding) -> None:
    weight: Any = module.weight
    with pytest.raises(ValueError, match=r"^ids in lists need lists of one length$"):
        weight[[[1], [1, 2]]]


def test_padding_may_be_any_integers(table_name: Callable[[], str]) -> None:
    for given, expected in ((np.int64(3), 3), ([np.int8(1), 2], (1, 2)), (torch.tensor([4, 4]), 4)):
        module = DistEmbedding(None, 2, table_name(), padding_idx=given)  # type: ignore[arg-type]
        assert module.padding_idx == expected
        assert sorted(operators.hashtable_ids(module.table.handle).tolist()) == sorted({*np.atleast_1d(expected)})
