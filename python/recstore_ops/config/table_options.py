"""`TableOptions`: what a table is opened with, under the same names in every constructor that opens one."""

from os import PathLike
from typing import Any, Literal, TypedDict, cast

import torch
import torch.distributed as dist

GradReduce = Literal["mean", "sum"]
OnExisting = Literal["share", "error", "reset"]

DEFAULT_LR = 0.01
"""The learning rate of tables that nothing else gives one."""


class StorageOptions(TypedDict, total=False):
    """Those of `TableOptions` that say which rows are kept, and how."""

    dtype: torch.dtype | None
    seed: int | None
    block_size: int | None
    max_grad_norm: float | None
    state_dtype: torch.dtype | str | None
    ema_decay: float | None
    nan_policy: str | None
    admission: dict[str, Any] | None
    eviction: dict[str, Any] | None
    memory_limit: int | None
    disk: str | PathLike[str] | None


class ConfigOptions(StorageOptions, total=False):
    """Those of `TableOptions` that a table's configuration holds, wherever its rows lie."""

    optimizer: str | dict[str, Any] | None
    initializer: str | dict[str, Any] | None


class TableOptions(ConfigOptions, total=False):
    """The options that a table is opened with, as keywords.

    An option that is absent or `None` has the value of the configuration file's entry for the table
    (`recstore_ops.load_config_file`), or else its default. The values are checked when the table is opened; an unknown
    key or kind is refused by name.

    Attributes:
        optimizer: kind, one of `recstore_ops.config.optimizers.OptimizerName`, or `{"kind": ...}` with its
            hyper-parameters, named as in `torch.optim`: `OPTIMIZERS` beside the names has the keys of each, and
            `docs/tables.md` the equations. Also `{"kind": "rule", "name": ..., "lr": ...}`: a rule of
            `recstore_ops.register_rule`, on servers one of the servers' own program. SGD by default. Its own `lr`
            takes precedence over the file's `learning_rate`, and that over the argument `lr`, 0.01 by default.
        initializer: kind, or `{"kind": "zeros" | "constant" | "uniform" | "normal" | "truncated_normal" |
            "xavier_uniform"}` with the parameters of `torch.nn.init`; normal with a standard deviation of 0.01 by
            default.
        dtype: the type rows are kept in: `torch.float32`, the default, `torch.bfloat16` or `torch.float16`, which take
            half the memory, `torch.int8` or `torch.float8_e4m3fn`, with a scale a row, which take about a quarter.
            Written rows are rounded to the nearest, a step rounds stochastically, with noise that the seed
            determines; slots and arithmetic stay float32. See docs/tables.md.
        seed: together with the table's name it seeds the initial values; 0 by default.
        block_size: rows in one block of storage; 10,240 by default.
        max_grad_norm: the longest gradient of a row, by its L2 norm: a longer one is scaled to it before the rule sees
            it, duplicates summed; without one, none is.
        state_dtype: the type of what the rule keeps for each element of a row: `torch.float32`, the default,
            `torch.bfloat16`, or `"float8"`, of 8 bits with a scale a row. A step rounds it stochastically, as rows.
            Values kept once a row, and `ema_decay`'s averages, stay float32. Refused if the rule keeps nothing of that
            kind.
        ema_decay: keeps the moving average of each row: `e = ema_decay * e + (1 - ema_decay) * w` at every step of the
            table. `recstore_ops.averaged` gives a model that has it; without a decay, none is kept.
        nan_policy: what happens to NaN and infinity in rows and gradients: `error`, the default, `skip` or `allow`.
        admission: which ids get a row by training; all of them by default.
            `{"kind": "count", "threshold": n}`: those updated in n steps.
            `{"kind": "sketch", "threshold": n, "epsilon": 1e-6, "delta": 0.01}`: the same, counted in fixed memory.
            Either may have `"halve_every": steps`, after which all counts are halved again and again, so that ids
            that come seldom are never admitted and at last forgotten.
            `{"kind": "probability", "probability": p}`: each update admits with this probability.
            Any may have `"shared_rows": m`: ids without a row of their own read and train one of m rows, which a hash
            of the id names, and an id that is admitted starts from it.
        eviction: which rows leave; none by default. Any of `ttl` (steps without an update of the row), `min_norm` (L2)
            and `capacity` (rows). Each sweep brings a table down to its `capacity`: the least rows by `policy`, `lru`
            or `lfu`, leave. Between sweeps there may be more. Further `interval`, the steps between two sweeps (1000),
            `delay`, the steps until the rows leave (a tenth of it), and `keep`, ids that never do. The row of a
            module's `padding_idx` never does either.
        memory_limit: the most bytes of memory that the table may take; no limit by default. Of a table with
            `eviction` the least rows by its policy leave at once for new ones; else, without `disk`, a call whose new
            rows would exceed it is refused and changes nothing.
        disk: a directory for the rows that `memory_limit` leaves no room for: those used last stay in memory, and
            results are the same to the bit. A checkpoint holds neither limit nor directory.
        process_group: the ranks over which the table is sharded by id, each with the rows of its own ids; see
            `docs/sharding.md`. All of them open it and call it together.
        grad_reduce: whether the gradients of the ranks are summed, `sum`, or divided by the number of ranks besides,
            `mean`, the default, as `DistributedDataParallel` does.
        wire_dtype: the type in which rows and gradients travel between ranks: `torch.float32`, the default, or
            `torch.bfloat16`.
        on_existing: the treatment of a table that exists and has rows. `share` goes on with them and `error` raises.
            `reset` gives up rows, optimizer state and configuration: modules, optimizers and handles that the table had
            before refuse from then on. It is refused for a table on servers. By default a module shares the table, and
            warns each time if an earlier module trained or wrote its rows, unless the two are made in the constructor
            of one model. All ranks of a `process_group` do the same.
    """

    process_group: dist.ProcessGroup | None
    grad_reduce: GradReduce
    wire_dtype: torch.dtype | None
    on_existing: OnExisting | None


TableOptions.__module__ = "recstore_ops"  # Not in its body, where names of types would be looked up there.


DEFAULTS: TableOptions = {"grad_reduce": "mean"}
"""The options whose default is no `None`."""


def config_options(options: TableOptions) -> ConfigOptions:
    """Those of the options that a table's configuration holds."""
    kept = {name: value for name, value in options.items() if name in ConfigOptions.__optional_keys__}
    return cast(ConfigOptions, kept)


def options_of(described: object) -> ConfigOptions:
    """The options of a table among the attributes of what describes it; those that are `None` are left out."""
    attributes = {name: getattr(described, name, None) for name in ConfigOptions.__optional_keys__}
    return given(cast(ConfigOptions, attributes))


def given(options: ConfigOptions) -> ConfigOptions:
    """The options that are not `None`."""
    return cast(ConfigOptions, {name: value for name, value in options.items() if value is not None})
