"""The part of `KeyedJaggedTensor` that TorchScript leaves out: copies, printing, and tensors for other ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import Self

from recstore_ops.sparse.distribution import sums_of_splits
from recstore_ops.sparse.tensors import BatchTensors, jagged_text, keyed_block, pair_of

_TAKEN_OVER = (
    *("_stride", "_stride_per_key_per_rank", "_stride_per_key", "_length_per_key", "_lengths_offset_per_key"),
    *("_offset_per_key", "_index_per_key"),
)


class KeyedBatch(BatchTensors):
    """A batch of features by name, made of bags."""

    _told_alike = ("keys",)
    _weights: Tensor | None
    _inverse_indices: tuple[list[str], Tensor] | None
    _stride_per_key_per_rank: Tensor | None
    _jt_dict: dict[str, Any] | None
    _lengths_BF: Tensor | None

    if TYPE_CHECKING:
        keys: Callable[[], list[str]]
        values: Callable[[], Tensor]
        weights_or_none: Callable[[], Tensor | None]
        lengths: Callable[[], Tensor]
        offsets: Callable[[], Tensor]
        stride_per_key: Callable[[], list[int]]
        length_per_key: Callable[[], list[int]]
        lengths_offset_per_key: Callable[[], list[int]]
        variable_stride_per_key: Callable[[], bool]
        to_dict: Callable[[], dict[str, Any]]

    def to(self, device: torch.device | str, non_blocking: bool = False, dtype: torch.dtype | None = None) -> Self:
        """A copy on a device; its weights have the type `dtype` if one is given."""
        made = super().to(device, non_blocking)
        if dtype is not None and made._weights is not None:
            made._weights = made._weights.to(dtype)
        return made

    def size_in_bytes(self) -> int:
        """The bytes of all tensors that are there, strides of ranks among them."""
        strides = self._stride_per_key_per_rank
        return super().size_in_bytes() + (0 if strides is None else strides.element_size() * strides.numel())

    def copy_(self, other: Any, non_blocking: bool = False) -> Self:
        """Copies the tensors of a batch with equal shapes into those of this one, and takes over its strides.

        Raises:
            ValueError: other keys, other shapes, or weights or inverse indices of one of both only; then nothing is
                copied.
        """
        super().copy_(other, non_blocking)
        for name in _TAKEN_OVER:
            setattr(self, name, getattr(other, name))
        self._jt_dict = self._lengths_BF = None  # Of what was here before.
        own, others = self._inverse_indices, other._inverse_indices
        if own is not None:
            self._inverse_indices = (others[0], own[1])
        return self

    def _pairs(self, other: Any) -> list[tuple[Tensor, Tensor]]:
        own, others = (batch._inverse_indices and batch._inverse_indices[1] for batch in (self, other))
        return super()._pairs(other) + pair_of("inverse_indices", own, others)

    def dist_labels(self) -> list[str]:
        """The names of `dist_tensors`, in their order."""
        labels = ["lengths", "values"]
        if self.variable_stride_per_key():
            labels.append("strides")
        return labels if self.weights_or_none() is None else [*labels, "weights"]

    def dist_splits(self, key_splits: list[int]) -> list[list[int]]:
        """How many elements of each of `dist_tensors` go to each rank, which gets `key_splits[rank]` features."""
        values = sums_of_splits(self.length_per_key(), key_splits)
        splits = [sums_of_splits(self.stride_per_key(), key_splits), values]
        if self.variable_stride_per_key():
            splits.append(list(key_splits))
        return splits if self.weights_or_none() is None else [*splits, values]

    def dist_tensors(self) -> list[Tensor]:
        """The tensors of this batch that ranks send each other."""
        tensors = [self.lengths(), self.values()]
        if self.variable_stride_per_key():
            strides = torch.tensor(self.stride_per_key(), dtype=torch.int64, device="cpu")
            tensors.append(strides.to(self.values().device))
        weights = self.weights_or_none()
        return tensors if weights is None else [*tensors, weights]

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        made: Any = super()._mapped(function)
        made._jt_dict = made._lengths_BF = None
        if self._inverse_indices is not None:
            made._inverse_indices = (self._inverse_indices[0], function(self._inverse_indices[1]))
        return made

    def __str__(self) -> str:
        bounds, weights = self.offsets().tolist(), self.weights_or_none()
        texts = []
        # What `empty_like` makes has strides and no keys.
        for key, (start, end) in zip(self.keys(), pairwise(self.lengths_offset_per_key()), strict=False):
            text = jagged_text(self.values(), weights, bounds[start : end + 1], " " * 8)
            texts.append((key, text if weights is None else f"{{\n{text}\n    }}"))
        return keyed_block("KeyedJaggedTensor", texts)

    def __repr__(self) -> str:
        features = {key: [bag.tolist() for bag in feature.to_dense()] for key, feature in self.to_dict().items()}
        return f"KeyedJaggedTensor({features})"
