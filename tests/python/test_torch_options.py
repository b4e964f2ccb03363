"""Options of lookups beside `torch.nn`: weighted means, narrow ids, scaled gradients, several padding ids, `max_norm`.

Expected values are those of `nn.Embedding` and `nn.EmbeddingBag`, or of a plain formula over their rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from module_kinds import BATCH, IDS, KINDS, NUM, OFFSETS, Kind, Pair, each_kind, pair  # noqa: F401
from torch import Tensor, nn
from torch.nn import functional

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    HashTable,
    KeyedJaggedTensor,
    RecStoreEmbeddingBagCollection,
    SparseOptimizer,
    Table,
    embedding,
    embedding_bag,
)
from recstore_ops.transfer import from_embedding

pytestmark = pytest.mark.tier("test")

ops = torch.ops.recstore

COUNT, DIM = 12, 3
SGD: dict[str, Any] = {"kind": "sgd", "lr": 1.0}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def rows_at_first() -> Tensor:
    return torch.randn(COUNT, DIM, generator=torch.Generator().manual_seed(3))


def bag_of(name: str, mode: Any = "mean", **options: Any) -> DistEmbeddingBag:
    options = {"initializer": {"kind": "zeros"}, "optimizer": SGD, **options}
    return DistEmbeddingBag(COUNT, DIM, name, mode, init_func=lambda shape, dtype: rows_at_first(), **options)


def rows_of(table: Table) -> Tensor:
    return ops.emb_read.table(table.handle, torch.arange(table.config.num_embeddings or 0), table.dim)


# Weighted means.

BAG_IDS = torch.tensor([1, 4, 4, 2, 7, 1, 3])
BAG_OFFSETS = torch.tensor([0, 3, 3, 6])  # The second bag is empty.
WEIGHTS = torch.tensor([0.5, 2.0, -0.25, 1.0, 3.0, 0.125, 0.75])


def weighted_means(
    rows: Tensor, weights: Tensor, ids: Tensor = BAG_IDS, offsets: Tensor = BAG_OFFSETS, padding: tuple[int, ...] = ()
) -> Tensor:
    """`sum(w * x) / sum(w)` of each bag, zeros of one whose weights add up to zero."""
    ends = [*offsets.tolist()[1:], len(ids)]
    means = []
    for start, end in zip(offsets.tolist(), ends, strict=True):
        places = [place for place in range(start, end) if int(ids[place]) not in padding]
        total = weights[places].sum()
        products = weights[places].unsqueeze(1) * rows[ids[places]]
        means.append(products.sum(0) / total if bool(total != 0) else torch.zeros(rows.shape[1]))
    return torch.stack(means)


def check_means(call: Callable[[Tensor], Tensor], table: Table, step: Callable[[], object], **reference: Any) -> None:
    """Compares outputs, the gradient of the weights, and the rows after a step, with the formula's."""
    dense, weights, own = rows_of(table).clone().requires_grad_(), WEIGHTS.clone(), WEIGHTS.clone()
    weights.requires_grad_()
    own.requires_grad_()
    expected, outputs = weighted_means(dense, weights, **reference), call(own)
    assert torch.allclose(outputs, expected, atol=1e-6)
    grads = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5))
    expected.backward(grads)
    outputs.backward(grads)
    assert weights.grad is not None
    assert dense.grad is not None
    assert own.grad is not None
    assert torch.allclose(own.grad, weights.grad, atol=1e-5)
    step()
    assert torch.allclose(rows_of(table), dense.detach() - dense.grad, atol=1e-5)
    with torch.no_grad():
        assert torch.allclose(call(own), weighted_means(rows_of(table), own, **reference), atol=1e-6)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("padding", [None, 4, [1, 2]])
def test_a_bags_weighted_mean_is_that_of_the_formula(
    padding: int | list[int] | None, compiles: bool, table_name: Callable[[], str]
) -> None:
    bag = bag_of(table_name(), padding_idx=padding)
    call: Callable[..., Tensor] = torch.compile(bag, backend="aot_eager", fullgraph=True) if compiles else bag
    paddings = () if padding is None else (padding,) if isinstance(padding, int) else tuple(padding)
    step = SparseOptimizer(modules=[bag]).step
    check_means(lambda weights: call(BAG_IDS, BAG_OFFSETS, weights), bag.table, step, padding=paddings)


def test_the_functions_weighted_mean_is_that_of_the_formula(table_name: Callable[[], str]) -> None:
    table = bag_of(table_name()).table
    step = SparseOptimizer(modules=[table]).step
    ends = torch.cat([BAG_OFFSETS, torch.tensor([len(BAG_IDS)])])

    def call(weights: Tensor) -> Tensor:
        return embedding_bag(BAG_IDS, table, ends, "mean", weights, include_last_offset=True)

    check_means(call, table, step)


def test_bags_of_equal_length_have_weights_of_their_shape(table_name: Callable[[], str]) -> None:
    table, ids, weights = bag_of(table_name()).table, torch.tensor([[1, 2], [3, 1]]), torch.rand(2, 2)
    found = embedding_bag(ids, table, mode="mean", per_sample_weights=weights)
    expected = weighted_means(rows_of(table), weights.flatten(), ids.flatten(), torch.tensor([0, 2]))
    assert torch.allclose(found, expected)


@pytest.mark.parametrize("fuses", [True, False])
@pytest.mark.parametrize("compiles", [False, True])
def test_a_collections_weighted_means_are_those_of_the_formula(
    compiles: bool, fuses: bool, table_name: Callable[[], str]
) -> None:
    names = [table_name(), table_name()]
    configs = [
        {"name": name, "num_embeddings": COUNT, "embedding_dim": DIM, "feature_names": [key], "pooling": pooling}
        for name, key, pooling in zip(names, "ab", ("mean", "sum"), strict=True)
    ]
    collection = RecStoreEmbeddingBagCollection(configs, enable_fusion=fuses, optimizer=SGD)
    first, second = collection.tables()
    for table in (first, second):
        ops.emb_write.table(table.handle, torch.arange(COUNT), rows_at_first())
    call: Any = torch.compile(collection, backend="aot_eager", fullgraph=True) if compiles else collection
    lengths = torch.tensor([3, 0, 3, 1])

    def means(weights: Tensor) -> Tensor:
        batch = KeyedJaggedTensor(
            ["a", "b"], torch.cat([BAG_IDS, BAG_IDS]), torch.cat([weights, weights.detach()]), lengths.repeat(2)
        )
        found = call(batch)
        sums = functional.embedding_bag(
            BAG_IDS, rows_of(second), BAG_OFFSETS, mode="sum", per_sample_weights=weights.detach()
        )
        assert torch.allclose(found[:, 1].detach(), sums, atol=1e-6)
        return found[:, 0]

    check_means(means, first, SparseOptimizer(modules=[collection]).step)


def test_weights_that_add_up_to_zero_give_zero_and_no_gradient(table_name: Callable[[], str]) -> None:
    bag = bag_of(table_name())
    before, weights = rows_of(bag.table), torch.tensor([1.0, -1.0, 0.0], requires_grad=True)
    outputs = bag(torch.tensor([1, 2, 3]), torch.tensor([0, 2]), weights)
    assert outputs.eq(0).all()
    outputs.sum().backward()
    SparseOptimizer(modules=[bag]).step()
    assert weights.grad is not None
    assert weights.grad.eq(0).all()
    assert torch.equal(rows_of(bag.table), before)


def test_gradients_of_weights_pass_gradcheck(table_name: Callable[[], str]) -> None:
    bag = bag_of(table_name())
    bag.frozen = True
    weights = WEIGHTS.double().requires_grad_()

    def means(weights: Tensor) -> Tensor:
        return bag(BAG_IDS, BAG_OFFSETS, weights.float()).double()

    assert torch.autograd.gradcheck(means, [weights], eps=1e-2, atol=1e-2, rtol=1e-2)


def test_a_maximum_takes_no_weights(table_name: Callable[[], str]) -> None:
    with pytest.raises(ValueError, match='per_sample_weights need mode "sum" or "mean", got mode \'max\''):
        bag_of(table_name(), "max")(BAG_IDS, BAG_OFFSETS, WEIGHTS)


# Narrow ids.

NARROW = [torch.int32, torch.int16, torch.int8, torch.uint8]
REFUSED = [torch.bool, torch.float32, torch.float16, torch.uint16, torch.uint32]


def outputs_for(module: Any, ids: Tensor) -> Tensor:
    """What a module of any kind gives for ids of any type."""
    if isinstance(module, DistEmbeddingBag):
        return module(ids, OFFSETS)
    if isinstance(module, DistEmbedding | HashTable):
        return module(ids)
    found = module(KeyedJaggedTensor(["seen"], ids, lengths=torch.tensor([2, 1])))
    return found["seen"].values() if isinstance(found, dict) else found.squeeze(1)


@each_kind
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_ids_train_as_wide_ones(dtype: torch.dtype, kind: Kind, pair: Pair) -> None:  # noqa: F811
    for number in range(2):
        outputs = outputs_for(pair.module, IDS.to(dtype))
        rival = pair.outputs()[1]
        assert torch.equal(outputs.detach(), rival.detach())
        pair.rival.zero_grad()
        for each in (outputs, rival):
            each.sum().mul(number + 1).backward()
        pair.step()
    pair.assert_equal_rows()


@each_kind
@pytest.mark.parametrize("dtype", REFUSED, ids=str)
def test_ids_of_other_types_are_refused(dtype: torch.dtype, kind: Kind, pair: Pair) -> None:  # noqa: F811
    with pytest.raises(TypeError, match="ids must be int64, uint64, int32, int16, int8 or uint8, got torch"):
        outputs_for(pair.module, IDS.to(dtype))


RAW: dict[str, Callable[[Table, Tensor], Any]] = {
    "emb_read": lambda t, ids: ops.emb_read.table(t.handle, ids, DIM),
    "emb_read.places": lambda t, ids: ops.emb_read.places(t.handle, ids, DIM),
    "emb_write": lambda t, ids: ops.emb_write.table(t.handle, ids, torch.ones(3, DIM)),
    "emb_update": lambda t, ids: ops.emb_update.table(t.handle, ids, torch.ones(3, DIM)),
    "emb_bag": lambda t, ids: ops.emb_bag(t.handle, ids, OFFSETS_OF_3, DIM, 0),
    "emb_prefetch": lambda t, ids: ops.emb_wait_result(ops.emb_prefetch.table(t.handle, ids), DIM),
    "hashtable_lookup": lambda t, ids: ops.hashtable_lookup(t.handle, ids, DIM, True),
    "hashtable_delete": lambda t, ids: ops.hashtable_delete(t.handle, ids),
    "accept_grad": lambda t, ids: (
        ops.accept_grad(t.collector, t.handle, ids, torch.ones(3, DIM)),
        ops.collected_grads(t.collector, t.handle),
        ops.clear_grads(t.collector),
    )[1],
    "unique": lambda t, ids: ops.unique(ids),
    "merge_gradients": lambda t, ids: ops.merge_gradients(ids, torch.ones(3, DIM)),
    "cross_ids": lambda t, ids: ops.cross_ids([ids, ids]),
    "ngram_ids": lambda t, ids: ops.ngram_ids(ids, 2, 2, 10),
    "prefix_ids": lambda t, ids: ops.prefix_ids(ids, [8, 8, 8]),
    "bucket_ids": lambda t, ids: ops.bucket_ids(ids, 10),
}
OFFSETS_OF_3 = torch.tensor([0, 2, 3])


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", RAW)
def test_operators_take_narrow_ids_as_wide_ones(name: str, dtype: torch.dtype, table_name: Callable[[], str]) -> None:
    tables = [bag_of(table_name()).table for _ in range(2)]
    ids = torch.tensor([7, 2, 7])
    narrow, wide = (RAW[name](table, given) for table, given in zip(tables, (ids.to(dtype), ids), strict=True))
    for one, other in zip(as_list(narrow), as_list(wide), strict=True):
        if one.dtype != torch.int32:  # Places tell of a table.
            assert torch.equal(one, other)
    assert torch.equal(rows_of(tables[0]), rows_of(tables[1]))


def as_list(found: Any) -> list[Tensor]:
    return [] if found is None else [found] if isinstance(found, Tensor) else list(found)


def test_fakes_of_narrow_ids_have_the_types_of_results() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    ids, grads = torch.tensor([3, 1, 3], dtype=torch.int16), torch.ones(3, DIM, dtype=torch.float16)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fake_ids, fake_grads = mode.from_tensor(ids), mode.from_tensor(grads)
        fakes = [*ops.unique(fake_ids), *ops.merge_gradients(fake_ids, fake_grads)]
    found = [*ops.unique(ids), *ops.merge_gradients(ids, grads)]
    assert [fake.dtype for fake in fakes] == [each.dtype for each in found]


def test_a_dist_tensor_takes_no_bytes_for_ids(table_name: Callable[[], str]) -> None:
    weight = bag_of(table_name()).weight
    assert torch.equal(weight[torch.tensor([1, 2], dtype=torch.int8)], rows_at_first()[1:3])
    with pytest.raises(TypeError, match="a DistTensor takes no uint8 index, which torch takes for a mask"):
        weight[torch.tensor([1, 0], dtype=torch.uint8)]


# Gradients scaled by frequency.


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("padding", [None, 4])
def test_rows_scale_their_gradients_by_frequency(
    padding: int | None, compiles: bool, table_name: Callable[[], str]
) -> None:
    rival = nn.Embedding(COUNT, DIM, padding, scale_grad_by_freq=True)
    ours = from_embedding(rival, table_name(), optimizer=SGD)
    call: Callable[..., Tensor] = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiles else ours
    compare_steps(ours, call, rival, rival, (BAG_IDS.view(1, 7),))


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("padding", [None, 4])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_scale_their_gradients_by_frequency(
    mode: str, padding: int | None, weighted: bool, compiles: bool, table_name: Callable[[], str]
) -> None:
    """Rows that torch scales, pooled: its own bags divide by the counts of other ids on the CPU."""
    bag = nn.EmbeddingBag(COUNT, DIM, mode=mode, padding_idx=padding, scale_grad_by_freq=True)
    ours = from_embedding(bag, table_name(), optimizer=SGD)
    call: Callable[..., Tensor] = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiles else ours
    rival = nn.Embedding(COUNT, DIM, scale_grad_by_freq=True, _weight=bag.weight.detach().clone())
    places = torch.where(BAG_IDS == 4, 1, torch.arange(len(BAG_IDS))) if padding else torch.arange(len(BAG_IDS))

    def pooled(ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
        return functional.embedding_bag(
            places,
            rival(ids),
            offsets,
            mode=mode,
            per_sample_weights=weights,
            padding_idx=1 if padding else None,
        )

    weights = (WEIGHTS,) if weighted and mode == "sum" else ()
    compare_steps(ours, call, rival, pooled, (BAG_IDS, BAG_OFFSETS, *weights))


def compare_steps(
    ours: Any,
    call: Callable[..., Tensor],
    rival: nn.Module,
    rival_call: Callable[..., Tensor],
    given: tuple[Tensor, ...],
) -> None:
    """Two steps of each, of random gradients, give the same rows."""
    step, rivals = SparseOptimizer(modules=[ours]), torch.optim.SGD(rival.parameters(), lr=1.0)
    for number in range(2):
        outputs, expected = call(*given), rival_call(*given)
        assert torch.allclose(outputs, expected, atol=1e-5)
        grads = torch.randn(expected.shape, generator=torch.Generator().manual_seed(number))
        outputs.backward(grads)
        expected.backward(grads)
        for optimizer in (step, rivals):
            optimizer.step()
            optimizer.zero_grad()
    (weight,) = rival.parameters()
    assert torch.allclose(rows_of(ours.table), weight.detach(), atol=1e-5)


def test_frequencies_are_those_of_each_lookup(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(
        COUNT, DIM, table_name(), optimizer=SGD, initializer={"kind": "zeros"}, scale_grad_by_freq=True
    )
    for ids in ([1, 1, 2], [1, 2, 2]):
        module(torch.tensor(ids)).sum().backward()
    SparseOptimizer(modules=[module]).step()
    assert torch.equal(rows_of(module.table)[:3], torch.tensor([0.0, -2.0, -2.0]).unsqueeze(1).expand(3, DIM))
    assert "scale_grad_by_freq=True" in repr(module)


def test_maxima_have_no_frequencies(table_name: Callable[[], str]) -> None:
    for call in (
        lambda: bag_of(table_name(), "max", scale_grad_by_freq=True),
        lambda: embedding_bag(BAG_IDS, bag_of(table_name()).table, BAG_OFFSETS, "max", scale_grad_by_freq=True),
    ):
        with pytest.raises(ValueError, match='scale_grad_by_freq goes with mode "sum" or "mean", got mode "max"'):
            call()


@pytest.mark.parametrize("open_module", [DistEmbedding, DistEmbeddingBag])
def test_max_norm_is_refused_with_the_way(open_module: Any, table_name: Callable[[], str]) -> None:
    name, weight = table_name(), rows_at_first()
    with pytest.raises(ValueError, match=re.escape(f"{open_module.__name__}: max_norm changes rows when they are")):
        open_module(COUNT, DIM, name, max_norm=1.0)

    # The way that the error names gives the rows of torch.
    rival = nn.Embedding(COUNT, DIM, max_norm=1.0, _weight=weight.clone())
    ours = bag_of(name).weight
    ids = BAG_IDS.unique()
    rival(ids)
    ours[ids] = torch.renorm(ours[ids], 2, 0, 1.0)
    assert torch.allclose(ours[torch.arange(COUNT)], rival.weight.detach(), atol=1e-6)


# Several padding ids.


@pytest.mark.parametrize("compiles", [False, True])
def test_several_padding_ids_get_no_gradient_and_keep_their_rows(compiles: bool, table_name: Callable[[], str]) -> None:
    module = DistEmbedding(COUNT, DIM, table_name(), padding_idx=[4, -5, 4], optimizer=SGD, scale_grad_by_freq=False)
    assert module.padding_idx == (4, 7)
    assert module.weight[[4, 7]].eq(0).all()
    module.weight[torch.arange(COUNT)] = before = rows_at_first()
    call: Callable[..., Tensor] = torch.compile(module, backend="aot_eager", fullgraph=True) if compiles else module
    outputs = call(BAG_IDS)
    assert torch.equal(outputs.detach(), before[BAG_IDS])
    outputs.sum().backward()
    SparseOptimizer(modules=[module]).step()
    counts = torch.bincount(BAG_IDS, minlength=COUNT).float()
    counts[[4, 7]] = 0
    assert torch.allclose(rows_of(module.table), before - counts.unsqueeze(1))
    assert module.table.statistics()["updates"] == 3
    assert torch.equal(embedding(BAG_IDS, module.table, [4, 7]).detach(), rows_of(module.table)[BAG_IDS])


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_count_no_padding_id_of_several(mode: str, compiles: bool, table_name: Callable[[], str]) -> None:
    several = bag_of(table_name(), mode, padding_idx=[4, 2])
    single = bag_of(table_name(), mode, padding_idx=4)
    call: Callable[..., Tensor] = torch.compile(several, backend="aot_eager", fullgraph=True) if compiles else several
    for bag in (several, single):
        bag.weight[torch.arange(COUNT)] = rows_at_first()
    ids = torch.where(BAG_IDS == 2, 4, BAG_IDS)
    outputs, expected = call(BAG_IDS, BAG_OFFSETS), single(ids, BAG_OFFSETS)
    assert torch.equal(outputs, expected)
    for each in (outputs, expected):
        each.backward(torch.arange(each.numel(), dtype=torch.float32).view(each.shape))
    SparseOptimizer(modules=[several, single]).step()
    assert torch.equal(rows_of(several.table), rows_of(single.table))
    assert several.table.statistics()["updates"] == single.table.statistics()["updates"]


def test_padding_ids_stay_where_others_leave(table_name: Callable[[], str]) -> None:
    eviction = {"policy": "lru", "capacity": 4}
    module = DistEmbedding(None, DIM, table_name(), padding_idx=(1, 2), eviction=eviction)
    assert module.table.config.eviction is not None
    assert module.table.config.eviction["keep"] == [1, 2]
    assert "padding_idx=(1, 2)" in repr(module)


@pytest.mark.parametrize(
    ("size", "padding", "message"),
    [
        (COUNT, [1, COUNT], f"padding_idx must be within num_embeddings {COUNT}, got {COUNT}"),
        (None, [1, 2**63], f"padding_idx must be an int64, got {2**63}"),
    ],
)
def test_each_padding_id_is_checked(
    size: int | None, padding: list[int], message: str, table_name: Callable[[], str]
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        DistEmbedding(size, DIM, table_name(), padding_idx=padding)


@pytest.mark.parametrize(("given", "kept"), [([], None), ([3], 3), (3, 3), ((3, 3), 3)])
def test_one_padding_id_is_kept_as_one(given: Any, kept: int | None, table_name: Callable[[], str]) -> None:
    assert DistEmbedding(COUNT, DIM, table_name(), padding_idx=given).padding_idx == kept


def test_uint64_ids_have_padding_ids(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(None, DIM, table_name(), padding_idx=[-1, 5], optimizer=SGD, initializer={"kind": "zeros"})
    module(torch.tensor([2**64 - 1, 5, 6], dtype=torch.uint64)).sum().backward()
    SparseOptimizer(modules=[module]).step()
    assert module.weight[[-1, 5, 6]].sum(1).tolist() == [0.0, 0.0, -3.0]
