"""Processes that find torch imported, which takes longer than what most of them do: forked from one that has it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

PROCESSES = multiprocessing.get_context("forkserver")
# Optimizers import the second when they are made, and exports the third.
PROCESSES.set_forkserver_preload(["recstore_ops.cli", "torch._dynamo", "torch.export._trace"])

SECONDS = 120


def side_by_side(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What a function of a module returns for each arguments, all called at once, each in a process of its own.

    Raises:
        multiprocessing.TimeoutError: one has not returned after two minutes.
    """
    with PROCESSES.Pool(len(arguments), maxtasksperchild=1) as pool:
        return pool.starmap_async(function, arguments, chunksize=1).get(SECONDS)
