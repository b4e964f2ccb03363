"""A model as one directory: its exported program, and the tables that it reads, frozen.

model/manifest.json              what belongs to the bundle, with checksums
model/program.pt2                of `torch.export.save`
model/tables/0.safetensors       a frozen table
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from recstore_ops.config.paths import user_path
from recstore_ops.serving.frozen_table import EncodingName, FrozenMemory, FrozenTable, freeze
from recstore_ops.serving.manifest import PROGRAM, BundledTable, Manifest, sum_of
from recstore_ops.serving.program_tables import put_handle, tables_of
from recstore_ops.serving.program_tensors import described
from recstore_ops.table.table import Table


class Bundle(nn.Module):
    """The model of a bundle; called as the model that was exported, without gradients.

    Attributes:
        path: the directory.
        manifest: what is in it.
        tables: by the names that they had.
    """

    def __init__(
        self, path: Path, manifest: Manifest, program: ExportedProgram, tables: Mapping[str, FrozenTable]
    ) -> None:
        super().__init__()
        self.path = path
        self.manifest = manifest
        self.tables = dict(tables)
        self._program = program.module()
        self._structure = program.call_spec.in_spec
        self.training = False

    def train(self, mode: bool = True) -> Bundle:
        """Stays as it is: in evaluation mode.

        Raises:
            RuntimeError: training mode is asked for.
        """
        if mode:
            raise RuntimeError(f"the bundle {self.path} only predicts: train the model that it was exported from")
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the program gives."""
        with torch.no_grad():
            return self._program(*args, **kwargs)

    def flat(self, inputs: Sequence[Tensor]) -> list[Any]:
        """Returns the outputs of the manifest for its inputs, both in their order."""
        assert self._structure is not None, "torch.export.load gives it"
        args, kwargs = tree_unflatten(inputs, self._structure)
        return tree_leaves(self(*args, **kwargs))


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
    arguments = _Arguments.of(example_inputs)
    program, outputs = _exported(model, arguments, dynamic_shapes)
    read = tables_of(program)
    encodings = _encodings(list(read), encoding)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as beside:
        written = Path(beside) / "bundle"
        (written / "tables").mkdir(parents=True)
        tables = [_frozen(written, number, *each, encodings) for number, each in enumerate(read.values())]
        program.example_inputs = None  # They are somebody's rows, and pickled.
        torch.export.save(program, written / PROGRAM)
        Manifest(
            torch=torch.__version__,
            recstore_ops=version("recstore-ops"),
            program=sum_of(written / PROGRAM),
            tables=tuple(tables),
            **described(program, outputs)._asdict(),
        ).write(written)
        if target.exists():
            shutil.rmtree(target)
        written.rename(target)
    return target


def load_bundle(directory: str | os.PathLike[str], *, memory: FrozenMemory = "mapped") -> Bundle:
    """Opens a bundle. No name of a table is taken: any tables may be open in the process, other bundles too.

    Args:
        directory: as `export` wrote it. Its files must not be changed in place as long as the bundle is in use.
        memory: of the tables, see `FrozenTable`.

    Raises:
        ValueError: there is no bundle, or one of another version.
        OSError: a file is missing, cut off, changed, or of another bundle. Rows are looked at when they are first read.
    """
    path = Path(user_path(directory, "directory"))
    manifest = Manifest.read(path)
    program = torch.export.load(manifest.check_program(path))
    tables = {}
    for bundled in manifest.tables:
        tables[bundled.name] = table = _opened(path, bundled, memory)
        for constant in bundled.constants:
            put_handle(program, constant, table.handle)
    return Bundle(path, manifest, program, tables)


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


def _exported(model: nn.Module, arguments: _Arguments, dynamic_shapes: Any) -> tuple[ExportedProgram, Any]:
    """Returns the program of a model, and what the model gives for the arguments."""
    if dynamic_shapes is None:
        dynamic_shapes = _first_dimensions(arguments.by_name or arguments.positional)
    was_training = model.training
    try:
        with torch.no_grad():
            outputs = model.eval()(*arguments.positional, **arguments.by_name)
            return torch.export.export(model, *arguments, dynamic_shapes=dynamic_shapes), outputs
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


def _encodings(names: Sequence[str], given: EncodingName | Mapping[str, EncodingName]) -> dict[str, EncodingName]:
    if isinstance(given, str):
        return dict.fromkeys(names, given)
    if unknown := sorted(given.keys() - set(names)):
        raise ValueError(f"encoding names table {unknown[0]!r}, the model reads {', '.join(names) or 'none'}")
    return {name: given.get(name, "float32") for name in names}


def _frozen(
    written: Path, number: int, table: Table, constants: tuple[str, ...], encodings: Mapping[str, EncodingName]
) -> BundledTable:
    file = f"tables/{number}.safetensors"
    freeze(table, written / file, encodings[table.name])
    return BundledTable(table.name, file, FrozenTable(written / file).fingerprint, constants)


def _opened(path: Path, bundled: BundledTable, memory: FrozenMemory) -> FrozenTable:
    table = FrozenTable(path / bundled.file, memory)
    if (table.name, table.fingerprint) != (bundled.name, bundled.fingerprint):
        raise OSError(
            f"{table.path} is not of this bundle: expected table {bundled.name!r} with fingerprint "
            f"{bundled.fingerprint:08x}, got {table.name!r} with {table.fingerprint:08x}"
        )
    return table
