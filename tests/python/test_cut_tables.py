"""Exports and states beside a thread that changes the table: the rows of one moment, and of no ids that went."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file
from torch import Tensor

from recstore_ops import DistEmbedding, RecStoreClient, SparseOptimizer, _native
from recstore_ops.ops import operators
from recstore_ops.serving import FrozenTable, freeze
from recstore_ops.table import cut
from recstore_ops.table.cut import cut_tables
from recstore_ops.transfer import export_parquet, export_safetensors, restore_embeddings
from recstore_ops.transfer.row_ranges import row_ranges
from recstore_ops.transfer.safetensors_index import open_safetensors

pytestmark = [pytest.mark.tier("test"), pytest.mark.timeout(120)]

one_moment = pytest.mark.embedded_only("servers give rows as they are when they are asked for")

DIM, IDS, LEAVING = 4, 10_000, 100
INITIAL = -7.0

Rows = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def _parts_of_a_thousand_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut, "_BYTES_PER_CHUNK", 1000 * 4 * DIM)


def opened(name: str, num_embeddings: int | None = None) -> DistEmbedding:
    return DistEmbedding(num_embeddings, DIM, name, initializer={"kind": "constant", "value": INITIAL})


def write(module: DistEmbedding, first: int, value: float) -> None:
    ids = torch.arange(first, first + IDS)
    operators.emb_write(module.table.handle, ids, torch.full((IDS, DIM), value))


def slide(module: DistEmbedding, round: int) -> None:
    """Writes the rows of a window of ids, all with the number of the round, and deletes those before the window."""
    write(module, round * LEAVING, float(round))
    before = torch.arange((round - 1) * LEAVING, round * LEAVING)
    operators.hashtable_delete(module.table.handle, before)


@contextmanager
def beside(change: Callable[[int], None]) -> Iterator[None]:
    """Changes something on another thread, round after round; the first round is done before."""
    ends, failures = threading.Event(), list[BaseException]()
    change(1)

    def work() -> None:
        round = 2
        try:
            while not ends.is_set():
                change(round)
                round += 1
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join(60)
    assert not thread.is_alive()
    assert failures == []


def check_moment(ids: Tensor, values: Tensor) -> None:
    """Checks that all rows are of one moment of `slide`: with the ids that leave, of the round before, or without."""
    latest, count = int(values.max()), len(ids)
    leaving = count - IDS
    assert leaving in (0, LEAVING), count
    assert torch.equal(ids, torch.arange(latest * LEAVING - leaving, latest * LEAVING + IDS))
    assert values[:leaving].eq(latest - 1).all()
    assert values[leaving:].eq(latest).all()


def of_state(module: DistEmbedding, path: Path) -> Rows:
    state = module.state_dict()
    return tuple(state[key].as_subclass(Tensor) for key in ("ids", "rows"))  # type: ignore[return-value]


def of_safetensors(module: DistEmbedding, path: Path) -> Rows:
    export_safetensors(path, [module])
    found = load_file(path)
    return found[f"{module.name}.ids"], found[f"{module.name}.rows"]


def of_split_safetensors(module: DistEmbedding, path: Path) -> Rows:
    export_safetensors(path, [module], max_shard_size=100_000)
    found = open_safetensors(path)
    parts = row_ranges(found.names())
    ids, rows = (parts[f"{module.name}.{what}"] for what in ("ids", "rows"))
    return tuple(torch.cat([found.tensor(part.tensor) for part in each]) for each in (ids, rows))  # type: ignore[return-value]


def of_parquet(module: DistEmbedding, path: Path) -> Rows:
    export_parquet(path, module)
    read = parquet.read_table(path)
    rows = torch.from_numpy(read["row"].combine_chunks().flatten().to_numpy().copy())
    return torch.from_numpy(read["id"].to_numpy().copy()), rows.reshape(-1, DIM)


def of_frozen(module: DistEmbedding, path: Path) -> Rows:
    freeze(module.table, path)
    frozen = FrozenTable(path)
    ids = operators.hashtable_ids(frozen.handle).sort().values
    return ids, frozen.read(ids)


WAYS = [of_state, of_safetensors, of_split_safetensors, of_parquet, of_frozen]


@one_moment
@pytest.mark.parametrize("way", WAYS)
def test_what_is_written_is_of_one_moment(
    way: Callable[[DistEmbedding, Path], Rows], table_name: Callable[[], str], tmp_path: Path
) -> None:
    module = opened(table_name())
    write(module, 0, 0.0)
    with beside(lambda round: slide(module, round)):
        for number in range(6):
            ids, rows = way(module, tmp_path / str(number))
            assert rows.eq(rows[:, :1]).all()
            check_moment(ids, rows[:, 0])


@one_moment
def test_the_state_of_an_optimizer_is_of_one_moment(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(None, DIM, table_name(), optimizer={"kind": "adagrad", "lr": 1.0})
    optimizer, ids = SparseOptimizer(module), torch.arange(IDS)

    def step(round: int) -> None:
        operators.emb_update(module.table.handle, ids, torch.ones(IDS, DIM))

    with beside(step):
        for _ in range(6):
            found, slots, progress = optimizer.state_dict()["state"][module.name]
            assert torch.equal(found, ids)
            assert slots["state_sum"].eq(progress["step"]).all()


def matrix_of_safetensors(module: DistEmbedding, path: Path) -> Tensor:
    export_safetensors(path, [module], as_matrices=True)
    return load_file(path)[f"{module.name}.weight"]


def matrix_restored(module: DistEmbedding, path: Path) -> Tensor:
    model: Any = torch.nn.Sequential(module)
    restore_embeddings(model)
    return model[0].weight.detach()


@one_moment
@pytest.mark.parametrize("way", [matrix_of_safetensors, matrix_restored])
def test_a_matrix_is_of_one_moment_with_initial_values_for_ids_without_a_row(
    way: Callable[[DistEmbedding, Path], Tensor], table_name: Callable[[], str], tmp_path: Path
) -> None:
    module = opened(table_name(), IDS + LEAVING)

    def change(round: int) -> None:
        write(module, round % 2 * LEAVING, float(round))
        operators.hashtable_clear(module.table.handle)

    with beside(change):
        for number in range(6):
            rows = way(module, tmp_path / str(number))
            values = rows[:, 0]
            is_written = values != INITIAL
            assert int(is_written.sum()) in (0, IDS)
            assert len(values[is_written].unique()) < 2


@one_moment
def test_tables_of_one_export_are_of_one_moment(table_name: Callable[[], str], tmp_path: Path) -> None:
    first, second = opened(table_name()), opened(table_name())

    def change(round: int) -> None:
        write(first, 0, float(round))
        write(second, 0, float(round))

    with beside(change):
        for number in range(6):
            export_safetensors(tmp_path / str(number), [first, second, first])
            found = load_file(tmp_path / str(number))
            rounds = [found[f"{module.name}.rows"].unique().tolist() for module in (first, second)]
            assert [len(each) for each in rounds] == [1, 1]
            assert rounds[0][0] - rounds[1][0] in (0, 1)


@one_moment
def test_a_moment_ends_with_its_block_and_names_a_table_that_was_loaded(
    table_name: Callable[[], str], tmp_path: Path
) -> None:
    module, ids = opened(table_name()), torch.tensor([1])
    module.weight[[1]] = torch.ones(1, DIM)
    with cut_tables([module.table]) as (found,):
        module.weight[[1]] = torch.full((1, DIM), 2.0)
        assert found.values(torch.tensor([1, 5]))[:, 0].tolist() == [1.0, INITIAL]
    with pytest.raises(RuntimeError, match="were closed"):
        found.values(ids)
    RecStoreClient().save(tmp_path)
    with cut_tables([module.table]) as (found,):
        RecStoreClient().load(tmp_path)
        with pytest.raises(RuntimeError, match=f'loaded into table "{module.name}" while its rows were read'):
            found.values(ids)


def test_rows_that_servers_lose_meanwhile_are_left_out_or_the_export_says_so(
    table_name: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of tables on servers, which have no moment for a client."""
    monkeypatch.setattr(_native, "cut_tables", lambda numbers: [None] * len(numbers))
    lookup = operators.hashtable_lookup

    def loses(handle: Tensor, ids: Tensor, dim: int, insert: bool) -> tuple[Tensor, Tensor]:
        operators.hashtable_delete(handle, torch.tensor([3, 5]))
        return lookup(handle, ids, dim, insert)

    monkeypatch.setattr(operators, "hashtable_lookup", loses)

    def filled() -> DistEmbedding:
        module = opened(table_name())
        module.weight[list(range(10))] = torch.ones(10, DIM)
        return module

    for way in (of_state, of_parquet):
        ids, rows = way(filled(), tmp_path / "file")
        assert ids.tolist() == [0, 1, 2, 4, 6, 7, 8, 9]
        assert rows.eq(1).all()
    module = filled()
    with pytest.raises(RuntimeError, match=f'table "{module.name}" lost 2 rows on its servers while'):
        export_safetensors(tmp_path / "new", [module])
    assert not (tmp_path / "new").exists()
