"""`restore_embeddings`: torch's own modules in the place of those over tables.

Shape suffixes: N ids, D dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from recstore_ops.nn.closed_module import ClosedModule
from recstore_ops.nn.dist_embedding import DistEmbedding, TableModule
from recstore_ops.nn.embedding_bag import DistEmbeddingBag
from recstore_ops.nn.optimizer import tables_of
from recstore_ops.nn.padding import padding_ids
from recstore_ops.ops import operators
from recstore_ops.table.cut import cut_tables
from recstore_ops.table.table import Table
from recstore_ops.transfer.exporting import Export
from recstore_ops.transfer.module_tree import FoundModule, Include, chosen, found_in, holder_problems
from recstore_ops.transfer.row_ranges import bar_of_rows
from recstore_ops.transfer.torch_modules import hook_problems

Sizes = int | Mapping[str, int] | None
"""The rows of the weights of tables without a bound: of all, or by the path of their modules."""


def restore_embeddings(
    model: nn.Module, *, include: Include = None, num_embeddings: Sizes = None, drop_tables: bool = False
) -> None:
    """Puts torch's own modules in the place of those over tables, with their rows: undoes `replace_embeddings`.

    Each `DistEmbedding` and `DistEmbeddingBag` becomes an `nn.Embedding` or `nn.EmbeddingBag`, whose row i belongs to
    the id i; an id without a row gives its initial value. Padding, mode, output type, device and freezing stay, and
    modules over one table share a weight. Optimizer state is not transferred. All is checked before anything is
    changed.

    Args:
        model: changed in place.
        include: as in `replace_embeddings`; by default all such modules.
        num_embeddings: the rows of a weight whose table has no `num_embeddings`: for all of these, or by the path of
            the module. They must hold every id that has a row. Of a table that has it, no other number is taken.
        drop_tables: whether the tables are dropped, even if something else has them open; else they stay.

    Raises:
        TypeError: no module of torch; or an argument of another type.
        ValueError: a model without such modules, or one that cannot be restored: each by its path, with the reason; a
            pattern that matches none, or a path in `num_embeddings` that no such module has.

    Examples:
        >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 1))
        >>> replace_embeddings(model, prefix="there and back/").tables
        {'0': 'there and back/0'}
        >>> restore_embeddings(model, drop_tables=True)
        >>> model[0]
        Embedding(10, 4)
    """
    if not isinstance(drop_tables, bool):
        raise TypeError(f"restore_embeddings: drop_tables must be a bool, got {drop_tables!r}")
    present = _modules_in(model)
    found = chosen(present, include, "restore_embeddings")
    asked = _asked(found, num_embeddings)
    problems = [f'"{each.path}": {problem}' for each in found for problem in _problems(each, asked[each.path])]
    sizes = {each.path: next(iter(asked[each.path]), _bound(each)) for each in found}
    problems = problems or [
        *_tie_problems(found, sizes),
        *_left_problems(found, present),
        *holder_problems(model, {each.path: each.module for each in found}),
    ]
    if problems:
        raise ValueError(f"{type(model).__name__} stays as it is: {'; '.join(problems)}")
    # All weights are made before the first module is put: one that does not fit into memory leaves the model as it was.
    weights: dict[int, nn.Parameter] = {}
    for each in found:
        if each.module.table.table_id not in weights:
            weights[each.module.table.table_id] = _weight(each.module, sizes[each.path])
    for each in found:
        each.put(_torch_module(each.module, weights[each.module.table.table_id]))
    for name in dict.fromkeys(each.module.name for each in found) if drop_tables else ():
        operators.drop_table(name)


def _modules_in(model: Any) -> list[FoundModule]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"restore_embeddings takes a module of torch, got {type(model).__name__}")
    if isinstance(model, ClosedModule):
        kind = type(model).__name__
        raise ValueError(f"the model is itself a {kind}, and nothing holds it where another could be put")
    # Other modules of this package that have tables within are found as a whole, and refused.
    found = found_in(model, lambda module: isinstance(module, ClosedModule) or _has_own_tables(module))
    if not found:
        raise ValueError(f"{type(model).__name__} has no DistEmbedding or DistEmbeddingBag among its modules")
    return found


def _has_own_tables(module: nn.Module) -> bool:
    is_ours = type(module).__module__.partition(".")[0] == "recstore_ops"
    return is_ours and any(isinstance(child, ClosedModule) for child in module.modules())


def _asked(found: list[FoundModule], sizes: Sizes) -> dict[str, set[int]]:
    """The rows that each weight is asked to have, by the path of its module."""
    if isinstance(sizes, Mapping):
        paths = {place.path: each.path for each in found for place in each.places}
        asked: dict[str, set[int]] = {each.path: set() for each in found}
        for path, size in sizes.items():
            if path not in paths:
                raise ValueError(f"restore_embeddings: num_embeddings has {path!r}, which is none of {list(paths)}")
            asked[paths[path]].add(_checked_size(size))
        return asked
    own = set() if sizes is None else {_checked_size(sizes)}
    # One number is for the tables without bound, where there are such.
    growing = {each.path for each in found if _bound(each) is None}
    return {each.path: own if each.path in growing or not growing else set() for each in found}


def _checked_size(size: Any) -> int:
    if type(size) is not int:
        raise TypeError(
            f"restore_embeddings: num_embeddings must be an int, or ints by the paths of modules, got {size!r}"
        )
    return size


def _bound(each: FoundModule) -> int | None:
    bound: int | None = getattr(each.module, "num_embeddings", None)
    return bound


def _problems(each: FoundModule, asked: set[int]) -> Iterator[str]:
    """Why one of torch's modules cannot take the place of a module over a table."""
    module = each.module
    if type(module) not in (DistEmbedding, DistEmbeddingBag):
        yield f"it is a {type(module).__name__}, and only DistEmbedding and DistEmbeddingBag are restored"
        return
    yield from hook_problems(module)
    if len(padding_ids(module.padding_idx)) > 1:
        yield f"torch takes one padding id, and it has {module.padding_idx}"
    if module.table.is_sharded:
        yield "its table is sharded: this rank has some of its rows, not all"
        return
    if module.table.has_collected():
        yield "it has collected gradients: step and zero_grad first"
    yield from _size_problems(module, asked)


def _size_problems(module: TableModule, asked: set[int]) -> Iterator[str]:
    bound = module.num_embeddings
    if len(asked) > 1:
        yield f"num_embeddings has several numbers for its paths: {sorted(asked)}"
    elif bound is not None:
        yield from (f"num_embeddings is {size}, and its table has {bound}" for size in asked if size != bound)
    elif not asked:
        yield "its table has no num_embeddings: say how many rows the weight is to have"
    else:
        yield from _bound_problems(module, *asked)


def _bound_problems(module: TableModule, size: int) -> Iterator[str]:
    """Why a weight of so many rows does not hold those of a table without bound."""
    if size < 1:
        yield f"num_embeddings must be at least 1, got {size}"
        return
    ids = module.ids()
    outside = ids[(ids < 0) | (ids >= size)]
    padding = next(iter(padding_ids(module.padding_idx)), 0)
    if outside.numel():
        yield f"its table has a row of the id {int(outside[0])}, which is not within num_embeddings {size}"
    elif not 0 <= padding < size:
        yield f"its padding_idx {padding} is not within num_embeddings {size}"


def _tie_problems(found: list[FoundModule], sizes: dict[str, int | None]) -> Iterator[str]:
    """Modules over one table that cannot share a parameter."""
    first: dict[int, FoundModule] = {}
    for each in found:
        other = first.setdefault(each.module.table.table_id, each)
        for what, own, others in zip(_SHARED, _shared(each, sizes), _shared(other, sizes), strict=True):
            if own != others:
                yield f'"{each.path}": it shares a table with "{other.path}", and {what} {own} is not {others}'


def _left_problems(found: list[FoundModule], present: list[FoundModule]) -> Iterator[str]:
    """Modules whose table is also that of one that stays: their rows would part."""
    own = {id(each.module) for each in found}
    left = [each for each in present if id(each.module) not in own]
    kept = {table.table_id: each for each in left for table in tables_of([each.module])}
    for each in found:
        if other := kept.get(each.module.table.table_id):
            yield f'"{each.path}": it shares a table with "{other.path}", which stays: restore both, or neither'


_SHARED = ("frozen", "the type", "the device", "num_embeddings")


def _shared(each: FoundModule, sizes: dict[str, int | None]) -> tuple[Any, ...]:
    module = each.module
    return module.frozen, module.output_dtype, _device(module), sizes[each.path]


def _weight(module: TableModule, size: int | None) -> nn.Parameter:
    weight_ND = _matrix(module.table, size or 0, module.output_dtype)
    return nn.Parameter(weight_ND.to(_device(module)), requires_grad=not module.frozen)


def _device(module: TableModule) -> torch.device:
    """That of the outputs; the meta device has no rows."""
    stand_in: Any = module._parameters["weight"]
    return torch.device("cpu") if stand_in.is_meta else stand_in.device


@torch.no_grad()
def _matrix(table: Table, size: int, dtype: torch.dtype) -> Tensor:
    """The rows of the ids from 0 on, `[N, D]`."""
    matrix_ND = torch.empty(size, table.dim, dtype=dtype, device="cpu")
    with cut_tables([table]) as (cut,), bar_of_rows("restoring", size, False) as bar:
        for ids_N, rows_ND in Export(cut, range(size)).parts(bar):
            matrix_ND[ids_N] = rows_ND.to(dtype)
    return matrix_ND


def _torch_module(module: DistEmbedding | DistEmbeddingBag, weight: nn.Parameter) -> nn.Module:
    size, dim = weight.shape
    common: dict[str, Any] = {
        "padding_idx": next(iter(padding_ids(module.padding_idx)), None),
        "scale_grad_by_freq": module._scale_grad_by_freq,
        # With a weight given, torch's constructors draw no random numbers for one of their own.
        "_weight": weight.detach(),
    }
    theirs: nn.Embedding | nn.EmbeddingBag
    if isinstance(module, DistEmbeddingBag):
        bag = {"mode": module.mode, "include_last_offset": module.include_last_offset}
        theirs = nn.EmbeddingBag(size, dim, **bag, **common)
    else:
        theirs = nn.Embedding(size, dim, **common)
    # The constructor made a parameter of its own. This is the one that all modules over the table share.
    theirs.weight = weight
    return theirs.train(module.training)
