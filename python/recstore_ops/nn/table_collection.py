"""Common parts of collections: a module for each table, and the features that look it up."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from recstore_ops.client.client import RecStoreClient, get_kv_client
from recstore_ops.config.collection_config import EmbeddingConfig, read_configs
from recstore_ops.config.table_options import TableOptions
from recstore_ops.nn.closed_module import ClosedModule
from recstore_ops.nn.dist_embedding import TableModule
from recstore_ops.servers.choosing import use_constructor_address
from recstore_ops.sparse import KeyedJaggedTensor
from recstore_ops.sparse._bags import check_cover
from recstore_ops.sparse._torchrec import own_batch
from recstore_ops.sparse.transforms import is_transformed
from recstore_ops.state.keys import check_state, names_in, tensor_of_names
from recstore_ops.state.rows import are_tables_left_out
from recstore_ops.table.shard import Shard
from recstore_ops.table.table import Table, disagreeing_on_error

_Config = TypeVar("_Config", bound=EmbeddingConfig)
_Module = TypeVar("_Module", bound=TableModule)


class Output(NamedTuple):
    """One output of a collection: a feature looked up in a table.

    Attributes:
        name: the feature's name; `feature@table` for a feature that looks up several tables.
        feature: the feature's name.
        table: the table's place among the tables.
    """

    name: str
    feature: str
    table: int


class TableCollection(ClosedModule, Generic[_Config, _Module]):
    """Tables, each a module, and the features that look them up.

    Args:
        kind: the type that describes a table.
        configs: the tables: of this type, dicts of its fields, or TorchRec's type of the name.
        open_table: makes a table's module, of its description, the learning rate and its options.
        lr: the learning rate of the tables whose `optimizer` has none.
        ps_host: the address of a parameter server, where the tables are opened, and all after them.
        ps_port: its port.
        options: for the tables that have no such option of their own.
        device: the device of the module, as `to` gives it.

    Attributes:
        feature_keys: the features that a batch must hold, in the order of the tables.

    Raises:
        TypeError: a description of another type.
        ValueError: no tables, a name twice, an invalid table, or a server's address.
        RuntimeError: several processes without a `process_group`, or another rank could not make its tables.
    """

    __jit_ignored_attributes__ = ("_modules_of_tables",)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__jit_unused_properties__ = [name for name in dir(cls) if isinstance(getattr(cls, name, None), property)]

    def __init__(
        self,
        kind: type[_Config],
        configs: Sequence[Any],
        open_table: Callable[[_Config, float, TableOptions], _Module],
        lr: float,
        ps_host: str | None,
        ps_port: int | None,
        options: TableOptions,
        device: torch.device | str | None = None,
    ) -> None:
        with disagreeing_on_error(Shard.of(options)):
            use_constructor_address(ps_host, ps_port)
            tables = read_configs(configs, kind)
        modules = [open_table(table, lr, table.options(options)) for table in tables]
        super().__init__()
        self._configs = tables
        for module in modules:
            module._is_in_collection = True
        self._modules_of_tables = nn.ModuleList(modules)
        self._tables = [module.table for module in modules]
        self._outputs = _outputs(tables)
        self._output_names = [output.name for output in self._outputs]
        self._output_dims = [tables[output.table].embedding_dim for output in self._outputs]
        self.feature_keys = list(dict.fromkeys(output.feature for output in self._outputs))
        self._config_names = {output.name: tables[output.table].name for output in self._outputs}
        if device is not None:
            self.to(device)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if not name.startswith("_program_")}
        # As plain tuples: a pickle must not name a type that is not public.
        state["_outputs"] = [tuple(output) for output in self._outputs]
        # Modules hold the same tables, and a deep copy of them has tables of its own.
        del state["_tables"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._outputs = [Output(*output) for output in self._outputs]
        self._tables = [module.table for module in self._each_module()]

    @property
    def kv_client(self) -> RecStoreClient:
        """The client of this process, which knows the tables by name."""
        return get_kv_client()

    @property
    def _trace(self) -> list[tuple[str, Tensor, Tensor]]:
        """The gradients collected and not yet applied, as `(table_name, ids [U], grads [U, dim])`, ids distinct."""
        return [entry for table in self.tables() for entry in table.collected()]

    def tables(self) -> list[Table]:
        """The tables, each once."""
        return list(self._tables)

    @property
    def _itself(self) -> "TableCollection[_Config, _Module]":
        """The module that a graph of this collection alone calls."""
        return self

    def _recorded(self, features: Proxy) -> Proxy:
        """The lookup as one node of the graph that `torch.fx` makes, for which a collection is a leaf."""
        tracer: Any = features.tracer
        return tracer.create_proxy("call_module", tracer.path_of_module(self) or "_itself", (features,), {})

    @property
    def device(self) -> torch.device:
        """The device of the module; what `forward` gives lies on that of the ids."""
        return next(self.parameters()).device

    def embedding_names_by_table(self) -> list[list[str]]:
        """The names of what `forward` gives, those of each table together."""
        places = range(len(self._configs))
        return [[output.name for output in self._outputs if output.table == place] for place in places]

    def _prepare_program(self) -> None:
        """Sets what a program of `torch.jit.script` reads.

        Raises:
            TypeError: the tables are sharded.
        """
        if self._tables[0].is_sharded:
            super().__prepare_scriptable__()
        tables = self._tables_of(self._outputs)
        self._program_tables = [table.handle for table in tables]
        self._program_is_trained = any(table.requires_grad for table in tables)
        self._program_dims = [table.dim for table in tables]
        self._program_features = [output.feature for output in self._outputs]
        self._program_names = [output.name for output in self._outputs]

    def reset_parameters(self) -> None:
        """Brings all rows back to their initial values, without slots; see `DistEmbedding.reset_parameters`."""
        for module in self._by_name().values():
            module.reset_parameters()

    def reset_trace(self) -> None:
        """Forgets the gradients collected and not yet applied."""
        for module in self._by_name().values():
            module.reset_trace()

    def get_extra_state(self) -> Tensor:
        """The names of the tables for `state_dict`, as `tensor_of_names`: the rows of each come under its place."""
        return tensor_of_names(self._by_name())

    def set_extra_state(self, state: Any) -> None:
        """Checks that no table of this collection has another place in the state.

        Raises:
            TypeError: no names.
            ValueError: the tables come in another order.
        """
        own, names = list(self._by_name()), names_in(state)
        if any(name in own and own.index(name) != place for place, name in enumerate(names)):
            raise ValueError(f"the state is of the tables {names}, but this collection has them as {own}")

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: Any,
        missing_keys: Any,
        unexpected_keys: Any,
        error_msgs: Any,
    ) -> None:
        # Before any table changes: they are loaded one after another.
        for place, module in enumerate(self._by_name().values()):
            if not are_tables_left_out():
                check_state(module.table, state_dict, f"{prefix}_modules_of_tables.{place}.")
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _by_name(self) -> dict[str, _Module]:
        # By their names in the configuration, which a deep copy keeps.
        return {config.name: module for config, module in zip(self._configs, self._each_module(), strict=True)}

    def _each_module(self) -> list[_Module]:
        # A look into a `ModuleList` takes longer than all of it as a list.
        modules: Any = self._modules_of_tables
        return list(modules)

    def _modules_of(self, outputs: Sequence[Output]) -> list[_Module]:
        modules = self._each_module()
        return [modules[output.table] for output in outputs]

    def _tables_of(self, outputs: Sequence[Output]) -> list[Table]:
        return [module.looked_up() for module in self._modules_of(outputs)]

    def _checked(self, features: Any) -> KeyedJaggedTensor:
        """Returns a batch that holds the features of this collection, no more and no less.

        Raises:
            TypeError: no `KeyedJaggedTensor`.
            ValueError: features are missing or come twice, or there are others; or there are ids behind the last bag.
        """
        batch = features if type(features) is KeyedJaggedTensor else own_batch(features)
        # Attributes in place of methods: a forward passes fewer Python frames.
        keys, values, offsets = batch._keys, batch._values, batch._offsets
        if offsets is None:
            offsets = batch.offsets()
        # Those that trace take no numbers out of tensors.
        is_traced = torch.compiler.is_compiling() or get_proxy_mode() is not None or is_transformed()
        if offsets.is_cpu and offsets.numel() and not is_traced:
            check_cover(values.shape[0], int(offsets[-1]))
        if keys == self.feature_keys:
            return batch
        if len(set(keys)) < len(keys):
            raise ValueError(f"the batch must hold each feature once, got {keys}")
        missing = [key for key in self.feature_keys if key not in keys]
        extra = [key for key in keys if key not in self.feature_keys]
        if missing or extra:
            raise ValueError(
                f"the batch must hold the features {self.feature_keys}: it lacks {missing} and has {extra} besides"
            )
        return batch


def _outputs(configs: Sequence[EmbeddingConfig]) -> list[Output]:
    features = [feature for config in configs for feature in config.feature_names]
    return [
        Output(feature if features.count(feature) == 1 else f"{feature}@{config.name}", feature, table)
        for table, config in enumerate(configs)
        for feature in config.feature_names
    ]
