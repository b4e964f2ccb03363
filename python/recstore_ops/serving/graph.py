"""An exported program as a list of operator calls: JSON that is read in milliseconds, without a compiler.

{"state": names of tensors, "inputs": how many, "calls": [...], "outputs": values, "in_spec": ..., "out_spec": ...}

Values are numbered: those of the state, the inputs, and what each call gives. A call names an operator of the list in
`graph_operators.txt`, one that the caller of `load_bundle` allows, or a function on sizes. Nothing else runs, and
what is in the file is checked as a whole before anything does.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import TreeSpec

from recstore_ops.serving.closed_json import fields_of, parse_json, shown, texts, typed, whole
from recstore_ops.serving.graph_arguments import (
    NUMBER,
    TENSOR,
    Result,
    Schema,
    Value,
    check_numbers,
    read,
    result_of_item,
    values_in,
)
from recstore_ops.serving.graph_guards import guarded
from recstore_ops.serving.graph_operators import Operators
from recstore_ops.serving.size_functions import FUNCTIONS, GETITEM, OPERANDS
from recstore_ops.serving.structures import read_structure

_FIELDS = ("state", "inputs", "calls", "outputs", "in_spec", "out_spec")
_MAX = 1 << 20
"""Values of a graph."""
_FILE, _FIRST_LINE = "graph", 2
"""The file name of the compiled function, and the line of its first call."""
_ASSERTION = "aten::_assert_scalar.default"

Run = Callable[[Sequence[Any]], Sequence[Any]]


class Graph:
    """A graph that was read.

    Args:
        text: of the file.
        handles: the names of the tensors of its state that are handles of the bundle's own tables.
        operators: what it may call.

    Attributes:
        state: the names of the tensors that it needs.
        in_spec: how the inputs lie in the arguments of a call.
        out_spec: how the outputs lie in the result of a call.

    Raises:
        ValueError: the text is no graph, or calls what is no operator of graphs.
    """

    def __init__(self, text: str | bytes, handles: Collection[str] = (), operators: Operators | None = None) -> None:
        fields = fields_of(parse_json(text), _FIELDS, "the graph")
        self.state = texts(fields["state"], "state")
        self.in_spec: TreeSpec = read_structure(fields["in_spec"], "in_spec")
        self.out_spec: TreeSpec = read_structure(fields["out_spec"], "out_spec")
        inputs = whole(fields["inputs"], 0, _MAX, "inputs")
        outputs = typed(fields["outputs"], list, "outputs")
        for name, count, spec in (("inputs", inputs, self.in_spec), ("outputs", len(outputs), self.out_spec)):
            if count != spec.num_leaves:
                raise ValueError(f"it has {count} {name}, and a structure of {spec.num_leaves}")
        if unknown := sorted(set(handles) - set(self.state)):
            raise ValueError(f"it has no constant {shown(unknown[0])} for a table")
        tables = [number for number, name in enumerate(self.state) if name in handles]
        reader = _Reader(len(self.state) + inputs, tables, operators or Operators())
        calls = [reader.call(each) for each in typed(fields["calls"], list, "calls")]
        self._run = _function(len(self.state) + inputs, calls, reader.outputs(outputs))
        self._names = [call.name for call in calls]

    def bind(self, state: Mapping[str, Tensor]) -> Run:
        """Returns a function from flat inputs to flat outputs, with the tensors of a state.

        If a call does not take the results of others, the function raises a `ValueError` that names the call. A
        `RuntimeError` of torch's operators and a lack of memory are raised unchanged.
        """
        tensors, run = tuple(state[name] for name in self.state), self._run

        def bound(inputs: Sequence[Any]) -> Sequence[Any]:
            try:
                return run(*tensors, *inputs)
            # A call got what it does not take. Python's errors do not say which call it was.
            except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
                raise ValueError(f"{self._called(error)}: {error}") from error
            except RuntimeError as error:
                # A check of sizes raises RuntimeError too, and is about the inputs.
                if (name := self._called(error)) != _ASSERTION:
                    raise
                raise ValueError(f"{name}: {error}") from error

        return bound

    def _called(self, error: Exception) -> str:
        """The name of the call that failed: each has its own line."""
        lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == _FILE]
        place = lines[0] - _FIRST_LINE if lines else -1
        return self._names[place] if 0 <= place < len(self._names) else "the graph"


class _Call(NamedTuple):
    """A call whose arguments fit."""

    name: str
    function: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]

    def read(self) -> list[int]:
        """The numbers of the values that it reads."""
        return values_in([*self.args, *self.kwargs.values()])


class _Reader:
    """Reads the calls of a graph, one after the other."""

    def __init__(self, tensors: int, handles: Collection[int], operators: Operators) -> None:
        self._values: list[Result] = [TENSOR] * tensors
        self._handles = frozenset(handles)
        self._operators = operators
        self._found: dict[str, tuple[Callable[..., Any], Schema]] = {}

    def call(self, written: Any) -> _Call:
        """Returns a call, the next after those before.

        Raises:
            ValueError: it is none, or calls what it may not.
        """
        if len(typed(written, list, "a call")) != 3:
            raise ValueError(f"a call has {len(written)} parts: a name, arguments by position and by name are expected")
        name = typed(written[0], str, "the name of a call")
        args = [self._argument(each) for each in typed(written[1], list, f"{shown(name)}: the arguments")]
        named = typed(written[2], dict, f"{shown(name)}: the arguments by name")
        kwargs = {key: self._argument(each) for key, each in named.items()}
        function, result = self._checked(name, args, kwargs)
        self._values.append(result)
        if len(self._values) > _MAX:
            raise ValueError(f"it has more than {_MAX} values")
        return _Call(name, function, args, kwargs)

    def outputs(self, written: list[Any]) -> list[Any]:
        """Returns the outputs, which follow all calls.

        Raises:
            ValueError: one is none.
        """
        outputs = [self._argument(each) for each in written]
        for output in outputs:
            if isinstance(output, list) or (
                isinstance(output, Value)
                and (output.number in self._handles or self._values[output.number] not in (TENSOR, NUMBER))
            ):
                raise ValueError("an output is neither a tensor nor a number")
        return outputs

    def _argument(self, written: Any) -> Any:
        return read(written, len(self._values))

    def _checked(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> tuple[Callable[..., Any], Result]:
        """Returns the function that is called, and the kind of its result."""
        if name in FUNCTIONS:
            if kwargs:
                raise ValueError(f"{name} takes no arguments by name")
            if name == GETITEM:
                return FUNCTIONS[name], result_of_item(name, args, self._values)
            check_numbers(name, args, OPERANDS[name], self._values)
            return FUNCTIONS[name], NUMBER
        if name not in self._found:
            overload = self._operators.find(name)
            schema = Schema(name, overload._schema, listed=name not in self._operators.further)
            self._found[name] = guarded(name, overload), schema
        function, schema = self._found[name]
        schema.check(args, kwargs, self._values, self._handles)
        return function, schema.result


def _function(first: int, calls: Sequence[_Call], outputs: list[Any]) -> Callable[..., Sequence[Any]]:
    """Makes a function of calls: Python's own interpreter is the fastest loop there is over them.

    Its text has the names of arguments from schemas and numbers of values; all else of the graph goes by reference.
    """
    source = _Source(first, calls, outputs)
    names: dict[str, Any] = dict(source.names)
    # The only words of the file in the text are names of arguments, and `Schema.check` lets none pass but the
    # operator's.
    exec(compile(source.text, _FILE, "exec"), names)
    return names["run"]


class _Source:
    """The text of a function.

    Attributes:
        names: what it refers to.
        text: in Python.
    """

    def __init__(self, first: int, calls: Sequence[_Call], outputs: list[Any]) -> None:
        self.names: dict[str, Any] = {}
        self._first = first
        self._last_use: dict[int, int] = {}
        for place, call in enumerate(calls):
            self._last_use.update(dict.fromkeys(call.read(), place))
        self._last_use.update(dict.fromkeys(values_in(outputs), len(calls)))
        parameters = ", ".join(f"v{value}" for value in range(first))
        lines = [self._line(place, call) for place, call in enumerate(calls)]
        self.text = "\n".join([f"def run({parameters}):", *lines, f" return {self._expression(outputs)}"])

    def _line(self, place: int, call: _Call) -> str:
        self.names[f"f{place}"] = call.function
        given = [self._expression(each) for each in call.args]
        given += [f"{key}={self._expression(each)}" for key, each in call.kwargs.items()]
        value = self._first + place
        line = f" {f'v{value}' if value in self._last_use else '_'} = f{place}({', '.join(given)})"
        # What is not read any more goes, so that its memory can be used again.
        ended = sorted(used for used in {*call.read()} if used >= self._first and self._last_use[used] == place)
        return line + "".join(f"; v{used} = None" for used in ended)

    def _expression(self, argument: Any) -> str:
        if isinstance(argument, list):
            return f"[{', '.join(map(self._expression, argument))}]"
        if isinstance(argument, Value):
            return f"v{argument.number}"
        name = f"c{len(self.names)}"
        self.names[name] = argument
        return name
