"""What a rank makes of the rows that it got: rows of ids, and sums, means and maxima of bags.

Shape suffixes: N ids, U distinct ids, B bags, D dim.
"""

from torch import Tensor
from torch.nn import functional

from recstore_ops.sharding.rows import Rows


def spread_rows(rows: Rows) -> Tensor:
    """The row of each id, `[..., D]`; `backward` sums the gradients of equal ids in input order."""
    return functional.embedding(rows.places, rows.rows, padding_idx=rows.padding_place)


def pool_rows(rows: Rows, offsets: Tensor, mode: str, weights_N: Tensor | None) -> Tensor:
    """Pools the rows of bags, `[B, D]`.

    Args:
        rows: of ids `[N]`.
        offsets: int64, `[B + 1]`.
        mode: `sum`, `mean` or `max`.
        weights_N: factors of the rows of a sum.
    """
    return functional.embedding_bag(
        rows.places,
        rows.rows,
        offsets,
        mode=mode,
        per_sample_weights=weights_N,
        include_last_offset=True,
        padding_idx=rows.padding_place,
    )


def check_offsets(name: str, ids_N: Tensor, offsets: Tensor) -> None:
    """Checks where bags begin and end, before anything is sent.

    Raises:
        ValueError: the offsets do not rise from zero to the number of ids.
    """
    if offsets.numel() == 0:
        raise ValueError(f'table "{name}": offsets must hold at least the end of the last bag, got none')
    first, last = int(offsets[0]), int(offsets[-1])
    if (first, last) != (0, ids_N.numel()) or bool((offsets.diff() < 0).any()):
        raise ValueError(
            f'table "{name}": offsets must rise from 0 to the number of ids, {ids_N.numel()}; '
            f"got offsets from {first} to {last}"
        )
