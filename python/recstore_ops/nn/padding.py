"""Padding ids of a lookup: one, or several that stand for it.

Operators take one padding id. If there are several, each occurrence of any is handed to them as the first.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from recstore_ops.ops import operators
from recstore_ops.ops.integers import as_int
from recstore_ops.table.table import Table

PaddingIdx = int | Sequence[int] | None
"""An id that gets no gradient, several, or none."""


def padding_ids(padding_idx: PaddingIdx) -> tuple[int, ...]:
    """All padding ids, each once, in the order given.

    Raises:
        TypeError: something else than integers.
    """
    if padding_idx is None:
        return ()
    ids = padding_idx if isinstance(padding_idx, Iterable) else (padding_idx,)
    return tuple(dict.fromkeys([as_int("padding_idx must be an integer, or several", id) for id in ids]))


def with_one_padding(ids: Tensor, padding_idx: PaddingIdx) -> tuple[Tensor, int | None]:
    """Returns ids with the first padding id in the place of the others, and that."""
    paddings = padding_ids(padding_idx)
    if len(paddings) < 2:
        return ids, paddings[0] if paddings else None
    ids = _signed(ids)
    return torch.where(_matches(ids, paddings).any(-1), paddings[0], ids), paddings[0]


def with_rows_of_padding(rows: Tensor, ids: Tensor, table: Table, padding_idx: PaddingIdx) -> Tensor:
    """Gives each of several padding ids its own row; a lookup gives all of them the row of the first.

    Args:
        rows: `[..., D]`.
        ids: as they came, `[...]`.
        table: whose rows they are.
        padding_idx: several ids.
    """
    paddings = padding_ids(padding_idx)
    matches = _matches(_signed(ids), paddings)
    ids_K = torch.tensor(paddings, dtype=torch.int64, device=ids.device)
    rows_KD = operators.emb_read(table.handle, ids_K, table.dim)
    own = rows_KD[matches.to(torch.uint8).argmax(-1)]
    return torch.where(matches.any(-1).unsqueeze(-1), own, rows)


def _matches(ids: Tensor, paddings: tuple[int, ...]) -> Tensor:
    """Whether each id equals each padding id, bool `[..., K]`."""
    return ids.unsqueeze(-1) == torch.tensor(paddings, dtype=torch.int64, device=ids.device)


def _signed(ids: Tensor) -> Tensor:
    return ids.view(torch.int64) if ids.dtype == torch.uint64 else ids
