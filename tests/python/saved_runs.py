"""Runs of `recstore train` in processes of their own, which can be killed, and what such a run leaves."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import plots
import torch
from warm_processes import PROCESSES

from recstore_ops import checkpoint, cli
from recstore_ops.training.run import loop

# What is measured and not computed.
_MEASURED = ("seconds", "train_seconds", "rows_per_second", "train_rows_per_second", "table_bytes", "process_bytes")


@dataclass(frozen=True)
class Signals:
    """Signals that a process sends to itself right before one of its steps."""

    step: int
    numbers: tuple[int, ...] = (signal.SIGKILL,)


def run_train(
    folder: Path,
    options: Sequence[object],
    signals: Signals | None = None,
    largest_file: int | None = None,
) -> tuple[int | None, str]:
    """Runs the command within `folder`; returns the exit code and what it wrote to the standard error.

    Args:
        signals: that the run is to get.
        largest_file: bytes; a file that would become larger cannot be written.
    """
    texts = [str(option) for option in options]
    process = PROCESSES.Process(target=_train, args=(folder, texts, signals, largest_file))
    process.start()
    process.join(120)
    assert not process.is_alive(), "the run does not end"
    return process.exitcode, (folder / "stderr").read_text()


def _train(folder: Path, options: list[str], signals: Signals | None, largest_file: int | None) -> None:
    os.chdir(folder)
    # Whoever runs the tests in the background ignores it, and what is ignored stays so.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    torch.set_num_threads(1)
    plots.leave_out_all()
    if signals is not None:
        loop._take_step = _signalled(loop._take_step, signals)
    sys.argv = ["recstore", "train", *options]
    cli.main()


def _signalled(take_step: Callable[..., float], signals: Signals) -> Callable[..., float]:
    steps = 0

    def step(*arguments: Any) -> float:
        nonlocal steps
        steps += 1
        if steps == signals.step:
            for number in signals.numbers:
                os.kill(os.getpid(), number)
        return take_step(*arguments)

    return step


def rows_of(path: Path) -> dict[str, dict[str, bytes]]:
    """The rows of a checkpoint directory's newest snapshot: of each table each tensor, by ascending ids, as bytes."""
    copy = path.with_name(f"{path.name}-copy")
    process = PROCESSES.Process(target=_copy, args=(path, copy))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    # A name begins with that of the snapshot.
    return {file.name.split("-", 1)[1]: _tensors(file) for file in copy.glob("*.safetensors")}


def _copy(source: Path, target: Path) -> None:
    checkpoint.load(source)
    checkpoint.save(target, replace=True)


def _tensors(file: Path) -> dict[str, bytes]:
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = {name: entry for name, entry in json.loads(content[8:start]).items() if name != "__metadata__"}
    tensors = {}
    for name, entry in header.items():
        begin, end = (start + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(content[begin:end], np.uint8)
    order = np.argsort(tensors["ids"].view(np.int64))

    def in_order(name: str, tensor: np.ndarray) -> bytes:
        is_about_table = name.startswith(("admission.", "eviction."))
        return tensor.tobytes() if is_about_table else tensor.reshape(len(order), -1)[order].tobytes()

    return {name: in_order(name, tensor) for name, tensor in tensors.items()}


def state_of(path: Path) -> dict[str, Any]:
    """What the newest snapshot of a checkpoint directory holds besides tables, but for what was measured."""
    snapshot = json.loads((path / "manifest.json").read_text())["snapshots"][-1]
    state = torch.load(path / snapshot["metadata"]["dense"], weights_only=True)
    return {name: state[name] for name in ("model", "optimizers", "random", "schedule", "stopping", "step", "epoch")}


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, but for what was measured."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name not in _MEASURED} for line in lines]
