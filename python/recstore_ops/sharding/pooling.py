"""What a rank makes of the rows that it got: rows of ids, and sums, means and maxima of bags.

Shape suffixes: N ids, U distinct ids, B bags, D dim.
"""

import torch
from torch import Tensor
from torch.nn import functional

from recstore_ops.sharding.rows import Rows


def spread_rows(rows: Rows, scale_grad_by_freq: bool = False) -> Tensor:
    """The row of each id, `[..., D]`; `backward` sums the gradients of equal ids in input order."""
    return functional.embedding(
        rows.places, rows.rows, padding_idx=rows.padding_place, scale_grad_by_freq=scale_grad_by_freq
    )


def pool_rows(
    rows: Rows, offsets: Tensor, mode: str, weights_N: Tensor | None, scale_grad_by_freq: bool = False
) -> Tensor:
    """Pools the rows of bags, `[B, D]`.

    Args:
        rows: of ids `[N]`.
        offsets: int64, `[B + 1]`.
        mode: `sum`, `mean` or `max`.
        weights_N: factors of the rows of a sum.
        scale_grad_by_freq: whether gradients are divided by how often their id occurs here.
    """
    if scale_grad_by_freq:
        rows = _each_apart(rows)
    return functional.embedding_bag(
        rows.places,
        rows.rows,
        offsets,
        mode=mode,
        per_sample_weights=weights_N,
        include_last_offset=True,
        padding_idx=rows.padding_place,
    )


def _each_apart(rows: Rows) -> Rows:
    """A row for each place, whose gradients are scaled by frequency: torch scales those of bags by wrong counts."""
    places_N = torch.arange(rows.places.numel(), dtype=torch.int64, device=rows.places.device)
    padding_place = None
    if rows.padding_place is not None:
        is_padding_N = rows.places.reshape(-1) == rows.padding_place
        padding_place = int(is_padding_N.to(torch.uint8).argmax())
        places_N = torch.where(is_padding_N, padding_place, places_N)
    spread_ND = spread_rows(rows, scale_grad_by_freq=True).reshape(places_N.numel(), -1)
    return Rows(spread_ND, places_N.view(rows.places.shape), padding_place)


def check_offsets(name: str, ids_N: Tensor, offsets: Tensor) -> None:
    """Checks where bags begin and end, before anything is sent.

    Raises:
        ValueError: the offsets do not rise from zero to the number of ids.
    """
    fault = _fault(offsets, ids_N.numel())
    if fault is not None:
        raise ValueError(f'table "{name}": offsets must {fault}')


def _fault(offsets: Tensor, num_ids: int) -> str | None:
    """What is wrong with offsets, in the words of `emb_bag`."""
    if offsets.numel() == 0:
        return "hold at least the end of the last bag, got none"
    first, last, differences = int(offsets[0]), int(offsets[-1]), offsets.diff()
    if first != 0:
        return f"start at 0, got {first}"
    if bool((differences < 0).any()):
        if bool((offsets > num_ids).any()):
            place = int((offsets > num_ids).nonzero()[0])
            return f"not exceed the number of ids, {num_ids}, got {int(offsets[place])} at position {place}"
        place = int((differences < 0).nonzero()[0])
        return f"not fall, got {int(offsets[place + 1])} after {int(offsets[place])} at position {place + 1}"
    return None if last == num_ids else f"end at the {num_ids} ids, got {last}"
