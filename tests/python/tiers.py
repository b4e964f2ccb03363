"""Tiers of tests: which of them run when.

`quick` in minutes while one works; `test` before a change goes in; `all` what takes long or needs much of the machine.
A run of a tier runs those before it too. Each file says its tier by `pytestmark`, and a test that takes much longer
than its file its own.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping
from typing import Any, TypeAlias

import pytest

Made: TypeAlias = "pytest.Item | pytest.Collector | list[pytest.Item | pytest.Collector] | None"

TIERS = ("quick", "test", "all")

_SEED = "order_seed"


def add_option(parser: pytest.Parser) -> None:
    """Adds `--tier`, without which all tests run, and `--order-seed`."""
    parser.addoption("--tier", choices=TIERS, default=TIERS[-1], help="run the tests of this tier and those before it")
    parser.addoption("--order-seed", type=int, metavar="SEED", help="put the files in the order of an earlier run")


def choose_seed(config: pytest.Config) -> int:
    """Returns the seed of the order of files, one for all processes of xdist: another one in each run."""
    workers = getattr(config, "workerinput", None)
    if workers is not None:
        return workers[_SEED]
    given = config.getoption("--order-seed")
    return random.SystemRandom().randrange(10**6) if given is None else given


def give_seed(node: Any, seed: int) -> None:
    """Gives the seed to a process of xdist, before it collects tests."""
    node.workerinput[_SEED] = seed


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is of a later tier than the one asked for."""
    last = TIERS.index(config.getoption("--tier"))
    too_late = [item for item in items if TIERS.index(tier_of(item)) > last]
    if too_late:
        config.hook.pytest_deselected(items=too_late)
        items[:] = [item for item in items if TIERS.index(tier_of(item)) <= last]


def cells(table: Mapping[str, Any], *before_a_change: str) -> list[Any]:
    """The values of a table as parameters of a test; all but the named ones run in `make test-all` only."""
    unknown = set(before_a_change) - table.keys()
    if unknown:
        raise ValueError(f"there is no {unknown}")
    return [
        pytest.param(value, id=name, marks=() if name in before_a_change else pytest.mark.tier("all"))
        for name, value in table.items()
    ]


@pytest.hookimpl(wrapper=True)
def check_made() -> Generator[None, Made, Made]:
    """Looks at each test and class where it is collected: an error is told from there by every process of xdist."""
    made = yield
    for node in made if isinstance(made, list) else [made]:
        if isinstance(node, (pytest.Item, pytest.Collector)):
            tier_of(node)
    return made


LONGEST = (
    *(
        "runtime_graphs",
        "train_resume",
        "follow_files",
        "embedding_bag_collection",
        "servers_soak",
        "exported_runs",
        "train_command",
    ),
    *("train_on_ranks", "formats_text", "compile", "serve_directories", "determinism", "train_with_servers"),
    *("init_from", "lifecycle", "parity", "row_groups", "following", "ray", "first_calls", "training_figures"),
    *("datasets", "store_model", "operations_page", "servers", "torch_options", "replicas", "run_directory", "docs"),
    *("row_dataset", "sharded_modules", "accumulation", "two_tower_runs", "row_types", "finished_run", "fork"),
    *("checkpoint", "benches", "activation_checkpointing", "transfer", "foreign_handles", "config_mutations"),
    *("unlinked_files", "planted_retrieval", "serve_model"),
)
"""The files that take longest, by their names without `test_`, the longest first."""

CLASS_SIZE = 10


def order(items: list[pytest.Item], seed: int) -> None:
    """Shuffles files, but for their class of length: were a long one the last, other processes would wait for it."""
    classes = {f"test_{name}": place // CLASS_SIZE for place, name in enumerate(LONGEST)}
    files = sorted({item.path.stem for item in items})
    random.Random(seed).shuffle(files)
    files.sort(key=lambda file: classes.get(file, len(LONGEST)))
    places = {file: place for place, file in enumerate(files)}
    items.sort(key=lambda item: places[item.path.stem])


def tier_of(item: pytest.Item | pytest.Collector) -> str:
    """The tier of a test: its own, or its file's.

    Raises:
        pytest.Collector.CollectError: its file does not say its one tier, or there is no such tier.
    """
    module = item.getparent(pytest.Module)
    of_file = [] if module is None else [mark for mark in module.own_markers if mark.name == "tier"]
    if len(of_file) != 1:
        raise pytest.Collector.CollectError(
            f"{item.nodeid}: its file must say one tier by pytestmark, it says {len(of_file)}"
        )
    mark = item.get_closest_marker("tier")
    assert mark is not None, "its file has one"
    if mark.args not in {(tier,) for tier in TIERS}:
        raise pytest.Collector.CollectError(f"{item.nodeid}: its tier must be one of {TIERS}, it says {mark.args}")
    return mark.args[0]
