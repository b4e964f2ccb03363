"""FBGEMM's table-batched embeddings on the CPU, with the optimizer fused into the backward pass."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benches.yardstick import EPS, INITIAL_WEIGHT, LR

NAME = "FBGEMM"
HOW_TO_INSTALL = "`make bench-peers` makes an environment with FBGEMM and runs the benches there"

_OPTIMIZERS = {"adagrad": "EXACT_ADAGRAD", "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD", "sgd": "EXACT_SGD"}


@functools.cache
def _operators() -> ModuleType | None:
    try:
        return importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    except (ImportError, OSError):
        return None  # Not installed, or built for another torch.


def is_installed() -> bool:
    """Whether FBGEMM can be imported beside this torch."""
    return _operators() is not None


def absent() -> tuple[str, ...]:
    """The names of the columns that stay empty because FBGEMM is not there."""
    return () if is_installed() else (NAME,)


class FbgemmTables:
    """Tables behind one operator.

    Args:
        rows: of each table.
        dim: elements a row.
        optimizer: `adagrad`, `rowwise_adagrad` or `sgd`.

    Raises:
        ModuleNotFoundError: FBGEMM cannot be imported.
    """

    def __init__(self, rows: Sequence[int], dim: int, optimizer: str = "adagrad") -> None:
        operators = _operators()
        if operators is None:
            raise ModuleNotFoundError(f"there is no FBGEMM; {HOW_TO_INSTALL}")
        self._module: Any = operators.SplitTableBatchedEmbeddingBagsCodegen(
            [(each, dim, operators.EmbeddingLocation.HOST, operators.ComputeDevice.CPU) for each in rows],
            optimizer=getattr(operators.OptimType, _OPTIMIZERS[optimizer]),
            pooling_mode=operators.PoolingMode.SUM,
            learning_rate=LR,
            eps=EPS,
        )
        self._touch_pages()

    def lookup(self, index_N: Tensor, offsets_B: Tensor) -> Tensor:
        """Sums of bags `[B, tables * dim]`, without autograd; `offsets_B` also holds the end of the last bag."""
        with torch.no_grad():
            return self._module(index_N, offsets_B)

    def step(self, index_N: Tensor, offsets_B: Tensor, grad_BD: Tensor) -> None:
        """Forward, and a backward pass that takes the optimizer's step."""
        self._module(index_N, offsets_B).backward(grad_BD)

    def _touch_pages(self) -> None:
        """Writes weights and state, whose pages otherwise would come while steps are timed."""
        for weight in self._module.split_embedding_weights():
            weight.detach().fill_(INITIAL_WEIGHT)
        for states in self._module.split_optimizer_states():
            for state in states:
                state.fill_(0)


def version() -> str | None:
    """FBGEMM's version where it can be imported."""
    if not is_installed():
        return None
    for name in ("fbgemm-gpu-cpu", "fbgemm_gpu-cpu", "fbgemm-gpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"


class QuantizedTable:
    """A table of rows of 8 or 4 bits behind FBGEMM's operator for inference; sums of bags by row numbers.

    Args:
        rows: of the table.
        dim: elements a row.
        encoding: `int8` or `int4`.
    """

    def __init__(self, rows: int, dim: int, encoding: str) -> None:
        inference: Any = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_inference")
        types: Any = importlib.import_module("fbgemm_gpu.split_embedding_configs").SparseType
        common: Any = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
        bits = {"int8": types.INT8, "int4": types.INT4}[encoding]
        self._module: Any = inference.IntNBitTableBatchedEmbeddingBagsCodegen(
            [("", rows, dim, bits, common.EmbeddingLocation.HOST)],
            pooling_mode=common.PoolingMode.SUM,
            device="cpu",
            output_dtype=types.FP32,
        )
        self._module.fill_random_weights()

    def lookup(self, index_N: Tensor, offsets_B: Tensor) -> Tensor:
        """Sums of bags, float32 `[B, dim]`; `offsets_B` also holds the end of the last bag. It takes 32-bit numbers."""
        return self._module(index_N.int(), offsets_B.int())
