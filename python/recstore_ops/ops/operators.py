"""The operators of `torch.ops.recstore`: one entry each, with its Python name and what tracing needs to know of it.

Schemas, checks and kernels stand in `cxx_bridge/ops.cpp`. Here an operator is `_traced`, with its fake kernel, or
`_eager`. A traced operator that touches the store has an ordered effect. Without that `torch.compile` would drop
updates, whose results are not used, and move reads past them.

Shape suffixes: N ids, D dim, B bags, U distinct ids.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._library.effects import EffectType
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import traceback
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from recstore_ops import _native  # noqa: F401  (its import registers the operators)
from recstore_ops.ops import id_fakes

# Lookups in a region of `torch.utils.checkpoint` that is compiled.
#
# Such a graph runs again, in its backward pass, what the region's policy does not keep. Torch cannot do so with an
# operator that has an effect: the graph fails when it runs. So what these give is kept, whatever the policy. In eager
# mode they run again.

_NAMESPACES = ("recstore", "recstore_python")


def keep_in_checkpoints() -> None:
    """Lets the region that is traced, if any, keep the operators of this package; called while one is traced.

    The region's policy is in the mode whose method calls the operator. Torch hides a mode while its method runs, so it
    is found among the callers.
    """
    if "recompute" not in traceback.get_current_meta():
        return
    frame = inspect.currentframe()
    while frame is not None:
        mode: Any = frame.f_locals.get("self")
        if isinstance(mode, checkpoint._CachingTorchDispatchMode):
            if not isinstance(mode.policy_fn, _Keeping):
                mode.policy_fn = _Keeping(mode.policy_fn)
            return
        frame = frame.f_back


class _Keeping:
    """A policy that keeps the operators of this package, and is another one for the rest."""

    def __init__(self, policy: Callable[..., Any]) -> None:
        self._policy = policy

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(operator, "namespace", None) in _NAMESPACES:
            return CheckpointPolicy.MUST_SAVE
        return self._policy(context, operator, *args, **kwargs)


_NAMESPACE = "recstore"

_P = ParamSpec("_P")
_R = TypeVar("_R")

EFFECTFUL: list[str] = []
"""The operators of this file that have an ordered effect, as `namespace::name.overload`."""

NAMES: list[str] = []
"""The operators of this file, as `name.overload`."""

SUM, MEAN, MAX = 0, 1, 2
"""The pooling modes of `emb_bag`, numbered as in `torch.nn.functional.embedding_bag`."""

OF_DEFAULT_TABLES = ("emb_read", "emb_write", "emb_update")
"""The traced operators that take no handle."""

PLACES_TAG = 2
"""The words behind the places of a lookup that identify their owner."""


def eager_only(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keeps a function and all it calls out of graphs, as `torch.compiler.disable`, which would import the compiler."""
    return torch._disable_dynamo(function)  # type: ignore[return-value]


def register_ordered_effect(name: str) -> None:
    """Declares that calls of an operator keep their order. The name is private in torch, and moved once."""
    register = getattr(torch.library, "_register_effectful_op", None)
    if register is None:
        from torch._higher_order_ops.effects import _register_effectful_op as register
    register(name, EffectType.ORDERED)


def refusing_meta(name: str, fake: Callable[_P, _R], *, is_pure: bool = False) -> Callable[_P, _R]:
    """A fake kernel that takes what tracing gives it, and meta tensors only if all tensors are.

    The first tensor of an operator is a handle, unless the operator takes a default table or is pure.
    """

    @functools.wraps(fake)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            _check_meta(name, tensors, is_pure)
        elif not is_pure:
            keep_in_checkpoints()
        return fake(*args, **kwargs)

    return checked


def _check_meta(name: str, tensors: list[Tensor], is_pure: bool) -> None:
    are_meta = [tensor.is_meta for tensor in tensors]
    if not any(are_meta):
        return
    operator = name.partition(".")[0]
    if not is_pure and (name in OF_DEFAULT_TABLES or not are_meta[0]):
        raise RuntimeError(f"{operator}: got a meta tensor, which has no values, for a table that has")
    if not all(are_meta):
        raise RuntimeError(f"{operator}: got a meta tensor, which has no values, beside one that has")


def _traced(name: str, fake: Callable[..., Any], *, is_pure: bool = False) -> Any:
    """An operator that graphs take: with its fake kernel, and an ordered effect unless it leaves the store alone."""
    qualified = f"{_NAMESPACE}::{name}"
    torch.library.register_fake(qualified)(refusing_meta(name, fake, is_pure=is_pure))
    if not is_pure:
        register_ordered_effect(qualified)
        EFFECTFUL.append(qualified)
    return _overload(name)


def _eager(name: str) -> Any:
    """An operator that graphs leave to Python."""
    return eager_only(_overload(name))


def _overload(name: str) -> Any:
    NAMES.append(name)
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.recstore, packet), overload or "default")


# Fake kernels, with the arguments of their operators. Those of the operators that make ids stand in `id_fakes`.


def _returns_nothing(*args: object, **kwargs: object) -> None:
    return None


def _rows(ids: Tensor, dim: int) -> Tensor:
    return ids.new_empty((*ids.shape, dim), dtype=torch.float32)


def _rows_of_table(table: Tensor, ids: Tensor, dim: int) -> Tensor:
    return _rows(ids, dim)


def _rows_and_places(table: Tensor, ids: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return _rows(ids, dim), _places(ids, 1)


def _places(ids: Tensor, tables: int) -> Tensor:
    # The kernel leaves them on the host, whatever the device of the ids.
    device = "meta" if ids.device.type == "meta" else "cpu"
    return torch.empty(ids.numel() + PLACES_TAG * tables, dtype=torch.int32, device=device)


def _indices_and_rows(table: Tensor, ids: Tensor, dim: int, insert: bool) -> tuple[Tensor, Tensor]:
    return ids.new_empty(ids.shape, dtype=torch.int64), _rows(ids, dim)


def _bags(
    table: Tensor,
    ids: Tensor,
    offsets: Tensor,
    dim: int,
    mode: int,
    per_sample_weights: Tensor | None = None,
    padding_idx: int | None = None,
) -> tuple[Tensor, Tensor]:
    return _pooled(ids, offsets.numel() - 1, dim, mode)


def _bags_of_tables(
    tables: list[Tensor],
    ids: Tensor,
    offsets: Tensor,
    dims: list[int],
    mode: int,
    per_sample_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return _pooled(ids, (offsets.numel() - 1) // len(tables), sum(dims), mode)


def _bags_and_places(
    tables: list[Tensor],
    ids: Tensor,
    offsets: Tensor,
    dims: list[int],
    mode: int,
    per_sample_weights: Tensor | None = None,
    padding_idx: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return *_bags_of_tables(tables, ids, offsets, dims, mode), _places(ids, len(tables))


def _pooled(ids: Tensor, bags: int, dim: int, mode: int) -> tuple[Tensor, Tensor]:
    pooled_BD = ids.new_empty((bags, dim), dtype=torch.float32)
    positions_BD = ids.new_empty((bags, dim) if mode == MAX else (0,), dtype=torch.int64)
    return pooled_BD, positions_BD


def _unique(ids: Tensor) -> tuple[Tensor, Tensor]:
    unique_U = ids.new_empty((_distinct(ids),), dtype=torch.int64)
    return unique_U, ids.new_empty(ids.shape, dtype=torch.int64)


def _merged(ids: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    distinct = _distinct(ids)
    ids_U = ids.new_empty((distinct,), dtype=torch.int64)
    return ids_U, grads.new_empty((distinct, grads.shape[-1]), dtype=torch.float32)


def _distinct(ids: Tensor) -> torch.SymInt:
    """A size that depends on the data."""
    return torch.library.get_ctx().new_dynamic_size()


make_hashtable = _eager("make_hashtable")
hashtable_release = _eager("hashtable_release")
drop_table = _eager("drop_table")
init_embedding_table = _eager("init_embedding_table")
set_learning_rate = eager_only(_traced("set_learning_rate", _returns_nothing))
emb_read = _traced("emb_read.table", _rows_of_table)
emb_read_default = _traced("emb_read", _rows)
emb_read_places = _traced("emb_read.places", _rows_and_places)
emb_write = _traced("emb_write.table", _returns_nothing)
emb_write_default = _traced("emb_write", _returns_nothing)
emb_update = _traced("emb_update.table", _returns_nothing)
emb_update_default = _traced("emb_update", _returns_nothing)
emb_bag = _traced("emb_bag", _bags)
emb_bag_tables = _traced("emb_bag.tables", _bags_of_tables)
emb_bag_places = _traced("emb_bag.places", _bags_and_places)
emb_prefetch = _eager("emb_prefetch.table")
emb_prefetch_default = _eager("emb_prefetch")
emb_prefetch_tables = _eager("emb_prefetch.tables")
emb_wait_result = _eager("emb_wait_result")
emb_wait_tables = _eager("emb_wait_tables")
hashtable_lookup = _traced("hashtable_lookup", _indices_and_rows)
hashtable_delete = _traced("hashtable_delete", _returns_nothing)
hashtable_clear = _traced("hashtable_clear", _returns_nothing)
hashtable_ids = _eager("hashtable_ids")
hashtable_size = _eager("hashtable_size")
hashtable_slot = _eager("hashtable_slot")
make_collector = _eager("make_collector")
collector_release = _eager("collector_release")
accept_grad = _traced("accept_grad", _returns_nothing)
accept_bag_grads = _traced("accept_bag_grads", _returns_nothing)
apply_grads = _traced("apply_grads", _returns_nothing)
clear_grads = _traced("clear_grads", _returns_nothing)
collected_tables = _eager("collected_tables")
collected_grads = _eager("collected_grads")
rank_requests = _eager("rank_requests")
emb_read_ranks = _eager("emb_read.ranks")
pool_rank_rows = _eager("pool_rank_rows")
spread_rank_grads = _eager("spread_rank_grads")
accept_rank_grads = _eager("accept_rank_grads")
unique = _traced("unique", _unique, is_pure=True)
merge_gradients = _traced("merge_gradients", _merged, is_pure=True)
hash_strings = _traced("hash_strings", id_fakes.ids_of_strings, is_pure=True)
cross_ids = _traced("cross_ids", id_fakes.crossed, is_pure=True)
ngram_ids = _traced("ngram_ids", id_fakes.ngrams, is_pure=True)
prefix_ids = _traced("prefix_ids", id_fakes.prefixes, is_pure=True)
bucket_ids = _traced("bucket_ids", id_fakes.bucketed, is_pure=True)
