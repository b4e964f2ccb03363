"""How many examples a property is tried on: all in `make test-all`, fewer before a change, more in `make test-long`."""

import os

from hypothesis import settings

_factor = 10.0 if os.environ.get("RECSTORE_LONG_TESTS") else 1.0


def try_fewer(divisor: int) -> None:
    """Tries a part of them from here on: before a change, and where properties are tried elsewhere too.

    To be called before the test files are imported: they say their numbers there.
    """
    global _factor
    _factor /= divisor
    settings.register_profile("fewer", max_examples=examples(settings().max_examples))
    settings.load_profile("fewer")


def steps(count: int) -> int:
    """Returns how many steps to train side by side where `count` are in a run of all tests; rounding adds up."""
    return min(count, examples(count))


def examples(count: int) -> int:
    """Returns how many examples to try where `count` do in a run of all tests."""
    return max(1, int(count * _factor))
