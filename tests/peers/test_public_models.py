"""`replace_embeddings` on models that others published, as pip installs them, beside the same models as they were.

Each is skipped where its package is not installed: deepctr-torch 0.3.0, fuxictr 2.3.10, recbole 1.2.1 and
torch-geometric 2.8.1 were tried, without the versions of `ray` and others that they pin.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recstore_ops import DistEmbedding, get_kv_client, replace_embeddings, restore_embeddings, table_names

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS, BATCH, TOLERANCE = 100, 16, 1e-5

Loss = Callable[[Any], Tensor]


@pytest.fixture(autouse=True)
def _tables_are_dropped() -> Iterator[None]:
    before = set(table_names())
    yield
    for name in set(table_names()) - before:
        get_kv_client().drop(name)


def needed(module: str, package: str) -> Any:
    return pytest.importorskip(module, reason=f"{package} is not installed: pip install {package}")


def labels() -> Tensor:
    return torch.randint(2, (BATCH, 1)).float()


def deepctr() -> tuple[Any, Loss]:
    """DeepFM of DeepCTR-Torch, whose penalties are left out: they are about all rows of a weight."""
    inputs = needed("deepctr_torch.inputs", "deepctr-torch")
    columns = [inputs.SparseFeat(name, 30, embedding_dim=4) for name in ("user", "item")]
    columns.append(inputs.DenseFeat("price", 1))
    kind = needed("deepctr_torch.models", "deepctr-torch").DeepFM
    model = kind(columns, columns, dnn_hidden_units=(8,), l2_reg_linear=0, l2_reg_embedding=0, init_std=0.1)

    def loss(model: Any) -> Tensor:
        batch = torch.cat([torch.randint(30, (BATCH, 2)).float(), torch.rand(BATCH, 1)], dim=1)
        return nn.functional.binary_cross_entropy(model(batch), labels())

    return model, loss


def fuxictr() -> tuple[Any, Loss]:
    """DCNv2 of FuxiCTR, where the item looked at and those seen share a table."""
    kind = needed("model_zoo.LongCTR.DCNv2", "fuxictr").DCNv2
    features = needed("fuxictr.features", "fuxictr").FeatureMap("clicks", "/nowhere")
    features.labels, features.default_emb_dim = ["label"], 4
    features.features = OrderedDict(
        user={"type": "categorical", "source": "", "vocab_size": 30, "padding_idx": 0, "embedding_dim": 4},
        item={"type": "categorical", "source": "item", "vocab_size": 30, "padding_idx": 0, "embedding_dim": 4},
        friend={"type": "categorical", "source": "", "share_embedding": "user", "vocab_size": 30, "embedding_dim": 4},
    )
    options = {"optimizer": "adam", "loss": "binary_crossentropy", "metrics": ["AUC"], "verbose": 0, "model_root": "."}
    model = kind(features, parallel_dnn_hidden_units=[8], embedding_dim=4, **options)

    def loss(model: Any) -> Tensor:
        batch = {"user": torch.randint(30, (BATCH,)), "friend": torch.randint(30, (BATCH,)), "label": labels()}
        items = {"item": torch.randint(30, (BATCH * 4,))}
        return model.loss_fn(model((batch, items, torch.ones(BATCH, 3)))["y_pred"], labels())

    return model, loss


class Sizes:
    def num(self, field: str) -> int:
        return 30


def recbole() -> tuple[Any, Loss]:
    """GRU4Rec of RecBole, over padded sessions, with negatives."""
    kind = needed("recbole.model.sequential_recommender", "recbole").GRU4Rec
    config = {
        "USER_ID_FIELD": "user", "ITEM_ID_FIELD": "item", "NEG_PREFIX": "neg_", "LIST_SUFFIX": "_list",
        "ITEM_LIST_LENGTH_FIELD": "length", "MAX_ITEM_LIST_LENGTH": 5, "device": "cpu", "embedding_size": 4,
        "hidden_size": 8, "num_layers": 1, "dropout_prob": 0.0, "loss_type": "BPR",
    }  # fmt: skip
    model = kind(config, Sizes())

    def loss(model: Any) -> Tensor:
        lengths = torch.randint(1, 6, (BATCH,))
        seen = torch.randint(1, 30, (BATCH, 5)) * (torch.arange(5) < lengths.unsqueeze(1))
        items = {"item": torch.randint(1, 30, (BATCH,)), "neg_item": torch.randint(1, 30, (BATCH,))}
        return model.calculate_loss({"item_list": seen, "length": lengths, **items})

    return model, loss


def pyg() -> tuple[Any, Loss]:
    """ComplEx of PyG, with four embeddings."""
    model = needed("torch_geometric.nn", "torch-geometric").ComplEx(30, 5, 4)

    def loss(model: Any) -> Tensor:
        return model.loss(torch.randint(30, (BATCH,)), torch.randint(5, (BATCH,)), torch.randint(30, (BATCH,)))

    return model, loss


def trained(model: Any, loss: Loss, optimizers: list[torch.optim.Optimizer]) -> Tensor:
    """The loss of each step."""
    torch.manual_seed(1)
    found = []
    for _ in range(STEPS):
        value = loss(model)
        for optimizer in optimizers:
            optimizer.zero_grad()
        value.backward()
        for optimizer in optimizers:
            optimizer.step()
        found.append(value.detach())
    return torch.stack(found)


@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
@pytest.mark.parametrize("make", [deepctr, fuxictr, recbole, pyg])
def test_a_published_model_trains_as_it_would_have(make: Callable[[], tuple[Any, Loss]], kind: str) -> None:
    torch.manual_seed(0)
    original, loss = make()
    model = copy.deepcopy(original)
    weights = {path: each.weight for path, each in model.named_modules() if isinstance(each, nn.Embedding)}
    optimizer = {"kind": kind, "lr": 0.1, **({"convention": "torch"} if kind == "adagrad" else {})}
    replaced = replace_embeddings(model, prefix=f"{make.__name__}/{kind}/", grows=True, optimizer=optimizer)
    assert weights.keys() <= replaced.tables.keys()
    assert not any(isinstance(each, nn.Embedding) for each in model.modules())

    of_torch = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[kind]
    dense = [of_torch(parameters, lr=0.1) for parameters in [replaced.dense_parameters()] if parameters]
    expected = trained(original, loss, [of_torch(original.parameters(), lr=0.1)])
    losses = trained(model, loss, [replaced.optimizer, *dense])
    torch.testing.assert_close(losses, expected, rtol=0, atol=TOLERANCE)

    table = next(each for each in model.modules() if isinstance(each, DistEmbedding))
    assert table(torch.tensor([2**62])).shape == (1, table.embedding_dim)
    restore_embeddings(model, num_embeddings={path: weight.shape[0] for path, weight in weights.items()})
    for (path, weight), other in zip(original.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other, weight, rtol=0, atol=TOLERANCE, msg=path)
