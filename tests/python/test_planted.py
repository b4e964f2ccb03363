"""The planted data: formulas, figures, what theory says of each family of models, reproducibility."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from recstore_ops.training.data.sparse_lines import LibsvmFormat, write_libsvm
from recstore_ops.training.metrics.classification import logloss
from recstore_ops.training.synthetic.planted import (
    PlantedKind,
    PlantedModel,
    best_logits_of_order,
    planted_interactions,
    planted_rows,
)

pytestmark = pytest.mark.tier("quick")

KINDS: tuple[PlantedKind, ...] = get_args(PlantedKind)


class TestRows:
    @pytest.mark.parametrize("kind", KINDS)
    def test_have_one_id_of_each_field(self, kind: PlantedKind) -> None:
        planted = planted_rows(kind, train_rows=100, test_rows=50)
        train, model = planted.train, planted.model
        assert (len(train), len(planted.test)) == (100, 50)
        assert train.num_fields == model.num_fields == {"pairs": 8, "triples": 3}[kind]
        assert train.offsets is None
        assert train.values is None
        fields = train.ids.view(100, -1) // model.ids_per_field
        assert torch.equal(fields, torch.arange(model.num_fields).expand(100, -1))

    def test_ids_are_uniform(self) -> None:
        counts = torch.bincount(planted_interactions().train.ids, minlength=400)
        # 40,000 rows / 50 ids = 800 expected, standard deviation 28.
        assert counts.shape == (400,)
        assert counts.min() > 800 - 5 * 28
        assert counts.max() < 800 + 5 * 28

    @pytest.mark.parametrize("kind", KINDS)
    def test_labels_follow_the_true_logits(self, kind: PlantedKind) -> None:
        planted = planted_rows(kind, 5, train_rows=20_000, test_rows=100)
        logits = planted.model.logits(ids_of(planted.train.ids, planted.model))
        probabilities, labels = 1 / (1 + np.exp(-logits)), planted.train.labels.numpy()
        for low in np.arange(0, 1, 0.1):
            chosen = (probabilities >= low) & (probabilities < low + 0.1)
            five_sigma = 5 * 0.5 / np.sqrt(chosen.sum())
            assert abs(labels[chosen].mean() - probabilities[chosen].mean()) < five_sigma

    def test_equal_seeds_give_equal_rows_and_others_do_not(self) -> None:
        first, again, other = (planted_interactions(seed, 100, 10) for seed in (3, 3, 4))
        assert torch.equal(first.train.ids, again.train.ids)
        assert torch.equal(first.test.labels, again.test.labels)
        assert first.bayes_auc == again.bayes_auc
        assert not torch.equal(first.train.ids, other.train.ids)

    def test_written_read_back_equal(self, tmp_path: Path) -> None:
        test = planted_interactions(0, 1, 100).test
        write_libsvm(tmp_path / "test.libfm", test)
        read = LibsvmFormat(num_fields=8).parse((tmp_path / "test.libfm").read_bytes())
        assert torch.equal(read.ids, test.ids)
        assert torch.equal(read.labels, test.labels)

    def test_none_or_of_an_unknown_kind_are_refused(self) -> None:
        with pytest.raises(ValueError, match="at least one row"):
            planted_rows("pairs", train_rows=0)
        with pytest.raises(ValueError, match="one of pairs, triples, got 'quads'"):
            planted_rows("quads")  # pyright: ignore[reportArgumentType]


class TestPublishedDraw:
    def test_logits_follow_the_formula_pair_by_pair(self) -> None:
        rng = np.random.default_rng(5)
        w, v = 0.3 * rng.standard_normal(400), 0.45 * rng.standard_normal((400, 4))
        planted = planted_interactions(5, train_rows=200, test_rows=100)
        ids = ids_of(planted.train.ids, planted.model)
        logits = -1 + w[ids].sum(1)
        for f, g in combinations(range(8), 2):
            logits += (v[ids[:, f]] * v[ids[:, g]]).sum(1)
        np.testing.assert_allclose(planted.model.logits(ids), logits)

    @pytest.mark.parametrize("seed", [0, 1])
    def test_bayes_figures_are_near_the_published_ones(self, seed: int) -> None:
        # One other draw gave AUC 0.883 and logloss 0.391; draws differ by about 0.01.
        planted = planted_interactions(seed)
        assert planted.bayes_auc == pytest.approx(0.883, abs=0.02)
        assert planted.bayes_logloss == pytest.approx(0.391, abs=0.03)

    def test_is_still_the_same(self) -> None:
        planted = planted_interactions()
        assert int(planted.train.ids[:80].sum()) == 15_791
        assert int(planted.train.labels.sum()) == 13_180
        assert planted.bayes_auc == pytest.approx(0.8850997473609541, abs=1e-9)
        assert planted.bayes_logloss == pytest.approx(0.3882688844966793, abs=1e-9)


class TestStandardizedFactors:
    def test_have_mean_zero_and_the_deviation(self) -> None:
        factors = planted_rows("triples", 2, 1, 100).model.factors
        np.testing.assert_allclose(factors.mean(1), 0, atol=1e-12)
        np.testing.assert_allclose(factors.std(1), 1.1)

    def test_leave_triples_no_part_that_pairs_could_express(self) -> None:
        model = planted_rows("triples", 2, 1, 100).model
        logits = model.logits(every_row(model)).reshape((12,) * 3)
        for rest in range(3):
            first, second = (model.effects[field] for field in range(3) if field != rest)
            main = model.bias + model.effects[rest].mean() + first[:, None] + second
            np.testing.assert_allclose(logits.mean(rest), main, atol=1e-12)
        # The main effects leave the triples, of variance 2 columns x 1.1^6 where the columns are uncorrelated.
        effects = sum(np.expand_dims(model.effects[f], [g for g in range(3) if g != f]) for f in range(3))
        assert (logits - effects).var() == pytest.approx(2 * 1.1**6, rel=0.3)


class TestTheory:
    @pytest.mark.parametrize("kind", KINDS)
    def test_each_family_is_bounded_by_the_larger_one(self, kind: PlantedKind) -> None:
        planted = planted_rows(kind, train_rows=1)
        assert planted.additive_logloss > planted.pairwise_logloss + 0.002
        assert planted.additive_auc < planted.pairwise_auc - 0.005
        if kind == "triples":
            assert planted.pairwise_logloss > planted.bayes_logloss + 0.1
            assert planted.pairwise_auc < planted.bayes_auc - 0.15
        else:
            assert planted.pairwise_logloss == planted.bayes_logloss
            assert planted.pairwise_auc == planted.bayes_auc

    @pytest.mark.parametrize("order", [1, 2])
    def test_best_model_over_all_rows_is_that_of_another_optimizer(self, order: int) -> None:
        model = planted_rows("triples", 1, 1, 100).model
        ids = every_row(model)
        probabilities = torch.from_numpy(1 / (1 + np.exp(-model.logits(ids))))
        columns = [ids[:, fields] @ [1, 100][:order] for fields in map(list, combinations(range(3), order))]
        fitted = fit_by_lbfgs(torch.from_numpy(np.stack(columns, 1)), probabilities)
        ours = best_logits_of_order(order, model.logits, 3, 12, ids)
        np.testing.assert_allclose(ours, fitted, atol=1e-4)

    def test_best_model_over_sampled_rows_is_where_logistic_regression_ends(self) -> None:
        planted = planted_rows("pairs", 1, 100_000, 20_000)
        model = planted.model
        columns = torch.cat([planted.train.ids, planted.test.ids]).view(-1, 8)
        train, test = columns.split([100_000, 20_000])
        weights = lbfgs_weights(train, planted.train.labels, 400, steps=20)
        reached = logloss(planted.test.labels, weights[test].sum(1))
        parameters = 1 + 8 * (model.ids_per_field - 1)
        # The standard error of an excess logloss p / 2n is sqrt(2 p) / 2n, 0.0002; the sample's error is as large.
        assert reached - planted.additive_logloss == pytest.approx(parameters / 200_000, abs=0.001)

    @pytest.mark.parametrize(("order", "fields", "rank"), [(2, 3, 1), (2, 4, 2), (2, 5, 3), (3, 3, 1), (3, 3, 2)])
    def test_free_parameters_are_the_rank_of_the_derivatives(self, order: int, fields: int, rank: int) -> None:
        rng = np.random.default_rng(0)
        model = PlantedModel(order, 0.5, rng.standard_normal((fields, 4)), rng.standard_normal((fields, 4, rank)))
        ids = torch.from_numpy(every_row(model))

        def logits(effects: Tensor, factors: Tensor) -> Tensor:
            interacting = combinations(range(fields), order)
            products = [torch.stack([factors[ids[:, f]] for f in which]).prod(0).sum(1) for which in interacting]
            return model.bias + effects[ids].sum(1) + torch.stack(products).sum(0)

        parameters = (torch.from_numpy(model.effects).view(-1), torch.from_numpy(model.factors).view(-1, rank))
        np.testing.assert_allclose(logits(*parameters), model.logits(ids.numpy()))
        derivatives = torch.autograd.functional.jacobian(logits, parameters)
        matrix = torch.cat([part.reshape(len(ids), -1) for part in derivatives], dim=1)
        # The bias is not among them, for the main effects of one field can stand in for it.
        assert int(torch.linalg.matrix_rank(matrix)) == model.num_parameters

    def test_estimation_gap_is_half_a_nat_for_a_parameter_in_all_rows_together(self) -> None:
        model = planted_interactions(0, 1, 100).model
        assert model.num_parameters == 1 + 392 + 8 * 49 * 4 - 6
        assert model.estimation_gap(40_000) * 40_000 == pytest.approx(model.num_parameters / 2)


def ids_of(ids: Tensor, model: PlantedModel) -> NDArray:
    return ids.view(-1, model.num_fields).numpy()


def every_row(model: PlantedModel) -> NDArray:
    within_field = np.indices((model.ids_per_field,) * model.num_fields).reshape(model.num_fields, -1).T
    return within_field + model.ids_per_field * np.arange(model.num_fields)


def fit_by_lbfgs(columns: Tensor, targets: Tensor) -> NDArray:
    """Logits of the additive model of arbitrary codes that fits targets best."""
    _, codes = torch.stack([column + 10_000 * place for place, column in enumerate(columns.T)], 1).unique(
        return_inverse=True
    )
    return lbfgs_weights(codes, targets, int(codes.max()) + 1, steps=200)[codes].sum(1).numpy()


def lbfgs_weights(codes: Tensor, targets: Tensor, num_weights: int, *, steps: int) -> Tensor:
    weights = torch.zeros(num_weights, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights], max_iter=steps, tolerance_grad=1e-8, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = binary_cross_entropy_with_logits(weights[codes].sum(1), targets.double())
        value.backward()
        return value

    optimizer.step(loss)  # pyright: ignore[reportArgumentType]
    return weights.detach()
