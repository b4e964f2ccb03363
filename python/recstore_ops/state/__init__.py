"""What `state_dict` holds of tables: their rows by id, and beside an optimizer its slots by id.

A table's rows are `(ids, rows)`: int64 `[N]`, rising, and `[N, dim]` in the table's row type. They come as a module's
*extra state*, in a tuple. `torch.save`, `torch.load(weights_only=True)` and `load_state_dict(strict=True)` take extra
state as they take parameters, but do not compare its shape: tables grow, so a state seldom has as many rows as the
module that loads it. For the same reason it is a tuple: `torch.distributed.checkpoint` takes tensors apart from dicts
and lists and reads them into tensors of the same size; a tuple it saves and loads as one value of any size.

What an optimizer keeps is `(ids, slots, progress)`, in a tuple too: int64 `[N]`, empty where the optimizer has no
slots; float32 `[N, width]` by the slot's name; and `step`, `learning_rate`, `learning_rate_was_set` and `group_lr`.

Shape suffixes: N ids, D dim.
"""

from recstore_ops.state.rows import (
    OptimizerState,
    TableRows,
    are_tables_left_out,
    check_rows,
    native_state,
    optimizer_state,
    replace_rows,
    table_rows,
    tables_left_out,
)

__all__ = [
    "OptimizerState",
    "TableRows",
    "are_tables_left_out",
    "check_rows",
    "native_state",
    "optimizer_state",
    "replace_rows",
    "table_rows",
    "tables_left_out",
]
