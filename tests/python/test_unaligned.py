"""Tensors whose first element lies between two places of its type, as slices of received bytes do: taken as others."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest
import torch
from torch import Tensor

from recstore_ops import DistEmbedding, SparseOptimizer, bucket_ids, cross_ids, hash_strings, ngram_ids, prefix_ids

pytestmark = pytest.mark.tier("quick")

ops = torch.ops.recstore
DIM = 2


def between(values: Tensor, shift: int = 1) -> Tensor:
    """The same values, so many bytes behind a place where they may begin."""
    raw = bytearray(shift) + bytearray(values.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    moved = torch.frombuffer(raw, dtype=values.dtype, offset=shift).view(values.shape)
    assert moved.data_ptr() % values.element_size() != 0
    return moved


IDS = torch.tensor([5, 9, 5, -(2**62)])
GRADS = torch.arange(8.0).view(4, DIM)
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0])
OFFSETS = torch.tensor([0, 2, 4])
CODES = torch.tensor([[1, 2], [3, 4]])

CALLS: dict[str, tuple[Callable[..., object], tuple[Tensor, ...]]] = {
    "unique": (ops.unique, (IDS,)),
    "merge_gradients": (ops.merge_gradients, (IDS, GRADS)),
    "bucket_ids": (lambda ids: bucket_ids(ids, 1000), (IDS,)),
    "cross_ids": (lambda *ids: cross_ids(list(ids)), (IDS, IDS + 1)),
    "ngram_ids": (lambda tokens: ngram_ids(tokens.abs(), 2, 2, 100), (torch.tensor([[5, 9, 5]]),)),
    "prefix_ids": (lambda codes: prefix_ids(codes, [8, 8]), (CODES,)),
    "hash_strings": (ops.hash_strings, (torch.frombuffer(bytearray(b"abcd"), dtype=torch.uint8), OFFSETS)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shift", [1, 4])
def test_pure_operators_give_the_same(name: str, shift: int) -> None:
    call, arguments = CALLS[name]
    moved = [between(each, shift) if shift % each.element_size() else each for each in arguments]
    torch.testing.assert_close(call(*moved), call(*arguments), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint64])
def test_tables_are_read_and_trained_alike(dtype: torch.dtype, table_name: Callable[[], str]) -> None:
    rows = []
    for change in (between, lambda values: values):
        name = table_name()
        module = DistEmbedding(None, DIM, name, optimizer={"kind": "sgd", "lr": 1.0}, initializer="zeros")
        ids = change(torch.tensor([5, 9, 5]).to(dtype))
        ops.emb_write.table(module.table.handle, ids, change(torch.ones(3, DIM)))
        module(ids).backward(change(GRADS[:3]))
        SparseOptimizer(modules=[module]).step()
        ops.accept_grad(module.table.collector, module.table.handle, ids, change(GRADS[:3]))
        ops.emb_update.table(module.table.handle, ids, change(GRADS[:3]))
        rows.append(module.weight[torch.tensor([5, 9])])
    assert torch.equal(*rows)
    assert rows[0].abs().sum() > 4


def test_bags_take_weights_and_offsets_of_any_place(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(None, DIM, table_name())
    pooled = [
        ops.emb_bag(module.table.handle, change(IDS), change(OFFSETS), DIM, 0, change(WEIGHTS))
        for change in (between, lambda values: values)
    ]
    torch.testing.assert_close(pooled[0], pooled[1], rtol=0, atol=0)


def test_a_message_of_arrow_may_begin_anywhere() -> None:
    stream = pa.BufferOutputStream()
    batch = pa.record_batch({"city": ["Bern", "Zug", ""]})
    with pa.ipc.new_stream(stream, batch.schema) as writer:
        writer.write_batch(batch)
    moved = pa.py_buffer(b"x" + stream.getvalue().to_pybytes()).slice(1)
    column = pa.ipc.open_stream(moved).read_all()["city"]
    assert torch.equal(hash_strings(column), hash_strings(["Bern", "Zug", ""]))
