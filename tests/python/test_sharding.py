"""Tables sharded over ranks against the same tables in one process."""

from typing import Any

import pytest
import torch
from ranks import Ranks
from sharded_training import Trained, train

pytestmark = pytest.mark.tier("test")

OPTIMIZERS = {
    "sgd": 0.5,
    "adagrad": 0.3,
    "rowwise_adagrad": 0.3,
    "rmsprop": 0.05,
    "adam": 0.05,
    "adamw": 0.05,
    "rowwise_adam": 0.05,
    "lamb": 0.05,
}


def _spec(kind: str) -> dict[str, Any]:
    return {"kind": kind, "lr": OPTIMIZERS[kind]}


def _assert_same(ranks: list[Trained], alone: Trained) -> None:
    for each in ranks:
        torch.testing.assert_close(each.rows, alone.rows, rtol=0, atol=1e-5)
        assert each.step == alone.step
    assert torch.equal(torch.cat([each.first for each in ranks]), alone.first), "a lookup is equal to the bit"
    assert sum(each.num_rows for each in ranks) == alone.num_rows


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_ranks_train_as_one_process_does(ranks: Ranks, world: int, kind: str) -> None:
    name = f"as-one/{world}/{kind}"
    _assert_same(ranks.run(world, train, name, _spec(kind)), train(None, name, _spec(kind)))


@pytest.mark.parametrize("kind", ["rowwise_adagrad", "adamw", "rowwise_adam", "lamb"])
@pytest.mark.parametrize("weights", [(1, 0, 2), (0, 1, 0)])
def test_uneven_and_empty_shares_keep_one_clock(ranks: Ranks, kind: str, weights: tuple[int, ...]) -> None:
    name = f"uneven/{kind}/{weights}"
    _assert_same(ranks.run(3, train, name, _spec(kind), weights), train(None, name, _spec(kind)))


def test_a_group_of_one_is_no_group_to_the_bit(ranks: Ranks) -> None:
    (one,) = ranks.run(1, train, "alone", _spec("adam"))
    assert torch.equal(one.rows, train(None, "alone", _spec("adam")).rows)
