"""The first call of an operator: it means the store that the configuration file chooses, as the first module does.

Operators find tables by name, or by a handle, which has a name; a program may call one before all else, as one that was
exported does. Until a store was chosen, the operators of `torch.ops.recstore` choose it first. Then they are what they
were, and cost nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from recstore_ops.ops import operators
from recstore_ops.servers.choosing import prepare, was_chosen

_OF_ANY_STORE = (
    "hashtable_release",
    "make_collector",
    "collector_release",
    "collected_tables",
    "clear_grads",
    "unique",
    "merge_gradients",
    "hash_strings",
    "cross_ids",
    "ngram_ids",
    "prefix_ids",
    "bucket_ids",
)
"""The operators that find no table."""

_waiting: list[tuple[Any, Callable[..., Any]]] = []
"""Operators and overloads that choose a store first, with what they call then."""


def choose_at_first_call() -> None:
    """Makes the operators choose a store first, those that find no table aside, until one was chosen."""
    for name in {name.partition(".")[0] for name in operators.NAMES}.difference(_OF_ANY_STORE):
        packet = getattr(torch.ops.recstore, name)
        for called in [packet, *(getattr(packet, overload) for overload in packet.overloads())]:
            _waiting.append((called, called._op))
            # Private in torch: `_op` is the function that an overload, or a packet of them, calls.
            called._op = _choosing_first(called._op)


def _choosing_first(operator: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operator)
    def call(*args: Any, **kwargs: Any) -> Any:
        prepare()
        if was_chosen():
            _wait_no_longer()
        return operator(*args, **kwargs)

    return call


def _wait_no_longer() -> None:
    # Several threads may come here at once.
    with suppress(IndexError):
        while True:
            called, operator = _waiting.pop()
            called._op = operator


__all__ = ["choose_at_first_call"]
