"""Ids that carry their field, for formats whose columns are fields.

    id = field << 40 | value        value in [0, 2**40)
    id = field << 40 | 1 << 32      the value is missing

No two fields share a row of a table, so that one table serves all of them. The 32 bits of a hexadecimal value stay
readable in the id. No pass over the rows numbers the values beforehand, because tables take any int64.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

VALUE_BITS = 40
MISSING = 1 << 32
_VALUE_MASK = (1 << VALUE_BITS) - 1


def field_ids(values_BF: NDArray[np.int64], first_field: int = 0) -> NDArray[np.int64]:
    """Returns the ids [B, F] of the values of F consecutive fields; the lower 40 bits of each value count."""
    fields_F = np.arange(first_field, first_field + values_BF.shape[1], dtype=np.int64)
    ids_BF = values_BF & _VALUE_MASK
    ids_BF |= fields_F << VALUE_BITS
    return ids_BF
