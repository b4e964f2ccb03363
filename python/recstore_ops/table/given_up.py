"""Tables that a module made with `on_existing="reset"` began anew: all that was opened over them before refuses."""

from __future__ import annotations

from typing import Any, NoReturn

from recstore_ops.ops import operators
from recstore_ops.table.table import Table, open_tables


class GivenUpTable(Table):
    """The type that a `Table` gets when its rows are given up. The table made in its place has another number.

    All that reads rows, or looks at collected gradients, asks for the handle or the collector. By another type these
    raise an error, and tables in use pay nothing for it.
    """

    @property
    def handle(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Raises an error, as all that reads the rows needs it."""
        self._refuse()

    @property
    def collector(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Raises an error, as all that looks at collected gradients needs it."""
        self._refuse()

    def clear_collected(self) -> None:
        """Drops what was collected: an optimizer of all tables does so for those that are given up too."""
        self._lent = None
        operators.clear_grads(self.__dict__["collector"])

    def _if_there(self, found: Any) -> NoReturn:
        self._refuse()

    def __reduce__(self) -> Any:
        # By its name it would be opened as the table that took its place.
        self._refuse()

    def __deepcopy__(self, memo: dict[Any, Any]) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            f'table "{self.name}" was given up: a module made later, with on_existing="reset", began it anew, and the '
            f"rows and gradients of this {self.owner} are gone; use the module that was made last, or "
            'on_existing="share" for modules over one table'
        )


def note_given_up(number: int) -> None:
    """Lets every `Table` that is open over a table refuse from now on."""
    for table in open_tables():
        if table.table_id == number:
            table.__class__ = GivenUpTable
