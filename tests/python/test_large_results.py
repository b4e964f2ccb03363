"""Results of 32 MiB and more lie in memory that is kept for the next ones."""

import gc
import resource
from pathlib import Path

import pytest
import torch
from test_fork import in_child

from recstore_ops import DistEmbedding

pytestmark = pytest.mark.tier("test")

DIM = 64
LARGE_BYTES = 32 << 20
COUNT = LARGE_BYTES // 4 // DIM


@pytest.fixture
def table() -> DistEmbedding:
    """A table with rows 0 to 989; those of the ids up to 999 are initial values."""
    table = DistEmbedding(1000, DIM, name="large results", initializer="normal", seed=3)
    # Written, as a read stores nothing: initial values are drawn at every lookup.
    table.weight[torch.arange(990)] = table(torch.arange(990)).detach()
    return table


def many(count: int, seed: int = 0) -> torch.Tensor:
    """Ids of the table's rows."""
    return torch.randint(1000, (count,), generator=torch.Generator().manual_seed(seed))


def rows_of(table: DistEmbedding, ids: torch.Tensor) -> torch.Tensor:
    """The rows, looked up in small parts."""
    return torch.cat([table(part).detach() for part in ids.split(10_000)])


@pytest.mark.parametrize("count", [COUNT - 1, COUNT, COUNT + 1, 3 * COUNT])
def test_a_large_lookup_gives_the_rows_of_small_ones(table: DistEmbedding, count: int) -> None:
    for seed in range(2):
        ids = many(count, seed)
        assert torch.equal(table(ids), rows_of(table, ids))


def test_memory_is_used_again_when_nothing_refers_to_it(table: DistEmbedding) -> None:
    first, second = (table(many(COUNT, seed)).detach() for seed in range(2))
    expected = rows_of(table, many(COUNT, 0))
    addresses = {first.data_ptr(), second.data_ptr()}
    assert len(addresses) == 2
    del second
    third = table(many(COUNT, 2)).detach()
    assert third.data_ptr() in addresses
    assert torch.equal(first, expected), "the first was in use all the time"


def test_views_and_arrays_keep_a_large_result(table: DistEmbedding) -> None:
    expected = rows_of(table, many(COUNT))
    rows = table(many(COUNT)).detach()
    array, view, shared = rows.numpy()[5:], rows[7:].t(), rows.clone().share_memory_()
    del rows
    gc.collect()
    others = [table(many(COUNT, seed)) for seed in range(3)]
    assert torch.equal(torch.from_numpy(array), expected[5:])
    assert torch.equal(view.t(), expected[7:])
    assert torch.equal(shared, expected)
    assert len(others) == 3


def test_a_large_result_can_be_shared_with_processes_and_changed(table: DistEmbedding) -> None:
    expected = rows_of(table, many(COUNT))
    rows = table(many(COUNT)).detach()
    assert torch.equal(rows.share_memory_(), expected)
    assert torch.equal(rows.mul_(2).sub_(expected), expected)


def test_large_gradients_are_merged_as_small_ones() -> None:
    ids = many(200_000)
    gradients = torch.randn(200_000, DIM)
    merged_ids, sums = torch.ops.recstore.merge_gradients(ids, gradients)
    expected = torch.zeros(1000, DIM).index_add_(0, ids, gradients)
    assert torch.equal(merged_ids.sort().values, torch.arange(1000))
    torch.testing.assert_close(sums, expected[merged_ids], rtol=1e-4, atol=1e-4)


def test_a_child_may_let_go_of_its_parents_results(table: DistEmbedding) -> None:
    expected = rows_of(table, many(COUNT))
    held = [table(many(COUNT)).detach()]

    def let_go() -> None:
        torch.set_num_threads(1)  # A child has not its parent's threads.
        held.clear()
        with torch.no_grad():
            assert torch.equal(table(many(COUNT)), expected)

    in_child(let_go)
    assert torch.equal(held[0], expected)


def test_memory_that_the_system_refuses_is_an_error(table: DistEmbedding) -> None:
    ids = many(4 * COUNT)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    message = rf"no memory for a result of shape \[{4 * COUNT}, {DIM}\], {4 * LARGE_BYTES} bytes"
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + LARGE_BYTES, limits[1]))
    try:
        with pytest.raises(RuntimeError, match=message):
            table(ids)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert torch.equal(table(ids), rows_of(table, ids))
