"""Features with different numbers of examples, and the features of a batch one by one. TorchScript compiles this.

A *stride* is the number of examples of a feature. If features have different strides, each of the ranks that a batch
comes from has its own: `strides_FR`, of feature f and rank r. Inverse indices `[F, B]` map each of B examples to the
example of its feature that it stands for.

Shape suffixes: F features, R ranks, B examples.
"""

import torch
from torch import Tensor

from recstore_ops.sparse.jagged_tensor import JaggedTensor


def strides_tensor(strides: Tensor | list[list[int]] | None) -> Tensor | None:
    """Strides of each feature and rank as a tensor on the host, `[F, R]`."""
    return torch.tensor(strides, dtype=torch.int32, device="cpu") if isinstance(strides, list) else strides


def sums_over_ranks(strides_FR: Tensor) -> list[int]:
    """The stride of each feature."""
    if strides_FR.dim() != 2:
        return []
    sums: list[int] = strides_FR.sum(dim=1).tolist()
    return sums


def examples_of(strides_FR: Tensor, inverse_indices: tuple[list[str], Tensor] | None) -> int:
    """The number of examples that a batch stands for: those of its inverse indices, else of its largest feature."""
    if inverse_indices is not None and inverse_indices[1].numel() > 0:
        return inverse_indices[1].shape[-1]
    sums = sums_over_ranks(strides_FR)
    return max(sums) if len(sums) > 0 else 0


def reordered(tensor: Tensor, bounds: list[int], order: list[int]) -> Tensor:
    """Parts of a tensor, which start and end at `bounds`, in an order; a part may come several times."""
    if len(order) == 0:
        return tensor[:0]
    return torch.cat([tensor[bounds[part] : bounds[part + 1]] for part in order])


def reordered_strides(strides_FR: Tensor | None, order: list[int]) -> Tensor | None:
    """The strides of some features."""
    return None if strides_FR is None else strides_FR[list(order)]


def shared_out(count: int, parts: int) -> list[int]:
    """A number as a sum of others, as even as may be, the rest with the first."""
    shares = [count // parts] * parts
    shares[0] += count % parts
    return shares


def filled_up(lengths: Tensor, strides: list[int], stride: int) -> Tensor:
    """The lengths of features with different strides, each with empty bags behind up to one stride, `[F * stride]`."""
    filled = lengths.new_zeros(len(strides), stride)
    for feature, part in enumerate(lengths.split(strides)):
        filled[feature, : strides[feature]] = part
    return filled.reshape(-1)


def taken_apart(
    keys: list[str], values: Tensor, weights: Tensor | None, lengths: Tensor, sizes: list[int], bounds: list[int]
) -> dict[str, JaggedTensor]:
    """The features of a batch by name.

    Args:
        keys: the names of the F features.
        values: `[N]`, weights: `[N]`.
        lengths: of all bags, `[F * B]`.
        sizes: how many of the values each feature has.
        bounds: the start of each feature's bags, and the end of the last one.
    """
    values_of = torch.split(values, sizes)
    weights_of = torch.split(values if weights is None else weights, sizes)
    features: dict[str, JaggedTensor] = {}
    for index, key in enumerate(keys):
        features[key] = JaggedTensor(
            values_of[index],
            None if weights is None else weights_of[index],
            lengths[bounds[index] : bounds[index + 1]],
            None,
        )
    return features


def joined_weights(weights: list[Tensor | None]) -> Tensor | None:
    """The weights of several features, or none; all have some, or none has."""
    given = torch.jit.annotate(list[Tensor], [])
    for weight in weights:
        if weight is not None:
            given.append(weight)
    if 0 < len(given) < len(weights):
        raise ValueError("either all features must have weights or none")
    return torch.cat(given) if len(given) > 0 else None


def joined_inverse_indices(parts: list[tuple[list[str], Tensor] | None]) -> tuple[list[str], Tensor] | None:
    """The inverse indices of several batches, or none; all have some, or none has."""
    keys = torch.jit.annotate(list[str], [])
    indices = torch.jit.annotate(list[Tensor], [])
    for inverse_indices in parts:
        if inverse_indices is not None:
            keys += inverse_indices[0]
            indices.append(inverse_indices[1])
    if 0 < len(indices) < len(parts):
        raise ValueError("either all batches must have inverse indices or none")
    return (keys, torch.cat(indices)) if len(indices) > 0 else None
