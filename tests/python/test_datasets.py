"""Reading, cutting, shuffling, caching and splitting rows."""

from __future__ import annotations

import gzip
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from recstore_ops.training import (
    Batch,
    CachedRows,
    HeldOutRows,
    MemoryRows,
    TextRows,
    concatenate,
    find_input_files,
    parse_lines,
    regroup,
    shuffled,
    sum_by_row,
    write_libsvm,
)
from recstore_ops.training.text_format import FileFormat, explain_bad_line

Row = tuple[int, list[tuple[int, float]]]

rows_strategy = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.lists(
            st.tuples(st.integers(-(2**63), 2**63 - 1), st.floats(-(2.0**99), 2.0**99, width=32)),
            max_size=4,
        ),
    ),
    max_size=30,
)


def make_batch(rows: list[Row]) -> Batch:
    features = [feature for _, row in rows for feature in row]
    lengths = [0, *(len(row) for _, row in rows)]
    return Batch(
        ids=torch.tensor([i for i, _ in features], dtype=torch.int64),
        values=torch.tensor([v for _, v in features], dtype=torch.float32),
        offsets=torch.tensor(list(itertools.accumulate(lengths))),
        labels=torch.tensor([label for label, _ in rows], dtype=torch.float32),
    )


def numbered_rows(count: int) -> Batch:
    """Rows of 0 to 3 features; the label alternates and every id is the row's number."""
    return make_batch([(n % 2, [(n, float(n))] * (n % 4)) for n in range(count)])


def as_rows(batch: Batch) -> list[Row]:
    offsets, pairs = batch.offsets.tolist(), list(zip(batch.ids.tolist(), batch.values.tolist(), strict=True))
    return [(int(label), pairs[offsets[n] : offsets[n + 1]]) for n, label in enumerate(batch.labels.tolist())]


def read(path: Path, **options) -> list[Row]:
    return [row for block in TextRows([path], **options) for row in as_rows(block)]


@pytest.fixture
def text_file(tmp_path: Path):
    def write(content: bytes, name: str = "rows.txt") -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


class TestFormats:
    def test_libsvm_row(self, text_file) -> None:
        assert read(text_file(b"1 3:0.5 -7:2e1\n")) == [(1, [(3, 0.5), (-7, 20.0)])]

    def test_libffm_row_loses_its_fields(self, text_file) -> None:
        assert read(text_file(b"0\t1:3:0.5 2:7:1\n")) == [(0, [(3, 0.5), (7, 1.0)])]

    @pytest.mark.parametrize("content", [b"1\t3:1\t4:1\n", b"  1   3:1 \t 4:1  \n"])
    def test_spaces_and_tabs_separate(self, text_file, content: bytes) -> None:
        assert read(text_file(content)) == [(1, [(3, 1.0), (4, 1.0)])]

    def test_crlf_blank_lines_and_missing_final_newline(self, text_file) -> None:
        content = b"\r\n1 3:1\r\n\r\n  \n0 4:1"
        assert read(text_file(content)) == [(1, [(3, 1.0)]), (0, [(4, 1.0)])]

    @pytest.mark.parametrize(
        ("label", "expected"),
        [(b"-1", 0), (b"0", 0), (b"1", 1), (b"+1", 1), (b"0.0", 0), (b"2.5", 1), (b"1e-3", 1)],
    )
    def test_label_above_zero_is_one(self, text_file, label: bytes, expected: int) -> None:
        assert read(text_file(label + b" 3:1\n")) == [(expected, [(3, 1.0)])]

    def test_row_without_features(self, text_file) -> None:
        assert read(text_file(b"1\n0 3:1\n")) == [(1, []), (0, [(3, 1.0)])]

    def test_unsigned_64_bit_ids_are_taken_as_their_int64_bits(self, text_file) -> None:
        rows = read(text_file(b"1 18446744073709551615:1 9223372036854775808:1 5:1\n"))
        assert rows == [(1, [(-1, 1.0), (-(2**63), 1.0), (5, 1.0)])]

    def test_ignored_values_are_one(self, text_file) -> None:
        rows = read(text_file(b"1 3:0.5 4:-2\n"), ignore_values=True)
        assert rows == [(1, [(3, 1.0), (4, 1.0)])]

    def test_gzip_is_recognised_by_content(self, text_file) -> None:
        assert read(text_file(gzip.compress(b"1 3:1\n"), "rows")) == [(1, [(3, 1.0)])]

    def test_format_is_detected_past_rows_without_features(self, text_file) -> None:
        assert read(text_file(b"1\n\n0 9:3:1\n")) == [(1, []), (0, [(3, 1.0)])]

    def test_each_file_has_its_own_format(self, text_file) -> None:
        paths = [text_file(b"1 3:1\n", "a"), text_file(b"0 9:4:1\n", "b")]
        assert [as_rows(block) for block in TextRows(paths)] == [
            [(1, [(3, 1.0)])],
            [(0, [(4, 1.0)])],
        ]

    def test_given_format_wins_over_detection(self, text_file) -> None:
        with pytest.raises(ValueError, match=r"expected field:id:value \(libffm\)"):
            read(text_file(b"1 3:1\n"), file_format="libffm")

    @given(rows_strategy)
    def test_written_rows_parse_back_equal(self, tmp_path_factory, rows: list[Row]) -> None:
        path = tmp_path_factory.mktemp("rows") / "rows.libfm"
        batch = make_batch(rows)
        write_libsvm(path, batch)
        assert as_rows(parse_lines(path.read_bytes().splitlines(), "libsvm")) == as_rows(batch)


NUMBER = r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?"
INTEGER = r"[+-]?\d+"
LINE = {
    "libsvm": re.compile(rf"{NUMBER}( {INTEGER}:{NUMBER})*"),
    "libffm": re.compile(rf"{NUMBER}( {INTEGER}:{INTEGER}:{NUMBER})*"),
}


class TestBadLines:
    @given(
        st.lists(st.text("01.e-+:nx_", min_size=1, max_size=6), min_size=1, max_size=3),
        st.sampled_from(["libsvm", "libffm"]),
    )
    def test_a_line_parses_if_and_only_if_it_matches_the_grammar(
        self, parts: list[str], file_format: FileFormat
    ) -> None:
        line = " ".join(parts).encode()
        assume(not re.search(rb"e\+?\d{3}", line))  # in the grammar, but not finite
        try:
            parse_lines([line], file_format)
        except ValueError:
            assert not LINE[file_format].fullmatch(line.decode())
            assert "expected" in explain_bad_line(line, file_format)
        else:
            assert LINE[file_format].fullmatch(line.decode())

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (b"x 3:1", "expected a finite number as label, got 'x'"),
            (b"nan 3:1", "expected a finite number as label, got 'nan'"),
            (b"inf 3:1", "expected a finite number as label, got 'inf'"),
            (b"3:1 4:1", "expected a finite number as label, got '3:1'"),
            (b"1_0 3:1", "expected a finite number as label, got '1_0'"),
            (b"1 3:1 4", "got '4'"),
            (b"1 3:1 4:", "got '4:'"),
            (b"1 3:1 :1", "got ':1'"),
            (b"1 3:nan", "got '3:nan'"),
            (b"1 3:inf", "got '3:inf'"),
            (b"1 3:1e39", "got '3:1e39'"),
            (b"1 3.5:1", "got '3.5:1'"),
            (b"1 a:1", "got 'a:1'"),
            (b"1 18446744073709551616:1", "got '18446744073709551616:1'"),
            (b"1 1:2:3 4", "got '1:2:3'"),
            (b"1 \xff\xfe:1", r"got '\\xff\\xfe:1'"),
            (b"1 " + b"z" * 500, "got '" + "z" * 40 + "...'"),
        ],
    )
    def test_message_names_file_line_and_part(self, text_file, line: bytes, message: str) -> None:
        path = text_file(b"1 3:1\n\n" + line + b"\n")
        with pytest.raises(ValueError, match=re.escape(f"{path}:3: expected ")) as caught:
            read(path, file_format="libsvm")
        assert message in str(caught.value)

    def test_line_number_counts_through_blocks(self, text_file) -> None:
        path = text_file(b"1 3:1\n" * 10_000 + b"1 3:x\n")
        with pytest.raises(ValueError, match=re.escape(f"{path}:10001: expected id:value")):
            read(path)

    def test_skipped_lines_are_counted_and_the_others_kept(self, text_file) -> None:
        path = text_file(b"1 3:1\nbad\n0 4:1\n1 5\n\n1 6:1\n")
        rows = TextRows([path], on_bad_line="skip")
        kept = [row for block in rows for row in as_rows(block)]
        assert kept == [(1, [(3, 1.0)]), (0, [(4, 1.0)]), (1, [(6, 1.0)])]
        assert rows.skipped_lines == 2
        assert rows.first_skipped is not None
        assert rows.first_skipped.startswith(f"{path}:2: expected a finite number as label")

    def test_second_pass_counts_anew(self, text_file) -> None:
        rows = TextRows([text_file(b"1 3:1\nbad\n")], on_bad_line="skip")
        assert [len(list(rows)), len(list(rows))] == [1, 1]
        assert rows.skipped_lines == 1

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "rows.txt is empty"),
            (b"\n \n", "rows.txt has no row: all of its 2 lines are blank or bad"),
            (b"x\ny\n", "rows.txt has no row: all of its 2 lines are blank or bad"),
            (gzip.compress(b""), "rows.txt is empty"),
        ],
    )
    def test_file_without_rows_is_an_error(self, text_file, content: bytes, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            read(text_file(content), on_bad_line="skip")

    def test_truncated_gzip_is_an_error(self, text_file) -> None:
        content = gzip.compress(b"".join(b"1 %d:1\n" % n for n in range(9000)))
        with pytest.raises(ValueError, match="the gzip stream is damaged"):
            read(text_file(content[: len(content) // 2]))


class TestStreaming:
    def test_rows_come_before_the_end_of_the_file_is_read(self, text_file) -> None:
        path = text_file(b"1 3:1\n" * 20_000 + b"bad\n")
        blocks = iter(TextRows([path]))
        assert len(next(blocks)) < 20_000

    def test_row_count_is_estimated_on_the_way_and_exact_at_the_end(self, text_file) -> None:
        rows = TextRows([text_file(b"1 3:1\n" * 20_000)])
        assert rows.estimated_rows is None
        blocks = iter(rows)
        next(blocks)
        assert rows.estimated_rows == pytest.approx(20_000, rel=0.5)
        assert sum(map(len, blocks)) < 20_000
        assert rows.estimated_rows == 20_000


class TestRegrouping:
    @given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 12))
    def test_every_row_stays_in_order_and_only_the_last_batch_is_small(
        self, block_sizes: list[int], num_rows: int
    ) -> None:
        stream = numbered_rows(sum(block_sizes))
        ends = list(itertools.accumulate(block_sizes, initial=0))
        blocks = [stream.rows(start, stop) for start, stop in itertools.pairwise(ends)]
        batches = list(regroup(blocks, num_rows))
        assert [row for batch in batches for row in as_rows(batch)] == as_rows(stream)
        assert all(len(batch) == num_rows for batch in batches[:-1])
        assert all(1 <= len(batch) <= num_rows for batch in batches[-1:])

    @given(st.lists(st.integers(0, 19), max_size=30))
    def test_take_gives_the_rows_asked_for(self, order: list[int]) -> None:
        rows = numbered_rows(20)
        taken = rows.take(torch.tensor(order, dtype=torch.int64))
        assert as_rows(taken) == [as_rows(rows)[n] for n in order]

    def test_concatenate_joins_in_order(self) -> None:
        rows = numbered_rows(10)
        joined = concatenate([rows.rows(0, 3), rows.rows(3, 3), rows.rows(3, 10)])
        assert as_rows(joined) == as_rows(rows)

    def test_sum_by_row_gives_zero_for_an_empty_row(self) -> None:
        features = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        sums = sum_by_row(features, torch.tensor([0, 2, 2, 3]))
        assert sums.tolist() == [[4.0, 6.0], [0.0, 0.0], [5.0, 6.0]]

    def test_sum_by_row_differentiates(self) -> None:
        features = torch.arange(8, dtype=torch.float64).reshape(4, 2).requires_grad_()
        offsets = torch.tensor([0, 0, 3, 3, 4])
        assert torch.autograd.gradcheck(lambda x: sum_by_row(x, offsets), features)

    def test_sum_by_row_without_features(self) -> None:
        assert sum_by_row(torch.empty(0, 2), torch.tensor([0, 0])).tolist() == [[0.0, 0.0]]


class TestShuffling:
    def shuffle(self, seed: int, window_rows: int = 1000) -> list[Row]:
        rng = np.random.default_rng(seed)
        blocks = shuffled([numbered_rows(100)], window_rows, rng)
        return [row for block in blocks for row in as_rows(block)]

    def test_a_permutation_that_the_seed_decides(self) -> None:
        assert self.shuffle(1) == self.shuffle(1)
        assert self.shuffle(1) != self.shuffle(2)
        assert sorted(self.shuffle(1)) == sorted(as_rows(numbered_rows(100)))

    def test_rows_stay_within_their_window(self) -> None:
        rows = self.shuffle(1, window_rows=40)
        original = as_rows(numbered_rows(100))
        for start in (0, 40, 80):
            assert sorted(rows[start : start + 40]) == sorted(original[start : start + 40])


class CountingRows:
    """A source of two blocks that counts its passes."""

    passes = 0
    estimated_rows = 8

    def __iter__(self) -> Iterator[Batch]:
        self.passes += 1
        yield numbered_rows(4)
        yield numbered_rows(4)


class TestCaching:
    def two_passes(self, max_bytes: int) -> tuple[int, list[list[Row]]]:
        source = CountingRows()
        cached = CachedRows(source, max_bytes)
        passes = [[row for block in cached for row in as_rows(block)] for _ in range(2)]
        return source.passes, passes

    def test_rows_that_fit_are_read_once(self) -> None:
        passes, (first, second) = self.two_passes(2 * numbered_rows(4).nbytes)
        assert passes == 1
        assert first == second == 2 * as_rows(numbered_rows(4))

    def test_rows_that_do_not_fit_are_read_again(self) -> None:
        passes, (first, second) = self.two_passes(2 * numbered_rows(4).nbytes - 1)
        assert passes == 2
        assert first == second == 2 * as_rows(numbered_rows(4))

    def test_an_abandoned_pass_is_not_taken_for_the_whole(self) -> None:
        cached = CachedRows(CountingRows(), 2**20)
        next(iter(cached))
        assert sum(map(len, cached)) == 8


class CutRows(MemoryRows):
    """The rows of one batch, in blocks of a given size."""

    def __init__(self, batch: Batch, size: int) -> None:
        super().__init__(batch)
        self._size = size

    def __iter__(self) -> Iterator[Batch]:
        return regroup(super().__iter__(), self._size)


class TestHoldingOut:
    def parts(self, blocks: int, seed: int = 0) -> tuple[list[Row], list[Row]]:
        rows = numbered_rows(1000)
        size = 1000 // blocks
        source = CutRows(rows, size)
        training, validation = (
            [row for block in HeldOutRows(source, 0.2, seed=seed, part=part) for row in as_rows(block)]
            for part in ("training", "validation")
        )
        return training, validation

    def test_parts_are_disjoint_and_complete(self) -> None:
        training, validation = self.parts(blocks=1)
        assert sorted(training + validation) == sorted(as_rows(numbered_rows(1000)))
        assert 140 < len(validation) < 260

    def test_parts_do_not_depend_on_how_rows_are_cut(self) -> None:
        assert self.parts(blocks=1) == self.parts(blocks=10)

    def test_the_seed_decides(self) -> None:
        assert self.parts(blocks=1, seed=1) != self.parts(blocks=1, seed=2)


class TestInputFiles:
    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        for name in ("small_train-01", "small_train-00", "Test.libfm", "pretrained", "README"):
            (tmp_path / name).write_text("1 3:1\n")
        return tmp_path

    def test_directory_is_split_by_the_words_in_names(self, directory: Path) -> None:
        train, test = find_input_files([directory], [])
        assert [path.name for path in train] == ["small_train-00", "small_train-01"]
        assert [path.name for path in test] == ["Test.libfm"]

    def test_given_test_files_win(self, directory: Path) -> None:
        _, test = find_input_files([directory], [directory / "README"])
        assert test == (directory / "README",)

    def test_files_keep_their_order(self, directory: Path) -> None:
        files = [directory / "small_train-01", directory / "small_train-00"]
        assert find_input_files(files, []) == (tuple(files), ())

    def test_missing_path_is_an_error(self, directory: Path) -> None:
        with pytest.raises(ValueError, match=r"no such file or directory: .*absent"):
            find_input_files([directory / "absent"], [])

    def test_directory_without_training_file_is_an_error(self, directory: Path) -> None:
        (directory / "empty").mkdir()
        with pytest.raises(ValueError, match="has no file with the word 'train'"):
            find_input_files([directory / "empty"], [])

    def test_directory_among_others_is_an_error(self, directory: Path) -> None:
        with pytest.raises(ValueError, match="is a directory; give one directory alone"):
            find_input_files([directory, directory / "README"], [])

    def test_training_on_test_rows_is_an_error(self, directory: Path) -> None:
        with pytest.raises(ValueError, match="is both a training and a test file"):
            find_input_files([directory], [directory / "small_train-00"])
