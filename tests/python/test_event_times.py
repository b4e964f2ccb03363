"""Rows that live by event times: columns of times, which steps are how long ago, and which rows leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from saved_runs import Signals, metrics_of, rows_of, run_train
from test_train_on_ranks import run, torchrun
from training_runs import drop_tables

from recstore_ops import table_statistics
from recstore_ops.ops import operators
from recstore_ops.training import (
    Batch,
    RowSource,
    TrainingConfig,
    build_model,
    concatenate,
    open_input,
    open_rows,
    train,
)
from recstore_ops.training.data.schema_file import read_schema, write_schema
from recstore_ops.training.run.build import tables_of
from recstore_ops.training.run.event_times import EventTimes, TimeToLive, times_before
from recstore_ops.training.run.option_values import read_duration

pytestmark = [
    pytest.mark.tier("test"),
    pytest.mark.embedded_only("a run is saved by a process that keeps its tables itself"),
]

QUICK = pytest.mark.tier("quick")
DAY = 86_400
START = 1_700_000_000


def last_step_before(times: list[int], age: int) -> int | None:
    """The last step, from 1, up to which all times are older than the newest by more than `age`."""
    newest = np.maximum.accumulate(times)
    old = np.flatnonzero(newest[-1] - newest > age)
    return int(old[-1]) + 1 if old.size else None


@QUICK
@settings(max_examples=examples(200))
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=200), st.integers(1, 3000), st.integers(0, 199))
def test_the_last_old_step_is_that_of_all_times_kept(gaps: list[int], ttl: int, back: int) -> None:
    times = [START + time - back * (number % 3) for number, time in enumerate(np.cumsum(gaps).tolist())]
    known = EventTimes(ttl)
    for step, time in enumerate(times, 1):
        known.add(step, time)
        copy = EventTimes(ttl)
        copy.load_state_dict(known.state_dict())
        known = copy
    late, exact = last_step_before(times, ttl + -(-ttl // 1000)), last_step_before(times, ttl)
    assert (late or 0) <= (known.last_old_step() or 0) <= (exact or 0)


@QUICK
def test_as_many_steps_as_there_may_be_take_little_room() -> None:
    known = EventTimes(7 * DAY)
    for step in range(1, 30_001):
        known.add(step, START + 60 * step)
    assert len(known) <= 1003
    old = known.last_old_step()
    assert old is not None
    assert old <= 30_000 - 7 * DAY // 60 <= old + 7 * DAY // 60 // 1000 + 2


@QUICK
def test_times_of_a_run_are_those_before_the_next_one() -> None:
    one, both = EventTimes(100), EventTimes(100)
    for step in range(1, 11):
        one.add(step, 50 * step)
        both.add(step, 50 * step)
    two = EventTimes(100)
    state = times_before(one.state_dict(), 10)
    assert state is not None
    two.load_state_dict(state)
    for step in range(1, 3):
        two.add(step, 500 + 50 * step)
        both.add(10 + step, 500 + 50 * step)
    old, of_both = two.last_old_step(), both.last_old_step()
    assert old is not None
    assert of_both == old + 10
    assert times_before(None, 10) is None


def batch_at(*seconds: int) -> Batch:
    times = torch.tensor(seconds, dtype=torch.int64) * 1_000_000
    return Batch(torch.zeros(len(seconds), dtype=torch.int64), torch.zeros(len(seconds)), times=times)


@QUICK
def test_a_table_is_told_for_how_many_steps_its_rows_may_go_without_an_update() -> None:
    calls: list[tuple[str, int]] = []
    living = TimeToLive(10.0, 2, ["a", "b"], lambda table, ttl: calls.append((table, ttl)))
    # The newest times up to each step are 0, 5, 20, 20, 40, 40: at step 4 two steps are too old, at 6 four.
    for step, seconds in enumerate(((0,), (5, 1), (20,), (3,), (40, 2), (7,)), 1):
        living.after_step(step, batch_at(*seconds))
    # Rows that steps 3 and 5 updated stay: they were updated 1 step before, and are not more than 1 old.
    assert calls == [("a", 1), ("b", 1), ("a", 1), ("b", 1)]


@QUICK
def test_rows_without_times_cannot_live_by_them() -> None:
    living = TimeToLive(10.0, 2, [], lambda table, ttl: None)
    with pytest.raises(ValueError, match="ttl_time needs the event times of rows, and these have none"):
        living.after_step(1, Batch(torch.zeros(1, dtype=torch.int64), torch.zeros(1)))
    TimeToLive(None, 2, [], lambda table, ttl: None).after_step(1, batch_at(1))


@QUICK
def test_lengths_of_time_are_written_with_a_unit() -> None:
    assert [read_duration("ttl-time", text) for text in ("90s", "30m", "12h", "7d", "1.5d")] == [
        *(90, 1800, 43_200, 7 * DAY, 1.5 * DAY)
    ]
    for text in ("7", "7w", "d", "", "seven d"):
        with pytest.raises(ValueError, match=f"ttl-time takes a length of time, as 7d, 12h, 30m or 90s, got '{text}'"):
            read_duration("ttl-time", text)


@QUICK
def test_batches_keep_the_times_of_their_rows() -> None:
    batch = batch_at(1, 2, 3)
    both = concatenate([batch, batch_at(4)])
    assert both.times is not None
    assert (both.times // 1_000_000).tolist() == [1, 2, 3, 4]
    for part in (both.rows(1, 3), both.take(torch.tensor([1, 2]))):
        assert part.times is not None
        assert (part.times // 1_000_000).tolist() == [2, 3]
    assert batch.nbytes == 3 * (8 + 4 + 8)


SECONDS = [START, START + 1, START + 90_061]
ISO = ["2023-11-14T22:13:20Z", "2023-11-14 22:13:21", "2023-11-16 00:14:21+0100"]


def times_of(rows: RowSource) -> list[int]:
    return [time for batch in rows for time in (batch.times if batch.times is not None else torch.empty(0)).tolist()]


def in_parquet(path: Path, ts: pa.Array, name: str = "ts") -> Path:
    table = pa.table({"label": pa.array([0, 1, 1]), "user": pa.array([1, 2, 3]), name: ts})
    pq.write_table(table, path / "rows.parquet")
    return path / "rows.parquet"


@QUICK
@pytest.mark.parametrize(
    ("cells", "rule"),
    [
        (pa.array(SECONDS), "s since 1970"),
        (pa.array(SECONDS, pa.float64()), "s since 1970"),
        (pa.array([1000 * each for each in SECONDS]), "ms since 1970"),
        (pa.array([1_000_000 * each for each in SECONDS]), "us since 1970"),
        (pa.array([1_000_000_000 * each for each in SECONDS]), "ns since 1970"),
        (pa.array(SECONDS, pa.timestamp("s")), "UTC"),
        (pa.array([1_000_000_000 * each for each in SECONDS], pa.timestamp("ns", "Europe/Paris")), "UTC"),
        (pa.array(ISO), "UTC"),
        (pa.array(ISO).dictionary_encode(), "UTC"),
    ],
    ids=["s", "float", "ms", "us", "ns", "timestamp", "zone", "ISO", "dictionary"],
)
def test_times_are_read_in_every_spelling(tmp_path: Path, cells: pa.Array, rule: str) -> None:
    path = in_parquet(tmp_path, cells)
    rows: Any = open_rows([path], column_roles={"ts": "time"})
    assert rows.field_names == ("user",)
    assert times_of(rows) == [1_000_000 * each for each in SECONDS]
    assert rows.schema.time.rule == rule
    write_schema(tmp_path / "schema.toml", rows.schema)
    again = open_rows([path], schema=read_schema(tmp_path / "schema.toml"))
    assert times_of(again) == [1_000_000 * each for each in SECONDS]


@QUICK
def test_the_name_says_the_unit_before_the_size(tmp_path: Path) -> None:
    rows: Any = open_rows([in_parquet(tmp_path, pa.array([1, 2, 90_000]), "seen_ms")], column_roles={"seen_ms": "time"})
    assert times_of(rows) == [1000, 2000, 90_000_000]
    days = open_rows([in_parquet(tmp_path, pa.array([0, 1, 19_000], pa.date32()))], column_roles={"ts": "time"})
    assert times_of(days) == [0, DAY * 1_000_000, 19_000 * DAY * 1_000_000]


@QUICK
@pytest.mark.parametrize(("cells", "rule"), [([str(each) for each in SECONDS], "s since 1970"), (ISO, "UTC")])
def test_times_are_read_from_text_files(tmp_path: Path, cells: list[str], rule: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(["label,user,ts", *(f"{n % 2},u{n},{cell}" for n, cell in enumerate(cells))]) + "\n")
    rows: Any = open_rows([path], column_roles={"ts": "time"})
    assert times_of(rows) == [1_000_000 * each for each in SECONDS]
    assert rows.schema.time.rule == rule
    with open(path, "a") as file:
        file.write("1,u7,\n1,u8,soon\n")
    with pytest.raises(ValueError, match=r"rows.csv: row 4: expected a time in column 'ts', got None"):
        list(rows)
    skipping = open_rows([path], schema=rows.schema, on_bad_line="skip")
    assert times_of(skipping) == [1_000_000 * each for each in SECONDS]
    assert skipping.skipped_lines == 2


@QUICK
@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (pa.array([1, 2, 3], pa.time32("s")), "column 'ts' has time32.ms., and event times have a date"),
        (pa.array([True, False, True]), "column 'ts' is boolean, and a column of the role time is"),
    ],
)
def test_what_is_no_time_is_refused(tmp_path: Path, cells: pa.Array, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_rows([in_parquet(tmp_path, cells)], column_roles={"ts": "time"})


@QUICK
def test_two_times_and_a_file_whose_times_are_others_are_refused(tmp_path: Path) -> None:
    path = in_parquet(tmp_path, pa.array(SECONDS))
    with pytest.raises(ValueError, match="columns 'user' and 'ts' are both time"):
        open_rows([path], column_roles={"ts": "time", "user": "time"})
    rows = open_rows([path], column_roles={"ts": "time"})
    with pytest.raises(ValueError, match="column 'ts' is string, and integer in"):
        open_rows([in_parquet(tmp_path, pa.array(ISO))], like=rows)


@QUICK
@pytest.mark.parametrize(
    ("unit", "message"),
    [("", "a column of the role time needs a unit here"), ('unit = "weeks"', "expected s or ms or us or ns as unit")],
)
def test_a_schema_says_a_unit_that_there_is(tmp_path: Path, unit: str, message: str) -> None:
    column = '[[column]]\nname = "u"\nrole = "categorical"\ntype = "integer"\n'
    text = f'version = 1\n{column}[[column]]\nname = "ts"\nrole = "time"\ntype = "integer"\n{unit}\n'
    (tmp_path / "schema.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_schema(tmp_path / "schema.toml")


def write_days(path: Path, first: int, days: int, rows_a_day: int = 96) -> list[tuple[int, int]]:
    """Writes rows of users who are seen on few days; returns the time and user of each."""
    rng = np.random.default_rng(first)
    rows = []
    for day in range(first, first + days):
        for row in range(rows_a_day):
            rows.append((START + day * DAY + row * DAY // rows_a_day, int(rng.integers(10 * day, 10 * day + 25))))
    lines = (f"{int(rng.integers(2))},{user},{time}" for time, user in rows)
    path.write_text("\n".join(["label,user,ts", *lines]) + "\n")
    return rows


def config_of(path: Path, **options: Any) -> TrainingConfig:
    values = {"epochs": 1, "validation_fraction": 0.0, "shuffle": False, "batch_size": 16, "ttl_time": 2.0 * DAY}
    return TrainingConfig(train=(path,), column_roles={"ts": "time"}, **{**values, "eviction_interval": 1, **options})


@pytest.mark.parametrize("further", [{}, {"ttl": 5000}, {"capacity": 100_000}, {"min_norm": 1e-30}])
def test_the_rows_that_stay_are_of_ids_seen_within_the_time(tmp_path: Path, further: dict[str, Any]) -> None:
    rows = write_days(tmp_path / "rows.csv", 0, 8)
    config = config_of(tmp_path / "rows.csv", model="lr", **further)
    data = open_input(config)
    model = build_model(config, "lived", data.train)
    try:
        train(config, model, data)
        (table,) = tables_of(model)
        ids = set(operators.hashtable_ids(table.handle).tolist())
        assert table_statistics(table.name)["evictions"] > 50
    finally:
        drop_tables("lived")
    steps = [rows[start : start + 16] for start in range(0, len(rows), 16)]
    newest = [step[-1][0] for step in steps]
    resolution = -(-2 * DAY // 1000)
    must = {user for step, time in zip(steps, newest, strict=True) for _, user in step if newest[-1] - time <= 2 * DAY}
    may = {
        user
        for step, time in zip(steps, newest, strict=True)
        for _, user in step
        if newest[-1] - time <= 2 * DAY + resolution
    }
    assert must <= ids <= may
    assert len(ids) < len({user for _, user in rows}) / 2


def test_it_needs_a_column_of_times(tmp_path: Path) -> None:
    write_days(tmp_path / "rows.csv", 0, 1)
    message = "ttl_time needs the event times of rows: --column NAME=time names a column of CSV or Parquet"
    with pytest.raises(ValueError, match=message):
        open_input(TrainingConfig(train=(tmp_path / "rows.csv",), ttl_time=1.0))
    (tmp_path / "rows.libsvm").write_text("1 1:1\n0 2:1\n" * 20)
    with pytest.raises(ValueError, match=message):
        open_input(TrainingConfig(train=(tmp_path / "rows.libsvm",), ttl_time=1.0))
    unused = open_input(TrainingConfig(train=(tmp_path / "rows.csv",), column_roles={"ts": "time"}))
    assert "ts is read as the event time, which only --ttl-time uses" in unused.notes


OPTIONS = ("--model", "fm", "--batch-size", 16, "--ttl-time", "2d", "--eviction-interval", 4, "--log-every", 3)


@pytest.fixture
def days(tmp_path: Path) -> Path:
    """A folder with files of two days each in `in`."""
    (tmp_path / "in").mkdir()
    for number in range(4):
        write_days(tmp_path / "in" / f"days{number}.csv", 2 * number, 2)
    return tmp_path


def test_a_killed_run_goes_on_to_the_bit(days: Path) -> None:
    follow = ("--follow-files", "in", "--follow-every", 0.05, "--follow-until-idle", 0.5, "--column", "ts=time")
    options = (*follow, *OPTIONS, "--save-every", 5)
    assert run_train(days, (*options, "--run-name", "whole")) == (0, "")
    assert run_train(days, (*options, "--run-name", "killed"), Signals(32))[0] == -9
    assert run_train(days, (*options, "--run-name", "killed", "--resume")) == (0, "")
    whole, killed = days / "runs" / "whole", days / "runs" / "killed"
    assert metrics_of(whole) == metrics_of(killed)
    assert rows_of(whole / "checkpoint") == rows_of(killed / "checkpoint")
    table_rows = [line["table_rows"] for line in metrics_of(whole) if line["event"] == "evaluation"]
    # Of two tables. A file is shuffled, so that its rows are as new as its last one: those of it and the file before
    # are there at its end, 55 users of four days.
    assert max(table_rows) <= 2 * 55


def test_times_go_on_in_a_run_that_begins_with_another(days: Path) -> None:
    options = (*OPTIONS, "--epochs", 1, "--validation-fraction", 0, "--no-shuffle")
    files = [f"in/days{number}.csv" for number in range(3)]
    assert run_train(days, (*files, *options, "--column", "ts=time", "--run-name", "whole")) == (0, "")
    assert run_train(days, (files[0], *options, "--column", "ts=time", "--run-name", "r0")) == (0, "")
    for number in (1, 2):
        begin = ("--init-from", f"runs/r{number - 1}", "--run-name", f"r{number}")
        assert run_train(days, (files[number], *options, *begin)) == (0, "")
    whole, last = (rows_of(days / "runs" / name / "checkpoint") for name in ("whole", "r2"))
    assert whole == last


@pytest.mark.tier("all")
def test_rows_leave_the_tables_of_several_processes(days: Path) -> None:
    files = tuple(f"in/days{number}.csv" for number in range(4))
    options = (*OPTIONS, "--epochs", 1, "--validation-fraction", 0, "--no-shuffle", "--column", "ts=time")
    options = tuple(map(str, options))
    assert run_train(days, (*files, *options, "--run-name", "alone")) == (0, "")
    done = run(days, torchrun(2, *options, "--run-name", "ranks", rows=files))
    assert done.returncode == 0, done.stderr
    alone, ranks = (
        [line["table_rows"] for line in metrics_of(days / "runs" / name) if line["event"] == "steps"]
        for name in ("alone", "ranks")
    )
    assert alone == ranks
    # Of two tables. Between sweeps, which are two thirds of a day apart, there are users of four days at most.
    assert max(alone) <= 2 * 55


def test_a_run_may_begin_to_let_rows_go(days: Path) -> None:
    options = ("--model", "fm", "--batch-size", 16, "--epochs", 1, "--validation-fraction", 0)
    assert run_train(days, ("in/days0.csv", *options, "--column", "ts=time", "--run-name", "r0")) == (0, "")
    living = ("--ttl-time", "1d", "--eviction-interval", 2, "--init-from", "runs/r0", "--run-name", "r1")
    assert run_train(days, ("in/days2.csv", *options, *living)) == (0, "")
    output = (days / "stdout").read_text()
    assert "table fm/v: 35 rows before, " in output
