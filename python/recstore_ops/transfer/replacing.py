"""`replace_embeddings`: tables in the place of a model's embeddings."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from typing_extensions import Unpack

from recstore_ops.config.config_file import same_entries
from recstore_ops.config.keywords import takes
from recstore_ops.config.table_options import DEFAULT_LR, DEFAULTS, TableOptions
from recstore_ops.nn.optimizer import SparseOptimizer, tables_of
from recstore_ops.nn.padding import padding_ids
from recstore_ops.nn.table_parameter import without_stand_ins
from recstore_ops.ops import operators
from recstore_ops.servers import store
from recstore_ops.table.existing import check_choice
from recstore_ops.table.shard import Shard
from recstore_ops.table.table import disagreeing_on_error, learning_rates
from recstore_ops.transfer.module_tree import (
    FoundModule,
    Include,
    chosen,
    found_in,
    holder_problems,
    tie_problems,
    weight_holders,
)
from recstore_ops.transfer.torch_modules import KINDS, module_over_table, module_problems, wrapper_problems
from recstore_ops.transfer.torchrec_modules import (
    collection_over_tables,
    collection_problems,
    configs_of_collection,
    is_collection,
    tables_of_collection,
)


@dataclass(frozen=True)
class ReplacedEmbeddings:
    """The result of `replace_embeddings`.

    Attributes:
        model: the model.
        optimizer: steps the tables of the model, each by its own optimizer.
        tables: the name of each table by the path of its module; of a collection by `<path>.<table>`.
    """

    __module__ = "recstore_ops"

    model: nn.Module
    optimizer: SparseOptimizer
    tables: dict[str, str]

    def dense_parameters(self) -> list[nn.Parameter]:
        """The parameters of the model outside tables, for an optimizer of `torch.optim`."""
        return [parameter for _, parameter in without_stand_ins(self.model.named_parameters())]


@takes(TableOptions, DEFAULTS)
def replace_embeddings(
    model: nn.Module,
    *,
    include: Include = None,
    prefix: str = "",
    grows: bool = False,
    lr: float = DEFAULT_LR,
    **options: Unpack[TableOptions],
) -> ReplacedEmbeddings:
    """Puts tables in the place of a model's embeddings: the model gives the same outputs and trains alike.

    Each `nn.Embedding` and `nn.EmbeddingBag` becomes a `DistEmbedding` or `DistEmbeddingBag` over a table that has its
    rows; padding, mode, types and frozen weights stay. An `EmbeddingBagCollection` or `EmbeddingCollection` of TorchRec
    becomes our collection. Modules that share a weight share a table. All is checked before anything is changed: a
    model that is refused stays as it was, no table was opened, and none lost its rows. Make the optimizers afterwards.

    Args:
        model: changed in place.
        include: patterns of paths, as `"*.user*"`, or `include(path, module)`; by default all embeddings.
        prefix: what the names of tables begin with, before the path of the module. A collection's tables have their
            own names behind it.
        grows: whether the tables have no bound, so that every int64 is an id from now on; else an id beyond the weight
            is an error, as it was.
        lr: the learning rate, if `optimizer` has none.
        **options: see `recstore_ops.TableOptions`; for all tables. Without `on_existing` a table that exists is an
            error; one that is shared keeps its rows, and those of the weight are not written.

    Returns:
        The optimizer of the tables, their names, and the parameters that are left.

    Raises:
        TypeError: no module, an option of another name, or an argument of another type.
        ValueError: a model without embeddings, or one that cannot be replaced: each by its path, with the reason; a
            pattern that matches none; a table that exists; or an invalid option.
        RuntimeError: a table of another module of the model was dropped.

    Warns:
        UserWarning: an attribute of the model holds a weight too, as an optimizer or a list for a penalty does, which
            changes no row: make it anew.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(1000, 8), torch.nn.Linear(8, 1))
        >>> replaced = replace_embeddings(model, prefix="clicks/", grows=True, optimizer={"kind": "adagrad", "lr": 0.1})
        >>> dense = torch.optim.Adagrad(replaced.dense_parameters(), lr=0.1)
        >>> model(torch.tensor([[7, 2**40]])).shape, replaced.tables
        (torch.Size([1, 1]), {'0': 'clicks/0'})
    """
    given = {name: value for name, value in options.items() if value is not None}
    shard = Shard.of(options)
    with disagreeing_on_error(shard):
        _check_types(prefix, grows)
        plan = _Plan.of(model, include, prefix, grows)
        plan.check_names(model, options.get("on_existing"))
        learning_rates(tables_of([model]))  # The optimizer below asks for those of the other tables too.
    held = weight_holders(model, _weights(plan.found))
    # Ranks do it together, whichever of them has tables.
    if options.get("on_existing") == "reset" and (shard is not None or plan.has_tables()):
        plan.rehearse({"lr": lr, **given})
    # A program may have made errors of warnings.
    for where in held:
        warnings.warn(
            f"{where} holds a weight that a table takes the place of, and changes no row: make it anew",
            stacklevel=3,
        )
    with _dropping_on_error(plan.table_names()):
        made = plan.modules({"lr": lr, **given})
    # Only when all are made: until here an error leaves the model as it was.
    for found, module in made:
        found.put(module)
    return ReplacedEmbeddings(model, SparseOptimizer(modules=[model], on_existing="share"), plan.tables_by_path())


def _check_types(prefix: Any, grows: Any) -> None:
    if not isinstance(prefix, str):
        raise TypeError(f"replace_embeddings: prefix must be a str, got {prefix!r}")
    if not isinstance(grows, bool):
        raise TypeError(f"replace_embeddings: grows must be a bool, got {grows!r}")


@dataclass(frozen=True)
class _Plan:
    """The modules to replace, and how.

    Attributes:
        found: the modules.
        prefix: what the names of tables begin with.
        grows: whether tables have no bound.
    """

    found: list[FoundModule]
    prefix: str
    grows: bool

    @staticmethod
    def of(model: nn.Module, include: Include, prefix: str, grows: bool) -> _Plan:
        """Chooses and checks.

        Raises:
            TypeError, ValueError: as `replace_embeddings`, but for its options.
        """
        plan = _Plan(chosen(_embeddings_in(model), include, "replace_embeddings"), prefix, grows)
        problems = [f'"{each.path}": {problem}' for each in plan.found for problem in plan.problems_of(each)]
        problems = problems or list(_model_problems(model, plan.found))
        if problems:
            raise ValueError(f"{type(model).__name__} stays as it is: {'; '.join(problems)}")
        return plan

    def problems_of(self, each: FoundModule) -> Iterator[str]:
        """Why a table cannot take the place of a module."""
        yield from wrapper_problems({id(module): module for place in each.places for module in place.above}.values())
        if is_collection(each.module):
            yield from collection_problems(each.module, self.prefix, self.grows)
        else:
            yield from module_problems(each.module, self.grows)

    @property
    def collections(self) -> list[FoundModule]:
        """Those of TorchRec."""
        return [each for each in self.found if is_collection(each.module)]

    @property
    def tied(self) -> list[list[FoundModule]]:
        """Those of torch, a list for each weight."""
        tied: dict[int, list[FoundModule]] = {}
        for each in self.found:
            if not is_collection(each.module):
                tied.setdefault(id(each.module.weight), []).append(each)
        return list(tied.values())

    def name_of(self, modules: list[FoundModule]) -> str:
        """The name of the table of modules that share a weight."""
        return f"{self.prefix}{modules[0].path}"

    def tables_by_path(self) -> dict[str, str]:
        """The names of all tables."""
        names = {place.path: self.name_of(group) for group in self.tied for each in group for place in each.places}
        for each in self.collections:
            for config in configs_of_collection(each.module):
                names.update({f"{place.path}.{config.name}": f"{self.prefix}{config.name}" for place in each.places})
        return names

    def table_names(self) -> list[str]:
        """The name of each table, in the order in which they are opened."""
        configs = [config for each in self.collections for config in configs_of_collection(each.module)]
        return [*map(self.name_of, self.tied), *(f"{self.prefix}{config.name}" for config in configs)]

    def check_names(self, model: nn.Module, on_existing: str | None) -> None:
        """Raises an error if two tables would have one name, or one exists and `on_existing` does not allow it."""
        names = self.table_names()
        own = {table.name for table in tables_of([model])}
        for name in names:
            check_choice(on_existing, name)
            if names.count(name) > 1:
                raise ValueError(f'replace_embeddings would give two tables the name "{name}"')
            if on_existing in (None, "error") and store.find_table(name) is not None:
                raise ValueError(
                    f'table "{name}" exists: give another prefix, or on_existing="share" to go on with its rows, or '
                    '"reset" to begin anew'
                )
            if on_existing == "reset" and name in own:
                raise ValueError(
                    f'table "{name}" is that of another module of this model, which on_existing="reset" would take it '
                    'from: give another prefix, or on_existing="share"'
                )

    def has_tables(self) -> bool:
        """Whether one of the tables exists."""
        return any(store.find_table(name) is not None for name in self.table_names())

    def rehearse(self, options: dict[str, Any]) -> None:
        """Opens each table under another name and drops it, so that what can fail does before a table loses its rows.

        One after another, so that only one needs memory beside those that exist.
        """
        for part in [*self.tied, *([each] for each in self.collections)]:
            own, trial = (replace(self, found=part, prefix=before + self.prefix) for before in ("", "trial of "))
            # The configuration file says nothing of these names, so the trial would try another configuration.
            names = trial.table_names()
            with same_entries(dict(zip(names, own.table_names(), strict=True))), _dropping(names):
                trial.modules(options)

    def modules(self, options: dict[str, Any]) -> list[tuple[FoundModule, nn.Module]]:
        """Opens the tables, and makes the modules over them."""
        made: list[tuple[FoundModule, nn.Module]] = []
        for group in self.tied:
            own = _keeping_paddings(group, options)
            for each in group:
                size = None if self.grows else each.module.weight.shape[0]
                made.append((each, module_over_table(each.module, self.name_of(group), size, **own)))
                # The first module of a weight opens the table with its rows, and the others share them.
                own = {**own, "on_existing": "share"}
        for each in self.collections:
            made.append((each, collection_over_tables(each.module, self.prefix, self.grows, options)))
        return made


def _embeddings_in(model: Any) -> list[FoundModule]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"replace_embeddings takes a module of torch, got {type(model).__name__}")
    if _is_embedding(model):
        raise ValueError(
            f"the model is itself a {type(model).__name__}, and nothing holds it where another could be put: "
            "recstore_ops.transfer.from_embedding makes the module that takes its place"
        )
    found = found_in(model, _is_embedding)
    if not found:
        raise ValueError(f"{type(model).__name__} has no nn.Embedding or nn.EmbeddingBag among its modules")
    return found


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, KINDS) or is_collection(module)


def _modules(found: list[FoundModule]) -> dict[str, Any]:
    """The modules of torch by their paths; of a collection one for each table."""
    modules: dict[str, Any] = {}
    for each in found:
        if is_collection(each.module):
            tables = tables_of_collection(each.module)
            modules.update({f"{each.path}.{name}": table for name, table in tables.items()})
        else:
            modules[each.path] = each.module
    return modules


def _weights(found: list[FoundModule]) -> dict[str, Tensor]:
    return {path: module.weight for path, module in _modules(found).items()}


def _model_problems(model: nn.Module, found: list[FoundModule]) -> Iterator[str]:
    weights = _weights(found)
    replaced = [module for each in found for module in each.module.modules()]
    yield from tie_problems(model, weights, replaced)
    yield from holder_problems(model, {**_modules(found), **{each.path: each.module for each in found}})
    collected = [each for each in found if is_collection(each.module)]
    of_collections = _weights(collected)
    times = Counter(map(id, weights.values()))
    for path, weight in of_collections.items():
        if times[id(weight)] > 1:
            yield f'"{path}": its weight is that of another module too, and a collection opens tables of its own'


def _keeping_paddings(group: list[FoundModule], options: dict[str, Any]) -> dict[str, Any]:
    """Options with which modules of several padding ids have one configuration."""
    eviction = options.get("eviction")
    paddings = {id for each in group for id in padding_ids(each.module.padding_idx)}
    if not eviction or not paddings:
        return options
    return {**options, "eviction": {**eviction, "keep": sorted({*eviction.get("keep", ()), *paddings})}}


@contextmanager
def _dropping(names: list[str]) -> Iterator[None]:
    """Drops the tables of these names that were opened within."""
    before = _numbers(names)
    try:
        yield
    finally:
        _drop_new(before)


@contextmanager
def _dropping_on_error(names: list[str]) -> Iterator[None]:
    """Drops the tables of these names that were opened within, if there is an error or the program is interrupted."""
    before = _numbers(names)
    try:
        yield
    except BaseException:
        _drop_new(before)
        raise


def _numbers(names: list[str]) -> dict[str, int | None]:
    return {name: store.find_table(name) for name in names}


def _drop_new(before: dict[str, int | None]) -> None:
    for name, number in before.items():
        # Numbers are never given out twice: another one under the same name is a table that was opened within.
        if store.find_table(name) not in (None, number):
            operators.drop_table(name)
