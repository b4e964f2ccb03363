"""`DistTensor`: a table as a matrix, and whose it is."""

from __future__ import annotations

import copy
import gc
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from recstore_ops import DistEmbedding, DistTensor, get_kv_client, table_names

pytestmark = pytest.mark.tier("quick")

SHAPE = (5, 3)


@pytest.fixture
def name(table_name: Callable[[], str]) -> str:
    return table_name()


def open_tensor(name: str, persistent: bool = False) -> DistTensor:
    return DistTensor(SHAPE, torch.float32, name, persistent=persistent)


def ascending(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return torch.arange(float(shape[0] * shape[1]), dtype=dtype).reshape(shape)


def exists(name: str) -> bool:
    gc.collect()
    return name in table_names()


def test_a_new_tensor_is_zeros_without_a_row(name: str) -> None:
    tensor = open_tensor(name)
    assert tensor[torch.arange(5)].eq(0).all()
    assert len(tensor.table) == 0
    assert (tensor.shape, len(tensor), tensor.dtype) == (SHAPE, 5, torch.float32)
    assert (tensor.name, tensor.tensor_name) == (name, name)
    assert repr(tensor) == f"DistTensor((5, 3), torch.float32, name='{name}')"


def test_init_func_gives_the_rows_of_a_new_table_only(name: str) -> None:
    calls: list[object] = []

    def init(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        calls.append((shape, dtype))
        return ascending(shape, dtype)

    first = DistTensor(SHAPE, torch.float32, name, init)
    second = DistTensor(SHAPE, torch.float32, name, init)

    assert calls == [(SHAPE, torch.float32)]
    assert torch.equal(second[torch.arange(5)], ascending(SHAPE, torch.float32))
    assert len(first.table) == 5


@pytest.mark.parametrize(
    "ids",
    [
        [4, 0],
        [],
        2,
        torch.tensor(2),
        torch.tensor([[1, 1], [4, 0]]),
        torch.tensor([3], dtype=torch.int32),
        torch.tensor([3], dtype=torch.uint64),
        torch.arange(4)[::2],
    ],
    ids=str,
)
def test_rows_are_read_by_ids_of_any_form(ids: Tensor | list[int] | int, name: str) -> None:
    tensor = DistTensor(SHAPE, torch.float32, name, ascending)
    index = torch.as_tensor(ids).to(torch.int64)
    assert torch.equal(tensor[ids], ascending(SHAPE, torch.float32)[index])


SLICES = [slice(None), slice(1, 3), slice(-2, None), slice(None, None, 2), slice(4, 2), slice(1, 99), slice(None, -4)]


@pytest.mark.parametrize("ids", SLICES, ids=str)
def test_slices_are_those_of_a_matrix(ids: slice, name: str) -> None:
    tensor, matrix = DistTensor(SHAPE, torch.float32, name, ascending), ascending(SHAPE, torch.float32)
    assert torch.equal(tensor[ids], matrix[ids])
    for rows in (tensor, matrix):
        rows[ids] += 1  # type: ignore[operator]
    assert torch.equal(tensor[torch.arange(5)], matrix)


def test_a_slice_may_go_backwards(name: str) -> None:
    matrix = ascending(SHAPE, torch.float32)
    assert torch.equal(DistTensor(SHAPE, torch.float32, name, ascending)[::-2], matrix[[4, 2, 0]])


def test_a_slice_needs_a_bound(name: str) -> None:
    with pytest.raises(TypeError, match=f'table "{name}" has no bound that a slice could end at'):
        _ = DistEmbedding(None, 3, name).weight[:2]


@pytest.mark.parametrize("index", [(0, 1), (0,), (), (slice(None), 0), None, ...], ids=str)
def test_rows_are_read_and_written_whole(index: Any, name: str) -> None:
    tensor = DistTensor(SHAPE, torch.float32, name, ascending)
    message = f'table "{name}" is read and written by whole rows, weight[ids], got weight['
    with pytest.raises(TypeError, match=re.escape(message)):
        tensor[index]
    with pytest.raises(TypeError, match=re.escape(message)):
        tensor[index] = torch.ones(3)
    assert torch.equal(tensor[torch.arange(5)], ascending(SHAPE, torch.float32))


def test_rows_are_written_by_id_and_the_last_duplicate_wins(name: str) -> None:
    tensor, matrix = open_tensor(name), torch.zeros(SHAPE)
    for ids, rows in [
        (torch.tensor([1, 3, 1]), ascending((3, 3), torch.float32)),
        ([0, 2], torch.full((3,), 7.0)),
        (4, torch.tensor([1.0, 2.0, 3.0])),
        (torch.tensor([[0, 1]]), torch.ones(1, 2, 1)),
        (torch.tensor([2]), torch.ones(1, 3, dtype=torch.float64) / 4),
    ]:
        tensor[ids] = rows
        matrix[torch.as_tensor(ids)] = rows.to(torch.float32)
    assert torch.equal(tensor[torch.arange(5)], matrix)


@pytest.mark.parametrize(
    ("ids", "error", "words"),
    [
        ([5], IndexError, 'id 5 at position 0 is out of range for table "{name}" with num_embeddings 5'),
        ([0, -1], IndexError, 'id -1 at position 1 is out of range for table "{name}"'),
        ([0.5], TypeError, "ids must be integers, got 0.5"),
    ],
)
def test_wrong_ids_are_refused(ids: list[Any], error: type[Exception], words: str, name: str) -> None:
    tensor = open_tensor(name)
    for call in (lambda: tensor[ids], lambda: tensor.__setitem__(ids, torch.ones(len(ids), 3))):
        with pytest.raises(error) as caught:
            call()
        assert words.format(name=name) in str(caught.value)
    assert len(tensor.table) == 0


@pytest.mark.parametrize("shape", [(2, 2), (3, 3), (1, 2, 3)])
def test_wrong_rows_are_refused_with_the_table(shape: tuple[int, ...], name: str) -> None:
    tensor = open_tensor(name)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        tensor[[0, 1]] = torch.ones(shape)
    assert name in str(caught.value)
    assert len(tensor.table) == 0


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "words"),
    [
        ((5,), torch.float32, ValueError, "must be (rows, dim), got (5,)"),
        ((5, 3, 1), torch.float32, ValueError, "must be (rows, dim), got (5, 3, 1)"),
        ((0, 3), torch.float32, ValueError, "num_embeddings"),
        ((5, 0), torch.float32, ValueError, "dim must be at least 1, got 0"),
        ((5, 3), torch.float64, TypeError, "torch.int8, torch.float8_e4m3fn, got torch.float64"),
        ((5, 3), torch.int64, TypeError, "got torch.int64"),
    ],
)
def test_a_wrong_shape_or_dtype_is_refused_and_opens_no_table(
    shape: tuple[int, int], dtype: torch.dtype, error: type[Exception], words: str, name: str
) -> None:
    with pytest.raises(error) as caught:
        DistTensor(shape, dtype, name)
    assert words in str(caught.value)
    assert not exists(name)


def test_a_tensor_needs_a_name() -> None:
    with pytest.raises(ValueError, match="needs a name"):
        DistTensor(SHAPE, torch.float32, "")


def test_another_shape_of_the_same_name_is_refused_with_both(name: str) -> None:
    tensor = open_tensor(name)
    for shape in [(5, 4), (6, 3)]:
        with pytest.raises(TypeError) as caught:
            DistTensor(shape, torch.float32, name)
        assert f'table "{name}" has the shape {SHAPE}, got {shape}' in str(caught.value)
    assert exists(tensor.name)


def test_an_init_func_that_fails_leaves_no_table_and_no_owner_behind(name: str) -> None:
    with pytest.raises(ValueError, match=r"must return rows of shape \(5, 3\), got \(2, 2\)"):
        DistTensor(SHAPE, torch.float32, name, lambda shape, dtype: torch.zeros(2, 2))
    assert not exists(name)
    tensor = open_tensor(name)
    assert exists(name)
    del tensor
    assert not exists(name)


def test_rows_go_with_the_last_owner(name: str) -> None:
    first, second = open_tensor(name), open_tensor(name)
    first[[1]] = torch.ones(1, 3)
    del first
    assert exists(name)
    assert second[1].tolist() == [1.0] * 3
    del second
    assert not exists(name)
    assert open_tensor(name)[1].tolist() == [0.0] * 3


def test_rows_of_a_persistent_tensor_stay(name: str) -> None:
    tensor = open_tensor(name, persistent=True)
    tensor[[1]] = torch.ones(1, 3)
    del tensor
    assert exists(name)
    again = open_tensor(name, persistent=True)
    assert again[1].tolist() == [1.0] * 3


def test_a_persistent_tensor_keeps_its_rows_when_another_of_the_name_goes(name: str) -> None:
    kept, passing = open_tensor(name, persistent=True), open_tensor(name)
    kept[[1]] = torch.ones(1, 3)
    del passing
    assert exists(name)
    assert kept[1].tolist() == [1.0] * 3


def test_a_module_keeps_its_table_when_a_tensor_over_it_goes(name: str) -> None:
    module = DistEmbedding(*SHAPE, name)
    tensor = open_tensor(name)
    tensor[[1]] = torch.ones(1, 3)
    del tensor
    assert exists(name)
    assert module(torch.tensor(1)).tolist() == [1.0] * 3


def test_a_copy_is_an_owner_too(name: str) -> None:
    tensor = open_tensor(name)
    tensor[[1]] = torch.ones(1, 3)
    for twin in (copy.copy(tensor), pickle.loads(pickle.dumps(tensor))):
        assert (repr(twin), twin[1].tolist()) == (repr(tensor), [1.0] * 3)
    del tensor
    assert exists(name)
    del twin
    assert not exists(name)


def test_a_name_that_was_dropped_and_opened_again_has_new_owners(name: str) -> None:
    old = open_tensor(name)
    get_kv_client().drop(name)
    new = open_tensor(name)
    del new
    assert not exists(name)
    third = open_tensor(name)
    del old
    assert exists(name)
    del third
    assert not exists(name)


def test_global_data_is_listed_while_its_table_is_there(table_name: Callable[[], str]) -> None:
    shown, hidden = table_name(), table_name()
    tensors = [
        DistTensor(SHAPE, torch.float32, shown),
        DistTensor(SHAPE, torch.float32, hidden, is_gdata=False),
    ]
    client = get_kv_client()
    assert shown in client.gdata_name_list()
    assert hidden not in client.gdata_name_list()
    assert {shown, hidden} <= set(client.data_name_list())
    tensors.clear()
    gc.collect()
    assert shown not in client.gdata_name_list()


def test_a_dropped_name_is_no_longer_global(name: str) -> None:
    tensor = DistTensor(SHAPE, torch.float32, name, persistent=True)
    get_kv_client().drop(tensor.name)
    DistEmbedding(*SHAPE, name)
    assert name not in get_kv_client().gdata_name_list()


def test_a_table_without_bound_has_as_many_rows_as_are_stored(name: str) -> None:
    weight = DistEmbedding(None, 3, name).weight
    assert weight.shape == (0, 3)
    weight[[-9, 2**62]] = torch.ones(2, 3)
    assert (weight.shape, len(weight)) == ((2, 3), 2)
    assert weight[[2**62, -9, -9]].eq(1).all()
