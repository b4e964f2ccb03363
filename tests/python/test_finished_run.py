"""What one does with a run that is over: its model loaded, evaluated on files, and asked for predictions."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as parquet
import pytest
import torch
from html_tables import Shown
from numpy.typing import NDArray
from saved_runs import rows_of, run_train, state_of
from test_train_on_ranks import run, torchrun
from training_runs import drop_tables, metrics_of, with_own_tables

from recstore_ops import DistEmbedding, RecStoreClient, Table, table_names, table_statistics
from recstore_ops.servers import choosing
from recstore_ops.training import evaluate, load, planted_interactions
from recstore_ops.training.data.sparse_lines import write_libsvm
from recstore_ops.training.run.saved_run import SavedRun

pytestmark = [
    pytest.mark.tier("test"),
    pytest.mark.embedded_only("a run is loaded by a process that keeps its tables itself"),
]

OPTIONS = ("train.libfm", "--test", "test.libfm", "--dim", 4, "--epochs", 2, "--lr", 0.05, "--batch-size", 64)
UNSEEN = 10**12
Recstore = Callable[..., int]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files with the run `fm` on them; only to be copied or read."""
    folder = tmp_path_factory.mktemp("trained")
    planted = planted_interactions(0, 1003, 500)
    write_libsvm(folder / "train.libfm", planted.train)
    write_libsvm(folder / "test.libfm", planted.test)
    assert run_train(folder, (*OPTIONS, "--run-name", "fm")) == (0, "")
    (folder / "train.libfm").unlink()
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of `trained`."""
    return Path(shutil.copytree(trained, tmp_path / "folder"))


@pytest.fixture(autouse=True)
def _no_tables_of_models() -> Iterator[None]:
    """Each test begins and ends without tables of the models trained here."""
    before = set(table_names())
    yield
    for name in set(table_names()) - before:
        RecStoreClient().drop(name)


@contextmanager
def piped(file: Path) -> Iterator[str]:
    """The path of a pipe that gives what is in a file, as a shell makes one."""
    with subprocess.Popen(["cat", file], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield f"/dev/fd/{process.stdout.fileno()}"
        process.stdout.close()


def rows_by_id(path: Path, table: str, dim: int) -> dict[int, NDArray[np.float32]]:
    """The rows of a table of a checkpoint as its file holds them."""
    tensors = next(tensors for file, tensors in rows_of(path).items() if f"fm_{table}" in file)
    ids = np.frombuffer(tensors["ids"], np.int64).tolist()
    return dict(zip(ids, np.frombuffer(tensors["rows"], np.float32).reshape(-1, dim), strict=True))


def predicted_by_hand(lines: list[str], run: Path) -> NDArray[np.float64]:
    """The probabilities of a factorization machine in double precision, from the files of a run's best checkpoint."""
    w, v = rows_by_id(run / "best", "w", 1), rows_by_id(run / "best", "v", 4)
    bias = float(state_of(run / "best")["model"]["linear.bias"])
    logits = []
    for line in lines:
        ids = [int(feature.split(":")[0]) for feature in line.split()[1:]]
        factors = np.stack([v[id].astype(np.float64) for id in ids])
        pairs = sum(float(factors[i] @ factors[j]) for i in range(len(ids)) for j in range(i))
        logits.append(bias + sum(float(w[id][0]) for id in ids) + pairs)
    return 1 / (1 + np.exp(-np.array(logits)))


@pytest.fixture(scope="module")
def expected(trained: Path) -> NDArray[np.float64]:
    """The probabilities of the test rows, computed by hand."""
    return predicted_by_hand((trained / "test.libfm").read_text().splitlines(), trained / "runs" / "fm")


def best_of(run: Path) -> dict[str, Any]:
    return min(metrics_of(run, "evaluation"), key=lambda line: line["validation_logloss"])


def test_a_notebook_shows_model_tables_and_options_of_a_run(trained: Path) -> None:
    loaded = load(trained / "runs" / "fm")
    rows = Shown(loaded).rows
    assert rows[0] == [f"fm after step {loaded.step:,}", ""]
    assert ["table v", f"{len(loaded.table('v')):,} rows of 4"] in rows
    assert ["model", "fm"] in rows


def test_predictions_are_those_of_the_formula_over_the_saved_rows(trained: Path, expected: NDArray[np.float64]) -> None:
    loaded = load(trained / "runs" / "fm")
    rows = loaded.open_rows([trained / "test.libfm"])
    probabilities = loaded.predict(rows)
    assert probabilities.dtype == torch.float32
    np.testing.assert_allclose(probabilities.numpy(), expected, rtol=2e-6)
    assert loaded.config.dim == 4
    assert not loaded.model.training


@pytest.mark.parametrize(("which", "place"), [("best", "best"), ("last", "checkpoint")])
def test_a_loaded_run_has_the_figures_that_it_recorded(trained: Path, which: Any, place: str) -> None:
    loaded = load(trained / "runs" / "fm", which=which)
    step = state_of(trained / "runs" / "fm" / place)["step"]
    recorded = next(line for line in metrics_of(trained / "runs" / "fm", "evaluation") if line["step"] == step)
    found = evaluate(loaded.model, loaded.open_rows([trained / "test.libfm"]))
    assert (found.auc, found.logloss) == pytest.approx((recorded["test_auc"], recorded["test_logloss"]), abs=1e-9)
    assert loaded.step == step


@pytest.mark.parametrize(
    "further",
    [
        ("--model", "wide_deep", "--cross", "0,1", "--row-type", "bfloat16", "--capacity", 100),
        ("--model", "dlrm", "--hash-buckets", 50, "--optimizer", "ftrl"),
        ("--model", "lr", "--no-bias", "--auc-by", "field_0", "--memory-limit", "1MB", "--disk", "."),
    ],
    ids=["wide_deep", "dlrm", "lr"],
)
def test_other_models_and_tables_are_loaded_too(small_files: Path, further: tuple[object, ...]) -> None:
    assert run_train(small_files, (*OPTIONS[:3], "--epochs", 1, *further, "--run-name", "other")) == (0, "")
    path = small_files / "runs" / "other"
    (small_files / "train.libfm").unlink()
    loaded = load(path)
    found = evaluate(loaded.model, loaded.open_rows([small_files / "test.libfm"]))
    assert found.logloss == pytest.approx(best_of(path)["test_logloss"], abs=1e-7)


@pytest.mark.tier("all")
def test_a_run_of_several_processes_is_loaded_by_one(tmp_path: Path) -> None:
    planted = planted_interactions(0, 1003, 500)
    write_libsvm(tmp_path / "train.libfm", planted.train)
    write_libsvm(tmp_path / "test.libfm", planted.test)
    done = run(tmp_path, torchrun(2, "--run-name", "ranks", rows=tuple(map(str, OPTIONS))))
    assert done.returncode == 0, done.stderr
    loaded = load(tmp_path / "runs" / "ranks")
    found = evaluate(loaded.model, loaded.open_rows([tmp_path / "test.libfm"]))
    best = best_of(tmp_path / "runs" / "ranks")
    assert found.logloss == pytest.approx(best["test_logloss"], abs=1e-7)
    assert sum(len(Table.open(name)) for name in ("fm/w", "fm/v")) == best["table_rows"]


def test_under_another_name_a_run_is_the_same_also_for_unknown_ids(folder: Path, table_name: Callable[[], str]) -> None:
    (folder / "unseen.libfm").write_text(f"1 3:1 {UNSEEN}:1 {UNSEEN + 1}:1\n")
    files = [folder / "test.libfm", folder / "unseen.libfm"]
    names = [table_name(), table_name()]
    loaded = [load(folder / "runs" / "fm", name=name) for name in names]
    loaded.append(load(folder / "runs" / "fm"))
    one, *others = [each.predict(each.open_rows(files)) for each in loaded]
    assert all(torch.equal(one, other) for other in others)
    assert {f"{name}/{table}" for name in (*names, "fm") for table in "wv"} <= set(table_names())


def test_predictions_add_no_rows(folder: Path) -> None:
    loaded = load(folder / "runs" / "fm")
    before = {name: table_statistics(name)["rows"] for name in ("fm/w", "fm/v")}
    (folder / "unseen.libfm").write_text(f"1 {UNSEEN}:1 {UNSEEN + 1}:1\n")
    probability = loaded.predict(loaded.open_rows([folder / "unseen.libfm"]))
    assert {name: table_statistics(name)["rows"] for name in before} == before
    # As a table of this name and seed begins, of which no row was trained.
    ids = torch.tensor([UNSEEN, UNSEEN + 1])
    drop_tables("fm")
    initial = DistEmbedding(None, 4, "fm/v", initializer={"kind": "normal", "std": 0.01}, seed=0)(ids).detach()
    logit = (initial[0] @ initial[1]).double() + state_of(folder / "runs" / "fm" / "best")["model"]["linear.bias"]
    assert float(probability[0]) == pytest.approx(float(logit.sigmoid()), rel=1e-6)


def damaged(change: Callable[[Path], object]) -> Callable[[Path], object]:
    def damage(run: Path) -> None:
        manifest = json.loads((run / "best" / "manifest.json").read_text())
        change(run / "best" / manifest["snapshots"][-1]["metadata"]["dense"])

    return damage


def cut_tables(run: Path) -> None:
    for path in (run / "best").glob("*.safetensors"):
        # A hard link of the file in `checkpoint`.
        content = path.read_bytes()[:-8]
        path.unlink()
        path.write_bytes(content)


def with_option(name: str, value: object) -> Callable[[Path], object]:
    def change(run: Path) -> None:
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps({**config, name: value}))

    return change


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (shutil.rmtree, ValueError, "there is no run {run}: it has no config.json"),
        (lambda run: (run / "config.json").write_text("{"), OSError, "{run}/config.json is damaged: "),
        (
            lambda run: (run / "config.json").write_text("[]"),
            OSError,
            "{run}/config.json is damaged: expected an object, got list",
        ),
        (with_option("depth", 3), ValueError, "{run}/config.json: unknown option depth; it was written by another"),
        (with_option("dim", 0), ValueError, "{run}/config.json: dim must be at least 1, got 0"),
        (with_option("dim", 5), OSError, "table 'fm/v' of the checkpoint has dim 4, the run's configuration 5"),
        (with_option("tables", "nn"), ValueError, "run {run} was trained with tables nn: its rows are not in tables"),
        (
            with_option("model", "deepfm"),
            OSError,
            "{run}/best has no tables deepfm/..., as the run is configured, but fm/v, fm/w",
        ),
        (with_option("table_prefix", "other"), OSError, "{run}/best has no tables other/..., as the run is configured"),
        (with_option("bias", False), ValueError, "the model has the parameters [], those saved are ['linear.bias']"),
        (
            lambda run: (run / "rows.json").unlink(),
            ValueError,
            "run {run} has no rows.json, which names the fields of its rows: train it anew",
        ),
        (
            lambda run: (run / "rows.json").write_text("{}"),
            OSError,
            "{run}/rows.json is damaged: expected file_format, fields and dense",
        ),
        (
            lambda run: shutil.rmtree(run / "best"),
            ValueError,
            "run {run} has no checkpoint best: nothing of it was saved",
        ),
        (damaged(Path.unlink), OSError, "{run}/best is not of a training run, or is damaged: there is no file dense-"),
        (damaged(lambda path: path.write_bytes(b"")), OSError, " is damaged: "),
        (cut_tables, OSError, "run {run} cannot be loaded: "),
    ],
)
def test_a_run_that_cannot_be_loaded_is_an_error_and_leaves_no_tables(
    folder: Path, change: Callable[[Path], object], kind: type[Exception], message: str
) -> None:
    path = folder / "runs" / "fm"
    change(path)
    with pytest.raises(kind) as caught:
        load(path)
    assert message.format(run=path) in str(caught.value)
    assert not {"fm/w", "fm/v"} & set(table_names())


def test_a_run_that_was_saved_meanwhile_is_an_error(trained: Path) -> None:
    saved = SavedRun.read(trained / "runs" / "fm", "best")
    earlier = replace(saved, state={**saved.state, "step": 3})
    step = saved.state["step"]
    with pytest.raises(OSError, match=f"was saved after step {step} while what it knew after step 3 was read"):
        earlier.load_tables()


def test_another_checkpoint_than_those_of_a_run_is_an_error(trained: Path) -> None:
    with pytest.raises(ValueError, match="expected one of best, last as checkpoint of a run, got 'first'"):
        load(trained / "runs" / "fm", which="first")  # type: ignore[arg-type]


def test_a_name_that_is_taken_is_an_error(trained: Path, table_name: Callable[[], str]) -> None:
    name = table_name()
    load(trained / "runs" / "fm", name=name)
    with pytest.raises(ValueError, match=f"this process has a table '{name}/v' already"):
        load(trained / "runs" / "fm", name=name)
    assert len(Table.open(f"{name}/v")) > 0


def test_a_process_with_servers_is_refused(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing._choice, "backend", choosing.SERVERS)
    with pytest.raises(ValueError, match="load needs a process that keeps its tables itself"):
        load(trained / "runs" / "fm")


def test_files_with_other_fields_are_refused_by_name(tmp_path: Path) -> None:
    columns = {"click": [0, 1] * 50, "user": [1, 2, 3, 4] * 25, "item": [5, 6] * 50, "price": [0.5, 1.5] * 50}

    def write(name: str, names: list[str]) -> Path:
        parquet.write_table(
            pa.table({column: columns.get(column, columns["item"]) for column in names}), tmp_path / name
        )
        return tmp_path / name

    write("train.parquet", ["click", "user", "item", "price"])
    assert run_train(tmp_path, ("train.parquet", "--epochs", 1, "--run-name", "fm"))[0] == 0
    loaded = load(tmp_path / "runs" / "fm")
    schema = tmp_path / "runs" / "fm" / "schema.toml"
    for names, message in (
        (["click", "user", "shop", "price"], f"there is no column 'item', which is integer in {schema}"),
        (["click", "user", "item"], f"there is no column 'price', which is number in {schema}"),
        (["click", "user", "item", "price", "shop"], f"there is a column 'shop', which {schema} lacks"),
    ):
        path = write("other.parquet", names)
        with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
            loaded.open_rows([path])
    (tmp_path / "text").write_text("1 3:1\n")
    with pytest.raises(ValueError, match="schema is for csv and parquet, but the files are libsvm"):
        loaded.open_rows([tmp_path / "text"])
    first = loaded.predict(loaded.open_rows([tmp_path / "train.parquet"]))
    assert torch.equal(loaded.predict(loaded.open_rows([write("order.parquet", ["item", "price", "user"])])), first)
    pa_csv.write_csv(parquet.read_table(tmp_path / "train.parquet"), tmp_path / "rows.csv")
    assert torch.equal(loaded.predict(loaded.open_rows([tmp_path / "rows.csv"])), first)


def test_rows_without_labels_are_predicted_and_not_evaluated(
    tmp_path: Path, recstore: Recstore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.csv").write_text("label,user,city\n" + "1,5,Bern\n0,6,Zug\n" * 50)
    Path("new.csv").write_text("city,user\nBern,5\nZug,7\n")
    assert run_train(tmp_path, ("train.csv", "--epochs", 1, "--run-name", "fm"))[0] == 0
    assert recstore("predict", "runs/fm", "new.csv", "--output", "new.parquet") == 0
    assert parquet.read_table("new.parquet").column_names == ["row", "probability"]
    drop_tables("fm")
    assert recstore("predict", "runs/fm", "new.csv", "train.csv", "-o", "both.parquet") == 0
    assert parquet.read_table("both.parquet")["label"].to_pylist() == [None, None, *[1, 0] * 50]
    drop_tables("fm")
    assert recstore("evaluate", "runs/fm", "new.csv") == 2
    assert "new.csv has no labels: there is nothing to evaluate; recstore predict needs none" in capsys.readouterr().err
    drop_tables("fm")


class TestCommands:
    @pytest.fixture(autouse=True)
    def _in_folder(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder)

    @pytest.fixture
    def recstore(self, recstore: Recstore) -> Recstore:
        """Each run of the real program has a store of its own."""
        return with_own_tables(recstore, "fm")

    def test_evaluate_prints_the_recorded_figures(
        self, folder: Path, recstore: Recstore, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert recstore("evaluate", "runs/fm", "test.libfm", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        best = best_of(folder / "runs" / "fm")
        for name in ("auc", "logloss", "calibration"):
            assert found[name] == pytest.approx(best[f"test_{name}"], abs=1e-9)
        error = [line for line in metrics_of(folder / "runs" / "fm", "calibration") if line["part"] == "test"]
        assert found["expected_calibration_error"] == pytest.approx(error[0]["expected_calibration_error"], abs=1e-9)
        assert (found["rows"], found["step"], found["checkpoint"]) == (500, best["step"], "best")
        labels = [line[0] for line in (folder / "test.libfm").read_text().splitlines()]
        assert (found["positives"], found["positive_share"]) == (labels.count("1"), labels.count("1") / 500)

    def test_evaluate_prints_a_table(self, recstore: Recstore, capsys: pytest.CaptureFixture[str]) -> None:
        assert recstore("evaluate", "runs/fm", "test.libfm", "--checkpoint", "last", "--batch-size", "7") == 0
        words = capsys.readouterr().out.splitlines()
        assert words[0].startswith("run runs/fm, checkpoint last, after step ")
        assert [line.split()[0] for line in words[1:]] == [
            *("rows", "positive", "share", "AUC", "logloss,", "mean", "calibration", "bad")
        ]

    def test_evaluate_without_a_positive_row_has_no_auc(
        self, folder: Path, recstore: Recstore, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (folder / "zeros").write_text("0 3:1\n0 4:1\n")
        assert recstore("evaluate", "runs/fm", "zeros", "--json") == 0
        assert json.loads(capsys.readouterr().out)["auc"] is None
        assert recstore("evaluate", "runs/fm", "zeros") == 0
        assert "AUC - " in " ".join(capsys.readouterr().out.split())

    @pytest.mark.parametrize("batch_size", ["1000", "33"])
    def test_predict_writes_a_row_for_each_row(
        self, folder: Path, recstore: Recstore, batch_size: str, expected: NDArray[np.float64]
    ) -> None:
        options = ("--output", "found.parquet", "--batch-size", batch_size)
        assert recstore("predict", "runs/fm", "test.libfm", *options) == 0
        found = parquet.read_table(folder / "found.parquet")
        lines = (folder / "test.libfm").read_text().splitlines()
        assert found.column_names == ["row", "probability", "label"]
        assert found["row"].to_pylist() == list(range(500))
        assert found["label"].to_pylist() == [int(line[0]) for line in lines]
        assert str(found.schema.field("probability").type) == "float"
        np.testing.assert_allclose(found["probability"], expected, rtol=2e-6)
        assert not list(folder.glob("*.new"))

    def test_predict_of_several_files_names_them(
        self, folder: Path, recstore: Recstore, expected: NDArray[np.float64]
    ) -> None:
        lines = (folder / "test.libfm").read_text().splitlines(keepends=True)
        (folder / "one").write_text("".join(lines[:30]))
        (folder / "two").write_text("".join(lines[30:50]))
        assert recstore("predict", "runs/fm", "one", "two", "--output", "found.csv") == 0
        with open(folder / "found.csv", newline="") as file:
            found = list(csv.DictReader(file))
        places = [(row["file"], int(row["row"])) for row in found]
        assert places == [*(("one", row) for row in range(30)), *(("two", row) for row in range(20))]
        np.testing.assert_allclose([float(row["probability"]) for row in found], expected[:50], rtol=2e-6)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("test.libfm", "--output", "p.txt"), "expected an output that ends in .parquet or .csv, got p.txt"),
            (("test.libfm", "--output", "kept.csv"), "kept.csv exists already; --replace replaces it"),
            (("kept.csv", "--output", "kept.csv", "--replace"), "kept.csv is the output and one of the files to read"),
            (("bad", "--output", "kept.csv", "--replace"), "bad:2: "),
            (("missing", "--output", "p.csv"), "no such file: missing"),
            (("runs", "--output", "p.csv"), "runs is a directory; give its files"),
            (("test.libfm", "--output", "nowhere/p.csv"), "nowhere/p.csv cannot be written: there is no directory now"),
        ],
    )
    def test_predict_that_fails_leaves_what_was_there(
        self,
        folder: Path,
        recstore: Recstore,
        capsys: pytest.CaptureFixture[str],
        arguments: tuple[str, ...],
        message: str,
    ) -> None:
        (folder / "kept.csv").write_text("kept")
        (folder / "bad").write_text("1 3:1\nx 3:1\n")
        before = sorted(os.listdir(folder))
        assert recstore("predict", "runs/fm", *arguments) == 2
        assert message in capsys.readouterr().err
        assert sorted(os.listdir(folder)) == before
        assert (folder / "kept.csv").read_text() == "kept"

    def test_pipes_are_read_as_the_files_that_are_in_them(
        self, folder: Path, recstore: Recstore, capsys: pytest.CaptureFixture[str], expected: NDArray[np.float64]
    ) -> None:
        with piped(folder / "test.libfm") as pipe:
            assert recstore("predict", "runs/fm", pipe, "--output", "found.csv") == 0
        with open(folder / "found.csv", newline="") as file:
            found = [float(row["probability"]) for row in csv.DictReader(file)]
        np.testing.assert_allclose(found, expected, rtol=2e-6)
        capsys.readouterr()
        figures = []
        with piped(folder / "test.libfm") as pipe:
            for path in ("test.libfm", pipe):
                assert recstore("evaluate", "runs/fm", path, "--json") == 0
                ended = capsys.readouterr()
                figures.append(json.loads(ended.out))
        assert figures[0] == figures[1]
        assert f"{pipe} can be read only once: copying it to " in ended.err

    def test_predict_names_pipes_among_several_files_as_they_are_given(self, folder: Path, recstore: Recstore) -> None:
        with piped(folder / "test.libfm") as pipe:
            assert recstore("predict", "runs/fm", "test.libfm", pipe, "--output", "found.csv") == 0
        with open(folder / "found.csv", newline="") as file:
            assert [row["file"] for row in csv.DictReader(file)] == ["test.libfm"] * 500 + [pipe] * 500

    def test_the_standard_input_is_read(self, folder: Path) -> None:
        command = "cat test.libfm | recstore predict runs/fm /dev/stdin --output found.csv"
        ended = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=120)
        assert (ended.returncode, ended.stdout) == (0, "found.csv: 500 rows\n")
        assert "/dev/stdin can be read only once: copying it to " in ended.stderr

    def test_a_pipe_is_not_copied_for_an_output_that_is_refused(
        self, folder: Path, recstore: Recstore, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with piped(folder / "test.libfm") as pipe:
            assert recstore("predict", "runs/fm", pipe, "--output", "test.libfm") == 2
        assert "copying" not in capsys.readouterr().err

    def test_predict_leaves_files_of_like_names_alone(
        self, folder: Path, recstore: Recstore, expected: NDArray[np.float64]
    ) -> None:
        shutil.copy(folder / "test.libfm", folder / "found.csv.new")
        before = (folder / "found.csv.new").read_bytes()
        assert recstore("predict", "runs/fm", "found.csv.new", "--output", "found.csv") == 0
        assert (folder / "found.csv.new").read_bytes() == before
        assert len((folder / "found.csv").read_text().splitlines()) == len(expected) + 1

    @pytest.mark.parametrize("command", [("predict", "none"), ("export-vectors", "none", "--table", "v")])
    def test_an_output_that_cannot_be_is_refused_before_a_run_is_read(
        self, tmp_path: Path, recstore: Recstore, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
    ) -> None:
        rows = [__file__] if command[0] == "predict" else []
        (tmp_path / "d.parquet").mkdir()
        for name, message in (("d.parquet", "is a directory; the output must"), ("x/p.parquet", "cannot be written")):
            assert recstore(*command, *rows, "--output", tmp_path / name, "--replace") == 2
            assert f"{tmp_path / name} {message}" in capsys.readouterr().err

    def test_predict_replaces_where_it_is_asked_to(self, folder: Path, recstore: Recstore) -> None:
        (folder / "kept.csv").write_text("kept")
        assert recstore("predict", "runs/fm", "test.libfm", "--output", "kept.csv", "--replace") == 0
        assert len((folder / "kept.csv").read_text().splitlines()) == 501
