"""`torch.compile` against eager: no update is dropped, none is moved past a read, nothing is compiled twice.

Compiler caches do not know of effects, so they stay off here.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from recstore_ops import DistEmbedding, DistEmbeddingBag, SparseOptimizer, Table, TableConfig
from recstore_ops.ops import operators

pytestmark = [pytest.mark.tier("test"), pytest.mark.usefixtures("fresh_compiler")]

NUM_TABLES = 26
STEPS = 50
DIM = 4


def read_update_read(handle: Tensor, ids: Tensor, grads: Tensor) -> Tensor:
    before = torch.ops.recstore.emb_read.table(handle, ids, DIM)
    torch.ops.recstore.emb_update.table(handle, ids, grads)
    return torch.ops.recstore.emb_read.table(handle, ids, DIM) - before


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.tier("all"))])
def test_read_update_read_sees_the_update_between_the_reads(backend: str, table_name: Callable[[], str]) -> None:
    table = Table(table_name(), DIM, TableConfig(optimizer={"kind": "sgd", "lr": 0.1}))
    ids, grads = torch.arange(6), torch.ones(6, DIM)
    compiled = torch.compile(read_update_read, backend=backend, fullgraph=True)

    moved = compiled(table.handle, ids, grads)

    assert torch.allclose(moved, torch.full((6, DIM), -0.1))
    assert table.statistics()["step"] == 1


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.tier("all"))])
def test_the_two_argument_ops_keep_their_order_too(backend: str) -> None:
    dim = 17  # No other test writes to this default table.

    def step(ids: Tensor, grads: Tensor) -> Tensor:
        before = torch.ops.recstore.emb_read(ids, dim)
        torch.ops.recstore.emb_update(ids, grads)
        return torch.ops.recstore.emb_read(ids, dim) - before

    ids, grads = torch.arange(6), torch.ones(6, dim)
    moved = torch.compile(step, backend=backend, fullgraph=True)(ids, grads)

    assert torch.allclose(moved, torch.full((6, dim), -0.01), atol=1e-6)


def test_an_update_whose_result_nobody_uses_is_not_dropped(table_name: Callable[[], str]) -> None:
    table = Table(table_name(), DIM)

    @torch.compile(fullgraph=True)
    def change(ids: Tensor, rows: Tensor) -> Tensor:
        torch.ops.recstore.emb_write.table(table.handle, ids, rows)
        torch.ops.recstore.hashtable_delete(table.handle, ids[:1])
        return ids + 1

    change(torch.arange(4), torch.ones(4, DIM))

    assert operators.hashtable_ids(table.handle).tolist() == [1, 2, 3]


def test_every_stateful_overload_is_registered_as_ordered() -> None:
    from torch._higher_order_ops.effects import _get_effect

    for name in operators.EFFECTFUL:
        packet, _, overload = name.removeprefix("recstore::").partition(".")
        op = getattr(getattr(torch.ops.recstore, packet), overload or "default")
        assert _get_effect(op) is not None, name


class Fields(nn.Module):
    """26 tables and a linear layer, as in a model over Criteo's columns."""

    def __init__(self, name: str, lr: float = 0.1) -> None:
        super().__init__()
        self.tables: Any = nn.ModuleList(
            DistEmbedding(None, DIM, f"{name}/{field}", optimizer={"kind": "adagrad", "lr": lr})
            for field in range(NUM_TABLES)
        )
        self.head = nn.Linear(NUM_TABLES * DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        rows = [table(ids[:, field]) for field, table in enumerate(self.tables)]
        return self.head(torch.cat(rows, dim=1)).squeeze(1)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randint(-30, 30, (32, NUM_TABLES), generator=generator),
            torch.randint(0, 2, (32,), generator=generator).float(),
        )
        for _ in range(count)
    ]


def train(model: nn.Module, forward: Callable[[Tensor], Tensor], steps: int) -> list[float]:
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    sparse = SparseOptimizer(modules=[model])
    losses = []
    for ids, labels in batches(steps):
        dense.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(forward(ids), labels)
        loss.backward()
        dense.step()
        sparse.step()
        losses.append(loss.item())
    return losses


class GraphCounter:
    """Compiles with `aot_eager` or `inductor` and counts the graphs of each direction."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.graphs = {"forward": 0, "backward": 0}

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        if self.backend == "inductor":
            return compile_fx(graph, inputs, inner_compile=self._inductor)
        return aot_autograd(fw_compiler=self._eager("forward"), bw_compiler=self._eager("backward"))(graph, inputs)

    def _inductor(self, graph: torch.fx.GraphModule, inputs: list[Tensor], **options: Any) -> Any:
        self.graphs["backward" if options.get("is_backward") else "forward"] += 1
        return compile_fx_inner(graph, inputs, **options)

    def _eager(self, direction: str) -> Callable[..., object]:
        def compile_one(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
            self.graphs[direction] += 1
            return make_boxed_func(graph.forward)

        return compile_one


def paired_models(table_name: Callable[[], str]) -> tuple[Fields, Fields]:
    eager, compiled = Fields(table_name()), Fields(table_name())
    compiled.load_state_dict(eager.state_dict())
    ids = torch.arange(-30, 30)
    for ours, theirs in zip(compiled.tables, eager.tables, strict=True):
        ours.weight[ids] = theirs.weight[ids]
        theirs.weight[ids] = theirs.weight[ids]
    return eager, compiled


def assert_equal_tables(eager: Fields, compiled: Fields) -> None:
    ids = torch.arange(-30, 30)
    for ours, theirs in zip(compiled.tables, eager.tables, strict=True):
        assert torch.allclose(ours.weight[ids], theirs.weight[ids], atol=1e-5)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.tier("all"))])
def test_a_model_compiled_whole_trains_as_eager(backend: str, table_name: Callable[[], str]) -> None:
    eager, model = paired_models(table_name)
    counter = GraphCounter(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True)

    with torch._dynamo.config.patch(error_on_recompile=True):
        losses = train(model, compiled, STEPS)

    assert counter.graphs == {"forward": 1, "backward": 1}
    assert losses == pytest.approx(train(eager, eager, STEPS), abs=1e-5)
    assert_equal_tables(eager, model)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.tier("all"))])
def test_one_graph_serves_26_tables_compiled_one_by_one(backend: str, table_name: Callable[[], str]) -> None:
    eager, model = paired_models(table_name)
    counter = GraphCounter(backend)
    compiled = [torch.compile(table, backend=counter, fullgraph=True) for table in model.tables]

    def forward(ids: Tensor) -> Tensor:
        rows = [table(ids[:, field]) for field, table in enumerate(compiled)]
        return model.head(torch.cat(rows, dim=1)).squeeze(1)

    with torch._dynamo.config.patch(error_on_recompile=True):
        losses = train(model, forward, STEPS)

    assert counter.graphs == {"forward": 1, "backward": 1}
    assert losses == pytest.approx(train(eager, eager, STEPS), abs=1e-5)
    assert_equal_tables(eager, model)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_compiled_bag_trains_as_eager(mode: str, table_name: Callable[[], str]) -> None:
    bags = [DistEmbeddingBag(20, DIM, table_name(), mode=mode, padding_idx=3) for _ in range(2)]  # type: ignore[arg-type]
    ids = torch.randint(0, 20, (40,))
    offsets = torch.tensor([0, 5, 5, 17])
    rows = bags[0].weight[torch.arange(20)]
    outputs = []
    for bag in bags:
        bag.weight[torch.arange(20)] = rows
        forward = torch.compile(bag, fullgraph=True) if bag is bags[1] else bag
        optimizer = SparseOptimizer(modules=[bag], lr=0.1)
        for _ in range(3):
            forward(ids, offsets).square().sum().backward()
            optimizer.step()
        outputs.append(bag.weight[torch.arange(20)])
    assert torch.allclose(outputs[0], outputs[1], atol=1e-6)
    assert torch.equal(outputs[0][3], rows[3])


def test_compiled_bag_weights_get_their_gradient(table_name: Callable[[], str]) -> None:
    bag = DistEmbeddingBag(20, DIM, table_name(), mode="sum")
    ids, offsets = torch.randint(0, 20, (12,)), torch.tensor([0, 4])
    grads = []
    for forward in (bag, torch.compile(bag, fullgraph=True)):
        weights = torch.linspace(-1, 1, 12).requires_grad_()
        forward(ids, offsets, weights).square().sum().backward()
        grads.append(weights.grad)
    assert torch.allclose(*grads, atol=1e-6)


def test_several_backwards_before_a_step_are_one_step_compiled_too(table_name: Callable[[], str]) -> None:
    config = {"kind": "adagrad", "lr": 0.1}
    table = DistEmbedding(None, 1, table_name(), optimizer=config, initializer="zeros")
    compiled = torch.compile(table, fullgraph=True)
    ids = torch.tensor([7, 7])
    for scale in (0.05, 0.1):
        (compiled(ids) * scale).sum().backward()

    SparseOptimizer(modules=[table]).step()

    # 0.3 / sqrt(0.3^2) = 1: one step of the learning rate.
    assert table(ids).flatten().tolist() == pytest.approx([-0.1, -0.1])


def test_dim_size_and_batch_changes_keep_results_right(table_name: Callable[[], str]) -> None:
    table = DistEmbedding(None, DIM, table_name())
    compiled = torch.compile(table, fullgraph=True, dynamic=True)
    for shape in [(3,), (5,), (2, 4), (0,), ()]:
        ids = torch.randint(-9, 9, shape)
        rows = compiled(ids)
        rows.sum().backward()
        assert torch.equal(rows, table(ids))


def test_a_whole_training_step_with_the_optimizer_keeps_its_order(table_name: Callable[[], str]) -> None:
    table = Table(table_name(), DIM, TableConfig(optimizer={"kind": "sgd", "lr": 0.1}))

    @torch.compile(fullgraph=True)
    def step(ids: Tensor, grads: Tensor) -> Tensor:
        before = operators.emb_read(table.handle, ids, DIM)
        operators.accept_grad(table.collector, table.handle, ids, grads)
        operators.apply_grads([table.collector])
        return operators.emb_read(table.handle, ids, DIM) - before

    for _ in range(3):
        moved = step(torch.arange(5), torch.ones(5, DIM))
        assert torch.allclose(moved, torch.full((5, DIM), -0.1))
