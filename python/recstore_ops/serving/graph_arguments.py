"""The arguments of a graph's calls: each kind has one form in JSON, and the schema must take that kind."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._C import Argument, FunctionSchema

from recstore_ops.serving.closed_json import shown, whole
from recstore_ops.serving.size_functions import GETITEM

Result = str | tuple[str, ...]
"""The kind of a call's result; for an operator that gives several values, the kind of each."""

TENSOR, NUMBER, TENSORS, NOTHING, OTHER = "a tensor", "a number", "a list of tensors", "nothing", "something else"

DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"),
        *("uint16", "uint32", "uint64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
    )
}
"""The types of tensors that a graph knows."""

_CONSTANTS: dict[str, dict[str, Any]] = {
    "dtype": DTYPES,
    "device": {"cpu": torch.device("cpu")},
    "layout": {"strided": torch.strided},
    "memory_format": {
        name: getattr(torch, name)
        for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
    },
}
_FLOAT = re.compile(r"-?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|inf)|nan")
_FORMS: dict[str, tuple[str, ...]] = {
    "Tensor": ("int", "float", "bool"),  # A number counts as a tensor.
    "int": ("int",),
    "float": ("int", "float"),
    "bool": ("bool",),
    "number": ("int", "float", "bool"),
    "str": ("str",),
    "ScalarType": ("dtype",),
    "Layout": ("layout",),
    "Device": ("device",),
    "MemoryFormat": ("memory_format",),
}
"""The constants that an argument of each type takes."""
_NUMERIC = ("Tensor", "int", "float", "bool", "number")
"""The types of arguments that take a number which was computed."""
_RESULTS = {"Tensor": TENSOR, "List[Tensor]": TENSORS, **dict.fromkeys(("int", "float", "bool", "number"), NUMBER)}

_ONLY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("insert", "pin_memory", "train"), (None, False)),
    "dropout_p": (0,),
}
"""The values that arguments must have, so that an operator of the list only computes."""
_STATISTICS = ("running_mean", "running_var")
_TRAINING = ("training", "use_input_stats")
_TABLES = ("table", "tables")


class Value(NamedTuple):
    """A value that is there before a call, by its number."""

    number: int


def read(argument: Any, count: int) -> Any:
    """Returns an argument, or a list of them, as Python has it; what a call gave as a `Value`.

    Args:
        argument: of a graph.
        count: how many values there are.

    Raises:
        ValueError: it is none.
    """
    if isinstance(argument, list):
        return [_read_one(each, count) for each in argument]
    return _read_one(argument, count)


def _read_one(argument: Any, count: int) -> Any:
    if argument is None or isinstance(argument, bool | str):
        return argument
    # JSON has integers of any size, and schemas know 64 bits.
    if isinstance(argument, int):
        return whole(argument, -(1 << 63), (1 << 63) - 1, "an integer")
    if isinstance(argument, dict) and len(argument) == 1:
        ((kind, content),) = argument.items()
        if kind == "value" and type(content) is int:
            if not 0 <= content < count:
                raise ValueError(f"a call reads value {shown(content)}, there are {count} before it")
            return Value(content)
        # As text: JSON has neither infinities nor NaN.
        if kind == "float" and isinstance(content, str) and _FLOAT.fullmatch(content):
            return float(content)
        if kind in _CONSTANTS and isinstance(content, str) and content in _CONSTANTS[kind]:
            return _CONSTANTS[kind][content]
    raise ValueError(f"{shown(argument)} is no argument of a call")


def values_in(arguments: Any) -> list[int]:
    """The numbers of the values among arguments, which may be lists."""
    if isinstance(arguments, Value):
        return [arguments.number]
    return [number for each in arguments for number in values_in(each)] if isinstance(arguments, list) else []


class Schema:
    """The arguments and results of an operator.

    Args:
        name: of the operator, for messages.
        schema: torch's.
        listed: whether it is on the list of operators that only compute; its arguments must not change that.
    """

    def __init__(self, name: str, schema: FunctionSchema, *, listed: bool) -> None:
        self._name, self._listed = name, listed
        self._arguments: Sequence[Argument] = schema.arguments
        kinds = [_RESULTS.get(str(each.real_type), OTHER) for each in schema.returns]
        self.result: Result = NOTHING if not kinds else kinds[0] if len(kinds) == 1 else tuple(kinds)

    def check(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], values: Sequence[Result], handles: Collection[int]
    ) -> None:
        """Checks the arguments of a call.

        Args:
            args: by position, as `read` returns them.
            kwargs: by name.
            values: the kinds of the values that are there.
            handles: the values that are handles of tables.

        Raises:
            ValueError: names the operator and the argument.
        """
        given = self._by_name(args, kwargs)
        for argument in self._arguments:
            if argument.name not in given:
                if not argument.has_default_value():
                    raise ValueError(f"{self._name}: the argument {argument.name} is missing")
                continue
            value = given[argument.name]
            if (expected := self._expected(argument, value, given, values, handles)) is not None:
                raise ValueError(
                    f"{self._name}: the argument {argument.name} must be {expected}, got {_told(value, values)}"
                )

    def _expected(
        self,
        argument: Argument,
        value: Any,
        given: Mapping[str, Any],
        values: Sequence[Result],
        handles: Collection[int],
    ) -> str | None:
        """Returns what an argument must be, None if it is."""
        if not _fits(argument, value, values):
            return str(argument.real_type)
        if not self._takes(argument, value, handles):
            return "a table of the bundle" if self._is_table(argument) else "no table of the bundle"
        if self._listed and not _only_computes(argument.name, value, given):
            return "a constant by which the operator only computes"
        return None

    def _by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        names = [argument.name for argument in self._arguments]
        by_place = [argument.name for argument in self._arguments if not argument.kwarg_only]
        if len(args) > len(by_place):
            raise ValueError(f"{self._name} takes {len(by_place)} arguments by position, got {len(args)}")
        given = dict(zip(by_place, args, strict=False))
        if unknown := [name for name in kwargs if name not in names or name in given]:
            raise ValueError(f"{self._name} has no further argument {shown(unknown[0])}")
        return {**given, **kwargs}

    def _is_table(self, argument: Argument) -> bool:
        is_tensor = "Tensor" in str(argument.real_type)
        return is_tensor and argument.name in _TABLES and self._name.startswith("recstore::")

    def _takes(self, argument: Argument, value: Any, handles: Collection[int]) -> bool:
        """Whether an argument for tables gets handles of tables, and any other argument gets none."""
        numbers = values_in(value)
        if not self._is_table(argument):
            return not any(number in handles for number in numbers)
        count = len(value) if isinstance(value, list) else 1
        return len(numbers) == count and all(number in handles for number in numbers)


def result_of_item(name: str, args: Sequence[Any], values: Sequence[Result]) -> Result:
    """Returns the kind of one element of an operator's result.

    Raises:
        ValueError: other arguments than a list or a tuple, and a place in it.
    """
    container = values[args[0].number] if len(args) == 2 and isinstance(args[0], Value) else NOTHING
    place = args[1] if type(args[-1] if args else None) is int else -1
    if isinstance(container, tuple) and 0 <= place < len(container):
        return container[place]
    if container == TENSORS and place >= 0:
        return TENSOR
    raise ValueError(f"{name} takes what an operator of several results gave, and a place in it")


def check_numbers(name: str, args: Sequence[Any], count: int, values: Sequence[Result]) -> None:
    """Checks the operands of a function on numbers.

    Raises:
        ValueError: they are others.
    """
    if name == GETITEM or len(args) != count or not all(_fits_one("number", each, values) for each in args):
        raise ValueError(f"{name} takes {count} numbers, got {', '.join(_told(each, values) for each in args)}")


def _fits(argument: Argument, value: Any, values: Sequence[Result]) -> bool:
    kind = str(argument.real_type)
    if optional := re.fullmatch(r"Optional\[(.*)\]", kind):
        if value is None:
            return True
        kind = optional[1]
    if not (of_list := re.fullmatch(r"List\[(.*)\]", kind)):
        return not isinstance(value, list) and _fits_one(kind, value, values)
    if isinstance(value, list):
        return all(_fits_element(of_list[1], each, values) for each in value)
    if of_list[1] == "Tensor":
        return isinstance(value, Value) and values[value.number] == TENSORS
    # One number stands for each element of a list of fixed length.
    length = argument.N  # pyright: ignore[reportAttributeAccessIssue]  # Torch's stubs lack it.
    return length is not None and _fits_one(of_list[1], value, values)


def _fits_element(kind: str, value: Any, values: Sequence[Result]) -> bool:
    if kind in ("Tensor", "Optional[Tensor]"):
        return (value is None and kind != "Tensor") or (isinstance(value, Value) and values[value.number] == TENSOR)
    return _fits_one(kind, value, values)


def _fits_one(kind: str, value: Any, values: Sequence[Result]) -> bool:
    if isinstance(value, Value):
        found = values[value.number]
        return (found == TENSOR and kind == "Tensor") or (found == NUMBER and kind in _NUMERIC)
    return _form_of(value) in _FORMS.get(kind, ())


def _form_of(value: Any) -> str:
    named = {torch.dtype: "dtype", torch.device: "device", torch.layout: "layout", torch.memory_format: "memory_format"}
    return named.get(type(value), type(value).__name__)


def _only_computes(name: str, value: Any, given: Mapping[str, Any]) -> bool:
    if name in _TRAINING:
        # In training mode such an operator writes the running statistics, if it has any.
        without = all(given.get(each) is None for each in _STATISTICS)
        return value is False or (without and value is True)
    return name not in _ONLY or (not isinstance(value, Value) and value in _ONLY[name])


def _told(value: Any, values: Sequence[Result]) -> str:
    if isinstance(value, Value):
        kind = values[value.number]
        return kind if isinstance(kind, str) else "several results"
    if isinstance(value, list):
        return "a list of " + (", ".join(dict.fromkeys(_told(each, values) for each in value)) or "nothing")
    return shown(value)
