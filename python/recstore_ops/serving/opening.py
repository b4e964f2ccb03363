"""Reads the parts of a bundle, each compared with what its manifest says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from recstore_ops.config.extras import imported
from recstore_ops.serving.frozen_table import FrozenMemory, FrozenTable
from recstore_ops.serving.graph import Graph
from recstore_ops.serving.manifest import GRAPH, STATE, BundledTable, Manifest


def read_graph(path: Path, manifest: Manifest) -> Graph:
    """Reads the graph of a program that has one.

    Raises:
        OSError: its file is missing or changed.
        ValueError: this version of torch lacks an operator.
    """
    return Graph(manifest.check_file(path, GRAPH).read_text(encoding="utf-8"))


def read_state(path: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Reads the tensors that a graph needs.

    Raises:
        OSError: their file is missing or changed.
    """
    return aligned(imported("safetensors.torch", "serve", "a bundle").load_file(manifest.check_file(path, STATE)))


def aligned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors that lie as those of torch do.

    In a file they lie anywhere, and a product of such matrices can have other bits.
    """
    return {name: value.clone() for name, value in tensors.items()}


def opened_tables(path: Path, manifest: Manifest, memory: FrozenMemory) -> dict[str, FrozenTable]:
    """Opens the tables, by their names.

    Raises:
        OSError: a file is missing, cut off, or of another bundle.
    """
    return {bundled.name: _opened(path, bundled, memory) for bundled in manifest.tables}


def with_handles(
    state: Mapping[str, Tensor], manifest: Manifest, tables: Mapping[str, FrozenTable]
) -> dict[str, Tensor]:
    """The state with the handles of tables, which programs hold as constants."""
    handles = {constant: tables[bundled.name].handle for bundled in manifest.tables for constant in bundled.constants}
    return {**state, **handles}


def _opened(path: Path, bundled: BundledTable, memory: FrozenMemory) -> FrozenTable:
    table = FrozenTable(path / bundled.file, memory)
    if (table.name, table.fingerprint) != (bundled.name, bundled.fingerprint):
        raise OSError(
            f"{table.path} is not of this bundle: expected table {bundled.name!r} with fingerprint "
            f"{bundled.fingerprint:08x}, got {table.name!r} with {table.fingerprint:08x}"
        )
    return table
