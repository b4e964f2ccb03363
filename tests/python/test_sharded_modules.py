"""Modules over sharded tables: each gives on several ranks what it gives in one process."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from sharded_training import VOCABULARY, Group, share
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    HashTable,
    KeyedJaggedTensor,
    RecStoreClient,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
    SparseOptimizer,
)
from recstore_ops.sharding import ShardedPipeline, exchange_statistics, shard_of
from recstore_ops.sharding.ownership import own_ids

pytestmark = pytest.mark.tier("test")

ADAGRAD = {"kind": "adagrad", "lr": 0.1}
BAGS = 24


def bags(step: int) -> tuple[Tensor, Tensor]:
    """The ids of bags of 0 to 4 ids, and their lengths `[BAGS]`."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 5, (BAGS,), generator=generator)
    places = torch.randint(len(VOCABULARY), (int(lengths.sum()),), generator=generator)
    return VOCABULARY[places], lengths


def own_bags(step: int, group: Group, weights: list[int] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The ids, offsets `[B]` and factors of the ids of this rank's bags."""
    ids, lengths = bags(step)
    factors = torch.linspace(0.5, 1.5, len(ids))
    own = share(BAGS, group, weights)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    part = slice(int(ends[own.start]), int(ends[own.stop]))
    offsets = ends[own.start : own.stop] - ends[own.start]
    return ids[part], offsets, factors[part]


def features(step: int, group: Group, keys: list[str]) -> KeyedJaggedTensor:
    """A batch of this rank's bags, other ones for each key."""
    parts = [own_bags(100 * step + number, group) for number in range(len(keys))]
    lengths = [torch.cat([offsets, torch.tensor([len(ids)])]).diff() for ids, offsets, _ in parts]
    return KeyedJaggedTensor(keys, torch.cat([ids for ids, _, _ in parts]), lengths=torch.cat(lengths))


def train_bag(group: Group, name: str, mode: Any, weighted: bool, padding_idx: Any) -> tuple[Tensor, Tensor]:
    """Trains a bag for ten steps; returns the rows and this rank's gradients of the last factors."""
    bag = DistEmbeddingBag(
        None,
        5,
        name,
        mode,
        padding_idx,
        optimizer=ADAGRAD,
        process_group=group,
        **_summed(group),  # type: ignore[arg-type]
    )
    stepper = SparseOptimizer(modules=[bag])
    factors = torch.empty(0)
    for step in range(10):
        ids, offsets, factors = own_bags(step, group)
        factors.requires_grad_()
        pooled = bag(ids, offsets, factors if weighted else None)
        (pooled - 1).square().sum().backward()
        stepper.step()
    rows = DistEmbedding(None, 5, name, optimizer=ADAGRAD, process_group=group)
    with torch.no_grad():
        return rows(VOCABULARY), torch.empty(0) if factors.grad is None else factors.grad


def _summed(group: Group) -> dict[str, Any]:
    return {} if group is None else {"grad_reduce": "sum"}


@pytest.mark.parametrize(
    ("mode", "weighted", "padding_idx"),
    [
        ("sum", False, None),
        ("sum", True, 7),
        ("mean", False, 7),
        ("mean", False, None),
        ("mean", True, None),
        ("mean", True, [int(id) for id in VOCABULARY[:3]]),
        ("max", False, -1),
    ],
)
def test_bags_train_as_in_one_process(
    ranks: Ranks, table_name: Callable[[], str], mode: str, weighted: bool, padding_idx: Any
) -> None:
    name = table_name()
    alone, grads = train_bag(None, name, mode, weighted, padding_idx)
    found = ranks.run(3, train_bag, name, mode, weighted, padding_idx)
    for rows, _ in found:
        torch.testing.assert_close(rows, alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.cat([part for _, part in found]), grads, rtol=0, atol=1e-5)


def scaled_rows(group: Group, name: str, is_bag: bool, padding_idx: int | None) -> Tensor:
    """Rows after one step of -1 for each gradient of ones, divided by how often an id occurs on its rank."""
    options: dict[str, Any] = {"initializer": {"kind": "zeros"}, "optimizer": {"kind": "sgd", "lr": 1.0}}
    options |= {"process_group": group, "scale_grad_by_freq": True, "padding_idx": padding_idx, **_summed(group)}
    ids, offsets, _ = own_bags(0, group)
    if is_bag:
        module: Any = DistEmbeddingBag(None, 2, name, "sum", **options)
        module(ids, offsets).sum().backward()
    else:
        module = DistEmbedding(None, 2, name, **options)
        module(ids).sum().backward()
    SparseOptimizer(modules=[module]).step()
    options |= {"padding_idx": None, "scale_grad_by_freq": False}
    reader = DistEmbedding(None, 2, name, **options)
    with torch.no_grad():
        return torch.stack([reader(VOCABULARY)[:, 0], torch.isin(VOCABULARY, ids).float()])


@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("is_bag", [False, True])
def test_frequencies_are_those_of_a_ranks_batch(
    ranks: Ranks, table_name: Callable[[], str], is_bag: bool, has_padding: bool
) -> None:
    padding_idx = int(bags(0)[0][0]) if has_padding else None
    found = ranks.run(2, scaled_rows, table_name(), is_bag, padding_idx)
    expected = -torch.stack([has_id for _, has_id in found]).sum(0)
    if has_padding:
        expected[padding_idx == VOCABULARY] = 0
    for rows, _ in found:
        torch.testing.assert_close(rows, expected)


def look_up_with_paddings(group: Group, name: str) -> None:
    DistEmbedding(None, 2, name, padding_idx=[1, 2], process_group=group)(torch.tensor([1]))


def test_sharded_rows_refuse_several_padding_ids(ranks: Ranks, table_name: Callable[[], str]) -> None:
    name = table_name()
    for error in ranks.errors(2, look_up_with_paddings, name):
        assert f'table "{name}" is sharded, and rows of it take one padding id, got (1, 2)' in str(error)


def gradients_after_a_look_at_factors(group: Group, name: str) -> tuple[int, Tensor]:
    """How many ids were collected for while the factors' gradient alone was asked for, and the rows after a step."""
    bag = DistEmbeddingBag(None, 5, name, "sum", optimizer=ADAGRAD, process_group=group, **_summed(group))  # type: ignore[arg-type]
    ids, offsets, factors = own_bags(0, group)
    loss = (bag(ids, offsets, factors.requires_grad_()) - 1).square().sum()
    torch.autograd.grad(loss, factors, retain_graph=True)
    collected = len(bag._trace)
    loss.backward()
    SparseOptimizer(modules=[bag]).step()
    with torch.no_grad():
        return collected, DistEmbedding(None, 5, name, optimizer=ADAGRAD, process_group=group)(VOCABULARY)


def test_a_look_at_the_gradient_of_factors_collects_nothing(ranks: Ranks, table_name: Callable[[], str]) -> None:
    name = table_name()
    _, alone = gradients_after_a_look_at_factors(None, name)
    for collected, rows in ranks.run(2, gradients_after_a_look_at_factors, name):
        assert collected == 0
        torch.testing.assert_close(rows, alone, rtol=0, atol=1e-5)


def under_other_defaults(group: Group, name: str) -> tuple[Tensor, Tensor]:
    """What a step gives where dense parameters are made on the meta device and in bfloat16."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            return trained_collection(group, name)
    finally:
        torch.set_default_dtype(torch.float32)


def trained_collection(group: Group, name: str) -> tuple[Tensor, Tensor]:
    """The means of a batch, and the rows after a step."""
    config = {"name": name, "num_embeddings": 7, "embedding_dim": 3, "feature_names": ["a"], "pooling": "mean"}
    collection = RecStoreEmbeddingBagCollection([config], optimizer=ADAGRAD, process_group=group)
    ids, lengths = (torch.tensor(numbers, device="cpu") for numbers in ([0, 1, 2, 5, 5, 6], [3, 0, 3]))
    pooled = collection(KeyedJaggedTensor(["a"], ids, lengths=lengths))
    (pooled - 1).square().sum().backward()
    optimizer = SparseOptimizer(modules=[collection])
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    with torch.no_grad():
        return pooled.detach(), collection(KeyedJaggedTensor(["a"], ids, lengths=torch.ones_like(ids)))


def test_ranks_train_the_same_under_other_defaults(ranks: Ranks, table_name: Callable[[], str]) -> None:
    name = table_name()
    expected = trained_collection(None, name)
    for found in ranks.run(2, under_other_defaults, name):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


TABLES = [
    {"name": "user", "num_embeddings": None, "embedding_dim": 4, "feature_names": ["user"]},
    {"name": "item", "num_embeddings": None, "embedding_dim": 6, "feature_names": ["seen", "bought"]},
]
KEYS = ["bought", "user", "seen"]


def tables_of(prefix: str, **more: Any) -> list[dict[str, Any]]:
    """The two tables under names of their own."""
    return [{**table, "name": f"{prefix}/{table['name']}", **more} for table in TABLES]


def train_collection(group: Group, prefix: str, pooling: str, fusion: bool, ahead: bool) -> tuple[list[Tensor], float]:
    """Trains a collection for ten steps; returns the outputs of an 11th and of all, and the exchanges."""
    collection = RecStoreEmbeddingBagCollection(
        tables_of(prefix, pooling=pooling),
        enable_fusion=fusion,
        optimizer=ADAGRAD,
        process_group=group,
        **_summed(group),
    )
    stepper = SparseOptimizer(modules=[collection])
    exchange_statistics(reset=True)
    batches: Any = [features(step, group, KEYS) for step in range(10)]
    for batch in ShardedPipeline(batches, [collection]) if ahead and group is not None else batches:
        pooled = collection(batch)
        (pooled.values() - 1).square().sum().backward()
        stepper.step()
    exchanges = exchange_statistics()["exchanges"]
    with torch.no_grad():
        return [collection(features(10, group, KEYS)).values()], exchanges


@pytest.mark.parametrize(
    ("pooling", "fusion", "ahead"),
    [("sum", True, False), ("mean", True, False), ("mean", False, False), ("sum", True, True)],
)
def test_collections_train_as_in_one_process_in_one_exchange_a_batch(
    ranks: Ranks, table_name: Callable[[], str], pooling: str, fusion: bool, ahead: bool
) -> None:
    prefix = table_name()
    (alone,), _ = train_collection(None, prefix, pooling, fusion, ahead)
    found = ranks.run(4, train_collection, prefix, pooling, fusion, ahead)
    torch.testing.assert_close(torch.cat([outputs[0] for outputs, _ in found]), alone, rtol=0, atol=1e-5)
    assert {exchanges for _, exchanges in found} == {10 if fusion else 30}


def train_sequences(group: Group, prefix: str, hashed: bool) -> list[Tensor]:
    """Trains a collection without pooling, or a HashTable, for ten steps; returns the outputs of an 11th."""
    options: dict[str, Any] = {"optimizer": ADAGRAD, "process_group": group, **_summed(group)}
    if hashed:
        module: Any = HashTable([2, 3], prefix, insert_on_lookup=True, num_workers=1, **options)
    else:
        module = RecStoreEmbeddingCollection(tables_of(prefix), **options)

    def outputs(step: int) -> list[Tensor]:
        batch = features(step, group, KEYS)
        return [module(batch.values())] if hashed else [part.values() for part in module(batch).values()]

    stepper = SparseOptimizer(modules=[module])
    for step in range(10):
        sum((each - 1).square().sum() for each in outputs(step)).backward()  # type: ignore[union-attr]
        stepper.step()
    with torch.no_grad():
        module.eval()
        batch = (
            VOCABULARY
            if hashed
            else KeyedJaggedTensor(KEYS, VOCABULARY.repeat(3), lengths=torch.full((3,), len(VOCABULARY)))
        )
        return [module(batch)] if hashed else [part.values() for part in module(batch).values()]


@pytest.mark.parametrize("hashed", [False, True])
def test_rows_without_pooling_train_as_in_one_process(
    ranks: Ranks, table_name: Callable[[], str], hashed: bool
) -> None:
    prefix = table_name()
    alone = train_sequences(None, prefix, hashed)
    for found in ranks.run(3, train_sequences, prefix, hashed):
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-5)


class Dense(nn.Module):
    """A table under a perceptron."""

    def __init__(self, name: str, group: Group) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = DistEmbeddingBag(None, 5, name, "sum", optimizer={"kind": "adam", "lr": 0.01}, process_group=group)
        self.top = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.top(self.bag(ids, offsets)).squeeze(1)


def train_dense(group: Group, name: str, weights: list[int] | None, is_fully_sharded: bool = False) -> Tensor:
    """Trains for 20 steps, the dense part under DDP or FSDP; returns this rank's logits of a further batch."""
    own_model = Dense(name, group)
    if is_fully_sharded and group is not None:
        fully_shard(own_model.top, mesh=DeviceMesh.from_group(group, "cpu"))
    is_replicated = group is not None and not is_fully_sharded
    model = DistributedDataParallel(own_model, process_group=group) if is_replicated else own_model
    optimizers = [SparseOptimizer(modules=[own_model]), torch.optim.Adam(own_model.parameters(), lr=0.01)]
    world = 1 if group is None else group.size()
    for step in range(20):
        ids, offsets, _ = own_bags(step, group, weights)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (world * (model(ids, offsets) - 1).square().sum() / BAGS).backward()
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad():
        ids, offsets, _ = own_bags(20, group, weights)
        return model(ids, offsets)


@pytest.mark.parametrize(("world", "weights"), [(1, None), (2, None), (4, None), (2, [5, 0])])
def test_logits_with_a_dense_part_under_ddp_agree(
    ranks: Ranks, table_name: Callable[[], str], world: int, weights: list[int] | None
) -> None:
    name = table_name()
    alone = train_dense(None, name, None)
    found = ranks.run(world, train_dense, name, weights)
    torch.testing.assert_close(torch.cat(found), alone, rtol=0, atol=1e-5)


def transformed(group: Group, name: str) -> list[str]:
    """Compares what `torch.func` gives of a sharded model with the same over its sums; returns what it refuses."""
    model = Dense(name, group)
    ids, offsets, _ = own_bags(0, group)
    pooled = model.bag(ids, offsets).detach()
    dense = {key: each for key, each in model.named_parameters() if not key.startswith("bag.")}
    of_top = {key.removeprefix("top."): each for key, each in dense.items()}

    def loss(params: Any) -> Tensor:
        return functional_call(model, params, (ids, offsets)).square().sum()

    def loss_of_top(params: Any) -> Tensor:
        return functional_call(model.top, params, (pooled,)).square().sum()

    for key, gradient in grad(loss_of_top)(of_top).items():
        torch.testing.assert_close(grad(loss)(dense)[f"top.{key}"], gradient)
    stacked = {key: torch.stack([each, -each]) for key, each in of_top.items()}
    ensemble = vmap(loss)({f"top.{key}": each for key, each in stacked.items()})
    torch.testing.assert_close(ensemble, vmap(loss_of_top)(stacked))
    assert model.bag._trace == []
    loss({}).backward()
    [(_, ids_U, expected)] = model.bag._trace
    model.bag.reset_trace()
    grad(loss)(dict(model.named_parameters()))
    [(_, found_U, found)] = model.bag._trace
    assert torch.equal(found_U, ids_U)
    torch.testing.assert_close(found, expected)
    maxima = DistEmbeddingBag(None, 5, f"{name}/max", "max", process_group=group)
    messages = []
    for refused in (
        lambda: vmap(model.bag)(torch.ones(2, 3, 1, dtype=torch.int64)),
        lambda: jacrev(lambda params: functional_call(model, params, (ids, offsets)))(dict(model.named_parameters())),
        lambda: grad(lambda scale: (scale * maxima(ids, offsets)).sum())(torch.ones(())),
    ):
        with pytest.raises(RuntimeError) as raised:
            refused()
        messages.append(str(raised.value))
    return messages


def test_transforms_go_over_the_dense_part_of_sharded_models(ranks: Ranks, table_name: Callable[[], str]) -> None:
    name = table_name()
    for of_ids, of_gradients, of_maxima in ranks.run(2, transformed, name):
        assert of_ids == of_gradients
        assert f"tables ['{name}'] are sharded, and no vmap goes over their ids" in of_ids
        assert "does not go through the maxima of sharded bags" in of_maxima


def test_logits_with_a_dense_part_under_fsdp_agree(ranks: Ranks, table_name: Callable[[], str]) -> None:
    name = table_name()
    found = ranks.run(2, train_dense, name, None, True)
    torch.testing.assert_close(torch.cat(found), train_dense(None, name, None), rtol=0, atol=1e-5)


def train_with_comings_and_goings(group: Group, name: str) -> tuple[Tensor, list[int]]:
    """Trains a table that admits ids at their second update and lets rows go; returns rows and this rank's ids."""
    table = DistEmbedding(
        None,
        3,
        name,
        optimizer=ADAGRAD,
        process_group=group,
        admission={"kind": "count", "threshold": 2},
        eviction={"ttl": 3, "interval": 1, "delay": 1},
        **_summed(group),
    )
    stepper = SparseOptimizer(modules=[table])
    for step in range(12):
        ids, _, _ = own_bags(step, group)
        (table(ids) - 1).square().sum().backward()
        stepper.step()
    ids = torch.ops.recstore.hashtable_ids(table.table.handle)
    with torch.no_grad():
        return table(VOCABULARY), ids.tolist()


def test_rows_are_admitted_and_leave_as_in_one_process(ranks: Ranks, table_name: Callable[[], str]) -> None:
    name = table_name()
    alone, ids = train_with_comings_and_goings(None, name)
    found = ranks.run(3, train_with_comings_and_goings, name)
    assert 0 < len(ids) < len(VOCABULARY)
    assert sorted(number for _, own in found for number in own) == sorted(ids)
    for rows, _ in found:
        torch.testing.assert_close(rows, alone, rtol=0, atol=1e-5)


def evicted_on_ranks(group: Group, name: str) -> tuple[list[int], list[int], list[int]]:
    """The ids that leave one rank when its client says so, those that it said would, and those that stay."""
    eviction = {"ttl": 100, "interval": 100}
    table = DistEmbedding(None, 2, name, optimizer=ADAGRAD, process_group=group, eviction=eviction, **_summed(group))
    stepper = SparseOptimizer(modules=[table])
    for ids in (torch.arange(20), torch.arange(20, 30)):
        table(ids).sum().backward()
        stepper.step()
    client = RecStoreClient()
    announced, gone = (client.evict(name, dry_run, ttl=0).tolist() for dry_run in (True, False))
    return gone, announced, torch.ops.recstore.hashtable_ids(table.table.handle).tolist()


def test_a_client_evicts_the_rows_of_its_rank(ranks: Ranks, table_name: Callable[[], str]) -> None:
    found = ranks.run(2, evicted_on_ranks, table_name())
    assert all(gone == announced for gone, announced, _ in found)
    assert sorted(number for gone, _, _ in found for number in gone) == list(range(20))
    assert sorted(number for _, _, left in found for number in left) == list(range(20, 30))


def written_rows(group: Group, name: str) -> tuple[bool, bool, list[int]]:
    """Whether a new table has the rows it was given, its padding row, and the ids of this rank."""
    matrix = torch.arange(40, dtype=torch.float32).view(20, 2) + 1
    given = DistEmbedding.from_pretrained(matrix, f"{name}/given", padding_idx=3, process_group=group)
    padded = DistEmbedding(20, 2, f"{name}/padded", padding_idx=4, process_group=group)
    same = torch.equal(given(torch.arange(20)), matrix)
    is_own = bool(own_ids(padded.table, torch.tensor([4])))
    zero = bool((padded(torch.tensor([4])) == 0).all()) and len(padded.table) == int(is_own)
    return same, zero, torch.ops.recstore.hashtable_ids(given.table.handle).sort().values.tolist()


def test_rows_that_a_module_writes_lie_with_their_owners(ranks: Ranks, table_name: Callable[[], str]) -> None:
    found = ranks.run(3, written_rows, table_name())
    owners = shard_of(torch.arange(20), 3)
    for rank, (same, zero, ids) in enumerate(found):
        assert same
        assert zero
        assert ids == (owners == rank).nonzero().flatten().tolist()


def copied_on_ranks(group: Group, name: str) -> tuple[str, bool, bool, int]:
    """Copies a model and its optimizer, and trains the copy; one rank has made a table of the first name before."""
    model = DistEmbedding(None, 5, name, optimizer=ADAGRAD, process_group=group)
    stepper = SparseOptimizer(modules=[model])
    _step_with(model, stepper, 0, group)
    taken = None if group is None or group.rank() else f"{name}.copy"
    if taken is not None:
        torch.ops.recstore.make_hashtable(taken, 1, "{}")
    twin, stepper_of_twin = copy.deepcopy((model, stepper))
    ids = VOCABULARY[own_ids(model.table, VOCABULARY)]
    before = model.weight[ids]
    was_equal = torch.equal(twin.weight[ids], before)
    _step_with(twin, stepper_of_twin, 1, group)
    is_apart = torch.equal(model.weight[ids], before) and not torch.equal(twin.weight[ids], before)
    _step_with(model, stepper, 1, group)
    return twin.name, was_equal, is_apart, int((twin.weight[ids] - model.weight[ids]).abs().gt(0).sum())


def _step_with(model: DistEmbedding, stepper: SparseOptimizer, step: int, group: Group) -> None:
    (model(own_bags(step, group)[0]) - 1).square().sum().backward()
    stepper.step()


def test_a_deep_copy_of_a_sharded_module_is_sharded_as_it_is(ranks: Ranks, table_name: Callable[[], str]) -> None:
    name = table_name()
    for outcome in ranks.run(3, copied_on_ranks, name):
        assert outcome == (f"{name}.copy2", True, True, 0)


def averaged_on_ranks(group: Group, name: str) -> Tensor:
    """The exponential average of a table's rows over five steps, as the ranks look it up."""
    model = DistEmbedding(
        None,
        5,
        name,
        initializer={"kind": "zeros"},
        optimizer=ADAGRAD,
        process_group=group,
        **_summed(group),  # type: ignore[arg-type]
    )
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    stepper = SparseOptimizer(modules=[model])
    for step in range(5):
        _step_with(model, stepper, step, group)
        averaged.update_parameters(model)
    with torch.no_grad():
        return averaged.module(VOCABULARY)


def test_rows_of_a_sharded_table_are_averaged_by_their_ranks(ranks: Ranks, table_name: Callable[[], str]) -> None:
    expected = averaged_on_ranks(None, table_name())
    for averaged in ranks.run(2, averaged_on_ranks, table_name()):
        torch.testing.assert_close(averaged, expected, rtol=1e-5, atol=1e-6)


def made_anew(group: Group, name: str, choices: list[Any]) -> list[str]:
    """Trains a module on an id of one rank, and makes it anew; returns what each of two ranks says."""
    said = []
    assert group is not None
    for choice in (None, choices[group.rank()]):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                module = DistEmbedding(None, 5, name, optimizer=ADAGRAD, process_group=group, on_existing=choice)
            except ValueError as error:
                return [f"error: {error}"]
        said += [str(warning.message) for warning in caught]
        module(VOCABULARY[:1]).sum().backward()
        SparseOptimizer(modules=[module]).step()
        said.append(f"step {module.table.statistics()['step']}")
        del module
    return said


def test_ranks_do_alike_with_a_table_that_exists(ranks: Ranks, table_name: Callable[[], str]) -> None:
    for said in ranks.run(2, made_anew, table_name(), [None, None]):
        assert [len(said), said[0], said[2]] == [3, "step 1", "step 2"]
        assert "a new module goes on with its" in said[1]
    assert ranks.run(2, made_anew, table_name(), ["reset", "reset"]) == [["step 1", "step 1"]] * 2
    for said in ranks.run(2, made_anew, table_name(), ["error", "error"]):
        assert "exists with" in said[0]
    for said in ranks.run(2, made_anew, table_name(), ["share", "reset"]):
        assert "has on_existing=" in said[0]
