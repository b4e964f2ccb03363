"""Functions of torch that what stands for a table allows: all others are refused."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.optim import Optimizer

from recstore_ops.ops import operators
from recstore_ops.table.program_line import warn_program
from recstore_ops.table.table import Table


class StandIn:
    """A tensor in the place of a table, or of a part of one."""

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Refused as other functions are; torch asks no override for this one."""
        return type(self).__torch_function__(Tensor.set_, (type(self),), (self, *args), kwargs)  # type: ignore[attr-defined]

    def __iter__(self) -> Any:
        """Refused too: torch asks the scalar."""
        return type(self).__torch_function__(Tensor.__iter__, (type(self),), (self,))  # type: ignore[attr-defined]


def without_override(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function with the scalars that stand-ins are; compilers trace it."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


OF_SCALAR = frozenset(
    {
        *(
            "device",
            "dtype",
            "layout",
            "requires_grad",
            "requires_grad=",
            "is_leaf",
            "grad_fn",
            "grad_dtype",
            "_version",
        ),
        *("output_nr", "name", "names", "retains_grad", "_backward_hooks", "_base", "is_cpu", "is_cuda", "is_meta"),
        *(
            "is_sparse",
            "is_sparse_csr",
            "is_nested",
            "is_quantized",
            "is_mkldnn",
            "is_xpu",
            "is_mps",
            "is_ipu",
            "is_mtia",
        ),
        *("is_xla", "is_maia", "is_vulkan", "itemsize", "element_size", "is_floating_point", "is_complex", "is_signed"),
        *("is_conj", "is_neg", "is_inference", "is_shared", "get_device", "_is_view", "has_names", "__hash__"),
        *("untyped_storage", "storage_offset", "is_contiguous"),
        *("_has_compatible_shallow_copy_type", "_typed_storage", "__cuda_array_interface__"),
    }
)
"""The scalar itself answers these: how it lies, and which kind of tensor it is."""
SIZES = frozenset({"shape", "size", "numel", "nelement", "dim", "ndim", "ndimension", "__len__", "stride"})
"""The table answers these, about its matrix."""
TEXTS = frozenset({"__repr__", "__format__"})


OF_TORCH = str(Path(torch.__file__).parent)
_EXPORTS = tuple(str(Path(OF_TORCH, name)) for name in ("export", "_export", "_inductor"))
_OPTIMIZERS = str(Path(torch.optim.__file__).parent)
_INITIALIZERS = str(Path(torch.nn.init.__file__))


_WRITTEN_AS = {
    **{"truediv": "div", "itruediv": "div", "rdiv": "rdiv", "rtruediv": "rdiv", "iadd": "add", "isub": "sub"},
    **{"imul": "mul", "rmul": "mul", "radd": "add", "rsub": "rsub", "rpow": "rpow", "invert": "bitwise_not"},
}


def plain_name(name: str) -> str:
    """The name of an operation without what says how it was written: `__radd__`, `add_` and `add` are one."""
    bare = name.removeprefix("_foreach").strip("_")
    return _WRITTEN_AS.get(bare, bare)


def is_of_compiler(name: str) -> bool:
    """Whether torch itself asks how the scalar lies, to make one of its own of it; initializers ask for the rows."""
    # Of code that the compiler traces, programs ask.
    if name not in SIZES or name == "__len__" or torch.compiler.is_dynamo_compiling():
        return False
    file = "" if TracingContext.try_get() is not None else sys._getframe(2).f_code.co_filename
    return not file or (file.startswith(OF_TORCH) and file != _INITIALIZERS)


def is_exporting() -> bool:
    """Whether torch pickles an exported program."""
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(_EXPORTS):
        frame = frame.f_back
    return frame is not None


def is_of_optimizer() -> bool:
    """Whether an optimizer of torch asks."""
    return sys._getframe(2).f_code.co_filename.startswith(_OPTIMIZERS)


def size_of_table(name: str, table: Table, args: Any) -> Any:
    """The answer of a table, `[N, dim]`, to a function of `SIZES`; one that grows has the rows of now."""
    bound = table.config.num_embeddings
    rows = operators.hashtable_size(table.handle) if bound is None else bound
    shape = torch.Size((rows, table.dim))
    if name in ("shape", "size", "stride"):
        found = (table.dim, 1) if name == "stride" else shape
        return found[args[0]] if args else found
    return {"numel": rows * table.dim, "nelement": rows * table.dim, "__len__": rows}.get(name, 2)


# The code that `Optimizer.profile_hook_step` puts around the step of every optimizer.
_STEP = Optimizer.profile_hook_step(lambda self: None).__code__


def dense_step() -> str | None:
    """The step of an optimizer of torch that asks, if one does and not a closure within.

    It takes a stand-in for a scalar. The text is one object all through a step, and another one in the next.
    """
    frame = sys._getframe(2)
    files = set()
    while frame is not None:
        if frame.f_code is _STEP:
            step = getattr(type(frame.f_locals["args"][0]).step, "__wrapped__", None)
            own = "" if step is None else step.__code__.co_filename
            is_asking = all(file == own or file.startswith(OF_TORCH) for file in files)
            return frame.f_locals["profile_name"] if is_asking else None
        files.add(frame.f_code.co_filename)
        frame = frame.f_back
    return None


_steppers: WeakKeyDictionary[object, set[int]] = WeakKeyDictionary()
"""The numbers of the tables that each optimizer that is alive steps."""
_warned_in: dict[int, str] = {}
"""The step in which a warning named each table."""


def note_stepper(optimizer: object, tables: Iterable[Table]) -> None:
    """Notes that an optimizer steps tables, so that one of dense parameters may pass over them."""
    _steppers.setdefault(optimizer, set()).update(table.table_id for table in tables)


def check_is_stepped(table: Table, owner: str, step: str) -> None:
    """Warns once, and then refuses, if a step of torch finds gradients of a table that no `SparseOptimizer` steps.

    Raises:
        RuntimeError: the second time.
    """
    if _warned_in.get(table.table_id) is step:
        return
    if any(table.table_id in numbers for numbers in _steppers.values()):
        return
    text = (
        f'an optimizer of torch.optim has a parameter of {owner} over table "{table.name}", which it cannot step: its '
        "gradients stay collected and no row trains. SparseOptimizer(modules=[...]) steps the tables, beside an "
        "optimizer for the dense parameters; SparseOptimizer().step([modules]) names them later"
    )
    if table.table_id in _warned_in:
        raise RuntimeError(text)
    _warned_in[table.table_id] = step
    warn_program(text)
