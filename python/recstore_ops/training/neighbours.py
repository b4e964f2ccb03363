"""The nearest vectors of a vector: searched through all of them, or by an index of faiss or hnswlib.

Shape suffixes: N ids, D dim, K neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from recstore_ops.training.vectors import Vectors

Metric = Literal["dot", "cosine"]
IndexName = Literal["exact", "faiss", "hnswlib"]
Found = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Ids and scores of neighbours, the nearest first: int64 [K], float64 [K]."""

_PACKAGES = {"faiss": "faiss-cpu", "hnswlib": "hnswlib"}
# Usual for hnswlib: links of each vector, and vectors looked at while it is built.
_LINKS, _BUILD_WIDTH = 32, 200


def nearest(vectors: Vectors, id: int, count: int, metric: Metric = "cosine", index: IndexName = "exact") -> Found:
    """Returns the nearest other ids, at most `count` of them; of equal scores the lower id first.

    Args:
        vectors: among which it is searched.
        id: one of theirs.
        count: K, from 1.
        metric: dot product or cosine; higher is nearer. A vector of zeros has the cosine 0.
        index: "exact" reads all vectors, some at a time. "faiss" and "hnswlib" put all of them in an index in memory;
            hnswlib's finds nearly all of the nearest.

    Raises:
        ValueError: the id has no row, or is one of zeros, which has no cosine; or an argument is out of range.
        ImportError: the package of the index is not installed.
    """
    if count < 1:
        raise ValueError(f"expected at least 1 neighbour, got {count}")
    for word, value, known in (("metric", metric, get_args(Metric)), ("index", index, get_args(IndexName))):
        if value not in known:
            raise ValueError(f"expected {word} to be one of {', '.join(known)}, got {value!r}")
    query_D = vectors.row(id).astype(np.float64)
    if metric == "cosine" and not query_D.any():
        raise ValueError(f"the row of id {id} is zero, which has no cosine with others; take the metric dot")
    ids_K, scores_K = _SEARCHES[index](vectors, query_D, count + 1, metric)
    is_other_K = ids_K != id
    return ids_K[is_other_K][:count], scores_K[is_other_K][:count]


def _exact(vectors: Vectors, query_D: NDArray[np.float64], count: int, metric: Metric) -> Found:
    best: Found = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float64)
    for ids_N, rows_ND in vectors.parts():
        scores_N = _scores(rows_ND, query_D, metric)
        best = _first(np.concatenate([best[0], ids_N]), np.concatenate([best[1], scores_N]), count)
    return best


def _scores(rows_ND: NDArray[np.float32], query_D: NDArray[np.float64], metric: Metric) -> NDArray[np.float64]:
    rows = rows_ND.astype(np.float64)
    scores_N = rows @ query_D
    if metric == "dot":
        return scores_N
    lengths_N = np.linalg.norm(rows, axis=1) * np.linalg.norm(query_D)
    return np.divide(scores_N, lengths_N, out=np.zeros_like(scores_N), where=lengths_N > 0)


def _first(ids: NDArray[np.int64], scores: NDArray[np.float64], count: int) -> Found:
    order = np.lexsort((ids, -scores))[:count]
    return ids[order], scores[order]


def _by_faiss(vectors: Vectors, query_D: NDArray[np.float64], count: int, metric: Metric) -> Found:
    faiss = _imported("faiss")
    index = faiss.IndexFlatIP(vectors.dim)
    for _, rows_ND in vectors.parts():
        index.add(_scaled(rows_ND, metric))
    scores, places = index.search(_scaled(query_D[None].astype(np.float32), metric), min(count, len(vectors)))
    return _first(vectors.ids[places[0]], scores[0].astype(np.float64), count)


def _by_hnswlib(vectors: Vectors, query_D: NDArray[np.float64], count: int, metric: Metric) -> Found:
    hnswlib = _imported("hnswlib")
    index, found = hnswlib.Index(space="ip", dim=vectors.dim), min(count, len(vectors))
    index.init_index(max_elements=len(vectors), ef_construction=_BUILD_WIDTH, M=_LINKS)
    for ids_N, rows_ND in vectors.parts():
        index.add_items(_scaled(rows_ND, metric), np.searchsorted(vectors.ids, ids_N))
    index.set_ef(max(_BUILD_WIDTH, found))
    places, distances = index.knn_query(_scaled(query_D[None].astype(np.float32), metric), k=found)
    # The distance is 1 less the product.
    return _first(vectors.ids[places[0].astype(np.int64)], 1 - distances[0].astype(np.float64), count)


def _scaled(rows_ND: NDArray[np.float32], metric: Metric) -> NDArray[np.float32]:
    """For cosines, vectors of length 1; those of zeros stay."""
    if metric == "dot":
        return rows_ND
    lengths_N1 = np.linalg.norm(rows_ND, axis=1, keepdims=True)
    return np.divide(rows_ND, lengths_N1, out=np.zeros_like(rows_ND), where=lengths_N1 > 0)


def _imported(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError:
        raise ImportError(
            f"the index {name} needs a package that is not installed: run `pip install {_PACKAGES[name]}`"
        ) from None


_SEARCHES: dict[IndexName, Callable[[Vectors, NDArray[np.float64], int, Metric], Found]] = {
    "exact": _exact,
    "faiss": _by_faiss,
    "hnswlib": _by_hnswlib,
}
