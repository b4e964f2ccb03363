"""Generated rows with known bounds on how well each family of models can predict them.

Every row has one id of each field, drawn uniformly, and a label drawn with the log-odds

    pairs      logit = -1   + sum_f w_f + sum_{f<g} <v_f, v_g>
    triples    logit = -0.5 + sum_f w_f + sum_k v_1k v_2k v_3k

with w_f and v_f those of the row's id of field f, all of them normal:

    kind      fields x ids   columns of v   sd of w   sd of v   v standardized
    pairs        8 x 50            4          0.3       0.45      no
    triples      3 x 12            2          0.3       1.1       yes

Standardized means that over the ids of each field, each column has mean zero and exactly that deviation. Then main
effects are w alone, and the triples have no part that pairs could express. docs/planted.md says what follows for linear
models, factorization machines and networks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import comb
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from recstore_ops.training.data.batch import Batch
from recstore_ops.training.metrics.classification import auc, logloss


def row_counts(train_rows: int | None, test_rows: int | None, defaults: tuple[int, int]) -> tuple[int, int]:
    """Returns the numbers of training and test rows; None takes the default.

    Raises:
        ValueError: one is below one.
    """
    train = defaults[0] if train_rows is None else train_rows
    test = defaults[1] if test_rows is None else test_rows
    if train < 1 or test < 1:
        raise ValueError(f"expected at least one row each, got {train} and {test}")
    return train, test


# The best model of main effects, or of main effects and pairs, of rows whose true probabilities are known.
#
# Best is the lowest expected logloss over uniform ids, which is where maximum likelihood ends with ever more rows
# (White 1982). A model of pairs is linear too, in one parameter for each pair of ids, so both are fits of one kind:
# each row has some codes, its logit is the sum of their weights, and Newton's method finds the weights. Labels are not
# drawn: the true probabilities stand in for them, and leave the rows drawn as the only source of error.
#
# Shapes: B rows, F fields, C codes a row, W weights.

_MAX_ENUMERATED = 100_000
_SAMPLED_ROWS = 200_000
_BLOCK_ROWS = 50_000
_SAMPLE_SEED = 20_240_601
_NEWTON_STEPS = 50
_RIDGE = 1e-9


def best_logits_of_order(
    order: int, true_logits: Callable[[NDArray], NDArray], num_fields: int, ids_per_field: int, ids_BF: NDArray
) -> NDArray:
    """Returns the logits [B] that the best model of an order gives to rows.

    If there are few combinations of ids, all are weighed equally; otherwise a large sample of them.

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
    if ids_per_field**num_fields <= _MAX_ENUMERATED:
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


PlantedKind = Literal["pairs", "triples"]


@dataclass(frozen=True)
class PlantedModel:
    """The true model of planted rows.

    Attributes:
        order: how many fields interact, 2 or 3; with 3 there are 3 fields.
        bias: the logit without main effects and interactions.
        effects: float64 [F, M], main effects by field and id.
        factors: float64 [F, M, K].
    """

    order: int
    bias: float
    effects: NDArray
    factors: NDArray

    @property
    def num_fields(self) -> int:
        """F."""
        return self.effects.shape[0]

    @property
    def ids_per_field(self) -> int:
        """M; the ids of field f are those from f * M to before (f + 1) * M."""
        return self.effects.shape[1]

    @property
    def num_parameters(self) -> int:
        """Free parameters: those of the formula less the directions in which no logit changes.

        A constant can move from each field's main effects to the bias. A vector can move from a field's factors of
        pairs to the main effects, and those factors can be rotated; columns of triples can be rescaled between fields.
        """
        (fields, ids), rank = self.effects.shape, self.factors.shape[-1]
        main_effects = 1 + fields * (ids - 1)
        if self.order == 2:
            return main_effects + fields * (ids - 1) * rank - rank * (rank - 1) // 2
        return main_effects + (fields * ids - 2) * rank

    def estimation_gap(self, num_rows: int) -> float:
        """Nats of logloss that maximum likelihood costs with so many training rows, to first order (Wilks 1938)."""
        return self.num_parameters / (2 * num_rows)

    def logits(self, ids_BF: NDArray) -> NDArray:
        """Returns the true logits [B] of rows of ids, int64 [B, F]."""
        rows_BFK = self.factors.reshape(-1, self.factors.shape[-1])[ids_BF]
        effects_B = self.effects.reshape(-1)[ids_BF].sum(1)
        return self.bias + effects_B + (sum_of_pairs(rows_BFK) if self.order == 2 else rows_BFK.prod(1).sum(1))


@dataclass(frozen=True)
class PlantedRows:
    """Train and test rows, and the best possible figures for the test rows; logloss in nats.

    The additive and pairwise figures come from the model of that family with the lowest expected logloss. Learners by
    likelihood approach it with more and more rows. Its logloss is a bound for the family. Its AUC is only the limit of
    such learners: other models of the family may rank better and predict worse.

    Attributes:
        model: the true one.
        bayes_auc, bayes_logloss: of the true logits, the best of any model.
    """

    train: Batch
    test: Batch
    model: PlantedModel
    bayes_auc: float
    bayes_logloss: float

    @property
    def additive_auc(self) -> float:
        """AUC of the best sum of main effects, the limit of logistic regression."""
        return self._additive[0]

    @property
    def additive_logloss(self) -> float:
        """Logloss of the best sum of main effects, the bound of logistic regression."""
        return self._additive[1]

    @property
    def pairwise_auc(self) -> float:
        """AUC of the best model of main effects and pairs, at best the limit of factorization machines."""
        return self._pairwise[0]

    @property
    def pairwise_logloss(self) -> float:
        """Logloss of the best model of main effects and pairs, the bound of factorization machines."""
        return self._pairwise[1]

    @cached_property
    def _additive(self) -> tuple[float, float]:
        return self._figures_of_order(1)

    @cached_property
    def _pairwise(self) -> tuple[float, float]:
        return (self.bayes_auc, self.bayes_logloss) if self.model.order == 2 else self._figures_of_order(2)

    def _figures_of_order(self, order: int) -> tuple[float, float]:
        ids_BF = self.test.ids.view(-1, self.test.num_fields).numpy()
        model = self.model
        logits = best_logits_of_order(order, model.logits, model.num_fields, model.ids_per_field, ids_BF)
        return auc(self.test.labels, logits), logloss(self.test.labels, logits)


@dataclass(frozen=True)
class _Recipe:
    order: int
    num_fields: int
    ids_per_field: int
    rank: int
    bias: float
    factor_std: float
    standardized: bool
    train_rows: int
    test_rows: int


_RECIPES: dict[PlantedKind, _Recipe] = {
    "pairs": _Recipe(2, 8, 50, 4, -1.0, 0.45, False, 40_000, 10_000),
    "triples": _Recipe(3, 3, 12, 2, -0.5, 1.1, True, 60_000, 20_000),
}
_EFFECT_STD = 0.3


def planted_rows(
    kind: PlantedKind, seed: int = 0, train_rows: int | None = None, test_rows: int | None = None
) -> PlantedRows:
    """Draws a data set; equal arguments give equal rows.

    Args:
        kind: of the interactions.
        seed: of the true model and the rows.
        train_rows, test_rows: how many; None takes 40,000 and 10,000 of pairs, 100,000 and 20,000 of the others.

    Raises:
        ValueError: an unknown kind, or a row count below one.
    """
    if kind not in _RECIPES:
        raise ValueError(f"expected one of {', '.join(_RECIPES)}, got {kind!r}")
    recipe = _RECIPES[kind]
    train_rows, test_rows = row_counts(train_rows, test_rows, (recipe.train_rows, recipe.test_rows))
    rng = np.random.default_rng(seed)
    model = _draw_model(rng, recipe)
    train, _ = _draw_rows(rng, model, train_rows)
    test, logits = _draw_rows(rng, model, test_rows)
    return PlantedRows(train, test, model, auc(test.labels, logits), logloss(test.labels, logits))


def planted_interactions(seed: int = 0, train_rows: int = 40_000, test_rows: int = 10_000) -> PlantedRows:
    """Returns `planted_rows("pairs", ...)`."""
    return planted_rows("pairs", seed, train_rows, test_rows)


def _draw_model(rng: np.random.Generator, recipe: _Recipe) -> PlantedModel:
    shape = recipe.num_fields, recipe.ids_per_field
    effects = _EFFECT_STD * rng.standard_normal(shape)
    factors = recipe.factor_std * rng.standard_normal((*shape, recipe.rank))
    if recipe.standardized:
        factors -= factors.mean(1, keepdims=True)
        factors *= recipe.factor_std / factors.std(1, keepdims=True)
    return PlantedModel(recipe.order, recipe.bias, effects, factors)


def _draw_rows(rng: np.random.Generator, model: PlantedModel, num_rows: int) -> tuple[Batch, NDArray]:
    ids_BF = rng.integers(model.ids_per_field, size=(num_rows, model.num_fields))
    ids_BF += model.ids_per_field * np.arange(model.num_fields)
    logits_B = model.logits(ids_BF)
    labels_B = rng.random(num_rows) < 1 / (1 + np.exp(-logits_B))
    batch = Batch(
        ids=torch.from_numpy(ids_BF.reshape(-1)),
        labels=torch.from_numpy(labels_B.astype(np.float32)),
        num_fields=model.num_fields,
    )
    return batch, logits_B


def sum_of_pairs(rows_BFK: NDArray) -> NDArray:
    """The sum of <v_f, v_g> over f < g, in time linear in the fields (Rendle 2010, lemma 3.1): [B]."""
    return 0.5 * (rows_BFK.sum(1) ** 2 - (rows_BFK**2).sum(1)).sum(1)
