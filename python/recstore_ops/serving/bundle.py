"""A model as one directory: its exported program, and the tables that it reads, frozen.

model/manifest.json              what belongs to the bundle, with checksums
model/program.pt2                of `torch.export.save`
model/tables/0.safetensors       a frozen table
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from recstore_ops.config.paths import user_path
from recstore_ops.nn.dist_embedding import TableModule
from recstore_ops.serving.frozen_table import EncodingName, FrozenTable, freeze
from recstore_ops.serving.manifest import PROGRAM, BundledTable, Manifest, described_inputs, sum_of
from recstore_ops.table.table import Table


class Bundle(nn.Module):
    """The model of a bundle; called as the model that was exported, without gradients.

    Attributes:
        path: the directory.
        manifest: what is in it.
        tables: by the names that they had.
    """

    def __init__(self, path: Path, manifest: Manifest, program: nn.Module, tables: Mapping[str, FrozenTable]) -> None:
        super().__init__()
        self.path = path
        self.manifest = manifest
        self.tables = dict(tables)
        self._program = program

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the program gives."""
        with torch.no_grad():
            return self._program(*args, **kwargs)


def export(
    model: nn.Module,
    example_inputs: Sequence[Any],
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
        example_inputs: the positional arguments of a call.
        directory: of the bundle.
        encoding: how rows are kept, of all tables or by their names; see `freeze`.
        dynamic_shapes: as in `torch.export.export`; None lets the first dimension of every tensor vary.
        replace: whether a bundle that is there may go.

    Raises:
        ValueError: there is something at `directory` that may not go, an encoding names a table that the model does not
            read, a table has no rows in this process only, or the model cannot be exported.
        OSError: the bundle cannot be written, or a row has a value that its encoding has no number for.
    """
    target = Path(user_path(directory, "directory"))
    _check_target(target, replace=replace)
    program = _exported(model, tuple(example_inputs), dynamic_shapes)
    read = _tables_of(program, model)
    encodings = _encodings([table.name for table, _ in read], encoding)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as beside:
        written = Path(beside) / "bundle"
        (written / "tables").mkdir(parents=True)
        tables = [_frozen(written, number, *each, encodings) for number, each in enumerate(read)]
        torch.export.save(program, written / PROGRAM)
        Manifest(
            torch=torch.__version__,
            recstore_ops=version("recstore-ops"),
            program=sum_of(written / PROGRAM),
            tables=tuple(tables),
            inputs=described_inputs(_input_names(program), tuple(example_inputs)),
        ).write(written)
        if target.exists():
            shutil.rmtree(target)
        written.rename(target)
    return target


def load_bundle(directory: str | os.PathLike[str]) -> Bundle:
    """Opens a bundle. No name of a table is taken: any tables may be open in the process, other bundles too.

    Args:
        directory: as `export` wrote it. Its files must not be changed in place as long as the bundle is in use.

    Raises:
        ValueError: there is no bundle, or one of another version.
        OSError: a file is missing, cut off, changed, or of another bundle. Rows are looked at when they are first read.
    """
    path = Path(user_path(directory, "directory"))
    manifest = Manifest.read(path)
    program = torch.export.load(manifest.check_program(path))
    tables = {}
    for bundled in manifest.tables:
        tables[bundled.name] = table = _opened(path, bundled)
        for constant in bundled.constants:
            _put(program, constant, table.handle)
    return Bundle(path, manifest, program.module(), tables)


def _check_target(target: Path, *, replace: bool) -> None:
    if not target.exists():
        return
    if not replace:
        raise ValueError(f"{target} is there already; replace=True writes the bundle in its place")
    Manifest.read(target)


def _exported(model: nn.Module, inputs: tuple[Any, ...], dynamic_shapes: Any) -> ExportedProgram:
    if dynamic_shapes is None:
        dynamic_shapes = tuple({0: Dim.AUTO} if isinstance(each, Tensor) and each.dim() else None for each in inputs)
    was_training = model.training
    try:
        with torch.no_grad():
            return torch.export.export(model.eval(), inputs, dynamic_shapes=dynamic_shapes)
    finally:
        model.train(was_training)


def _tables_of(program: ExportedProgram, model: nn.Module) -> list[tuple[Table, tuple[str, ...]]]:
    """The tables whose handles a program has, and the names of the constants that hold them."""
    tables = {module.table.name: module.table for module in model.modules() if isinstance(module, TableModule)}
    found = []
    for table in tables.values():
        names = tuple(name for name, tensor in _held(program) if tensor.equal(table.handle))
        if names:
            found.append((table, names))
    return found


def _held(program: ExportedProgram) -> Iterator[tuple[str, Tensor]]:
    for name, value in (*program.constants.items(), *program.state_dict.items()):
        if isinstance(value, Tensor) and value.dtype is torch.int64:
            yield name, value


def _put(program: ExportedProgram, name: str, handle: Tensor) -> None:
    for held in (program.constants, program.state_dict):
        if name in held:
            held[name] = handle
            return
    raise OSError(f"the program of the bundle has no constant {name}")


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


def _opened(path: Path, bundled: BundledTable) -> FrozenTable:
    table = FrozenTable(path / bundled.file)
    if (table.name, table.fingerprint) != (bundled.name, bundled.fingerprint):
        raise OSError(
            f"{table.path} is not of this bundle: expected table {bundled.name!r} with fingerprint "
            f"{bundled.fingerprint:08x}, got {table.name!r} with {table.fingerprint:08x}"
        )
    return table


def _input_names(program: ExportedProgram) -> list[str]:
    return list(program.graph_signature.user_inputs)  # type: ignore[arg-type]
