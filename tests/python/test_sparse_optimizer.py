"""`SparseOptimizer`: what a step is, which learning rate it has, and what a refused step leaves."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    SparseOptimizer,
    Table,
    TableConfig,
    embedding,
    get_kv_client,
    table_statistics,
)
from recstore_ops.ops import operators

pytestmark = pytest.mark.tier("quick")

IDS = torch.tensor([1, 2])
Module = DistEmbedding
NewModule = Callable[..., Module]


@pytest.fixture
def new_module(table_name: Callable[[], str]) -> NewModule:
    """Makes modules of dim 1 whose rows start at zero; under a name of its own where none is given."""

    def new(name: str | None = None, **options: Any) -> Module:
        keywords: dict[str, Any] = {"initializer": "zeros", **options}
        return DistEmbedding(None, 1, name or table_name(), **keywords)

    return new


def collect(*modules: Module, gradient: float = 1.0, ids: Tensor = IDS) -> None:
    """Lets modules collect `gradient` for each id."""
    for module in modules:
        (module(ids) * gradient).sum().backward()


def row(module: Module, id: int = 1) -> float:
    return module.weight[id].item()


def steps(module: Module) -> int:
    return module.table.statistics()["step"]


def rate(module: Module) -> float:
    return module.table.statistics()["learning_rate"]


def step_taken(module: Module, optimizer: SparseOptimizer, modules: list[Module] | None = None) -> float:
    """How far one step with a gradient of 1 moves a row: by SGD the learning rate."""
    before = row(module)
    collect(module)
    optimizer.step(modules)
    return before - row(module)


def test_a_step_applies_what_was_collected_and_empties_the_traces(new_module: NewModule) -> None:
    module = new_module(lr=0.5)
    optimizer = SparseOptimizer(modules=[module])
    collect(module, gradient=3.0)

    optimizer.step()

    assert (row(module, 1), row(module, 2), row(module, 3)) == (-1.5, -1.5, 0.0)
    assert module._trace == []
    optimizer.step()
    assert (row(module), steps(module)) == (-1.5, 1)


def test_several_backward_passes_are_one_step_per_distinct_id(new_module: NewModule) -> None:
    module = new_module(optimizer={"kind": "adagrad", "lr": 1.0})
    for _ in range(3):
        collect(module, ids=torch.tensor([1, 2, 1]))
    SparseOptimizer(modules=[module]).step()
    # lr * g / sqrt(g^2) is 1 whatever g is, in one step; in several it would be more.
    assert row(module, 1) == pytest.approx(-1.0)
    assert row(module, 2) == pytest.approx(-1.0)
    statistics = module.table.statistics()
    assert (statistics["step"], statistics["updates"]) == (1, 2)


def test_modules_that_share_a_table_take_one_step_per_distinct_id(
    new_module: NewModule, table_name: Callable[[], str]
) -> None:
    name, adagrad = table_name(), {"kind": "adagrad", "lr": 1.0}
    first, second = (new_module(name, optimizer=adagrad) for _ in range(2))
    bag = DistEmbeddingBag(None, 1, name, "sum", initializer="zeros", optimizer=adagrad)
    collect(first, second)
    bag(torch.tensor([[1, 3]])).sum().backward()

    SparseOptimizer(modules=[first, second, bag]).step()

    assert [row(first, id) for id in (1, 2, 3)] == pytest.approx([-1.0] * 3)
    assert (steps(first), first.table.statistics()["updates"]) == (1, 3)
    assert first._trace == second._trace == bag._trace == []


@pytest.mark.parametrize(
    "wrap",
    [
        lambda module: [module],
        lambda module: module,
        lambda module: (one for one in [module]),
        lambda module: nn.ModuleList([nn.ModuleDict({"a": module}), nn.Linear(1, 1)]),
        lambda module: [module, module, nn.Sequential(module)],
        lambda module: module.table,
        lambda module: [module.table],
    ],
    ids=["list", "module", "generator", "nested", "repeated", "table", "tables"],
)
def test_a_step_finds_the_tables_of_all_forms_of_modules(wrap: Callable[[Module], Any], new_module: NewModule) -> None:
    at_construction, at_the_step = new_module(lr=1.0), new_module(lr=1.0)
    collect(at_construction, at_the_step)
    SparseOptimizer(modules=wrap(at_construction)).step()
    SparseOptimizer().step(wrap(at_the_step))
    assert (row(at_construction), row(at_the_step)) == (-1.0, -1.0)


def test_a_step_of_some_modules_leaves_the_others(new_module: NewModule) -> None:
    first, second = new_module(lr=1.0), new_module(lr=1.0)
    optimizer = SparseOptimizer(modules=[first, second])
    collect(first, second)
    optimizer.step([first])
    assert (row(first), row(second), len(second._trace)) == (-1.0, 0.0, 1)
    optimizer.step()
    assert (row(first), row(second)) == (-1.0, -1.0)


def test_the_functional_form_is_stepped_through_its_table(table_name: Callable[[], str]) -> None:
    config = TableConfig(initializer={"kind": "zeros"}, optimizer={"kind": "sgd", "lr": 1.0})
    table = Table(table_name(), 1, config)
    embedding(IDS, table).sum().backward()
    SparseOptimizer(modules=table).step()
    assert operators.emb_read(table.handle, IDS, 1).tolist() == [[-1.0], [-1.0]]


def test_a_table_without_gradients_keeps_its_step(new_module: NewModule) -> None:
    busy, idle = new_module(), new_module()
    optimizer = SparseOptimizer(modules=[busy, idle])
    for _ in range(3):
        collect(busy)
        optimizer.step()
    assert (steps(busy), steps(idle)) == (3, 0)


@pytest.mark.parametrize("ids", [torch.empty(0, dtype=torch.int64), torch.tensor([7, 7])])
def test_a_batch_without_trained_ids_counts_as_a_step(ids: Tensor, new_module: NewModule) -> None:
    module = new_module(padding_idx=7, optimizer={"kind": "adam", "lr": 0.1})
    optimizer = SparseOptimizer(modules=[module])
    collect(module, ids=ids)
    optimizer.step()
    assert (steps(module), module.table.statistics()["updates"]) == (1, 0)


def test_zero_grad_forgets_the_traces_of_the_modules(new_module: NewModule) -> None:
    ours, others = new_module(lr=1.0), new_module(lr=1.0)
    optimizer = SparseOptimizer(modules=[ours])
    collect(ours, others)

    optimizer.zero_grad()

    assert (ours._trace, len(others._trace)) == ([], 1)
    optimizer.step()
    assert (row(ours), steps(ours)) == (0.0, 0)
    with pytest.raises(ValueError, match="cannot keep zeros"):
        optimizer.zero_grad(set_to_none=False)


def test_zero_grad_forgets_the_traces_of_modules_once_stepped(new_module: NewModule) -> None:
    module = new_module(lr=1.0)
    optimizer = SparseOptimizer()
    assert step_taken(module, optimizer, [module]) == 1.0
    collect(module)
    optimizer.zero_grad()
    assert module._trace == []


def test_a_closure_computes_the_loss_with_gradients_before_the_step(new_module: NewModule) -> None:
    module = new_module(lr=1.0)
    optimizer = SparseOptimizer(modules=[module])
    collect(module, gradient=100.0)

    def closure() -> float:
        optimizer.zero_grad()
        loss = module(IDS).sum() + 5
        loss.backward()
        return loss.item()

    with torch.no_grad():
        assert optimizer.step(closure=closure) == 5.0
        assert optimizer.step([module], closure) == 3.0
    assert row(module) == -2.0
    assert optimizer.step() is None


def test_an_optimizer_needs_modules_with_tables(new_module: NewModule) -> None:
    with pytest.raises(ValueError, match="needs modules, here or at construction"):
        SparseOptimizer().step()
    with pytest.raises(ValueError, match="without any table"):
        SparseOptimizer(modules=[nn.Linear(1, 1)])
    stranger = new_module()
    collect(stranger)
    with pytest.raises(ValueError, match=f'table "{stranger.name}"'):
        SparseOptimizer(modules=[new_module()]).step([stranger])
    assert (len(stranger._trace), steps(stranger)) == (1, 0)


# Learning rates


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0.01),
        ({"lr": 0.5}, 0.5),
        ({"optimizer": "sgd"}, 0.01),
        ({"optimizer": {"kind": "sgd"}, "lr": 0.5}, 0.5),
        ({"optimizer": {"kind": "sgd", "lr": 0.25}}, 0.25),
        ({"optimizer": {"kind": "sgd", "lr": 0.25}, "lr": 0.5}, 0.25),
    ],
)
@pytest.mark.parametrize("at_construction", [True, False])
def test_without_a_rate_of_the_optimizer_the_tables_own_counts(
    options: dict[str, Any], expected: float, at_construction: bool, new_module: NewModule
) -> None:
    module = new_module(**options)
    optimizer = SparseOptimizer(modules=[module] if at_construction else None)
    assert step_taken(module, optimizer, [module]) == pytest.approx(expected)


@pytest.mark.parametrize("at_construction", [True, False])
def test_the_optimizers_rate_comes_before_the_tables(at_construction: bool, new_module: NewModule) -> None:
    module = new_module(optimizer={"kind": "sgd", "lr": 0.25}, lr=0.5)
    optimizer = SparseOptimizer(lr=2.0, modules=[module] if at_construction else None)
    assert step_taken(module, optimizer, [module]) == 2.0
    assert table_statistics(module.name)["learning_rate_was_set"] is False


@pytest.mark.parametrize("at_construction", [True, False])
@pytest.mark.parametrize("when", ["before", "after", "later"])
def test_a_rate_set_by_hand_comes_first(when: str, at_construction: bool, new_module: NewModule) -> None:
    module = new_module(lr=0.5)
    if when == "before":
        get_kv_client().set_learning_rate(module.name, 4.0)
    optimizer = SparseOptimizer(lr=2.0, modules=[module] if at_construction else None)
    if when == "later":
        assert step_taken(module, optimizer, [module]) == 2.0
    if when != "before":
        get_kv_client().set_learning_rate(module.name, 4.0)
    assert step_taken(module, optimizer, [module]) == 4.0
    assert step_taken(module, optimizer, [module]) == 4.0


def test_a_rate_of_zero_moves_nothing(new_module: NewModule) -> None:
    module = new_module(lr=1.0)
    assert step_taken(module, SparseOptimizer(lr=0.0, modules=[module])) == 0.0


@pytest.mark.parametrize("lr", [-1.0, float("nan")])
def test_a_rate_below_zero_is_refused(lr: float, new_module: NewModule) -> None:
    module = new_module(lr=0.5)
    with pytest.raises(ValueError, match="learning rate must"):
        SparseOptimizer(lr=lr, modules=[module])
    assert rate(module) == 0.5


def test_every_table_has_a_group_with_its_own_rate(new_module: NewModule, table_name: Callable[[], str]) -> None:
    shared = table_name()
    modules = [new_module(lr=0.5), new_module(shared, lr=0.25), new_module(shared, lr=0.25)]
    optimizer = SparseOptimizer(modules=modules)
    rates = {group["table"]: group["lr"] for group in optimizer.param_groups}
    assert rates == {modules[0].name: 0.5, shared: 0.25}

    optimizer.param_groups[1]["lr"] = 1.0

    assert step_taken(modules[0], optimizer) == 0.5
    assert step_taken(modules[1], optimizer) == 1.0


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=4),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: (epoch + 1) / 4),
    "ConstantLR": lambda optimizer: lr_scheduler.ConstantLR(optimizer, factor=0.25, total_iters=9),
}


@pytest.mark.parametrize("at_construction", [True, False])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_changes_the_step_as_it_does_in_torch(
    kind: str, at_construction: bool, new_module: NewModule
) -> None:
    module, theirs = new_module(lr=0.5), nn.Parameter(torch.zeros(1))
    ours = SparseOptimizer(lr=1.0, modules=[module] if at_construction else None)
    rival = torch.optim.SGD([theirs], lr=1.0)
    schedulers = [SCHEDULERS[kind](ours), SCHEDULERS[kind](rival)]

    for _ in range(6):
        taken = step_taken(module, ours, [module])
        before = theirs.item()
        theirs.grad = torch.ones(1)
        rival.step()
        assert taken == pytest.approx(before - theirs.item(), abs=1e-6)
        for scheduler in schedulers:
            scheduler.step()


def test_a_scheduler_scales_every_table_from_its_own_rate(new_module: NewModule) -> None:
    fast, slow = new_module(lr=1.0), new_module(lr=0.25)
    optimizer = SparseOptimizer(modules=[fast, slow])
    scheduler = lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    for factor in (1.0, 0.5, 0.25):
        assert step_taken(fast, optimizer) == pytest.approx(factor)
        assert step_taken(slow, optimizer) == pytest.approx(factor / 4)
        scheduler.step()


def test_a_rate_that_the_rule_cannot_take_fails_the_step_and_keeps_the_trace(new_module: NewModule) -> None:
    module = new_module(optimizer={"kind": "ftrl", "alpha": 0.5})
    optimizer = SparseOptimizer(modules=[module])
    collect(module)
    optimizer.param_groups[0]["lr"] = 0.0
    with pytest.raises(ValueError, match=f'table "{module.name}": the learning rate must be above 0 for ftrl, got 0.0'):
        optimizer.step()
    assert (steps(module), len(module._trace), rate(module)) == (0, 1, 0.5)
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step()
    assert (steps(module), rate(module)) == (1, 1.0)


@pytest.mark.embedded_only("servers take an optimizer's state from checkpoints only")
@pytest.mark.parametrize("at_construction", [True, False])
def test_the_state_restores_the_rate_where_training_stopped(at_construction: bool, new_module: NewModule) -> None:
    module = new_module()
    chosen = [module] if at_construction else None
    optimizer = SparseOptimizer(lr=1.0, modules=chosen)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(3):
        step_taken(module, optimizer, [module])
        scheduler.step()
    file = io.BytesIO()
    torch.save((optimizer.state_dict(), scheduler.state_dict()), file)
    file.seek(0)
    states = torch.load(file)
    get_kv_client().drop(module.name)

    module = new_module(module.name)
    optimizer = SparseOptimizer(lr=1.0, modules=[module] if at_construction else None)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.load_state_dict(states[0])
    scheduler.load_state_dict(states[1])

    assert step_taken(module, optimizer, [module]) == pytest.approx(0.125)
    scheduler.step()
    assert step_taken(module, optimizer, [module]) == pytest.approx(0.0625)


def test_the_state_of_other_modules_is_refused(new_module: NewModule) -> None:
    state = SparseOptimizer(modules=[new_module(), new_module()]).state_dict()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        SparseOptimizer(modules=[new_module()]).load_state_dict(state)


# Refused steps


def assert_refused_whole(optimizer: SparseOptimizer, modules: list[Module], error: type[Exception], words: str) -> None:
    """Holds a step to raise, and rows, steps and traces of all modules to stay as they are."""
    ids = torch.arange(5)
    before = [(module.weight[ids], steps(module), module._trace) for module in modules]
    with pytest.raises(error) as caught:
        optimizer.step()
    assert words in str(caught.value)
    for module, (rows, step, trace) in zip(modules, before, strict=True):
        assert torch.equal(module.weight[ids], rows)
        assert steps(module) == step
        for (kept_ids, kept), (old_ids, old) in zip(module._trace, trace, strict=True):
            assert torch.equal(kept_ids, old_ids)
            assert torch.equal(kept, old) or bool(kept.isnan().any())


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_table_that_refuses_leaves_all_tables_and_traces_as_they_were(position: int, new_module: NewModule) -> None:
    modules = [new_module(lr=1.0) for _ in range(3)]
    optimizer = SparseOptimizer(modules=modules)
    collect(*modules)
    optimizer.step()
    collect(*modules)
    collect(modules[position], gradient=float("nan"))

    assert_refused_whole(optimizer, modules, RuntimeError, f'"{modules[position].name}" holds NaN')
    assert_refused_whole(optimizer, modules, RuntimeError, f'"{modules[position].name}" holds NaN')

    modules[position].reset_trace()
    optimizer.step()
    assert [row(module) for module in modules] == [-1.0 if n == position else -2.0 for n in range(3)]


def test_a_step_of_a_dropped_table_is_refused_by_name_and_leaves_the_others(new_module: NewModule) -> None:
    dropped, kept = new_module(lr=1.0), new_module(lr=1.0)
    optimizer = SparseOptimizer(modules=[kept, dropped])
    collect(kept, dropped)
    get_kv_client().drop(dropped.name)

    with pytest.raises(RuntimeError, match=f'table "{dropped.name}"'):
        optimizer.step()

    assert (row(kept), steps(kept), len(kept._trace)) == (0.0, 0, 1)


def test_gradients_of_a_dropped_table_are_not_applied_to_its_successor(
    new_module: NewModule,
) -> None:
    module = new_module(lr=1.0)
    optimizer = SparseOptimizer(modules=[module])
    collect(module)
    get_kv_client().drop(module.name)
    successor = new_module(module.name, lr=1.0)

    with pytest.raises(RuntimeError, match=f'table "{module.name}"'):
        optimizer.step()

    assert (row(successor), steps(successor)) == (0.0, 0)


def test_gradients_collected_during_a_refused_step_come_after_the_kept_ones(new_module: NewModule) -> None:
    module = new_module(lr=1.0)
    optimizer = SparseOptimizer(modules=[module])
    collect(module, gradient=float("inf"))
    with pytest.raises(RuntimeError, match="holds inf"):
        optimizer.step()
    collect(module, ids=torch.tensor([3]))
    assert module._trace[0][0].tolist() == [1, 2, 3]


def test_a_dense_and_a_sparse_optimizer_train_one_model(new_module: NewModule) -> None:
    model = nn.Sequential(new_module(lr=0.1), nn.Linear(1, 1))
    dense, sparse = torch.optim.SGD(model.parameters(), lr=0.1), SparseOptimizer(modules=model)
    losses = []
    for _ in range(60):
        for optimizer in (dense, sparse):
            optimizer.zero_grad()
        loss = (model(IDS).squeeze(1) - torch.tensor([1.0, -1.0])).pow(2).mean()
        loss.backward()
        dense.step()
        sparse.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 < losses[0]


def test_modules_may_stand_where_torch_takes_parameters(new_module: NewModule) -> None:
    for wrap in (lambda module: module, lambda module: [module], lambda module: torch.nn.Sequential(module)):
        module = new_module(lr=0.5)
        optimizer = SparseOptimizer(wrap(module))
        assert [group["table"] for group in optimizer.param_groups] == [module.name]


@pytest.mark.parametrize("kind", ["parameters", "groups", "number", "text"])
def test_what_is_no_module_is_refused_at_once(new_module: NewModule, kind: str) -> None:
    module = new_module()
    given: Any = {
        "parameters": module.parameters(),
        "groups": [{"params": list(module.parameters())}],
        "number": 3,
        "text": "user",
    }[kind]
    for arguments in ({"kv_client": given}, {"modules": given}):
        with pytest.raises(ValueError, match=r"^SparseOptimizer (takes modules and tables, got |got modules without)"):
            SparseOptimizer(**arguments)
    with pytest.raises(ValueError, match=r"^SparseOptimizer got modules twice: "):
        SparseOptimizer(module, modules=[module])


def test_an_optimizer_shows_rates_and_tables(new_module: NewModule) -> None:
    module = new_module(lr=0.5)
    text = repr(SparseOptimizer(modules=[module]))
    assert "lr: 0.5" in text
    assert module.name in text


def test_step_hooks_are_called_once_a_step(new_module: NewModule) -> None:
    module = new_module()
    optimizer = SparseOptimizer(modules=[module])
    called: list[tuple[str, int]] = []

    def noting(name: str) -> Callable[[Any, Any, Any], None]:
        return lambda hooked, args, kwargs: called.append((name, steps(module)))

    handles = [
        optimizer.register_step_pre_hook(noting("before")),
        register_optimizer_step_pre_hook(noting("before any")),
        optimizer.register_step_post_hook(noting("after")),
        register_optimizer_step_post_hook(noting("after any")),
    ]
    for handle in handles:
        collect(module)
        called.clear()
        before = steps(module)
        optimizer.step()
        assert len(called) == len(handles) - handles.index(handle)
        assert all(step == before + name.startswith("after") for name, step in called)
        handle.remove()
    called.clear()
    collect(module)
    optimizer.step()
    assert called == []
    assert steps(module) == len(handles) + 1


def test_a_profiler_sees_the_steps(new_module: NewModule) -> None:
    module = new_module()
    optimizer = SparseOptimizer(modules=[module])
    collect(module)
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert "Optimizer.step#SparseOptimizer.step" in {event.key for event in profile.key_averages()}
    assert steps(module) == 1
