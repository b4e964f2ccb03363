"""The keys of a table in the state of a model: `<module>.ids`, `<module>.rows` and `<module>.ids_check`.

All are tensors, so that what goes over the values of a state dict, such as `v.cpu()` or safetensors, takes them as it
takes parameters. A state may lack the check; if it is there, the ids are compared with it. The weight of an
`nn.Embedding` or `nn.EmbeddingBag` is read too, as the rows of the ids 0, 1, 2 and so on, and so is the pair under
`_extra_state` that states held before.
"""

import json
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor

from recstore_ops.config.row_types import VALUE_TYPES
from recstore_ops.sharding.ownership import own_ids
from recstore_ops.state.ids_check import are_ids_as_saved, check_of_ids
from recstore_ops.state.rows import are_tables_left_out, check_rows, replace_rows, table_rows
from recstore_ops.table.checks import ROW_TYPES
from recstore_ops.table.copied_values import CopiedValues
from recstore_ops.table.table import Table

_KEYS = _IDS, _ROWS, _WEIGHT, _PAIR = "ids", "rows", "weight", "_extra_state"

_CHECK = "ids_check"
"""The key of the check of the ids, which no state needs to have."""


class StateTensor(CopiedValues):
    """A tensor of a state whose size changes as a table grows. Writes to it would change no table, and are refused.

    `torch.distributed.checkpoint` reads tensors into tensors of the same size; this it saves and loads as one value of
    any size. In files it is an ordinary tensor.
    """

    def _new(self, values: Tensor) -> Tensor:
        # A clone may be changed, and is still of no fixed size to `torch.distributed.checkpoint`.
        return values.as_subclass(StateTensor) if values.layout == torch.strided else values

    def __create_write_items__(self, name: str, value: Any) -> list[Any]:
        # Private in torch, and imported here: only saves by `torch.distributed.checkpoint` come this way.
        from torch.distributed.checkpoint.planner_helpers import _create_write_item_for_bytesio

        return [_create_write_item_for_bytesio(name, value)]


def add_rows(table: Table, state: MutableMapping[str, Any], prefix: str) -> None:
    """Adds a table's rows to the state of a model, unless tables are left out."""
    if not are_tables_left_out():
        ids_N, rows_ND = table_rows(table)
        for key, values in ((_IDS, ids_N), (_ROWS, rows_ND), (_CHECK, check_of_ids(ids_N))):
            state[prefix + key] = Tensor._make_subclass(StateTensor, values).refusing(
                f'"{prefix}{key}" of a state: it is a copy, which changes no row of table "{table.name}"; change a '
                "clone and give that to load_state_dict, or average models by torch.optim.swa_utils"
            )


def keys_of(prefix: str) -> list[str]:
    """The keys of a table in a state, behind the prefix of its module."""
    return [prefix + key for key in (_IDS, _ROWS, _CHECK)]


def check_state(table: Table, state: MutableMapping[str, Any], prefix: str) -> bool:
    """Checks what a state holds of a table, and returns whether it holds anything; raises as `load_rows`."""
    return _is_found(table, state, prefix, check_rows)


def load_rows(
    table: Table, state: MutableMapping[str, Any], prefix: str, missing: list[str], unexpected: list[str]
) -> None:
    """Gives a table the rows that a state holds and no others; nothing changes on an error.

    Args:
        table: the table.
        state: of a model.
        prefix: of the keys of the table's module.
        missing: gets the keys that the state lacks.
        unexpected: loses those that are read here.

    Raises:
        ValueError: ids without rows or rows without ids, the rows in several forms, or a weight of another size; or
            ids that are not those of the state's check.
        TypeError: a weight that is no floating point tensor, or a check that is none of int64.
        As `recstore_ops.state.replace_rows`.
    """
    if are_tables_left_out():
        own = [prefix + key for key in (*_KEYS, _CHECK)]
    else:
        own = [prefix + key for key in (*_found(state, prefix), _CHECK)]
        if not _is_found(table, state, prefix, replace_rows):
            missing.extend((prefix + _IDS, prefix + _ROWS))
    unexpected[:] = [key for key in unexpected if key not in own]


def _found(state: MutableMapping[str, Any], prefix: str) -> dict[str, Any]:
    """The entries of a state for a table."""
    found = {key: state[prefix + key] for key in _KEYS if prefix + key in state}
    if len(found) > 1:
        found.pop(_PAIR, None)  # A derived class may have an extra state of its own.
    return found


def _is_found(table: Table, state: MutableMapping[str, Any], prefix: str, use: Callable[[Table, Any], object]) -> bool:
    """Whether a state has a table's rows, which are handed to `use` as `(ids, rows)`."""
    match found := _found(state, prefix):
        case {"ids": ids, "rows": rows} if len(found) == 2:
            use(table, (_ids_as_saved(table, ids, state, prefix), rows))
        case {"weight": weight} if len(found) == 1:
            use(table, _rows_of_matrix(table, prefix + _WEIGHT, weight))
        case {"_extra_state": pair}:
            use(table, pair)
        case {}:
            if found:
                raise ValueError(
                    f'table "{table.name}" takes "{prefix}ids" with "{prefix}rows", or "{prefix}weight" alone; '
                    "the state has " + " and ".join(f'"{prefix}{key}"' for key in found)
                )
    return bool(found)


def _ids_as_saved(table: Table, ids: Any, state: MutableMapping[str, Any], prefix: str) -> Any:
    """Compares ids with the check that a state has of them, if it has one; what are no ids is refused elsewhere.

    A mean of states may leave both as floating point numbers: by the check the ids are right, or refused.
    """
    check = state.get(prefix + _CHECK)
    if check is None or not isinstance(ids, Tensor) or not (ids.dtype == torch.int64 or ids.is_floating_point()):
        return ids
    if not isinstance(check, Tensor) or not (check.dtype == torch.int64 or check.is_floating_point()):
        found = check.dtype if isinstance(check, Tensor) else type(check).__name__
        raise TypeError(f'table "{table.name}" takes a tensor of torch.int64 as "{prefix}{_CHECK}", got {found}')
    whole = ids.detach().cpu().to(torch.int64)
    is_changed = ids.is_floating_point() and not torch.equal(whole.to(ids.dtype), ids.detach().cpu())
    if is_changed or not are_ids_as_saved(whole, check.detach().cpu().to(torch.int64)):
        raise ValueError(
            f'table "{table.name}": "{prefix}{_IDS}" has other ids than "{prefix}{_CHECK}" was made of: a mean of '
            "states, or float32 on the way, makes other ids of those above 2**24. Average the rows and keep the ids of "
            f'one state; where ids were changed on purpose, leave "{prefix}{_CHECK}" out'
        )
    return whole


def tensor_of_names(names: Iterable[str]) -> Tensor:
    """Names as a state holds them: a list in JSON, its UTF-8 as uint8 `[bytes]`."""
    text = bytearray(json.dumps(list(names)), "utf-8")
    return torch.frombuffer(text, dtype=torch.uint8).clone().as_subclass(StateTensor)


def names_in(state: Any) -> list[str]:
    """The names that a state holds, also as a tuple, as it did before.

    Raises:
        TypeError: something else.
    """
    if isinstance(state, tuple | list):
        return list(state)
    if not isinstance(state, Tensor) or state.dtype != torch.uint8:
        found = state.dtype if isinstance(state, Tensor) else type(state).__name__
        raise TypeError(f"the names of tables in a state are a tensor of torch.uint8, got {found}")
    return json.loads(bytes(state.tolist()))


def _rows_of_matrix(table: Table, key: str, weight: Any) -> tuple[Tensor, Tensor]:
    """The ids and rows of a matrix whose row i belongs to id i; for a sharded table, those of this rank."""
    if not isinstance(weight, Tensor) or weight.dtype not in ROW_TYPES:
        found = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        raise TypeError(
            f'table "{table.name}" takes a tensor of {", ".join(map(str, ROW_TYPES))} as "{key}", got {found}'
        )
    size = table.config.num_embeddings
    expected = ("any number" if size is None else size, table.dim)
    if weight.dim() < 2 or weight[:1].numel() not in (0, table.dim) or size not in (None, weight.shape[0]):
        raise ValueError(
            f'table "{table.name}" takes {expected[0]} rows of dim {expected[1]} as "{key}", '
            f"got a tensor of shape {tuple(weight.shape)}"
        )
    ids_N = torch.arange(weight.shape[0], dtype=torch.int64, device="cpu")
    is_own_N = own_ids(table, ids_N)
    rows_ND = weight.detach().cpu().reshape(ids_N.numel(), table.dim)[is_own_N]
    return ids_N[is_own_N], rows_ND.to(VALUE_TYPES[table.config.dtype])
