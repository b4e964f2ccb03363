"""Arguments that ranks give to calls that they make together: where they differ, all raise, and hear both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

from recstore_ops import DistEmbedding, DistEmbeddingBag, export, freeze, sharding

pytestmark = pytest.mark.tier("test")

IDS = torch.arange(4)


def calls_of(group: dist.ProcessGroup, name: str, path: Path) -> dict[str, Callable[[], Any]]:
    """Calls that differ between two ranks, by what differs."""
    is_first, module = group.rank() == 0, DistEmbedding(None, 2, name, process_group=group)
    module.reset_parameters()
    model = torch.nn.Sequential(module)

    def save(**arguments: Any) -> Any:
        return sharding.save(path / "saved", group, **arguments)

    return {
        "kind": lambda: save(kind="full" if is_first else "auto"),
        "keep": lambda: save(keep=1 if is_first else 2),
        "replace": lambda: save(replace=is_first),
        "metadata": lambda: save(metadata={"a": group.rank()}),
        "metadata that JSON cannot hold": lambda: save(metadata={"a": 1} if is_first else {1, 2}),
        "directory": lambda: export(model, (IDS,), path / f"bundle {group.rank()}"),
        "encoding": lambda: export(model, (IDS,), path / "bundle", encoding="int8" if is_first else "float32"),
        "path": lambda: freeze(module.table, path / f"frozen {group.rank()}"),
        "encoding of rows": lambda: freeze(module.table, path / "frozen", "int8" if is_first else "float32"),
        "padding_idx": lambda: DistEmbedding(None, 2, f"{name}/p", process_group=group, padding_idx=group.rank()),
        "padding_idx of bags": lambda: DistEmbeddingBag(
            None, 2, f"{name}/b", process_group=group, padding_idx=None if is_first else 1
        ),
    }


def said_by(group: dist.ProcessGroup, name: str, path: Path) -> dict[str, str]:
    said = {}
    for what, call in calls_of(group, name, path).items():
        try:
            call()
        except Exception as error:
            said[what] = str(error)
        else:
            said[what] = "nothing"
    # What is the same, and metadata of the first rank alone, goes on.
    sharding.save(path / "saved", group, metadata={"a": 1} if group.rank() == 0 else None)
    assert sharding.load(path / "saved", group).metadata == {"a": 1}
    return said


def test_where_arguments_differ_all_ranks_raise(ranks: Ranks, table_name: Callable[[], str], tmp_path: Path) -> None:
    for rank, said in enumerate(ranks.run(2, said_by, table_name(), tmp_path)):
        for what, message in said.items():
            if "padding_idx" in what:
                assert "opens a table of another name or configuration than rank" in message, (rank, what, message)
            elif "JSON" in what:
                assert "metadata must be what JSON can hold" in message, (rank, what, message)
            else:
                expected = f"all ranks give the same {what.partition(' ')[0]}, and rank 0 gives "
                assert expected in message, (rank, what, message)
                assert ", rank 1 " in message, (rank, what, message)
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]
