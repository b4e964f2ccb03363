"""`recstore train`: the figures it reaches, the files it leaves, and what it says to users."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recstore_ops import RecStoreClient, cli, table_names
from recstore_ops.training import (
    Batch,
    EpochRecord,
    Evaluation,
    Observer,
    TrainingConfig,
    best_record,
    build_model,
    planted_interactions,
    table_rows,
    train,
    write_libsvm,
)
from recstore_ops.training.loop import EarlyStopping
from recstore_ops.training.optimizers import dense_optimizer, table_optimizer

TableName = Callable[[], str]
Recstore = Callable[..., int]

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def recstore(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recstore:
    """Runs the command line within `tmp_path` and returns the exit code."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> int:
        monkeypatch.setattr(sys, "argv", ["recstore", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        # Each run of the real program has a store of its own.
        drop_tables("lr")
        drop_tables("fm")
        assert isinstance(caught.value.code, int)
        return caught.value.code

    return run


@pytest.fixture
def small_files(tmp_path: Path) -> Path:
    """A directory of 1,003 training and 500 test rows."""
    planted = planted_interactions(0, 1003, 500)
    write_libsvm(tmp_path / "train.libfm", planted.train)
    write_libsvm(tmp_path / "test.libfm", planted.test)
    return tmp_path


def train_new(config: TrainingConfig, name: str, observer: Observer | None = None) -> list[EpochRecord]:
    """Trains a new model and deletes its tables, so that the name is free again."""
    try:
        return train(config, build_model(config, name), observer=observer)
    finally:
        drop_tables(name)


def drop_tables(prefix: str) -> None:
    for table in table_names():
        if table.startswith(f"{prefix}/"):
            RecStoreClient().drop(table)


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


class TestFigures:
    """What a correct implementation reaches on planted and on real rows."""

    def test_fm_finds_planted_interactions(self, table_name: TableName) -> None:
        config = TrainingConfig(
            planted=True,
            dim=4,
            init_std=0.05,
            optimizer="ftrl",
            lr=0.1,
            l1=1e-5,
            l2=1e-3,
            reduction="sum",
            batch_size=100,
            epochs=20,
            validation_fraction=0,
        )
        test = train_new(config, table_name())[-1].test
        assert test is not None
        assert test.auc >= 0.86

    def test_lr_cannot_find_planted_interactions(self, table_name: TableName) -> None:
        config = TrainingConfig(
            planted=True,
            model="lr",
            optimizer="ftrl",
            lr=0.1,
            l1=1e-5,
            l2=1e-3,
            reduction="sum",
            batch_size=100,
            epochs=3,
            validation_fraction=0,
        )
        test = train_new(config, table_name())[-1].test
        assert test is not None
        assert 0.62 <= test.auc <= 0.68

    def test_fm_on_frappe_with_the_defaults(self, data_root: Path, table_name: TableName) -> None:
        frappe = data_root / "frappe"
        config = TrainingConfig(train=(frappe / "train.libfm",), test=(frappe / "test.libfm",))
        records = train_new(config, table_name())
        test = best_record(records).test
        assert len(records) < config.epochs, "early stopping ends the run"
        assert test is not None
        assert test.auc >= 0.925
        assert test.logloss <= 0.305

    def test_lr_with_ftrl_on_xflow(self, data_root: Path, table_name: TableName) -> None:
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
        test = train_new(config, table_name())[-1].test
        assert test is not None
        assert test.auc == pytest.approx(0.595, abs=0.002)
        assert test.logloss == pytest.approx(0.5394, abs=0.0005)


class TestLoop:
    def config(self, small_files: Path, **options: Any) -> TrainingConfig:
        train_file, test_file = small_files / "train.libfm", small_files / "test.libfm"
        options = {"epochs": 2, "validation_fraction": 0, **options}
        return TrainingConfig(train=(train_file,), test=(test_file,), **options)

    def figures(self, config: TrainingConfig, name: str) -> list[tuple[float, Evaluation | None]]:
        return [(record.train_loss, record.test) for record in train_new(config, name)]

    def test_the_last_partial_batch_is_trained_on(self, small_files: Path, table_name: TableName) -> None:
        records = train_new(self.config(small_files, batch_size=100), table_name())
        assert [record.train_rows for record in records] == [1003, 1003]

    def test_equal_seeds_give_equal_figures(self, small_files: Path, table_name: TableName) -> None:
        config = self.config(small_files, seed=3)
        other = self.config(small_files, seed=4)
        name = table_name()
        figures = self.figures(config, name)
        assert figures == self.figures(config, name)
        assert figures != self.figures(other, name)

    def test_rows_that_do_not_fit_the_cache_give_equal_figures(self, small_files: Path, table_name: TableName) -> None:
        cached = self.config(small_files, validation_fraction=0.2)
        streamed = self.config(small_files, validation_fraction=0.2, cache_bytes=0)
        name = table_name()
        assert self.figures(cached, name) == self.figures(streamed, name)

    def test_validation_rows_are_not_trained_on(self, small_files: Path, table_name: TableName) -> None:
        config = self.config(small_files, validation_fraction=0.2)
        record = train_new(config, table_name())[0]
        assert record.validation is not None
        assert record.validation.rows > 100
        assert record.train_rows + record.validation.rows == 1003

    def test_summed_gradients_are_batch_size_times_the_mean(self, small_files: Path, table_name: TableName) -> None:
        # All rows in one batch: a partial one would have another factor.
        name = table_name()
        options = {"optimizer": "sgd", "batch_size": 1003, "epochs": 3, "shuffle": False}
        mean = self.config(small_files, reduction="mean", lr=0.1003, **options)
        summed = self.config(small_files, reduction="sum", lr=0.0001, **options)
        losses = [record.train_loss for record in train_new(mean, name)]
        summed_losses = [record.train_loss for record in train_new(summed, name)]
        assert losses == pytest.approx(summed_losses, rel=1e-5)
        assert losses[-1] < losses[0]

    @pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "ftrl"])
    def test_every_optimizer_lowers_the_loss(self, small_files: Path, table_name: TableName, optimizer) -> None:
        config = self.config(small_files, optimizer=optimizer, epochs=4, batch_size=50)
        losses = [record.train_loss for record in train_new(config, table_name())]
        assert losses[-1] < losses[0] - 0.005

    def test_tables_with_rows_are_refused(self, small_files: Path, table_name: TableName) -> None:
        name = table_name()
        config = self.config(small_files)
        model = build_model(config, name)
        train(config, model)
        num_rows = table_rows(model)
        assert num_rows > 0
        with pytest.raises(ValueError, match=f"have {num_rows} rows already"):
            build_model(config, name)

    def test_a_diverging_run_stops_with_advice(self, small_files: Path, table_name: TableName) -> None:
        config = self.config(small_files, optimizer="sgd", lr=1e6, reduction="sum", epochs=20, batch_size=10)
        with pytest.raises(ValueError, match="lower the learning rate"):
            train_new(config, table_name())

    def test_too_few_rows_to_hold_any_out_is_an_error(self, tmp_path: Path, table_name: TableName) -> None:
        (tmp_path / "one").write_text("1 3:1\n")
        config = TrainingConfig(train=(tmp_path / "one",), validation_fraction=0.01)
        with pytest.raises(ValueError, match="no rows to evaluate"):
            train_new(config, table_name())

    def test_a_bad_test_line_surfaces_before_training(self, small_files: Path, table_name: TableName) -> None:
        with open(small_files / "test.libfm", "a") as file:
            file.write("bad\n")

        class NoBatches:
            def on_batch(self, epoch: int, rows: int, expected_rows: int | None, loss: float):
                raise AssertionError("trained before the test rows were read")

            def on_epoch(self, record: EpochRecord) -> None:
                raise AssertionError("trained before the test rows were read")

        with pytest.raises(ValueError, match=r"test\.libfm:501: expected"):
            train_new(self.config(small_files), table_name(), observer=NoBatches())


class TestEarlyStopping:
    def test_stops_after_patience_epochs_without_improvement(self) -> None:
        stopping = EarlyStopping(patience=2)
        assert [stopping.should_stop(x) for x in (0.5, 0.4, 0.41, 0.39, 0.4, 0.39)] == ([False] * 5 + [True])

    def test_zero_patience_never_stops(self) -> None:
        stopping = EarlyStopping(patience=0)
        assert not any(stopping.should_stop(x) for x in (0.1, 0.2, 0.3, 0.4))

    def record(self, epoch: int, logloss: float | None) -> EpochRecord:
        validation = None if logloss is None else Evaluation(10, 0.5, logloss)
        return EpochRecord(epoch, 0.5, 100, 1.0, validation, None, 5)

    def test_best_record_has_the_lowest_validation_logloss(self) -> None:
        records = [self.record(n, loss) for n, loss in enumerate((0.5, 0.3, 0.4), start=1)]
        assert best_record(records).epoch == 2

    def test_best_record_without_validation_is_the_last(self) -> None:
        assert best_record([self.record(n, None) for n in (1, 2, 3)]).epoch == 3


class TestConfig:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"planted": False}, "no training data"),
            ({"train": (Path("x"),)}, "planted data takes no files"),
            ({"model": "dnn"}, "model must be one of lr, fm, got 'dnn'"),
            ({"optimizer": "lion"}, "optimizer must be one of sgd"),
            ({"model": "lr", "dim": 4}, "model lr takes no dim"),
            ({"l1": 0.1}, "optimizer adam takes no l1"),
            ({"optimizer": "ftrl", "weight_decay": 0.1}, "optimizer ftrl takes no weight_decay"),
            ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
            ({"epochs": 0}, "epochs must be at least 1, got 0"),
            ({"dim": 0}, "dim must be at least 1, got 0"),
            ({"lr": 0.0}, "lr must be above 0"),
            ({"lr": float("nan")}, "lr must be at least 0, got nan"),
            ({"seed": -1}, "seed must be at least 0, got -1"),
            ({"validation_fraction": 0.6}, "validation_fraction must be at most 0.5"),
            ({"validation_fraction": 0, "patience": 1}, "early stopping needs validation rows"),
        ],
    )
    def test_nonsense_is_refused(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            TrainingConfig(**{"planted": True, **options})

    def test_ftrl_takes_lr_as_alpha(self) -> None:
        config = TrainingConfig(planted=True, optimizer="ftrl", lr=0.2, l1=0.5)
        assert table_optimizer(config) == {
            "kind": "ftrl",
            "alpha": 0.2,
            "beta": 1.0,
            "l1": 0.5,
            "l2": 0.0,
        }

    @pytest.mark.parametrize(
        ("optimizer", "expected"),
        [
            ("sgd", torch.optim.SGD),
            ("adam", torch.optim.Adam),
            ("adamw", torch.optim.Adam),
            ("adagrad", torch.optim.Adagrad),
            ("rowwise_adagrad", torch.optim.Adagrad),
            ("ftrl", torch.optim.Adagrad),
        ],
    )
    def test_the_bias_follows_the_same_rule(self, optimizer, expected: type) -> None:
        config = TrainingConfig(planted=True, optimizer=optimizer, lr=0.3)
        bias = torch.nn.Parameter(torch.zeros(()))
        dense = dense_optimizer(config, [bias])
        assert dense is not None
        assert type(dense) is expected
        assert dense.param_groups[0]["lr"] == 0.3
        assert dense.param_groups[0].get("weight_decay", 0) == 0


class TestCommand:
    def test_a_run_leaves_its_configuration_metrics_and_curve(self, recstore: Recstore, small_files: Path) -> None:
        options = ("--epochs", 3, "--patience", 0, "--dim", 4, "--run-name", "first")
        assert recstore("train", small_files, *options) == 0
        run = small_files / "runs" / "first"
        config = json.loads((run / "config.json").read_text())
        assert config["train"] == [str(small_files / "train.libfm")]
        assert (config["dim"], config["lr"], config["epochs"]) == (4, 2e-3, 3)
        metrics = metrics_of(run)
        assert [line["epoch"] for line in metrics] == [1, 2, 3]
        assert all(0 < line["test_auc"] < 1 and line["test_rows"] == 500 for line in metrics)
        assert (run / "learning_curve.png").read_bytes().startswith(PNG_MAGIC)

    def test_output_that_is_no_terminal_has_one_line_an_epoch(
        self, recstore: Recstore, small_files: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        options = ("--epochs", "3", "--patience", "0", "--run-name", "plain")
        recstore("train", small_files, *options)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split()[:3] == ["epoch", "train", "loss"]
        assert [line.split()[0] for line in lines[1:4]] == ["1", "2", "3"]
        assert "lowest validation logloss" in lines[4]
        assert "results:" in lines[5]
        assert len(lines) == 6

    def test_a_run_can_be_repeated_under_another_name(self, recstore: Recstore, small_files: Path) -> None:
        figures = []
        for name in ("first", "second"):
            recstore("train", small_files, "--epochs", "2", "--run-name", name)
            metrics = metrics_of(small_files / "runs" / name)
            figures.append([(line["train_loss"], line["test_auc"]) for line in metrics])
        assert figures[0] == figures[1]

    def test_an_existing_run_is_left_alone(
        self, recstore: Recstore, small_files: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run = small_files / "runs" / "taken"
        run.mkdir(parents=True)
        assert recstore("train", small_files, "--run-name", "taken") == 2
        assert "run 'taken' exists already" in capsys.readouterr().err
        assert list(run.iterdir()) == []

    def test_runs_without_a_name_get_their_own_directories(self, recstore: Recstore, small_files: Path) -> None:
        for _ in range(2):
            assert recstore("train", small_files, "--epochs", "1") == 0
        assert len(list((small_files / "runs").iterdir())) == 2

    def test_planted_rows_need_no_files(
        self, recstore: Recstore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        options = ("--planted", "--epochs", "1", "--batch-size", "1000", "--run-name", "planted")
        assert recstore("train", *options) == 0
        assert "the true model has test AUC 0.8" in capsys.readouterr().out
        assert metrics_of(tmp_path / "runs" / "planted")[0]["test_rows"] == 10_000

    def test_a_bad_line_stops_with_one_sentence_and_leaves_no_run(
        self, recstore: Recstore, small_files: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with open(small_files / "train.libfm", "a") as file:
            file.write("1 3:1 4:oops\n")
        assert recstore("train", small_files, "--run-name", "bad") == 2
        error = capsys.readouterr().err
        assert f"{small_files / 'train.libfm'}:1004: expected id:value" in error
        assert "got '4:oops'" in error
        assert error.count("\n") == 1
        assert not (small_files / "runs" / "bad").exists()

    def test_skipped_lines_are_reported(
        self, recstore: Recstore, small_files: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with open(small_files / "train.libfm", "a") as file:
            file.write("oops\n")
        options = ("--on-bad-line", "skip", "--epochs", "1", "--run-name", "skip")
        assert recstore("train", small_files, *options) == 0
        assert "bad lines skipped: 1; the first: " in capsys.readouterr().out

    def test_test_rows_of_one_class_have_no_auc(
        self,
        recstore: Recstore,
        small_files: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        rows = planted_interactions(0, 100, 10).train
        ones = Batch(rows.ids, rows.values, rows.offsets, torch.ones(100))
        write_libsvm(small_files / "test.libfm", ones)
        assert recstore("train", small_files, "--epochs", "2", "--run-name", "one") == 0
        assert capsys.readouterr().out.count("the test rows have labels of one class only") == 1
        metrics = metrics_of(small_files / "runs" / "one")
        assert metrics[0]["test_auc"] is None
        assert metrics[0]["test_logloss"] > 0

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ((), "no training data"),
            (("absent.libfm",), "no such file or directory: absent.libfm"),
            (("--planted", "--alpha", "1"), "optimizer adam takes no alpha; give lr"),
            (
                ("--planted", "--optimizer", "ftrl", "--alpha", "1", "--lr", "1"),
                "alpha and lr are the same for ftrl",
            ),
            (("--planted", "--run-name", "a/b"), "run name 'a/b' is not a plain directory name"),
            (("--planted", "--epochs", "many"), "Invalid value for '--epochs'"),
            (("--planted", "--model", "dnn"), "Invalid value for '--model'"),
        ],
    )
    def test_a_user_error_is_a_sentence_and_exit_code_2(
        self,
        recstore: Recstore,
        capsys: pytest.CaptureFixture[str],
        options: tuple[str, ...],
        message: str,
    ) -> None:
        assert recstore("train", *options) == 2
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error

    def test_help_names_the_options(self, recstore: Recstore, capsys: pytest.CaptureFixture[str]) -> None:
        assert recstore("train", "--help") == 0
        assert "--on-bad-line" in capsys.readouterr().out
