"""Fake kernels of the operators that make ids: they refuse what the kernels refuse, as far as no value counts.

So `torch.export` of a call that would always fail is an error, and not a program that never runs. Shapes may be
symbolic and are checked here, by `torch._check`. The kernel itself checks the rest: it is called with no ids, outside
of the fake mode.
"""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

ops = torch.ops.recstore


def ids_of_strings(characters: Tensor, offsets: Tensor, seed: int = 0) -> Tensor:
    """The fake kernel of `hash_strings`."""
    _check_flat("characters", characters)
    _check_flat("offsets", offsets)
    ends = offsets.shape[0]
    torch._check(ends >= 1, lambda: "hash_strings: offsets must hold at least the end of the last string, got none")
    with unset_fake_temporarily():
        end = torch.zeros(1, dtype=offsets.dtype, device="cpu")
        ops.hash_strings(_none_of(characters), end, seed)
    return characters.new_empty((ends - 1,), dtype=torch.int64)


def crossed(ids: list[Tensor], seed: int = 0) -> Tensor:
    """The fake kernel of `cross_ids`."""
    for number, each in enumerate(ids):
        _check_one_shape(ids[0], each, number)
    with unset_fake_temporarily():
        ops.cross_ids([_none_of(each) for each in ids], seed)
    return _ids_like(ids[0])


def ngrams(tokens: Tensor, n: int, tables: int, vocab: int, seed: int = 0) -> Tensor:
    """The fake kernel of `ngram_ids`."""
    torch._check(tokens.dim() > 0, lambda: "ngram_ids: tokens must have at least one dimension, got shape []")
    with unset_fake_temporarily():
        ops.ngram_ids(_none_of(tokens), n, tables, vocab, seed)
    return tokens.new_empty((*tokens.shape, tables), dtype=torch.int64)


def prefixes(codes: Tensor, sizes: list[int]) -> Tensor:
    """The fake kernel of `prefix_ids`."""
    levels = len(sizes)
    torch._check(
        codes.dim() > 0 and codes.shape[-1] == levels,
        lambda: (
            f"prefix_ids: codes must have a last dimension of {levels}, one code a size, got shape {list(codes.shape)}"
        ),
    )
    with unset_fake_temporarily():
        ops.prefix_ids(_none_of(codes, levels), sizes)
    return _ids_like(codes)


def bucketed(ids: Tensor, buckets: int, seed: int = 0) -> Tensor:
    """The fake kernel of `bucket_ids`."""
    with unset_fake_temporarily():
        ops.bucket_ids(_none_of(ids), buckets, seed)
    return _ids_like(ids)


def _check_flat(what: str, tensor: Tensor) -> None:
    torch._check(tensor.dim() == 1, lambda: f"hash_strings: {what} must be 1-d, got shape {list(tensor.shape)}")


def _check_one_shape(first: Tensor, each: Tensor, number: int) -> None:
    def words() -> str:
        shapes = f"{list(first.shape)} at position 0 and {list(each.shape)} at position {number}"
        return f"cross_ids: ids must have one shape, got {shapes}"

    torch._check(each.dim() == first.dim(), words)
    for size, expected in zip(each.shape, first.shape, strict=True):
        torch._check(size == expected, words)


def _none_of(ids: Tensor, *width: int) -> Tensor:
    """No ids of the same type, on the host."""
    return torch.empty((0, *width), dtype=ids.dtype, device="cpu")


def _ids_like(ids: Tensor) -> Tensor:
    return ids.new_empty(ids.shape, dtype=torch.int64)
