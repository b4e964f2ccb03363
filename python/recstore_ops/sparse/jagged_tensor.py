"""`JaggedTensor`: one feature of a batch, a bag of values for each example.

Shape suffixes: N values, B examples, L longest bag. TorchScript compiles the class but for what it inherits.
"""

import torch
import torch.fx
from torch import Tensor

from recstore_ops.sparse._bags import check_bags, check_values, lengths_of, may_keep, offsets_of
from recstore_ops.sparse.proxyable import Proxyable
from recstore_ops.sparse.tensors import BatchTensors, block, jagged_text

# Bags from and to dense tensors. TorchScript compiles this but for `check_integer`.
#
# Shape suffixes: N values, B bags, L longest bag.


def check_integer(name: str, value: object) -> None:
    """Refuses what is no integer, neither Python's nor one of a tensor.

    Raises:
        TypeError: it is that.
    """
    if not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")


def lengths_of_each(values: list[Tensor]) -> Tensor:
    """The number of values of each bag, int32 `[B]`."""
    device = values[0].device
    return torch.tensor([value.shape[0] for value in values], dtype=torch.int32, device=device)


def within_lengths(size: int, lengths: Tensor) -> Tensor:
    """Whether bags of these lengths fill each place of `[B, size]`, bool."""
    place_L = torch.arange(size, dtype=torch.int64, device=lengths.device)
    return place_L.unsqueeze(0) < lengths.unsqueeze(1)


def masked(values: Tensor | None, is_taken: Tensor) -> Tensor | None:
    """The values that are taken; `None` without values."""
    return None if values is None else values[is_taken]


def cut(values: Tensor, offsets: Tensor) -> list[Tensor]:
    """The values of each bag."""
    bounds: list[int] = offsets.to(torch.int64).tolist()
    return [values[bounds[bag] : bounds[bag + 1]] for bag in range(len(bounds) - 1)]


def padded(values: Tensor, offsets: Tensor, length: int, padding_value: float) -> Tensor:
    """Bags as the rows of one tensor, `[B, length, ...]`: longer ones cut, shorter ones filled up."""
    if padding_value % 1 != 0 and not (values.is_floating_point() or values.is_complex()):
        raise ValueError(f"padding_value must be a whole number for values of {values.dtype}, got {padding_value}")
    place_L = torch.arange(length, dtype=torch.int64, device=offsets.device)
    is_filled_BL = place_L.unsqueeze(0) < offsets.diff().unsqueeze(1)
    # Places beyond a bag take the one further value, behind all others: the padding.
    place_BL = torch.where(is_filled_BL, offsets[:-1].unsqueeze(1) + place_L, values.shape[0])
    sizes = list(values.shape)
    sizes[0] = 1
    padding = values.new_full(sizes, padding_value)
    return torch.cat([values, padding])[place_BL]


# `torch.fx.symbolic_trace` records these, for it knows neither sizes nor whether there are weights.
torch.fx.wrap("masked")
torch.fx.wrap("within_lengths")


class _PrintedBags(BatchTensors):
    """How a `JaggedTensor` prints."""

    def __str__(self: "JaggedTensor") -> str:  # type: ignore[misc]
        text = jagged_text(self.values(), self.weights_or_none(), self.offsets().tolist(), "    ")
        return block("JaggedTensor", [text if self.weights_or_none() is not None else f"    {text}"])

    def __repr__(self: "JaggedTensor") -> str:  # type: ignore[misc]
        return f"JaggedTensor({[bag.tolist() for bag in self.to_dense()]})"


class JaggedTensor(_PrintedBags, metaclass=Proxyable):
    """Values in bags of different lengths.

    Args:
        values: `[N, ...]`: ids, or a row for each id.
        weights: `[N, ...]`: a weight for each value.
        lengths: int32 or int64, `[B]`: the number of values of each bag. Lengths or offsets must be given.
        offsets: int32 or int64, `[B + 1]`: the start of each bag, and the end of the last one.

    Raises:
        TypeError: an argument of another type.
        ValueError: shapes that do not fit together, or bags that do not lie within the values.

    Examples:
        >>> JaggedTensor(torch.tensor([7, 8, 9]), lengths=torch.tensor([2, 0, 1])).to_padded_dense()
        tensor([[7, 8],
                [0, 0],
                [9, 0]])
    """

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets
        if not torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]
            check_values(values, weights)
            check_bags(values, lengths, offsets)

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> "JaggedTensor":
        """No bags, of the types given; values and weights have torch's default type unless one is given."""
        weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
        none = torch.empty(0, dtype=lengths_dtype, device=device)
        return JaggedTensor(torch.empty(0, dtype=values_dtype, device=device), weights, none, none)

    @staticmethod
    def empty_like(jt: "JaggedTensor", device: torch.device | None = None) -> "JaggedTensor":
        """No bags, of the types of another; with a device tensors of the same shapes there, not filled."""
        if device is not None:
            if torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]
                raise ValueError("in TorchScript empty_like takes no device")
            else:
                return jt._not_filled(device)
        weights = jt.weights_or_none()
        return JaggedTensor(
            jt.values().new_empty(0), None if weights is None else weights.new_empty(0), jt.lengths().new_empty(0)
        )

    @staticmethod
    def from_dense_lengths(values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> "JaggedTensor":
        """Takes the first values of each row.

        Args:
            values: `[B, L, ...]`.
            lengths: `[B]`, how many of each row.
            weights: `[B, L, ...]`.
        """
        is_taken_BL = within_lengths(values.shape[1], lengths)
        return JaggedTensor(values[is_taken_BL], masked(weights, is_taken_BL), lengths)

    @staticmethod
    def from_dense(values: list[Tensor], weights: list[Tensor] | None = None) -> "JaggedTensor":
        """Joins bags, each a tensor `[length, ...]`, with weights of the same lengths."""
        return JaggedTensor(torch.cat(values), None if weights is None else torch.cat(weights), lengths_of_each(values))

    def values(self) -> Tensor:
        """The values of all bags, `[N, ...]`."""
        return self._values

    def weights(self) -> Tensor:
        """The weights of all values, `[N, ...]`.

        Raises:
            ValueError: there are none.
        """
        weights = self._weights
        if weights is None:
            raise ValueError("this JaggedTensor has no weights")
        return weights

    def weights_or_none(self) -> Tensor | None:
        """The weights of all values, `[N, ...]`, if there are any."""
        return self._weights

    def lengths(self) -> Tensor:
        """The number of values of each bag, `[B]`."""
        lengths = lengths_of(self._lengths, self._offsets)
        if may_keep():
            self._lengths = lengths
        return lengths

    def lengths_or_none(self) -> Tensor | None:
        """The number of values of each bag, `[B]`, if it was given or computed."""
        return self._lengths

    def offsets(self) -> Tensor:
        """The start of each bag, and the end of the last one, `[B + 1]`."""
        offsets = offsets_of(self._lengths, self._offsets)
        if may_keep():
            self._offsets = offsets
        return offsets

    def offsets_or_none(self) -> Tensor | None:
        """The start of each bag, and the end of the last one, `[B + 1]`, if they were given or computed."""
        return self._offsets

    def device(self) -> torch.device:
        """The device of the values."""
        return self._values.device

    def to_dense(self) -> list[Tensor]:
        """The bags one by one: B tensors `[length, ...]`."""
        return cut(self._values, self.offsets())

    def to_dense_weights(self) -> list[Tensor] | None:
        """The weights of the bags one by one, if there are any."""
        weights = self._weights
        return None if weights is None else cut(weights, self.offsets())

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """The bags as the rows of one tensor.

        Args:
            desired_length: the values of each row: longer bags are cut; the longest bag's by default.
            padding_value: what fills the shorter ones.

        Returns:
            `[B, L, ...]`, of the values' type.

        Raises:
            TypeError: a length that is no integer.
            ValueError: a negative length, or a padding value with a fraction among integers.
        """
        return padded(self._values, self.offsets(), self._longest(desired_length), padding_value)

    def to_padded_dense_weights(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor | None:
        """The weights as the rows of one tensor, as `to_padded_dense` gives the values, if there are any."""
        weights = self._weights
        if weights is None:
            return None
        return padded(weights, self.offsets(), self._longest(desired_length), padding_value)

    def _longest(self, desired_length: int | None) -> int:
        if desired_length is not None:
            if not torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]
                check_integer("desired_length", desired_length)
            if desired_length < 0:
                raise ValueError(f"desired_length must not be negative, got {desired_length}")
            return desired_length
        lengths = self.lengths()
        return int(lengths.max()) if lengths.shape[0] > 0 else 0
