"""Rows from and to several safetensors files with an index, beside the `safetensors` package."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor, nn
from warm_programs import output_of

from recstore_ops import DistEmbedding, get_kv_client, table_names
from recstore_ops.ops import operators
from recstore_ops.table import cut
from recstore_ops.transfer import export_safetensors, import_safetensors
from recstore_ops.transfer.safetensors_file import Column
from recstore_ops.transfer.safetensors_index import INDEX, SafetensorsIndex, Splittable, write_shards

pytestmark = pytest.mark.tier("quick")

TableName = Callable[[], str]
DIM = 3
IDS = torch.tensor([7, -(2**63), 2**62, 1, 2])


@pytest.fixture(autouse=True)
def _few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two rows are moved at a time, and tables are dropped."""
    monkeypatch.setattr(cut, "_BYTES_PER_CHUNK", 2 * 4 * DIM)
    before = set(table_names())
    yield
    for name in set(table_names()) - before:
        get_kv_client().drop(name)


def rows_of(table: DistEmbedding) -> dict[int, list[float]]:
    ids = operators.hashtable_ids(table.table.handle)
    return dict(zip(ids.tolist(), get_kv_client().pull(table.name, ids).tolist(), strict=True))


def write_model(folder: Path, files: dict[str, dict[str, Tensor]], **index: Any) -> Path:
    """A model as it is published: files by the `safetensors` package, and their index; returns its path."""
    folder.mkdir(exist_ok=True)
    for file, tensors in files.items():
        safetensors.torch.save_file(tensors, folder / file)
    tensors = {name: (file, tensor) for file, each in files.items() for name, tensor in each.items()}
    whole = {
        "metadata": {"total_size": sum(tensor.nbytes for _, tensor in tensors.values())},
        "weight_map": {name: file for name, (file, _) in tensors.items()},
        **index,
    }
    (folder / INDEX).write_text(json.dumps(whole))
    return folder / INDEX


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors by the index, read by the `safetensors` package."""
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    files = {file: safetensors.torch.load_file(folder / file) for file in set(places.values())}
    assert sorted(name for file in files.values() for name in file) == sorted(places), "each is in its file alone"
    return {name: files[file][name] for name, file in places.items()}


# Import


def test_matrices_of_a_published_model_are_imported(table_name: TableName, tmp_path: Path) -> None:
    first, second = torch.randn(5, DIM), torch.randn(4, DIM, dtype=torch.float64)
    files = {
        "model-00001-of-00003.safetensors": {"layers.0.bias": torch.zeros(2), "memory.0": first},
        "model-00002-of-00003.safetensors": {"memory.1": second, "other": torch.ones(2, 2)},
        "model-00003-of-00003.safetensors": {"head": torch.ones(2, 2)},
    }
    index = write_model(tmp_path / "model", files)
    (tmp_path / "model" / "model-00003-of-00003.safetensors").unlink()  # Nothing of it is asked for.
    one, both = DistEmbedding(4, DIM, table_name()), DistEmbedding(9, DIM, table_name())
    import_safetensors(index, {"memory.1": one})
    assert rows_of(one) == dict(enumerate(second.float().tolist()))
    import_safetensors(tmp_path / "model", {("memory.0", "memory.1"): both})
    assert rows_of(both) == dict(enumerate(torch.cat([first, second.float()]).tolist()))


def test_a_matrix_with_ids_beside_is_imported(table_name: TableName, tmp_path: Path) -> None:
    rows = torch.randn(5, DIM)
    write_model(tmp_path / "model", {"a.safetensors": {"m.ids": IDS}, "b.safetensors": {"m.rows": rows}})
    table = DistEmbedding(None, DIM, table_name())
    import_safetensors(tmp_path / "model", {"m": table})
    assert rows_of(table) == dict(zip(IDS.tolist(), rows.tolist(), strict=True))


def test_a_directory_may_have_a_file_instead_of_an_index(table_name: TableName, tmp_path: Path) -> None:
    table, rows = DistEmbedding(None, DIM, table_name()), torch.randn(2, DIM)
    with pytest.raises(FileNotFoundError, match=r"has neither an index, \*.safetensors.index.json, nor model.safete"):
        import_safetensors(tmp_path, {"rows": table})
    safetensors.torch.save_file({"rows": rows}, tmp_path / "model.safetensors")
    import_safetensors(tmp_path, {"rows": table})
    assert rows_of(table) == dict(enumerate(rows.tolist()))
    for name in ("a.safetensors.index.json", "b.safetensors.index.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=r"has the indexes \['a.safetensors.index.json', .*: give the path of one"):
        import_safetensors(tmp_path, {"rows": table})


GOOD = {
    "a.safetensors": {"m[0:2]": torch.zeros(2, DIM), "whole": torch.zeros(2, DIM)},
    "b.safetensors": {"m[2:5]": torch.zeros(3, DIM), "wide": torch.zeros(2, DIM + 1), "long": torch.zeros(2, 2).long()},
}


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ("absent", ValueError, r'index.json has no tensor "absent", but \[.*whole'),
        ("wide", ValueError, r'takes ids \[N\] and rows \[N, 3\], got \[2\] and \[2, 4\], by "wide" of .*index.json'),
        ("long", TypeError, r'takes rows of .*, got torch.int64, by "long" of .*index.json: codes are'),
        (("whole", "wide"), ValueError, r'got \[2\] and \[2, 4\], by "wide" of'),
        (("m", "whole"), IndexError, r'takes ids within num_embeddings 6, got 6, by "whole" of'),
        (("whole", "m", "absent"), ValueError, 'no tensor "absent"'),
    ],
)
def test_tensors_that_do_not_fit_are_named_and_change_nothing(
    asked: str | tuple[str, ...], error: type[Exception], message: str, table_name: TableName, tmp_path: Path
) -> None:
    table = DistEmbedding(6, DIM, table_name())
    index = write_model(tmp_path / "model", GOOD)
    with pytest.raises(error, match=message):
        import_safetensors(index, {asked: table})
    assert len(table.table) == 0
    import_safetensors(index, {"m": table})
    assert len(table.table) == 5


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["m[0:2]", "m[3:5]"], r'index.json: the next part of "m" must begin at row 2, got "m\[3:5\]"'),
        (["m[0:2]", "m[1:3]"], r'must begin at row 2, got "m\[1:3\]"'),
        (["m[0:2]", "m[0:2]x", "m[0:4]"], r'must begin at row 2, got "m\[0:4\]"'),
        (["m[1:3]"], r'must begin at row 0, got "m\[1:3\]"'),
        (["m[0:2]", "m[2:1]"], r'must begin at row 2, got "m\[2:1\]"'),
        (["m[0:2]", "m[2:5]"], r'the tensor "m\[2:5\]" of .* must have 3 rows, got the shape \[2, 3\]'),
    ],
)
def test_parts_that_leave_rows_out_or_have_them_twice_are_refused(
    names: list[str], message: str, table_name: TableName, tmp_path: Path
) -> None:
    table = DistEmbedding(None, DIM, table_name())
    write_model(tmp_path / "model", {"a.safetensors": {name: torch.zeros(2, DIM) for name in names}})
    with pytest.raises(ValueError, match=message):
        import_safetensors(tmp_path / "model", {"m": table})
    assert len(table.table) == 0


def test_ids_and_rows_that_are_split_otherwise_are_refused(table_name: TableName, tmp_path: Path) -> None:
    table, rows = DistEmbedding(None, DIM, table_name()), torch.zeros(3, DIM)
    ids = {"m.ids": torch.arange(5)}
    write_model(tmp_path / "model", {"a.safetensors": {**ids, "m.rows[0:3]": rows, "m.rows[3:6]": rows.clone()}})
    with pytest.raises(ValueError, match=r"must be split alike, got \['m.ids'\] and \['m.rows\[0:3\]', 'm.rows\[3:6"):
        import_safetensors(tmp_path / "model", {"m": table})
    ids = {"m.ids[0:2]": torch.arange(2), "m.ids[2:6]": torch.arange(4)}
    write_model(tmp_path / "model", {"a.safetensors": {**ids, "m.rows[0:3]": rows, "m.rows[3:6]": rows.clone()}})
    with pytest.raises(ValueError, match=r'got \[2\] and \[3, 3\], by "m.rows\[0:3\]" of'):
        import_safetensors(tmp_path / "model", {"m": table})


def test_files_that_are_not_as_the_index_says_are_refused(table_name: TableName, tmp_path: Path) -> None:
    table, folder = DistEmbedding(None, DIM, table_name()), tmp_path / "model"
    index = write_model(folder, GOOD)
    second = folder / "b.safetensors"
    whole = second.read_bytes()
    second.write_bytes(whole[:-1])
    with (
        pytest.warns(UserWarning, match="bytes by .*index.json"),
        pytest.raises(ValueError, match=r"b.safetensors is not a safetensors file"),
    ):
        import_safetensors(index, {"m": table})
    second.unlink()
    with pytest.raises(FileNotFoundError, match=r'"m\[2:5\]" lies in .*b.safetensors by .*index.json, but there is no'):
        import_safetensors(index, {"m": table})
    safetensors.torch.save_file({"m[2:5]": torch.zeros(3, DIM)}, second)
    with (
        pytest.warns(UserWarning, match="bytes by .*index.json"),
        pytest.raises(
            ValueError, match=r"says that .*b.safetensors holds \['long', 'wide'\], but it holds \['m\[2:5\]"
        ),
    ):
        import_safetensors(index, {"m": table})
    safetensors.torch.save_file({**GOOD["b.safetensors"], "whole": torch.ones(2, DIM)}, second)
    with (
        pytest.warns(UserWarning, match="the tensors have 148 bytes by .*, but those of its 2 files have 172"),
        pytest.raises(ValueError, match=r'"whole" lies in a.safetensors by .*index.json, and in .*b.safetensors too'),
    ):
        import_safetensors(index, {"m": table})
    assert len(table.table) == 0


def test_a_size_that_the_index_has_wrong_is_a_warning(table_name: TableName, tmp_path: Path) -> None:
    table, folder = DistEmbedding(None, DIM, table_name()), tmp_path / "model"
    index = write_model(folder, GOOD, metadata={"total_size": 7})
    with pytest.warns(UserWarning, match="have 7 bytes by .*index.json, but those of its 2 files have 148"):
        import_safetensors(index, {"m": table})
    assert len(table.table) == 5
    index = write_model(folder, GOOD, metadata={})
    import_safetensors(index, {"m": table})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not an index of safetensors files"),
        ("[]", "is not an index of safetensors files"),
        ("{}", "is not an index of safetensors files: KeyError"),
        ("[" * 100_000, "is not an index of safetensors files"),
        ('{"weight_map": {"m": "a.safetensors", "m": "b.safetensors"}}', "\"m\" is there twice, for 'a.*' and 'b.*'"),
        ('{"weight_map": []}', "weight_map must be an object, got list"),
        ('{"weight_map": {"m": 1}}', 'expected the name of a safetensors file for "m", got 1'),
        ('{"weight_map": {"m": "../a.safetensors"}}', r"expected the name .* for \"m\", got '../a.safetensors'"),
        ('{"weight_map": {"m": "model.bin"}}', "expected the name .* got 'model.bin'"),
    ],
)
def test_an_index_that_is_none_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        SafetensorsIndex(tmp_path / INDEX)
    assert str(tmp_path / INDEX) in str(raised.value)


def test_of_very_many_tensors_those_of_a_like_name_are_named(tmp_path: Path) -> None:
    places = {f"layers.{number}.weight": "a.safetensors" for number in range(500)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {**places, "memory.weight": "a.safetensors"}}))
    with pytest.raises(ValueError, match=r'no tensor "memory", but \[.*memory.weight.*\] and 481 more'):
        SafetensorsIndex(tmp_path / INDEX).tensor("memory")


# Export


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_go_to_files_of_a_size_and_back(dtype: torch.dtype, table_name: TableName, tmp_path: Path) -> None:
    large, small = DistEmbedding(None, DIM, table_name(), dtype=dtype), DistEmbedding(None, DIM, table_name())
    empty = DistEmbedding(None, DIM, table_name())
    ids = torch.randperm(100)
    large.weight[ids], small.weight[IDS] = torch.randn(100, DIM), torch.randn(5, DIM)
    before = rows_of(large), rows_of(small)
    folder = tmp_path / "rows"
    export_safetensors(folder, [small, large, empty], max_shard_size=600)

    files = sorted(path for path in folder.iterdir() if path.name != INDEX)
    assert len(files) > 3
    assert [path.name for path in files] == [
        f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)
    ]
    assert all(path.stat().st_size <= 600 for path in files)
    tensors = tensors_of(folder)
    assert json.loads((folder / INDEX).read_text())["metadata"] == {
        "total_size": sum(tensor.nbytes for tensor in tensors.values())
    }
    assert torch.equal(tensors[f"{small.name}.ids"], IDS.sort().values), "what fits is not split"
    parts = sorted(
        (name for name in tensors if name.startswith(f"{large.name}.rows[")),
        key=lambda name: int(name.rpartition("[")[2].partition(":")[0]),
    )
    rows = torch.cat([tensors[name] for name in parts])
    assert rows.dtype == dtype
    assert rows.float().tolist() == [before[0][id] for id in range(100)]

    for table in (large, small):
        table.reset_parameters()
    import_safetensors(folder)
    assert (rows_of(large), rows_of(small)) == before
    other = DistEmbedding(None, DIM, table_name())
    import_safetensors(folder / INDEX, {large.name: other})
    assert rows_of(other) == before[0]


@pytest.mark.parametrize("max_shard_size", [None, 300, 10_000])
def test_a_matrix_has_initial_values_of_ids_without_row(
    max_shard_size: int | None, table_name: TableName, tmp_path: Path
) -> None:
    table = DistEmbedding(40, DIM, table_name(), optimizer="adagrad")
    table.weight[torch.tensor([3, 39])] = torch.ones(2, DIM)
    expected = table(torch.arange(40)).detach()
    path = tmp_path / "model.safetensors"
    export_safetensors(path, [table], as_matrices=True, max_shard_size=max_shard_size)
    assert len(table.table) == 2, "an export makes no rows"
    name = f"{table.name}.weight"
    if max_shard_size is None:
        with safe_open(path, framework="pt") as file:
            assert torch.equal(file.get_tensor(name), expected)
    elif max_shard_size == 10_000:
        plain = nn.Embedding(40, DIM)
        plain.load_state_dict({"weight": tensors_of(path)[name]})
        assert torch.equal(plain.weight, expected)
    else:
        assert len(tensors_of(path)) > 2
    other = DistEmbedding(40, DIM, table_name())
    import_safetensors(path, {name: other})
    assert rows_of(other) == dict(enumerate(expected.tolist()))


def test_a_matrix_needs_num_embeddings(table_name: TableName, tmp_path: Path) -> None:
    table = DistEmbedding(None, DIM, table_name())
    with pytest.raises(ValueError, match=f'table "{table.name}" has no num_embeddings, which as_matrices needs'):
        export_safetensors(tmp_path / "model", [table], as_matrices=True)
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_does_not_fit_into_a_file_is_refused(table_name: TableName, tmp_path: Path) -> None:
    table = DistEmbedding(None, DIM, table_name())
    table.weight[IDS] = torch.ones(5, DIM)
    message = f'max_shard_size must be at least (\\d+) for a row of table "{table.name}" and its header, got 100'
    with pytest.raises(ValueError, match=message) as raised:
        export_safetensors(tmp_path / "new", [table], max_shard_size=100)
    least = int(str(raised.value).partition("at least ")[2].partition(" ")[0])
    export_safetensors(tmp_path / "new", [table], max_shard_size=least)
    assert len(list((tmp_path / "new").iterdir())) == 6
    with pytest.raises(ValueError, match=f"at least {least} "):
        export_safetensors(tmp_path / "other", [table], max_shard_size=least - 1)
    assert not (tmp_path / "other").exists()


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(0, 120), min_size=1, max_size=4), most=st.integers(200, 3000), dim=st.integers(1, 9))
def test_any_tables_fit_into_files_of_any_size(
    sizes: list[int], most: int, dim: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    matrices = {f"t{place}": torch.randn(size, dim) for place, size in enumerate(sizes)}

    def splittable(name: str, rows: Tensor) -> Splittable:
        def columns(first: int, end: int) -> list[Column]:
            own = name if (first, end) == (0, len(rows)) else f"{name}[{first}:{end}]"
            return [Column.of(own, rows[first:end])]

        return Splittable(name, len(rows), columns)

    folder = tmp_path_factory.mktemp("model")
    write_shards(folder, [splittable(name, rows) for name, rows in matrices.items()], most)
    files = [path for path in folder.iterdir() if path.name != INDEX]
    assert all(path.stat().st_size <= most for path in files)
    found = tensors_of(folder)
    assert sum(tensor.shape[0] for tensor in found.values()) == sum(sizes)
    for name, rows in matrices.items():
        if name in found:
            assert torch.equal(found[name], rows)
    total = sum(path.stat().st_size for path in files)
    assert len(files) <= 2 * total // most + len(sizes), "files are filled"


def test_a_directory_with_something_else_is_refused(table_name: TableName, tmp_path: Path) -> None:
    table = DistEmbedding(None, DIM, table_name())
    (tmp_path / "config.json").write_text("mine")
    with pytest.raises(FileExistsError, match=rf"{tmp_path} must be new or empty .*, but it holds \['config.json'\]"):
        export_safetensors(tmp_path, [table], max_shard_size=1000)
    assert (tmp_path / "config.json").read_text() == "mine"
    with pytest.raises(FileExistsError, match=r"config\.json"):
        export_safetensors(tmp_path / "config.json", [table], max_shard_size=1000)
    export_safetensors(tmp_path / "new", [table], max_shard_size=1000)
    with pytest.raises(FileExistsError, match="it holds"):
        export_safetensors(tmp_path / "new", [table], max_shard_size=1000)


def test_an_export_that_fails_leaves_nothing(
    table_name: TableName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = DistEmbedding(None, DIM, table_name())
    table.weight[torch.arange(100)] = torch.ones(100, DIM)
    reads = iter(range(10))
    read = cut.TableCut.values

    def fails(*args: Any) -> Tensor:
        if next(reads) == 9:
            raise OSError("no more")
        return read(*args)

    monkeypatch.setattr(cut.TableCut, "values", fails)
    (tmp_path / "here").mkdir()
    for folder in ("here", "new"):
        reads = iter(range(10))
        with pytest.raises(OSError, match="no more"):
            export_safetensors(tmp_path / folder, [table], max_shard_size=300)
    assert [path.name for path in tmp_path.rglob("*")] == ["here"]


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from recstore_ops import DistEmbedding
from recstore_ops.transfer import export_safetensors
folder, calls = Path(sys.argv[1]), 0
table = DistEmbedding(None, 4, "t")
table.weight[torch.arange(1000)] = torch.ones(1000, 4)
replace = Path.replace
def killed(path, target):
    os.kill(os.getpid(), signal.SIGKILL)
Path.replace = killed
export_safetensors(folder, [table], max_shard_size=10_000)
"""


def test_an_export_that_is_killed_leaves_nothing_that_passes_for_one(table_name: TableName, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    ended = subprocess.run([sys.executable, "-c", KILLED, os.fspath(folder)], check=False, timeout=120)
    assert ended.returncode == -signal.SIGKILL
    left = sorted(path.name for path in folder.iterdir())
    assert len(left) > 2
    assert all(name.endswith(".new") for name in left)
    table = DistEmbedding(None, 4, table_name())
    with pytest.raises(FileNotFoundError, match="has neither an index"):
        import_safetensors(folder, {"t": table})
    table.weight[torch.arange(3)] = torch.ones(3, 4)
    export_safetensors(folder, [table], max_shard_size=10_000)
    assert sorted(path.name for path in folder.iterdir()) == ["model-00001-of-00001.safetensors", INDEX]


MEMORY = """
import resource, torch
from recstore_ops import DistEmbedding, RecStoreClient
from recstore_ops.transfer import export_safetensors, import_safetensors
table = DistEmbedding(600_000, 64, "large")
for start in range(0, 600_000, 100_000):
    table.weight[torch.arange(start, start + 100_000)] = torch.randn(100_000, 64)
small = DistEmbedding(10, 64, "small")
for as_matrices in (False, True):
    export_safetensors(f"warm{as_matrices}", [small], max_shard_size=1 << 20, as_matrices=as_matrices)
import_safetensors("warmTrue", {"small.weight": small})

def own(what):
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith(what)).split()[1]) // 1024

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for as_matrices in (False, True):
    export_safetensors(f"large{as_matrices}", [table], max_shard_size=50 << 20, as_matrices=as_matrices)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
del table
RecStoreClient().drop("large")
for path, name in (("largeFalse", "large"), ("largeTrue", "large.weight")):
    target = DistEmbedding(600_000, 64, path, memory_limit=40 << 20, disk=".")
    before = own("RssAnon")
    import_safetensors(path, {name: target})
    print(own("RssAnon") - before, len(target.table))
"""


@pytest.mark.tier("all")
def test_sharded_exports_and_imports_need_little_memory(tmp_path: Path) -> None:
    of_exports, *of_imports = output_of(MEMORY, cwd=tmp_path).splitlines()
    assert int(of_exports) < 100  # MiB, of 146: twice 16 at a time, ids, and what the allocator keeps.
    for each in of_imports:
        grown, rows = map(int, each.split())
        assert rows == 600_000
        assert grown < 100  # MiB, the table's own 40 among them.


def test_codes_are_refused_although_their_scales_lie_beside(table_name: TableName, tmp_path: Path) -> None:
    table = DistEmbedding(6, DIM, table_name())
    codes = {"codes": torch.ones(2, DIM).to(torch.float8_e4m3fn), "codes_scale_inv": torch.ones(2)}
    index = write_model(tmp_path / "model", {"a.safetensors": codes})
    with pytest.raises(
        TypeError, match=r'got torch.float8_e4m3fn, by "codes" of .*: codes are multiplied by the scales'
    ):
        import_safetensors(index, {"codes": table})
    assert len(table.table) == 0
