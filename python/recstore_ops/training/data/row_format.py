"""What a text format is."""

from __future__ import annotations

from typing import Protocol

from recstore_ops.training.data.batch import Batch

_QUOTED_CHARACTERS = 40


class RowFormat(Protocol):
    """A text format with one row a line.

    Lines end with LF and have neither CR nor NUL: whoever reads a file sees to that, the same for all formats.
    """

    @property
    def name(self) -> str: ...

    @property
    def field_names(self) -> tuple[str, ...]:
        """Names of the F fields."""
        ...

    @property
    def dense_names(self) -> tuple[str, ...]:
        """Names of the J dense features."""
        ...

    @property
    def has_labels(self) -> bool:
        """Whether rows have labels; those without have NaN."""
        ...

    @property
    def group_name(self) -> str | None:
        """What rows are grouped by; None where they are not."""
        ...

    def is_header(self, line: bytes) -> bool:
        """Tells whether a file's first line, without its end, is a header, which is no row.

        Raises:
            ValueError: it is a header, but of other columns.
        """
        ...

    def parse(self, block: bytes) -> Batch:
        """Parses whole lines; blank ones are passed over.

        Raises:
            ValueError: some line is bad. `explain` says which part of it and why.
        """
        ...

    def explain(self, line: bytes) -> str:
        """Says what was expected of a line, without its end, that `parse` refuses, and what is there instead."""
        ...


def quote(part: bytes) -> str:
    """Returns a part of a line for a message: in quotes, printable, cut if it is long."""
    text = part[: _QUOTED_CHARACTERS + 1].decode("ascii", errors="backslashreplace")
    return repr(text if len(text) <= _QUOTED_CHARACTERS else text[:_QUOTED_CHARACTERS] + "...")
