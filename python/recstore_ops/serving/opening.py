"""Opens the parts of a bundle: all by one directory that is held, each compared with the manifest in it."""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from torch import Tensor

from recstore_ops.config.directory import Directory
from recstore_ops.config.extras import imported
from recstore_ops.serving.frozen_table import FrozenMemory, FrozenTable
from recstore_ops.serving.graph import Graph
from recstore_ops.serving.graph_operators import Operators
from recstore_ops.serving.manifest import COMPILED, GRAPH, NAME, PROGRAM, STATE, BundledTable, Manifest


class BundleFiles:
    """The files of a bundle. The contents in memory are those that were checked, even if the directory changes.

    Args:
        place: the directory of the bundle, or its path.

    Attributes:
        path: of the bundle.
        manifest: the contents of the bundle.

    Raises:
        ValueError: there is no bundle, or one of another version.
        OSError: the manifest is damaged, or a file is missing or has another size.
    """

    def __init__(self, place: Path | Directory) -> None:
        try:
            self._directory = place if isinstance(place, Directory) else Directory(place)
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(f"{place} is no bundle: it has no {NAME}") from None
        self.path = self._directory.path
        self.manifest = Manifest.read(self._directory)
        for name in self.manifest.files:
            # Sizes at once, checksums when a file is read: a bundle opens in milliseconds.
            with self._directory.open(name) as file:
                self._compare(name, "bytes", os.fstat(file.fileno()).st_size)

    def graph(self, operators: Operators) -> Graph:
        """Reads the graph of a program that has one.

        Raises:
            OSError: its file is changed.
            ValueError: it is no graph, or calls what is no operator of graphs.
        """
        handles = {constant for table in self.manifest.tables for constant in table.constants}
        try:
            graph = Graph(self._read(GRAPH), handles, operators)
            for name, count in (("inputs", graph.in_spec.num_leaves), ("outputs", graph.out_spec.num_leaves)):
                if count != (described := len(getattr(self.manifest, name))):
                    raise ValueError(f"it has {count} {name}, the manifest {described}")
        except ValueError as error:
            raise ValueError(f"{self.path / GRAPH}: {error}") from error
        return graph

    def state(self, graph: Graph, tables: Mapping[str, FrozenTable]) -> dict[str, Tensor]:
        """Reads the tensors that a graph needs, and adds the handles of tables, which programs hold as constants.

        Raises:
            OSError: their file is changed, or no safetensors file.
            ValueError: it lacks a tensor.
        """
        content = self._read(STATE)
        try:
            state = aligned(imported("safetensors.torch", "serve", "a bundle").load(content))
        except Exception as error:
            raise OSError(f"{self.path / STATE} is damaged: {error}") from error
        handles = {name: tables[table.name].handle for table in self.manifest.tables for name in table.constants}
        if missing := sorted(set(graph.state) - state.keys() - handles.keys()):
            raise ValueError(f"{self.path / STATE} has no tensor {missing[0]!r}, which the graph needs")
        return {**state, **handles}

    def tables(self, memory: FrozenMemory) -> dict[str, FrozenTable]:
        """Opens the tables, by their names.

        Raises:
            OSError: a file is missing, cut off, or of another bundle.
        """
        return {bundled.name: self._table(bundled, memory) for bundled in self.manifest.tables}

    def program(self) -> bytes:
        """Reads the program as torch wrote it: code.

        Raises:
            OSError: its file is changed.
        """
        return self._read(PROGRAM)

    @contextmanager
    def compiled(self) -> Iterator[Path]:
        """Yields a private copy of the compiled program, which is code too.

        Raises:
            OSError: its file is changed, or cannot be copied.
        """
        # torch loads by path. From the bundle it might get another file than the one whose checksum was compared.
        with tempfile.TemporaryDirectory(prefix="recstore-compiled-") as directory:
            path = Path(directory) / COMPILED
            path.write_bytes(self._read(COMPILED))  # by path: a new directory
            yield path

    def _read(self, name: str) -> bytes:
        if (expected := self.manifest.files.get(name)) is None:
            raise ValueError(f"{self.path} has no {name}")
        content = self._directory.read(name, most=expected["bytes"])
        self._compare(name, "bytes", len(content))
        self._compare(name, "crc32", zlib.crc32(content))
        return content

    def _compare(self, name: str, what: Literal["bytes", "crc32"], found: int) -> None:
        expected = self.manifest.files[name][what]
        if found != expected:
            told = f"expected {expected} bytes, got {found}" if what == "bytes" else "its checksum is another"
            raise OSError(f"{self.path / name} is not that of this bundle: {told}")

    def _table(self, bundled: BundledTable, memory: FrozenMemory) -> FrozenTable:
        table = FrozenTable.within(self._directory, bundled.file, memory)
        if (table.name, table.fingerprint) != (bundled.name, bundled.fingerprint):
            raise OSError(
                f"{table.path} is not of this bundle: expected table {bundled.name!r} with fingerprint "
                f"{bundled.fingerprint:08x}, got {table.name!r} with {table.fingerprint:08x}"
            )
        return table


def aligned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors that lie as those of torch do.

    In a file they lie anywhere, and a product of such matrices can have other bits.
    """
    return {name: value.clone() for name, value in tensors.items()}
