"""Prefetch + forward equals forward, whatever happens between them, and a handle is good for one use by its owner."""

import gc
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from own_draws import fresh_name
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from recstore_ops import (
    DistEmbedding,
    KeyedJaggedTensor,
    PrefetchingDataLoader,
    RecStoreClient,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
    SparseOptimizer,
)
from recstore_ops.nn import prefetch

pytestmark = pytest.mark.tier("test")

KEYS = ["user", "seen", "bought"]


def collection(
    name: str | None = None, dims: tuple[int, int] = (4, 4), **options: Any
) -> RecStoreEmbeddingBagCollection:
    name = name or fresh_name()
    return RecStoreEmbeddingBagCollection(
        [
            {"name": f"{name}/u", "num_embeddings": None, "embedding_dim": dims[0], "feature_names": ["user"]},
            {
                "name": f"{name}/i",
                "num_embeddings": None,
                "embedding_dim": dims[1],
                "feature_names": ["seen", "bought"],
            },
        ],
        optimizer={"kind": "adagrad", "lr": 0.1},
        **options,
    )


def batch(seed: int, size: int = 3, weights: bool = False) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(KEYS) * size,), generator=generator)
    ids = torch.randint(0, 9, (int(lengths.sum()),), generator=generator)
    factors = torch.rand(ids.shape, generator=generator).requires_grad_() if weights else None
    return KeyedJaggedTensor(KEYS, ids, factors, lengths=lengths)


def values(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.values()


@pytest.mark.parametrize("dims", [(4, 4), (3, 5)])
@pytest.mark.parametrize("weights", [False, True])
def test_prefetch_and_forward_equals_forward_and_trains_alike(dims: tuple[int, int], weights: bool) -> None:
    ahead, plain = (collection(f"same/{which}/{dims}/{weights}", dims) for which in "ab")
    ids = torch.arange(9)
    for ours, theirs in zip(ahead.embedding_bags.values(), plain.embedding_bags.values(), strict=True):
        theirs.weight[ids] = ours.weight[ids]
        ours.weight[ids] = ours.weight[ids]
    optimizers = [SparseOptimizer(modules=[module]) for module in (ahead, plain)]
    for seed in range(10):
        pair = batch(seed, weights=weights), batch(seed, weights=weights)
        ahead.issue_fused_prefetch(pair[0])
        outputs = [values(module(features)) for module, features in zip((ahead, plain), pair, strict=True)]
        torch.testing.assert_close(outputs[0], outputs[1])
        for output, optimizer in zip(outputs, optimizers, strict=True):
            output.square().sum().backward()
            optimizer.step()
        if weights:
            torch.testing.assert_close(pair[0].weights().grad, pair[1].weights().grad)
    assert ahead.report_prefetch_stats()["used"] == 10
    for ours, theirs in zip(ahead.embedding_bags.values(), plain.embedding_bags.values(), strict=True):
        assert torch.allclose(ours.weight[ids], theirs.weight[ids], atol=1e-5)


ACTS = st.lists(
    st.tuples(st.sampled_from(["issue", "forward", "train", "hand over", "delete"]), st.integers(0, 3)), max_size=14
)


@settings(deadline=None, max_examples=examples(40))
@given(acts=ACTS)
def test_any_schedule_gives_what_a_plain_forward_gives(acts: list[tuple[str, int]]) -> None:
    name = fresh_name()
    bags, plain = collection(name), collection(name)
    optimizer = SparseOptimizer(modules=[bags])
    handles: list[int] = []
    for act, seed in acts:
        features = batch(seed)
        if act == "issue":
            bags.issue_fused_prefetch(features)
        elif act == "hand over":
            handle, *beside = bags.issue_fused_prefetch(features, record_handle=False)
            handles.append(handle)
            bags.set_fused_prefetch_handle(handle, beside[0], beside[1], True, beside[2], beside[3])
        elif act == "delete":
            RecStoreClient().delete(f"{name}/i", torch.arange(seed + 1))
        else:
            output = bags(features)
            assert torch.allclose(output, plain(features), atol=1e-6)
            if act == "train":
                output.sum().backward()
                optimizer.step()


def test_a_consumed_unknown_or_foreign_handle_is_an_error() -> None:
    bags, others = collection(), collection()
    consumed = bags.issue_fused_prefetch(batch(1))
    bags(batch(1))
    foreign = others.issue_fused_prefetch(batch(1))
    for handle in (consumed, foreign, 10**9):
        with pytest.raises(ValueError, match=f"prefetch handle {handle} was not issued by this collection"):
            bags.set_fused_prefetch_handle(handle)


def test_what_is_given_beside_a_handle_must_belong_to_it() -> None:
    bags = collection()
    handle, num_ids, issue_ts, fused, inverse = bags.issue_fused_prefetch(batch(1), record_handle=False)
    for wrong, words in [
        ({"num_ids": num_ids + 1}, "got num_ids"),
        ({"issue_ts": issue_ts - 1}, "got issue_ts"),
        ({"fused_ids_cpu": fused}, "go together"),
        ({"fused_ids_cpu": fused, "fused_inverse": inverse.flip(0)}, "of other ids"),
    ]:
        with pytest.raises(ValueError, match=words):
            bags.set_fused_prefetch_handle(handle, **wrong)
    assert bags._fused_prefetch_handle is None
    bags.set_fused_prefetch_handle(handle, num_ids, issue_ts, False, fused, inverse)
    assert bags._fused_prefetch_handle == handle
    bags(batch(1))
    assert bags._fused_prefetch_handle is None
    assert bags.report_prefetch_stats()["used"] == 0


def test_another_batch_leaves_the_prefetch_pending() -> None:
    bags = collection()
    handle = bags.issue_fused_prefetch(batch(1))
    bags(batch(2))
    assert bags._fused_prefetch_handle == handle
    bags(batch(1))
    report = bags.report_prefetch_stats(reset=True)
    assert (report["issued"], report["used"], report["unused"]) == (1, 1, 1)
    assert bags.report_prefetch_stats()["issued"] == 0


def test_a_compiled_forward_reads_and_leaves_the_prefetch_pending() -> None:
    bags = collection()
    handle = bags.issue_fused_prefetch(batch(1))
    compiled = torch.compile(bags, fullgraph=True, dynamic=True)
    assert torch.allclose(compiled(batch(1)), collection_like(bags)(batch(1)))
    assert bags._fused_prefetch_handle == handle


def collection_like(bags: RecStoreEmbeddingBagCollection) -> RecStoreEmbeddingBagCollection:
    twin = pickle.loads(pickle.dumps(bags))
    assert twin._fused_prefetch_handle is None
    return twin


def test_a_prefetch_that_the_store_dropped_is_read_instead(table_name: Callable[[], str]) -> None:
    bags = collection()
    bags.issue_fused_prefetch(batch(1))
    client = RecStoreClient()
    client.init_data(table_name(), (9, 2), torch.float32)
    for _ in range(1024):
        client.prefetch(torch.tensor([1]), client.data_name_list()[-1])
    assert torch.equal(bags(batch(1)), collection_like(bags)(batch(1)))
    assert bags.report_prefetch_stats()["used"] == 0


def test_beyond_a_bound_the_oldest_prefetch_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "MAX_ISSUED", 2)
    bags = collection()
    first = bags.issue_fused_prefetch(batch(1))
    second = bags.issue_fused_prefetch(batch(2))
    bags.issue_fused_prefetch(batch(3))
    assert bags._fused_prefetch_handle == second
    with pytest.raises(ValueError, match="not issued"):
        bags.set_fused_prefetch_handle(first)


def test_ids_beyond_fusion_k_are_prefetched_but_not_fused() -> None:
    bags = collection()
    features = KeyedJaggedTensor(KEYS, torch.tensor([-1, 2**62, 5]), lengths=torch.ones(3, dtype=torch.int64))
    bags.issue_fused_prefetch(features)
    assert torch.equal(bags(features), collection_like(bags)(features))
    with pytest.raises(ValueError, match=r"within \[0, 2\^30\)"):
        bags.issue_fused_prefetch(features, record_handle=False)


def test_without_fusion_a_fused_prefetch_is_refused() -> None:
    with pytest.raises(RuntimeError, match="needs enable_fusion"):
        collection(enable_fusion=False).issue_fused_prefetch(batch(1))


def test_handles_of_each_feature_are_consumed_by_the_next_forward() -> None:
    bags, client, features = collection(), RecStoreClient(), batch(4)
    parts = features.to_dict()
    handles = {key: client.prefetch(parts[key].values(), bags._config_names[key]) for key in KEYS}
    bags.set_prefetch_handles(handles)
    assert torch.allclose(bags(features), collection_like(bags)(features), atol=1e-6)
    assert bags._prefetch_handles == {}
    with pytest.raises(RuntimeError, match="unknown, consumed or dropped"):
        client.wait_and_get(handles["user"], 4)
    with pytest.raises(ValueError, match="a handle for each of"):
        bags.set_prefetch_handles({"user": 1})
    bags.set_prefetch_handles({key: client.prefetch(torch.arange(50), bags._config_names[key]) for key in KEYS})
    with pytest.raises(ValueError, match='feature "user" has'):
        bags(features)


def test_a_dataloader_that_looks_ahead_trains_as_one_that_does_not() -> None:
    modules = [collection("loader/a"), collection("loader/b")]
    ids = torch.arange(9)
    for ours, theirs in zip(*(module.embedding_bags.values() for module in modules), strict=True):
        theirs.weight[ids] = ours.weight[ids]
        ours.weight[ids] = ours.weight[ids]
    batches = [(torch.zeros(3), batch(seed)) for seed in range(12)]
    loaders = [PrefetchingDataLoader(batches, modules[0], prefetch_count=3), batches]
    for module, loader in zip(modules, loaders, strict=True):
        optimizer = SparseOptimizer(modules=[module])
        for _, features in loader:
            module(features).square().sum().backward()
            optimizer.step()
    assert len(loaders[0]) == 12
    assert modules[0].report_prefetch_stats()["used"] == 12
    for ours, theirs in zip(*(module.embedding_bags.values() for module in modules), strict=True):
        assert torch.allclose(ours.weight[ids], theirs.weight[ids], atol=1e-5)


class BadSourceError(Exception):
    """What a source of batches fails with."""


class Numbers(Dataset[KeyedJaggedTensor]):
    """Seven batches, of which the one of a number cannot be read."""

    def __init__(self, bad: int | None) -> None:
        self._bad = bad

    def __len__(self) -> int:
        return 7

    def __getitem__(self, number: int) -> KeyedJaggedTensor:
        if number == self._bad:
            raise BadSourceError(number)
        return batch(number)


def run_through(loader: PrefetchingDataLoader, bags: RecStoreEmbeddingBagCollection, seen: list[Tensor]) -> None:
    for features in loader:
        bags(features)
        seen.append(features.values())


def failing(bad: int | None) -> Iterator[KeyedJaggedTensor]:
    source = Numbers(bad)
    return (source[number] for number in range(len(source)))


def loader_of(workers: int, **options: Any) -> Callable[[int | None], Iterable[KeyedJaggedTensor]]:
    return lambda bad: DataLoader(Numbers(bad), batch_size=None, num_workers=workers, **options)


SOURCES: dict[str, Callable[[int | None], Iterable[KeyedJaggedTensor]]] = {
    "a generator": failing,
    "a DataLoader": loader_of(0),
    "pinned memory": loader_of(0, pin_memory=True),
    "two workers": loader_of(2, pin_memory=True),
}


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch waits five seconds for each worker of a loader that failed, before it ends it."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    yield
    gc.collect()


@pytest.mark.usefixtures("_impatient")
@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_a_source_that_fails_gives_the_batches_before_and_then_its_error(
    source: Callable[[int | None], Iterable[KeyedJaggedTensor]],
) -> None:
    for bad, count in [(0, 1), (5, 2), (6, 9)]:
        bags, seen = collection(), list[Tensor]()
        with pytest.raises(BadSourceError, match=str(bad)):
            run_through(PrefetchingDataLoader(source(bad), bags, count), bags, seen)
        assert len(seen) == bad
        assert all(torch.equal(ids, batch(number).values()) for number, ids in enumerate(seen))
        assert bags.report_prefetch_stats()["used"] == bad


def test_a_batch_whose_rows_cannot_be_issued_comes_as_an_error_in_its_place() -> None:
    bags, seen = collection(), list[Tensor]()
    bad = KeyedJaggedTensor(["other"], torch.tensor([1]), lengths=torch.tensor([1]))
    loader = PrefetchingDataLoader([batch(0), batch(1), bad, batch(2)], bags)
    with pytest.raises(ValueError, match="must hold the features"):
        run_through(loader, bags, seen)
    assert len(seen) == 2


@pytest.mark.parametrize("kind", ["a generator", "two workers"])
def test_a_loader_that_is_left_ends_its_source(kind: str) -> None:
    source, left = SOURCES[kind](None), []

    def watched() -> Iterator[KeyedJaggedTensor]:
        try:
            yield from source
        finally:
            left.append(kind)

    bags = collection()
    for number, _ in enumerate(PrefetchingDataLoader(watched(), bags)):
        if number == 2:
            break
    gc.collect()
    assert left == [kind]
    iterator = iter(PrefetchingDataLoader(SOURCES[kind](None), bags))
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    with pytest.raises(StopIteration):
        next(iterator)


def test_the_features_of_a_batch_are_found_or_asked_for() -> None:
    features = batch(1)
    for whole in (features, {"x": features, "y": 1}, [1, features]):
        assert prefetch.find_features(whole) is features
    for whole in ((1, 2), {"a": features, "b": features}, 7):
        with pytest.raises(ValueError, match="expected one KeyedJaggedTensor"):
            prefetch.find_features(whole)
    with pytest.raises(ValueError, match="prefetch_count must be at least 1, got 0"):
        PrefetchingDataLoader([], collection(), 0)


def test_a_module_that_reads_nothing_ahead_is_refused_at_once(table_name: Callable[[], str]) -> None:
    name = table_name()
    plain: Any = DistEmbedding(None, 4, name)
    rows: Any = RecStoreEmbeddingCollection([{"name": f"{name}/rows", "num_embeddings": None, "embedding_dim": 4}])
    for module in (plain, rows):
        words = f"needs a RecStoreEmbeddingBagCollection, .* got {type(module).__name__}$"
        with pytest.raises(TypeError, match=words):
            PrefetchingDataLoader([], module)


def test_the_client_prefetches_by_name_or_dim(table_name: Callable[[], str]) -> None:
    client, name = RecStoreClient(), table_name()
    client.init_data(name, (9, 3), torch.float32, lambda shape, dtype: torch.rand(shape))
    ids = torch.tensor([[1, 2], [2, 8]])
    rows = client.wait_and_get(client.prefetch(ids, name), 3)
    assert torch.equal(rows, client.pull(name, ids).reshape(4, 3))
    assert client.wait_and_get(client.prefetch(ids, embedding_dim=29), 29).shape == (4, 29)
    for arguments in ({}, {"name": name, "embedding_dim": 3}):
        with pytest.raises(ValueError, match="either name or embedding_dim"):
            client.prefetch(ids, **arguments)
    with pytest.raises(KeyError, match="no table"):
        client.prefetch(ids, "missing")


def test_asynchronous_updates_run_in_order_and_raise_where_they_are_waited_for(
    table_name: Callable[[], str],
) -> None:
    client, name = RecStoreClient(), table_name()
    client.init_data(name, (9, 1), torch.float32)
    ids, grads = torch.tensor([1]), torch.ones(1, 1)
    handles = [client.update_async(name, ids, grads) for _ in range(20)]
    grads.fill_(99)
    for handle in handles:
        client.wait(handle)
    assert client.pull(name, ids).item() == pytest.approx(-0.2)
    failing = client.update_async(name, torch.tensor([100]), grads)
    with pytest.raises(IndexError, match="id 100 at position 0"):
        client.wait(failing)
    for handle in (failing, handles[0], 10**9):
        with pytest.raises(ValueError, match="unknown, or was waited for"):
            client.wait(handle)
