"""What the tests of `forget` share: ids and rows that nothing else looks like, and all bytes that a directory has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from recstore_ops import Table
from recstore_ops.ops import operators


def distinctive_ids(count: int, seed: int = 0) -> Tensor:
    """Ids of nineteen digits, so that no other eight bytes are equal to one."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2**60, 2**62, (count,), generator=generator)


def bytes_of_rows(name: str, ids: Tensor, slots: Iterable[str] = ()) -> list[bytes]:
    """The bytes of each row, and of each of its slots."""
    table = Table.open(name)
    kept = [operators.emb_read(table.handle, ids, table.dim)]
    kept += [operators.hashtable_slot(table.handle, ids, slot) for slot in slots]
    return [row.numpy().tobytes() for values in kept for row in values]


def all_bytes(directory: Path) -> Iterator[tuple[Path, bytes]]:
    """The content of every file below a directory; of compressed ones the plain content too."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            yield path, path.read_bytes()
            if path.suffix == ".zst":
                with pa.input_stream(str(path), compression="zstd") as plain:
                    yield path, plain.read()


def holders(directory: Path, ids: Tensor, rows: Iterable[bytes] = ()) -> set[str]:
    """The names of the files that have an id, in any form, or a row."""
    numbers = [*(np.int64(id).tobytes() for id in ids.tolist()), *(str(id).encode() for id in ids.tolist())]
    needles = [*numbers, *rows]
    return {path.name for path, content in all_bytes(directory) if any(needle in content for needle in needles)}


def files(directory: Path) -> dict[str, bytes]:
    """Every file below a directory by its path, but for locks, which have nothing."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name not in (".lock", "lock")
    }
