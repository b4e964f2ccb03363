"""The tables that an exported program reads: found by the handles among its constants, and put in their place."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Node

from recstore_ops.nn.closed_module import ClosedModule
from recstore_ops.nn.table_parameter import TableParameter, scalar_of
from recstore_ops.ops.operators import OF_DEFAULT_TABLES
from recstore_ops.table.table import Table, open_tables

_NAMESPACE = "recstore"


def tables_of(program: ExportedProgram) -> dict[str, tuple[Table, tuple[str, ...]]]:
    """Returns the tables that a program reads, by name, each with the names of the constants that hold its handle.

    Raises:
        ValueError: the program reads what no open table stands for.
    """
    held, tables = dict(_held(program)), open_tables()
    found: dict[str, tuple[Table, dict[str, None]]] = {}
    for operator, constant in _read(program):
        handle = None if constant is None else held.get(constant)
        table = next((table for table in tables if handle is not None and table.handle.equal(handle)), None)
        if table is None or constant is None:
            raise ValueError(f"{operator} of the model reads no table of a name: a bundle takes tables of modules only")
        found.setdefault(table.name, (table, {}))[1][constant] = None
    return {name: (table, tuple(constants)) for name, (table, constants) in found.items()}


def tables_in(model: nn.Module) -> list[Table]:
    """The tables of a model's modules, whether its program reads them or not."""
    return [table for module in model.modules() if isinstance(module, ClosedModule) for table in module.tables()]


def named_tables(names: Iterable[str]) -> list[Table]:
    """The open tables of names."""
    tables = {table.name: table for table in open_tables()}
    return [tables[name] for name in names]


def state_of(program: ExportedProgram, handles: Collection[str]) -> dict[str, Tensor]:
    """Returns the tensors that a program needs beside its inputs and the handles of tables, as they are held."""
    return {
        name: scalar_of(value) if isinstance(value, TableParameter) else value.detach()
        for name, value in _held(program)
        if name not in handles
    }


def _held(program: ExportedProgram) -> Iterator[tuple[str, Tensor]]:
    for name, value in (*program.constants.items(), *program.state_dict.items()):
        if isinstance(value, Tensor):
            yield name, value


def _read(program: ExportedProgram) -> Iterator[tuple[str, str | None]]:
    """Each operator on tables in a program, with each constant that it takes for a table, None for what is none."""
    signature = program.graph_signature
    constants = {**signature.inputs_to_lifted_tensor_constants, **signature.inputs_to_buffers}
    for node in program.graph.nodes:
        if isinstance(node.target, OpOverload) and node.target.namespace == _NAMESPACE:
            for handle in _handles(node):
                yield str(node.target), constants.get(handle.name) if isinstance(handle, Node) else None


def _handles(node: Node) -> list[object]:
    """The arguments of an operator for its tables; None for the default table, which has no handle."""
    target = node.target
    assert isinstance(target, OpOverload)
    first = target._schema.arguments[0].name
    if first in ("table", "tables"):
        given = node.args[0]
        return list(given) if isinstance(given, list | tuple) else [given]
    return [None] if target._opname in OF_DEFAULT_TABLES else []
