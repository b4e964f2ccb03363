"""`DistEmbedding`: construction and sharing, copies and pickles, padding, pretrained rows, traces, modes."""

from __future__ import annotations

import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    DistTensor,
    EmbeddingTableConfig,
    RecStoreClient,
    SparseOptimizer,
    Table,
    TableConfig,
    current_ps_backend,
    embedding,
    get_kv_client,
    opening_empty_tables,
    table_names,
)
from recstore_ops.ops import operators

pytestmark = pytest.mark.tier("test")

NUM, DIM = 6, 3
IDS = torch.tensor([[1, 5, 1], [0, 2, 5]])


@pytest.fixture
def name(table_name: Callable[[], str]) -> str:
    return table_name()


def pretend_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process look like one of a job of two."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)


def ascending(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return torch.arange(float(shape[0] * shape[1]), dtype=dtype).reshape(shape)


def rows_of(module: DistEmbedding, ids: Tensor | None = None) -> Tensor:
    return module.weight[torch.arange(NUM) if ids is None else ids]


def train(module: DistEmbedding, ids: Tensor = IDS) -> None:
    module(ids).sum().backward()
    SparseOptimizer(modules=[module]).step()


def twins(name: str, **options: Any) -> tuple[DistEmbedding, nn.Embedding]:
    """A `DistEmbedding` and an `nn.Embedding` with the same rows."""
    theirs = nn.Embedding(NUM, DIM, **options)
    ours = DistEmbedding(NUM, DIM, name, lr=0.1, **options)
    ours.weight[torch.arange(NUM)] = theirs.weight.detach()
    return ours, theirs


def test_a_module_reads_a_row_for_each_id_of_any_shape(name: str) -> None:
    module = DistEmbedding(NUM, DIM, name, init_func=ascending)
    for ids in (torch.tensor(5), torch.tensor([], dtype=torch.int64), IDS, IDS.t()[None]):
        rows = module(ids)
        assert rows.shape == (*ids.shape, DIM)
        assert torch.equal(rows, ascending((NUM, DIM), torch.float32)[ids])


def test_a_module_without_init_func_stores_nothing_before_it_is_trained(name: str) -> None:
    module = DistEmbedding(10**12, DIM, name)
    module(torch.tensor([0, 10**12 - 1]))
    assert len(module.table) == 0
    train(module, torch.tensor([10**12 - 1]))
    assert len(module.table) == 1


def test_initial_rows_depend_on_name_and_seed_and_id_alone(table_name: Callable[[], str]) -> None:
    name = table_name()
    rows = rows_of(DistEmbedding(None, DIM, name, seed=1))
    get_kv_client().drop(name)
    again = rows_of(DistEmbedding(None, DIM, name, seed=1), torch.arange(NUM).flip(0)).flip(0)
    assert torch.equal(again, rows)
    assert rows.unique().numel() == rows.numel()
    get_kv_client().drop(name)
    assert not torch.equal(rows_of(DistEmbedding(None, DIM, name, seed=2)), rows)
    assert not torch.equal(rows_of(DistEmbedding(None, DIM, table_name(), seed=1)), rows)


def test_an_open_vocabulary_takes_every_int64(name: str) -> None:
    module = DistEmbedding(None, DIM, name, lr=1.0, initializer="zeros")
    ids = torch.tensor([-(2**63), -1, 0, 2**63 - 1])
    train(module, ids)
    assert module(ids).eq(-1).all()
    assert module(torch.tensor([2**64 - 1], dtype=torch.uint64)).eq(-1).all()
    assert module.weight.shape == (4, DIM)


def test_uint64_and_int32_ids_are_trained_like_int64(name: str) -> None:
    module = DistEmbedding(None, DIM, name, lr=1.0, initializer="zeros")
    train(module, torch.tensor([2**64 - 1, 7, 7], dtype=torch.uint64))
    train(module, torch.tensor([7, -1], dtype=torch.int32))
    assert rows_of(module, torch.tensor([-1, 7])).tolist() == [[-2.0] * DIM, [-3.0] * DIM]


def test_modules_of_one_name_share_rows_but_not_traces(name: str) -> None:
    first, second = DistEmbedding(NUM, DIM, name), DistEmbedding(NUM, DIM, name)
    first(IDS).sum().backward()
    assert (len(first._trace), len(second._trace)) == (1, 0)
    SparseOptimizer(modules=[first]).step()
    assert torch.equal(first(IDS), second(IDS))
    assert len(second.table) == 4


def test_another_learning_rate_of_an_existing_table_is_warned_of_and_not_taken(name: str) -> None:
    DistEmbedding(NUM, DIM, name, lr=0.5)
    with pytest.warns(UserWarning, match=r"exists and keeps lr=0\.5, not 0\.25") as warned:
        module = DistEmbedding(NUM, DIM, name, lr=0.25)
    assert [warning.filename for warning in warned] == [__file__]
    assert module.table.statistics()["learning_rate"] == 0.5


def test_a_module_made_in_inference_mode_can_be_trained(name: str) -> None:
    with torch.inference_mode():
        module = DistEmbedding(NUM, DIM, name)
    train(module)
    assert len(module.table) == 4


def test_init_func_gives_the_rows_of_a_new_table_only(name: str) -> None:
    calls: list[tuple[Any, ...]] = []

    def init(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        calls.append((shape, dtype))
        return ascending(shape, torch.float64)

    first = DistEmbedding(NUM, DIM, name, init)
    first.weight[[0]] = torch.full((1, DIM), 9.0)
    second = DistEmbedding(NUM, DIM, name, init)
    assert calls == [((NUM, DIM), torch.float32)]
    assert rows_of(second)[0].tolist() == [9.0] * DIM
    assert torch.equal(rows_of(second)[1:], ascending((NUM, DIM), torch.float32)[1:])


@pytest.mark.parametrize(
    ("num_embeddings", "init_func", "error"),
    [
        (NUM, lambda shape, dtype: torch.zeros(2, 2), ValueError),
        (NUM, lambda shape, dtype: torch.zeros(NUM), ValueError),
        (NUM, lambda shape, dtype: torch.full(shape, float("nan")), RuntimeError),
        (NUM, lambda shape, dtype: 1 / 0, ZeroDivisionError),
        (NUM, lambda shape, dtype: None, AttributeError),
        (None, ascending, ValueError),
    ],
)
def test_an_init_func_that_fails_leaves_no_table_behind(
    num_embeddings: int | None, init_func: Any, error: type[Exception], name: str
) -> None:
    with pytest.raises(error):
        DistEmbedding(num_embeddings, DIM, name, init_func)
    assert name not in table_names()
    assert len(DistEmbedding(NUM, DIM + 1, name).table) == 0


def test_a_wrong_shape_of_init_func_is_shown(name: str) -> None:
    with pytest.raises(ValueError, match=r"must return rows of shape \(6, 3\), got \(2, 2\)"):
        DistEmbedding(NUM, DIM, name, lambda shape, dtype: torch.zeros(2, 2))


@pytest.mark.parametrize("padding_idx", [0, 2, -1, -NUM])
def test_padding_is_as_in_nn_embedding(padding_idx: int, name: str) -> None:
    ours, theirs = twins(name, padding_idx=padding_idx)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    assert ours.padding_idx == theirs.padding_idx
    for _ in range(3):
        theirs(IDS).pow(2).sum().backward()
        ours(IDS).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        SparseOptimizer(modules=[ours]).step()
    assert torch.allclose(rows_of(ours), theirs.weight)
    assert rows_of(ours)[padding_idx].eq(0).all()


def test_the_padding_row_of_a_new_table_is_zero_and_gets_no_gradient(name: str) -> None:
    module = DistEmbedding(None, DIM, name, padding_idx=-7)
    ids = torch.tensor([-7, 1, -7])
    module(ids).sum().backward()
    assert module(ids)[::2].eq(0).all()
    assert module._trace[0][0].tolist() == [1]


def test_opening_a_table_again_keeps_its_padding_row(name: str) -> None:
    DistEmbedding(NUM, DIM, name, padding_idx=2).weight[[2]] = torch.ones(1, DIM)
    assert DistEmbedding(NUM, DIM, name, padding_idx=2)(torch.tensor(2)).eq(1).all()


@pytest.mark.parametrize("freeze", [True, False])
def test_from_pretrained_is_frozen_where_asked(freeze: bool, name: str) -> None:
    rows = ascending((NUM, DIM), torch.float32)
    module = DistEmbedding.from_pretrained(rows, name, freeze=freeze, lr=1.0)
    assert (module.num_embeddings, module.embedding_dim) == (NUM, DIM)
    assert torch.equal(module(IDS), rows[IDS])
    assert module(IDS).requires_grad is not freeze
    if not freeze:
        train(module, torch.tensor([1]))
        assert torch.equal(module(torch.tensor(1)), rows[1] - 1)


def test_from_pretrained_keeps_the_padding_row_as_nn_embedding_does(name: str) -> None:
    rows = torch.ones(NUM, DIM)
    theirs = nn.Embedding.from_pretrained(rows, padding_idx=1)
    ours = DistEmbedding.from_pretrained(rows, name, padding_idx=1)
    assert torch.equal(ours(IDS), theirs(IDS))


def test_from_pretrained_refuses_a_table_that_exists_and_leaves_it(name: str) -> None:
    module = DistEmbedding(NUM, DIM, name)
    before = rows_of(module)
    with pytest.raises(ValueError, match="exists"):
        DistEmbedding.from_pretrained(torch.ones(NUM, DIM), name)
    assert torch.equal(rows_of(module), before)
    with pytest.raises(ValueError, match="must be 2-D, got 1-D"):
        DistEmbedding.from_pretrained(torch.ones(NUM), name + "/flat")
    assert name + "/flat" not in table_names()


def test_from_pretrained_copies_the_rows(name: str) -> None:
    rows = torch.ones(NUM, DIM, requires_grad=True)
    module = DistEmbedding.from_pretrained(rows, name)
    with torch.no_grad():
        rows.zero_()
    assert module(IDS).eq(1).all()


def test_the_weight_is_the_table_and_outlives_the_module(name: str) -> None:
    module = DistEmbedding(NUM, DIM, name, init_func=ascending)
    weight = module.weight
    assert (weight.shape, weight.dtype, weight.name) == ((NUM, DIM), torch.float32, name)
    weight[[3]] = torch.full((1, DIM), 8.0)
    assert module(torch.tensor(3)).eq(8).all()
    del module
    gc.collect()
    assert weight[3].eq(8).all()


def test_the_trace_holds_distinct_ids_and_the_sums_of_their_gradients(name: str) -> None:
    module = DistEmbedding(NUM, DIM, name)
    factors = torch.arange(18.0).reshape(2, 3, DIM)
    (module(IDS) * factors).sum().backward()
    (module(torch.tensor([5])) * 100).sum().backward()

    [(ids, grads)] = module._trace

    expected = torch.zeros(NUM, DIM).index_add_(0, IDS.flatten(), factors.flatten(0, 1))
    expected[5] += 100
    assert ids.tolist() == [0, 1, 2, 5]
    assert torch.equal(grads, expected[ids])


def test_reset_trace_forgets_and_the_table_stays_as_it_is(name: str) -> None:
    module = DistEmbedding(NUM, DIM, name)
    module(IDS).sum().backward()
    module.reset_trace()
    assert module._trace == []
    SparseOptimizer(modules=[module]).step()
    assert (len(module.table), module.table.statistics()["step"]) == (0, 0)


def test_backward_twice_counts_twice_as_in_torch(name: str) -> None:
    module = DistEmbedding(NUM, DIM, name)
    loss = module(torch.tensor([1])).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert module._trace[0][1].tolist() == [[2.0] * DIM]


def test_a_recomputed_forward_collects_once(name: str) -> None:
    from torch.utils.checkpoint import checkpoint

    module = DistEmbedding(NUM, DIM, name)
    out = checkpoint(lambda ids: module(ids).sin(), IDS, use_reentrant=False)
    assert isinstance(out, Tensor)
    out.sum().backward()
    assert len(module._trace) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_a_forward_reads_and_traces_nothing(mode: Callable[[], Any], name: str) -> None:
    module = DistEmbedding(NUM, DIM, name, init_func=ascending)
    with mode():
        rows = module(IDS)
    assert torch.equal(rows, ascending((NUM, DIM), torch.float32)[IDS])
    assert not rows.requires_grad
    assert module._trace == []


def test_eval_changes_nothing_for_an_embedding(name: str) -> None:
    module = DistEmbedding(NUM, DIM, name).eval()
    rows = module(IDS)
    assert rows.requires_grad
    assert len(module.table) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_rows_and_gradients_stay_float32(dtype: torch.dtype, name: str) -> None:
    ours, theirs = twins(name)
    head = nn.Linear(DIM, 1)
    outputs = []
    for embed in (ours, theirs):
        with torch.autocast("cpu", dtype=dtype):
            rows = embed(IDS)
            out = head(rows)
        assert (rows.dtype, out.dtype) == (torch.float32, dtype)
        out.float().sum().backward()
        outputs.append(out)
    assert torch.equal(*outputs)
    [(ids, grads)] = ours._trace
    assert theirs.weight.grad is not None
    assert grads.dtype == torch.float32
    assert torch.allclose(grads, theirs.weight.grad[ids])


def test_a_module_has_a_stand_in_for_its_table_and_its_rows_move_nowhere(name: str) -> None:
    module = DistEmbedding(NUM, DIM, name).half().to("meta")
    [(named, parameter)] = module.named_parameters()
    assert (named, parameter.shape, parameter.dtype, parameter.is_meta) == ("weight", (NUM, DIM), torch.float16, True)
    assert list(module.named_parameters(recurse=False)) == []
    assert list(module.state_dict()) == ["ids", "rows", "ids_check"]
    assert module(IDS).dtype == torch.float16
    assert module.weight[IDS].dtype == torch.float32


def test_the_representation_shows_size_name_and_padding(table_name: Callable[[], str]) -> None:
    plain, open_, padded = table_name(), table_name(), table_name()
    sgd = "optimizer=sgd(lr=0.01)"
    assert shown(DistEmbedding(NUM, DIM, plain)) == f"DistEmbedding(6, 3, name='{plain}', {sgd}, rows=0)"
    module = DistEmbedding(None, DIM, open_, optimizer={"kind": "adam", "lr": 0.5})
    module.weight[torch.tensor([7, -8])] = torch.ones(2, DIM)
    expected = f"DistEmbedding(open, 3, name='{open_}', optimizer=adam(lr=0.5), rows=2)"
    assert shown(module) == expected
    module = DistEmbedding(NUM, DIM, padded, padding_idx=-1)
    assert shown(module) == f"DistEmbedding(6, 3, name='{padded}', padding_idx=5, {sgd}, rows=1)"
    get_kv_client().drop(padded)
    assert repr(module).endswith(f"padding_idx=5, {sgd}, no rows)") or current_ps_backend() == "servers"
    bag = DistEmbeddingBag(None, DIM, table_name(), mode="max")
    assert shown(bag).endswith(f", {sgd}, rows=0, mode='max')")


def shown(module: DistEmbedding | DistEmbeddingBag) -> str:
    """What a module shows, with the rows that a table on servers does not ask for."""
    rows = module.table.statistics()["rows"]
    return repr(module).replace("rows on servers", f"rows={rows}")


PICKLES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": lambda module: saved_and_loaded(module),
}


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", PICKLES)
def test_a_pickle_shares_the_rows_and_has_a_trace_of_its_own(way: str, name: str) -> None:
    module = DistEmbedding(NUM, DIM, name, padding_idx=2, lr=0.5)
    module(IDS).sum().backward()

    [twin, _] = PICKLES[way](nn.Sequential(module, nn.Linear(DIM, 1))).children()

    assert isinstance(twin, DistEmbedding)
    assert repr(twin) == repr(module)
    assert twin._trace == []
    train(twin, torch.tensor([1, 2]))
    assert torch.equal(rows_of(module), rows_of(twin))
    assert len(module._trace) == 1


@pytest.mark.parametrize("way", PICKLES)
def test_a_pickle_of_a_frozen_module_is_frozen(way: str, name: str) -> None:
    module = DistEmbedding.from_pretrained(torch.ones(NUM, DIM), name)
    assert not PICKLES[way](module)(IDS).requires_grad


def test_a_pickle_opens_its_table_where_that_is_gone(name: str) -> None:
    module = DistEmbedding(None, DIM, name, optimizer={"kind": "adam", "lr": 0.5}, seed=3)
    initial = rows_of(module)
    text = pickle.dumps(module)
    get_kv_client().drop(name)

    with opening_empty_tables():
        again = pickle.loads(text)

    assert torch.equal(rows_of(again), initial)
    assert again.table.statistics()["learning_rate"] == 0.5
    assert Table.open(name).table_id == again.table.table_id


def test_a_pickle_that_opens_its_table_anew_has_a_padding_row_of_zeros(name: str) -> None:
    text = pickle.dumps(DistEmbedding(NUM, DIM, name, padding_idx=2))
    get_kv_client().drop(name)
    with opening_empty_tables():
        assert pickle.loads(text)(torch.tensor(2)).eq(0).all()


def test_a_pickle_of_another_configuration_than_the_table_now_has_is_refused(name: str) -> None:
    text = pickle.dumps(DistEmbedding(NUM, DIM, name))
    get_kv_client().drop(name)
    DistEmbedding(NUM, DIM, name, optimizer="adam")
    with pytest.raises(ValueError, match="exists with the configuration"):
        pickle.loads(text)


OPENINGS: dict[str, Callable[[str], object]] = {
    "DistEmbedding": lambda name: DistEmbedding(NUM, DIM, name),
    "from_pretrained": lambda name: DistEmbedding.from_pretrained(torch.ones(2, 2), name),
    "DistEmbeddingBag": lambda name: DistEmbeddingBag(NUM, DIM, name),
    "DistTensor": lambda name: DistTensor((NUM, DIM), torch.float32, name),
    "init_data": lambda name: RecStoreClient().init_data(name, (NUM, DIM), torch.float32),
    "init_embedding_table": lambda name: RecStoreClient().init_embedding_table(name, EmbeddingTableConfig(NUM, DIM)),
}


@pytest.mark.embedded_only("the processes of a job share the tables of servers")
@pytest.mark.parametrize("opening", OPENINGS)
def test_a_job_of_several_processes_is_refused_an_embedded_table(
    opening: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_two_processes(monkeypatch)
    with pytest.raises(RuntimeError) as caught:
        OPENINGS[opening](name)
    assert f'table "{name}" would be embedded in each of 2 processes' in str(caught.value)
    assert name not in table_names()


@pytest.mark.embedded_only("the processes of a job share the tables of servers")
def test_a_pickle_is_refused_in_a_job_of_several_processes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = pickle.dumps(DistEmbedding(NUM, DIM, name))
    get_kv_client().drop(name)
    pretend_two_processes(monkeypatch)
    with pytest.raises(RuntimeError, match="would be embedded in each of 2 processes"), opening_empty_tables():
        pickle.loads(text)
    assert name not in table_names()


def test_the_functional_form_trains_a_table(name: str) -> None:
    table = Table(name, DIM, TableConfig(initializer={"kind": "zeros"}, optimizer={"kind": "sgd", "lr": 1.0}))
    embedding(torch.tensor([4, 4, 1]), table, padding_idx=1).sum().backward()
    SparseOptimizer(modules=[table]).step()
    assert operators.hashtable_ids(table.handle).tolist() == [4]
    assert embedding(torch.tensor(4), table).tolist() == [-2.0] * DIM


def test_the_functional_form_takes_a_dim_for_a_default_table() -> None:
    dim = 1021
    assert embedding(torch.tensor([1]), dim).eq(0).all()
    torch.ops.recstore.emb_write(torch.tensor([1]), torch.ones(1, dim))
    assert embedding(torch.tensor([1]), dim).eq(1).all()


def test_a_default_table_that_was_dropped_opens_again() -> None:
    dim = 1031
    torch.ops.recstore.emb_write(torch.tensor([1]), torch.ones(1, dim))
    assert embedding(torch.tensor([1]), dim).eq(1).all()
    get_kv_client().drop(f"default/{dim}")
    assert embedding(torch.tensor([1]), dim).eq(0).all()
