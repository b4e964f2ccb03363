"""`Batch`: rows, fields and bags, against lists of lists."""

from __future__ import annotations

import itertools

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from recstore_ops.training.data.batch import Batch, concatenate, sum_by_field, sum_by_row, weighted

pytestmark = pytest.mark.tier("quick")

# A row is its label, its dense features, and the (id, value) pairs of each field.
Field = list[tuple[int, float]]
Row = tuple[float, list[float], list[Field]]

NUM_FIELDS = 3
pairs = st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-3, 3).map(float))


def rows_of(field: st.SearchStrategy[Field]) -> st.SearchStrategy[list[Row]]:
    row = st.tuples(
        st.sampled_from([0.0, 1.0]),
        st.lists(st.integers(-5, 5).map(float), min_size=2, max_size=2),
        st.lists(field, min_size=NUM_FIELDS, max_size=NUM_FIELDS),
    )
    return st.lists(row, min_size=1, max_size=8)


bags = rows_of(st.lists(pairs, max_size=3))
ones = rows_of(st.tuples(st.integers(0, 9), st.just(1.0)).map(lambda pair: [pair]))


def batch_of(rows: list[Row]) -> Batch:
    fields = [field for _, _, fields in rows for field in fields]
    features = [pair for field in fields for pair in field]
    values = torch.tensor([value for _, value in features])
    return Batch(
        ids=torch.tensor([id for id, _ in features], dtype=torch.int64),
        labels=torch.tensor([label for label, _, _ in rows]),
        num_fields=NUM_FIELDS,
        offsets=None
        if all(len(field) == 1 for field in fields)
        else torch.tensor([0, *(len(field) for field in fields)]).cumsum(0),
        values=None if bool((values == 1).all()) else values,
        dense=torch.tensor([dense for _, dense, _ in rows]),
    )


def rows_in(batch: Batch) -> list[Row]:
    offsets, features = (
        batch.offsets_or_ones().tolist(),
        list(zip(batch.ids.tolist(), batch.values_or_ones().tolist(), strict=True)),
    )
    fields = [features[first:last] for first, last in itertools.pairwise(offsets)]
    assert batch.dense is not None
    return [
        (label, dense, fields[row * NUM_FIELDS : (row + 1) * NUM_FIELDS])
        for row, (label, dense) in enumerate(zip(batch.labels.tolist(), batch.dense.tolist(), strict=True))
    ]


@settings(max_examples=examples(100), deadline=None)
@given(bags | ones, st.data())
def test_rows_and_take_choose_rows(rows: list[Row], data: st.DataObject) -> None:
    batch = batch_of(rows)
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10))
    assert rows_in(batch.rows(start, stop)) == rows[start:stop]
    assert rows_in(batch.take(torch.tensor(order, dtype=torch.int64))) == [rows[row] for row in order]


def test_rows_without_fields_are_taken_too() -> None:
    dense = torch.arange(6.0).view(3, 2)
    batch = Batch(ids=torch.empty(0, dtype=torch.int64), labels=torch.tensor([0.0, 1, 1]), num_fields=0, dense=dense)
    taken = batch.take(torch.tensor([2, 0]))
    assert (taken.ids.tolist(), taken.labels.tolist()) == ([], [1, 0])
    assert taken.dense is not None
    assert taken.dense.tolist() == [[4, 5], [0, 1]]


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(bags | ones, min_size=1, max_size=3))
def test_concatenation_keeps_all_rows(parts: list[list[Row]]) -> None:
    joined = concatenate([batch_of(rows) for rows in parts])
    assert rows_in(joined) == [row for rows in parts for row in rows]
    assert len(joined) == sum(map(len, parts))


@settings(max_examples=examples(100), deadline=None)
@given(bags | ones)
def test_sums_by_field_and_row(rows: list[Row]) -> None:
    batch = batch_of(rows)
    features_N2 = weighted(torch.stack([batch.ids % 7, batch.ids % 5], dim=1).float(), batch)

    def summed(fields: list[Field]) -> list[float]:
        return [sum(id % modulus * value for field in fields for id, value in field) for modulus in (7, 5)]

    assert sum_by_field(features_N2, batch).tolist() == [[summed([field]) for field in row[2]] for row in rows]
    assert sum_by_row(features_N2, batch).tolist() == [summed(row[2]) for row in rows]


def test_bytes_are_those_of_the_tensors_that_are_there() -> None:
    assert Batch(ids=torch.arange(6), labels=torch.zeros(2), num_fields=3).nbytes == 6 * 8 + 2 * 4
    bag = Batch(ids=torch.arange(2), labels=torch.zeros(1), offsets=torch.tensor([0, 2]), values=torch.ones(2))
    assert bag.nbytes == 2 * 8 + 4 + 2 * 8 + 2 * 4
