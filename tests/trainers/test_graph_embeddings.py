"""Models of knowledge graphs of PyTorch Geometric over tables, beside the same ones over `nn.Embedding`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn.kge import ComplEx, DistMult, KGEModel, RotatE, TransE

from recstore_ops import DistEmbedding, SparseOptimizer, replace_embeddings

NODES, RELATIONS, DIM, EPOCHS = 30, 5, 8, 3
RULE: Any = {"kind": "adagrad", "lr": 0.1, "convention": "torch"}

each_model = pytest.mark.parametrize("kind", [TransE, DistMult, ComplEx, RotatE])


def triples() -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(3)
    head, relation, tail = (torch.randint(size, (200,), generator=draws) for size in (NODES, RELATIONS, NODES))
    return head, relation, tail


def original(kind: type[KGEModel]) -> KGEModel:
    torch.manual_seed(0)
    return kind(NODES, RELATIONS, DIM)


def embeddings(model: nn.Module) -> dict[str, Any]:
    return {name: each for name, each in model.named_children() if isinstance(each, nn.Embedding | DistEmbedding)}


def in_one_call(model: KGEModel) -> SparseOptimizer:
    return replace_embeddings(model, prefix="graph/", optimizer=RULE).optimizer


def by_attributes(model: KGEModel) -> SparseOptimizer:
    for name, each in embeddings(model).items():
        setattr(model, name, DistEmbedding.from_pretrained(each.weight, f"graph/{name}", freeze=False, optimizer=RULE))
    return SparseOptimizer(modules=[model])


def trained(model: Any, optimizer: torch.optim.Optimizer) -> tuple[Tensor, tuple[float, float, float]]:
    """The losses, and what the model's own test says afterwards."""
    torch.manual_seed(1)
    losses = []
    for _ in range(EPOCHS):
        for head, relation, tail in model.loader(*triples(), batch_size=40, shuffle=True):
            optimizer.zero_grad()
            loss = model.loss(head, relation, tail)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    model.eval()
    return torch.stack(losses), model.test(*(each[:20] for each in triples()), batch_size=16, k=10, log=False)


@pytest.mark.parametrize("replaced", [in_one_call, by_attributes])
@each_model
def test_a_model_of_a_graph_trains_as_over_embeddings(kind: type[KGEModel], replaced: Any) -> None:
    dense = original(kind)
    model = copy.deepcopy(dense)
    optimizer = replaced(model)
    expected, figures_before = trained(dense, torch.optim.Adagrad(dense.parameters(), lr=0.1))
    losses, figures = trained(model, optimizer)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    assert figures == pytest.approx(figures_before)
    for name, embedding in embeddings(dense).items():
        table = embeddings(model)[name]
        assert isinstance(table, DistEmbedding)
        rows = table(torch.arange(embedding.num_embeddings)).detach()
        torch.testing.assert_close(rows, embedding.weight.detach(), rtol=1e-5, atol=1e-5)


@each_model
def test_values_that_a_model_gives_its_embeddings_are_refused_by_tables(kind: type[KGEModel]) -> None:
    model: Any = original(kind)
    in_one_call(model)
    before = model.node_emb(torch.arange(NODES)).detach()
    with pytest.raises((TypeError, AttributeError), match=r'"graph/node_emb".*reset_parameters'):
        model.reset_parameters()
    assert torch.equal(model.node_emb(torch.arange(NODES)), before)
