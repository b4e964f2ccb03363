"""What the programs of this folder share: they begin without tables, and without the warnings of trainers."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from recstore_ops import get_kv_client, table_names

# Of the trainers themselves, on a small machine and with this release of torch.
_IGNORED = (
    "ignore:.*does not have many workers",
    "ignore:.*LeafSpec",
    "ignore:.*torch.jit.script:DeprecationWarning",
    "ignore::UserWarning:lightning",
    "ignore::UserWarning:accelerate",
)


def pytest_configure(config: pytest.Config) -> None:
    for each in _IGNORED:
        config.addinivalue_line("filterwarnings", each)


def drop_tables() -> None:
    """Drops all tables, as the end of a process does."""
    gc.collect()  # Trainers and their callbacks hold models in circles.
    for name in table_names():
        get_kv_client().drop(name)


@pytest.fixture(autouse=True)
def _without_tables() -> Iterator[None]:
    drop_tables()
    yield
    drop_tables()
