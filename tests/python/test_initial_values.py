"""The value of a row that was never written: a pure function of seed, table name, id and column.

The expected values are computed here, in Python alone: Philox4x32-10 for the random words, the quantile of the
standard library for normal numbers, which the store computes in single precision.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from optimizer_kinds import REGISTRY
from torch import Tensor
from warm_processes import in_a_process

from recstore_ops import DistEmbedding, DistEmbeddingBag, Table, TableConfig

pytestmark = pytest.mark.tier("test")

MASK32, MASK64 = 2**32 - 1, 2**64 - 1

EXTREME_IDS = [0, 1, -1, 42, 2**31, -(2**31) - 1, 2**32, 2**53 + 1, 2**63 - 1, -(2**63)]

OPTIMIZERS: list[dict[str, Any]] = [
    *(
        {"kind": kind, **{option["name"]: 0.0 for option in rule["options"] if option["name"] == "weight_decay"}}
        for kind, rule in REGISTRY.items()
    ),
    {"kind": "adagrad", "convention": "torch"},
    {"kind": "adam", "bias_correction": "row"},
    {"kind": "sgd", "momentum": 0.9},
    {"kind": "rmsprop", "momentum": 0.9, "centered": True},
]


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Salmon et al. 2011, section 4.3: ten rounds."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & MASK32
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return [c0, c1, c2, c3]


def table_key(name: str, seed: int) -> list[int]:
    """FNV-1a of the name, mixed with the seed by the finalizer of SplitMix64."""
    state = 0xCBF29CE484222325
    for byte in name.encode():
        state = ((state ^ byte) * 0x100000001B3) & MASK64
    state ^= (seed * 0x9E3779B97F4A7C15) & MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK64
    state ^= state >> 31
    return [state & MASK32, state >> 32]


def random_words(name: str, seed: int, id: int, dim: int) -> list[int]:
    """A word for each column: column `8 * word + lane` of a group of 32 is of the counter (id, `8 * group + lane`)."""
    key, low, high = table_key(name, seed), id & MASK32, (id >> 32) & MASK32
    words: list[int] = []
    for group in range(-(-dim // 32)):
        lanes = [philox([low, high, 8 * group + lane, 0], key) for lane in range(8)]
        words += [lane[word] for word in range(4) for lane in lanes]
    return words[:dim]


def unit(word: int) -> float:
    """A number in (0, 1): the middle of one of the 2^32 intervals that a word can mean."""
    return (word + 0.5) / 2**32


def normal(word: int) -> float:
    """The quantile of the upper 24 bits, read as a signed number: the middle of one of 2^24 intervals."""
    signed = (word ^ 2**31) - 2**31
    return NormalDist().inv_cdf(((signed >> 8) + 0.5) / 2**24 + 0.5)


def truncated_normal(word: int, mean: float, std: float, a: float, b: float) -> float:
    """`inv_cdf` is algorithm AS 241, as ours; only its logarithm may round differently."""
    low, high = (0.5 * math.erfc(-(bound - mean) / std / math.sqrt(2)) for bound in (a, b))
    return min(max(mean + std * NormalDist().inv_cdf(low + (high - low) * unit(word)), a), b)


def expected_rows(name: str, seed: int, ids: list[int], dim: int, value: Callable[[int], float]) -> Tensor:
    numbers = [[value(word) for word in random_words(name, seed, id, dim)] for id in ids]
    return torch.tensor(numbers, dtype=torch.float64).to(torch.float32)


def assert_single_precision(actual: Tensor, expected: Tensor, std: float) -> None:
    """Holds normal numbers, computed in single precision, to their quantiles."""
    torch.testing.assert_close(actual, expected, rtol=3e-6, atol=3e-7 * std)


def open_table(name: str, dim: int, initializer: dict[str, Any], **options: Any) -> Table:
    return Table(name, dim, TableConfig(initializer=initializer, **options))


def read(table: Table, ids: list[int] | Tensor) -> Tensor:
    return torch.ops.recstore.emb_read.table(table.handle, torch.as_tensor(ids), table.dim)


def ulps(actual: Tensor, expected: Tensor) -> float:
    """The largest distance in units of the last place of float32."""
    distance = np.abs(actual.double().numpy() - expected.double().numpy())
    return float((distance / np.spacing(np.abs(expected.numpy()))).max())


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        (0, [0, 0], "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (MASK32, [MASK32, MASK32], "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ],
)
def test_the_philox_of_this_file_gives_the_published_vectors(counter: int, key: list[int], words: str) -> None:
    # From the known answers of Random123, the reference implementation.
    assert philox([counter] * 4, key) == [int(word, 16) for word in words.split()]


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 5, MASK64])
@pytest.mark.parametrize("dim", [1, 7, 70])  # 70: more than two groups of 32.
def test_normal_values_are_the_quantiles_of_philox(dim: int, seed: int, table_name: Callable[[], str]) -> None:
    name, ids = table_name(), [*EXTREME_IDS, *range(500)]
    table = open_table(name, dim, {"kind": "normal", "mean": 0.25, "std": 3.0}, seed=seed)

    rows = read(table, ids)

    expected = expected_rows(name, seed, ids, dim, lambda word: 0.25 + 3.0 * normal(word))
    assert_single_precision(rows, expected, std=3.0)


@pytest.mark.parametrize("bounds", [{}, {"a": -0.5, "b": 0.125}, {"a": 2.0, "b": 5.0}])
def test_truncated_normal_values_are_quantiles_between_the_bounds(
    bounds: dict[str, float], table_name: Callable[[], str]
) -> None:
    name, ids, mean, std = table_name(), [*EXTREME_IDS, *range(500)], 0.25, 1.5
    table = open_table(name, 5, {"kind": "truncated_normal", "mean": mean, "std": std, **bounds}, seed=3)
    a, b = bounds.get("a", mean - 2 * std), bounds.get("b", mean + 2 * std)

    rows = read(table, ids)

    # The logarithm in the tails is our own, and erfc of two libraries may differ in its last bit, which may tip a
    # rounding.
    assert ulps(rows, expected_rows(name, 3, ids, 5, lambda word: truncated_normal(word, mean, std, a, b))) <= 1
    assert a <= rows.min()
    assert rows.max() <= b


def test_uniform_values_are_philox_scaled(table_name: Callable[[], str]) -> None:
    name, ids = table_name(), [*EXTREME_IDS, *range(500)]
    table = open_table(name, 40, {"kind": "uniform", "a": -0.1, "b": 0.7}, seed=9)
    assert torch.equal(read(table, ids), expected_rows(name, 9, ids, 40, lambda word: -0.1 + (0.7 - -0.1) * unit(word)))


def test_xavier_uniform_values_are_philox_within_the_bound_of_glorot(table_name: Callable[[], str]) -> None:
    name, ids = table_name(), list(range(500))
    table = open_table(name, 6, {"kind": "xavier_uniform", "gain": 2.0}, num_embeddings=500)
    bound = 2.0 * math.sqrt(6 / (500 + 6))
    assert torch.equal(read(table, ids), expected_rows(name, 0, ids, 6, lambda word: -bound + 2 * bound * unit(word)))


@pytest.mark.parametrize(
    ("initializer", "value"), [({"kind": "zeros"}, 0.0), ({"kind": "constant", "value": -0.3}, -0.3)]
)
def test_constant_values_are_the_constant(
    initializer: dict[str, Any], value: float, table_name: Callable[[], str]
) -> None:
    table = open_table(table_name(), 3, initializer)
    assert torch.equal(read(table, EXTREME_IDS), torch.full((len(EXTREME_IDS), 3), value))


def test_a_table_starts_by_default_from_a_normal_with_a_std_of_a_hundredth(
    table_name: Callable[[], str],
) -> None:
    name = table_name()
    module = DistEmbedding(None, 5, name)
    expected = expected_rows(name, 0, EXTREME_IDS, 5, lambda word: 0.01 * normal(word))
    assert_single_precision(module(torch.tensor(EXTREME_IDS)).detach(), expected, std=0.01)


def test_the_first_columns_of_a_wider_table_are_those_of_a_narrower_one(
    table_name: Callable[[], str],
) -> None:
    name = table_name()
    narrow = read(open_table(name, 3, {"kind": "normal"}), EXTREME_IDS)
    torch.ops.recstore.drop_table(name)
    wide = read(open_table(name, 45, {"kind": "normal"}), EXTREME_IDS)
    assert torch.equal(wide[:, :3], narrow)


SEEDED_NAME, SEED = "initial values of every process", 11


def hash_of_initial_rows() -> str:
    table = open_table(SEEDED_NAME, 7, {"kind": "normal", "std": 1.0}, seed=SEED)
    return hashlib.sha256(read(table, torch.arange(-2_000, 2_000)).numpy().tobytes()).hexdigest()


def test_values_are_the_same_in_another_process() -> None:
    assert in_a_process(hash_of_initial_rows) == hash_of_initial_rows()


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_values_do_not_depend_on_threads_order_or_neighbours(threads: int, table_name: Callable[[], str]) -> None:
    torch.set_num_threads(threads)
    dim = 33  # A thread takes 32,768 floats: ten pieces of work.
    table, ids = open_table(table_name(), dim, {"kind": "normal"}), torch.arange(-5_000, 5_000)
    expected = torch.cat([read(table, part) for part in ids.split(100)])  # Each by one thread.
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))

    assert torch.equal(read(table, ids), expected)
    assert torch.equal(read(table, ids[order]), expected[order])
    assert torch.equal(read(table, ids.reshape(100, 100).t()), expected.reshape(100, 100, dim).transpose(0, 1))


def drop_and_open_again(table: Table) -> Table:
    torch.ops.recstore.drop_table(table.name)
    return Table(table.name, table.dim, table.config)


def delete_all(table: Table) -> Table:
    torch.ops.recstore.hashtable_delete(table.handle, torch.tensor([*EXTREME_IDS, *EXTREME_IDS]))
    return table


def clear(table: Table) -> Table:
    torch.ops.recstore.hashtable_clear(table.handle)
    return table


@pytest.mark.parametrize("end", [delete_all, clear, drop_and_open_again])
def test_rows_start_again_from_the_same_values(end: Callable[[Table], Table], table_name: Callable[[], str]) -> None:
    table, ids = open_table(table_name(), 5, {"kind": "normal"}), torch.tensor(EXTREME_IDS)
    initial = read(table, ids)
    torch.ops.recstore.emb_update.table(table.handle, ids, torch.ones(len(ids), 5))
    assert not torch.equal(read(table, ids), initial)

    table = end(table)

    assert len(table) == 0
    assert torch.equal(read(table, ids), initial)
    backwards = ids.flip(0)  # Into other places than before.
    _, inserted = torch.ops.recstore.hashtable_lookup(table.handle, backwards, 5, True)
    assert len(table) == len(ids)
    assert torch.equal(inserted, initial.flip(0))
    assert torch.equal(read(table, ids), initial)


def test_a_million_unknown_ids_are_read_without_leaving_a_trace(table_name: Callable[[], str]) -> None:
    table = open_table(table_name(), 4, {"kind": "normal"})
    bag = DistEmbeddingBag(None, 4, table.name, "sum")
    torch.ops.recstore.emb_write.table(table.handle, torch.tensor([5]), torch.ones(1, 4))
    before = table.statistics()
    ids = torch.arange(10, 1_000_010)

    rows = read(table, ids)
    pooled = bag(ids.reshape(-1, 1))
    indices, looked_up = torch.ops.recstore.hashtable_lookup(table.handle, ids, 4, False)

    assert torch.equal(pooled, rows)
    assert torch.equal(looked_up, rows)
    assert (indices == -1).all()
    assert len(table) == 1
    assert table.statistics() == before


def test_the_first_update_starts_from_exactly_the_initial_value(table_name: Callable[[], str]) -> None:
    table = open_table(table_name(), 5, {"kind": "normal"}, optimizer={"kind": "sgd", "lr": 0.5})
    ids = torch.tensor(EXTREME_IDS)
    gradients = torch.randn(len(ids), 5, generator=torch.Generator().manual_seed(0))
    initial = read(table, ids)

    torch.ops.recstore.emb_update.table(table.handle, ids, gradients)

    assert torch.equal(read(table, ids), initial - 0.5 * gradients)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: "-".join(map(str, optimizer.values())))
def test_an_update_with_a_zero_gradient_keeps_the_initial_value(
    optimizer: dict[str, Any], table_name: Callable[[], str]
) -> None:
    table = open_table(table_name(), 5, {"kind": "normal"}, optimizer=optimizer)
    ids = torch.tensor(EXTREME_IDS)
    initial = read(table, ids)

    torch.ops.recstore.emb_update.table(table.handle, ids, torch.zeros(len(ids), 5))

    assert len(table) == len(ids)
    # FTRL solves for z from the weight and back, each rounded once; the others add zero.
    assert ulps(read(table, ids), initial) <= (1 if optimizer["kind"] == "ftrl" else 0)


def test_tables_of_one_seed_differ_and_so_do_seeds_of_one_table(table_name: Callable[[], str]) -> None:
    name, ids = table_name(), torch.arange(1_000)
    first = read(open_table(name, 4, {"kind": "normal"}), ids)
    second = read(open_table(table_name(), 4, {"kind": "normal"}), ids)
    torch.ops.recstore.drop_table(name)
    third = read(open_table(name, 4, {"kind": "normal"}, seed=1), ids)

    # Two independent float32 normals agree in about one of 10^7.
    for one, other in ((first, second), (first, third), (second, third)):
        assert (one == other).float().mean() < 0.001


def kolmogorov_smirnov(values: Tensor, cumulative: Callable[[float], float]) -> float:
    """The largest distance between the empirical and the given distribution, times the root of the count."""
    ordered = values.flatten().double().sort().values.tolist()
    count = len(ordered)
    probabilities = [cumulative(value) for value in ordered]
    distance = max(max((at + 1) / count - p, p - at / count) for at, p in enumerate(probabilities))
    return distance * math.sqrt(count)


def truncated_cumulative(value: float) -> float:
    distribution = NormalDist(0.5, 2.0)
    low, high = distribution.cdf(-3.5), distribution.cdf(4.5)
    return (distribution.cdf(value) - low) / (high - low)


@pytest.mark.parametrize(
    ("initializer", "cumulative", "mean", "std"),
    [
        ({"kind": "normal", "mean": 0.5, "std": 2.0}, NormalDist(0.5, 2.0).cdf, 0.5, 2.0),
        ({"kind": "uniform", "a": -1.0, "b": 3.0}, lambda x: (x + 1) / 4, 1.0, 4 / math.sqrt(12)),
        # A normal that is cut at two sigma has a standard deviation of 0.87963 sigma.
        ({"kind": "truncated_normal", "mean": 0.5, "std": 2.0}, truncated_cumulative, 0.5, 2 * 0.87963),
        # Glorot's bound is sqrt(6 / (25000 + 4)); a uniform of that half width.
        (
            {"kind": "xavier_uniform"},
            lambda x: 0.5 + x / (2 * math.sqrt(6 / 25_004)),
            0.0,
            math.sqrt(6 / 25_004) / math.sqrt(3),
        ),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)
def test_values_are_distributed_as_named(
    initializer: dict[str, Any], cumulative: Callable[[float], float], mean: float, std: float
) -> None:
    name = f"distribution/{initializer['kind']}"  # Part of the seed, so that the verdict never changes.
    table = open_table(name, 4, initializer, num_embeddings=25_000, seed=5)

    values = read(table, torch.arange(25_000))

    # At most one in 10,000 random samples passes each bound; this one is fixed.
    count = values.numel()
    assert abs(values.double().mean().item() - mean) < 3.9 * std / math.sqrt(count)
    assert abs(values.double().std().item() - std) < 3.9 * std / math.sqrt(count)
    assert kolmogorov_smirnov(values, cumulative) < 2.23


def test_neighbouring_ids_columns_and_tables_are_uncorrelated() -> None:
    options = {"initializer": {"kind": "normal", "std": 1.0}, "seed": 5}
    one, other = (Table(f"correlation/{number}", 5, TableConfig(**options)) for number in range(2))
    rows, others = read(one, torch.arange(25_000)).double(), read(other, torch.arange(25_000)).double()

    for left, right in ((rows[1:], rows[:-1]), (rows[:, 1:], rows[:, :-1]), (rows, others)):
        # The mean product of n pairs of independent normals has a standard deviation of 1 / sqrt(n).
        assert abs((left * right).mean().item()) < 3.9 / math.sqrt(left.numel())
