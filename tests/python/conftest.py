"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import own_draws
import plots
import pytest
import tiers
import torch
from examples import try_fewer
from page_commands import Shell
from ranks import Ranks, started_ranks
from runtime_programs import Runtime
from served_tables import ServerProcesses

from recstore_ops import cli, get_kv_client, set_ps_servers, table_names
from recstore_ops.training import planted_interactions
from recstore_ops.training.data.sparse_lines import write_libsvm

pytest_pycollect_makeitem = tiers.check_made

_ORDER_SEED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    tiers.add_option(parser)
    parser.addoption(
        "--served",
        type=int,
        default=0,
        metavar="SHARDS",
        help="open all tables on so many servers (0: in this process)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ORDER_SEED] = tiers.choose_seed(config)
    plots.leave_out()
    config.addinivalue_line("markers", "tier(name): quick, test or all; see tiers.py")
    config.addinivalue_line("markers", "embedded_only(reason): does not hold for tables on servers")
    config.addinivalue_line("markers", "one_server_only(reason): does not hold for tables on several servers")
    if config.getoption("--served"):
        try_fewer(10)
    elif config.getoption("--tier") != tiers.TIERS[-1]:
        try_fewer(5)


def pytest_report_header(config: pytest.Config) -> str:
    return f"order of files: --order-seed={config.stash[_ORDER_SEED]}"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Processes of xdist collect in one order, or none of their tests would run."""
    tiers.give_seed(node, node.config.stash[_ORDER_SEED])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    terminalreporter.write_line(f"order of files: --order-seed={config.stash[_ORDER_SEED]}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers.select(config, items)
    tiers.order(items, config.stash[_ORDER_SEED])


def pytest_runtest_setup(item: pytest.Item) -> None:
    own_draws.begin(item)
    num_shards = int(item.config.getoption("--served") or 0)
    for name, most in (("embedded_only", 0), ("one_server_only", 1)):
        marker = item.get_closest_marker(name)
        if marker is not None and num_shards > most:
            pytest.skip(marker.args[0])


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A compiler that has compiled nothing yet, and keeps no graph for other tests."""
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session", autouse=True)
def _served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """With `--served` tables are opened on servers, each a process, that all tests share."""
    num_shards = request.config.getoption("--served")
    if not num_shards:
        yield
        return
    with ServerProcesses(tmp_path_factory.mktemp("servers"), num_shards) as processes:
        set_ps_servers(processes.addresses)
        yield


@pytest.fixture(scope="module", autouse=True)
def _little_to_search() -> None:
    """Searches for reference cycles, of which tests ask many, leave out what was there before the tests of a file.

    Most of that are torch's functions, which take a quarter of a second each time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def data_root() -> Path:
    """The folder of real data sets that RECSTORE_DATA names; without it the test is skipped."""
    root = os.environ.get("RECSTORE_DATA")
    if root is None:
        pytest.skip("RECSTORE_DATA is not set: no real data sets to test on")
    path = Path(root)
    if not path.is_dir():
        pytest.fail(f"RECSTORE_DATA={root} is not a directory")
    return path


@pytest.fixture
def table_name() -> Callable[[], str]:
    """Gives another table name at each call, the same ones whatever tests ran before."""
    return own_draws.fresh_name


@pytest.fixture
def prefix(table_name: Callable[[], str]) -> str:
    """What the names of a model's tables begin with."""
    return f"{table_name()}/"


@pytest.fixture
def tables_are_dropped() -> Iterator[None]:
    """Drops the tables that a test made."""
    with _without_new_tables():
        yield


@pytest.fixture(scope="module", autouse=True)
def _tables_go_with_their_file() -> Iterator[None]:
    """Files run in any order: one that names a table "user" finds none of another."""
    with _without_new_tables():
        yield


@contextmanager
def _without_new_tables() -> Iterator[None]:
    before = set(table_names())
    yield
    for name in set(table_names()) - before:
        get_kv_client().drop(name)


@pytest.fixture
def fixed_table_name(request: pytest.FixtureRequest) -> Callable[[], str]:
    """Gives the names of tables whose initial rows are known to do.

    An FM of planted pairs ends in a worse place from those of one name in fourteen.
    """
    numbers = itertools.count()
    return lambda: f"{request.node.name}/fixed/{next(numbers)}"


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """The ranks of a job, started once for all tests."""
    with started_ranks() as started:
        yield started


@pytest.fixture(scope="session")
def runtime() -> Runtime:
    """The examples that answer with a bundle without Python."""
    return Runtime()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """Runs the commands of a page; what still runs ends with the test."""
    shell = Shell(tmp_path)
    yield shell
    shell.end()


@pytest.fixture
def recstore(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the command line with these arguments and returns the exit code."""

    def run(*arguments: str | Path) -> int:
        monkeypatch.setattr(sys, "argv", ["recstore", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert isinstance(caught.value.code, int)
        return caught.value.code

    return run


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of this test draw their plots."""
    plots.draw_again(monkeypatch)


@pytest.fixture
def small_files(tmp_path: Path) -> Path:
    """A directory of 1,003 training and 500 test rows."""
    planted = planted_interactions(0, 1003, 500)
    write_libsvm(tmp_path / "train.libfm", planted.train)
    write_libsvm(tmp_path / "test.libfm", planted.test)
    return tmp_path
