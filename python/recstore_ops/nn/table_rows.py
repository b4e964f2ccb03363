"""`RowsOfTable`: what averages of parameters take for the rows of a table.

`torch.optim.swa_utils.AveragedModel` and loops over two models' `parameters()` average tensors in place. For a table
they are given a scalar, the stand-in, detached or as its `data`. As a `RowsOfTable` it notes which sum of rows an
expression over such scalars stands for, and writing it to one averages the rows themselves. A clone has a table of
its own, which keeps the rows as they are.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recstore_ops.nn.allowed import (
    OF_SCALAR,
    SIZES,
    TEXTS,
    StandIn,
    dense_step,
    is_of_compiler,
    plain_name,
    size_of_table,
    without_override,
)
from recstore_ops.ops import operators
from recstore_ops.sharding.ownership import own_ids
from recstore_ops.table.copied_values import flat, function_name
from recstore_ops.table.refusals import refuse_shared_rows, refused_for_average, refused_for_rows
from recstore_ops.table.table import Table

_ROWS_PER_CHUNK = 1 << 16

_CONVERSIONS = frozenset({"to", "cpu"})
OF_ROWS = _CONVERSIONS | {"equal"}
"""Functions that are about the rows of a parameter whether or not gradients are recorded."""

_Terms = dict[int, tuple[Table, float]]
"""A sum of rows: of each `Table`, by its `id`, how much."""
_Counts = tuple[int, ...]


class RowsOfTable(StandIn, Tensor):
    """A scalar that stands for the rows of a table, or for a weighted sum of those of several.

    Sums, differences, products and quotients by numbers and `lerp` give another one. In-place ones, and `copy_`, write
    the rows that either side has; an id without a row counts with its initial value. Every other function is refused.
    """

    _terms: _Terms
    _owner: str
    _counts: dict[int, _Counts]
    """The counts of the tables of a sum when it was made; the rows of one table have none."""
    _bound: int | None
    """How often the parameter had got other `data` when its rows were taken; `None` for sums and clones."""

    @staticmethod
    def of(table: Table, scalar: Tensor, owner: str) -> RowsOfTable:
        """Returns a stand-in for the rows of a table, in the memory of `scalar`; errors name the `owner`."""
        rows = _summed(scalar, {id(table): (table, 1.0)}, owner)
        rows._bound = table.times_bound
        return rows

    def is_view_of_rows(self) -> bool:
        """Whether these are the rows of a parameter's table as they are at any time, and neither a clone nor a sum."""
        return self._bound is not None

    def table_of_rows(self) -> Table:
        """The table of rows that are no sum, for lookups without gradients.

        Raises:
            RuntimeError: they are a sum.
        """
        if self._counts:
            raise refused_for_average(self._owner, self.table.name, "functional_call")
        check_unchanged(self, "functional_call")
        with torch.inference_mode(False):
            return self.table.anchored(torch.zeros((), dtype=torch.float32, device="cpu"), self._owner)

    @property
    def table(self) -> Table:
        """The table whose rows it stands for; of a sum the first."""
        return next(iter(self._terms.values()))[0]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function_name(func), kwargs or {}
        if name in OF_SCALAR or name == "grad" or is_of_compiler(name):
            return without_override(func, types, args, kwargs)
        own = next(each for each in flat([*args, *kwargs.values()]) if isinstance(each, RowsOfTable))
        if name in SIZES and args[0] is own:
            return size_of_table(name, own.table, args[1:])
        if name in TEXTS:
            return "RowsOfTable(" + ", ".join(f'table "{table.name}"' for table, _ in own._terms.values()) + ")"
        if name.startswith("_foreach_"):
            return _each(func, types, args, kwargs)
        if name in ("detach", "data") and args[0] is own:
            return own
        if name in _CONVERSIONS and args[0] is own:
            moved = _summed(without_override(func, types, args, kwargs), own._terms, own._owner, own._counts)
            moved._bound = own._bound
            return moved
        if name in ("clone", "__deepcopy__") and args[0] is own:
            return _copied(own)
        if name == "equal" and len(args) == 2:
            return _are_equal(own, (args[1] if args[0] is own else args[0]).detach())
        rule = RULES.get(plain_name(name))
        if rule is not None:
            return _applied(rule, name, args, kwargs)
        if dense_step():
            return without_override(func, types, args, kwargs)
        raise _refusal([own], name)


def _summed(scalar: Tensor, terms: _Terms, owner: str, counts: dict[int, _Counts] | None = None) -> RowsOfTable:
    rows = Tensor._make_subclass(RowsOfTable, scalar)
    rows._terms, rows._owner, rows._counts, rows._bound = terms, owner, counts or {}, None
    return rows


def _counts_of(table: Table) -> _Counts:
    """The counts that every change of rows raises."""
    found = table.statistics()
    return tuple(found[name] for name in ("step", "inserts", "updates", "writes", "deletes", "evictions"))


def _copied(rows: RowsOfTable) -> RowsOfTable:
    """The same rows in a table of their own, which goes with what is returned."""
    if not _is_average(rows._terms):
        raise _refusal([rows], "clone")
    check_unchanged(rows, "clone")
    table = copy.deepcopy(rows.table)
    if set(rows._terms) != {id(rows.table)}:
        _write(table, rows._terms)
    return _summed(torch.zeros_like(rows.as_subclass(Tensor)), {id(table): (table, 1.0)}, rows._owner)


def _are_equal(rows: RowsOfTable, other: Tensor) -> bool:
    """`torch.equal` of the rows of two tables, or of a table and a matrix; of open tables those that either one has."""
    is_table = isinstance(other, RowsOfTable)
    if rows._counts or not (type(other) is Tensor or (is_table and not other._counts)):
        raise _refusal([rows], "equal")
    if rows.shape != other.shape:
        return False
    if is_table and rows.table.config.num_embeddings is None:
        ids = torch.cat([operators.hashtable_ids(each.table.handle) for each in (rows, other)]).unique()
    else:
        ids = torch.arange(len(other), dtype=torch.int64, device="cpu")
        ids = ids[own_ids(rows.table, ids)]
    for part in ids.split(_ROWS_PER_CHUNK):
        expected = _read(other.table, part) if is_table else other[part]
        if not torch.equal(_read(rows.table, part).to(expected), expected):
            return False
    return True


def _read(table: Table, ids: Tensor) -> Tensor:
    return operators.emb_read(table.handle, ids, table.dim)


def check_unchanged(rows: RowsOfTable, name: str) -> None:
    """Checks that rows are still those that they stood for when they were taken.

    Raises:
        RuntimeError: they have changed, of a sum, or the parameter has other `data`.
    """
    if rows._bound is not None and rows._bound != rows.table.times_bound:
        raise RuntimeError(
            f'"{name}" of {rows._owner} over table "{rows.table.name}": its data was set since these rows were taken, '
            "and they are those of before in torch; clone() keeps rows as they are"
        )
    for key, counts in rows._counts.items():
        table = rows._terms[key][0]
        if _counts_of(table) != counts:
            raise RuntimeError(
                f'"{name}" of {rows._owner} over table "{table.name}": its rows have changed since this sum was made, '
                "and a sum of rows is computed when it is written; clone() keeps rows as they are"
            )


def _is_average(terms: _Terms) -> bool:
    # Shares that do not add up to one are no average: `p.mul_(0.9)`, for example, decays a weight.
    return math.isclose(sum(share for _, share in terms.values()), 1, abs_tol=1e-4)


def _is_in_place(name: str) -> bool:
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def _applied(rule: Callable[..., _Terms], name: str, args: Any, kwargs: Any) -> RowsOfTable:
    """The sum that an operation gives; one in place writes it."""
    target = args[0]
    is_in_place = _is_in_place(name)
    summands = [each for each in flat([*args, *kwargs.values()]) if isinstance(each, RowsOfTable)]
    for each in summands:
        check_unchanged(each, name)
    try:
        terms = rule(*args, **kwargs)
    except (TypeError, ValueError):
        if plain_name(name) == "copy":
            raise refused_for_rows(target._owner, target.table.name, name) from None
        raise _refusal(args, name) from None
    if not is_in_place:
        counts = {key: _counts_of(table) for key, (table, _) in terms.items()}
        for each in summands:
            counts.update(each._counts)
        return _summed(torch.zeros_like(summands[0].as_subclass(Tensor)), terms, summands[0]._owner, counts)
    if not isinstance(target, RowsOfTable) or not _is_average(terms):
        raise _refusal(args, name)
    _write(target.table, terms)
    return target


def _each(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """An operation on lists: on the rows one by one, on all other tensors together."""
    size = len(args[0])
    places = [place for place in range(size) if any(isinstance(each, RowsOfTable) for each in _at(args, place))]
    rule = RULES.get(plain_name(func.__name__))
    if rule is None:
        raise _refusal(_at(args, places[0]), func.__name__)
    found: dict[int, Any] = {
        place: _applied(rule, func.__name__.removeprefix("_foreach"), _at(args, place), kwargs) for place in places
    }
    others = [place for place in range(size) if place not in found]
    if others:
        chosen = [[each[place] for place in others] if isinstance(each, list | tuple) else each for each in args]
        given = func(*chosen, **kwargs)
        found.update(zip(others, given or chosen[0], strict=True))
    return None if _is_in_place(func.__name__) else [found[place] for place in range(size)]


def _at(args: Any, place: int) -> list[Any]:
    return [each[place] if isinstance(each, list | tuple) else each for each in args]


def _refusal(args: Any, name: str) -> RuntimeError:
    rows = next(each for each in args if isinstance(each, RowsOfTable))
    return refused_for_average(rows._owner, rows.table.name, name)


def _terms_of(value: Any) -> _Terms:
    if not isinstance(value, RowsOfTable):
        raise TypeError
    return value._terms


def _scaled(terms: _Terms, factor: Any) -> _Terms:
    if isinstance(factor, RowsOfTable):
        raise TypeError
    return {key: (table, share * float(factor)) for key, (table, share) in terms.items()}


def _added(value: Any, other: Any, alpha: float = 1) -> _Terms:
    if type(other) is int and other == 0:  # Python's `sum` begins with it.
        return _terms_of(value)
    return _merged(_terms_of(value), _scaled(_terms_of(other), alpha))


def _multiplied(value: Any, other: Any) -> _Terms:
    rows, factor = (value, other) if isinstance(value, RowsOfTable) else (other, value)
    return _scaled(_terms_of(rows), factor)


def _interpolated(value: Any, end: Any, weight: Any) -> _Terms:
    return _merged(_scaled(_terms_of(value), 1 - float(weight)), _scaled(_terms_of(end), weight))


def _merged(terms: _Terms, others: _Terms) -> _Terms:
    found = dict(terms)
    for key, (table, share) in others.items():
        found[key] = (table, share + found.get(key, (table, 0.0))[1])
    return found


RULES: dict[str, Callable[..., _Terms]] = {
    "add": _added,
    "sub": lambda value, other, alpha=1: _added(value, other, -alpha),
    "mul": _multiplied,
    "div": lambda value, other: _scaled(_terms_of(value), 1 / float(other)),
    "neg": lambda value: _scaled(_terms_of(value), -1),
    "lerp": _interpolated,
    "addcdiv": lambda start, dividend, divisor, value=1: _added(start, dividend, value / float(divisor)),
    "copy": lambda value, other, non_blocking=False: _terms_of(other),
}
"""The sum of rows that an operation gives, by its name."""


def _write(target: Table, terms: _Terms) -> None:
    """Gives a table the rows that are a weighted sum of those of tables; shares add up to one."""
    others = [(table, share) for table, share in terms.values() if table.table_id != target.table_id]
    # All refusals come before the first row changes.
    for table, _ in terms.values():
        refuse_shared_rows(table.name, table.config.admission, "an average of rows")
    if not others or _is_repeated(target, others):
        return
    # Ids of either side: one without a row here counts with its initial value, and gets a row.
    ids = torch.cat([operators.hashtable_ids(table.handle) for table, _ in [(target, 1.0), *others]]).unique()
    for part in ids.split(_ROWS_PER_CHUNK):
        before = _read(target, part)
        rows = before.clone()
        for table, share in others:
            rows = _moved(rows, before, _read(table, part), share, len(others))
        operators.emb_write(target.handle, part, rows)
    _last_averages[target.table_id] = (weakref.ref(target), _fingerprint(target, others))


_last_averages: dict[int, tuple[weakref.ref[Table], object]] = {}
"""Through which `Table` rows were averaged last, and the fingerprint afterwards, by the number of the table."""


def _is_repeated(target: Table, others: list[tuple[Table, float]]) -> bool:
    """Whether another module over the same rows was averaged so just before: a loop over parameters comes to both."""
    by, fingerprint = _last_averages.get(target.table_id, (lambda: target, None))
    return by() is not target and fingerprint == _fingerprint(target, others)


def _fingerprint(target: Table, others: list[tuple[Table, float]]) -> object:
    return _counts_of(target), sorted((table.table_id, share, _counts_of(table)) for table, share in others)


def _moved(rows: Tensor, before: Tensor, other: Tensor, share: float, count: int) -> Tensor:
    # With one other table to the same bits as torch's average of a parameter.
    return torch.lerp(before, other, share) if count == 1 else rows + share * (other - before)
