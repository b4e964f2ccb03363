"""`SparseOptimizer`: the step that applies collected gradients to the tables."""

import copy
import functools
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from recstore_ops import _native
from recstore_ops.client.client import RecStoreClient, get_kv_client
from recstore_ops.config.table_config import check_learning_rate
from recstore_ops.nn.allowed import note_stepper
from recstore_ops.nn.collected_gradients import CollectedGradients, check_unscaled
from recstore_ops.nn.gradient_hooks import check_passes
from recstore_ops.nn.parameter_groups import check_rate_of_rule, rate_of, rates_of
from recstore_ops.nn.table_collection import TableCollection
from recstore_ops.ops.operators import eager_only
from recstore_ops.servers import store
from recstore_ops.sharding.gradient_norm import clip_sharded_norm
from recstore_ops.sharding.rows import check_other_ranks
from recstore_ops.state.rows import native_state, optimizer_state
from recstore_ops.table.existing import note_stepped, times_loaded, warn_of_kept_state
from recstore_ops.table.table import Table, learning_rates, open_tables

Tables = nn.Module | Table


_optimizers: weakref.WeakSet["SparseOptimizer"] = weakref.WeakSet()


class SparseOptimizer(torch.optim.Optimizer):
    """Applies the gradients that modules collected, by the optimizer of each table.

    A step first checks everything, then takes, for each table, exactly one optimizer step per distinct id over all
    that was collected since the last step, as `torch.optim` does after several backward passes. A table without
    collected gradients is left alone, its step count too.

    Every table of `modules` has a parameter group of its own, so that `torch.optim.lr_scheduler` works on each. Only
    the learning rate of a group can be set: a step refuses a group with `weight_decay`, `betas` and the like, which
    tables are opened with.

    Without `modules` there is one group, whose learning rate goes to all tables of a step once it is changed, except
    those whose rate was set by hand.

    `torch.amp.GradScaler` works on the tables of `modules`: it unscales collected gradients. If they hold infinity or
    NaN, it skips the step and leaves every row as it is.

    Args:
        kv_client: the client whose tables are updated; this process's by default. Modules may stand here too, as
            parameters do in `torch.optim`.
        lr: the learning rate of all tables, except those whose rate was set by hand with `set_learning_rate`; by
            default each table's own.
        modules: modules and tables that `step()` and `zero_grad()` are about.
        on_existing: `share` goes on without a warning with what an earlier optimizer of these modules left beside the
            rows, as averages of gradients; by default a table that keeps such is warned of each time.

    Raises:
        ValueError: a learning rate out of range, modules without any table, parameters in the place of modules, or
            another `on_existing`.
    """

    __module__ = "recstore_ops"

    def __init__(
        self,
        kv_client: RecStoreClient | nn.Module | Table | Sequence[Tables] | None = None,
        lr: float | None = None,
        modules: nn.Module | Table | Sequence[Tables] | None = None,
        on_existing: Literal["share"] | None = None,
    ) -> None:
        if on_existing not in (None, "share"):
            raise ValueError(f'SparseOptimizer: on_existing must be "share" or None, got {on_existing!r}')
        client, self._modules = _client_and_modules(kv_client, modules)
        self.kv_client = client or get_kv_client()
        self._lr = None if lr is None else check_learning_rate(lr)
        self._initial_lr = 0.01 if self._lr is None else self._lr
        self._rates: dict[int, float] = {}
        self._loads: Counter[int] = Counter()
        self._seen: weakref.WeakSet[Table] = weakref.WeakSet()
        self._stepped: list[weakref.ref[Table]] = []
        self._followed: tuple[list[tuple[float, bool]], list[float]] | None = None
        tables = tables_of(self._modules or [])
        if self._modules is not None and not tables:
            raise ValueError("SparseOptimizer got modules without any table")
        first, *others = self._groups(tables)
        super().__init__([first], {})
        # torch compares each group with all before it, which takes a minute for 10,000 tables; these are all distinct.
        self.param_groups.extend(others)
        groups = self._groups_by_table()
        self._seen.update(tables)
        note_stepper(self, tables)
        self._bring_together([(table, _group_of(table, groups)) for table in tables])
        _optimizers.add(self)
        if on_existing is None:
            warn_of_kept_state(tables)

    def __deepcopy__(self, memo: dict[int, Any]) -> "SparseOptimizer":
        """An optimizer of copies of the modules, at the same learning rates; hooks are not copied, as in torch.

        Copied together with the model, by `copy.deepcopy((model, optimizer))`, it is the optimizer of the model's copy.
        Without modules at construction it is about what its `step` is given.
        """
        # In the memo before anything else is copied: a module may hold this optimizer.
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.kv_client, copied._lr, copied._initial_lr = self.kv_client, self._lr, self._initial_lr
        copied._modules = copy.deepcopy(self._modules, memo)
        pairs = list(zip(tables_of(self._modules or []), tables_of(copied._modules or []), strict=True))
        numbers = {before.table_id: after.table_id for before, after in pairs}
        names = {before.name: after.name for before, after in pairs}
        # A table that is no part of the modules is not copied, and keeps its number.
        copied._rates = {numbers.get(number, number): rate for number, rate in self._rates.items()}
        copied._loads = Counter()
        copied._seen = weakref.WeakSet(after for _, after in pairs)
        copied._stepped, copied._followed = [], None
        groups = [copied._copied_group(group, names, memo) for group in self.param_groups]
        # torch's `__setstate__` adds the dictionaries of hooks that `__init__` would have made.
        copied.__setstate__({"defaults": dict(self.defaults), "state": defaultdict(dict), "param_groups": groups})
        _optimizers.add(copied)
        note_stepper(copied, copied._seen)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """For a pickle: the modules, as their pickles have them, and the parameter groups; no hooks, as in torch.

        Slots and steps belong to the tables, which the process that reads the pickle has open.
        """
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        names = {table.table_id: table.name for table in self._tables_kept().values()}
        return {
            "kv_client": None if self.kv_client is get_kv_client() else self.kv_client,
            "modules": self._modules,
            "lr": self._lr,
            "initial_lr": self._initial_lr,
            "rates": {names[number]: rate for number, rate in self._rates.items() if number in names},
            "defaults": self.defaults,
            "param_groups": groups,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "modules" not in state:  # No pickle: torch sets the parts of a state so.
            super().__setstate__(state)
            return
        self.kv_client = state["kv_client"] or get_kv_client()
        self._modules, self._lr, self._initial_lr = state["modules"], state["lr"], state["initial_lr"]
        numbers = {name: store.find_table(name) for name in state["rates"]}
        self._rates = {number: state["rates"][name] for name, number in numbers.items() if number is not None}
        self._loads, self._seen, self._stepped, self._followed = Counter(), weakref.WeakSet(), [], None
        groups = [{"params": [self._parameter_for(group["table"])], **group} for group in state["param_groups"]]
        super().__setstate__({"defaults": state["defaults"], "state": defaultdict(dict), "param_groups": groups})
        _optimizers.add(self)
        # A module that holds this optimizer is not there yet: its tables are found when they are needed.
        with suppress(AttributeError):
            tables = tables_of(self._modules or [])
            self._seen.update(tables)
            note_stepper(self, tables)

    def _copied_group(self, group: dict[str, Any], names: dict[str, str], memo: dict[int, Any]) -> dict[str, Any]:
        """A parameter group of the original, about the copy of its table."""
        rest = copy.deepcopy({key: value for key, value in group.items() if key not in ("params", "table")}, memo)
        name = None if group["table"] is None else names[group["table"]]
        return {"params": [self._parameter_for(name)], **rest, "table": name}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses groups but those that the optimizer makes of its tables.

        Raises:
            ValueError: any other group.
        """
        params = param_group.get("params")
        if not (isinstance(params, list) and all(isinstance(each, CollectedGradients) for each in params)):
            raise ValueError(
                "SparseOptimizer takes no parameter groups: give modules at construction, each table has a group then, "
                "and dense parameters go to an optimizer of torch.optim"
            )
        super().add_param_group(param_group)

    def _groups(self, tables: list[Table]) -> list[dict[str, Any]]:
        if not tables:
            return [{"params": [self._parameter_for(None)], "lr": self._initial_lr, "table": None}]
        by_name = {table.name: table for table in tables}
        return [
            {"params": [self._parameter_for(name)], "lr": _rate(table), "table": name}
            for name, table in by_name.items()
        ]

    def _parameter_for(self, name: str | None) -> CollectedGradients:
        """The parameter of a table's group; there is one without a table too, which torch asks for."""
        if name is None:
            return CollectedGradients.of(_refuse_without_modules)
        return CollectedGradients.of(functools.partial(_tables_named, self._modules or [], name))

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Empty: what the optimizer keeps lies in the tables, and `state_dict` has it.

        Raises:
            RuntimeError: `torch.distributed.checkpoint.state_dict` asks, which looks for parameters in the model.
        """
        # Private in torch: by another name it would fail a little later, for want of a parameter.
        if sys._getframe(1).f_code.co_name == "_init_optim_state":
            raise RuntimeError(self._not_by_parameter())
        return self.__dict__["state"]

    @state.setter
    def state(self, state: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.__dict__["state"] = state

    def _not_by_parameter(self) -> str:
        names = [f'"{group["table"]}"' for group in self.param_groups if group["table"] is not None]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        tables = f"the tables {', '.join(names[:3])}{more}" if names else "tables"
        return (
            "get_optimizer_state_dict, set_optimizer_state_dict and get_state_dict of torch look for the parameters of "
            f"an optimizer in the model, and SparseOptimizer has {tables} by name: save its state_dict() under a key "
            "of its own, load it by load_state_dict, and give torch's functions the other optimizers"
        )

    @eager_only
    def step(  # type: ignore[override]
        self,
        modules: nn.Module | Table | Sequence[Tables] | None = None,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """Applies what was collected, and empties the traces.

        Args:
            modules: the modules to step; by default those given at construction. A callable is the closure.
            closure: computes the loss again, gradients included, before the step.

        Returns:
            The result of the closure.

        Raises:
            ValueError: no modules here nor at construction, or modules without any table; or a parameter group with a
                hyper-parameter other than its learning rate, which no step would read.
            RuntimeError: a table refuses its gradients; a sharded table refuses those of any rank; or a `GradScaler`
                was given the dense optimizer alone. Then no table has changed and all traces are kept.
        """
        if callable(modules) and not isinstance(modules, nn.Module | Table):
            modules, closure = None, modules  # As torch.optim: step(closure).
        return self._watched_step(modules, closure) if self._is_watched() else self._step(modules, closure)

    # Else torch wraps it at the first construction, for hooks and profilers, which costs every step as much as the
    # rest of it: 0.13 ms where the caches hold a large batch.
    step.hooked = True  # type: ignore[attr-defined]

    def _is_watched(self) -> bool:
        """Whether hooks or a profiler are to see the steps."""
        hooks = (
            self._optimizer_step_pre_hooks,
            self._optimizer_step_post_hooks,
            _global_optimizer_pre_hooks,
            _global_optimizer_post_hooks,
        )
        return any(hooks) or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]

    def _step(self, modules: Tables | Sequence[Tables] | None, closure: Callable[[], Any] | None) -> Any:
        chosen = self._chosen("step", modules)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        tables = tables_of(chosen)
        if not tables:
            raise ValueError("SparseOptimizer.step got modules without any table")
        self._note(tables)
        # Before the ranks compare: within `sharding.join` that announces the rates to ranks without batches.
        self._follow_rates(tables)
        check_passes(tables)
        check_other_ranks(tables)
        check_unscaled(tables)
        self.kv_client.apply_grads(tables)
        return loss

    _watched_step = torch.optim.Optimizer.profile_hook_step(_step)

    def _apply_gradients(self, module: Tables) -> None:
        """Applies what one module collected: `step([module])`."""
        self.step([module])

    @eager_only
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        modules: nn.Module | Table | Sequence[Tables] | None = None,
    ) -> Tensor:
        """Scales what was collected so that its norm does not exceed `max_norm`; `torch.nn.utils.clip_grad_norm_`.

        The norm is over the merged gradients of all tables together, as if they were one vector. If tables are sharded,
        it is over all ranks, and all ranks call this together. For one norm over dense parameters as well, give
        `torch.nn.utils.clip_grad_norm_` the parameters of the model, or those of this optimizer's groups beside the
        dense ones. Sharded tables refuse the former; the latter sees this rank's rows only.

        Args:
            max_norm: the greatest norm that is kept as it is.
            norm_type: the order of the norm; `math.inf` for the greatest magnitude.
            error_if_nonfinite: whether a norm that is not finite is an error.
            modules: the modules whose gradients are clipped; by default those given at construction.

        Returns:
            The norm before clipping, float32, 0-d.

        Raises:
            ValueError: no modules here nor at construction.
            RuntimeError: a norm that is not finite, with `error_if_nonfinite`; then nothing is scaled.
        """
        # Modules over one table collect apart, and the norm is over their sum: they go together under one name.
        by_name: dict[str, list[Table]] = {}
        for table in tables_of(self._chosen("clip_grad_norm_", modules)):
            by_name.setdefault(table.name, []).append(table)
        parameters = [CollectedGradients.of(functools.partial(list, tables)) for tables in by_name.values()]
        if any(table.is_sharded for tables in by_name.values() for table in tables):
            return clip_sharded_norm(list(by_name.values()), parameters, max_norm, norm_type, error_if_nonfinite)
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    @eager_only
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets what was collected and not yet applied, by the modules given at construction.

        Without such modules it is about all tables of this process, except those of other optimizers.

        Args:
            set_to_none: has no meaning for collected gradients, which are always dropped; must be True.

        Raises:
            ValueError: `set_to_none=False`.
        """
        if not set_to_none:
            raise ValueError("SparseOptimizer.zero_grad drops collected gradients; it cannot keep zeros")
        own = self._seen or tables_of(self._modules or [])  # That of a pickle may have seen none yet.
        for table in own if self._modules is not None else self._all_but_those_of_others():
            table.clear_collected()

    def _all_but_those_of_others(self) -> set[Table]:
        others = {table for optimizer in _optimizers if optimizer is not self for table in optimizer._seen}
        return set(open_tables()) - (others - set(self._seen))

    @eager_only
    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state: `param_groups` as in torch, and under `state` the slots of each table by its name.

        Without modules at construction it covers the tables stepped so far. Gradients collected and not yet applied are
        not part of it. See `recstore_ops.state` for the state of one table. Other threads must not train meanwhile.
        """
        packed = super().state_dict()
        tables = self._tables_kept().items()
        packed["state"] = {name: optimizer_state(table, self._rates[table.table_id]) for name, table in tables}
        return packed

    @eager_only
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` gave, tables found by their names. Load the state of the model first.

        Slots belong to rows, so the tables must have the rows that the state has slots of, and its optimizers; only
        learning rate and weight decay may differ. On an error nothing has changed.

        Raises:
            TypeError: a state of another type, or a learning rate that is no number.
            ValueError: a state of other tables or of another optimizer, or of other rows than the tables have, or with
                parameter groups that `step` refuses.
            IndexError: an id outside a table's `num_embeddings`.
            RuntimeError: a table of a forked child's parent, or rows that came or went meanwhile.
        """
        # All checks come first, then all tables change in one call. torch comes last, with groups that were checked.
        groups = self._in_own_order(state_dict["param_groups"])
        states = state_dict["state"]
        tables = self._tables_of_state(list(states))
        for group, rate in zip(groups, rates_of(groups), strict=True):
            if group["table"] in tables:
                check_rate_of_rule(tables[group["table"]], rate)
        _native.put_optimizer_states([native_state(table, states[name]) for name, table in tables.items()])
        # Without slots: torch would attach them to the scalars that stand for tables.
        super().load_state_dict({**state_dict, "state": {}, "param_groups": groups})
        self._followed = None
        for name, table in tables.items():
            self._note_rate(table, states[name][2]["group_lr"])

    def _tables_kept(self) -> dict[str, Table]:
        """The tables whose state is the optimizer's, by name."""
        if self._modules is not None:
            return {table.name: table for table in tables_of(self._modules) if table.table_id in self._rates}
        return {name: Table.open(name) for name in store.table_names() if store.find_table(name) in self._rates}

    def _tables_of_state(self, names: list[str]) -> dict[str, Table]:
        """The tables whose state is loaded, by name."""
        if self._modules is None:
            missing = [name for name in names if store.find_table(name) is None]
            if missing:
                raise ValueError(f"the state is of tables that are not there, {missing}: make the model first")
            return {name: Table.open(name) for name in names}
        tables = self._tables_kept()
        if set(names) != set(tables):
            raise ValueError(f"the state is of the tables {sorted(names)}, this optimizer steps {sorted(tables)}")
        return tables

    def _in_own_order(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The parameter groups of a state, each at the place of this optimizer's group of the same table."""
        by_table = {group.get("table"): group for group in groups if len(group.get("params", [])) == 1}
        own = [group["table"] for group in self.param_groups]
        if len(groups) != len(own):
            raise ValueError(
                f"the state has a different number of parameter groups, {len(groups)} instead of {len(own)}"
            )
        if set(by_table) != set(own):
            got = [group.get("table") for group in groups]
            raise ValueError(f"the state has parameter groups of the tables {got}, this optimizer one of each of {own}")
        return [by_table[table] for table in own]

    def _chosen(self, method: str, modules: nn.Module | Table | Sequence[Tables] | None) -> list[Tables]:
        chosen = self._modules if modules is None else _as_list(modules)
        if chosen is None:
            raise ValueError(f"SparseOptimizer.{method} needs modules, here or at construction")
        return chosen

    def _groups_by_table(self) -> dict[str | None, dict[str, Any]]:
        """The parameter groups by the names of their tables; under `None` the one of all others."""
        return {group["table"]: group for group in self.param_groups}

    def _note(self, tables: list[Table]) -> None:
        """Remembers the tables of a step, for `zero_grad`; usually the step before had the same."""
        if [reference() for reference in self._stepped] != tables:
            self._seen.update(tables)
            note_stepper(self, tables)
            note_stepped(tables)
            self._stepped = [weakref.ref(table) for table in tables]
            self._followed = None

    def _follow_rates(self, tables: list[Table]) -> None:
        """Brings the learning rates of tables and groups together; mostly they are as the step before left them."""
        # One native call reads the rates of all tables. With this comparison, and tables kept as a list, a step of 26
        # tables takes 85 us less, and one of a single table 5 us more.
        if self._followed == self._rates_now(tables):
            return
        groups = self._groups_by_table()
        self._bring_together([(table, _group_of(table, groups)) for table in tables])
        # Read again, since both sides may just have changed.
        self._followed = self._rates_now(tables)

    def _rates_now(self, tables: list[Table]) -> tuple[list[tuple[float, bool]], list[float]]:
        return learning_rates(tables), rates_of(self.param_groups)

    def _bring_together(self, pairs: list[tuple[Table, dict[str, Any]]]) -> None:
        """Hands the rates of groups on to tables, and theirs to groups; checks all of them before one changes."""
        rates = [(table, rate) for table, group in pairs if (rate := self._rate_for(table, group)) is not None]
        for table, rate in rates:
            check_rate_of_rule(table, rate)
        for table, rate in rates:
            _native.set_optimizer_learning_rate(table.table_id, rate)
        for table, group in pairs:
            if group["table"] is not None and table.table_id not in self._rates:
                group["lr"] = _rate(table)
            self._note_rate(table, rate_of(group))

    def _note_rate(self, table: Table, rate: float) -> None:
        self._rates[table.table_id] = float(rate)
        self._loads[table.table_id] = times_loaded(table)

    def _rate_for(self, table: Table, group: dict[str, Any]) -> float | None:
        """The learning rate that a table is to get, if any: one set by hand wins over the group's."""
        if table.table_id not in self._rates:
            return self._first_rate(table, group)
        # Others may have set it by hand on servers meanwhile: they are asked before it changes.
        is_changed = self._is_changed(table, group, asks=False) and self._is_changed(table, group, asks=True)
        return rate_of(group) if is_changed else None

    def _first_rate(self, table: Table, group: dict[str, Any]) -> float | None:
        """The learning rate that a table is to get when it first meets its group, if any."""
        _, was_set = table.learning_rate(asks=True)
        if was_set:
            return None
        # The group of all tables outlives any of them: a scheduler may have moved its rate before this table's first
        # step.
        is_scheduled = group["table"] is None and rate_of(group) != self._initial_lr
        return rate_of(group) if is_scheduled else self._lr

    def _is_changed(self, table: Table, group: dict[str, Any], asks: bool) -> bool:
        """Whether the group's rate differs from its table's, after taking over a rate set by hand or loaded."""
        last, (current, was_set) = self._rates[table.table_id], table.learning_rate(asks)
        if group["table"] is None:
            return not was_set and rate_of(group) != last
        if current != last and (was_set or self._follows_a_load(table, group)):
            group["lr"] = current
        return rate_of(group) != current

    def _follows_a_load(self, table: Table, group: dict[str, Any]) -> bool:
        """Whether a checkpoint was loaded since the last step, and the group goes on with its learning rate."""
        is_untouched = self._lr is None and rate_of(group) == self._rates[table.table_id]
        return is_untouched and self._loads[table.table_id] != times_loaded(table)


def _group_of(table: Table, groups: dict[str | None, dict[str, Any]]) -> dict[str, Any]:
    group = groups.get(table.name) or groups.get(None)
    if group is None:
        raise ValueError(f'table "{table.name}" is not among the modules of this optimizer')
    return group


def _rate(table: Table) -> float:
    rate, _ = table.learning_rate()
    return rate


def _client_and_modules(first: Any, modules: Any) -> tuple[RecStoreClient | None, list[Tables] | None]:
    """Separates a client from modules given in its place.

    Raises:
        ValueError: modules come twice, or what comes is neither.
    """
    client = first if isinstance(first, RecStoreClient) else None
    if first is not client:
        if modules is not None:
            raise ValueError(f"SparseOptimizer got modules twice: {type(first).__name__} and {type(modules).__name__}")
        modules = first
    if modules is None:
        return client, None
    chosen = _as_list(modules) if isinstance(modules, nn.Module | Table | Iterable) else [modules]
    for each in chosen:
        if not isinstance(each, nn.Module | Table):
            raise ValueError(
                f"SparseOptimizer takes modules and tables, got {type(each).__name__}: give the model itself, and its "
                "parameters outside the tables to an optimizer of torch.optim"
            )
    return client, chosen


def _as_list(modules: nn.Module | Table | Iterable[Tables]) -> list[Tables]:
    return [modules] if isinstance(modules, nn.Module | Table) else list(modules)


def _refuse_without_modules() -> list[Table]:
    raise ValueError("a SparseOptimizer has gradients to scale or clip only with modules at construction")


def _tables_named(modules: list[Tables], name: str) -> list[Table]:
    return [table for table in tables_of(modules) if table.name == name]


def tables_of(modules: list[Tables]) -> list[Table]:
    """The tables of modules and their children, each `Table` once; `modules()` would make the name of each module."""
    found: dict[int, Table] = {}
    seen: set[int] = set()
    waiting: list[Tables | None] = [*reversed(modules)]
    while waiting:
        owner = waiting.pop()
        if owner is None or id(owner) in seen:
            continue
        seen.add(id(owner))
        # A collection names its tables at once, so its modules, one for each, are marked as seen.
        if isinstance(owner, TableCollection):
            found.update((id(table), table) for table in owner.tables())
            seen.add(id(owner._modules["_modules_of_tables"]))
        else:
            table = owner if isinstance(owner, Table) else getattr(owner, "table", None)
            if isinstance(table, Table):
                found[id(table)] = table
        if isinstance(owner, nn.Module):
            # Backwards onto the stack, so that tables come in the order of the modules.
            waiting.extend(reversed(owner._modules.values()))
    return list(found.values())
