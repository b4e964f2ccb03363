"""A backward pass trains tables when it is about their rows, and leaves them alone when it asks for something else."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.autograd.functional import jacobian, vjp
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    HashTable,
    KeyedJaggedTensor,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
    SparseOptimizer,
    embedding,
    embedding_bag,
)
from recstore_ops.ops import asked_gradients

pytestmark = pytest.mark.tier("test")

NUM, DIM = 4, 3
IDS = torch.tensor([1, 2, 2, 3, 1])
OFFSETS = torch.tensor([0, 2, 5])
OPTIONS: dict[str, Any] = {"initializer": {"kind": "normal", "std": 1.0}, "optimizer": {"kind": "sgd", "lr": 1.0}}


class Lookup(NamedTuple):
    """A module, and the rows or sums that it gives for weights of the ids, `[5]`."""

    module: nn.Module
    forward: Callable[[Tensor], Tensor]


def batch(weights: Tensor | None = None) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a", "b"], IDS, lengths=torch.tensor([2, 0, 1, 2]), weights=weights)


def configs(name: str) -> list[dict[str, Any]]:
    """Two features of one table, and one of them of another table too, where ids are not cut in a graph."""
    return [{"name": name, "num_embeddings": NUM, "embedding_dim": DIM, "feature_names": ["a", "b"]}]


def of_embedding(name: str) -> Lookup:
    module = DistEmbedding(NUM, DIM, name, **OPTIONS)
    return Lookup(module, lambda weights: module(IDS) * weights[:, None])


def of_function(name: str) -> Lookup:
    module = DistEmbedding(NUM, DIM, name, **OPTIONS)
    return Lookup(module, lambda weights: embedding(IDS, module.table) * weights[:, None])


def of_bag(name: str) -> Lookup:
    module = DistEmbeddingBag(NUM, DIM, name, mode="sum", include_last_offset=True, **OPTIONS)
    return Lookup(module, lambda weights: module(IDS, OFFSETS, weights))


def of_padded_bag(name: str) -> Lookup:
    module = DistEmbeddingBag(NUM, DIM, name, mode="sum", padding_idx=2, include_last_offset=True, **OPTIONS)
    return Lookup(module, lambda weights: module(IDS, OFFSETS, weights))


def of_bag_function(name: str) -> Lookup:
    module = DistEmbeddingBag(NUM, DIM, name, **OPTIONS)
    return Lookup(module, lambda weights: embedding_bag(IDS, module.table, OFFSETS, "sum", weights, True))


def of_pooled(mode: str) -> Callable[[str], Lookup]:
    def make(name: str) -> Lookup:
        module: Any = DistEmbeddingBag(NUM, DIM, name, mode=mode, include_last_offset=True, **OPTIONS)  # type: ignore[arg-type]
        return Lookup(module, lambda weights: module(IDS, OFFSETS) * weights[:2, None])

    return make


def of_hash_table(name: str) -> Lookup:
    module = HashTable([DIM], name, num_embeddings=NUM, **OPTIONS)
    return Lookup(module, lambda weights: module(IDS) * weights[:, None])


def of_bag_collection(fused: bool) -> Callable[[str], Lookup]:
    def make(name: str) -> Lookup:
        module = RecStoreEmbeddingBagCollection(configs(name), enable_fusion=fused, **OPTIONS)
        return Lookup(module, lambda weights: module(batch(weights)))

    return make


def of_prefetched(name: str) -> Lookup:
    module = RecStoreEmbeddingBagCollection(configs(name), **OPTIONS)

    def forward(weights: Tensor) -> Tensor:
        module.issue_fused_prefetch(batch(weights))
        return module(batch(weights))

    return Lookup(module, forward)


def of_collection(name: str) -> Lookup:
    module = RecStoreEmbeddingCollection(configs(name), **OPTIONS)

    def forward(weights: Tensor) -> Tensor:
        rows = module(batch())
        return torch.cat([rows["a"].values(), rows["b"].values()]) * weights[:, None]

    return Lookup(module, forward)


LOOKUPS: dict[str, Callable[[str], Lookup]] = {
    "DistEmbedding": of_embedding,
    "embedding": of_function,
    "DistEmbeddingBag": of_bag,
    "DistEmbeddingBag, padding_idx": of_padded_bag,
    "DistEmbeddingBag, mean": of_pooled("mean"),
    "DistEmbeddingBag, max": of_pooled("max"),
    "embedding_bag": of_bag_function,
    "HashTable": of_hash_table,
    "RecStoreEmbeddingBagCollection": of_bag_collection(True),
    "RecStoreEmbeddingBagCollection, one by one": of_bag_collection(False),
    "RecStoreEmbeddingBagCollection, prefetched": of_prefetched,
    "RecStoreEmbeddingCollection": of_collection,
}

CUTS_IDS = ("RecStoreEmbeddingBagCollection, one by one", "RecStoreEmbeddingCollection")
"""Those whose graphs cut ids feature by feature."""

NOT_COMPILED = ("RecStoreEmbeddingBagCollection, prefetched",)

Forward = Callable[[Tensor], Tensor]


def by_grad(forward: Forward, weights: Tensor) -> None:
    torch.autograd.grad(forward(weights).sum(), weights)


def by_grad_twice(forward: Forward, weights: Tensor) -> None:
    loss = forward(weights).sum()
    torch.autograd.grad(loss, weights, retain_graph=True)
    torch.autograd.grad(loss, weights)


def by_inputs(forward: Forward, weights: Tensor) -> None:
    forward(weights).sum().backward(inputs=[weights])
    weights.grad = None


def by_jacobian(forward: Forward, weights: Tensor) -> None:
    jacobian(forward, weights)


def by_vjp(forward: Forward, weights: Tensor) -> None:
    vjp(lambda each: forward(each).sum(), weights)


def by_gradcheck(forward: Forward, weights: Tensor) -> None:
    # Float32 rows: lookups are linear in the weights, so large steps are exact.
    assert torch.autograd.gradcheck(forward, weights, eps=0.5, atol=1e-4)


def by_create_graph(forward: Forward, weights: Tensor) -> None:
    torch.autograd.grad(forward(weights).sum(), weights, create_graph=True)


def by_checkpoint(forward: Forward, weights: Tensor) -> None:
    output = checkpoint(forward, weights, use_reentrant=False)
    assert isinstance(output, Tensor)
    torch.autograd.grad(output.sum(), weights)


WAYS: dict[str, Callable[[Forward, Tensor], None]] = {
    "autograd.grad": by_grad,
    "autograd.grad twice": by_grad_twice,
    "backward(inputs=)": by_inputs,
    "jacobian": by_jacobian,
    "vjp": by_vjp,
    "gradcheck": by_gradcheck,
    "create_graph": by_create_graph,
    "checkpoint": by_checkpoint,
}


@pytest.fixture
def keeps_graphs() -> Iterator[None]:
    """Without it torch refuses `retain_graph` and `create_graph` of compiled code."""
    with torch._functorch.config.patch(donated_buffer=False):
        yield


@pytest.fixture
def name(table_name: Callable[[], str]) -> str:
    return table_name()


def new_weights() -> Tensor:
    return torch.tensor([0.5, 1.5, -1.0, 2.0, 0.25], requires_grad=True)


def collected(module: Any) -> dict[int, list[float]]:
    """The gradients collected by a module of one table, by id."""
    return {
        id: grad
        for table in module.tables()
        for _, ids, grads in table.collected()
        for id, grad in zip(ids.tolist(), grads.tolist(), strict=True)
    }


def expected_gradients(lookup: Lookup) -> dict[int, list[float]]:
    """What one backward pass of the sum collects in eager mode."""
    lookup.forward(new_weights()).sum().backward()
    gradients = collected(lookup.module)
    SparseOptimizer(modules=[lookup.module]).zero_grad()
    assert collected(lookup.module) == {} != gradients
    return gradients


def compiled(kind: str, forward: Forward) -> Forward:
    graph = torch.compile(forward, backend="aot_eager", fullgraph=True)

    def run(weights: Tensor) -> Tensor:
        with torch._dynamo.config.patch(capture_scalar_outputs=kind in CUTS_IDS):
            return graph(weights)

    return run


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", LOOKUPS)
def test_what_asks_for_weights_only_collects_nothing(kind: str, way: str, name: str) -> None:
    lookup = LOOKUPS[kind](name)
    expected = expected_gradients(lookup)
    WAYS[way](lookup.forward, new_weights())
    assert collected(lookup.module) == {}
    lookup.forward(new_weights()).sum().backward()
    assert collected(lookup.module) == expected


@pytest.mark.usefixtures("keeps_graphs")
@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("gradcheck", "checkpoint")])
@pytest.mark.parametrize("kind", [kind for kind in LOOKUPS if kind not in NOT_COMPILED])
def test_compiled_code_collects_nothing_either(kind: str, way: str, name: str) -> None:
    lookup = LOOKUPS[kind](name)
    expected = expected_gradients(lookup)
    forward = compiled(kind, lookup.forward)
    WAYS[way](forward, new_weights())
    assert collected(lookup.module) == {}
    forward(new_weights()).sum().backward()
    assert collected(lookup.module) == expected


@pytest.mark.parametrize("kind", LOOKUPS)
def test_a_look_at_weights_before_backward_does_not_train_twice(kind: str, name: str) -> None:
    lookup = LOOKUPS[kind](name)
    expected, weights = expected_gradients(lookup), new_weights()
    optimizer = SparseOptimizer(modules=[lookup.module])
    (table,) = {table.name: table for table in lookup.module.tables()}.values()  # type: ignore[operator]
    before = embedding(torch.arange(NUM), table).detach()
    loss = lookup.forward(weights).sum()
    (of_weights,) = torch.autograd.grad(loss, weights, retain_graph=True)
    loss.backward()
    assert weights.grad is not None
    assert torch.equal(of_weights, weights.grad)
    optimizer.step()
    after = embedding(torch.arange(NUM), table).detach()
    gradients = torch.stack([torch.tensor(expected.get(id, [0.0] * DIM)) for id in range(NUM)])
    assert torch.equal(after, before - gradients)


def twice(forward: Forward, weights: Tensor) -> None:
    loss = forward(weights).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def with_weights_frozen(forward: Forward, weights: Tensor) -> None:
    forward(weights.detach()).sum().backward()


def in_reentrant_checkpoint(forward: Forward, weights: Tensor) -> None:
    output = checkpoint(forward, weights, use_reentrant=True)
    assert isinstance(output, Tensor)
    output.sum().backward()


def with_graph(forward: Forward, weights: Tensor) -> None:
    forward(weights).sum().backward(create_graph=True)


ABOUT_ROWS: dict[str, tuple[Callable[[Forward, Tensor], None], int]] = {
    "twice": (twice, 2),
    "weights without a gradient": (with_weights_frozen, 1),
    "a reentrant checkpoint": (in_reentrant_checkpoint, 1),
    "create_graph": (with_graph, 1),
}


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("way", ABOUT_ROWS)
@pytest.mark.parametrize("kind", LOOKUPS)
def test_passes_about_rows_collect_them(kind: str, way: str, name: str) -> None:
    lookup, (run, times) = LOOKUPS[kind](name), ABOUT_ROWS[way]
    expected = expected_gradients(lookup)
    run(lookup.forward, new_weights())
    assert collected(lookup.module) == {id: [times * value for value in grad] for id, grad in expected.items()}


def test_bags_are_as_torch_s_when_their_weights_are_looked_at(name: str) -> None:
    ours = DistEmbeddingBag(NUM, DIM, name, mode="sum", init_func=lambda *_: torch.ones(NUM, DIM), lr=1.0)
    theirs = nn.EmbeddingBag(NUM, DIM, mode="sum")
    nn.init.ones_(theirs.weight)
    rows = []
    for bag, optimizer in (
        (ours, SparseOptimizer(modules=[ours])),
        (theirs, torch.optim.SGD(theirs.parameters(), 1.0)),
    ):
        weights = new_weights()
        loss = bag(IDS, OFFSETS[:-1], weights).sum()
        torch.autograd.grad(loss, weights, retain_graph=True)
        loss.backward()
        optimizer.step()
        rows.append(bag.weight[torch.arange(NUM)].detach())
    assert torch.equal(*rows)


WEIGHTED = [kind for kind in LOOKUPS if "Bag" in kind and "mean" not in kind and "max" not in kind] + ["embedding_bag"]


def dense_output(kind: str, rows: Tensor, weights: Tensor) -> Tensor:
    """What a weighted lookup gives, of a matrix of all rows."""
    offsets = torch.tensor([0, 2, 2, 3, 5]) if "Collection" in kind else OFFSETS
    counted = (IDS != 2).to(torch.float32) if "padding" in kind else 1.0
    weighted = rows[IDS] * (weights * counted)[:, None]
    bag_N = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
    return torch.zeros(len(offsets) - 1, DIM).index_add(0, bag_N, weighted)


@pytest.mark.parametrize("kind", WEIGHTED)
def test_gradients_of_gradients_of_weights_reach_rows_weights_and_what_is_above(kind: str, name: str) -> None:
    lookup, results = LOOKUPS[kind](name), []
    (table,) = {table.name: table for table in lookup.module.tables()}.values()  # type: ignore[operator]
    dense_rows = embedding(torch.arange(NUM), table).detach().requires_grad_()
    for forward in (lookup.forward, lambda weights: dense_output(kind, dense_rows, weights)):
        weights = new_weights()
        (gradient,) = torch.autograd.grad((forward(weights) ** 2).sum(), weights, create_graph=True)
        (gradient**2).sum().backward()
        assert weights.grad is not None
        results.append(weights.grad)
    assert torch.allclose(*results, rtol=1e-4)
    ours, theirs = collected(lookup.module), dense_rows.grad
    assert theirs is not None
    for id in range(NUM):
        assert torch.allclose(torch.tensor(ours.get(id, [0.0] * DIM)), theirs[id], rtol=1e-4), id


def test_a_penalty_on_the_gradient_of_weights_trains_rows(name: str) -> None:
    bag = DistEmbeddingBag(NUM, 2, name, mode="sum", init_func=lambda *_: torch.ones(NUM, 2), lr=1.0)
    weights = torch.ones(2, requires_grad=True)
    (gradient,) = torch.autograd.grad(
        bag(torch.tensor([1, 2]), torch.tensor([0]), weights).sum(), weights, create_graph=True
    )
    (gradient**2).sum().backward()
    # d/drow of (row[0] + row[1])^2 at ones.
    assert collected(bag) == {1: [4.0, 4.0], 2: [4.0, 4.0]}


@pytest.mark.usefixtures("keeps_graphs")
@pytest.mark.parametrize("kind", [kind for kind in WEIGHTED if kind not in NOT_COMPILED])
def test_compiled_code_refuses_gradients_of_gradients(kind: str, name: str) -> None:
    lookup = LOOKUPS[kind](name)
    forward, weights = compiled(kind, lookup.forward), new_weights()
    loss = forward(weights).sum()
    (gradient,) = torch.autograd.grad(loss, weights, create_graph=True, retain_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        (loss + (gradient**2).sum()).backward()


def test_operators_that_ask_pass_opcheck(name: str) -> None:
    table = DistEmbedding(NUM, DIM, name).table
    handle, collector, rows = table.handle, table.collector, torch.ones(len(IDS), DIM)
    anchor = torch.zeros(())
    torch.library.opcheck(asked_gradients.accept_asked_grad, (anchor, collector, handle, IDS, rows))
    torch.library.opcheck(
        asked_gradients.accept_asked_bag_grads,
        (anchor, [collector], [handle], IDS, OFFSETS, torch.ones(2, DIM), [DIM], torch.ones(len(IDS))),
    )
    assert table.collected()


def test_dense_parameters_before_a_table_can_be_asked_for_alone(name: str) -> None:
    module, before, after = DistEmbedding(NUM, DIM, name), nn.Parameter(torch.ones(())), nn.Linear(DIM, 1)
    loss = after(module(IDS) * before).sum()
    loss.backward(inputs=list(after.parameters()), retain_graph=True)
    loss.backward(inputs=[before], retain_graph=True)
    assert collected(module) == {}
    functional.mse_loss(loss, torch.zeros(())).backward()
    assert len(collected(module)) == 3
