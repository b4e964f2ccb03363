"""Tables of bfloat16 and float16 rows: what is rounded, what modules give, and that models train as with float32."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_kinds import KINDS
from torch import Tensor
from training_runs import train_new

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    DistTensor,
    EmbeddingTableConfig,
    HashTable,
    KeyedJaggedTensor,
    RecStoreClient,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
    SparseOptimizer,
    current_ps_backend,
    embedding,
    table_names,
)
from recstore_ops.config.row_types import RowTypeName
from recstore_ops.training import StoreTables, TrainingConfig, build_model, open_input
from recstore_ops.training.run.choices import ModelName

pytestmark = pytest.mark.tier("test")

NUM, DIM = 40, 5
IDS = torch.tensor([[1, 5, 1], [0, 2, 39]])

row_types = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@pytest.fixture
def name(table_name: Callable[[], str]) -> str:
    return table_name()


def rounded(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """What a table of `dtype` keeps of rows, as float32."""
    return rows.to(torch.float32).to(dtype).to(torch.float32)


def scattered(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def all_rows(module: DistEmbedding | DistEmbeddingBag) -> Tensor:
    return module.weight[torch.arange(NUM)]


def train(name: str, dtype: torch.dtype, optimizer: Any, steps: int = 50, **options: Any) -> Tensor:
    """Moves the rows of a new table towards some target, deletes the table, and returns them."""
    module = DistEmbedding(NUM, DIM, name, optimizer=optimizer, dtype=dtype, **options)
    stepper, target = SparseOptimizer(modules=[module]), scattered(NUM, DIM)
    for step in range(steps):
        ids = torch.arange(step % 3, NUM, 1 + step % 2)
        stepper.zero_grad()
        (module(ids) - target[ids]).square().sum().backward()
        stepper.step()
    rows = all_rows(module)
    RecStoreClient().drop(name)
    return rows


# What is rounded.


@row_types
def test_initial_rows_are_those_of_float32_rounded_to_the_nearest(dtype: torch.dtype, name: str) -> None:
    exact = all_rows(DistEmbedding(NUM, DIM, name))
    RecStoreClient().drop(name)
    module = DistEmbedding(NUM, DIM, name, dtype=dtype)
    assert torch.equal(all_rows(module), rounded(exact, dtype))
    assert len(module.table) == 0


@row_types
@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_written_rows_are_rounded_to_the_nearest(dtype: torch.dtype, given: torch.dtype, name: str) -> None:
    module = DistEmbedding(NUM, DIM, name, dtype=dtype)
    rows = scattered(NUM, DIM).to(given)
    module.weight[torch.arange(NUM)] = rows
    assert torch.equal(all_rows(module), rounded(rows, dtype))


def test_what_exceeds_float16_becomes_its_greatest_number(name: str) -> None:
    tensor = DistTensor((2, 2), torch.float16, name)
    tensor[[0, 1]] = torch.tensor([[70_000.0, -1e30], [65_504.0, 65_519.0]])
    assert tensor[[0, 1]].tolist() == [[65_504.0, -65_504.0], [65_504.0, 65_504.0]]


@pytest.mark.parametrize("policy", ["error", "skip", "allow"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn])
def test_a_step_that_overflows_float32_leaves_infinity_or_a_row_of_nan(
    dtype: torch.dtype, policy: str, name: str
) -> None:
    module = DistEmbedding(None, 2, name, dtype=dtype, lr=1e30, initializer="zeros", nan_policy=policy)
    module(torch.tensor([1])).backward(torch.tensor([[1e10, 0.0]]))
    SparseOptimizer(modules=[module]).step()
    expected = [-math.inf, 0.0] if dtype not in (torch.int8, torch.float8_e4m3fn) else [math.nan, math.nan]
    torch.testing.assert_close(module.weight[[1]], torch.tensor([expected]), equal_nan=True)


@row_types
def test_steps_too_small_for_the_row_type_are_right_on_average(dtype: torch.dtype, name: str) -> None:
    ids, gradient = torch.arange(20_000), torch.finfo(dtype).eps / 16
    module = DistEmbedding(None, DIM, name, initializer={"kind": "constant", "value": 1}, lr=1.0, dtype=dtype)
    module(ids).sum().mul(gradient).backward()
    SparseOptimizer(modules=[module]).step()
    moved = 1 - module(ids).detach().double()
    assert moved.unique().tolist() == [0, torch.finfo(dtype).eps / 2]
    assert moved.mean().item() == pytest.approx(gradient, rel=0.06)


@row_types
@pytest.mark.parametrize("optimizer", KINDS)
def test_two_runs_give_equal_bits_and_another_seed_others(dtype: torch.dtype, optimizer: str, name: str) -> None:
    constant = {"kind": "constant", "value": 0.1}
    first, again, other = (train(name, dtype, optimizer, initializer=constant, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@row_types
@pytest.mark.parametrize("optimizer", KINDS)
def test_rows_go_where_they_go_with_float32(dtype: torch.dtype, optimizer: str, name: str) -> None:
    # The steps of LAMB and Lion are as long as before where the gradient is all noise.
    config = {"kind": optimizer, "lr": 0.002 if optimizer in ("lamb", "lion") else 0.05}
    steps = 300
    exact = train(name, torch.float32, config, steps)
    difference = train(name, dtype, config, steps) - exact
    # A rounding moves an element by half a distance between values, on average; nothing need bring it back.
    walk = 0.5 * math.sqrt(steps) * torch.finfo(dtype).eps * exact.abs().max()
    assert difference.abs().max() < 4 * walk
    assert difference.mean().abs() < 4 * walk / math.sqrt(difference.numel())


# What modules give.


@row_types
def test_an_embedding_gives_float32_or_the_row_type(dtype: torch.dtype, name: str) -> None:
    plain = DistEmbedding(NUM, DIM, name, dtype=dtype)
    narrow = DistEmbedding(NUM, DIM, name, dtype=dtype, output_dtype=dtype)
    assert (plain(IDS).dtype, narrow(IDS).dtype) == (torch.float32, dtype)
    assert torch.equal(narrow(IDS).float(), plain(IDS))
    explicit = DistEmbedding(NUM, DIM, name, dtype=dtype, output_dtype=torch.float32)
    assert explicit(IDS).dtype == torch.float32


@row_types
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_bag_pools_in_float32_and_gives_float32_or_the_row_type(dtype: torch.dtype, mode: Any, name: str) -> None:
    plain = DistEmbeddingBag(NUM, DIM, name, mode, dtype=dtype)
    narrow = DistEmbeddingBag(NUM, DIM, name, mode, dtype=dtype, output_dtype=dtype)
    expected = torch.nn.functional.embedding_bag(IDS, all_rows(plain), mode=mode)
    assert torch.allclose(plain(IDS), expected, rtol=0, atol=1e-6)
    assert torch.equal(narrow(IDS), plain(IDS).to(dtype))


@row_types
@pytest.mark.parametrize("kind", [DistEmbedding, DistEmbeddingBag])
def test_gradients_through_the_row_type_are_collected_in_float32(dtype: torch.dtype, kind: Any, name: str) -> None:
    module = kind(NUM, DIM, name, dtype=dtype, output_dtype=dtype)
    module(IDS).sum().backward()
    *_, ids, grads = module._trace[0]
    assert ids.tolist() == [0, 1, 2, 5, 39]
    assert grads.dtype == torch.float32
    shares = torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0]) / (1 if kind is DistEmbedding else 3)
    assert torch.equal(grads, rounded(shares.unsqueeze(1).expand(5, DIM), torch.float32))


@row_types
def test_pretrained_rows_keep_type_and_freeze(dtype: torch.dtype, name: str) -> None:
    rows = scattered(NUM, DIM).to(dtype)
    module = DistEmbedding.from_pretrained(rows, name, dtype=dtype, output_dtype=dtype)
    assert torch.equal(module(torch.arange(NUM)), rows)
    assert not module(IDS).requires_grad


@row_types
def test_init_func_gets_the_row_type_and_may_return_it(dtype: torch.dtype, name: str) -> None:
    asked = []

    def init(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        asked.append((shape, dtype))
        return scattered(*shape).to(dtype)

    module = DistEmbedding(NUM, DIM, name, init, dtype=dtype)
    assert asked == [((NUM, DIM), dtype)]
    assert torch.equal(all_rows(module), rounded(scattered(NUM, DIM), dtype))


@row_types
def test_copies_and_pickles_keep_both_types(dtype: torch.dtype, name: str) -> None:
    module = DistEmbedding(NUM, DIM, name, dtype=dtype, output_dtype=dtype)
    for twin in (copy.copy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(IDS), module(IDS))
        assert twin.weight.dtype == dtype


def test_the_representation_shows_a_row_type_of_16_bits(name: str) -> None:
    rows = "rows on servers" if current_ps_backend() == "servers" else "rows=0"
    assert repr(DistEmbedding(NUM, DIM, name, dtype=torch.bfloat16)) == (
        f"DistEmbedding(40, 5, name='{name}', dtype=bfloat16, optimizer=sgd(lr=0.01), {rows})"
    )


@row_types
@pytest.mark.parametrize("kind", [DistEmbedding, DistEmbeddingBag])
def test_a_compiled_module_gives_what_an_eager_one_does(dtype: torch.dtype, kind: Any, name: str) -> None:
    torch.compiler.reset()
    eager = kind(NUM, DIM, name, dtype=dtype, output_dtype=dtype)
    twin = pickle.loads(pickle.dumps(eager))
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(IDS), eager(IDS))
    for module in (compiled, eager):
        module(IDS).square().sum().backward()
    [(*_, grads)], [(*_, expected)] = twin._trace, eager._trace
    assert torch.equal(grads, expected)


# The other ways to a table.


@row_types
def test_the_functional_form_reads_float32(dtype: torch.dtype, name: str) -> None:
    module = DistEmbedding(NUM, DIM, name, dtype=dtype)
    assert torch.equal(embedding(IDS, module.table), module(IDS))


@row_types
def test_a_dist_tensor_has_the_row_type_and_reads_float32(dtype: torch.dtype, name: str) -> None:
    tensor = DistTensor((NUM, DIM), dtype, name, lambda shape, dtype: scattered(*shape).to(dtype))
    assert tensor.dtype == dtype
    assert torch.equal(tensor[IDS], rounded(scattered(NUM, DIM), dtype)[IDS])
    assert pickle.loads(pickle.dumps(tensor)).dtype == dtype
    with pytest.raises(TypeError) as caught:
        DistTensor((NUM, DIM), torch.float32, name)
    assert f'table "{name}" has the dtype {dtype}, got torch.float32' in str(caught.value)


@row_types
def test_the_client_opens_reads_writes_and_prefetches(dtype: torch.dtype, name: str) -> None:
    client = RecStoreClient()
    client.init_embedding_table(name, EmbeddingTableConfig(NUM, DIM, dtype=dtype))
    assert client.get_data_meta(name) == (dtype, (NUM, DIM))
    rows = scattered(NUM, DIM)
    client.push(name, torch.arange(NUM), rows.to(dtype))
    assert torch.equal(client.pull(name, IDS), rounded(rows, dtype)[IDS])
    prefetch = client.prefetch(IDS.reshape(-1), name)
    assert torch.equal(client.wait_and_get(prefetch, DIM), rounded(rows, dtype)[IDS.reshape(-1)])
    client.update(name, IDS, torch.ones(2, 3, DIM))
    assert (client.pull(name, torch.tensor([5])) < rounded(rows, dtype)[5]).all()


@row_types
def test_init_data_makes_a_table_of_the_type(dtype: torch.dtype, name: str) -> None:
    client = RecStoreClient()
    client.init_data(name, (NUM, DIM), dtype)
    assert client.get_data_meta(name) == (dtype, (NUM, DIM))
    assert torch.equal(client.pull(name, IDS), torch.zeros(2, 3, DIM))


@pytest.mark.one_server_only("indices, and the order of ids, are those of each server")
@row_types
def test_a_hash_table_rounds_rows_and_keeps_slots_in_float32(dtype: torch.dtype, name: str) -> None:
    table = HashTable([2, 3], name, dtype=dtype, optimizer="adagrad")
    ids, rows = torch.tensor([7, -3]), scattered(2, 2, 3)
    table.insert(ids, rows)
    assert torch.equal(table.embeddings(), rounded(rows, dtype))
    assert torch.equal(table(ids), rounded(rows, dtype))
    table.accept_grad(ids, torch.full((2, 2, 3), 0.1))
    SparseOptimizer(modules=[table]).step()
    assert torch.equal(table.slot("state_sum"), torch.full((2, 2, 3), 0.1).square())
    assert (table.embeddings() < rounded(rows, dtype)).float().mean() > 0.5


TABLES = [("user", ["user"]), ("item", ["seen", "bought"])]


def batch() -> KeyedJaggedTensor:
    lengths = torch.tensor([1, 1, 2, 0, 0, 1])
    return KeyedJaggedTensor(["user", "seen", "bought"], torch.tensor([3, 39, 1, 2, 3]), lengths=lengths)


def configs(prefix: str) -> list[dict[str, Any]]:
    return [
        {"name": f"{prefix}/{table}", "num_embeddings": NUM, "embedding_dim": DIM, "feature_names": features}
        for table, features in TABLES
    ]


@row_types
@pytest.mark.parametrize("enable_fusion", [True, False])
def test_a_bag_collection_pools_rows_of_the_type(dtype: torch.dtype, enable_fusion: bool, name: str) -> None:
    bags = RecStoreEmbeddingBagCollection(configs(name), dtype=dtype, enable_fusion=enable_fusion)
    rows = {table: module.weight[torch.arange(NUM)] for table, module in bags._by_name().items()}
    user, item = rows[f"{name}/user"], rows[f"{name}/item"]
    expected = [user[3], user[39], item[1] + item[2], torch.zeros(DIM), torch.zeros(DIM), item[3]]
    pooled = bags(batch())
    assert pooled.dtype == torch.float32
    assert torch.equal(pooled.transpose(0, 1).reshape(6, DIM), torch.stack(expected))
    pooled.sum().backward()
    assert sorted(table for table, _, _ in bags._trace) == [f"{name}/item", f"{name}/user"]
    SparseOptimizer(modules=[bags]).step()
    assert bags(batch()).sum() < pooled.sum()


@row_types
def test_a_prefetched_batch_gives_the_rows_that_a_read_gives(dtype: torch.dtype, name: str) -> None:
    bags = RecStoreEmbeddingBagCollection(configs(name), dtype=dtype)
    expected = bags(batch())
    bags.issue_fused_prefetch(batch())
    assert torch.equal(bags(batch()), expected)


@row_types
def test_a_collection_gives_rows_of_the_type(dtype: torch.dtype, name: str) -> None:
    collection = RecStoreEmbeddingCollection(configs(name), dtype=dtype)
    rows = collection.embeddings[f"{name}/item"].weight[torch.tensor([1, 2])]
    assert torch.equal(collection(batch())["seen"].values(), rows)
    assert torch.equal(rows, rounded(rows, dtype))


# Refusals.


@pytest.mark.parametrize("kind", [DistEmbedding, DistEmbeddingBag])
@pytest.mark.parametrize(
    ("dtype", "output_dtype"),
    [
        (None, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.int64),
    ],
)
def test_another_output_type_is_refused_and_opens_no_table(
    kind: Any, dtype: torch.dtype | None, output_dtype: torch.dtype, name: str
) -> None:
    with pytest.raises(ValueError, match=r"must be torch\.float32 or the type of its rows") as caught:
        kind(NUM, DIM, name, dtype=dtype, output_dtype=output_dtype)
    assert str(caught.value).startswith(f'output_dtype of table "{name}"')
    assert str(caught.value).endswith(f"got {output_dtype}")
    assert name not in table_names()


@row_types
def test_a_table_does_not_open_with_another_row_type(dtype: torch.dtype, name: str) -> None:
    DistEmbedding(NUM, DIM, name, dtype=dtype)
    with pytest.raises(ValueError, match="float32"):
        DistEmbedding(NUM, DIM, name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e5m2, torch.int64])
def test_any_other_row_type_is_refused_by_name(dtype: torch.dtype, name: str) -> None:
    with pytest.raises(ValueError, match=f"`{str(dtype).removeprefix('torch.')}`, expected one of `float32`"):
        DistEmbedding(NUM, DIM, name, dtype=dtype)
    assert name not in table_names()


# Training.


def test_a_run_keeps_the_tables_of_its_model_in_the_configured_type(name: str) -> None:
    config = TrainingConfig(planted="pairs", row_type="bfloat16")
    model = build_model(config, name, open_input(config).train)
    tables = [module for module in model.modules() if isinstance(module, DistEmbedding)]
    assert len(tables) == 2
    assert {table.weight.dtype for table in tables} == {torch.bfloat16}
    assert config.as_json()["row_type"] == "bfloat16"


def test_tables_of_models_have_float32_rows_unless_asked(name: str) -> None:
    assert StoreTables(name, "sgd")("w", 2).weight.dtype == torch.float32


def auc_on_frappe(data_root: Path, name: str, **options: Any) -> float:
    """Test AUC after the last epoch of a run with Adam at 2e-3 and factors of dim 8."""
    folder = data_root / "frappe"
    config = TrainingConfig(train=(folder / "train.libfm",), test=(folder / "test.libfm",), patience=0, **options)
    assert (config.optimizer, config.lr, config.dim) == ("adam", 2e-3, 8)
    test = train_new(config, name)[-1].test
    assert test is not None
    return test.auc


# Both after the epoch that early stopping chooses: which one it is must not hang on a hair.
@pytest.mark.parametrize(("model", "epochs"), [("fm", 4), ("deepfm", 2)])
@pytest.mark.parametrize("row_type", ["bfloat16", "float16"])
@pytest.mark.tier("all")
def test_a_model_of_frappe_is_as_good_with_rows_of_16_bits(
    data_root: Path, name: str, model: ModelName, epochs: int, row_type: RowTypeName
) -> None:
    narrow, wide = (
        auc_on_frappe(data_root, name, model=model, epochs=epochs, row_type=kind) for kind in (row_type, "float32")
    )
    assert wide > 0.92
    assert narrow == pytest.approx(wide, abs=0.002)
