"""How soon a follower sees what is trained, and what that costs trainer and readers.

    python benches/follow_model.py [--rows 1000000] [--dim 64] [--seconds 20] [--http]

The trainer is a process of its own: a table of so many rows and a perceptron. It changes 1 % of the rows per second,
and multiplies matrices in the time that is left: their number says what publishing costs. The follower is this process;
it asks for 128 rows 200 times per second.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import recstore_ops
from recstore_ops import DistEmbedding, FollowingBundle, Publisher, SparseOptimizer
from recstore_ops.ops import operators

IDS_PER_STEP, IDS_PER_CALL, CALLS_PER_SECOND = 100, 128, 200
HIDDEN = 512


class Model(nn.Module):
    """Rows behind a perceptron."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.table = DistEmbedding(None, dim, "followed", optimizer="adagrad")
        self.dense = nn.Sequential(nn.Linear(dim, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def forward(self, ids: Tensor) -> Tensor:
        """Returns logits [B] of ids [B]."""
        return self.dense(self.table(ids)).squeeze(1)


class Trained(NamedTuple):
    """What a trainer did in a time.

    Attributes:
        steps: taken, no more than change 1 % of the rows per second.
        products: of matrices, in the time that was left.
        changed: bytes of the rows that changed with their ids, and of the dense tensors, once an update.
        told: bytes of updates.
    """

    steps: int
    products: int
    changed: int
    told: int


class Trainer:
    """A model in training, in a process of its own."""

    def __init__(self, rows: int, dim: int) -> None:
        torch.set_num_threads(1)
        self.model, self._rows, self._dim = Model(dim), rows, dim
        for ids in torch.arange(rows).split(1 << 16):
            operators.emb_write(self.model.table.table.handle, ids, torch.randn(len(ids), dim))
        self._sparse = SparseOptimizer(lr=0.01, modules=self.model)
        self._dense = torch.optim.SGD(self.model.dense.parameters(), lr=0.01)
        self._other = torch.randn(256, 256)

    def train(self, seconds: float, publisher: Publisher | None) -> Trained:
        """Trains for a time."""
        told, updates = _told(publisher)
        begun, steps, products = time.monotonic(), 0, 0
        a_second = self._rows // 100 // IDS_PER_STEP
        while (elapsed := time.monotonic() - begun) < seconds:
            if steps < elapsed * a_second:
                self._step()
                steps += 1
                if publisher is not None:
                    publisher.step()
            torch.mm(self._other, self._other)
            products += 1
        told_then, updates_then = _told(publisher)
        dense = sum(parameter.nbytes for parameter in self.model.dense.parameters())
        changed = steps * IDS_PER_STEP * (self._dim * 4 + 8) + (updates_then - updates) * dense
        return Trained(steps, products, changed, told_then - told)

    def _step(self) -> None:
        self.model(torch.randint(0, self._rows, (IDS_PER_STEP,))).square().mean().backward()
        for optimizer in (self._sparse, self._dense):
            optimizer.step()
            optimizer.zero_grad()


def _told(publisher: Publisher | None) -> tuple[int, int]:
    """The bytes and the number of the updates so far."""
    if publisher is None:
        return 0, 0
    publisher.update()
    publisher.flush()
    return publisher.bytes_written, publisher.number


def train(asked: Connection, directory: Path, rows: int, dim: int, http: bool) -> None:
    """Answers to a number of seconds with what was trained in so many without publishing, then in as many with it."""
    trainer = Trainer(rows, dim)
    example = (torch.arange(4),)
    recstore_ops.export(trainer.model, example, directory / "bundle")
    news = directory / "news"
    with recstore_ops.publish(trainer.model, example, news, address="127.0.0.1:0" if http else None) as publisher:
        asked.send(publisher.address or news)
        while (seconds := asked.recv()) is not None:
            asked.send((trainer.train(seconds, None), trainer.train(seconds, publisher)))


class Reader:
    """Asks a bundle at a fixed rate, and notes how long it took and when it saw each update."""

    def __init__(self, bundle: FollowingBundle, rows: int) -> None:
        self._bundle, self._rows, self._seen = bundle, rows, bundle.step
        self.seconds: list[float] = []
        self.ages: list[float] = []

    def read(self, seconds: float) -> None:
        """Asks for a time."""
        begun = time.monotonic()
        for call in range(int(seconds * CALLS_PER_SECOND)):
            time.sleep(max(0.0, begun + call / CALLS_PER_SECOND - time.monotonic()))
            ids = torch.randint(0, self._rows, (IDS_PER_CALL,))
            asked = time.perf_counter()
            self._bundle(ids)
            self.seconds.append(time.perf_counter() - asked)
            if self._bundle.step != self._seen:
                self._seen = self._bundle.step
                self.ages.append(self._bundle.age)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--http", action="store_true", help="follow the publisher's address, and not its directory")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    own, others = multiprocessing.get_context("spawn").Pipe()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        trainer = multiprocessing.get_context("spawn").Process(
            target=train, args=(others, path, options.rows, options.dim, options.http)
        )
        trainer.start()
        bundle = recstore_ops.load_bundle(path / "bundle", follow=own.recv())
        assert isinstance(bundle, FollowingBundle)
        compare(bundle, own, options.rows, options.seconds)
        bundle.close()
        own.send(None)
        trainer.join()


def compare(bundle: FollowingBundle, trainer: Connection, rows: int, seconds: float) -> None:
    """Prints what each does alone, and both together."""
    idle, following = Reader(bundle, rows), Reader(bundle, rows)
    trainer.send(seconds)
    idle.read(seconds)
    following.read(seconds)
    alone, beside = trainer.recv()
    ages, steps = sorted(following.ages), beside.steps / seconds
    print(f"{steps:.0f} steps per second, {len(ages) / seconds:.1f} updates seen per second")
    print(f"age when seen: median {1e3 * statistics.median(ages):.0f} ms, p99 {1e3 * quantile(ages, 0.99):.0f} ms")
    print(f"the trainer's other work, over that without publishing: {beside.products / alone.products:.3f}")
    print(f"bytes told over those that changed: {beside.told / beside.changed:.3f}")
    for name, reader in (("idle", idle), ("following", following)):
        p50, p99 = (1e6 * quantile(sorted(reader.seconds), part) for part in (0.5, 0.99))
        print(f"a call, {name}: p50 {p50:.0f} us, p99 {p99:.0f} us")


def quantile(values: Sequence[float], part: float) -> float:
    """The value that a part of sorted ones is not above."""
    return values[min(len(values) - 1, int(part * len(values)))]


if __name__ == "__main__":
    main()
