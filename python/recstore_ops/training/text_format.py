"""The text formats of sparse rows: libsvm (also called libfm) and libffm.

    libsvm   label id:value id:value ...
    libffm   label field:id:value field:id:value ...

Parts are separated by spaces or tabs. A label above zero counts as 1, any other as 0, which covers
-1/1 and 0/1. The field of libffm must be an integer; it is not kept, because the models here own
one row per id. An id may be any int64; an unsigned 64-bit hash is taken as its int64 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from recstore_ops.training.batch import Batch, offsets_of_lengths

FileFormat = Literal["libsvm", "libffm"]

FEATURE_PARTS: dict[FileFormat, tuple[str, ...]] = {
    "libsvm": ("id", "value"),
    "libffm": ("field", "id", "value"),
}
_NUMBER_CHARACTERS = b"0123456789+-.eE"
_QUOTED_CHARACTERS = 40


def parse_lines(lines: Iterable[bytes], file_format: FileFormat) -> Batch:
    """Parses lines, all of which must be good; blank ones are passed over.

    Raises:
        ValueError: some line is bad. `explain_bad_line` says which part of it and why.
    """
    rows = [parts for parts in map(bytes.split, lines) if parts]
    features = list(chain.from_iterable(row[1:] for row in rows))
    ids, values = _parse_features(features, len(FEATURE_PARTS[file_format]))
    lengths = torch.tensor([len(row) - 1 for row in rows], dtype=torch.int64)
    labels = _parse_labels([row[0] for row in rows])
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(values),
        offsets_of_lengths(lengths),
        torch.from_numpy(labels),
    )


def explain_bad_line(line: bytes, file_format: FileFormat) -> str:
    """Says what was expected of a line that `parse_lines` refuses, and what it has instead."""
    parts = line.split()
    if not _parses(parts[:1], file_format):
        return f"expected a finite number as label, got {_quote(parts[0])}"
    wrong = next(part for part in parts[1:] if not _parses([b"0", part], file_format))
    shape = ":".join(FEATURE_PARTS[file_format])
    return f"expected {shape} ({file_format}) with integer id and finite value, got {_quote(wrong)}"


def detect_format(lines: Iterable[bytes]) -> FileFormat:
    """Tells the format by the first feature with one or two colons; libsvm if there is none."""
    for line in lines:
        for feature in line.split()[1:2]:
            if feature.count(b":") == 1:
                return "libsvm"
            if feature.count(b":") == 2:
                return "libffm"
    return "libsvm"


def write_libsvm(path: Path | str, batch: Batch) -> None:
    """Writes rows as `label id:value ...` with labels 0 and 1; values keep every digit."""
    offsets = batch.offsets.tolist()
    pairs = zip(batch.ids.tolist(), batch.values.tolist(), strict=True)
    features = [f"{id}:{value:.9g}" for id, value in pairs]
    with open(path, "w", encoding="ascii", newline="\n") as file:
        for row, label in enumerate(batch.labels.tolist()):
            parts = [f"{label:.0f}", *features[offsets[row] : offsets[row + 1]]]
            file.write(" ".join(parts) + "\n")


def _parse_features(features: Sequence[bytes], parts: int) -> tuple[NDArray, NDArray]:
    # Without the characters of numbers only the separators remain, so that one comparison checks
    # every feature; an empty number is left to int() and float().
    separators = b" ".join(features).translate(None, _NUMBER_CHARACTERS)
    if separators != b" ".join([b":" * (parts - 1)] * len(features)):
        raise ValueError("a feature has the wrong shape")
    numbers = b":".join(features).split(b":") if features else []
    if parts == 3:
        _int64(numbers[0::3])
    ids = _int64(numbers[parts - 2 :: parts])
    return ids, _finite_float32(numbers[parts - 1 :: parts])


def _parse_labels(labels: Sequence[bytes]) -> NDArray:
    if b"".join(labels).translate(None, _NUMBER_CHARACTERS):
        raise ValueError("a label is not a number")
    return (_finite_float32(labels) > 0).astype(np.float32)


def _int64(texts: Sequence[bytes]) -> NDArray:
    numbers = list(map(int, texts))
    try:
        return np.array(numbers, dtype=np.int64)
    except OverflowError:
        return np.array(list(map(_int64_bits, numbers)), dtype=np.int64)


def _int64_bits(number: int) -> int:
    if not -(2**63) <= number < 2**64:
        raise ValueError("an id does not fit 64 bits")
    return number - 2**64 if number >= 2**63 else number


def _finite_float32(texts: Sequence[bytes]) -> NDArray:
    with np.errstate(over="ignore"):
        numbers = np.array(list(map(float, texts)), dtype=np.float64).astype(np.float32)
    if not np.isfinite(numbers).all():
        raise ValueError("a number is not finite")
    return numbers


def _parses(parts: Sequence[bytes], file_format: FileFormat) -> bool:
    try:
        parse_lines([b" ".join(parts)], file_format)
    except ValueError:
        return False
    return True


def _quote(part: bytes) -> str:
    text = part.decode("ascii", errors="backslashreplace")
    return repr(text if len(text) <= _QUOTED_CHARACTERS else text[:_QUOTED_CHARACTERS] + "...")
