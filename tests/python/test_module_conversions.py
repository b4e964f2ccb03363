"""`half()`, `double()` and `to(...)`: outputs take the type as those of `nn.Embedding` do, and rows keep theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_kinds import BATCH, IDS, KINDS, NUM, OFFSETS, OPTIONS, Kind, Pair, each_kind, pair
from tiers import cells
from torch import nn

from recstore_ops import DistEmbeddingBag, KeyedJaggedTensor, RecStoreEmbeddingBagCollection

__all__ = ["pair"]

pytestmark = pytest.mark.tier("test")

CONVERSIONS: dict[str, tuple[Callable[[nn.Module], nn.Module], torch.dtype]] = {
    "half": (lambda module: module.half(), torch.float16),
    "bfloat16": (lambda module: module.bfloat16(), torch.bfloat16),
    "double": (lambda module: module.double(), torch.float64),
    "to(bfloat16)": (lambda module: module.to(torch.bfloat16), torch.bfloat16),
    "to(cpu, float64)": (lambda module: module.to("cpu", torch.float64), torch.float64),
    "to(a tensor)": (lambda module: module.to(torch.zeros(1, dtype=torch.float16)), torch.float16),
    "type": (lambda module: module.type(torch.float64), torch.float64),
    "half, float": (lambda module: module.half().float(), torch.float32),
    "to(cpu)": (lambda module: module.to("cpu"), torch.float32),
}


@each_kind
@pytest.mark.parametrize(("convert", "dtype"), CONVERSIONS.values(), ids=CONVERSIONS.keys())
def test_outputs_take_the_type_of_the_module(
    pair: Pair, convert: Callable[[nn.Module], nn.Module], dtype: torch.dtype
) -> None:
    weight = torch.arange(float(2 * NUM)).view(NUM, 2) / 4
    torch.ops.recstore.emb_write.table(pair.table.handle, torch.arange(NUM), weight)
    with torch.no_grad():
        pair.rival.weight.copy_(weight)
    assert convert(pair.model) is pair.model
    convert(pair.rival_model)

    ours, theirs = pair.outputs()
    assert (ours.dtype, theirs.dtype) == (dtype, dtype)
    assert torch.equal(ours, theirs)
    assert [parameter.dtype for parameter in pair.module.parameters()] == [dtype]
    with torch.no_grad():
        assert [each.dtype for each in pair.outputs()] == [dtype, dtype]
    pair.backward()
    [(_, grads)] = [(ids, grads) for _, ids, grads in pair.table.collected()]
    assert (grads.dtype, pair.table.config.dtype) == (torch.float32, "float32")
    pair.step()
    assert torch.equal(pair.rows(), pair.rival.weight.detach().float())


@pytest.mark.parametrize("kind", cells(KINDS, "DistEmbeddingBag", "RecStoreEmbeddingCollection"))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_compiled_modules_give_the_type_too(kind: Kind, dtype: torch.dtype, table_name: Callable[[], str]) -> None:
    module = kind.open(table_name())
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(kind.outputs, backend="aot_eager")
        assert compiled(module).dtype == torch.float32
        module.to(dtype)
        output = compiled(module)
        assert output.dtype == dtype
        output.sum().backward()
    assert module.tables()[0].has_collected()


@pytest.mark.parametrize("kind", ["DistEmbeddingBag", "RecStoreEmbeddingBagCollection"])
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_may_have_the_type_of_the_module(
    kind: str, is_fused: bool, dtype: torch.dtype, table_name: Callable[[], str]
) -> None:
    module = KINDS[kind].open(table_name()).to(dtype)
    rival = nn.EmbeddingBag(NUM, 2, mode="sum", _weight=torch.ones(NUM, 2, dtype=dtype))
    torch.ops.recstore.emb_write.table(module.tables()[0].handle, torch.arange(NUM), torch.ones(NUM, 2))
    weights, twins = (torch.tensor([1.0, 2.0, 4.0], dtype=dtype, requires_grad=True) for _ in range(2))
    if isinstance(module, DistEmbeddingBag):
        output = module(IDS, OFFSETS, weights)
    else:
        module.set_fusion(is_fused)
        output = module(KeyedJaggedTensor(["seen"], IDS, weights=weights, lengths=BATCH.lengths())).squeeze(1)
    expected = rival(IDS, OFFSETS, twins)
    assert torch.equal(output, expected)
    output.sum().backward()
    expected.sum().backward()
    assert weights.grad is not None
    assert twins.grad is not None
    assert torch.equal(weights.grad, twins.grad)


def test_weights_of_another_type_than_the_module_are_refused(table_name: Callable[[], str]) -> None:
    bag = DistEmbeddingBag(NUM, 2, table_name(), "sum", **OPTIONS)
    with pytest.raises(TypeError, match=r"must be float32, got torch\.float64"):
        bag(IDS, OFFSETS, torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_collection_of_modules_of_two_types_gives_the_type_that_holds_both(
    is_fused: bool, table_name: Callable[[], str]
) -> None:
    name = table_name()
    tables: list[dict[str, Any]] = [
        {"name": f"{name}/{key}", "num_embeddings": NUM, "embedding_dim": 2, "feature_names": [key]} for key in "ab"
    ]
    bags = RecStoreEmbeddingBagCollection(tables, enable_fusion=is_fused, **OPTIONS)
    batch = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    bags.embedding_bags[f"{name}/a"].half()
    assert bags(batch).dtype == torch.float32
    bags.embedding_bags[f"{name}/b"].half()
    assert bags(batch).dtype == torch.float16


@each_kind
def test_a_module_says_its_device_and_its_rows_stay(kind: Kind, table_name: Callable[[], str]) -> None:
    module = kind.open(table_name())
    module.requires_grad_(False)
    moved = module.to("meta")
    [parameter] = moved.parameters()
    assert (parameter.is_meta, parameter.requires_grad) == (True, False)
    assert kind.outputs(moved).device.type == "cpu"
    moved.requires_grad_(True)
    assert kind.outputs(moved.to_empty(device="cpu")).requires_grad
