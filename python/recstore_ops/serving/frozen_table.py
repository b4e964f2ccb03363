"""Tables that no longer change: a file each, mapped into memory, whose pages all processes of a machine share."""

from __future__ import annotations

import json
import os
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from recstore_ops import _native
from recstore_ops.config.directory import Directory
from recstore_ops.config.paths import user_path
from recstore_ops.ops import operators

EncodingName = Literal["float32", "bfloat16", "float16", "int8", "int4"]
FrozenMemory = Literal["mapped", "copied"]


class FrozenTable:
    """A table in a file, to be read.

    A mapped file must not be changed in place as long as it is open; writing a new one and renaming it does no harm.

    Args:
        path: the file, of `freeze`.
        memory: "mapped": opening reads the header only, all processes of a machine share the pages, and a part of the
            file is compared with its checksum when it is first read. "copied": opening reads and compares all, into
            huge pages of this process; lookups are faster.

    Attributes:
        name: the name of the table when it was frozen.
        dim: elements a row.
        rows: how many.
        encoding: how they are kept.
        config: the table's configuration when it was frozen.
        fingerprint: a 32-bit number that distinguishes its contents from others.
        handle: the handle that operators take; those that change rows refuse it.

    Raises:
        ValueError: another `memory`.
        OSError: the file cannot be read, was cut off or changed, or is no frozen table that this version knows.
    """

    __module__ = "recstore_ops"

    def __init__(self, path: str | os.PathLike[str], memory: FrozenMemory = "mapped") -> None:
        given = Path(user_path(path, "path"))
        self._open(given, _native.open_frozen(str(given), memory))

    @classmethod
    def within(cls, directory: Directory, name: str, memory: FrozenMemory) -> FrozenTable:
        """Opens the file of a name in a directory that is held.

        Raises:
            ValueError, OSError: as the constructor; or the name leads out of the directory, or over a symbolic link.
        """
        table = cls.__new__(cls)
        table._open(directory.path / name, _native.open_frozen(name, memory, directory.native))
        return table

    def _open(self, path: Path, opened: dict[str, Any]) -> None:
        self.path = path
        self.name: str = opened["name"]
        self.dim: int = opened["dim"]
        self.rows: int = opened["rows"]
        self.encoding: EncodingName = opened["encoding"]
        self.config: dict[str, Any] = json.loads(opened["config"])
        self.fingerprint: int = opened["fingerprint"]
        self.handle = torch.tensor(opened["handle"], dtype=torch.int64, device="cpu")
        weakref.finalize(self, _close, opened["handle"])

    def read(self, ids: Tensor) -> Tensor:
        """Returns the row of each id, int64 `[...]` -> float32 `[..., dim]`; an id without one has its initial value.

        Raises:
            RuntimeError: a byte that was read was changed.
        """
        return operators.emb_read(self.handle, ids, self.dim)

    def change(self, ids: bytes, rows: bytes, deleted: bytes) -> None:
        """Takes what changed in the table since it was frozen; rows are read as they are then, the file stays as it is.

        Args:
            ids: int64, of rows that are new or other.
            rows: theirs, in the encoding of the table, one behind the other.
            deleted: int64, of rows that went before the others came.

        Raises:
            RuntimeError: lengths do not fit each other, an id is beyond the table's bound, or a byte of the file was
                changed. Then no row has changed.
        """
        _native.change_frozen(self.handle.tolist(), ids, rows, deleted)

    def __len__(self) -> int:
        return self.rows

    def __repr__(self) -> str:
        return f"FrozenTable({str(self.path)!r}, name={self.name!r}, rows={self.rows}, dim={self.dim}, {self.encoding})"


def _close(handle: list[int]) -> None:
    # Not by the operator: a table may be collected as garbage while something else is traced. Whoever released all
    # released it too.
    with suppress(RuntimeError):
        _native.close_frozen(handle)
