"""How many examples a property is tried on: more in `make test-long`, which sets RECSTORE_LONG_TESTS."""

import os

_factor = 10.0 if os.environ.get("RECSTORE_LONG_TESTS") else 1.0


def try_fewer() -> None:
    """Tries a tenth: of properties that are tried elsewhere too, where each example takes long."""
    global _factor
    _factor /= 10


def examples(count: int) -> int:
    """Returns how many examples to try where `count` do in everyday runs."""
    return max(1, int(count * _factor))
