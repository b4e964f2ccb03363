"""The sizes that an exported program is for: what its tracing took for true, and its author said, of the inputs' sizes.

Bounds of one size go into the manifest. Relations of sizes become calls of the program that check them. Torch's own
rule that sizes are 2 or more is an assumption and no bound: programs are asked with one row, and with none.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import Tensor
from torch.export.dynamic_shapes import _DimHint
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv, StrictMinMaxConstraint
from torch.utils._pytree import tree_leaves
from torch.utils._sympy import functions
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.solve import try_solve

from recstore_ops.serving.sizes import Range

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

_Expression = Any
"""One of sympy: its stubs know too little of what torch makes of it."""
_ASSUMED = 2
"""The least size that torch assumes."""
_OF_STRIDES = ("torch/_prims_common/__init__.py", "torch/_prims/__init__.py", "torch/_ops.py")
"""Code that asks of sizes how tensors lie in memory, or asks for an operator that checks its arguments itself."""
_VIEWS = "torch/_refs/__init__.py", "_reshape_view_helper"
_SLICES = "_compute_slice_index"
_MAX_TRACES = 16
"""How often a model is traced to find which guards of slices matter; what is found no more is held."""
_TracedAt = Callable[[Mapping[tuple[str, int], int]], "ExportedProgram"]


class HeldSizes:
    """The conditions of a program on the sizes of its inputs.

    Args:
        program: as `torch.export.export` returns it; a loaded program has lost the assumptions of its tracing.
        dynamic_shapes: those of the export.
        traced_at: traces the model again, with these sizes of its inputs, by name and dimension.

    Attributes:
        ranges: the bounds of sizes, by torch's symbols.

    Raises:
        ValueError: it has a condition that a bundle cannot check.
    """

    def __init__(self, program: ExportedProgram, dynamic_shapes: Any, traced_at: _TracedAt) -> None:
        self._shapes = _shapes_of(program)
        self._places = _places(self._shapes)
        self._relations: dict[_Expression, None] = {}
        environment = _environment(program)
        self._bounds = {} if environment is None else _told(program, environment, dynamic_shapes)
        for guard in _Guards(program, self._shapes, traced_at).held():
            self._hold(guard)
        for name, place, size in self._derived():
            self._relations[sympy.Eq(sympy.Symbol(f"{name}.shape[{place}]"), size, evaluate=False)] = None
        self.ranges = {
            str(symbol): Range(least if least > _ASSUMED else 0, most)
            for symbol, (least, most) in self._bounds.items()
            if symbol in self._places and (least > _ASSUMED or most is not None)
        }
        # A condition that no call can check is an error here, before anything is written.
        self.check_in(program, dry=True)

    def check_in(self, program: ExportedProgram, *, dry: bool = False) -> None:
        """Adds the checks of relations to a program of the same inputs, before its first call.

        Args:
            program: the one that was read, or one made of it.
            dry: adds nothing, and only finds whether all can be checked.

        Raises:
            ValueError: one cannot.
        """
        graph = torch.fx.Graph() if dry else program.graph
        if dry:
            nodes = {name: graph.placeholder(name) for name in self._shapes}
        else:
            nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
        last = [node for node in graph.nodes if node.op == "placeholder"]
        if not self._relations:
            return
        with graph.inserting_before(last[-1].next):
            calls = _Calls(graph, nodes, self._places)
            for relation in self._relations:
                calls.check(relation)
        if not dry:
            program.graph_module.recompile()

    def _hold(self, guard: _Expression) -> None:
        if guard in (sympy.true, sympy.false):
            return
        if isinstance(guard, sympy.And):
            for each in guard.args:
                self._hold(each)
        elif not self._is_bound(guard):
            self._relations[guard] = None

    def _is_bound(self, guard: _Expression) -> bool:
        """Whether a guard is a bound of one size, which is noted."""
        if (solved := _solved(guard)) is None or solved[0] not in self._places:
            return False
        symbol, (least, most) = solved
        before = self._bounds.get(symbol, (0, None))
        mosts = [each for each in (before[1], most) if each is not None]
        self._bounds[symbol] = max(least, before[0]), min(mosts, default=None)
        return True

    def _derived(self) -> list[tuple[str, int, _Expression]]:
        """The sizes that are made of others, which the names of the manifest do not hold."""
        return [
            (name, place, size)
            for name, shape in self._shapes.items()
            for place, size in enumerate(shape)
            if not size.is_Symbol and not size.is_Integer
        ]


def _shapes_of(program: ExportedProgram) -> dict[str, list[_Expression]]:
    """The sizes of the inputs, as expressions."""
    nodes = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    names = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    return {
        name: [size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size) for size in value.shape]
        for name in names
        if isinstance(value := nodes.get(name), Tensor)
    }


def _places(shapes: Mapping[str, list[_Expression]]) -> dict[_Expression, tuple[str, int, _Expression | None]]:
    """Finds each symbol in the shapes: as a size, or by solving a size for it."""
    found: dict[_Expression, tuple[str, int, _Expression | None]] = {}
    every = [(size, name, place) for name, shape in shapes.items() for place, size in enumerate(shape)]
    for size, name, place in every:
        if size.is_Symbol:
            found.setdefault(size, (name, place, None))
    for size, name, place in every:
        if len(size.free_symbols) == 1 and not size.is_Symbol:
            (symbol,) = size.free_symbols
            step, first = size.coeff(symbol, 1), size.subs(symbol, 0)
            if symbol not in found and step.is_Integer and sympy.expand(size - step * symbol - first) == 0:
                whole = sympy.Symbol(f"{name}.shape[{place}]", integer=True)
                found[symbol] = name, place, functions.FloorDiv(whole - first, step)
    return found


def _environment(program: ExportedProgram) -> ShapeEnv | None:
    for node in program.graph.nodes:
        if isinstance(value := node.meta.get("val"), Tensor) and (mode := getattr(value, "fake_mode", None)):
            return mode.shape_env
    return None


def _solved(guard: _Expression) -> tuple[_Expression, tuple[int, int | None]] | None:
    """The symbol of a guard that is a bound of one, and its bounds."""
    if len(guard.free_symbols) != 1 or not isinstance(guard, sympy.Le | sympy.Lt | sympy.Ge | sympy.Gt):
        return None
    (symbol,) = guard.free_symbols
    solved = try_solve(guard, symbol)
    if solved is None or not solved[1].is_Integer:
        return None
    relation, bound = solved[0], int(solved[1])
    if isinstance(relation, sympy.Ge | sympy.Gt):
        return symbol, (bound + isinstance(relation, sympy.Gt), None)
    return symbol, (0, bound - isinstance(relation, sympy.Lt))


class _Guards:
    """The assumptions of tracing about sizes, except those about how tensors lie in memory.

    Tracing assumes on which side of a slice's ends a size lies, and computes the size of the slice from that. The graph
    may depend on the side. If it is the same on both sides, the calls compute the right size themselves. So the model
    is traced on the other side of each end too.
    """

    def __init__(self, program: ExportedProgram, shapes: Mapping[str, list[_Expression]], traced_at: _TracedAt) -> None:
        self._graph, self._shapes, self._traced_at = str(program.graph), shapes, traced_at
        self._held: dict[_Expression, None] = {}
        self._of_slices: list[_Expression] = []
        self._same: dict[tuple[_Expression, int], bool] = {}
        self._note(program, {})

    def held(self) -> list[_Expression]:
        """Returns those that must hold when the program is called with other sizes."""
        while self._of_slices:
            guard = self._of_slices.pop(0)
            if not self._is_same_beyond(guard):
                self._held[guard] = None
        return list(self._held)

    def _is_same_beyond(self, guard: _Expression) -> bool:
        """Whether the graph is the same for sizes that break a guard of a slice."""
        if (solved := _solved(guard)) is None:
            return False
        symbol, (least, most) = solved
        # A rest of one item has a size that never varies, in the eyes of torch: a further size leaves two.
        beyond = (least - 1, least - 2) if most is None else (most + 1, most + 2)
        return any(self._is_same_at(symbol, size) for size in beyond if size >= _ASSUMED)

    def _is_same_at(self, symbol: _Expression, size: int) -> bool:
        if (symbol, size) not in self._same:
            self._same[symbol, size] = len(self._same) < _MAX_TRACES and self._traces_the_same(symbol, size)
        return self._same[symbol, size]

    def _traces_the_same(self, symbol: _Expression, size: int) -> bool:
        sizes = {
            (name, dimension): int(each.subs(symbol, size))
            for name, shape in self._shapes.items()
            for dimension, each in enumerate(shape)
            if each.free_symbols == {symbol}
        }
        try:
            program = self._traced_at(sizes)
        except Exception:  # Of the model, or of torch: no such call can be made, so none is let through.
            return False
        own, others = (
            [size for shape in shapes.values() for size in shape] for shapes in (self._shapes, _shapes_of(program))
        )
        # Where nothing is left between a guard and the least size that torch assumes, it takes that size for constant.
        varies = [each.is_Symbol or each == size == _ASSUMED for each in others]
        if str(program.graph) != self._graph or varies != [each.is_Symbol for each in own]:
            return False
        self._note(program, dict(zip(others, own, strict=True)))
        return True

    def _note(self, program: ExportedProgram, names: Mapping[_Expression, _Expression]) -> None:
        if (environment := _environment(program)) is None:
            return
        for guard in environment.guards:
            place = guard.sloc.framework_loc
            file, function = (place, "") if isinstance(place, str) or place is None else (place.filename, place.name)
            is_view = str(file).endswith(_VIEWS[0]) and function.startswith(_VIEWS[1])
            if is_view or str(file).endswith(_OF_STRIDES):
                continue
            expression = environment.replace(guard.expr).xreplace(names)
            if function == _SLICES:
                # A slice to the end of a tensor is one to its size too.
                self._of_slices.append(_with_equal(expression))
            else:
                self._held[expression] = None


def _with_equal(guard: _Expression) -> _Expression:
    weaker = {sympy.StrictLessThan: sympy.Le, sympy.StrictGreaterThan: sympy.Ge}.get(type(guard))
    return guard if weaker is None else weaker(*guard.args)


def _told(
    program: ExportedProgram, environment: ShapeEnv, dynamic_shapes: Any
) -> dict[_Expression, tuple[int, int | None]]:
    """The bounds that the author of a program gave for its sizes; of named ones torch keeps them apart."""
    found = {}
    hints = [each for each in tree_leaves(dynamic_shapes) if isinstance(each, _DimHint)]
    least_told, most_told = {each.min for each in hints}, {each.max for each in hints}
    told = {constraint.vr for constraint in _constraints(environment)}
    for symbol, given in program.range_constraints.items():
        if not symbol.is_Symbol or symbol not in environment.var_to_range:
            continue
        is_told = given in told
        lower: Any = given.lower
        upper: Any = given.upper
        least = int(lower) if is_told or given.lower in least_told else 0
        has_most = given.upper.is_Integer and (is_told or given.upper in most_told)
        found[symbol] = least, int(upper) if has_most else None
    return found


def _constraints(environment: ShapeEnv) -> list[StrictMinMaxConstraint]:
    contexts = [tracked.symbolic_context for tracked in environment.tracked_fakes or ()]
    every = [each for context in contexts for each in getattr(context, "constraint_sizes", ())]
    return [each for each in every if isinstance(each, StrictMinMaxConstraint)]


class _Calls:
    """Adds calls that compute of sizes."""

    def __init__(
        self,
        graph: torch.fx.Graph,
        nodes: Mapping[str, Node],
        places: Mapping[_Expression, tuple[str, int, _Expression | None]],
    ) -> None:
        self._graph, self._nodes, self._places = graph, nodes, places
        self._made: dict[_Expression, Any] = {}

    def check(self, relation: _Expression) -> None:
        """Adds the check of a relation."""
        named = {symbol: sympy.Symbol(self._name(symbol), integer=True) for symbol in relation.free_symbols}
        shown = PythonPrinter().doprint(relation.xreplace(named))
        try:
            holds = self._value(relation)
        except _NoWordsError:
            raise ValueError(
                f"the program of the model is right only where {shown} holds of the sizes of its inputs, which "
                "a bundle cannot check: compute with sizes by whole numbers, or let the sizes not vary"
            ) from None
        message = f"the sizes of the inputs must be such that {shown}, for which the program was exported"
        if not isinstance(holds, bool):
            self._graph.call_function(torch.ops.aten._assert_scalar.default, (holds, message))

    def _name(self, symbol: _Expression) -> str:
        if (place := self._places.get(symbol)) is None:
            return str(symbol)
        return f"{place[0]}.shape[{place[1]}]" if place[2] is None else f"({place[2]})"

    def _value(self, expression: _Expression) -> Any:
        if expression not in self._made:
            self._made[expression] = self._new(expression)
        return self._made[expression]

    def _new(self, expression: _Expression) -> Any:
        if expression in (sympy.true, sympy.false):
            return bool(expression)
        if expression.is_Integer:
            return int(expression)
        if expression.is_Float:
            return float(expression)
        if expression.is_Symbol:
            return self._size(expression)
        if (name := next((name for kind, name in _KINDS.items() if isinstance(expression, kind)), None)) is None:
            raise _NoWordsError
        if name == "power":
            base, exponent = expression.args
            # A power becomes multiplications, one after the other.
            if not (exponent.is_Integer and 0 < exponent <= 64):
                raise _NoWordsError
            return self._fold(operator.mul, [self._value(base)] * int(exponent))
        return self._fold(name, [self._value(each) for each in expression.args])

    def _fold(self, function: Callable[..., Any], given: list[Any]) -> Any:
        if len(given) == 1:
            return given[0] if function is operator.mul else self._call(function, given[0])
        result = given[0]
        for each in given[1:]:
            result = self._call(function, result, each)
        return result

    def _size(self, symbol: _Expression) -> Any:
        name, _, place = symbol.name.rpartition(".shape[")
        if name in self._nodes:
            return self._call(torch.ops.aten.sym_size.int, self._nodes[name], int(place.rstrip("]")))
        if (found := self._places.get(symbol)) is None:
            raise _NoWordsError
        name, dimension, solution = found
        if solution is not None:
            return self._value(solution)
        return self._call(torch.ops.aten.sym_size.int, self._nodes[name], dimension)

    def _call(self, function: Callable[..., Any], *given: Any) -> Any:
        if not any(isinstance(each, torch.fx.Node) for each in given):
            return function(*given)
        node = self._graph.call_function(function, given)
        values = [each.meta.get("val") if isinstance(each, torch.fx.Node) else each for each in given]
        if all(value is not None for value in values):
            node.meta["val"] = function(*values)
        return node


class _NoWordsError(ValueError):
    """An expression that calls on sizes do not compute."""


_KINDS: dict[Any, Any] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    sympy.Pow: "power",
    functions.PowByNatural: "power",
    functions.CleanDiv: operator.floordiv,
    functions.FloorDiv: operator.floordiv,
    functions.Mod: operator.mod,
    functions.PythonMod: operator.mod,
    functions.IntTrueDiv: operator.truediv,
    functions.FloatTrueDiv: operator.truediv,
    functions.ToFloat: torch.sym_float,
    functions.TruncToInt: torch.sym_int,
    functions.Max: torch.sym_max,
    functions.Min: torch.sym_min,
    sympy.Eq: operator.eq,
    sympy.Ne: operator.ne,
    sympy.Le: operator.le,
    sympy.Lt: operator.lt,
    sympy.Ge: operator.ge,
    sympy.Gt: operator.gt,
    sympy.Not: torch.sym_not,
}
"""The calls that compute what torch's expressions of sizes mean."""
