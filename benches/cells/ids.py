"""Ids of strings that lie in Arrow's memory and of n-grams of tokens, in nanoseconds an id, on one thread.

Strings are hashed beside xxHash, which has a function for one string alone: its time is that of a loop of Python.
`cargo bench --bench ids` compares both in Rust. N-grams are hashed beside the same chain as operators of torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.nn import functional

from benches.cells.stage import Stage
from benches.measured import Axis, Case, Competitor
from benches.scale import Scale
from recstore_ops import hash_strings, ngram_ids

CELL = "ids"
OURS, XXHASH, TORCH = "recstore", "xxh64, a call a string", "torch"

_PEER = "xxhash"
_COUNT, _BATCHES, _ROW, _VOCAB = 1_000_000, 4, 1_000, 1_000_003


def stages(scale: Scale, chosen: Collection[str]) -> list[Stage]:
    """One stage."""
    if CELL not in chosen:
        return []
    return [Stage(CELL, "strings and n-grams", 3 * scale.lookups.rounds, lambda: _cases(scale))]


def _cases(scale: Scale) -> Iterator[Case]:
    yield _hashing(scale)
    for n in (2, 3):
        yield _ngrams(scale, n)


def _case(scale: Scale, work: str, count: int, competitors: Sequence[Competitor], absent: Sequence[str] = ()) -> Case:
    axes: dict[str, Axis] = {"work": work, "ids": count, "threads": 1}
    return Case(CELL, axes, competitors, scale.lookups, threads=1, operations=count, absent=absent)


def _hashing(scale: Scale) -> Case:
    batches = [_strings(scale.of(_COUNT), seed) for seed in range(_BATCHES)]
    count = len(batches[0])
    output = ((count,), torch.int64)
    competitors = [Competitor(OURS, lambda turn: hash_strings(batches[turn % _BATCHES]), output=output)]
    absent: tuple[str, ...] = (XXHASH,)
    if importlib.util.find_spec(_PEER) is not None:
        digest = importlib.import_module(_PEER).xxh64_intdigest
        lists = [batch.to_pylist() for batch in batches]
        competitors.append(Competitor(XXHASH, _one_by_one(digest, lists), OURS, output))
        absent = ()
    return _case(scale, "strings of 8 to 16 bytes", count, competitors, absent)


def _one_by_one(digest: Callable[[bytes], int], lists: Sequence[list[bytes]]) -> Callable[[int], object]:
    return lambda turn: np.fromiter(map(digest, lists[turn % _BATCHES]), dtype=np.uint64)


def _strings(count: int, seed: int) -> pa.Array:
    random = np.random.default_rng(seed)
    offsets = np.concatenate([[0], random.integers(8, 17, count).cumsum()]).astype(np.int32)
    characters = random.integers(48, 123, int(offsets[-1]), dtype=np.uint8)
    return pa.BinaryArray.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(characters.tobytes())]
    )


def _ngrams(scale: Scale, n: int) -> Case:
    count = scale.of(_COUNT) // _ROW * _ROW or _ROW
    generator = torch.Generator().manual_seed(n)
    batches = [torch.randint(0, 128_000, (count // _ROW, _ROW), generator=generator) for _ in range(_BATCHES)]
    output = ((count,), torch.int64)
    competitors = [
        Competitor(OURS, lambda turn: ngram_ids(batches[turn % _BATCHES], n, 1, _VOCAB), output=output),
        Competitor(TORCH, lambda turn: _by_torch(batches[turn % _BATCHES], n), OURS, output),
    ]
    return _case(scale, f"{n}-grams, one table", count, competitors)


def _by_torch(tokens: Tensor, n: int) -> Tensor:
    """The same hashes; modulo, for torch has no upper half of a product."""
    padded = functional.pad(tokens, (n - 1, 0), value=-1)
    length = tokens.shape[1]
    hashes = _mixed(padded[:, :length])
    for age in range(1, n):
        hashes = _mixed(hashes + padded[:, age : age + length])
    return hashes % _VOCAB


def _mixed(numbers: Tensor) -> Tensor:
    z = numbers + (0x9E3779B97F4A7C15 - 2**64)
    z = (z ^ _shifted(z, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ _shifted(z, 27)) * (0x94D049BB133111EB - 2**64)
    return z ^ _shifted(z, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """The shift of unsigned numbers: zeros come in from the left."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
