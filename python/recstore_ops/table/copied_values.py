"""Tensors that are copies of what a table holds, where torch has views: a write to one would reach no table."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

_KEPT = frozenset({"requires_grad_", "detach_", "share_memory_", "__setstate__"})
"""Methods that end like those that write values, and write none."""


class CopiedValues(Tensor):
    """A copy that refuses writes, and so do its views; what functions make of it is a plain tensor."""

    _refusal = ""

    def refusing(self, sentence: str) -> CopiedValues:
        """Sets the sentence of the refusal, and returns the tensor."""
        self._refusal = sentence
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__self__.__name__ + "=" if func.__name__ == "__set__" else func.__name__
        written = args[:1] if _is_write(name) else ()
        targets = [each for each in _flat([*written, kwargs.get("out")]) if isinstance(each, CopiedValues)]
        for each in targets:
            each._begin_write(name)
        with DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
        for each in targets:
            each._end_write()
        own = args[0] if args else None
        if type(found) is Tensor and isinstance(own, CopiedValues):
            return own._view(found) if _is_view(found, own) else own._new(found)
        return found

    def _begin_write(self, function: str) -> None:
        """Called before a function writes to the values.

        Raises:
            RuntimeError: it may not.
        """
        if self._refusal:
            raise RuntimeError(f'"{function}" of {self._refusal}')

    def _end_write(self) -> None:
        """Called after a function has written to the values."""

    def _new(self, values: Tensor) -> Tensor:
        """What a function made of the values, in memory of its own."""
        return values

    def _view(self, values: Tensor) -> Tensor:
        """What has the memory of the values."""
        return values.as_subclass(type(self)).refusing(self._refusal)


def _is_write(name: str) -> bool:
    if name in _KEPT:
        return False
    is_in_place = name.endswith("_") and not name.startswith("__")
    return is_in_place or name in ("__setitem__", "data=") or (name.startswith("__i") and name not in _OF_INT)


_OF_INT = frozenset({"__init__", "__invert__", "__int__", "__index__", "__instancecheck__", "__init_subclass__"})


def _flat(values: Any) -> list[Any]:
    return [each for value in values for each in (value if isinstance(value, list | tuple) else [value])]


def _is_view(found: Tensor, own: Tensor) -> bool:
    with DisableTorchFunctionSubclass():
        if found.is_meta or own.is_meta:
            return False
        return found.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
