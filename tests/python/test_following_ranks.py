"""Bundles and publications of models whose tables are sharded over the ranks of a job."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, second_groups
from test_following import IDS, Clicks, answer, caught_up, followed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recstore_ops import (
    DistEmbedding,
    KeyedJaggedTensor,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
    SparseOptimizer,
    sharding,
)
from recstore_ops.nn.functional import embedding
from recstore_ops.ops import operators
from recstore_ops.serving import FrozenTable, Publisher, export, freeze, load_bundle, publish
from recstore_ops.serving.following import publication_files
from recstore_ops.serving.following.publication import Current
from recstore_ops.sharding import shard_of
from recstore_ops.table.table import Table

pytestmark = [pytest.mark.tier("test"), pytest.mark.embedded_only("ranks have tables of their own")]

ADAGRAD = {"kind": "adagrad", "lr": 0.1}
Group = dist.ProcessGroup


def clicks(group: Group, name: str) -> Clicks:
    """A model with the same dense part on all ranks."""
    torch.manual_seed(1)
    return Clicks(f"{name}/user", f"{name}/item", optimizer=ADAGRAD, process_group=group)


def train(group: Group, model: Clicks, steps: int, publisher: Publisher | None = None) -> None:
    """Takes steps of both optimizers, each rank on a batch of its own."""
    wrapped, sparse = DistributedDataParallel(model, process_group=group), SparseOptimizer(lr=0.1, modules=model)
    dense = torch.optim.SGD(model.dense.parameters(), lr=0.1)
    for _ in range(steps):
        batch = torch.randint(0, 50, (16, 2), generator=torch.Generator().manual_seed(7 * steps + dist.get_rank(group)))
        wrapped(batch).sub(1.0).square().mean().backward()
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad()
        if publisher is not None:
            publisher.step()


def published_by(group: Group, *args: Any, **options: Any) -> Publisher:
    return publish(*args, **options, second_group=second_groups[dist.get_world_size(group)])


def exported(group: Group, name: str, path: Path, encoding: Any) -> tuple[Tensor, Tensor]:
    """Exports a model that was trained; returns what it answers, and what the bundle does."""
    model = clicks(group, name)
    train(group, model, 5)
    wrapped = DistributedDataParallel(model, process_group=group)
    found = export(wrapped, (IDS,), path / "bundle", encoding=encoding)
    expected = answer(model)
    return expected, load_bundle(found)(IDS)


@pytest.mark.parametrize("encoding", ["float32", "int8"])
def test_a_bundle_of_ranks_answers_as_they_do(
    ranks: Ranks, table_name: Callable[[], str], tmp_path: Path, encoding: str
) -> None:
    for expected, found in ranks.run(3, exported, table_name(), tmp_path, encoding):
        if encoding == "float32":
            assert found.equal(expected)
        else:
            torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"], "nothing lies beside"
    assert sorted(path.name for path in (tmp_path / "bundle" / "tables").iterdir()) == [
        "0.safetensors",
        "1.safetensors",
    ]


class Collected(nn.Module):
    """What both kinds of collections give."""

    def __init__(self, name: str, group: Group) -> None:
        super().__init__()
        options = {"process_group": group, "initializer": {"kind": "normal", "std": 1.0}}
        one = {"num_embeddings": None, "embedding_dim": 4, "feature_names": ["a", "b"], "name": f"{name}/bags"}
        self.bags = RecStoreEmbeddingBagCollection([one], **options)
        self.rows = RecStoreEmbeddingCollection([{**one, "name": f"{name}/rows"}], **options)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Returns pooled rows and rows."""
        return self.bags(features), self.rows(features)["b"].values()


def exported_collections(group: Group, name: str, path: Path) -> tuple[Any, Any]:
    model = Collected(name, group)
    features = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3, 4, 5]), lengths=torch.tensor([2, 1, 0, 2]))
    found = load_bundle(export(model, (features,), path / "bundle"))(features)
    with torch.no_grad():
        return model(features), found


def test_collections_of_ranks_are_exported(ranks: Ranks, table_name: Callable[[], str], tmp_path: Path) -> None:
    for expected, found in ranks.run(2, exported_collections, table_name(), tmp_path):
        assert all(one.equal(other) for one, other in zip(found, expected, strict=True))


def published(group: Group, name: str, path: Path) -> list[str]:
    """Follows a model that ranks train, and returns what was wrong."""
    model, first, wrong = clicks(group, name), dist.get_rank(group) == 0, []
    with published_by(group, model, (IDS,), path / "news", interval=0) as publisher:
        bundle = followed(publisher, path) if first else None

        def agree(what: str) -> None:
            publisher.update()
            publisher.flush()
            ids = torch.cat([IDS, torch.arange(0, 60).reshape(-1, 2)])
            expected = answer(model, ids)
            if bundle is not None and not caught_up(bundle, publisher)(ids).equal(expected):
                wrong.append(what)

        agree("as it began")
        for steps in (1, 5, 20):
            train(group, model, steps, publisher)
            agree(f"after {steps} steps")
        gone = torch.arange(30)
        operators.hashtable_delete(model.user.table.handle, gone[shard_of(gone, 3) == dist.get_rank(group)])
        agree("after rows went")
        save_and_load(group, path)
        train(group, model, 2, publisher)
        agree("after a load")
        if publisher.steps != 28 or publisher.number < 20 or publisher.bytes_written == 0:
            wrong.append(f"{publisher.steps} steps, {publisher.number} updates, {publisher.bytes_written} bytes")
        if bundle is not None and bundle.step != 28:
            wrong.append(f"the bundle is of step {bundle.step}")
    return wrong


def save_and_load(group: Group, path: Path) -> None:
    sharding.save(path / "saved", group)
    sharding.load(path / "saved", group)


def test_what_ranks_train_is_seen_to_the_bit(ranks: Ranks, table_name: Callable[[], str], tmp_path: Path) -> None:
    assert ranks.run(3, published, table_name(), tmp_path) == [[], [], []]


def published_bases(group: Group, name: str, path: Path) -> tuple[int, bool]:
    """Publishes until there are other bases; returns how many there were, and whether the last is right."""
    usual, publication_files._MIN_BYTES = publication_files._MIN_BYTES, 100
    model, first = clicks(group, name), dist.get_rank(group) == 0
    bases = set()
    with published_by(group, model, (IDS,), path / "news", interval=0) as publisher:
        for _ in range(60):
            train(group, model, 1, publisher)
            publisher.flush()
            bases.add(Current.read(publisher.directory).base.name)
        publisher.update()
        publisher.flush()
        expected = answer(model)
        is_right = not first or caught_up(followed(publisher, path), publisher)(IDS).equal(expected)
    publication_files._MIN_BYTES = usual
    return len(bases), is_right


def test_new_bases_are_written_beside_the_training_of_ranks(
    ranks: Ranks, table_name: Callable[[], str], tmp_path: Path
) -> None:
    for bases, is_right in ranks.run(2, published_bases, table_name(), tmp_path):
        assert bases > 2
        assert is_right


def paced(group: Group, name: str, path: Path) -> int:
    """How many updates there are where the interval is long."""
    model = clicks(group, name)
    with published_by(group, model, (IDS,), path / "news", interval=60) as publisher:
        train(group, model, 100, publisher)
        return publisher.number


def test_updates_of_ranks_keep_their_interval(ranks: Ranks, table_name: Callable[[], str], tmp_path: Path) -> None:
    assert ranks.run(2, paced, table_name(), tmp_path) == [1, 1]


def refused(group: Group, name: str, path: Path, what: str) -> None:
    """Publishes or exports what cannot be."""
    model, first = clicks(group, name), dist.get_rank(group) == 0
    if what == "not seen":
        published_by(group, model, (IDS,), path / f"news-{dist.get_rank(group)}")
    elif what == "not finite":
        rows = torch.rand(40, 4) * 1e30
        ids = torch.arange(40)
        with published_by(group, model, (IDS,), path / "news", encoding="int8") as publisher:
            if not first:
                own = shard_of(ids, 2) == 1
                operators.emb_write(model.user.table.handle, ids[own], rows[own])
            publisher.update()
    elif what == "join":
        publisher = published_by(group, model, (IDS,), path / "news")
        with sharding.join([model.user, model.item], second_group=second_groups[2]):
            publisher.update()
    elif what == "inputs":
        published_by(group, model, (IDS.float(),), path / "news")
    elif what == "export":
        (path / "there").mkdir(exist_ok=True)
        export(model, (IDS,), path / "there")
    elif what == "encoding":
        export(model, (IDS,), path / "bundle", encoding={"other": "int8"})
    elif what == "no module":
        export(Borrowing(model.user.table), (IDS,), path / "bundle")


class Borrowing(nn.Module):
    """Reads a table that no module of its own has."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self._table = table

    def forward(self, ids: Tensor) -> Tensor:
        """Returns rows."""
        return embedding(ids, self._table)


@pytest.mark.parametrize(
    ("what", "of_first", "of_other"),
    [
        ("not seen", "rank 1: .*news-1 is not there: all processes must see the directory", "rank 0 could not publish"),
        ("not finite", "rank 1: .*int8", "rank 0 could not publish: rank 1: .*int8"),
        ("join", "use it outside of sharding.join", "use it outside of sharding.join"),
        ("inputs", "ids|int64", "rank 0 could not publish: "),
        ("export", "is there already", "rank 0 could not export to .*there: .*is there already"),
        ("encoding", "encoding names table 'other'", "rank 0 could not export to .*: encoding names table 'other'"),
        (
            "no module",
            "sharded over processes, and in no module of the model",
            "sharded over processes, and in no module of the model",
        ),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(
    ranks: Ranks, table_name: Callable[[], str], tmp_path: Path, what: str, of_first: str, of_other: str
) -> None:
    first, other = ranks.errors(2, refused, table_name(), tmp_path, what)
    assert re.search(of_first, first.message)
    assert re.search(of_other, other.message)


def left(group: Group, name: str, path: Path) -> str:
    """One rank fails within a publication; the others go on without it."""
    model = clicks(group, name)
    try:
        with published_by(group, model, (IDS,), path / "news", interval=0) as publisher:
            train(group, model, 2, publisher)
            raise KeyError("training failed")
    except KeyError as error:
        with published_by(group, model, (IDS,), path / "news", interval=0) as again:
            train(group, model, 1, again)
        return str(error)


def test_an_error_of_the_training_waits_for_no_other_rank(
    ranks: Ranks, table_name: Callable[[], str], tmp_path: Path
) -> None:
    assert ranks.run(2, left, table_name(), tmp_path) == ["'training failed'"] * 2


def frozen(group: Group, name: str, path: Path) -> tuple[Tensor, Tensor, list[int]]:
    """Freezes a table, and returns its rows beside the file's."""
    module = DistEmbedding(None, 4, name, process_group=group)
    ids = torch.arange(-50, 50)
    module(ids).sum().backward()
    SparseOptimizer(lr=0.1, modules=module).step()
    freeze(module.table, path / "table")
    table = FrozenTable(path / "table")
    with torch.no_grad():
        return module(ids), table.read(ids), [table.rows, len(module.table)]


def test_a_table_of_ranks_is_frozen(ranks: Ranks, table_name: Callable[[], str], tmp_path: Path) -> None:
    for expected, found, (rows, own) in ranks.run(2, frozen, table_name(), tmp_path):
        assert found.equal(expected)
        assert rows == 100 > own
    assert [path.name for path in tmp_path.iterdir()] == ["table"]
