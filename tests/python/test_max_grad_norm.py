"""`max_grad_norm` against tables whose gradients torch clipped before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from served_tables import ServerProcesses
from torch import Tensor

from recstore_ops import DistEmbedding, DistEmbeddingBag, SparseOptimizer, Table, TableConfig, servers

pytestmark = pytest.mark.tier("test")

TableName = Callable[[], str]
DIM, NUM, MAX = 20, 50, 1.5


def clipped(gradients: Tensor) -> Tensor:
    """Each row scaled to a norm of `MAX`, if it is longer."""
    norms = torch.linalg.vector_norm(gradients.double(), dim=1, keepdim=True)
    return (gradients * (MAX / norms).clamp(max=1)).float()


def batches(count: int = 6) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids with duplicates, and gradients of which some are longer than `MAX`."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        ids = torch.randint(NUM, (80,), generator=generator)
        yield ids, torch.randn(80, DIM, generator=generator) * torch.rand(80, 1, generator=generator)


def table(name: str, **options: Any) -> Table:
    return Table(name, DIM, TableConfig(optimizer={"kind": "sgd", "lr": 0.5}, **options))


def update(of: Table, ids: Tensor, gradients: Tensor) -> None:
    torch.ops.recstore.emb_update.table(of.handle, ids, gradients)


def rows(of: Table) -> Tensor:
    return torch.ops.recstore.emb_read.table(of.handle, torch.arange(NUM), DIM)


@pytest.mark.parametrize("ids_are", ["distinct", "duplicates"])
def test_the_sum_of_an_ids_gradients_is_clipped(ids_are: str, table_name: TableName) -> None:
    ours, theirs = table(table_name(), max_grad_norm=MAX, seed=1), table(table_name(), seed=1)
    theirs_rows = rows(ours)
    lengths = []
    for ids, gradients in batches():
        if ids_are == "distinct":
            ids, gradients = torch.arange(NUM), gradients[:NUM]
        update(ours, ids, gradients)
        distinct, inverse = ids.unique(return_inverse=True)
        summed = torch.zeros(len(distinct), DIM).index_add(0, inverse, gradients)
        lengths.append(torch.linalg.vector_norm(summed, dim=1))
        theirs_rows[distinct] -= 0.5 * clipped(summed)
    assert 0.1 < (torch.cat(lengths) > MAX).float().mean() < 0.9, "some are clipped and some are not"
    torch.testing.assert_close(rows(ours), theirs_rows, rtol=0, atol=2e-6)
    assert theirs.config.max_grad_norm is None


@pytest.mark.parametrize("kind", [DistEmbedding, DistEmbeddingBag])
def test_modules_are_clipped_and_from_the_disk_to_the_same_bits(
    kind: type, table_name: TableName, tmp_path: Path
) -> None:
    def trained(name: str, **options: Any) -> Tensor:
        torch.manual_seed(0)
        module = kind(None, DIM, name, optimizer="adagrad", max_grad_norm=0.01, seed=2, **options)
        optimizer = SparseOptimizer(modules=[module])
        for _ in range(5):
            ids = torch.randint(3_000, (400, 2))
            (module(ids) * torch.randn(DIM)).square().sum().backward()
            optimizer.step()
        return module.weight[torch.arange(3_000)].detach()

    name = table_name()
    expected = trained(name)
    torch.ops.recstore.drop_table(name)
    assert torch.equal(trained(name, memory_limit=300_000, disk=str(tmp_path)), expected)
    torch.ops.recstore.drop_table(name)


def test_values_whose_squares_overflow_are_clipped_too(table_name: TableName) -> None:
    ours = table(table_name(), max_grad_norm=2.0, initializer={"kind": "zeros"})
    gradient = torch.zeros(1, DIM)
    gradient[0, :4] = 3e38
    update(ours, torch.tensor([7]), gradient)
    expected = torch.zeros(DIM)
    expected[:4] = -0.5
    torch.testing.assert_close(rows(ours)[7], expected)


def test_servers_clip_the_sum_of_all_gradients(table_name: TableName, tmp_path: Path) -> None:
    def trained(name: str) -> Tensor:
        ours = table(name, max_grad_norm=MAX)
        for ids, gradients in batches():
            update(ours, ids, gradients)
        return rows(ours)

    name = table_name()
    expected = trained(name)
    with ServerProcesses(tmp_path, 2) as processes:
        servers.set_ps_servers(processes.addresses)
        try:
            assert torch.equal(trained(name), expected)
        finally:
            servers.set_ps_backend("embedded")


def test_another_norm_is_another_configuration(table_name: TableName) -> None:
    name = table_name()
    table(name, max_grad_norm=1.0)
    with pytest.raises(ValueError, match=r'"max_grad_norm":1.0.* differs from the requested .*"max_grad_norm":2.0'):
        table(name, max_grad_norm=2.0)
