"""The results of saving and loading checkpoints."""

import os
import warnings
from dataclasses import asdict, dataclass
from os import PathLike
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
        kept: the newest of the snapshots of another store that stay in the directory beside this one, if this one is
            the first of its store.
    """

    snapshot: str
    is_delta: bool
    rows: int
    deleted: int
    bytes: int
    kept: str | None = None

    def _repr_html_(self) -> str:
        return html_facts("saved", asdict(self))


def warn_of_kept(path: str | PathLike[str], kept: str | None, stacklevel: int) -> None:
    """Warns of the snapshots of another store that a save has left in its directory.

    Args:
        path: the directory or URL.
        kept: the newest of these snapshots; `None` if there are none.
        stacklevel: as in `warnings.warn`, from the caller's point of view.
    """
    if kept is None:
        return
    place = os.fspath(path)
    warnings.warn(
        f"{place} has snapshots of another store, which this process neither saved nor loaded; they stay beside those "
        f'saved now. checkpoint.load({place!r}, snapshot="{kept}") loads their newest one, a save with replace=True '
        "drops them, and another store that has loaded neither is refused",
        RuntimeWarning,
        stacklevel=stacklevel + 1,
    )


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
