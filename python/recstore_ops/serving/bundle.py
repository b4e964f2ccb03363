"""A model as one directory: its exported program, and the tables that it reads, frozen.

- `manifest.json`: the contents of the bundle, with checksums.
- `program.pt2`: the program, written by `torch.export.save`.
- `graph.json`: the same program as a list of calls, see `recstore_ops.serving.graph`.
- `state.safetensors`: the tensors that the graph needs.
- `compiled.pt2`: the same program as machine code, if it was asked for.
- `tables/0.safetensors`: a frozen table.

The graph opens in milliseconds, and calls only operators of a list. A program without a graph is code, which torch
loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from io import BytesIO
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from recstore_ops.serving.compiled import CompiledModel, check_fits
from recstore_ops.serving.frozen_table import FrozenMemory, FrozenTable
from recstore_ops.serving.graph import Run
from recstore_ops.serving.graph_operators import Operators
from recstore_ops.serving.manifest import COMPILED, GRAPH, PROGRAM
from recstore_ops.serving.opening import BundleFiles
from recstore_ops.serving.sizes import Range
from recstore_ops.serving.structures import are_alike

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def check_inputs(
    expected: Sequence[dict[str, Any]], inputs: Sequence[Any], ranges: Mapping[str, Range] | None = None
) -> None:
    """Checks tensors: their number, types, dimensions, and sizes that are fixed, within bounds or equal one another.

    Args:
        expected: the manifest's description of each.
        inputs: in the same order.
        ranges: the bounds of sizes, by their names.

    Raises:
        ValueError: names the input, the expected value and the actual one.
    """
    if len(inputs) != len(expected):
        names = ", ".join(each["name"] for each in expected)
        raise ValueError(f"the bundle takes {len(expected)} tensors, {names}; got {len(inputs)}")
    sizes: dict[str, tuple[int, str]] = {}
    for description, given in zip(expected, inputs, strict=True):
        if "dtype" not in description:
            _check_value(description, given)
            continue
        _check_tensor(description, given)
        for place, (name, size) in enumerate(zip(description["sizes"], given.shape, strict=True)):
            if name is not None:
                bounds = (ranges or {}).get(name)
                if bounds is not None and not bounds.has(size):
                    raise ValueError(
                        f"input {description['name']}: size {size} of dimension {place} must be {bounds}, for which "
                        "the program was exported"
                    )
                first, whose = sizes.setdefault(name, (size, description["name"]))
                if size != first:
                    raise ValueError(
                        f"input {description['name']}: size {size} of dimension {place} must be equal to that of "
                        f"{whose}, {first}"
                    )


def _check_value(description: dict[str, Any], given: Any) -> None:
    if type(given).__name__ != description["type"]:
        raise ValueError(f"input {description['name']}: expected {description['type']}, got {type(given).__name__}")


def _check_tensor(description: dict[str, Any], given: Any) -> None:
    name, dtype, shape = description["name"], description["dtype"], description["shape"]
    if not isinstance(given, Tensor):
        raise ValueError(f"input {name}: expected a tensor, got {type(given).__name__}")
    found = str(given.dtype).removeprefix("torch."), list(given.shape)
    fits = found[0] == dtype and len(found[1]) == len(shape)
    if not fits or any(size not in (-1, own) for size, own in zip(shape, found[1], strict=True)):
        raise ValueError(f"input {name}: expected {dtype} {shape}, got {found[0]} {found[1]}")


class Model(Protocol):
    """The part of a bundle that answers calls.

    Attributes:
        in_spec: how the inputs lie in the arguments of a call.
        out_spec: how the outputs lie in the result of a call.
        tables: by their names.
    """

    @property
    def in_spec(self) -> TreeSpec: ...

    @property
    def out_spec(self) -> TreeSpec: ...

    @property
    def tables(self) -> Mapping[str, FrozenTable]: ...

    def run(self, inputs: Sequence[Any], /) -> Sequence[Any]:
        """Returns the outputs, flat, of inputs, flat."""
        ...

    def unchanged(self) -> AbstractContextManager[Run]:
        """Gives what runs it over tables that do not change between its calls."""
        ...


class Bundle(nn.Module):
    """The model of a bundle; called as the model that was exported, without gradients.

    Attributes:
        path: the directory.
        manifest: what is in it.
    """

    __module__ = "recstore_ops"

    def __init__(self, files: BundleFiles, model: Model, *, trusted: bool = False) -> None:
        super().__init__()
        self.path = files.path
        self.manifest = files.manifest
        self._files, self._model, self._trusted = files, model, trusted
        self.training = False

    @property
    def tables(self) -> Mapping[str, FrozenTable]:
        """The tables, by the names that they had."""
        return self._model.tables

    def train(self, mode: bool = True) -> Bundle:
        """Stays as it is: in evaluation mode.

        Raises:
            RuntimeError: training mode is asked for.
        """
        if mode:
            raise RuntimeError(f"the bundle {self.path} only predicts: train the model that it was exported from")
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the program gives.

        Raises:
            ValueError: other arguments than those of the export, or tensors of another type or shape.
        """
        leaves, spec = tree_flatten((args, kwargs))
        # Arguments in the order of the export are the usual case, and need no second flattening.
        if not are_alike(spec, self._model.in_spec):
            leaves = _ordered(args, kwargs, self._model.in_spec)
        return tree_unflatten(self.flat(leaves), self._model.out_spec)

    def flat(self, inputs: Sequence[Tensor]) -> list[Any]:
        """Returns the outputs of the manifest for its inputs, both in their order.

        Raises:
            ValueError: tensors of another number, type or shape than those of the manifest.
        """
        return self._checked(self._model.run, inputs)

    @contextmanager
    def at_one_step(self) -> Iterator[Callable[[Sequence[Tensor]], list[Any]]]:
        """Gives what does as `flat` does, over tables that do not change between its calls."""
        with self._model.unchanged() as run:
            yield lambda inputs: self._checked(run, inputs)

    def _checked(self, run: Run, inputs: Sequence[Tensor]) -> list[Any]:
        check_inputs(self.manifest.inputs, inputs, self.manifest.ranges)
        with torch.no_grad():
            return list(run(inputs))

    def program(self) -> ExportedProgram:
        """Returns the program as `torch.export` knows it, over the tables of this bundle.

        Raises:
            ValueError: the bundle was not opened with `trusted=True`, and torch runs code of the file; or it is a base
                of a publication, which has the graph alone.
            OSError: its file was changed.
        """
        _check_trusted(self._files, PROGRAM, trusted=self._trusted)
        return _read_program(self._files, self.tables)


class _GraphModel:
    """A program that is run by its graph."""

    def __init__(self, files: BundleFiles, memory: FrozenMemory, operators: Operators) -> None:
        # In this order: a graph that is refused has taken no memory for tables.
        graph, self.tables = files.graph(operators), files.tables(memory)
        self.in_spec, self.out_spec = graph.in_spec, graph.out_spec
        self.run = graph.bind(files.state(graph, self.tables))

    def unchanged(self) -> AbstractContextManager[Run]:
        """See `Model`."""
        return nullcontext(self.run)


class _ProgramModel:
    """A program that is run as torch loads it."""

    def __init__(self, files: BundleFiles, memory: FrozenMemory) -> None:
        self.tables = files.tables(memory)
        program = _read_program(files, self.tables)
        in_spec, out_spec = program.call_spec.in_spec, program.call_spec.out_spec
        assert in_spec is not None, "torch.export.load gives it"
        assert out_spec is not None, "torch.export.load gives it"
        self.in_spec, self.out_spec = in_spec, out_spec
        self._module = program.module()

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """See `Model`."""
        args, kwargs = tree_unflatten(inputs, self.in_spec)
        return tree_leaves(self._module(*args, **kwargs))

    def unchanged(self) -> AbstractContextManager[Run]:
        """See `Model`."""
        return nullcontext(self.run)


def open_bundle(
    files: BundleFiles, memory: FrozenMemory, operators: Operators, *, compiled: bool, trusted: bool
) -> Bundle:
    """Opens a bundle of which the manifest was read.

    Raises:
        ValueError, OSError: as `load_bundle`.
    """
    model: Model
    if compiled:
        check_fits(files)
        _check_trusted(files, COMPILED, trusted=trusted)
        model = CompiledModel(files, memory)
    # Preferred to the program: a graph calls only operators of a list, so it needs no trust.
    elif GRAPH in files.manifest.files:
        model = _GraphModel(files, memory, operators)
    else:
        _check_trusted(files, PROGRAM, trusted=trusted)
        model = _ProgramModel(files, memory)
    return Bundle(files, model, trusted=trusted)


def _check_trusted(files: BundleFiles, name: str, *, trusted: bool) -> None:
    if name not in files.manifest.files:
        raise ValueError(
            f"{files.path} has no {name}: it is a base of a publication, or torch could not write the program"
        )
    if not trusted:
        raise ValueError(
            f"{files.path / name} is code, which can do all that this process can: to run it, open the bundle with "
            "trusted=True, or serve it with --trust-code"
        )


def _read_program(files: BundleFiles, tables: Mapping[str, FrozenTable]) -> ExportedProgram:
    # From memory: these are the bytes whose checksum was compared.
    program = torch.export.load(BytesIO(files.program()))
    for bundled in files.manifest.tables:
        for constant in bundled.constants:
            _put_handle(program, constant, tables[bundled.name].handle)
    return program


def _ordered(args: Sequence[Any], kwargs: Mapping[str, Any], expected: TreeSpec) -> list[Any]:
    """The leaves of arguments that are given by name in another order.

    Raises:
        ValueError: they are others.
    """
    names = list(expected.child(1).context)
    if set(names) == set(kwargs):
        leaves, spec = tree_flatten((tuple(args), {name: kwargs[name] for name in names}))
        if are_alike(spec, expected):
            return leaves
    given = _call_of(tree_flatten((tuple(args), dict(kwargs)))[1])
    raise ValueError(f"the bundle takes the arguments that it was exported with, {_call_of(expected)}; got {given}")


def _call_of(structure: TreeSpec) -> str:
    """A structure of arguments as a call has them: `bundle(a tensor, names=a dict of 2)`."""
    positional, named = structure.child(0), structure.child(1)
    given = [_shown(positional.child(place)) for place in range(positional.num_children)]
    given += [f"{name}={_shown(named.child(place))}" for place, name in enumerate(named.context)]
    return f"bundle({', '.join(given)})"


def _shown(structure: TreeSpec) -> str:
    return "..." if structure.is_leaf() else f"a {structure.type.__name__} of {structure.num_children}"


def _put_handle(program: ExportedProgram, constant: str, handle: Tensor) -> None:
    for held in (program.constants, program.state_dict):
        if constant in held:
            held[constant] = handle
            return
    raise OSError(f"the program of the bundle has no constant {constant}")
