"""`KeyedTensor`: dense columns of several features side by side, each found by its name."""

from collections.abc import Sequence

import torch
from torch import Tensor


class KeyedTensor:
    """Tensors joined along one dimension.

    Args:
        keys: the names of the F parts.
        length_per_key: the size of each part along `key_dim`.
        values: the joined parts, `[B, sum of length_per_key]` for parts that are pooled rows.
        key_dim: the dimension that the parts are joined along.

    Raises:
        ValueError: a key twice, or lengths that do not fit keys and values.

    Examples:
        >>> pooled = KeyedTensor.from_tensor_list(["user", "item"], [torch.zeros(3, 16), torch.zeros(3, 8)])
        >>> pooled.values().shape, pooled["item"].shape
        (torch.Size([3, 24]), torch.Size([3, 8]))
    """

    __module__ = "recstore_ops"

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor, key_dim: int = 1) -> None:
        self._keys = list(keys)
        self._length_per_key = list(length_per_key)
        self._values = values
        self._key_dim = key_dim
        if len(set(self._keys)) < len(self._keys):
            raise ValueError(f"keys must be distinct, got {self._keys}")
        if len(self._keys) != len(self._length_per_key):
            raise ValueError(f"{len(self._keys)} keys need as many lengths, got {len(self._length_per_key)}")
        if sum(self._length_per_key) != values.shape[key_dim]:
            raise ValueError(
                f"length_per_key {self._length_per_key} does not add up to the {values.shape[key_dim]} columns"
            )

    @staticmethod
    def from_tensor_list(
        keys: Sequence[str], tensors: Sequence[Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> "KeyedTensor":
        """Joins tensors along `cat_dim`, which is `key_dim` in all but exotic cases."""
        lengths = [tensor.shape[key_dim] for tensor in tensors]
        return KeyedTensor(keys, lengths, torch.cat(list(tensors), dim=cat_dim), key_dim)

    @staticmethod
    def regroup(keyed_tensors: Sequence["KeyedTensor"], groups: Sequence[Sequence[str]]) -> list[Tensor]:
        """Joins the parts named by each group, in its order, to one tensor a group.

        Raises:
            KeyError: a name that none of the tensors has.
        """
        parts = {key: part for tensor in keyed_tensors for key, part in tensor.to_dict().items()}
        missing = [key for group in groups for key in group if key not in parts]
        if missing:
            raise KeyError(f"there are no parts {missing} among {list(parts)}")
        key_dim = keyed_tensors[0].key_dim()
        return [torch.cat([parts[key] for key in group], dim=key_dim) for group in groups]

    def keys(self) -> list[str]:
        """The names of the parts."""
        return self._keys

    def values(self) -> Tensor:
        """The joined parts."""
        return self._values

    def key_dim(self) -> int:
        """The dimension that the parts are joined along."""
        return self._key_dim

    def length_per_key(self) -> list[int]:
        """The size of each part: F numbers."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Where each part starts, and the end of the last one: F + 1 numbers."""
        return [sum(self._length_per_key[:count]) for count in range(len(self._keys) + 1)]

    def device(self) -> torch.device:
        """The device of the values."""
        return self._values.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "KeyedTensor":
        """A copy on a device."""
        values = self._values.to(device, non_blocking=non_blocking)
        return KeyedTensor(self._keys, self._length_per_key, values, self._key_dim)

    def to_dict(self) -> dict[str, Tensor]:
        """The parts by name."""
        parts = self._values.split(self._length_per_key, dim=self._key_dim)
        return dict(zip(self._keys, parts, strict=True))

    def __getitem__(self, key: str) -> Tensor:
        """One part.

        Raises:
            KeyError: there is no such part.
        """
        if key not in self._keys:
            raise KeyError(f'there is no part "{key}" among {self._keys}')
        index = self._keys.index(key)
        return self._values.narrow(self._key_dim, self.offset_per_key()[index], self._length_per_key[index])

    def __repr__(self) -> str:
        lengths = dict(zip(self._keys, self._length_per_key, strict=True))
        return f"KeyedTensor({lengths}, values of shape {tuple(self._values.shape)})"
