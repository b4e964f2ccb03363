"""`recstore_ops.transfer`: rows from `torch.nn`, TorchRec and safetensors, and out to safetensors and Parquet."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from checkpoints import drop_all_tables
from torch import Tensor, nn
from warm_programs import output_of

from recstore_ops import (
    DistEmbedding,
    DistTensor,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
    SparseOptimizer,
    Table,
    get_kv_client,
    table_names,
    table_statistics,
)
from recstore_ops.ops import operators
from recstore_ops.table import cut
from recstore_ops.transfer import (
    export_parquet,
    export_safetensors,
    export_torchrec,
    from_embedding,
    import_rows,
    import_safetensors,
    import_torchrec,
)
from recstore_ops.transfer.safetensors_file import TYPES, Column, SafetensorsFile, write_safetensors

pytestmark = [pytest.mark.tier("quick"), pytest.mark.usefixtures("tables_are_dropped")]

DIM = 3
IDS = torch.tensor([7, -(2**63), 2**62])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def name(table_name: Callable[[], str]) -> str:
    return table_name()


@pytest.fixture
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets two rows be moved at a time."""
    monkeypatch.setattr(cut, "_BYTES_PER_CHUNK", 2 * 4 * DIM)


def rows_of(name: str) -> dict[int, list[float]]:
    """All rows of a table, by id."""
    table = Table.open(name)
    ids = operators.hashtable_ids(table.handle)
    return dict(zip(ids.tolist(), get_kv_client().pull(name, ids).tolist(), strict=True))


# torch.nn


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_embedding_gives_the_same_outputs(dtype: torch.dtype, padding_idx: int | None, name: str) -> None:
    original = nn.Embedding(10, DIM, padding_idx=padding_idx, dtype=dtype)
    with torch.no_grad():
        original.weight[2] = 5.0  # A padding row of its own.
    ours = from_embedding(original, name)
    assert isinstance(ours, DistEmbedding)
    ids = torch.tensor([[0, 2], [9, 2]])
    assert ours(ids).dtype == dtype
    assert torch.equal(ours(ids), original(ids))
    assert (ours.num_embeddings, ours.padding_idx, ours.frozen) == (10, padding_idx, False)


def test_an_embedding_trains_as_the_original(name: str) -> None:
    original = nn.Embedding(10, DIM, padding_idx=1)
    ours = from_embedding(original, name, optimizer={"kind": "adagrad", "lr": 0.1, "convention": "torch"})
    theirs = torch.optim.Adagrad(original.parameters(), lr=0.1)
    ids = torch.tensor([0, 1, 0, 7])
    for module, optimizer in ((ours, SparseOptimizer(modules=[ours])), (original, theirs)):
        module(ids).square().sum().backward()
        optimizer.step()
    everything = torch.arange(10)
    assert torch.allclose(ours(everything), original(everything), atol=1e-6)


def test_a_weight_without_gradient_stays_without(name: str) -> None:
    ours = from_embedding(nn.Embedding.from_pretrained(torch.randn(4, DIM), freeze=True), name)
    assert isinstance(ours, DistEmbedding)
    assert ours.frozen
    assert not ours(torch.tensor([1])).requires_grad


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_embedding_bag_gives_the_same_outputs(dtype: torch.dtype, mode: str, name: str) -> None:
    original = nn.EmbeddingBag(10, DIM, mode=mode, padding_idx=3, include_last_offset=True, dtype=dtype)
    ours = from_embedding(original, name)
    ids, offsets = torch.tensor([1, 2, 3, 1, 3]), torch.tensor([0, 2, 4, 4, 5])
    assert ours(ids, offsets).dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    assert torch.allclose(ours(ids, offsets), original(ids, offsets), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("original", "error", "message"),
    [
        (nn.Linear(2, 2), TypeError, "takes nn.Embedding or nn.EmbeddingBag, got Linear"),
        (nn.Embedding(2, 2, dtype=torch.float64), TypeError, "a table is made of torch.float32, .*, got torch.float64"),
        (nn.Embedding(2, 2, max_norm=1.0), ValueError, "a lookup changes no table"),
        (nn.Embedding(1, 2, _weight=torch.tensor([[0.0, torch.nan]])), RuntimeError, "NaN|nan|finite"),
    ],
)
def test_what_a_table_cannot_be_is_refused(original: Any, error: type[Exception], message: str, name: str) -> None:
    with pytest.raises(error, match=message):
        from_embedding(original, name)
    assert name not in table_names()


def test_a_table_that_exists_is_refused(name: str) -> None:
    from_embedding(nn.Embedding(2, DIM), name)
    before = rows_of(name)
    with pytest.raises(ValueError, match=f'table "{name}" exists; from_embedding needs a new one'):
        from_embedding(nn.Embedding(2, DIM), name)
    assert rows_of(name) == before


# import_rows


@pytest.mark.usefixtures("few_at_a_time")
def test_rows_are_imported_in_parts_to_whatever_stands_for_a_table(table_name: Callable[[], str]) -> None:
    modules = [DistEmbedding(None, DIM, table_name()) for _ in range(3)]
    tensor = DistTensor((10, DIM), torch.float32, table_name())
    targets = [modules[0], modules[1].name, modules[2].table, tensor]
    ids, rows = torch.tensor([3, 1, 4, 1, 5]), torch.randn(5, DIM)
    for target in targets:
        import_rows(target, ids, rows.double())
    for table in [*modules, tensor]:
        kept = rows_of(table.name)
        assert kept == {3: rows[0].tolist(), 4: rows[2].tolist(), 1: rows[3].tolist(), 5: rows[4].tolist()}


def test_an_import_leaves_other_rows(name: str) -> None:
    module = DistEmbedding(None, DIM, name)
    import_rows(module, torch.tensor([1]), torch.ones(1, DIM))
    import_rows(module, torch.tensor([2]), torch.zeros(1, DIM))
    import_rows(module, torch.empty(0, dtype=torch.int64), torch.empty(0, DIM))
    assert rows_of(name) == {1: [1.0] * DIM, 2: [0.0] * DIM}


def test_unsigned_ids_are_taken_as_int64_bits(name: str) -> None:
    import_rows(DistEmbedding(None, DIM, name), torch.tensor([2**64 - 1], dtype=torch.uint64), torch.ones(1, DIM))
    assert list(rows_of(name)) == [-1]


GOOD = torch.tensor([0, 1, 2])
ROWS = torch.zeros(3, DIM)
LAST_NOT_FINITE = torch.tensor([[0.0] * DIM, [0.0] * DIM, [0.0, torch.nan, 0.0]])


@pytest.mark.usefixtures("few_at_a_time")
@pytest.mark.parametrize(
    ("ids", "rows", "error", "message"),
    [
        (GOOD.double(), ROWS, TypeError, "ids|int64"),
        (GOOD, ROWS.long(), TypeError, "takes rows of torch.float64, .*torch.bfloat16, got torch.int64: codes are"),
        (GOOD, ROWS.to(torch.float8_e4m3fn), TypeError, "got torch.float8_e4m3fn: codes are multiplied by the scales"),
        (GOOD, ROWS.to(torch.float8_e5m2), TypeError, "got torch.float8_e5m2: codes are multiplied by the scales"),
        (GOOD, ROWS[:, :2], ValueError, r"takes ids \[N\] and rows \[N, 3\], got \[3\] and \[3, 2\]"),
        (GOOD, ROWS[:2], ValueError, r"takes ids \[N\] and rows \[N, 3\], got \[3\] and \[2, 3\]"),
        (GOOD.view(1, 3), ROWS.view(1, 3, DIM), ValueError, r"got \[1, 3\] and \[1, 3, 3\]"),
        (torch.tensor([0, 1, 10]), ROWS, IndexError, "takes ids within num_embeddings 10, got 10"),
        (torch.tensor([0, -1, 2]), ROWS, IndexError, "takes ids within num_embeddings 10, got -1"),
        (GOOD, LAST_NOT_FINITE, ValueError, "the row of id 2 for table .* is not finite"),
        (
            GOOD,
            torch.full((3, DIM), 1e300, dtype=torch.float64),
            ValueError,
            "the row of id 0 for table .* is not finite",
        ),
    ],
)
def test_an_invalid_import_is_refused_and_changes_nothing(
    ids: Tensor, rows: Tensor, error: type[Exception], message: str, name: str
) -> None:
    module = DistEmbedding(10, DIM, name)
    with pytest.raises(error, match=message):
        import_rows(module, ids, rows)
    assert len(module.table) == 0


def test_rows_that_are_not_finite_are_skipped_where_the_policy_says_so(name: str) -> None:
    import_rows(DistEmbedding(10, DIM, name, nan_policy="skip"), GOOD, LAST_NOT_FINITE)
    assert list(rows_of(name)) == [0, 1]
    assert table_statistics(name)["refusals"] == 1


def test_a_table_that_is_not_there_is_named() -> None:
    with pytest.raises(KeyError, match='there is no table "absent"'):
        import_rows("absent", GOOD, ROWS)


def test_progress_is_shown_where_asked_for(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    module = DistEmbedding(None, DIM, name)
    import_rows(module, GOOD, ROWS)
    assert capsys.readouterr().err == ""
    import_rows(module, GOOD, ROWS, progress=True)
    assert "importing: 100%" in capsys.readouterr().err
    export_safetensors(tmp_path / "rows", [module], progress=True)
    assert "exporting: 100%" in capsys.readouterr().err


# safetensors


@pytest.mark.usefixtures("few_at_a_time")
@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_go_to_a_file_and_back(dtype: torch.dtype, table_name: Callable[[], str], tmp_path: Path) -> None:
    modules = [DistEmbedding(None, DIM, table_name(), dtype=dtype), DistEmbedding(None, DIM, table_name())]
    empty = DistEmbedding(None, DIM, table_name())
    for module in modules:
        module.weight[IDS] = torch.randn(3, DIM)
    before = [rows_of(module.name) for module in modules]
    export_safetensors(tmp_path / "rows.safetensors", [*modules, empty.name])

    file = SafetensorsFile(tmp_path / "rows.safetensors")
    first = modules[0].name
    assert torch.equal(file.tensor(f"{first}.ids"), IDS.sort().values)
    assert file.tensor(f"{first}.rows").dtype == dtype
    assert file.tensor(f"{empty.name}.rows").shape == (0, DIM)
    for module in modules:
        module.weight[IDS] = torch.zeros(3, DIM)
    import_safetensors(tmp_path / "rows.safetensors")
    assert [rows_of(module.name) for module in modules] == before
    other = DistEmbedding(None, DIM, table_name())
    import_safetensors(tmp_path / "rows.safetensors", {first: other})
    assert rows_of(other.name) == before[0]


def test_an_export_is_of_all_tables_where_none_is_named(name: str, tmp_path: Path) -> None:
    drop_all_tables()  # Other files' may have what no file of rows holds.
    DistEmbedding(None, DIM, name)
    export_safetensors(tmp_path / "rows")
    expected = sorted(f"{table}.{part}" for table in table_names() for part in ("ids", "rows"))
    assert SafetensorsFile(tmp_path / "rows").names() == expected
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


def test_the_file_is_as_the_format_says(name: str, tmp_path: Path) -> None:
    module = DistEmbedding(None, DIM, name)
    module.weight[[2]] = torch.tensor([1.0, 2.0, 3.0])
    export_safetensors(tmp_path / "rows", [module])
    written = (tmp_path / "rows").read_bytes()
    length = int.from_bytes(written[:8], "little")
    assert length % 8 == 0
    assert json.loads(written[8 : 8 + length]) == {
        f"{name}.ids": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
        f"{name}.rows": {"dtype": "F32", "shape": [1, 3], "data_offsets": [8, 20]},
    }
    expected = torch.tensor([2]).numpy().tobytes() + torch.tensor([1.0, 2.0, 3.0]).numpy().tobytes()
    assert written[8 + length :] == expected


def test_a_matrix_has_the_row_of_each_id(name: str, tmp_path: Path) -> None:
    weight = torch.randn(4, DIM, dtype=torch.float64)
    write_safetensors(tmp_path / "model", [Column.of("item.weight", weight), Column.of("bias", torch.zeros(()))])
    import_safetensors(tmp_path / "model", {"item.weight": DistEmbedding(4, DIM, name)})
    assert rows_of(name) == {id: weight[id].float().tolist() for id in range(4)}


@pytest.mark.parametrize("other", ["other.ids", "other.rows", "bias", "item.rows[0:4]x", "other.ids[0:4]"])
def test_tensors_of_no_pair_are_refused_by_name(name: str, tmp_path: Path, other: str) -> None:
    path, module = tmp_path / "model", DistEmbedding(None, DIM, name)
    pair = [Column.of(f"{name}.ids", torch.arange(4)), Column.of(f"{name}.rows", ROWS[:1].expand(4, -1).contiguous())]
    write_safetensors(path, [*pair, Column.of(other, torch.zeros(()))])
    message = f"has ['{other}'], of which none has both NAME.ids and NAME.rows: name the tensors"
    with pytest.raises(ValueError, match=re.escape(message)):
        import_safetensors(path)
    assert len(module.table) == 0
    with pytest.raises(ValueError, match="tables names no tensor of "):
        import_safetensors(path, {})
    import_safetensors(path, {name: name})
    assert len(module.table) == 4


def test_a_text_or_a_table_in_the_place_of_several_is_refused(name: str, tmp_path: Path) -> None:
    module = DistEmbedding(None, DIM, name)
    with pytest.raises(TypeError, match=f"tables are names in a list, got the text '{name}'"):
        export_safetensors(tmp_path / "rows", name)
    with pytest.raises(TypeError, match=r"tables are in a list, got DistEmbedding"):
        export_safetensors(tmp_path / "rows", module)  # type: ignore[arg-type]
    export_safetensors(tmp_path / "rows", [name])
    for tables in (name, [name]):
        with pytest.raises(TypeError, match=r"tables are by the names of tensors, as {'user': table}, got "):
            import_safetensors(tmp_path / "rows", tables)  # type: ignore[arg-type]


def test_a_file_without_the_tensors_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    write_safetensors(path, [Column.of("weight", ROWS), Column.of("scalar", torch.zeros(()))])
    module = DistEmbedding(None, DIM, name)
    with pytest.raises(ValueError, match=r"model has no tensor \"item\", but \['scalar', 'weight'\]"):
        import_safetensors(path, {"item": module})
    with pytest.raises(ValueError, match=r"no tensors NAME.ids and NAME.rows, but \['scalar', 'weight'\]"):
        import_safetensors(path)
    with pytest.raises(ValueError, match=r"takes ids \[N\] and rows \[N, 3\], got \[0\] and \[\]"):
        import_safetensors(path, {"weight": module, "scalar": module})
    assert len(module.table) == 0
    with pytest.raises(FileNotFoundError):
        import_safetensors(tmp_path / "absent")


@pytest.mark.parametrize("dtype", TYPES.values())
def test_every_type_is_written_and_read(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.tensor([[1, 0], [3, 4]]).to(dtype)
    write_safetensors(tmp_path / "file", [Column.of("odd", torch.ones(3, dtype=torch.uint8)), Column.of("t", tensor)])
    read = SafetensorsFile(tmp_path / "file").tensor("t")
    assert read.dtype == dtype
    assert torch.equal(read, tensor)


def test_files_are_those_of_the_safetensors_package(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.tensor([[1, 0], [3, 4]]).to(dtype) for dtype in TYPES.values()}
    tensors["empty"] = torch.empty(0, DIM)
    write_safetensors(tmp_path / "ours", [Column.of(name, tensor) for name, tensor in tensors.items()])
    safetensors.torch.save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    ours, theirs = safetensors.torch.load_file(tmp_path / "ours"), SafetensorsFile(tmp_path / "theirs")
    assert sorted(ours) == theirs.names() == sorted(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(ours[name], tensor)
        assert torch.equal(theirs.tensor(name), tensor)


def test_a_tensor_without_alignment_is_read(tmp_path: Path) -> None:
    header = b'{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    header = header.ljust(len(header) // 2 * 2 + 1)
    (tmp_path / "file").write_bytes(len(header).to_bytes(8, "little") + header + torch.ones(1).numpy().tobytes())
    assert SafetensorsFile(tmp_path / "file").tensor("t").tolist() == [1.0]


def entry(**changes: Any) -> bytes:
    values = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}
    return json.dumps({"t": {key: value for key, value in values.items() if value is not None}}).encode()


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "invalid JSON in header: EOF while parsing a value"),
        (b"{", "invalid JSON in header: EOF while parsing an object"),
        (b"\xff\xfe", "invalid UTF-8 in header"),
        (b"[" * 100_000, "invalid JSON in header"),
        (b"[]", "invalid JSON in header: invalid type: sequence"),
        (b'{"t": 1}', "invalid JSON in header: invalid type: integer `1`"),
        (entry(shape=None), "missing field `shape`"),
        (entry(data_offsets=[0]), "invalid length 1, expected a tuple of size 2"),
        (entry(shape=[-1]), "invalid value: integer `-1`"),
        (entry(shape=[True]), "invalid type: boolean `true`"),
        (entry(data_offsets=[0, 1e9]), r"invalid type: floating point `1000000000\.0`"),
        (entry(shape=[2]), "invalid shape, data type, or offset for tensor"),
        (entry(data_offsets=[4, 8]), "invalid offset for tensor `t`"),
        (entry(shape=[2**62], data_offsets=[0, 2**64]), "invalid type: floating point"),
        (entry(shape=[2**62], data_offsets=[0, 4]), "overflow computing buffer size from shape"),
        (entry(dtype="F8", data_offsets=[4, 0]), "unknown variant `F8`, expected one of .*`F32`"),
        (entry(dtype="F8", data_offsets=[0, 5]), "unknown variant `F8`, expected one of .*`F32`"),
        (entry(data_offsets=[0, 4]) + b"}", "invalid JSON in header: trailing characters"),
    ],
)
def test_a_damaged_file_is_refused_by_name(header: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match=message) as raised:
        SafetensorsFile(path)
    assert f"{path} is not a safetensors file" in str(raised.value)


def test_a_tensor_of_a_type_that_torch_lacks_harms_no_other(tmp_path: Path) -> None:
    entries = {
        "known": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "other": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [4, 7]},
    }
    header = json.dumps(entries).encode()
    (tmp_path / "file").write_bytes(len(header).to_bytes(8, "little") + header + bytes(7))
    file = SafetensorsFile(tmp_path / "file")
    assert file.tensor("known").tolist() == [0.0]
    with pytest.raises(ValueError, match=rf'the tensor "other" of {tmp_path / "file"} cannot be read: .*F6_E2M3'):
        file.tensor("other")


def test_tensors_that_share_bytes_are_refused(tmp_path: Path) -> None:
    fields = '"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = f'{{"one":{{{fields},"other":{{{fields}}}'.encode()
    (tmp_path / "file").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match=r"file is not a safetensors file: .*invalid offset for tensor"):
        SafetensorsFile(tmp_path / "file")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "header too small"),
        (b"1234567", "header too small"),
        ((2**63).to_bytes(8, "little"), "header too large"),
        ((9).to_bytes(8, "little") + b"{}", "invalid header length"),
    ],
)
def test_a_file_cut_short_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=f"{tmp_path / 'file'} is not a safetensors file: .*{reason}"):
        SafetensorsFile(tmp_path / "file")


def test_what_the_system_does_not_open_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        SafetensorsFile(tmp_path)
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "absent")):
        SafetensorsFile(tmp_path / "absent")


@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json"])
def test_what_would_wait_for_a_writer_is_refused_by_name(file: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / file)
    with pytest.raises(OSError, match=re.escape(f"{tmp_path / file}: expected a regular file, got a FIFO")):
        import_safetensors(tmp_path / file, {})


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match='tensor "t" has 12 bytes by its shape, got 8'):
        write_safetensors(path, [Column("t", torch.float32, (3,), [torch.zeros(2)])])
    with pytest.raises(FileNotFoundError):
        write_safetensors(tmp_path / "absent" / "file", [])
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("file", b"old")]


# TorchRec


def torchrec_state(kind: str, names: list[str], prefix: str = "") -> dict[str, Tensor]:
    return {f"{prefix}{kind}.{name}.weight": torch.randn(4, DIM) for name in names}


@pytest.mark.parametrize("prefix", ["", "sparse.ebc."])
def test_the_weights_of_torchrec_collections_are_imported(prefix: str, table_name: Callable[[], str]) -> None:
    for cls, kind in (
        (RecStoreEmbeddingBagCollection, "embedding_bags"),
        (RecStoreEmbeddingCollection, "embeddings"),
    ):
        names = [table_name(), table_name()]
        tables = [
            {"name": name, "num_embeddings": size, "embedding_dim": DIM, "feature_names": [name]}
            for name, size in zip(names, (4, None), strict=True)
        ]
        state = torchrec_state(kind, names, prefix)
        import_torchrec({**state, "over.linear.weight": torch.zeros(1)}, cls(tables))
        for name in names:
            assert rows_of(name) == dict(enumerate(state[f"{prefix}{kind}.{name}.weight"].tolist()))


def test_a_collection_gives_the_state_of_torchrecs(table_name: Callable[[], str]) -> None:
    for cls, kind in (
        (RecStoreEmbeddingBagCollection, "embedding_bags"),
        (RecStoreEmbeddingCollection, "embeddings"),
    ):
        name = table_name()
        ours = cls([{"name": name, "num_embeddings": 4, "embedding_dim": DIM, "feature_names": [name]}])
        state = torchrec_state(kind, [name])
        import_torchrec(state, ours)
        exported = export_torchrec(ours)
        assert exported.keys() == state.keys()
        assert all(torch.equal(exported[key], state[key]) for key in state)
    growing = RecStoreEmbeddingCollection([{"name": table_name(), "num_embeddings": None, "embedding_dim": DIM}])
    with pytest.raises(ValueError, match="has no num_embeddings"):
        export_torchrec(growing)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(table_name: Callable[[], str]) -> None:
    names = [table_name(), table_name()]
    bags = RecStoreEmbeddingBagCollection(
        [{"name": name, "num_embeddings": 4, "embedding_dim": DIM, "feature_names": [name]} for name in names]
    )
    state = torchrec_state("embedding_bags", names)
    last = f"embedding_bags.{names[1]}.weight"
    twice = {**state, f"other.{last}": state[last]}
    for bad, error, message in (
        ({key: state[key] for key in state if key != last}, ValueError, r"expected one weight of table .*, got \[\]"),
        (twice, ValueError, r"expected one weight of table .*, got \['embedding_bags"),
        ({**state, last: [1.0]}, TypeError, "must be a tensor that is not sharded, got list"),
        ({**state, last: torch.zeros(4, 2)}, ValueError, r"rows \[N, 3\], got \[4\] and \[4, 2\]"),
        ({**state, last: torch.zeros(5, DIM)}, IndexError, "takes ids within num_embeddings 4, got 4"),
    ):
        with pytest.raises(error, match=message):
            import_torchrec(bad, bags)
    assert [len(Table.open(name)) for name in names] == [0, 0]


# Parquet


@pytest.mark.usefixtures("few_at_a_time")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_table_goes_to_parquet_in_row_groups(dtype: torch.dtype, name: str, tmp_path: Path) -> None:
    module = DistEmbedding(None, DIM, name, dtype=dtype)
    module.weight[IDS] = torch.randn(3, DIM)
    export_parquet(tmp_path / "rows.parquet", module)
    table = pq.read_table(tmp_path / "rows.parquet")
    assert [str(field.type) for field in table.schema] == ["int64", "fixed_size_list<element: float>[3]"]
    read = dict(zip(table["id"].to_pylist(), table["row"].to_pylist(), strict=True))
    assert read == rows_of(name)
    assert table["id"].to_pylist() == sorted(IDS.tolist())
    groups = pq.ParquetFile(tmp_path / "rows.parquet").metadata
    assert [groups.row_group(place).num_rows for place in range(groups.num_row_groups)] == [2, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]


def test_a_table_without_rows_goes_to_parquet(name: str, tmp_path: Path) -> None:
    export_parquet(tmp_path / "rows.parquet", DistEmbedding(None, DIM, name))
    assert pq.read_table(tmp_path / "rows.parquet").num_rows == 0


def test_without_pyarrow_the_command_that_installs_it_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"^export_parquet needs pyarrow: pip install 'recstore-ops\[train\]'$"):
        export_parquet(tmp_path / "rows.parquet", DistEmbedding(None, DIM, name))


MEMORY_OF_BOTH = """
import resource, sys, torch
from recstore_ops import DistEmbedding, RecStoreClient
from recstore_ops.transfer import export_parquet, export_safetensors, import_safetensors
table = DistEmbedding(None, 64, "large")
for start in range(0, 1_000_000, 100_000):
    table.weight[torch.arange(start, start + 100_000)] = torch.randn(100_000, 64)
export_safetensors("warm.safetensors", [DistEmbedding(None, 64, "small")])
export_parquet("warm.parquet", "small")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export_safetensors("large.safetensors", [table])
export_parquet("large.parquet", table)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)

def own():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1])

del table
RecStoreClient().drop("large")
target = DistEmbedding(None, 64, "target", memory_limit=64 << 20, disk=".")
before = own()
import_safetensors("large.safetensors", {"large": target})
print((own() - before) // 1024, len(target.table))
"""


@pytest.mark.tier("test")
def test_exports_and_imports_need_little_memory(tmp_path: Path) -> None:
    of_exports, of_import = output_of(MEMORY_OF_BOTH, cwd=tmp_path).splitlines()
    assert (tmp_path / "large.safetensors").stat().st_size > 244 << 20
    assert int(of_exports) < 150  # MiB, of 244.
    grown, rows = map(int, of_import.split())
    assert grown < 150
    assert rows == 1_000_000
