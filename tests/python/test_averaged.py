"""`averaged` against `torch.optim.swa_utils.AveragedModel` over dense weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_kinds import FORMS
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    SparseOptimizer,
    averaged,
    checkpoint,
    export,
    load_bundle,
)
from recstore_ops.servers.store import table_names

pytestmark = [
    pytest.mark.tier("test"),
    pytest.mark.embedded_only("tables on servers cannot be copied"),
    # torch's Adagrad makes sparse tensors without saying whether they shall be checked.
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]

TableName = Callable[[], str]
NUM, DIM, DECAY = 30, 4, 0.9
ADAGRAD = {"kind": "adagrad", "lr": 0.1, "convention": "torch"}


def batches(count: int = 12) -> list[Tensor]:
    """Ids of which most rest for several steps, and the last ten never come."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(NUM - 10, (3,), generator=generator) for _ in range(count)]


def train(module: DistEmbedding, optimizer: SparseOptimizer, ids: Tensor) -> None:
    (module(ids) ** 2).sum().backward()
    optimizer.step()


def rows(module: nn.Module) -> Tensor:
    return module(torch.arange(NUM)).detach()


def test_rows_are_averaged_as_torch_averages_weights(table_name: TableName) -> None:
    ours = DistEmbedding(None, DIM, table_name(), optimizer=ADAGRAD, ema_decay=DECAY)
    theirs = nn.Embedding(NUM, DIM, sparse=True, _weight=rows(ours).clone())
    mean = AveragedModel(theirs, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    mean.update_parameters(theirs)  # The first call copies: rows start as their own averages.
    optimizer, theirs_optimizer = SparseOptimizer(modules=[ours]), torch.optim.Adagrad(theirs.parameters(), lr=0.1)
    for ids in batches():
        train(ours, optimizer, ids)
        theirs.zero_grad()
        (theirs(ids) ** 2).sum().backward()
        theirs_optimizer.step()
        mean.update_parameters(theirs)
    torch.testing.assert_close(rows(averaged(ours)), rows(mean), rtol=0, atol=1e-6)
    assert not torch.allclose(rows(averaged(ours)), rows(ours), atol=1e-3)


@pytest.mark.parametrize(
    "form", [each for each in FORMS if "catch_up" not in each], ids=lambda form: "-".join(map(str, form.values()))
)
def test_an_average_changes_no_step_of_any_rule(form: dict[str, Any], table_name: TableName) -> None:
    start, results = torch.randn(NUM, DIM, generator=torch.Generator().manual_seed(4)), []
    for decay in (None, DECAY):
        module = DistEmbedding(None, DIM, table_name(), optimizer=form, ema_decay=decay)
        torch.ops.recstore.emb_write.table(module.table.handle, torch.arange(NUM), start)
        optimizer = SparseOptimizer(modules=[module])
        for ids in batches():
            train(module, optimizer, ids)
        results.append(rows(module))
    assert torch.equal(*results)
    mean = rows(averaged(module))
    assert torch.equal(mean[NUM - 10 :], start[NUM - 10 :]), "rows that were never stepped"
    assert not torch.equal(mean, results[0])


class Both(nn.Module):
    """Rows and bags of one table, and a dense layer."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.rows = DistEmbedding(None, DIM, name, ema_decay=DECAY)
        self.bags = DistEmbeddingBag(None, DIM, name, ema_decay=DECAY)
        self.dense = nn.Linear(DIM, 1)


def test_a_model_keeps_its_rows_and_the_copy_goes_with_its_last_owner(table_name: TableName) -> None:
    name = table_name()
    model = Both(name)
    train(model.rows, SparseOptimizer(modules=[model]), torch.arange(5))
    before = rows(model.rows)
    twin = averaged(model)
    assert torch.equal(rows(model.rows), before)
    assert torch.equal(twin.dense.weight, model.dense.weight)
    assert twin.rows.name == twin.bags.name == f"{name}.copy"
    assert twin.rows.table.table_id == twin.bags.table.table_id
    del twin
    assert f"{name}.copy" not in table_names()


def test_averages_are_saved_and_exported(table_name: TableName, tmp_path: Path) -> None:
    name = table_name()
    module = DistEmbedding(None, DIM, name, optimizer=ADAGRAD, ema_decay=DECAY)
    optimizer = SparseOptimizer(modules=[module])
    for number, ids in enumerate(batches()):
        train(module, optimizer, ids)
        if number == 5:
            checkpoint.save(tmp_path / "saved")
    expected = rows(averaged(module))
    export(averaged(module), (torch.arange(NUM),), tmp_path / "bundle")
    assert torch.equal(load_bundle(tmp_path / "bundle")(torch.arange(NUM)), expected)
    checkpoint.load(tmp_path / "saved", tables=[name])
    for ids in batches()[6:]:
        train(module, optimizer, ids)
    assert torch.equal(rows(averaged(module)), expected)


def test_a_row_that_is_overwritten_is_its_own_average(table_name: TableName) -> None:
    module = DistEmbedding(None, DIM, table_name(), ema_decay=DECAY)
    optimizer = SparseOptimizer(modules=[module])
    for ids in batches():
        train(module, optimizer, ids)
    torch.ops.recstore.emb_write.table(module.table.handle, torch.tensor([3]), torch.full((1, DIM), 5.0))
    assert torch.equal(rows(averaged(module))[3], torch.full((DIM,), 5.0))


def test_what_keeps_no_averages_is_refused(table_name: TableName) -> None:
    module = DistEmbedding(None, DIM, table_name())
    with pytest.raises(ValueError, match=f'table "{module.name}" keeps no averages: it was opened without ema_decay'):
        averaged(module)
    with pytest.raises(ValueError, match="Linear has no tables whose rows were averaged"):
        averaged(nn.Linear(1, 1))
