"""What the manifest of a bundle says: its files, its tables and the inputs of its program."""

from __future__ import annotations

import re
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recstore_ops.serving.checked_json import checked_json, parse_checked_json

NAME = "manifest.json"
PROGRAM, GRAPH, STATE, COMPILED = "program.pt2", "graph.json", "state.safetensors", "compiled.pt2"
_FORMAT, _VERSION = "recstore bundle", 2
_BYTES_AT_A_TIME = 1 << 20


@dataclass(frozen=True)
class BundledTable:
    """A table of a bundle.

    Attributes:
        name: of the table when it was frozen.
        file: within the directory.
        fingerprint: of the file.
        constants: of the program, that hold its handle.
    """

    name: str
    file: str
    fingerprint: int
    constants: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """What a bundle has.

    Attributes:
        torch, recstore_ops: the versions that wrote it.
        files: bytes and CRC-32 of the program's files.
        tables: those that the program reads.
        inputs: each tensor that the program takes, see `recstore_ops.serving.program_tensors`.
        outputs: each that it gives.
        compiled_for: the kind of processor that the program was compiled for, if it was.
    """

    torch: str
    recstore_ops: str
    files: dict[str, dict[str, int]]
    tables: tuple[BundledTable, ...]
    inputs: tuple[dict[str, Any], ...]
    outputs: tuple[dict[str, Any], ...]
    compiled_for: str | None = None

    def write(self, directory: Path) -> None:
        """Writes the manifest."""
        text = checked_json(asdict(self), _FORMAT, _VERSION, indent=2)
        (directory / NAME).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Reads the manifest.

        Raises:
            ValueError: there is no bundle, or one of another version.
            OSError: the manifest is damaged.
        """
        path = directory / NAME
        if not path.is_file():
            raise ValueError(f"{directory} is no bundle: it has no {NAME}")
        fields = parse_checked_json(path.read_text(encoding="utf-8", errors="replace"), path, _FORMAT, _VERSION)
        tables = tuple(BundledTable(**{**table, "constants": tuple(table["constants"])}) for table in fields["tables"])
        tensors = {name: tuple(fields[name]) for name in ("inputs", "outputs")}
        return cls(**{**fields, "tables": tables, **tensors})

    def names(self) -> set[str]:
        """The files of the bundle, the manifest among them."""
        return {NAME, *self.files, *(table.file for table in self.tables)}

    def check_sizes(self, directory: Path) -> None:
        """Checks the sizes of the program's files, also of those that are not read.

        Raises:
            OSError: a file is missing, or has another size.
        """
        for name, expected in self.files.items():
            path = directory / name
            if (found := path.stat().st_size) != expected["bytes"]:
                raise OSError(f"{path} is not that of this bundle: expected {expected['bytes']} bytes, got {found}")

    def check_file(self, directory: Path, name: str) -> Path:
        """Returns a file of the program.

        Raises:
            OSError: it is not the one that was written.
        """
        path = directory / name
        if (found := sum_of(path)) != self.files[name]:
            raise OSError(f"{path} is not that of this bundle: expected {self.files[name]}, got {found}")
        return path


def check_explained(directory: Path) -> None:
    """Checks that a directory has the files of a bundle alone, so that it may go as a whole.

    Raises:
        ValueError: there is no bundle, or its manifest does not list a file.
        OSError: the manifest is damaged.
    """
    names = Manifest.read(directory).names()
    known = {directory / name for name in names} | {(directory / name).parent for name in names}
    if strange := sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path not in known):
        raise ValueError(
            f"{directory} has {', '.join(strange)}, of which the manifest of its bundle does not tell: move away what "
            "is to stay, and delete the rest"
        )


def is_file_of_a_bundle(name: str) -> bool:
    """Whether a file has a name that bundles give."""
    return name in (NAME, PROGRAM, GRAPH, STATE, COMPILED) or re.fullmatch(r"tables/\d+\.safetensors", name) is not None


def sum_of(path: Path) -> dict[str, int]:
    """Returns bytes and CRC-32 of a file."""
    crc, size = 0, 0
    with open(path, "rb") as file:
        while block := file.read(_BYTES_AT_A_TIME):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return {"bytes": size, "crc32": crc}
