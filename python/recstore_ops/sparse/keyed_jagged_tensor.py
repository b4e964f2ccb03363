"""`KeyedJaggedTensor`: the sparse features of a batch, a bag of ids for each feature and example.

Shape suffixes: F features, B examples, N ids of all features.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from recstore_ops.sparse._bags import check_values, lengths_and_offsets, moved
from recstore_ops.sparse.jagged_tensor import JaggedTensor


class KeyedJaggedTensor:
    """Bags of values, feature by feature: the bag of feature f and example b is number `f * B + b`.

    Args:
        keys: the names of the F features.
        values: `[N]`: the ids of all bags, one bag after the other.
        weights: `[N]`: a weight for each id.
        lengths: int32 or int64, `[F * B]`: the number of ids of each bag. Lengths or offsets must be given.
        offsets: int32 or int64, `[F * B + 1]`: where each bag starts, and the end of the last one.
        stride: the number of examples B; told by the number of bags where absent.

    Raises:
        TypeError: an argument of another type.
        ValueError: a key twice, shapes that do not fit together, or bags that do not cover the values.

    Examples:
        Two features of three examples; the second example has no `item`:

        >>> features = KeyedJaggedTensor(
        ...     keys=["user", "item"],
        ...     values=torch.tensor([7, 8, 9, 1, 2, 3]),
        ...     lengths=torch.tensor([1, 1, 1, 2, 0, 1]),
        ... )
        >>> features["item"].to_dense()
        [tensor([1, 2]), tensor([], dtype=torch.int64), tensor([3])]
    """

    __module__ = "recstore_ops"

    _lengths_BF: Tensor | None = None

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
    ) -> None:
        check_values(values, weights)
        self._keys = list(keys)
        self._values = values
        self._weights = weights
        self._lengths, self._offsets = lengths_and_offsets(values, lengths, offsets)
        _check_keys(self._keys, self._lengths.shape[0], stride)

    @staticmethod
    def from_offsets_sync(
        keys: Sequence[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
    ) -> "KeyedJaggedTensor":
        """The constructor with offsets, under TorchRec's name."""
        return KeyedJaggedTensor(keys, values, weights, offsets=offsets, stride=stride)

    @staticmethod
    def from_lengths_sync(
        keys: Sequence[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
    ) -> "KeyedJaggedTensor":
        """The constructor with lengths, under TorchRec's name."""
        return KeyedJaggedTensor(keys, values, weights, lengths=lengths, stride=stride)

    @staticmethod
    def from_jt_dict(jt_dict: dict[str, JaggedTensor]) -> "KeyedJaggedTensor":
        """Joins features of equally many examples.

        Raises:
            ValueError: no feature, different numbers of examples, or weights of some features only.
        """
        if not jt_dict:
            raise ValueError("from_jt_dict needs at least one feature")
        sizes = {key: feature.lengths().shape[0] for key, feature in jt_dict.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"features must have equally many examples, got {sizes}")
        features = list(jt_dict.values())
        return KeyedJaggedTensor(
            list(jt_dict),
            torch.cat([feature.values() for feature in features]),
            _joined_weights([feature.weights_or_none() for feature in features]),
            torch.cat([feature.lengths() for feature in features]),
        )

    @staticmethod
    def concat(kjt_list: Sequence["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
        """Joins the features of batches of the same examples.

        Raises:
            ValueError: no batch, different numbers of examples, a key twice, or weights in some batches only.
        """
        if not kjt_list:
            raise ValueError("concat needs at least one KeyedJaggedTensor")
        strides = [batch.stride() for batch in kjt_list]
        if len(set(strides)) > 1:
            raise ValueError(f"batches must have equally many examples, got {strides}")
        keys_of_batches = [batch.keys() for batch in kjt_list]
        return KeyedJaggedTensor(
            [key for keys in keys_of_batches for key in keys],
            torch.cat([batch.values() for batch in kjt_list]),
            _joined_weights([batch.weights_or_none() for batch in kjt_list]),
            torch.cat([batch.lengths() for batch in kjt_list]),
        )

    def keys(self) -> list[str]:
        """The names of the features."""
        return self._keys

    def values(self) -> Tensor:
        """The ids of all bags, `[N]`."""
        return self._values

    def weights(self) -> Tensor:
        """The weights of all ids, `[N]`.

        Raises:
            ValueError: there are none.
        """
        if self._weights is None:
            raise ValueError("this KeyedJaggedTensor has no weights")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """The weights of all ids, `[N]`, where there are any."""
        return self._weights

    def lengths(self) -> Tensor:
        """The number of ids of each bag, `[F * B]`."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Where each bag starts, and the end of the last one, `[F * B + 1]`."""
        return self._offsets

    def stride(self) -> int:
        """The number of examples B."""
        return self._lengths.shape[0] // len(self._keys) if self._keys else 0

    def offset_per_key(self) -> list[int]:
        """Where the ids of each feature start, and the end of the last one: F + 1 numbers."""
        first_bags = torch.arange(len(self._keys) + 1, dtype=torch.int64, device=self._offsets.device) * self.stride()
        return self._offsets[first_bags].tolist()

    def length_per_key(self) -> list[int]:
        """The number of ids of each feature: F numbers."""
        bounds = self.offset_per_key()
        return [end - start for start, end in pairwise(bounds)]

    def device(self) -> torch.device:
        """The device of the values."""
        return self._values.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "KeyedJaggedTensor":
        """A copy on a device."""
        return KeyedJaggedTensor(
            self._keys,
            self._values.to(device, non_blocking=non_blocking),
            moved(self._weights, device, non_blocking),
            self._lengths.to(device, non_blocking=non_blocking),
            self._offsets.to(device, non_blocking=non_blocking),
        )

    def split(self, segments: Sequence[int]) -> list["KeyedJaggedTensor"]:
        """Cuts the features into groups.

        Args:
            segments: the number of features of each group, all F together.

        Raises:
            ValueError: segments that do not add up to F.
        """
        if sum(segments) != len(self._keys) or any(segment < 0 for segment in segments):
            raise ValueError(f"segments must add up to {len(self._keys)} features, got {list(segments)}")
        bounds, stride, groups, first = self.offset_per_key(), self.stride(), [], 0
        for segment in segments:
            last = first + segment
            ids, bags = slice(bounds[first], bounds[last]), slice(first * stride, last * stride)
            weights = None if self._weights is None else self._weights[ids]
            groups.append(KeyedJaggedTensor(self._keys[first:last], self._values[ids], weights, self._lengths[bags]))
            first = last
        return groups

    def permute(self, indices: Sequence[int]) -> "KeyedJaggedTensor":
        """Chooses features by their place, in the order given.

        Raises:
            ValueError: no place, one that is out of range, or one twice among `indices`.
        """
        if len(set(indices)) < len(indices) or any(not 0 <= index < len(self._keys) for index in indices):
            raise ValueError(f"indices must be distinct and within [0, {len(self._keys)}), got {list(indices)}")
        parts = list(self.to_dict().values())
        return KeyedJaggedTensor.from_jt_dict({self._keys[index]: parts[index] for index in indices})

    def to_dict(self) -> dict[str, JaggedTensor]:
        """The features by name."""
        lengths = self.length_per_key()
        values = self._values.split(lengths)
        weights = [None] * len(values) if self._weights is None else self._weights.split(lengths)
        bags = self._lengths.view(len(self._keys), self.stride()) if self._keys else []
        columns = zip(self._keys, values, weights, bags, strict=True)
        return {key: JaggedTensor(ids, weight, length) for key, ids, weight, length in columns}

    def __getitem__(self, key: str) -> JaggedTensor:
        """One feature.

        Raises:
            KeyError: there is no such feature.
        """
        if key not in self._keys:
            raise KeyError(f'there is no feature "{key}" among {self._keys}')
        index = self._keys.index(key)
        start, end = self.offset_per_key()[index : index + 2]
        weights = None if self._weights is None else self._weights[start:end]
        bags = slice(index * self.stride(), (index + 1) * self.stride())
        return JaggedTensor(self._values[start:end], weights, self._lengths[bags])

    def __repr__(self) -> str:
        features = {key: [bag.tolist() for bag in feature.to_dense()] for key, feature in self.to_dict().items()}
        return f"KeyedJaggedTensor({features})"


def _check_keys(keys: list[str], bags: int, stride: int | None) -> None:
    if len(set(keys)) < len(keys):
        raise ValueError(f"keys must be distinct, got {keys}")
    if bags // max(len(keys), 1) * len(keys) != bags:
        raise ValueError(f"{bags} bags cannot be shared out over {len(keys)} keys")
    if stride is not None and stride * len(keys) != bags:
        raise ValueError(f"{len(keys)} keys with a stride of {stride} need {stride * len(keys)} bags, got {bags}")


def _joined_weights(weights: Sequence[Tensor | None]) -> Tensor | None:
    given = [weight for weight in weights if weight is not None]
    if 0 < len(given) < len(weights):
        raise ValueError("either all features must have weights or none")
    return torch.cat(given) if given else None
