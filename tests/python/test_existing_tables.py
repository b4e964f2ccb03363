"""A module made anew over a table that holds rows: it says so each time, or does what `on_existing` says."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
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
    NGramMemory,
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
from recstore_ops.nn.optimizer import tables_of
from recstore_ops.training.models.logistic_regression import LogisticRegression
from recstore_ops.training.models.tables import StoreTables
from recstore_ops.transfer import ReplacedEmbeddings, replace_embeddings

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


class Derived(DistEmbedding):
    """A module of a program's own, whose constructor is a part of this package's."""


RATES = itertools.count(0.125, 0.125)

MAKERS: dict[str, Callable[[str], Any]] = {
    "a derived class": lambda name: Derived(NUM, DIM, name, **OPTIONS),
    "a training model": lambda name: LogisticRegression(StoreTables(name.rpartition("/")[0], "sgd")),
    "n-grams": lambda name: NGramMemory(DIM, 7, DIM, name, **OPTIONS),
    "a rate that is kept": lambda name: DistEmbedding(NUM, DIM, name, on_existing="share", lr=next(RATES)),
    "embeddings replaced": lambda name: replace_embeddings(
        nn.ModuleDict({"weight": nn.Embedding(NUM, DIM)}),
        prefix=name.rpartition("weight")[0],
        on_existing="share",
        lr=next(RATES),
    ),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_each_maker_of_modules_warns_of_the_line_that_called_it(maker: str, table_name: Callable[[], str]) -> None:
    make, name = MAKERS[maker], f"{table_name()}/weight"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            made = make(name)
            tables = tables_of([made.model if isinstance(made, ReplacedEmbeddings) else made])
            torch.ops.recstore.emb_write.table(tables[0].handle, IDS, torch.ones(3, tables[0].dim))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(name)
    lines = {(each.filename, each.lineno) for each in caught}
    source, first = inspect.getsourcelines(make)
    assert [file for file, _ in lines] == [__file__]
    assert all(first <= line < first + len(source) for _, line in lines)


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
def test_a_module_made_anew_warns_each_time(kind: str, table_name: Callable[[], str]) -> None:
    name = table_name()
    assert said(lambda: train(kind, name)) == []
    for _ in range(3):
        assert said(lambda: train(kind, name)) == [WARNING.format(name)]
    assert table_statistics(name)["step"] == 4


def build(name: str, **more: Any) -> nn.Module:
    return nn.Sequential(DistEmbedding(NUM, DIM, name, **OPTIONS | more))


def fit(model: nn.Module) -> None:
    model(IDS).sum().backward()
    SparseOptimizer(modules=[model]).step()


@pytest.mark.parametrize("action", ["default", "always"])  # Python shows equal texts of one line once by default.
def test_each_fold_warns_while_the_model_before_is_bound(action: Any, table_name: Callable[[], str]) -> None:
    name = table_name()
    model: nn.Module | None = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        for _ in range(3):
            model = build(name)
            fit(model)
    assert model is not None
    assert [str(each.message) for each in caught] == [WARNING.format(name)] * 2
    assert {each.filename for each in caught} == {__file__}


def test_each_trial_of_a_study_warns(table_name: Callable[[], str]) -> None:
    name, kept = table_name(), []

    def objective(trial: int) -> float:
        model = build(name)
        fit(model)
        kept.append(model)  # As a study keeps what the best trial made.
        return float(trial)

    assert said(lambda: [objective(trial) for trial in range(3)]) == [WARNING.format(name)] * 2


def test_a_cell_that_runs_again_warns_each_time(table_name: Callable[[], str]) -> None:
    cell = compile(f"model = build({table_name()!r})\nfit(model)", "<cell 1>", "exec")
    notebook = {"build": build, "fit": fit, "__name__": "__main__"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            exec(cell, notebook)
    assert len(caught) == 2


STATE = (
    'table "{}" keeps exp_avg, exp_avg_sq of an earlier SparseOptimizer, and a new one goes on with them, where one of '
    'torch.optim begins without: on_existing="share" says that this is meant'
)


def test_an_optimizer_made_anew_over_what_another_left_warns_each_time(
    table_name: Callable[[], str], tmp_path: Any
) -> None:
    name = table_name()
    model = build(name, optimizer="adam")
    assert said(lambda: SparseOptimizer(modules=[model])) == []
    assert said(lambda: [fit(model) for _ in range(3)]) == [STATE.format(name)] * 2
    with pytest.warns(UserWarning, match="keeps exp_avg") as caught:
        SparseOptimizer(modules=[model])
    assert [each.filename for each in caught] == [__file__]
    assert said(lambda: SparseOptimizer(modules=[model], on_existing="share")) == []
    checkpoint.save(tmp_path)
    checkpoint.load(tmp_path)
    assert said(lambda: SparseOptimizer(modules=[model])) == []  # It goes on from the checkpoint.
    again = build(name, optimizer="adam", on_existing="share")
    assert said(lambda: SparseOptimizer(modules=[again])) == []  # The module said that it is meant.
    with pytest.raises(ValueError, match=r'SparseOptimizer: on_existing must be "share" or None, got \'reset\''):
        SparseOptimizer(modules=[model], on_existing="reset")  # pyright: ignore[reportArgumentType]


def test_an_optimizer_that_another_left_nothing_for_says_nothing(table_name: Callable[[], str]) -> None:
    model = build(table_name())  # Plain SGD keeps rows alone.
    assert said(lambda: [fit(model) for _ in range(3)]) == []


class Twins(nn.Module):
    """Two modules over one table, which they share by design."""

    def __init__(self, name: str, **more: Any) -> None:
        super().__init__()
        self.left = DistEmbedding(NUM, DIM, name, **OPTIONS | more)
        fit(self.left)  # So that the other one finds rows that were trained.
        self.right = DistEmbedding(NUM, DIM, name, **OPTIONS | more)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.left(ids) + self.right(ids)


class Nested(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.first = Twins(name)
        self.second = Twins(name)


def test_modules_of_one_model_share_in_silence(table_name: Callable[[], str]) -> None:
    name = table_name()
    assert said(lambda: Twins(name)) == []
    assert said(lambda: Nested(table_name())) == []
    assert said(lambda: Twins(name)) == [WARNING.format(name)]  # Of the model: its second module adds nothing.


@pytest.mark.embedded_only("tables on servers are not given up")
def test_modules_of_one_model_begin_anew_together(table_name: Callable[[], str]) -> None:
    name = table_name()
    for _ in range(2):
        model = Twins(name, on_existing="reset")
        assert table_statistics(name)["step"] == 1
        assert model(IDS).eq(2 * model.right(IDS)).all()


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


@each_kind
def test_a_table_in_use_is_not_opened_with_error(kind: str, table_name: Callable[[], str]) -> None:
    name = table_name()
    module = DistEmbedding(NUM, DIM, name, **OPTIONS)
    message = (
        f'table "{name}" is in use by a module, a Table or a DistTensor that is alive, and on_existing="error" is '
        "for a table that nothing else uses"
    )
    # A HashTable finds its name free, for only others have the table.
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        KINDS[kind][0](name, on_existing="error")
    assert module(IDS).eq(0).all()


GIVEN_UP = (
    'table "{}" was given up: a module made later, with on_existing="reset", began it anew, and the rows and gradients '
    'of this {} are gone; use the module that was made last, or on_existing="share" for modules over one table'
)


@pytest.mark.embedded_only("tables on servers are not given up")
@each_kind
def test_reset_begins_anew_while_the_model_before_is_bound(kind: str, table_name: Callable[[], str]) -> None:
    name = table_name()
    make, batch = KINDS[kind]
    old = make(name)
    optimizer = SparseOptimizer(modules=[old])
    loss(old, batch).backward()
    optimizer.step()
    loss(old, batch).backward()  # Collected, and not stepped.
    again = make(name, on_existing="reset")
    assert table_statistics(name)["rows"] == 0
    given_up = pytest.raises(RuntimeError, match=re.escape(f'table "{name}" was given up: a module made later'))
    with given_up:
        loss(old, batch)
    with given_up:
        optimizer.step()
    with given_up:
        old.load_state_dict(again.state_dict())
    assert table_statistics(name)["step"] == 0
    loss(again, batch).backward()
    SparseOptimizer(modules=[again]).step()
    assert table_statistics(name)["step"] == 1
    del old, optimizer, given_up
    gc.collect()
    assert table_statistics(name)["rows"] == 2  # The end of those before takes nothing along.
    assert loss(again, batch) != 0


OLD: dict[str, Callable[[Any, Any], Any]] = {
    "lookup": lambda module, _: module(IDS),
    "weight": lambda module, _: module.weight[IDS],
    "write": lambda module, _: module.weight.__setitem__(IDS, torch.zeros(3, DIM)),
    "ids": lambda module, _: module.ids(),
    "rows": lambda module, _: module.rows(),
    "reset": lambda module, _: module.reset_parameters(),
    "size": lambda module, _: len(module.table),
    "statistics": lambda module, _: module.table.statistics(),
    "grad": lambda module, _: next(module.parameters()).grad,
    "norm": lambda module, _: nn.utils.clip_grad_norm_(module.parameters(), 1.0),
    "collected": lambda module, _: module.table.collected(),
    "pickle": lambda module, _: pickle.dumps(module),
    "copy": lambda module, _: copy.deepcopy(module),
    "step": lambda _, optimizer: optimizer.step(),
    "clip": lambda _, optimizer: optimizer.clip_grad_norm_(1.0),
    "state of the optimizer": lambda _, optimizer: optimizer.state_dict(),
    "an optimizer": lambda module, _: SparseOptimizer(modules=[module]),
    "a step of the module": lambda module, _: SparseOptimizer().step([module]),
}


@pytest.mark.embedded_only("tables on servers are not given up")
@pytest.mark.parametrize("way", OLD)
def test_what_had_a_table_that_was_given_up_refuses(way: str, table_name: Callable[[], str]) -> None:
    name = table_name()
    old = DistEmbedding(NUM, DIM, name, **OPTIONS)
    optimizer = SparseOptimizer(modules=[old])
    old(IDS).sum().backward()
    optimizer.step()
    old(IDS).sum().backward()
    new = DistEmbedding(NUM, DIM, name, **OPTIONS, on_existing="reset")
    new.weight[IDS] = torch.ones(3, DIM)
    with pytest.raises(RuntimeError, match=f"^{re.escape(GIVEN_UP.format(name, 'DistEmbedding'))}$"):
        OLD[way](old, optimizer)
    assert new.weight[IDS].eq(1).all()
    assert new.table.collected() == []
    assert "no rows" in repr(old)


@pytest.mark.embedded_only("tables on servers are not given up")
def test_handles_and_graphs_of_a_table_that_was_given_up_refuse(table_name: Callable[[], str]) -> None:
    name = table_name()
    old = DistEmbedding(NUM, DIM, name, **OPTIONS)
    weight, total = old.weight, old(IDS).sum()
    tensor = DistTensor((NUM, DIM), torch.float32, name)
    handle = old.table.handle
    new = DistEmbedding(NUM, DIM, name, **OPTIONS, on_existing="reset")
    for held in (weight, tensor):
        with pytest.raises(RuntimeError, match=f'table "{name}" was given up'):
            held[IDS]
    with pytest.raises(RuntimeError, match=f'table "{name}" was dropped'):
        total.backward()
    with pytest.raises(RuntimeError, match=f'table "{name}" was dropped'):
        torch.ops.recstore.emb_read.table(handle, IDS, DIM)
    SparseOptimizer().zero_grad()  # Of all tables: those that are gone have nothing to keep.
    del old, weight, tensor, held, total
    gc.collect()
    assert new(IDS).eq(0).all()


@pytest.mark.embedded_only("tables on servers are not given up")
def test_a_reset_takes_another_dim_while_the_model_before_is_bound(table_name: Callable[[], str]) -> None:
    name = table_name()
    old = build(name)
    fit(old)
    assert DistEmbedding(NUM, 2 * DIM, name, on_existing="reset")(IDS).shape == (3, 2 * DIM)
    with pytest.raises(RuntimeError, match="was given up"):
        old(IDS)


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


def made_before_training(name: str) -> Any:
    modules = [DistEmbedding(NUM, DIM, name, **OPTIONS) for _ in range(2)]
    fit(nn.Sequential(modules[0]))
    fit(nn.Sequential(modules[1]))
    return modules


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
    "modules made before either is trained": made_before_training,
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


def test_a_module_that_a_checkpoint_was_loaded_into_is_one_before(table_name: Callable[[], str], tmp_path: Any) -> None:
    name = table_name()
    model = build(name)
    fit(model)
    checkpoint.save(tmp_path)
    checkpoint.load(tmp_path)
    assert said(lambda: build(name)) == []
    fit(model)
    assert said(lambda: build(name)) == [WARNING.format(name)]


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
        model.__dict__["itself"] = model
        del model
        DistEmbedding(NUM, DIM, name, **OPTIONS, on_existing="error")
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
