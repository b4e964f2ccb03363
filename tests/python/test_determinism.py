"""Training gives the same bits for every thread count, SIMD level, merge, block size and order of insertion.

Run as a program, this file trains with every optimizer and prints a hash of the rows of each.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizer_kinds import REGISTRY
from torch import Tensor
from warm_processes import in_a_process

from recstore_ops import (
    DistEmbeddingBag,
    SparseOptimizer,
    Table,
    TableConfig,
    _native,
    merge_gradients,
    set_merge,
    table_names,
)
from recstore_ops.ops import collecting

pytestmark = pytest.mark.tier("test")

# A row is one full run of the 16 lanes that sums go over, and a rest. A thread takes 32,768 floats, or a block:
# 8,000 bags are 6 pieces of work, their 24,000 rows 16, and a step of some 10,000 distinct ids 180 blocks.
DIM, SPAN, BAGS, BLOCK_SIZE, STEPS = 21, 6_000, 8_000, 64, 2

OPTIMIZERS: dict[str, dict[str, Any]] = {
    **{kind: {"kind": kind, rule["options"][0]["name"]: 0.1} for kind, rule in REGISTRY.items()},
    "sgd": {"kind": "sgd", "lr": 0.1, "weight_decay": 0.01},
    "adagrad_torch": {"kind": "adagrad", "lr": 0.1, "convention": "torch", "weight_decay": 0.01},
    "rowwise_adagrad": {"kind": "rowwise_adagrad", "lr": 0.1, "weight_decay": 0.01},
    "rowwise_adagrad_torch": {"kind": "rowwise_adagrad", "lr": 0.1, "convention": "torch"},
    "adam": {"kind": "adam", "lr": 0.1, "weight_decay": 0.01},
    "adam_row": {"kind": "adam", "lr": 0.1, "bias_correction": "row"},
    "adamw_row": {"kind": "adamw", "lr": 0.1, "bias_correction": "row"},
    "ftrl": {"kind": "ftrl", "alpha": 0.1, "l1": 0.3, "l2": 0.1},
    "nesterov": {"kind": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True},
    "rmsprop": {"kind": "rmsprop", "lr": 0.1, "momentum": 0.9, "centered": True},
    "amsgrad": {"kind": "adam", "lr": 0.1, "amsgrad": True},
}

BEFORE_CHANGE = ("sgd", "rowwise_adagrad", "adam", "lamb", "ftrl")
each_optimizer = pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(name, marks=[] if name in BEFORE_CHANGE else [pytest.mark.tier("all")], id=name)
        for name in OPTIMIZERS
    ],
)

MERGES: tuple[Literal["python", "native"], ...] = ("python", "native")

TABLE = "determinism"  # Always this name: it is part of the seed of the initial values.


def fresh_module(optimizer: str, block_size: int = BLOCK_SIZE) -> DistEmbeddingBag:
    if TABLE in table_names():
        torch.ops.recstore.drop_table(TABLE)
    return DistEmbeddingBag(None, DIM, TABLE, "sum", optimizer=OPTIMIZERS[optimizer], block_size=block_size)


def train(module: DistEmbeddingBag) -> str:
    """Trains on random bags and returns a hash of all outputs and rows."""
    generator = torch.Generator().manual_seed(0)
    digest = hashlib.sha256()
    optimizer = SparseOptimizer(modules=[module])
    for _ in range(STEPS):
        ids = torch.randint(-SPAN, SPAN, (BAGS, 3), generator=generator)
        weights, slope = (torch.randn(*shape, generator=generator) for shape in (ids.shape, (len(ids), DIM)))
        pooled = module(ids, per_sample_weights=weights)
        digest.update(pooled.detach().numpy().tobytes())
        pooled.backward(slope + pooled.detach())
        optimizer.step()
    digest.update(module.weight[torch.arange(-SPAN, SPAN)].numpy().tobytes())
    return digest.hexdigest()


@cache
def expected_hash(optimizer: str) -> str:
    """What a new table gives in this process, with one thread."""
    return train(fresh_module(optimizer))


@pytest.fixture(autouse=True)
def _one_thread_unless_told() -> Iterator[None]:
    threads, merge_kind = torch.get_num_threads(), collecting._merge_kind
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    set_merge(merge_kind)


@each_optimizer
@pytest.mark.parametrize("threads", [2, 8])
def test_rows_are_bit_equal_for_1_2_and_8_threads(threads: int, optimizer: str) -> None:
    expected = expected_hash(optimizer)
    torch.set_num_threads(threads)
    assert train(fresh_module(optimizer)) == expected


@each_optimizer
@pytest.mark.parametrize("kind", MERGES)
def test_rows_are_bit_equal_for_the_python_and_the_native_merge(
    kind: Literal["python", "native"], optimizer: str
) -> None:
    expected = expected_hash(optimizer)
    set_merge(kind)
    assert train(fresh_module(optimizer)) == expected


def hashes() -> dict[str, str]:
    """What one thread of this process computes with each optimizer."""
    torch.set_num_threads(1)
    return {optimizer: train(fresh_module(optimizer)) for optimizer in OPTIMIZERS}


def start_python(code: list[str], level: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "RECSTORE_SIMD": level, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *code], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def output_of(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return output


@pytest.fixture(scope="module")
def hashes_by_level() -> dict[str, dict[str, str]]:
    """For each SIMD level of this machine and each optimizer, what a process of that level computes."""
    *levels, widest = _native.simd_levels()
    # Without the variable a process takes the widest.
    own = os.environ.get("RECSTORE_SIMD", widest)
    processes = {level: start_python([str(Path(__file__))], level) for level in (*levels, widest) if level != own}
    return {own: in_a_process(hashes)} | {level: json.loads(output_of(process)) for level, process in processes.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_are_bit_equal_for_every_simd_level_and_process(
    optimizer: str, hashes_by_level: dict[str, dict[str, str]]
) -> None:
    assert "baseline" in hashes_by_level
    found = {level: hashes[optimizer] for level, hashes in hashes_by_level.items()}
    assert found == dict.fromkeys(found, expected_hash(optimizer))


def test_an_unknown_simd_level_is_an_import_error_that_lists_the_known_ones() -> None:
    process = start_python(["-c", "import recstore_ops"], level="sse9")

    _, errors = process.communicate(timeout=300)

    assert process.returncode == 1
    last_line = errors.strip().splitlines()[-1]
    assert last_line.startswith("ImportError: ")
    assert 'RECSTORE_SIMD: SIMD level "sse9" is not available' in last_line
    assert ", ".join(_native.simd_levels()) in last_line


@each_optimizer
def test_rows_do_not_depend_on_the_order_of_insertion(optimizer: str) -> None:
    module = fresh_module(optimizer)
    order = torch.randperm(2 * SPAN, generator=torch.Generator().manual_seed(1)) - SPAN
    torch.ops.recstore.hashtable_lookup(module.table.handle, order, DIM, True)
    assert train(module) == expected_hash(optimizer)


@each_optimizer
def test_rows_do_not_depend_on_those_deleted_from_their_places(optimizer: str) -> None:
    others, hashes = torch.arange(SPAN, 3 * SPAN), []
    for deleted in (others[:0], others):
        module = fresh_module(optimizer)
        # A step of its own, because a table's count of steps corrects the bias of Adam's moments.
        torch.ops.recstore.emb_update.table(module.table.handle, others, torch.ones(len(others), DIM))
        torch.ops.recstore.hashtable_delete(module.table.handle, deleted)
        hashes.append(train(module))
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("block_size", [1, 7, 10_240])
def test_rows_do_not_depend_on_the_block_size(block_size: int) -> None:
    assert train(fresh_module("adagrad", block_size)) == expected_hash("adagrad")


@each_optimizer
def test_an_update_of_distinct_ids_does_not_depend_on_their_order(
    optimizer: str, table_name: Callable[[], str]
) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(2_000, generator=generator)
    gradients = torch.randn(len(ids), DIM, generator=generator)
    config = TableConfig(optimizer=OPTIMIZERS[optimizer], block_size=BLOCK_SIZE, initializer={"kind": "zeros"})
    straight, reversed_ = Table(table_name(), DIM, config), Table(table_name(), DIM, config)

    for _ in range(STEPS):
        torch.ops.recstore.emb_update.table(straight.handle, ids, gradients)
        torch.ops.recstore.emb_update.table(reversed_.handle, ids.flip(0), gradients.flip(0))

    rows = [torch.ops.recstore.emb_read.table(table.handle, ids, DIM) for table in (straight, reversed_)]
    assert torch.equal(*rows)


@pytest.mark.parametrize(("gradients", "total"), [((1e8, 1.0, -1e8), 0.0), ((1e8, -1e8, 1.0), 1.0)])
@pytest.mark.parametrize("threads", [1, 8])
def test_duplicates_are_summed_in_input_order(
    threads: int, gradients: tuple[float, ...], total: float, table_name: Callable[[], str]
) -> None:
    torch.set_num_threads(threads)
    config = TableConfig(optimizer={"kind": "sgd", "lr": 1.0}, initializer={"kind": "zeros"})
    table, ids = Table(table_name(), DIM, config), torch.arange(5_000)
    grads = torch.tensor(gradients).repeat_interleave(len(ids)).unsqueeze(1).expand(-1, DIM)

    torch.ops.recstore.emb_update.table(table.handle, ids.repeat(3), grads)

    rows = torch.ops.recstore.emb_read.table(table.handle, ids, DIM)
    assert torch.equal(rows, torch.full_like(rows, -total))


def bits(values: Tensor) -> list[int]:
    return values.contiguous().view(torch.int32).flatten().tolist()


def merged_one_by_one(ids: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    """The merge that is obviously right: from zero, in input order, one addition after the other."""
    distinct, inverse = np.unique(ids.numpy(), return_inverse=True)
    sums = np.zeros((len(distinct), grads.shape[1]), np.float32)
    for row, gradient in zip(inverse, grads.numpy(), strict=True):
        sums[row] += gradient
    return torch.from_numpy(distinct), torch.from_numpy(sums)


def assert_merges_agree(ids: Tensor, grads: Tensor) -> None:
    unique, inverse = torch.unique(ids, return_inverse=True)
    expected_ids, expected_sums = merged_one_by_one(ids, grads)
    merged = [(unique, torch.zeros(len(unique), grads.shape[1]).index_add_(0, inverse, grads))]
    for kind in MERGES:
        set_merge(kind)
        merged.append(merge_gradients(ids, grads))
    for merged_ids, sums in merged:
        assert torch.equal(merged_ids, expected_ids)
        assert bits(sums) == bits(expected_sums)


some_ids = st.one_of(st.integers(-3, 3), st.sampled_from([-(2**63), 2**63 - 1]))
# Of any size, signed zeros and subnormal numbers too; 40 of the largest do not overflow.
some_gradients = st.floats(-(2.0**120), 2.0**120, width=32)
gradient_rows = st.integers(1, 5).flatmap(
    lambda dim: st.tuples(
        st.just(dim),
        st.lists(st.tuples(some_ids, st.lists(some_gradients, min_size=dim, max_size=dim)), max_size=40),
    )
)


@settings(deadline=None)  # Machines that run tests are busy.
@given(gradient_rows)
def test_every_merge_of_duplicates_gives_the_same_bits(
    case: tuple[int, list[tuple[int, list[float]]]],
) -> None:
    dim, rows = case
    ids = torch.tensor([id for id, _ in rows], dtype=torch.int64)
    grads = torch.tensor([gradient for _, gradient in rows], dtype=torch.float32).reshape(-1, dim)
    assert_merges_agree(ids, grads)


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("dim", [1, 3, 64])
def test_every_merge_of_many_duplicates_gives_the_same_bits(dim: int, threads: int) -> None:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-100, 100, (2, 6_000), generator=generator)[0]
    scale = 10.0 ** torch.randint(-6, 6, (6_000, 1), generator=generator)
    grads = (torch.randn(dim, 6_000, generator=generator).t() * scale).t().contiguous().t()
    assert not grads.is_contiguous() or dim == 1
    assert_merges_agree(ids, grads)


if __name__ == "__main__":
    print(json.dumps(hashes()))
