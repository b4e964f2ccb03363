"""Tables of int8 and float8_e4m3fn rows, beside the same roundings made of torch's types."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import drop_all_tables
from optimizer_kinds import KINDS
from safetensors.torch import load_file
from test_row_types import DIM, NUM, all_rows, auc_on_frappe, scattered, train
from torch import Tensor, nn

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    DistTensor,
    EmbeddingTableConfig,
    RecStoreClient,
    SparseOptimizer,
    checkpoint,
    table_names,
    table_statistics,
)
from recstore_ops.config.row_types import RowTypeName
from recstore_ops.training.run.choices import ModelName
from recstore_ops.transfer import export_safetensors, from_embedding

pytestmark = pytest.mark.tier("test")

GREATEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
FINEST = {torch.int8: 1 / 64, torch.float8_e4m3fn: 1 / 8}
"""How far apart the values from half of a row's greatest to it are, relative to them."""

row_types = pytest.mark.parametrize("dtype", list(GREATEST), ids=str)


@pytest.fixture(autouse=True)
def _empty_store() -> Iterator[None]:
    drop_all_tables()
    yield
    drop_all_tables()


@pytest.fixture
def name(table_name: Callable[[], str]) -> str:
    return table_name()


def scales(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The least power of two by which each row can be divided to be no greater than the greatest code, `[N, 1]`."""
    powers = 2.0 ** torch.arange(-126, 120)
    fits = rows.abs().amax(dim=1, keepdim=True) <= GREATEST[dtype] * powers
    return powers[fits.int().argmax(dim=1)].unsqueeze(1)


def rounded(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """What a table of `dtype` keeps of rows, as float32."""
    codes = rows / scales(rows, dtype)
    codes = codes.round() if dtype == torch.int8 else codes.to(dtype).float()
    return codes * scales(rows, dtype)


# What is rounded.


@row_types
def test_initial_rows_are_those_of_float32_rounded_to_the_nearest(dtype: torch.dtype, name: str) -> None:
    exact = all_rows(DistEmbedding(NUM, DIM, name))
    RecStoreClient().drop(name)
    module = DistEmbedding(NUM, DIM, name, dtype=dtype)
    assert torch.equal(all_rows(module), rounded(exact, dtype))
    assert len(module.table) == 0


@row_types
@pytest.mark.parametrize("scale", [1.0, 1e-30, 3e5])
def test_written_rows_are_rounded_to_the_nearest(dtype: torch.dtype, scale: float, name: str) -> None:
    module = DistEmbedding(NUM, 37, name, dtype=dtype)
    rows = scattered(NUM, 37) * scale
    module.weight[torch.arange(NUM)] = rows
    assert torch.equal(all_rows(module), rounded(rows, dtype))


@row_types
def test_a_step_that_moves_one_weight_leaves_the_others(dtype: torch.dtype, name: str) -> None:
    module = DistEmbedding(NUM, DIM, name, lr=1.0, dtype=dtype)
    module.weight[torch.arange(NUM)] = scattered(NUM, DIM)
    before = all_rows(module)
    gradient = torch.zeros(NUM, DIM)
    gradient[:, 2] = before[:, 2] / 3
    RecStoreClient().update(name, torch.arange(NUM), gradient)
    after = all_rows(module)
    same_scale = (scales(before, dtype) == scales(after, dtype)).squeeze(1)
    others = [column for column in range(DIM) if column != 2]
    assert same_scale.sum() > NUM / 2
    assert torch.equal(after[same_scale][:, others], before[same_scale][:, others])


@row_types
def test_steps_too_small_for_the_row_type_are_right_on_average(dtype: torch.dtype, name: str) -> None:
    ids, gradient = torch.arange(20_000), FINEST[dtype] / 16
    module = DistEmbedding(None, DIM, name, initializer={"kind": "constant", "value": 1}, lr=1.0, dtype=dtype)
    module(ids).sum().mul(gradient).backward()
    SparseOptimizer(modules=[module]).step()
    moved = 1 - module(ids).detach().double()
    assert len(moved.unique()) == 2
    # Six times the deviation of the mean of 160,000 elements, of which one of 16 moves.
    assert moved.mean().item() == pytest.approx(gradient, rel=0.06)


@row_types
@pytest.mark.parametrize("optimizer", KINDS)
def test_two_runs_give_equal_bits_and_another_seed_others(dtype: torch.dtype, optimizer: str, name: str) -> None:
    constant = {"kind": "constant", "value": 0.1}
    first, again, other = (train(name, dtype, optimizer, 20, initializer=constant, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@row_types
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "rmsprop", "ftrl"])
def test_rows_go_where_they_go_with_float32(dtype: torch.dtype, optimizer: str, name: str) -> None:
    config, steps = {"kind": optimizer, "lr": 0.05}, 300
    exact = train(name, torch.float32, config, steps)
    difference = train(name, dtype, config, steps) - exact
    # A rounding moves an element by half a distance between values, on average; nothing need bring it back.
    walk = 0.5 * math.sqrt(steps) * FINEST[dtype] * exact.abs().max()
    assert difference.abs().max() < 2 * walk
    assert difference.mean().abs() < 2 * walk / math.sqrt(difference.numel())


def test_rows_take_about_a_quarter_of_the_memory(name: str) -> None:
    def row_bytes(dtype: torch.dtype) -> int:
        module = DistEmbedding(None, 64, name, dtype=dtype)
        module.weight[torch.arange(100)] = scattered(100, 64)
        taken = table_statistics(name)["row_bytes"]
        RecStoreClient().drop(name)
        return taken

    assert [row_bytes(dtype) for dtype in (torch.float32, *GREATEST)] == [25_600, 6_800, 6_800]


# What modules give.


@row_types
@pytest.mark.parametrize("kind", [DistEmbedding, DistEmbeddingBag])
def test_a_module_gives_float32_or_bfloat16(dtype: torch.dtype, kind: Any, name: str) -> None:
    ids = torch.tensor([[1, 5, 1], [0, 2, 39]])
    plain = kind(NUM, DIM, name, dtype=dtype)
    narrow = kind(NUM, DIM, name, dtype=dtype, output_dtype=torch.bfloat16)
    assert (plain(ids).dtype, narrow(ids).dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(narrow(ids), plain(ids).bfloat16())
    assert torch.equal(all_rows(narrow).bfloat16().float(), all_rows(plain))
    for twin in (copy.copy(narrow), pickle.loads(pickle.dumps(narrow))):
        assert torch.equal(twin(ids), narrow(ids))
    with pytest.raises(ValueError, match=r"must be torch\.float32 or the type of its rows, torch\.bfloat16, got"):
        kind(NUM, DIM, name, dtype=dtype, output_dtype=dtype)


@row_types
def test_init_func_and_pretrained_rows_are_of_bfloat16(dtype: torch.dtype, name: str) -> None:
    asked = []

    def init(shape: tuple[int, int], asked_dtype: torch.dtype) -> Tensor:
        asked.append((shape, asked_dtype))
        return scattered(*shape)

    module = DistEmbedding(NUM, DIM, name, init, dtype=dtype)
    assert asked == [((NUM, DIM), torch.bfloat16)]
    assert torch.equal(all_rows(module), rounded(scattered(NUM, DIM), dtype))
    frozen = DistEmbedding.from_pretrained(scattered(NUM, DIM), f"{name}/frozen", dtype=dtype)
    assert torch.equal(all_rows(frozen), all_rows(module))


@row_types
def test_an_embedding_of_torch_becomes_such_a_table(dtype: torch.dtype, name: str) -> None:
    original = nn.Embedding(NUM, DIM)
    ours = from_embedding(original, name, dtype=dtype)
    assert torch.equal(ours(torch.arange(NUM)), rounded(original.weight.detach(), dtype))


@row_types
def test_a_state_dict_holds_rows_as_bfloat16_and_gives_them_back(dtype: torch.dtype, name: str) -> None:
    module = DistEmbedding(NUM, DIM, name, dtype=dtype)
    module.weight[torch.arange(NUM)] = scattered(NUM, DIM)
    state, rows = copy.deepcopy(module.state_dict()), all_rows(module)
    assert torch.bfloat16 in {part.dtype for value in state.values() for part in value if isinstance(part, Tensor)}
    module.weight[torch.arange(NUM)] = torch.zeros(NUM, DIM)
    module.load_state_dict(state)
    assert torch.equal(all_rows(module), rows)


@row_types
def test_client_and_dist_tensor_name_the_row_type(dtype: torch.dtype, name: str) -> None:
    client = RecStoreClient()
    client.init_embedding_table(name, EmbeddingTableConfig(NUM, DIM, dtype=dtype))
    assert client.get_data_meta(name) == (dtype, (NUM, DIM))
    tensor = DistTensor((NUM, DIM), dtype, f"{name}/t", lambda shape, _: scattered(*shape))
    assert tensor.dtype == dtype
    assert torch.equal(tensor[torch.arange(NUM)], rounded(scattered(NUM, DIM), dtype))


@row_types
def test_checkpoints_and_exports_hold_the_rows_exactly(dtype: torch.dtype, name: str, tmp_path: Path) -> None:
    module = DistEmbedding(NUM, DIM, name, dtype=dtype, optimizer="adam")
    module(torch.arange(NUM)).square().sum().backward()
    SparseOptimizer(modules=[module]).step()
    rows = all_rows(module)
    checkpoint.save(tmp_path / "saved")
    saved = map(load_file, (tmp_path / "saved").glob("*.safetensors"))
    (columns,) = [columns for columns in saved if columns["rows"].dtype == dtype]
    codes_in_order = columns["rows"].float()[columns["ids"].argsort()]
    assert torch.equal(codes_in_order * columns["rows.scale"][columns["ids"].argsort()], rows)
    export_safetensors(tmp_path / "rows.safetensors", [name])
    exported = load_file(tmp_path / "rows.safetensors")
    assert torch.equal(exported[f"{name}.rows"].float(), rows)
    module.weight[torch.arange(NUM)] = torch.zeros(NUM, DIM)
    checkpoint.load(tmp_path / "saved")
    assert torch.equal(all_rows(module), rows)


@row_types
def test_a_table_does_not_open_with_another_row_type(dtype: torch.dtype, name: str) -> None:
    DistEmbedding(NUM, DIM, name, dtype=dtype)
    with pytest.raises(ValueError, match="float32"):
        DistEmbedding(NUM, DIM, name)
    assert name in table_names()


# Training.


# Both after the epoch that early stopping chooses: which one it is must not hang on a hair.
@pytest.mark.parametrize(("model", "epochs"), [("fm", 4), ("deepfm", 2)])
@pytest.mark.parametrize("row_type", ["int8", "float8_e4m3fn"])
@pytest.mark.tier("all")
def test_a_model_of_frappe_is_as_good_with_rows_of_8_bits(
    data_root: Path, name: str, model: ModelName, epochs: int, row_type: RowTypeName
) -> None:
    narrow, wide = (
        auc_on_frappe(data_root, name, model=model, epochs=epochs, row_type=kind) for kind in (row_type, "float32")
    )
    assert wide > 0.92
    assert narrow == pytest.approx(wide, abs=0.002)
