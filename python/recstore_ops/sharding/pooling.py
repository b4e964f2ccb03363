"""Computes results from the rows that a rank received: rows of ids, and sums, means and maxima of bags.

Shape suffixes: N ids, U distinct ids, B bags, D dim.
"""

import torch
from torch import Tensor
from torch.nn import functional

from recstore_ops.sharding.rows import Rows
from recstore_ops.sparse._bags import bag_of_each
from recstore_ops.sparse.transforms import is_transformed


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

    Raises:
        RuntimeError: maxima under a transform of `torch.func`.
    """
    if scale_grad_by_freq:
        rows = _each_apart(rows)
    if is_transformed():
        return _pooled_under_transforms(rows, offsets, mode, weights_N)
    return functional.embedding_bag(
        rows.places,
        rows.rows,
        offsets,
        mode=mode,
        per_sample_weights=weights_N,
        include_last_offset=True,
        padding_idx=rows.padding_place,
    )


def _pooled_under_transforms(rows: Rows, offsets: Tensor, mode: str, weights_N: Tensor | None) -> Tensor:
    """The same of torch's operators that transforms go through, as they do not through its `embedding_bag`."""
    if mode == "max":
        raise RuntimeError(
            "a transform of torch.func does not go through the maxima of sharded bags; look them up before"
        )
    counted_N = None if rows.padding_place is None else rows.places != rows.padding_place
    bag_N = bag_of_each(rows.places, offsets)
    return sum_bags(rows.rows[rows.places], bag_N, offsets.shape[0] - 1, mode == "mean", counted_N, weights_N)


def sum_bags(
    rows_ND: Tensor, bag_N: Tensor, bags: int, is_mean: bool, counted_N: Tensor | None, weights_N: Tensor | None
) -> Tensor:
    """Sums or means of the rows of bags, `[B, D]`, of operators that every transform of `torch.func` goes through.

    Args:
        rows_ND: the row of each id.
        bag_N: its bag.
        bags: B.
        is_mean: whether sums are divided by the numbers of ids.
        counted_N: which ids count; all by default.
        weights_N: factors of the rows of a sum.
    """
    ones_N = torch.ones(bag_N.shape, dtype=torch.float32, device=bag_N.device)
    counts_N = ones_N if counted_N is None else counted_N.to(torch.float32)
    factors_N = counts_N if weights_N is None else counts_N * weights_N
    zeros_BD = torch.zeros((bags, rows_ND.shape[-1]), dtype=torch.float32, device=bag_N.device)
    sums_BD = zeros_BD.index_add(0, bag_N, rows_ND * factors_N.unsqueeze(-1))
    if not is_mean:
        return sums_BD
    sizes_B = zeros_BD[:, 0].index_add(0, bag_N, counts_N)
    # An empty bag has the sum 0, and 0 / 1 instead of 0 / 0.
    return sums_BD / sizes_B.clamp(min=1).unsqueeze(-1)


def _each_apart(rows: Rows) -> Rows:
    """A row for each place, whose gradients are scaled by frequency: torch scales those of bags by wrong counts."""
    places_N = torch.arange(rows.places.numel(), dtype=torch.int64, device=rows.places.device)
    padding_place = None
    if rows.padding_place is not None:
        is_padding_N = rows.places.reshape(-1) == rows.padding_place
        padding_place = int(is_padding_N.to(torch.uint8).argmax())
        # All padding ids share the first one's place, for `embedding_bag` knows only one.
        places_N = torch.where(is_padding_N, padding_place, places_N)
    spread_ND = spread_rows(rows, scale_grad_by_freq=True).reshape(places_N.numel(), -1)
    return Rows(spread_ND, places_N.view(rows.places.shape), padding_place)


def check_offsets(name: str, ids_N: Tensor, offsets: Tensor) -> None:
    """Checks the beginnings and ends of bags before anything is sent.

    Raises:
        ValueError: the offsets do not rise from zero to the number of ids.
    """
    fault = _fault(offsets, ids_N.numel())
    if fault is not None:
        raise ValueError(f'table "{name}": offsets must {fault}')


def _fault(offsets: Tensor, num_ids: int) -> str | None:
    """The error of offsets, in the words of `emb_bag`; None if they are valid."""
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
