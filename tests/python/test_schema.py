"""Schemas: roles by rules and by the caller, TOML files, the table that is shown, and runs that keep theirs."""

from __future__ import annotations

import os
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from training_runs import train_new

from recstore_ops.training import TrainingConfig, open_input, open_rows
from recstore_ops.training.data.arrow_rows import ArrowRows
from recstore_ops.training.data.input_files import kept
from recstore_ops.training.data.schema import Schema
from recstore_ops.training.data.schema_file import read_schema, schema_notes, schema_table, write_schema
from recstore_ops.training.report.run_directory import RunDirectory
from recstore_ops.training.run.choices import MODEL_OPTIONS
from recstore_ops.training.run.option_values import read_roles

pytestmark = pytest.mark.tier("quick")

COLUMNS: dict[str, Any] = {
    "label": [1, 0, 1, 0],
    "user": [5, None, 7, 8],
    "city": ["Bern", "Zug", None, "Bern"],
    "genres": ["a|b", "c", "", "a|c"],
    "items": [[1, 2], [], [3], None],
    "vector": [[0.5, 1.0], [2.0, 3.0], None, [4.0, 5.0]],
    "price": [100.5, 2000.0, 30.0, None],
    "share": [0.5, 0.25, None, 1.0],
    "weight": [1.0, 0.5, 2.0, 0.0],
    "seen": pa.array([0, 1, 2, 3], pa.timestamp("s")),
    "__index_level_0__": [0, 1, 2, 3],
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    pq.write_table(pa.table(COLUMNS), tmp_path / "train.parquet")
    return tmp_path / "train.parquet"


def opened(path: Path, **options) -> ArrowRows:
    rows = open_rows([path], **options)
    assert isinstance(rows, ArrowRows)
    return rows


def roles(rows: ArrowRows) -> dict[str, str]:
    return {column.name: column.role for column in rows.schema.columns}


def test_roles_by_names_and_cells(path: Path) -> None:
    assert roles(opened(path)) == {
        "label": "label",
        "user": "categorical",
        "city": "categorical",
        "genres": "ids",
        "items": "ids",
        "vector": "vector",
        "price": "number",
        "share": "number",
        "weight": "number",
        "seen": "ignored",
        "__index_level_0__": "ignored",
    }


def test_the_caller_gives_other_roles(path: Path) -> None:
    given = {"weight": "weight", "genres": "categorical", "user": "number", "city": "ids", "share": "ignored"}
    rows = opened(path, column_roles=given, drop_columns=["price"])
    assert {name: roles(rows)[name] for name in given} == given
    assert rows.field_names == ("city", "genres", "items")
    assert rows.dense_names == ("user", "vector[0]", "vector[1]")
    (block,) = rows
    assert block.weights is not None
    assert block.weights.tolist() == [1.0, 0.5, 2.0, 0.0]
    assert block.dense is not None
    assert block.dense[:, 1:].tolist() == [[0.5, 1.0], [2.0, 3.0], [0.0, 0.0], [4.0, 5.0]]
    mean, deviation = np.mean([5, 7, 8]), np.std([5, 7, 8])
    expected = [(5 - mean) / deviation, 0.0, (7 - mean) / deviation, (8 - mean) / deviation]
    assert np.allclose(block.dense[:, 0], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column_roles": {"cty": "ids"}}, "expected a column 'cty', got only 'label', 'user'"),
        (
            {"column_roles": {"city": "cat"}},
            "expected one of label, categorical, ids, sequence, number, vector, weight, time, group, ignored as",
        ),
        (
            {"column_roles": {"city": "number"}},
            "column 'city' is string, and a column of the role number is",
        ),
        ({"column_roles": {"user": "vector"}}, "column 'user' is integer, and a column of the role vector is list of"),
        (
            {"column_roles": {"items": "vector"}},
            "column 'items' is list of integer, and a column of the role vector",
        ),
        ({"column_roles": {"price": "weight", "weight": "weight"}}, "columns 'price' and 'weight' are both weight"),
        ({"column_roles": {"seen": "categorical"}}, "column 'seen' is time, and a column of the role categorical is"),
        (
            {"label_column": "price"},
            "expected 0 and 1, or -1 and 1, in column 'price', the labels, got 30, 100.5",
        ),
    ],
)
def test_roles_that_columns_cannot_have(path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        opened(path, **options)


def test_vectors_of_several_lengths_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": [1, 0], "a": [1, 2], "x": [[0.5], [0.5, 1.0]]}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="expected lists of one length in column 'x', vectors of numbers; got others"):
        opened(tmp_path / "x.parquet")


@pytest.mark.parametrize(
    ("column", "cells", "message"),
    [
        ("weight", [1.0, -0.5], "expected a weight of 0 or more in column 'weight', got -0.5"),
        ("weight", [1.0, None], "expected a weight of 0 or more in column 'weight', got None"),
        ("x", [[0.5, 1.0], [0.5]], "expected 2 finite 32-bit numbers in column 'x', got [0.5]"),
        ("user", [5.0, 5.5], "expected a whole number in column 'user', got 5.5"),
    ],
)
def test_bad_cells_of_each_role(tmp_path: Path, column: str, cells: list[Any], message: str) -> None:
    first = {"label": [1, 0], "user": [5.0, 7.0], "weight": [1.0, 2.0], "x": [[0.5, 1.0], [2.0, 3.0]]}
    for name, columns in (("train", first), ("test", {**first, column: cells})):
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    train = opened(tmp_path / "train.parquet", column_roles={"weight": "weight"})
    with pytest.raises(ValueError, match=re.escape(f"test.parquet: row 2: {message}")):
        list(open_rows([tmp_path / "test.parquet"], like=train))


class TestFiles:
    def test_a_schema_is_read_as_it_was_written(self, path: Path) -> None:
        rows = opened(path, column_roles={"weight": "weight"})
        write_schema(path.with_name("schema.toml"), rows.schema)
        read = read_schema(path.with_name("schema.toml"))
        assert read.columns == rows.schema.columns
        (block,), (again,) = rows, open_rows([path], schema=read)
        assert torch.equal(block.ids, again.ids)

    @given(st.text(min_size=1), st.text(), st.floats(allow_nan=False, allow_infinity=False))
    @settings(max_examples=examples(50), deadline=None)
    def test_any_names_and_numbers_come_back(
        self, tmp_path_factory: pytest.TempPathFactory, name: str, reason: str, threshold: float
    ) -> None:
        path = tmp_path_factory.mktemp("schema") / "schema.toml"
        pq.write_table(pa.table({"label": [1], "a": [1]}), path.with_name("a.parquet"))
        label, other = opened(path.with_name("a.parquet")).schema.columns
        columns = (
            replace(label, negative=None, positive=None, threshold=threshold, reason=reason),
            replace(other, name=name + "a"),
        )
        write_schema(path, Schema(columns, ""))
        assert read_schema(path).columns == columns

    @pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
    @pytest.mark.parametrize("name", ["mean", "deviation", "threshold"])
    def test_numbers_that_are_none_are_neither_written_nor_read(self, path: Path, name: str, number: str) -> None:
        file, schema = path.with_name("schema.toml"), opened(path).schema
        column = schema.columns[0]
        values = {"mean": 0.0, "deviation": 1.0, "transform": "standard"} if name != "threshold" else {}
        changed = replace(column, role="number" if values else "label", negative=None, positive=None, **values)
        columns = (replace(changed, **{name: 0.5}), *schema.columns[1:])
        write_schema(file, Schema(columns, ""))
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace(f"{name} = 0.5", f"{name} = {number}"), encoding="utf-8")
        with pytest.raises(ValueError, match=f"column 1, '{column.name}': expected a finite number as {name}, got"):
            read_schema(file)
        file.unlink()
        with pytest.raises(ValueError, match=f"column '{column.name}' must have a finite {name}, got {number}"):
            write_schema(file, Schema((replace(changed, **{name: float(number)}),), ""))
        assert not file.exists()

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ("version = 1", "version = 2", "expected version = 1, got 2"),
            ("version = 1", "version =", "no TOML"),
            ("version = 1", "version = 1\nextra = 1", "unknown key 'extra'; the known ones are version, column"),
            ('role = "number"', 'rol = "number"', "unknown key 'rol'; did you mean \"role\"?"),
            ('role = "number"', 'role = "numbr"', "expected label or categorical or ids or"),
            ('role = "number"', "role = 5", "expected a string as role, got 5"),
            ('role = "number"\n', "", "expected a role, got none"),
            ('role = "number"', 'role = "categorical"', "a column of the role categorical takes no transform here"),
            ('transform = "none"\n', "", "a column of the role number needs a transform here"),
            ('transform = "none"', 'transform = "standard"', "a column of the role number needs a mean here"),
            ('transform = "none"', 'transform = "standard"\nmean = true', "expected a number as mean, got True"),
            (
                'transform = "none"',
                'transform = "standard"\nmean = 1\ndeviation = 0',
                "expected a deviation above 0, got 0.0",
            ),
            ("size = 2", "size = 0", "expected a size of 1 or more, got 0"),
            ('name = "user"', 'name = "city"', "expected each column once, got several of the name 'city'"),
            ('separator = "|"\n', "", "a column of the role ids needs a separator here"),
            ('type = "time"', 'type = "time"\nthreshold = 1', "a column of the role ignored takes no threshold here"),
        ],
    )
    def test_what_is_no_schema_is_an_error_that_names_file_and_key(
        self, path: Path, old: str, new: str, message: str
    ) -> None:
        file = path.with_name("schema.toml")
        write_schema(file, opened(path).schema)
        text = file.read_text(encoding="utf-8")
        assert old in text
        # The number without a transform is the last one.
        before, _, after = text.rpartition(old) if "transform" in old or "number" in old else text.partition(old)
        file.write_text(before + new + after, encoding="utf-8")
        with pytest.raises(ValueError, match=re.escape(str(file)) + ".*" + re.escape(message)):
            read_schema(file)

    def test_nothing_stands_beside_a_schema(self, path: Path) -> None:
        schema = opened(path).schema
        with pytest.raises(ValueError, match="a schema says what columns are for: it takes no label_column beside it"):
            open_rows([path], schema=schema, label_column="label")

    def test_an_empty_file(self, tmp_path: Path) -> None:
        (tmp_path / "schema.toml").write_text("version = 1\n")
        with pytest.raises(ValueError, match=r"expected \[\[column\]\] for each column, got none"):
            read_schema(tmp_path / "schema.toml")


LABELS: dict[str, list[Any]] = {
    "integer": [0, 5, None, 2],
    "number": [0.5, 4.5, float("nan"), 2.0],
    "boolean": [True, False, None, True],
    "string": ["no", "yes", None, "yes"],
}


class TestThresholds:
    """Of labels: each side of one has labels, and only numbers have sides."""

    def write(self, folder: Path, kind: str, ending: str) -> Path:
        folder.mkdir(exist_ok=True)
        path = folder / f"a{ending}"
        labels = LABELS[kind]
        if ending == ".parquet":
            pq.write_table(pa.table({"label": labels, "user": [1, 2, 3, 4]}), path)
        else:
            lines = [f"{'' if label is None else label},{user}" for user, label in enumerate(labels)]
            path.write_text("\n".join(["label,user", *lines]) + "\n")
        return path

    @pytest.mark.parametrize("ending", [".parquet", ".csv"])
    @pytest.mark.parametrize(
        ("kind", "threshold", "message"),
        [
            (
                "integer",
                6,
                "rating_threshold 6 would leave no row positive: the first 3 labels, in column 'label'",
            ),
            (
                "integer",
                0,
                "rating_threshold 0 would leave no row negative: the first 3 labels, in column 'label'",
            ),
            ("integer", -1, "are from 0 to 5"),
            ("number", 4.6, "would leave no row positive"),
            ("number", 0.5, "rating_threshold 0.5 would leave no row negative: the first 3 labels"),
            ("boolean", 3, "column 'label', the labels, is boolean: rating_threshold 3 is for numbers"),
            ("boolean", 1, "column 'label', the labels, is boolean"),
            ("string", 3, "column 'label', the labels, is string: rating_threshold 3 is for numbers"),
            ("integer", float("nan"), "rating_threshold must be a finite number, got nan"),
            ("number", float("inf"), "rating_threshold must be a finite number, got inf"),
        ],
    )
    def test_one_that_has_no_two_sides_is_refused(
        self, tmp_path: Path, kind: str, threshold: float, message: str, ending: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            open_rows([self.write(tmp_path, kind, ending)], rating_threshold=threshold, on_bad_line="skip")

    @pytest.mark.parametrize("threshold", [0.75, 2, 4.5])
    def test_one_between_labels_is_taken(self, tmp_path: Path, threshold: float) -> None:
        path = self.write(tmp_path, "number", ".parquet")
        (block,) = open_rows([path], rating_threshold=threshold, on_bad_line="skip")
        assert block.labels.tolist() == [float(label >= threshold) for label in (0.5, 4.5, 2.0)]

    def test_booleans_are_no_ratings_for_a_schema_with_one(self, tmp_path: Path) -> None:
        rated, booleans = self.write(tmp_path, "integer", ".parquet"), self.write(tmp_path / "b", "boolean", ".parquet")
        schema = cast(ArrowRows, open_rows([rated], rating_threshold=3)).schema
        with pytest.raises(ValueError, match="column 'label' is boolean, and integer in"):
            open_rows([booleans], schema=schema)

    def test_a_file_gives_none_to_labels_that_are_no_numbers(self, tmp_path: Path) -> None:
        rows = cast(ArrowRows, open_rows([self.write(tmp_path, "boolean", ".parquet")]))
        write_schema(tmp_path / "schema.toml", rows.schema)
        text = (tmp_path / "schema.toml").read_text()
        text = re.sub("negative = .*\npositive = .*\n", "threshold = 3\n", text)
        (tmp_path / "schema.toml").write_text(text)
        with pytest.raises(ValueError, match="a column of the role label needs a negative here"):
            read_schema(tmp_path / "schema.toml")


def test_the_table_shows_every_column_with_its_figures(path: Path) -> None:
    rows = opened(path)
    console = Console(width=200, record=True)
    console.print(schema_table(rows.schema, rows.samples, "title [bold]"))
    text = console.export_text()
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "title [bold]" in text
    assert set(COLUMNS) <= set(lines)
    assert "0 / 1" in lines["label"]
    assert "25.0%" in lines["user"]
    assert "cut at '|'" in lines["genres"]
    assert "the index that pandas adds" in lines["__index_level_0__"]
    assert lines["user"].split()[-1] == "3"


def test_a_column_of_other_values_in_every_row_is_told(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": [1] * 2000, "a": [1] * 2000, "key": range(2000)}), tmp_path / "a.parquet")
    rows = opened(tmp_path / "a.parquet")
    notes = schema_notes(rows.schema, rows.samples)
    assert notes == ("key: another value in each row; --column key=ignored leaves it out",)


def test_of_many_columns_the_table_shows_some(tmp_path: Path) -> None:
    columns = {"label": [1, 0], **{f"column {n}": [n, n + 1] for n in range(70)}}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    rows = opened(tmp_path / "a.parquet")
    assert schema_table(rows.schema, rows.samples, "").row_count == 60
    message = "the table shows 60 columns, and there are 11 more: schema.toml has all"
    assert schema_notes(rows.schema, rows.samples) == (message,)


class TestRuns:
    def write_rows(self, path: Path, columns: list[str], labelled: bool = True) -> Path:
        rng = np.random.default_rng(0)
        rows = {"label": rng.integers(0, 2, 400), "user": rng.integers(0, 20, 400), "item": rng.integers(0, 9, 400)}
        rows["label"] |= rows["user"] == 3
        names = [name for name in columns if labelled or name != "label"]
        lines = [",".join(str(rows[name][row]) for name in names) for row in range(400)]
        path.write_text("\n".join([",".join(names), *lines]) + "\n")
        return path

    def test_test_rows_are_found_by_name(self, tmp_path: Path) -> None:
        train = self.write_rows(tmp_path / "train.csv", ["label", "user", "item"])
        test = self.write_rows(tmp_path / "test.csv", ["item", "label", "user"])
        config = TrainingConfig(train=(train,), test=(test,), epochs=3, patience=0, model="deepfm", seed=1)
        records = train_new(config, "by_name")
        same = train_new(replace(config, test=(train,)), "by_name")
        assert [record.test for record in records] == [record.test for record in same]

    def test_test_rows_without_labels_are_told_of(self, tmp_path: Path) -> None:
        train = self.write_rows(tmp_path / "train.csv", ["label", "user", "item"])
        test = self.write_rows(tmp_path / "test.csv", ["user", "item"], labelled=False)
        rows = open_input(TrainingConfig(train=(train,), test=(test,)))
        assert rows.test is None
        assert rows.notes == (f"{test} has no labels: the test rows are not evaluated",)

    def test_a_run_keeps_its_schema_and_is_held_to_it(self, tmp_path: Path) -> None:
        train = self.write_rows(tmp_path / "train.csv", ["label", "user", "item"])
        config = TrainingConfig(train=(train,))
        schema = open_input(config).schema
        assert schema is not None
        with RunDirectory(tmp_path, "run", config) as run:
            run.keep_schema(schema)
            run.keep_schema(schema)
            run.record_event("begun")
            assert read_schema(run.path / "schema.toml").columns == schema.columns
            other = replace(schema, columns=schema.columns[:-1])
            with pytest.raises(ValueError, match="run 'run' has column 'item' as ColumnSchema"):
                run.keep_schema(other)

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_weights_count_as_often_as_rows(self, tmp_path: Path, reduction: str) -> None:
        lines = ["label,user,times", "1,5,3.0", "0,6,1.0", "1,6,2.0", "0,5,0.0"]
        (tmp_path / "weighted.csv").write_text("\n".join(lines) + "\n")
        repeated = ["label,user", "1,5", "1,5", "1,5", "0,6", "1,6", "1,6"]
        (tmp_path / "repeated.csv").write_text("\n".join(repeated) + "\n")
        common: dict[str, Any] = {
            "validation_fraction": 0.0,
            "shuffle": False,
            "epochs": 4,
            "model": "lr",
            "reduction": reduction,
        }
        common |= {"optimizer": "sgd", "lr": 0.1, "batch_size": 100, "reduction": reduction}
        found = {}
        for name, roles in (("weighted", {"times": "weight"}), ("repeated", {})):
            train = (tmp_path / f"{name}.csv",)
            test = (tmp_path / "repeated.csv",) if name == "repeated" else train
            records = train_new(TrainingConfig(train=train, test=test, column_roles=roles, **common), name)
            found[name] = records[-1].table_rows, records[-1].train_loss * records[-1].train_rows
        assert found["weighted"][0] == found["repeated"][0]
        assert found["weighted"][1] == pytest.approx(found["repeated"][1], rel=1e-5)


@pytest.mark.parametrize("model", MODEL_OPTIONS)
def test_planted_rows_take_no_columns(model: Any) -> None:
    several: list[dict[str, Any]] = [{"label_column": "y"}, {"drop_columns": ("a",)}, {"schema": "x"}]
    several.append({"column_roles": {"a": "ids"}})
    for options in several:
        with pytest.raises(ValueError, match=f"planted data takes no {next(iter(options))}"):
            TrainingConfig(planted="pairs", model=model, **options)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            ["price"],
            "column takes name=role with one of label, categorical, ids, sequence, number, vector, weight, time, "
            "group, ignored",
        ),
        (["price=dense"], "column takes name=role with one of"),
        (["a=ids", "a=number"], "column gives column 'a' two roles, ids and number"),
    ],
)
def test_roles_on_the_command_line(texts: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_roles("column", texts)
    assert read_roles("column", ["a=b=ids", "c=number"]) == {"a=b": "ids", "c": "number"}


def test_a_pipe_is_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writing = threading.Thread(target=pipe.write_text, args=("label,a\n1,5\n",))
    writing.start()
    copy = kept(pipe)
    writing.join()
    try:
        assert len(list(open_rows([copy]))) == 1
        assert len(list(open_rows([copy]))) == 1
    finally:
        copy.unlink()
    assert f"{pipe} can be read only once: copying it to {copy}" in capsys.readouterr().err
    assert kept(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("text", "options", "notes"),
    [
        ("1 1:1 2:1\n", {}, ["{path} is read as libsvm"]),
        ("1 1:1 2:1\n", {"file_format": "libsvm"}, []),
        (
            "userId,movieId,rating,timestamp\n1,2,4.5,9\n",
            {},
            [
                "{path} is read as movielens: a rating of 4 or more is positive, --rating-threshold chooses another",
            ],
        ),
        ("userId,movieId,rating,timestamp\n1,2,4.5,9\n", {"rating_threshold": 3.0}, ["{path} is read as movielens"]),
    ],
)
def test_what_a_file_is_read_as_is_said(text: str, options: dict[str, Any], notes: list[str], tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_text(text)
    rows = open_input(TrainingConfig(train=(path,), validation_fraction=0.0, **options))
    assert list(rows.notes) == [note.format(path=path) for note in notes]
