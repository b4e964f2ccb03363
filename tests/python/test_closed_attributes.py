"""What a module or its weight does not have is refused, with a sentence that names module, table and the way."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_kinds import DIM, IDS, NUM, OPTIONS, Kind, Pair, each_kind, pair
from torch import Tensor, nn
from torch.nn import functional

from recstore_ops import DistEmbedding, DistTensor, HashTable, SparseOptimizer, StagedRows

__all__ = ["pair"]

pytestmark = pytest.mark.tier("test")

UNKNOWN = ["frozen_rows", "lr", "max_norm", "scale_grad_by_freq", "sparse", "norm_type", "learning_rate", "device"]
FIXED = ["num_embeddings", "embedding_dim", "name", "weight", "table"]


@each_kind
@pytest.mark.parametrize("attribute", [*UNKNOWN, *FIXED])
@pytest.mark.parametrize("value", [3, nn.Parameter(torch.zeros(NUM, DIM))], ids=["int", "Parameter"])
def test_a_module_takes_no_attribute_that_has_no_effect(
    kind: Kind, attribute: str, value: Any, table_name: Callable[[], str]
) -> None:
    name = table_name()
    module = kind.open(name)
    before = dict(module.__dict__), dict(module._parameters)
    message = f'{type(module).__name__} over table "{name}" takes no "{attribute}": '
    with pytest.raises(AttributeError, match=re.escape(message)):
        setattr(module, attribute, value)
    assert (module.__dict__, module._parameters) == before


@each_kind
def test_a_module_takes_its_own_attributes_and_private_ones(kind: Kind, table_name: Callable[[], str]) -> None:
    module = kind.open(table_name())
    module.training = False
    module.forward = module.forward
    module._tag = 1
    assert module._tag == 1
    for attribute in ("padding_idx", "mode", "enable_fusion", "insert_on_lookup"):
        if hasattr(module, attribute):
            setattr(module, attribute, getattr(module, attribute))


def test_a_derived_class_has_attributes_of_its_own(table_name: Callable[[], str]) -> None:
    class Scaled(DistEmbedding):
        def __init__(self, name: str) -> None:
            super().__init__(NUM, DIM, name, **OPTIONS)
            self.scale = 2.0
            self.top: nn.Linear = nn.Linear(DIM, 1)

        def forward(self, ids: Tensor | StagedRows) -> Tensor:
            return self.top(self.scale * super().forward(ids))

    module = Scaled(table_name())
    module.scale = 3.0
    assert sorted(name for name, _ in module.named_parameters()) == ["top.bias", "top.weight", "weight"]
    assert list(module.state_dict()) == ["ids", "rows", "ids_check", "top.weight", "top.bias"]
    module.double()
    assert (module.top.weight.dtype, module.output_dtype) == (torch.float64, torch.float64)
    with pytest.raises(AttributeError, match='takes no "scales"'):
        module.scales = 3.0


def weights_of(kind: Kind, name: str) -> list[Any]:
    """All that stands for the rows of a module."""
    module = kind.open(name)
    children = [each for each in module.modules() if hasattr(each, "weight")]
    return [*module.parameters(), *(each.weight for each in children)]


@each_kind
@pytest.mark.parametrize("attribute", ["data", "grad", "anything", "shape"])
def test_what_stands_for_rows_takes_no_values(kind: Kind, attribute: str, table_name: Callable[[], str]) -> None:
    name = table_name()
    for weight in weights_of(kind, name):
        with pytest.raises(AttributeError, match=r'attribute|has no "') as raised:
            setattr(weight, attribute, torch.zeros(NUM, DIM))
        # torch itself refuses the shape of a scalar.
        is_own = attribute != "shape" or isinstance(weight, DistTensor)
        assert is_own == (f'over table "{name}" has no "{attribute}": ' in str(raised.value))


INITS: dict[str, Callable[[Any], Any]] = {
    "uniform_": nn.init.uniform_,
    "normal_": nn.init.normal_,
    "trunc_normal_": nn.init.trunc_normal_,
    "constant_": lambda weight: nn.init.constant_(weight, 1.0),
    "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_,
    "data.uniform_": lambda weight: weight.data.uniform_(-1, 1),
    "data.copy_": lambda weight: weight.data.copy_(torch.zeros(NUM, DIM)),
    "copy_": lambda weight: weight.copy_(torch.zeros(NUM, DIM)),
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "orthogonal_": nn.init.orthogonal_,
    "eye_": nn.init.eye_,
    "sparse_": lambda weight: nn.init.sparse_(weight, 0.5),
}


@each_kind
@pytest.mark.parametrize("init", INITS)
def test_initializers_of_torch_name_the_way(kind: Kind, init: str, table_name: Callable[[], str]) -> None:
    name = table_name()
    for weight in weights_of(kind, name):
        message = f'"{re.escape(name)}".*(initializer, init_func and reset_parameters|weight\\[ids\\])'
        with pytest.raises((AttributeError, TypeError, RuntimeError), match=message):
            INITS[init](weight)


def test_unknown_attributes_and_those_of_tensors_are_not_there(table_name: Callable[[], str]) -> None:
    weight: Any = DistEmbedding(NUM, DIM, table_name()).weight
    assert not any(hasattr(weight, name) for name in ("data", "numel", "nothing", "__array__"))
    with pytest.raises(AttributeError, match=r"no \"numel\": weight\[ids\] reads rows"):
        weight.numel()
    with pytest.raises(AttributeError, match="object has no attribute 'nothing'"):
        _ = weight.nothing


def test_the_weight_of_a_dense_layer_is_no_table_and_the_other_way_around(table_name: Callable[[], str]) -> None:
    name = table_name()
    module: Any = DistEmbedding(NUM, DIM, name, **OPTIONS)
    top = nn.Linear(DIM, NUM, bias=False)
    with pytest.raises(AttributeError, match=f'"{re.escape(name)}" takes no "weight": .*share their rows'):
        module.weight = top.weight
    with pytest.raises(TypeError, match="DistTensor"):
        top.weight = module.weight
    with pytest.raises(
        TypeError, match=f'linear takes tensors, and the weight of a table, "{re.escape(name)}", is none'
    ):
        functional.linear(torch.ones(1, DIM), module.weight)


def test_tied_weights_train_through_rows_of_the_module(table_name: Callable[[], str]) -> None:
    start = torch.arange(float(NUM * DIM)).view(NUM, DIM) / 8
    ours = DistEmbedding.from_pretrained(start, table_name(), freeze=False, optimizer={"kind": "sgd", "lr": 0.5})
    theirs = nn.Embedding.from_pretrained(start.clone(), freeze=False)
    optimizer, rival = SparseOptimizer(modules=[ours]), torch.optim.SGD(theirs.parameters(), lr=0.5)
    for output, rows in ((ours(IDS), ours(torch.arange(NUM))), (theirs(IDS), theirs.weight)):
        functional.linear(output, rows).square().sum().backward()
    optimizer.step()
    rival.step()
    torch.testing.assert_close(ours(torch.arange(NUM)), theirs.weight, rtol=0, atol=1e-6)


def reset(module: Any) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


@each_kind
def test_reset_parameters_brings_back_the_initial_values(pair: Pair) -> None:
    pair.backward()
    pair.step()
    assert pair.rows()[1].tolist() == [-1.0, -1.0]
    pair.model.apply(reset)
    assert not pair.rows().any()
    assert len(pair.table) == 0


def test_reset_parameters_forgets_slots_and_keeps_the_padding_row(table_name: Callable[[], str]) -> None:
    module = DistEmbedding(NUM, DIM, table_name(), padding_idx=0, optimizer="adam", initializer="uniform")
    optimizer = SparseOptimizer(modules=[module])
    first = module.weight[torch.arange(NUM)]
    module(IDS).sum().backward()
    optimizer.step()
    module.reset_parameters()
    assert torch.equal(module.weight[torch.arange(NUM)], first)
    assert module.weight[0].tolist() == [0.0, 0.0]
    module.reset_parameters()
    assert len(module.table) == 1


def test_a_hash_table_keeps_its_shape(table_name: Callable[[], str]) -> None:
    table = HashTable([1, 2], table_name())
    with pytest.raises(AttributeError, match=r"fixed when the table is opened"):
        table.name = "other"
