"""Lookups within `torch.utils.checkpoint`, in eager mode and compiled: rows collect once, whatever is recomputed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from module_kinds import DIM, KINDS, NUM, Kind, Pair, each_kind, pair
from tiers import cells
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

pytestmark = pytest.mark.tier("test")

__all__ = ["pair"]


def recompute_all(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


def save_all(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def prefer_to_recompute(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def selective(policy: Callable[..., CheckpointPolicy]) -> Callable[..., Any]:
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return lambda function, *args: checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


WAYS: dict[str, Callable[..., Any]] = {
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "no state of random numbers": partial(checkpoint, use_reentrant=False, preserve_rng_state=False),
    "no early stop": partial(checkpoint, use_reentrant=False, early_stop=False),
    "all recomputed": selective(recompute_all),
    "all saved": selective(save_all),
    "recomputed if wanted": selective(prefer_to_recompute),
}


def losses(pair: Pair, way: Callable[..., Any], scale: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of ours through a checkpoint, and of torch's without."""
    for top in (pair.top, pair.rival_top):
        nn.init.ones_(top.weight)

    def region(scale: Tensor) -> Tensor:
        return torch.tanh(pair.top(pair.outputs()[0]) * scale)

    return way(region, scale).sum(), torch.tanh(pair.rival_top(pair.outputs()[1]) * scale).sum()


def assert_collected_once(pair: Pair, scale: Tensor, compiled: Callable[..., Any] | None, way: Any) -> None:
    with torch.no_grad():
        pair.rival_top.bias.copy_(pair.top.bias)
    for _ in range(2):
        ours, theirs = losses(pair, way if compiled is None else compiled(way), scale)
        ours.backward()
        theirs.backward()
        assert torch.allclose(ours, theirs)
        grads = torch.zeros(NUM, DIM)
        for table in pair.module.tables():
            for _, ids, part in table.collected():
                grads.index_add_(0, ids, part)
        assert pair.rival.weight.grad is not None
        torch.testing.assert_close(grads, pair.rival.weight.grad)
        torch.testing.assert_close(pair.top.weight.grad, pair.rival_top.weight.grad)
    pair.step()
    torch.testing.assert_close(pair.rows(), pair.rival.weight.detach())


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@each_kind
def test_rows_collect_once_in_a_checkpoint(pair: Pair, kind: Kind, way: Callable[..., Any]) -> None:
    assert_collected_once(pair, torch.ones((), requires_grad=True), None, way)


def compiled(backend: str) -> Callable[..., Any]:
    torch._dynamo.reset()
    return lambda way: lambda region, scale: torch.compile(lambda scale: way(region, scale), backend=backend)(scale)


def compiled_before_a_change(way: str, kind: str) -> bool:
    """Every kind in one way, and one kind in every way."""
    return way == "not reentrant" or kind == "DistEmbeddingBag"


@pytest.mark.filterwarnings("ignore:.*context_fn.*")
@pytest.mark.parametrize(
    ("way", "kind"),
    [
        pytest.param(
            way,
            KINDS[kind],
            id=f"{kind}-{way}",
            marks=() if compiled_before_a_change(way, kind) else pytest.mark.tier("all"),
        )
        for kind in KINDS
        for way in WAYS
        if way != "no early stop"
    ],
)
def test_rows_collect_once_in_a_compiled_checkpoint(pair: Pair, kind: Kind, way: str) -> None:
    assert_collected_once(pair, torch.ones((), requires_grad=True), compiled("aot_eager"), WAYS[way])


@pytest.mark.parametrize("kind", cells(KINDS, "DistEmbedding", "RecStoreEmbeddingBagCollection"))
def test_a_compiled_checkpoint_over_the_dense_part_collects_once(pair: Pair, kind: Kind) -> None:
    def around_top(region: Any, scale: Tensor) -> Tensor:
        rows = pair.outputs()[0]
        return checkpoint(lambda rows: torch.tanh(pair.top(rows) * scale), rows, use_reentrant=False)  # type: ignore[return-value]

    assert_collected_once(pair, torch.ones((), requires_grad=True), compiled("aot_eager"), around_top)


def test_parts_of_a_sequence_collect_once(table_name: Callable[[], str]) -> None:
    pair = Pair(KINDS["DistEmbedding"], table_name())
    nn.init.ones_(pair.top.weight)

    class Rows(nn.Module):
        def forward(self, scale: Tensor) -> Tensor:
            return pair.outputs()[0] * scale

    sequence = nn.Sequential(Rows(), pair.top, nn.Tanh(), nn.Identity())
    checkpoint_sequential(sequence, 2, torch.ones((), requires_grad=True), use_reentrant=False).sum().backward()
    ((_, _, checkpointed),) = pair.table.collected()
    pair.optimizer.zero_grad()
    sequence(torch.ones((), requires_grad=True)).sum().backward()
    ((_, _, plain),) = pair.table.collected()
    assert torch.equal(checkpointed, plain)
