"""The configuration of a table in a collection, with the features that look it up."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from os import PathLike
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from recstore_ops.config.table_options import TableOptions, options_of

_Config = TypeVar("_Config", bound="EmbeddingConfig")


@dataclass(frozen=True)
class EmbeddingConfig:
    """A table of a `RecStoreEmbeddingCollection`.

    Attributes:
        name: the table's name, unique in the process.
        num_embeddings: the number of ids; `None` for an open vocabulary, in which every int64 is an id.
        embedding_dim: elements a row.
        feature_names: the features that look it up; the table's name if empty.
        optimizer: this and all that follow except `init_fn` are as in `recstore_ops.TableOptions`; by default the
            collection's.
        init_fn: fills the rows `[num_embeddings, embedding_dim]` of a new table in place, as `torch.nn.init` does.

    Raises:
        TypeError: features that are a text.
        ValueError: an empty name, or a feature twice.
    """

    __module__ = "recstore_ops"

    name: str
    num_embeddings: int | None
    embedding_dim: int
    feature_names: list[str] = field(default_factory=list)
    optimizer: str | dict[str, Any] | None = None
    initializer: str | dict[str, Any] | None = None
    admission: dict[str, Any] | None = None
    eviction: dict[str, Any] | None = None
    memory_limit: int | None = None
    disk: str | PathLike[str] | None = None
    init_fn: Callable[[Tensor], Any] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a table of a collection needs a name")
        if isinstance(self.feature_names, str):
            raise TypeError(f'the features of table "{self.name}" are a list, got the text {self.feature_names!r}')
        features = list(self.feature_names) or [self.name]
        if len(set(features)) < len(features):
            raise ValueError(f'the features of table "{self.name}" must be distinct, got {features}')
        object.__setattr__(self, "feature_names", features)

    def first_rows(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """The rows of a new table with an `init_fn`."""
        assert self.init_fn is not None
        rows = torch.zeros(shape, dtype=torch.float32, device="cpu")
        with torch.no_grad():
            self.init_fn(rows)
        return rows.to(dtype)

    def options(self, shared: TableOptions) -> TableOptions:
        """The options that the table is opened with: its own take precedence over those shared by all tables."""
        own = {name: value for name, value in options_of(self).items() if value != {}}
        return cast(TableOptions, {**shared, **own})


@dataclass(frozen=True)
class EmbeddingBagConfig(EmbeddingConfig):
    """A table of a `RecStoreEmbeddingBagCollection`.

    Attributes:
        pooling: `sum` or `mean`, or TorchRec's `PoolingType`; and all of `EmbeddingConfig`.

    Raises:
        ValueError: another pooling; further as `EmbeddingConfig`.
    """

    __module__ = "recstore_ops"

    pooling: str = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        pooling = str(getattr(self.pooling, "value", self.pooling)).lower()
        if pooling not in ("sum", "mean"):
            raise ValueError(f'the pooling of table "{self.name}" must be "sum" or "mean", got {self.pooling!r}')
        object.__setattr__(self, "pooling", pooling)


def read_configs(configs: Iterable[Any], kind: type[_Config]) -> list[_Config]:
    """Reads the tables of a collection: each a `kind`, a dict of its fields, or TorchRec's type of that name.

    Raises:
        TypeError: something else.
        ValueError: no table, a name twice, or an invalid one.
    """
    tables = [_read(config, kind) for config in configs]
    names = [table.name for table in tables]
    if not tables:
        raise ValueError("a collection needs at least one table")
    if len(set(names)) < len(names):
        raise ValueError(f"the tables of a collection must have distinct names, got {names}")
    return tables


def _read(config: Any, kind: type[_Config]) -> _Config:
    if isinstance(config, kind):
        return config
    if isinstance(config, Mapping):
        return _from_dict(config, kind)
    if type(config).__module__.startswith("torchrec."):
        return _from_torchrec(config, kind)
    raise TypeError(f"a table must be described by {kind.__name__} or a dict, got {type(config).__name__}")


def _from_dict(config: Mapping[str, Any], kind: type[_Config]) -> _Config:
    known = {item.name for item in fields(kind)}
    required = {"name", "num_embeddings", "embedding_dim"}
    unknown, missing = sorted(config.keys() - known), sorted(required - config.keys())
    if unknown or missing:
        raise ValueError(f"{kind.__name__} got unknown fields {unknown} and lacks {missing}: {dict(config)}")
    return kind(**config)


def _from_torchrec(config: Any, kind: type[_Config]) -> _Config:
    if config.data_type.name != "FP32":
        raise ValueError(f'table "{config.name}" must hold float32, got {config.data_type.name}')
    initial = config.init_fn
    is_uniform = isinstance(initial, functools.partial) and initial.func is torch.nn.init.uniform_
    return kind(
        name=config.name,
        num_embeddings=config.num_embeddings,
        embedding_dim=config.embedding_dim,
        feature_names=config.feature_names,
        initializer={"kind": "uniform", **initial.keywords} if is_uniform else None,
        init_fn=None if is_uniform else initial,
        **({"pooling": config.pooling} if hasattr(config, "pooling") else {}),
    )
