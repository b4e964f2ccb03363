"""Tables in `state_dict`: their rows by id, and beside an optimizer its slots by id.

A table's rows are two tensors under keys of their own: `ids`, int64 `[N]`, rising, and `rows`, `[N, dim]` in the
table's row type. A third, `ids_check`, int64 `[32]`, shows whether a mean of states changed ids; a state may lack it.
`torch.save`, `torch.load(weights_only=True)`, safetensors and other code that goes over the values of a state take them
as they take parameters. `load_state_dict` does not compare their shape with the module's: tables
grow, so a state seldom has as many rows as the module that loads it.

The state of an optimizer is the tuple `(ids, slots, progress)`. `ids` is int64 `[N]`, empty if the optimizer has no
slots. `slots` has float32 `[N, width]` by the slot's name. `progress` has `step`, `learning_rate`,
`learning_rate_was_set`, `group_lr` and `optimizer`: the kind and the options without learning rate and weight decay.
With `catch_up` of weight decay it also has `idle_kept`, a fraction and an exponent of two.

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
