"""What a run leaves in its directory: records, plots, segments and TensorBoard's event file."""

from __future__ import annotations

import csv
import json
import math
import time
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recstore_ops.training.metrics.evaluation import Evaluation, Scores
from recstore_ops.training.report.plots import (
    draw_calibration,
    draw_learning_curve,
    draw_table_growth,
    rows_per_epoch,
    running_mean,
)
from recstore_ops.training.report.records import EvaluationRecord, StepRecord
from recstore_ops.training.report.run_directory import RunDirectory

pytestmark = pytest.mark.tier("quick")

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
PLOTS = ("learning_curve.png", "calibration.png", "table_growth.png")


class Config:
    """Stands in for `TrainingConfig`."""

    model = "fm"

    def as_json(self) -> dict[str, Any]:
        return {"model": self.model, "lr": 0.05}


def steps_at(step: int, loss: float = 0.5) -> StepRecord:
    return StepRecord(
        step=step,
        epoch=1,
        rows=step * 256,
        loss=loss,
        rows_per_second=1e5,
        lr=0.05,
        table_rows=step * 100,
        table_bytes=step * 10_000,
        process_bytes=3 * 10**8,
    )


def scores_of(rows: int = 200, seed: int = 0, label: float | None = None, spread: float = 1.0) -> Scores:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(-2, spread, rows).astype(np.float32))
    labels = (torch.from_numpy(rng.random(rows)) < logits.sigmoid()).float()
    segments = torch.from_numpy(rng.integers(5, size=rows))
    return Scores(labels if label is None else torch.full((rows,), label), logits, segments, torch.ones(rows).bool())


def evaluation_at(
    number: int,
    validation: Evaluation | None = None,
    test: Evaluation | None = None,
    epoch: float | None = None,
) -> EvaluationRecord:
    return EvaluationRecord(
        number=number,
        epoch=float(number) if epoch is None else epoch,
        step=number * 10,
        rows=number * 2560,
        train_loss=0.5,
        train_rows=2560,
        seconds=0.1,
        validation=validation,
        test=test,
        table_rows=number * 1000,
    )


def figures(logloss: float) -> Evaluation:
    return Evaluation(rows=200, positives=20, auc=0.7, logloss=logloss, calibration=1.1)


ONE_CLASS = Evaluation(rows=10, positives=10, auc=math.nan, logloss=0.3, calibration=0.9)


def lines_of(directory: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory.path / "metrics.jsonl").read_text().splitlines()]


class TestDirectory:
    @pytest.mark.usefixtures("draws")
    def test_a_run_leaves_configuration_records_and_plots(self, tmp_path: Path) -> None:
        with RunDirectory(tmp_path, "run", Config()) as directory:
            directory.record_event("vocabulary", ids=3, seconds=0.5)
            directory.record_steps(steps_at(10))
            scores = scores_of()
            directory.record_evaluation(evaluation_at(1, Evaluation.of(scores)), {"validation": scores})
        assert json.loads((directory.path / "config.json").read_text()) == Config().as_json()
        lines = lines_of(directory)
        kinds = [line["event"] for line in lines]
        assert kinds == ["vocabulary", "steps", "evaluation", "segments", "calibration", "end"]
        assert lines[1] == steps_at(10).as_json()
        assert lines[-1]["finished"] is True
        for name in PLOTS:
            assert (directory.path / name).read_bytes().startswith(PNG_MAGIC)

    def test_lines_are_on_disk_as_soon_as_they_are_recorded(self, tmp_path: Path) -> None:
        with RunDirectory(tmp_path, "run", Config()) as directory:
            directory.record_steps(steps_at(10))
            assert len(lines_of(directory)) == 1
            directory.record_evaluation(evaluation_at(1), {})
            assert len(lines_of(directory)) == 2

    @pytest.mark.usefixtures("draws")
    @pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
    def test_plots_are_drawn_also_after_an_error(self, tmp_path: Path, error: type[BaseException]) -> None:
        directory = RunDirectory(tmp_path, "run", Config())

        def interrupted_run() -> None:
            with directory:
                directory.record_steps(steps_at(10))
                raise error

        with pytest.raises(error):
            interrupted_run()
        assert (directory.path / "learning_curve.png").read_bytes().startswith(PNG_MAGIC)
        assert lines_of(directory)[-1]["finished"] is False

    def test_a_run_without_a_record_leaves_nothing(self, tmp_path: Path) -> None:
        def failing_run() -> None:
            with RunDirectory(tmp_path, "run", Config()) as directory:
                directory.record_event("vocabulary", ids=3, seconds=0.5)
                raise ValueError("bad line")

        with pytest.raises(ValueError, match="bad line"):
            failing_run()
        assert list(tmp_path.iterdir()) == []

    def test_a_figure_that_is_no_number_is_refused(self, tmp_path: Path) -> None:
        with RunDirectory(tmp_path, "run", Config()) as directory, pytest.raises(ValueError, match="JSON"):
            directory.record_event("vocabulary", seconds=math.nan)

    def test_a_taken_name_is_refused_and_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        with pytest.raises(ValueError, match="run 'run' exists already"):
            RunDirectory(tmp_path, "run", Config())
        assert list((tmp_path / "run").iterdir()) == []

    @pytest.mark.parametrize("name", ["", "a/b", "..", "/x"])
    def test_a_name_that_is_no_directory_name_is_refused(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(ValueError, match=r"is not a plain directory name|exists already"):
            RunDirectory(tmp_path, name, Config())

    def test_runs_without_a_name_are_named_after_the_model(self, tmp_path: Path) -> None:
        names = set()
        for _ in range(3):
            with RunDirectory(tmp_path, None, Config()) as directory:
                directory.record_steps(steps_at(1))
            names.add(directory.name)
        assert len(names) == 3
        assert all(name.startswith("fm-") for name in names)


class TestScores:
    """What is drawn and written of scores are those of the best evaluation."""

    def segments_of(self, directory: RunDirectory) -> list[dict[str, str]]:
        with open(directory.path / "segments.csv", newline="") as file:
            return list(csv.DictReader(file))

    def test_the_best_by_validation_logloss_counts(self, tmp_path: Path) -> None:
        with RunDirectory(tmp_path, "run", Config()) as directory:
            for number, logloss in enumerate((0.5, 0.3, 0.4), start=1):
                record = evaluation_at(number, figures(logloss), figures(0.9))
                directory.record_evaluation(record, {"validation": scores_of(100 * number), "test": scores_of(50)})
        rows = {
            part: sum(int(line["rows"]) for line in self.segments_of(directory) if line["part"] == part)
            for part in ("validation", "test")
        }
        assert rows == {"validation": 200, "test": 50}

    def test_without_validation_rows_the_last_counts(self, tmp_path: Path) -> None:
        with RunDirectory(tmp_path, "run", Config()) as directory:
            for number in (1, 2):
                record = evaluation_at(number, test=figures(0.1 * number))
                directory.record_evaluation(record, {"test": scores_of(100 * number)})
        assert sum(int(line["rows"]) for line in self.segments_of(directory)) == 200
        segments, calibration = lines_of(directory)[-3:-1]
        assert (segments["part"], segments["segments"], segments["weighted_auc_rows"]) == ("test", 5, 200)
        assert 0 < segments["weighted_auc"] < 1
        assert 0 < calibration["expected_calibration_error"] < 1

    def test_without_a_segment_field_there_is_no_file_of_segments(self, tmp_path: Path) -> None:
        scores = scores_of()
        with RunDirectory(tmp_path, "run", Config()) as directory:
            directory.record_evaluation(evaluation_at(1, figures(0.5)), {"test": Scores(scores.labels, scores.logits)})
        assert not (directory.path / "segments.csv").exists()
        assert directory.segments() == {}


@pytest.mark.filterwarnings("error")
class TestPlots:
    @pytest.mark.parametrize(
        ("steps", "evaluations"),
        [
            ([steps_at(1)], []),
            ([], [evaluation_at(1)]),
            ([steps_at(1)], [evaluation_at(1, figures(0.5), figures(0.6))]),
            ([steps_at(n) for n in range(1, 50)], [evaluation_at(n, ONE_CLASS, ONE_CLASS) for n in range(1, 5)]),
            ([steps_at(n) for n in range(1, 50)], [evaluation_at(1, test=figures(0.3), epoch=0.25)]),
            ([steps_at(n, math.nan) for n in range(1, 9)], []),
            ([steps_at(n, 1e30**n) for n in range(1, 9)], [evaluation_at(1, figures(1e-30))]),
            ([steps_at(n) for n in range(1, 3000)], [evaluation_at(n, figures(1 / n)) for n in range(1, 301)]),
        ],
    )
    def test_any_records_can_be_drawn(
        self, tmp_path: Path, steps: list[StepRecord], evaluations: list[EvaluationRecord]
    ) -> None:
        for name, draw in (("curve.png", draw_learning_curve), ("growth.png", draw_table_growth)):
            draw(tmp_path / name, "a run", steps, evaluations)
            pixels = matplotlib.image.imread(tmp_path / name)
            assert pixels.std() > 0

    @pytest.mark.parametrize(
        ("rows", "label", "spread"),
        [(1, None, 1.0), (500, 0.0, 0.0), (500, 1.0, 0.1), (500, 0.0, 3.0), (500, 1.0, 3.0), (500, None, 100.0)],
    )
    def test_any_scores_can_be_drawn(self, tmp_path: Path, rows: int, label: float | None, spread: float) -> None:
        scores = {"validation": scores_of(rows, 1, label, spread), "test": scores_of(rows, 2, None, spread)}
        draw_calibration(tmp_path / "calibration.png", "a run", scores)
        assert matplotlib.image.imread(tmp_path / "calibration.png").std() > 0

    def test_the_running_mean_weighs_by_rows(self) -> None:
        losses, rows = np.array([1.0, 2.0, 4.0]), np.array([1.0, 3.0, 1.0])
        assert running_mean(losses, rows, 1).tolist() == [1, 2, 4]
        assert running_mean(losses, rows, 2).tolist() == [1, 7 / 4, 10 / 4]
        assert running_mean(losses, rows, 9).tolist() == [1, 7 / 4, 11 / 5]

    def test_rows_of_an_epoch_are_known_once_one_is_over(self) -> None:
        assert rows_per_epoch([]) is None
        assert rows_per_epoch([evaluation_at(1, epoch=0.5)]) is None
        assert rows_per_epoch([evaluation_at(1, epoch=0.5), evaluation_at(2, epoch=1.0)]) == 5120
        assert rows_per_epoch([evaluation_at(2, epoch=1.0), evaluation_at(3, epoch=1.5)]) == 5120


class TestEventFile:
    """Read back with TensorBoard itself."""

    def read(self, path: Path) -> EventAccumulator:
        accumulator = EventAccumulator(str(path))
        accumulator.Reload()
        return accumulator

    def values(self, accumulator: EventAccumulator, tag: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in accumulator.Scalars(tag)]

    def test_scalars_are_those_recorded(self, tmp_path: Path) -> None:
        before = time.time()
        with RunDirectory(tmp_path, "run", Config()) as directory:
            for step in (5, 10):
                directory.record_steps(steps_at(step, 1 / step))
            directory.record_evaluation(evaluation_at(1, figures(0.5), figures(0.25)), {})
        accumulator = self.read(directory.path)
        assert self.values(accumulator, "train/loss") == [(5, pytest.approx(0.2)), (10, pytest.approx(0.1))]
        assert self.values(accumulator, "train/rows_per_second") == [(5, 1e5), (10, 1e5)]
        assert self.values(accumulator, "train/lr") == [(5, pytest.approx(0.05)), (10, pytest.approx(0.05))]
        assert self.values(accumulator, "table/rows") == [(5, 500), (10, 1000)]
        assert self.values(accumulator, "table/bytes") == [(5, 50_000), (10, 100_000)]
        assert self.values(accumulator, "process/bytes") == [(5, 3e8), (10, 3e8)]
        assert self.values(accumulator, "validation/logloss") == [(10, 0.5)]
        assert self.values(accumulator, "test/logloss") == [(10, 0.25)]
        assert self.values(accumulator, "test/auc") == [(10, pytest.approx(0.7))]
        assert self.values(accumulator, "test/calibration") == [(10, pytest.approx(1.1))]
        times = [event.wall_time for event in accumulator.Scalars("train/loss")]
        assert before <= times[0] <= times[1] <= time.time()

    def test_the_configuration_is_shown_as_text(self, tmp_path: Path) -> None:
        with RunDirectory(tmp_path, "run", Config()) as directory:
            directory.record_steps(steps_at(1))
        accumulator = self.read(directory.path)
        (tag,) = accumulator.Tags()["tensors"]
        (event,) = accumulator.Tensors(tag)
        text = event.tensor_proto.string_val[0].decode()
        assert json.loads(text) == Config().as_json()
        assert all(line.startswith("    ") for line in text.splitlines())

    def test_undefined_figures_and_absent_parts_have_no_scalar(self, tmp_path: Path) -> None:
        negatives = Evaluation(rows=10, positives=0, auc=math.nan, logloss=0.3, calibration=math.nan)
        with RunDirectory(tmp_path, "run", Config()) as directory:
            directory.record_evaluation(evaluation_at(1, test=negatives), {})
        assert self.read(directory.path).Tags()["scalars"] == ["test/logloss"]

    def test_scalars_can_be_read_while_the_run_goes_on(self, tmp_path: Path) -> None:
        with RunDirectory(tmp_path, "run", Config()) as directory:
            directory.record_steps(steps_at(1))
            deadline = time.monotonic() + 20
            while "train/loss" not in self.read(directory.path).Tags()["scalars"]:
                assert time.monotonic() < deadline, "not written within 20 seconds"
                time.sleep(0.1)
