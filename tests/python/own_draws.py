"""What a test draws follows from its own id: the names of its tables, and so their initial rows, and its seeds.

Neither depends on which tests ran before it.
"""

from __future__ import annotations

import itertools
import random
import zlib

import numpy as np
import pytest
import torch

_test = "no test"
_numbers = itertools.count()


def begin(item: pytest.Item) -> None:
    """Begins a test: its names and its seeds are those of its id."""
    global _test, _numbers
    _test, _numbers = f"{item.path.stem.removeprefix('test_')}/{item.name}", itertools.count()
    seed = zlib.crc32(_test.encode())
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def fresh_name() -> str:
    """Returns another name at each call; no other test has it."""
    return f"{_test}/{next(_numbers)}"
