"""What several batches have, as one; TorchScript compiles it."""

import torch
from torch import Tensor


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
