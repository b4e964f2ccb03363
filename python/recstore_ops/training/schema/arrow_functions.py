"""The functions of `pyarrow.compute`: most are made when it is imported, where type checkers do not see them."""

from __future__ import annotations

from typing import Any

import pyarrow.compute

pc: Any = pyarrow.compute
