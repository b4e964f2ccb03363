"""Arguments of `replace_embeddings` that are of another type: each is refused by its name, with what came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from recstore_ops import (
    DistEmbedding,
    RecStoreEmbeddingCollection,
    replace_embeddings,
    restore_embeddings,
    table_names,
)

pytestmark = [pytest.mark.tier("quick"), pytest.mark.usefixtures("tables_are_dropped")]


def model_of() -> Any:
    return nn.ModuleDict({"user": nn.Embedding(6, 4), "item": nn.Embedding(6, 4)})


def is_refused(message: str, error: type[Exception] = TypeError, **options: Any) -> None:
    model, before = model_of(), table_names()
    with pytest.raises(error) as caught:
        replace_embeddings(model, **options)
    assert message in str(caught.value)
    assert table_names() == before
    assert [type(module) for module in model.values()] == [nn.Embedding, nn.Embedding]


@pytest.mark.parametrize("prefix", [None, 5, b"x", ["a"], ("a",), True])
def test_a_prefix_is_a_str(prefix: Any) -> None:
    is_refused(f"replace_embeddings: prefix must be a str, got {prefix!r}", prefix=prefix)


@pytest.mark.parametrize("grows", ["no", "", 0, 1, None, [], torch.tensor(True)])
def test_whether_tables_grow_is_a_bool(grows: Any) -> None:
    is_refused(f"replace_embeddings: grows must be a bool, got {grows!r}", grows=grows)


INCLUDES = [
    5,
    [5],
    ["user", 5],
    ["user", None],
    b"user",
    [b"user"],
    nn.Linear,
    nn.Embedding,
    str,
    True,
    {"user": 1, 2: 3},
]


@pytest.mark.parametrize("include", [*INCLUDES, nn.Linear(1, 1), nn.ModuleList([nn.Linear(1, 1)])])
def test_an_include_is_patterns_or_a_function(include: Any, table_name: Callable[[], str]) -> None:
    words = f"include must be a pattern of paths, several, or include(path, module), got {include!r}"
    is_refused(f"replace_embeddings: {words}", include=include)
    model = nn.ModuleDict({"user": DistEmbedding(6, 4, table_name())})
    with pytest.raises(TypeError) as caught:
        restore_embeddings(model, include=include)
    assert f"restore_embeddings: {words}" in str(caught.value)
    assert isinstance(model["user"], DistEmbedding)


class Chooser:
    def __call__(self, path: str, module: nn.Module) -> bool:
        return path == "user"


@pytest.mark.parametrize("include", ["user", ("us*",), {"user"}, iter(["user"]), Chooser(), Chooser().__call__])
def test_patterns_of_all_kinds_and_what_can_be_called_choose(include: Any, table_name: Callable[[], str]) -> None:
    assert list(replace_embeddings(model_of(), include=include, prefix=table_name()).tables) == ["user"]


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"lr": "0.1"}, "lr must be a number, got '0.1'"),
    ({"lr": None}, "lr must be a number, got None"),
    ({"lr": True}, "lr must be a number, got True"),
    ({"lr": torch.tensor(0.1)}, "lr must be a number, got tensor(0.1"),
    ({"lr": [0.1]}, "lr must be a number, got [0.1]"),
    ({"optimizer": {"kind": "adam", "lr": "0.1"}}, "optimizer.lr must be a number, got '0.1'"),
    ({"optimizer": {"kind": "adam", "lr": None}}, "optimizer.lr must be a number, got None"),
    ({"optimizer": {"kind": "ftrl", "alpha": "1"}}, "optimizer.alpha must be a number, got '1'"),
    ({"optimizer": torch.optim.Adam}, 'optimizer must be the name of a kind, or a dict with a "kind", got <class'),
    ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=1)}, "optimizer must be the name of a kind, or a dict with a"),
    ({"optimizer": 0.1}, 'optimizer must be the name of a kind, or a dict with a "kind", got 0.1'),
    ({"optimizer": ["sgd"]}, "optimizer must be the name of a kind, or a dict with a \"kind\", got ['sgd']"),
    ({"initializer": nn.init.zeros_}, 'initializer must be the name of a kind, or a dict with a "kind", got <function'),
    ({"initializer": 0.0}, 'initializer must be the name of a kind, or a dict with a "kind", got 0.0'),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_learning_rates_and_kinds_of_another_type_are_refused_by_name(
    options: dict[str, Any], message: str, table_name: Callable[[], str]
) -> None:
    error = ValueError if "number" in message else TypeError
    is_refused(message, error, **options)
    name = table_name()
    config = {"name": name, "num_embeddings": 6, "embedding_dim": 4}
    for make in (
        lambda: DistEmbedding(6, 4, name, **options),
        lambda: RecStoreEmbeddingCollection([config], **options),
    ):
        with pytest.raises(error) as caught:
            make()
        assert message in str(caught.value)
    assert name not in table_names()
