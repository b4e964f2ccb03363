"""Modules whose attributes are closed: setting one that would have no effect is an error."""

import inspect
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from recstore_ops.table.refusals import refused_by_script, refused_for_module
from recstore_ops.table.table import Table


class _ClosedType(type):
    """Closes a module once it is made, constructors of derived classes included."""

    if not TYPE_CHECKING:  # To a checker of types a call of a class would be of any type, with any arguments.

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            module = super().__call__(*args, **kwargs)
            module._is_closed = True
            return module

    @property
    def __signature__(cls) -> inspect.Signature:
        """The signature of the constructor, which `__call__` hides."""
        signature = inspect.signature(cls.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class ClosedModule(nn.Module, metaclass=_ClosedType):
    """A module over tables that takes no further public attributes once it is made."""

    _is_closed = False
    _is_in_collection = False
    _fixed: ClassVar[frozenset[str]] = frozenset()
    """Attributes that describe an open table, and so must keep their values."""

    def tables(self) -> list[Table]:
        """The tables of this module."""
        raise NotImplementedError

    def __prepare_scriptable__(self) -> Any:
        """Returns the module itself within a collection; otherwise refuses `torch.jit.script`."""
        if self._is_in_collection:
            return self  # The collection reads the table, and its program has no module for it.
        raise refused_by_script(type(self).__name__, [table.name for table in self.tables()])

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_closed and not self._takes(name, value):
            raise refused_for_module(type(self).__name__, [table.name for table in self.tables()], name)
        super().__setattr__(name, value)

    def _takes(self, name: str, value: Any) -> bool:
        if name.startswith("_"):
            return True
        of_class = getattr(type(self), name, None)
        is_read_only = isinstance(of_class, property) and of_class.fset is None
        # A method may be wrapped, and no value takes its place.
        is_lost = callable(of_class) and not callable(value)
        return hasattr(self, name) and name not in self._fixed and not is_read_only and not is_lost
