"""Programs of bundles that AOTInductor compiled: what they answer, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_following import IDS, Clicks, answer
from torch import Tensor, nn

from recstore_ops import DistEmbedding, KeyedJaggedTensor, RecStoreEmbeddingBagCollection
from recstore_ops.serving import compiled, export, load_bundle
from recstore_ops.serving.manifest import Manifest

pytestmark = pytest.mark.tier("test")
IN_ALL = pytest.mark.tier("all")

TableName = Callable[[], str]


@IN_ALL
@pytest.mark.parametrize("encoding", ["float32", "int8"])
def test_a_compiled_program_answers_as_the_graph(table_name: TableName, tmp_path: Path, encoding: str) -> None:
    clicks = Clicks(table_name(), table_name(), optimizer={"kind": "sgd"})
    path = export(clicks, (IDS,), tmp_path / "bundle", encoding=encoding, compiled=True)  # pyright: ignore[reportArgumentType]
    plain, bundle = load_bundle(path), load_bundle(path, compiled=True, trusted=True)
    for ids in (IDS, torch.randint(-5, 80, (64, 2))):
        torch.testing.assert_close(bundle(ids), plain(ids))
    with pytest.raises(ValueError, match="ids"):
        bundle(IDS.float())
    program = (
        "import sys, torch, recstore_ops\n"
        "other = recstore_ops.DistEmbedding(None, 4, 'somebody')\n"
        "bundle = recstore_ops.load_bundle(sys.argv[1], compiled=True, trusted=True)\n"
        "print(bundle(torch.tensor([[1, 2], [3, 4], [5, 99]])).tolist())"
    )
    out = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True).stdout
    torch.testing.assert_close(torch.tensor(json.loads(out)), plain(IDS))
    if encoding == "float32":
        torch.testing.assert_close(bundle(IDS), answer(clicks))
    manifest = Manifest.read(path)
    renamed = [replace(table, constants=(f"other of {table.name}",)) for table in manifest.tables]
    replace(manifest, tables=tuple(renamed)).write(path)
    with pytest.raises(OSError, match=r"compiled\.pt2 reads no table 'compiled/test_a_compiled"):
        load_bundle(path, compiled=True, trusted=True)
    manifest.write(path)
    (path / "compiled.pt2").write_bytes((path / "compiled.pt2").read_bytes()[:-1])
    with pytest.raises(OSError, match=r"compiled\.pt2 is not that of this bundle"):
        load_bundle(path, compiled=True, trusted=True)


@IN_ALL
def test_a_table_of_two_modules_is_read_by_both(table_name: TableName, tmp_path: Path) -> None:
    first = DistEmbedding(None, 4, table_name(), initializer={"kind": "normal", "std": 1.0})
    second = DistEmbedding(None, 4, first.table.name, initializer={"kind": "normal", "std": 1.0}, on_existing="share")
    model = Both(first, second)
    bundle = load_bundle(export(model, (IDS,), tmp_path / "bundle", compiled=True), compiled=True, trusted=True)
    torch.testing.assert_close(bundle(IDS), answer(model))


class Both(nn.Module):
    """What two modules over one table give."""

    def __init__(self, first: DistEmbedding, second: DistEmbedding) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, ids: Tensor) -> Tensor:
        """Returns rows beside rows."""
        return torch.cat([self.first(ids), self.second(ids + 1)], dim=-1)


@IN_ALL
def test_features_are_inputs_of_a_compiled_program(table_name: TableName, tmp_path: Path) -> None:
    config = {"name": table_name(), "num_embeddings": None, "embedding_dim": 4, "feature_names": ["a", "b"]}
    bags = RecStoreEmbeddingBagCollection([config], initializer={"kind": "normal", "std": 1.0})
    features = KeyedJaggedTensor(["a", "b"], torch.arange(5), lengths=torch.tensor([2, 1, 0, 0, 1, 1]))
    bundle = load_bundle(export(bags, (features,), tmp_path / "bags", compiled=True), compiled=True, trusted=True)
    one = KeyedJaggedTensor(["a", "b"], torch.tensor([3, 5]), lengths=torch.tensor([0, 2]))
    with torch.no_grad():
        for each in (features, one):
            torch.testing.assert_close(bundle(each), bags(each))


def test_a_program_for_others_is_refused(table_name: TableName, tmp_path: Path) -> None:
    path = export(DistEmbedding(None, 4, table_name()), (IDS,), tmp_path / "bundle")
    with pytest.raises(ValueError, match="has no compiled program: export it with compiled=True"):
        load_bundle(path, compiled=True)
    with pytest.raises(ValueError, match="a compiled program does not follow: give compiled or follow"):
        load_bundle(path, compiled=True, follow=tmp_path)
    manifest = Manifest.read(path)
    replace(manifest, compiled_for="riscv64 DEFAULT").write(path)
    with pytest.raises(ValueError, match=r"was compiled for riscv64 DEFAULT, this machine has"):
        load_bundle(path, compiled=True)
    replace(manifest, compiled_for=compiled.processor(), torch="2.1.0").write(path)
    with pytest.raises(ValueError, match=r"was compiled for torch 2\.1\.0, this is"):
        load_bundle(path, compiled=True)
    assert load_bundle(path)(IDS).shape == (3, 2, 4), "its graph answers still"


@pytest.mark.parametrize(
    ("compiled_for", "here", "runs"),
    [
        ("x86_64 AVX2", "x86_64 AVX512", True),
        ("x86_64 AVX512", "x86_64 AVX2", False),
        ("x86_64 DEFAULT", "x86_64 DEFAULT", True),
        ("aarch64 SVE256", "aarch64 SVE256", True),
        ("aarch64 SVE256", "aarch64 DEFAULT", False),
        ("aarch64 DEFAULT", "x86_64 DEFAULT", False),
    ],
)
def test_machine_code_runs_where_the_processor_can(compiled_for: str, here: str, *, runs: bool) -> None:
    assert compiled._runs_on(compiled_for, here) is runs


def test_what_cannot_be_compiled_is_told(
    table_name: TableName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("No working C++ compiler found")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail)
    model = nn.Sequential(DistEmbedding(None, 4, table_name()))
    with pytest.raises(RuntimeError, match="AOTInductor could not compile the program: No working C"):
        export(model, (IDS,), tmp_path / "bundle", compiled=True)
    assert list(tmp_path.iterdir()) == []
