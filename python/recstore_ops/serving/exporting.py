"""Writes a model as a bundle: its program, and the tables that it reads, frozen."""

from __future__ import annotations

import inspect
import os
import tempfile
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

from recstore_ops.config.extras import imported
from recstore_ops.config.paths import user_path
from recstore_ops.serving.compiled import processor, with_named_handles, write_compiled
from recstore_ops.serving.exchanging import exchange
from recstore_ops.serving.freezing import freeze_tables, group_of
from recstore_ops.serving.frozen_table import EncodingName, FrozenTable
from recstore_ops.serving.graph import Graph
from recstore_ops.serving.graph_operators import Operators
from recstore_ops.serving.graph_writing import NoGraphError, functional, written
from recstore_ops.serving.held_sizes import HeldSizes
from recstore_ops.serving.manifest import (
    COMPILED,
    GRAPH,
    PROGRAM,
    STATE,
    BundledTable,
    Manifest,
    check_explained,
    sum_of,
)
from recstore_ops.serving.program_tables import named_tables, state_of, tables_in, tables_of
from recstore_ops.serving.program_tensors import described
from recstore_ops.sharding.collective import Collective
from recstore_ops.table.table import traced_as_whole


def export(
    model: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    directory: str | os.PathLike[str],
    *,
    encoding: EncodingName | Mapping[str, EncodingName] = "float32",
    dynamic_shapes: Any = None,
    compiled: bool = False,
    replace: bool = False,
    operators: Sequence[str] = (),
) -> Path:
    """Writes a model and the rows that its tables have now to a directory, which `load_bundle` reads.

    The model is exported in evaluation mode by `torch.export.export`. A program that has no graph, such as one with
    control flow, is written as code alone, with a warning. The directory is written beside its place and then renamed.
    If it replaces a bundle, only the files that the old manifest lists are deleted.

    If the tables are sharded over processes, all of them call this together, and the first one writes the bundle. The
    program then looks rows up as if one process had them all.

    Args:
        model: a module; of a `DistributedDataParallel` the one within is exported.
        example_inputs: the positional arguments of a call, or its keyword arguments by name. They are not kept. A batch
            should have two rows or more: a size of 1 may be taken for one that never changes.
        directory: of the bundle; of sharded tables one that all processes see.
        encoding: how rows are kept, of all tables or by their names; see `freeze`.
        dynamic_shapes: as in `torch.export.export`; None lets the first dimension of every tensor vary.
        compiled: whether the program is compiled by AOTInductor too, for this release of torch and this kind of
            processor; `load_bundle(..., compiled=True)` runs it. It needs a C++ compiler.
        replace: whether an existing bundle may be replaced.
        operators: further operators that the graph may call, as `"mylib::op.default"`; `load_bundle` must allow them
            too.

    Raises:
        ValueError: `directory` has something that must not be replaced: no bundle, a bundle with files that its
            manifest does not list, or a symbolic link. Or an encoding names a table that the model does not read, or
            the model reads a table that has no name. Or its tables are sharded over several groups, or their processes
            give other arguments than the first one. Or the program calls operators that a graph may not call.
        OSError: the bundle cannot be written, or a row has a value that its encoding has no number for.
        RuntimeError: another process of sharded tables failed, or the program cannot be compiled.
    """
    target = Path(user_path(directory, "directory"))
    together = Collective(group_of(tables_in(model)))
    allowed = Operators(operators)
    together.check_same(
        "export",
        directory=str(target),
        encoding=encoding,
        compiled=compiled,
        replace=replace,
        operators=list(allowed.further),
    )
    writing = _Writing(target)

    def begin() -> tuple[str, dict[str, EncodingName]]:
        _check_target(target, replace=replace)
        writing.model = ExportedModel(model, example_inputs, dynamic_shapes, compiled=compiled, operators=allowed)
        return writing.begin(), encodings_of(writing.model.tables, encoding)

    try:
        beside, encodings = together.of_first(f"export to {target}", begin)
        together.all_or_none(f"write its part of {target}", lambda: writing.write(Path(beside), encodings, together))
    finally:
        writing.end()
    return target


class _Writing:
    """Writes a bundle beside its place, and then puts it there.

    Attributes:
        model: what is written; None on a process that writes its rows of sharded tables only.
    """

    def __init__(self, target: Path) -> None:
        self.model: ExportedModel | None = None
        self._target = target
        self._beside: tempfile.TemporaryDirectory[str] | None = None

    def begin(self) -> str:
        """Makes a directory beside, and returns it."""
        self._target.parent.mkdir(parents=True, exist_ok=True)
        # Beside its place, so that both lie on one file system and a rename suffices.
        self._beside = tempfile.TemporaryDirectory(dir=self._target.parent, prefix=f".{self._target.name}.")
        return self._beside.name

    def write(self, beside: Path, encodings: Mapping[str, EncodingName], together: Collective) -> None:
        """Writes the bundle, or rows for it."""
        made = beside / "bundle"
        if self.model is None:
            freeze_tables(made, named_tables(encodings), encodings, together)
            return
        self.model.write(made, encodings, together)
        if not os.path.lexists(self._target):
            made.rename(self._target)
            return
        # What came meanwhile is not deleted either.
        check_explained(self._target)
        # Both change places, in one move if the system can. The old bundle then goes with what lies beside.
        exchange(made, self._target)

    def end(self) -> None:
        """Deletes what lies beside."""
        if self._beside is not None:
            self._beside.cleanup()


class ExportedModel:
    """The program of a model.

    Attributes:
        tables: those that it reads, by their names.
        state: the names of the tensors that it needs, if it has a graph.

    Raises:
        ValueError: the model reads a table that has no name, or calls an operator that a graph may not call.
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Sequence[Any] | Mapping[str, Any],
        dynamic_shapes: Any = None,
        *,
        compiled: bool = False,
        operators: Operators | None = None,
    ) -> None:
        model = unwrapped(model)
        self._program = _exported(model, _Arguments.of(example_inputs), dynamic_shapes)

        def traced_at(sizes: Mapping[tuple[str, int], int]) -> ExportedProgram:
            return _exported(model, _resized(self._program, sizes), dynamic_shapes)

        sizes = HeldSizes(self._program, dynamic_shapes, traced_at)
        self._described = described(self._program, sizes.ranges)
        self._functional = _functional(self._program)
        # Both are one program if no call writes to its arguments, and checks go into it once.
        for program in dict.fromkeys((self._program, self._functional)):
            if isinstance(program, ExportedProgram):
                sizes.check_in(program)
        read = tables_of(self._program)
        self.tables = {name: table for name, (table, _) in read.items()}
        self._constants = {name: constants for name, (_, constants) in read.items()}
        self._to_compile = with_named_handles(self._program, self._handles()) if compiled else None
        self._program.example_inputs = None  # They are somebody's rows, and pickled.
        self._operators = operators or Operators()
        self._graph = self._written_graph()

    @property
    def state(self) -> set[str] | None:
        """The names of the tensors that the program needs beside its inputs; None for one that has no graph."""
        return None if self._graph is None else set(self._state())

    def write(
        self,
        directory: Path,
        encodings: Mapping[str, EncodingName],
        together: Collective,
        *,
        graph_only: bool = False,
    ) -> None:
        """Writes program and tables, as they are now, to a new directory.

        Args:
            directory: of the bundle.
            encodings: of tables, by their names.
            together: the processes that have the tables: the others call `freeze_tables` meanwhile.
            graph_only: writes the graph, and not what torch takes long to write.

        Raises:
            OSError: it cannot be written, or a row has a value that its encoding has no number for.
        """
        frozen = freeze_tables(directory, list(self.tables.values()), encodings, together)
        Manifest(
            torch=torch.__version__,
            recstore_ops=version("recstore-ops"),
            files=self._write_program(directory, graph_only=graph_only),
            tables=tuple(map(self._bundled, self.tables, frozen)),
            compiled_for=None if self._to_compile is None else processor(),
            **self._described._asdict(),
        ).write(directory)

    def _written_graph(self) -> str | None:
        """The graph of the program, as those will read it who open the bundle; None if it has none."""
        try:
            if isinstance(self._functional, NoGraphError):
                raise self._functional
            text = written(self._functional, self._operators)
        except NoGraphError as error:
            warnings.warn(
                f"the program of the model has no graph, because of {error}: the bundle is code, and opens with "
                "trusted=True or --trust-code alone",
                stacklevel=2,
            )
            return None
        # Read once, as `load_bundle` will: a graph that it would refuse fails the export.
        Graph(text, self._handles(), self._operators)
        return text

    def _state(self) -> dict[str, Tensor]:
        return state_of(self._program, self._handles())

    def _handles(self) -> set[str]:
        return {name for constants in self._constants.values() for name in constants}

    def _write_program(self, directory: Path, *, graph_only: bool) -> dict[str, dict[str, int]]:
        """Writes the program, and its graph if it has one, and returns the manifest's entries for the files."""
        files = []
        if not graph_only and self._is_saved(directory / PROGRAM):
            files += [PROGRAM]
        if self._graph is not None:
            (directory / GRAPH).write_text(self._graph, encoding="utf-8")  # by path: a new directory
            # Those that are one tensor under several names are written apart.
            state = {name: value.contiguous().clone() for name, value in self._state().items()}
            imported("safetensors.torch", "serve", "an export").save_file(state, directory / STATE)
            files += [GRAPH, STATE]
        if self._to_compile is not None:
            write_compiled(self._to_compile, directory / COMPILED)
            files += [COMPILED]
        return {name: sum_of(directory / name) for name in files}

    def _is_saved(self, path: Path) -> bool:
        """Writes the program as torch does, which it cannot do with every one; one that has a graph opens without."""
        try:
            _save(self._program, path)
        except ValueError:
            if self._graph is None:
                raise
            path.unlink(missing_ok=True)  # by path: a new directory
            return False
        return True

    def _bundled(self, name: str, file: Path) -> BundledTable:
        return BundledTable(name, f"tables/{file.name}", FrozenTable(file).fingerprint, self._constants[name])


def _functional(program: ExportedProgram) -> ExportedProgram | NoGraphError:
    try:
        return functional(program)
    except NoGraphError as error:
        return error


def _save(program: ExportedProgram, path: Path) -> None:
    try:
        torch.export.save(program, path)
    except Exception as error:
        # Faults of the disk or of the machine say nothing about the program.
        if isinstance(error, OSError | MemoryError):
            raise
        # Containers without a registered name, and functions of sizes that have no form.
        raise ValueError(f"torch.export.save cannot write the program: {str(error).partition(chr(10))[0]}") from error


def _check_target(target: Path, *, replace: bool) -> None:
    if target.is_symlink():
        raise ValueError(
            f"{target} is a symbolic link to {os.readlink(target)}: name the directory of the bundle itself"
        )
    if not target.exists():
        return
    if not replace:
        raise ValueError(f"{target} is there already; replace=True, or --replace, writes the bundle in its place")
    check_explained(target)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module within a `DistributedDataParallel`, whose forward exchanges gradients; all others are their own."""
    return model.module if isinstance(model, DistributedDataParallel) else model


class _Arguments(NamedTuple):
    """The arguments of a call."""

    positional: tuple[Any, ...]
    by_name: dict[str, Any]

    @classmethod
    def of(cls, given: Sequence[Any] | Mapping[str, Any]) -> _Arguments:
        return cls((), dict(given)) if isinstance(given, Mapping) else cls(tuple(given), {})


def _exported(model: nn.Module, arguments: _Arguments, dynamic_shapes: Any) -> ExportedProgram:
    """Returns the program of a model."""
    if dynamic_shapes is None:
        dynamic_shapes = _collected(model, arguments, _first_dimensions(arguments.by_name or arguments.positional))
    was_training = model.training
    try:
        with torch.no_grad(), traced_as_whole(), _with_names(model, arguments.by_name):
            return torch.export.export(model.eval(), *arguments, dynamic_shapes=dynamic_shapes)
    finally:
        model.train(was_training)


def _resized(program: ExportedProgram, sizes: Mapping[tuple[str, int], int]) -> _Arguments:
    """The example inputs of a program with other sizes: their items repeat."""
    leaves, structure = tree_flatten(program.example_inputs)
    names = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    values = dict(zip(names, leaves, strict=True))
    for (name, dimension), size in sizes.items():
        value = values[name]
        items = torch.arange(size, dtype=torch.int64, device=value.device) % value.shape[dimension]
        values[name] = value.index_select(dimension, items)
    return _Arguments(*tree_unflatten(list(values.values()), structure))


def _collected(model: nn.Module, arguments: _Arguments, shapes: Any) -> Any:
    """Shapes of positional arguments as torch expects them: those that a model collects by `*` in one entry."""
    signature = inspect.signature(model.forward)
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if arguments.by_name or inspect.Parameter.VAR_POSITIONAL not in kinds:
        return shapes
    return dict(signature.bind(*shapes).arguments)


@contextmanager
def _with_names(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """A model that collects arguments by `**` has parameters of their names meanwhile: torch knows no others."""
    forward, kind = model.forward, inspect.Parameter
    if not names or kind.VAR_KEYWORD not in [each.kind for each in inspect.signature(forward).parameters.values()]:
        yield
        return
    own = vars(model).get("forward")

    def named(**given: Any) -> Any:
        return forward(**given)

    named.__signature__ = inspect.Signature([kind(name, kind.KEYWORD_ONLY) for name in names])
    model.forward = named
    try:
        yield
    finally:
        # The attribute of the instance hides the method of its class, which shows again.
        del model.forward
        if own is not None:
            model.forward = own


def _first_dimensions(value: Any) -> Any:
    """Shapes by which the first dimension of every tensor varies, also of those within containers."""
    if isinstance(value, Tensor):
        return {0: Dim.AUTO} if value.dim() else None
    if isinstance(value, dict):
        return {name: _first_dimensions(each) for name, each in value.items()}
    leaves, structure = tree_flatten(value)
    if structure.is_leaf():
        return None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_first_dimensions, value))
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
