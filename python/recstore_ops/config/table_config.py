"""What describes a table, as keywords: the same configuration as in JSON and in Rust, with the same defaults."""

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

_OPTIONAL = ("admission", "eviction", "memory_limit", "disk")
_FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True)
class TableConfig:
    """Bound, initial values, optimizer and policies of a table.

    Attributes:
        num_embeddings: ids outside `[0, num_embeddings)` are refused; `None` for an open vocabulary.
        dtype: the type rows are kept in: `float32`, `bfloat16` or `float16`; see `recstore_ops.row_types`.
        seed: together with the table's name it seeds the initial values.
        block_size: rows in one block of storage.
        initializer: `{"kind": "zeros" | "constant" | "uniform" | "normal" | "truncated_normal" | "xavier_uniform"}`
            with the parameters of `torch.nn.init`.
        optimizer: `{"kind": "sgd" | "adagrad" | "rowwise_adagrad" | "adam" | "adamw" | "ftrl"}` with the
            hyper-parameters of `torch.optim`; for FTRL `alpha`, `beta`, `l1`, `l2`. On servers also
            `{"kind": "rule", "name": ..., "lr": ...}`: a rule of the servers' own program.
        nan_policy: what happens to NaN and infinity in rows and gradients: `error`, `skip` or `allow`.
        admission: which ids get a row by training; all of them without it.
            `{"kind": "count", "threshold": n}`: those updated in n steps.
            `{"kind": "sketch", "threshold": n, "epsilon": 1e-6, "delta": 0.01}`: the same, counted in fixed memory.
            `{"kind": "probability", "probability": p}`: each update admits with this probability.
        eviction: which rows leave; none without it. Any of `ttl` (steps that no update came in), `min_norm` (L2) and
            `capacity` (rows; the least by `policy`, `lru` or `lfu`, leave), further `interval` (1000) steps between
            two sweeps, `delay` (a tenth of it) steps until the rows leave, and `keep`, ids that never do.
        memory_limit: the most bytes of memory that the table may take; `None` for no limit.
        disk: a directory for the rows that the limit leaves no room for; without it a call that would exceed the limit
            is refused. A checkpoint holds neither of both.

    The values are checked when a table is opened; an unknown key or kind is refused by name.
    """

    num_embeddings: int | None = None
    dtype: str = "float32"
    seed: int = 0
    block_size: int = 10_240
    initializer: dict[str, Any] = field(default_factory=lambda: {"kind": "normal"})
    optimizer: dict[str, Any] = field(default_factory=lambda: {"kind": "sgd"})
    nan_policy: str = "error"
    admission: dict[str, Any] | None = None
    eviction: dict[str, Any] | None = None
    memory_limit: int | None = None
    disk: str | None = None

    def to_json(self) -> str:
        """The configuration as the JSON object that `make_hashtable` takes.

        Raises:
            ValueError: a number that is not finite, which JSON cannot write.
        """
        config = {key: value for key, value in asdict(self).items() if key not in _OPTIONAL or value is not None}
        for part in ("initializer", "optimizer", *_OPTIONAL):
            options = config.get(part)
            for key, value in options.items() if isinstance(options, dict) else ():
                if isinstance(value, float) and not math.isfinite(value):
                    raise ValueError(f"invalid table configuration: {part}.{key} must be finite, got {value}")
        return json.dumps(config)

    @classmethod
    def from_json(cls, text: str) -> "TableConfig":
        """Reads what `to_json` wrote.

        Raises:
            TypeError: an unknown key.
        """
        return cls(**json.loads(text))


def with_kind(option: str | dict[str, Any] | None, default: str) -> dict[str, Any]:
    """Turns `"adam"` or `None` into `{"kind": ...}`; a dict is copied."""
    if option is None:
        return {"kind": default}
    return {"kind": option} if isinstance(option, str) else dict(option)


def optimizer_with_lr(optimizer: str | dict[str, Any] | None, lr: float) -> dict[str, Any]:
    """Completes an optimizer with the learning rate of a module's `lr` keyword; its own `lr` takes precedence."""
    config = with_kind(optimizer, "sgd")
    has_own_lr = "lr" in config or "alpha" in config
    return config if has_own_lr else {**config, "lr": lr}


def check_learning_rate(lr: float, table: str | None = None) -> None:
    """Checks a learning rate before it goes anywhere; `table` is named in the message.

    Raises:
        ValueError: a rate that is negative, or not finite as a float32.
    """
    if not 0 <= lr <= _FLOAT32_MAX:
        prefix = "" if table is None else f'table "{table}": '
        raise ValueError(f"{prefix}the learning rate must be finite and not negative, got {lr}")
