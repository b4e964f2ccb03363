"""Checkpoints that all ranks save together, and other numbers of ranks load."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from sharded_training import VOCABULARY, Group, global_batch, share
from torch import Tensor

from recstore_ops import DistEmbedding, SparseOptimizer, sharding, table_statistics

pytestmark = pytest.mark.tier("test")

STEPS = 10


def train_on(group: Group, name: str, first: int, source: Path | None, target: Path | None) -> tuple[Tensor, int]:
    """Takes steps from number `first` on, after a load and before a save; returns the rows and the table's step."""
    grads = "mean" if group is None else "sum"
    table = DistEmbedding(None, 6, name, optimizer={"kind": "adam", "lr": 0.05}, process_group=group, grad_reduce=grads)
    if source is not None:
        assert group is not None
        assert sharding.load(source, group).metadata == {"step": first}
    stepper = SparseOptimizer(modules=[table])
    for step in range(first, first + STEPS):
        ids, targets = global_batch(step)
        own = share(len(ids), group)
        (table(ids[own]) - targets[own]).square().sum().backward()
        stepper.step()
    if target is not None:
        assert group is not None
        sharding.save(target, group, metadata={"step": first + STEPS})
    with torch.no_grad():
        rows = table(VOCABULARY)
    return rows, table_statistics(name)["step"]


def train_in_one(name: str) -> Tensor:
    """Takes all the steps in one process."""
    table = DistEmbedding(None, 6, name, optimizer={"kind": "adam", "lr": 0.05})
    stepper = SparseOptimizer(modules=[table])
    for step in range(4 * STEPS):
        ids, targets = global_batch(step)
        (table(ids) - targets).square().sum().backward()
        stepper.step()
    with torch.no_grad():
        return table(VOCABULARY)


def test_any_number_of_ranks_goes_on_from_a_save(ranks: Ranks, table_name: Callable[[], str], tmp_path: Path) -> None:
    name, source = table_name(), None
    found: list[tuple[Tensor, int]] = []
    for place, world in enumerate([2, 4, 1, 3]):
        target = tmp_path / str(place)
        found = ranks.run(world, train_on, name, place * STEPS, source, target)
        source = target
    alone = train_in_one(name)
    for rows, step in found:
        assert step == 4 * STEPS
        torch.testing.assert_close(rows, alone, rtol=0, atol=1e-5)


def save_plain_and_compressed(group: dist.ProcessGroup, name: str, path: Path) -> None:
    table = DistEmbedding(None, 64, name, process_group=group)
    table.reset_parameters()
    SparseOptimizer(modules=[table])
    table(torch.arange(2000)).sum().backward()
    SparseOptimizer(modules=[table]).step()
    plain = sharding.save(path / "plain", group, progress=False)
    compressed = sharding.save(path / "compressed", group, compression=("zstd", 5), progress=True)
    assert compressed.rows == plain.rows
    sharding.load(path / "compressed", group)


def test_ranks_compress_their_files(ranks: Ranks, table_name: Callable[[], str], tmp_path: Path) -> None:
    ranks.run(2, save_plain_and_compressed, table_name(), tmp_path)
    files = [sorted((tmp_path / place).glob("*.safetensors*")) for place in ("plain", "compressed")]
    assert [{file.suffix for file in each} for each in files] == [{".safetensors"}, {".zst"}]


def save_badly(group: dist.ProcessGroup, name: str, path: Path, what: str) -> None:
    """Saves where one rank cannot."""
    DistEmbedding(None, 2, name, process_group=group)
    is_last = group.rank() == group.size() - 1
    if what == "path":
        file = path / "file"
        file.touch()
        sharding.save(file / "below" if is_last else path / "fine", group)
    elif what == "URL":
        sharding.save("s3://bucket/prefix", group)
    elif what == "compression":
        sharding.save(path, group, compression=("zstd", 50) if is_last else None)
    elif what == "metadata":
        sharding.save(path, group, metadata=object() if group.rank() == 0 else None)
    else:
        sharding.load(path, group)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("path", "rank 2 could not save its part of the checkpoint: "),
        ("metadata", "rank 0 could not save its part of the checkpoint: metadata must be what JSON can hold"),
        ("URL", "sharding.save needs a directory, got s3://bucket/prefix"),
        ("compression", "rank 2 could not save its part of the checkpoint: compression must be None"),
        ("load", "no checkpoint"),
    ],
)
def test_what_one_rank_cannot_save_or_load_all_refuse(
    ranks: Ranks, table_name: Callable[[], str], tmp_path: Path, what: str, message: str
) -> None:
    errors = ranks.errors(3, save_badly, table_name(), tmp_path, what)
    assert any(message in error.message for error in errors), [str(error) for error in errors]
    assert not (tmp_path / "fine" / "manifest.json").exists()
    assert not (tmp_path / "manifest.json").exists()
