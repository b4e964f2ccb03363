"""What `state_dict` holds of tables: their rows by id, and beside an optimizer its slots by id.

A table's rows are `ids`, int64 `[N]`, rising, and `rows`, `[N, dim]` in the table's row type: two tensors under keys of
their own, which `torch.save`, `torch.load(weights_only=True)`, safetensors and whatever goes over the values of a state
take as they take parameters. `load_state_dict` does not compare their shape with the module's: tables grow, so a state
seldom has as many rows as the module that loads it.

What an optimizer keeps is `(ids, slots, progress)`, in a tuple too: int64 `[N]`, empty where the optimizer has no
slots; float32 `[N, width]` by the slot's name; and `step`, `learning_rate`, `learning_rate_was_set`, `group_lr` and
`optimizer`, the kind and the options but learning rate and weight decay, with `catch_up` of weight decay also
`idle_kept`, a fraction and an exponent of two.

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
