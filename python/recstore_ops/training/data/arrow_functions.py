"""The functions of `pyarrow.compute`: most are made when it is imported, where type checkers do not see them."""

from __future__ import annotations

from typing import Any


class _Functions:
    """Imports them when the first is used: they take as long as half of the other imports of a run beside torch."""

    def __getattr__(self, name: str) -> Any:
        import pyarrow.compute

        function = getattr(pyarrow.compute, name)
        setattr(self, name, function)
        return function


pc: Any = _Functions()
