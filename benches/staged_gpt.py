"""A step of a small GPT on a GPU: without a memory of n-grams, with one, and with one whose rows are staged.

    python -m benches.staged_gpt [--rows 2000000] [--dim 64] [--width 512] [--layers 8] [--length 256] [--texts 32]

They take turns, ten steps at a time; medians over rounds. Losses with staging and without are near each other, not
equal: the sums of torch's kernels depend on the order of threads. tests/python/test_cuda.py compares them to the bit
with those that do not. `--profile` prints what the host does in a few steps with staging.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benches.gpt import Size, Training, texts_of
from recstore_ops import NGramMemory, StagingDataLoader

DEVICE, STEPS, BATCHES, FUNCTIONS, VOCAB, HEADS = "cuda", 10, 16, 4, 8_000, 8
_CHUNK = 262_144

Turn = Callable[[], list[Tensor]]


def main() -> None:
    """Measures and prints."""
    options = _parser().parse_args()
    torch.set_float32_matmul_precision("high")
    size = Size(options.width, options.layers, HEADS, options.length, options.texts, VOCAB)
    print(f"{size.name}, {FUNCTIONS * (options.rows // FUNCTIONS):,} rows of {options.dim}", flush=True)
    without, unstaged, staged = (Training(size, memory, DEVICE) for memory in _memories(size, options))
    batches = [texts_of(size, number).pin_memory() for number in range(BATCHES)]
    turns: dict[str, Turn] = {
        "without memory": _turn(without, batches, is_staged=False),
        "with memory": _turn(unstaged, batches, is_staged=False),
        "with memory, staged": _turn(staged, batches, is_staged=True),
    }
    losses, seconds = _measure(turns, options.rounds)
    base = statistics.median(seconds["without memory"])
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:20} {1e3 * median / STEPS:8.2f} ms a step   {median / base:6.3f} x   loss {losses[name][-1]:.5f}")
    if options.profile:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            turns["with memory, staged"]()
        print(profiled.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"rows": 2_000_000, "dim": 64, "width": 512, "layers": 8, "length": 256, "texts": 32, "rounds": 9}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--profile", action="store_true", help="print what the host does")
    return parser


def _memories(size: Size, options: argparse.Namespace) -> Iterator[NGramMemory | None]:
    yield None
    for name in ("unstaged", "staged"):
        torch.manual_seed(0)
        rows = options.rows // FUNCTIONS
        memory = NGramMemory(size.width, rows, options.dim, name, heads=FUNCTIONS // 2, optimizer="adagrad")
        for ids in torch.arange(FUNCTIONS * rows).split(_CHUNK):
            memory.table.weight[ids] = torch.full((len(ids), options.dim), 0.01)
        yield memory


def _turn(training: Training, batches: list[Tensor], is_staged: bool) -> Turn:
    """Some steps on the batches that come next; returns their losses."""
    following = _forever(batches)

    def turn() -> list[Tensor]:
        chosen = [next(following) for _ in range(STEPS)]
        memory = training.model.memory
        pairs: Iterable[tuple[Tensor, Any]] = ((texts, None) for texts in chosen)
        if is_staged and memory is not None:
            pairs = StagingDataLoader(chosen, memory, DEVICE, features=lambda texts: texts[:, :-1])
        losses = [training.step(texts, rows) for texts, rows in pairs]
        torch.cuda.synchronize()
        return losses

    return turn


def _forever(batches: list[Tensor]) -> Iterator[Tensor]:
    while True:
        yield from batches


def _measure(turns: dict[str, Turn], rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Losses and seconds of each, but for the first two rounds' seconds."""
    losses: dict[str, list[float]] = {name: [] for name in turns}
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 2):
        for name, turn in turns.items():
            start = time.perf_counter()
            found = turn()
            if number >= 2:
                seconds[name].append(time.perf_counter() - start)
            losses[name] += [loss.item() for loss in found]
    return losses, seconds


if __name__ == "__main__":
    main()
