"""Whether the keys of a batch and its numbers for each key fit together."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from recstore_ops.sparse._bags import bounds_of, check_bags, may_keep, offsets_of
from recstore_ops.sparse.keyed_parts import examples_of

_NONE_TOLD = (None,) * 4


def _is_graph() -> bool:
    """Whether numbers belong to an example only, and reading them is not recorded."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


def check_keys(keys: Any) -> None:
    """Refuses keys that are no strings, and one string in place of a list.

    Raises:
        TypeError: they are that.
    """
    if torch.compiler.is_compiling():
        return
    if isinstance(keys, str):
        raise TypeError(f'keys must be a list of str, got the str "{keys}"')
    # The usual case without a loop in Python; the loop lets subclasses of str pass.
    if set(map(type, keys)) <= {str}:
        return
    for place, key in enumerate(keys):
        if not isinstance(key, str):
            raise TypeError(f"keys must be a list of str, got {type(key).__name__} at place {place}")


def accept_batch(batch: Any) -> None:
    """Refuses bags, keys, strides and kept numbers of a `KeyedJaggedTensor` that do not fit together.

    A batch of no features and no bags need not say so: it is given lengths and offsets.
    """
    if not batch._keys and batch._lengths is None and batch._offsets is None:
        batch._lengths = torch.empty(0, dtype=torch.int32, device=batch._values.device)
    check_bags(batch._values, batch._lengths, batch._offsets, 2)
    keys, bags = batch._keys, batch._num_bags()
    if may_keep() and bags == 0 and batch._offset_per_key is None:
        batch._offset_per_key = [0] * (len(keys) + 1)  # There may be no offset to look them up in.
    check_index(keys, batch._index_per_key)
    strides = _equal_strides(batch, bags) if batch._stride_per_key_per_rank is None else _own_strides(batch, bags)
    told = (batch._stride_per_key, batch._length_per_key, batch._offset_per_key, batch._lengths_offset_per_key)
    if told != _NONE_TOLD:
        _check_counts(batch)
        _check_told(batch, strides)
    if batch._inverse_indices is not None:
        # While a program is compiled there are no strides, so that the two lengths differ.
        _check_inverse_indices(batch._inverse_indices, dict(zip(keys, strides, strict=False)))


def _equal_strides(batch: Any, bags: int) -> list[int]:
    """The number of examples of each feature, which all have equally many."""
    count, stride = len(batch._keys), batch._stride
    if bags // max(count, 1) * count != bags:
        raise ValueError(f"{bags} bags cannot be shared out over {count} keys")
    if stride is not None and stride < 0:
        raise ValueError(f"stride must not be negative, got {stride}")
    if stride is not None and stride * count != bags:
        raise ValueError(f"{count} keys with a stride of {stride} need {stride * count} bags, got {bags}")
    return [bags // max(count, 1)] * count


def _own_strides(batch: Any, bags: int) -> list[int]:
    """The number of examples of each feature, if each has its own. A batch from `empty_like` has them without keys."""
    keys, strides_FR = batch._keys, batch._stride_per_key_per_rank
    if not keys or torch.compiler.is_compiling():
        return []
    if strides_FR.dim() != 2 or strides_FR.shape[0] != len(keys):
        raise ValueError(
            f"stride_per_key_per_rank must be [{len(keys)}, ranks] for {len(keys)} keys, "
            f"got the shape {tuple(strides_FR.shape)}"
        )
    strides = strides_FR.sum(dim=1).tolist()
    if strides_FR.is_cpu and strides_FR.numel() and (least := int(strides_FR.min())) < 0:
        raise ValueError(f"stride_per_key_per_rank must not be negative, got {least}")
    if sum(strides) != bags:
        raise ValueError(f"strides of {sum(strides)} examples in all need as many bags, got {bags}")
    if batch._stride is not None:
        _check_equal("stride", batch._stride, examples_of(strides_FR, batch._inverse_indices))
    return strides


def _check_counts(batch: Any) -> None:
    count = len(batch._keys)
    for name in ("stride_per_key", "length_per_key", "offset_per_key", "lengths_offset_per_key"):
        given, needed = getattr(batch, f"_{name}"), count + ("offset" in name)
        if given is not None and len(given) != needed:
            raise ValueError(f"{name} must hold {needed} numbers for {count} keys, got {len(given)}")


def _check_told(batch: Any, strides: list[int]) -> None:
    """Refuses numbers of each key that are not those of the bags."""
    if _is_graph():
        return
    bags = bounds_of(strides)
    _check_equal("stride_per_key", batch._stride_per_key, strides)
    _check_equal("lengths_offset_per_key", batch._lengths_offset_per_key, bags)
    sizes, bounds = batch._length_per_key, batch._offset_per_key
    if sizes is None and bounds is None:
        return
    if batch._values.is_cpu:
        found = _bounds(batch, bags)
    else:
        # A look at offsets elsewhere would wait for their device, so only what was given is compared.
        found = bounds if sizes is None else bounds_of(sizes)
        _check_bounds(found, batch._values.shape[0])
    _check_equal("length_per_key", sizes, [end - start for start, end in pairwise(found)])
    _check_equal("offset_per_key", bounds, found)


def _bounds(batch: Any, bags: list[int]) -> list[int]:
    """The start of each feature's ids, looked up in offsets or summed up, and not cached."""
    if not bags[-1]:
        return [0] * len(bags)
    if batch._offsets is None and batch._stride_per_key_per_rank is None:
        return bounds_of(batch._lengths.reshape(len(bags) - 1, -1).sum(dim=1).tolist())
    bounds: list[int] = offsets_of(batch._lengths, batch._offsets)[bags].tolist()
    return bounds


def _check_bounds(bounds: list[int], count: int) -> None:
    if bounds[0] != 0 or bounds[-1] > count or sorted(bounds) != bounds:
        raise ValueError(f"the features must lie within the {count} values, from 0 on, got {bounds} as their bounds")


def _check_inverse_indices(inverse_indices: tuple[list[str], Tensor], strides: dict[str, int]) -> None:
    names, indices_FB = inverse_indices
    if _is_graph() or not indices_FB.numel():
        return
    if indices_FB.dim() != 2 or indices_FB.shape[0] != len(names):
        raise ValueError(f"inverse_indices must be [{len(names)}, examples], got the shape {tuple(indices_FB.shape)}")
    # A look at numbers on another device would wait for it.
    if not indices_FB.is_cpu:
        return
    least, most = indices_FB.aminmax(dim=1)
    for name, low, high in zip(names, least.tolist(), most.tolist(), strict=True):
        stride = strides.get(name, high + 1)
        if low < 0 or high >= stride:
            got = low if low < 0 else high
            raise ValueError(f'inverse indices of the feature "{name}" must be within [0, {stride}), got {got}')


def _check_equal(name: str, given: Any, needed: Any) -> None:
    if given is not None and given != needed:
        raise ValueError(f"{name} must be {needed}, by the bags and strides, got {given}")


def check_index(keys: list[str], index_per_key: dict[str, int] | None) -> None:
    """Refuses a repeated key without given places, and given places that do not belong to the keys.

    Raises:
        ValueError: a key comes twice, or a place belongs to another key or to none.
    """
    distinct = set(keys)
    if index_per_key is None:
        if len(distinct) < len(keys):
            raise ValueError(f"keys must be distinct, got {keys}")
        return
    are_places = all(0 <= place < len(keys) and keys[place] == key for key, place in index_per_key.items())
    if not are_places or len(index_per_key) < len(distinct):
        raise ValueError(f"index_per_key must be the place of each of the keys {keys}, got {index_per_key}")


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
