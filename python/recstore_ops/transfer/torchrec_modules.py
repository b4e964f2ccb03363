"""The collections of TorchRec that ours can replace. Its package is not needed here: a model brings its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from recstore_ops.nn.embedding_bag_collection import RecStoreEmbeddingBagCollection
from recstore_ops.nn.embedding_collection import RecStoreEmbeddingCollection
from recstore_ops.table.owners import opening
from recstore_ops.transfer.torch_modules import hook_problems, module_problems, write_first_rows

_PLAIN = ("EmbeddingBagCollection", "EmbeddingCollection")
_HOME = "torchrec.modules.embedding_modules"

Collection = RecStoreEmbeddingBagCollection | RecStoreEmbeddingCollection


def is_collection(module: nn.Module) -> bool:
    """Whether a module is a collection of TorchRec, of whatever kind."""
    return any(
        base.__module__.startswith("torchrec.") and base.__name__.endswith(_PLAIN) for base in type(module).__mro__
    )


def tables_of_collection(module: Any) -> dict[str, Any]:
    """The module of torch of each table of a collection by the table's name."""
    return dict((module.embedding_bags if _has_bags(module) else module.embeddings).items())


def configs_of_collection(module: Any) -> list[Any]:
    """The configurations of a collection's tables."""
    return list(module.embedding_bag_configs() if _has_bags(module) else module.embedding_configs())


def collection_problems(module: Any, prefix: str, grows: bool) -> Iterator[str]:
    """Why our collection cannot take the place of one of TorchRec."""
    kind = type(module)
    if (kind.__module__, kind.__name__) not in [(_HOME, name) for name in _PLAIN]:
        yield f"it is a {kind.__name__}, and only plain {' and '.join(_PLAIN)} are replaced: before they are sharded"
        return
    yield from hook_problems(module)
    yield from _own_problems(module)
    configs, tables = configs_of_collection(module), tables_of_collection(module)
    features = Counter(feature for config in configs for feature in config.feature_names)
    shared = [feature for feature, count in features.items() if count > 1]
    if prefix and shared:
        yield f"a prefix would change the names of the outputs of {shared}, which look up several tables"
    if list(tables) != [config.name for config in configs]:
        yield f"it has the tables {list(tables)}, and describes {[config.name for config in configs]}"
        return
    for config in configs:
        problems = _table_problems(tables[config.name], config, grows)
        yield from (f'table "{config.name}": {problem}' for problem in problems)


def _own_problems(module: Any) -> Iterator[str]:
    """The attributes that one collection has and others of its class do not, as a problem."""
    tables = "embedding_bags" if _has_bags(module) else "embeddings"
    own = [name for name in vars(module).keys() - vars(nn.Module()).keys() if not name.startswith("_")]
    own += [name for name in (*module._modules, *module._parameters, *module._buffers) if name != tables]
    if own:
        yield f"it has the attributes {sorted(own)}, which ours would not have"


def _table_problems(table: Any, config: Any, grows: bool) -> Iterator[str]:
    """Why a table cannot take the place of the module of torch that one is described by, in a collection."""
    made: dict[str, Any] = {"padding_idx": None, "scale_grad_by_freq": False}
    kind: type[nn.Module] = nn.Embedding
    if hasattr(config, "pooling"):
        kind, made = nn.EmbeddingBag, {**made, "mode": config.pooling.value.lower(), "include_last_offset": True}
    if type(table) is not kind:
        yield f"it is a {type(table).__name__}, and the collection made a {kind.__name__}"
        return
    for name, value in made.items():
        if getattr(table, name) != value:
            yield f"its {name} is {getattr(table, name)!r}, and the collection made it with {value!r}"
    problems = list(module_problems(table, grows))
    if not problems and table.weight.dtype != torch.float32:
        problems = [f"a table of a collection is made of torch.float32, and its weight is {table.weight.dtype}"]
    described = (config.num_embeddings, config.embedding_dim)
    if not problems and tuple(table.weight.shape) != described:
        problems = [f"its weight has the shape {tuple(table.weight.shape)}, and is described as {described}"]
    yield from problems


def collection_over_tables(module: Any, prefix: str, grows: bool, options: dict[str, Any]) -> Collection:
    """Makes a collection that gives what one of TorchRec gives, over tables that have the same rows if they are new."""
    tables = tables_of_collection(module)
    described = [
        {
            "name": f"{prefix}{config.name}",
            "num_embeddings": None if grows else config.num_embeddings,
            "embedding_dim": config.embedding_dim,
            "feature_names": list(config.feature_names),
            **({"pooling": config.pooling} if _has_bags(module) else {}),
        }
        for config in configs_of_collection(module)
    ]
    ours: Collection
    with opening:
        if _has_bags(module):
            ours = RecStoreEmbeddingBagCollection(
                described, keyed_output=True, is_weighted=module.is_weighted(), **options
            )
        else:
            ours = RecStoreEmbeddingCollection(described, need_indices=module.need_indices(), **options)
        for own, theirs in zip(ours._each_module(), tables.values(), strict=True):
            write_first_rows(own.table, theirs.weight.detach())
            own.frozen = not theirs.weight.requires_grad
    return ours.train(module.training)


def _has_bags(module: Any) -> bool:
    return type(module).__name__ == _PLAIN[0]
