"""The results of saving and loading checkpoints."""

from dataclasses import asdict, dataclass
from typing import Any

from recstore_ops.config.html_table import html_facts, html_table, shown


@dataclass(frozen=True)
class SaveReport:
    """The result of a save.

    Attributes:
        snapshot: the snapshot's name.
        is_delta: whether it holds only changes.
        rows: the rows written.
        deleted: the ids recorded as deleted.
        bytes: the bytes written.
    """

    snapshot: str
    is_delta: bool
    rows: int
    deleted: int
    bytes: int

    def _repr_html_(self) -> str:
        return html_facts("saved", asdict(self))


@dataclass(frozen=True)
class LoadReport:
    """The result of a load.

    Attributes:
        snapshot: the snapshot's name.
        metadata: the metadata that was given to its save.
        tables: the rows of each table, by name.
    """

    snapshot: str
    metadata: Any
    tables: dict[str, int]

    def _repr_html_(self) -> str:
        tables = ((name, shown(rows)) for name, rows in self.tables.items())
        return html_table((f"loaded {self.snapshot}", "rows"), tables, figures_from=1)
