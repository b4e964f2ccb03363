"""Tables sharded over two ranks of a thread each, beside one process with two threads, and TorchRec."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from statistics import median

from benches.cells.sharded_process import STORE
from benches.cells.stage import Stage
from benches.competitors import sharded_torchrec
from benches.measured import Figure
from benches.scale import Scale

CELL = "sharding"

_ROWS, _BATCH, _STEPS, _ROUNDS = 1_000_000, 8_192, 50, 3
_ROOT = Path(__file__).resolve().parents[2]


def stages(scale: Scale, chosen: Collection[str]) -> list[Stage]:
    """One stage."""
    if CELL not in chosen:
        return []
    title = f"4 tables of {_ROWS:,} rows of 64, batches of {_BATCH:,}, on two ranks"
    return [Stage(CELL, title, 1, lambda: _figures(scale))]


def _figures(scale: Scale) -> Iterator[Figure]:
    sizes = [scale.of(_ROWS), scale.of(_BATCH), min(_STEPS, max(4, scale.of(_STEPS)))]
    ways = sharded_torchrec.WAYS if sharded_torchrec.is_installed() else ()
    # What a process gets of the system's memory at each step differs from process to process.
    rounds = [
        (
            _measured(1, sizes),
            _measured(2, sizes),
            _measured(2, sizes, STORE),
            *(_measured(2, sizes, way) for way in ways),
        )
        for _ in range(_ROUNDS)
    ]
    of_shards, of_alone = (median(of[2]["plain"] / of[other]["plain"] for of in rounds) for other in (1, 0))
    alone, ranks, store, *torchrec = (_medians(of_rounds) for of_rounds in zip(*rounds, strict=True))
    yield Figure(CELL, "a step in one process of two threads", 1e3 * alone["plain"], "ms")
    yield Figure(CELL, "a step on two ranks of one thread", 1e3 * ranks["plain"], "ms")
    yield Figure(CELL, "a step on two ranks, exchanged ahead", 1e3 * ranks["ahead"], "ms")
    yield Figure(CELL, "a step on two ranks through one store", 1e3 * store["plain"], "ms")
    yield Figure(CELL, "the same over a step on two ranks", of_shards, "x", "<= 0.8")
    yield Figure(CELL, "the same over a step in one process", of_alone, "x", "<= 1.1")
    yield Figure(CELL, "communication exposed in a step", 1e3 * ranks["plain exposed"], "ms")
    yield Figure(CELL, "communication exposed in a step, exchanged ahead", 1e3 * ranks["ahead exposed"], "ms")
    for name, what in (("plain", ""), ("ahead", ", exchanged ahead")):
        seconds, exposed = ranks[f"{name} over a network"], ranks[f"{name} over a network exposed"]
        yield Figure(CELL, f"a step as over a network of 1 Gbit/s{what}", 1e3 * seconds, "ms")
        yield Figure(CELL, f"communication exposed in a step as over a network of 1 Gbit/s{what}", 1e3 * exposed, "ms")
    for way, found in zip(ways, torchrec, strict=True):
        yield Figure(CELL, f"a step of TorchRec on two ranks, {way}", 1e3 * found["plain"], "ms")
    yield Figure(CELL, "bytes sent over the fewest possible", ranks["bytes over minimum"], "x", "<= 1.05")


def _medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: median(found[name] for found in rounds) for name in rounds[0]}


def _measured(world: int, sizes: list[int], *way: str) -> dict[str, float]:
    """What the processes of a job measured.

    Raises:
        RuntimeError: they failed.
    """
    program = ["-m", "benches.cells.sharded_process", *map(str, sizes), *way]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": str(2 // world)}
    done = subprocess.run(
        [sys.executable, *launcher, *program], cwd=_ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"{world} ranks failed: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])
