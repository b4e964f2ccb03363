"""Columns of the role sequence: whose ids they have, who says it, what keeps it, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from saved_runs import rows_of, run_train
from training_runs import drop_tables, train_new

from recstore_ops.training import TrainingConfig, load, open_input, open_rows
from recstore_ops.training.data.arrow_rows import ArrowRows
from recstore_ops.training.data.batch import Batch
from recstore_ops.training.data.schema import Schema
from recstore_ops.training.data.schema_file import read_schema, schema_table, write_schema
from recstore_ops.training.run.option_values import read_roles
from recstore_ops.training.run.row_form import RowForm
from recstore_ops.training.run.vectors import Vectors

pytestmark = [
    pytest.mark.tier("test"),
    pytest.mark.embedded_only("a run is loaded by a process that keeps its tables itself"),
]

COLUMNS: dict[str, Any] = {
    "label": [1, 0, 1, 0],
    "clicked": [[3, 7], [], [7, 3, 7], [9]],
    "item": [7, 3, 9, 7],
    "words": [["a", "b"], ["b"], [], None],
    "word": ["a", "b", "c", "a"],
    "price": [0.5, 1.5, 2.5, 3.5],
}
VALUE_MASK = 2**40 - 1
DIN = ("--model", "din", "--epochs", 1, "--batch-size", 64, "--dim", 4, "--hidden", "8", "--attention-hidden", "4")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    pq.write_table(pa.table(COLUMNS), tmp_path / "train.parquet")
    return tmp_path / "train.parquet"


def opened(path: Path, **options: Any) -> ArrowRows:
    rows = open_rows([path], **options)
    assert isinstance(rows, ArrowRows)
    return rows


def only_block(path: Path, **options: Any) -> Batch:
    (block,) = opened(path, **options)
    return block


def ids_of_field(block: Batch, field: int) -> list[list[int]]:
    offsets = block.offsets_or_ones().tolist()
    bags = range(field, len(block) * block.num_fields, block.num_fields)
    return [block.ids[offsets[bag] : offsets[bag + 1]].tolist() for bag in bags]


def clicks(rows: int, seed: int = 0) -> dict[str, Any]:
    """Rows whose label says whether the item was clicked before."""
    rng = np.random.default_rng(seed)
    clicked = [rng.integers(0, 12, rng.integers(1, 5)).tolist() for _ in range(rows)]
    item = rng.integers(0, 12, rows)
    return {"label": [int(i in c) for i, c in zip(item, clicked, strict=True)], "item": item, "clicked": clicked}


class TestIds:
    def test_keep_their_order_and_repeats_and_are_those_of_the_target(self, path: Path) -> None:
        block = only_block(path, column_roles={"clicked": "sequence:item", "words": "sequence:word"})
        items = dict(zip((7, 3, 9), (ids_of_field(block, 1)[row][0] for row in (0, 1, 2)), strict=True))
        assert ids_of_field(block, 0) == [[items[id] for id in ids] for ids in COLUMNS["clicked"]]
        a, b = ids_of_field(block, 3)[0][0], ids_of_field(block, 3)[1][0]
        assert ids_of_field(block, 2) == [[a, b], [b], [], []]

    def test_are_its_own_without_a_target(self, path: Path) -> None:
        own = only_block(path, column_roles={"clicked": "sequence"})
        assert torch.equal(own.ids, only_block(path).ids)
        shared = only_block(path, column_roles={"clicked": "sequence:item"})
        assert not torch.equal(own.ids, shared.ids)
        assert torch.equal(own.ids & VALUE_MASK, shared.ids & VALUE_MASK)

    def test_are_hashed_after_they_are_shared(self, path: Path) -> None:
        rows = open_rows([path], column_roles={"clicked": "sequence:item"}, hash_buckets=10**9)
        (block,) = rows
        seven, three, nine, _ = (ids[0] for ids in ids_of_field(block, 1))
        assert ids_of_field(block, 0) == [[three, seven], [], [seven, three, seven], [nine]]

    @pytest.mark.parametrize(
        ("items", "clicked"),
        [
            (["7", "3", "9"], ["3|7", "", "7|9|3"]),
            (["7", "3", ""], ["3|7", "", "7|9|3"]),
            (["x", "y", "z"], ["y|x", "", "x|z|y"]),
            (["true", "false", "true"], ["false|true", "", "true|true"]),
        ],
    )
    def test_of_text_are_read_as_those_of_the_target(
        self, tmp_path: Path, items: list[str], clicked: list[str]
    ) -> None:
        lines = ["label,item,clicked", *(f"{n % 2},{items[n]},{clicked[n]}" for n in range(3))]
        (tmp_path / "train.csv").write_text("\n".join(lines) + "\n")
        block = only_block(tmp_path / "train.csv", column_roles={"clicked": "sequence:item"})
        first, second = ids_of_field(block, 0)[0][0], ids_of_field(block, 0)[1][0]
        assert ids_of_field(block, 1)[0] == [second, first]
        assert ids_of_field(block, 1)[1] == []

    def test_of_numbers_with_gaps(self, tmp_path: Path) -> None:
        columns = {"label": [1, 0, 1], "item": [7.0, 3.0, None], "clicked": ["3|7", "7.0|7.5", None]}
        pq.write_table(pa.table(columns), tmp_path / "train.parquet")
        roles = {"clicked": "sequence:item"}
        message = "row 2: expected ids as 'item' has, number, in column 'clicked', got 7.0|7.5"
        with pytest.raises(ValueError, match=re.escape(message)):
            list(opened(tmp_path / "train.parquet", column_roles=roles))
        rows = opened(tmp_path / "train.parquet", column_roles=roles, on_bad_line="skip")
        (block,) = rows
        assert rows.skipped_lines == 1
        assert ids_of_field(block, 1)[0][1] == ids_of_field(block, 0)[0][0]
        assert ids_of_field(block, 1)[1] == []

    def test_text_that_is_no_id_of_the_target_is_a_bad_row(self, tmp_path: Path) -> None:
        (tmp_path / "train.csv").write_text("label,item,clicked\n1,7,3|7\n0,3,7|x\n")
        message = "row 2: expected ids as 'item' has, integer, in column 'clicked', got 7|x"
        with pytest.raises(ValueError, match=re.escape(message)):
            list(opened(tmp_path / "train.csv", column_roles={"clicked": "sequence:item"}))

    def test_text_with_one_id_each_in_the_sample_is_a_sequence_where_it_is_asked_for(self, tmp_path: Path) -> None:
        (tmp_path / "train.csv").write_text("label,item,clicked\n1,x,y\n0,y,x\n0,y,x|y\n" + "0,x,x\n" * 300)
        rows = opened(tmp_path / "train.csv", sequences=[("clicked", "item")])
        assert rows.schema.columns[2].separator == "|"
        (block,) = rows
        assert len(ids_of_field(block, 1)[2]) == 2


class TestWhoSaysIt:
    def test_an_option_of_the_model_and_a_role_are_one(self, path: Path) -> None:
        by_role = opened(path, column_roles={"clicked": "sequence:item"})
        by_option = opened(path, sequences=[("clicked", "item")])
        by_both = opened(path, column_roles={"clicked": "sequence"}, sequences=[("clicked", "item")])
        assert by_role.schema.columns == by_option.schema.columns == by_both.schema.columns
        assert by_role.sequences == (("clicked", "item"),)

    def test_a_file_of_the_schema_says_it(self, path: Path, tmp_path: Path) -> None:
        rows = opened(path, column_roles={"clicked": "sequence:item"})
        write_schema(tmp_path / "schema.toml", rows.schema)
        assert '\nrole = "sequence"\n' in (tmp_path / "schema.toml").read_text()
        assert '\nof = "item"\n' in (tmp_path / "schema.toml").read_text()
        schema = read_schema(tmp_path / "schema.toml")
        assert schema.columns == rows.schema.columns
        (block,), (again,) = rows, opened(path, schema=schema)
        assert torch.equal(block.ids, again.ids)
        assert opened(path, schema=schema, sequences=[("clicked", "item")]).schema.columns == schema.columns

    def test_an_older_schema_with_plain_ids_gets_the_role(self, path: Path) -> None:
        older = opened(path).schema
        assert opened(path, schema=older, sequences=[("clicked", "item")]).sequences == (("clicked", "item"),)

    def test_the_table_shows_it(self, path: Path) -> None:
        rows = opened(path, column_roles={"clicked": "sequence:item"})
        console = Console(width=200, record=True)
        console.print(schema_table(rows.schema, rows.samples, ""))
        (line,) = (line for line in console.export_text().splitlines() if line.startswith("clicked"))
        assert re.search(r"clicked +sequence +list of integer +ids of 'item' ", line)

    def test_the_table_shows_what_parts_text_too(self, tmp_path: Path) -> None:
        (tmp_path / "train.csv").write_text("label,item,clicked\n1,7,3|7\n0,3,7\n")
        column = opened(tmp_path / "train.csv", column_roles={"clicked": "sequence:item"}).schema.columns[2]
        assert column.rule == "cut at '|', ids of 'item'"

    def test_test_rows_are_held_to_it(self, path: Path, tmp_path: Path) -> None:
        train = opened(path, column_roles={"clicked": "sequence:item"})
        (expected,) = train
        pq.write_table(pa.table({name: COLUMNS[name] for name in reversed(COLUMNS)}), tmp_path / "test.parquet")
        (block,) = open_rows([tmp_path / "test.parquet"], like=train)
        assert torch.equal(block.ids, expected.ids)
        for clicked, found in ((["x"] * 4, "string"), ([["x"]] * 4, "list of string")):
            pq.write_table(pa.table({**COLUMNS, "clicked": clicked}), tmp_path / "test.parquet")
            message = f"column 'clicked' is {found}, and list of integer in {path}"
            with pytest.raises(ValueError, match=re.escape(message)):
                open_rows([tmp_path / "test.parquet"], like=train)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"column_roles": {"clicked": "sequence:itm"}},
            "sequences must name a field, one of clicked, item, words, word; got 'itm'",
        ),
        (
            {"column_roles": {"clicked": "sequence:price"}},
            "column 'clicked' has the ids of 'price', which has the role number, and must be categorical",
        ),
        (
            {"column_roles": {"clicked": "sequence:words"}},
            "column 'clicked' has the ids of 'words', which has the role ids, and must be categorical",
        ),
        (
            {"column_roles": {"clicked": "sequence:word"}},
            "column 'clicked' has the ids of 'word', but is list of integer, and 'word' is string",
        ),
        (
            {"sequences": [("words", "item")]},
            "column 'words' has the ids of 'item', but is list of string, and 'item' is integer",
        ),
        (
            {"sequences": [("item", "word")]},
            "column 'item' is integer, and a column of the role sequence is list of integer or list of string or",
        ),
        (
            {"column_roles": {"clicked": "ids"}, "sequences": [("clicked", "item")]},
            "column 'clicked' is a sequence of the ids of 'item' by sequences, and by column_roles ids",
        ),
        (
            {"column_roles": {"clicked": "sequence:word"}, "sequences": [("clicked", "item")]},
            "column 'clicked' is a sequence of the ids of 'item' by sequences, and by column_roles sequence:word",
        ),
        ({"column_roles": {"clicked": "ids:item"}}, "expected one of label, categorical, ids, sequence"),
        ({"column_roles": {"clicked": "sequence:"}}, "expected one of label, categorical, ids, sequence"),
        ({"sequences": [("clicks", "item")]}, "expected a column 'clicks', got only 'label', 'clicked'"),
        ({"sequences": [("clicked", "itm")]}, "sequences must name a field, one of clicked, item, words, word; got"),
    ],
)
def test_what_is_no_sequence_is_refused(path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        opened(path, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"of": "itm"}, "column 'clicked' has the ids of 'itm', and there is no such column"),
        ({"of": "label"}, "has the ids of 'label', which has the role label, and must be categorical"),
        ({"role": "ids"}, "column 2, 'clicked': a column of the role ids takes no of here"),
        ({"type": "string"}, "column 2, 'clicked': a column of the role sequence needs a separator here"),
    ],
)
def test_a_file_that_says_what_is_no_sequence(path: Path, change: dict[str, Any], message: str) -> None:
    schema = opened(path, column_roles={"clicked": "sequence:item"}).schema
    columns = tuple(replace(each, **change) if each.name == "clicked" else each for each in schema.columns)
    write_schema(path.with_name("schema.toml"), Schema(columns, ""))
    with pytest.raises(ValueError, match=re.escape(message)):
        read_schema(path.with_name("schema.toml"))


def test_a_schema_and_an_option_that_disagree(path: Path) -> None:
    schema = opened(path, column_roles={"clicked": "sequence:item", "word": "ignored"}).schema
    columns = (*schema.columns, replace(schema.columns[2], name="shop"))
    with pytest.raises(ValueError, match="column 'clicked' has the ids of 'item', and sequences say of 'shop'"):
        replace(schema, columns=columns).with_sequences([("clicked", "shop")])


def test_the_option_of_the_command_line() -> None:
    assert read_roles("column", ["clicked=sequence:item"]) == {"clicked": "sequence:item"}
    for text in ("clicked=sequence:", "clicked=ids:item", "clicked=sequences"):
        with pytest.raises(ValueError, match="column takes name=role with one of"):
            read_roles("column", [text])


class TestModels:
    def test_attention_needs_no_further_option(self, tmp_path: Path) -> None:
        pq.write_table(pa.table(clicks(600)), tmp_path / "train.parquet")
        common: dict[str, Any] = {"train": (tmp_path / "train.parquet",), "model": "din", "epochs": 2, "dim": 4}
        by_option = train_new(TrainingConfig(**common, sequences=(("clicked", "item"),)), "option")
        by_role = train_new(TrainingConfig(**common, column_roles={"clicked": "sequence:item"}), "option")
        assert [each.validation for each in by_option] == [each.validation for each in by_role]

    @pytest.mark.parametrize("options", [{"column_roles": {"clicked": "sequence"}}, {"schema": "plain.toml"}])
    def test_attention_needs_a_target(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        pq.write_table(pa.table(clicks(100)), tmp_path / "train.parquet")
        write_schema(tmp_path / "plain.toml", opened(tmp_path / "train.parquet").schema)
        config = TrainingConfig(train=(tmp_path / "train.parquet",), model="din", **options)
        with pytest.raises(ValueError, match="model din needs sequences: --sequence HISTORY=TARGET, or `of` at a seq"):
            train_new(config, "no_target")

    def test_other_models_share_rows_too(self, tmp_path: Path) -> None:
        pq.write_table(pa.table(clicks(600)), tmp_path / "train.parquet")
        rows = {}
        for target in ("", ":item"):
            config = TrainingConfig(
                train=(tmp_path / "train.parquet",),
                model="deepfm",
                epochs=1,
                column_roles={"clicked": f"sequence{target}"},
            )
            rows[target] = train_new(config, "shared")[-1].table_rows
        assert (rows[""], rows[":item"]) == (48, 24)

    def test_the_form_of_a_run_knows_them(self, path: Path) -> None:
        config = TrainingConfig(train=(path,), column_roles={"clicked": "sequence:item"})
        assert RowForm.of(config, open_input(config)).sequences == (("clicked", "item"),)


class TestRuns:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for name, seed in (("one", 0), ("two", 1)):
            pq.write_table(pa.table(clicks(256, seed)), tmp_path / f"{name}.parquet")
        return tmp_path

    def test_are_the_same_by_option_by_role_and_by_file(self, folder: Path) -> None:
        for name, options in {
            "option": ("--sequence", "clicked=item"),
            "role": ("--column", "clicked=sequence:item"),
            "file": ("--schema", "runs/role/schema.toml"),
        }.items():
            assert run_train(folder, ("one.parquet", *DIN, *options, "--run-name", name)) == (0, "")
        runs = [folder / "runs" / name for name in ("option", "role", "file")]
        assert rows_of(runs[0] / "checkpoint") == rows_of(runs[1] / "checkpoint") == rows_of(runs[2] / "checkpoint")
        assert {(run / "schema.toml").read_text() for run in runs} == {(runs[0] / "schema.toml").read_text()}
        assert "sequence" in (folder / "stdout").read_text()
        found = []
        for run in runs:
            loaded = load(run)
            found.append(loaded.predict(loaded.open_rows([folder / "two.parquet"])))
            drop_tables("din")
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])

    def test_go_on_and_follow_files_by_what_they_keep(self, folder: Path) -> None:
        role = ("--column", "clicked=sequence:item")
        follow = ("--follow-files", "in", "--follow-every", 0.05, "--follow-until", "done", "--run-name", "followed")
        (folder / "in").mkdir()
        (folder / "in" / "done").touch()
        (folder / "one.parquet").rename(folder / "in" / "one.parquet")
        assert run_train(folder, (*DIN, *role, *follow, "--no-shuffle")) == (0, "")
        (folder / "two.parquet").rename(folder / "in" / "two.parquet")
        assert run_train(folder, (*DIN, *role, *follow, "--no-shuffle", "--resume")) == (0, "")
        both = ("in/one.parquet", "in/two.parquet", *DIN, *role, "--no-shuffle", "--validation-fraction", 0)
        assert run_train(folder, (*both, "--run-name", "whole")) == (0, "")
        followed, whole = (folder / "runs" / name / "checkpoint" for name in ("followed", "whole"))
        assert rows_of(followed) == rows_of(whole)
        code, said = run_train(folder, (*DIN, "--column", "clicked=sequence", *follow, "--no-shuffle", "--resume"))
        assert code == 2
        assert "run 'followed' has --column {'clicked': 'sequence:item'}, got {'clicked': 'sequence'}" in said

    def test_begin_with_each_other_by_what_the_first_keeps(self, folder: Path) -> None:
        role = ("--column", "clicked=sequence:item")
        assert run_train(folder, ("one.parquet", *DIN, *role, "--run-name", "first")) == (0, "")
        second = ("two.parquet", *DIN, "--init-from", "runs/first")
        assert run_train(folder, (*second, "--run-name", "second")) == (0, "")
        assert run_train(folder, (*second, "--sequence", "clicked=item", "--run-name", "third")) == (0, "")
        second_rows, third_rows = (rows_of(folder / "runs" / name / "checkpoint") for name in ("second", "third"))
        assert second_rows == third_rows
        code, said = run_train(folder, (*second, "--sequence", "item=clicked", "--run-name", "fourth"))
        assert code == 2
        assert "column 'item' is integer, and a column of the role sequence is list of integer" in said
        texts = {**clicks(64), "clicked": [["x"]] * 64}
        pq.write_table(pa.table(texts), folder / "texts.parquet")
        code, said = run_train(folder, ("texts.parquet", *DIN, "--init-from", "runs/first", "--run-name", "fifth"))
        assert code == 2
        assert (
            "texts.parquet: column 'clicked' is list of string, and list of integer in runs/first/schema.toml" in said
        )

    def test_of_a_run_without_them_are_no_beginning_for_one_with_them(self, folder: Path) -> None:
        options = ("--model", "deepfm", "--epochs", 1, "--batch-size", 64)
        assert run_train(folder, ("one.parquet", *options, "--run-name", "first")) == (0, "")
        code, said = run_train(folder, ("two.parquet", *DIN, "--init-from", "runs/first", "--run-name", "second"))
        assert code == 2
        assert "was trained with model deepfm, this one has model din" in said

    def test_have_the_vectors_of_their_target(self, folder: Path) -> None:
        role = ("--column", "clicked=sequence:item")
        assert run_train(folder, ("one.parquet", *DIN, *role, "--run-name", "vectors")) == (0, "")
        loaded = load(folder / "runs" / "vectors")
        of_history, of_target = (Vectors(loaded, "v", field) for field in ("clicked", "item"))
        assert np.array_equal(of_history.ids, of_target.ids)
        assert of_history.id_of(3) == of_target.id_of(3)
        drop_tables("din")

    def test_lists_in_parquet_are_no_columns_of_text(self, folder: Path) -> None:
        role = ("--column", "clicked=sequence:item")
        assert run_train(folder, ("one.parquet", *DIN, *role, "--run-name", "lists")) == (0, "")
        pa_csv.write_csv(pa.table({"label": [1], "item": [3], "clicked": ["3|4"]}), folder / "rows.csv")
        loaded = load(folder / "runs" / "lists")
        with pytest.raises(ValueError, match="column 'clicked' is text, and list of integer in"):
            loaded.open_rows([folder / "rows.csv"])
        drop_tables("din")
