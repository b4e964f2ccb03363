"""`is_finite` beside a look at each value."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recstore_ops.table.checks import is_finite

pytestmark = pytest.mark.tier("quick")

SPECIAL = [0.0, -1.5, 3.4e38, -3.4e38, float("inf"), -float("inf"), float("nan")]


@given(st.lists(st.sampled_from(SPECIAL), max_size=9))
def test_it_is_what_a_look_at_each_value_gives(values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    assert is_finite(tensor) is bool(tensor.isfinite().all())
