"""Models of runs as bundles: `recstore export` and `recstore quantize`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from runtime_programs import ONLY_TORCH, Runtime
from saved_runs import run_train
from served_models import ServedModel, infer_body
from warm_programs import output_of

from recstore_ops import RecStoreClient, load_bundle, table_names
from recstore_ops.training import Batch, LoadedRun, load, open_input
from recstore_ops.training.run.exported_run import export_run, first_rows, tensors_of

pytestmark = [
    pytest.mark.tier("test"),
    pytest.mark.embedded_only("a run is loaded by a process that keeps its tables itself"),
]

Recstore = Callable[..., int]
Drop = Callable[[], None]
Train = Callable[[str], LoadedRun]
Capture = pytest.CaptureFixture[str]

ONE_ID_EACH = ("--planted", "pairs", "--planted-rows", 400)
BAGS = ("--planted", "sequences", "--planted-rows", 400)
PAIRS = ("--planted", "retrieval", "--planted-rows", 400)
SMALL = ("--epochs", 1, "--batch-size", 64)
HIDDEN = ("--hidden", "8")
MODELS = {
    "lr": (*ONE_ID_EACH, "--model", "lr"),
    "fm": (*ONE_ID_EACH, "--model", "fm"),
    "deepfm": (*ONE_ID_EACH, "--model", "deepfm", *HIDDEN),
    "dlrm": (*ONE_ID_EACH, "--model", "dlrm", *HIDDEN),
    "dcn": (*ONE_ID_EACH, "--model", "dcn", *HIDDEN),
    "crosses": (*ONE_ID_EACH, "--model", "wide_deep", *HIDDEN, "--cross", "0,1"),
    "lr_bags": (*BAGS, "--model", "lr"),
    "wide_deep_bags": (*BAGS, "--model", "wide_deep", *HIDDEN),
    "dlrm_bags": (*BAGS, "--model", "dlrm", *HIDDEN),
    "din": (*BAGS, "--model", "din", *HIDDEN, "--sequence", "history=target"),
    "two_tower": (
        "--planted",
        "retrieval",
        "--planted-rows",
        400,
        "--model",
        "two_tower",
        "--item-field",
        "item",
        *HIDDEN,
    ),
}


@pytest.fixture(autouse=True)
def no_tables() -> Iterator[Callable[[], None]]:
    """Drops the tables of models, as the end of a process would; each test begins and ends without any."""
    before = set(table_names())

    def drop() -> None:
        for name in set(table_names()) - before:
            RecStoreClient().drop(name)

    yield drop
    drop()


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Trains a run of `MODELS` in `tmp_path`, in a process of its own, and opens it."""
    monkeypatch.chdir(tmp_path)

    def run(name: str) -> LoadedRun:
        assert run_train(tmp_path, (*MODELS[name], *SMALL, "--run-name", name)) == (0, "")
        return load(Path("runs") / name)

    return run


def rows_of(run: LoadedRun) -> Batch:
    rows = open_input(run.config)
    return first_rows(rows.test or rows.train)


def expected(run: LoadedRun, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        return run.model(batch)


IN_EVERY_RUN = ("crosses", "lr_bags", "din", "two_tower")
EACH_MODEL = [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.tier("all")) for name in MODELS]


@pytest.mark.parametrize("name", EACH_MODEL)
def test_every_model_is_exported_and_gives_the_same_to_the_bit(trained: Train, tmp_path: Path, name: str) -> None:
    run = trained(name)
    batch = rows_of(run)
    bundle = export_run(run, [batch], tmp_path / "bundle")
    names = [each["name"] for each in bundle.manifest.inputs]
    for rows in (batch, batch.rows(3, 70), batch.rows(0, 1)):
        tensors = tensors_of(rows, names)
        given = bundle(**tensors)
        assert all(map(torch.equal, bundle.flat([tensors[name] for name in names]), given.values()))
        assert given["scores" if name == "two_tower" else "logits"].equal(expected(run, rows))
        if name != "two_tower":
            assert given["probabilities"].equal(run.predict([rows]))
    assert ("lengths" in names) == (name in ("lr_bags", "wide_deep_bags", "dlrm_bags", "din"))


@ONLY_TORCH
@pytest.mark.tier("all")
@pytest.mark.parametrize("name", MODELS)
def test_every_model_answers_without_python(trained: Train, runtime: Runtime, tmp_path: Path, name: str) -> None:
    run = trained(name)
    batch = rows_of(run)
    bundle = export_run(run, [batch], tmp_path / "bundle")
    tensors = tensors_of(batch, [each["name"] for each in bundle.manifest.inputs])
    wanted = bundle(**tensors)
    for language in runtime.programs:
        answer = runtime.ask(language, bundle.path, [*tensors.values()], tmp_path)
        assert answer.code == 0, answer.told
        assert all(map(torch.equal, answer.tensors, (value.flatten() for value in wanted.values())))


def test_the_command_writes_what_another_process_reads(
    trained: Train,
    tmp_path: Path,
    recstore: Recstore,
    no_tables: Drop,
    capfd: Capture,
) -> None:
    run = trained("fm")
    batch = rows_of(run)
    torch.save(tensors_of(batch), tmp_path / "inputs.pt")
    wanted = expected(run, batch)
    no_tables()
    capfd.readouterr()
    assert recstore("export", "runs/fm", "bundle") == 0
    shown = capfd.readouterr().out.splitlines()
    assert shown[:2] == ["takes ids int64 [-1, 8]", "gives logits float32 [-1], probabilities float32 [-1]"]
    assert shown[-2].endswith("rows differ from the model's by 0 at most")
    program = "import sys, torch, recstore_ops\nbundle = recstore_ops.load_bundle('bundle')\n"
    program += "torch.save(bundle(**torch.load('inputs.pt')), 'outputs.pt')"
    output_of(program, cwd=tmp_path)
    assert torch.load(tmp_path / "outputs.pt")["logits"].equal(wanted)


@pytest.mark.parametrize("name", ["lr", "two_tower"])
def test_a_run_answers_requests(trained: Train, tmp_path: Path, name: str) -> None:
    run = trained(name)
    bundle = export_run(run, [rows_of(run)], tmp_path / "bundle")
    rows = rows_of(run).rows(0, 5)
    with ServedModel(tmp_path / "bundle") as server:
        answer = server.send("/v2/models/bundle/infer", infer_body(("ids", "INT64", tensors_of(rows)["ids"])))
    given = {each["name"]: torch.tensor(each["data"]).view(each["shape"]) for each in answer.document["outputs"]}
    # A matrix product of another number of threads may differ in its last bits.
    torch.testing.assert_close(given, bundle(**tensors_of(rows)))


def test_targets_of_sequences_are_checked_by_the_bundle(trained: Train, tmp_path: Path) -> None:
    run = trained("din")
    bundle = export_run(run, [rows_of(run)], tmp_path / "bundle")
    with pytest.raises(RuntimeError, match="field 1 is a sequence's target and must have one id a row"):
        bundle(ids=torch.arange(3), lengths=torch.tensor([[1, 2]]))


def test_rows_that_the_bundle_has_no_place_for_are_refused(trained: Train) -> None:
    batch = rows_of(trained("lr_bags"))
    with pytest.raises(ValueError, match="the rows have lengths, the bundle takes only dense, ids"):
        tensors_of(batch, ["ids", "dense"])
    with pytest.raises(ValueError, match="an example of at least 2 rows is needed"):
        first_rows([batch.rows(0, 1)])


def test_encodings_go_by_the_names_of_the_model(trained: Train, tmp_path: Path) -> None:
    run = trained("fm")
    bundle = export_run(run, [rows_of(run)], tmp_path / "bundle", encoding={"v": "int8"})
    assert {name: table.encoding for name, table in bundle.tables.items()} == {"fm/v": "int8", "fm/w": "float32"}
    with pytest.raises(ValueError, match="the model fm has no table x; it has v, w"):
        export_run(run, [rows_of(run)], tmp_path / "other", encoding={"x": "int8"})


def test_quantize_tells_what_is_lost(trained: Train, recstore: Recstore, no_tables: Drop, capfd: Capture) -> None:
    trained("fm")
    no_tables()
    capfd.readouterr()
    assert recstore("quantize", "runs/fm", "--json") == 0
    kinds = {each["encoding"]: each for each in json.loads(capfd.readouterr().out)}
    assert list(kinds) == ["float32", "bfloat16", "float16", "int8", "int4"]
    shares = [table["rms"] / table["rms_of_rows"] for each in kinds.values() for table in each["tables"][1:]]
    assert shares[0] == 0
    assert 0 < shares[2] < shares[1] < shares[3] < shares[4] < 0.1
    assert abs(kinds["int8"]["figures"]["auc"] - kinds["float32"]["figures"]["auc"]) < 1e-3
    no_tables()
    assert recstore("quantize", "runs/fm") == 0
    assert "of the rows' RMS" in capfd.readouterr().out


def test_quantize_looks_at_the_tables_of_a_model_that_retrieves(
    trained: Train, recstore: Recstore, no_tables: Drop, capfd: Capture
) -> None:
    trained("two_tower")
    no_tables()
    assert recstore("quantize", "runs/two_tower") == 0
    assert "the scores of model two_tower rank items: its figures are not compared" in capfd.readouterr().out


def test_rows_are_named_when_those_of_the_run_are_gone(
    small_files: Path,
    monkeypatch: pytest.MonkeyPatch,
    recstore: Recstore,
    no_tables: Drop,
    capfd: Capture,
) -> None:
    monkeypatch.chdir(small_files)
    options = ("train.libfm", "--test", "test.libfm", *SMALL, "--run-name", "gone")
    assert run_train(small_files, options) == (0, "")
    Path("train.libfm").unlink()
    assert recstore("export", "runs/gone", "bundle") == 2
    assert "train.libfm, which the run was trained on, is no longer there: name rows like them by --rows" in (
        capfd.readouterr().err
    )
    no_tables()
    assert recstore("export", "runs/gone", "bundle", "--rows", "test.libfm") == 0
    no_tables()
    assert load_bundle("bundle").manifest.inputs[0]["name"] == "ids"
    assert recstore("export", "runs/gone", "bundle", "--rows", "test.libfm") == 2
    no_tables()
    assert (
        "bundle is there already; replace=True, or --replace, writes the bundle in its place" in capfd.readouterr().err
    )
