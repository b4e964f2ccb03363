"""Arguments of `replace_embeddings` that are of another type: each is refused by its name, with what came."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from recstore_ops import get_kv_client, replace_embeddings, table_names

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
