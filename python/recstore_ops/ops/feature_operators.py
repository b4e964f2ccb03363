"""Operators over the features of a batch, each with a table of its own, written in Python.

The ids of all features stand in one tensor, and only the offsets show where those of a feature begin. A traced graph
cannot cut there, so the cut is made inside an operator. Feature f's ids are `ids[offsets[f * B]:offsets[(f + 1) * B]]`.

Shape suffixes: F features, B examples, N ids of all features, D dim.
"""

from collections import defaultdict
from itertools import pairwise

import torch
from torch import Tensor

from recstore_ops.ops import operators
from recstore_ops.ops.collecting import collect
from recstore_ops.ops.python_operators import define, returns_nothing


def slices_of_features(offsets: Tensor, features: int) -> list[slice]:
    """The slice of the ids of each feature."""
    batch = (offsets.shape[0] - 1) // features
    bounds = offsets[torch.arange(features + 1, dtype=torch.int64, device=offsets.device) * batch].tolist()
    return [slice(start, end) for start, end in pairwise(bounds)]


def _read_features(tables: list[Tensor], ids: Tensor, offsets: Tensor, dims: list[int]) -> Tensor:
    rows_ND = torch.zeros((ids.shape[0], max(dims)), dtype=torch.float32, device=ids.device)
    for table, part, dim in zip(tables, slices_of_features(offsets, len(tables)), dims, strict=True):
        rows_ND[part, :dim] = operators.emb_read(table, ids[part], dim)
    return rows_ND


def _accept_feature_grads(
    tables: list[Tensor],
    collectors: list[Tensor],
    ids: Tensor,
    offsets: Tensor,
    grads: Tensor,
    dims: list[int],
    per_sample_weights: Tensor | None = None,
    padding_idx: int | None = None,
) -> None:
    parts = slices_of_features(offsets, len(tables))
    lengths_FB = offsets.diff().view(len(tables), grads.shape[0])
    places = defaultdict(list)
    for feature, collector in enumerate(collectors):
        places[int(collector)].append(feature)
    columns = grads.split(dims, dim=1)
    for features in places.values():
        grad_ND = torch.cat([columns[f].repeat_interleave(lengths_FB[f], dim=0) for f in features])
        if per_sample_weights is not None:
            grad_ND = grad_ND * torch.cat([per_sample_weights[parts[f]] for f in features]).unsqueeze(1)
        ids_N = torch.cat([ids[parts[f]] for f in features])
        collect(collectors[features[0]], tables[features[0]], ids_N, grad_ND, padding_idx)


def _rows_of_features(tables: list[Tensor], ids: Tensor, offsets: Tensor, dims: list[int]) -> Tensor:
    return ids.new_empty((ids.shape[0], max(dims)), dtype=torch.float32)


read_features = define(
    "read_features(Tensor[] tables, Tensor ids, Tensor offsets, int[] dims) -> Tensor",
    _read_features,
    _rows_of_features,
)
accept_feature_grads = define(
    "accept_feature_grads(Tensor[] tables, Tensor[] collectors, Tensor ids, Tensor offsets, Tensor grads, int[] dims, "
    "Tensor? per_sample_weights=None, int? padding_idx=None) -> ()",
    _accept_feature_grads,
    returns_nothing,
)
