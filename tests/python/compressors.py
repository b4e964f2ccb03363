"""Every way in which the files of tests are compressed."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable

import pyarrow as pa


def by_arrow(content: bytes, kind: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, kind) as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zstd": lambda content: by_arrow(content, "zstd"),
    "lz4": lambda content: by_arrow(content, "lz4"),
}
