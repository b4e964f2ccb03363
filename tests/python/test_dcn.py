"""DCN-V2 against its equations written out element by element, and its gradients against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_models import BAGS
from torch import Tensor, nn

from recstore_ops.training import Batch, StoreTables
from recstore_ops.training.models import DCN

pytestmark = pytest.mark.tier("quick")

TableName = Callable[[], str]

NUM_IDS, DIM, WIDTH = 6, 2, 6
FORMS: list[dict[str, Any]] = [
    {"cross_structure": structure, "low_rank": low_rank, "cross_layers": layers}
    for structure, low_rank, layers in (("stacked", None, 1), ("parallel", None, 3), ("stacked", 2, 2))
]


def double_tables(name: str, dim: int, std: float = 0.0) -> nn.Module:
    return nn.Embedding(NUM_IDS, dim, dtype=torch.float64)


def make(**options: Any) -> DCN:
    torch.manual_seed(0)
    return DCN(double_tables, DIM, num_fields=2, num_dense=2, hidden=(4, 3), **options).double()


def array(tensor: Any) -> NDArray:
    return tensor.detach().double().numpy()


def first_layer_by_loop(model: DCN) -> NDArray:
    rows, ids, values = array(model.v.weight), BAGS.ids.numpy(), array(BAGS.values)
    offsets, dense = BAGS.offsets_or_ones().tolist(), array(BAGS.dense)
    inputs = np.zeros((2, WIDTH))
    for bag in range(4):
        row, field = divmod(bag, 2)
        for n in range(offsets[bag], offsets[bag + 1]):
            inputs[row, field * DIM : (field + 1) * DIM] += values[n] * rows[ids[n]]
    inputs[:, 4:] = dense
    return inputs


def crossed_by_loop(model: DCN, inputs: NDArray) -> NDArray:
    """Equation 1 or 2 of the paper, one element at a time."""
    crossed = inputs.copy()
    for cross in model.crosses:
        if isinstance(cross, nn.Linear):
            matrix, bias = array(cross.weight), array(cross.bias)
        else:
            (factor_v, factor_u) = cross.children()
            matrix, bias = array(factor_u.weight) @ array(factor_v.weight), array(factor_u.bias)
        following = np.empty_like(crossed)
        for row in range(len(inputs)):
            for i in range(WIDTH):
                product = sum(matrix[i, j] * crossed[row, j] for j in range(WIDTH)) + bias[i]
                following[row, i] = inputs[row, i] * product + crossed[row, i]
        crossed = following
    return crossed


def perceptron_by_numpy(layers: nn.Sequential, inputs: NDArray) -> NDArray:
    *hidden, last = (layer for layer in layers if isinstance(layer, nn.Linear))
    for layer in hidden:
        inputs = np.maximum(inputs @ array(layer.weight).T + array(layer.bias), 0)
    return (inputs @ array(last.weight).T + array(last.bias))[:, 0]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_logits_follow_the_equations(form: dict[str, Any]) -> None:
    model = make(**form)
    inputs = first_layer_by_loop(model)
    crossed = crossed_by_loop(model, inputs)
    if form["cross_structure"] == "stacked":
        expected = perceptron_by_numpy(model.deep, crossed)
    else:
        assert model.crossed is not None
        expected = perceptron_by_numpy(model.deep, inputs) + crossed @ array(model.crossed.weight)[0]
    np.testing.assert_allclose(array(model(in_double(BAGS))), expected, rtol=1e-12)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gradients_are_those_of_finite_differences(form: dict[str, Any]) -> None:
    model = make(**form)
    names, parameters = zip(*model.named_parameters(), strict=True)

    def logits(*values: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (in_double(BAGS),))

    assert torch.autograd.gradcheck(logits, parameters)


def in_double(batch: Batch) -> Batch:
    assert batch.values is not None
    assert batch.dense is not None
    return Batch(batch.ids, batch.labels, batch.num_fields, batch.offsets, batch.values.double(), batch.dense.double())


def test_a_low_rank_has_fewer_parameters() -> None:
    full, low = (sum(p.numel() for p in make(low_rank=rank).crosses.parameters()) for rank in (None, 2))
    assert (full, low) == (2 * (WIDTH * WIDTH + WIDTH), 2 * (2 * WIDTH * 2 + WIDTH))


@pytest.mark.parametrize("low_rank", [0, WIDTH])
def test_a_low_rank_that_saves_nothing_is_refused(low_rank: int) -> None:
    with pytest.raises(ValueError, match=f"low_rank must be from 1 to before the 6 elements of a row, got {low_rank}"):
        make(low_rank=low_rank)


def test_no_cross_layer_is_refused(table_name: TableName) -> None:
    with pytest.raises(ValueError, match="cross_layers must be at least 1, got 0"):
        DCN(StoreTables(table_name(), "sgd"), DIM, num_fields=2, cross_layers=0)
