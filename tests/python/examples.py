"""How many examples a property is tried on: more in `make test-long`, which sets RECSTORE_LONG_TESTS."""

import os

_FACTOR = 10 if os.environ.get("RECSTORE_LONG_TESTS") else 1


def examples(count: int) -> int:
    """Returns how many examples to try where `count` do in everyday runs."""
    return count * _FACTOR
