"""What a correct implementation reaches on planted and on real rows, and parity with `nn.Embedding` step by step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from training_runs import Recorder, train_new

from recstore_ops.training import Evaluation, PlantedRows, StepRecord, TrainingConfig, best_record, planted_rows
from recstore_ops.training.run.choices import ModelName
from recstore_ops.training.synthetic.planted import PlantedKind

pytestmark = pytest.mark.tier("test")

TableName = Callable[[], str]


def ftrl_on_planted_pairs(name: str, **options: Any) -> Evaluation:
    """Test figures after the last epoch, with the published settings of FTRL."""
    ftrl: dict[str, Any] = {"optimizer": "ftrl", "lr": 0.1, "l1": 1e-5, "l2": 1e-3, "reduction": "sum"}
    config = TrainingConfig(planted="pairs", batch_size=100, validation_fraction=0, **ftrl, **options)
    test = train_new(config, name)[-1].test
    assert test is not None
    return test


@pytest.mark.tier("all")
def test_fm_finds_planted_interactions(fixed_table_name: TableName) -> None:
    assert ftrl_on_planted_pairs(fixed_table_name(), dim=4, init_std=0.05, epochs=20).auc >= 0.86


@pytest.mark.tier("all")
def test_lr_cannot_find_planted_interactions(fixed_table_name: TableName) -> None:
    assert 0.62 <= ftrl_on_planted_pairs(fixed_table_name(), model="lr", epochs=3).auc <= 0.68


def best_on_frappe(data_root: Path, name: str, **options: Any) -> Evaluation:
    """Test figures of the best evaluation of a run that early stopping ends."""
    folder = data_root / "frappe"
    config = TrainingConfig(train=(folder / "train.libfm",), test=(folder / "test.libfm",), **options)
    records = train_new(config, name)
    assert config.epochs is not None
    assert len(records) < config.epochs, "early stopping ends the run"
    test = best_record(records).test
    assert test is not None
    return test


@pytest.mark.tier("all")
def test_fm_on_frappe_with_the_defaults(data_root: Path, fixed_table_name: TableName) -> None:
    test = best_on_frappe(data_root, fixed_table_name())
    assert test.auc >= 0.925
    assert test.logloss <= 0.305


@pytest.fixture(scope="module")
def deepfm_on_frappe() -> Callable[[Path], Evaluation]:
    """Test figures of DeepFM, trained once."""
    return cache(lambda root: best_on_frappe(root, "deepfm on frappe", model="deepfm", lr=1e-3, dropout=0.3))


@pytest.mark.tier("all")
def test_deepfm_on_frappe_stops_before_it_overfits(
    data_root: Path, deepfm_on_frappe: Callable[[Path], Evaluation]
) -> None:
    test = deepfm_on_frappe(data_root)
    assert test.auc >= 0.92
    assert test.logloss <= 0.31


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    "form",
    [{"dropout": 0.3}, {"dropout": 0.3, "cross_structure": "parallel"}, {"dropout": 0.3, "low_rank": 16}],
    ids=str,
)
def test_dcn_on_frappe_ranks_as_well_as_deepfm(
    data_root: Path,
    fixed_table_name: TableName,
    form: dict[str, Any],
    deepfm_on_frappe: Callable[[Path], Evaluation],
) -> None:
    dcn = best_on_frappe(data_root, fixed_table_name(), model="dcn", lr=1e-3, **form)
    assert dcn.auc >= deepfm_on_frappe(data_root).auc - 0.002


def test_lr_with_ftrl_on_xflow(data_root: Path, fixed_table_name: TableName) -> None:
    config = TrainingConfig(
        train=(data_root / "xflow" / "small_train",),
        test=(data_root / "xflow" / "small_test",),
        model="lr",
        ignore_values=True,
        bias=False,
        optimizer="ftrl",
        lr=0.05,
        beta=1,
        l1=5e-5,
        l2=10,
        batch_size=100,
        epochs=100,
        shuffle=False,
        validation_fraction=0,
    )
    test = train_new(config, fixed_table_name())[-1].test
    assert test is not None
    assert test.auc == pytest.approx(0.595, abs=0.002)
    assert test.logloss == pytest.approx(0.5394, abs=0.0005)


LIKE_TORCH = {
    "SparseAdam": {"optimizer": "adam"},
    "Adagrad": {"optimizer": "adagrad", "convention": "torch"},
    "SGD": {"optimizer": "sgd"},
}
MODELS = ("deepfm", "dlrm", "wide_deep", "dcn", "two_tower")
IDS = {"raw ids": None, "hashed ids": 20_000}
BEFORE_CHANGE = {
    ("deepfm", "SparseAdam", "raw ids"),
    ("dlrm", "SGD", "hashed ids"),
    ("wide_deep", "Adagrad", "raw ids"),
    ("dcn", "SparseAdam", "hashed ids"),
    ("two_tower", "SparseAdam", "raw ids"),
}
"""Each model, each optimizer and each kind of ids once; `make test-all` has every combination."""


def each_combination() -> list[Any]:
    """Models, optimizers and numbers of hash buckets, as parameters of a test."""
    return [
        pytest.param(
            model,
            LIKE_TORCH[optimizer],
            IDS[kind],
            id=f"{model}-{optimizer}-{kind}",
            marks=[] if (model, optimizer, kind) in BEFORE_CHANGE else [pytest.mark.tier("all")],
        )
        for model, optimizer, kind in itertools.product(MODELS, LIKE_TORCH, IDS)
    ]


@pytest.mark.parametrize(("model", "optimizer", "hash_buckets"), each_combination())
def test_losses_on_criteo_are_those_of_nn_embedding(
    data_root: Path, model: Any, optimizer: dict[str, Any], hash_buckets: int | None
) -> None:
    options = {"model": model, "hash_buckets": hash_buckets, **optimizer}
    if model == "two_tower":
        options["item_fields"] = ("C3", "C17")
    # Names give initial values. AdaGrad's first step on an element has the size of the learning rate: where rounding
    # decides a gradient's sign, curves part. From one name in ten or so they do, from another one on each kind of
    # processor; with DLRM's products of rows, and gradients at right angles to the vectors of two towers, sooner or
    # later from most. Tables that did something else would part from every name.
    names = [f"{start}/{model}/{optimizer['optimizer']}/{hash_buckets}" for start in ("one", "two", "three")]
    steps = {("two_tower", "adagrad"): 20}.get((model, optimizer["optimizer"]), 50 if model == "dlrm" else 100)
    path = data_root / "criteo" / "train.tsv"
    *first, last = names
    if not any(are_close(*losses_of_both(path, name, steps, **options)) for name in first):
        assert_same_losses(path, last, steps, **options)


def are_close(losses: list[float], expected: list[float]) -> bool:
    return losses == pytest.approx(expected, rel=0, abs=1e-5)


def assert_same_losses(path: Path, name: str, steps: int, **options: Any) -> None:
    """Both sides give the loss of each of the first steps within 1e-5."""
    losses, expected = losses_of_both(path, name, steps, **options)
    assert losses == pytest.approx(expected, rel=0, abs=1e-5)


class EnoughStepsError(Exception):
    """Ends a run of which no further steps are looked at."""


class FirstSteps(Recorder):
    """Keeps what an observer is told of the first steps, and ends the run after them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def on_steps(self, record: StepRecord) -> None:
        """Raises `EnoughStepsError` at the last one."""
        super().on_steps(record)
        if len(self.steps) == self._count:
            raise EnoughStepsError


def losses_of_both(path: Path, name: str, steps: int, **options: Any) -> list[list[float]]:
    """The losses of the first steps over the store's tables and over `nn.Embedding`."""
    losses = []
    for tables in ("store", "nn"):
        config = TrainingConfig(
            train=(path,), tables=tables, epochs=1, batch_size=72, log_every=1, validation_fraction=0, **options
        )
        recorder = FirstSteps(steps)
        with suppress(EnoughStepsError):
            train_new(config, name, recorder)
        losses.append([record.loss for record in recorder.steps])
    assert len(losses[0]) == steps
    assert losses[0][-1] != losses[0][0]
    return losses


# docs/planted.md derives these ends. A logloss on 10,000 or 20,000 test rows has a standard error of about 0.002, and
# what p/2n leaves out adds about a quarter of it.
def end_on_planted(
    kind: PlantedKind, model: ModelName, name: str, **options: Any
) -> tuple[Evaluation, PlantedRows, int]:
    """Test figures of the best evaluation, what was planted, and the rows trained on."""
    defaults = {"epochs": 30, "batch_size": 500, "lr": 5e-3, "init_std": None if model == "lr" else 0.1}
    config = TrainingConfig(planted=kind, model=model, **{**defaults, **options})
    records = train_new(config, name)
    best = best_record(records)
    assert best.test is not None
    return best.test, planted_rows(kind), records[0].train_rows


def test_lr_ends_at_the_bound_of_models_without_interactions(fixed_table_name: TableName) -> None:
    test, planted, rows = end_on_planted("pairs", "lr", fixed_table_name())
    # 8 fields of 50 ids: 8 * 49 weights and the bias are free.
    assert test.logloss == pytest.approx(planted.additive_logloss + 393 / (2 * rows), abs=0.005)
    assert test.auc < 0.68


@pytest.mark.tier("all")
def test_an_fm_of_the_true_rank_ends_at_the_true_model_and_its_estimation_gap(fixed_table_name: TableName) -> None:
    test, planted, rows = end_on_planted("pairs", "fm", fixed_table_name(), dim=4)
    end = planted.bayes_logloss + planted.model.estimation_gap(rows)
    assert end - 0.010 <= test.logloss <= end + 0.015
    assert test.auc > planted.bayes_auc - 0.03


@pytest.mark.tier("all")
def test_an_fm_of_too_low_a_rank_ends_far_from_the_true_model(fixed_table_name: TableName) -> None:
    test, planted, rows = end_on_planted("pairs", "fm", fixed_table_name(), dim=2)
    assert test.logloss > planted.bayes_logloss + planted.model.estimation_gap(rows) + 0.05


def test_an_fm_ends_at_the_bound_of_pairs_where_three_fields_interact(fixed_table_name: TableName) -> None:
    test, planted, _ = end_on_planted("triples", "fm", fixed_table_name())
    assert planted.pairwise_logloss - 0.003 <= test.logloss <= planted.pairwise_logloss + 0.010
    assert test.auc < planted.pairwise_auc + 0.02


@pytest.mark.parametrize("model", ["deepfm", "wide_deep"])
@pytest.mark.tier("all")
def test_a_perceptron_finds_what_three_fields_do(fixed_table_name: TableName, model: ModelName) -> None:
    test, planted, rows = end_on_planted("triples", model, fixed_table_name())
    # A weight for each of the 12^3 combinations is the most that there is to learn.
    assert planted.bayes_logloss <= test.logloss <= planted.bayes_logloss + 12**3 / (2 * rows) + 0.010
    assert test.auc > planted.bayes_auc - 0.025
