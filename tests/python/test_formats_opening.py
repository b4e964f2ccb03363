"""Opening files: formats told by content, options that fit the format or are refused."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from compressors import COMPRESSORS
from text_lines import CASES, as_rows

from recstore_ops.table.shard_of import splitmix64
from recstore_ops.training.data.format_detection import FormatName, detect_format
from recstore_ops.training.data.opening import open_rows

pytestmark = pytest.mark.tier("quick")

FORMATS = "libsvm, libffm, criteo, avazu, movielens, csv, parquet"


@pytest.fixture
def text_file(tmp_path: Path):
    def write(content: bytes, name: str = "rows.txt") -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


class TestDetection:
    @pytest.mark.parametrize("name", CASES)
    @pytest.mark.parametrize("compress", [bytes, *COMPRESSORS.values()])
    def test_each_format_by_content(self, text_file, name: str, compress) -> None:
        case = CASES[name]
        path = text_file(compress(b"\xef\xbb\xbf\r\n" + case.good + b"\r\n"))
        assert detect_format(path) == case.row_format.name
        (block,) = open_rows([path], by_field="by" in name)
        assert len(block) == 1

    @pytest.mark.parametrize("header", [b"userId,movieId,rating,timestamp", b"bad line", b"1", b'{"a": 1}'])
    def test_lines_of_no_known_shape_are_passed_over(self, text_file, header: bytes) -> None:
        assert detect_format(text_file(header + b"\n1,2,3,4\n")) == "movielens"

    def test_parquet(self, tmp_path: Path) -> None:
        pq.write_table(pa.table({"label": [1], "a": [5]}), tmp_path / "rows")
        assert detect_format(tmp_path / "rows") == "parquet"
        (block,) = open_rows([tmp_path / "rows"])
        assert block.ids.tolist() == [5]

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            (b"1\n\n0 9:3:1\n", "libffm"),
            (b"1\n0\n", "libsvm"),
            (b"1\t3:1\t4:1\t5:1\n", "libsvm"),
            (b"1" + b"\t3:1" * 39, "libsvm"),
            (b"0\t1:3:1\t1:4:1\t1:5:1\n", "libffm"),
            (b"a,b,c\n1,2,3\n", "csv"),
            (b"click,user,item,price\n1,5,7,300\n", "csv"),
            (b"1,5,7,3.5\n", "csv"),
            (b"1,5,70,300\n", "csv"),
            (b"user_id:token\titem_id:token\n5\t7\n", "csv"),
        ],
    )
    def test_sparse_lines_are_told_by_their_colons(self, text_file, content: bytes, expected: FormatName) -> None:
        assert detect_format(text_file(content)) == expected

    @pytest.mark.parametrize("compress", [bytes, gzip.compress])
    @pytest.mark.parametrize(
        "text",
        [
            '{"user": "u27", "price": 7.06, "label": 1}\n{"user": "u8", "price": 4.24, "label": 0}\n',
            '{"user": 1, "label": 1}\n',
            '\n  {"user": 1, "label": 1}\n',
            '[{"user": 1, "label": 1},\n {"user": 2, "label": 0}]\n',
            '[\n  {"user": 1, "label": 1}\n]\n',
            '{\n  "user": [1, 2],\n  "label": [0, 1]\n}\n',
            "[1, 2, 0]\n[3, 4, 1]\n",
        ],
    )
    def test_json_is_refused_by_its_name(self, tmp_path: Path, text: str, compress: Callable[[bytes], bytes]) -> None:
        path = tmp_path / "rows"
        path.write_bytes(compress(text.encode()))
        message = f"expected a file in one of the formats {FORMATS}, but {path} has JSON, which is not read"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            open_rows([path])

    @pytest.mark.parametrize(
        ("content", "found"),
        [
            (b"", "has no line of text"),
            (b"\n \n", "has no line of text"),
            (b"hello there\n", "begins with 'hello there'"),
        ],
    )
    def test_what_formats_there_are_where_none_fits(self, text_file, content: bytes, found: str) -> None:
        path = text_file(content)
        message = f"expected a file in one of the formats {FORMATS}, but {path} {found}"
        with pytest.raises(ValueError, match=re.escape(message)):
            open_rows([path])

    def test_files_of_two_formats(self, text_file) -> None:
        paths = [text_file(b"1 3:1\n", "a"), text_file(b"0 9:4:1\n", "b")]
        message = f"expected files of one format, got {paths[0]} (libsvm) and {paths[1]} (libffm)"
        with pytest.raises(ValueError, match=re.escape(message)):
            open_rows(paths)

    def test_a_given_format_wins(self, text_file) -> None:
        with pytest.raises(ValueError, match=r"rows.txt:1: expected field:id:value \(libffm\)"):
            list(open_rows([text_file(b"1 3:1\n")], file_format="libffm"))

    def test_a_cut_stream(self, text_file) -> None:
        content = COMPRESSORS["gzip"](b"".join(b"1 %d:1\n" % n for n in range(9000)))
        path = text_file(content[: len(content) // 2])
        with pytest.raises(ValueError, match=re.escape(f"{path}:1: the gzip stream is damaged")):
            open_rows([path])

    def test_a_movielens_file_of_no_known_separator(self, text_file) -> None:
        path = text_file(b"1;2;3;4\n")
        with pytest.raises(ValueError, match=re.escape("expected four columns between ',', '::' or tabs (movielens)")):
            open_rows([path], file_format="movielens")

    def test_missing_file_and_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            open_rows([tmp_path / "absent"])
        with pytest.raises(ValueError, match="expected at least one file, got none"):
            open_rows([])


class TestFields:
    def test_libsvm_takes_the_features_of_the_first_good_row(self, text_file) -> None:
        path = text_file(b"\nbad\n1 3:1 4:1\n0 5:1 6:1\n1 7:1\n")
        rows = open_rows([path], by_field=True, on_bad_line="skip")
        (block,) = rows
        assert (block.num_fields, block.ids.tolist(), rows.skipped_lines) == (2, [3, 4, 5, 6], 2)
        with pytest.raises(ValueError, match=r"expected 2 features, one a field, as in the first row of .*rows.txt"):
            list(open_rows([text_file(b"1 3:1 4:1\n1 7:1\n")], by_field=True))

    def test_libffm_takes_the_largest_field_of_the_first_lines(self, text_file) -> None:
        path = text_file(b"1 0:3:1\nbad\n0 4:5:1\n")
        rows = open_rows([path], by_field=True, on_bad_line="skip")
        assert rows.field_names == ("field_0", "field_1", "field_2", "field_3", "field_4")
        (block,) = rows
        assert block.num_fields == 5

    def test_given_numbers_win(self, text_file) -> None:
        assert len(open_rows([text_file(b"1 0:3:1\n")], by_field=True, num_fields=7).field_names) == 7
        with pytest.raises(ValueError, match="expected 3 features, one a field, as num_fields says, got 1"):
            list(open_rows([text_file(b"1 3:1\n")], by_field=True, num_fields=3))

    @pytest.mark.parametrize(
        ("content", "file_format", "message"),
        [
            (b"1\n", "libsvm", "expected id:value (libsvm) in the first 4096 lines"),
            (b"1\n", "libffm", "expected field:id:value (libffm) in the first 4096 lines"),
            (b"1 99999:1:1\n", "libffm", "expected fields below 4096, got 99999"),
        ],
    )
    def test_files_that_do_not_tell(self, text_file, content: bytes, file_format: FormatName, message: str) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            open_rows([text_file(content)], file_format=file_format, by_field=True)

    def test_other_formats_always_have_fields(self, text_file) -> None:
        path = text_file(CASES["criteo"].good)
        plain, by_field = open_rows([path]), open_rows([path], by_field=True)
        assert plain.field_names == by_field.field_names == tuple(f"C{number}" for number in range(1, 27))


class TestOptions:
    @pytest.mark.parametrize(
        ("name", "options", "message"),
        [
            ("criteo", {"num_fields": 3}, "num_fields is for libsvm and libffm by field, but the files are criteo"),
            ("libsvm", {"num_fields": 3}, "num_fields is for libsvm and libffm by field"),
            ("criteo", {"num_fields": 3, "by_field": True}, "num_fields is for libsvm and libffm by field"),
            ("criteo", {"ignore_values": True}, "ignore_values is for libsvm and libffm, but the files are criteo"),
            (
                "avazu",
                {"rating_threshold": 3.0},
                "rating_threshold is for movielens, csv and parquet, but the files are avazu",
            ),
            ("libffm", {"label_column": "y"}, "label_column is for csv and parquet, but the files are libffm"),
            ("u.data", {"drop_columns": ["a"]}, "drop_columns is for csv and parquet, but the files are movielens"),
            ("libsvm", {"num_fields": 0, "by_field": True}, "expected num_fields to be at least 1, got 0"),
            ("libsvm", {"on_bad_line": "go"}, "expected on_bad_line to be stop or skip, got 'go'"),
            ("libsvm", {"hash_buckets": 0}, "expected at least 1 bucket, got 0"),
            ("libsvm", {"hash_buckets": 2**63}, f"buckets must be an int64, got {2**63}"),
            ("libsvm", {"file_format": "json"}, f"expected one of {FORMATS} as format, got 'json'"),
        ],
    )
    def test_options_without_meaning_are_refused(self, text_file, name: str, options: dict, message: str) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            open_rows([text_file(CASES[name].good)], **options)

    def test_rating_threshold(self, text_file) -> None:
        path = text_file(b"1,2,3.5,0\n1,2,3,0\n")
        labels = [block.labels.tolist() for block in open_rows([path], rating_threshold=3.5)]
        assert labels == [[1.0, 0.0]]

    def test_ignored_values(self, text_file) -> None:
        (block,) = open_rows([text_file(b"1 3:0.5\n")], ignore_values=True)
        assert as_rows(block) == [(1, (((3, 1.0),),), ())]

    def test_hashed_ids(self, text_file) -> None:
        path = text_file(b"1 3:1 -7:1\n")
        (plain,), (hashed,) = open_rows([path]), open_rows([path], hash_buckets=1000)
        expected = [int(hash) % 1000 for hash in splitmix64(plain.ids.numpy())]
        assert hashed.ids.tolist() == expected


def test_real_files_are_told_apart(data_root: Path) -> None:
    assert detect_format(data_root / "criteo" / "train.tsv") == "criteo"
    assert detect_format(data_root / "frappe" / "train.libfm") == "libsvm"
    assert detect_format(data_root / "xflow" / "small_train") == "libffm"


def test_real_criteo_rows_are_those_of_the_plain_parser(data_root: Path) -> None:
    path = data_root / "criteo" / "test.tsv"
    rows = [row for block in open_rows([path]) for row in as_rows(block)]
    assert rows == [CASES["criteo"].parse(line) for line in path.read_bytes().splitlines()]
