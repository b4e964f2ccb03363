"""Refusals of calls that parameters have and tables lack, with what takes their place."""

from typing import Any

_ROWS = (
    "weight[ids] reads rows and weight[ids] = rows writes them; initializer, init_func and reset_parameters() give "
    "them their first values"
)
_AT_OPENING = "it is fixed when the table is opened; open a table of another name"
_IN_THE_TABLE = "the learning rate is that of the table: set it by a parameter group of SparseOptimizer"
_FREEZING = "freeze with requires_grad_(False)"
NO_ENSEMBLE = (
    "vmap over its parameter would read the rows of one table for all models of an ensemble; call the models one after "
    "another, or the ensemble of their dense parts"
)

_INSTEAD = {
    "weight": f"{_ROWS}. Modules with one name and one configuration share their rows",
    "grad": "backward collects gradients; setting grad to None drops them, and SparseOptimizer clips and applies them",
    "lr": _IN_THE_TABLE,
    "frozen": _FREEZING,
    "requires_grad": _FREEZING,
    "stack": NO_ENSEMBLE,
    **dict.fromkeys(("num_embeddings", "embedding_dim", "embedding_shape", "name", "table"), _AT_OPENING),
}
NO_MAX_NORM = (
    "max_norm changes rows when they are looked up, and a lookup changes no table: after a step give the rows of its "
    "ids the norm yourself, weight[ids] = torch.renorm(weight[ids], 2, 0, max_norm)"
)
_WITHOUT_EFFECT = "it would have no effect; a class derived from the module may set attributes of its own in __init__"


def refused_for_rows(owner: str, table: str, attribute: str) -> AttributeError:
    """The error for an attribute or a method of tensors, at what stands for a table."""
    return AttributeError(f'{owner} over table "{table}" has no "{attribute}": {_INSTEAD.get(attribute, _ROWS)}')


def refused_for_sharded_hooks(owner: str, table: str, method: str) -> RuntimeError:
    """The error for a hook on the parameter of a table whose gradients lie on several ranks."""
    return RuntimeError(
        f'"{method}" of {owner} over table "{table}": its gradients lie on several ranks; change those of '
        "SparseOptimizer's parameter groups before a step, or clip with SparseOptimizer.clip_grad_norm_"
    )


def refused_for_average(owner: str, table: str, function: str) -> RuntimeError:
    """The error for a function that makes no average of rows, at what stands for a table."""
    # No TypeError: Python takes that of an operator for one that is not there.
    return RuntimeError(
        f'{owner} over table "{table}" has no "{function}": rows are averaged by copy_ of a sum of parameters whose '
        "shares add up to one, by lerp_, or by torch.optim.swa_utils; weight[ids] reads rows and weight[ids] = rows "
        "writes them"
    )


def refuse_shared_rows(name: str, admission: dict[str, Any] | None, what: str) -> None:
    """Refuses a table with shared rows in a place that would lose them.

    Args:
        name: the table's.
        admission: as its configuration has it.
        what: the place that cannot hold them.

    Raises:
        ValueError: it shares rows.
    """
    if admission is not None and admission.get("shared_rows") is not None:
        raise ValueError(
            f'table "{name}" has admission.shared_rows, for which there is no place in {what}: a checkpoint holds them'
        )


def refused_for_module(owner: str, tables: list[str], attribute: str) -> AttributeError:
    """The error for an attribute that a module does not have, or must keep."""
    return AttributeError(
        f'{owner} over table {_named(tables)} takes no "{attribute}": {_INSTEAD.get(attribute, _WITHOUT_EFFECT)}'
    )


def refused_by_script(owner: str, tables: list[str]) -> TypeError:
    """The error for a module that `torch.jit.script` is to compile."""
    return TypeError(
        f"{owner} over table {_named(tables)} is Python that torch.jit.script cannot compile: use torch.compile or "
        "torch.export, or script the dense part alone"
    )


def _named(tables: list[str]) -> str:
    return " and ".join(f'"{table}"' for table in tables)
