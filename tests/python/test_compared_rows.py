"""What callbacks of trainers ask of the parameters of a model: whether two are equal, and on which device they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recstore_ops import DistEmbedding, SparseOptimizer

pytestmark = [pytest.mark.tier("quick"), pytest.mark.usefixtures("tables_are_dropped")]

NUM, DIM = 6, 2
MATRIX = torch.arange(float(NUM * DIM)).view(NUM, DIM)


def module(name: str, matrix: Tensor = MATRIX, size: int | None = NUM) -> DistEmbedding:
    made = DistEmbedding(size, DIM, name, optimizer={"kind": "sgd", "lr": 1.0})
    made.weight[torch.arange(len(matrix))] = matrix
    return made


def only(of: nn.Module) -> Any:
    return next(of.parameters())


@pytest.mark.parametrize("size", [NUM, None])
def test_parameters_of_tables_are_equal_as_their_rows_are(size: int | None) -> None:
    one, same, other = module("one", size=size), module("same", size=size), module("other", MATRIX + 1, size)
    assert torch.equal(only(one), only(one))
    assert torch.equal(only(one), only(same))
    assert torch.equal(only(one).data, only(same))
    assert not torch.equal(only(one), only(other))
    assert torch.equal(only(one), MATRIX)
    assert torch.equal(nn.Parameter(MATRIX.clone()), only(one))
    assert not only(one).equal(MATRIX + 1)
    assert not torch.equal(torch.zeros(1), only(one))
    assert not torch.equal(only(one), only(module("larger", torch.zeros(NUM + 1, DIM), size and size + 1)))


def test_a_row_that_one_of_two_tables_lacks_counts_with_its_initial_value() -> None:
    zeros: Any = {"initializer": "zeros"}
    one, other = DistEmbedding(NUM, DIM, "one", **zeros), DistEmbedding(NUM, DIM, "other", **zeros)
    one.weight[[3]] = torch.zeros(1, DIM)
    assert torch.equal(only(one), only(other))
    one.weight[[3]] = torch.ones(1, DIM)
    assert not torch.equal(only(one), only(other))


def test_a_sum_of_rows_has_no_values_to_compare() -> None:
    one, other = module("one"), module("other")
    mean = only(one).data * 0.5 + only(other).data * 0.5
    for call in (lambda: torch.equal(mean, only(one)), lambda: torch.equal(MATRIX, mean)):
        with pytest.raises(RuntimeError, match='over table "one" has no "equal"'):
            call()


@pytest.mark.embedded_only("tables on servers cannot be copied")
def test_a_clone_of_what_is_no_average_is_refused() -> None:
    one = module("one")
    with pytest.raises(RuntimeError, match='over table "one" has no "clone"'):
        (only(one).data * 2).clone()
    assert torch.equal((only(one).data * 1.0).clone(), MATRIX)


def test_a_parameter_on_its_device_is_copied_as_its_rows() -> None:
    source, target = module("source"), module("target", MATRIX + 1)
    only(target).detach().copy_(only(source).to(only(target).device))
    assert torch.equal(target.weight[torch.arange(NUM)], MATRIX)


def test_a_group_that_is_looked_up_among_the_parameters_of_a_model_names_the_way() -> None:
    model = module("user")
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    [group] = SparseOptimizer(modules=[model]).param_groups
    with pytest.raises(KeyError, match="is no parameter of a model: give this function the optimizer of the dense"):
        names[group["params"][0]]
