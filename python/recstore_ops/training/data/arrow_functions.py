"""The functions of `pyarrow.compute`: most are created at import time, so type checkers do not see them."""

from __future__ import annotations

from typing import Any


class _Functions:
    """Imports them on first use: their import takes half as long as a run's other imports without torch."""

    def __getattr__(self, name: str) -> Any:
        import pyarrow.compute

        function = getattr(pyarrow.compute, name)
        setattr(self, name, function)
        return function


pc: Any = _Functions()
