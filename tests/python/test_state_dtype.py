"""`state_dtype`: what a rule keeps of a row, in 16 or 8 bits."""

from collections.abc import Callable

import pytest
import torch

from recstore_ops import DistEmbedding, RecStoreClient, SparseOptimizer, Table, table_statistics

pytestmark = pytest.mark.tier("quick")

DIM = 32
IDS = torch.arange(40)
# The kinds that keep something for each element, and slots of theirs that no step may make zero.
KINDS = {
    "adagrad": ["state_sum"],
    "adam": ["exp_avg_sq"],
    "adamw": ["exp_avg_sq"],
    "rowwise_adam": [],
    "lamb": ["exp_avg_sq"],
    "lion": [],
    "rmsprop": ["square_avg"],
    "adadelta": ["square_avg", "acc_delta"],
    "ftrl": ["n"],
}


def trained(name: str, kind: str, state_dtype: torch.dtype | str, steps: int = 40) -> DistEmbedding:
    """Rows that are drawn to a target by steps of a gradient with noise."""
    module = DistEmbedding(None, DIM, name, optimizer={"kind": kind, "lr": 0.05}, state_dtype=state_dtype, seed=3)
    optimizer = SparseOptimizer(modules=[module])
    noise = torch.Generator().manual_seed(1)
    target = torch.linspace(-1, 1, DIM)
    for _ in range(steps):
        ids = IDS[torch.rand(len(IDS), generator=noise) < 0.7]
        rows = module(ids)
        gradient = rows.detach() - target + 0.1 * torch.randn(rows.shape, generator=noise)
        rows.backward(gradient)
        optimizer.step()
    return module


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("state_dtype", "most"), [(torch.bfloat16, 0.03), ("float8", 0.25)])
def test_training_is_about_as_in_single_precision(
    kind: str, state_dtype: torch.dtype | str, most: float, table_name: Callable[[], str]
) -> None:
    name = table_name()
    exact = trained(name, kind, torch.float32)(IDS).detach()
    RecStoreClient().drop(name)
    module = trained(name, kind, state_dtype)
    narrow = module(IDS).detach()
    moved = (exact - trained(table_name(), kind, torch.float32, 0)(IDS).detach()).norm()
    assert 0 < (narrow - exact).norm() < most * moved
    for slot in KINDS[kind]:
        values = torch.ops.recstore.hashtable_slot(Table.open(name).handle, IDS, slot)
        assert values.shape == (len(IDS), DIM)
        assert (values > 0).all()


def test_it_takes_the_memory_that_it_says(table_name: Callable[[], str]) -> None:
    def slot_bytes(state_dtype: torch.dtype | str) -> int:
        module = trained(table_name(), "adam", state_dtype, 1)
        return table_statistics(module.name)["slot_bytes"]

    exact, half, quarter = (slot_bytes(dtype) for dtype in (torch.float32, torch.bfloat16, "float8"))
    assert half == exact / 2
    assert quarter < 0.3 * exact


def test_a_table_is_not_opened_again_with_another_one(table_name: Callable[[], str]) -> None:
    name = table_name()
    trained(name, "adam", "bfloat16", 0)
    with pytest.raises(ValueError, match="state_dtype"):
        trained(name, "adam", "float8", 0)
