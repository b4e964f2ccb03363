"""Two builds of this package in one run: does a change cost anything?

    python benches/versus.py OLD NEW [--only step,one_id] [--rounds 60]

OLD and NEW are folders that hold a package `recstore_ops` with its native module, such as `python` of two checkouts.
Each runs in a process of its own; they take turns, cell by cell and round by round, so that slow moments hit both. The
figure is the median of the rounds' ratios, new over old: below 1 is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ROWS, _DIM, _BATCH = 1_000_000, 64, 65_536
_TABLES, _TABLE_ROWS, _TABLE_DIM, _BAGS = 26, 20_000, 16, 2_048
_STEP_OF_SERVERS = 256

Round = Callable[[], object]


def main() -> None:
    """Measures, or is one of the two sides."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--only", default=",".join(CELLS), help="the cells, separated by commas")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        return _be_a_side(options.side, options.threads)
    cells = options.only.split(",")
    unknown = [cell for cell in cells if cell not in CELLS]
    if unknown:
        parser.error(f"there is no cell {unknown[0]}: choose from {', '.join(CELLS)}")
    sides = [_Side(folder, options) for folder in (options.old, options.new)]
    print("| cell | old, µs | new, µs | new over old |\n|---|---|---|---|")
    for cell in cells:
        _report(cell, sides, options.rounds)
    for side in sides:
        side.end()


def _report(cell: str, sides: list[_Side], rounds: int) -> None:
    for side in sides:
        side.ask(cell)
    taken: list[list[float]] = [[], []]
    for number in range(rounds):
        # Whoever comes second finds warmer caches: they change places.
        order = (0, 1) if number % 2 else (1, 0)
        for place in order:
            taken[place].append(sides[place].ask("round"))
    ratio = statistics.median(new / old for old, new in zip(*taken, strict=True))
    old, new = (statistics.median(side) / 1e3 for side in taken)
    print(f"| {cell} | {old:,.1f} | {new:,.1f} | {ratio:.3f} |", flush=True)


class _Side:
    """A process that runs one of the builds."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "-", "-", "--side", str(folder), "--threads", str(options.threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, word: str) -> float:
        """Sends a word and returns the nanoseconds that come back."""
        assert self._process.stdin
        assert self._process.stdout
        print(word, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"versus: a side ended at {word}")
        return float(json.loads(line))

    def end(self) -> None:
        """Ends the process."""
        self._process.communicate()


def _be_a_side(folder: Path, threads: int) -> None:
    sys.path.insert(0, str(folder))
    import torch

    import recstore_ops

    assert Path(str(recstore_ops.__file__)).is_relative_to(folder.resolve()), recstore_ops.__file__
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    round_of_cell: Round = int
    for line in sys.stdin:
        word = line.strip()
        if word == "round":
            start = time.perf_counter_ns()
            round_of_cell()
            print(json.dumps(time.perf_counter_ns() - start), flush=True)
        else:
            round_of_cell = CELLS[word]()
            for _ in range(3):
                round_of_cell()
            print(0, flush=True)


def _one_id() -> Round:
    """2,000 calls of `emb_read` with one id."""
    import torch

    from recstore_ops import DistEmbedding

    module = DistEmbedding(1_000, _DIM, "one_id", optimizer="adagrad")
    ids = torch.tensor([7])
    handle, read = module.table.handle, torch.ops.recstore.emb_read.table

    def round_() -> None:
        assert module is not None  # A handle is good as long as its module.
        for _ in range(2_000):
            read(handle, ids, _DIM)

    return round_


def _table(name: str, batch: int, optimizer: str) -> Round:
    import torch

    from recstore_ops import DistEmbedding, SparseOptimizer

    table = DistEmbedding(_ROWS, _DIM, name, optimizer={"kind": optimizer, "lr": 0.01})
    _fill(table)
    steps = SparseOptimizer(modules=[table])
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(_ROWS, (batch,), generator=generator) for _ in range(8)]
    grad = torch.randn(batch, _DIM, generator=generator)
    turn = iter(range(1 << 40))
    calls = max(1, _BATCH // batch)

    def round_() -> None:
        for _ in range(calls):
            table(batches[next(turn) % len(batches)]).backward(grad)
            steps.step()

    return round_


def _fill(table: Any) -> None:
    import torch

    with torch.no_grad():
        for ids in torch.arange(_ROWS).split(_BATCH):
            table.weight[ids] = torch.randn(len(ids), _DIM)


def _lookup() -> Round:
    import torch

    from recstore_ops import DistEmbedding

    table = DistEmbedding(_ROWS, _DIM, "lookup", optimizer="sgd")
    _fill(table)
    batches = [torch.randint(_ROWS, (_BATCH,)) for _ in range(8)]
    turn = iter(range(1 << 40))

    def round_() -> None:
        with torch.no_grad():
            table(batches[next(turn) % len(batches)])

    return round_


def _collection(name: str) -> Round:
    import torch

    from recstore_ops import RecStoreEmbeddingBagCollection, SparseOptimizer

    names = [f"{name}{number}" for number in range(_TABLES)]
    configs = [
        {"name": table, "num_embeddings": _TABLE_ROWS, "embedding_dim": _TABLE_DIM, "feature_names": [table]}
        for table in names
    ]
    bags = RecStoreEmbeddingBagCollection(configs, optimizer={"kind": "adagrad", "lr": 0.01})
    steps = SparseOptimizer(modules=[bags])
    count = _STEP_OF_SERVERS if name == "served" else _BAGS
    values = torch.randint(_TABLE_ROWS, (_TABLES * count,))
    lengths = torch.ones(_TABLES * count, dtype=torch.int64)

    class Features:
        """The fields of a keyed jagged tensor."""

        def keys(self) -> list[str]:
            return names

        def values(self) -> torch.Tensor:
            return values

        def lengths(self) -> torch.Tensor:
            return lengths

        def offsets(self) -> torch.Tensor:
            return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])

        def weights_or_none(self) -> None:
            return None

    features = Features()

    def round_() -> None:
        for _ in range(10):
            bags(features).sum().backward()
            steps.step()

    return round_


def _served() -> Round:
    """A step of 26 tables on two servers, which run the same build."""
    import atexit

    import recstore_ops

    port = 21_000 + 2 * (os.getpid() % 2_500)
    servers = [{"host": "127.0.0.1", "port": port + shard, "shard": shard} for shard in (0, 1)]
    config = Path(tempfile.mkdtemp()) / "recstore_config.json"
    config.write_text(json.dumps({"cache_ps": {"servers": servers}}))
    environment = {**os.environ, "PYTHONPATH": str(Path(str(recstore_ops.__file__)).parent.parent)}
    command = [sys.executable, "-m", "recstore_ops.cli", "serve", "--config", str(config)]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    atexit.register(server.kill)
    assert server.stdout
    for _ in servers:
        server.stdout.readline()
    recstore_ops.set_ps_servers([f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"])
    return _collection("served")


CELLS: dict[str, Callable[[], Round]] = {
    "one_id": _one_id,
    "lookup": _lookup,
    "step_adagrad": lambda: _table("adagrad", _BATCH, "adagrad"),
    "step_adam": lambda: _table("adam", _BATCH, "adam"),
    "step_sgd_1024": lambda: _table("sgd", 1_024, "sgd"),
    "collection": lambda: _collection("bags"),
    "served": _served,
}

if __name__ == "__main__":
    main()
