"""The directory of a publication: bundles, and what changed since.

publication/current.json                    what there is
publication/bases/7-3f2a9c1e/               a bundle with the tables as they were at about update 7
publication/updates/8-3f2a9c1e.update       what changed between updates 7 and 8

A publisher that begins anew begins a *history*: its updates follow its own bases only. A base is written while the
tables train, so its rows are of no one step. All that changed meanwhile is in the updates behind it: it counts from
update `until` on.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recstore_ops.config.extras import imported
from recstore_ops.serving.checked_json import checked_json, parse_checked_json
from recstore_ops.serving.opening import aligned

CURRENT, BASES, UPDATES = "current.json", "bases", "updates"
_FORMAT, _VERSION = "recstore publication", 1
_MAGIC = b"recstore update 1\n"
_CRC = struct.Struct("<I")


@dataclass(frozen=True)
class Base:
    """A bundle, and the updates that make it whole.

    Attributes:
        history: the one that it is of.
        after: the last update whose changes it has for sure.
        until: the first update at which it is the state of one step.
    """

    history: str
    after: int
    until: int

    @property
    def name(self) -> str:
        """Its directory within the publication."""
        return f"{BASES}/{self.after}-{self.history}"


@dataclass(frozen=True)
class Current:
    """What a publication has.

    Attributes:
        base: where those begin who know nothing.
        update: the number of the newest update.
        previous: the base before, and the number of the last update that follows it only.
    """

    base: Base
    update: int
    previous: tuple[Base, int] | None = None

    @property
    def tag(self) -> str:
        """Another for whatever else the publication says."""
        return f"{self.base.name.removeprefix(BASES)[1:]}-{self.update}"

    def write(self, directory: Path) -> None:
        """Puts this in the place of what the publication said before, at once."""
        beside = directory / f".{CURRENT}"
        beside.write_text(checked_json(asdict(self), _FORMAT, _VERSION), encoding="utf-8")
        os.replace(beside, directory / CURRENT)

    @classmethod
    def parse(cls, text: str, whose: object) -> Current:
        """Reads what a publication says.

        Raises:
            ValueError: it is no publication, or one of another version.
            OSError: it is damaged.
        """
        fields = parse_checked_json(text, whose, _FORMAT, _VERSION)
        previous = fields["previous"] and (Base(**fields["previous"][0]), fields["previous"][1])
        return cls(Base(**fields["base"]), fields["update"], previous)

    @classmethod
    def read(cls, directory: Path) -> Current:
        """Reads what the publication in a directory says.

        Raises:
            ValueError: there is none, or one of another version.
            OSError: it is damaged.
        """
        return cls.parse(current_text(directory), directory / CURRENT)


def current_text(directory: Path) -> str:
    """Returns what the publication in a directory says, as it stands there.

    Raises:
        ValueError: there is none.
        OSError: it cannot be read.
    """
    try:
        return (directory / CURRENT).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise ValueError(f"{directory} is no publication: it has no {CURRENT}") from None


@dataclass(frozen=True)
class TableChanges:
    """What changed in a table: int64 ids of rows that are new or other, the rows in the table's encoding, and ids whose
    rows went before."""

    ids: bytes
    rows: bytes
    deleted: bytes

    def __bool__(self) -> bool:
        return bool(self.ids or self.deleted)


@dataclass(frozen=True)
class Update:
    """What changed in a model between two moments.

    Attributes:
        history: whose it is.
        number: one more than that of the update before.
        step: of the trainer, when it was cut.
        time: seconds since 1970, when it was cut.
        tables: by their names, those that changed.
        state: the dense tensors that changed, by their names in the program.
    """

    history: str
    number: int
    step: int
    time: float
    tables: Mapping[str, TableChanges]
    state: Mapping[str, Tensor]

    @property
    def name(self) -> str:
        """Its file within the publication."""
        return update_name(self.history, self.number)

    def to_bytes(self) -> bytes:
        """Returns the content of its file: a line that says what it is, a CRC-32, and safetensors."""
        tensors = {f"state/{name}": value for name, value in self.state.items()}
        for number, changes in enumerate(self.tables.values()):
            for part, value in asdict(changes).items():
                tensors[f"table/{number}/{part}"] = _as_tensor(value)
        about = {"history": self.history, "number": self.number, "step": self.step, "time": self.time}
        about["tables"] = list(self.tables)
        body = _safetensors().save(tensors, {"update": json.dumps(about)})
        return _MAGIC + _CRC.pack(zlib.crc32(body)) + body

    @classmethod
    def from_bytes(cls, data: bytes, expected: str) -> Update:
        """Reads the content of a file whose name within its publication is expected.

        Raises:
            OSError: it is damaged, or another update.
        """
        head = len(_MAGIC) + _CRC.size
        if data[: len(_MAGIC)] != _MAGIC or len(data) < head:
            raise OSError(f"{expected} is no update of a publication")
        body = data[head:]
        if zlib.crc32(body) != _CRC.unpack(data[len(_MAGIC) : head])[0]:
            raise OSError(f"{expected} is damaged: its checksum is another")
        (length,) = struct.unpack_from("<Q", body)
        about: dict[str, Any] = json.loads(json.loads(body[8 : 8 + length])["__metadata__"]["update"])
        tensors = _safetensors().load(body)
        parts = ("ids", "rows", "deleted")
        tables = {
            name: TableChanges(*(tensors[f"table/{number}/{part}"].numpy().tobytes() for part in parts))
            for number, name in enumerate(about.pop("tables"))
        }
        state = {name.removeprefix("state/"): value for name, value in tensors.items() if name.startswith("state/")}
        update = cls(**about, tables=tables, state=aligned(state))
        if update.name != expected:
            raise OSError(f"{expected} is another update, {update.name}")
        return update


def _safetensors() -> Any:
    return imported("safetensors.torch", "serve", "a publication")


def update_name(history: str, number: int) -> str:
    """The file of an update within its publication."""
    return f"{UPDATES}/{number}-{history}.update"


def _as_tensor(data: bytes) -> Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
