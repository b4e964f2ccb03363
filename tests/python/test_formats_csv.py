"""Text with named columns: dialects, types, headers, bad rows, and rows like those of a plain parser."""

from __future__ import annotations

import csv
import io
import re
import zipfile
from itertools import chain
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from compressors import COMPRESSORS
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from text_lines import Row, as_rows

from recstore_ops.training.data import csv_rows
from recstore_ops.training.data.arrow_rows import ArrowRows
from recstore_ops.training.data.csv_dialect import detect_dialect
from recstore_ops.training.data.field_ids import MISSING
from recstore_ops.training.data.format_detection import detect_format
from recstore_ops.training.data.opening import open_rows
from recstore_ops.training.data.text_cells import text_values, values_of_hashes

pytestmark = pytest.mark.tier("quick")

TEXT = 'label,user,city,price\n1,5,Bern,0.5\n0,,"a, b",\n1,7,,-2.25\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "train.csv"


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(path: Path, **options) -> list[Row]:
    return [row for block in open_rows([path], **options) for row in as_rows(block)]


def as_parquet(path: Path, columns: dict) -> list[Row]:
    pq.write_table(pa.table(columns), path.with_suffix(".parquet"))
    return read(path.with_suffix(".parquet"))


def roles(rows) -> dict[str, str]:
    assert isinstance(rows, ArrowRows)
    return {column.name: column.role for column in rows.schema.columns}


COLUMNS = {"label": [1, 0, 1], "user": [5, None, 7], "city": ["Bern", "a, b", None], "price": [0.5, None, -2.25]}


class TestDialects:
    @pytest.mark.parametrize("delimiter", [",", "\t", ";", "|"])
    @pytest.mark.parametrize("newline", ["\n", "\r\n"])
    def test_rows_are_those_of_parquet(self, path: Path, delimiter: str, newline: str) -> None:
        text = io.StringIO()
        writer = csv.writer(text, delimiter=delimiter, lineterminator=newline)
        writer.writerow(COLUMNS)
        writer.writerows(zip(*COLUMNS.values(), strict=True))
        write(path, text.getvalue())
        assert detect_format(path) == "csv"
        assert read(path) == as_parquet(path, COLUMNS)

    @pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
    def test_encodings_are_told_by_their_mark(self, path: Path, encoding: str) -> None:
        write(path, TEXT.replace("Bern", "Zürich").encode(encoding))
        assert read(path) == as_parquet(path, {**COLUMNS, "city": ["Zürich", "a, b", None]})

    @pytest.mark.parametrize("name", COMPRESSORS)
    def test_compressed_files(self, path: Path, name: str) -> None:
        assert read(write(path, COMPRESSORS[name](TEXT.encode()))) == as_parquet(path, COLUMNS)

    def test_a_zip_archive_of_one_file(self, path: Path) -> None:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("folder/train.csv", TEXT)
        assert read(path) == as_parquet(path, COLUMNS)
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("test.csv", TEXT)
        message = f"{path}: expected a zip archive of one file, got folder/train.csv, test.csv"
        with pytest.raises(ValueError, match=re.escape(message)):
            read(path)
        path.write_bytes(path.read_bytes()[:-30])
        with pytest.raises(ValueError, match=re.escape(f"{path}: the zip archive is damaged")):
            read(path)

    def test_a_header_that_says_types(self, path: Path) -> None:
        text = "user_id:token\titem_id:token\tgenres:token_seq\trating:float\ttimestamp:float\n"
        rows = open_rows([write(path, text + "1\t7\tA B\t5\t100\n1\t8\tC\t3\t101\n")])
        assert rows.field_names == ("user_id", "item_id", "genres")
        expected = {"label": [1, 0], "user_id": ["1", "1"], "item_id": ["7", "8"], "genres": [["A", "B"], ["C"]]}
        assert [row for block in rows for row in as_rows(block)] == as_parquet(path, expected)

    def test_columns_without_a_header_have_numbers(self, path: Path) -> None:
        rows = open_rows([write(path, "1,5,x\n0,6,y\n")])
        assert roles(rows) == {"column_1": "label", "column_2": "categorical", "column_3": "categorical"}
        write(path, "5,1,x\n6,0,y\n")
        assert open_rows([path], label_column="column_2").field_names == ("column_1", "column_3")
        with pytest.raises(ValueError, match="--column NAME=label names it"):
            open_rows([path])

    def test_criteo_with_commas(self, path: Path) -> None:
        line = ",".join(["1", *["3.0"] * 13, *["68fd1e64"] * 26])
        rows = open_rows([write(path, f"{line}\n{line}\n")])
        assert rows.dense_names == tuple(f"I{number}" for number in range(1, 14))
        assert rows.field_names == tuple(f"C{number}" for number in range(1, 27))
        (block,) = rows
        assert block.dense is not None
        assert np.allclose(block.dense.numpy(), np.log(4))

    def test_lines_that_are_not_cut_alike(self, path: Path) -> None:
        write(path, "hello\nthere, you\nand, you, too\n")
        with pytest.raises(ValueError, match=re.escape(f"{path}: expected lines of equally many columns, between ','")):
            open_rows([path], file_format="csv")

    @pytest.mark.parametrize(
        ("names", "repeated"),
        [("user,user,price,label", "user"), ("a,label,a,label", "a"), ("a, a ,b,label", "a"), ("label,b,b,b", "b")],
    )
    @pytest.mark.parametrize("rows", [1, 3, 60])
    def test_names_that_come_twice_are_names(self, path: Path, names: str, repeated: str, rows: int) -> None:
        lines = [f"u{n},film,{n}.5,{n % 2}" for n in range(rows)]
        write(path, "\n".join([names, *lines]) + "\n")
        message = f"{path}: expected each column once, got several of the name '{repeated}'"
        with pytest.raises(ValueError, match=re.escape(message)):
            open_rows([path])
        trained = write(path.with_name("trained.csv"), "user,film,price,label\nu1,a,1.5,1\n")
        schema = cast(ArrowRows, open_rows([trained])).schema
        with pytest.raises(ValueError, match=re.escape(message)):
            open_rows([path], schema=schema, labels="optional")

    @pytest.mark.parametrize(
        "lines", [["no,no,x", "no,yes,y"], ["NA,NA,x", "1,5,y", "NA,7,y"], ["x,x,y"], [",,x", "1,5,y"]]
    )
    def test_cells_that_come_twice_are_no_names(self, path: Path, lines: list[str]) -> None:
        dialect = detect_dialect(write(path, "\n".join(lines) + "\n"))
        assert dialect is not None
        assert dialect.names == ("column_1", "column_2", "column_3")

    def test_two_columns_of_one_name(self, path: Path) -> None:
        write(path, "label,a:token,a\n1,5,6\n0,5,6\n")
        assert open_rows([path]).field_names == ("a:token", "a")
        write(path, "label:float,a:token,a:token_seq\n1,5,6\n0,5,6\n")
        with pytest.raises(
            ValueError, match=re.escape(f"{path}: expected each column once, got several of the name 'a'")
        ):
            open_rows([path])


class TestTypes:
    @pytest.mark.parametrize(
        ("cells", "role", "type"),
        [
            (["1", "", "3"], "categorical", "integer"),
            (["1.0", "NA", "3.0"], "categorical", "integer"),
            (["9007199254740993", "1", "2"], "categorical", "integer"),
            (["007", "12", "13"], "categorical", "string"),
            (["1.5", "nan", "-3e2"], "number", "number"),
            ([*["1.5"] * 299, "cheap"], "number", "number"),
            ([*["1.5"] * 30, "cheap"], "categorical", "string"),
            ([*["15"] * 299, "x15"], "categorical", "string"),
            (["true", "", "False"], "categorical", "boolean"),
            (["2020-01-31", "", "2021-2-1"], "ignored", "time"),
            (["2020-01-31 10:00:00", "2020-01-31T10:00:00.5Z", ""], "ignored", "time"),
            (["", "", ""], "ignored", "null"),
            (["a|b", "c", ""], "ids", "string"),
            (["68fd1e64", "12345678", "1"], "categorical", "string"),
            (["x", "5", ""], "categorical", "string"),
        ],
    )
    def test_each_kind_of_cells(self, path: Path, cells: list[str], role: str, type: str) -> None:
        lines = [f"{n % 2},{cell},b{n}\n" for n, cell in enumerate(cells)]
        rows = open_rows([write(path, "label,x,b\n" + "".join(lines))], on_bad_line="skip")
        assert isinstance(rows, ArrowRows)
        column = rows.schema.columns[1]
        assert (column.role, column.type) == (role, type)
        assert sum(map(len, rows)) == len(cells) - (role == "number" and "cheap" in cells)

    def test_integers_with_gaps_are_the_same_ids_in_every_way_of_writing(self, path: Path) -> None:
        ids = [1_000_000_001, None, 1_000_000_002]
        columns = {"label": [1, 0, 1], "a": ids}
        expected = as_parquet(path, columns)
        assert as_parquet(path, {**columns, "a": pa.array(ids, pa.float64())}) == expected
        for cells in (["1000000001", "", "1000000002"], ["1000000001.0", "", "1000000002.0"]):
            text = "".join(f"{label},{cell}\n" for label, cell in zip("101", cells, strict=True))
            assert read(write(path, "label,a\n" + text)) == expected

    def test_whole_numbers_that_their_type_merges_are_refused(self, path: Path) -> None:
        message = "column 'a' has whole numbers in float, which has not all numbers of that size"
        with pytest.raises(ValueError, match=message):
            as_parquet(path, {"label": [1, 0], "a": pa.array([1e9, 2.0], pa.float32())})

    @pytest.mark.parametrize(
        ("numbers", "transform"),
        [
            ([0.5, -4.0, 3.0], "none"),
            ([100.5, 200.0, 300.0], "standard"),
            ([*[0.5] * 99, 1e6], "log"),
            ([7.5] * 5, "log"),
            ([1e300, -1e300, 0.5], "log"),
        ],
    )
    def test_large_numbers_are_brought_near_zero(self, path: Path, numbers: list[float], transform: str) -> None:
        text = "".join(f"{n % 2},{n},{number}\n" for n, number in enumerate(numbers))
        rows = open_rows([write(path, "label,a,x\n" + text)])
        assert isinstance(rows, ArrowRows)
        assert rows.schema.columns[2].transform == transform
        (block,) = rows
        assert block.dense is not None
        found = block.dense.numpy()[:, 0]
        wide = np.array(numbers)
        if transform == "standard":
            expected = (wide - wide.mean()) / wide.std()
        else:
            expected = np.sign(wide) * np.log1p(np.abs(wide)) if transform == "log" else wide
        assert np.allclose(found, expected, rtol=1e-6)


class TestLabels:
    @pytest.mark.parametrize(
        ("name", "cells", "labels", "rule"),
        [
            ("clk", "01", [0, 1], "0 / 1"),
            ("label", ["-1", "1"], [0, 1], "-1 / 1"),
            ("target", ["0.0", "1.0"], [0, 1], "0 / 1"),
            ("y", ["No", "yes"], [0, 1], "no / yes"),
            ("is_click", ["False", "true"], [0, 1], "0 / 1"),
            ("rating", ["3.5", "4"], [0, 1], ">= 4"),
        ],
    )
    def test_names_and_values(self, path: Path, name: str, cells: list[str], labels: list[int], rule: str) -> None:
        rows = open_rows([write(path, f"a,{name}\n5,{cells[0]}\n6,{cells[1]}\n")])
        assert isinstance(rows, ArrowRows)
        assert rows.schema.label is not None
        assert (rows.schema.label.name, rows.schema.label.rule) == (name, rule)
        (block,) = rows
        assert block.labels.tolist() == labels

    def test_other_values_need_a_threshold(self, path: Path) -> None:
        write(path, "a,label\n5,1\n6,2\n7,5\n")
        message = f"{path}: expected 0 and 1, or -1 and 1, in column 'label', the labels, got 1, 2, 5; rating_threshold"
        with pytest.raises(ValueError, match=re.escape(message)):
            open_rows([path])
        (block,) = open_rows([path], rating_threshold=2)
        assert block.labels.tolist() == [0, 1, 1]

    @pytest.mark.parametrize("cells", [["good", "bad"], ["1", "x"]])
    def test_other_words_are_refused(self, path: Path, cells: list[str]) -> None:
        write(path, f"a,label\n5,{cells[0]}\n6,{cells[1]}\n")
        with pytest.raises(
            ValueError, match="expected numbers, booleans, or yes and no in column 'label', the labels, got"
        ):
            open_rows([path])

    def test_rows_without_labels(self, path: Path) -> None:
        train = open_rows([write(path, TEXT)])
        test = write(path.with_name("test.csv"), "price,user,city\n0.5,5,Bern\n")
        with pytest.raises(
            ValueError, match=re.escape(f"{test}: there is no column 'label', which is integer in {path}")
        ):
            open_rows([test], like=train)
        rows = open_rows([test], like=train, labels="optional")
        assert not rows.has_labels
        (block,), (first, *_) = rows, train
        assert block.labels.isnan().all()
        assert block.ids.tolist() == first.rows(0, 1).ids.tolist()
        assert open_rows([path], like=train, labels="optional").has_labels

    @pytest.mark.parametrize(
        ("labelled", "unlabelled"),
        [
            ("\t".join(["1", *["3"] * 13, *["ab"] * 26]), "\t".join([*["3"] * 13, *["ab"] * 26])),
            ("1,0,14102100," + ",".join(["1"] * 21), None),
        ],
        ids=["criteo", "avazu"],
    )
    def test_kaggle_test_files(self, path: Path, labelled: str, unlabelled: str | None) -> None:
        train = open_rows([write(path, labelled + "\n")])
        if unlabelled is None:
            names = ["id", "hour", "C1", "banner_pos", *train.field_names[3:]]
            unlabelled = ",".join(names) + "\n" + labelled.replace("1,0,", "1,", 1)
        test = open_rows([write(path.with_name("test"), unlabelled + "\n")], like=train, labels="optional")
        assert not test.has_labels
        (block,), (other,) = test, train
        assert block.ids.tolist() == other.ids.tolist()
        assert block.labels.isnan().all()
        with pytest.raises(ValueError, match="test has no labels"):
            open_rows([path.with_name("test")])


class TestBadRows:
    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("1,x,Bern,0.5", "column 'user': expected an integer, got 'x'"),
            ("1,7.5,Bern,0.5", "column 'user': expected an integer, got '7.5'"),
            ("2,5,Bern,0.5", "expected 0 or 1 in column 'label', got 2"),
            (",5,Bern,0.5", "expected 0 or 1 in column 'label', got None"),
            ("1,5,Bern,cheap", "column 'price': expected a number, got 'cheap'"),
            ("1,5,Bern,inf", "expected a finite 32-bit number in column 'price', got inf"),
            ("1,5,Bern", "expected 4 columns, got 3"),
            ("1,5,Bern,0.5,6", "expected 4 columns, got 5"),
        ],
    )
    def test_a_bad_row_stops_with_file_and_row_or_is_skipped_alone(
        self, path: Path, line: str, message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The columns are told by the first block.
        monkeypatch.setattr(csv_rows, "BLOCK_BYTES", 2048)
        good = [f"{n % 2},{n},c{n},{n / 8}" for n in range(3000)]
        lines = ["label,user,city,price", *good[:2000], "", line, *good[2000:]]
        whole = write(path.with_name("whole.csv"), "\n".join([lines[0], *good]) + "\n")
        write(path, "\n".join(lines) + "\n")
        with pytest.raises(ValueError, match=re.escape(f"{path}: row 2001: {message}")) as caught:
            read(path)
        rows = open_rows([path], on_bad_line="skip")
        assert [row for block in rows for row in as_rows(block)] == read(whole)
        assert (rows.skipped_lines, rows.first_skipped) == (1, str(caught.value))

    def test_the_number_of_a_row_counts_those_that_were_skipped(self, path: Path) -> None:
        rows = open_rows([write(path, "label,a,b\n" + "1,5,x\n" * 60 + "1,5\n0,6,y\n,7,z\n")], on_bad_line="skip")
        assert sum(map(len, rows)) == 61
        assert rows.skipped_lines == 2
        write(path, "label,a,b\n" + "1,5,x\n" * 60 + "1,5,x\n0,6,y\n,7,z\n")
        with pytest.raises(ValueError, match=re.escape("row 63: expected 0 or 1 in column 'label', got None")):
            read(path)
        write(path, "label,a,b\n" + "1,5,x\n" * 60 + "1,5,x,9\n0,z,y\n")
        skipping = open_rows([path], on_bad_line="skip")
        list(skipping)
        assert skipping.first_skipped == f"{path}: row 61: expected 3 columns, got 4"

    def test_a_cut_stream(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(csv_rows, "BLOCK_BYTES", 16_384)
        lines = "".join(f"1,{n * 7919 % 100003}\n" for n in range(200_000))
        content = COMPRESSORS["gzip"](f"label,a\n{lines}".encode())
        write(path, content[: len(content) // 2])
        with pytest.raises(ValueError, match=re.escape(f"{path}: the gzip stream is damaged") + ".*after row [1-9]"):
            read(path)

    def test_a_quote_that_is_not_closed(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(csv_rows, "BLOCK_BYTES", 4096)
        lines = [f"1,{n},x" for n in range(2000)]
        for place, message in (
            (100, f"{path} has a row of more than 4096 bytes, or a quote that is not closed, after row "),
            (1800, f"{path}: row 1801 begins a quote that is not closed"),
        ):
            cut = [*lines[:place], '1,5,"x', *lines[place:]]
            write(path, "label,a,b\n" + "\n".join(cut) + "\n")
            with pytest.raises(ValueError, match=re.escape(message)):
                read(path)

    @pytest.mark.parametrize("header", ["label,city\n", ""])
    @pytest.mark.parametrize("row", [1, 5, 900])
    def test_text_of_another_encoding(self, path: Path, header: str, row: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(csv_rows, "BLOCK_BYTES", 4096)
        rows = [f"{n % 2},{'Zürich' if n == row else 'Bern'}\n" for n in range(1, 1000)]
        write(path, (header + "".join(rows)).encode("latin-1"))
        message = f"{path}: row {row}: expected text in UTF-8, got other bytes"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            read(path)

    def test_files_without_rows(self, path: Path) -> None:
        for text in ("label,a\n", "label,a"):
            with pytest.raises(ValueError, match=re.escape(f"{path} has no row")):
                open_rows([write(path, text)])
        empty = write(path.with_name("part-1"), "")
        assert len(list(open_rows([write(path, "label,a\n1,5\n"), empty], file_format="csv"))) == 1


class TestFiles:
    def test_other_columns(self, path: Path) -> None:
        first = write(path, "label,a\n1,5\n")
        second = write(path.with_name("second.csv"), "label,b\n1,5\n")
        with pytest.raises(
            ValueError, match=re.escape(f"{second}: there is no column 'a', which is integer in {first}")
        ):
            open_rows([first, second])
        write(second, "label,b,a\n1,5,6\n")
        with pytest.raises(ValueError, match=re.escape(f"{second}: there is a column 'b', which {first} lacks")):
            open_rows([first, second])

    def test_csv_tests_a_run_on_parquet(self, path: Path) -> None:
        pq.write_table(pa.table(COLUMNS), path.with_suffix(".parquet"))
        train = open_rows([path.with_suffix(".parquet")])
        rows = open_rows([write(path, TEXT)], like=train)
        assert [row for block in rows for row in as_rows(block)] == [row for block in train for row in as_rows(block)]

    def test_test_rows_of_other_features_are_refused(self, path: Path) -> None:
        train = open_rows([write(path, "\t".join(["1", *["3"] * 13, *["ab"] * 26]) + "\n")])
        other = write(path.with_name("other"), "1,2,4,100\n")
        with pytest.raises(ValueError, match="other has the fields 'user', 'movie', and the training rows have 'C1'"):
            open_rows([other], like=train)

    def test_shards_have_all_rows_between_them(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(csv_rows, "BLOCK_BYTES", 1024)
        rows = open_rows([write(path, "label,a\n" + "".join(f"1,{n}\n" for n in range(2000)))])
        parts = [[id for block in rows.shard(n, 3) for id in block.ids.tolist()] for n in range(3)]
        assert all(parts)
        assert sorted(chain(*parts)) == list(range(2000))
        assert [id for block in rows for id in block.ids.tolist()] == list(range(2000))
        assert rows.estimated_rows == 2000
        next(blocks := iter(rows))
        next(blocks)
        assert rows.estimated_rows == 2000
        parts = iter(fresh := open_rows([path]))
        next(parts)
        assert fresh.estimated_rows is not None
        assert 1500 < fresh.estimated_rows < 2500


CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\0\r|^", exclude_categories=["Cs"]), max_size=12)


@given(
    rows=st.lists(st.tuples(st.integers(0, 1), st.integers(-(2**62), 2**62), CELLS), min_size=1, max_size=20),
    delimiter=st.sampled_from(",\t;"),
    quotes_all=st.booleans(),
)
@settings(max_examples=examples(100), deadline=None)
def test_any_cells_are_those_of_parquet(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, str]], delimiter: str, quotes_all: bool
) -> None:
    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(
            file, delimiter=delimiter, quoting=csv.QUOTE_ALL if quotes_all else csv.QUOTE_MINIMAL, lineterminator="\n"
        )
        writer.writerow(["label", "number", "text", "end"])
        # The columns' types do not depend on what is drawn.
        writer.writerows([*[(*row, "x") for row in rows], (1, 5, "word", "x")])
    labels, numbers, texts = zip(*rows, strict=True)
    columns = {"label": [*labels, 1], "number": [*numbers, 5], "text": [*[t or None for t in texts], "word"]}
    assert read(path, file_format="csv") == as_parquet(path, {**columns, "end": ["x"] * (len(rows) + 1)})


@given(content=st.binary(max_size=300), place=st.integers(0, len(TEXT)))
@settings(max_examples=examples(100), deadline=None)
def test_damage_gives_rows_or_an_error_that_names_the_file(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, place: int
) -> None:
    path = write(tmp_path_factory.mktemp("csv") / "rows.csv", TEXT[:place].encode() + content + TEXT[place:].encode())
    try:
        labels = {label for label, _, _ in read(path, file_format="csv", on_bad_line="skip")}
        problem = None
    except ValueError as error:
        labels, problem = set(), str(error)
    assert labels <= {0, 1}
    assert problem is None or str(path) in problem


def test_missing_texts_have_a_value_that_no_other_has() -> None:
    cells = pa.array(["a", None, "b", None, "c"] * 3)[3:12]
    values = text_values(cells)
    assert (values == MISSING).tolist() == cells.is_null().to_pylist()
    hashes = np.array([MISSING, MISSING | 5 << 40, -1, MISSING - 2**63])
    assert values_of_hashes(hashes).tolist() == [MISSING ^ 1, MISSING ^ 1, 2**40 - 1, MISSING ^ 1]
