"""The operators of what ranks exchange, against torch; how messages find room; how a pipeline chooses its pace."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor
from torch.nn import functional

from recstore_ops import DistEmbedding, Table
from recstore_ops.ops import operators
from recstore_ops.sharding import exchange, exchange_statistics, pipeline, shard_of
from recstore_ops.sharding.exchange import FLAGS, Layout, Requests, exchange_messages
from recstore_ops.sharding.pipeline import ExchangeTuner

pytestmark = pytest.mark.tier("test")

DIMS = [3, 5]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_requests_are_the_distinct_ids_of_each_owner(world: int) -> None:
    ids = [torch.randint(-9, 9, (40,)), torch.randint(-(2**62), 2**62, (7,)), torch.empty(0, dtype=torch.int64)]
    asked, taken = Requests.of(ids, world), 0
    pieces = asked.ids.split([count for counts in asked.counts_WT for count in counts])
    for table, ids_N in enumerate(ids):
        own = pieces[table :: len(ids)]
        places = asked.places[taken : taken + len(ids_N)]
        taken += len(ids_N)
        assert torch.equal(torch.cat(own)[places], ids_N)
        for rank, piece in enumerate(own):
            assert torch.equal(piece, ids_N[shard_of(ids_N, world) == rank].unique())


def test_rows_are_pooled_and_gradients_spread_as_torch_does() -> None:
    torch.manual_seed(0)
    layout = Layout([[4, 0], [2, 6]], DIMS)
    flat = torch.randn(layout.ends_W[-1])
    tables, offsets = [1, 0, 1], torch.tensor([0, 2, 2, 3, 3, 7, 8])
    places = torch.tensor([5, 0, 1, 3, 3, 5, 0, 2])
    rows = [each.requires_grad_() for each in layout.by_table(flat)]
    sums = []
    for feature, table in enumerate(tables):
        own = offsets[2 * feature : 2 * feature + 3]
        of_feature = places[int(own[0]) : int(own[-1])]
        sums.append(
            functional.embedding_bag(of_feature, rows[table], own - own[0], mode="sum", include_last_offset=True)
        )
    expected = torch.cat(sums, dim=1)
    pooled = operators.pool_rank_rows(flat, layout.counts, layout.dims, tables, places, offsets)
    assert torch.equal(pooled, expected)
    grads = torch.randn_like(pooled)
    expected.backward(grads)
    spread = operators.spread_rank_grads(grads, layout.counts, layout.dims, tables, places, offsets)
    for found, each in zip(layout.by_table(spread), rows, strict=True):
        torch.testing.assert_close(found, each.grad, rtol=0, atol=1e-6)
    assert torch.equal(layout.flat(layout.by_table(flat)).view(-1)[: 4 * 3], flat[: 4 * 3])
    assert layout.flags_W(spread) == [0, 0]


def test_rows_are_read_and_gradients_collected_where_they_are_sent(table_name: Callable[[], str]) -> None:
    tables = [Table(table_name(), dim) for dim in DIMS]
    handles, collectors = [table.handle for table in tables], [table.collector for table in tables]
    layout, ids = Layout([[2, 1], [1, 2]], DIMS), torch.tensor([4, 9, 1, 4, 8, 1])
    for table in tables:
        operators.emb_write(table.handle, torch.arange(10), torch.randn(10, table.dim))
    rows, places = operators.emb_read_ranks(handles, ids, layout.counts, layout.dims)
    of_tables = [torch.tensor([4, 9, 4]), torch.tensor([1, 8, 1])]
    for table, found, own in zip(tables, layout.by_table(rows), of_tables, strict=True):
        assert torch.equal(found, operators.emb_read(table.handle, own, table.dim))
    grads = torch.randn_like(rows)
    operators.accept_rank_grads(collectors, handles, ids, layout.counts, grads, layout.dims, [1], [8], places)
    for table, own, each in zip(tables, of_tables, layout.by_table(grads), strict=True):
        counted = own != 8
        expected = operators.merge_gradients(own[counted], each[counted])
        ((_, *found),) = table.collected()
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


REFUSED: dict[str, tuple[Callable[[Table, Tensor], Any], str]] = {
    "splits": (lambda t, ids: operators.rank_requests(ids, [0, 3], 2), "rank_requests: splits must end at the 2 ids"),
    "ranks": (lambda t, ids: operators.rank_requests(ids, [0, 2], 0), "rank_requests: there must be ranks"),
    "counts": (lambda t, ids: operators.emb_read_ranks([t.handle], ids, [3], [3]), "the ranks have 3 ids, got 2"),
    "negative": (lambda t, ids: operators.emb_read_ranks([t.handle], ids, [5, -3], [3]), "-3 is not a count"),
    "dim": (lambda t, ids: operators.emb_read_ranks([t.handle], ids, [2], [4]), "has dim 3, got rows of 4"),
    "dims": (lambda t, ids: operators.emb_read_ranks([t.handle], ids, [2], []), "1 tables need as many dims, got 0"),
    "rows": (lambda t, ids: _pooled(torch.zeros(3), [0], ids), "the ranks have 25 elements, got 3"),
    "table": (lambda t, ids: _pooled(torch.zeros(25), [1], ids), "there are 1 tables, got number 1"),
    "place": (lambda t, ids: _pooled(torch.zeros(25), [0], ids), "place 7 at position 1 is of no row"),
    "gradients": (
        lambda t, ids: _spread(torch.zeros(2, 2), ids),
        r"expected gradients of shape \[2, 3\], got \[2, 2\]",
    ),
    "collectors": (lambda t, ids: _accepted(t, [], ids), "1 tables need as many collectors.* got 0 collectors"),
    "elements": (lambda t, ids: _accepted(t, [t.collector], ids), "the ranks have 22 elements, got 5"),
}


def _pooled(rows: Tensor, tables: list[int], places: Tensor) -> Tensor:
    return operators.pool_rank_rows(rows, [3], [3], tables, places, torch.tensor([0, 1, 2]))


def _spread(grads: Tensor, places: Tensor) -> Tensor:
    return operators.spread_rank_grads(grads, [3], [3], [0], places, torch.tensor([0, 1, 2]))


def _accepted(table: Table, collectors: list[Tensor], ids: Tensor) -> None:
    operators.accept_rank_grads(collectors, [table.handle], ids, [2], torch.zeros(5), [3], [], [], None)


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused(what: str, table_name: Callable[[], str]) -> None:
    call, message = REFUSED[what]
    with pytest.raises(RuntimeError, match=message):
        call(Table(table_name(), 3), torch.tensor([2, 7]))


def told(group: dist.ProcessGroup, name: str) -> list[tuple[list[list[int]], list[list[int]], int]]:
    """What comes in messages of several sizes, and how many bytes beside their bodies each sends."""
    table, rank = DistEmbedding(None, 2, name, process_group=group).table, group.rank()
    assert table.shard is not None
    found = []
    for size in (5, 5, 90, 1, 0):
        bodies = [torch.full((8 * size * (rank + 1),), rank * 10 + to, dtype=torch.uint8) for to in range(group.size())]
        exchange_statistics(reset=True)
        words = [[rank, to] for to in range(group.size())]
        came = exchange_messages(table.shard, "test", words, bodies, "id_bytes")
        others = int(exchange_statistics()["count_bytes"])
        found.append((came.words, [body.tolist() for body in came.bodies], others))
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_messages_arrive_whole_whatever_room_they_have(ranks: Ranks, table_name: Callable[[], str], world: int) -> None:
    for to, found in enumerate(ranks.run(world, told, table_name())):
        for size, (words, bodies, _) in zip((5, 5, 90, 1, 0), found, strict=True):
            assert words == [[rank, to] for rank in range(world)]
            assert bodies == [[rank * 10 + to] * (8 * size * (rank + 1)) for rank in range(world)]
        heads = 8 * 4 * (world - 1)
        assert found[0][2] == heads, "there is no room at first"
        assert found[2][2] == heads, "a message larger than its room leaves none over"


def test_a_message_has_room_for_an_eighth_more_than_the_largest() -> None:
    assert [exchange._with_room(size) for size in (0, 8, 80, 800)] == [0, 16, 96, 904]


def paced(seconds: dict[bool, float], monkeypatch: pytest.MonkeyPatch, batches: int, others: list[int]) -> list[bool]:
    """Which batches are exchanged ahead where each way takes some seconds; one batch is always begun ahead."""
    clock = [0.0]
    monkeypatch.setattr(pipeline, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    own, chosen, note = ExchangeTuner(), [], 0
    for number in range(batches):
        if own.is_decided_now and note:
            own.decide([note, *others])
        chosen.append(own.begin())
        note = own.note or note
        if number:
            clock[0] += seconds[chosen[number - 1]]
            own.finish()
    return chosen


@pytest.mark.parametrize(("ahead", "wins"), [(0.9, True), (0.99, False), (1.2, False)])
def test_the_faster_way_is_taken(ahead: float, wins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = paced({True: ahead, False: 1.0}, monkeypatch, 100, [])
    assert chosen[:14] == [True] * 6 + [False] * 6 + [True, False]
    assert chosen[14:64] == [wins] * 50
    assert chosen[64:78] == chosen[:14], "it is tried again"
    assert chosen[78:] == [wins] * 22


def test_the_ranks_together_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = int(2e6) << 31 | int(1e6)
    assert not any(paced({True: 0.9, False: 1.0}, monkeypatch, 40, [slow])[14:])
    assert not any(paced({True: 0.9, False: 1.0}, monkeypatch, 40, [0])[14:]), "a rank has measured nothing"


def test_time_is_measured(table_name: Callable[[], str]) -> None:
    own = ExchangeTuner()
    for _ in range(4):
        own.begin()
    for _ in range(3):
        time.sleep(0.002)
        own.finish()
    assert all(0.002 <= seconds < 60 for seconds in own._times[True])
    assert len(own._times[True]) == 2
    assert FLAGS == 16
