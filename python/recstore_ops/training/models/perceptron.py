"""The multilayer perceptron of the models with a deep part."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def perceptron(sizes: Sequence[int], *, dropout: float = 0.0) -> nn.Sequential:
    """Returns linear layers from `sizes[0]` to `sizes[-1]`, with a ReLU and dropout after all but the last."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes[:-1]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        if dropout > 0:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))
