"""Runs that begin with another run: they go on as one run over both parts would."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from saved_runs import Signals, rows_of, run_train, state_of
from test_train_on_ranks import run, torchrun
from training_runs import drop_tables, metrics_of

from recstore_ops import DistEmbedding, Table, table_statistics
from recstore_ops.ops import operators
from recstore_ops.training import TrainingConfig, open_input, planted_interactions
from recstore_ops.training.data.sparse_lines import write_libsvm
from recstore_ops.training.run.begin import RowChanges, RowsBefore, begin
from recstore_ops.training.run.job import Job

pytestmark = [
    pytest.mark.tier("test"),
    pytest.mark.embedded_only("a run is loaded by a process that keeps its tables itself"),
]

IN_ALL = pytest.mark.tier("all")
DAY = 480
OPTIONS = ("--batch-size", 48, "--epochs", 1, "--no-shuffle", "--validation-fraction", 0)
MODEL = ("--model", "deepfm", "--dropout", 0.2)
RUN_TWO = ("day2", *OPTIONS, *MODEL, "--init-from", "runs/one", "--run-name", "two")


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows of two days and the run `one` on the first; only to be copied."""
    folder = tmp_path_factory.mktemp("days")
    planted = planted_interactions(0, 2 * DAY, 100)
    write_libsvm(folder / "day1", planted.train.rows(0, DAY))
    write_libsvm(folder / "day2", planted.train.rows(DAY, 2 * DAY))
    assert run_train(folder, ("day1", *OPTIONS, *MODEL, "--run-name", "one")) == (0, "")
    return folder


@pytest.fixture
def folder(days: Path, tmp_path: Path) -> Path:
    """A copy of `days`."""
    return Path(shutil.copytree(days, tmp_path / "folder"))


@pytest.fixture(autouse=True)
def _no_tables() -> Iterator[None]:
    yield
    for model in ("deepfm", "fm"):
        drop_tables(model)


def train(folder: Path, *options: object) -> None:
    assert run_train(folder, options) == (0, "")


def assert_equal(one: Path, other: Path, tensors: tuple[str, ...] = ()) -> None:
    """Compares the last saves of two runs; of table files all tensors, or those named and the slots."""
    rows, others = rows_of(one / "checkpoint"), rows_of(other / "checkpoint")
    assert rows.keys() == others.keys()
    for name, table in rows.items():
        names = [each for each in table if not tensors or each in tensors or each.startswith("slot.")]
        assert {each: table[each] for each in names} == {each: others[name][each] for each in names}
        assert len(table["rows"]) > 0
    state, expected = state_of(one / "checkpoint"), state_of(other / "checkpoint")
    for name in ("model", "optimizers", "random"):
        torch.testing.assert_close(state[name], expected[name], rtol=0, atol=0)


def test_columns_mean_what_they_did_on_the_first_day(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for day, scale, user in (("day1", 100.0, "u{}"), ("day2", 90_000.0, "{}")):
        users, prices, labels = rng.integers(0, 30, DAY), rng.random(DAY) * scale, rng.integers(0, 2, DAY)
        rows = [f"{label},{user.format(n)},{price:.2f}" for label, n, price in zip(labels, users, prices, strict=True)]
        (tmp_path / f"{day}.csv").write_text("\n".join(["label,user,price", *rows]) + "\n")
    train(tmp_path, "day1.csv", *OPTIONS, *MODEL, "--run-name", "one")
    train(tmp_path, "day2.csv", *OPTIONS, *MODEL, "--init-from", "runs/one", "--run-name", "two")
    train(tmp_path, "day1.csv", "day2.csv", *OPTIONS, *MODEL, "--run-name", "both")
    assert_equal(tmp_path / "runs" / "two", tmp_path / "runs" / "both")
    config = TrainingConfig(
        train=(tmp_path / "day2.csv",), init_from=str(tmp_path / "runs" / "one"), label_column="label"
    )
    with pytest.raises(ValueError, match=r"columns are for what .*schema.toml says: with init_from there is no label_"):
        open_input(config)


@pytest.mark.parametrize(
    "further",
    [
        (*MODEL, "--optimizer", "adam"),
        pytest.param((*MODEL, "--optimizer", "ftrl", "--reduction", "sum"), marks=IN_ALL),
        pytest.param((*MODEL, "--optimizer", "adamw", "--weight-decay", 0.1), marks=IN_ALL),
        pytest.param(("--model", "lr", "--optimizer", "sgd"), marks=IN_ALL),
        pytest.param(("--model", "dlrm", "--optimizer", "adagrad", "--row-type", "bfloat16"), marks=IN_ALL),
        ("--model", "wide_deep", "--optimizer", "rowwise_adagrad", "--admit-after", 2, "--ttl", 7, "--capacity", 90),
    ],
)
def test_two_runs_equal_one_over_both_days(folder: Path, further: tuple[object, ...]) -> None:
    further = (*further, "--eviction-interval", 3) if "--ttl" in further else further
    train(folder, "day1", "day2", *OPTIONS, *further, "--run-name", "both")
    train(folder, "day1", *OPTIONS, *further, "--run-name", "first")
    train(folder, "day2", *OPTIONS, *further, "--init-from", "runs/first", "--run-name", "second")
    assert_equal(folder / "runs" / "second", folder / "runs" / "both")


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("ftrl", marks=IN_ALL)])
def test_so_they_do_with_tables_that_are_configured_otherwise(folder: Path, optimizer: str) -> None:
    # Nothing is old enough to leave.
    further = (*OPTIONS, *MODEL, "--optimizer", optimizer)
    train(folder, "day1", "day2", *further, "--run-name", "both")
    train(folder, "day1", *further, "--run-name", "first")
    train(folder, "day2", *further, "--ttl", 10_000, "--init-from", "runs/first", "--run-name", "second")
    assert_equal(folder / "runs" / "second", folder / "runs" / "both", ("ids", "rows"))


def config_of(folder: Path, **options: Any) -> TrainingConfig:
    values: dict[str, Any] = {"train": (folder / "day2",), "model": "deepfm", "dropout": 0.2, "validation_fraction": 0}
    return TrainingConfig(**{**values, "init_from": str(folder / "runs" / "one"), **options})


def begun(config: TrainingConfig, folder: Path) -> dict[str, Table]:
    """The tables of a run as it begins."""
    model, _ = begin(config, open_input(config).train, Job(), folder, is_new=True)
    tables = [module.table for module in model.modules() if isinstance(module, DistEmbedding)]
    return {table.name.rpartition("/")[2]: table for table in tables}


def saved_rows(folder: Path, table: str, tensor: str = "rows") -> NDArray[np.float32]:
    rows = rows_of(folder / "runs" / "one" / "checkpoint")
    return next(np.frombuffer(tensors[tensor], np.float32) for name, tensors in rows.items() if f"_{table}" in name)


def rows_now(table: Table) -> NDArray[np.float32]:
    ids = operators.hashtable_ids(table.handle).sort().values
    return operators.emb_read(table.handle, ids, table.dim).numpy().reshape(-1)


def test_another_optimizer_begins_with_the_rows_and_new_slots(folder: Path) -> None:
    tables = begun(config_of(folder, optimizer="adagrad"), folder)
    for name, table in tables.items():
        assert np.array_equal(rows_now(table), saved_rows(folder, name))
        ids = operators.hashtable_ids(table.handle)
        assert not operators.hashtable_slot(table.handle, ids, "state_sum").any()
        assert (table_statistics(table.name)["step"], table.learning_rate()[0]) == (0, pytest.approx(0.05))


def test_rows_alone_can_be_asked_for(folder: Path) -> None:
    tables = begun(config_of(folder, init_what="rows"), folder)
    for name, table in tables.items():
        assert np.array_equal(rows_now(table), saved_rows(folder, name))
        ids = operators.hashtable_ids(table.handle)
        assert not operators.hashtable_slot(table.handle, ids, "exp_avg").any()
        assert table_statistics(table.name)["step"] == 0


@pytest.mark.parametrize("further", [{}, {"ttl": 50}, {"row_type": "bfloat16"}], ids=["alike", "ttl", "bfloat16"])
def test_slots_step_and_the_new_learning_rate_are_there(folder: Path, further: dict[str, Any]) -> None:
    tables = begun(config_of(folder, lr=0.5, **further), folder)
    for name, table in tables.items():
        rows = saved_rows(folder, name)
        expected = torch.tensor(rows).to(torch.bfloat16).float().numpy() if "row_type" in further else rows
        assert np.array_equal(rows_now(table), expected)
        ids = operators.hashtable_ids(table.handle).sort().values
        slot = operators.hashtable_slot(table.handle, ids, "exp_avg").numpy().reshape(-1)
        assert np.array_equal(slot, saved_rows(folder, name, "slot.exp_avg"))
        assert (table_statistics(table.name)["step"], table.learning_rate()[0]) == (DAY // 48, 0.5)


def test_dense_parameters_begin_as_they_were_saved(folder: Path) -> None:
    config = config_of(folder)
    model, how = begin(config, open_input(config).train, Job(), folder, is_new=True)
    state = state_of(folder / "runs" / "one" / "checkpoint")
    own = dict(model.named_parameters())
    assert all(torch.equal(own[name], saved) for name, saved in state["model"].items())
    assert how.start is not None
    torch.testing.assert_close(how.start.optimizers, state["optimizers"], rtol=0, atol=0)


def test_dropout_may_differ(folder: Path) -> None:
    config = config_of(folder, dropout=0.0)
    model, _ = begin(config, open_input(config).train, Job(), folder, is_new=True)
    saved = state_of(folder / "runs" / "one" / "checkpoint")["model"]
    own = [value for name, value in model.named_parameters() if name.startswith("deep.")]
    assert all(torch.equal(*pair) for pair in zip(own, [saved[name] for name in saved if "deep" in name], strict=True))


def test_what_does_not_fit_begins_anew(folder: Path) -> None:
    config = config_of(folder, dense_optimizer="sgd", seed=3)
    _, how = begin(config, open_input(config).train, Job(), folder, is_new=True)
    assert how.start is not None
    assert how.start.optimizers is None
    assert how.start.random is None


def test_a_dense_learning_rate_is_the_new_runs_own(folder: Path) -> None:
    train(folder, *RUN_TWO, "--dense-lr", 0.25, "--lr", 0.125, "--log-every", 1)
    optimizers = torch.load(next((folder / "runs" / "two" / "checkpoint").glob("dense-*")))["optimizers"]
    assert optimizers[0]["param_groups"][0]["lr"] == 0.25
    assert optimizers[0]["state"][0]["step"] == 2 * DAY // 48
    assert {line["lr"] for line in metrics_of(folder / "runs" / "two", "steps")} == {0.125}


def test_chosen_tables_begin_so_and_others_anew(folder: Path) -> None:
    tables = begun(config_of(folder, init_tables=("v",)), folder)
    assert np.array_equal(rows_now(tables["v"]), saved_rows(folder, "v"))
    assert [len(tables[name]) for name in ("v", "w")] == [400, 0]


@pytest.fixture
def changing(tmp_path: Path) -> Path:
    """Ids 1 to 20 on one day, 11 to 40 on the other."""
    draw = random.Random(0)
    for name, first, last, rows in (("day1", 1, 20, 96), ("day2", 11, 40, DAY)):
        ids = list(range(first, last + 1))
        with open(tmp_path / name, "w") as file:
            for _ in range(rows // 48):
                for row in range(48):
                    file.write(f"{draw.randint(0, 1)} {ids[row % len(ids)]}:1\n")
    return tmp_path


CHANGED = {"before": 20, "new": 20, "gone": 10, "moved": 10, "after": 30}


@pytest.mark.parametrize("steps_to_kill", [None, 7])
def test_the_report_says_what_became_of_the_rows(changing: Path, steps_to_kill: int | None) -> None:
    train(changing, "day1", *OPTIONS, "--lr", 0.01, "--run-name", "one")
    options = ("day2", *OPTIONS, "--ttl", 4, "--eviction-interval", 1, "--save-every", 3)
    options = (*options, "--init-from", "runs/one", "--run-name", "two")
    if steps_to_kill is not None:
        assert run_train(changing, options, Signals(steps_to_kill))[0] != 0
        options = (*options, "--resume")
    train(changing, *options)
    changes = {line["table"]: line for line in metrics_of(changing / "runs" / "two", "table_changes")}
    assert changes.keys() == {"fm/v", "fm/w"}
    # The factors of an id with a gradient of zero stay: each row has one id, so that there are no pairs.
    assert changes["fm/w"] == {"event": "table_changes", "table": "fm/w", **CHANGED}
    assert changes["fm/v"] == {"event": "table_changes", "table": "fm/v", **CHANGED, "moved": 0}
    line = "note: table fm/w: 20 rows before, 20 new, 10 gone, 10 moved, 30 now"
    assert line in (changing / "stdout").read_text().splitlines()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"model": "fm"},
            "was trained with model deepfm, this one has model fm: a run begins with one of",
        ),
        ({"dim": 16}, "was trained with dim 8, this one has dim 16"),
        ({"hidden": (8,)}, r"was trained with hidden \(64, 32\), this one has hidden \(8,\)"),
        ({"bias": False}, "was trained with bias True, this one has bias False"),
        ({"hash_buckets": 7}, "was trained with hash_buckets None, this one has hash_buckets 7"),
        ({"ignore_values": True}, "was trained with ignore_values False, this one has ignore_values True"),
        ({"init_tables": ("u", "v")}, "has no table u; it has v, w"),
        (
            {"optimizer": "sgd", "init_what": "rows-and-optimizer"},
            "was trained with optimizer adam, this one has optimizer sgd: only its rows can be taken, init_what rows",
        ),
        (
            {"optimizer_options": {"amsgrad": True}, "init_what": "rows-and-optimizer"},
            "was trained with optimizer adam, this one has optimizer adam amsgrad=True: only its rows can be taken",
        ),
    ],
)
def test_another_model_is_an_error_that_names_both(folder: Path, options: dict[str, Any], message: str) -> None:
    config = config_of(folder, **({"dropout": None} if options.get("model") == "fm" else {}), **options)
    with pytest.raises(ValueError, match=message):
        begun(config, folder)


def test_other_fields_are_an_error_that_names_both(folder: Path) -> None:
    (folder / "wide").write_text("1 1:1 2:1\n0 3:1 4:1\n")
    config = TrainingConfig(train=(folder / "wide",), model="deepfm", init_from=str(folder / "runs" / "one"))
    with pytest.raises(ValueError, match=r"trained with the fields field_0, .* field_7, this one has field_0, field_1"):
        begun(config, folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--init-from", "runs/none"), "there is no run runs/none: it has no config.json"),
        (("--init-what", "rows"), "a run without --init-from takes no --init-what"),
        (("--init-table", "v"), "a run without --init-from takes no --init-table"),
        (("--init-from", "runs/one", "--tables", "nn"), "a run with tables nn takes no --init-from"),
        (("--init-from", "runs/one", "--init-what", "slots"), "Invalid value for '--init-what'"),
    ],
)
def test_the_command_refuses(folder: Path, options: tuple[str, ...], message: str) -> None:
    code, error = run_train(folder, ("day2", *OPTIONS, *MODEL, "--run-name", "two", *options))
    assert code == 2
    assert message in error
    assert not (folder / "runs" / "two").exists()


def test_a_damaged_run_is_an_error(folder: Path) -> None:
    for path in (folder / "runs" / "one" / "checkpoint").glob("*.safetensors"):
        path.write_bytes(b"")
    for further in ((), ("--ttl", 9)):
        code, error = run_train(folder, (*RUN_TWO, *further))
        assert code == 2
        assert "recstore: run runs/one cannot be loaded: " in error


def test_tables_of_the_other_runs_names_are_left_alone(folder: Path) -> None:
    module = DistEmbedding(None, 8, "deepfm/v", init_func=None)
    module.weight[torch.tensor([3])] = torch.ones(1, 8)
    with pytest.raises(ValueError, match="this process has a table deepfm/v already, under which a run is read"):
        begun(config_of(folder, optimizer="sgd"), folder)
    assert len(module.ids()) == 1


@pytest.mark.tier("all")
def test_several_processes_begin_with_a_run_of_one(folder: Path) -> None:
    options = ("day2", *map(str, OPTIONS), "--model", "fm", "--test", "day1")
    train(folder, "day1", *OPTIONS, "--model", "fm", "--run-name", "fm")
    further = ("--init-from", "runs/fm")
    train(folder, *options, *further, "--run-name", "alone")
    done = run(folder, torchrun(2, *further, "--run-name", "ranks", rows=options))
    assert done.returncode == 0, done.stderr
    alone, ranks = (metrics_of(folder / "runs" / name, "evaluation")[0] for name in ("alone", "ranks"))
    assert ranks["test_logloss"] == pytest.approx(alone["test_logloss"], abs=1e-6)
    changes = [metrics_of(folder / "runs" / name, "table_changes") for name in ("alone", "ranks")]
    assert changes[0] == changes[1]
    refused = run(folder, torchrun(2, *further, "--ttl", "9", "--run-name", "refused", rows=options))
    assert "run runs/fm differs in ttl: several processes begin only with" in refused.stderr


def test_changes_are_counted_by_id_and_by_value(tmp_path: Path, table_name: Callable[[], str]) -> None:
    table = DistEmbedding(None, 3, table_name(), initializer={"kind": "zeros"})
    table.weight[torch.arange(10)] = torch.arange(30.0).view(10, 3)
    RowsBefore.of(table.tables()).write(tmp_path, 0)
    operators.hashtable_delete(table.table.handle, torch.tensor([0, 1]))
    table.weight[torch.tensor([4, 5, 20, 21, 22])] = torch.tensor([[12.0, 13.0, 15.0]]).expand(5, 3)
    found = RowsBefore.read(tmp_path).changes(table.tables())
    assert found == [RowChanges(table.name, before=10, after=11, new=3, gone=2, moved=2)]
