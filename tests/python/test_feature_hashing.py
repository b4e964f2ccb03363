"""Ids made of strings, pairs, tokens and codes, and ids in buckets, beside their equations in Python's integers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from recstore_ops import bucket_ids, cross_ids, hash_strings, ngram_ids, prefix_ids
from recstore_ops.ops import feature_hashing, operators
from recstore_ops.table.shard_of import splitmix64

pytestmark = pytest.mark.tier("quick")

PAGE = (Path(__file__).parents[2] / "docs" / "ids.md").read_text(encoding="utf-8")
BITS = 2**64 - 1
INT64 = st.integers(-(2**63), 2**63 - 1)
SEEDS = st.sampled_from([0, 1, -1]) | INT64


# The equations of the page.


def mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & BITS
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & BITS
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & BITS
    return z ^ z >> 31


def salt(seed: int) -> int:
    return mix(seed & BITS) ^ mix(0)


def signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def string_id(text: str | bytes, seed: int = 0) -> int:
    data = text.encode() if isinstance(text, str) else text
    h = mix(len(data) ^ salt(seed))
    for start in range(0, len(data), 8):
        h = mix(h ^ int.from_bytes(data[start : start + 8], "little"))
    return signed(h)


def cross_hash(ids: Sequence[int], seed: int = 0) -> int:
    h = mix(ids[0] & BITS ^ salt(seed))
    for each in ids[1:]:
        h = mix((h + each) & BITS)
    return h


def ngram_rows(tokens: Sequence[int], n: int, tables: int, vocab: int, seed: int = 0) -> list[list[int]]:
    padded = [-1] * (n - 1) + list(tokens)
    grams = [padded[end : end + n] for end in range(len(tokens))]
    return [[cross_hash(gram, signed((seed + k) & BITS)) * vocab >> 64 for k in range(tables)] for gram in grams]


def prefix_numbers(codes: Sequence[int], sizes: Sequence[int]) -> list[int]:
    numbers, number, shorter, prefixes = [], 0, 0, 1
    for code, size in zip(codes, sizes, strict=True):
        number = number * size + code
        numbers.append(shorter + number)
        prefixes *= size
        shorter += prefixes
    return numbers


def longs(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def of_strings(texts: Sequence[str | bytes], seed: int = 0) -> Tensor:
    """What the operator itself gives."""
    encoded = [text.encode() if isinstance(text, str) else text for text in texts]
    characters = torch.tensor(list(b"".join(encoded)), dtype=torch.uint8)
    return torch.ops.recstore.hash_strings(characters, longs(np.cumsum([0, *map(len, encoded)])), seed)


PUBLISHED = re.findall(r"^\| `(\w+\(.*\))` \| `(\[.*\])` \|$", PAGE, flags=re.MULTILINE)

EQUATIONS: dict[str, Callable[..., Any]] = {
    "hash_strings": lambda texts, seed=0: [string_id(text, seed) for text in texts],
    "cross_ids": lambda *ids, seed=0: [signed(cross_hash(each, seed)) for each in zip(*ids, strict=True)],
    "ngram_ids": lambda tokens, *options, seed=0: [ngram_rows(row, *options, seed=seed) for row in tokens],
    "prefix_ids": lambda codes, sizes: [prefix_numbers(row, sizes) for row in codes],
    "bucket_ids": lambda ids, buckets, seed=0: [cross_hash([each], seed) % buckets for each in ids],
}

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "hash_strings": lambda texts, seed=0: hash_strings(texts, seed).tolist(),
    "cross_ids": lambda *ids, seed=0: cross_ids([longs(each) for each in ids], seed).tolist(),
    "ngram_ids": lambda tokens, *options, seed=0: ngram_ids(longs(tokens), *options, seed=seed).tolist(),
    "prefix_ids": lambda codes, sizes: prefix_ids(longs(codes), sizes).tolist(),
    "bucket_ids": lambda ids, buckets, seed=0: bucket_ids(longs(ids), buckets, seed).tolist(),
}


def test_the_page_has_values_of_every_function() -> None:
    assert {call.partition("(")[0] for call, _ in PUBLISHED} == set(FUNCTIONS)
    assert len(PUBLISHED) == 20


@pytest.mark.parametrize(("call", "ids"), PUBLISHED)
def test_published_values_are_those_of_the_equations_and_of_the_functions(call: str, ids: str) -> None:
    assert eval(call, dict(EQUATIONS)) == eval(call, dict(FUNCTIONS)) == eval(ids)


# Any input.


@given(texts=st.lists(st.text(max_size=30) | st.binary(max_size=30), max_size=20), seed=SEEDS)
@settings(max_examples=examples(200), deadline=None)
def test_any_strings_have_the_hash_of_the_equation(texts: list[str | bytes], seed: int) -> None:
    expected = [string_id(text, seed) for text in texts]
    assert hash_strings(texts, seed).tolist() == of_strings(texts, seed).tolist() == expected


@given(ids=st.lists(st.tuples(INT64, INT64, INT64), max_size=20), count=st.integers(1, 3), seed=SEEDS)
@settings(max_examples=examples(200), deadline=None)
def test_any_ids_are_crossed_by_the_equation(ids: list[tuple[int, int, int]], count: int, seed: int) -> None:
    columns = [longs([each[number] for each in ids]) for number in range(count)]
    assert cross_ids(columns, seed).tolist() == [signed(cross_hash(each[:count], seed)) for each in ids]


@given(
    tokens=st.lists(st.lists(INT64, min_size=4, max_size=4), max_size=3),
    n=st.integers(1, 7),
    tables=st.integers(1, 3),
    vocab=st.integers(1, 2**63 - 1),
    seed=SEEDS,
)
@settings(max_examples=examples(200), deadline=None)
def test_any_tokens_have_the_rows_of_the_equation(
    tokens: list[list[int]], n: int, tables: int, vocab: int, seed: int
) -> None:
    found = ngram_ids(longs(tokens).reshape(-1, 4), n, tables, vocab, seed)
    assert found.tolist() == [ngram_rows(row, n, tables, vocab, seed) for row in tokens]


@given(data=st.data(), sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=6))
@settings(max_examples=examples(200), deadline=None)
def test_any_codes_have_the_prefixes_of_the_equation(data: st.DataObject, sizes: list[int]) -> None:
    rows = data.draw(st.lists(st.tuples(*(st.integers(0, size - 1) for size in sizes)), min_size=1, max_size=9))
    assert prefix_ids(longs(rows), sizes).tolist() == [prefix_numbers(row, sizes) for row in rows]


@given(ids=st.lists(INT64, max_size=20), buckets=st.integers(1, 2**63 - 1), seed=SEEDS)
@settings(max_examples=examples(200), deadline=None)
def test_any_ids_have_the_bucket_of_the_equation(ids: list[int], buckets: int, seed: int) -> None:
    assert bucket_ids(longs(ids), buckets, seed).tolist() == [cross_hash([each], seed) % buckets for each in ids]


def test_each_prefix_has_one_id_and_each_id_a_prefix() -> None:
    sizes = [3, 1, 4, 2]
    codes = torch.cartesian_prod(*(torch.arange(size) for size in sizes))
    prefixes = {}
    for row, ids in zip(codes.tolist(), prefix_ids(codes, sizes).tolist(), strict=True):
        for level, each in enumerate(ids):
            assert prefixes.setdefault(each, row[: level + 1]) == row[: level + 1]
    assert sorted(prefixes) == list(range(3 + 3 + 12 + 24))


def test_a_row_of_tokens_never_sees_its_neighbours() -> None:
    tokens = torch.randint(0, 50, (4, 3, 6))
    together = ngram_ids(tokens, 4, 2, 10**6)
    assert together.shape == (4, 3, 6, 2)
    for block in range(4):
        for row in range(3):
            assert torch.equal(together[block, row], ngram_ids(tokens[block, row], 4, 2, 10**6))


def test_long_rows_of_tokens_are_cut_nowhere() -> None:
    tokens = torch.randint(-(2**62), 2**62, (2, 1500))
    padded = torch.cat([torch.full((2, 4), feature_hashing.PADDING_TOKEN), tokens], dim=1)
    crossed = [cross_ids([padded[:, age : age + 1500] for age in range(5)], seed) for seed in (8, 9)]
    upper_halves = torch.stack(crossed, dim=-1) >> 32 & 2**32 - 1
    assert torch.equal(ngram_ids(tokens, 5, 2, 2**32, 8), upper_halves)
    assert not ngram_ids(tokens, 5, 2, 1, 8).any()


def test_every_hash_comes_close_to_a_uniform_number() -> None:
    """Counts of buckets beside their mean: chi-square of 1,023 degrees of freedom, ten deviations off at most."""
    numbers = torch.arange(1_000_000)
    seen = {
        "buckets": bucket_ids(numbers, 1024),
        "a cross": cross_ids([numbers % 1000, numbers // 1000]) & 1023,
        "the upper bits of a cross": cross_ids([numbers // 1000, numbers % 1000]) >> 54 & 1023,
        "rows of bigrams": ngram_ids(numbers, 2, 1, 1024, 5).flatten(),
        "strings": hash_strings(list(map(str, range(1_000_000)))) & 1023,
    }
    for name, values in seen.items():
        counts = torch.bincount(values, minlength=1024).double()
        mean = len(numbers) / 1024
        chi = ((counts - mean) ** 2 / mean).sum().item()
        assert abs(chi - 1023) < 10 * (2 * 1023) ** 0.5, name


def test_tables_and_seeds_are_unlike() -> None:
    numbers = torch.arange(10_000)
    tables = ngram_ids(numbers, 1, 4, 100)
    for first in range(4):
        for second in range(first):
            shared = (tables[:, first] == tables[:, second]).sum().item()
            assert 40 < shared < 170, "one in a hundred, by chance"
    assert torch.equal(tables[:, 3], ngram_ids(numbers, 1, 1, 100, 3)[:, 0])
    assert (cross_ids([numbers], 1) == cross_ids([numbers])).sum() == 0
    assert (cross_ids([numbers, numbers + 1]) == cross_ids([numbers + 1, numbers])).sum() == 0


# Strings of every kind of container.

TEXTS = ["", "a", "Zürich", "12345678", "123456789", "a\0", "x" * 40]

CONTAINERS: dict[str, Callable[[list[str]], Any]] = {
    "list": list,
    "tuple": tuple,
    "bytes": lambda texts: [text.encode() for text in texts],
    "objects": lambda texts: np.array(texts, dtype=object),
    "Arrow strings": lambda texts: pa.array(texts, pa.string()),
    "large strings": lambda texts: pa.array(texts, pa.large_string()),
    "binaries": lambda texts: pa.array([text.encode() for text in texts], pa.binary()),
    "large binaries": lambda texts: pa.array([text.encode() for text in texts], pa.large_binary()),
    "a slice": lambda texts: pa.array(["before", *texts, "behind"])[1:-1],
    "chunks": lambda texts: pa.chunked_array([texts[:2], [], texts[2:3], texts[3:]], pa.string()),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.filterwarnings("error")
def test_every_container_of_strings_gives_the_same_ids(container: str) -> None:
    expected = [string_id(text, 3) for text in TEXTS]
    assert hash_strings(CONTAINERS[container](TEXTS), 3).tolist() == expected


@pytest.mark.parametrize("dtype", ["U", "S"])
def test_arrays_of_numpy_leave_out_zeros_at_the_end(dtype: str) -> None:
    texts = ["ab", "", "a longer one"]
    assert hash_strings(np.array(texts, dtype=dtype)).tolist() == [string_id(text) for text in texts]
    assert hash_strings(np.array(["a\0"], dtype=dtype)).tolist() == [string_id("a")]


def test_no_strings_have_no_ids() -> None:
    arrow = [pa.array([], pa.string()), pa.chunked_array([], pa.string()), pa.array(["a"])[:0]]
    for empty in [[], (), np.array([], dtype="U1"), *arrow]:
        ids = hash_strings(empty)
        assert (ids.shape, ids.dtype) == ((0,), torch.int64)


def test_strings_of_arrow_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tensor] = []

    def watched(characters: Tensor, offsets: Tensor, seed: int) -> Tensor:
        given.extend((characters, offsets))
        return torch.ops.recstore.hash_strings(characters, offsets, seed)

    monkeypatch.setattr(operators, "hash_strings", watched)
    for type, width in ((pa.string(), 4), (pa.large_binary(), 8)):
        cells = pa.array(["Bern", None, "Zug", "Basel"], type)[1:]
        hash_strings(cells, missing=0)
        _, offsets, characters = cells.buffers()
        assert [each.data_ptr() for each in given] == [characters.address, offsets.address + width]
        given.clear()


def test_memory_of_arrow_that_is_read_only_is_taken_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    offsets = pa.py_buffer(np.array([0, 4, 7], dtype=np.int32).tobytes())
    cells = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"BernZug"))
    assert hash_strings(cells).tolist() == [string_id("Bern"), string_id("Zug")]
    assert [str(warning.message) for warning in recwarn] == []


MISSING: dict[str, Any] = {
    "None": ["a", "b", None, "c"],
    "NaN": np.array(["a", "b", float("nan"), "c"], dtype=object),
    "null": pa.array(["z", "a", "b", None, "c"])[1:],
    "null in a later chunk": pa.chunked_array([["a", "b"], [None, "c"]], pa.string()),
}


@pytest.mark.parametrize("texts", MISSING.values(), ids=MISSING)
def test_a_missing_string_is_an_error_or_an_id(texts: Any) -> None:
    with pytest.raises(ValueError, match=r"^hash_strings: the string at position 2 is missing; `missing` takes an id"):
        hash_strings(texts)
    assert hash_strings(texts, missing=-5).tolist() == [string_id("a"), string_id("b"), -5, string_id("c")]


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "a string": ("Bern", TypeError, "expected a list, or an array of numpy or Arrow, got str"),
    "a number": (["a", 7], TypeError, "expected str or bytes at position 1, got int"),
    "numbers": (np.arange(2), TypeError, r"expected an array of strings of one dimension, got int64 of shape \(2,\)"),
    "a matrix": (np.array([["a"]]), TypeError, r"of one dimension, got <U1 of shape \(1, 1\)"),
    "numbers of Arrow": (pa.array([1]), TypeError, "expected Arrow strings or binaries, got int64; cast them first"),
    "no UTF-8": (["a", "\ud800"], ValueError, "the text at position 1 has no UTF-8: surrogates not allowed"),
}


@pytest.mark.parametrize(("texts", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_strings_is_refused(texts: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"^hash_strings: .*{words}"):
        hash_strings(texts)


# Refusals of the operators.

ops = torch.ops.recstore
FOUR = torch.tensor([66, 101, 114, 110], dtype=torch.uint8)

WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "offsets that fall": (
        lambda: ops.hash_strings(FOUR, longs([0, 3, 1])),
        "hash_strings: offset 1 at position 2 is not from 3 to 4",
    ),
    "narrow offsets behind the end": (
        lambda: ops.hash_strings(FOUR, longs([0, 5]).int()),
        "hash_strings: offset 5 at position 1 is not from 0 to 4",
    ),
    "an offset below 0": (
        lambda: ops.hash_strings(FOUR, longs([-1, 2])),
        "hash_strings: offset -1 at position 0 is not from 0 to 4",
    ),
    "no offsets": (
        lambda: ops.hash_strings(FOUR, longs([])),
        "hash_strings: offsets must hold at least the end of the last string, got none",
    ),
    "characters of another type": (
        lambda: ops.hash_strings(FOUR.char(), longs([0, 4])),
        "hash_strings: characters must be uint8 and offsets int32 or int64, got Char and Long",
    ),
    "offsets of another type": (
        lambda: ops.hash_strings(FOUR, longs([0, 4]).short()),
        "hash_strings: characters must be uint8 and offsets int32 or int64, got Byte and Short",
    ),
    "a matrix of characters": (
        lambda: ops.hash_strings(FOUR.view(2, 2), longs([0, 4])),
        "hash_strings: characters must be 1-d, got shape [2, 2]",
    ),
    "a matrix of offsets": (
        lambda: ops.hash_strings(FOUR, longs([[0, 4]])),
        "hash_strings: offsets must be 1-d, got shape [1, 2]",
    ),
    "a cross of nothing": (lambda: cross_ids([]), "cross_ids: expected at least one tensor of ids, got none"),
    "a cross of shapes": (
        lambda: cross_ids([longs([1, 2]), longs([1, 2]), longs([1])]),
        "cross_ids: ids must have one shape, got [2] at position 0 and [1] at position 2",
    ),
    "a cross of floats": (
        lambda: cross_ids([torch.ones(2)]),
        "cross_ids: ids must be int64, uint64, int32, int16, int8 or uint8, got Float",
    ),
    "no n-gram": (lambda: ngram_ids(longs([1]), 0, 1, 9), "ngram_ids: n must be from 1 to 256, got 0"),
    "a huge n-gram": (lambda: ngram_ids(longs([1]), 2**62, 1, 9), f"ngram_ids: n must be from 1 to 256, got {2**62}"),
    "no table": (lambda: ngram_ids(longs([1]), 1, -1, 9), "ngram_ids: tables must be from 1 to 1024, got -1"),
    "no vocab": (
        lambda: ngram_ids(longs([1]), 1, 1, 0),
        "ngram_ids: vocab must be from 1 to 9223372036854775807, got 0",
    ),
    "one token alone": (
        lambda: ngram_ids(longs(1), 1, 1, 9),
        "ngram_ids: tokens must have at least one dimension, got shape []",
    ),
    "tokens of floats": (
        lambda: ngram_ids(torch.ones(2), 1, 1, 9),
        "ngram_ids: tokens must be int64, uint64, int32, int16, int8 or uint8, got Float",
    ),
    "a code too large": (
        lambda: prefix_ids(longs([[2, 3], [1, 4]]), [3, 4]),
        "prefix_ids: code 4 at position 3 is not from 0 to below 4, the size of level 1",
    ),
    "a code below 0": (
        lambda: prefix_ids(longs([[-1, 3]]), [3, 4]),
        "prefix_ids: code -1 at position 0 is not from 0 to below 3, the size of level 0",
    ),
    "a size of 0": (
        lambda: prefix_ids(longs([[0, 0]])[:0], [3, 0]),
        "prefix_ids: the size of level 1 must be at least 1, got 0",
    ),
    "too many prefixes": (
        lambda: prefix_ids(longs([[0, 0, 0]]), [2**31, 2**31, 2]),
        "prefix_ids: codes of sizes [2147483648, 2147483648, 2] have more than 2^63 prefixes up to level 2",
    ),
    "codes of fewer levels": (
        lambda: prefix_ids(longs([[0, 0]]), [3]),
        "prefix_ids: codes must have a last dimension of 1, one code a size, got shape [1, 2]",
    ),
    "one code alone": (
        lambda: prefix_ids(longs(0), []),
        "prefix_ids: codes must have a last dimension of 0, one code a size, got shape []",
    ),
    "no bucket": (
        lambda: bucket_ids(longs([1]), 0),
        "bucket_ids: buckets must be from 1 to 9223372036854775807, got 0",
    ),
}


@pytest.mark.parametrize(("call", "words"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{re.escape(words)}$"):
        call()


OF_VALUES = {
    "offsets that fall",
    "narrow offsets behind the end",
    "an offset below 0",
    "a code too large",
    "a code below 0",
}


@pytest.mark.parametrize("case", [case for case in WRONG if case not in OF_VALUES])
def test_wrong_arguments_are_refused_where_there_are_no_values(case: str) -> None:
    call, words = WRONG[case]
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match=f"^{re.escape(words)}$"):
        call()


NEVER_RIGHT: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "bucket_ids": (lambda ids: bucket_ids(ids, 0), WRONG["no bucket"][1]),
    "ngram_ids": (lambda ids: ngram_ids(ids, 0, 1, 1), WRONG["no n-gram"][1]),
    "prefix_ids": (lambda ids: prefix_ids(ids, [4, 4, 0]), "prefix_ids: the size of level 2 must be at least 1, got 0"),
    "cross_ids": (lambda ids: cross_ids([ids, ids[:1]]), "cross_ids: ids must have one shape, got [3] at position 0"),
    "cross_ids of none": (lambda ids: cross_ids([]) + ids, WRONG["a cross of nothing"][1]),
}


@pytest.mark.parametrize(("call", "words"), NEVER_RIGHT.values(), ids=NEVER_RIGHT)
def test_a_call_that_would_always_fail_is_not_exported(call: Callable[[Tensor], Tensor], words: str) -> None:
    class Model(torch.nn.Module):
        """The call as a model."""

        def forward(self, ids: Tensor) -> Tensor:
            """Returns what the call gives."""
            return call(ids)

    with pytest.raises(RuntimeError, match=re.escape(words)):
        torch.export.export(Model(), (longs([1, 2, 3]),))
    with pytest.raises(RuntimeError, match=re.escape(words)):
        torch.compile(call, fullgraph=True, backend="eager")(longs([1, 2, 3]))
    with pytest.raises(RuntimeError, match=re.escape(words)):
        call(longs([1, 2, 3]).to("meta"))


# The same bits everywhere.


def every_function(numbers: Tensor, characters: Tensor, offsets: Tensor) -> list[Tensor]:
    """All functions on numbers [N] and strings."""
    pairs = torch.stack([numbers, numbers.flip(0)], dim=1)
    return [
        torch.ops.recstore.hash_strings(characters, offsets, 3),
        cross_ids([numbers, numbers.flip(0)], 3),
        ngram_ids(pairs, 3, 2, 1000, 3),
        prefix_ids(pairs & 7, [8, 8]),
        bucket_ids(numbers, 1000, 3),
    ]


def inputs(count: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    lengths = torch.randint(0, 20, (count,), generator=generator)
    offsets = torch.cat([longs([0]), lengths.cumsum(0)])
    characters = torch.randint(0, 256, (int(offsets[-1]),), generator=generator).to(torch.uint8)
    return numbers, characters, offsets


def test_threads_change_nothing() -> None:
    before = torch.get_num_threads()
    given, found = inputs(300_000), []
    try:
        for threads in (1, 2, 8):
            torch.set_num_threads(threads)
            found.append(every_function(*given))
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


def test_strides_and_shapes_change_nothing() -> None:
    numbers, characters, offsets = inputs(24)
    spread = torch.stack([numbers, numbers + 1], dim=1)[:, 0]
    doubled = characters.repeat_interleave(2)[::2], offsets.repeat_interleave(2)[::2]
    assert not spread.is_contiguous()
    assert all(map(torch.equal, every_function(spread, *doubled), every_function(numbers, characters, offsets)))
    assert torch.equal(bucket_ids(numbers.view(2, 3, 4), 7), bucket_ids(numbers, 7).view(2, 3, 4))
    assert torch.equal(cross_ids([numbers.view(4, 6).t()] * 2), cross_ids([numbers] * 2).view(4, 6).t())


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.tier("all"))])
def test_compiled_functions_give_the_same(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(every_function, backend=backend, fullgraph=True, dynamic=True)
    for count in (12, 40):
        given = inputs(count)
        assert all(map(torch.equal, compiled(*given), every_function(*given)))


def test_exported_functions_give_the_same(tmp_path: Path) -> None:
    class Makers(torch.nn.Module):
        """All functions as a model."""

        def forward(self, numbers: Tensor, characters: Tensor, offsets: Tensor) -> list[Tensor]:
            """Returns the ids of each function."""
            return every_function(numbers, characters, offsets)

    dims = tuple({0: torch.export.Dim.AUTO} for _ in range(3))
    torch.export.save(torch.export.export(Makers(), inputs(12), dynamic_shapes=dims), tmp_path / "makers.pt2")
    program = torch.export.load(tmp_path / "makers.pt2").module()
    given = inputs(40)
    assert all(map(torch.equal, program(*given), every_function(*given)))


# Collisions.


def colliding_pairs(values: NDArray[np.int64]) -> int:
    """How many pairs of equal values there are; `values` is sorted in place."""
    values.sort()
    pairs, distance = 0, 1
    while equal := np.count_nonzero(values[distance:] == values[:-distance]):
        pairs, distance = pairs + equal, distance + 1
    return pairs


def assert_as_by_chance(values: NDArray[np.int64], ids: int) -> None:
    """Pairs of equal values: five deviations of a Poisson number from the expected one at most."""
    pairs, expected = colliding_pairs(values), len(values) ** 2 / (2 * ids)
    assert abs(pairs - expected) < 5 * expected**0.5 + 1, (pairs, expected)


def decimal_strings(start: int, count: int) -> tuple[Tensor, Tensor]:
    """The numbers from `start` on as decimals of nine digits, as one tensor of characters, and offsets."""
    numbers = torch.arange(start, start + count)
    digits = torch.stack([numbers // 10**place % 10 + 48 for place in reversed(range(9))], dim=1)
    return digits.to(torch.uint8).flatten(), torch.arange(count + 1) * 9


def of_decimals(start: int, count: int) -> Tensor:
    return torch.ops.recstore.hash_strings(*decimal_strings(start, count)) & 2**40 - 1


def in_buckets(start: int, count: int) -> Tensor:
    return bucket_ids(torch.arange(start, start + count), 2**40)


def made_in_pieces(make: Callable[[int, int], Tensor], count: int) -> NDArray[np.int64]:
    values, piece = np.empty(count, dtype=np.int64), min(count, 2_000_000)
    for start in range(0, count, piece):
        values[start : start + piece] = make(start, piece).numpy()
    return values


@pytest.mark.parametrize("make", [of_decimals, in_buckets])
@pytest.mark.parametrize("count", [1_000_000, pytest.param(100_000_000, marks=pytest.mark.tier("all"))])
def test_ids_of_40_bits_collide_as_by_chance(count: int, make: Callable[[int, int], Tensor]) -> None:
    assert_as_by_chance(made_in_pieces(make, count), 2**40)


def test_a_million_ids_of_32_bits_collide_as_by_chance() -> None:
    numbers = torch.arange(1_000_000)
    seen = {
        "buckets": bucket_ids(numbers, 2**32),
        "crosses": cross_ids([numbers // 1000, numbers % 1000]) & 2**32 - 1,
        "rows of bigrams": ngram_ids(numbers, 2, 1, 2**32).flatten(),
        "strings": torch.ops.recstore.hash_strings(*decimal_strings(0, 1_000_000), 7) & 2**32 - 1,
    }
    for values in seen.values():
        assert_as_by_chance(values.numpy(), 2**32)


# The ids that the trainer has had.


def test_the_trainer_keeps_its_ids() -> None:
    """The former formulas, on numpy's integers."""
    ids = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 5 << 40 | 7])
    hashes = splitmix64(ids.numpy())
    for buckets in (1, 1000, 2**40, 2**63 - 1):
        assert bucket_ids(ids, buckets).tolist() == (hashes % np.uint64(buckets)).astype(np.int64).tolist()
    second = ids.flip(0)
    crossed = splitmix64((hashes + second.numpy().view(np.uint64)).view(np.int64)).view(np.int64)
    assert cross_ids([ids, second]).tolist() == crossed.tolist()
