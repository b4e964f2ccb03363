"""Rows that ids without one of their own share: against `nn.Embedding` of hashed ids, and what such tables refuse."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import drop_all_tables
from ranks import Ranks
from served_tables import ServerProcesses
from sharded_training import Group
from torch import Tensor, nn
from training_runs import train_new

import recstore_ops
from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    SparseOptimizer,
    checkpoint,
    servers,
    table_statistics,
    transfer,
)
from recstore_ops.sharding import shard_of
from recstore_ops.training import TrainingConfig
from recstore_ops.training.metrics.classification import auc

pytestmark = pytest.mark.tier("test")

TableName = Callable[[], str]
DIM, SHARED = 4, 7
NEVER = {"kind": "probability", "probability": 0, "shared_rows": SHARED}
IDS = torch.tensor([-(2**63), -5, 0, 1, 2, 3, 3, 40, 41, 2**40, 2**63 - 1, 1])
BITS = 2**64 - 1


@pytest.fixture(autouse=True)
def _empty_store() -> Iterator[None]:
    """A save holds all tables of the process."""
    drop_all_tables()
    yield
    drop_all_tables()


def mixed(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & BITS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & BITS
    return z ^ (z >> 31)


def shared_rows_of(name: str, ids: Tensor, seed: int = 0) -> Tensor:
    """The shared row of each id, by the formula of docs/checkpoint_format.md."""
    hashed = 0xCBF29CE484222325
    for byte in name.encode():
        hashed = ((hashed ^ byte) * 0x100000001B3) & BITS
    of_table = mixed(hashed ^ ((seed * 0x9E3779B97F4A7C15) & BITS))
    rows = [mixed(((number & BITS ^ of_table) + 0x9E3779B97F4A7C15) & BITS) % SHARED for number in ids.tolist()]
    return torch.tensor(rows)


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_ids_without_a_row_train_the_row_that_a_hash_names(seed: int, table_name: TableName) -> None:
    name = table_name()
    ids = torch.cat([IDS, torch.arange(100, 160)])
    options: dict[str, Any] = {"initializer": {"kind": "normal", "std": 1.0}, "seed": seed}
    plain = DistEmbedding(None, DIM, name, **options)
    first = plain(-1 - torch.arange(SHARED)).detach()
    recstore_ops.RecStoreClient().drop(name)
    module = DistEmbedding(None, DIM, name, lr=0.5, admission=NEVER, on_existing="share", **options)
    rows = shared_rows_of(name, ids, seed)
    assert set(rows.tolist()) == set(range(SHARED))
    torch_twin = nn.Embedding.from_pretrained(first.clone(), freeze=False)
    ours, theirs = SparseOptimizer(modules=[module]), torch.optim.SGD(torch_twin.parameters(), lr=0.5)
    assert torch.equal(module(ids), torch_twin(rows))
    for step in range(3):
        for embedding, given in ((module, ids), (torch_twin, rows)):
            (embedding(given) * (step + given.numel() % 5 - 1)).square().mean().backward()
        ours.step()
        theirs.step()
        theirs.zero_grad()
        torch.testing.assert_close(module(ids), torch_twin(rows), rtol=1e-6, atol=1e-6)
    statistics = table_statistics(name)
    assert (statistics["rows"], statistics["shared_rows"], statistics["updates"]) == (0, SHARED, 0)
    assert statistics["rejections"] == 3 * ids.unique().numel()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_read_and_train_shared_rows(mode: Any, table_name: TableName) -> None:
    name = table_name()
    module = DistEmbeddingBag(None, DIM, name, mode=mode, lr=0.5, admission=NEVER)
    rows = shared_rows_of(name, IDS)
    matrix = torch.zeros(SHARED, DIM)
    matrix[rows] = torch.stack([module(number.view(1, 1))[0] for number in IDS]).detach()
    twin = nn.EmbeddingBag.from_pretrained(matrix, mode=mode, freeze=False)
    offsets = torch.tensor([0, 4, 5])
    ours, theirs = SparseOptimizer(modules=[module]), torch.optim.SGD(twin.parameters(), lr=0.5)
    for _ in range(3):
        assert torch.allclose(module(IDS, offsets), twin(rows, offsets), rtol=1e-6, atol=1e-6)
        module(IDS, offsets).square().sum().backward()
        twin(rows, offsets).square().sum().backward()
        ours.step()
        theirs.step()
        theirs.zero_grad()


def trained(module: DistEmbedding, steps: int = 3) -> DistEmbedding:
    optimizer = SparseOptimizer(modules=[module])
    for _ in range(steps):
        (module(IDS) - 1).square().sum().backward()
        optimizer.step()
    return module


def test_checkpoints_and_copies_have_shared_rows(tmp_path: Path, table_name: TableName) -> None:
    name = table_name()
    module = trained(DistEmbedding(None, DIM, name, optimizer={"kind": "adam", "lr": 0.1}, admission=NEVER))
    checkpoint.save(tmp_path)
    before = module(IDS).detach()
    twin = copy.deepcopy(module)
    assert torch.equal(twin(IDS), before)
    after = trained(module, 1)(IDS).detach()
    assert not torch.equal(after, before)
    assert torch.equal(trained(twin, 1)(IDS), after)
    checkpoint.load(tmp_path)
    assert torch.equal(module(IDS), before)
    assert torch.equal(trained(module, 1)(IDS), after)
    module.reset_parameters()
    assert table_statistics(name)["shared_rows"] == 0


@pytest.mark.parametrize("kind", ["int8", torch.float8_e4m3fn])
def test_a_checkpoint_has_more_shared_rows_than_own_ones(kind: Any, tmp_path: Path, table_name: TableName) -> None:
    name, shared = table_name(), {"kind": "count", "threshold": 9, "shared_rows": 10_000}
    module = DistEmbedding(None, 8, name, dtype=kind, admission=shared, optimizer={"kind": "sgd", "lr": 1.0})
    rows = trained(module)(torch.arange(50)).detach()
    checkpoint.save(tmp_path)
    drop_all_tables()
    checkpoint.load(tmp_path)
    again = DistEmbedding(None, 8, name, dtype=kind, admission=shared, optimizer={"kind": "sgd", "lr": 1.0})
    assert again(torch.arange(50)).equal(rows)


def test_an_id_starts_from_its_shared_row(table_name: TableName) -> None:
    options: dict[str, Any] = {"lr": 0.1, "admission": {"kind": "count", "threshold": 3, "shared_rows": 1}}
    module = trained(DistEmbedding(None, DIM, table_name(), **options), 2)
    shared = module(torch.tensor([77])).detach()[0]
    trained(module, 1)
    # Of a loss (w - 1)^2, 3 and 1 come twice.
    times = torch.tensor([2.0 if number in (1, 3) else 1.0 for number in IDS.tolist()]).unsqueeze(1)
    torch.testing.assert_close(module(IDS), shared - 0.1 * times * 2 * (shared - 1))
    assert torch.equal(module(torch.tensor([77]))[0], shared)


def test_tables_on_servers_share_rows_among_the_ids_of_each(tmp_path: Path, fixed_table_name: TableName) -> None:
    name = fixed_table_name()  # It decides which ids share a row.
    options: dict[str, Any] = {"optimizer": {"kind": "adagrad", "lr": 0.1}, "admission": NEVER}
    alone = trained(DistEmbedding(None, DIM, name, **options))(IDS).detach()
    for count in (1, 2):
        place = tmp_path / str(count)
        place.mkdir()
        with ServerProcesses(place, count) as processes:
            servers.set_ps_servers(processes.addresses)
            try:
                served = trained(DistEmbedding(None, DIM, name, **options))
                assert table_statistics(name)["shared_rows"] == count * SHARED
                assert torch.equal(served(IDS), alone) == (count == 1)
            finally:
                servers.set_ps_backend("embedded")


def trained_on_rank(group: Group, name: str, ids: Tensor) -> Tensor:
    module = DistEmbedding(None, DIM, name, optimizer="adagrad", admission=NEVER, process_group=group)
    optimizer = SparseOptimizer(modules=[module])
    for _ in range(3):
        (module(ids) - 1).square().sum().backward()
        optimizer.step()
    return module(IDS).detach()


def test_each_rank_shares_rows_among_its_own_ids(ranks: Ranks, table_name: TableName) -> None:
    name = table_name()
    found = ranks.run(2, trained_on_rank, name, IDS)
    assert torch.equal(found[0], found[1])
    owners = shard_of(IDS, 2)
    for rank in range(2):
        own = owners == rank
        torch.testing.assert_close(found[0][own], trained_on_rank(None, name, IDS[own])[own])
        drop_all_tables()


REFUSED: dict[str, Callable[[DistEmbedding, Path], Any]] = {
    "a state dict": lambda module, _: module.state_dict(),
    "a state dict that is loaded": lambda module, _: module.load_state_dict(
        {"ids": torch.tensor([1]), "rows": torch.zeros(1, DIM)}
    ),
    "the state of an optimizer": lambda module, _: SparseOptimizer(modules=[module]).state_dict(),
    "averages": lambda module, _: recstore_ops.averaged(module),
    "a file of rows": lambda module, path: transfer.export_safetensors(path / "rows", [module]),
    "a Parquet file": lambda module, path: transfer.export_parquet(path / "rows", module),
    "a frozen table": lambda module, path: recstore_ops.freeze(module.table, path / "frozen"),
    "a bundle": lambda module, path: recstore_ops.export(module, (IDS,), path / "bundle"),
    "a publication": lambda module, path: recstore_ops.publish(module, (IDS,), path / "published"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_place_for_shared_rows_refuses_the_table(what: str, tmp_path: Path, table_name: TableName) -> None:
    name = table_name()
    module = trained(DistEmbedding(None, DIM, name, admission=NEVER, ema_decay=0.9))
    before = module(IDS).detach()
    expected = re.escape(f'table "{name}" has admission.shared_rows')
    with pytest.raises((ValueError, RuntimeError, OSError), match=expected):
        REFUSED[what](module, tmp_path)
    assert torch.equal(module(IDS), before)


@pytest.mark.parametrize(
    ("shared_rows", "message"),
    [
        (0, r"admission.shared_rows must lie in \[1, 1073741824\], got 0"),
        (2**31, r"admission.shared_rows must lie in \[1, 1073741824\], got 2147483648"),
        (-1, "invalid value: integer `-1`, expected u32"),
        (1.5, "invalid type: floating point `1.5`, expected u32"),
        ("7", 'invalid type: string "7", expected u32'),
    ],
)
def test_a_number_of_shared_rows_that_cannot_be_is_refused(
    shared_rows: Any, message: str, table_name: TableName
) -> None:
    with pytest.raises(ValueError, match=message):
        DistEmbedding(None, DIM, table_name(), admission={**NEVER, "shared_rows": shared_rows})
    with pytest.raises(ValueError, match="shared_row"):
        DistEmbedding(None, DIM, table_name(), admission={**NEVER, "shared_row": 5})


def planted(seed: int, rows: int, fields: int = 4, ids: int = 200_000) -> tuple[Tensor, Tensor]:
    """Rows of Zipf ids with exponent 1.3, and labels: each id has an effect, and rare ids a lower one on average."""
    generator = np.random.default_rng(seed)
    shares = np.arange(1, ids + 1) ** -1.3
    places = generator.choice(ids, size=(rows, fields), p=shares / shares.sum()) + np.arange(fields) * ids
    effects = np.random.default_rng(99).normal(0, 0.7, fields * ids) - 0.3 * (np.arange(fields * ids) % ids > 1000)
    labels = generator.random(rows) < 1 / (1 + np.exp(-effects[places].sum(axis=1)))
    return torch.from_numpy(places), torch.from_numpy(labels).double()


def regression(name: str, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], **options: Any) -> float:
    """The test AUC of a logistic regression after one epoch."""
    rule = {"kind": "adagrad", "lr": 0.1}
    module = DistEmbeddingBag(None, 1, name, mode="sum", initializer="zeros", optimizer=rule, **options)
    optimizer = SparseOptimizer(modules=[module])
    for ids, labels in zip(train[0].split(500), train[1].split(500), strict=True):
        logits = module(ids).squeeze(1).double()
        nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum").backward()
        optimizer.step()
    with torch.no_grad():
        return auc(test[1].numpy(), module(test[0]).squeeze(1).double().numpy())


def hashed(ids: Tensor, rows: int) -> Tensor:
    return (ids * 2_654_435_761 >> 7) % rows


def compare_on_planted(
    name: TableName, rows: int, threshold: int, shared_rows: int
) -> tuple[dict[str, float], dict[str, int]]:
    """The AUC of a table of all ids, of one with shared rows and of one of hashed ids; the rows of the first two."""
    train, test = planted(0, rows), planted(1, 40_000)
    names = {kind: name() for kind in ("all", "shared", "hashed")}
    admission = {"kind": "count", "threshold": threshold, "shared_rows": shared_rows}
    found = {
        "all": regression(names["all"], train, test),
        "shared": regression(names["shared"], train, test, admission=admission),
    }
    of_all, of_shared = (table_statistics(names[kind]) for kind in ("all", "shared"))
    count = {"all": of_all["rows"], "shared": of_shared["rows"] + of_shared["shared_rows"]}
    at_once = [(hashed(ids, count["shared"]), labels) for ids, labels in (train, test)]
    found["hashed"] = regression(names["hashed"], *at_once)
    return found, count


def test_fewer_rows_are_better_than_hashed_ids(table_name: TableName) -> None:
    found, count = compare_on_planted(table_name, 12_000, 6, 4)
    assert count["all"] >= 10 * count["shared"]
    assert found["shared"] > found["hashed"] + 0.03


@pytest.mark.tier("all")
def test_a_tenth_of_the_rows_is_nearly_as_good_as_all_on_planted_ids(table_name: TableName) -> None:
    found, count = compare_on_planted(table_name, 60_000, 6, 4)
    assert count["all"] >= 10 * count["shared"]
    assert found["shared"] > found["all"] - 0.002
    assert found["shared"] > found["hashed"] + 0.005


def on_frappe(data_root: Path, name: str, **options: Any) -> tuple[float, int]:
    """Test AUC of an FM after its fourth epoch, and the rows of its tables."""
    folder = data_root / "frappe"
    files: dict[str, Any] = {"train": (folder / "train.libfm",), "test": (folder / "test.libfm",)}
    last = train_new(TrainingConfig(**files, patience=0, epochs=4, **options), name)[-1]
    assert last.test is not None
    return last.test.auc, last.table_rows


@pytest.mark.tier("all")
def test_a_tenth_of_the_rows_on_frappe_is_better_than_hashed_ids(data_root: Path, fixed_table_name: TableName) -> None:
    """Four fifths of its ids come eight to fifteen times each: no tenth of the rows is as good as all."""
    of_shared, own = on_frappe(data_root, fixed_table_name(), admit_after=230, shared_rows=60)
    of_hashed, rows = on_frappe(data_root, fixed_table_name(), hash_buckets=own // 2 + 60)
    assert 10 * (own + 120) <= 10_566
    assert rows <= own + 120
    assert of_shared > of_hashed + 0.005
