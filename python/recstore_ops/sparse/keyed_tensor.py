"""`KeyedTensor`: dense columns of several features side by side, each found by its name.

TorchScript compiles the class but for what it inherits.
"""

import torch
import torch.fx
from torch import Tensor

from recstore_ops.sparse._bags import bounds_of
from recstore_ops.sparse.key_checks import check_index, check_keys
from recstore_ops.sparse.proxyable import Proxyable
from recstore_ops.sparse.tensors import BatchTensors, keyed_block


class _PrintedColumns(BatchTensors):
    """How a `KeyedTensor` prints."""

    _tensors = ("_values",)
    _told_alike = ("keys", "length_per_key", "key_dim")

    def __str__(self: "KeyedTensor") -> str:  # type: ignore[misc]
        return keyed_block("KeyedTensor", ((key, str(self[key].tolist())) for key in self.keys()))

    def __repr__(self: "KeyedTensor") -> str:  # type: ignore[misc]
        lengths = dict(zip(self.keys(), self.length_per_key(), strict=True))
        return f"KeyedTensor({lengths}, values of shape {tuple(self.values().shape)})"


class KeyedTensor(_PrintedColumns, metaclass=Proxyable):
    """Tensors joined along one dimension.

    Args:
        keys: the names of the F parts.
        length_per_key: the size of each part along `key_dim`.
        values: the joined parts, `[B, sum of length_per_key]` for parts that are pooled rows.
        key_dim: the dimension that the parts are joined along.
        offset_per_key: the start of each part, and the end of the last one; computed by default.
        index_per_key: the place of each part; with it a key may come twice.

    Raises:
        ValueError: a key twice, or lengths that do not fit keys and values.

    Examples:
        >>> pooled = KeyedTensor.from_tensor_list(["user", "item"], [torch.zeros(3, 16), torch.zeros(3, 8)])
        >>> pooled.values().shape, pooled["item"].shape
        (torch.Size([3, 24]), torch.Size([3, 8]))
    """

    def __init__(
        self,
        keys: list[str],
        length_per_key: list[int],
        values: Tensor,
        key_dim: int = 1,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
    ) -> None:
        self._keys = list(keys)
        self._length_per_key = list(length_per_key)
        self._values = values
        self._key_dim = key_dim
        self._offset_per_key = offset_per_key
        self._index_per_key = index_per_key
        if not torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]
            check_keys(keys)
            _check(self)

    @staticmethod
    def from_tensor_list(keys: list[str], tensors: list[Tensor], key_dim: int = 1, cat_dim: int = 1) -> "KeyedTensor":
        """Joins tensors along `cat_dim`, which is `key_dim` in all but exotic cases."""
        lengths = [tensor.shape[key_dim] for tensor in tensors]
        return KeyedTensor(keys, lengths, torch.cat(tensors, dim=cat_dim), key_dim)

    @staticmethod
    def regroup(keyed_tensors: list["KeyedTensor"], groups: list[list[str]]) -> list[Tensor]:
        """Joins the parts named by each group, in its order, to one tensor a group.

        Raises:
            KeyError: a name that none of the tensors has.
        """
        return _regrouped(keyed_tensors, groups)

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: list["KeyedTensor"], groups: list[list[str]], keys: list[str]
    ) -> dict[str, Tensor]:
        """The same with a name for each group.

        Raises:
            KeyError: a name that none of the tensors has.
            ValueError: another number of names than of groups.
        """
        return _regrouped_by_name(keyed_tensors, groups, keys)

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
        """The start of each part, and the end of the last one: F + 1 numbers."""
        given = self._offset_per_key
        return given if given is not None else bounds_of(self._length_per_key)

    def index_per_key(self) -> dict[str, int]:
        """The place of each part."""
        given = self._index_per_key
        if given is not None:
            return given
        return {key: index for index, key in enumerate(self._keys)}

    def device(self) -> torch.device:
        """The device of the values."""
        return self._values.device

    def to_dict(self) -> dict[str, Tensor]:
        """The parts by name."""
        parts = torch.split(self._values, self._length_per_key, dim=self._key_dim)
        return {key: parts[index] for key, index in self.index_per_key().items()}

    def __getitem__(self, key: str) -> Tensor:
        """One part.

        Raises:
            KeyError: there is no such part.
        """
        places = self.index_per_key()
        if key not in places:
            raise KeyError(f'there is no part "{key}" among {self._keys}')
        index = places[key]
        return self._values.narrow(self._key_dim, self.offset_per_key()[index], self._length_per_key[index])


@torch.fx.wrap
def _regrouped(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[Tensor]:
    parts: dict[str, Tensor] = {}
    for tensor in keyed_tensors:
        parts.update(tensor.to_dict())
    key_dim = keyed_tensors[0].key_dim()
    joined = torch.jit.annotate(list[Tensor], [])
    for group in groups:
        for key in group:
            if key not in parts:
                raise KeyError(f'there is no part "{key}" among {list(parts.keys())}')
        joined.append(torch.cat([parts[key] for key in group], dim=key_dim))
    return joined


@torch.fx.wrap
def _regrouped_by_name(keyed_tensors: list[KeyedTensor], groups: list[list[str]], keys: list[str]) -> dict[str, Tensor]:
    if len(keys) != len(groups):
        raise ValueError(f"{len(groups)} groups need as many names, got {len(keys)}")
    joined = _regrouped(keyed_tensors, groups)
    return {key: joined[index] for index, key in enumerate(keys)}


def _check(tensor: KeyedTensor) -> None:
    keys, lengths, columns = tensor._keys, tensor._length_per_key, tensor._values.shape[tensor._key_dim]
    check_index(keys, tensor._index_per_key)
    if len(keys) != len(lengths):
        raise ValueError(f"{len(keys)} keys need as many lengths, got {len(lengths)}")
    if sum(lengths) != columns or min(lengths, default=0) < 0:
        raise ValueError(f"length_per_key {lengths} does not add up to the {columns} columns")
    offsets = tensor._offset_per_key
    if offsets is not None and list(offsets) != bounds_of(lengths):
        raise ValueError(f"offset_per_key must be {bounds_of(lengths)}, got {offsets}")
