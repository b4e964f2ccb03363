"""Snapshots that several processes save together, each its rows, and any number of processes load; compaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import assert_same, contents, drop_all_tables
from torch import Tensor
from warm_processes import side_by_side

from recstore_ops import DistEmbedding, RecStoreClient, SparseOptimizer, checkpoint, table_names
from recstore_ops.ops import operators
from recstore_ops.table.shard_of import splitmix64

pytestmark = pytest.mark.tier("test")

IDS = torch.cat([torch.arange(-300, 300), torch.tensor([2**63 - 1, -(2**63)])])
ADAM = {"kind": "adam", "lr": 0.1}


@pytest.fixture(autouse=True)
def _empty_store() -> Iterator[None]:
    drop_all_tables()
    yield
    drop_all_tables()


def train(module: DistEmbedding, ids: Tensor, steps: int) -> None:
    optimizer = SparseOptimizer()
    for step in range(steps):
        batch = ids[ids % (step + 2) == 0]
        module(batch).mul(batch[:, None] % 7 - 3.0).sum().backward()
        optimizer.step([module])


def of_a_shard(job: str, path: Path, shard: tuple[int, int], snapshot: str, kind: Any, steps: int) -> Any:
    """Trains and saves the rows of a shard, or loads them, in a new process; returns what it has."""
    assert not table_names()
    torch.set_num_threads(1)
    if job == "load":
        checkpoint.load(path, shard=shard)
    else:
        table = DistEmbedding(None, 3, "t", optimizer=ADAM)
        if kind == "delta":
            checkpoint.load(path, shard=shard)
        train(table, IDS[checkpoint.shard_of(IDS, shard[1]) == shard[0]], steps)
        checkpoint.save_part(path, snapshot, *shard, kind=kind)
    module = DistEmbedding(None, 3, "t", optimizer=ADAM, on_existing="share")
    ids = operators.hashtable_ids(module.table.handle)
    assert bool((checkpoint.shard_of(ids, shard[1]) == shard[0]).all())
    return ids.tolist(), module(ids).tolist(), module.table.statistics()["step"]


def run_all(job: str, path: Path, of: int, snapshot: str = "-", kind: str = "full", steps: int = 0) -> list[Any]:
    """Runs a process for each shard, all at once, and returns what they told."""
    return side_by_side(of_a_shard, [(job, path, (number, of), snapshot, kind, steps) for number in range(of)])


def rows_of(told: list[Any]) -> dict[int, list[float]]:
    rows = {id: row for ids, of_ids, _ in told for id, row in zip(ids, of_ids, strict=True)}
    assert len(rows) == sum(len(ids) for ids, _, _ in told), "two shards have one id"
    return rows


def test_two_processes_save_and_one_and_three_load(tmp_path: Path) -> None:
    reference = DistEmbedding(None, 3, "t", optimizer=ADAM)
    train(reference, IDS, 4)
    ids, rows, _, statistics = contents("t")
    expected = dict(zip(ids.tolist(), rows.tolist(), strict=True))

    snapshot = checkpoint.new_snapshot_name()
    saved = run_all("save", tmp_path, 2, snapshot, "full", 4)
    with pytest.raises(RuntimeError, match="there is no checkpoint here"):
        checkpoint.load(tmp_path)
    checkpoint.commit(tmp_path, snapshot, 2, metadata={"epoch": 1})
    assert rows_of(saved) == expected

    report = checkpoint.load(tmp_path)
    assert (report.snapshot, report.metadata, report.tables) == (snapshot, {"epoch": 1}, {"t": len(expected)})
    assert torch.equal(contents("t")[1], rows)
    assert contents("t")[3]["step"] == statistics["step"]

    told = run_all("load", tmp_path, 3)
    assert rows_of(told) == expected
    assert [step for _, _, step in told] == [4, 4, 4]
    assert all(ids for ids, _, _ in told)

    delta = checkpoint.new_snapshot_name()
    saved = run_all("save", tmp_path, 3, delta, "delta", 2)
    checkpoint.commit(tmp_path, delta, 3)
    checkpoint.load(tmp_path)
    train(reference, IDS[:0], 0)
    ids, rows, _, _ = contents("t")
    assert rows_of(saved) == dict(zip(ids.tolist(), rows.tolist(), strict=True))
    checkpoint.compact(tmp_path)
    assert rows_of(run_all("load", tmp_path, 2)) == rows_of(saved)


def test_ids_are_spread_by_their_hash() -> None:
    hashes = splitmix64(IDS.numpy())
    for of in (1, 3, 64):
        shards = checkpoint.shard_of(IDS, of)
        assert shards.tolist() == [int(value) % of for value in hashes]
    assert checkpoint.shard_of(IDS[:6].reshape(2, 3).t(), 5).shape == (3, 2)
    assert checkpoint.shard_of(torch.tensor(7), 5).shape == ()
    with pytest.raises(TypeError, match=r"ids must be of torch.int64, got torch.float32"):
        checkpoint.shard_of(torch.ones(2), 3)


@pytest.mark.parametrize(("number", "of"), [(2, 2), (-1, 2), (0, 0), (True, 2), (0, 2.0)])
def test_what_is_no_shard_is_refused(number: Any, of: Any, tmp_path: Path) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: checkpoint.load(tmp_path, shard=(number, of)),
        lambda: checkpoint.save_part(tmp_path, checkpoint.new_snapshot_name(), number, of),
    ]
    if of != 2:
        calls += [
            lambda: checkpoint.commit(tmp_path, checkpoint.new_snapshot_name(), of),
            lambda: checkpoint.shard_of(IDS, of),
        ]
    for call in calls:
        with pytest.raises(ValueError, match="a shard is a number from 0 on below the number of shards, got "):
            call()
    assert list(tmp_path.iterdir()) == []


def test_a_commit_needs_all_parts_under_a_name(tmp_path: Path) -> None:
    DistEmbedding(None, 2, "t")
    snapshot = checkpoint.new_snapshot_name()
    checkpoint.save_part(tmp_path, snapshot, 0, 2)
    with pytest.raises(RuntimeError, match=r"part-1-of-2.json: this shard has not been saved"):
        checkpoint.commit(tmp_path, snapshot, 2)
    with pytest.raises(RuntimeError, match='"mine" is not the name of a snapshot'):
        checkpoint.save_part(tmp_path, "mine", 0, 2)
    with pytest.raises(RuntimeError, match='"mine" is not the name of a snapshot'):
        checkpoint.commit(tmp_path, "mine", 2)
    with pytest.raises(ValueError, match="kind must be full, delta or auto"):
        checkpoint.save_part(tmp_path, snapshot, 0, 2, kind="some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep must be an int of at least 1"):
        checkpoint.commit(tmp_path, snapshot, 2, keep=0)


def deltas(path: Path) -> None:
    module = DistEmbedding(None, 3, "t", optimizer=ADAM)
    for kind in ("full", "delta", "delta"):
        train(module, IDS, 2)
        RecStoreClient().delete("t", IDS[:5])
        checkpoint.save(path, kind=kind, metadata=kind)


def test_a_chain_of_deltas_is_compacted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    deltas(tmp_path)
    expected = contents("t")
    report = checkpoint.compact(tmp_path, progress=True)
    assert report is not None
    assert (report.is_delta, report.rows, report.deleted) == (False, expected[0].numel(), 0)
    assert "compacting: " in capfd.readouterr().err
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    assert checkpoint.compact(tmp_path) is None
    assert checkpoint.save(tmp_path, kind="delta").is_delta
    loaded = checkpoint.load(tmp_path)
    assert loaded.metadata is None
    assert_same(contents("t"), expected)


def test_the_command_compacts(tmp_path: Path, recstore: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    deltas(tmp_path)
    assert recstore("compact", tmp_path) == 0
    assert f"{contents('t')[0].numel():,} rows" in capsys.readouterr().out
    assert recstore("compact", tmp_path) == 0
    assert "nothing to compact" in capsys.readouterr().out
    assert recstore("compact", tmp_path / "absent") == 2
    assert "absent" in capsys.readouterr().err
