"""Random programs over the list of operators, each argument by its type in the schema.

    python random_graphs.py FOLDER SEED COUNT    writes so many, FOLDER/0 and on, and prints the operators of each

A call is made here as it is added, so that most of them give something; some that fail are left at the end.
"""

from __future__ import annotations

import math
import operator
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from graph_programs import DTYPES, Program, Table
from torch import Tensor

from recstore_ops import DistEmbedding
from recstore_ops.ops import operators
from recstore_ops.serving import export
from recstore_ops.serving.frozen_table import FrozenTable

SHAPES = (
    (),
    (1,),
    (3,),
    (4,),
    (2, 3),
    (3, 2),
    (3, 3),
    (4, 3),
    (0, 3),
    (2, 3, 4),
    (1, 2, 4, 4),
    (2, 2, 3, 3),
    (1, 2, 3, 4, 4),
)
FLOATS = (0.0, -0.0, 1.0, 0.5, -1.5, 2.0, 1e-5, 0.1, 3.0, float("inf"), float("nan"))
INTS = (0, 1, 1, 2, 2, 3, 4, -1, -1, -2)
EDGES = (2**62, 2**63 - 1, -(2**63), 2**53 + 1, -(2**31), 2**31)
TEXTS = {
    "rounding_mode": ("floor", "trunc"),
    "reduction": ("mean", "sum"),
    "reduce": ("sum", "prod", "mean", "amax", "amin"),
    "side": ("left", "right"),
    "padding": ("same", "valid"),
    "approximate": ("none", "tanh"),
    "indexing": ("ij", "xy"),
    "mode": ("constant", "reflect", "replicate", "circular"),
    "equation": ("ij,jk->ik", "i,i->", "ij->ji", "bij,bjk->bik", "ii->i"),
    "assert_msg": ("no",),
    "interpolation": ("linear", "lower", "nearest"),
    "ord": ("fro", "nuc"),
}
NAMED = {
    "ScalarType": ("dtype", ("float32", "float64", "int64", "bool", "int32", "float16", "bfloat16", "complex64")),
    "Device": ("device", ("cpu",)),
    "Layout": ("layout", ("strided",)),
    "MemoryFormat": ("memory_format", ("contiguous_format", "preserve_format", "channels_last")),
}
OFF = ("train", "training", "use_input_stats", "insert", "pin_memory")
PLACES = ("index", "indices", "ids", "offsets", "target", "sorter", "boundaries")
TRIES, MAX_ELEMENTS = 60, 4096


def _bags(schema: Any, draw: random.Random) -> list[Any]:
    indices, offsets = torch.tensor([2, 0, 1, 1]), torch.tensor([0, 1, 1, 4])
    args = [torch.randn(3, 2), indices, offsets, False, draw.randrange(3), False, None, True]
    return args if schema.overload_name == "" else [*args, draw.choice((None, 1))]


def _recurrent(schema: Any, draw: random.Random) -> list[Any]:
    layers, both, biases = draw.choice((1, 2)), draw.choice((False, True)), draw.choice((False, True))
    gates = {"aten::lstm": 4, "aten::gru": 3}.get(schema.name, 1)
    directions = 2 if both else 1
    projected = draw.choice((0, 2)) if schema.name == "aten::lstm" else 0
    given_back = projected or 4
    parameters = []
    for layer in range(layers):
        for _ in range(directions):
            width = 3 if layer == 0 else given_back * directions
            parameters += [torch.randn(gates * 4, width), torch.randn(gates * 4, given_back)]
            parameters += [torch.randn(gates * 4), torch.randn(gates * 4)] if biases else []
            parameters += [torch.randn(projected, 4)] if projected else []
    state = torch.randn(layers * directions, 2, given_back)
    first = [state, torch.randn(layers * directions, 2, 4)] if schema.name == "aten::lstm" else state
    return [torch.randn(2, 2, 3), first, parameters, biases, layers, 0.0, False, both, True]


EXACT: dict[str, Callable[[Any, random.Random], list[Any]]] = {
    "aten::embedding_bag": _bags,
    **dict.fromkeys(("aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"), _recurrent),
}
"""Operators whose kernels trust their arguments, which are therefore made as a whole."""


class Failed(Exception):
    """An operator refused its arguments."""


class Value:
    """A value of a program, with what it is here."""

    def __init__(self, kind: str, real: Any) -> None:
        self.kind, self.real, self.number = kind, real, -1


def listed() -> tuple[list[Any], list[str]]:
    """The schemas of the list, and the names of its functions on sizes."""
    lines = files("recstore_ops.serving").joinpath("graph_operators.txt").read_text().splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    return [torch._C.parse_schema(line) for line in lines if "::" in line], [line for line in lines if "::" not in line]


class Maker:
    """Makes one program."""

    def __init__(self, draw: random.Random, table: Table, handle: Tensor) -> None:
        self._draw, self._table = draw, table
        self._handle = Value("handle", handle)
        self._values: list[Value] = []
        self._calls: list[tuple[str, Any, Any, Value]] = []
        self._fresh: list[Value] = []
        self.made: list[str] = []

    # Values.

    def _tensor(self, name: str) -> Value:
        is_place = name in PLACES
        known = [each for each in self._values if isinstance(each.real, Tensor)]
        known = [each for each in known if not is_place or each.real.dtype == torch.int64]
        if known and self._draw.random() < 0.6:
            return self._draw.choice(known[-6:])
        dtype = torch.int64 if is_place else self._draw.choice((torch.float32, torch.float32, torch.float32, *DTYPES))
        made = Value(self._draw.choice(("state", "input")), self._elements(dtype, self._draw.choice(SHAPES), is_place))
        self._fresh.append(made)
        return made

    def _elements(self, dtype: torch.dtype, shape: Sequence[int], is_place: bool) -> Tensor:
        seeded = torch.Generator().manual_seed(self._draw.randrange(2**31))
        if dtype.is_floating_point:
            made = torch.randn(shape, generator=seeded).to(dtype)
            special = self._draw.random() < 0.1
        else:
            made = torch.randint(0 if is_place or not dtype.is_signed else -3, 3, shape, generator=seeded).to(dtype)
            special = dtype == torch.int64 and not is_place and self._draw.random() < 0.1
        if special and made.numel():
            values = FLOATS if dtype.is_floating_point else EDGES
            made.view(-1)[self._draw.randrange(made.numel())] = self._draw.choice(values)
        return made

    def _number(self, of: tuple[type, ...], otherwise: Sequence[Any], most: float = math.inf) -> tuple[Any, Any]:
        known = [each for each in self._values if type(each.real) in of and not abs(each.real) > most]
        if known and self._draw.random() < 0.3:
            chosen = self._draw.choice(known)
            return chosen, chosen.real
        value = self._draw.choice(otherwise)
        return ({"float": repr(value)} if isinstance(value, float) else value), value

    # Arguments: as the file has them, with values in place of their numbers, and as they are here.

    def _argument(self, argument: Any) -> tuple[Any, Any]:
        name, kind = argument.name, str(argument.real_type)
        while kind.startswith("Optional["):
            if self._draw.random() < 0.4 or name in ("running_mean", "running_var"):
                return None, None
            kind = kind.removeprefix("Optional[").removesuffix("]")
        if name in OFF:
            return False, False
        if name == "dropout_p":
            return {"float": "0.0"}, 0.0
        if kind.startswith("List["):
            return self._list(name, kind.removeprefix("List[").removesuffix("]"), argument.N)
        return self._single(name, kind)

    def _list(self, name: str, kind: str, count: int | None) -> tuple[Any, Any]:
        count = self._draw.choice((1, 2, 2, 3)) if count is None or self._draw.random() < 0.1 else count
        if name in ("size", "shape", "output_size", "normalized_shape", "sizes"):
            tensors = [each.real for each in self._values if isinstance(each.real, Tensor)]
            if tensors and self._draw.random() < 0.5:
                sizes = list(self._draw.choice(tensors).shape)
                return sizes, sizes
        if kind == "Tensor" and self._draw.random() < 0.5:
            one = self._single(name, kind)
            return [one[0]] * count, [one[1]] * count
        each = [self._single(name, kind.removeprefix("Optional[").removesuffix("]")) for _ in range(count)]
        return [pair[0] for pair in each], [pair[1] for pair in each]

    def _single(self, name: str, kind: str) -> tuple[Any, Any]:
        if kind == "Tensor":
            value = self._handle if name in ("table", "tables") else self._tensor(name)
            return value, value.real
        if kind == "number":
            is_length = name in ("start", "end", "step", "repeats")
            return self._number(
                (int, float, bool), INTS if is_length else (*INTS, *FLOATS, True), 99 if is_length else math.inf
            )
        if kind == "float":
            return self._number((float,), FLOATS)
        if kind == "bool":
            return self._number((bool,), (True, False))
        if kind == "int":
            # Memory and time for more would be those of the machine.
            return self._number((int,), INTS, 99)
        if kind == "str":
            text = self._draw.choice(TEXTS.get(name, ("none",)))
            return text, text
        tag, names = NAMED[kind]
        text = self._draw.choice(names)
        return {tag: text}, torch.device(text) if tag == "device" else getattr(torch, text)

    # Calls.

    def call(self, schema: Any) -> Value:
        """Adds a call of an operator.

        Raises:
            Failed: no arguments were found that it takes.
        """
        packet = getattr(getattr(torch.ops, schema.name.split("::")[0]), schema.name.split("::")[1])
        overload = schema.overload_name or "default"
        function, name = getattr(packet, overload), f"{schema.name}.{overload}"
        for _ in range(TRIES):
            self._fresh = []
            args, kwargs, real_args, real_kwargs = self._arguments(schema)
            if _breaks_torch(name, real_args, real_kwargs):
                continue
            try:
                result = function(*real_args, **real_kwargs)
            except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
                if self._draw.random() < 0.002:
                    return self._add(name, args, kwargs, None)
                continue
            if _is_small(result):
                return self._add(name, args, kwargs, result)
        raise Failed

    def _arguments(self, schema: Any) -> tuple[list[Any], dict[str, Any], list[Any], dict[str, Any]]:
        if schema.name in EXACT:
            values = EXACT[schema.name](schema, self._draw)
            return [self._written(value) for value in values], {}, values, {}
        args, kwargs, real_args, real_kwargs = [], {}, [], {}
        by_place = True
        for argument in schema.arguments:
            if argument.has_default_value() and self._draw.random() < 0.6:
                by_place = False
                continue
            written, real = self._argument(argument)
            if by_place and not argument.kwarg_only:
                args.append(written)
                real_args.append(real)
            else:
                kwargs[argument.name], real_kwargs[argument.name] = written, real
        return args, kwargs, real_args, real_kwargs

    def _written(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self._fresh.append(Value(self._draw.choice(("state", "input")), value))
            return self._fresh[-1]
        if isinstance(value, list):
            return [self._written(each) for each in value]
        return {"float": repr(value)} if isinstance(value, float) else value

    def _add(self, name: str, args: Any, kwargs: Any, result: Any) -> Value:
        value = Value("call", result)
        self._calls.append((name, args, kwargs, value))
        self.made.append(name)
        self._values += [*self._fresh, value]
        self._fresh = []
        if isinstance(result, (tuple, list)):
            for place, element in enumerate(result):
                if isinstance(element, Tensor) or type(element) in (int, float, bool):
                    self._add("operator.getitem", [value, place], {}, element)
        return value

    def size(self, name: str) -> None:
        """Adds a call of a function on sizes."""
        function: Callable[..., Any] = getattr(operator if name.startswith("operator") else torch, name.split(".")[1])
        count = 1 if name in ("operator.neg", "torch.sym_not", "torch.sym_int", "torch.sym_float") else 2
        given = [self._number((int, float, bool), (*INTS, *EDGES, *FLOATS, True)) for _ in range(count)]
        try:
            result = function(*(pair[1] for pair in given))
        except (ArithmeticError, ValueError, AssertionError):
            return
        if type(result) is not int or -(2**63) <= result < 2**63:
            self._calls.append((name, [pair[0] for pair in given], {}, Value("call", result)))
            self._values.append(self._calls[-1][-1])

    def shown(self) -> None:
        """Adds tensors of the numbers, and of the parts of complex tensors."""
        for value in [*self._values]:
            if type(value.real) in (int, float, bool):
                dtype = {int: "int64", float: "float64", bool: "bool"}[type(value.real)]
                result = torch.full([1], value.real, dtype=getattr(torch, dtype))
                self._add("aten::full.default", [[1], value], {"dtype": {"dtype": dtype}}, result)
            elif isinstance(value.real, Tensor) and value.real.is_complex():
                part = self._draw.choice(("real", "imag"))
                self._add(f"aten::{part}.default", [value], {}, getattr(torch.ops.aten, part)(value.real))

    def program(self) -> Program:
        """The program with what was added."""
        inner = [each for each in self._values if each.kind in ("state", "input")]
        state, inputs = ([each for each in inner if each.kind == kind] for kind in ("state", "input"))
        order = [*state, self._handle, *inputs, *(value for *_, value in self._calls)]
        for number, value in enumerate(order):
            value.number = number
        given = [
            each
            for each in order
            if isinstance(each.real, Tensor) and each.real.dtype in DTYPES and each is not self._handle
        ]
        chosen = [
            *(self._draw.choices(given, k=2) if given else ()),
            *[each for each in given if each.kind == "call"][-4:],
        ]
        return Program(
            [[name, _numbered(args), _numbered(kwargs)] for name, args, kwargs, _ in self._calls],
            [each.number for each in chosen],
            [each.real for each in inputs],
            [each.real for each in chosen],
            {f"s{place}": each.real.contiguous().clone() for place, each in enumerate(state)},
            self._table,
            ["handle"],
        )


def _numbered(value: Any) -> Any:
    if isinstance(value, Value):
        return {"value": value.number}
    if isinstance(value, list):
        return [_numbered(each) for each in value]
    return {key: _numbered(each) for key, each in value.items()} if isinstance(value, dict) else value


def _breaks_torch(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether torch would end the process, or give what memory held; the runtime refuses such calls."""
    values = [*args, *kwargs.values()]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if name.endswith("_mode"):
        whole = [
            value for value in tensors if not value.is_floating_point() and not value.is_complex() and value.numel()
        ]
        return "trunc" in values and any(value.min() < -(2**30) for value in whole)
    if name in ("aten::_weight_norm.default", "aten::norm_except_dim.default"):
        return any(value.numel() != 9 or value.dim() != 2 or not value.is_floating_point() for value in tensors)
    if name == "aten::_pad_circular.default":
        return any(pad < 0 for value in values if isinstance(value, list) for pad in value)
    # Bytes that are no bools have no meaning.
    return name == "aten::view.dtype" and torch.bool in values


def _is_small(result: Any) -> bool:
    if isinstance(result, Tensor):
        return result.numel() <= MAX_ELEMENTS
    return not isinstance(result, (list, tuple)) or (len(result) <= 8 and all(map(_is_small, result)))


def made_program(
    seed: int, table: Table, handle: Tensor, schemas: Sequence[Any], sizes: Sequence[str]
) -> tuple[Program, list[str]]:
    """A program by its seed, around an operator that is another for the next; and the operators that it calls."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    maker = Maker(draw, table, handle)
    calls = [draw.choice(schemas) for _ in range(draw.randrange(3))]
    for schema in (*calls, schemas[seed % len(schemas)], *(draw.choice(schemas) for _ in range(draw.randrange(3)))):
        for _ in range(draw.randrange(3)):
            maker.size(draw.choice(sizes))
        try:
            maker.call(schema)
        except Failed:
            continue
    maker.shown()
    return maker.program(), maker.made


def main(folder: Path, seed: int, count: int) -> None:
    """Writes programs over the table of a bundle of its own, and prints the operators that each calls."""
    schemas, sizes = listed()
    sizes.remove("operator.getitem")
    module = DistEmbedding(None, 4, "random")
    operators.emb_write(module.table.handle, torch.arange(6), torch.randn(6, 4))
    table = Table.of(export(module, (torch.arange(3),), folder / "table_of"))
    frozen = FrozenTable(table.file)
    with torch.no_grad():
        for number in range(count):
            program, made = made_program(seed + number, table, frozen.handle, schemas, sizes)
            program.write(folder / str(number))
            print(*made, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
