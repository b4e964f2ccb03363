"""The changes of a model between two moments, and their file."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from recstore_ops.config.extras import imported
from recstore_ops.serving.closed_json import fields_of, parse_json, shown, texts, typed, whole
from recstore_ops.serving.following.names import MAX_NUMBER, UPDATES, Name
from recstore_ops.serving.opening import aligned

MAX_ROW_BYTES = 1 << 30
"""The most bytes of the rows and ids of an update. If more changed, a new base has them."""

MAX_HEADER_BYTES = 16 << 20
"""The most bytes of the names and places of an update's tensors."""

_MAGIC = b"recstore update 1\n"
_CRC = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")
_ID_BYTES = 8


@dataclass(frozen=True)
class TableChanges:
    """The changes of a table: int64 ids of new and changed rows, the rows in the table's encoding, and ids whose rows
    were deleted before these were written."""

    ids: bytes
    rows: bytes
    deleted: bytes

    def __bool__(self) -> bool:
        return bool(self.ids or self.deleted)

    def __len__(self) -> int:
        """How many bytes it takes."""
        return len(self.ids) + len(self.rows) + len(self.deleted)


@dataclass(frozen=True)
class Update:
    """The changes of a model between two moments.

    Attributes:
        history: the history that it belongs to.
        number: one more than that of the update before.
        step: of the trainer, when it was cut.
        time: seconds since 1970, when it was cut.
        tables: by their names, those that changed.
        state: the dense tensors that changed, by their names in the program.

    Raises:
        ValueError: a field has another form.
    """

    history: str
    number: int
    step: int
    time: float
    tables: Mapping[str, TableChanges]
    state: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        Name(UPDATES, self.number, self.history)
        whole(self.step, 0, MAX_NUMBER, "step")
        if type(self.time) not in (int, float) or not math.isfinite(self.time):
            raise ValueError(f"time must be seconds since 1970, got {shown(self.time)}")

    @property
    def name(self) -> str:
        """Its file within the publication."""
        return update_name(self.history, self.number)

    @property
    def size(self) -> int:
        """The bytes of its rows, ids and tensors."""
        return sum(map(len, self.tables.values())) + sum(value.nbytes for value in self.state.values())

    def without_content(self) -> Update:
        """Returns what it says of itself."""
        return replace(self, tables={}, state={})

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
        # Before anything is parsed: only bytes that a publisher wrote so reach the readers of JSON and safetensors.
        if zlib.crc32(body) != _CRC.unpack(data[len(_MAGIC) : head])[0]:
            raise OSError(f"{expected} is damaged: its checksum is another")
        try:
            update = cls._of(_about(body), _safetensors().load(body))
        except Exception as error:  # safetensors raises an exception of its own, and JSON can nest too deeply.
            raise OSError(f"{expected} is damaged: {error or type(error).__name__}") from error
        # A file under the name of another is whole by its checksum, and would be applied out of turn.
        if update.name != expected:
            raise OSError(f"{expected} is another update, {update.name}")
        return update

    @classmethod
    def _of(cls, about: Any, tensors: dict[str, Tensor]) -> Update:
        own = fields_of(about, ("history", "number", "step", "time", "tables"), "an update")
        names = texts(own.pop("tables"), "tables")
        tables = {name: _changes(tensors, place) for place, name in enumerate(names)}
        if strange := next((name for name in tensors if not name.startswith("state/")), None):
            raise ValueError(f"there is a tensor {strange!r}, which no table has")
        state = aligned({name.removeprefix("state/"): value for name, value in tensors.items()})
        return cls(**own, tables=tables, state=state)


def update_name(history: str, number: int) -> str:
    """The file of an update within its publication.

    Raises:
        ValueError: the history or the number has another form.
    """
    return str(Name(UPDATES, number, history))


def _about(body: bytes) -> Any:
    """The entry about the update in the header of safetensors."""
    (length,) = _LENGTH.unpack_from(body)
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"its header must have at most {MAX_HEADER_BYTES} bytes, got {length}")
    header = typed(parse_json(body[_LENGTH.size : _LENGTH.size + length]), dict, "its header")
    metadata = fields_of(header.get("__metadata__"), ("update",), "its metadata")
    return parse_json(typed(metadata["update"], str, "update"))


def _changes(tensors: dict[str, Tensor], number: int) -> TableChanges:
    """Takes the changes of the table of a number out of all tensors."""
    changes = TableChanges(*(_bytes_of(tensors, f"table/{number}/{part}") for part in ("ids", "rows", "deleted")))
    if len(changes.ids) % _ID_BYTES or len(changes.deleted) % _ID_BYTES:
        raise ValueError(f"the ids of table {number} are no whole number of int64")
    return changes


def _bytes_of(tensors: dict[str, Tensor], name: str) -> bytes:
    if (tensor := tensors.pop(name, None)) is None:
        raise ValueError(f"it lacks the tensor {name!r}")
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise ValueError(f"the tensor {name!r} must be bytes, got {tensor.dtype} {list(tensor.shape)}")
    return tensor.numpy().tobytes()


def _safetensors() -> Any:
    return imported("safetensors.torch", "serve", "a publication")


def _as_tensor(data: bytes) -> Tensor:
    # `torch.frombuffer` takes no empty buffer, and warns of one that is read-only, as bytes are.
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
