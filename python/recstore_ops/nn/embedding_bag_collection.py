"""`RecStoreEmbeddingBagCollection`: the sparse features of a batch, each pooled from a table that grows by id.

Shape suffixes: F features, B examples, N ids of all features, D dims of all features together.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy
from typing_extensions import Unpack

from recstore_ops.autograd import _EagerEBCFunction, _RecStoreEBCFunction
from recstore_ops.config.collection_config import EmbeddingBagConfig
from recstore_ops.config.keywords import takes
from recstore_ops.config.table_options import DEFAULT_LR, DEFAULTS, TableOptions
from recstore_ops.nn.embedding_bag import DistEmbeddingBag
from recstore_ops.nn.functional import needs_backward
from recstore_ops.nn.prefetch import Issued, PendingPrefetches
from recstore_ops.nn.scripted import batch_of_outputs, pooled_rows, refuse_gradients
from recstore_ops.nn.table_collection import Output, TableCollection
from recstore_ops.nn.variable_batch import Features, expanded, features_at, with_one_stride, without_weights
from recstore_ops.nn.weighted_means import divided_by_weights, sums_of_weights
from recstore_ops.ops import operators
from recstore_ops.sharding.pooling import pool_rows
from recstore_ops.sharding.rows import Request, failing_together, sharded_bags, sharded_rows
from recstore_ops.sparse import KeyedJaggedTensor, KeyedTensor
from recstore_ops.sparse._bags import bag_of_each
from recstore_ops.sparse._torchrec import Batch, type_beside
from recstore_ops.sparse.transforms import is_transformed
from recstore_ops.table.checks import check_ids, check_weights
from recstore_ops.table.shard import Shard
from recstore_ops.table.table import Table, disagreeing_on_error


class RecStoreEmbeddingBagCollection(TableCollection[EmbeddingBagConfig, DistEmbeddingBag]):
    """Tables, and the features that are pooled from them.

    The gradients that `backward` collects are applied by `SparseOptimizer.step`: one step per distinct id, however
    many features share a table. Weights of a batch are factors of the rows of `sum` tables and get a gradient.

    `torch.compile(fullgraph=True)` takes it, with `dynamic=True` for batches whose number of ids varies, except
    without fusion and for features that look up several tables: there the ids are cut feature by feature, which
    needs `torch._dynamo.config.capture_scalar_outputs`.

    Args:
        embedding_bag_configs: the tables: `EmbeddingBagConfig`, dicts of its fields, or TorchRec's type of the name.
        lr: the learning rate of the tables whose `optimizer` has none; 0.01 by default.
        enable_fusion: whether a batch is one request to all tables; else one a feature.
        fusion_k: the bit above which `fused_ids` puts the index of the table.
        ps_host: the address of a parameter server, where the tables are opened, and all after them; see
            `recstore_ops.servers`.
        ps_port: its port.
        keyed_output: whether `forward` returns a `KeyedTensor` even if all dims are equal.
        is_weighted: whether every batch must have weights (`True`), or the weights of batches are ignored (`False`); by
            default weights count if a batch has them.
        device: the device of the module, as `to` sets it; rows do not move.
        **options: see `recstore_ops.TableOptions`, for the tables that have no such option of their own. With a
            `process_group` a batch is one exchange for all tables.

    Raises:
        TypeError: a description of a table of another type, or an option of another name.
        ValueError: no tables, a name twice, an invalid table, a server's address, or `fusion_k` out of [1, 62].
        RuntimeError: a job of several processes has no `process_group`, so each process would train its own copy; or
            another rank could not make its tables.

    Examples:
        >>> bags = RecStoreEmbeddingBagCollection([
        ...     {"name": "user", "num_embeddings": None, "embedding_dim": 8, "feature_names": ["user"]},
        ...     {"name": "item", "num_embeddings": 100, "embedding_dim": 8, "feature_names": ["seen", "bought"]},
        ... ])
        >>> features = KeyedJaggedTensor(
        ...     ["user", "seen", "bought"], torch.tensor([-7, 2**62, 1, 2, 3]), lengths=torch.tensor([1, 1, 2, 0, 0, 1])
        ... )
        >>> bags(features).shape
        torch.Size([2, 3, 8])
    """

    __module__ = "recstore_ops"
    __constants__ = ("_program_is_keyed",)
    _program_is_keyed = False

    @takes(TableOptions, DEFAULTS)
    def __init__(
        self,
        embedding_bag_configs: Sequence[Any],
        lr: float = DEFAULT_LR,
        enable_fusion: bool = True,
        fusion_k: int = 30,
        ps_host: str | None = None,
        ps_port: int | None = None,
        *,
        keyed_output: bool = False,
        is_weighted: bool | None = None,
        device: torch.device | str | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        # A rank that raises alone leaves the others waiting: they compare their tables as they open them.
        with disagreeing_on_error(Shard.of(options)):
            if not 1 <= fusion_k <= 62:
                raise ValueError(f"fusion_k must be within [1, 62], got {fusion_k}")
        super().__init__(EmbeddingBagConfig, embedding_bag_configs, _open_bags, lr, ps_host, ps_port, options, device)
        self._embedding_bag_configs = self._configs
        self.enable_fusion = enable_fusion
        self.fusion_k = fusion_k
        self.keyed_output = keyed_output
        self._is_weighted = is_weighted
        self._has_means = any(config.pooling == "mean" for config in self._configs)
        self._prefetches = PendingPrefetches()
        self._prefetch_handles: dict[str, int] = {}

    # Without a type of what it gives, which TorchScript then finds.
    def forward(self, features: Batch):
        """Pools the bags of every feature.

        Args:
            features: a `KeyedJaggedTensor` of int64 ids, ours or TorchRec's, with the features of this collection
                in any order. Features may have different numbers of examples, with inverse indices.

        Returns:
            (Tensor | KeyedTensor): `[B, F, dim]`, float32 unless the module was converted, features in the order of the
                tables. If dims differ, or with `keyed_output`, a `KeyedTensor` of `[B, D]` columns, TorchRec's for
                TorchRec's batch. An empty bag gives zeros.

        Raises:
            TypeError: something else than a batch, or ids or weights of another type.
            ValueError: features are missing or come twice, or there are others; weights are missing although the
                collection `is_weighted`; features have different numbers of examples without inverse indices; there are
                ids behind the last bag.
            IndexError: an id out of its table's `num_embeddings`.
        """
        if torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]
            return self._scripted(features)
        else:
            return self._recorded(features) if isinstance(features, Proxy) else self._eager(features)

    def _eager(self, features: Any) -> Any:
        """`forward` outside of TorchScript."""
        pooled_BD = self._pooled_sharded(features) if self._tables[0].is_sharded else self._pooled_here(features)
        output_dtype = self._output_dtype()
        if pooled_BD.dtype != output_dtype:
            pooled_BD = pooled_BD.to(output_dtype)
        dims = list(self._output_dims)
        pooled_BD = self._of_all_examples(features, pooled_BD, dims)
        if not self.keyed_output and len(set(dims)) == 1:
            return pooled_BD.view(pooled_BD.shape[0], len(dims), dims[0])
        return type_beside(features, "KeyedTensor")(
            keys=list(self._output_names), length_per_key=dims, values=pooled_BD
        )

    def _scripted(self, features: KeyedJaggedTensor):
        """`forward` as `torch.jit.script` compiles it."""
        weights = features.weights_or_none()
        if self._program_is_weighted and weights is None:
            raise ValueError("the collection is_weighted, and the batch has no weights")
        refuse_gradients(self._program_is_trained or (weights is not None and weights.requires_grad))
        batch = batch_of_outputs(features, self._program_features)
        weights = None if self._program_is_unweighted else batch.weights_or_none()
        tables, dims = self._program_tables, self._program_dims
        pooled_BD = pooled_rows(batch, weights, tables, dims, self._program_means).to(self._program_dtype)
        if self._program_is_keyed:
            return KeyedTensor(self._program_names, dims, pooled_BD)
        else:
            return pooled_BD.reshape(pooled_BD.shape[0], len(dims), dims[0])

    def __prepare_scriptable__(self) -> Any:
        """Sets the attributes that programs read, and gives itself to `torch.jit.script`."""
        self._prepare_program()
        dims = self._dims(self._outputs)
        self._program_means = [bag.mode == "mean" for bag in self._modules_of(self._outputs)]
        self._program_is_weighted, self._program_is_unweighted = self._is_weighted is True, self._is_weighted is False
        self._program_is_keyed = self.keyed_output or len(set(dims)) > 1
        self._program_dtype = self._output_dtype()
        return self

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The configurations of the tables."""
        return self._embedding_bag_configs

    def is_weighted(self) -> bool:
        """Whether every batch must have weights."""
        return self._is_weighted is True

    @property
    def embedding_bags(self) -> dict[str, DistEmbeddingBag]:
        """The module of each table by its name; `embedding_bags[name].weight` reads and writes rows."""
        return self._by_name()

    def set_fusion(self, enabled: bool) -> None:
        """Chooses between one request for all features and one a feature; results are the same."""
        self.enable_fusion = enabled

    def issue_fused_prefetch(self, features: Any, record_handle: bool = True) -> Any:
        """Issues a read of all rows of a batch, which a forward of the same batch then consumes.

        The rows include changes that the process makes after the issue. A compiled forward, or one of another batch,
        leaves the prefetch pending and reads the rows itself.

        Args:
            features: a batch as `forward` takes it.
            record_handle: whether the next forwards may consume it. Otherwise the caller hands the handle to
                `set_fused_prefetch_handle`, from another thread for example.

        Returns:
            The handle. Without `record_handle` also the number of ids, `time.time()` of the issue, the distinct
            `fused_ids` `[U]` and the place of each id among them `[N]`.

        Raises:
            RuntimeError: fusion is off, or the tables are sharded.
            ValueError: as `forward`; without `record_handle` as `fused_ids`.
        """
        if not self.enable_fusion:
            raise RuntimeError("issue_fused_prefetch needs enable_fusion")
        self._refuse_sharded("issue_fused_prefetch")
        batch = self._by_output(self._checked(features))
        outputs, ids_N = self._in_order_of(batch), check_ids(batch.values())
        # Before the issue: an id that does not fit into the fused keys leaves no prefetch behind.
        fused = () if record_handle else torch.unique(self.fused_ids(features), return_inverse=True)
        splits = torch.tensor([0, *batch.length_per_key()], dtype=torch.int64, device="cpu").cumsum(0)
        handle = operators.emb_prefetch_tables([table.handle for table in self._tables_of(outputs)], ids_N, splits)
        # A copy: the batch may be filled anew before a forward compares its ids.
        issued = Issued(handle, tuple(batch.keys()), ids_N.clone(), time.time())
        self._prefetches.add(issued)
        if not fused:
            self._prefetches.make_pending(handle, counts=True)
            return handle
        return handle, ids_N.numel(), issued.issued_at, *fused

    def set_fused_prefetch_handle(
        self,
        handle: int,
        num_ids: int | None = None,
        issue_ts: float | None = None,
        record_stats: bool = True,
        fused_ids_cpu: Tensor | None = None,
        fused_inverse: Tensor | None = None,
    ) -> None:
        """Lets the next forwards consume a prefetch that was issued with `record_handle=False`.

        Args:
            handle: of `issue_fused_prefetch`.
            num_ids: if given, it must equal the number of ids issued.
            issue_ts: if given, it must equal the time of the issue.
            record_stats: whether `report_prefetch_stats` counts its use.
            fused_ids_cpu: the distinct fused ids, checked together with `fused_inverse` against those issued.
            fused_inverse: the place of each id among them.

        Raises:
            ValueError: a handle that was consumed, or was not issued by this collection; or what is given beside it
                belongs to another prefetch.
        """
        issued = self._prefetches.of(handle)
        if num_ids not in (None, issued.ids.numel()):
            raise ValueError(f"prefetch handle {handle} is of {issued.ids.numel()} ids, got num_ids {num_ids}")
        if issue_ts not in (None, issued.issued_at):
            raise ValueError(f"prefetch handle {handle} was issued at {issued.issued_at}, got issue_ts {issue_ts}")
        if (fused_ids_cpu is None) != (fused_inverse is None):
            raise ValueError("fused_ids_cpu and fused_inverse go together")
        if fused_ids_cpu is not None and fused_inverse is not None:
            ids_N = fused_ids_cpu.to(issued.ids.device)[fused_inverse.to(issued.ids.device)]
            if not torch.equal(ids_N & ((1 << self.fusion_k) - 1), issued.ids):
                raise ValueError(f"prefetch handle {handle} is of other ids than fused_ids_cpu and fused_inverse")
        self._prefetches.make_pending(handle, record_stats)

    def set_prefetch_handles(self, handles: Mapping[str, int]) -> None:
        """Lets the next forward consume a prefetch for each feature, of `RecStoreClient.prefetch`.

        Args:
            handles: one for every feature; empty to forget those given before.

        Raises:
            ValueError: features are missing, or there are others.
        """
        self._refuse_sharded("set_prefetch_handles")
        if handles and set(handles) != set(self._config_names):
            raise ValueError(f"expected a handle for each of {sorted(self._config_names)}, got {sorted(handles)}")
        self._prefetch_handles = dict(handles)

    def report_prefetch_stats(self, reset: bool = True) -> dict[str, float]:
        """Counts and times of prefetches: `issued`, `used`, `unused`, `ids`, and `ahead_ms` and `wait_ms`, summed."""
        return self._prefetches.report(reset)

    def _refuse_sharded(self, method: str) -> None:
        if self._tables[0].is_sharded:
            raise RuntimeError(
                f"{method} reads this process's rows only, and the tables are sharded: "
                "recstore_ops.sharding.ShardedPipeline reads ahead there"
            )

    @property
    def _fused_prefetch_handle(self) -> int | None:
        """The handle that the next forward looks at first."""
        return next(iter(self._prefetches.pending), None)

    def _prefetched(self, batch: KeyedJaggedTensor, outputs: list[Output], ids_N: Tensor) -> list[Tensor] | None:
        """The rows of each output if they were prefetched."""
        if self._prefetch_handles:
            # A wait consumes a handle, so all are forgotten even if one of the waits fails.
            handles, self._prefetch_handles = self._prefetch_handles, {}
            return self._wait_for_features(handles, batch, outputs)
        return self._prefetches.take(tuple(batch.keys()), ids_N, operators.emb_wait_tables)

    def _wait_for_features(
        self, handles: dict[str, int], batch: KeyedJaggedTensor, outputs: list[Output]
    ) -> list[Tensor]:
        dims = self._dims(outputs)
        rows = [operators.emb_wait_result(handles[output.name], dim) for output, dim in zip(outputs, dims, strict=True)]
        for output, part, count in zip(outputs, rows, batch.length_per_key(), strict=True):
            if part.shape[0] != count:
                raise ValueError(f'feature "{output.name}" has {count} ids, but its prefetch has {part.shape[0]}')
        return rows

    def fused_ids(self, features: Any) -> Tensor:
        """The ids of a batch as keys of one key space: `id + (table_idx << fusion_k)`, `[N]` in the batch's order.

        For stores that know no tables. Lookups of this collection do not need them: there the table travels beside
        the id, and every int64 is an id.

        Raises:
            ValueError: an id that does not fit in `fusion_k` bits, or tables that do not fit above; further as
                `forward`.
        """
        batch = self._by_output(self._checked(features))
        ids_N = check_ids(batch.values())
        limit = 1 << self.fusion_k
        if len(self._embedding_bag_configs) * limit > 1 << 63:
            raise ValueError(f"{len(self._embedding_bag_configs)} tables do not fit above bit {self.fusion_k}")
        outside_N = (ids_N < 0) | (ids_N >= limit)
        if bool(outside_N.any()):
            raise ValueError(f"fused ids must be within [0, 2^{self.fusion_k}), got {int(ids_N[outside_N][0])}")
        first_keys = [output.table << self.fusion_k for output in self._in_order_of(batch)]
        lengths = torch.tensor(batch.length_per_key(), dtype=torch.int64, device=ids_N.device)
        first_key_F = torch.tensor(first_keys, dtype=torch.int64, device=ids_N.device)
        return ids_N + first_key_F.repeat_interleave(lengths)

    def __getstate__(self) -> dict[str, Any]:
        # Prefetches belong to this process and this module.
        own = ("_prefetches", "_prefetch_handles")
        return {name: value for name, value in super().__getstate__().items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._prefetches = PendingPrefetches()
        self._prefetch_handles = {}

    def requests(self, features: Any) -> list[Request]:
        """The lookups in sharded tables that a forward of these features makes, for `ShardedPipeline`."""
        return self._requests(self._by_output(self._checked(features)))

    def _requests(self, batch: KeyedJaggedTensor) -> list[Request]:
        ids = check_ids(batch.values()).split(batch.length_per_key())
        tables = self._tables_of(self._in_order_of(batch))
        return [Request(table, part) for table, part in zip(tables, ids, strict=True)]

    def _pooled_sharded(self, features: Any) -> Tensor:
        """One exchange for all features, `[B, D]` in the order of the outputs; one a feature without fusion."""
        # The tables of the first exchange.
        with failing_together(self.tables() if self.enable_fusion else self._tables_of(self._outputs[:1])):
            batch = self._by_output(self._checked(features))
            outputs, size = self._in_order_of(batch), batch.stride()
            bags = self._modules_of(outputs)
            weights_N = _weights(batch, bags)
            requests, offsets = self._requests(batch), batch.offsets().to(torch.int64)
        if not self.enable_fusion:
            return self._pooled_one_by_one(batch)
        # The operator behind `sharded_bags` takes no weights.
        pooled_BD = None if weights_N is not None else sharded_bags(requests, offsets)
        if pooled_BD is not None:
            return self._in_own_order(outputs, _with_means(pooled_BD, batch, bags))
        sums = []
        weights = [None] * len(outputs) if weights_N is None else weights_N.split(batch.length_per_key())
        for place, rows in enumerate(sharded_rows(requests)):
            own_offsets = offsets[place * size : (place + 1) * size + 1]
            sums.append(pool_rows(rows, own_offsets - own_offsets[0], "sum", weights[place]))
        return self._in_own_order(outputs, _with_means(torch.cat(sums, dim=1), batch, bags))

    def _pooled_here(self, features: Any) -> Tensor:
        """Pools from tables of this process, `[B, D]` in the order of the outputs."""
        batch = self._by_output(self._checked(features))
        # A program of torch.jit.trace has the list of handles as a constant, which TorchScript empties as it is read.
        is_tracing = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        if not self.enable_fusion or is_transformed() or is_tracing:
            return self._pooled_one_by_one(batch)
        values, weights_N, offsets = batch._values, batch._weights, batch._offsets
        if offsets is None:
            offsets = batch.offsets()
        # The list itself, and no copy: by `is` the steps below see that columns are in order already.
        outputs = self._outputs if batch._keys == self._output_names else self._in_order_of(batch)
        bags = self._modules_of(outputs)
        ids_N, weights_N = check_ids(values), None if weights_N is None else _weights(batch, bags)
        # A graph uses no prefetches.
        has_rows = not torch.compiler.is_compiling() and (self._prefetch_handles or self._prefetches.pending)
        rows = self._prefetched(batch, outputs, ids_N) if has_rows else None
        pooled_BD = self._sums(Features(ids_N, offsets.to(torch.int64), weights_N, rows), outputs, bags)
        if self._has_means:
            pooled_BD = _with_means(pooled_BD, batch, bags)
        return pooled_BD if outputs is self._outputs else self._in_own_order(outputs, pooled_BD)

    def _in_own_order(self, outputs: list[Output], pooled_BD: Tensor) -> Tensor:
        """Puts the columns of `outputs` into the order of this collection."""
        if outputs == self._outputs:
            return pooled_BD
        columns = dict(zip(outputs, pooled_BD.split(self._dims(outputs), dim=1), strict=True))
        return torch.cat([columns[output] for output in self._outputs], dim=1)

    def _sums(self, features: Features, outputs: list[Output], bags: list[DistEmbeddingBag]) -> Any:
        """The sums of all features, `[B, D]` in the order of `outputs`, whose modules are given."""
        # As `looked_up`, without a call for each of many tables.
        own = [(bag, bag._parameters.get("weight") is bag.table.anchor) for bag in bags]
        tables = [bag.table if has_own else bag.looked_up() for bag, has_own in own]
        trained = {table.is_frozen for table in tables}
        if torch.is_grad_enabled() and len(trained) > 1:
            return self._pooled_apart(features, outputs, tables)
        return self._pooled_together(features, outputs, tables)

    def _pooled_apart(self, features: Features, outputs: list[Output], tables: list[Table]) -> Tensor:
        """Frozen features and others in a request each, for a backward pass is about the others only."""
        columns = {}
        for kind in (False, True):
            places = [place for place, table in enumerate(tables) if table.requires_grad == kind]
            own = [outputs[place] for place in places]
            part = features_at(features, places, len(outputs))
            pooled_BD = self._pooled_together(part, own, [tables[place] for place in places])
            columns.update(zip(own, pooled_BD.split(self._dims(own), dim=1), strict=True))
        return torch.cat([columns[output] for output in outputs], dim=1)

    def _pooled_together(self, features: Features, outputs: list[Output], tables: list[Table]) -> Any:
        """Features that are all frozen, or all trained, in one request."""
        ids_N, offsets, weights_N, rows = features
        dims = self._output_dims if outputs is self._outputs else self._dims(outputs)
        handles = [table.handle for table in tables]
        if rows is None and not needs_backward(tables[0], weights_N):
            return operators.emb_bag_tables(handles, ids_N, offsets, dims, operators.SUM, weights_N)[0]
        request = (tables[0].anchor, weights_N, ids_N, offsets, dims)
        if torch.compiler.is_compiling():
            # A compiled graph takes no tensor twice, and features may share a table: each handle comes once, with
            # numbers.
            own = self.tables()
            numbers = [output.table for output in outputs]
            handles_and_collectors = [*(table.handle for table in own), *(table.collector for table in own)]
            return _RecStoreEBCFunction.apply(*request, numbers, *handles_and_collectors)
        return _EagerEBCFunction.apply(*request, handles, [table.collector for table in tables], rows)

    def _pooled_one_by_one(self, batch: KeyedJaggedTensor) -> Tensor:
        """One request a feature, `[B, D]` in the order of the outputs."""
        parts = batch.to_dict()
        bags = zip(self._modules_of(self._outputs), [parts[output.name] for output in self._outputs], strict=True)
        pooled = [bag(part.values(), part.offsets(), part.weights_or_none()) for bag, part in bags]
        return torch.cat(pooled, dim=1)

    def _by_output(self, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The batch with a key for each output: a feature that looks up several tables comes several times."""
        if self._is_weighted is not None:
            batch = self._with_weights_asked(batch)
        if batch.variable_stride_per_key():
            batch = with_one_stride(batch)
        if len(self._outputs) == len(self.feature_keys):
            return batch
        parts = batch.to_dict()
        return KeyedJaggedTensor.from_jt_dict({output.name: parts[output.feature] for output in self._outputs})

    def _with_weights_asked(self, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        has_weights = batch.weights_or_none() is not None
        if self._is_weighted and not has_weights:
            raise ValueError("the collection is_weighted, and the batch has no weights")
        return without_weights(batch) if self._is_weighted is False and has_weights else batch

    def _of_all_examples(self, features: Any, pooled_BD: Tensor, dims: list[int]) -> Tensor:
        """The pooled rows of all examples of the batch, also if features hold equal bags once."""
        inverse_indices = features.inverse_indices_or_none() if hasattr(features, "inverse_indices_or_none") else None
        if inverse_indices is None:
            return pooled_BD
        return expanded(pooled_BD, dims, [output.feature for output in self._outputs], inverse_indices)

    def _in_order_of(self, batch: KeyedJaggedTensor) -> list[Output]:
        by_name = {output.name: output for output in self._outputs}
        names = batch.keys()
        return [by_name[name] for name in names]

    def _output_dtype(self) -> torch.dtype:
        """The type that holds what every table's module gives."""
        first, *others = self._each_module()
        dtype = first.output_dtype
        for other in others:
            if other.output_dtype != dtype:
                dtype = torch.promote_types(dtype, other.output_dtype)
        return dtype

    def _dims(self, outputs: list[Output]) -> list[int]:
        return [self._configs[output.table].embedding_dim for output in outputs]


def _open_bags(config: EmbeddingBagConfig, lr: float, options: TableOptions) -> DistEmbeddingBag:
    return DistEmbeddingBag(
        config.num_embeddings,
        config.embedding_dim,
        config.name,
        "mean" if config.pooling == "mean" else "sum",
        include_last_offset=True,
        init_func=None if config.init_fn is None else config.first_rows,
        lr=lr,
        **options,
    )


def _weights(batch: KeyedJaggedTensor, bags: list[DistEmbeddingBag]) -> Tensor | None:
    """The weight of each id, `[N]`, if the batch has weights."""
    weights_N = batch.weights_or_none()
    if weights_N is not None:
        if weights_N.dtype in {bag.output_dtype for bag in bags}:
            weights_N = weights_N.to(torch.float32)
        check_weights(batch.values(), weights_N, "sum")
    return weights_N


def _with_means(sums_BD: Tensor, batch: KeyedJaggedTensor, bags: list[DistEmbeddingBag]) -> Tensor:
    """Divides the sums of the `mean` tables by the sizes of their bags, or by their weights, as one bag does."""
    if all(bag.mode == "sum" for bag in bags):
        return sums_BD
    weights_N = _weights(batch, bags)
    lengths_FB = batch.lengths().view(len(bags), batch.stride())
    is_mean_F1 = torch.tensor([[bag.mode == "mean"] for bag in bags], dtype=torch.bool, device=lengths_FB.device)
    dims = [bag.table.dim for bag in bags]
    dim_F = torch.tensor(dims, dtype=torch.int64, device=lengths_FB.device)
    if weights_N is None:
        divisors_FB = lengths_FB.clamp(min=1).where(is_mean_F1, 1).to(torch.float32)
        # With a known size no device is waited for.
        return sums_BD / divisors_FB.repeat_interleave(dim_F, dim=0, output_size=sum(dims)).T
    bag_N = bag_of_each(batch.values(), batch.offsets().to(torch.int64))
    weights_FB = sums_of_weights(bag_N, lengths_FB.numel(), weights_N).view(lengths_FB.shape)
    divisors_FB = torch.where(is_mean_F1, weights_FB, 1.0)
    return divided_by_weights(sums_BD, divisors_FB.repeat_interleave(dim_F, dim=0, output_size=sum(dims)).T)
