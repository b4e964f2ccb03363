"""A collection of bags against one `torch.nn.EmbeddingBag` a table: outputs, gradients, training, eager and compiled.

Shape suffixes: F features, B examples, N ids of all features, D dims of all features together.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from examples import steps
from hypothesis import given, settings
from hypothesis import strategies as st
from test_compile import GraphCounter
from tiers import cells
from torch import Tensor, nn

from recstore_ops import RecStoreClient, SparseOptimizer, set_merge
from recstore_ops.config.collection_config import EmbeddingBagConfig
from recstore_ops.nn.embedding_bag_collection import RecStoreEmbeddingBagCollection
from recstore_ops.ops import feature_operators
from recstore_ops.sparse import KeyedJaggedTensor, KeyedTensor

# torch's Adagrad makes sparse tensors without saying whether they shall be checked.
pytestmark = [
    pytest.mark.tier("test"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    pytest.mark.usefixtures("fresh_compiler"),
]

NUM_IDS, STEPS, BATCH = 30, steps(50), 6
TOLERANCE = 1e-5
"""As in `test_parity.py`: float32 after 50 steps of feedback."""

SGD = {"kind": "sgd", "lr": 0.1}
ADAGRAD = {"kind": "adagrad", "lr": 0.1, "convention": "torch", "eps": 1e-3}


@dataclass(frozen=True)
class Case:
    """Tables as `name: (dim, pooling, features)`, and what the batches are like."""

    tables: dict[str, tuple[int, str, tuple[str, ...]]]
    keys: tuple[str, ...]
    weighted: bool = False
    fused: bool = True
    cuts_ids: bool = False
    """Whether a graph needs sizes that only the data tells."""


CASES = {
    "sum": Case({"u": (4, "sum", ("a",)), "i": (4, "sum", ("b",))}, ("a", "b")),
    "mean": Case({"u": (4, "mean", ("a",)), "i": (4, "mean", ("b",))}, ("a", "b")),
    "sum and mean": Case({"u": (4, "sum", ("a",)), "i": (4, "mean", ("b",))}, ("a", "b")),
    "weights": Case({"u": (4, "sum", ("a",)), "i": (4, "sum", ("b",))}, ("a", "b"), weighted=True),
    "a shared table": Case({"u": (4, "sum", ("a", "b", "c"))}, ("a", "b", "c")),
    "a shared table, mean": Case({"u": (4, "mean", ("a", "b")), "i": (4, "sum", ("c",))}, ("a", "b", "c")),
    "several dims": Case({"u": (2, "sum", ("a",)), "i": (5, "mean", ("b", "c"))}, ("a", "b", "c")),
    "several dims, weights": Case({"u": (2, "sum", ("a", "c")), "i": (5, "sum", ("b",))}, ("a", "b", "c"), True),
    "another order": Case({"u": (2, "sum", ("a", "c")), "i": (5, "mean", ("b",))}, ("c", "b", "a")),
    "another order, weights": Case({"u": (3, "sum", ("a", "c")), "i": (3, "sum", ("b",))}, ("b", "c", "a"), True),
    "several tables a feature": Case(
        {"u": (4, "sum", ("a", "b")), "i": (4, "mean", ("b",))}, ("b", "a"), cuts_ids=True
    ),
    "several tables a feature, weights": Case(
        {"u": (2, "sum", ("a", "b")), "i": (4, "sum", ("b",))}, ("a", "b"), True, cuts_ids=True
    ),
    "one by one": Case(
        {"u": (2, "sum", ("a", "c")), "i": (5, "mean", ("b",))}, ("c", "b", "a"), fused=False, cuts_ids=True
    ),
    "one by one, weights": Case(
        {"u": (4, "sum", ("a", "c")), "i": (4, "sum", ("b",))}, ("a", "b", "c"), True, fused=False, cuts_ids=True
    ),
}


class Rival(nn.Module):
    """The same tables as `torch.nn.EmbeddingBag`s."""

    def __init__(self, ours: RecStoreEmbeddingBagCollection) -> None:
        super().__init__()
        self.configs = ours.embedding_bag_configs()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(
                NUM_IDS,
                config.embedding_dim,
                mode=config.pooling,
                include_last_offset=True,
                sparse=True,
                _weight=ours.embedding_bags[config.name].weight[torch.arange(NUM_IDS)],
            )
            for config in self.configs
        )

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """The pooled features side by side, `[B, D]`."""
        parts = features.to_dict()
        pooled = []
        for config, bag in zip(self.configs, self.bags, strict=True):
            for name in config.feature_names:
                part = parts[name]
                pooled.append(bag(part.values(), part.offsets(), part.weights_or_none()))
        return torch.cat(pooled, dim=1)

    def weight(self, name: str) -> Tensor:
        place = [config.name for config in self.configs].index(name)
        return self.bags.get_submodule(str(place)).get_parameter("weight")


def collection(case: Case, prefix: str, **options: Any) -> RecStoreEmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(f"{prefix}/{name}", NUM_IDS, dim, list(features), pooling=pooling)
        for name, (dim, pooling, features) in case.tables.items()
    ]
    options = {"initializer": {"kind": "normal", "std": 0.5}, "enable_fusion": case.fused, **options}
    return RecStoreEmbeddingBagCollection(configs, **options)


def batches(case: Case, count: int = STEPS) -> Iterator[KeyedJaggedTensor]:
    """Bags with duplicate ids, empty ones among them; sometimes all are empty, sometimes there are none."""
    generator = torch.Generator().manual_seed(0)
    for step in range(count):
        bags = len(case.keys) * (0 if step % 10 == 9 else BATCH)
        lengths = torch.randint(0, 1 if step % 10 == 8 else 5, (bags,), generator=generator)
        values = torch.randint(NUM_IDS, (int(lengths.sum()),), generator=generator)
        weights = 0.5 * torch.randn(len(values), generator=generator) if case.weighted else None
        yield KeyedJaggedTensor(case.keys, values, weights, lengths)


def side_by_side(output: Any) -> Tensor:
    """`[B, F, dim]` or a `KeyedTensor` as `[B, D]`."""
    return output.values() if isinstance(output, KeyedTensor) else output.flatten(1)


def with_own_weights(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """A copy whose weights get a gradient of their own."""
    weights = batch.weights_or_none()
    weights = None if weights is None else weights.clone().requires_grad_()
    return KeyedJaggedTensor(batch.keys(), batch.values(), weights, batch.lengths())


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def assert_same_gradients(ours: RecStoreEmbeddingBagCollection, theirs: Rival) -> None:
    collected = {name: (ids, grads) for name, ids, grads in ours._trace}
    assert len(collected) == len(ours._trace)
    for name, bag in ours.embedding_bags.items():
        expected = theirs.weight(name).grad
        assert expected is not None
        ids, grads = collected.get(name, (torch.empty(0).long(), torch.empty(0, bag.embedding_dim)))
        assert torch.equal(ids, expected.coalesce().indices()[0])
        assert_near(grads, expected.coalesce().values())


def assert_train_alike(
    ours: RecStoreEmbeddingBagCollection,
    forward: Callable[[KeyedJaggedTensor], Any],
    optimizer: dict[str, Any],
    steps: Iterator[KeyedJaggedTensor],
) -> None:
    """Trains both side by side; compares outputs and gradients of each step, and the rows at the end."""
    theirs = Rival(ours)
    kind = torch.optim.SGD if optimizer["kind"] == "sgd" else torch.optim.Adagrad
    options = {key: value for key, value in optimizer.items() if key in ("lr", "eps")}
    rival_optimizer, sparse = kind(theirs.parameters(), **options), SparseOptimizer(modules=[ours])
    generator = torch.Generator().manual_seed(1)
    for batch in steps:
        own, other = with_own_weights(batch), with_own_weights(batch)
        output, expected = side_by_side(forward(own)), theirs(other)
        assert_near(output, expected)

        slope = torch.randn(expected.shape, generator=generator)
        for pooled in (output, expected):
            (pooled * (slope + 0.25 * pooled)).sum().backward()
        assert_same_gradients(ours, theirs)
        if own.weights_or_none() is not None:
            gradients = own.weights().grad, other.weights().grad
            assert gradients[0] is not None
            assert gradients[1] is not None
            assert_near(gradients[0], gradients[1])

        sparse.step()
        rival_optimizer.step()
        rival_optimizer.zero_grad()
        assert ours._trace == []
    for name, bag in ours.embedding_bags.items():
        assert_near(bag.weight[torch.arange(NUM_IDS)], theirs.weight(name).detach())


WITH_SGD_BEFORE_CHANGE = ("mean", "several dims, weights")


@pytest.mark.parametrize(
    ("case", "optimizer"),
    [
        *(pytest.param(case, ADAGRAD, id=f"{name}-adagrad") for name, case in CASES.items()),
        *(
            pytest.param(*each.values, SGD, id=f"{each.id}-sgd", marks=each.marks)
            for each in cells(CASES, *WITH_SGD_BEFORE_CHANGE)
        ),
    ],
)
def test_a_collection_trains_as_the_bags_of_torch(
    case: Case, optimizer: dict[str, Any], table_name: Callable[[], str]
) -> None:
    ours = collection(case, table_name(), optimizer=optimizer)
    assert_train_alike(ours, ours, optimizer, batches(case))


COMPILED_BEFORE_CHANGE = ("sum and mean", "a shared table, mean")


def eager_and_compiled() -> list[Any]:
    """Each case both ways; most are compiled in `make test-all` only."""
    return [
        pytest.param(
            case,
            compiles,
            id=f"{'compiled' if compiles else 'eager'}-{name}",
            marks=[pytest.mark.tier("all")] if compiles and name not in COMPILED_BEFORE_CHANGE else [],
        )
        for compiles in (False, True)
        for name, case in CASES.items()
    ]


@pytest.mark.parametrize(("case", "compiles"), eager_and_compiled())
def test_a_forward_without_gradients_gives_the_same(case: Case, compiles: bool, table_name: Callable[[], str]) -> None:
    ours = collection(case, table_name())
    forward = torch.compile(ours, backend="aot_eager", dynamic=True) if compiles else ours
    for batch in batches(case, 10):
        with torch.no_grad():
            pooled = side_by_side(forward(batch))
        assert not pooled.requires_grad
        assert torch.equal(pooled, side_by_side(ours(batch)).detach())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.tier("all")
def test_a_compiled_collection_trains_as_the_bags_of_torch(case: Case, table_name: Callable[[], str]) -> None:
    ours = collection(case, table_name(), optimizer=ADAGRAD)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(capture_scalar_outputs=case.cuts_ids):
        assert_train_alike(ours, compiled, ADAGRAD, batches(case))


class Model(nn.Module):
    """A collection and a linear layer."""

    def __init__(self, case: Case, prefix: str) -> None:
        super().__init__()
        self.bags = collection(case, prefix, optimizer=ADAGRAD)
        dims = [bag.embedding_dim for bag in self.bags.embedding_bags.values()]
        columns = sum(dims[output.table] for output in self.bags._outputs)
        self.head = nn.Linear(columns, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.head(side_by_side(self.bags(features))).squeeze(1)


def train(model: Model, forward: Callable[[KeyedJaggedTensor], Tensor], steps: list[KeyedJaggedTensor]) -> list[float]:
    dense, sparse = torch.optim.SGD(model.parameters(), lr=0.1), SparseOptimizer(modules=[model])
    losses = []
    for batch in steps:
        dense.zero_grad()
        loss = (forward(batch) - 1).square().mean()
        loss.backward()
        dense.step()
        sparse.step()
        losses.append(loss.item())
    return losses


def paired_models(case: Case, table_name: Callable[[], str]) -> tuple[Model, Model]:
    models = Model(case, table_name()), Model(case, table_name())
    models[1].load_state_dict(models[0].state_dict())
    ids = torch.arange(NUM_IDS)
    bags = [model.bags.embedding_bags.values() for model in models]
    for ours, theirs in zip(*bags, strict=True):
        theirs.weight[ids] = ours.weight[ids]
    return models


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param("sum and mean", "aot_eager", marks=pytest.mark.tier("all")),
        pytest.param("sum and mean", "inductor", marks=pytest.mark.tier("all")),
        pytest.param("several dims, weights", "aot_eager", marks=pytest.mark.tier("all")),
        pytest.param("several dims, weights", "inductor", marks=pytest.mark.tier("all")),
        ("another order", "aot_eager"),
        pytest.param("another order", "inductor", marks=pytest.mark.tier("all")),
    ],
)
def test_a_model_compiled_whole_is_one_graph_each_way_and_never_compiled_again(
    name: str, backend: str, table_name: Callable[[], str]
) -> None:
    eager, model = paired_models(CASES[name], table_name)
    steps = [batch for batch in batches(CASES[name]) if batch.values().numel() > 1]
    counter = GraphCounter(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)

    with torch._dynamo.config.patch(error_on_recompile=True):
        losses = train(model, compiled, steps)

    assert counter.graphs == {"forward": 1, "backward": 1}
    assert losses == pytest.approx(train(eager, eager, steps), abs=1e-5)


def test_batches_of_one_size_need_no_dynamic_shapes(table_name: Callable[[], str]) -> None:
    eager, model = paired_models(CASES["sum"], table_name)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.ones(2 * BATCH, dtype=torch.int64)
    ids = [torch.randint(NUM_IDS, (2 * BATCH,), generator=generator) for _ in range(STEPS)]
    steps = [KeyedJaggedTensor(("a", "b"), values, lengths=lengths) for values in ids]
    counter = GraphCounter("aot_eager")

    with torch._dynamo.config.patch(error_on_recompile=True):
        losses = train(model, torch.compile(model, backend=counter, fullgraph=True), steps)

    assert counter.graphs == {"forward": 1, "backward": 1}
    assert losses == pytest.approx(train(eager, eager, steps), abs=1e-5)


SHARED = Case({"u": (1, "sum", ("a", "b"))}, ("a", "b"))


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("fused", [True, False])
def test_features_of_one_table_make_one_step_an_id(
    fused: bool, is_compiled: bool, table_name: Callable[[], str]
) -> None:
    if is_compiled and not fused:
        pytest.skip("without fusion the ids are cut by the data")
    options = {"optimizer": {"kind": "adagrad", "lr": 0.1}, "initializer": "zeros", "enable_fusion": fused}
    bags = collection(SHARED, table_name(), **options)
    forward = torch.compile(bags, fullgraph=True) if is_compiled else bags
    features = KeyedJaggedTensor(["a", "b"], torch.tensor([7, 7]), lengths=torch.tensor([1, 1]))

    (forward(features).flatten() * torch.tensor([0.1, 0.2])).sum().backward()
    SparseOptimizer(modules=[bags]).step()

    # 0.3 / sqrt(0.3^2) = 1: one step of the learning rate, not two.
    assert bags(features).flatten().tolist() == pytest.approx([-0.1, -0.1])


@pytest.mark.parametrize("kind", ["python", "native"])
def test_either_merge_gives_the_same_trace(kind: Any, table_name: Callable[[], str]) -> None:
    bags = collection(CASES["a shared table"], table_name())
    for batch in batches(CASES["a shared table"], 3):
        bags(batch).square().sum().backward()
    expected = bags._trace
    bags.reset_trace()
    assert bags._trace == []
    set_merge(kind)
    try:
        for batch in batches(CASES["a shared table"], 3):
            bags(batch).square().sum().backward()
    finally:
        set_merge("native")
    for actual, other in zip(bags._trace, expected, strict=True):
        assert actual[0] == other[0]
        assert torch.equal(actual[1], other[1])
        assert torch.equal(actual[2], other[2])


def test_the_trace_updates_tables_through_the_client(table_name: Callable[[], str]) -> None:
    stepped, updated = (collection(CASES["several dims"], table_name(), optimizer=SGD) for _ in range(2))
    for first, second in zip(stepped.embedding_bags.values(), updated.embedding_bags.values(), strict=True):
        second.weight[torch.arange(NUM_IDS)] = first.weight[torch.arange(NUM_IDS)]
    for batch in batches(CASES["several dims"], 5):
        for bags in (stepped, updated):
            bags(batch).values().square().sum().backward()
        SparseOptimizer(modules=[stepped]).step()
        for name, ids, grads in updated._trace:
            updated.kv_client.update(name, ids, grads)
        updated.reset_trace()
    for first, second in zip(stepped.embedding_bags.values(), updated.embedding_bags.values(), strict=True):
        assert torch.equal(first.weight[torch.arange(NUM_IDS)], second.weight[torch.arange(NUM_IDS)])


INT64 = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([0, 1, 2**30, 2**31, 2**30 + 1, 2**62, -1])


@pytest.fixture(scope="module")
def open_bags() -> RecStoreEmbeddingBagCollection:
    return RecStoreEmbeddingBagCollection(
        [
            EmbeddingBagConfig("any id/sum", None, 3, ["a", "b"]),
            EmbeddingBagConfig("any id/mean", None, 2, ["c"], pooling="mean"),
        ],
        initializer={"kind": "normal", "std": 1.0},
    )


@st.composite
def any_batches(draw: st.DrawFn) -> KeyedJaggedTensor:
    keys = draw(st.permutations(["a", "b", "c"]))
    lengths = draw(
        st.integers(0, 4).flatmap(lambda size: st.lists(st.integers(0, 3), min_size=3 * size, max_size=3 * size))
    )
    values = draw(st.lists(INT64, min_size=sum(lengths), max_size=sum(lengths)))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return KeyedJaggedTensor(keys, torch.tensor(values, dtype=torch.int64), lengths=torch.tensor(lengths, dtype=dtype))


@settings(deadline=None)  # Machines that run tests are busy.
@given(features=any_batches())
def test_any_batch_of_any_int64_is_pooled_as_torch_pools_its_rows(
    open_bags: RecStoreEmbeddingBagCollection, features: KeyedJaggedTensor
) -> None:
    open_bags.reset_trace()
    pooled = open_bags(features)
    pooled.values().square().sum().backward()
    gradients: dict[str, dict[int, Tensor]] = {}
    for key, table, mode in (("a", "any id/sum", "sum"), ("b", "any id/sum", "sum"), ("c", "any id/mean", "mean")):
        part = features[key]
        rows_ND = open_bags.embedding_bags[table].weight[part.values()].requires_grad_()
        places_N, offsets = torch.arange(len(rows_ND)), part.offsets().long()
        expected = nn.functional.embedding_bag(places_N, rows_ND, offsets, mode=mode, include_last_offset=True)
        assert_near(pooled[key], expected)
        expected.square().sum().backward()
        assert rows_ND.grad is not None
        for row, grad in zip(part.values().tolist(), rows_ND.grad, strict=True):
            sums = gradients.setdefault(table, {})
            sums[row] = sums.get(row, torch.zeros_like(grad)) + grad
    for table, ids, grads in open_bags._trace:
        expected = gradients.pop(table, {})
        assert ids.tolist() == sorted(expected)
        for row, grad in zip(ids.tolist(), grads, strict=True):
            torch.testing.assert_close(grad, expected[row], rtol=1e-5, atol=1e-5)
    assert gradients == {}


def test_equal_ids_of_different_tables_are_different_rows(table_name: Callable[[], str]) -> None:
    bags = RecStoreEmbeddingBagCollection(
        [EmbeddingBagConfig(table_name(), None, 2, [key]) for key in "ab"], initializer="zeros", optimizer=SGD
    )
    # With fused keys the second id of "a" would be the row 0 of table 1.
    features = KeyedJaggedTensor(["a", "b"], torch.tensor([0, 1 << 30, 0]), lengths=torch.tensor([2, 1]))
    (bags(features) * torch.tensor([1.0, 10.0]).view(1, 2, 1)).sum().backward()
    SparseOptimizer(modules=[bags]).step()
    first, second = (bag.weight for bag in bags.embedding_bags.values())
    assert first[[0, 1 << 30]].flatten().tolist() == pytest.approx([-0.1] * 4)
    assert second[[0, 1 << 30]].flatten().tolist() == pytest.approx([-1.0, -1.0, 0.0, 0.0])


def test_outputs_stand_side_by_side_where_dims_agree_and_keyed_where_they_do_not(
    table_name: Callable[[], str],
) -> None:
    same, keyed = CASES["a shared table, mean"], CASES["several dims"]
    assert collection(same, table_name())(next(batches(same))).shape == (BATCH, 3, 4)
    asked = collection(same, table_name(), keyed_output=True)(next(batches(same)))
    assert asked.keys() == ["a", "b", "c"]
    assert asked.length_per_key() == [4, 4, 4]
    output = collection(keyed, table_name())(next(batches(keyed)))
    assert isinstance(output, KeyedTensor)
    assert output.length_per_key() == [2, 5, 5]
    assert output["c"].shape == (BATCH, 5)


def test_a_feature_of_several_tables_is_named_with_its_table(table_name: Callable[[], str]) -> None:
    case = CASES["several tables a feature"]
    bags = collection(case, "named", keyed_output=True)
    assert bags.feature_keys == ["a", "b"]
    assert bags(next(batches(case))).keys() == ["a", "b@named/u", "b@named/i"]
    assert bags._config_names == {"a": "named/u", "b@named/u": "named/u", "b@named/i": "named/i"}


def test_both_ways_of_lookup_give_the_same(table_name: Callable[[], str]) -> None:
    for name in ("sum", "weights", "another order, weights"):
        bags = collection(CASES[name], table_name())
        batch = next(batches(CASES[name]))
        fused = bags(batch)
        bags.set_fusion(False)
        assert torch.equal(bags(batch), fused)


def test_the_description_of_the_tables_can_be_read(table_name: Callable[[], str]) -> None:
    name = table_name()
    bags = RecStoreEmbeddingBagCollection(
        [
            {"name": name, "num_embeddings": 10, "embedding_dim": 4, "feature_names": ["a", "b"], "pooling": "mean"},
            EmbeddingBagConfig(f"{name}/default", None, 4),
        ]
    )
    assert bags.embedding_bag_configs() == [
        EmbeddingBagConfig(name, 10, 4, ["a", "b"], pooling="mean"),
        EmbeddingBagConfig(f"{name}/default", None, 4, [f"{name}/default"], pooling="sum"),
    ]
    assert bags.feature_keys == ["a", "b", f"{name}/default"]
    assert bags._config_names == {"a": name, "b": name, f"{name}/default": f"{name}/default"}
    assert isinstance(bags.kv_client, RecStoreClient)
    assert bags.kv_client.pull(name, torch.arange(3)).shape == (3, 4)


def test_a_table_has_its_own_optimizer_and_initial_values_or_those_of_the_collection(
    table_name: Callable[[], str],
) -> None:
    own: dict[str, Any] = {"optimizer": {"kind": "sgd", "lr": 1.0}, "initializer": {"kind": "constant", "value": 2.0}}
    bags = RecStoreEmbeddingBagCollection(
        [EmbeddingBagConfig(table_name(), None, 1, ["a"], **own), EmbeddingBagConfig(table_name(), None, 1, ["b"])],
        lr=0.25,
        initializer="zeros",
    )
    features = KeyedJaggedTensor(["a", "b"], torch.tensor([5, 5]), lengths=torch.tensor([1, 1]))
    assert bags(features).flatten().tolist() == [2.0, 0.0]
    bags(features).sum().backward()
    SparseOptimizer(modules=[bags]).step()
    assert bags(features).flatten().tolist() == [1.0, -0.25]


def test_pickles_reopen_the_tables(table_name: Callable[[], str]) -> None:
    case = CASES["several dims"]
    bags, batch = collection(case, table_name()), next(batches(case))
    other = pickle.loads(pickle.dumps(bags))
    assert torch.equal(other(batch).values(), bags(batch).values())
    other(batch).values().sum().backward()
    assert bags._trace == []
    SparseOptimizer(modules=[other]).step()
    assert torch.equal(other(batch).values(), bags(batch).values())


@pytest.mark.embedded_only("tables on servers cannot be copied")
def test_a_deep_copy_has_tables_of_its_own_under_the_names_of_its_configuration(
    table_name: Callable[[], str],
) -> None:
    case = CASES["several dims"]
    bags, batch = collection(case, table_name()), next(batches(case))
    other = copy.deepcopy(bags)
    before = bags(batch).values()
    assert torch.equal(other(batch).values(), before)
    assert other(batch).keys() == bags(batch).keys()
    other(batch).values().sum().backward()
    SparseOptimizer(modules=[other]).step()
    assert torch.equal(bags(batch).values(), before)
    assert not torch.equal(other(batch).values(), before)
    names = {name: bag.name for name, bag in other.embedding_bags.items()}
    assert names == {name: f"{name}.copy" for name in bags.embedding_bags}
    other.load_state_dict(bags.state_dict())
    assert torch.equal(other(batch).values(), before)


def test_fused_ids_hold_the_table_above_the_id(table_name: Callable[[], str]) -> None:
    configs = [EmbeddingBagConfig(table_name(), None, 2, features) for features in (["a"], ["b", "c"])]
    bags = RecStoreEmbeddingBagCollection(configs, fusion_k=4)
    features = KeyedJaggedTensor(["b", "a", "c"], torch.tensor([0, 15, 3, 1]), lengths=torch.tensor([2, 1, 1]))
    assert bags.fused_ids(features).tolist() == [16, 31, 3, 17]
    for outside in (16, -1):
        other = KeyedJaggedTensor(["a", "b", "c"], torch.tensor([outside]), lengths=torch.tensor([1, 0, 0]))
        with pytest.raises(ValueError, match=rf"within \[0, 2\^4\), got {outside}"):
            bags.fused_ids(other)
        assert bags(other).shape == (1, 3, 2)

    configs.append(EmbeddingBagConfig(table_name(), None, 2, ["d"]))
    empty = KeyedJaggedTensor(list("abcd"), torch.tensor([]).long(), lengths=torch.zeros(4).long())
    with pytest.raises(ValueError, match="3 tables do not fit above bit 62"):
        RecStoreEmbeddingBagCollection(configs, fusion_k=62).fused_ids(empty)


def test_a_batch_of_the_same_interface_is_taken(table_name: Callable[[], str]) -> None:
    case = CASES["weights"]
    bags, batch = collection(case, table_name()), next(batches(case))

    class Foreign:
        keys, values, offsets, weights_or_none = batch.keys, batch.values, batch.offsets, batch.weights_or_none

    assert torch.equal(bags(Foreign()), bags(batch))


def test_ids_may_be_int32_or_uint64(table_name: Callable[[], str]) -> None:
    bags = RecStoreEmbeddingBagCollection([EmbeddingBagConfig(table_name(), None, 2, ["a"])])
    lengths = torch.tensor([2, 1])
    expected = bags(KeyedJaggedTensor(["a"], torch.tensor([1, 2, 1]), lengths=lengths))
    for dtype in (torch.int32, torch.uint64):
        features = KeyedJaggedTensor(["a"], torch.tensor([1, 2, 1], dtype=dtype), lengths=lengths)
        output = bags(features)
        assert torch.equal(output, expected)
        output.sum().backward()
    assert bags._trace[0][1].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("keys", "message"),
    [(["a"], r"lacks \['b'\] and has \[\] besides"), (["a", "b", "x"], r"lacks \[\] and has \['x'\] besides")],
)
def test_features_that_are_missing_or_too_many_are_named(
    keys: list[str], message: str, table_name: Callable[[], str]
) -> None:
    bags = collection(CASES["sum"], table_name())
    lengths = torch.zeros(len(keys), dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        bags(KeyedJaggedTensor(keys, torch.tensor([]).long(), lengths=lengths))


@pytest.mark.parametrize("fused", [True, False])
def test_a_batch_refuses_what_the_tables_do_not_take(fused: bool, table_name: Callable[[], str]) -> None:
    bags = collection(CASES["sum and mean"], "refused", enable_fusion=fused)
    lengths = torch.tensor([1, 1])
    with pytest.raises(TypeError, match="features must be a KeyedJaggedTensor, got dict"):
        bags({"a": torch.tensor([1])})
    with pytest.raises(TypeError, match=r"ids must be int64, uint64, .* int8 or uint8, got torch\.float32"):
        bags(KeyedJaggedTensor(["a", "b"], torch.ones(2), lengths=lengths))
    with pytest.raises(IndexError, match=r'id 30 .* table "refused/i" with num_embeddings 30'):
        bags(KeyedJaggedTensor(["a", "b"], torch.tensor([29, 30]), lengths=lengths))
    weighted = collection(CASES["sum"], table_name(), enable_fusion=fused)
    with pytest.raises(TypeError, match=r"per_sample_weights must be float32, got torch\.float64"):
        weighted(KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2]), torch.ones(2).double(), lengths))


FIELDS = {"name": "t", "num_embeddings": 10, "embedding_dim": 2}


@pytest.mark.parametrize(
    ("configs", "options", "error", "message"),
    [
        ([], {}, ValueError, "at least one table"),
        ([FIELDS, FIELDS], {}, ValueError, "distinct names"),
        ([{**FIELDS, "dim": 2}], {}, ValueError, r"EmbeddingBagConfig got unknown fields \['dim'\]"),
        ([{"name": "t"}], {}, ValueError, r"lacks \['embedding_dim', 'num_embeddings'\]"),
        ([{**FIELDS, "name": ""}], {}, ValueError, "needs a name"),
        ([{**FIELDS, "feature_names": ["a", "a"]}], {}, ValueError, "must be distinct"),
        ([{**FIELDS, "feature_names": "ab"}], {}, TypeError, "are a list, got the text 'ab'"),
        ([{**FIELDS, "pooling": "max"}], {}, ValueError, 'the pooling of table "t" must be "sum" or "mean"'),
        (["t"], {}, TypeError, "EmbeddingBagConfig or a dict, got str"),
        ([FIELDS], {"fusion_k": 63}, ValueError, r"fusion_k must be within \[1, 62\], got 63"),
        ([{**FIELDS, "optimizer": "none"}], {}, ValueError, "none"),
    ],
)
def test_a_collection_refuses_a_wrong_description(
    configs: list[Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        RecStoreEmbeddingBagCollection(configs, **options)


def test_the_operators_over_features_pass_opcheck(table_name: Callable[[], str]) -> None:
    bags = collection(CASES["several dims"], table_name())
    tables = [bag.table for bag in bags.embedding_bags.values()]
    handles, collectors = [table.handle for table in tables], [table.collector for table in tables]
    ids, offsets, dims = torch.arange(5), torch.tensor([0, 2, 2, 4, 5]), [2, 5]
    torch.library.opcheck(feature_operators.read_features, (handles, ids, offsets, dims))
    grads, weights = torch.ones(2, 7), torch.ones(5)
    for extra in ((), (weights,)):
        torch.library.opcheck(
            feature_operators.accept_feature_grads, (handles, collectors, ids, offsets, grads, dims, *extra)
        )


def test_the_operators_over_features_keep_their_order() -> None:
    from torch._higher_order_ops.effects import _get_effect

    for op in (feature_operators.read_features, feature_operators.accept_feature_grads):
        assert _get_effect(op) is not None
