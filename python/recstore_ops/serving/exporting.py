"""Writes a model as a bundle: its program, and the tables that it reads, frozen."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_flatten

from recstore_ops.config.paths import user_path
from recstore_ops.serving import graph
from recstore_ops.serving.frozen_table import EncodingName, FrozenTable, freeze
from recstore_ops.serving.manifest import GRAPH, PROGRAM, STATE, BundledTable, Manifest, sum_of
from recstore_ops.serving.program_tables import state_of, tables_of
from recstore_ops.serving.program_tensors import described
from recstore_ops.table.table import Table


def export(
    model: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    directory: str | os.PathLike[str],
    *,
    encoding: EncodingName | Mapping[str, EncodingName] = "float32",
    dynamic_shapes: Any = None,
    replace: bool = False,
) -> Path:
    """Writes a model and the rows that its tables have now to a directory, which `load_bundle` reads.

    The model is exported in evaluation mode by `torch.export.export`. The directory is written beside its place and
    then renamed.

    Args:
        model: with tables of this process.
        example_inputs: the positional arguments of a call, or its keyword arguments by name. They are not kept. A batch
            should have two rows or more: a size of 1 may be taken for one that never changes.
        directory: of the bundle.
        encoding: how rows are kept, of all tables or by their names; see `freeze`.
        dynamic_shapes: as in `torch.export.export`; None lets the first dimension of every tensor vary.
        replace: whether a bundle that is there may go.

    Raises:
        ValueError: there is something at `directory` that may not go, an encoding names a table that the model does not
            read, a table is sharded over processes, or the model reads a table that has no name.
        OSError: the bundle cannot be written, or a row has a value that its encoding has no number for.
    """
    target = Path(user_path(directory, "directory"))
    _check_target(target, replace=replace)
    exported = ExportedModel(model, example_inputs, dynamic_shapes)
    encodings = encodings_of(exported.tables, encoding)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as beside:
        written = Path(beside) / "bundle"
        exported.write(written, encodings)
        if target.exists():
            shutil.rmtree(target)
        written.rename(target)
    return target


class ExportedModel:
    """The program of a model.

    Attributes:
        tables: those that it reads, by their names.
        state: the names of the tensors that it needs, if it has a graph.

    Raises:
        ValueError: the model reads a table that has no name.
    """

    def __init__(
        self, model: nn.Module, example_inputs: Sequence[Any] | Mapping[str, Any], dynamic_shapes: Any = None
    ) -> None:
        self._program = _exported(model, _Arguments.of(example_inputs), dynamic_shapes)
        self._described = described(self._program)
        read = tables_of(self._program)
        self.tables = {name: table for name, (table, _) in read.items()}
        self._constants = {name: constants for name, (_, constants) in read.items()}
        self._program.example_inputs = None  # They are somebody's rows, and pickled.
        self._graph = None
        with suppress(graph.NoGraphError):
            self._graph = graph.written(self._program)

    @property
    def state(self) -> set[str] | None:
        """The names of the tensors that the program needs beside its inputs; None for one that has no graph."""
        return None if self._graph is None else set(self._state())

    def write(self, directory: Path, encodings: Mapping[str, EncodingName], *, graph_only: bool = False) -> None:
        """Writes program and tables, as they are now, to a new directory.

        Args:
            directory: of the bundle.
            encodings: of tables, by their names.
            graph_only: writes the graph, and not what torch takes long to write.

        Raises:
            OSError: it cannot be written, or a row has a value that its encoding has no number for.
        """
        (directory / "tables").mkdir(parents=True)
        tables = [self._frozen(directory, *each, encodings) for each in enumerate(self.tables.values())]
        Manifest(
            torch=torch.__version__,
            recstore_ops=version("recstore-ops"),
            files=self._write_program(directory, graph_only=graph_only),
            tables=tuple(tables),
            **self._described._asdict(),
        ).write(directory)

    def _state(self) -> dict[str, Tensor]:
        return state_of(self._program, {name for constants in self._constants.values() for name in constants})

    def _write_program(self, directory: Path, *, graph_only: bool) -> dict[str, dict[str, int]]:
        """Writes the program, and its graph where it has one, and returns what the manifest says of the files."""
        files = []
        if not graph_only:
            torch.export.save(self._program, directory / PROGRAM)
            files += [PROGRAM]
        if self._graph is not None:
            (directory / GRAPH).write_text(self._graph, encoding="utf-8")
            # Those that are one tensor under several names are written apart.
            state = {name: value.contiguous().clone() for name, value in self._state().items()}
            safetensors.torch.save_file(state, directory / STATE)
            files += [GRAPH, STATE]
        return {name: sum_of(directory / name) for name in files}

    def _frozen(
        self, directory: Path, number: int, table: Table, encodings: Mapping[str, EncodingName]
    ) -> BundledTable:
        file = f"tables/{number}.safetensors"
        freeze(table, directory / file, encodings[table.name])
        return BundledTable(table.name, file, FrozenTable(directory / file).fingerprint, self._constants[table.name])


def _check_target(target: Path, *, replace: bool) -> None:
    if not target.exists():
        return
    if not replace:
        raise ValueError(f"{target} is there already; replace=True, or --replace, writes the bundle in its place")
    Manifest.read(target)


class _Arguments(NamedTuple):
    """Of a call."""

    positional: tuple[Any, ...]
    by_name: dict[str, Any]

    @classmethod
    def of(cls, given: Sequence[Any] | Mapping[str, Any]) -> _Arguments:
        return cls((), dict(given)) if isinstance(given, Mapping) else cls(tuple(given), {})


def _exported(model: nn.Module, arguments: _Arguments, dynamic_shapes: Any) -> ExportedProgram:
    """Returns the program of a model."""
    if dynamic_shapes is None:
        dynamic_shapes = _first_dimensions(arguments.by_name or arguments.positional)
    was_training = model.training
    try:
        with torch.no_grad():
            return torch.export.export(model.eval(), *arguments, dynamic_shapes=dynamic_shapes)
    finally:
        model.train(was_training)


def _first_dimensions(value: Any) -> Any:
    """Shapes by which the first dimension of every tensor varies, also of those within containers."""
    if isinstance(value, Tensor):
        return {0: Dim.AUTO} if value.dim() else None
    if isinstance(value, dict):
        return {name: _first_dimensions(each) for name, each in value.items()}
    leaves, structure = tree_flatten(value)
    if structure.is_leaf():
        return None
    if isinstance(value, list | tuple):
        return type(value)(map(_first_dimensions, value))
    return [_first_dimensions(leaf) for leaf in leaves]


def encodings_of(names: Collection[str], given: EncodingName | Mapping[str, EncodingName]) -> dict[str, EncodingName]:
    """The encoding of each table.

    Raises:
        ValueError: one is given for a table that is not among the names.
    """
    if isinstance(given, str):
        return dict.fromkeys(names, given)
    if unknown := sorted(given.keys() - set(names)):
        raise ValueError(f"encoding names table {unknown[0]!r}, the model reads {', '.join(names) or 'none'}")
    return {name: given.get(name, "float32") for name in names}
