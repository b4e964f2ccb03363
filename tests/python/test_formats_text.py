"""Every text format: good files however cut and compressed, bad lines of every kind, found by file and line."""

from __future__ import annotations

import random
import re
import tracemalloc
from pathlib import Path
from unittest import mock

import pytest
from compressors import COMPRESSORS
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from text_lines import CASES, Row, TextCase, as_rows

from recstore_ops.training.data import text_rows
from recstore_ops.training.data.text_rows import TextRows

pytestmark = pytest.mark.tier("quick")

every_format = pytest.mark.parametrize("name", CASES)
every_compressor = pytest.mark.parametrize("kind", COMPRESSORS)

Reader = tuple[list[Row], TextRows]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("text") / "rows.txt"


def read(path: Path, case: TextCase, content: bytes, **options) -> Reader:
    path.write_bytes(content)
    rows = TextRows([path], case.row_format, **options)
    return [row for block in rows for row in as_rows(block)], rows


def is_blank(line: bytes, case: TextCase) -> bool:
    return not line.strip(b" \t" if case.row_format.name in ("libsvm", "libffm") else b" ")


class TestGoodFiles:
    @every_format
    @given(data=st.data())
    @settings(max_examples=examples(25), deadline=None)
    def test_rows_are_read_back_whatever_the_layout_of_the_file(
        self, path: Path, name: str, data: st.DataObject
    ) -> None:
        case = CASES[name]
        lines = data.draw(st.lists(case.lines, min_size=1, max_size=12))
        blanks = data.draw(st.lists(st.sampled_from([b"", b"", b"", b"\n", b"  \r\n"]), min_size=len(lines)))
        ends = data.draw(st.lists(st.sampled_from([b"\n", b"\r\n"]), min_size=len(lines), max_size=len(lines)))
        content = b"".join(blank + line + end for blank, line, end in zip(blanks, lines, ends, strict=False))
        if data.draw(st.booleans()):
            content = content.rstrip(b"\r\n")
        if data.draw(st.booleans()):
            content = b"\xef\xbb\xbf" + content
        compress = data.draw(st.sampled_from([bytes, *COMPRESSORS.values()]))
        cut = data.draw(st.integers(0, len(content)))
        parts = [content[:cut], content[cut:]] if data.draw(st.booleans()) else [content]
        with mock.patch.object(text_rows, "BLOCK_BYTES", data.draw(st.sampled_from([1, 7, 100, 2**20]))):
            rows, _ = read(path, case, b"".join(map(compress, parts)))
        assert rows == [case.parse(line) for line in lines]

    @every_format
    def test_a_file_of_many_blocks(self, path: Path, name: str) -> None:
        case = CASES[name]
        path.write_bytes(b"\n".join([case.good] * 30_000))
        source = TextRows([path], case.row_format)
        blocks = list(source)
        assert max(map(len, blocks)) * len(case.good) <= text_rows.BLOCK_BYTES
        assert sum(map(len, blocks)) == source.estimated_rows == 30_000
        assert as_rows(blocks[-1].rows(0, 1)) == [case.parse(case.good)]

    @every_format
    def test_ignored_values_are_ones(self, path: Path, name: str) -> None:
        case = CASES[name]
        path.write_bytes(case.good)
        (block,) = TextRows([path], case.row_format, ignore_values=True)
        assert block.values is None

    @every_format
    def test_names_are_those_of_the_rows(self, path: Path, name: str) -> None:
        case = CASES[name]
        path.write_bytes(case.good)
        rows = TextRows([path], case.row_format)
        (block,) = rows
        assert len(rows.field_names) == block.num_fields
        assert len(rows.dense_names) == (0 if block.dense is None else block.dense.shape[1])


def replaced_cell(line: bytes, place: int, cell: bytes) -> bytes:
    """Puts something else between two separators of any format."""
    parts = re.split(rb"(::|[,\t: ])", line)
    parts[2 * place] = cell
    return b"".join(parts)


BAD_EVERYWHERE = {
    "one column too many": lambda line: line + b"\t1",
    "one comma too many": lambda line: line + b",1",
    "a column of its own": lambda line: b"7 " + line,
    "nothing but a word": lambda line: b"word",
    "label nan": lambda line: b"nan" + line,
    "label of a letter": lambda line: b"x" + line[1:],
    "lone carriage return": lambda line: line[:3] + b"\r" + line[3:],
    "two rows between carriage returns": lambda line: line + b"\r" + line,
    "carriage return before the end": lambda line: line + b"\r\r",
    "NUL": lambda line: line[:2] + b"\0" + line[2:],
    "NUL at the end": lambda line: line + b"\0",
    "vertical tab": lambda line: line + b"\v",
    "form feed": lambda line: b"\f" + line,
    "bytes beyond ASCII": lambda line: line + b"\xff",
    "a letter beyond ASCII": lambda line: line + "é".encode(),
    "a digit beyond ASCII": lambda line: line + "٣".encode(),
    "byte order mark within the file": lambda line: b"\xef\xbb\xbf" + line,
    "quotes around": lambda line: b'"' + line + b'"',
    "quotes around the first cell": lambda line: replaced_cell(line, 0, b'"1"'),
    "one quote": lambda line: b'"' + line,
    "backslash": lambda line: line + b"\\",
    "underscore in a number": lambda line: b"1_0" + line,
    "hexadecimal prefix": lambda line: b"0x1" + line,
    "nan": lambda line: line[:-1] + b"nan",
    "infinity": lambda line: line + b"inf",
}
BAD_TABLES = {
    "a column too few": lambda line, separator: line[: line.rindex(separator)],
    "a column too many": lambda line, separator: line + separator,
    "only separators": lambda line, separator: separator * line.count(separator),
    "separators of another kind": lambda line, separator: line.replace(separator, b";"),
    "space after a separator": lambda line, separator: line.replace(separator, separator + b" ", 1),
    "space before a separator": lambda line, separator: line.replace(separator, b" " + separator, 1),
    "space at the end": lambda line, separator: line + b" ",
    "plus before a number": lambda line, separator: b"+" + line,
    "two rows on a line": lambda line, separator: line + separator + line,
}
SEPARATORS = {"criteo": b"\t", "avazu": b",", "ratings.csv": b",", "ratings.dat": b"::", "u.data": b"\t"}
BAD_CELLS = {
    "libsvm": [
        *[(0, cell) for cell in (b"nan", b"inf", b"-inf", b"1e39", b"+", b"1_0", b"")],
        *[(1, cell) for cell in (b"", b"3.5", b"a", b"0x3", b"18446744073709551616", b"-9223372036854775809", b"1e3")],
        *[(2, cell) for cell in (b"", b"nan", b"inf", b"1e39", b"x", b"1:1", b".", b"1.2.3", b"0x1")],
    ],
    "libffm": [(1, b""), (1, b"x"), (1, b"1.0"), (2, b""), (2, b"x"), (3, b"nan"), (3, b""), (3, b"1:1")],
    "libffm by field": [(1, b"3"), (1, b"-1"), (1, b"18446744073709551615")],
    "criteo": [
        *[(0, cell) for cell in (b"", b"2", b"-1", b"nan", b"1.0", b"1e0")],
        *[(1, cell) for cell in (b"1.5", b"a", b"nan", b"inf", b"--1", b"-", b"9223372036854775808", b"1e3", b"0x1")],
        *[(39, cell) for cell in (b"g0000000", b"123456789", b"-1", b"0x1f", b"1234 678", b"00000000000000001")],
    ],
    "avazu": [
        *[(1, cell) for cell in (b"", b"2", b"-1", b"nan")],
        *[(2, cell) for cell in (b"", b"14102124", b"14133100", b"14003100", b"14120000", b"114102123", b"-1", b"x")],
        *[(3, cell) for cell in (b"549755813888", b"-549755813889", b"a", b"1.0", b"9223372036854775808")],
        *[(5, cell) for cell in (b"g0000000", b"123456789", b"-1")],
    ],
    "ratings.csv": [
        *[(place, cell) for place in (0, 1) for cell in (b"", b"x", b"1.5", b"549755813888")],
        *[(2, cell) for cell in (b"", b"nan", b"inf", b"-", b".", b"4-5", b"9" * 400)],
        *[(3, cell) for cell in (b"", b"1.5", b"now", b"9223372036854775808")],
    ],
}


def bad_lines(name: str) -> dict[str, bytes]:
    """Returns the lines that are bad in a format, by what is wrong with them."""
    good = CASES[name].good
    bad = {what: change(good) for what, change in BAD_EVERYWHERE.items()}
    if name in SEPARATORS:
        bad |= {what: change(good, SEPARATORS[name]) for what, change in BAD_TABLES.items()}
    bad |= {f"cell {place} is {cell!r}": replaced_cell(good, place, cell) for place, cell in BAD_CELLS.get(name, [])}
    return bad


CORPUS = [pytest.param(name, line, id=f"{name}: {what}") for name in CASES for what, line in bad_lines(name).items()]


class TestBadLines:
    @pytest.mark.parametrize(("name", "bad"), CORPUS)
    def test_a_bad_line_stops_with_file_and_line_or_is_skipped_alone(self, path: Path, name: str, bad: bytes) -> None:
        case = CASES[name]
        assert case.parse(bad) is None or re.search(rb"[\0\r\v\f]", bad), "the plain parser takes it too"
        content = case.good + b"\n\n" + bad + b"\n" + case.good
        with pytest.raises(ValueError, match=re.escape(f"{path}:3: expected ")) as caught:
            read(path, case, content)
        rows, source = read(path, case, content, on_bad_line="skip")
        assert rows == [case.parse(case.good)] * 2
        assert source.skipped_lines == 1
        assert source.first_skipped == str(caught.value)
        assert ", got " in str(caught.value)

    @every_format
    @given(data=st.data())
    @settings(max_examples=examples(80), deadline=None)
    def test_exactly_the_lines_that_the_plain_parser_refuses_are_skipped(
        self, path: Path, name: str, data: st.DataObject
    ) -> None:
        case = CASES[name]
        lines = [case.good, *data.draw(st.lists(mutated(case), min_size=1, max_size=6))]
        with mock.patch.object(text_rows, "BLOCK_BYTES", data.draw(st.sampled_from([1, 60, 2**20]))):
            rows, source = read(path, case, b"\n".join(lines) + b"\n", on_bad_line="skip")
        expected = [case.parse(line) for line in lines if not is_blank(line, case)]
        assert rows == [row for row in expected if row is not None]
        assert source.skipped_lines == expected.count(None)

    @every_format
    def test_a_bad_line_far_into_a_file(self, path: Path, name: str) -> None:
        case = CASES[name]
        with pytest.raises(ValueError, match=re.escape(f"{path}:20001: expected ")):
            read(path, case, (case.good + b"\n") * 20_000 + b"bad\n")

    @every_format
    def test_a_skipped_line_costs_few_parses(self, path: Path, name: str) -> None:
        case = CASES[name]
        content = (case.good + b"\n") * 500 + b"bad\n" + (case.good + b"\n") * 500
        path.write_bytes(content)
        counting = mock.Mock(wraps=case.row_format)
        rows = list(TextRows([path], counting, on_bad_line="skip"))
        assert sum(map(len, rows)) == 1000
        assert counting.parse.call_count <= 30
        assert counting.explain.call_count == 1

    @every_format
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "is empty"),
            (b"\n \n", "has no row: all of its 2 lines are blank, bad or a header"),
            (b"x\ny", "has no row: all of its 2 lines are blank, bad or a header"),
            (b"\xef\xbb\xbf", "has no row: all of its 1 lines are blank, bad or a header"),
        ],
    )
    def test_a_file_without_rows_is_an_error(self, path: Path, name: str, content: bytes, message: str) -> None:
        with pytest.raises(ValueError, match=re.escape(f"{path} {message}")):
            read(path, CASES[name], content, on_bad_line="skip")


@st.composite
def mutated(draw: st.DrawFn, case: TextCase) -> bytes:
    """A line that may be good, with some bytes put in, taken out or replaced."""
    line = draw(case.lines)
    for _ in range(draw(st.integers(0, 2))):
        at, taken = draw(st.integers(0, len(line))), draw(st.integers(0, 2))
        put = draw(
            st.sampled_from([b"", b" ", b"\t", b",", b":", b"::", b"-", b"+", b".", b"e", b"0", b"9", b"x", b'"'])
        )
        line = line[:at] + put + line[at + taken :]
    return line


class TestDamage:
    @every_format
    @every_compressor
    def test_a_cut_stream_is_an_error_with_file_and_line(self, path: Path, name: str, kind: str) -> None:
        case = CASES[name]
        whole = COMPRESSORS[kind](numbered_lines(case, 3000))
        for kept in (20, len(whole) // 2, len(whole) - 1):
            with pytest.raises(ValueError, match=re.escape(f"{path}:") + rf"\d+: the {kind} stream is damaged"):
                read(path, case, whole[:kept], on_bad_line="skip")

    @every_compressor
    def test_the_line_reached_is_told(self, path: Path, kind: str) -> None:
        case = CASES["criteo"]
        whole = COMPRESSORS[kind](numbered_lines(case, 20_000))
        with pytest.raises(ValueError, match=r"the \w+ stream is damaged") as caught:
            read(path, case, whole[: len(whole) * 3 // 4])
        reached = int(str(caught.value).removeprefix(f"{path}:").split(":")[0])
        assert 5_000 < reached < 20_000

    @pytest.mark.parametrize("kind", ["gzip", "bz2", "xz"])
    def test_a_changed_byte_in_the_middle_is_an_error(self, path: Path, kind: str) -> None:
        case = CASES["criteo"]
        content = bytearray(COMPRESSORS[kind](numbered_lines(case, 3000)))
        content[len(content) // 2] ^= 0xFF
        with pytest.raises(ValueError, match=re.escape(f"{path}:")):
            read(path, case, bytes(content))

    @every_compressor
    @pytest.mark.parametrize("rest", [b"garbage", b"1 3:1\n", b"\xff" * 70_000])
    def test_what_follows_a_stream_must_be_one(self, path: Path, kind: str, rest: bytes) -> None:
        case = CASES["libsvm"]
        with pytest.raises(ValueError, match=rf":\d+: the {kind} stream is damaged"):
            read(path, case, COMPRESSORS[kind](case.good) + rest)

    @pytest.mark.parametrize("kind", ["gzip", "bz2", "xz"])
    def test_zeros_after_a_stream_are_padding(self, path: Path, kind: str) -> None:
        case = CASES["libsvm"]
        content = COMPRESSORS[kind](case.good + b"\n") + b"\0" * 70_000 + COMPRESSORS[kind](case.good) + b"\0" * 8
        assert len(read(path, case, content)[0]) == 2

    @every_compressor
    def test_an_empty_stream_is_an_empty_file(self, path: Path, kind: str) -> None:
        with pytest.raises(ValueError, match=re.escape(f"{path} is empty")):
            read(path, CASES["libsvm"], COMPRESSORS[kind](b""))


def numbered_lines(case: TextCase, count: int) -> bytes:
    """Good lines that do not compress to nothing."""
    rng = random.Random(0)
    if case.row_format.name != "criteo":
        return (case.good + b"\n") * count
    head = case.good[: case.good.rindex(b"\t", 0, -1)]
    return b"".join(head + b"\t%08x\t\n" % rng.getrandbits(32) for _ in range(count))


class TestOverlongLines:
    @pytest.fixture(autouse=True)
    def short_limits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(text_rows, "BLOCK_BYTES", 256)
        monkeypatch.setattr(text_rows, "MAX_LINE_BYTES", 1000)

    @every_format
    @pytest.mark.parametrize("size", [1001, 1024, 5000])
    def test_an_overlong_line_is_a_bad_line(self, path: Path, name: str, size: int) -> None:
        case = CASES[name]
        content = case.good + b"\n" + b"z" * size + b"\n" + case.good + b"\n" + b"y" * size
        with pytest.raises(
            ValueError, match=re.escape(f"{path}:2: expected a line of at most 1000 bytes, got a longer")
        ):
            read(path, case, content)
        rows, source = read(path, case, content, on_bad_line="skip")
        assert rows == [case.parse(case.good)] * 2
        assert source.skipped_lines == 2

    def test_a_line_of_the_greatest_length_is_read(self, path: Path) -> None:
        case = CASES["libsvm"]
        line = b"1" + b" 3:1" * 249 + b"   "
        assert len(line) == 1000
        rows, _ = read(path, case, line + b"\n" + case.good)
        assert len(rows) == 2

    def test_memory_does_not_grow_with_an_overlong_line(self, path: Path) -> None:
        case = CASES["libsvm"]
        path.write_bytes(case.good + b"\n" + b"z" * 10_000_000)
        tracemalloc.start()
        assert len(list(TextRows([path], case.row_format, on_bad_line="skip"))) == 1
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1_000_000


class TestHeaders:
    AVAZU = (
        b"id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,"
        b"device_ip,device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21"
    )
    HEADERS = (("avazu", AVAZU), ("ratings.csv", b"userId,movieId,rating,timestamp"))

    @pytest.mark.parametrize(("name", "header"), HEADERS)
    @pytest.mark.parametrize("start", [b"", b"\n \r\n", b"\xef\xbb\xbf"])
    def test_a_header_is_no_row(self, path: Path, name: str, header: bytes, start: bytes) -> None:
        case = CASES[name]
        rows, _ = read(path, case, start + header + b"\r\n" + case.good)
        assert rows == [case.parse(case.good)]

    @pytest.mark.parametrize(("name", "header"), HEADERS)
    def test_lines_count_from_the_header_on(self, path: Path, name: str, header: bytes) -> None:
        with pytest.raises(ValueError, match=re.escape(f"{path}:3: expected ")):
            read(path, CASES[name], header + b"\n" + CASES[name].good + b"\nbad\n")

    @pytest.mark.parametrize(("name", "header"), HEADERS)
    def test_a_header_further_down_is_a_bad_line(self, path: Path, name: str, header: bytes) -> None:
        with pytest.raises(ValueError, match=re.escape(f"{path}:2: expected ")):
            read(path, CASES[name], CASES[name].good + b"\n" + header)

    @pytest.mark.parametrize(("name", "header"), HEADERS)
    @pytest.mark.parametrize("on_bad_line", ["stop", "skip"])
    def test_a_header_of_other_columns_is_an_error(
        self, path: Path, name: str, header: bytes, on_bad_line: str
    ) -> None:
        first, second, *rest = header.split(b",")
        other = b",".join([second, first, *rest])
        with pytest.raises(ValueError, match=re.escape(f"{path}:2: expected the header {header.decode()}")):
            read(path, CASES[name], b"\n" + other + b"\n" + CASES[name].good, on_bad_line=on_bad_line)

    @pytest.mark.parametrize(("name", "header"), HEADERS)
    def test_only_a_header_is_no_row(self, path: Path, name: str, header: bytes) -> None:
        with pytest.raises(ValueError, match=re.escape(f"{path} has no row: all of its 1 lines")):
            read(path, CASES[name], header)


class TestProgress:
    def test_rows_come_before_the_end_of_the_file_is_read(self, path: Path) -> None:
        case = CASES["libsvm"]
        path.write_bytes((case.good + b"\n") * 200_000 + b"bad\n")
        assert len(next(iter(TextRows([path], case.row_format)))) < 200_000

    @pytest.mark.parametrize("compress", [bytes, *COMPRESSORS.values()])
    def test_row_count_is_estimated_on_the_way_and_exact_at_the_end(self, path: Path, compress) -> None:
        case = CASES["criteo"]
        path.write_bytes(compress(numbered_lines(case, 20_000)))
        rows = TextRows([path, path], case.row_format)
        assert rows.estimated_rows is None
        blocks = iter(rows)
        first = len(next(blocks))
        # A decompressor is ahead by its buffer, which is much of so small a file.
        assert first < (rows.estimated_rows or 0) < 45_000
        assert first + sum(map(len, blocks)) == 40_000
        assert rows.estimated_rows == 40_000

    def test_each_pass_counts_skipped_lines_anew(self, path: Path) -> None:
        case = CASES["libsvm"]
        path.write_bytes(case.good + b"\nbad\n")
        rows = TextRows([path, path], case.row_format, on_bad_line="skip")
        assert [len(list(rows)), len(list(rows))] == [2, 2]
        assert rows.skipped_lines == 2
        assert [(file.path, file.count) for file in rows.skipped] == [(path, 2)]
