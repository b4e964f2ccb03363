"""`recstore_config.json`: what it may hold, and whose word counts when a table is opened."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import hypothesis.strategies as some
import pytest
import torch
from hypothesis import given
from optimizer_kinds import KINDS

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    EmbeddingTableConfig,
    RecStoreClient,
    SparseOptimizer,
    Table,
    TableConfig,
    active_config,
    load_config_file,
    table_statistics,
)
from recstore_ops.config.config_file import config_schema, configure_table, document_problems
from recstore_ops.config.json_schema import find_problems
from recstore_ops.config.optimizers import OPTIMIZERS, OptimizerName

pytestmark = pytest.mark.tier("quick")

TableName = Callable[[], str]
WriteConfig = Callable[..., Path]

RECSTORE_FILE = {
    "cache_ps": {
        "ps_type": "GRPC",
        "max_batch_keys_size": 65536,
        "num_threads": 32,
        "num_shards": 1,
        "servers": [{"host": "127.0.0.1", "port": 15000, "shard": 0}],
        "base_kv_config": {
            "capacity": 1000000,
            "index": {"type": "DRAM_EXTENDIBLE_HASH"},
            "value": {"type": "DRAM_VALUE_STORE", "path": "/dev/shm/value", "default_value_size_hint": 512},
        },
    },
    "distributed_client": {"num_shards": 1, "hash_method": "city_hash", "max_keys_per_request": 500},
    "client": {"host": "127.0.0.1", "port": 15000, "shard": 0},
    "local_shm": {"region_name": "recstore_local_ps", "slot_count": 64},
    "hugectr": {"backend": "recstore"},
    "hierkv": {"max_capacity": 1024, "dim": 16},
    "report_API": "http://127.0.0.1:8081/report",
}

FULL_ENTRY = {
    "num_embeddings": 100,
    "embedding_dim": 4,
    "learning_rate": 0.25,
    "optimizer": {"kind": "adagrad", "eps": 1e-6, "convention": "torch"},
    "initializer": {"kind": "uniform", "a": -0.5, "b": 0.5},
    "dtype": "float32",
    "seed": 7,
    "block_size": 128,
    "max_grad_norm": 2.5,
    "state_dtype": "bfloat16",
    "ema_decay": 0.5,
    "nan_policy": "skip",
    "admission": {"kind": "count", "threshold": 1},
    "eviction": {"ttl": 1000},
}


@pytest.fixture(autouse=True)
def _fresh_active_config() -> Iterator[None]:
    yield
    active_config(reload=True)


@pytest.fixture
def write_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteConfig:
    """Makes a file with these tables the active one."""

    def write(tables: dict[str, Any], **others: Any) -> Path:
        path = tmp_path / "recstore_config.json"
        path.write_text(json.dumps({"embedding_tables": tables, **others}))
        monkeypatch.setenv("RECSTORE_CONFIG", str(path))
        active_config(reload=True)
        return path

    return write


def learning_rate(name: str) -> float:
    return table_statistics(name)["learning_rate"]


@pytest.mark.parametrize("kind", [DistEmbedding, DistEmbeddingBag])
def test_a_module_takes_what_the_file_says(kind: type, table_name: TableName, write_config: WriteConfig) -> None:
    name = table_name()
    write_config({name: FULL_ENTRY})
    module = kind(None, 4, name)
    config = Table.open(name).config
    assert module.num_embeddings == config.num_embeddings == 100
    assert config.optimizer == {
        "kind": "adagrad",
        "lr": 0.25,
        "eps": 1e-6,
        "weight_decay": 0.0,
        "convention": "torch",
    }
    assert (config.max_grad_norm, config.state_dtype, config.ema_decay) == (2.5, "bfloat16", 0.5)
    assert config.initializer == {"kind": "uniform", "a": -0.5, "b": 0.5}
    assert (config.seed, config.block_size, config.nan_policy) == (7, 128, "skip")


def test_a_client_takes_what_the_file_says(table_name: TableName, write_config: WriteConfig) -> None:
    name = table_name()
    write_config({name: FULL_ENTRY})
    RecStoreClient().init_embedding_table(name, EmbeddingTableConfig(None, 4))
    config = Table.open(name).config
    assert (config.num_embeddings, config.seed, learning_rate(name)) == (100, 7, 0.25)


def test_arguments_win_over_the_file(table_name: TableName, write_config: WriteConfig) -> None:
    name = table_name()
    write_config({name: FULL_ENTRY})
    given = {"optimizer": "adam", "initializer": "zeros", "seed": 0, "block_size": 10_240, "nan_policy": "error"}
    DistEmbedding(50, 4, name, **given)
    config = Table.open(name).config
    assert (config.num_embeddings, config.seed, config.block_size, config.nan_policy) == (50, 0, 10_240, "error")
    assert (config.optimizer["kind"], config.initializer["kind"]) == ("adam", "zeros")


def test_a_table_that_the_file_does_not_name_has_the_defaults(table_name: TableName, write_config: WriteConfig) -> None:
    write_config({table_name(): FULL_ENTRY})
    assert configure_table(table_name(), 4) == TableConfig(optimizer={"kind": "sgd", "lr": 0.01})


def test_another_embedding_dim_than_the_files_is_refused(table_name: TableName, write_config: WriteConfig) -> None:
    name = table_name()
    path = write_config({name: {"embedding_dim": 4}})
    with pytest.raises(ValueError, match=r"has embedding_dim 4 in .*, but is opened with 8") as caught:
        DistEmbedding(None, 8, name)
    assert str(path) in str(caught.value)


def test_the_first_word_on_the_learning_rate_counts(table_name: TableName, write_config: WriteConfig) -> None:
    """set_learning_rate > SparseOptimizer(lr=) > optimizer["lr"] > the file's learning_rate > lr= > 0.01."""
    unnamed, named = table_name(), table_name()
    write_config({named: {"learning_rate": 0.3}})

    DistEmbedding(None, 1, unnamed)
    assert learning_rate(unnamed) == 0.01
    other = table_name()
    DistEmbedding(None, 1, other, lr=0.2)
    assert learning_rate(other) == 0.2

    assert configure_table(named, 1, lr=0.2).optimizer["lr"] == 0.3
    assert configure_table(named, 1, lr=0.2, optimizer="adam").optimizer["lr"] == 0.3
    own = {"kind": "sgd", "lr": 0.4}
    assert configure_table(named, 1, lr=0.2, optimizer=own).optimizer["lr"] == 0.4

    module = DistEmbedding(None, 1, named, lr=0.2, optimizer=own)
    SparseOptimizer(lr=0.5, modules=[module])
    assert learning_rate(named) == 0.5
    RecStoreClient().set_learning_rate(named, 0.6)
    SparseOptimizer(lr=0.7, modules=[module])
    assert learning_rate(named) == 0.6


def test_ftrls_alpha_counts_as_the_optimizers_own_rate(table_name: TableName, write_config: WriteConfig) -> None:
    name = table_name()
    write_config({name: {"learning_rate": 0.3, "optimizer": {"kind": "ftrl", "alpha": 0.1}}})
    assert configure_table(name, 1).optimizer == {"kind": "ftrl", "alpha": 0.1}


def test_a_module_opened_again_under_the_file_shares_its_table(
    table_name: TableName, write_config: WriteConfig
) -> None:
    name = table_name()
    write_config({name: FULL_ENTRY})
    first, second = (DistEmbedding(None, 4, name) for _ in range(2))
    assert first.table.table_id == second.table.table_id
    assert torch.equal(first(torch.tensor([3])), second(torch.tensor([3])))


def test_the_file_is_found_in_the_folders_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    for folder, seed in ((tmp_path, 1), (tmp_path / "a", 2)):
        document = {"embedding_tables": {"user": {"seed": seed}}}
        (folder / "recstore_config.json").write_text(json.dumps(document))
    monkeypatch.delenv("RECSTORE_CONFIG", raising=False)
    monkeypatch.chdir(deep)
    config = active_config(reload=True)
    assert config is not None
    assert config.embedding_tables["user"].seed == 2
    assert config.path == tmp_path / "a" / "recstore_config.json"


def test_the_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recstore_config.json").write_text("{}")
    named = tmp_path / "other.json"
    named.write_text('{"embedding_tables": {"user": {}}}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RECSTORE_CONFIG", str(named))
    config = active_config(reload=True)
    assert config is not None
    assert list(config.embedding_tables) == ["user"]


def test_a_file_that_the_environment_names_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("RECSTORE_CONFIG", str(tmp_path / "absent.json"))
        with pytest.raises(FileNotFoundError, match=r"absent\.json"):
            active_config(reload=True)


def test_without_a_file_there_is_no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECSTORE_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    assert active_config(reload=True) is None


def test_the_file_is_read_again_only_when_asked(write_config: WriteConfig) -> None:
    path = write_config({"user": {"seed": 1}})
    path.write_text('{"embedding_tables": {"user": {"seed": 2}}}')
    before, after = active_config(), active_config(reload=True)
    assert before is not None
    assert after is not None
    assert (before.embedding_tables["user"].seed, after.embedding_tables["user"].seed) == (1, 2)


def test_recstores_own_file_loads_with_one_warning_that_lists_what_has_no_effect(tmp_path: Path) -> None:
    path = tmp_path / "recstore_config.json"
    schema = {"$schema": "./ci/schema/recstore_config.schema.json"}
    path.write_text(json.dumps({**RECSTORE_FILE, **schema, "embedding_tables": {"user": {"learning_rate": 0.1}}}))
    with pytest.warns(UserWarning, match="without effect here") as caught:
        config = load_config_file(path)
    assert len(caught) == 1
    assert all(key in str(caught[0].message) for key in RECSTORE_FILE)
    assert config.without_effect == tuple(RECSTORE_FILE)
    assert config.embedding_tables["user"].learning_rate == 0.1


def test_a_file_of_tables_alone_loads_without_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "recstore_config.json"
    path.write_text(json.dumps({"embedding_tables": {"user": FULL_ENTRY}}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_config_file(path)


def test_integers_may_be_written_as_in_json_schema(tmp_path: Path) -> None:
    path = tmp_path / "recstore_config.json"
    path.write_text('{"embedding_tables": {"user": {"seed": 3.0, "num_embeddings": 1e3}}}')
    entry = load_config_file(path).embedding_tables["user"]
    assert repr((entry.seed, entry.num_embeddings)) == "(3, 1000)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ('{"embedding_tables": {"user": {"learning_rate": NaN}}}', "NaN is no JSON value"),
        ('{"embedding_tables": {"user": {}, "user": {}}}', 'the key "user" is given twice'),
    ],
)
def test_a_file_that_is_no_sound_json_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "recstore_config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_config_file(path)
    assert str(path) in str(caught.value)


def tables(**entry: Any) -> dict[str, Any]:
    return {"embedding_tables": {"user": entry}}


VALID: list[Any] = [
    {},
    {"$schema": "recstore_config.schema.json"},
    {"embedding_tables": {}},
    RECSTORE_FILE,
    tables(),
    tables(**FULL_ENTRY),
    tables(num_embeddings=None),
    tables(num_embeddings=2**63 - 1, seed=2**64 - 1),
    tables(seed=3.0),
    tables(learning_rate=0),
    tables(optimizer="ftrl", initializer="xavier_uniform"),
    tables(optimizer={"kind": "adamw", "betas": [0, 0.5], "bias_correction": "row", "lr": 1e-3}),
    tables(optimizer={"kind": "ftrl", "lr": 0.1, "beta": 1, "l1": 0, "l2": 0}),
    tables(initializer={"kind": "constant", "value": -1}),
    tables(initializer={"kind": "truncated_normal", "a": None, "b": 1}),
    tables(admission={"kind": "count", "threshold": 2**32 - 1}),
    tables(admission={"kind": "sketch", "threshold": 2, "epsilon": 0.1}),
    tables(admission={"kind": "probability", "probability": 1}),
    tables(admission={"kind": "sketch", "threshold": 2, "shared_rows": 2**29}),
    tables(eviction={"ttl": 5, "min_norm": 0.1, "capacity": 9, "policy": "lfu", "interval": 2, "keep": [-1]}),
]

INVALID: list[tuple[Any, str]] = [
    ([], "must be object, got an array"),
    ({"cach_ps": {}}, 'cach_ps: unknown key; did you mean "cache_ps"?'),
    ({"$schema": 3}, "$schema: must be string, got 3"),
    ({"embedding_tables": []}, "embedding_tables: must be object, got an array"),
    ({"embedding_tables": {"": {}}}, "embedding_tables.: must not be empty"),
    ({"embedding_tables": {"user": None}}, "embedding_tables.user: must be object, got null"),
    (tables(optimzer="sgd"), 'embedding_tables.user.optimzer: unknown key; did you mean "optimizer"?'),
    (tables(num_embeddings=0), "embedding_tables.user.num_embeddings: must be at least 1, got 0"),
    (tables(num_embeddings=2**63), "embedding_tables.user.num_embeddings: must be at most 9223372036854775807"),
    (tables(num_embeddings=True), "embedding_tables.user.num_embeddings: must be integer or null, got true"),
    (tables(embedding_dim=1.5), "embedding_tables.user.embedding_dim: must be integer, got 1.5"),
    (tables(learning_rate=-1), "embedding_tables.user.learning_rate: must be at least 0, got -1"),
    (tables(learning_rate=1e39), "embedding_tables.user.learning_rate: must be at most 3.402"),
    (tables(seed=-1), "embedding_tables.user.seed: must be at least 0, got -1"),
    (tables(seed=float("inf")), "embedding_tables.user.seed: must be integer, got Infinity"),
    (
        tables(dtype="float8"),
        'user.dtype: must be one of "float32", "bfloat16", "float16", "int8", "float8_e4m3fn", got "float8"',
    ),
    (tables(nan_policy="ignore"), "embedding_tables.user.nan_policy: must be one of"),
    (tables(optimizer=3), "embedding_tables.user.optimizer: must be string or object, got 3"),
    (tables(optimizer="sign"), "embedding_tables.user.optimizer: must be one of"),
    (tables(optimizer={"lr": 1}), 'embedding_tables.user.optimizer: needs "kind"'),
    (tables(optimizer={"kind": "sign", "lr": 1}), "embedding_tables.user.optimizer.kind: must be one of"),
    (tables(optimizer={"kind": "sgd", "eps": 1}), "embedding_tables.user.optimizer.eps: unknown key"),
    (tables(optimizer={"kind": "adagrad", "eps": 0}), "embedding_tables.user.optimizer.eps: must be above 0, got 0"),
    (tables(optimizer={"kind": "adam", "betas": [0.9]}), "optimizer.betas: must have at least 2 elements, got 1"),
    (tables(optimizer={"kind": "adam", "betas": [0, 0, 0]}), "optimizer.betas: must have at most 2 elements, got 3"),
    (tables(optimizer={"kind": "adam", "betas": [0.9, 1]}), "optimizer.betas.1: must be below 1, got 1"),
    (tables(initializer="constant"), "embedding_tables.user.initializer: must be one of"),
    (tables(initializer={"kind": "constant"}), 'embedding_tables.user.initializer: needs "value"'),
    (tables(optimizer="rule"), "embedding_tables.user.optimizer: must be one of"),
    (tables(optimizer={"kind": "rule"}), 'embedding_tables.user.optimizer: needs "name"'),
    (tables(initializer={"kind": "zeros", "std": 1}), "embedding_tables.user.initializer.std: unknown key"),
    (tables(initializer={"kind": "normal", "std": -1}), "initializer.std: must be at least 0, got -1"),
    (tables(admission={"kind": "count", "threshold": 1, "shared_rows": 0}), "shared_rows: must be at least 1, got 0"),
    (tables(admission={"kind": "probability", "probability": 1, "shared_rows": 1.5}), "shared_rows: must be integer"),
    (tables(admission="count"), "embedding_tables.user.admission: must be object"),
    (tables(admission={"kind": "count"}), 'embedding_tables.user.admission: needs "threshold"'),
    (tables(admission={"kind": "count", "threshold": 1, "delta": 0.1}), "admission.delta: unknown key"),
    (tables(admission={"kind": "sketch", "threshold": 1, "delta": 1}), "admission.delta: must be below 1, got 1"),
    (tables(admission={"kind": "probability", "probability": 2}), "admission.probability: must be at most 1, got 2"),
    (tables(eviction={"ttl": 0}), "embedding_tables.user.eviction.ttl: must be at least 1, got 0"),
    (tables(eviction={"tll": 1}), 'embedding_tables.user.eviction.tll: unknown key; did you mean "ttl"?'),
    (tables(eviction={"capacity": 1, "policy": "fifo"}), "eviction.policy: must be one of"),
]


@pytest.mark.parametrize("document", VALID)
def test_a_valid_document_has_no_problems(document: Any) -> None:
    assert document_problems(document) == []


@pytest.mark.parametrize(("document", "message"), INVALID)
def test_a_problem_is_named_by_its_path(document: Any, message: str) -> None:
    first, *others = document_problems(document)
    assert message in str(first)
    assert all(problem.path == first.path for problem in others)


def test_every_problem_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "recstore_config.json"
    path.write_text('{"other": 1, "embedding_tables": {"user": {"seed": -1}, "item": {"dtyp": "float32"}}}')
    with pytest.raises(ValueError, match="other") as caught:
        load_config_file(path)
    assert "embedding_tables.user.seed" in str(caught.value)
    assert "embedding_tables.item.dtyp" in str(caught.value)


@pytest.mark.parametrize("document", VALID)
def test_the_store_takes_what_the_schema_finds_valid(document: Any, table_name: TableName, tmp_path: Path) -> None:
    for entry in document.get("embedding_tables", {}).values():
        name = table_name()
        path = tmp_path / "recstore_config.json"
        path.write_text(json.dumps({"embedding_tables": {name: {"num_embeddings": 10, **entry}}}))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RECSTORE_CONFIG", str(path))
            active_config(reload=True)
            DistEmbedding(None, 4, name)


def is_valid_elsewhere(document: Any) -> bool:
    jsonschema = pytest.importorskip("jsonschema")
    return jsonschema.Draft202012Validator(config_schema()).is_valid(document)


def test_the_schema_is_a_sound_one() -> None:
    pytest.importorskip("jsonschema").Draft202012Validator.check_schema(config_schema())


@pytest.mark.parametrize("document", [*VALID, *(document for document, _ in INVALID)])
def test_the_loader_agrees_with_a_validator(document: Any) -> None:
    assert is_valid_elsewhere(document) == (document_problems(document) == [])


NAMES = [*KINDS, "zeros", "normal", "constant", "sign"]
NUMBERS = some.sampled_from([-1, 0, 1, 2, 0.5, 1.0, 1e39, float("inf"), 2**63, 2**64])
VALUES = some.one_of(
    NUMBERS,
    some.sampled_from([None, True, "error", "float32", "torch", "row", *NAMES, [], [0, 0.5], [1, 2], {}]),
)
PARAMETERS = [
    *("kind", "lr", "alpha", "beta", "betas", "eps", "l1", "std", "a", "value", "gain", "convention", "lrr"),
    *("rho", "momentum", "nesterov", "centered", "amsgrad", "lr_decay", "catch_up"),
]
RULES = some.dictionaries(some.sampled_from(PARAMETERS), VALUES, max_size=3)
KINDS_WITH_PARAMETERS = some.builds(lambda kind, rule: {**rule, "kind": kind}, some.sampled_from(NAMES), RULES)
ENTRIES = some.dictionaries(
    some.sampled_from([*FULL_ENTRY, "name"]), some.one_of(VALUES, RULES, KINDS_WITH_PARAMETERS), max_size=3
)
DOCUMENTS = some.fixed_dictionaries(
    {}, optional={"embedding_tables": some.dictionaries(some.text(max_size=2), ENTRIES)}
)


@given(DOCUMENTS)
def test_the_loader_agrees_with_a_validator_on_any_document(document: Any) -> None:
    assert is_valid_elsewhere(document) == (document_problems(document) == [])


def test_a_keyword_that_the_checker_does_not_know_is_no_silent_pass() -> None:
    with pytest.raises(KeyError, match="pattern"):
        find_problems("text", {"pattern": "^a"})


@pytest.mark.parametrize(("opening", "closing"), ["[]", ('{"a":', "}")])
def test_a_configuration_that_is_nested_deeply_is_refused(tmp_path: Path, opening: str, closing: str) -> None:
    path = tmp_path / "recstore_config.json"
    path.write_text(f'{{"cache_ps": {opening * 5000}1{closing * 5000}}}')
    with pytest.raises(ValueError, match=f"{path}: its arrays and objects are nested too deeply"):
        load_config_file(path)


def test_schema_trainer_and_store_know_the_same_optimizers(table_name: TableName) -> None:
    of_schema = [kind for kind in config_schema()["$defs"]["optimizer_kind"]["enum"] if kind != "rule"]
    assert of_schema == config_schema()["$defs"]["optimizer"]["then"]["enum"] == KINDS == [*get_args(OptimizerName)]
    assert [*OPTIMIZERS] == KINDS
    with pytest.raises(ValueError, match="unknown variant `sign`, expected one of ") as refused:
        DistEmbedding(None, 4, table_name(), optimizer="sign")
    assert re.findall(r"`(\w+)`", str(refused.value))[1:] == [*KINDS, "rule"]


def test_the_page_of_tables_has_every_optimizer_and_option() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tables.md").read_text("utf-8")
    section = page.split("## Optimizers\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)`", section, flags=re.MULTILINE)
    assert [*dict.fromkeys(rows)] == [*KINDS, "rule"]
    options = {option for each in OPTIMIZERS.values() for option in each.options}
    assert [option for option in sorted(options) if f"`{option}`" not in section] == []
