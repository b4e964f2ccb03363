"""Frozen tables: rows of every encoding, operators over them, damage, refusals."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from own_draws import fresh_name
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from recstore_ops import DistEmbedding
from recstore_ops.ops import operators
from recstore_ops.serving import EncodingName, FrozenTable, freeze

pytestmark = pytest.mark.tier("quick")

TableName = Callable[[], str]

DIM = 6
IDS = torch.tensor([3, -5, 2**40, 7, 0])


@pytest.fixture
def live(table_name: TableName) -> DistEmbedding:
    """A table with five rows."""
    module = DistEmbedding(None, DIM, table_name(), initializer={"kind": "normal", "std": 1.0})
    generator = torch.Generator().manual_seed(1)
    operators.emb_write(module.table.handle, IDS, torch.randn(len(IDS), DIM, generator=generator))
    return module


def frozen(live: DistEmbedding, path: Path, encoding: EncodingName = "float32") -> FrozenTable:
    assert freeze(live.table, path, encoding) == path.stat().st_size
    return FrozenTable(path)


def fbgemm_codes(rows: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and biases as `FloatOrHalfToFusedNBitRowwiseQuantizedSBHalfRef` computes them."""
    least = rows.min(1).astype(np.float16)
    span = rows.max(1) - least.astype(np.float32)
    scale = (span / np.float32(2**bits - 1)).astype(np.float16)
    codes = np.rint((rows - least.astype(np.float32)[:, None]) * (np.float32(1) / scale.astype(np.float32))[:, None])
    return np.clip(codes, 0, 2**bits - 1).astype(np.uint8), scale, least


def test_rows_are_those_of_the_table_and_initial_values_elsewhere(live: DistEmbedding, tmp_path: Path) -> None:
    table, asked = frozen(live, tmp_path / "t"), torch.cat([IDS, torch.tensor([11, -(2**63), 2**63 - 1])])
    assert table.read(asked).equal(live(asked).detach())
    assert (table.name, table.dim, table.rows, len(table), table.encoding) == (live.table.name, DIM, 5, 5, "float32")
    assert table.config["initializer"] == {"kind": "normal", "mean": 0.0, "std": 1.0}


def test_a_copy_is_read_as_the_map_and_outlives_the_file(live: DistEmbedding, tmp_path: Path) -> None:
    path = tmp_path / "t"
    expected = frozen(live, path, "int8").read(IDS)
    copied = FrozenTable(path, "copied")
    path.write_bytes(b"")
    assert copied.read(IDS).equal(expected)
    with pytest.raises(ValueError, match='is opened as mapped or copied, not as "ram"'):
        FrozenTable(path, "ram")  # type: ignore[arg-type]


def test_a_copy_of_a_changed_file_is_refused_when_it_is_opened(live: DistEmbedding, tmp_path: Path) -> None:
    freeze(live.table, tmp_path / "t")
    content = bytearray((tmp_path / "t").read_bytes())
    content[-80] ^= 1
    (tmp_path / "changed").write_bytes(content)
    with pytest.raises(OSError, match="were changed: the checksum is another"):
        FrozenTable(tmp_path / "changed", "copied")


def test_later_steps_of_the_table_do_not_show(live: DistEmbedding, tmp_path: Path) -> None:
    table, before = frozen(live, tmp_path / "t"), live(IDS).detach().clone()
    operators.emb_write(live.table.handle, IDS, torch.zeros(len(IDS), DIM))
    assert table.read(IDS).equal(before)


@pytest.mark.parametrize(("encoding", "dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_halves_are_those_of_torch(
    live: DistEmbedding, tmp_path: Path, encoding: EncodingName, dtype: torch.dtype
) -> None:
    table = frozen(live, tmp_path / "t", encoding)
    assert table.read(IDS).equal(live(IDS).detach().to(dtype).float())


@pytest.mark.parametrize(("encoding", "bits"), [("int8", 8), ("int4", 4)])
def test_codes_are_those_of_fbgemm(live: DistEmbedding, tmp_path: Path, encoding: EncodingName, bits: int) -> None:
    table = frozen(live, tmp_path / "t", encoding)
    codes, scale, bias = fbgemm_codes(live(IDS).detach().numpy(), bits)
    expected = codes * scale.astype(np.float32)[:, None] + bias.astype(np.float32)[:, None]
    np.testing.assert_array_equal(table.read(IDS).numpy(), expected)
    packed = codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
    row = np.concatenate([packed, scale[:, None].view(np.uint8), bias[:, None].view(np.uint8)], axis=1)
    found = load_file(tmp_path / "t")["rows"].numpy()
    # These ids lie far apart, so each lies behind its row.
    width = row.shape[1]
    ids = np.ascontiguousarray(found[:, width : width + 8]).view(np.int64)[:, 0].tolist()
    np.testing.assert_array_equal(found[[ids.index(id) for id in IDS.tolist()], :width], row)


@pytest.mark.parametrize(("step", "index"), [(1, "consecutive"), (3, "bits"), (1_000, "hashed")])
def test_ids_choose_the_index_and_all_read_the_same(
    table_name: TableName, tmp_path: Path, step: int, index: str
) -> None:
    module, ids = DistEmbedding(None, DIM, table_name()), torch.randperm(2_000) * step - 999
    operators.emb_write(module.table.handle, ids, torch.randn(len(ids), DIM))
    table = frozen(module, tmp_path / "t")
    with safe_open(tmp_path / "t", "pt") as file:
        assert json.loads(file.metadata()["table"])["index"]["kind"] == index
        rows = file.get_tensor("rows")
    if index != "hashed":
        assert rows.equal(module(ids.sort().values).detach()), "rows have the order of the ids"
    asked = torch.cat([ids, ids + 1, torch.tensor([-(2**63), 2**63 - 1])])
    assert table.read(asked).equal(module(asked).detach())
    again = frozen(module, tmp_path / "again")
    assert again.read(ids).equal(table.read(ids))
    assert (tmp_path / "again").read_bytes() == (tmp_path / "t").read_bytes()


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["sum", "mean", "max"])
def test_bags_are_those_of_the_table(live: DistEmbedding, tmp_path: Path, mode: int) -> None:
    table, ids, offsets = frozen(live, tmp_path / "t"), torch.tensor([3, 7, 99, -5, 3]), torch.tensor([0, 2, 2, 5])

    def pooled(handle: Tensor) -> tuple[Tensor, Tensor]:
        return operators.emb_bag(handle, ids, offsets, DIM, mode)

    for found, expected in zip(pooled(table.handle), pooled(live.table.handle), strict=True):
        assert found.equal(expected)


@pytest.mark.parametrize(
    ("step", "index_bytes", "shares"), [(3, 0.5, (0.28, 0.16)), (7919, 9, (0.30, 0.25))], ids=["near", "far"]
)
def test_files_of_many_rows_take_a_third_and_a_quarter(
    table_name: TableName, tmp_path: Path, step: int, index_bytes: float, shares: tuple[float, float]
) -> None:
    module, ids = DistEmbedding(None, 64, table_name()), torch.arange(20_000) * step
    operators.emb_write(module.table.handle, ids, torch.randn(len(ids), 64))
    sizes = {encoding: freeze(module.table, tmp_path / "t", encoding) for encoding in ("float32", "int8", "int4")}
    assert sizes["int8"] <= shares[0] * sizes["float32"]
    assert sizes["int4"] <= shares[1] * sizes["float32"], "with its id a row of codes is filled up to a cache line"
    assert sizes["float32"] - len(ids) * 64 * 4 <= index_bytes * len(ids) + 2_000


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_ids_are_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=50))
    module = DistEmbedding(None, 2, fresh_name())
    rows = torch.arange(2 * len(ids), dtype=torch.float32).view(-1, 2)
    operators.emb_write(module.table.handle, torch.tensor(ids, dtype=torch.int64), rows)
    table = frozen(module, tmp_path_factory.mktemp("frozen") / "t")
    asked = torch.tensor([*ids, *data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9))], dtype=torch.int64)
    assert table.read(asked).equal(module(asked).detach())


def test_every_change_is_refused(live: DistEmbedding, tmp_path: Path) -> None:
    table, rows = frozen(live, tmp_path / "t"), torch.ones(len(IDS), DIM)
    for change in (
        lambda: operators.emb_write(table.handle, IDS, rows),
        lambda: operators.emb_update(table.handle, IDS, rows),
        lambda: operators.hashtable_delete(table.handle, IDS),
        lambda: operators.hashtable_clear(table.handle),
    ):
        with pytest.raises(RuntimeError, match=f'table "{table.name}" is frozen: it is read only'):
            change()
    assert table.read(IDS).equal(live(IDS).detach())


@pytest.mark.parametrize("place", [0.0, 0.02, 0.3, 0.6, 0.9, 0.999])
def test_a_changed_byte_is_never_used(live: DistEmbedding, tmp_path: Path, place: float) -> None:
    path = tmp_path / "t"
    expected = frozen(live, path).read(IDS)
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 4
    path.with_name("changed").write_bytes(content)
    with pytest.raises((OSError, RuntimeError), match="changed"):
        assert not FrozenTable(path.with_name("changed")).read(IDS).equal(expected)


def test_other_files_are_refused(live: DistEmbedding, tmp_path: Path) -> None:
    path = tmp_path / "t"
    freeze(live.table, path)
    (tmp_path / "cut").write_bytes(path.read_bytes()[:-1])
    (tmp_path / "text").write_text("id,row\n")
    for name, message in (("cut", "expected .* bytes, got"), ("text", "frozen table"), ("none", "none"), (".", "file")):
        with pytest.raises(OSError, match=message):
            FrozenTable(tmp_path / name)


def test_what_cannot_be_kept_is_refused_and_replaces_nothing(live: DistEmbedding, tmp_path: Path) -> None:
    path = tmp_path / "t"
    freeze(live.table, path)
    before = path.read_bytes()
    operators.emb_write(live.table.handle, torch.tensor([7]), torch.full((1, DIM), 1e6))
    with pytest.raises(OSError, match="1000000 in the row of id 7 cannot be kept as int8"):
        freeze(live.table, path, "int8")
    with pytest.raises(ValueError, match=r"encoding must be one of float32, .*, got 'int2'"):
        freeze(live.table, path, "int2")  # type: ignore[arg-type]
    with pytest.raises(OSError, match="no/t"):
        freeze(live.table, tmp_path / "no" / "t")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_table_that_nobody_has_is_closed(live: DistEmbedding, tmp_path: Path) -> None:
    table = frozen(live, tmp_path / "t")
    handle = table.handle.clone()
    del table
    gc.collect()
    # By its name it is the table that is trained: of the file nothing is left.
    assert operators.emb_read(handle, IDS, DIM).equal(live(IDS).detach())
    operators.emb_write(handle, IDS, torch.zeros(len(IDS), DIM))


def test_a_table_is_closed_while_something_is_traced(live: DistEmbedding, tmp_path: Path) -> None:
    opened = [frozen(live, tmp_path / "t")]

    class Dropping(torch.nn.Module):
        """Lets go of a table in the middle of a call."""

        def forward(self, x: Tensor) -> Tensor:
            """Returns x and one."""
            opened.clear()
            gc.collect()
            return x + 1

    torch.export.export(Dropping(), (torch.ones(2),))
    assert not opened
