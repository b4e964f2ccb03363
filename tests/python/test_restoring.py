"""`restore_embeddings`: arguments that would be without effect, and modules whose table another goes on with."""

from __future__ import annotations

from types import MappingProxyType
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


def over_tables(prefix: str, **sizes: int | None) -> Any:
    return nn.ModuleDict({name: DistEmbedding(size, 4, f"{prefix}{name}") for name, size in sizes.items()})


def tied(prefix: str) -> Any:
    """Two embeddings over one table, and one over another."""
    model = nn.ModuleDict({name: nn.Embedding(6, 4) for name in ("item", "history", "user")})
    model["history"].weight = model["item"].weight
    replace_embeddings(model, prefix=prefix)
    return model


def state_of(model: nn.Module) -> list[Any]:
    return [[id(module) for module in model.modules()], table_names()]


@pytest.mark.parametrize("size", [7.0, 7.5, True, "7", torch.tensor(7), [7, 7], (7,), b"7", {7}])
@pytest.mark.parametrize("bound", [6, None])
@pytest.mark.parametrize("by_path", [False, True])
def test_rows_that_are_no_number_are_refused(size: Any, bound: int | None, by_path: bool, prefix: str) -> None:
    model = over_tables(prefix, user=bound)
    before = state_of(model)
    with pytest.raises(TypeError, match="num_embeddings must be an int, or ints by the paths of modules, got "):
        restore_embeddings(model, num_embeddings={"user": size} if by_path else size)
    assert state_of(model) == before


REFUSED: dict[str, tuple[dict[str, int | None], Any, str | None, str]] = {
    "another number": ({"user": 6}, 100, None, '"user": num_embeddings is 100, and its table has 6'),
    "another by path": ({"user": 6, "item": 7}, {"item": 6}, None, '"item": num_embeddings is 6, and its table has 7'),
    "fewer": ({"user": None, "item": 7}, {"user": 9, "item": 2}, None, '"item": num_embeddings is 2, and its table'),
    "one of two": ({"user": 6, "item": 7}, 6, None, '"item": num_embeddings is 6, and its table has 7'),
    "no path": ({"user": None}, {"user": 9, "users": 9}, None, r"has 'users', which is none of \['user'\]"),
    "no path, bound": ({"user": 6}, {"tag": 6}, None, r"has 'tag', which is none of \['user'\]"),
    "left out": ({"user": None, "item": 7}, {"user": 9, "item": 7}, "user", r"has 'item', which is none of \['user'\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_would_be_ignored_are_refused(name: str, prefix: str) -> None:
    bounds, sizes, include, message = REFUSED[name]
    model = over_tables(prefix, **bounds)
    before = state_of(model)
    with pytest.raises(ValueError, match=message):
        restore_embeddings(model, include=include, num_embeddings=sizes)
    assert state_of(model) == before


@pytest.mark.parametrize("sizes", [9, {"user": 9}, {"user": 9, "item": 6}, MappingProxyType({"user": 9})])
def test_one_number_is_for_tables_without_bound_and_a_bound_may_be_repeated(sizes: Any, prefix: str) -> None:
    model = over_tables(prefix, user=None, item=6)
    restore_embeddings(model, num_embeddings=sizes)
    assert (model["user"].num_embeddings, model["item"].num_embeddings) == (9, 6)


def test_a_module_of_two_paths_has_one_number(prefix: str) -> None:
    model = over_tables(prefix, user=None)
    model["again"] = model["user"]
    with pytest.raises(ValueError, match=r'"user": num_embeddings has several numbers for its paths: \[6, 9\]'):
        restore_embeddings(model, num_embeddings={"user": 9, "again": 6})
    restore_embeddings(model, num_embeddings={"again": 9})
    assert model["user"].num_embeddings == 9


@pytest.mark.parametrize("drop", ["no", 1, None, []])
def test_whether_tables_are_dropped_is_a_bool(drop: Any, prefix: str) -> None:
    model = over_tables(prefix, user=6)
    before = state_of(model)
    with pytest.raises(TypeError, match="restore_embeddings: drop_tables must be a bool, got "):
        restore_embeddings(model, drop_tables=drop)
    assert state_of(model) == before


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize(("restored", "kept"), [("item", "history"), ("history", "item")])
def test_half_of_what_shares_a_table_is_refused(restored: str, kept: str, drop: bool, prefix: str) -> None:
    model = tied(prefix)
    before = state_of(model)
    with pytest.raises(ValueError, match=f'"{restored}": it shares a table with "{kept}", which stays'):
        restore_embeddings(model, include=restored, drop_tables=drop)
    assert state_of(model) == before
    restore_embeddings(model, include=["item", "history"], drop_tables=drop)
    assert model["item"].weight is model["history"].weight
    assert isinstance(model["user"], DistEmbedding)


def test_a_table_that_a_collection_has_too_is_refused(prefix: str) -> None:
    model = over_tables(prefix, user=6)
    config = {"name": f"{prefix}user", "num_embeddings": 6, "embedding_dim": 4}
    model["bags"] = RecStoreEmbeddingCollection([config])
    with pytest.raises(ValueError, match='"user": it shares a table with "bags", which stays'):
        restore_embeddings(model, include="user")
