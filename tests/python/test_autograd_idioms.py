"""Contexts and functions of autograd around models with tables: values as over torch's modules, rows collect once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from module_kinds import DIM, KINDS, NUM, Kind, Pair, each_kind, pair
from torch import Tensor
from torch.autograd import functional as forms
from torch.nn import functional

__all__ = ["pair"]

pytestmark = pytest.mark.tier("test")

START = torch.arange(1.0, NUM * DIM + 1).view(NUM, DIM) / 8


def fill(pair: Pair) -> None:
    """Gives both modules the same rows."""
    torch.ops.recstore.emb_write.table(pair.table.handle, torch.arange(NUM), START)
    with torch.no_grad():
        pair.rival.weight.copy_(START)


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "detect_anomaly": torch.autograd.detect_anomaly,
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x),
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "none": nullcontext,
}


@each_kind
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("context", CONTEXTS)
def test_contexts_of_autograd_collect_once(context: str, pair: Pair) -> None:
    with CONTEXTS[context]():
        pair.backward()
    pair.step()
    pair.assert_equal_rows()
    assert pair.rows().any()


def losses(pair: Pair) -> list[Callable[[Tensor], Tensor]]:
    """The loss of each model as a function of the weight of its dense layer."""

    def of(place: int) -> Callable[[Tensor], Tensor]:
        return lambda weight: functional.linear(pair.outputs()[place], weight).square().sum()

    return [of(0), of(1)]


V = torch.tensor([[0.5, -1.0]])

FORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "jacobian": forms.jacobian,
    "hessian": forms.hessian,
    "vjp": lambda loss, weight: forms.vjp(loss, weight)[1],
    "jvp": lambda loss, weight: forms.jvp(loss, weight, V)[1],
    "hvp": lambda loss, weight: forms.hvp(loss, weight, V)[1],
    "vhp": lambda loss, weight: forms.vhp(loss, weight, V)[1],
    "gradcheck": lambda loss, weight: torch.autograd.gradcheck(loss, weight.requires_grad_(), eps=0.5, atol=1e-2),
    "gradgradcheck": lambda loss, weight: torch.autograd.gradgradcheck(
        loss, weight.requires_grad_(), eps=0.5, atol=1e-2
    ),
}

CUT_BATCHES = [KINDS["RecStoreEmbeddingBagCollection, not fused"], KINDS["RecStoreEmbeddingCollection"]]
"""They cut a batch where its lengths say, which `linearize` cannot trace."""


def assert_same(form: Callable[[Callable[[Tensor], Tensor], Tensor], Any], pair: Pair) -> None:
    fill(pair)
    ours, theirs = (form(loss, torch.tensor([[1.0, -2.0]])) for loss in losses(pair))
    torch.testing.assert_close(ours, theirs)
    assert not pair.table.has_collected()


@each_kind
@pytest.mark.filterwarnings("ignore:Input #0 requires gradient and is not a double precision")
@pytest.mark.parametrize("form", FORMS)
def test_functional_forms_over_dense_parameters(form: str, pair: Pair) -> None:
    assert_same(FORMS[form], pair)


@each_kind
def test_linearize_over_dense_parameters(kind: Kind, pair: Pair) -> None:
    def linear(loss: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor:
        return torch.func.linearize(loss, weight)[1](V)

    if kind not in CUT_BATCHES:
        return assert_same(linear, pair)
    with pytest.raises(RuntimeError, match="value out of a tracing tensor"):
        assert_same(linear, pair)
    return None


@each_kind
def test_functionalize_is_refused_by_torch(pair: Pair) -> None:
    with pytest.raises(RuntimeError, match=r"NYI: Functionalize rule|unallocated storage"):
        assert_same(lambda loss, weight: torch.func.functionalize(loss)(weight), pair)
    assert not pair.table.has_collected()
