"""The best model of main effects, or of main effects and pairs, of rows whose true probabilities are known.

Best is the lowest expected logloss over uniform ids, which is where maximum likelihood ends with ever more rows (White
1982). A model of pairs is linear too, in one parameter for each pair of ids, so both are fits of one kind: each row
has some codes, its logit is the sum of their weights, and Newton's method finds the weights. Labels are not drawn:
the true probabilities stand in for them, and leave the rows drawn as the only source of error.

Shapes: B rows, F fields, C codes a row, W weights.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

_MOST_ENUMERATED = 100_000
_SAMPLED_ROWS = 200_000
_BLOCK_ROWS = 50_000
_SAMPLE_SEED = 20_240_601
_NEWTON_STEPS = 50
_RIDGE = 1e-9


def best_logits_of_order(
    order: int, true_logits: Callable[[NDArray], NDArray], num_fields: int, ids_per_field: int, ids_BF: NDArray
) -> NDArray:
    """Returns the logits [B] that the best model of an order gives to rows.

    All combinations of ids are weighed equally where they are few, and a large sample of them otherwise.

    Args:
        order: 1 for main effects, 2 for pairs.
        true_logits: of rows of ids, int64 [any, F] -> [any].
        num_fields, ids_per_field: ids of field f are those from `f * ids_per_field` to before the next field's.
        ids_BF: the rows to predict, int64 [B, F].
    """
    fitted_ids = _representative_ids(num_fields, ids_per_field)
    blocks = np.array_split(fitted_ids, -(-len(fitted_ids) // _BLOCK_ROWS))
    probabilities = _sigmoid(np.concatenate([true_logits(block) for block in blocks]))
    weights = _fit(
        _codes(fitted_ids, order, ids_per_field), probabilities, comb(num_fields, order) * ids_per_field**order
    )
    return weights[_codes(ids_BF, order, ids_per_field)].sum(1)


def _representative_ids(num_fields: int, ids_per_field: int) -> NDArray:
    if ids_per_field**num_fields <= _MOST_ENUMERATED:
        within_field = np.indices((ids_per_field,) * num_fields).reshape(num_fields, -1).T
    else:
        rng = np.random.default_rng(_SAMPLE_SEED)
        within_field = rng.integers(ids_per_field, size=(_SAMPLED_ROWS, num_fields))
    return within_field + ids_per_field * np.arange(num_fields)


def _codes(ids_BF: NDArray, order: int, ids_per_field: int) -> NDArray:
    """A number from 0 for each id, or for each pair of ids of two fields: [B, C]."""
    columns = []
    for place, fields in enumerate(combinations(ids_BF.T % ids_per_field, order)):
        code_B = np.full(len(ids_BF), place)
        for within_field_B in fields:
            code_B = code_B * ids_per_field + within_field_B
        columns.append(code_B)
    return np.stack(columns, axis=1)


def _fit(codes_BC: NDArray, probabilities_B: NDArray, num_weights: int) -> NDArray:
    """The weights [W] of lowest logloss, with which a row's logit is the sum of its codes' weights."""
    weights = np.zeros(num_weights)
    for _ in range(_NEWTON_STEPS):
        predicted_B = _sigmoid(weights[codes_BC].sum(1))
        gradient_W = _sum_by_code(codes_BC, probabilities_B - predicted_B, num_weights)
        if np.abs(gradient_W).max() < 1e-7 * len(codes_BC) / num_weights:
            return weights
        # The ridge settles what the rows leave open: a constant can move from one field's weights to another's.
        hessian = _hessian(codes_BC, predicted_B * (1 - predicted_B), num_weights) + _RIDGE * np.eye(num_weights)
        weights += np.linalg.solve(hessian, gradient_W)
    raise RuntimeError(f"Newton's method did not converge in {_NEWTON_STEPS} steps")


def _sum_by_code(codes_BC: NDArray, addends_B: NDArray, num_weights: int) -> NDArray:
    columns = [np.bincount(codes_B, addends_B, num_weights) for codes_B in codes_BC.T]
    return np.sum(columns, axis=0)


def _hessian(codes_BC: NDArray, curvature_B: NDArray, num_weights: int) -> NDArray:
    cells = np.zeros(num_weights**2)
    for first_B, second_B in combinations(codes_BC.T, 2):
        cells += np.bincount(first_B * num_weights + second_B, curvature_B, num_weights**2)
    between = cells.reshape(num_weights, num_weights)
    return between + between.T + np.diag(_sum_by_code(codes_BC, curvature_B, num_weights))


def _sigmoid(logits: NDArray) -> NDArray:
    return 1 / (1 + np.exp(-logits))
