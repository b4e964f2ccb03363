"""Whether a backward pass is about a table's rows: only one that reaches the lookup's anchor is.

`torch.autograd.grad(loss, weights)` and `loss.backward(inputs=[weights])` go through the lookup on their way to the
weights, and must leave the table alone. The engine knows: such a pass does not execute the anchor's node.

A compiled graph is one node for all its inputs, and runs as a whole. There the operators of this file ask, at run time.
"""

from typing import Any

import torch
from torch import Tensor

from recstore_ops.ops import operators
from recstore_ops.ops.collecting import begin_pass
from recstore_ops.ops.python_operators import define
from recstore_ops.ops.traced_regions import refuse_compiled_autograd


def reaches_anchor(ctx: Any) -> bool:
    """Whether the pass that runs the `backward` of `ctx` reaches the anchor, its function's first input."""
    return _is_executed(ctx.next_functions[0][0])


def _is_executed(node: Any) -> bool:
    """Whether the backward pass under way executes a node; `None` stands for an input without a gradient."""
    return node is not None and torch._C._will_engine_execute_node(node)  # type: ignore[attr-defined]


def _is_asked(anchor: Tensor) -> bool:
    """Whether the gradients of an anchor's lookup are to be collected; those that come in no backward pass are."""
    if torch._C._current_graph_task_id() == -1:  # type: ignore[attr-defined]
        return True
    return anchor.requires_grad and _is_executed(torch.autograd.graph.get_gradient_edge(anchor).node)


def _accept_grad(
    anchor: Tensor,
    collector: Tensor,
    table: Tensor,
    ids: Tensor,
    grads: Tensor,
    padding_idx: int | None = None,
    places: Tensor | None = None,
) -> None:
    refuse_compiled_autograd(table)
    if _is_asked(anchor):
        [collector] = begin_pass([collector])
        operators.accept_grad(collector, table, ids, grads, padding_idx, places)


def _accept_bag_grads(
    anchor: Tensor,
    collectors: list[Tensor],
    tables: list[Tensor],
    ids: Tensor,
    offsets: Tensor,
    grads: Tensor,
    dims: list[int],
    per_sample_weights: Tensor | None = None,
    padding_idx: int | None = None,
    places: Tensor | None = None,
) -> None:
    refuse_compiled_autograd(tables[0])
    if _is_asked(anchor):
        collectors = begin_pass(collectors)
        operators.accept_bag_grads(
            collectors, tables, ids, offsets, grads, dims, per_sample_weights, padding_idx, places
        )


def _traced_grad(anchor: Tensor, collector: Tensor, table: Tensor, *others: object) -> None:
    refuse_compiled_autograd(table)


def _traced_bag_grads(anchor: Tensor, collectors: list[Tensor], tables: list[Tensor], *others: object) -> None:
    refuse_compiled_autograd(tables[0])


accept_asked_grad = define(
    "accept_asked_grad(Tensor anchor, Tensor collector, Tensor table, Tensor ids, Tensor grads, "
    "int? padding_idx=None, Tensor? places=None) -> ()",
    _accept_grad,
    _traced_grad,
)
accept_asked_bag_grads = define(
    "accept_asked_bag_grads(Tensor anchor, Tensor[] collectors, Tensor[] tables, Tensor ids, Tensor offsets, "
    "Tensor grads, int[] dims, Tensor? per_sample_weights=None, int? padding_idx=None, Tensor? places=None) -> ()",
    _accept_bag_grads,
    _traced_bag_grads,
)
