"""The operators of `torch.ops.recstore`: one name each, and what tracing needs to know of them.

Schemas, checks and kernels stand in `cxx_bridge/ops.cpp`; here each operator has its Python name and its fake
kernel, and every operator that touches the store is registered as having an ordered effect. Without that
`torch.compile` would drop updates, whose results nobody uses, and move reads past them.

Shape suffixes: N ids, D dim, B bags, U distinct ids.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._library.effects import EffectType

from recstore_ops import _native  # noqa: F401  (its import registers the operators)

_recstore = torch.ops.recstore

_P = ParamSpec("_P")
_R = TypeVar("_R")


def eager_only(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keeps a function and all it calls out of graphs, as `torch.compiler.disable`, which would import the compiler."""
    return torch._disable_dynamo(function)  # type: ignore[return-value]


make_hashtable = eager_only(_recstore.make_hashtable.default)
hashtable_release = eager_only(_recstore.hashtable_release.default)
drop_table = eager_only(_recstore.drop_table.default)
init_embedding_table = eager_only(_recstore.init_embedding_table.default)
set_learning_rate = eager_only(_recstore.set_learning_rate.default)
emb_read = _recstore.emb_read.table
emb_read_places = _recstore.emb_read.places
emb_write = _recstore.emb_write.table
emb_update = _recstore.emb_update.table
emb_bag = _recstore.emb_bag.default
emb_bag_tables = _recstore.emb_bag.tables
emb_bag_places = _recstore.emb_bag.places
emb_prefetch = eager_only(_recstore.emb_prefetch.table)
emb_prefetch_default = eager_only(_recstore.emb_prefetch.default)
emb_prefetch_tables = eager_only(_recstore.emb_prefetch.tables)
emb_wait_result = eager_only(_recstore.emb_wait_result.default)
emb_wait_tables = eager_only(_recstore.emb_wait_tables.default)
hashtable_lookup = _recstore.hashtable_lookup.default
hashtable_delete = _recstore.hashtable_delete.default
hashtable_clear = _recstore.hashtable_clear.default
hashtable_ids = eager_only(_recstore.hashtable_ids.default)
hashtable_size = eager_only(_recstore.hashtable_size.default)
hashtable_slot = eager_only(_recstore.hashtable_slot.default)
make_collector = eager_only(_recstore.make_collector.default)
collector_release = eager_only(_recstore.collector_release.default)
accept_grad = _recstore.accept_grad.default
accept_bag_grads = _recstore.accept_bag_grads.default
apply_grads = _recstore.apply_grads.default
clear_grads = _recstore.clear_grads.default
collected_tables = eager_only(_recstore.collected_tables.default)
collected_grads = eager_only(_recstore.collected_grads.default)
unique = _recstore.unique.default
merge_gradients = _recstore.merge_gradients.default

EFFECTFUL = (
    "recstore::emb_read",
    "recstore::emb_read.table",
    "recstore::emb_read.places",
    "recstore::emb_write",
    "recstore::emb_write.table",
    "recstore::emb_update",
    "recstore::emb_update.table",
    "recstore::emb_bag",
    "recstore::emb_bag.tables",
    "recstore::emb_bag.places",
    "recstore::hashtable_lookup",
    "recstore::hashtable_delete",
    "recstore::hashtable_clear",
    "recstore::set_learning_rate",
    "recstore::accept_grad",
    "recstore::accept_bag_grads",
    "recstore::apply_grads",
    "recstore::clear_grads",
)


def _register_ordered_effect(name: str) -> None:
    """Declares that calls of an operator keep their order. The name is private in torch, and moved once."""
    register = getattr(torch.library, "_register_effectful_op", None)
    if register is None:
        from torch._higher_order_ops.effects import _register_effectful_op as register
    register(name, EffectType.ORDERED)


for _name in EFFECTFUL:
    _register_ordered_effect(_name)


def _rows(ids: Tensor, dim: int) -> Tensor:
    return ids.new_empty((*ids.shape, dim), dtype=torch.float32)


@torch.library.register_fake("recstore::emb_read")
def _(ids: Tensor, dim: int) -> Tensor:
    return _rows(ids, dim)


@torch.library.register_fake("recstore::emb_read.table")
def _(table: Tensor, ids: Tensor, dim: int) -> Tensor:
    return _rows(ids, dim)


_PLACES_TAG = 2
"""The words behind the places of a lookup that tell whose they are."""


@torch.library.register_fake("recstore::emb_read.places")
def _(table: Tensor, ids: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return _rows(ids, dim), _places(ids, 1)


def _places(ids: Tensor, tables: int) -> Tensor:
    return torch.empty(ids.numel() + _PLACES_TAG * tables, dtype=torch.int32, device="cpu")


@torch.library.register_fake("recstore::emb_bag")
def _(
    table: Tensor,
    ids: Tensor,
    offsets: Tensor,
    dim: int,
    mode: int,
    per_sample_weights: Tensor | None = None,
    padding_idx: int | None = None,
) -> tuple[Tensor, Tensor]:
    return _pooled(ids, offsets.numel() - 1, dim, mode)


@torch.library.register_fake("recstore::emb_bag.tables")
def _(
    tables: list[Tensor],
    ids: Tensor,
    offsets: Tensor,
    dims: list[int],
    mode: int,
    per_sample_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return _pooled(ids, (offsets.numel() - 1) // len(tables), sum(dims), mode)


@torch.library.register_fake("recstore::emb_bag.places")
def _(
    tables: list[Tensor],
    ids: Tensor,
    offsets: Tensor,
    dims: list[int],
    mode: int,
    per_sample_weights: Tensor | None = None,
    padding_idx: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    pooled_BD, positions_BD = _pooled(ids, (offsets.numel() - 1) // len(tables), sum(dims), mode)
    return pooled_BD, positions_BD, _places(ids, len(tables))


def _pooled(ids: Tensor, bags: int, dim: int, mode: int) -> tuple[Tensor, Tensor]:
    pooled_BD = ids.new_empty((bags, dim), dtype=torch.float32)
    positions_BD = ids.new_empty((bags, dim) if mode == MAX else (0,), dtype=torch.int64)
    return pooled_BD, positions_BD


SUM, MEAN, MAX = 0, 1, 2
"""The pooling modes of `emb_bag`, numbered as in `torch.nn.functional.embedding_bag`."""


@torch.library.register_fake("recstore::hashtable_lookup")
def _(table: Tensor, ids: Tensor, dim: int, insert: bool) -> tuple[Tensor, Tensor]:
    return ids.new_empty(ids.shape, dtype=torch.int64), _rows(ids, dim)


@torch.library.register_fake("recstore::unique")
def _(ids: Tensor) -> tuple[Tensor, Tensor]:
    unique_U = ids.new_empty((_distinct(ids),))
    return unique_U, ids.new_empty(ids.shape, dtype=torch.int64)


@torch.library.register_fake("recstore::merge_gradients")
def _(ids: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    distinct = _distinct(ids)
    return ids.new_empty((distinct,)), grads.new_empty((distinct, grads.shape[-1]))


def _distinct(ids: Tensor) -> torch.SymInt:
    """A size that only the data tells."""
    return torch.library.get_ctx().new_dynamic_size()


def _returns_nothing(*args: object, **kwargs: object) -> None:
    return None


for _name in (
    "emb_write",
    "emb_write.table",
    "emb_update",
    "emb_update.table",
    "hashtable_delete",
    "hashtable_clear",
    "set_learning_rate",
    "accept_grad",
    "accept_bag_grads",
    "apply_grads",
    "clear_grads",
):
    torch.library.register_fake(f"recstore::{_name}")(_returns_nothing)
