"""Fixtures shared by all tests."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

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
