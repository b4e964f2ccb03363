"""libsvm and libffm: labels, ids, separators, fields, the exact grammar, and what is said of bad lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from examples import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from text_lines import as_rows

from recstore_ops.training.data.batch import Batch
from recstore_ops.training.data.row_format import RowFormat
from recstore_ops.training.data.sparse_lines import LibffmFormat, LibsvmFormat, write_libsvm
from recstore_ops.training.data.text_rows import TextRows

pytestmark = pytest.mark.tier("quick")

NUMBER = r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?"
INTEGER = r"[+-]?\d+"
GRAMMARS = [
    (LibsvmFormat(), re.compile(rf"{NUMBER}( {INTEGER}:{NUMBER})*")),
    (LibffmFormat(), re.compile(rf"{NUMBER}( {INTEGER}:{INTEGER}:{NUMBER})*")),
]


def pairs(row_format: RowFormat, line: bytes) -> list[tuple[float, int, list[tuple[int, float]]]]:
    """The label, number of fields and pairs of each row."""
    return [
        (label, len(fields), [pair for field in fields for pair in field])
        for label, fields, _ in as_rows(row_format.parse(line))
    ]


class TestRows:
    def test_libsvm(self) -> None:
        assert pairs(LibsvmFormat(), b"1 3:0.5 -7:2e1\n") == [(1, 1, [(3, 0.5), (-7, 20.0)])]

    def test_libffm_without_fields(self) -> None:
        assert pairs(LibffmFormat(), b"0\t1:3:0.5 2:7:1\n") == [(0, 1, [(3, 0.5), (7, 1.0)])]

    @pytest.mark.parametrize("line", [b"1\t3:1\t4:1\n", b"  1   3:1 \t 4:1  \n"])
    def test_spaces_and_tabs_separate(self, line: bytes) -> None:
        assert pairs(LibsvmFormat(), line) == [(1, 1, [(3, 1.0), (4, 1.0)])]

    @pytest.mark.parametrize(
        ("label", "expected"),
        [(b"-1", 0), (b"0", 0), (b"1", 1), (b"+1", 1), (b"0.0", 0), (b"1e0", 1), (b"-1.0", 0)],
    )
    def test_labels(self, label: bytes, expected: int) -> None:
        assert pairs(LibsvmFormat(), label + b" 3:1\n") == [(expected, 1, [(3, 1.0)])]

    def test_row_without_features(self) -> None:
        assert pairs(LibsvmFormat(), b"1\n0 3:1\n") == [(1, 1, []), (0, 1, [(3, 1.0)])]

    @pytest.mark.parametrize("row_format", [LibsvmFormat(), LibffmFormat()])
    def test_unsigned_64_bit_ids_are_taken_as_their_int64_bits(self, row_format: RowFormat) -> None:
        field = b"0:" if row_format.name == "libffm" else b""
        line = b" ".join(
            [b"1", *(field + id + b":1" for id in (b"18446744073709551615", b"9223372036854775808", b"5"))]
        )
        assert pairs(row_format, line) == [(1, 1, [(-1, 1.0), (-(2**63), 1.0), (5, 1.0)])]

    def test_values_that_are_all_one_are_left_out(self) -> None:
        assert LibsvmFormat().parse(b"1 3:1 4:1.0\n").values is None
        assert LibsvmFormat().parse(b"1 3:1 4:2\n").values is not None


class TestFields:
    def test_positions_are_fields(self) -> None:
        batch = LibsvmFormat(2).parse(b"1 3:1 4:1\n0 5:1 6:1\n")
        assert (batch.num_fields, batch.offsets, batch.ids.tolist()) == (2, None, [3, 4, 5, 6])

    @pytest.mark.parametrize(("line", "count"), [(b"1 3:1", 1), (b"1", 0), (b"1 3:1 4:1 5:1", 3)])
    def test_another_number_of_features_is_a_bad_line(self, line: bytes, count: int) -> None:
        row_format = LibsvmFormat(2, reason="as in the first row")
        with pytest.raises(ValueError, match="another number"):
            row_format.parse(line)
        assert row_format.explain(line) == f"expected 2 features, one a field, as in the first row, got {count}"

    def test_features_are_grouped_by_field_in_their_order(self) -> None:
        batch = LibffmFormat(3).parse(b"1 2:7:1 0:8:2 2:5:3\n\n0 1:4:1\n")
        assert batch.num_fields == 3
        assert batch.ids.tolist() == [8, 7, 5, 4]
        assert batch.values_or_ones().tolist() == [2, 1, 3, 1]
        assert batch.offsets_or_ones().tolist() == [0, 1, 1, 3, 3, 4, 4]

    def test_one_id_in_each_field_needs_no_offsets(self) -> None:
        batch = LibffmFormat(2).parse(b"1 1:7:1 0:8:1\n0 0:4:1 1:3:1\n")
        assert (batch.offsets, batch.ids.tolist()) == (None, [8, 7, 4, 3])

    @pytest.mark.parametrize("field", [b"2", b"-1", b"9223372036854775807"])
    def test_a_field_beyond_the_last_is_a_bad_line(self, field: bytes) -> None:
        row_format = LibffmFormat(2, reason="as in the first lines")
        line = b"1 0:7:1 " + field + b":7:1"
        with pytest.raises(ValueError, match="out of range"):
            row_format.parse(line)
        expected = f"expected a field from 0 to before 2, as in the first lines, got '{field.decode()}:7:1'"
        assert row_format.explain(line) == expected


class TestGrammar:
    @given(
        st.lists(st.text("01.e-+:nx_", min_size=1, max_size=6), min_size=1, max_size=3),
        st.sampled_from(GRAMMARS),
    )
    @settings(max_examples=examples(300), deadline=None)
    def test_a_line_parses_if_and_only_if_it_matches_the_grammar(
        self, parts: list[str], grammar: tuple[RowFormat, re.Pattern[str]]
    ) -> None:
        row_format, pattern = grammar
        line = " ".join(parts).encode()
        assume(not re.search(rb"e\+?\d{3}", line))  # in the grammar, but not finite
        try:
            row_format.parse(line)
        except ValueError:
            assert not (pattern.fullmatch(line.decode()) and float(parts[0]) in (-1, 0, 1))
            assert "expected" in row_format.explain(line)
        else:
            assert pattern.fullmatch(line.decode())
            assert float(parts[0]) in (-1, 0, 1)

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (b"2 3:1", "expected 0, 1 or -1 as label, got '2'"),
            (b"4.5 3:1", "expected 0, 1 or -1 as label, got '4.5'"),
            (b"x 3:1", "expected 0, 1 or -1 as label, got 'x'"),
            (b"nan 3:1", "expected 0, 1 or -1 as label, got 'nan'"),
            (b"inf 3:1", "expected 0, 1 or -1 as label, got 'inf'"),
            (b"3:1 4:1", "expected 0, 1 or -1 as label, got '3:1'"),
            (b"1_0 3:1", "expected 0, 1 or -1 as label, got '1_0'"),
            (b"1 3:1 4", "expected id:value (libsvm) with integer id and finite value, got '4'"),
            (b"1 3:1 4:", "got '4:'"),
            (b"1 3:1 :1", "got ':1'"),
            (b"1 3:nan", "got '3:nan'"),
            (b"1 3:1e39", "got '3:1e39'"),
            (b"1 3.5:1", "got '3.5:1'"),
            (b"1 18446744073709551616:1", "got '18446744073709551616:1'"),
            (b"1 1:2:3 4", "got '1:2:3'"),
            (b"1 3:1 4:x 5:1 6:y", "got '4:x'"),
            (b"1 \xff\xfe:1", r"got '\\xff\\xfe:1'"),
            (b"1 " + b"z" * 500, "got '" + "z" * 40 + "...'"),
            (b"1 " + b"1:1 " * 100_000 + b"x:1", "got 'x:1'"),
        ],
    )
    def test_message_names_the_part_of_the_line(self, line: bytes, message: str) -> None:
        assert message in LibsvmFormat().explain(line)


class TestWriting:
    @given(
        st.lists(
            st.tuples(
                st.integers(0, 1),
                st.lists(
                    st.tuples(st.integers(-(2**63), 2**63 - 1), st.floats(-(2.0**99), 2.0**99, width=32)), max_size=4
                ),
            ),
            max_size=30,
        )
    )
    @settings(max_examples=examples(50), deadline=None)
    def test_written_rows_parse_back_equal(self, tmp_path_factory: pytest.TempPathFactory, rows: list) -> None:
        path = tmp_path_factory.mktemp("rows") / "rows.libfm"
        features = [feature for _, row in rows for feature in row]
        ends = torch.tensor([0, *(len(row) for _, row in rows)]).cumsum(0)
        batch = Batch(
            ids=torch.tensor([id for id, _ in features], dtype=torch.int64),
            labels=torch.tensor([label for label, _ in rows], dtype=torch.float32),
            offsets=ends,
            values=torch.tensor([value for _, value in features], dtype=torch.float32),
        )
        write_libsvm(path, batch)
        assert as_rows(LibsvmFormat().parse(path.read_bytes())) == as_rows(batch)

    def test_fields_become_positions(self, tmp_path: Path) -> None:
        batch = Batch(torch.tensor([3, 4, 5, 6]), torch.tensor([1.0, 0.0]), num_fields=2)
        write_libsvm(tmp_path / "rows", batch)
        (again,) = TextRows([tmp_path / "rows"], LibsvmFormat(2))
        assert as_rows(again) == as_rows(batch)


def test_real_rows(data_root: Path) -> None:
    (rows,) = [list(TextRows([data_root / "frappe" / "test.libfm"], LibsvmFormat(10)))]
    assert sum(map(len, rows)) == 28_860
    (rows,) = [list(TextRows([data_root / "xflow" / "small_train"], LibffmFormat(18)))]
    assert sum(map(len, rows)) == 200
