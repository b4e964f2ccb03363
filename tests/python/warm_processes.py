"""Processes that find torch imported, which takes longer than what most of them do: forked from one that has it."""

from __future__ import annotations

import multiprocessing

PROCESSES = multiprocessing.get_context("forkserver")
# Optimizers import the second when they are made.
PROCESSES.set_forkserver_preload(["recstore_ops.cli", "torch._dynamo"])
