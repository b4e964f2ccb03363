"""The modules of `torch.nn` that a table can replace, and the modules over tables that replace them.

Shape suffixes: N ids, D dim.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from recstore_ops.client.dist_tensor import fill_rows
from recstore_ops.config.row_types import VALUE_TYPES
from recstore_ops.nn.dist_embedding import DistEmbedding
from recstore_ops.nn.embedding_bag import DistEmbeddingBag
from recstore_ops.table.existing import note_loaded, note_module
from recstore_ops.table.owners import opening
from recstore_ops.table.refusals import NO_MAX_NORM
from recstore_ops.table.table import Table

KINDS = (nn.Embedding, nn.EmbeddingBag)

_WRAPPERS = {
    **dict.fromkeys(("DataParallel", "DistributedDataParallel"), "replace before it is wrapped"),
    **dict.fromkeys(("FullyShardedDataParallel", "FSDPModule"), "replace before it is sharded"),
    "OptimizedModule": "replace before torch.compile",
    "ScriptModule": "torch.jit.script cannot compile lookups in tables",
}
"""Classes of torch that keep parts of a model they were given, and what to do instead."""

_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_CONSTRUCTION = {"reset_parameters", "extra_repr", "from_pretrained", "_fill_padding_idx_with_zero"}


def kept_types() -> str:
    """The types of weights that a table keeps, as errors name them."""
    return ", ".join(map(str, dict.fromkeys(VALUE_TYPES.values())))


def wrapper_problems(above: Iterable[nn.Module]) -> Iterator[str]:
    """Why nothing can be put in the place of a module that is within others."""
    for wrapper in above:
        for base in type(wrapper).__mro__:
            if base.__name__ in _WRAPPERS and base.__module__.startswith("torch."):
                yield f"it is within {base.__name__}: {_WRAPPERS[base.__name__]}"


def module_problems(module: Any, grows: bool) -> Iterator[str]:
    """Why a module over a table cannot take the place of one of `KINDS`."""
    yield from _class_problems(module)
    yield from hook_problems(module)
    if module.max_norm is not None:
        yield NO_MAX_NORM
    if module.scale_grad_by_freq and getattr(module, "mode", None) == "max":
        yield 'scale_grad_by_freq goes with mode "sum" or "mean", and its mode is "max"'
    if set(module._parameters) != {"weight"} or module._buffers or module._modules:
        held = [*module._parameters, *module._buffers, *module._modules]
        yield f"it has {held} where a table has its weight alone: remove parametrizations, pruning and the like first"
    else:
        yield from weight_problems(module.weight, grows)


def _class_problems(module: Any) -> Iterator[str]:
    kind = next(kind for kind in KINDS if isinstance(module, kind))
    for base in type(module).__mro__[: type(module).__mro__.index(kind)]:
        own = [name for name in vars(base) if not name.startswith("__") and name not in _CONSTRUCTION]
        own += [name for name in ("__call__", "__getattr__") if name in vars(base)]
        if own:
            yield f"its class {base.__name__} has {sorted(own)} of its own, which a table's module would not have"
    own = [name for name in vars(module).keys() - _plain_attributes(kind) if not name.startswith("_")]
    if own:
        yield f"it has the attributes {sorted(own)}, which a table's module would not have"


@functools.cache
def _plain_attributes(kind: type[nn.Embedding] | type[nn.EmbeddingBag]) -> frozenset[str]:
    return frozenset(vars(kind(1, 1, device="meta")))


def hook_problems(module: nn.Module) -> Iterator[str]:
    """Hooks, which would be lost."""
    held = [name for name in _HOOKS if vars(module).get(name)]
    if held:
        yield f"it has hooks ({', '.join(held)}): remove them, and register them on what takes its place"


def weight_problems(weight: Tensor | None, grows: bool) -> Iterator[str]:
    """The reasons why rows cannot take the place of a weight."""
    if type(weight) is not nn.Parameter:
        kind = type(weight).__name__
        yield f"its weight is {'not initialized yet' if 'Uninitialized' in kind else f'no nn.Parameter but {kind}'}"
        return
    if type(weight.data) is not Tensor or weight.layout != torch.strided:
        yield f"its weight is {type(weight.data).__name__} of layout {weight.layout}, not a plain tensor"
    elif weight.dtype not in VALUE_TYPES.values():
        yield f"a table is made of {kept_types()}, and its weight is {weight.dtype}: convert the model first"
    elif weight.dim() != 2 or weight.shape[1] == 0:
        yield f"a row has at least one element, and its weight has the shape {tuple(weight.shape)}"
    elif weight.shape[0] == 0 and not grows:
        yield "a table with a bound has at least one row, and its weight has none: grows=True opens it without bound"
    elif weight.is_meta:
        yield "its weight is on the meta device, without values: give it values first, by to_empty and load_state_dict"
    elif weight.device.type != "cpu":
        yield (
            f"its weight is on {weight.device}, and rows lie in host memory: replace before the model is moved, or "
            "after model.cpu()"
        )
    elif weight._backward_hooks or weight._post_accumulate_grad_hooks:
        yield "its weight has gradient hooks, which no table calls: max_grad_norm clips the gradients of rows"
    elif weight.grad is not None:
        yield "its weight has a gradient: step and zero_grad first"
    elif weight.numel() and not all(bool(bound.isfinite()) for bound in weight.detach().aminmax()):
        yield "its weight is not finite"


def module_over_table(
    module: nn.Embedding | nn.EmbeddingBag, name: str, num_embeddings: int | None, **options: Any
) -> DistEmbedding | DistEmbeddingBag:
    """Makes a module that gives what one of torch gives, over a table that has the same rows if it is new."""
    weight_ND = module.weight.detach().cpu()
    common: dict[str, Any] = {
        "padding_idx": module.padding_idx,
        "max_norm": module.max_norm,
        "scale_grad_by_freq": module.scale_grad_by_freq,
        "dtype": weight_ND.dtype,
        "output_dtype": weight_ND.dtype,
        **options,
    }
    ours: DistEmbedding | DistEmbeddingBag
    with opening:
        if isinstance(module, nn.EmbeddingBag):
            bag = {"mode": module.mode, "include_last_offset": module.include_last_offset}
            ours = DistEmbeddingBag(num_embeddings, weight_ND.shape[1], name, **bag, **common)
        else:
            ours = DistEmbedding(num_embeddings, weight_ND.shape[1], name, **common)
        write_first_rows(ours.table, weight_ND)
    ours.frozen = not module.weight.requires_grad
    return ours.train(module.training)


def write_first_rows(table: Table, weight_ND: Tensor) -> None:
    """Gives a new table the rows of a matrix, as if it had begun with them; the table of an error is dropped."""
    if table.is_new:
        fill_rows(table, weight_ND.shape[0], lambda shape, dtype: weight_ND, weight_ND.dtype)
        note_loaded([table.name])
        note_module(table)
