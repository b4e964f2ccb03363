"""Fixtures shared by all tests."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ranks import Ranks, started_ranks

from recstore_ops import cli
from recstore_ops.training import planted_interactions
from recstore_ops.training.formats.libsvm import write_libsvm

_table_numbers = itertools.count()


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
def table_name(request: pytest.FixtureRequest) -> Callable[[], str]:
    """Gives another table name, unique in this process, at each call."""
    return lambda: f"{request.node.name}/{next(_table_numbers)}"


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """The ranks of a job, started once for all tests."""
    with started_ranks() as started:
        yield started


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
def small_files(tmp_path: Path) -> Path:
    """A directory of 1,003 training and 500 test rows."""
    planted = planted_interactions(0, 1003, 500)
    write_libsvm(tmp_path / "train.libfm", planted.train)
    write_libsvm(tmp_path / "test.libfm", planted.test)
    return tmp_path
