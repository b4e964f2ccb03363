"""The transforms of `torch.func` over models with tables: as over `nn.Embedding`, or a sentence that says why not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_kinds import BATCH, DIM, IDS, KINDS, NUM, OFFSETS, OPTIONS, Kind, each_kind
from torch import Tensor, nn
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    HashTable,
    KeyedJaggedTensor,
    RecStoreEmbeddingBagCollection,
    SparseOptimizer,
    embedding,
    embedding_bag,
)

pytestmark = pytest.mark.tier("test")

ROWS = torch.tensor([[0.5, -1.0], [1.5, 2.0], [-0.25, 0.75], [3.0, 1.0], [0.0, -2.0]])
Params = dict[str, Tensor]


class Model(nn.Module):
    """A module over a table, or torch's, and a dense layer over what it gives."""

    def __init__(self, sparse: nn.Module, outputs: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.sparse = sparse
        self._outputs = outputs
        self.top = nn.Linear(DIM, 1)
        nn.init.constant_(self.top.weight, 0.5)
        nn.init.constant_(self.top.bias, 0.25)

    def forward(self) -> Tensor:
        return self.top(self._outputs(self.sparse)).squeeze(-1)


def pooled(
    weight: Tensor,
    ids: Tensor,
    offsets: Tensor,
    mode: str,
    factors: Tensor | None = None,
    padding_idx: int | None = None,
) -> Tensor:
    """What `nn.EmbeddingBag` gives, which the transforms do not go through."""
    bags = []
    ends = [*offsets.tolist()[1:], ids.shape[0]]
    for start, stop in zip(offsets.tolist(), ends, strict=True):
        part = torch.arange(start, stop)
        part = part[ids[part] != padding_idx] if padding_idx is not None else part
        rows = weight[ids[part]] if factors is None else weight[ids[part]] * factors[part, None]
        if part.numel() == 0:
            bags.append(weight.new_zeros(weight.shape[1]))
        else:
            bags.append(rows.amax(0) if mode == "max" else rows.sum(0) / (part.numel() if mode == "mean" else 1))
    return torch.stack(bags)


def models(kind: Kind, name: str) -> tuple[Model, Model]:
    """Ours and torch's, with the same rows."""
    rival = kind.rival()
    of_rival = (
        (lambda bag: pooled(bag.weight, IDS, OFFSETS, "sum")) if isinstance(rival, nn.EmbeddingBag) else kind.of_rival
    )
    ours, theirs = Model(kind.open(name), kind.outputs), Model(rival, of_rival)
    table = ours.sparse.tables()[0]  # type: ignore[operator]
    torch.ops.recstore.emb_write.table(table.handle, torch.arange(NUM), ROWS)
    with torch.no_grad():
        theirs.sparse.weight.copy_(ROWS)  # type: ignore[operator]
    return ours, theirs


def collected(module: Any) -> Tensor:
    """What a module has collected, as the gradient of a matrix."""
    grads = torch.zeros(NUM, DIM)
    for table in module.tables():
        for _, ids, part in table.collected():
            grads.index_add_(0, ids, part)
    return grads


def dense(model: Model) -> Params:
    return {name: each for name, each in model.named_parameters() if name.startswith("top.")}


def loss_of(model: Model) -> Callable[[Params], Tensor]:
    return lambda params: functional_call(model, params, ()).square().sum()


def outputs_of(model: Model) -> Callable[[Params], Tensor]:
    return lambda params: functional_call(model, params, ())


def of_vjp(model: Model, params: Params) -> Any:
    output, back, *_ = vjp(outputs_of(model), params)
    return output, back(torch.ones_like(output))


def of_jvp(model: Model, params: Params) -> Any:
    return jvp(outputs_of(model), (params,), ({name: torch.ones_like(each) for name, each in params.items()},))


def of_an_ensemble(model: Model, params: Params) -> Any:
    stacked = {name: torch.stack([each, 2 * each, -each]) for name, each in params.items()}
    return vmap(outputs_of(model))(stacked)


def of_gradients_of_an_ensemble(model: Model, params: Params) -> Any:
    stacked = {name: torch.stack([each, 2 * each, -each]) for name, each in params.items()}
    return vmap(grad(loss_of(model)))(stacked)


TRANSFORMS: dict[str, Callable[[Model, Params], Any]] = {
    "functional_call": lambda model, params: functional_call(model, params, ()),
    "grad": lambda model, params: grad(loss_of(model))(params),
    "grad_and_value": lambda model, params: grad_and_value(loss_of(model))(params),
    "vjp": of_vjp,
    "jvp": of_jvp,
    "jacrev": lambda model, params: jacrev(outputs_of(model))(params),
    "jacrev, in chunks": lambda model, params: jacrev(outputs_of(model), chunk_size=1)(params),
    "jacfwd": lambda model, params: jacfwd(outputs_of(model))(params),
    "hessian": lambda model, params: hessian(loss_of(model))(params),
    "vmap": of_an_ensemble,
    "vmap of grad": of_gradients_of_an_ensemble,
}


def assert_equal(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@each_kind
def test_the_dense_part_is_transformed_as_over_torch_s_modules(
    kind: Kind, transform: Callable[[Model, Params], Any], table_name: Callable[[], str]
) -> None:
    ours, theirs = models(kind, table_name())
    assert_equal(transform(ours, dense(ours)), transform(theirs, dense(theirs)))
    assert collected(ours.sparse).eq(0).all(), "nothing asked for the gradients of rows"


ABOUT_ROWS: dict[str, Callable[[Model, Params], Any]] = {
    "grad": lambda model, params: grad(loss_of(model))(params),
    "grad_and_value": lambda model, params: grad_and_value(loss_of(model))(params),
    "vjp": of_vjp,
    "grad of detached parameters": lambda model, params: grad(loss_of(model))(
        {name: each.detach() for name, each in params.items()}
    ),
    "functional_call": lambda model, params: loss_of(model)(params).backward(),
}


@pytest.mark.parametrize("transform", ABOUT_ROWS.values(), ids=ABOUT_ROWS.keys())
@each_kind
def test_rows_collect_once_where_all_parameters_are_differentiated(
    kind: Kind, transform: Callable[[Model, Params], Any], table_name: Callable[[], str]
) -> None:
    ours, theirs = models(kind, table_name())
    given, expected = transform(ours, dict(ours.named_parameters())), transform(theirs, dict(theirs.named_parameters()))
    found = [each for each in (expected, given) if each is not None]
    of_rows = theirs.sparse.weight.grad  # type: ignore[union-attr]
    if found:
        place = next(place for place in (0, 1, None) if place is None or isinstance(found[0], tuple))
        gradients, ours_gradients = (each if place is None else _dict_in(each) for each in found)
        of_rows = gradients["sparse.weight"]
        assert_equal(
            {name: ours_gradients[name] for name in dense(ours)}, {name: gradients[name] for name in dense(ours)}
        )
        stand_ins = [each for name, each in ours_gradients.items() if name.endswith("weight") and "top" not in name]
        assert [each.tolist() for each in stand_ins] == [0.0]
    assert_equal(collected(ours.sparse), of_rows)


def _dict_in(result: tuple[Any, ...]) -> Params:
    """The gradients among what a transform gives."""
    flat = [each[0] if isinstance(each, tuple) else each for each in result]
    return next(each for each in flat if isinstance(each, dict))


@each_kind
def test_a_step_of_gradients_of_torch_func_is_one_of_backward(kind: Kind, table_name: Callable[[], str]) -> None:
    ours, theirs = models(kind, table_name())
    optimizer = SparseOptimizer(modules=[ours])
    for _ in range(3):
        grad(loss_of(ours))(dict(ours.named_parameters()))
        optimizer.step()
        loss_of(theirs)({}).backward()
        with torch.no_grad():
            theirs.sparse.weight -= theirs.sparse.weight.grad  # type: ignore[operator]
        theirs.zero_grad()
    table = ours.sparse.tables()[0]  # type: ignore[operator]
    rows = torch.ops.recstore.emb_read.table(table.handle, torch.arange(NUM), DIM)
    assert_equal(rows, theirs.sparse.weight.detach())  # type: ignore[union-attr]


@each_kind
def test_detached_parameters_give_rows_no_gradient(kind: Kind, table_name: Callable[[], str]) -> None:
    ours, _ = models(kind, table_name())
    params = {name: each.detach() for name, each in ours.named_parameters()}
    params["top.bias"].requires_grad_()
    loss_of(ours)(params).backward()
    assert collected(ours.sparse).eq(0).all()


@each_kind
def test_frozen_rows_collect_nothing_under_transforms(kind: Kind, table_name: Callable[[], str]) -> None:
    ours, theirs = models(kind, table_name())
    ours.sparse.requires_grad_(False)
    gradients = grad(loss_of(ours))(dense(ours))
    assert_equal(gradients, grad(loss_of(theirs))(dense(theirs)))
    vmap(lambda scale: scale * ours().sum())(torch.ones(3)).sum().backward()
    assert collected(ours.sparse).eq(0).all()


REFUSED_PER_SAMPLE = r'over table "{}": its rows have no gradients per sample, .* or freeze the module'


def per_sample(model: Model, params: Params) -> Any:
    def scaled(params: Params, scale: Tensor) -> Tensor:
        return scale * loss_of(model)(params)

    return vmap(grad(scaled), in_dims=(None, 0))(params, torch.tensor([1.0, 2.0]))


PER_SAMPLE = {"jacrev": TRANSFORMS["jacrev"], "vmap of grad": per_sample}


@pytest.mark.parametrize("transform", PER_SAMPLE.values(), ids=PER_SAMPLE.keys())
@each_kind
def test_gradients_of_rows_per_sample_are_refused(
    kind: Kind, transform: Callable[..., Any], table_name: Callable[[], str]
) -> None:
    name = table_name()
    ours, _ = models(kind, name)
    with pytest.raises(RuntimeError, match=REFUSED_PER_SAMPLE.format(re.escape(name))):
        transform(ours, dict(ours.named_parameters()))
    assert collected(ours.sparse).eq(0).all()


@each_kind
def test_an_ensemble_over_one_table_is_refused(kind: Kind, table_name: Callable[[], str]) -> None:
    name = table_name()
    ours, _ = models(kind, name)
    other, _ = models(kind, table_name())
    sentence = f'over table "{re.escape(name)}".*: vmap over its parameter would read the rows of one'
    with pytest.raises(AttributeError, match=sentence):
        stack_module_state([ours, other])  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=sentence):
        vmap(outputs_of(ours))({stand_in: torch.zeros(2) for stand_in, _ in ours.named_parameters()})


# Ids that vmap batches

IDS_OF_SAMPLES = torch.tensor([[1, 2, 2], [0, 4, 1], [3, 3, 3], [2, 1, 0]])
WEIGHTS = torch.tensor([[1.0, 2.0, 0.5], [1.0, -1.0, 3.0], [0.0, 1.0, 2.0], [0.25, 1.0, 1.0]])


def of_embedding(name: str) -> tuple[Any, Callable[..., Tensor], Callable[..., Tensor]]:
    ours, theirs = DistEmbedding(NUM, DIM, name, padding_idx=3, **OPTIONS), nn.Embedding(NUM, DIM, padding_idx=3)
    return (
        (ours, theirs),
        lambda ids, weights: ours(ids) * weights[:, None],
        lambda ids, weights: theirs(ids) * weights[:, None],
    )


def of_hash_table(inserts: bool) -> Callable[[str], Any]:
    def make(name: str) -> Any:
        ours = HashTable(DIM, name, num_embeddings=NUM, insert_on_lookup=inserts, **OPTIONS)
        theirs = nn.Embedding(NUM, DIM)
        return (
            (ours, theirs),
            lambda ids, weights: ours(ids) * weights[:, None],
            lambda ids, weights: theirs(ids) * weights[:, None],
        )

    return make


def of_bag(mode: Any, padding_idx: int | None = None) -> Callable[[str], Any]:
    def make(name: str) -> Any:
        ours, theirs = (
            DistEmbeddingBag(NUM, DIM, name, mode, padding_idx, **OPTIONS),
            nn.Embedding(NUM, DIM, padding_idx),
        )
        weighted = mode == "sum"
        return (
            (ours, theirs),
            lambda ids, weights: ours(ids, OFFSETS, weights if weighted else None) * weights[:2, None],
            lambda ids, weights: (
                pooled(theirs.weight, ids, OFFSETS, mode, weights if weighted else None, padding_idx)
                * weights[:2, None]
            ),
        )

    return make


def of_flat_bag(name: str) -> Any:
    ours, theirs = DistEmbeddingBag(NUM, DIM, name, "sum", **OPTIONS), nn.Embedding(NUM, DIM)
    return (
        (ours, theirs),
        lambda ids, weights: ours(ids.view(1, 3), None, weights.view(1, 3)),
        lambda ids, weights: pooled(theirs.weight, ids, torch.tensor([0]), "sum", weights),
    )


def of_collection(fused: bool, pooling: str = "sum") -> Callable[[str], Any]:
    def make(name: str) -> Any:
        config = {"name": name, "num_embeddings": NUM, "embedding_dim": DIM, "feature_names": ["a"], "pooling": pooling}
        ours = RecStoreEmbeddingBagCollection([config], enable_fusion=fused, **OPTIONS)
        theirs, lengths = nn.Embedding(NUM, DIM), torch.tensor([2, 1])
        has_weights = pooling == "sum"

        def forward(ids: Tensor, weights: Tensor) -> Tensor:
            batch = KeyedJaggedTensor(["a"], ids, weights if has_weights else None, lengths=lengths)
            return ours(batch).squeeze(1) * weights[:2, None]

        return (
            (ours, theirs),
            forward,
            lambda ids, weights: (
                pooled(theirs.weight, ids, OFFSETS, pooling, weights if has_weights else None) * weights[:2, None]
            ),
        )

    return make


def of_functions(name: str) -> Any:
    ours, theirs = DistEmbedding(NUM, DIM, name, **OPTIONS), nn.Embedding(NUM, DIM)
    table = ours.table
    return (
        (ours, theirs),
        lambda ids, weights: embedding_bag(ids, table, OFFSETS) * weights[:2, None] + embedding(ids[:2], table),
        lambda ids, weights: pooled(theirs.weight, ids, OFFSETS, "mean") * weights[:2, None] + theirs(ids[:2]),
    )


BATCHED: dict[str, Callable[[str], Any]] = {
    "DistEmbedding": of_embedding,
    "HashTable": of_hash_table(False),
    "HashTable, inserting": of_hash_table(True),
    "DistEmbeddingBag, sum": of_bag("sum"),
    "DistEmbeddingBag, sum, padding": of_bag("sum", 3),
    "DistEmbeddingBag, mean, padding": of_bag("mean", 3),
    "DistEmbeddingBag, max": of_bag("max", 3),
    "DistEmbeddingBag, 2-D": of_flat_bag,
    "collection": of_collection(True),
    "collection, mean": of_collection(True, "mean"),
    "collection, not fused": of_collection(False),
    "functions": of_functions,
}


def batched(make: Callable[[str], Any], name: str) -> tuple[Any, Any, Callable[..., Tensor], Callable[..., Tensor]]:
    (ours, theirs), forward, of_theirs = make(name)
    rows = ROWS.clone()
    padding_idx = getattr(theirs, "padding_idx", None)
    if padding_idx is not None:
        rows[padding_idx] = 0.0
    with torch.no_grad():
        theirs.weight.copy_(rows)
    torch.ops.recstore.emb_write.table(ours.tables()[0].handle, torch.arange(NUM), rows)
    return ours, theirs, forward, of_theirs


def one_by_one(forward: Callable[..., Tensor]) -> Tensor:
    return torch.stack([forward(ids, weights) for ids, weights in zip(IDS_OF_SAMPLES, WEIGHTS, strict=True)])


@pytest.mark.parametrize("make", BATCHED.values(), ids=BATCHED.keys())
def test_ids_that_vmap_batches_are_just_more_ids(make: Callable[[str], Any], table_name: Callable[[], str]) -> None:
    ours, theirs, forward, of_theirs = batched(make, table_name())
    rows, expected = vmap(forward)(IDS_OF_SAMPLES, WEIGHTS), one_by_one(of_theirs)
    assert_equal(rows, expected)
    assert_equal(vmap(forward, in_dims=(1, 1))(IDS_OF_SAMPLES.T.contiguous(), WEIGHTS.T.contiguous()), expected)
    assert_equal(vmap(forward, in_dims=(None, 0))(IDS_OF_SAMPLES[0], WEIGHTS)[0], expected[0])
    both = vmap(vmap(forward))(IDS_OF_SAMPLES.view(2, 2, 3), WEIGHTS.view(2, 2, 3))
    assert_equal(both.flatten(0, 1), expected)
    rows.square().sum().backward()
    expected.square().sum().backward()
    assert_equal(collected(ours), theirs.weight.grad)


@pytest.mark.parametrize("make", BATCHED.values(), ids=BATCHED.keys())
def test_gradients_of_weights_are_right_per_sample(make: Callable[[str], Any], table_name: Callable[[], str]) -> None:
    ours, _, forward, of_theirs = batched(make, table_name())

    def loss(forward: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda weights, ids: forward(ids, weights).square().sum()

    def each(transform: Callable[..., Any]) -> Tensor:
        samples = zip(WEIGHTS, IDS_OF_SAMPLES, strict=True)
        return torch.stack([transform(weights, ids) for weights, ids in samples])

    assert_equal(vmap(grad(loss(forward)))(WEIGHTS, IDS_OF_SAMPLES), each(grad(loss(of_theirs))))
    expected = each(
        lambda weights, ids: torch.autograd.functional.hessian(lambda at: loss(of_theirs)(at, ids), weights)
    )
    assert_equal(each(jacrev(grad(loss(forward)))), expected)
    assert_equal(vmap(hessian(loss(forward)))(WEIGHTS, IDS_OF_SAMPLES), expected)
    assert collected(ours).eq(0).all()


def test_gradients_of_dense_parameters_per_sample(table_name: Callable[[], str]) -> None:
    ours, theirs, _, _ = batched(of_bag("sum"), table_name())
    top = nn.Linear(DIM, 1)
    labels = torch.tensor([1.0, -1.0, 0.5, 2.0])

    def loss(bag: Any) -> Callable[..., Tensor]:
        return lambda params, ids, label: (functional_call(top, params, (bag(ids),)).squeeze() - label).square()

    given = [
        vmap(grad(loss(lambda ids: ours(ids.view(1, 3)))), in_dims=(None, 0, 0))(
            dict(top.named_parameters()), IDS_OF_SAMPLES, labels
        ),
    ]
    expected = [
        grad(loss(lambda ids: theirs(ids).sum(0, keepdim=True)))(dict(top.named_parameters()), ids, label)
        for ids, label in zip(IDS_OF_SAMPLES, labels, strict=True)
    ]
    for name in given[0]:
        assert_equal(given[0][name], torch.stack([each[name] for each in expected]))
    assert collected(ours).eq(0).all()


def test_offsets_are_batched_too(table_name: Callable[[], str]) -> None:
    for mode in ("sum", "mean", "max"):
        ours, theirs, _, _ = batched(of_bag(mode), table_name())
        offsets = torch.tensor([[0, 1], [0, 3], [0, 0], [0, 2]])
        expected = torch.stack(
            [pooled(theirs.weight, *each, mode) for each in zip(IDS_OF_SAMPLES, offsets, strict=True)]
        )
        assert_equal(vmap(ours)(IDS_OF_SAMPLES, offsets), expected)
        assert_equal(vmap(ours, in_dims=(None, 0))(IDS_OF_SAMPLES[1], offsets)[1], expected[1])
        bad = torch.tensor([[0, 1], [0, 4], [0, 0], [0, 2]])
        with pytest.raises((ValueError, RuntimeError), match="offsets"):
            vmap(ours)(IDS_OF_SAMPLES, bad)


def test_lengths_of_a_batch_are_not_batched(table_name: Callable[[], str]) -> None:
    bags = KINDS["RecStoreEmbeddingBagCollection"].open(table_name())
    lengths, offsets = torch.tensor([[2, 1]] * 4), torch.tensor([[0, 2, 3]] * 4)
    with pytest.raises(RuntimeError, match="vmap cannot go over the lengths of bags; put the samples into one batch"):
        vmap(lambda ids, each: bags(KeyedJaggedTensor(["seen"], ids, lengths=each)))(IDS_OF_SAMPLES, lengths)
    with pytest.raises(RuntimeError, match="vmap cannot go over the offsets of bags; put the samples into one batch"):
        vmap(lambda ids, each: bags(KeyedJaggedTensor(["seen"], ids, offsets=each)))(IDS_OF_SAMPLES, offsets)


def test_ids_out_of_range_are_refused_under_vmap(table_name: Callable[[], str]) -> None:
    name = table_name()
    module = DistEmbedding(NUM, DIM, name, **OPTIONS)
    with pytest.raises((IndexError, RuntimeError), match=re.escape(name)):
        vmap(module)(torch.tensor([[1, 2], [3, NUM]]))


def test_a_hash_table_in_evaluation_gives_no_gradient(table_name: Callable[[], str]) -> None:
    table = HashTable(DIM, table_name(), num_embeddings=NUM, insert_on_lookup=True, **OPTIONS).eval()
    rows = vmap(table)(IDS_OF_SAMPLES)
    assert (rows.requires_grad, len(table)) == (False, 0)


@pytest.mark.parametrize("reduce", ["worker", "id"])
def test_a_hash_table_divides_gradients_under_vmap(reduce: Any, table_name: Callable[[], str]) -> None:
    tables = [
        HashTable(DIM, table_name(), num_embeddings=NUM, grad_reduce_by=reduce, num_workers=4, **OPTIONS) for _ in "ab"
    ]
    tables[0](IDS_OF_SAMPLES).square().sum().backward()
    vmap(tables[1])(IDS_OF_SAMPLES).square().sum().backward()
    (tables[0](IDS_OF_SAMPLES) * WEIGHTS[..., None]).sum().backward()
    vmap(lambda ids, weights: tables[1](ids) * weights[:, None])(IDS_OF_SAMPLES, WEIGHTS).sum().backward()
    assert_equal(collected(tables[1]), collected(tables[0]))


def test_a_batch_within_a_transform_is_as_one_without(table_name: Callable[[], str]) -> None:
    bags = KINDS["RecStoreEmbeddingBagCollection"].open(table_name())
    bags.issue_fused_prefetch(BATCH)
    scale = torch.tensor(2.0)
    assert grad(lambda scale: (scale * bags(BATCH)).sum())(scale) == bags(BATCH).sum()
    assert len(IDS) == BATCH.values().numel()
