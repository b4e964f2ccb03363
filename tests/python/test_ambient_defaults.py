"""Default devices and default types are for dense parameters: tables give the same under each."""

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import recstore_ops
from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    DistTensor,
    HashTable,
    KeyedJaggedTensor,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingCollection,
    SparseOptimizer,
    embedding,
    embedding_bag,
)

pytestmark = pytest.mark.tier("quick")

ops = torch.ops.recstore

DEVICES = ["cpu", "meta", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
PACKAGE = Path(recstore_ops.__file__).parent

NUM, DIM = 7, 3
ROWS = torch.arange(NUM * DIM, dtype=torch.float32).view(NUM, DIM) / 3
IDS = torch.tensor([1, 2, 2, 5, 0])
OFFSETS = torch.tensor([0, 3])
WEIGHTS = torch.tensor([0.5, 0.1, 1.5, -2.0, 0.3])
BATCH = KeyedJaggedTensor(["a", "b"], IDS, lengths=torch.tensor([2, 1, 0, 2]))
SGD: dict[str, Any] = {"optimizer": {"kind": "sgd", "lr": 0.1}}


@contextmanager
def defaults(device: str, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


@pytest.fixture
def name(table_name: Callable[[], str]) -> str:
    return table_name()


def trained(module: Any, forward: Callable[[], Any], rows: Callable[[], Tensor]) -> list[Tensor]:
    """What a module gives in training and in evaluation, its gradients, its state and its rows after a step."""
    optimizer = SparseOptimizer(modules=[module])
    outputs = flat(forward())
    loss = sum(((output + 1) ** 2).sum() for output in outputs)
    assert isinstance(loss, Tensor)
    loss.backward()
    collected = [part for table in module.tables() for _, *parts in table.collected() for part in parts]
    norm = optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    module.load_state_dict(module.state_dict())
    with torch.no_grad():
        evaluated = flat(forward())
    return [*(output.detach() for output in outputs), *collected, norm, *evaluated, rows()]


def flat(outputs: Any) -> list[Tensor]:
    values = outputs.values() if isinstance(outputs, dict) else [outputs]
    return [value if isinstance(value, Tensor) else value.values() for value in values]


def pretrained(name: str) -> list[Tensor]:
    module = DistEmbedding.from_pretrained(ROWS, name, freeze=False, padding_idx=2, **SGD)
    return trained(module, lambda: module(IDS), lambda: module.weight[IDS])


def initialized(name: str) -> list[Tensor]:
    module = DistEmbedding(NUM, DIM, name, init_func=lambda shape, dtype: torch.full(shape, 0.1, dtype=dtype), **SGD)
    return trained(module, lambda: module(IDS), lambda: module.weight[IDS])


def padded(name: str) -> list[Tensor]:
    module = DistEmbedding(NUM, DIM, name, padding_idx=0, initializer={"kind": "constant", "value": 5.0}, **SGD)
    return trained(module, lambda: module(IDS), lambda: module.weight[IDS])


def bags(mode: str) -> Callable[[str], list[Tensor]]:
    def run(name: str) -> list[Tensor]:
        module: Any = DistEmbeddingBag(None, DIM, name, mode=mode, padding_idx=5, **SGD)  # type: ignore[arg-type]
        module.weight[torch.arange(NUM, device="cpu")] = ROWS
        return trained(module, lambda: module(IDS, OFFSETS), lambda: module.weight[IDS])

    return run


def weighted(name: str) -> list[Tensor]:
    module = DistEmbeddingBag(NUM, DIM, name, mode="sum", init_func=lambda shape, dtype: ROWS, **SGD)
    weights = WEIGHTS.clone().requires_grad_()
    results = trained(module, lambda: module(IDS, OFFSETS, weights), lambda: module.weight[IDS])
    assert weights.grad is not None
    return [*results, weights.grad]


def equal_bags(name: str) -> list[Tensor]:
    module = DistEmbeddingBag(NUM, DIM, name, init_func=lambda shape, dtype: ROWS, **SGD)
    return trained(module, lambda: module(IDS[:4].view(2, 2)), lambda: module.weight[IDS])


def hash_table(reduce_by: str) -> Callable[[str], list[Tensor]]:
    def run(name: str) -> list[Tensor]:
        module: Any = HashTable([DIM], name, grad_reduce_by=reduce_by, num_workers=3, **SGD)  # type: ignore[arg-type]
        module.insert(IDS[:2], ROWS[:2])
        nothing = [*module.grad(), module.slot("embedding", IDS)]
        return [*nothing, *trained(module, lambda: module(IDS), lambda: module.embeddings())]

    return run


def configs(name: str, **more: str) -> list[dict[str, Any]]:
    tables = {"a": DIM, "b": DIM + 1}
    return [
        {"name": f"{name}/{key}", "num_embeddings": None, "embedding_dim": dim, "feature_names": [key], **more}
        for key, dim in tables.items()
    ]


def bag_collection(pooling: str, fused: bool) -> Callable[[str], list[Tensor]]:
    def run(name: str) -> list[Tensor]:
        module = RecStoreEmbeddingBagCollection(configs(name, pooling=pooling), enable_fusion=fused, **SGD)
        rows = module.embedding_bags[f"{name}/a"].weight
        rows[[0, 1, 2]] = [[1.1] * DIM, [2.2] * DIM, [3.3] * DIM]  # type: ignore[assignment]
        if fused:
            module.issue_fused_prefetch(BATCH)
        fused_ids = module.fused_ids(BATCH)
        return [fused_ids, *trained(module, lambda: module(BATCH), lambda: rows[IDS])]

    return run


def collection(name: str) -> list[Tensor]:
    module = RecStoreEmbeddingCollection(configs(name), **SGD)
    return trained(module, lambda: module(BATCH), lambda: module.embeddings[f"{name}/a"].weight[IDS])


def matrix(name: str) -> list[Tensor]:
    tensor = DistTensor((NUM, DIM), torch.float32, name, init_func=lambda shape, dtype: torch.ones(shape) * 3)
    tensor[[1, 2]] = ROWS[:2]
    tensor[3] = 0.1  # type: ignore[assignment]
    tensor[[]] = ROWS[:0]
    return [tensor[[1, 2, 3, 4]], tensor[IDS]]


def functional(name: str) -> list[Tensor]:
    module = DistEmbedding(NUM, DIM, name, init_func=lambda shape, dtype: ROWS, **SGD)
    weighted = lambda: embedding_bag(IDS, module.table, OFFSETS, "sum", WEIGHTS)  # noqa: E731
    return [
        *trained(module, lambda: embedding(IDS, module.table), lambda: module.weight[IDS]),
        *trained(module, weighted, lambda: module.weight[IDS]),
    ]


def scaled(name: str) -> list[Tensor]:
    """Steps behind a `GradScaler`, of which the second is left out."""
    module = DistEmbedding(NUM, DIM, name, init_func=lambda shape, dtype: ROWS, **SGD)
    optimizer, scaler, rows = SparseOptimizer(modules=[module]), torch.amp.GradScaler("cpu"), []
    for factor in (1.0, torch.inf):
        optimizer.zero_grad()
        scaler.scale(module(IDS).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        rows.append(module.weight[IDS])
    return rows


PROGRAMS: dict[str, Callable[[str], list[Tensor]]] = {
    "DistEmbedding, from_pretrained": pretrained,
    "DistEmbedding, init_func": initialized,
    "DistEmbedding, padding_idx": padded,
    "DistEmbedding, GradScaler": scaled,
    **{f"DistEmbeddingBag, {mode}": bags(mode) for mode in ("sum", "mean", "max")},
    "DistEmbeddingBag, weights": weighted,
    "DistEmbeddingBag, 2-D": equal_bags,
    **{f"HashTable, {reduce_by}": hash_table(reduce_by) for reduce_by in ("worker", "id")},
    **{
        f"RecStoreEmbeddingBagCollection, {pooling}, {'fused' if fused else 'one by one'}": bag_collection(
            pooling, fused
        )
        for pooling in ("sum", "mean")
        for fused in (True, False)
    },
    "RecStoreEmbeddingCollection": collection,
    "DistTensor": matrix,
    "embedding and embedding_bag": functional,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_modules_give_the_same_under_all_defaults(program: str, device: str, dtype: torch.dtype, name: str) -> None:
    run = PROGRAMS[program]
    expected = run(name)
    # The same name again, from which the initial rows follow.
    for table in [table for table in recstore_ops.table_names() if table.startswith(name)]:
        ops.drop_table(table)
    with defaults(device, dtype):
        got = run(name)
    assert len(got) == len(expected) > 0
    for ours, usual in zip(got, expected, strict=True):
        assert (ours.device.type, ours.dtype) == (usual.device.type, usual.dtype)
        assert torch.equal(ours, usual)


@pytest.mark.parametrize("program", [name for name in PROGRAMS if "HashTable" not in name])
def test_every_program_trains_more_than_nothing(program: str, table_name: Callable[[], str]) -> None:
    assert any(
        result.is_floating_point() and bool(result.abs().sum() > 0) for result in PROGRAMS[program](table_name())
    )


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("size", [3, 257, 100_000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_mean_of_ones_is_one(dtype: torch.dtype, size: int, fused: bool, name: str) -> None:
    ids, initializer = torch.arange(size), {"kind": "constant", "value": 1.0}
    config = {"name": name, "num_embeddings": None, "embedding_dim": 1, "feature_names": ["a"], "pooling": "mean"}
    batch = KeyedJaggedTensor(["a"], ids, lengths=torch.tensor([size]))
    with defaults("cpu", dtype):
        bags = RecStoreEmbeddingBagCollection([config], enable_fusion=fused, initializer=initializer)
        assert bags(batch).tolist() == [[[1.0]]]
        assert bags.embedding_bags[name](ids, torch.tensor([0, size])).tolist() == [[1.0]]


def test_fused_and_unfused_means_and_their_gradients_have_the_same_bits(name: str) -> None:
    sizes = torch.tensor([1000, 0, 3, 7, 49, 1])
    ids = torch.randint(-50, 50, (int(sizes.sum()),))
    features = (("a", 5, "mean"), ("b", 2, "sum"), ("c", 3, "mean"))
    configs = [
        {"name": f"{name}/{key}", "num_embeddings": None, "embedding_dim": dim, "feature_names": [key], "pooling": way}
        for key, dim, way in features
    ]
    bags = RecStoreEmbeddingBagCollection(configs, keyed_output=True)
    results = []
    for fused in (True, False):
        bags.set_fusion(fused)
        pooled = bags(KeyedJaggedTensor(["a", "b", "c"], ids, lengths=sizes)).values()
        (pooled**2).sum().backward()
        results.append([pooled, *(part for _, *parts in bags._trace for part in parts)])
        bags.reset_trace()
    for fused, unfused in zip(*results, strict=True):
        assert torch.equal(fused, unfused)


def meta_calls(table: Tensor, collector: Tensor) -> dict[str, Callable[[], object]]:
    ids = torch.tensor([1, 2], device="meta")
    rows, offsets = torch.ones(2, DIM, device="meta"), torch.tensor([0, 2], device="meta")
    return {
        "emb_read": lambda: ops.emb_read(table, ids, DIM),
        "emb_read.places": lambda: ops.emb_read.places(table, ids, DIM),
        "emb_read of the default table": lambda: ops.emb_read(ids, DIM),
        "emb_write": lambda: ops.emb_write(table, ids, rows),
        "emb_write, rows only": lambda: ops.emb_write(table, IDS[:2], rows),
        "emb_write, ids only": lambda: ops.emb_write(table, ids, ROWS[:2]),
        "emb_write of the default table": lambda: ops.emb_write(ids, rows),
        "emb_update": lambda: ops.emb_update(table, ids, rows),
        "emb_update of the default table": lambda: ops.emb_update(ids, rows),
        "emb_bag": lambda: ops.emb_bag(table, ids, offsets, DIM, 0),
        "emb_bag.tables": lambda: ops.emb_bag([table], ids, offsets, [DIM], 0),
        "emb_bag.places": lambda: ops.emb_bag.places([table], ids, offsets, [DIM], 0),
        "hashtable_lookup": lambda: ops.hashtable_lookup(table, ids, DIM, True),
        "hashtable_delete": lambda: ops.hashtable_delete(table, ids),
        "accept_grad": lambda: ops.accept_grad(collector, table, ids, rows),
        "accept_bag_grads": lambda: ops.accept_bag_grads([collector], [table], ids, offsets, rows[:1], [DIM]),
        "read_features": lambda: torch.ops.recstore_python.read_features([table], ids, offsets, [DIM]),
        "accept_feature_grads": lambda: torch.ops.recstore_python.accept_feature_grads(
            [table], [collector], ids, offsets, rows[:1], [DIM]
        ),
    }


def test_no_operator_takes_meta_tensors_for_a_real_table(name: str) -> None:
    module = DistEmbedding(None, DIM, name)
    for operator, call in meta_calls(module.table.handle, module.table.collector).items():
        with pytest.raises(RuntimeError, match=f"{operator.split('.')[0].split(' ')[0].strip(',')}: got a meta tensor"):
            call()
    assert len(module.table) == 0
    assert module._trace == []


def test_lookups_of_meta_ids_are_refused(name: str) -> None:
    module, ids = DistEmbedding(None, DIM, name), IDS.to("meta")
    with pytest.raises(RuntimeError, match="emb_read: got a meta tensor"):
        module(ids)
    with torch.no_grad(), pytest.raises(RuntimeError, match="emb_read: got a meta tensor"):
        module(ids)
    with pytest.raises(RuntimeError, match="emb_read: got a meta tensor"):
        module.weight[ids]
    with pytest.raises(RuntimeError, match="emb_write: got a meta tensor"):
        module.weight[IDS] = ROWS[IDS].to("meta")


def test_rows_on_the_meta_device_are_refused(name: str) -> None:
    rows, message = ROWS.to("meta"), f'the rows of table "{name}" are on the meta device, where they have no values'
    with pytest.raises(ValueError, match=message):
        DistEmbedding.from_pretrained(rows, name)
    with pytest.raises(ValueError, match=message):
        DistEmbedding(NUM, DIM, name, init_func=lambda shape, dtype: rows)
    # Neither left a table behind.
    assert DistEmbedding.from_pretrained(ROWS, name).table.is_new


FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "logspace", "normal", "ones", "rand"),
    *("randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "zeros"),
}
"""The functions of torch that make tensors on the default device, or of the default type."""


def unnamed_defaults(source: str) -> list[str]:
    """The calls of tensor factories that leave device or type to the defaults, as `line: what`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES):
            continue
        named = {keyword.arg for keyword in node.keywords}
        if ast.unparse(node.func.value) == "torch" and not {"device", "dtype"} <= named:
            found.append(f"{node.lineno}: torch.{node.func.attr}")
    return found


def test_tensor_factories_in_the_package_name_device_and_dtype() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}:{call}"
        for path in PACKAGE.rglob("*.py")
        for call in unnamed_defaults(path.read_text())
    }
    assert sorted(found) == []


def test_unnamed_defaults_are_found() -> None:
    assert unnamed_defaults("torch.zeros(3, device=d)\nx = torch.arange(\n 3, dtype=t)") == [
        "1: torch.zeros",
        "2: torch.arange",
    ]
    assert unnamed_defaults("torch.ones(3, device=d, dtype=t); rows.new_zeros(3); np.zeros(3)") == []
