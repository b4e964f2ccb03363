"""Cutting, shuffling, caching, splitting, mapping and sharding rows, and finding files."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from recstore_ops.training.data import named_columns, text_rows
from recstore_ops.training.data.batch import Batch, concatenate, regroup, shuffled
from recstore_ops.training.data.input_files import find_input_files
from recstore_ops.training.data.opening import open_rows
from recstore_ops.training.data.row_source import (
    CachedRows,
    DerivedRows,
    HashedRows,
    HeldOutRows,
    MappedRows,
    MemoryRows,
    RowSource,
    hash_ids,
)
from recstore_ops.training.data.sparse_lines import LibsvmFormat, write_libsvm
from recstore_ops.training.data.text_rows import TextRows

pytestmark = pytest.mark.tier("quick")

Row = tuple[int, list[tuple[int, float]]]


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
    offsets = batch.offsets_or_ones().tolist()
    pairs = list(zip(batch.ids.tolist(), batch.values_or_ones().tolist(), strict=True))
    return [(int(label), pairs[offsets[n] : offsets[n + 1]]) for n, label in enumerate(batch.labels.tolist())]


def all_rows(source: RowSource) -> list[Row]:
    return [row for block in source for row in as_rows(block)]


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


class TestShuffling:
    def shuffle(self, seed: int, window_rows: int = 1000, num_rows: int = 7) -> list[Row]:
        rng = np.random.default_rng(seed)
        blocks = list(shuffled([numbered_rows(100)], window_rows, num_rows, rng))
        assert all(0 < len(block) <= num_rows for block in blocks)
        return [row for block in blocks for row in as_rows(block)]

    def test_pieces_of_any_size_give_the_same_rows(self) -> None:
        assert self.shuffle(1, window_rows=40, num_rows=1000) == self.shuffle(1, window_rows=40)

    def test_a_permutation_that_the_seed_decides(self) -> None:
        assert self.shuffle(1) == self.shuffle(1)
        assert self.shuffle(1) != self.shuffle(2)
        assert sorted(self.shuffle(1)) == sorted(as_rows(numbered_rows(100)))

    def test_rows_stay_within_their_window(self) -> None:
        rows = self.shuffle(1, window_rows=40)
        original = as_rows(numbered_rows(100))
        for start in (0, 40, 80):
            assert sorted(rows[start : start + 40]) == sorted(original[start : start + 40])


class CountingRows(DerivedRows):
    """A source of two blocks that counts its passes and estimates its rows as told."""

    def __init__(self, estimated_rows: int | None = 8) -> None:
        super().__init__(MemoryRows(numbered_rows(4)))
        self.passes = 0
        self._estimated_rows = estimated_rows

    def __iter__(self) -> Iterator[Batch]:
        self.passes += 1
        yield numbered_rows(4)
        yield numbered_rows(4)

    @property
    def estimated_rows(self) -> int | None:
        return self._estimated_rows

    def shard(self, index: int, count: int) -> RowSource:
        raise NotImplementedError


class TestCaching:
    @pytest.mark.parametrize(
        ("max_bytes", "estimated_rows", "passes"),
        [
            (2 * numbered_rows(4).nbytes, 8, 1),
            (2 * numbered_rows(4).nbytes, None, 1),
            (2 * numbered_rows(4).nbytes - 1, 8, 2),
            (2 * numbered_rows(4).nbytes - 1, None, 2),
            (2 * numbered_rows(4).nbytes - 1, 4, 2),
            (2 * numbered_rows(4).nbytes, 9, 2),
        ],
    )
    def test_rows_are_read_once_if_they_fit(self, max_bytes: int, estimated_rows: int | None, passes: int) -> None:
        source = CountingRows(estimated_rows)
        cached = CachedRows(source, max_bytes)
        assert all_rows(cached) == all_rows(cached) == 2 * as_rows(numbered_rows(4))
        assert source.passes == passes

    def test_nothing_is_kept_of_rows_that_will_not_fit(self) -> None:
        cached = CachedRows(CountingRows(9), 2 * numbered_rows(4).nbytes)
        blocks = [weakref.ref(block) for block in cached]
        gc.collect()
        assert [block() for block in blocks] == [None, None]

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


class TestMapping:
    def test_ids_are_mapped_and_nothing_else(self) -> None:
        rows = MappedRows(MemoryRows(numbered_rows(10)), lambda ids: ids + 1)
        expected = [(label, [(id + 1, value) for id, value in row]) for label, row in as_rows(numbered_rows(10))]
        assert all_rows(rows) == expected

    def test_hashes_are_those_of_the_paper(self) -> None:
        # The first outputs of the reference implementation from the states 0, 1234567 and -1.
        hashes = {0: 0xE220A8397B1DCDAF, 1234567: 6457827717110365317, -1: 0xE4D971771B652C20}
        for buckets in (1, 7, 1000, 2**40):
            ids = hash_ids(torch.tensor(list(hashes)), buckets)
            assert ids.tolist() == [hash % buckets for hash in hashes.values()]

    @pytest.mark.parametrize("buckets", [0, -1])
    def test_no_bucket_is_an_error(self, buckets: int) -> None:
        with pytest.raises(ValueError, match=f"expected at least 1 bucket, got {buckets}"):
            HashedRows(MemoryRows(numbered_rows(1)), buckets)


def text_source(path: Path, batch: Batch) -> RowSource:
    write_libsvm(path / "a", batch.rows(0, len(batch) // 2))
    write_libsvm(path / "b", batch.rows(len(batch) // 2, len(batch)))
    return TextRows([path / "a", path / "b"], LibsvmFormat())


def parquet_source(path: Path, batch: Batch, row_group_size: int) -> RowSource:
    lists = [[id for id, _ in row] for _, row in as_rows(batch)]
    table = pa.table({"label": batch.labels.numpy(), "list": pa.array(lists, pa.list_(pa.int64()))})
    pq.write_table(table, path / "rows", row_group_size=row_group_size)
    return open_rows([path / "rows"])


SOURCES: dict[str, Callable[[Path, Batch], RowSource]] = {
    "memory": lambda path, batch: MemoryRows(batch),
    "text": text_source,
    "parquet by row groups": lambda path, batch: parquet_source(path, batch, 3),
    "parquet by blocks": lambda path, batch: parquet_source(path, batch, 1000),
    "cached": lambda path, batch: CachedRows(text_source(path, batch), 2**20),
    "hashed": lambda path, batch: HashedRows(text_source(path, batch), 1000),
    "training": lambda path, batch: HeldOutRows(text_source(path, batch), 0.3, seed=1, part="training"),
    "validation": lambda path, batch: HeldOutRows(text_source(path, batch), 0.3, seed=1, part="validation"),
}


class TestSharding:
    @pytest.fixture(autouse=True)
    def small_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(text_rows, "BLOCK_BYTES", 40)
        monkeypatch.setattr(named_columns, "ROWS_PER_BLOCK", 7)

    @pytest.mark.parametrize("name", SOURCES)
    @given(num_rows=st.integers(2, 80), count=st.integers(1, 5), again=st.integers(1, 3))
    @settings(max_examples=examples(20), deadline=None)
    def test_shards_are_disjoint_and_complete(
        self, tmp_path_factory: pytest.TempPathFactory, name: str, num_rows: int, count: int, again: int
    ) -> None:
        source = SOURCES[name](tmp_path_factory.mktemp("rows"), numbered_rows(num_rows))
        shards = [source.shard(index, count) for index in range(count)]
        whole = sorted(all_rows(source))
        assert sorted(row for shard in shards for row in all_rows(shard)) == whole
        parts = [shard.shard(index, again) for shard in shards for index in range(again)]
        assert sorted(row for part in parts for row in all_rows(part)) == whole
        assert {part.field_names for part in parts} == {source.field_names}

    @pytest.mark.parametrize("name", SOURCES)
    def test_shards_are_of_similar_size(self, tmp_path: Path, name: str) -> None:
        source = SOURCES[name](tmp_path, numbered_rows(400))
        sizes = [len(all_rows(source.shard(index, 4))) for index in range(4)]
        assert max(sizes) < 2 * min(sizes)

    @pytest.mark.parametrize("name", SOURCES)
    @pytest.mark.parametrize(("index", "count"), [(2, 2), (-1, 2), (0, 0)])
    def test_a_shard_beyond_the_last(self, tmp_path: Path, name: str, index: int, count: int) -> None:
        source = SOURCES[name](tmp_path, numbered_rows(10))
        with pytest.raises(ValueError, match=f"expected a shard from 0 to before {count}, got {index}"):
            source.shard(index, count)

    def test_line_numbers_stay_right(self, tmp_path: Path) -> None:
        path = tmp_path / "rows"
        path.write_bytes(b"".join(b"1 %d:1\n" % n if n % 10 else b"bad\n" for n in range(1, 100)))
        rows = TextRows([path], LibsvmFormat(), on_bad_line="skip")
        shards = [rows.shard(index, 3) for index in range(3)]
        assert sum(len(all_rows(shard)) for shard in shards) == 90
        assert sum(shard.skipped_lines for shard in shards) == 9
        first = [shard.first_skipped for shard in shards if shard.first_skipped]
        lines = [int(message.removeprefix(f"{path}:").split(":")[0]) for message in first]
        assert all(line % 10 == 0 for line in lines)

    def test_blocks_of_others_are_not_parsed(self, tmp_path: Path) -> None:
        source = text_source(tmp_path, numbered_rows(400))
        blocks = [len(list(source.shard(index, 4))) for index in range(4)]
        assert sum(blocks) == len(list(source))
        (tmp_path / "a").write_bytes(b"1 3:1\n" * 7 + b"bad\n")
        with pytest.raises(ValueError, match="a:8: expected"):
            all_rows(source.shard(1, 2))
        assert len(all_rows(source.shard(0, 2))) > 100

    def test_skipped_rows_of_a_split_are_told_once(self, tmp_path: Path) -> None:
        (tmp_path / "rows").write_bytes(b"1 3:1\n" * 100 + b"bad\n")
        rows = TextRows([tmp_path / "rows"], LibsvmFormat(), on_bad_line="skip")
        parts = [HeldOutRows(rows, 0.5, seed=0, part="training").shard(index, 2) for index in range(2)]
        for part in parts:
            all_rows(part)
        assert [part.skipped_lines for part in parts] == [1, 0]


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

    def test_what_programs_leave_is_passed_over(self, directory: Path) -> None:
        before = find_input_files([directory], [])
        for name in ("train.txt~", ".train.txt.swp", "_train", "#train#", "test.txt.bak", "train.tmp", "test.orig"):
            (directory / name).write_text("1 3:1\n")
        assert find_input_files([directory], []) == before

    def test_directories_of_parts(self, directory: Path) -> None:
        for name in ("train/day=1/part-1", "train/day=2/part-0", "test/part-0", "train/_SUCCESS", "train/.crc/part-9"):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text("1 3:1\n")
        train, test = find_input_files([directory], [])
        parts = ["train/day=1/part-1", "train/day=2/part-0"]
        assert train == tuple(directory / name for name in ("small_train-00", "small_train-01", *parts))
        assert test == (directory / "Test.libfm", directory / "test" / "part-0")
        assert find_input_files([directory / "train"], [directory / "test"]) == (
            tuple(directory / name for name in parts),
            (directory / "test" / "part-0",),
        )
        (directory / "empty").mkdir()
        with pytest.raises(ValueError, match="empty has no files"):
            find_input_files([directory], [directory / "empty"])

    def test_files_keep_their_order(self, directory: Path) -> None:
        files = [directory / "small_train-01", directory / "small_train-00"]
        assert find_input_files(files, []) == (tuple(files), ())

    def test_missing_path_is_an_error(self, directory: Path) -> None:
        with pytest.raises(ValueError, match=r"no such file or directory: .*absent"):
            find_input_files([directory / "absent"], [])

    def test_directory_without_training_file_is_an_error(self, directory: Path) -> None:
        (directory / "empty").mkdir()
        with pytest.raises(ValueError, match="has no file or directory with the word 'train'"):
            find_input_files([directory / "empty"], [])

    def test_directory_among_others_is_an_error(self, directory: Path) -> None:
        with pytest.raises(ValueError, match="is a directory; give one directory alone"):
            find_input_files([directory, directory / "README"], [])

    def test_training_on_test_rows_is_an_error(self, directory: Path) -> None:
        with pytest.raises(ValueError, match="is both a training and a test file"):
            find_input_files([directory], [directory / "small_train-00"])

    @pytest.mark.parametrize("ending", ["parquet", "tsv.gz", "csv.zst", "libfm"])
    def test_names_of_every_format(self, tmp_path: Path, ending: str) -> None:
        for name in ("train-00000-of-00002", "train-00001-of-00002", "test"):
            (tmp_path / f"{name}.{ending}").write_bytes(b"")
        train, test = find_input_files([tmp_path], [])
        assert [path.name for path in train] == [f"train-0000{n}-of-00002.{ending}" for n in range(2)]
        assert [path.name for path in test] == [f"test.{ending}"]
