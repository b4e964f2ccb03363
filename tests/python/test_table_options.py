"""`TableOptions`: one description of what a table is opened with, for every constructor that opens one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, TypedDict, get_type_hints

import pytest
import torch
from typing_extensions import Unpack

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    EmbeddingTableConfig,
    HashTable,
    KVWorker,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
    TableConfig,
    table_names,
)
from recstore_ops.config.config_file import TableEntry, configure_table
from recstore_ops.config.keywords import takes
from recstore_ops.config.table_options import (
    ConfigOptions,
    StorageOptions,
    TableOptions,
    config_options,
    given,
    options_of,
)
from recstore_ops.training import StoreTables

pytestmark = pytest.mark.tier("quick")


class Options(TypedDict, total=False):
    optimizer: str | None
    memory_limit: int | None


@takes(Options, {"optimizer": "sgd"})
def opens(name: str, lr: float = 0.01, *, block: int = 0, **options: Unpack[Options]) -> tuple[object, ...]:
    """Opens a table."""
    return name, lr, block, options


def test_known_keywords_arrive_as_they_were_given() -> None:
    assert opens("t", 0.5, block=2, optimizer="adam") == ("t", 0.5, 2, {"optimizer": "adam"})
    assert opens(name="t", memory_limit=None) == ("t", 0.01, 0, {"memory_limit": None})


@pytest.mark.parametrize(
    ("keyword", "advice"),
    [
        ("optimzer", ". Did you mean 'optimizer'?"),
        ("memory_limits", ". Did you mean 'memory_limit'?"),
        ("blok", ". Did you mean 'block'?"),
        ("colour", ""),
    ],
)
def test_an_unknown_keyword_is_refused_with_the_nearest_name(keyword: str, advice: str) -> None:
    refused: Callable[..., Any] = opens
    with pytest.raises(TypeError) as raised:
        refused("t", **{keyword: 1})
    assert str(raised.value) == f"opens() got an unexpected keyword argument '{keyword}'{advice}"


def test_what_python_refuses_is_refused_as_ever() -> None:
    refused: Callable[..., Any] = opens
    with pytest.raises(TypeError, match=r"opens\(\) missing 1 required positional argument: 'name'"):
        refused(optimizer="sgd")
    with pytest.raises(TypeError, match=r"opens\(\) got multiple values for argument 'lr'"):
        refused("t", 0.1, lr=0.1)


def test_the_signature_shows_each_option_with_its_default() -> None:
    assert (opens.__name__, opens.__doc__) == ("opens", "Opens a table.")
    shown = inspect.signature(opens).parameters
    defaults = {name: parameter.default for name, parameter in shown.items() if name != "name"}
    assert defaults == {"lr": 0.01, "block": 0, "optimizer": "sgd", "memory_limit": None}
    assert shown["memory_limit"].annotation == int | None
    assert shown["memory_limit"].kind is inspect.Parameter.KEYWORD_ONLY


def test_each_option_is_documented_once() -> None:
    documented = re.findall(r"^    (\w+): ", inspect.cleandoc(TableOptions.__doc__ or ""), re.MULTILINE)
    assert sorted(documented) == sorted(get_type_hints(TableOptions))


def test_a_configuration_holds_what_is_not_of_ranks() -> None:
    assert {"process_group", "grad_reduce", "wire_dtype", "on_existing"} == set(get_type_hints(TableOptions)) - set(
        get_type_hints(ConfigOptions)
    )
    assert set(get_type_hints(ConfigOptions)) == set(vars(TableConfig())) - {"num_embeddings"}
    assert config_options({"seed": 3, "wire_dtype": None, "disk": None}) == {"seed": 3, "disk": None}


def test_options_are_found_among_the_attributes_of_a_description() -> None:
    assert given({"seed": 0, "disk": None}) == {"seed": 0}
    assert options_of(TableEntry(seed=0, embedding_dim=4, dtype="float16")) == {"seed": 0, "dtype": "float16"}
    assert options_of(EmbeddingTableConfig(9, 4, "adam", learning_rate=0.5)) == {"optimizer": "adam"}


TABLE = {"name": "t", "num_embeddings": None, "embedding_dim": 4}
CONSTRUCTORS: list[tuple[Callable[..., Any], tuple[Any, ...], type[Any]]] = [
    (configure_table, ("t", 4), ConfigOptions),
    (KVWorker, ("t",), ConfigOptions),
    (DistEmbedding, (None, 4, "t"), TableOptions),
    (DistEmbeddingBag, (None, 4, "t"), TableOptions),
    (HashTable, (4, "t"), TableOptions),
    (RecStoreEmbeddingBagCollection, ([TABLE],), TableOptions),
    (RecStoreEmbeddingCollection, ([TABLE],), TableOptions),
    (StoreTables, ("t", "sgd"), StorageOptions),
]


@pytest.mark.parametrize(("constructor", "arguments", "options"), CONSTRUCTORS)
def test_a_constructor_shows_its_options_and_refuses_others(
    constructor: Callable[..., Any], arguments: tuple[Any, ...], options: type[Any]
) -> None:
    assert set(get_type_hints(options)) <= set(inspect.signature(constructor).parameters)
    function = constructor.__init__ if isinstance(constructor, type) else constructor
    assert inspect.signature(constructor).parameters["seed"].default in (None, 0)
    message = f"{function.__qualname__}() got an unexpected keyword argument 'optimzer'. Did you mean 'optimizer'?"
    before = table_names()
    with pytest.raises(TypeError, match=re.escape(message)):
        constructor(*arguments, optimzer="adam")
    assert table_names() == before


def test_the_options_of_ranks_are_none_of_a_configuration() -> None:
    refused: Callable[..., Any] = configure_table
    with pytest.raises(TypeError, match="unexpected keyword argument 'process_group'"):
        refused("t", 4, process_group=None)


def test_an_option_that_is_none_has_its_default() -> None:
    nothing: dict[str, Any] = dict.fromkeys(get_type_hints(ConfigOptions))
    assert configure_table("t", 4, **nothing) == configure_table("t", 4)


def test_the_learning_rate_may_stand_by_position(table_name: Callable[[], str]) -> None:
    bound = {
        DistEmbedding: (None, 4, table_name(), None, 0.5),
        RecStoreEmbeddingBagCollection: ([{**TABLE, "name": table_name()}], 0.5, False, 20),
        RecStoreEmbeddingCollection: ([{**TABLE, "name": table_name()}], 0.5),
    }
    for constructor, arguments in bound.items():
        module: Any = constructor(*arguments)
        assert [table.config.optimizer["lr"] for table in module.tables()] == [0.5]


def test_an_option_of_a_collection_is_one_of_each_table_without_its_own(table_name: Callable[[], str]) -> None:
    own: ConfigOptions = {
        "optimizer": "adam",
        "initializer": "zeros",
        "admission": {"kind": "count", "threshold": 2},
        "eviction": {"ttl": 9},
        "memory_limit": 1 << 29,
    }
    shared: TableOptions = {
        "optimizer": "adagrad",
        "initializer": "uniform",
        "admission": {"kind": "count", "threshold": 3},
        "eviction": {"ttl": 7},
        "memory_limit": 1 << 30,
        "dtype": torch.bfloat16,
        "seed": 3,
        "block_size": 64,
        "max_grad_norm": 2.5,
        "state_dtype": torch.bfloat16,
        "ema_decay": 0.5,
        "nan_policy": "skip",
    }
    tables = [{**TABLE, **own, "name": table_name()}, {**TABLE, "name": table_name(), "optimizer": {}}]
    for constructor in (RecStoreEmbeddingBagCollection, RecStoreEmbeddingCollection):
        of_own, of_shared = (table.config for table in constructor(tables, 0.5, **shared).tables())
        assert of_own == TableConfig.of(None, 0.5, config_options({**shared, **own}))
        assert of_shared == TableConfig.of(None, 0.5, config_options(shared))


def test_a_worker_takes_all_that_configures_a_table(table_name: Callable[[], str]) -> None:
    name = table_name()
    with KVWorker(name, dim=2, seed=3, block_size=64, memory_limit=1 << 30) as worker:
        config = worker._table.config
    assert (config.seed, config.block_size, config.memory_limit) == (3, 64, 1 << 30)
    assert config.initializer == {"kind": "zeros"}
    with KVWorker(table_name(), dim=2, initializer=None) as worker:
        assert worker._table.config.initializer == {"kind": "normal"}


WRONG_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"optimizer": torch.optim.Adam},
        TypeError,
        "optimizer must be the name of a kind, or a dict .*, got <class .*Adam",
    ),
    ({"optimizer": ["adam"]}, TypeError, "optimizer must be the name of a kind, .* got .'adam'"),
    ({"optimizer": {"kind": torch.optim.Adam}}, TypeError, "invalid table configuration: .* got the class Adam"),
    (
        {"optimizer": {"kind": "sgd", "lr": torch.tensor(0.1)}},
        ValueError,
        r"invalid .* optimizer.lr must be a number, got tensor",
    ),
    ({"optimizer": {"kind": "adam", "lr": -1.0}}, ValueError, "invalid table configuration: optimizer.lr must not be"),
    ({"optimizer": {"kind": "adam", "lr": float("nan")}}, ValueError, "invalid table configuration: optimizer.lr must"),
    ({"optimizer": "adamm"}, ValueError, "invalid table configuration: unknown variant `adamm`"),
    (
        {"initializer": torch.nn.init.zeros_},
        TypeError,
        "initializer must be the name of a kind, .* got <function zeros_",
    ),
    ({"max_grad_norm": -1.0}, ValueError, "invalid table configuration: max_grad_norm must be positive, got -1"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG_OPTIONS)
@pytest.mark.parametrize("kind", ["DistEmbedding", "HashTable", "RecStoreEmbeddingBagCollection"])
def test_a_wrong_option_is_refused_with_the_table(
    kind: str, options: dict[str, Any], error: type[Exception], message: str, table_name: Callable[[], str]
) -> None:
    name = table_name()
    makers: dict[str, Callable[[], object]] = {
        "DistEmbedding": lambda: DistEmbedding(None, 4, name, **options),
        "HashTable": lambda: HashTable(4, name, **options),
        "RecStoreEmbeddingBagCollection": lambda: RecStoreEmbeddingBagCollection([{**TABLE, "name": name}], **options),
    }
    with pytest.raises(error, match=f'^table "{re.escape(name)}": {message}'):
        makers[kind]()
    assert name not in table_names()
