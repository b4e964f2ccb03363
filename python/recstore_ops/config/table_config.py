"""The configuration of a table, as keywords: the same as in JSON and in Rust, with the same defaults."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from recstore_ops.config.paths import user_path
from recstore_ops.config.row_types import state_type, type_name
from recstore_ops.config.table_options import ConfigOptions, given

_OPTIONAL = ("max_grad_norm", "state_dtype", "ema_decay", "admission", "eviction", "memory_limit", "disk")
_FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True)
class TableConfig:
    """Bound, initial values, optimizer and policies of a table.

    Attributes:
        num_embeddings: ids outside `[0, num_embeddings)` are refused; `None` for an open vocabulary.
        dtype: the name of the type rows are kept in: `float32`, `bfloat16`, `float16`, `int8` or
            `float8_e4m3fn`.
        seed: this and all that follow as in `recstore_ops.TableOptions`; initializer and optimizer have a `kind`.

    The values are checked when a table is opened; an unknown key or kind is refused by name.
    """

    __module__ = "recstore_ops"

    num_embeddings: int | None = None
    dtype: str = "float32"
    seed: int = 0
    block_size: int = 10_240
    initializer: dict[str, Any] = field(default_factory=lambda: {"kind": "normal"})
    optimizer: dict[str, Any] = field(default_factory=lambda: {"kind": "sgd"})
    max_grad_norm: float | None = None
    state_dtype: str | None = None
    ema_decay: float | None = None
    nan_policy: str = "error"
    admission: dict[str, Any] | None = None
    eviction: dict[str, Any] | None = None
    memory_limit: int | None = None
    disk: str | None = None

    @classmethod
    def of(cls, num_embeddings: int | None, lr: float, options: ConfigOptions) -> "TableConfig":
        """The configuration that options stand for; one that is absent or `None` has its default.

        Args:
            num_embeddings: the number of ids; `None` for an open vocabulary.
            lr: the learning rate, if the optimizer has none of its own.
            options: a type of rows may also be given by its name.

        Raises:
            TypeError: an initializer or an optimizer that is no name and no dict.
            ValueError: a learning rate that is no number.
        """
        chosen: dict[str, Any] = {**given(options)}
        for option in ("initializer", "optimizer"):
            check_kind(option, chosen.get(option))
        chosen["initializer"] = with_kind(chosen.get("initializer"), "normal")
        chosen["optimizer"] = optimizer_with_lr(chosen.get("optimizer"), lr)
        if "dtype" in chosen:
            chosen["dtype"] = type_name(chosen["dtype"])
        if "state_dtype" in chosen:
            chosen["state_dtype"] = state_type(chosen["state_dtype"])
        if "disk" in chosen:
            chosen["disk"] = user_path(chosen["disk"], "disk")
        return cls(num_embeddings=num_embeddings, **chosen)

    def to_json(self) -> str:
        """The configuration as the JSON object that `make_hashtable` takes.

        Raises:
            TypeError: a value that is none of JSON's, as a class or a tensor; names its key.
            ValueError: a number that is not finite, or an integer of more than 64 bits, which JSON cannot carry.
        """
        config = {key: value for key, value in asdict(self).items() if key not in _OPTIONAL or value is not None}
        for key, value in config.items():
            _check_value(key, value)
        return json.dumps(config)

    @classmethod
    def from_json(cls, text: str) -> "TableConfig":
        """Reads what `to_json` wrote.

        Raises:
            TypeError: an unknown key.
        """
        return cls(**json.loads(text))


def check_name_and_dim(name: Any, dim: Any) -> None:
    """Checks a table's name, and that its dim is no truth value; its range is checked when the table is opened.

    Raises:
        TypeError: the name is no text.
        ValueError: the name is not valid Unicode, or the dim is a truth value.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a table must be a text, got {name!r}")
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        raise ValueError(f"the name of a table must be valid Unicode, got {name!r}, which has half a surrogate pair")
    if isinstance(dim, bool):
        raise ValueError(f'table "{name}": dim must be an integer, got {dim}')


def check_kind(name: str, option: Any) -> None:
    """Checks an option that is a kind, or a dict with one.

    Raises:
        TypeError: it is neither.
    """
    if option is not None and not isinstance(option, str | Mapping):
        raise TypeError(f'{name} must be the name of a kind, or a dict with a "kind", got {option!r}')


def with_kind(option: str | dict[str, Any] | None, default: str) -> dict[str, Any]:
    """Turns `"adam"` or `None` into `{"kind": ...}`; a dict is copied."""
    if option is None:
        return {"kind": default}
    return {"kind": option} if isinstance(option, str) else dict(option)


def optimizer_with_lr(optimizer: str | dict[str, Any] | None, lr: float) -> dict[str, Any]:
    """Completes an optimizer with the learning rate of a module's `lr` keyword; its own `lr` takes precedence."""
    config = with_kind(optimizer, "sgd")
    if "lr" not in config and "alpha" not in config:
        _check_number("lr", lr)
        return {**config, "lr": lr}
    for name in config.keys() & {"lr", "alpha"}:
        _check_number(f"optimizer.{name}", config[name])
    return config


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"invalid table configuration: {name} must be a number, got {value!r}")


def check_learning_rate(lr: Any, table: str | None = None) -> float:
    """Checks a learning rate before it goes anywhere, and returns it as a float; `table` is named in the message.

    Args:
        lr: a number, or a tensor of one.
        table: whose it is to be.

    Raises:
        TypeError: it is no number.
        ValueError: a rate that is negative, or not finite as a float32.
    """
    prefix = "" if table is None else f'table "{table}": '
    try:
        # `float` alone would take a text or a truth value too.
        rate = float(lr) if hasattr(lr, "__float__") and not _is_truth_value(lr) else None
    except (TypeError, ValueError, RuntimeError):  # A tensor or an array of several.
        rate = None
    if rate is None:
        raise TypeError(f"{prefix}the learning rate must be a number, got {lr!r}")
    if not 0 <= rate <= _FLOAT32_MAX:
        raise ValueError(f"{prefix}the learning rate must be finite and not negative, got {rate}")
    return rate


def _check_value(key: str, value: Any) -> None:
    if isinstance(value, dict):
        for name, part in value.items():
            _check_value(f"{key}.{name}", part)
    elif isinstance(value, list | tuple):
        # Of a million ids these two say as much as all.
        for part in (min(value), max(value)) if set(map(type, value)) == {int} else value:
            _check_value(key, part)
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise ValueError(f"invalid table configuration: {key} must be an integer of 64 bits, got {value}")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"invalid table configuration: {key} must be finite, got {value}")
    elif not (value is None or isinstance(value, str)):
        raise TypeError(
            f"invalid table configuration: {key}: expected numbers, strings, lists and dicts, got {_shown(value)}"
        )


def _is_truth_value(value: Any) -> bool:
    # A tensor or an array of truth values too: `float` would take each for 0 or 1.
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def _shown(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a value of type {type(value).__name__}"
