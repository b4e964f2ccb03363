"""Rows in groups: columns of the role group, `--auc-by`, and `qid` of svmlight."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from grouped_runs import OPTIONS, figures_of_sessions, sessions, train_grouped
from rich.console import Console
from saved_runs import Signals, metrics_of, rows_of, run_train
from training_runs import Recorder, train_new

from recstore_ops import RecStoreClient, table_names
from recstore_ops.training import TrainingConfig, load, open_input, open_rows
from recstore_ops.training.data.arrow_rows import ArrowRows
from recstore_ops.training.data.batch import NO_GROUP, Batch, concatenate
from recstore_ops.training.data.number_keys import numbers_of_keys
from recstore_ops.training.data.schema_file import read_schema, schema_table, write_schema
from recstore_ops.training.data.sparse_lines import LibsvmFormat
from recstore_ops.training.data.text_cells import text_values
from recstore_ops.training.metrics.segments import segment_figures

pytestmark = [
    pytest.mark.tier("test"),
    pytest.mark.embedded_only("a run is loaded by a process that keeps its tables itself"),
]

COLUMNS: dict[str, Any] = {
    "label": [1, 0, 1, 0],
    "user": [5, 6, 7, 8],
    "session": [3, -1, None, 3],
    "city": ["Bern", "Zug", None, "Bern"],
    "genres": ["a|b", "c", "", "a|c"],
    "items": [[1, 2], [], [3], None],
    "price": [100.5, 2000.0, 30.0, None],
    "whole": [1.0, 2.0, None, 1.0],
    "is_new": [True, False, None, True],
    "seen": pa.array([0, 1, 2, 3], pa.timestamp("s")),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    pq.write_table(pa.table(COLUMNS), tmp_path / "train.parquet")
    return tmp_path / "train.parquet"


@pytest.fixture(autouse=True)
def _no_tables_of_models() -> Iterator[None]:
    before = set(table_names())
    yield
    for name in set(table_names()) - before:
        RecStoreClient().drop(name)


def opened(path: Path, **options: Any) -> ArrowRows:
    rows = open_rows([path], **options)
    assert isinstance(rows, ArrowRows)
    return rows


def groups_of(path: Path, **options: Any) -> list[int] | None:
    (block,) = open_rows([path], **options)
    return None if block.groups is None else block.groups.tolist()


class TestGroupColumns:
    def test_are_no_features(self, path: Path) -> None:
        rows = opened(path, column_roles={"session": "group"})
        assert (rows.group_name, "session" in rows.field_names) == ("session", False)
        assert rows.field_names == tuple(name for name in opened(path).field_names if name != "session")
        (block,) = rows
        (without,) = opened(path, drop_columns=["session"])
        assert torch.equal(block.ids, without.ids)
        assert without.groups is None

    @pytest.mark.parametrize(
        ("column", "expected"),
        [
            ("session", [3, -1, NO_GROUP, 3]),
            ("whole", [1, 2, NO_GROUP, 1]),
            ("is_new", [1, 0, NO_GROUP, 1]),
        ],
    )
    def test_of_numbers_are_their_values(self, path: Path, column: str, expected: list[int]) -> None:
        assert groups_of(path, column_roles={column: "group"}) == expected

    def test_of_text_are_hashes_that_know_their_text(self, path: Path) -> None:
        bern, zug = text_values(pa.array(["Bern", "Zug"])).tolist()
        rows = opened(path, column_roles={"city": "group"})
        assert rows.group_texts == {}
        (block,) = rows
        assert block.groups is not None
        assert block.groups.tolist() == [bern, zug, NO_GROUP, bern]
        assert rows.group_texts == {bern: "Bern", zug: "Zug"}

    def test_of_dictionaries_too(self, tmp_path: Path) -> None:
        cells = pa.array(["x", "y", "x"]).dictionary_encode()
        pq.write_table(pa.table({"label": [1, 0, 1], "user": [1, 2, 3], "kind": cells}), tmp_path / "a.parquet")
        rows = opened(tmp_path / "a.parquet", column_roles={"kind": "group"})
        (block,) = rows
        assert block.groups is not None
        assert [rows.group_texts[group] for group in block.groups.tolist()] == ["x", "y", "x"]

    def test_are_kept_shown_and_held_to(self, path: Path, tmp_path: Path) -> None:
        train = opened(path, column_roles={"session": "group"})
        write_schema(tmp_path / "schema.toml", train.schema)
        schema = read_schema(tmp_path / "schema.toml")
        assert schema.columns == train.schema.columns
        assert groups_of(path, schema=schema) == [3, -1, NO_GROUP, 3]
        console = Console(width=200, record=True)
        console.print(schema_table(train.schema, train.samples, ""))
        (line,) = (line for line in console.export_text().splitlines() if line.startswith("session"))
        assert line.split()[1:3] == ["group", "integer"]
        pq.write_table(pa.table({**COLUMNS, "session": ["a"] * 4}), tmp_path / "test.parquet")
        with pytest.raises(ValueError, match=re.escape(f"column 'session' is string, and integer in {path}")):
            open_rows([tmp_path / "test.parquet"], like=train)
        pq.write_table(pa.table(COLUMNS).drop_columns("session"), tmp_path / "test.parquet")
        with pytest.raises(ValueError, match=f"there is no column 'session', which is integer in {path}"):
            open_rows([tmp_path / "test.parquet"], like=train)
        pq.write_table(pa.table({**COLUMNS, "session": [1.0, 2.5, 3.0, 4.0]}), tmp_path / "test.parquet")
        with pytest.raises(ValueError, match=r"row 2: expected a whole number in column 'session', got 2\.5"):
            list(open_rows([tmp_path / "test.parquet"], like=train))

    @pytest.mark.parametrize(
        ("roles", "message"),
        [
            ({"session": "group", "city": "group"}, "columns 'session' and 'city' are both group"),
            ({"items": "group"}, "column 'items' is list of integer, and a column of the role group is integer or"),
            ({"seen": "group"}, "column 'seen' is time, and a column of the role group is integer or number"),
        ],
    )
    def test_what_is_no_group_is_refused(self, path: Path, roles: dict[str, str], message: str) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            opened(path, column_roles=roles)

    def test_an_option_and_a_role_name_one_column(self, path: Path) -> None:
        config = TrainingConfig(train=(path,), column_roles={"session": "group"}, auc_by="user")
        with pytest.raises(ValueError, match="column 'session' has the role group, and auc_by names 'user'"):
            open_input(config)
        assert open_input(replace(config, auc_by="session")).train.group_name == "session"

    @pytest.mark.parametrize(("column", "roles"), [("price", {}), ("user", {"user": "number"})])
    def test_amounts_are_none_for_auc(self, path: Path, column: str, roles: dict[str, str]) -> None:
        config = TrainingConfig(train=(path,), auc_by=column, column_roles=roles)
        found = "number" if column == "price" else "integer"
        message = (
            f"auc_by names column '{column}', which has the role number and is {found}: expected integers, strings"
        )
        with pytest.raises(ValueError, match=message):
            open_input(config)

    def test_models_that_retrieve_take_none(self, path: Path) -> None:
        config = TrainingConfig(
            train=(path,), column_roles={"session": "group"}, model="two_tower", item_fields=("user",)
        )
        with pytest.raises(ValueError, match="column 'session' has the role group, and model two_tower ranks items"):
            open_input(config)


class TestGroupingByAColumn:
    def test_of_ratings_is_by_ranges(self, tmp_path: Path) -> None:
        columns = {"rating": [4.5, 3.0, 5.0], "user": [1, 2, 3]}
        pq.write_table(pa.table(columns), tmp_path / "a.parquet")
        rows = opened(tmp_path / "a.parquet", group_by="rating")
        assert rows.schema.group is not None
        assert rows.schema.group.has_amounts
        (block,) = rows
        assert block.groups is not None
        assert numbers_of_keys(block.groups.numpy()).tolist() == columns["rating"]

    @pytest.mark.parametrize("column", ["user", "session", "city", "whole", "is_new", "label"])
    def test_leaves_it_what_it_is(self, path: Path, column: str) -> None:
        rows = opened(path, group_by=column)
        (block,), (plain,) = rows, opened(path)
        assert torch.equal(block.ids, plain.ids)
        assert (rows.schema.columns, rows.group_name) == (opened(path).schema.columns, column)
        if column != "label":
            assert groups_of(path, group_by=column) == groups_of(path, column_roles={column: "group"})

    def test_that_is_ignored_reads_it_for_that_alone(self, path: Path) -> None:
        rows = opened(path, drop_columns=["city"], group_by="city")
        (block,) = rows
        assert "city" not in rows.field_names
        assert block.groups is not None
        assert [rows.group_texts.get(group) for group in block.groups.tolist()] == ["Bern", "Zug", None, "Bern"]

    def test_takes_the_place_of_the_role(self, path: Path) -> None:
        assert groups_of(path, column_roles={"session": "group"}, group_by="user") == [5, 6, 7, 8]

    @pytest.mark.parametrize(
        ("column", "message"),
        [
            ("usr", "there is no column 'usr' to group rows by, only 'label', 'user', 'session'"),
            ("seen", "column 'seen' is time, and rows are grouped by integer, number, boolean, string"),
            ("items", "column 'items' has several ids in a cell, and a row is in one group"),
            ("genres", "column 'genres' has several ids in a cell, and a row is in one group"),
        ],
    )
    def test_needs_single_values(self, path: Path, column: str, message: str) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            opened(path, group_by=column)

    def test_of_text_files(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("label,city,user,day\n1,Bern,3,7\n0,,4,8\n")
        rows = opened(tmp_path / "a.csv", group_by="day", drop_columns=["day"])
        (block,) = rows
        assert block.groups is not None
        assert block.groups.tolist() == [7, 8]
        assert groups_of(tmp_path / "a.csv", group_by="city") == [*text_values(pa.array(["Bern"])).tolist(), NO_GROUP]


class TestQueries:
    LINES = (
        b"1 qid:7 3:1 4:0.5\n# a comment\n\n0 qid:8 3:1 5:1 # qid:9\n1 3:1 4:1\n0\tqid:99999999999999999999 6:1 7:1\n"
    )
    GROUPS = (7, 8, NO_GROUP, 99999999999999999999 % (2**63 - 1))

    def test_are_the_groups_of_rows(self, tmp_path: Path) -> None:
        (tmp_path / "a.svm").write_bytes(self.LINES)
        rows = open_rows([tmp_path / "a.svm"])
        (block,) = rows
        assert block.groups is not None
        assert (tuple(block.groups.tolist()), rows.group_name) == (self.GROUPS, "qid")
        assert block.ids.tolist() == [3, 4, 3, 5, 3, 4, 6, 7]
        assert groups_of(tmp_path / "a.svm", group_by="qid", by_field=True) == list(self.GROUPS)

    def test_are_passed_over_where_rows_are_grouped_by_a_field(self, tmp_path: Path) -> None:
        (tmp_path / "a.svm").write_bytes(self.LINES)
        rows = open_rows([tmp_path / "a.svm"], group_by="field_0", by_field=True)
        assert rows.group_name is None
        assert next(iter(rows)).groups is None

    def test_that_are_not_there_cannot_be_asked_for(self, tmp_path: Path) -> None:
        (tmp_path / "a.svm").write_text("1 3:1\n0 4:1\n")
        assert groups_of(tmp_path / "a.svm") is None
        message = f"rows are grouped by qid, and the first lines of {tmp_path / 'a.svm'} have none"
        with pytest.raises(ValueError, match=re.escape(message)):
            open_rows([tmp_path / "a.svm"], group_by="qid")

    def test_bad_lines_are_explained_as_without(self, tmp_path: Path) -> None:
        (tmp_path / "a.svm").write_text("1 qid:1 3:1\n0 qid:x 4:1\n")
        with pytest.raises(ValueError, match=r"a.svm:2: expected id:value \(libsvm\) .*, got 'qid:x'"):
            list(open_rows([tmp_path / "a.svm"]))

    def test_of_blocks_without_one_are_no_group(self) -> None:
        block = LibsvmFormat(group_name="qid").parse(b"1 3:1\n\n0 4:1\n")
        assert block.groups is not None
        assert block.groups.tolist() == [NO_GROUP] * 2

    def test_segments_are_those_of_queries(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        lines = [f"{rng.integers(2)} qid:{row // 5} {rng.integers(9)}:1 {rng.integers(9) + 20}:1" for row in range(400)]
        (tmp_path / "a.svm").write_text("\n".join(lines) + "\n")
        recorder = Recorder()
        for number, asked in enumerate((None, "qid")):
            config = TrainingConfig(train=(tmp_path / "a.svm",), model="lr", epochs=1, auc_by=asked, seed=1)
            train_new(config, f"queries{number}", recorder)
        scores, again = (each["validation"] for each in recorder.scores)
        assert scores.segments is not None
        assert again.segments is not None
        assert set(scores.segments.tolist()) <= set(range(80))
        assert torch.equal(scores.segments, again.segments)


class TestBatches:
    def test_are_cut_taken_and_joined_with_their_groups(self) -> None:
        batch = Batch(torch.arange(4), torch.zeros(4), groups=torch.tensor([4, 5, NO_GROUP, 5]))
        order = torch.tensor([2, 0])
        parts = [batch.rows(0, 1), batch.rows(1, 4)]
        assert [each.groups.tolist() for each in parts if each.groups is not None] == [[4], [5, NO_GROUP, 5]]
        for found, expected in ((batch.take(order), [NO_GROUP, 4]), (concatenate(parts), [4, 5, NO_GROUP, 5])):
            assert found.groups is not None
            assert found.groups.tolist() == expected
        assert batch.nbytes == 4 * 8 + 4 * 4 + 4 * 8


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `grouped` on rows with sessions; only to be read."""
    folder = tmp_path_factory.mktemp("grouped")
    train_grouped(folder)
    return folder


@pytest.fixture
def expected(trained: Path) -> dict[str, dict[str, float]]:
    """The figures of each session of the test rows."""
    return figures_of_sessions(trained)


class TestRuns:
    def test_report_auc_and_ranking_within_groups(self, trained: Path, expected: dict[str, dict[str, float]]) -> None:
        run = trained / "runs" / "grouped"
        with open(run / "segments.csv", newline="") as file:
            lines = {line["segment"]: line for line in csv.DictReader(file) if line["part"] == "test"}
        assert set(lines) == set(expected)
        for segment, line in lines.items():
            assert float(line["auc"]) == pytest.approx(expected[segment]["auc"], abs=1e-6)
            assert float(line["ndcg_at_10"]) == pytest.approx(expected[segment]["ndcg_at_10"], abs=1e-6)
            assert float(line["prediction"]) == pytest.approx(expected[segment]["mean_prediction"], abs=1e-5)
        (event,) = (line for line in metrics_of(run) if line["event"] == "segments" and line["part"] == "test")
        ndcg = np.mean([figures["ndcg_at_10"] for figures in expected.values()])
        assert event["ndcg_at_10"] == pytest.approx(ndcg, abs=1e-6)
        said = (trained / "stdout").read_text()
        assert re.search(r"session +group +string", said)
        assert f"test AUC within session, weighted by rows: {event['weighted_auc']:.4f} (600 rows of 30 ids" in said
        assert f"NDCG@10 {ndcg:.4f}, means over those with positive rows" in said
        assert "<td>s0</td>" in (run / "report.html").read_text()
        assert 'role = "group"' in (run / "schema.toml").read_text()

    def test_resumed_runs_know_the_texts(self, trained: Path, tmp_path: Path) -> None:
        for name in ("train", "test"):
            (tmp_path / f"{name}.parquet").write_bytes((trained / f"{name}.parquet").read_bytes())
        options = ("train.parquet", "--test", "test.parquet", *OPTIONS, "--column", "session=group")
        options = (*options, "--run-name", "grouped", "--save-every", 3)
        assert run_train(tmp_path, options, Signals(14))[0] != 0
        assert run_train(tmp_path, (*options, "--resume")) == (0, "")
        run, whole = tmp_path / "runs" / "grouped", trained / "runs" / "grouped"
        assert (run / "segments.csv").read_text() == (whole / "segments.csv").read_text()
        assert rows_of(run / "checkpoint") == rows_of(whole / "checkpoint")
        code, said = run_train(tmp_path, (*options, "--resume", "--auc-by", "session"))
        assert (code, "run 'grouped' has --auc-by None, got 'session'" in said) == (2, True)

    def test_of_nn_tables_have_the_same_groups(self, trained: Path) -> None:
        common: dict[str, Any] = {"train": (trained / "train.parquet",), "epochs": 1, "model": "lr"}
        config = TrainingConfig(**common, test=(trained / "test.parquet",), column_roles={"session": "group"})
        found = []
        for tables in ("store", "nn"):
            recorder = Recorder()
            train_new(replace(config, tables=tables), f"groups_{tables}", recorder)
            found.append(segment_figures(recorder.scores[-1]["test"]))
        assert found[0].names() == found[1].names()

    def test_auc_by_is_a_column_of_any_role(self, trained: Path, tmp_path: Path) -> None:
        options = (trained / "train.parquet", *OPTIONS, "--drop-column", "shop", "--auc-by", "shop")
        assert run_train(tmp_path, (*options, "--run-name", "by")) == (0, "")
        with open(tmp_path / "runs" / "by" / "segments.csv", newline="") as file:
            assert {line["segment"] for line in csv.DictReader(file)} == {"0", "1", "2", "3"}

    def test_begin_with_each_other_and_keep_the_group(self, trained: Path, tmp_path: Path) -> None:
        begin = (trained / "test.parquet", *OPTIONS, "--init-from", trained / "runs" / "grouped", "--run-name", "next")
        assert run_train(tmp_path, begin) == (0, "")
        assert "validation AUC within session" in (tmp_path / "stdout").read_text()
        pq.write_table(pa.table({**sessions(50), "session": range(50)}), tmp_path / "other.parquet")
        other = (tmp_path / "other.parquet", *OPTIONS, "--init-from", trained / "runs" / "grouped")
        code, said = run_train(tmp_path, other)
        assert code == 2
        assert "column 'session' is integer, and string in " in said

    @pytest.mark.parametrize(
        ("options", "name"), [(("--column", "session=group"), "session"), (("--drop-column", "shop"), "shop")]
    )
    def test_followed_files_have_them_too(
        self, trained: Path, tmp_path: Path, options: tuple[str, ...], name: str
    ) -> None:
        if name == "shop":
            options = (*options, "--auc-by", "shop")
        for folder in ("in", "later"):
            (tmp_path / folder).mkdir()
        (tmp_path / "in" / "done").touch()
        (tmp_path / "in" / "1").write_bytes((trained / "train.parquet").read_bytes())
        follow = ("--follow-files", "in", "--follow-every", 0.05, "--follow-until", "done", "--run-name", "f")
        command = (*follow, "--model", "fm", "--dim", 4, *options)
        assert run_train(tmp_path, command) == (0, "")
        (tmp_path / "in" / "2").write_bytes((trained / "test.parquet").read_bytes())
        assert run_train(tmp_path, (*command, "--resume")) == (0, "")
        assert f"validation AUC within {name}, weighted by rows" in (tmp_path / "stdout").read_text()
        with open(tmp_path / "runs" / "f" / "segments.csv", newline="") as file:
            found = {line["segment"]: int(line["rows"]) for line in csv.DictReader(file)}
        values, counts = np.unique(np.array(sessions(600, 1)[name]).astype(str), return_counts=True)
        assert found == dict(zip(values.tolist(), counts.tolist(), strict=True))

    def test_predict_needs_the_group_as_all_columns(self, trained: Path, tmp_path: Path) -> None:
        pq.write_table(pa.table(sessions(50)).drop_columns(["session", "label"]), tmp_path / "new.parquet")
        loaded = load(trained / "runs" / "grouped")
        with pytest.raises(ValueError, match="there is no column 'session', which is string in "):
            loaded.open_rows([tmp_path / "new.parquet"])
