"""The configuration of a training run: what it refuses, what it fills in, and its way through JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

from recstore_ops.nn.table_parameter import without_stand_ins
from recstore_ops.training import StoreTables, TrainingConfig
from recstore_ops.training.models import DeepFM, LogisticRegression
from recstore_ops.training.run.optimizers import make_optimizers, table_optimizer

pytestmark = pytest.mark.tier("quick")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"planted": None}, "no training data"),
        ({"train": (Path("x"),)}, "planted data takes no files"),
        ({"planted": "quads"}, "planted must be one of pairs, triples, sequences, retrieval, got 'quads'"),
        (
            {"planted": None, "train": (Path("x"),), "planted_train_rows": 5},
            "a run on files takes no planted_train_rows",
        ),
        ({"planted": None, "train": (Path("x"),), "file_format": "json"}, "file_format must be one of libsvm, libffm,"),
        ({"model": "dnn"}, "model must be one of lr, fm, deepfm, dlrm, wide_deep, dcn, din, two_tower, got 'dnn'"),
        ({"optimizer": "sign"}, "optimizer must be one of sgd"),
        (
            {"init_from": "runs/x", "init_what": "slots"},
            "init_what must be one of rows, rows-and-optimizer, got",
        ),
        ({"init_what": "rows"}, "a run without init_from takes no init_what"),
        ({"init_tables": ("v",)}, "a run without init_from takes no init_tables"),
        ({"init_from": "runs/x", "tables": "nn"}, "a run with tables nn takes no init_from"),
        ({"model": "lr", "dim": 4}, "model lr takes no dim"),
        ({"model": "fm", "hidden": (4,)}, "model fm takes no hidden"),
        ({"model": "deepfm", "bottom": (4,)}, "model deepfm takes no bottom"),
        ({"model": "deepfm", "crosses": ((0, 1),)}, "model deepfm takes no crosses"),
        ({"model": "dlrm", "bias": False}, "model dlrm always has a bias"),
        ({"model": "dcn", "bias": False}, "model dcn always has a bias"),
        ({"model": "din", "sequences": (("a", "b"),), "bias": False}, "model din always has a bias"),
        ({"model": "din"}, "model din needs sequences: name at least one history and its target"),
        ({"model": "dcn", "sequences": (("a", "b"),)}, "model dcn takes no sequences"),
        ({"model": "dcn", "attention_hidden": (4,)}, "model dcn takes no attention_hidden"),
        ({"model": "din", "sequences": (("a", "b"),), "attention_hidden": (0,)}, "attention_hidden must be at least 1"),
        ({"model": "two_tower"}, "model two_tower needs item_fields: name at least one field of the item"),
        ({"model": "two_tower", "item_fields": ("a",), "bias": False}, "model two_tower always has a bias"),
        (
            {"model": "two_tower", "item_fields": ("a",), "auc_by": "a"},
            "model two_tower takes no auc_by: it ranks items",
        ),
        ({"model": "two_tower", "item_fields": ("a",), "temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ({"model": "two_tower", "item_fields": ("a",), "vector_dim": 0}, "vector_dim must be at least 1, got 0"),
        ({"model": "deepfm", "item_fields": ("a",)}, "model deepfm takes no item_fields"),
        ({"model": "deepfm", "temperature": 0.1}, "model deepfm takes no temperature"),
        ({"model": "deepfm", "vector_dim": 8}, "model deepfm takes no vector_dim"),
        ({"model": "din", "popularity_correction": False}, "model din takes no popularity_correction"),
        ({"model": "deepfm", "cross_layers": 2}, "model deepfm takes no cross_layers"),
        ({"model": "wide_deep", "low_rank": 2}, "model wide_deep takes no low_rank"),
        ({"model": "fm", "cross_structure": "stacked"}, "model fm takes no cross_structure"),
        ({"model": "dcn", "cross_layers": 0}, "cross_layers must be at least 1, got 0"),
        ({"model": "dcn", "low_rank": 0}, "low_rank must be at least 1, got 0"),
        ({"model": "dcn", "cross_structure": "mixed"}, "cross_structure must be one of stacked, parallel, got 'mixed'"),
        ({"model": "deepfm", "dropout": 1.0}, "dropout must be below 1, got 1.0"),
        ({"model": "deepfm", "hidden": (8, 0)}, "hidden must be at least 1, got 0"),
        ({"model": "deepfm", "hidden": [8, 0]}, "hidden must be at least 1, got 0"),
        ({"optimizer": "adagrad", "convention": "tf"}, "convention must be one of recstore, torch, got 'tf'"),
        ({"l1": 0.1}, "optimizer adam takes no l1"),
        ({"optimizer": "ftrl", "weight_decay": 0.1}, "optimizer ftrl takes no weight_decay"),
        ({"convention": "torch"}, "optimizer adam takes no convention"),
        ({"optimizer_options": {"lr": 0.1, "l1": 1}}, "optimizer_options take no lr and no l1, which are options of"),
        ({"optimizer_options": {"momentum": 0.9}}, "optimizer_options of adam: momentum: unknown key"),
        ({"optimizer": "lion", "optimizer_options": {"betas": (0.9, 1)}}, "betas.1: must be below 1, got 1"),
        ({"tables": "nn", "optimizer_options": {"eps": 0.1}}, "a run with tables nn takes no optimizer_options"),
        ({"tables": "nn", "optimizer": "lion"}, r"nn.Embedding\(sparse=True\) has no optimizer lion"),
        ({"dense_options": {"momentum": 0.9}}, "dense_options need a dense_optimizer"),
        ({"dense_optimizer": "lion"}, "dense_optimizer must be one of"),
        ({"dense_optimizer": "adam", "dense_options": {"momentum": 0.9}}, "torch.optim.Adam takes no momentum"),
        ({"schedule": "step"}, "schedule must be one of constant, linear, cosine, exponential, plateau"),
        ({"gamma": 0.5}, "schedule constant takes no gamma"),
        ({"schedule": "exponential", "gamma": 1.5}, "gamma must be at most 1, got 1.5"),
        ({"schedule": "plateau", "validation_fraction": 0}, "schedule plateau needs validation rows"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ({"tables": "disk"}, "tables must be one of store, nn, got 'disk'"),
        ({"tables": "nn", "optimizer": "ftrl"}, r"nn.Embedding\(sparse=True\) has no optimizer ftrl"),
        ({"tables": "nn", "optimizer": "adagrad"}, 'only with convention "torch"'),
        (
            {"row_type": "float8"},
            "row_type must be one of float32, bfloat16, float16, int8, float8_e4m3fn, got 'float8'",
        ),
        ({"disk": "/tmp"}, "disk needs a memory_limit"),
        ({"memory_limit": 0}, "memory_limit must be at least 1, got 0"),
        ({"tables": "nn", "memory_limit": 1}, "tables nn takes no memory_limit"),
        ({"tables": "nn", "row_type": "float16"}, "tables nn take no row_type float16"),
        ({"tables": "nn", "weight_decay": 0.1}, "torch.optim has no weight decay for sparse gradients"),
        ({"tables": "nn", "model": "wide_deep", "crosses": ((0, 1),)}, "nn.Embedding has no row for crossed ids"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"dim": 0}, "dim must be at least 1, got 0"),
        ({"planted": None, "train": (Path("x"),), "hash_buckets": 0}, "hash_buckets must be at least 1, got 0"),
        (
            {"planted": None, "train": (Path("x"),), "hash_buckets": 2**63},
            f"hash_buckets must be at most {2**63 - 1}, got {2**63}",
        ),
        ({"evaluate_every": 0}, "evaluate_every must be at least 1, got 0"),
        ({"admit_after": 0}, "admit_after must be at least 1, got 0"),
        ({"admit_after": 2, "shared_rows": 0}, "shared_rows must be at least 1, got 0"),
        ({"shared_rows": 5}, "a run without admit_after takes no shared_rows"),
        ({"ttl": 0}, "ttl must be at least 1, got 0"),
        ({"min_norm": 0.0}, "min_norm must be above 0, got 0"),
        ({"eviction_policy": "lfu"}, "a run without capacity takes no eviction_policy"),
        ({"capacity": 5, "eviction_policy": "fifo"}, "eviction_policy must be one of lru, lfu, got 'fifo'"),
        ({"eviction_interval": 5}, "a run that no rows leave takes no eviction_interval"),
        ({"tables": "nn", "ttl": 5}, "a run with tables nn takes no ttl"),
        ({"ttl_time": 5.0}, "planted rows have no event times: they take no ttl_time"),
        ({"planted": None, "train": (Path("x"),), "ttl_time": 0.0}, "ttl_time must be above 0, got 0"),
        (
            {"planted": None, "train": (Path("x"),), "ttl_time": 5.0, "tables": "nn"},
            "a run with tables nn takes no ttl_time",
        ),
        ({"lr": 0.0}, "lr must be above 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"validation_fraction": 0.6}, "validation_fraction must be at most 0.5"),
        ({"validation_fraction": 0, "patience": 1}, "early stopping needs validation rows"),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**{"planted": "pairs", **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"planted": "pairs", "train": (), "hash_buckets": 5}, "planted data takes no hash_buckets"),
        ({"planted": "pairs", "train": (), "num_fields": 5}, "planted data takes no num_fields"),
        ({"planted": "pairs", "train": (), "rating_threshold": 0.0}, "planted data takes no rating_threshold"),
        ({"planted": "pairs", "train": (), "ignore_values": True}, "planted data takes no ignore_values"),
        ({"planted": "pairs", "train": (), "on_bad_line": "skip"}, "planted data takes no on_bad_line"),
        ({"shuffle": False, "shuffle_window": 10}, "a run that does not shuffle takes no shuffle_window 10"),
        (
            {"drop_columns": ("user",), "column_roles": {"user": "categorical"}},
            "column 'user' is left out by drop_columns, and categorical by column_roles",
        ),
        (
            {"drop_columns": ("user",), "label_column": "user"},
            "column 'user' is left out by drop_columns, and has the labels by label_column",
        ),
        (
            {"column_roles": {"user": "number"}, "label_column": "user"},
            "column 'user' has the labels by label_column, and is number by column_roles",
        ),
        (
            {"column_roles": {"user": "label"}, "label_column": "film"},
            "column 'film' has the labels by label_column, and 'user' by column_roles",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        TrainingConfig(**{"train": (Path("x"),), **options})


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": False},
        {"drop_columns": ("user",), "column_roles": {"user": "ignored"}},
        {"label_column": "film", "column_roles": {"film": "label", "user": "number"}},
    ],
)
def test_options_that_agree_are_taken(options: dict[str, Any]) -> None:
    config = TrainingConfig(train=(Path("x"),), **options)
    assert TrainingConfig.from_json(config.as_json()) == config


def numbers_of_the_configuration() -> list[tuple[str, Any]]:
    """Each field that takes a number, or a number in something, with what makes its value of one."""
    makes: dict[Any, Callable[[Any], Any]] = {
        int: lambda number: number,
        float: lambda number: number,
        tuple[int, ...]: lambda number: (1, number),
        tuple[tuple[int, int], ...]: lambda number: ((0, 1), (number, 2)),
        dict[str, Any]: lambda number: {"betas": [0.9, number]},
    }
    hints = get_type_hints(TrainingConfig).items()
    return [(name, make) for name, hint in hints for of, make in makes.items() if of in (hint, *get_args(hint))]


@pytest.mark.parametrize(("name", "make"), numbers_of_the_configuration())
@pytest.mark.parametrize(
    ("number", "message"),
    [
        (float("nan"), "must be a finite number, got nan"),
        (float("inf"), "must be a finite number, got inf"),
        (float("-inf"), "must be a finite number, got -inf"),
        (10**23, f"must be at most {2**63 - 1}, got {10**23}"),
        (-(10**23), f"must be at least {-(2**63)}, got {-(10**23)}"),
    ],
)
def test_a_number_that_no_run_can_take_is_refused(name: str, make: Any, number: float, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} {message}$"):
        TrainingConfig(**{"planted": "pairs", name: make(number)})


def test_all_kinds_of_fields_with_numbers_are_known() -> None:
    names = {name for name, _ in numbers_of_the_configuration()}
    assert {"lr", "seed", "rating_threshold", "hidden", "crosses", "dense_options", "ttl_time", "min_norm"} <= names


def test_each_model_has_its_own_options() -> None:
    assert TrainingConfig(planted="pairs", model="lr").model_options() == {"bias": True}
    assert TrainingConfig(planted="pairs", model="fm", dim=4).model_options() == {
        "dim": 4,
        "init_std": 0.01,
        "bias": True,
    }
    assert TrainingConfig(planted="pairs", model="dlrm", dropout=0.1).model_options() == {
        "dim": 8,
        "init_std": 0.01,
        "hidden": (64, 32),
        "dropout": 0.1,
        "bottom": (64,),
    }
    assert TrainingConfig(planted="pairs", model="dcn", low_rank=4).model_options() == {
        "dim": 8,
        "init_std": 0.01,
        "hidden": (64, 32),
        "dropout": 0.0,
        "cross_layers": 2,
        "low_rank": 4,
        "cross_structure": "stacked",
    }
    assert TrainingConfig(planted="retrieval", model="two_tower", item_fields=("item",), hidden=()).model_options() == {
        "dim": 8,
        "init_std": 0.1,
        "hidden": (),
        "dropout": 0.0,
        "item_fields": ("item",),
        "vector_dim": 32,
        "temperature": 0.1,
        "popularity_correction": True,
    }


def test_a_configuration_is_plain_json() -> None:
    config = TrainingConfig(train=(Path("a"), Path("b")), model="wide_deep", crosses=((0, 1),), drop_columns=("x",))
    values = json.loads(json.dumps(config.as_json()))
    assert (values["train"], values["test"], values["crosses"]) == (["a", "b"], [], [[0, 1]])


@pytest.mark.parametrize(
    "options",
    [
        {"train": (Path("a"), Path("b")), "test": (Path("c"),), "optimizer": "ftrl", "drop_columns": ("x", "y")},
        {"planted": "pairs", "model": "wide_deep", "crosses": ((0, 1), (2, 3)), "schedule": "plateau"},
        {"planted": "pairs", "dense_optimizer": "adam", "dense_options": {"betas": (0.8, 0.9)}, "ttl": 3},
        {"planted": "retrieval", "model": "two_tower", "item_fields": ("a", "b"), "popularity_correction": False},
        {"train": (Path("a"),), "model": "dlrm", "init_from": "runs/x", "init_what": "rows", "init_tables": ("v",)},
    ],
)
def test_a_configuration_is_read_back_from_json(options: dict[str, Any]) -> None:
    config = TrainingConfig(**options)
    assert TrainingConfig.from_json(json.loads(json.dumps(config.as_json()))) == config


def test_an_option_of_another_version_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown option depth, width; it was written by another version"):
        TrainingConfig.from_json({"planted": "pairs", "width": 1, "depth": 2})


def test_ftrl_takes_lr_as_alpha() -> None:
    config = TrainingConfig(planted="pairs", optimizer="ftrl", lr=0.2, l1=0.5)
    assert table_optimizer(config) == {"kind": "ftrl", "alpha": 0.2, "beta": 1.0, "l1": 0.5, "l2": 0.0}


def test_adagrad_takes_a_convention() -> None:
    config = TrainingConfig(planted="pairs", optimizer="adagrad", convention="torch")
    assert table_optimizer(config) == {"kind": "adagrad", "lr": 0.05, "convention": "torch"}


def test_further_arguments_are_the_rules() -> None:
    config = TrainingConfig(planted="pairs", optimizer="sgd", optimizer_options={"momentum": 0.9, "nesterov": True})
    assert table_optimizer(config) == {"kind": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True}
    assert TrainingConfig.from_json(config.as_json()) == config


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ("sgd", torch.optim.SGD),
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.Adam),
        ("adagrad", torch.optim.Adagrad),
        ("rowwise_adagrad", torch.optim.Adagrad),
        ("ftrl", torch.optim.Adagrad),
        ("rmsprop", torch.optim.RMSprop),
        ("adadelta", torch.optim.Adadelta),
        ("rowwise_adam", torch.optim.Adam),
        ("lamb", torch.optim.Adam),
        ("lion", torch.optim.Adam),
    ],
)
def test_the_dense_part_follows_the_same_rule(table_name, optimizer, expected: type) -> None:
    config = TrainingConfig(planted="pairs", optimizer=optimizer, lr=0.3)
    model = LogisticRegression(StoreTables(table_name(), table_optimizer(config)))
    _, dense = make_optimizers(config, model)
    assert type(dense) is expected
    assert dense.param_groups[0]["lr"] == 0.3
    assert dense.param_groups[0].get("weight_decay", 0) == 0


def test_the_dense_part_can_have_an_optimizer_of_its_own(table_name) -> None:
    config = TrainingConfig(planted="pairs", dense_optimizer="RMSprop", dense_lr=0.05, dense_options={"momentum": 0.5})
    model = DeepFM(StoreTables(table_name(), table_optimizer(config)), 4, num_fields=2)
    _, dense = make_optimizers(config, model)
    assert isinstance(dense, torch.optim.RMSprop)
    assert (dense.param_groups[0]["lr"], dense.param_groups[0]["momentum"]) == (0.05, 0.5)
    parameters = [parameter for _, parameter in without_stand_ins(model.named_parameters())]
    assert sum(len(group["params"]) for group in dense.param_groups) == len(parameters)


def test_a_model_of_tables_only_has_one_optimizer(table_name) -> None:
    config = TrainingConfig(planted="pairs", model="lr", bias=False)
    model = LogisticRegression(StoreTables(table_name(), "adam"), bias=False)
    assert len(make_optimizers(config, model)) == 1
