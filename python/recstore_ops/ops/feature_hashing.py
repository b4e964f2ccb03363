"""Ids made of something else: of strings, of several ids, of the last tokens of a sequence, of codes; and ids made few.

docs/ids.md has the equations, and says which function is for what.

Shape suffixes: N strings, C characters.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import is_tensor_like

from recstore_ops.ops import operators
from recstore_ops.ops.integers import as_int64

if TYPE_CHECKING:
    import pyarrow as pa

PADDING_TOKEN = -1
"""The token that `ngram_ids` puts before the first of a row."""

_ARROW_OFFSETS = {"string": "int32", "binary": "int32", "large_string": "int64", "large_binary": "int64"}


class _Column(NamedTuple):
    """Strings that lie one after the other.

    Attributes:
        characters: uint8 [C], of all of them.
        offsets: int32 or int64 [N + 1], the start of each and the end of the last one.
        is_missing: which are not there [N]; None if all are.
    """

    characters: Tensor
    offsets: Tensor
    is_missing: NDArray[np.bool_] | None


def hash_strings(
    texts: Sequence[str | bytes | None] | NDArray[Any] | pa.Array | pa.ChunkedArray,
    seed: int = 0,
    missing: int | None = None,
) -> Tensor:
    """Returns the hash of each string: an id of 64 bits, any int64.

    The bytes are hashed, those of UTF-8 for text. A string has the same id in every process and on every machine.
    Strings of Arrow are read in place. For strings that are tensors already there is the operator
    `torch.ops.recstore.hash_strings`.

    Args:
        texts: a list of `str` or `bytes`, a numpy array of them, or an Arrow array of type string, large_string, binary
            or large_binary, chunked or not. None, NaN and Arrow's null are missing strings.
        seed: another one gives other ids. `recstore train` takes 0.
        missing: the id of a missing string, an int64.

    Returns:
        int64 [N], on the CPU.

    Raises:
        TypeError: `texts`, or one of them, is something else, and the message names its position; or `seed` or
            `missing` is no integer.
        ValueError: a string is missing and there is no id for it, or a text has no UTF-8, and the message names its
            position; or `seed` or `missing` is no int64.

    Examples:
        >>> hash_strings(["Bern", b"Bern", None], missing=-1)
        tensor([700966251408354108, 700966251408354108,                 -1])
    """
    seed = as_int64("hash_strings", "seed", seed)
    if missing is not None:
        missing = as_int64("hash_strings", "missing", missing)
    first, parts = 0, []
    for column in _columns(texts):
        ids_N = operators.hash_strings(column.characters, column.offsets, seed)
        if column.is_missing is not None:
            if missing is None:
                position = first + int(column.is_missing.argmax())
                raise ValueError(
                    f"hash_strings: the string at position {position} is missing; `missing` takes an id for it"
                )
            ids_N[torch.from_numpy(column.is_missing)] = missing
        parts.append(ids_N)
        first += len(ids_N)
    return parts[0] if len(parts) == 1 else torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *parts])


def cross_ids(ids: Sequence[Tensor], seed: int = 0) -> Tensor:
    """Returns one id for the ids that several tensors have at a place: a hash of 64 bits, any int64.

    Their order counts: the cross of a user and an item is not that of the item and the user.

    Args:
        ids: one tensor or more of int64, uint64, int32, int16, int8 or uint8, all of one shape.
        seed: another one gives other ids.

    Returns:
        int64, in the shape of each.

    Raises:
        TypeError: something that is no tensor, a sparse tensor, or a seed that is no integer.
        ValueError: a seed that is no int64.
        RuntimeError: no tensors, shapes that differ, or another type.

    Examples:
        >>> cross_ids([torch.tensor([1, 2]), torch.tensor([2, 1])])
        tensor([-4838594755968170389, -2274933249722822011])
    """
    columns = list(ids)
    for number, column in enumerate(columns):
        _check_dense("cross_ids", f"ids at position {number}", column)
    return operators.cross_ids(columns, as_int64("cross_ids", "seed", seed))


def ngram_ids(tokens: Tensor, n: int, tables: int, vocab: int, seed: int = 0) -> Tensor:
    """Returns for each token, and for each table, the row of the n-gram that ends with the token.

    Two n-grams may share a row of one table. They seldom share one of all tables, for each table has a seed of its own:
    table k has `seed + k`. Before the first token of a row stand tokens -1, and never those of another row.

    Args:
        tokens: int64, uint64, int32, int16, int8 or uint8 `[..., T]`: rows of T tokens.
        n: tokens of an n-gram, from 1 to 256.
        tables: how many, from 1 to 1,024.
        vocab: rows of each.
        seed: of the first table.

    Returns:
        int64 in `[0, vocab)`, `[..., T, tables]`.

    Raises:
        TypeError: `tokens` is no dense tensor, or a number is no integer.
        ValueError: a number is no int64.
        RuntimeError: a number out of its range, or tokens of another type.

    Examples:
        >>> ngram_ids(torch.tensor([[5, 6, 5, 6]]), 2, 2, 1000)[0]
        tensor([[208, 946],
                [311, 695],
                [341, 723],
                [311, 695]])
    """
    _check_dense("ngram_ids", "tokens", tokens)
    options = (("n", n), ("tables", tables), ("vocab", vocab), ("seed", seed))
    return operators.ngram_ids(tokens, *(as_int64("ngram_ids", name, value) for name, value in options))


def prefix_ids(codes: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns for each code the id of the prefix that ends with it: each prefix its own, numbered from 0.

    Semantic ids are such codes: an item is a few of them, from coarse to fine.

    Args:
        codes: int64, uint64, int32, int16, int8 or uint8 `[..., L]`, of level l from 0 to below `sizes[l]`.
        sizes: how many codes each of the L levels has. The prefixes must not be more than 2**63.

    Returns:
        int64 `[..., L]`, from 0 to below the number of prefixes: `sizes[0] + sizes[0] * sizes[1] + ...`.

    Raises:
        TypeError: `codes` is no dense tensor, or a size is no integer.
        ValueError: a size is no int64.
        RuntimeError: a code outside its level; a size below 1; too many prefixes; codes of another type.

    Examples:
        >>> prefix_ids(torch.tensor([[0, 0], [2, 3]]), [3, 4])
        tensor([[ 0,  3],
                [ 2, 14]])
    """
    _check_dense("prefix_ids", "codes", codes)
    levels = [as_int64("prefix_ids", f"the size of level {level}", size) for level, size in enumerate(sizes)]
    return operators.prefix_ids(codes, levels)


def bucket_ids(ids: Tensor, buckets: int, seed: int = 0) -> Tensor:
    """Returns the bucket of each id: its hash modulo their number, for tables of a fixed size.

    With seed 0 these are the ids of `recstore train --hash-buckets`.

    Args:
        ids: int64, uint64, int32, int16, int8 or uint8 of any shape.
        buckets: how many there are.
        seed: another one gives other buckets.

    Returns:
        int64 in `[0, buckets)`, in the shape of `ids`.

    Raises:
        TypeError: `ids` is no dense tensor, or a number is no integer.
        ValueError: a number is no int64.
        RuntimeError: `buckets` is below 1, or ids of another type.

    Examples:
        >>> bucket_ids(torch.tensor([0, 1, 2, -1]), 1000)
        tensor([535, 465, 110, 936])
    """
    _check_dense("bucket_ids", "ids", ids)
    return operators.bucket_ids(ids, as_int64("bucket_ids", "buckets", buckets), as_int64("bucket_ids", "seed", seed))


def _check_dense(function: str, what: str, ids: Any) -> None:
    if isinstance(ids, Tensor):
        if ids.layout != torch.strided:
            raise TypeError(f"{function}: {what} must be a dense tensor, got layout {ids.layout}")
    elif not is_tensor_like(ids):
        raise TypeError(f"{function}: {what} must be a tensor, got {type(ids).__name__}")


def _columns(texts: Any) -> list[_Column]:
    # Who has an array of Arrow has imported it; others need not wait for that.
    arrow: Any = sys.modules.get("pyarrow")
    if arrow is not None and isinstance(texts, arrow.Array | arrow.ChunkedArray):
        return [_of_arrow(cells) for cells in (texts.chunks if isinstance(texts, arrow.ChunkedArray) else [texts])]
    if isinstance(texts, np.ndarray):
        if texts.ndim != 1 or texts.dtype.kind not in "USTO":
            raise TypeError(
                f"hash_strings: expected an array of strings of one dimension, got {texts.dtype} of shape {texts.shape}"
            )
        texts = texts.tolist()
    if not isinstance(texts, list | tuple):
        raise TypeError(f"hash_strings: expected a list, or an array of numpy or Arrow, got {type(texts).__name__}")
    return [_joined(texts)]


def _of_arrow(cells: Any) -> _Column:
    """The memory of an array of Arrow."""
    import pyarrow as pa

    offset_type = _ARROW_OFFSETS.get(str(cells.type))
    if offset_type is None:
        raise TypeError(f"hash_strings: expected Arrow strings or binaries, got {cells.type}; cast them first")
    if len(cells) == 0:
        return _joined([])
    # Buffers are used in place, and a slice by its offset. With copies of whole buffers a string of a slice took 125 to
    # 202 ns, not 14 to 15.
    _, offsets, characters = cells.buffers()
    size = 0 if characters is None else characters.size

    def tensor(type: str, count: int, buffer: Any, start: int = 0) -> Tensor:
        return torch.from_dlpack(pa.Array.from_buffers(pa.type_for_alias(type), count, [None, buffer], offset=start))

    return _Column(
        tensor("uint8", size, characters) if size > 0 else torch.empty(0, dtype=torch.uint8, device="cpu"),
        tensor(offset_type, len(cells) + 1, offsets, cells.offset),
        cells.is_null().to_numpy(zero_copy_only=False) if cells.null_count > 0 else None,
    )


def _joined(texts: Sequence[Any]) -> _Column:
    """Strings of Python, copied one after the other."""
    encoded = [_encoded(position, text) for position, text in enumerate(texts)]
    offsets = np.zeros(len(encoded) + 1, dtype=np.int64)
    np.cumsum([len(each or b"") for each in encoded], out=offsets[1:])
    characters = bytearray().join(each or b"" for each in encoded)
    is_missing = np.array([each is None for each in encoded], dtype=np.bool_)
    return _Column(
        torch.frombuffer(characters, dtype=torch.uint8)
        if characters
        else torch.empty(0, dtype=torch.uint8, device="cpu"),
        torch.from_numpy(offsets),
        is_missing if is_missing.any() else None,
    )


def _encoded(position: int, text: Any) -> bytes | None:
    """The bytes of a string of Python, None of a missing one."""
    if isinstance(text, bytes):
        return text
    if isinstance(text, str):
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"hash_strings: the text at position {position} has no UTF-8: {error.reason}") from error
    if text is None or (isinstance(text, float) and text != text):
        return None
    raise TypeError(f"hash_strings: expected str or bytes at position {position}, got {type(text).__name__}")


__all__ = ["PADDING_TOKEN", "bucket_ids", "cross_ids", "hash_strings", "ngram_ids", "prefix_ids"]
