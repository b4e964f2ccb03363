"""`JaggedTensor`: one feature of a batch, a bag of values for each example.

Shape suffixes: N values, B examples, L longest bag.
"""

import torch
from torch import Tensor

from recstore_ops.sparse._bags import check_values, lengths_and_offsets, moved


class JaggedTensor:
    """Values in bags of different lengths.

    Args:
        values: `[N, ...]`: ids, or a row for each id.
        weights: `[N, ...]`: a weight for each value.
        lengths: int32 or int64, `[B]`: the number of values of each bag. Lengths or offsets must be given.
        offsets: int32 or int64, `[B + 1]`: where each bag starts, and the end of the last one.

    Raises:
        TypeError: an argument of another type.
        ValueError: shapes that do not fit together, or bags that do not cover the values.

    Examples:
        >>> JaggedTensor(torch.tensor([7, 8, 9]), lengths=torch.tensor([2, 0, 1])).to_padded_dense()
        tensor([[7, 8],
                [0, 0],
                [9, 0]])
    """

    __module__ = "recstore_ops"

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        check_values(values, weights)
        self._values = values
        self._weights = weights
        self._lengths, self._offsets = lengths_and_offsets(values, lengths, offsets)

    def values(self) -> Tensor:
        """The values of all bags, `[N, ...]`."""
        return self._values

    def weights(self) -> Tensor:
        """The weights of all values, `[N, ...]`.

        Raises:
            ValueError: there are none.
        """
        if self._weights is None:
            raise ValueError("this JaggedTensor has no weights")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """The weights of all values, `[N, ...]`, where there are any."""
        return self._weights

    def lengths(self) -> Tensor:
        """The number of values of each bag, `[B]`."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Where each bag starts, and the end of the last one, `[B + 1]`."""
        return self._offsets

    def device(self) -> torch.device:
        """The device of the values."""
        return self._values.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "JaggedTensor":
        """A copy on a device."""
        return JaggedTensor(
            self._values.to(device, non_blocking=non_blocking),
            moved(self._weights, device, non_blocking),
            self._lengths.to(device, non_blocking=non_blocking),
            self._offsets.to(device, non_blocking=non_blocking),
        )

    def to_dense(self) -> list[Tensor]:
        """The bags one by one: B tensors `[length, ...]`."""
        return list(self._values.split(self._lengths.tolist()))

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """The bags as the rows of one tensor.

        Args:
            desired_length: the values of each row: longer bags are cut; the longest bag's by default.
            padding_value: what fills the shorter ones.

        Returns:
            `[B, L, ...]`, of the values' type.
        """
        bags = self._lengths.shape[0]
        length = desired_length
        if length is None:
            length = int(self._lengths.max()) if bags else 0
        bag_N = torch.repeat_interleave(self._lengths, output_size=self._values.shape[0])
        place_N = torch.arange(bag_N.shape[0], dtype=torch.int64, device=bag_N.device) - self._offsets[bag_N]
        kept_N = place_N < length
        dense_BL = self._values.new_full((bags, length, *self._values.shape[1:]), padding_value)
        return dense_BL.index_put((bag_N[kept_N], place_N[kept_N]), self._values[kept_N])

    def __repr__(self) -> str:
        return f"JaggedTensor({[bag.tolist() for bag in self.to_dense()]})"
