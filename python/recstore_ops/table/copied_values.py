"""Tensors that are copies of a table's rows. Torch has views in their place: a write to one would reach no table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from recstore_ops.ops.operators import eager_only


def function_name(func: Any) -> str:
    """The name of a function of torch: of the getter of an attribute that name, of its setter with `=`."""
    name = func.__name__
    if name in ("__get__", "__set__", "__delete__"):
        owner = func.__self__
        of: Any = owner.fget if isinstance(owner, property) else owner
        return of.__name__ + ("" if name == "__get__" else "=")
    return name


def flat(values: Iterable[Any]) -> list[Any]:
    """Arguments, and the items of those that are lists."""
    return [each for value in values for each in (value if isinstance(value, list | tuple) else [value])]


_KEPT = frozenset({"requires_grad_", "detach_", "share_memory_", "__setstate__"})
"""Methods that end like those that write values, and write none."""
_BASE = Tensor._base


class CopiedValues(Tensor):
    """A copy that refuses writes, and so do its views; what functions make of it is a plain tensor."""

    _refusal = ""

    def refusing(self, sentence: str) -> CopiedValues:
        """Sets the sentence of the refusal, and returns the tensor."""
        self._refusal = sentence
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _called(func, args, kwargs or {})

    def _begin_write(self, function: str) -> None:
        """Called before a function writes to the values.

        Raises:
            RuntimeError: it may not.
        """
        self._refuse(function)

    def _refuse(self, function: str) -> None:
        if self._refusal:
            raise RuntimeError(f'"{function}" of {self._refusal}')

    def _end_write(self) -> None:
        """Called after a function has written to the values."""

    def _new(self, values: Tensor) -> Tensor:
        """The result of a function, in memory of its own."""
        return values

    def _view(self, values: Tensor) -> Tensor:
        """A view of the values."""
        return values.as_subclass(type(self)).refusing(self._refusal)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        with DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def set_(self, *args: Any) -> Tensor:  # type: ignore[override]
        """Refused as a write; torch asks no override for this one."""
        self._begin_write("set_")
        return super().set_(*args)


@eager_only  # Compilers leave the call to Python: a copy within a graph would be a plain tensor, and take writes.
def _called(func: Any, args: Any, kwargs: Any) -> Any:
    name = function_name(func)
    written = args[:1] if _is_write(name) else ()
    targets = [each for each in flat([*written, kwargs.get("out")]) if isinstance(each, CopiedValues)]
    for each in targets:
        each._begin_write(name)
    copies = [each for each in flat([*args, *kwargs.values()]) if isinstance(each, CopiedValues)]
    with DisableTorchFunctionSubclass():
        versions = [_version(each) for each in copies]
        found = func(*args, **kwargs)
        changed = [each for each, version in zip(copies, versions, strict=True) if _version(each) != version]
    # Functions whose names do not tell that they write, such as `relu(x, inplace=True)`.
    for each in changed:
        if not any(each is target for target in targets):
            each._refuse(name)
    for each in targets:
        each._end_write()
    own = args[0] if args else None
    # Compilers follow views down to the tensor that is none.
    if type(found) is Tensor and isinstance(own, CopiedValues) and getattr(func, "__self__", None) is not _BASE:
        return own._view(found) if _is_view(found, own) else own._new(found)
    return found


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _is_write(name: str) -> bool:
    if name in _KEPT:
        return False
    is_in_place = name.endswith("_") and not name.startswith("__")
    return is_in_place or name in ("__setitem__", "data=") or (name.startswith("__i") and name not in _OF_INT)


_OF_INT = frozenset({"__init__", "__invert__", "__int__", "__index__", "__instancecheck__", "__init_subclass__"})


def _is_view(found: Tensor, own: Tensor) -> bool:
    with DisableTorchFunctionSubclass():
        # Others have no storage of values.
        if found.is_meta or own.is_meta or found.layout != torch.strided or found.is_mkldnn:
            return False
        return found.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
