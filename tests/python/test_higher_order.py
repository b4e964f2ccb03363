"""Lookups within the higher-order operators of torch: as those of `torch.nn`, or a sentence that names the table.

Each is called in Python and compiled, with gradients and without. After a refusal nothing has changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.hints_wrap import hints_wrapper
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.strict_mode import strict_mode
from torch._higher_order_ops.while_loop import while_loop
from torch.autograd import Function
from torch.func import functional_call, grad, hessian
from torch.utils.checkpoint import checkpoint

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    HashTable,
    KeyedJaggedTensor,
    RecStoreEmbeddingBagCollection,
    Table,
)

pytestmark = [pytest.mark.tier("all"), pytest.mark.usefixtures("fresh_compiler")]
IN_TEST = pytest.mark.tier("test")

NUM, DIM = 6, 3
ROWS = torch.linspace(-1, 1, NUM * DIM).view(NUM, DIM)
IDS = torch.tensor([1, 2, 2])
WEIGHTS = torch.tensor([0.5, 1.0, 2.0])
ONES = torch.ones(3, DIM)
OPTIONS: dict[str, Any] = {"optimizer": {"kind": "sgd", "lr": 1.0}, "initializer": {"kind": "zeros"}}

_Found = TypeVar("_Found")
Lookup = Callable[[Tensor], Tensor]


class Pair(NamedTuple):
    """A module over a table and the one of torch, each with a lookup, `[N] -> [N, DIM]`."""

    ours: Any
    lookup: Lookup
    theirs: nn.Embedding | nn.EmbeddingBag
    of_theirs: Lookup

    @property
    def table(self) -> Table:
        """The table of the module."""
        return self.ours.tables()[0]

    def rows(self) -> Tensor:
        """The rows of the table."""
        with torch.no_grad():
            return torch.ops.recstore.emb_read.table(self.table.handle, torch.arange(NUM), DIM)

    def collected(self) -> Tensor:
        """The gradients of the rows, dense."""
        found = torch.zeros(NUM, DIM)
        for _, ids, grads in self.table.collected():
            found[ids] += grads
        return found

    def gradient(self) -> Tensor:
        """The gradients of torch's rows."""
        return torch.zeros(NUM, DIM) if self.theirs.weight.grad is None else self.theirs.weight.grad

    def step(self) -> int:
        """The steps of the table."""
        return self.table.statistics()["step"]


def of_embedding(name: str) -> Pair:
    ours, theirs = DistEmbedding(NUM, DIM, name, **OPTIONS), nn.Embedding(NUM, DIM, _weight=ROWS.clone())
    return Pair(ours, ours, theirs, theirs)


def of_bag(name: str) -> Pair:
    ours, theirs = DistEmbeddingBag(NUM, DIM, name, "sum", **OPTIONS), _bag()
    return Pair(ours, _spread(lambda ids: ours(ids.view(1, -1))), theirs, _spread(lambda ids: theirs(ids.view(1, -1))))


def of_collection(name: str) -> Pair:
    config = {"name": name, "num_embeddings": NUM, "embedding_dim": DIM, "feature_names": ["seen"]}
    ours, theirs = RecStoreEmbeddingBagCollection([config], **OPTIONS), _bag()

    def lookup(ids: Tensor) -> Tensor:
        batch = KeyedJaggedTensor(["seen"], ids, lengths=torch.tensor([ids.numel()]))
        return ours(batch).view(1, DIM)

    return Pair(ours, _spread(lookup), theirs, _spread(lambda ids: theirs(ids.view(1, -1))))


def _bag() -> nn.EmbeddingBag:
    return nn.EmbeddingBag(NUM, DIM, mode="sum", _weight=ROWS.clone())


def _spread(lookup: Lookup) -> Lookup:
    """The sum of the rows once for each id, so that all lookups have one shape."""
    return lambda ids: lookup(ids).expand(ids.numel(), DIM)


KINDS = {"DistEmbedding": of_embedding, "DistEmbeddingBag": of_bag, "collection": of_collection}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


@pytest.fixture
def pair(kind: Callable[[str], Pair], table_name: Callable[[], str]) -> Pair:
    found = kind(table_name())
    torch.ops.recstore.emb_write.table(found.table.handle, torch.arange(NUM), ROWS)
    return found


# Each takes a lookup and weights, [3], and gives [3, DIM] or so.


def by_cond(lookup: Lookup, weights: Tensor) -> Tensor:
    return torch.cond(
        weights.sum() > 0, lambda given: lookup(IDS) * given[:, None], lambda given: given[:, None] * ONES, (weights,)
    )


def by_other_branch(lookup: Lookup, weights: Tensor) -> Tensor:
    return torch.cond(
        weights.sum() < 0, lambda given: lookup(IDS) * given[:, None], lambda given: given[:, None] * ONES, (weights,)
    )


def by_cond_over_ids(lookup: Lookup, weights: Tensor) -> Tensor:
    def pooled(given: Tensor, ids: Tensor) -> Tensor:
        return lookup(ids) * given[:, None]

    return torch.cond(weights.sum() > 0, pooled, lambda given, ids: given[:, None] * ONES, (weights, IDS))


def by_while_loop(lookup: Lookup, weights: Tensor) -> Tensor:
    def body(count: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        return count + 1, total + lookup(IDS)

    return while_loop(lambda count, _: count < 3, body, (torch.tensor(0), weights[:, None] * ONES))[1]


def by_scan(lookup: Lookup, weights: Tensor) -> Tensor:
    return scan(lambda total, id: (total + lookup(id.view(1)).sum(0), total.clone()), weights.clone(), IDS.clone())[0]


def by_associative_scan(lookup: Lookup, weights: Tensor) -> Tensor:
    given = weights[:, None, None] * torch.ones(3, 3, DIM)
    return associative_scan(lambda left, right: left + right + lookup(IDS), given, 0, combine_mode="generic")


def by_map(lookup: Lookup, weights: Tensor) -> Tensor:
    return map_rows(lambda id, given: lookup(id.view(1)).sum(0) * given, IDS, weights)  # type: ignore[arg-type]


def by_vmap(lookup: Lookup, weights: Tensor) -> Tensor:
    return torch.vmap(lambda id, weight: lookup(id.view(1)).sum(0) * weight)(IDS, weights)


def by_checkpoint(lookup: Lookup, weights: Tensor) -> Tensor:
    found = checkpoint(lambda given: lookup(IDS) * given[:, None], weights, use_reentrant=False)
    assert isinstance(found, Tensor)
    return found


def by_region(lookup: Lookup, weights: Tensor) -> Tensor:
    region: Any = torch.compiler.nested_compile_region(lambda given, ids: lookup(ids) * given[:, None])
    return region(weights, IDS)


def by_region_twice(lookup: Lookup, weights: Tensor) -> Tensor:
    region: Any = torch.compiler.nested_compile_region(lambda given, ids: lookup(ids) * given[:, None])
    return region(weights, IDS) + region(weights + 1, IDS + 1)


def by_function(lookup: Lookup, weights: Tensor) -> Tensor:
    class Doubled(Function):
        @staticmethod
        def forward(ctx: Any, given: Tensor) -> Tensor:  # type: ignore[override]
            rows = lookup(IDS)
            ctx.save_for_backward(rows)
            return rows * given[:, None]

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            (rows,) = ctx.saved_tensors
            return (grads[0] * rows).sum(1)

    return Doubled.apply(weights)  # type: ignore[return-value]


def by_hints(lookup: Lookup, weights: Tensor) -> Tensor:
    return hints_wrapper(lambda given: lookup(IDS) * given[:, None], (weights,), {}, hints={})  # type: ignore[call-arg]


def by_strict_mode(lookup: Lookup, weights: Tensor) -> Tensor:
    return strict_mode(lambda given: (lookup(IDS) * given[:, None],), (weights,))[0]


def by_grad(lookup: Lookup, weights: Tensor) -> Tensor:
    return grad(lambda given: (lookup(IDS) * given[:, None]).square().sum())(weights)


def by_hessian(lookup: Lookup, weights: Tensor) -> Tensor:
    return hessian(lambda given: (lookup(IDS) * given[:, None]).square().sum())(weights)


OPERATORS: dict[str, Callable[[Lookup, Tensor], Tensor]] = {
    "cond": by_cond,
    "cond, the other branch": by_other_branch,
    "cond over ids": by_cond_over_ids,
    "while_loop": by_while_loop,
    "scan": by_scan,
    "associative_scan": by_associative_scan,
    "map": by_map,
    "vmap": by_vmap,
    "checkpoint": by_checkpoint,
    "nested_compile_region": by_region,
    "nested_compile_region, twice": by_region_twice,
    "autograd.Function": by_function,
    "hints_wrapper": by_hints,
    "strict_mode": by_strict_mode,
    "grad": by_grad,
    "hessian": by_hessian,
}
WORK = {"associative_scan", "vmap", "checkpoint", "autograd.Function", "grad", "hessian"}
"""Those within which a lookup works in every way."""


def run(
    operator: Callable[[Lookup, Tensor], Tensor], lookup: Lookup, backend: str, has_gradients: bool
) -> tuple[Tensor, Tensor | None]:
    """What an operator gives for a lookup, and the gradient of the weights."""
    weights = WEIGHTS.clone().requires_grad_(has_gradients)

    def called(weights: Tensor) -> Tensor:
        return operator(lookup, weights)

    torch._dynamo.reset()
    function = called if backend == "python" else torch.compile(called, backend=backend)
    with torch.set_grad_enabled(has_gradients):
        output = function(weights)
        if output.requires_grad:
            (output * torch.arange(1, output.numel() + 1).view(output.shape)).sum().backward()
    return output.detach(), weights.grad


def refused_or(call: Callable[[], _Found]) -> _Found | RuntimeError:
    """What a call gives, or its error."""
    try:
        return call()
    except RuntimeError as error:
        return error


def check(pair: Pair, operator: Callable[[Lookup, Tensor], Tensor], backend: str, has_gradients: bool) -> bool:
    """Checks an operator: as over the module of torch, or an error that names the table; returns whether it works."""
    before, step = pair.rows(), pair.step()
    found = refused_or(lambda: run(operator, pair.lookup, backend, has_gradients))
    if isinstance(found, RuntimeError):
        assert f'table "{pair.table.name}": torch takes no lookup within' in str(found)
        assert pair.table.collected() == []
        assert pair.step() == step
        assert torch.equal(pair.rows(), before)
        return False
    of_torch = refused_or(lambda: run(operator, pair.of_theirs, backend, has_gradients))
    if isinstance(of_torch, RuntimeError):
        return True  # Its bags have no gradient of a gradient.
    (output, of_weights), (expected, of_theirs) = found, of_torch
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(of_weights, of_theirs)
    torch.testing.assert_close(pair.collected(), pair.gradient())
    return True


@pytest.mark.parametrize("kind", [pytest.param(of_embedding, marks=IN_TEST), of_bag, of_collection])
@pytest.mark.parametrize("has_gradients", [True, False], ids=["gradients", "no_grad"])
@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in ("hints_wrapper", "strict_mode")])
def test_in_python_a_lookup_is_as_torch_s_or_refused(name: str, has_gradients: bool, pair: Pair) -> None:
    works = check(pair, OPERATORS[name], "python", has_gradients)
    # The region is one of the compiler alone. The others trace their functions, to run them in Python.
    assert works is (name in WORK or not has_gradients or "region" in name)


@each_kind
@pytest.mark.parametrize("has_gradients", [True, False], ids=["gradients", "no_grad"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", OPERATORS)
def test_compiled_a_lookup_is_as_torch_s_or_refused(name: str, backend: str, has_gradients: bool, pair: Pair) -> None:
    works = check(pair, OPERATORS[name], backend, has_gradients)
    assert works is (name in WORK)


@each_kind
@pytest.mark.parametrize("name", ["vmap", "hessian"])
def test_in_one_graph_a_transform_that_python_would_run_is_refused(name: str, pair: Pair) -> None:
    graph = torch.compile(lambda given: OPERATORS[name](pair.lookup, given), backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=f'table "{re.escape(pair.table.name)}": torch takes no lookup within vmap'):
        graph(WEIGHTS.clone())
    assert pair.table.collected() == []


@pytest.mark.parametrize("kind", [of_embedding, of_bag])
def test_a_compiled_transform_over_all_parameters_collects_once(pair: Pair) -> None:
    def loss(module: nn.Module) -> Callable[[dict[str, Tensor]], Tensor]:
        return lambda params: functional_call(module, params, (IDS.view(1, -1),)).square().sum()

    whole = torch.compile(grad(loss(pair.ours)), backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"table \".*\": torch.compile collects no gradients of rows within"):
        whole(dict(pair.ours.named_parameters()))
    assert pair.table.collected() == []
    torch.compile(grad(loss(pair.ours)), backend="aot_eager")(dict(pair.ours.named_parameters()))
    expected = grad(loss(pair.theirs))(dict(pair.theirs.named_parameters()))["weight"]
    torch.testing.assert_close(pair.collected(), expected)


@each_kind
@pytest.mark.parametrize("backend", ["python", "aot_eager", "inductor"])
def test_compiled_autograd_is_refused_before_the_pass_runs(backend: str, pair: Pair) -> None:
    top = nn.Linear(DIM, 1)

    def loss() -> Tensor:
        return top(pair.lookup(IDS)).sum()

    def backward() -> None:
        (loss() if backend == "python" else torch.compile(loss, backend=backend)()).backward()

    compiler = "aot_eager" if backend == "python" else backend
    sentence = f'table "{re.escape(pair.table.name)}": compiled autograd collects no gradients of rows'
    with (
        compiled_autograd._enable(lambda graph: torch.compile(graph, backend=compiler)),
        pytest.raises(RuntimeError, match=sentence),
    ):
        backward()
    with torch._dynamo.config.patch(compiled_autograd=True), pytest.raises(RuntimeError, match=sentence):
        torch.compile(lambda: loss().backward(), backend=compiler)()
    assert (pair.table.collected(), top.weight.grad) == ([], None)
    torch._dynamo.reset()
    backward()
    assert pair.collected().count_nonzero() > 0


@IN_TEST
@pytest.mark.parametrize("kind", [of_embedding])
def test_a_graph_of_before_is_refused_by_compiled_autograd_as_it_runs(pair: Pair) -> None:
    output = torch.compile(lambda: pair.lookup(IDS).sum(), backend="aot_eager")()
    sentence = f'table "{re.escape(pair.table.name)}": compiled autograd collects no gradients of rows'
    with (
        compiled_autograd._enable(lambda graph: torch.compile(graph, backend="aot_eager")),
        pytest.raises(RuntimeError, match=sentence),
    ):
        output.backward()
    assert pair.table.collected() == []


@IN_TEST
def test_a_hash_table_in_evaluation_is_refused_too(table_name: Callable[[], str]) -> None:
    table = HashTable(DIM, table_name(), num_embeddings=NUM, **OPTIONS).eval()
    graph = torch.compile(lambda given: by_cond(table, given), backend="aot_eager")
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=r"torch takes no lookup within torch\.cond: look up before"),
    ):
        graph(WEIGHTS)
    assert len(table) == 0
