"""Whole runs of `recstore train --model two_tower`: what they show, leave, go on from, and are used for afterwards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from saved_runs import run_train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_train_on_ranks import run, torchrun
from test_train_resume import assert_equal_runs, kill_and_resume
from training_runs import drop_tables, metrics_of, with_own_tables

from recstore_ops.training import Evaluation, EvaluationRecord, load
from recstore_ops.training.report.comparison import write_comparison
from recstore_ops.training.report.display import Display
from recstore_ops.training.report.html_page import RunPage
from recstore_ops.training.report.plots import draw_learning_curve

pytestmark = [
    pytest.mark.tier("test"),
    pytest.mark.embedded_only("a run is loaded by a process that keeps its tables itself"),
]

Recstore = Callable[..., int]
MODEL = ("--model", "two_tower", "--item-field", "item", "--item-field", "shop")
OPTIONS = (
    *("train.csv", "--test", "test.csv", *MODEL, "--hidden", "16", "--vector-dim", 8, "--dropout", 0.1),
    *("--batch-size", 48, "--epochs", 3, "--patience", 0, "--log-every", 4),
)
RETRIEVAL = ("logloss", "recall_at_10", "ndcg_at_10")


def write_rows(path: Path, count: int, seed: int) -> None:
    """Rows of a user, an item and its shop; each user has a few items, and one row of eight is a negative."""
    rng = np.random.default_rng(seed)
    user, label = rng.integers(40, size=count), (rng.random(count) > 1 / 8).astype(int)
    item = np.where(label == 1, (user * 7 + rng.integers(5, size=count)) % 60, rng.integers(60, size=count))
    lines = [f"{y},{u},{i},{i % 6}" for y, u, i in zip(label, user, item, strict=True)]
    path.write_text("\n".join(["label,user,item,shop", *lines]) + "\n")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files with the run `towers` on them; only to be copied or read."""
    folder = tmp_path_factory.mktemp("towers")
    write_rows(folder / "train.csv", 1000, 0)
    write_rows(folder / "test.csv", 300, 1)
    assert run_train(folder, (*OPTIONS, "--run-name", "towers")) == (0, "")
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of `trained`."""
    return Path(shutil.copytree(trained, tmp_path / "folder"))


@pytest.fixture
def recstore(recstore: Recstore, monkeypatch: pytest.MonkeyPatch, trained: Path) -> Recstore:
    monkeypatch.chdir(trained)
    return with_own_tables(recstore, "two_tower")


def last_of(run: Path) -> dict[str, Any]:
    return metrics_of(run, "evaluation")[-1]


def test_a_run_records_ranking_in_place_of_auc(trained: Path) -> None:
    path = trained / "runs" / "towers"
    evaluations = metrics_of(path, "evaluation")
    assert evaluations[-1]["validation_recall_at_10"] > evaluations[0]["validation_recall_at_10"]
    for line in evaluations:
        assert {f"test_{name}" for name in RETRIEVAL} < line.keys()
        assert not any("auc" in name or "calibration" in name for name in line)
    events = EventAccumulator(str(path)).Reload()
    for name in RETRIEVAL:
        values = [event.value for event in events.Scalars(f"test/{name}")]
        assert values == pytest.approx([line[f"test_{name}"] for line in evaluations], rel=1e-6)
    assert "test/auc" not in events.Tags()["scalars"]
    assert not metrics_of(path, "calibration")
    page = (path / "report.html").read_text()
    assert all(f'<th class="figure">test {title}</th>' in page for title in ("logloss", "recall@10", "NDCG@10"))
    assert "AUC" not in page


def test_the_terminal_shows_the_items_and_the_ranking(trained: Path) -> None:
    out = (trained / "stdout").read_text()
    last = last_of(trained / "runs" / "towers")
    assert "distinct ones of all rows in" in out
    assert "val logloss  recall@10  NDCG@10  test logloss  recall@10  NDCG@10" in out
    assert f"{last['test_recall_at_10']:.4f}" in out
    assert "test recall@10 " in out.splitlines()[-3]
    assert "AUC" not in out


@pytest.mark.parametrize(
    "further",
    [("--cache-mb", 0, "--evaluate-every", 7), pytest.param(("--tables", "nn"), marks=pytest.mark.tier("all"))],
    ids=["store", "nn"],
)
def test_a_killed_run_ends_as_one_that_ran_through(folder: Path, further: tuple[object, ...]) -> None:
    options = (*OPTIONS, *further, "--save-every", 5)
    assert run_train(folder, (*options, "--run-name", "whole"))[0] == 0
    kill_and_resume(folder, options, [11, 9])
    assert_equal_runs(folder / "runs" / "whole", folder / "runs" / "killed")


def test_two_days_in_two_runs_are_one_run_over_both(folder: Path) -> None:
    """Frequencies of items go on with the rest, or the corrections would differ."""
    lines = (folder / "train.csv").read_text().splitlines()
    (folder / "monday.csv").write_text("\n".join(lines[: 1 + 480]) + "\n")
    (folder / "tuesday.csv").write_text("\n".join([lines[0], *lines[481:]]) + "\n")
    plain = (*MODEL, "--batch-size", 48, "--epochs", 1, "--no-shuffle", "--validation-fraction", 0)
    both = run_train(folder, ("train.csv", "--test", "test.csv", *plain, "--run-name", "both"))
    monday = run_train(folder, ("monday.csv", *plain, "--run-name", "monday"))
    beginning = ("--init-from", "runs/monday", "--run-name", "tuesday")
    tuesday = run_train(folder, ("tuesday.csv", "--test", "test.csv", *plain, *beginning))
    assert [both[0], monday[0], tuesday[0]] == [0, 0, 0]
    one, other = (load(folder / "runs" / name, name=name) for name in ("both", "tuesday"))
    rows = next(iter(one.open_rows([folder / "test.csv"])))
    with torch.no_grad():
        for side in ("query_vectors", "item_vectors"):
            assert torch.equal(getattr(one.model, side)(rows), getattr(other.model, side)(rows))
    for name in ("both", "tuesday"):
        drop_tables(name)


def test_evaluate_prints_the_ranking_of_the_items_of_its_files(
    recstore: Recstore, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = tmp_path / "few.csv"
    few.write_text("\n".join((trained / "test.csv").read_text().splitlines()[:41]) + "\n")
    assert recstore("evaluate", "runs/towers", few, "test.csv", "--json") == 0
    both = json.loads(capsys.readouterr().out)
    assert recstore("evaluate", "runs/towers", few, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    cells = [line.split(",") for line in few.read_text().splitlines()[1:]]
    assert found["candidates"] == len({item for *_, item, _ in cells}) < both["candidates"] == 60
    assert found["queries"] == len({user for label, user, *_ in cells if label == "1"})
    assert (both["rows"], found["rows"], both["queries"]) == (340, 40, 40)
    assert recstore("evaluate", "runs/towers", "test.csv") == 0
    out = capsys.readouterr().out
    assert "items ranked, all of these files" in out
    assert "recall@10" in out
    assert "AUC" not in out


def test_evaluate_with_the_items_of_the_run_prints_the_recorded_figures(
    recstore: Recstore, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of label 0 add candidates and no queries: with one for each item the candidates are those of the run."""
    lines = [f"0,0,{item},{item % 6}" for item in range(60)]
    whole = folder / "with_items.csv"
    whole.write_text((folder / "test.csv").read_text() + "\n".join(lines) + "\n")
    assert recstore("evaluate", "runs/towers", whole, "--checkpoint", "last", "--json") == 0
    found, last = json.loads(capsys.readouterr().out), last_of(folder / "runs" / "towers")
    assert [found[name] for name in RETRIEVAL] == pytest.approx([last[f"test_{name}"] for name in RETRIEVAL], abs=1e-6)


def test_predictions_are_refused_with_what_to_use_instead(
    recstore: Recstore, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert recstore("predict", "runs/towers", "test.csv", "--output", "p.csv") == 2
    error = capsys.readouterr().err
    assert "the scores of model two_tower are no probabilities: recstore evaluate ranks items by them" in error
    assert "query_vectors and item_vectors" in error
    assert not (trained / "p.csv").exists()
    loaded = load(trained / "runs" / "towers")
    with pytest.raises(ValueError, match="the scores of model two_tower are no probabilities"):
        loaded.predict(loaded.open_rows([trained / "test.csv"]))
    drop_tables("two_tower")


def test_a_loaded_run_has_the_vectors_whose_products_are_scores(trained: Path) -> None:
    loaded = load(trained / "runs" / "towers")
    model: Any = loaded.model
    rows = next(iter(loaded.open_rows([trained / "test.csv"])))
    with torch.no_grad():
        queries, items, scores = model.query_vectors(rows), model.item_vectors(rows), model(rows)
    drop_tables("two_tower")
    assert queries.shape == items.shape == (300, 8)
    torch.testing.assert_close(queries.norm(dim=1), torch.ones(300))
    torch.testing.assert_close((queries @ items.T).diag() / 0.1, scores)


def test_the_rows_of_its_table_are_exported(recstore: Recstore, folder: Path) -> None:
    for field, count in (("user", 40), ("item", 60), ("shop", 6)):
        output = folder / f"{field}.npy"
        assert recstore("export-vectors", "runs/towers", "--table", "v", "--field", field, "--output", output) == 0
        assert np.load(output).shape == (count, 8)


@pytest.mark.tier("all")
def test_several_processes_are_refused(folder: Path) -> None:
    command = torchrun(2, *map(str, MODEL), "--epochs", "1", rows=("train.csv",))
    process = run(folder, command)
    assert process.returncode != 0
    assert "model two_tower is trained by one process: its loss compares all rows of a batch" in process.stderr


def test_a_comparison_has_the_figures_of_ranking(folder: Path) -> None:
    assert run_train(folder, (*OPTIONS, "--tables", "nn", "--run-name", "nn"))[0] == 0
    text = write_comparison(folder, folder / "runs" / "towers", folder / "runs" / "nn")
    assert "validation recall@10" in text
    assert "test NDCG@10" in text
    assert "AUC" not in text
    ours, theirs = (metrics_of(folder / "runs" / name, "evaluation") for name in ("towers", "nn"))
    for one, other in zip(ours, theirs, strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], abs=1e-5)
        assert one["test_logloss"] == pytest.approx(other["test_logloss"], abs=1e-5)


@pytest.mark.tier("all")
def test_every_option_of_the_command_line_arrives_on_both_sides_of_a_comparison(folder: Path) -> None:
    further = ("--no-popularity-correction", "--temperature", 0.2, "--baseline", "nn", "--run-name", "both")
    assert run_train(folder, (*OPTIONS, *further)) == (0, "")
    for side in ("store", "nn"):
        config = json.loads((folder / "runs" / "both" / side / "config.json").read_text())
        assert (config["popularity_correction"], config["temperature"], config["vector_dim"]) == (False, 0.2, 8)
        assert (config["item_fields"], config["hidden"]) == (["item", "shop"], [16])
    assert "validation recall@10" in (folder / "runs" / "both" / "report.md").read_text()


NAN = float("nan")
RECORD = EvaluationRecord(
    number=1,
    epoch=1.0,
    step=10,
    rows=1000,
    train_loss=3.5,
    train_rows=1000,
    seconds=2.0,
    validation=Evaluation(100, 80, NAN, 3.25, NAN, recall=0.625, ndcg=0.5),
    test=Evaluation(200, 150, NAN, 3.75, NAN, recall=0.375, ndcg=0.25),
    table_rows=77,
)


class TestReports:
    def test_a_line_of_the_terminal(self, capsys: pytest.CaptureFixture[str]) -> None:
        with Display(Console(width=200), 1, retrieves=True) as display:
            display.on_evaluation(RECORD)
        header, line = capsys.readouterr().out.splitlines()
        assert line.split() == ["1", "3.5000", "3.2500", "0.6250", "0.5000", "3.7500", "0.3750", "0.2500", "500", "77"]
        assert len(header) == len(line)

    def test_the_page(self, tmp_path: Path) -> None:
        RunPage("towers", {}, [RECORD], {}, None, {}).write(tmp_path / "report.html")
        page = (tmp_path / "report.html").read_text()
        assert "validation NDCG@10" in page
        assert '<td class="figure">0.6250</td>' in page

    def test_the_learning_curve_has_axes_for_each_figure(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        drawn: list[Any] = []
        monkeypatch.setattr("recstore_ops.training.report.plots.save", lambda figure, path: drawn.append(figure))
        draw_learning_curve(tmp_path / "curve.png", "towers", [], [RECORD])
        assert [axes.get_ylabel() for axes in drawn[0].axes] == ["logloss (nats)", "recall@10", "NDCG@10"]
        assert "validation, 0.6250 at the best" in drawn[0].axes[1].get_legend_handles_labels()[1]
