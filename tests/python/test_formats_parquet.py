"""Parquet: what each column becomes, which types, labels and files are refused, and where."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from text_lines import MISSING, Row, as_rows

from recstore_ops.training.data import named_columns
from recstore_ops.training.data.opening import open_rows

pytestmark = pytest.mark.tier("quick")

MASK = 2**40 - 1

open_parquet = partial(open_rows, file_format="parquet")

# Of cells with these, the parts are ids.
TEXTS = st.text(st.characters(exclude_characters="|^", codec="utf-8"), max_size=3)


def string_id(field: int, text: str | None) -> int:
    return field << 40 | (MISSING if text is None else text_hash(text) & MASK)


def text_hash(text: str) -> int:
    """The documented hash, word by word."""
    encoded = text.encode()
    hashed = one_splitmix64(len(encoded))
    for start in range(0, len(encoded), 8):
        hashed = one_splitmix64(hashed ^ int.from_bytes(encoded[start : start + 8], "little"))
    return hashed


def one_splitmix64(number: int) -> int:
    z = (number + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def integer_id(field: int, number: int | None) -> int:
    if number is None:
        return field << 40 | MISSING
    if -(2**39) <= number < 2**39:
        return field << 40 | number & MASK
    return field << 40 | one_splitmix64(number % 2**64) & MASK


def write(path: Path, columns: dict[str, Any], **options) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


def read(*paths: Path, **options) -> list[Row]:
    return [row for block in open_parquet(paths, **options) for row in as_rows(block)]


def one_id_rows(path: Path) -> list[int]:
    return [fields[0][0][0] for _, fields, _ in read(path)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "train.parquet"


class TestColumns:
    def test_each_kind_of_column(self, path: Path) -> None:
        columns = {
            "price": [0.5, None, -2.0],
            "user": [7, None, -1],
            "label": [1, 0, 1],
            "city": ["Bern", "", None],
            "seen": [[1, None, 2], [], None],
            "share": pa.array([1.0, 2.5, 3.0], pa.float32()),
            "is_new": [True, False, None],
        }
        rows = open_parquet([write(path, columns)])
        assert rows.field_names == ("user", "city", "seen", "is_new")
        assert rows.dense_names == ("price", "share")
        (block,) = rows
        seen = [tuple((integer_id(2, id), 1.0) for id in ids) for ids in ([1, None, 2], [], [])]
        assert as_rows(block) == [
            (
                label,
                (((integer_id(0, user), 1.0),), ((string_id(1, city), 1.0),), ids, ((integer_id(3, is_new), 1.0),)),
                dense,
            )
            for label, user, city, ids, is_new, dense in zip(
                columns["label"],
                columns["user"],
                columns["city"],
                seen,
                columns["is_new"],
                [(0.5, 1.0), (0.0, 2.5), (-2.0, 3.0)],
                strict=True,
            )
        ]

    def test_without_lists_every_field_has_one_id(self, path: Path) -> None:
        (block,) = open_parquet([write(path, {"label": [0, 1], "a": [3, 4], "b": ["x", "y"]})])
        assert block.offsets is None
        assert block.dense is None
        assert block.num_fields == 2

    @pytest.mark.parametrize(
        "type", [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
    )
    def test_integer_types(self, path: Path, type: pa.DataType) -> None:
        write(path, {"label": [1, 1], "a": pa.array([100, None], type)})
        assert one_id_rows(path) == [100, MISSING]

    def test_integers_beyond_40_bits_are_mixed(self, path: Path) -> None:
        numbers = [2**39 - 1, -(2**39), 2**39, -(2**39) - 1, 2**63 - 1, -(2**63), 2**40]
        write(path, {"label": [1] * 7, "a": numbers})
        assert one_id_rows(path) == [integer_id(0, number) for number in numbers]
        assert len(set(one_id_rows(path))) == 7

    def test_unsigned_64_bit_integers(self, path: Path) -> None:
        write(path, {"label": [1, 1], "a": pa.array([2**64 - 1, 5], pa.uint64())})
        assert one_id_rows(path) == [integer_id(0, 2**64 - 1), 5]
        assert one_id_rows(path)[0] != integer_id(0, -1)

    @pytest.mark.parametrize(
        "type",
        [
            pa.string(),
            pa.large_string(),
            pa.string_view(),
            pa.dictionary(pa.int32(), pa.string()),
            pa.dictionary(pa.int8(), pa.large_string()),
        ],
    )
    def test_string_types_are_alike(self, path: Path, type: pa.DataType) -> None:
        write(path, {"label": [1, 1, 1], "a": pa.array(["é", None, ""]).cast(type)})
        assert one_id_rows(path) == [string_id(0, "é"), MISSING, string_id(0, "")]

    @pytest.mark.parametrize("type", [pa.list_(pa.string()), pa.large_list(pa.string())])
    def test_lists_of_strings(self, path: Path, type: pa.DataType) -> None:
        write(path, {"label": [1, 0], "a": pa.array([["x", "y"], None], type)})
        assert read(path) == [(1, (((string_id(0, "x"), 1.0), (string_id(0, "y"), 1.0)),), ()), (0, ((),), ())]

    @pytest.mark.parametrize("type", [pa.float16(), pa.float32(), pa.float64()])
    def test_floating_point_types(self, path: Path, type: pa.DataType) -> None:
        write(path, {"label": [1, 1], "a": [1, 2], "x": pa.array([np.float16(0.5), None], type)})
        assert [dense for _, _, dense in read(path)] == [(0.5,), (0.0,)]

    @pytest.mark.parametrize("labels", [[1, 0], [1.0, 0.0], [True, False], pa.array([1, 0], pa.uint8())])
    def test_label_types(self, path: Path, labels: Any) -> None:
        write(path, {"label": labels, "a": [1, 2]})
        assert [label for label, _, _ in read(path)] == [1, 0]

    def test_label_is_label_or_click_or_named(self, path: Path) -> None:
        write(path, {"click": [0], "bought": [1], "a": [5]})
        assert open_parquet([path]).field_names == ("bought", "a")
        assert open_parquet([path], label_column="bought").field_names == ("click", "a")
        assert [label for label, _, _ in read(path, label_column="bought")] == [1]

    def test_dropped_columns_are_not_read(self, path: Path) -> None:
        write(path, {"label": [1], "a": [5], "when": pa.array([0], pa.timestamp("s")), "x": [0.5]})
        assert open_parquet([path], drop_columns=("when", "x")).dense_names == ()
        assert read(path, drop_columns=("when", "x")) == [(1, (((5, 1.0),),), ())]


class TestRefusedColumns:
    @pytest.mark.parametrize(
        "cells",
        [
            pa.array([b"x"]),
            pa.array([[True]]),
            pa.array([[[1]]]),
            pa.array([{"b": 1}]),
        ],
        ids=lambda cells: str(cells.type),
    )
    def test_other_types_are_named(self, path: Path, cells: pa.Array) -> None:
        write(path, {"label": [1], "a": [5], "odd": cells})
        message = f"{path}: expected numbers, booleans, strings, times or lists of them in column 'odd', got"
        with pytest.raises(ValueError, match=re.escape(f"{message} {cells.type}".replace("item", "element"))):
            open_parquet([path])
        assert len(read(path, drop_columns=["odd"])) == 1

    @pytest.mark.parametrize(
        ("columns", "options", "message"),
        [
            ({"a": [1], "b": [1]}, {}, "expected a column 'label' or 'click' with the labels, got only 'a', 'b'"),
            (
                {"label": [1], "a": [1]},
                {"label_column": "y"},
                "expected a column 'y' with the labels, got only 'label'",
            ),
            ({"label": [1], "a": [1]}, {"drop_columns": ["label"]}, "expected a column 'label' or 'click'"),
            ({"label": [1], "a": [1]}, {"drop_columns": ["b"]}, "expected a column 'b', got only 'label', 'a'"),
            ({"label": ["1"], "a": [1]}, {}, "expected numbers, booleans, or yes and no in column 'label', the labels"),
            ({"label": [b"1"], "a": [1]}, {}, "column 'label' is binary, and a column of the role label is integer or"),
            ({"label": [1], "x": [0.5]}, {}, "expected at least one column of ids, categorical or ids"),
        ],
    )
    def test_columns_that_do_not_fit(self, path: Path, columns: dict, options: dict, message: str) -> None:
        with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
            open_parquet([write(path, columns)], **options)

    def test_two_columns_of_one_name(self, path: Path) -> None:
        pq.write_table(pa.table([[1], [2], [3]], names=["label", "a", "a"]), path)
        with pytest.raises(ValueError, match="expected each column once, got several of the name 'a'"):
            open_parquet([path])


class TestBadRows:
    @pytest.mark.parametrize(
        ("label", "number", "message"),
        [
            (2, 0.5, "expected 0 or 1 in column 'label', got 2"),
            (-1, 0.5, "expected 0 or 1 in column 'label', got -1"),
            (None, 0.5, "expected 0 or 1 in column 'label', got None"),
            (0.5, 0.5, "expected 0 or 1 in column 'label', got 0.5"),
            (math.nan, 0.5, "expected 0 or 1 in column 'label', got nan"),
            (1, math.nan, "expected a finite 32-bit number in column 'x', got nan"),
            (1, -math.inf, "expected a finite 32-bit number in column 'x', got -inf"),
            (1, 1e39, "expected a finite 32-bit number in column 'x', got 1e+39"),
        ],
    )
    def test_a_bad_row_stops_with_file_and_row_or_is_skipped_alone(
        self, path: Path, label: Any, number: float, message: str
    ) -> None:
        count = 2 * named_columns.ROWS_PER_BLOCK
        labels, numbers = [1] * count, [0.25] * count
        labels[-2], numbers[-2] = label, number
        write(path, {"label": labels, "a": list(range(count)), "x": numbers}, row_group_size=5000)
        with pytest.raises(ValueError, match=re.escape(f"{path}: row {count - 1}: {message}")) as caught:
            read(path)
        rows = open_parquet([path], on_bad_line="skip")
        ids = [id for block in rows for id in block.ids.tolist()]
        assert ids == [*range(count - 2), count - 1]
        assert (rows.skipped_lines, rows.first_skipped) == (1, str(caught.value))
        assert rows.estimated_rows == count - 1


class TestFiles:
    def test_truncated_or_foreign_files(self, path: Path) -> None:
        whole = write(path, {"label": [1], "a": [5]}).read_bytes()
        for content in (b"", b"PAR1", b"x" * 100, whole[:-1], whole[: len(whole) // 2]):
            path.write_bytes(content)
            with pytest.raises(ValueError, match=re.escape(f"{path} is no whole Parquet file")):
                open_parquet([path])

    def test_damaged_pages_name_the_file_and_the_row_reached(self, path: Path) -> None:
        count = 30_000
        write(
            path,
            {"label": [1] * count, "a": np.random.default_rng(0).integers(0, 2**39, count)},
            row_group_size=10_000,
            write_page_checksum=True,
        )
        content = bytearray(path.read_bytes())
        content[len(content) // 2 : len(content) // 2 + 100] = bytes(100)
        path.write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(f"{path} is damaged after row 1") + r"\d{4} \("):
            read(path)

    def test_missing_file(self, path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            open_parquet([path])

    def test_file_without_rows(self, path: Path) -> None:
        write(path, {"label": pa.array([], pa.int64()), "a": pa.array([], pa.int64())})
        with pytest.raises(ValueError, match=re.escape(f"{path} has no row")):
            open_parquet([path])

    @pytest.mark.parametrize(
        ("other", "difference"),
        [
            ({"label": [1], "a": ["x"]}, "column 'a' is string, and integer in {first}"),
            ({"label": [1], "a": [[5]]}, "column 'a' is list of integer, and integer in {first}"),
            ({"label": [1], "b": [5]}, "there is no column 'a', which is integer in {first}"),
            ({"label": [1]}, "there is no column 'a', which is integer in {first}"),
            ({"label": ["1"], "a": [5]}, "column 'label' is string, and integer in {first}"),
            ({"label": [1], "a": [5], "b": [6]}, "there is a column 'b', which {first} lacks"),
        ],
    )
    def test_files_with_other_columns(self, path: Path, other: dict, difference: str) -> None:
        first = write(path, {"label": [1], "a": [5]})
        second = write(path.with_name("second.parquet"), other)
        message = re.escape(f"{second}: {difference.format(first=first)}")
        with pytest.raises(ValueError, match=message):
            open_parquet([first, second])
        with pytest.raises(ValueError, match=message):
            open_parquet([second], like=open_parquet([first]))

    def test_columns_are_found_by_name(self, path: Path) -> None:
        first = write(path, {"label": [1], "user": pa.array([5], pa.int64()), "item": ["x"]})
        columns = {"item": ["y"], "user": pa.array([7], pa.int32()), "label": [False]}
        second = write(path.with_name("second.parquet"), columns)
        expected = [(0, (((integer_id(0, 7), 1.0),), ((string_id(1, "y"), 1.0),)), ())]
        for rows in (open_parquet([second], like=open_parquet([first])), open_rows([second], like=open_rows([first]))):
            assert [row for batch in rows for row in as_rows(batch)] == expected
            assert rows.field_names == ("user", "item")
        hashed = open_rows([second], hash_buckets=100, like=open_rows([first], hash_buckets=100))
        assert hashed.field_names == ("user", "item")
        assert open_parquet([first, second]).estimated_rows == 2

    def test_the_index_of_pandas_is_no_feature(self, path: Path) -> None:
        rows = open_parquet([write(path, {"label": [1], "a": [5], "__index_level_0__": [160]})])
        assert rows.field_names == ("a",)

    def test_two_columns_that_may_be_the_labels(self, path: Path) -> None:
        write(path, {"label": [1], "click": [0], "a": [5]})
        with pytest.raises(
            ValueError, match="columns 'label' and 'click' could both be the labels: --column NAME=label names the"
        ):
            open_parquet([path])
        assert open_parquet([path], label_column="click", drop_columns=["label"]).field_names == ("a",)

    def test_the_number_of_a_missing_id_is_no_id(self, path: Path) -> None:
        (batch,) = open_parquet([write(path, {"label": [1, 1, 1], "a": [2**32, None, 2**32]})])
        there, missing, again = batch.ids.flatten().tolist()
        assert there == again != missing

    @given(
        st.lists(
            st.tuples(
                st.integers(0, 1),
                st.lists(st.integers(-9, 9)),
                st.text(st.characters(exclude_characters="|^", codec="utf-8"), max_size=3),
            ),
            min_size=1,
        )
    )
    @settings(max_examples=examples(30), deadline=None)
    def test_rows_do_not_depend_on_row_groups_and_blocks(
        self, tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, list[int], str]]
    ) -> None:
        path = tmp_path_factory.mktemp("rows") / "rows.parquet"
        labels, lists, texts = zip(*rows, strict=True)
        columns = {"label": labels, "list": pa.array(lists, pa.list_(pa.int64())), "text": pa.array(texts)}
        expected = [
            (label, (tuple((integer_id(0, n), 1.0) for n in numbers), ((string_id(1, text), 1.0),)), ())
            for label, numbers, text in rows
        ]
        for size in (1, 3, 1000):
            assert read(write(path, columns, row_group_size=size)) == expected

    def test_two_files_and_their_row_count(self, path: Path) -> None:
        second = write(path.with_name("second.parquet"), {"label": [0], "a": [6]})
        rows = open_parquet([write(path, {"label": [1], "a": [5]}), second])
        assert rows.estimated_rows == 2
        assert [id for block in rows for id in block.ids.tolist()] == [5, 6]
