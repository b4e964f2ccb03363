"""The manifest of a bundle: its files, its tables and the inputs of its program."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from recstore_ops.config.directory import Directory
from recstore_ops.serving.checked_json import checked_json, parse_checked_json
from recstore_ops.serving.closed_json import fields_of, shown, texts, typed, whole
from recstore_ops.serving.graph_arguments import DTYPES
from recstore_ops.serving.sizes import Range

NAME = "manifest.json"
PROGRAM, GRAPH, STATE, COMPILED = "program.pt2", "graph.json", "state.safetensors", "compiled.pt2"
_FORMAT, _VERSION = "recstore bundle", 3
_WITHOUT_RANGES = 2
"""The version before, whose sizes have no bounds."""
_BYTES_PER_CHUNK = 1 << 20
_MAX_SIZE = (1 << 63) - 1
_MAX_BYTES = 1 << 26
"""The most bytes of a manifest."""
_PROGRAM_FILES = (PROGRAM, GRAPH, STATE, COMPILED)
# A bundle may come from elsewhere: a path of this form leads to no file outside of the bundle's directory.
_TABLE_FILE = re.compile(r"tables/\d{1,18}\.safetensors", re.ASCII)
_TYPES = ("int", "float", "bool", "str", "NoneType", "SymInt", "SymFloat", "SymBool")
"""The classes of what a program takes or gives that is no tensor."""


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
    """The contents of a bundle.

    Attributes:
        torch, recstore_ops: the versions that wrote it.
        files: bytes and CRC-32 of the program's files.
        tables: those that the program reads.
        inputs: each tensor that the program takes, see `recstore_ops.serving.program_tensors`.
        outputs: each that it gives.
        compiled_for: the kind of processor that the program was compiled for, if it was.
        ranges: the bounds of sizes that have some, by their names.
    """

    torch: str
    recstore_ops: str
    files: dict[str, dict[str, int]]
    tables: tuple[BundledTable, ...]
    inputs: tuple[dict[str, Any], ...]
    outputs: tuple[dict[str, Any], ...]
    compiled_for: str | None = None
    ranges: dict[str, Range] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        """Writes the manifest."""
        text = checked_json(asdict(self), _FORMAT, _VERSION, indent=2)
        (directory / NAME).write_text(text + "\n", encoding="utf-8")  # by path: a new directory

    @classmethod
    def read(cls, directory: Path | Directory) -> Manifest:
        """Reads the manifest.

        Raises:
            ValueError: there is no bundle, or one of another version.
            OSError: the manifest is damaged.
        """
        if isinstance(directory, Path):
            try:
                with Directory(directory) as held:
                    return cls.read(held)
            except (FileNotFoundError, NotADirectoryError):
                raise ValueError(f"{directory} is no bundle: it has no {NAME}") from None
        path = directory.path / NAME
        try:
            content = directory.read(NAME, most=_MAX_BYTES)
        except FileNotFoundError:
            raise ValueError(f"{directory.path} is no bundle: it has no {NAME}") from None
        fields, version = parse_checked_json(content, path, _FORMAT, _VERSION, _WITHOUT_RANGES)
        try:
            return _manifest({"ranges": {}, **fields} if version == _WITHOUT_RANGES else fields)
        except ValueError as error:
            raise OSError(f"{path} is damaged: {error}") from error

    def names(self) -> set[str]:
        """The files of the bundle, the manifest among them."""
        return {NAME, *self.files, *(table.file for table in self.tables)}


def check_explained(directory: Path) -> None:
    """Checks that a directory has the files of a bundle alone, so that it may go as a whole.

    Raises:
        ValueError: there is no bundle, or its manifest does not list a file.
        OSError: the manifest is damaged.
    """
    names = Manifest.read(directory).names()
    # `rglob` gives directories too, so those of known files have to be known.
    known = {directory / name for name in names} | {(directory / name).parent for name in names}
    if strange := sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path not in known):
        raise ValueError(
            f"{directory} has {', '.join(strange)}, of which the manifest of its bundle does not tell: move away what "
            "is to stay, and delete the rest"
        )


def is_file_of_a_bundle(name: str) -> bool:
    """Whether a file has a name that bundles give."""
    return name in (NAME, *_PROGRAM_FILES) or _TABLE_FILE.fullmatch(name) is not None


def sum_of(path: Path) -> dict[str, int]:
    """Returns bytes and CRC-32 of a file."""
    crc, size = 0, 0
    with open(path, "rb") as file:  # by path: a new directory
        while block := file.read(_BYTES_PER_CHUNK):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return {"bytes": size, "crc32": crc}


def _manifest(fields: Any) -> Manifest:
    """A manifest of its fields, each of which is checked."""
    names = ("torch", "recstore_ops", "files", "tables", "inputs", "outputs", "ranges")
    fields_of(fields, names, "the manifest", optional=("compiled_for",))
    compiled_for = fields.get("compiled_for")
    tables = tuple(_table(each, f"tables[{n}]") for n, each in enumerate(typed(fields["tables"], list, "tables")))
    for what, found in (
        ("name", [table.name for table in tables]),
        ("file", [table.file for table in tables]),
        ("constant", [constant for table in tables for constant in table.constants]),
    ):
        _check_different(found, f"a {what} of its tables")
    inputs, outputs = (
        tuple(_described(each, f"{name}[{n}]") for n, each in enumerate(typed(fields[name], list, name)))
        for name in ("inputs", "outputs")
    )
    _check_different([each["name"] for each in inputs], "an input")
    return Manifest(
        torch=typed(fields["torch"], str, "torch"),
        recstore_ops=typed(fields["recstore_ops"], str, "recstore_ops"),
        files=_files(fields["files"]),
        tables=tables,
        inputs=inputs,
        outputs=outputs,
        compiled_for=None if compiled_for is None else typed(compiled_for, str, "compiled_for"),
        ranges=_ranges(fields["ranges"], inputs),
    )


def _ranges(value: Any, inputs: Iterable[dict[str, Any]]) -> dict[str, Range]:
    names = {name for described in inputs for name in described.get("sizes", ()) if name is not None}
    return {name: _range(each, f"ranges: {name}") for name, each in fields_of(value, (), "ranges", names).items()}


def _range(value: Any, what: str) -> Range:
    if len(typed(value, list, what)) != 2:
        raise ValueError(f"{what}: expected two bounds, got {shown(value)}")
    least, most = whole(value[0], 0, _MAX_SIZE, what), value[1]
    return Range(least, None if most is None else whole(most, least, _MAX_SIZE, what))


def _check_different(names: Iterable[str], what: str) -> None:
    found: set[str] = set()
    for name in names:
        if name in found:
            raise ValueError(f"it has {what} twice, {shown(name)}")
        found.add(name)


def _files(value: Any) -> dict[str, dict[str, int]]:
    files = fields_of(value, (), "files", optional=_PROGRAM_FILES)
    for name, sums in files.items():
        fields_of(sums, ("bytes", "crc32"), name)
        whole(sums["bytes"], 0, (1 << 63) - 1, f"the bytes of {name}")
        whole(sums["crc32"], 0, (1 << 32) - 1, f"the CRC-32 of {name}")
    if (GRAPH in files) != (STATE in files):
        raise ValueError(f"it has one of {GRAPH} and {STATE}")
    if not {PROGRAM, GRAPH} & files.keys():
        raise ValueError("it has no program")
    return files


def _table(value: Any, what: str) -> BundledTable:
    fields = fields_of(value, ("name", "file", "fingerprint", "constants"), what)
    file = typed(fields["file"], str, f"{what}: file")
    if not _TABLE_FILE.fullmatch(file):
        raise ValueError(f"{what}: {shown(file)} is no file of a table of a bundle")
    return BundledTable(
        typed(fields["name"], str, f"{what}: name"),
        file,
        whole(fields["fingerprint"], 0, (1 << 32) - 1, f"{what}: fingerprint"),
        tuple(texts(fields["constants"], f"{what}: constants")),
    )


def _described(value: Any, what: str) -> dict[str, Any]:
    """A description as `recstore_ops.serving.program_tensors` writes it."""
    if "dtype" not in typed(value, dict, what):
        fields = fields_of(value, ("name", "type"), what)
        if typed(fields["type"], str, f"{what}: type") not in _TYPES:
            raise ValueError(f"{what}: expected one of {', '.join(_TYPES)}, got {shown(fields['type'])}")
    else:
        fields = fields_of(value, ("name", "dtype", "shape", "sizes"), what)
        if typed(fields["dtype"], str, f"{what}: dtype") not in DTYPES:
            raise ValueError(f"{what}: expected one of {', '.join(DTYPES)}, got {shown(fields['dtype'])}")
        _check_sizes(fields, what)
    typed(fields["name"], str, f"{what}: name")
    return fields


def _check_sizes(fields: dict[str, Any], what: str) -> None:
    shape, sizes = (typed(fields[name], list, f"{what}: {name}") for name in ("shape", "sizes"))
    if len(shape) != len(sizes):
        raise ValueError(f"{what}: shape has {len(shape)} sizes, and {len(sizes)} have names")
    for size, name in zip(shape, sizes, strict=True):
        if whole(size, -1, (1 << 63) - 1, f"{what}: shape") == -1:
            typed(name, str, f"{what}: sizes")
        elif name is not None:
            raise ValueError(f"{what}: a size of {size} has the name {shown(name)}")
