"""The deep interest network against its equation written out, its gradients, and how it refuses what is no sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from recstore_ops import SparseOptimizer
from recstore_ops.training import Batch, NnTables, RowSource, StoreTables, hash_ids, open_rows
from recstore_ops.training.models import DIN

pytestmark = pytest.mark.tier("quick")

TableName = Callable[[], str]

NUM_IDS, DIM = 8, 3
# Three rows of the fields user, history, target: histories of three ids, none and one.
BATCH = Batch(
    ids=torch.tensor([6, 0, 1, 0, 2, 7, 3, 6, 3, 0]),
    values=torch.tensor([1.0, 0.5, 2.0, 1.0, 1.0, 1.0, 0.25, 1.0, -1.0, 1.0]),
    offsets=torch.tensor([0, 1, 4, 5, 6, 6, 7, 8, 9, 10]),
    labels=torch.tensor([1.0, 0.0, 1.0]),
    num_fields=3,
    dense=torch.tensor([[0.5], [-1.0], [2.0]]),
)
HISTORY, TARGET = 1, 2


def double_tables(name: str, dim: int, std: float = 0.0) -> nn.Module:
    return nn.Embedding(NUM_IDS, dim, dtype=torch.float64)


def make(tables: Callable[..., nn.Module] = double_tables, sequences: Sequence[tuple[int, int]] = ((1, 2),)) -> DIN:
    torch.manual_seed(0)
    return DIN(
        tables,
        DIM,
        num_fields=3,
        sequences=sequences,
        attention_hidden=(5,),
        hidden=(4, 3),
        init_std=0.5,
        num_dense=1,
    )


def in_double(batch: Batch) -> Batch:
    assert batch.values is not None
    assert batch.dense is not None
    return replace(batch, values=batch.values.double(), dense=batch.dense.double())


def perceptron_by_numpy(layers: nn.Module, inputs: NDArray) -> NDArray:
    *hidden, last = (layer for layer in layers.children() if isinstance(layer, nn.Linear))
    for layer in hidden:
        inputs = np.maximum(layer.weight.detach().numpy() @ inputs + layer.bias.detach().numpy(), 0)
    return last.weight.detach().numpy() @ inputs + last.bias.detach().numpy()


def logits_by_loop(model: Any, batch: Batch) -> NDArray:
    """Equation 3 of the paper, one id after the other; the perceptron over all fields."""
    values, dense = batch.values_or_ones().double().numpy(), batch.dense
    assert dense is not None
    rows = model.v.weight.detach().numpy()[batch.ids] * values[:, None]
    bags = [rows[start:stop] for start, stop in pairwise(batch.offsets_or_ones().tolist())]
    logits = []
    for row in range(len(batch)):
        user, history, target = bags[3 * row : 3 * row + 3]
        pooled = np.zeros(DIM)
        for e in history:
            t = target[0]
            pooled += perceptron_by_numpy(model.units[0], np.concatenate([e, t, e - t, e * t])) * e
        inputs = np.concatenate([user.sum(0), pooled, target[0], dense[row].double().numpy()])
        logits.append(perceptron_by_numpy(model.deep, inputs)[0])
    return np.array(logits)


def test_logits_follow_the_equation() -> None:
    model = make().double()
    np.testing.assert_allclose(model(in_double(BATCH)).detach(), logits_by_loop(model, BATCH), rtol=1e-12)


def test_fields_of_one_id_each_are_histories_of_one() -> None:
    model, ids = make().double(), torch.tensor([6, 0, 1, 7, 2, 2])
    batch = Batch(ids, torch.tensor([1.0, 0.0]), 3, dense=torch.tensor([[0.5], [1.0]]).double())
    np.testing.assert_allclose(model(batch).detach(), logits_by_loop(model, batch), rtol=1e-12)


def test_gradients_are_those_of_finite_differences() -> None:
    model = make().double()
    names, parameters = zip(*model.named_parameters(), strict=True)

    def logits(*values: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (in_double(BATCH),))

    assert torch.autograd.gradcheck(logits, parameters)


def test_empty_histories_give_zeros_and_finite_gradients() -> None:
    model = make().double()
    offsets = torch.tensor([0, 1, 1, 2, 3, 3, 4])
    batch = Batch(torch.tensor([6, 0, 7, 1]), torch.tensor([1.0, 0.0]), 3, offsets, dense=torch.ones(2, 1).double())
    logits = model(batch)
    np.testing.assert_allclose(logits.detach(), logits_by_loop(model, batch), rtol=1e-12)
    logits.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    assert all(not parameter.grad.any() for parameter in model.units.parameters() if parameter.grad is not None)


def test_a_history_in_another_order_has_the_same_logit() -> None:
    model, ids, values = make().double(), BATCH.ids.clone(), BATCH.values_or_ones().clone()
    ids[1:4], values[1:4] = ids[1:4].flip(0), values[1:4].flip(0)
    turned = in_double(replace(BATCH, ids=ids, values=values))
    torch.testing.assert_close(model(turned), model(in_double(BATCH)))


def test_each_history_has_its_own_target_and_unit() -> None:
    model = make(sequences=((0, 2), (1, 2))).double()
    before = model(in_double(BATCH)).detach()
    for parameter in model.units[1].parameters():
        nn.init.zeros_(parameter)
    after = model(in_double(BATCH)).detach()
    # Row 1 has an empty history in the second sequence.
    assert ((after - before).abs() > 1e-9).tolist() == [True, False, True]


def test_steps_equal_those_of_sparse_embeddings(table_name: TableName) -> None:
    name = table_name()
    theirs, ours = make(NnTables(torch.arange(NUM_IDS), name)), make(StoreTables(name, {"kind": "sgd", "lr": 0.5}))
    sgd = [SparseOptimizer(modules=[ours]), *(torch.optim.SGD(model.parameters(), lr=0.5) for model in (ours, theirs))]
    for _ in range(3):
        torch.testing.assert_close(ours(BATCH), theirs(BATCH), rtol=0, atol=1e-5)
        for optimizer in sgd:
            optimizer.zero_grad()
        for model in (ours, theirs):
            binary_cross_entropy_with_logits(model(BATCH), BATCH.labels).backward()
        for optimizer in sgd:
            optimizer.step()


@pytest.mark.parametrize(
    ("offsets", "got"),
    [([0, 1, 4, 5, 6, 6, 7, 8, 8, 10], "got 2 in row 2"), ([0, 1, 4, 4, 5, 6, 7, 8, 9, 10], "got 0 in row 0")],
)
def test_a_target_has_one_id_a_row(offsets: list[int], got: str) -> None:
    with pytest.raises(ValueError, match=f"field 2 is the target of a sequence and must have one id a row, {got}"):
        make()(replace(BATCH, offsets=torch.tensor(offsets)))


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ((), "DIN needs a sequence, a history and its target, got none"),
        (((1, 3),), "a sequence needs two of the 3 fields, got 3"),
        (((-1, 2),), "a sequence needs two of the 3 fields, got -1"),
        (((1, 1),), "field 1 must be one history or targets only"),
        (((0, 2), (0, 1)), "field 0 must be one history or targets only"),
        (((0, 1), (1, 2)), "field 1 must be one history or targets only"),
    ],
)
def test_what_is_no_sequence_is_refused(sequences: Sequence[tuple[int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(sequences=sequences)


def open_histories(directory: Path, sequences: Sequence[tuple[str, str]], buckets: int | None = None) -> RowSource:
    columns = {"label": [1, 0], "user": [5, 6], "clicked": [["x", "y"], []], "item": ["y", "z"], "seen": [[5], [7, 6]]}
    pq.write_table(pa.table(columns), directory / "rows.parquet")
    return open_rows([directory / "rows.parquet"], hash_buckets=buckets, sequences=sequences)


class TestIdsOfHistories:
    def test_are_in_the_id_space_of_their_target(self, tmp_path: Path) -> None:
        plain = next(iter(open_histories(tmp_path, ())))
        mapped = next(iter(open_histories(tmp_path, [("clicked", "item"), ("seen", "user")])))
        # Row 0: user, x, y, item y, seen 5. Row 1: user, item z, seen 7 and 6.
        assert (mapped.ids >> 40).tolist() == [0, 2, 2, 2, 0, 0, 2, 0, 0]
        assert torch.equal(mapped.ids & (2**40 - 1), plain.ids & (2**40 - 1))
        assert mapped.ids[2] == mapped.ids[3] == plain.ids[3]
        assert mapped.ids[4] == plain.ids[0]

    def test_are_so_before_they_are_hashed(self, tmp_path: Path) -> None:
        mapped, hashed = (
            next(iter(open_histories(tmp_path, [("clicked", "item")], buckets))) for buckets in (None, 1000)
        )
        assert torch.equal(hashed.ids, hash_ids(mapped.ids, 1000))

    def test_follow_the_training_rows_columns_in_test_rows(self, tmp_path: Path) -> None:
        sequences = [("clicked", "item")]
        train = open_histories(tmp_path, sequences, 1000)
        table = pq.read_table(tmp_path / "rows.parquet").select(["item", "seen", "user", "label", "clicked"])
        pq.write_table(table, tmp_path / "test.parquet")
        test = open_rows([tmp_path / "test.parquet"], hash_buckets=1000, sequences=sequences, like=train)
        assert torch.equal(next(iter(test)).ids, next(iter(train)).ids)

    def test_of_libffm_are_in_one_space_already(self, tmp_path: Path) -> None:
        (tmp_path / "rows.ffm").write_text("1 0:7:1 0:9:1 1:7:1\n0 1:9:1\n")
        sequences = [("field_0", "field_1")]
        rows = open_rows([tmp_path / "rows.ffm"], file_format="libffm", by_field=True, sequences=sequences)
        assert next(iter(rows)).ids.tolist() == [7, 9, 7, 9]

    def test_need_fields_that_are_there(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="sequences must name a field, one of user, clicked, item, seen; got 'it'"):
            open_histories(tmp_path, [("clicked", "it")])
