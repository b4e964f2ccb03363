"""The rows and the optimizer state of tables, in the form that `recstore_ops.state` describes.

Shape suffixes: N ids, D dim.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from recstore_ops.config.row_types import VALUE_TYPES
from recstore_ops.config.table_config import TableConfig, check_learning_rate
from recstore_ops.ops import operators
from recstore_ops.servers import store
from recstore_ops.sharding.ownership import check_owned
from recstore_ops.table.cut import cut_tables
from recstore_ops.table.refusals import refuse_shared_rows
from recstore_ops.table.table import Table

TableRows = tuple[Tensor, Tensor]
OptimizerState = tuple[Tensor, dict[str, Tensor], dict[str, Any]]

_PROGRESS = {"step", "learning_rate", "learning_rate_was_set", "group_lr", "optimizer"}

_TUNABLE = {"lr", "weight_decay"}
"""Options of an optimizer that may differ between two openings of one table."""

_NEVER_NEGATIVE = {"exp_avg_sq", "max_exp_avg_sq", "state_sum", "square_avg", "acc_delta", "n", "step", "alpha"}
"""Slots of the store's rules that hold squares, counts and learning rates."""

_left_out: ContextVar[bool] = ContextVar("left_out", default=False)


@contextmanager
def tables_left_out() -> Iterator[None]:
    """Within it `state_dict` and `load_state_dict` of models are about all but tables.

    For who keeps the tables elsewhere, in a checkpoint for example.

    Examples:
        >>> from recstore_ops import DistEmbedding
        >>> model = torch.nn.Sequential(DistEmbedding(None, 2, "item"), torch.nn.Linear(2, 1))
        >>> with tables_left_out():
        ...     state = model.state_dict()
        ...     _ = model.load_state_dict(state)
        >>> list(state)
        ['1.weight', '1.bias']
    """
    before = _left_out.set(True)
    try:
        yield
    finally:
        _left_out.reset(before)


def are_tables_left_out() -> bool:
    """Whether `tables_left_out` is in effect here."""
    return _left_out.get()


def table_rows(table: Table) -> TableRows:
    """All rows of a table at one moment, as `(ids, rows)`.

    If the table lies on servers, rows that change meanwhile are as before or after, and rows that go are left out.

    Raises:
        ValueError: the table has shared rows, which a state does not hold.
    """
    _check_shares_none(table)
    return rows_by_id(table)


def rows_by_id(table: Table) -> TableRows:
    """The rows that ids of a table have, as `(ids, rows)`, whatever others read."""
    with cut_tables([table]) as (cut,):
        return cut.all_rows()


def check_rows(table: Table, state: Any) -> TableRows:
    """Checks that a table can take a state, and returns it on the CPU.

    Args:
        table: the table.
        state: `(ids, rows)`, int64 `[N]` and `[N, dim]` in the table's row type, of rows of 8 bits in bfloat16.

    Raises:
        TypeError: something else than two tensors, or tensors of another type.
        ValueError: tensors of another shape, an id that comes twice or that another rank owns, or a value that is not
            finite, under the policy `error`; or the table has shared rows.
        IndexError: an id outside the table's `num_embeddings`.
    """
    _check_shares_none(table)
    if not isinstance(state, tuple | list) or len(state) != 2 or not all(isinstance(part, Tensor) for part in state):
        raise TypeError(f'table "{table.name}" takes a state (ids, rows) of two tensors, got {_shown(state)}')
    ids_N, rows_ND = (part.detach().cpu() for part in state)
    _check_ids(table, ids_N)
    value_type = VALUE_TYPES[table.config.dtype]
    if rows_ND.dtype != value_type:
        raise TypeError(
            f'table "{table.name}" has rows of {table.config.dtype} and takes a state of {value_type}, '
            f"got one of {rows_ND.dtype}"
        )
    if rows_ND.shape != (ids_N.numel(), table.dim):
        expected = (ids_N.numel(), table.dim)
        raise ValueError(f'table "{table.name}" takes rows of shape {expected}, got {tuple(rows_ND.shape)}')
    if table.config.nan_policy == "error":
        _check_finite(table, ids_N, rows_ND)
    return ids_N, rows_ND


def replace_rows(table: Table, state: Any) -> None:
    """Gives a table the rows of a state and no others; nothing changes on an error.

    Rows that stay keep their optimizer's slots, but for FTRL's `z`, which follows the row. Under the policy `skip`
    rows that are not finite are left out and counted.

    Raises:
        TypeError: as `check_rows`.
        ValueError: as `check_rows`.
        IndexError: as `check_rows`.
    """
    # Deleting and writing are two calls. All that may be refused is refused before the first one.
    ids_N, rows_ND = check_rows(table, state)
    is_skipping = table.config.nan_policy == "skip"
    # An id whose new row the write will skip loses its old row too, as if the table were new.
    taken = ids_N[rows_ND.isfinite().all(dim=1)] if is_skipping else ids_N
    before = operators.hashtable_ids(table.handle)
    operators.hashtable_delete(table.handle, before[~torch.isin(before, taken)])
    operators.emb_write(table.handle, ids_N, rows_ND.to(torch.float32))


def optimizer_state(table: Table, group_lr: float) -> OptimizerState:
    """The state of a table's optimizer at one moment, as `(ids, slots, progress)`.

    If the table lies on servers, other threads must not change it meanwhile.

    Args:
        table: the table.
        group_lr: the learning rate of the table's parameter group at its last step.

    Raises:
        ValueError: the table has shared rows, whose slots a state does not hold.
    """
    _check_shares_none(table)
    names = list(_slot_widths(table))
    with cut_tables([table]) as (cut,):
        ids_N = cut.ids if names else torch.empty(0, dtype=torch.int64, device="cpu")
        slots = {name: cut.slot(name, ids_N) for name in names}
        statistics = cut.progress()
    own = {"group_lr": float(group_lr), "optimizer": _rule(table)}
    return ids_N, slots, {**{key: statistics[key] for key in _progress_of(table) - own.keys()}, **own}


def native_state(table: Table, state: Any) -> dict[str, Any]:
    """Checks that a table's optimizer can take a state, and returns it as `_native.put_optimizer_states` takes it.

    Raises:
        TypeError: something else than `(ids, slots, progress)`, or tensors of another type.
        ValueError: the state of another optimizer, learning rate and weight decay apart. Other slots or shapes than
            the optimizer's, ids that are not those of the table's rows, or an invalid step or learning rate. Or, under
            the policy `error`, a value in a slot that is not finite, or a negative square.
        IndexError: an id outside the table's `num_embeddings`.
    """
    is_state = isinstance(state, tuple | list) and len(state) == 3 and isinstance(state[0], Tensor)
    if not (is_state and isinstance(state[1], dict) and isinstance(state[2], dict)):
        raise TypeError(
            f'table "{table.name}" takes the state of an optimizer as (ids, slots, progress), got {_shown(state)}'
        )
    ids_N, slots, progress = state[0].cpu(), state[1], state[2]
    _check_ids(table, ids_N)
    _check_rule(table, progress)
    _check_slots(table, ids_N, slots)
    _check_progress(table, progress)
    own_N = operators.hashtable_ids(table.handle)
    if slots and not torch.equal(ids_N.sort().values, own_N.sort().values):
        raise ValueError(
            f"the state of the optimizer is of {ids_N.numel()} ids, which are not those of the {own_N.numel()} rows of "
            f'table "{table.name}": load the state of the model first'
        )
    kept = {key: value for key, value in progress.items() if key not in ("group_lr", "optimizer")}
    values = [_as_bytes(slots[name]) for name in _slot_widths(table)]
    ids = _as_bytes(ids_N if slots else ids_N[:0])
    return {"table": table.table_id, "ids": ids, "slots": values, "idle_kept": None, **kept}


def _progress_of(table: Table) -> set[str]:
    """The keys that the state of a table's optimizer has beside slots."""
    return _PROGRESS | (table.statistics().keys() & {"idle_kept"})


def _check_shares_none(table: Table) -> None:
    refuse_shared_rows(table.name, table.config.admission, "a state dict")


def _as_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()


def _slot_widths(table: Table) -> dict[str, int]:
    return dict(store.table_slots(table.name) or [])


def _check_ids(table: Table, ids_N: Tensor) -> None:
    if ids_N.dtype != torch.int64:
        raise TypeError(f'table "{table.name}" takes a state with ids of torch.int64, got {ids_N.dtype}')
    if ids_N.dim() != 1:
        raise ValueError(f'table "{table.name}" takes a state with 1-D ids, got {ids_N.dim()}-D')
    distinct, counts = ids_N.unique(return_counts=True)
    if distinct.numel() != ids_N.numel():
        twice = int(distinct[counts > 1][0])
        raise ValueError(f'the state of table "{table.name}" has the id {twice} more than once')
    bound = table.config.num_embeddings
    outside = distinct[(distinct < 0) | (distinct >= bound)] if bound is not None else distinct[:0]
    if outside.numel() > 0:
        raise IndexError(
            f'the state of table "{table.name}" has the id {int(outside[0])}, outside [0, {bound}), its num_embeddings'
        )
    check_owned(table, ids_N)


def _check_finite(table: Table, ids_N: Tensor, rows_ND: Tensor) -> None:
    is_finite_N = rows_ND.isfinite().all(dim=1)
    if not bool(is_finite_N.all()):
        position = int(is_finite_N.logical_not().nonzero()[0])
        raise ValueError(
            f'the state of table "{table.name}" has a row that is not finite, of the id {int(ids_N[position])} at '
            f"position {position}"
        )


def _rule(table: Table) -> dict[str, Any]:
    """The optimizer of a table, as the store describes it, without what may differ between two openings."""
    description = store.describe_table(table.name)
    if description is None:
        raise RuntimeError(f'table "{table.name}" was dropped')
    rule = TableConfig.from_json(description[1]).optimizer
    # FTRL calls its learning rate alpha.
    tunable = _TUNABLE | ({"alpha"} if rule["kind"] == "ftrl" else set())
    return {key: value for key, value in rule.items() if key not in tunable}


def _check_rule(table: Table, progress: dict[str, Any]) -> None:
    own = _rule(table)
    found = progress.get("optimizer", own)
    if not isinstance(found, dict):
        raise TypeError(f'the optimizer in the state of table "{table.name}" must be a dict, got {_shown(found)}')
    if found != own:
        raise ValueError(
            f"the state is of the optimizer {_differing(found, own)}, table "
            f'"{table.name}" has {_differing(own, found)}: open the table with the optimizer of the state'
        )


def _differing(rule: dict[str, Any], other: dict[str, Any]) -> str:
    """The kind of a rule and those of its options that another one has not, in words."""
    options = [f"{key}={value}" for key, value in rule.items() if key != "kind" and other.get(key) != value]
    return " with ".join([str(rule.get("kind")), *filter(None, [", ".join(options)])])


def _check_slots(table: Table, ids_N: Tensor, slots: dict[str, Any]) -> None:
    widths = _slot_widths(table)
    if set(slots) != set(widths):
        raise ValueError(
            f'the optimizer of table "{table.name}" has the slots {sorted(widths)}, got the state of {sorted(slots)}'
        )
    for name, width in widths.items():
        slot, expected = slots[name], (ids_N.numel(), width)
        if not isinstance(slot, Tensor) or slot.dtype != torch.float32:
            raise TypeError(f'slot "{name}" of table "{table.name}" is a float32 tensor, got {_shown(slot)}')
        if slot.shape != expected:
            raise ValueError(f'slot "{name}" of table "{table.name}" has the shape {expected}, got {tuple(slot.shape)}')
        if table.config.nan_policy == "error":
            _check_values(table, ids_N, name, slot)


def _check_values(table: Table, ids_N: Tensor, name: str, slot: Tensor) -> None:
    """Checks that no value of a slot is one that steps of finite gradients do not leave."""
    # A rule of the program's own may mean anything by such a name.
    is_square = name in _NEVER_NEGATIVE and table.config.optimizer.get("kind") != "rule"
    is_wrong = slot.isfinite().logical_not() | (slot < 0) if is_square else slot.isfinite().logical_not()
    if bool(is_wrong.any()):
        place = is_wrong.nonzero()[0]
        raise ValueError(
            f'slot "{name}" of table "{table.name}" must be finite{" and not negative" if is_square else ""}, '
            f"got {slot[tuple(place)].item()} for the id {int(ids_N[place[0]])}"
        )


def _check_progress(table: Table, progress: dict[str, Any]) -> None:
    expected = _progress_of(table)
    if set(progress) != expected:
        raise ValueError(
            f'the state of table "{table.name}" must have {sorted(expected)} beside its slots, got {sorted(progress)}'
        )
    step, was_set = progress["step"], progress["learning_rate_was_set"]
    # `isinstance` would take a bool for a step.
    if type(step) is not int or not 0 <= step < 2**63:
        raise ValueError(f'the step of table "{table.name}" must be an int from 0 on, got {step!r}')
    if type(was_set) is not bool:
        raise ValueError(f'learning_rate_was_set of table "{table.name}" must be a bool, got {was_set!r}')
    for key in ("learning_rate", "group_lr"):
        if not isinstance(progress[key], int | float):
            raise ValueError(f'{key} of table "{table.name}" must be a number, got {progress[key]!r}')
        check_learning_rate(progress[key], table.name)


def _shown(value: Any) -> str:
    """A value in a few words, for a message."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
