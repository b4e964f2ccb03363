"""Reads all files of a directory and compares them with its manifest. No table is made, and little memory is needed."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, BinaryIO, Literal

from recstore_ops.checkpoint.manifest import LOCK, MANIFEST, Manifest, read_manifest
from recstore_ops.checkpoint.place import checked_directory
from recstore_ops.config.directory import Directory
from recstore_ops.config.extras import imported

_OF_SERVERS = ("recstore-shard.json", "lock", "incarnation", "checkpoint", "log")
"""What the directory of a server has beside a checkpoint."""

_LENGTH_BYTES = 8
_LONGEST_HEADER = 1 << 20
_BYTES_AT_A_TIME = 1 << 20


@dataclass(frozen=True)
class FileFinding:
    """A file that is not as the manifest says.

    Attributes:
        kind: `damaged`: its content is another; `missing`; `unexplained`: the manifest does not list it.
        file: its name.
        message: what is wrong with it.
    """

    kind: Literal["damaged", "missing", "unexplained"]
    file: str
    message: str


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        snapshots: how many snapshots the directory has.
        files: how many files they have.
        bytes: of these files.
        findings: what is not as it should be. Files that are unexplained harm no load.
    """

    snapshots: int
    files: int
    bytes: int
    findings: list[FileFinding] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Whether no file is damaged or missing."""
        return all(finding.kind == "unexplained" for finding in self.findings)


def verify(path: str | PathLike[str]) -> VerifyReport:
    """Reads every file of every snapshot of a directory, and compares lengths, headers and checksums.

    The tables of this process have no part in it. Somebody may save meanwhile: then it begins anew.

    Args:
        path: the directory.

    Returns:
        What is damaged, missing or not explained by the manifest.

    Raises:
        ValueError: `path` is a URL.
        RuntimeError: the directory holds no checkpoint, or its manifest is damaged.
    """
    directory = checked_directory(path, "verify")
    manifest = read_manifest(directory)
    while True:
        report = _compared(manifest)
        again = read_manifest(directory)
        if report.is_sound or again.text == manifest.text:
            return report
        manifest = again


def _compared(manifest: Manifest) -> VerifyReport:
    files = manifest.files()
    findings = [FileFinding("damaged", MANIFEST, gap) for gap in manifest.gaps()]
    for entry in files.values():
        findings += _file_findings(manifest.directory, entry)
    listed = {MANIFEST, LOCK, *_OF_SERVERS, *files}
    others = [name for name in manifest.directory.names() if name not in listed]
    findings += [FileFinding("unexplained", name, "the manifest does not list it") for name in others]
    return VerifyReport(len(manifest.snapshots), len(files), sum(entry["bytes"] for entry in files.values()), findings)


def _file_findings(directory: Directory, entry: dict[str, Any]) -> Iterator[FileFinding]:
    name = entry["file"]
    try:
        with plain_file(directory, entry) as (file, plain_bytes):
            _compare(file, plain_bytes, entry["checksums"])
    except FileNotFoundError:
        yield FileFinding("missing", name, "the manifest lists it")
    except (KeyError, TypeError, AttributeError):
        yield FileFinding("damaged", name, "its header is none of safetensors")
    except (ValueError, RecursionError) as error:
        yield FileFinding("damaged", name, str(error))
    except OSError as error:
        yield FileFinding("damaged", name, error.strerror or str(error))


@contextmanager
def plain_file(directory: Directory, entry: dict[str, Any]) -> Iterator[tuple[Any, int]]:
    """The plain file that an entry of the manifest lists, to be read from its beginning to its end, and its length.

    Raises:
        OSError: it is missing, or no regular file.
        ValueError: it has another length than the entry says.
    """
    with directory.open(entry["file"]) as file:
        found = os.fstat(file.fileno()).st_size
        if found != entry["bytes"]:
            raise ValueError(f"it has {found:,} bytes, not {entry['bytes']:,}")
        if "compressed" not in entry:
            yield file, entry["bytes"]
            return
        pyarrow = imported("pyarrow", "train", "a compressed checkpoint's verification")
        with pyarrow.CompressedInputStream(file, entry["compressed"]["kind"]) as plain:
            yield plain, entry["compressed"]["bytes"]


def _compare(file: BinaryIO, plain_bytes: int, checksums: dict[str, int]) -> None:
    """Compares a plain file with its checksums, from its beginning to its end.

    Raises:
        ValueError: it differs.
    """
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > min(_LONGEST_HEADER, plain_bytes - _LENGTH_BYTES):
        raise ValueError("its header does not lie within it")
    header = file.read(length)
    if zlib.crc32(header) != checksums["header"]:
        raise ValueError("its header was changed: the checksum is another")
    tensors = json.loads(header)
    if tensors.keys() != checksums.keys() - {"header"}:
        raise ValueError(f"it has the tensors {sorted(tensors)}, and the manifest tells {sorted(checksums)}")
    place = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = tensor["data_offsets"]
        if begin != place or end < begin:
            raise ValueError(f'its tensor "{name}" does not begin where the one before it ends')
        if _crc32(file, end - begin) != checksums[name]:
            raise ValueError(f'its tensor "{name}" was changed: the checksum is another')
        place = end
    if place != plain_bytes - _LENGTH_BYTES - length or file.read(1):
        raise ValueError("it does not end where its last tensor does")


def _crc32(file: BinaryIO, count: int) -> int:
    checksum = 0
    while count > 0:
        part = file.read(min(count, _BYTES_AT_A_TIME))
        if not part:
            raise ValueError("it ends within a tensor")
        checksum, count = zlib.crc32(part, checksum), count - len(part)
    return checksum


__all__ = ["FileFinding", "VerifyReport", "plain_file", "verify"]
