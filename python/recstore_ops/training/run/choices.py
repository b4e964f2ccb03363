"""The choices of a configuration: names of models, their defaults, the options that they take."""

from __future__ import annotations

from typing import Any, Literal

ModelName = Literal["lr", "fm", "deepfm", "dlrm", "wide_deep", "dcn", "din", "two_tower"]
TablesName = Literal["store", "nn"]
InitWhat = Literal["rows", "rows-and-optimizer"]

# The optimizers that `torch.optim` has for the sparse gradients of `nn.Embedding`.
NN_OPTIMIZERS = ("sgd", "adagrad", "adam")
REASONS = ("ttl", "min_norm", "capacity")
FTRL_DEFAULTS = {"beta": 1.0, "l1": 0.0, "l2": 0.0}
# The arguments of the tables' optimizer that have options of their own.
WITH_OPTIONS = ("kind", "lr", "alpha", "beta", "l1", "l2", "weight_decay", "convention")

# What each model takes beside a bias, with its default.
_FACTORS = {"dim": 8, "init_std": 0.01}
_DEEP = {**_FACTORS, "hidden": (64, 32), "dropout": 0.0}
MODEL_OPTIONS: dict[ModelName, dict[str, Any]] = {
    "lr": {},
    "fm": _FACTORS,
    "deepfm": _DEEP,
    "dlrm": {**_DEEP, "bottom": (64,)},
    "wide_deep": {**_DEEP, "crosses": ()},
    "dcn": {**_DEEP, "cross_layers": 2, "low_rank": None, "cross_structure": "stacked"},
    "din": {**_DEEP, "sequences": (), "attention_hidden": (64, 32)},
    "two_tower": {
        **_DEEP,
        # Vectors have a length of 1: what small embeddings say of an id drowns in the biases of the layers.
        "init_std": 0.1,
        "item_fields": (),
        "vector_dim": 32,
        "temperature": 0.1,
        "popularity_correction": True,
    },
}

# What has a meaning for files with named columns only.
OF_NAMED_COLUMNS = ("label_column", "drop_columns", "column_roles", "schema")
# The models whose linear layers outside the tables have biases, which cannot be turned off.
ALWAYS_WITH_BIAS = ("dlrm", "dcn", "din", "two_tower")
# Those that rank items for queries: their scores are no log-odds.
RETRIEVAL = ("two_tower",)
