"""Whether the keys of a batch and its numbers for each key fit together."""

from typing import Any

import torch
from torch import Tensor

from recstore_ops.sparse._bags import check_bags, may_keep


def accept_batch(batch: Any) -> None:
    """Refuses bags, keys, strides and kept numbers of a `KeyedJaggedTensor` that do not fit together.

    A batch of no features and no bags need not say so: it is given lengths and offsets.
    """
    if not batch._keys and batch._lengths is None and batch._offsets is None:
        batch._lengths = torch.empty(0, dtype=torch.int32, device=batch._values.device)
    check_bags(batch._values, batch._lengths, batch._offsets, 2)
    keys, stride, strides_FR = batch._keys, batch._stride, batch._stride_per_key_per_rank
    bags = batch._num_bags()
    if may_keep() and bags == 0 and batch._offset_per_key is None:
        batch._offset_per_key = [0] * (len(keys) + 1)  # There may be no offset to look them up in.
    if batch._index_per_key is None and len(set(keys)) < len(keys):
        raise ValueError(f"keys must be distinct, got {keys}")
    for name in ("stride_per_key", "length_per_key", "offset_per_key", "lengths_offset_per_key"):
        given, needed = getattr(batch, f"_{name}"), len(keys) + ("offset" in name)
        if given is not None and len(given) != needed:
            raise ValueError(f"{name} must hold {needed} numbers for {len(keys)} keys, got {len(given)}")
    if strides_FR is not None:
        _check_strides(keys, bags, strides_FR)
        return
    if bags // max(len(keys), 1) * len(keys) != bags:
        raise ValueError(f"{bags} bags cannot be shared out over {len(keys)} keys")
    if stride is not None and stride * len(keys) != bags:
        raise ValueError(f"{len(keys)} keys with a stride of {stride} need {stride * len(keys)} bags, got {bags}")


def _check_strides(keys: list[str], bags: int, strides_FR: Tensor) -> None:
    if not keys or torch.compiler.is_compiling():
        return
    if strides_FR.dim() != 2 or strides_FR.shape[0] != len(keys):
        raise ValueError(
            f"stride_per_key_per_rank must be [{len(keys)}, ranks] for {len(keys)} keys, "
            f"got the shape {tuple(strides_FR.shape)}"
        )
    needed = int(strides_FR.sum())
    if needed != bags:
        raise ValueError(f"strides of {needed} examples in all need as many bags, got {bags}")


def check_places(indices: list[int], indices_tensor: Tensor | None, count: int) -> None:
    """Refuses places that are not among `count`, and a tensor that holds others. TorchScript compiles it."""
    if len(indices) > 0 and (min(indices) < 0 or max(indices) >= count):
        raise ValueError(f"indices must be within [0, {count}), got {indices}")
    if indices_tensor is not None and not torch.equal(
        indices_tensor.to(torch.int64), torch.tensor(indices, dtype=torch.int64, device=indices_tensor.device)
    ):
        raise ValueError(f"indices_tensor must hold the indices {indices}, got {indices_tensor}")


def last_places(keys: list[str]) -> dict[str, int]:
    """The place of each key, of one that comes twice the last. TorchScript compiles it."""
    return {key: index for index, key in enumerate(keys)}


def places_of_joined(keys_of_each: list[list[str]]) -> dict[str, int]:
    """The place of each key of batches one after the other, none of them in two batches. TorchScript compiles it."""
    places: dict[str, int] = {}
    first = 0
    for keys in keys_of_each:
        for key, index in last_places(keys).items():
            if key in places:
                raise ValueError(f"keys must be distinct, got {key} in two batches, of the keys {keys_of_each}")
            places[key] = first + index
        first += len(keys)
    return places
