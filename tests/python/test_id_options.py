"""Options and tensors of the functions that make ids: which are taken, and how others are refused, eager and traced."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, fx

from recstore_ops import bucket_ids, cross_ids, hash_strings, ngram_ids, prefix_ids

pytestmark = pytest.mark.tier("quick")

IDS = torch.tensor([0, 1, 2, -1])

OPTIONS: dict[str, Callable[[Any], Tensor]] = {
    "bucket_ids: buckets": lambda value: bucket_ids(IDS, value),
    "bucket_ids: seed": lambda value: bucket_ids(IDS, 9, value),
    "cross_ids: seed": lambda value: cross_ids([IDS, IDS], value),
    "ngram_ids: n": lambda value: ngram_ids(IDS, value, 1, 9),
    "ngram_ids: tables": lambda value: ngram_ids(IDS, 1, value, 9),
    "ngram_ids: vocab": lambda value: ngram_ids(IDS, 1, 1, value),
    "ngram_ids: seed": lambda value: ngram_ids(IDS, 1, 1, 9, value),
    "prefix_ids: the size of level 0": lambda value: prefix_ids(IDS.abs()[:2], [value, 9]),
    "prefix_ids: the size of level 1": lambda value: prefix_ids(IDS.abs()[:2], [9, value]),
    "hash_strings: seed": lambda value: hash_strings(["a"], value),
    "hash_strings: missing": lambda value: hash_strings(["a", None], missing=value),
    "hash_strings: missing, where no string is": lambda value: hash_strings(["a"], missing=value),
    "hash_strings: seed, of no chunks": lambda value: hash_strings(pa.chunked_array([], pa.string()), value),
    "hash_strings: missing, of no strings": lambda value: hash_strings([], missing=value),
}
each_option = pytest.mark.parametrize("option", OPTIONS)

NO_INTEGERS = [
    1.5,
    2.0,
    float("nan"),
    "x",
    4j,
    torch.tensor(10.9),
    torch.tensor([1, 2]),
    np.float64(2),
    np.array([1, 2]),
]
NO_INT64 = [2**63, -(2**63) - 1, 2**64 - 1, np.uint64(2**63), 10**30]
INTEGERS = [3, np.int32(3), np.uint64(3), torch.tensor(3), torch.tensor([3], dtype=torch.int16)]


@each_option
@pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)
def test_what_is_no_integer_is_refused_by_its_name(option: str, value: Any) -> None:
    words = f"{option.partition(',')[0]} must be an integer, got {value!r}"
    with pytest.raises(TypeError, match=f"^{re.escape(words)}$"):
        OPTIONS[option](value)


@each_option
@pytest.mark.parametrize("value", NO_INT64, ids=repr)
def test_an_integer_that_is_no_int64_is_refused_by_its_name(option: str, value: Any) -> None:
    words = f"{option.partition(',')[0]} must be an int64, got {value}"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        OPTIONS[option](value)


@each_option
@pytest.mark.parametrize("value", INTEGERS, ids=repr)
def test_every_kind_of_integer_is_taken(option: str, value: Any) -> None:
    assert OPTIONS[option](value).equal(OPTIONS[option](3))


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1])
def test_the_outermost_int64_are_taken(seed: int) -> None:
    operators = torch.ops.recstore
    assert bucket_ids(IDS, 2**63 - 1, seed).equal(operators.bucket_ids(IDS, 2**63 - 1, seed))
    assert hash_strings([None], seed, missing=seed).tolist() == [seed]


def test_no_seed_is_none() -> None:
    with pytest.raises(TypeError, match="bucket_ids: seed must be an integer, got None"):
        bucket_ids(IDS, 9, None)  # type: ignore[arg-type]


OF_TENSORS: dict[str, Callable[[Any], Tensor]] = {
    "bucket_ids: ids": lambda ids: bucket_ids(ids, 9),
    "cross_ids: ids at position 0": lambda ids: cross_ids([ids, IDS]),
    "cross_ids: ids at position 1": lambda ids: cross_ids([IDS, ids]),
    "ngram_ids: tokens": lambda ids: ngram_ids(ids, 1, 1, 9),
    "prefix_ids: codes": lambda ids: prefix_ids(ids, [9, 9, 9, 9]),
}
NO_DENSE_TENSORS: dict[str, tuple[Any, str]] = {
    "a list": ([0, 1, 2, 3], "must be a tensor, got list"),
    "an array": (np.arange(4), "must be a tensor, got ndarray"),
    "a number": (3, "must be a tensor, got int"),
    "sparse": (IDS.to_sparse(), "must be a dense tensor, got layout torch.sparse_coo"),
}


@pytest.mark.parametrize("function", OF_TENSORS)
@pytest.mark.parametrize(("ids", "words"), NO_DENSE_TENSORS.values(), ids=NO_DENSE_TENSORS)
def test_what_is_no_dense_tensor_is_refused_by_its_name(function: str, ids: Any, words: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(f'{function} {words}')}$"):
        OF_TENSORS[function](ids)


# Traced.


def bucketed(ids: Tensor, buckets: int) -> Tensor:
    return bucket_ids(ids, buckets)


def test_sizes_and_changing_options_are_compiled_as_before() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(bucketed, fullgraph=True, backend="eager")
    for buckets in (3, 4, 5, 2**40):
        assert compiled(IDS, buckets).equal(bucket_ids(IDS, buckets))
    assert compiled(IDS, np.int64(6)).equal(bucket_ids(IDS, 6))  # type: ignore[arg-type]
    by_size = torch.compile(lambda ids: bucket_ids(ids, ids.shape[0]), fullgraph=True, backend="eager", dynamic=True)
    for count in (3, 4, 7):
        assert by_size(torch.arange(count)).equal(bucket_ids(torch.arange(count), count))


def test_options_and_ids_are_traced_by_symbols() -> None:
    traced = fx.symbolic_trace(bucketed)
    assert traced(IDS, 7).equal(bucket_ids(IDS, 7))
    crossed = fx.symbolic_trace(lambda first, second: cross_ids([first, second], 3))
    assert crossed(IDS, IDS).equal(cross_ids([IDS, IDS], 3))


@pytest.mark.parametrize("strict", [False, True])
def test_an_option_that_is_no_int64_is_not_exported(strict: bool) -> None:
    class Model(torch.nn.Module):
        """Buckets of too great a number."""

        def forward(self, ids: Tensor) -> Tensor:
            """Returns the buckets."""
            return bucket_ids(ids, 2**63)

    with pytest.raises(Exception, match="bucket_ids: buckets must be an int64, got 9223372036854775808"):
        torch.export.export(Model(), (IDS,), strict=strict)
