"""A module made anew over a table that holds rows: it says so once, or does what `on_existing` says."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_kinds import BATCH, DIM, IDS, NUM, OPTIONS, _config
from torch import nn

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    DistTensor,
    EmbeddingTableConfig,
    HashTable,
    RecStoreClient,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
    SparseOptimizer,
    Table,
    checkpoint,
    servers,
    table_names,
    table_statistics,
)

pytestmark = pytest.mark.tier("test")

Opening = Callable[..., Any]

KINDS: dict[str, tuple[Opening, Any]] = {
    "DistEmbedding": (lambda name, **more: DistEmbedding(NUM, DIM, name, **OPTIONS | more), IDS),
    "DistEmbeddingBag": (lambda name, **more: DistEmbeddingBag(NUM, DIM, name, **OPTIONS | more), IDS.view(1, -1)),
    "HashTable": (lambda name, **more: HashTable(DIM, name, num_embeddings=NUM, **OPTIONS | more), IDS),
    "RecStoreEmbeddingBagCollection": (
        lambda name, **more: RecStoreEmbeddingBagCollection(_config(name), **OPTIONS | more),
        BATCH,
    ),
    "RecStoreEmbeddingCollection": (
        lambda name, **more: RecStoreEmbeddingCollection(_config(name), **OPTIONS | more),
        BATCH,
    ),
}

each_kind = pytest.mark.parametrize("kind", KINDS)


def loss(module: Any, batch: Any) -> torch.Tensor:
    found = module(batch)
    return found["seen"].values().sum() if isinstance(found, dict) else found.sum()


def train(kind: str, name: str, **more: Any) -> None:
    """Makes a module, as a function for a fold of a cross validation does, and trains it."""
    open_module, batch = KINDS[kind]
    module = open_module(name, **more)
    loss(module, batch).backward()
    SparseOptimizer(modules=[module]).step()


@each_kind
def test_the_warning_is_about_the_line_that_made_the_module(kind: str, table_name: Callable[[], str]) -> None:
    name = table_name()
    train(kind, name)
    with pytest.warns(UserWarning, match="goes on with its 2 rows") as caught:
        KINDS[kind][0](name)
    assert [warning.filename for warning in caught] == [__file__]


def said(work: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [str(warning.message) for warning in caught]


WARNING = (
    'table "{}" exists, and a new module goes on with its 2 rows, which an earlier one trained or wrote: '
    'on_existing="share" says that this is meant, "reset" begins anew, "error" raises'
)


@each_kind
def test_a_module_made_anew_warns_once(kind: str, table_name: Callable[[], str]) -> None:
    name = table_name()
    assert said(lambda: train(kind, name)) == []
    assert said(lambda: train(kind, name)) == [WARNING.format(name)]
    assert said(lambda: train(kind, name)) == []
    assert table_statistics(name)["step"] == 3


@each_kind
def test_share_is_silent_and_goes_on(kind: str, table_name: Callable[[], str]) -> None:
    name = table_name()
    for _ in range(2):
        assert said(lambda: train(kind, name, on_existing="share")) == []
    assert table_statistics(name)["step"] == 2


@each_kind
def test_error_names_the_table_and_its_rows(kind: str, table_name: Callable[[], str]) -> None:
    name = table_name()
    train(kind, name, on_existing="error")
    message = (
        f'table "{name}" exists with 2 rows, and on_existing="error": "share" goes on with them, "reset" begins anew, '
        "and RecStoreClient.drop drops the table"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        train(kind, name, on_existing="error")
    assert table_statistics(name)["step"] == 1


@pytest.mark.embedded_only("tables on servers are not given up")
@each_kind
def test_reset_begins_anew(kind: str, table_name: Callable[[], str]) -> None:
    name = table_name()
    train(kind, name)
    RecStoreClient().set_learning_rate(name, 0.125)
    assert said(lambda: train(kind, name, on_existing="reset")) == []
    statistics = table_statistics(name)
    assert [statistics[key] for key in ("step", "rows", "learning_rate", "learning_rate_was_set")] == [1, 2, 1.0, False]
    train(kind, name, on_existing="reset", optimizer={"kind": "adam", "lr": 0.5}, seed=3)
    assert table_statistics(name)["learning_rate"] == 0.5


@pytest.mark.embedded_only("tables on servers are not given up")
@each_kind
@pytest.mark.parametrize("choice", ["error", "reset"])
def test_a_table_in_use_is_neither_reset_nor_opened_with_error(
    kind: str, choice: str, table_name: Callable[[], str]
) -> None:
    name = table_name()
    module = DistEmbedding(NUM, DIM, name, **OPTIONS)
    message = (
        f'table "{name}" is in use by a module, a Table or a DistTensor that is alive, and on_existing="{choice}" is '
        "for a table that nothing else uses"
    )
    # A HashTable finds its name free, for only others have the table.
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        KINDS[kind][0](name, on_existing=choice)
    assert module(IDS).eq(0).all()


@each_kind
def test_another_choice_is_refused(kind: str, table_name: Callable[[], str]) -> None:
    name = table_name()
    with pytest.raises(ValueError, match=r'on_existing must be "share", "error" or "reset", got \'drop\''):
        KINDS[kind][0](name, on_existing="drop")
    assert name not in table_names()


@pytest.mark.embedded_only("tables on servers are not given up")
def test_a_configuration_that_is_refused_leaves_the_rows(table_name: Callable[[], str]) -> None:
    name = table_name()
    train("DistEmbedding", name)
    with pytest.raises(ValueError, match="lr"):
        DistEmbedding(NUM, DIM, name, optimizer={"kind": "sgd", "lr": -1.0}, on_existing="reset")
    assert table_statistics(name)["rows"] == 2
    assert [each for each in table_names() if each.startswith(name)] == [name]


def live(name: str) -> Any:
    module = DistEmbedding(NUM, DIM, name, **OPTIONS)
    train("DistEmbedding", name)
    DistEmbedding(NUM, DIM, name, **OPTIONS)
    return module


def through_the_client(name: str) -> None:
    client = RecStoreClient()
    client.init_embedding_table(name, EmbeddingTableConfig(NUM, DIM, optimizer={"kind": "sgd", "lr": 1.0}))
    client.push(name, IDS, torch.ones(3, DIM))
    DistEmbedding(NUM, DIM, name, optimizer={"kind": "sgd", "lr": 1.0})


def through_a_tensor(name: str) -> None:
    DistTensor((NUM, DIM), torch.float32, name, lambda shape, _: torch.ones(shape), persistent=True)
    DistEmbedding(NUM, DIM, name, initializer="zeros")


def through_a_table(name: str) -> None:
    table = Table(name, DIM)
    torch.ops.recstore.emb_write.table(table.handle, IDS, torch.ones(3, DIM))
    del table
    DistEmbedding(None, DIM, name)


def untouched(name: str) -> None:
    for _ in range(2):
        DistEmbedding(NUM, DIM, name, lambda shape, _: torch.ones(shape), padding_idx=0)


def pickled(name: str) -> None:
    module = DistEmbedding(NUM, DIM, name, **OPTIONS)
    saved = pickle.dumps(module)
    module.weight[[1]] = torch.ones(1, DIM)
    del module
    pickle.loads(saved)


SILENT: dict[str, Callable[[str], Any]] = {
    "a live module": live,
    "the client": through_the_client,
    "a tensor": through_a_tensor,
    "a table": through_a_table,
    "rows that none has trained": untouched,
    "a pickle": pickled,
}


@pytest.mark.parametrize("way", SILENT)
def test_sharing_on_purpose_is_silent(way: str, table_name: Callable[[], str]) -> None:
    name = table_name()
    assert said(lambda: SILENT[way](name)) == []


def test_a_checkpoint_that_was_loaded_is_meant(table_name: Callable[[], str], tmp_path: Any) -> None:
    name = table_name()
    train("DistEmbedding", name)
    checkpoint.save(tmp_path)
    assert said(lambda: (checkpoint.load(tmp_path), train("DistEmbedding", name))) == []
    RecStoreClient().drop(name)
    assert said(lambda: (checkpoint.load(tmp_path), train("DistEmbedding", name))) == []
    assert said(lambda: train("DistEmbedding", name)) == [WARNING.format(name)]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "HashTable"])  # Of that there is one at a time.
def test_a_module_over_a_table_shows_the_options_that_the_table_keeps(kind: str, table_name: Callable[[], str]) -> None:
    name, make = table_name(), KINDS[kind][0]
    first = make(name, optimizer={"kind": "adam", "lr": 0.1, "weight_decay": 0.1})
    again: list[Any] = []
    said_of = said(lambda: again.append(make(name, optimizer={"kind": "adam", "lr": 0.2, "weight_decay": 0.3})))
    for module in (first, *again):
        [table] = module.tables() if hasattr(module, "tables") else [module.table]
        assert (table.config.optimizer["lr"], table.config.optimizer["weight_decay"]) == (0.1, 0.1)
    for warning in said_of:
        assert ("set_learning_rate" in warning) == ("keeps lr=" in warning)
        assert ("RecStoreClient.drop" in warning) == ("keeps weight_decay=" in warning)


def test_an_owner_in_a_reference_cycle_is_none(table_name: Callable[[], str]) -> None:
    name = table_name()
    gc.collect()
    gc.disable()
    try:
        model = nn.Sequential(DistEmbedding(NUM, DIM, name, **OPTIONS))
        model[0](IDS).sum().backward()
        SparseOptimizer(modules=[model]).step()
        model.__dict__["itself"] = model
        del model
        assert said(lambda: DistEmbedding(NUM, DIM, name, **OPTIONS)) == [WARNING.format(name)]
    finally:
        gc.enable()


def test_a_copy_says_nothing(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(NUM, DIM, table_name(), **OPTIONS)
    assert said(lambda: copy.copy(module)) == []


def test_tables_of_servers_are_not_given_up(table_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "current_ps_backend", lambda: servers.SERVERS)
    name = table_name()
    with pytest.raises(ValueError, match=f'table "{name}" lies on parameter servers'):
        DistEmbedding(NUM, DIM, name, on_existing="reset")
