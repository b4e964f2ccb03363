"""Arguments of `replace_embeddings` that are of another type: each is refused by its name, with what came."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from recstore_ops import DistEmbedding, get_kv_client, replace_embeddings, restore_embeddings, table_names

pytestmark = pytest.mark.tier("quick")


@pytest.fixture(autouse=True)
def _tables_are_dropped() -> Iterator[None]:
    before = set(table_names())
    yield
    for name in set(table_names()) - before:
        get_kv_client().drop(name)


def model_of() -> Any:
    return nn.ModuleDict({"user": nn.Embedding(6, 4), "item": nn.Embedding(6, 4)})


def is_refused(message: str, **options: Any) -> None:
    model, before = model_of(), table_names()
    with pytest.raises(TypeError) as caught:
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
