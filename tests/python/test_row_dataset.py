"""Rows through PyTorch's DataLoader, with and without workers."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from recstore_ops.training.data import text_rows
from recstore_ops.training.data.batch import Batch
from recstore_ops.training.data.read_ahead import RowDataset
from recstore_ops.training.data.row_source import HashedRows, MemoryRows
from recstore_ops.training.data.sparse_lines import LibsvmFormat
from recstore_ops.training.data.text_rows import TextRows

pytestmark = pytest.mark.tier("quick")

NUM_ROWS = 1000
either_way = pytest.mark.parametrize("num_workers", [0, 2])


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(text_rows, "BLOCK_BYTES", 500)
    path = tmp_path / "rows"
    path.write_bytes(b"".join(b"1 %d:1\n" % n for n in range(NUM_ROWS)))
    return path


def ids_of(dataset: RowDataset, num_workers: int, **options) -> list[int]:
    loader = DataLoader(dataset, batch_size=None, num_workers=num_workers, **options)
    return [id for batch in loader for id in batch.ids.tolist()]


@either_way
def test_every_row_comes_once(path: Path, num_workers: int) -> None:
    dataset = RowDataset(TextRows([path], LibsvmFormat()), batch_size=64)
    loader = DataLoader(dataset, batch_size=None, num_workers=num_workers)
    batches = list(loader)
    assert all(isinstance(batch, Batch) for batch in batches)
    assert sorted(id for batch in batches for id in batch.ids.tolist()) == list(range(NUM_ROWS))
    assert sorted(map(len, batches))[2:] == [64] * (len(batches) - 2)


@either_way
def test_epochs_are_shuffled_otherwise_and_reproducibly(path: Path, num_workers: int) -> None:
    dataset = RowDataset(TextRows([path], LibsvmFormat()), batch_size=64, shuffle_window=200, seed=3)
    first = ids_of(dataset, num_workers)
    assert ids_of(dataset, num_workers) == first
    dataset.set_epoch(1)
    second = ids_of(dataset, num_workers)
    assert second != first
    assert sorted(second) == sorted(first) == list(range(NUM_ROWS))
    other_seed = RowDataset(TextRows([path], LibsvmFormat()), batch_size=64, shuffle_window=200, seed=4)
    assert ids_of(other_seed, num_workers) != first


def test_workers_that_persist_see_the_epoch(path: Path) -> None:
    dataset = RowDataset(TextRows([path], LibsvmFormat()), batch_size=64, shuffle_window=200)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    orders = []
    for epoch in (0, 1, 0):
        dataset.set_epoch(epoch)
        orders.append([id for batch in loader for id in batch.ids.tolist()])
    assert orders[0] == orders[2] != orders[1]


@pytest.mark.tier("test")
def test_workers_that_are_spawned(path: Path) -> None:
    dataset = RowDataset(HashedRows(TextRows([path], LibsvmFormat()), 10), batch_size=64, shuffle_window=200)
    assert len(ids_of(dataset, 1, multiprocessing_context="spawn")) == NUM_ROWS


def test_skipped_rows_are_warned_of(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"bad\nbad\n")
    dataset = RowDataset(TextRows([path], LibsvmFormat(), on_bad_line="skip"), batch_size=64)
    with pytest.warns(UserWarning, match=r"skipped 2 bad rows of .*rows, the first: .*rows:1001: expected 0, 1 or -1"):
        assert len(ids_of(dataset, 0)) == NUM_ROWS


def test_workers_warn_too(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"bad\n")
    dataset = RowDataset(TextRows([path], LibsvmFormat(), on_bad_line="skip"), batch_size=64)
    # A warning that is made an error in a worker comes out of the loader.
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(UserWarning, match="skipped 1 bad rows of"):
            ids_of(dataset, 2)


def test_a_bad_line_in_a_worker_is_an_error_with_file_and_line(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"bad\n")
    dataset = RowDataset(TextRows([path], LibsvmFormat()), batch_size=64)
    with pytest.raises(ValueError, match=r"rows:1001: expected 0, 1 or -1 as label, got 'bad'"):
        ids_of(dataset, 2)


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"batch_size": 1, "shuffle_window": 0}])
def test_sizes_below_one(options: dict[str, int]) -> None:
    rows = MemoryRows(Batch(torch.tensor([1]), torch.tensor([1.0])))
    with pytest.raises(ValueError, match="to be at least 1, got 0"):
        RowDataset(rows, **options)
