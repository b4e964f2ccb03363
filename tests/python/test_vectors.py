"""The vectors that a finished run has learnt: written to files, and searched for neighbours."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from numpy.typing import NDArray
from saved_runs import rows_of, run_train
from training_runs import drop_tables, with_own_tables

from recstore_ops import DistTensor
from recstore_ops.ops import operators
from recstore_ops.training import LoadedRun, load, planted_interactions
from recstore_ops.training.data.sparse_lines import write_libsvm
from recstore_ops.training.run import vectors
from recstore_ops.training.run.vectors import Vectors, nearest, values_of_ids

pytestmark = [
    pytest.mark.tier("test"),
    pytest.mark.embedded_only("a run is loaded by a process that keeps its tables itself"),
]

Recstore = Callable[..., int]
Rows = dict[int, NDArray[np.float32]]
ITEM = 1
DIM = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `fm` on columns of users and items, `sparse` on libsvm, `hashed` on hashed ids."""
    folder = tmp_path_factory.mktemp("vectors")
    draw = np.random.default_rng(0)
    columns = {"click": draw.integers(0, 2, 600), "user": draw.integers(0, 40, 600), "item": draw.integers(-9, 50, 600)}
    parquet.write_table(pa.table(columns), folder / "clicks.parquet")
    write_libsvm(folder / "clicks.libfm", planted_interactions(0, 300, 10).train)
    options = ("--dim", DIM, "--epochs", 1, "--lr", 0.1)
    for name, further in (
        ("fm", ("clicks.parquet",)),
        ("sparse", ("clicks.libfm",)),
        ("hashed", ("clicks.parquet", "--hash-buckets", 30)),
        ("crossed", ("clicks.parquet", "--model", "wide_deep", "--cross", "0,1")),
        ("planted", ("--planted", "pairs", "--planted-rows", 500)),
    ):
        assert run_train(folder, (*further, *options, "--run-name", name)) == (0, "")
    return folder


@pytest.fixture(scope="module")
def rows(folder: Path) -> Rows:
    """The rows of the table v of `fm`, as the file of its checkpoint holds them."""
    files = rows_of(folder / "runs" / "fm" / "best")
    tensors = next(tensors for file, tensors in files.items() if "fm_v" in file)
    ids = np.frombuffer(tensors["ids"], np.int64).tolist()
    return dict(zip(ids, np.frombuffer(tensors["rows"], np.float32).reshape(-1, DIM), strict=True))


@pytest.fixture
def loaded(folder: Path) -> Iterator[LoadedRun]:
    yield load(folder / "runs" / "fm")
    drop_tables("fm")


def of_items(rows: Rows) -> Rows:
    return {id: row for id, row in rows.items() if id >> 40 == ITEM}


def assert_rows(ids: Any, found: Any, expected: Rows) -> None:
    assert ids.tolist() == sorted(expected)
    assert np.array_equal(found, np.stack([expected[id] for id in sorted(expected)]))


def test_vectors_are_those_of_the_checkpoint(loaded: LoadedRun, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "_BYTES_PER_CHUNK", 4 * DIM * 7)
    for field, expected in ((None, rows), ("item", of_items(rows))):
        parts = list(Vectors(loaded, "v", field).parts())
        assert all(len(ids) <= 7 for ids, _ in parts)
        ids, found = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        assert_rows(ids, found, expected)


def test_values_of_a_field_and_its_ids(loaded: LoadedRun, rows: Rows) -> None:
    items = Vectors(loaded, "v", "item")
    values = values_of_ids(items.ids)
    assert sorted(values.tolist()) == list(range(-9, 50))
    assert [items.id_of(value) for value in values.tolist()] == items.ids.tolist()
    assert Vectors(loaded, "v").id_of(-3) == -3


def by_hand(rows: Rows, id: int, metric: str) -> list[tuple[int, float]]:
    """All other ids with their scores, the nearest first."""
    query = [float(value) for value in rows[id]]

    def score(row: NDArray[np.float32]) -> float:
        other = [float(value) for value in row]
        product = sum(one * two for one, two in zip(query, other, strict=True))
        lengths = (sum(value**2 for value in query) * sum(value**2 for value in other)) ** 0.5
        return product if metric == "dot" else product / lengths

    found = [(other, score(row)) for other, row in rows.items() if other != id]
    return sorted(found, key=lambda each: (-each[1], each[0]))


@pytest.mark.parametrize("index", ["exact", "faiss", "hnswlib"])
@pytest.mark.parametrize("metric", ["dot", "cosine"])
@pytest.mark.parametrize("field", [None, "item"])
def test_neighbours_are_those_found_by_hand(
    loaded: LoadedRun, rows: Rows, field: str | None, metric: Any, index: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if index != "exact":
        pytest.importorskip(index)
    monkeypatch.setattr(vectors, "_BYTES_PER_CHUNK", 4 * DIM * 7)
    among = rows if field is None else of_items(rows)
    for id in (ITEM << 40 | 3, ITEM << 40 | 44):
        ids, scores = nearest(Vectors(loaded, "v", field), id, 10, metric, index)
        expected = by_hand(among, id, metric)[:10]
        assert ids.tolist() == [id for id, _ in expected]
        np.testing.assert_allclose(scores, [score for _, score in expected], rtol=1e-5)


def test_all_others_are_found_where_more_are_asked_for(loaded: LoadedRun, rows: Rows) -> None:
    ids, _ = nearest(Vectors(loaded, "v"), ITEM << 40, 1000, "dot")
    assert sorted(ids.tolist()) == sorted(rows.keys() - {ITEM << 40})


def test_zeros_have_no_cosine(loaded: LoadedRun) -> None:
    items, table = Vectors(loaded, "v", "item"), loaded.table("v")
    zero, other = items.id_of(3), items.id_of(4)
    DistTensor.over(table, (None, DIM), "test")[[zero]] = torch.zeros(1, DIM)
    with pytest.raises(ValueError, match=f"the row of id {zero} is zero, which has no cosine with others; take the"):
        nearest(items, zero, 3)
    assert not nearest(items, zero, 3, "dot")[1].any()
    ids, scores = nearest(items, other, 1000)
    assert scores[ids.tolist().index(zero)] == 0


@pytest.mark.parametrize(
    ("run", "table", "field", "message"),
    [
        ("fm", "u", None, "the model fm has no table u; it has v, w"),
        ("fm", "v", "shop", "the run has no field 'shop'; it has user, item"),
        ("sparse", "v", "features", "ids of libsvm rows do not carry their field, so that 'features' cannot be told"),
        ("planted", "v", "field_0", "ids of planted rows do not carry their field"),
        ("hashed", "v", "item", "ids of the run are hashed to 30 buckets, which have no field"),
        ("crossed", "crosses", "item", "ids of table crosses do not carry their field"),
    ],
)
def test_what_cannot_be_chosen_is_an_error(
    folder: Path, table_name: Callable[[], str], run: str, table: str, field: str | None, message: str
) -> None:
    name = table_name()
    loaded = load(folder / "runs" / run, name=name)
    with pytest.raises(ValueError, match=message):
        Vectors(loaded, table, field)
    drop_tables(name)


def test_a_table_or_field_without_rows_is_an_error(loaded: LoadedRun) -> None:
    table = loaded.table("v")
    ids = operators.hashtable_ids(table.handle)
    operators.hashtable_delete(table.handle, ids[ids >> 40 == ITEM])
    with pytest.raises(ValueError, match="table v has no row of field item"):
        Vectors(loaded, "v", "item")
    operators.hashtable_clear(table.handle)
    with pytest.raises(ValueError, match=r"table v has no row$"):
        Vectors(loaded, "v")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10**15, 3), f"table v has no row of id {10**15}"),
        ((ITEM << 40, 0), "expected at least 1 neighbour, got 0"),
        ((ITEM << 40, 3, "l2"), "expected metric to be one of dot, cosine, got 'l2'"),
        ((ITEM << 40, 3, "dot", "tree"), "expected index to be one of exact, faiss, hnswlib, got 'tree'"),
    ],
)
def test_a_bad_question_is_an_error(loaded: LoadedRun, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nearest(Vectors(loaded, "v"), *arguments)


def missing(name: str) -> None:
    raise ImportError(name)


@pytest.mark.parametrize(("index", "package"), [("faiss", "faiss-cpu"), ("hnswlib", "hnswlib")])
def test_an_index_that_is_not_installed_says_what_is(
    loaded: LoadedRun, index: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recstore_ops.training.run.vectors.import_module", missing)
    with pytest.raises(ImportError, match=f"index {index} needs a package .* run `pip install {package}`"):
        nearest(Vectors(loaded, "v"), ITEM << 40, 3, "dot", index)


class TestCommands:
    @pytest.fixture(autouse=True)
    def _in_folder(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder)

    @pytest.fixture
    def recstore(self, recstore: Recstore) -> Recstore:
        """Each run of the real program has a store of its own."""
        return with_own_tables(recstore, "fm")

    @pytest.mark.parametrize("field", [(), ("--field", "item")])
    def test_parquet_has_ids_and_vectors(
        self, recstore: Recstore, rows: Rows, tmp_path: Path, field: tuple[str, ...]
    ) -> None:
        output = tmp_path / "v.parquet"
        assert recstore("export-vectors", "runs/fm", "--table", "v", *field, "--output", output) == 0
        found = parquet.read_table(output)
        vectors = np.stack(found["vector"].to_numpy())
        assert_rows(found["id"].to_numpy(), vectors, of_items(rows) if field else rows)
        assert str(found.schema.field("vector").type) == "fixed_size_list<element: float>[4]"

    def test_numpy_has_ids_beside(
        self, recstore: Recstore, rows: Rows, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        output = tmp_path / "v.npy"
        assert recstore("export-vectors", "runs/fm", "--table", "v", "--output", output) == 0
        assert_rows(np.load(tmp_path / "v.ids.npy"), np.load(output), rows)
        assert np.load(output).dtype == np.float32
        expected = f"{tmp_path / 'v.ids.npy'} and {output}: {len(rows)} vectors of dim 4\n"
        assert capsys.readouterr().out == expected
        assert sorted(os.listdir(tmp_path)) == ["v.ids.npy", "v.npy"]

    def test_files_are_replaced_only_where_it_is_asked_for(
        self, recstore: Recstore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "v.ids.npy").write_text("kept")
        options = ("export-vectors", "runs/fm", "--table", "v", "--output", tmp_path / "v.npy")
        assert recstore(*options) == 2
        assert f"{tmp_path / 'v.ids.npy'} exists already; --replace replaces it" in capsys.readouterr().err
        assert (tmp_path / "v.ids.npy").read_text() == "kept"
        assert recstore(*options, "--replace") == 0
        assert len(np.load(tmp_path / "v.ids.npy")) > 0

    def test_another_ending_is_an_error(self, recstore: Recstore, capsys: pytest.CaptureFixture[str]) -> None:
        assert recstore("export-vectors", "runs/fm", "--table", "v", "--output", "v.txt") == 2
        assert "expected an output that ends in .parquet or .npy, got v.txt" in capsys.readouterr().err

    def test_neighbours_of_a_value_are_printed_with_their_values(
        self, recstore: Recstore, rows: Rows, capsys: pytest.CaptureFixture[str]
    ) -> None:
        options = ("neighbours", "runs/fm", "--table", "v", "--field", "item", "--id", "0x2c", "-k", "5")
        assert recstore(*options, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        expected = by_hand(of_items(rows), ITEM << 40 | 44, "cosine")[:5]
        assert [each["id"] for each in found] == [id for id, _ in expected]
        assert all(each["value"] in (each["id"] & 2**40 - 1, (each["id"] & 2**40 - 1) - 2**40) for each in found)
        assert [each["cosine"] for each in found] == pytest.approx([score for _, score in expected])
        assert recstore(*options) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert lines[0] == ["id", "item", "cosine"]
        assert [line[:2] for line in lines[1:]] == [[str(each["id"]), str(each["value"])] for each in found]

    def test_neighbours_by_dot_product_of_an_id(
        self, recstore: Recstore, rows: Rows, capsys: pytest.CaptureFixture[str]
    ) -> None:
        options = ("--table", "v", "--id", ITEM << 40, "--metric", "dot")
        assert recstore("neighbours", "runs/fm", *map(str, options)) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert lines[0] == ["id", "dot"]
        assert [int(line[0]) for line in lines[1:]] == [id for id, _ in by_hand(rows, ITEM << 40, "dot")[:10]]

    @pytest.mark.parametrize(
        ("id", "message"),
        [
            ("many", "--id takes an integer, got 'many'"),
            (str(2**63), f"--id takes an int64, got {2**63}"),
            ("12345", "table v has no row of id 12345"),
        ],
    )
    def test_an_id_that_is_none_is_an_error(
        self, recstore: Recstore, capsys: pytest.CaptureFixture[str], id: str, message: str
    ) -> None:
        assert recstore("neighbours", "runs/fm", "--table", "v", "--id", id) == 2
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize("value", [12345, -(10**9)])
    def test_a_value_without_a_row_is_named_with_its_field(
        self, recstore: Recstore, capsys: pytest.CaptureFixture[str], value: int
    ) -> None:
        assert recstore("neighbours", "runs/fm", "--table", "v", "--field", "item", "--id", value) == 2
        assert f"table v has no row of item {value}, id {ITEM << 40 | value & 2**40 - 1}\n" in capsys.readouterr().err

    def test_an_index_that_is_not_installed_is_one_sentence(
        self, recstore: Recstore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("recstore_ops.training.run.vectors.import_module", missing)
        assert recstore("neighbours", "runs/fm", "--table", "v", "--id", "3", "--index", "faiss") == 2
        message = "recstore: the index faiss needs a package that is not installed: run `pip install faiss-cpu`\n"
        assert capsys.readouterr().err == message
