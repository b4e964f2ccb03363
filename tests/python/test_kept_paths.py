"""Paths that documents and pickles name stay, wherever the code lies."""

from __future__ import annotations

import ast
import copy
import importlib
import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
import torch
from warm_recstore import run_recstore

import recstore_ops
from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    DistTensor,
    EmbeddingBagConfig,
    EmbeddingConfig,
    HashTable,
    JaggedTensor,
    KeyedJaggedTensor,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
    Table,
    TableConfig,
)

pytestmark = pytest.mark.tier("quick")

PACKAGE = Path(recstore_ops.__file__).parent

KEPT = {
    "autograd": "merge_gradients set_merge GradWorkerMeanFunction HashTableLookupFunction _DistEmbFunction",
    "checkpoint": "save save_async load compact save_part commit new_snapshot_name shard_of SaveReport LoadReport",
    "cli": "app main",
    "doctor": "examine examine_config Finding",
    "inspect": "inspect_table inspect_checkpoint TableReport RowNorms",
    "servers": "set_ps_servers set_ps_config set_ps_backend current_ps_backend",
    "sharding": "ShardedPipeline shard_of save load exchange_statistics Shard GradReduce",
    "state": "tables_left_out table_rows replace_rows",
    "training": "train TrainingConfig build_model open_input FactorizationMachine",
    "transfer": "from_embedding import_rows import_safetensors import_torchrec export_safetensors export_parquet "
    "export_torchrec",
}


@pytest.mark.parametrize("module", sorted(KEPT))
def test_a_documented_path_has_its_names(module: str) -> None:
    found = importlib.import_module(f"recstore_ops.{module}")
    assert [name for name in KEPT[module].split() if not hasattr(found, name)] == []


def test_ray_is_found_where_it_is_documented() -> None:
    pytest.importorskip("ray")
    found = importlib.import_module("recstore_ops.ray")
    assert all(hasattr(found, name) for name in ("start_servers", "connect", "disconnect", "Servers"))


def test_the_command_is_a_module() -> None:
    shown = run_recstore("--help")
    assert shown.returncode == 0
    assert "An embedding store for PyTorch." in shown.stdout


def test_few_files_lie_beside_the_rooms() -> None:
    assert sorted(path.name for path in PACKAGE.glob("*.py")) == ["__init__.py", "__main__.py", "autograd.py"]


def test_from_the_package_itself_only_rooms_and_the_native_module_are_imported() -> None:
    # These two use the package as a program would.
    above = ("cli", "training")
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    for path in PACKAGE.rglob("*.py"):
        if path.parent == PACKAGE or path.relative_to(PACKAGE).parts[0] in above:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "recstore_ops":
                names = {name.name for name in node.names}
                assert names <= rooms | {"_native"}, f"{path}: {names}"


def public_objects(name: str) -> dict[str, Any]:
    bag = EmbeddingBagConfig(name=f"{name}/bag", num_embeddings=None, embedding_dim=2, feature_names=["f"])
    rows = EmbeddingConfig(name=f"{name}/rows", num_embeddings=None, embedding_dim=2, feature_names=["f"])
    table = Table(f"{name}/table", 2, TableConfig())
    return {
        "config": TableConfig(),
        "table": table,
        "tensor": DistTensor((4, 2), torch.float32, f"{name}/tensor"),
        "embedding": DistEmbedding(None, 2, f"{name}/embedding"),
        "bag": DistEmbeddingBag(None, 2, f"{name}/embedding bag"),
        "hash table": HashTable(2, name=f"{name}/hash table"),
        "bag collection": RecStoreEmbeddingBagCollection([bag]),
        "collection": RecStoreEmbeddingCollection([rows]),
        "features": KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1])),
        "jagged": JaggedTensor(torch.tensor([1]), lengths=torch.tensor([1])),
        "model": torch.nn.Sequential(DistEmbedding(None, 2, f"{name}/model")),
    }


def globals_of(pickled: bytes) -> set[tuple[str, str]]:
    """The module and name of every class and function that a pickle names."""
    found, strings = set(), []
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name == "GLOBAL":
            module, _, name = str(argument).partition(" ")
            found.add((module, name))
        elif opcode.name == "STACK_GLOBAL":
            found.add((strings[-2], strings[-1]))
        elif isinstance(argument, str):
            strings.append(argument)
    return found


def test_pickles_name_public_classes_alone(table_name: Any) -> None:
    for kind, value in public_objects(table_name()).items():
        for protocol in (2, pickle.DEFAULT_PROTOCOL):
            own = {each for each in globals_of(pickle.dumps(value, protocol)) if each[0].startswith("recstore_ops")}
            private = {each for each in own if each[0] != "recstore_ops" or each[1] not in recstore_ops.__all__}
            assert private == set(), (kind, private)


def test_whole_modules_are_saved_and_copied(table_name: Any) -> None:
    for value in public_objects(table_name()).values():
        if isinstance(value, torch.nn.Module):
            file = io.BytesIO()
            torch.save(value, file)
            file.seek(0)
            assert type(torch.load(file, weights_only=False)) is type(value)
            assert type(copy.copy(value)) is type(value)
