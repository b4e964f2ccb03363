"""Generated files in the format of Criteo's display-advertising data, of any size, with labels that can be learnt.

A line is a label, 13 integers (I1-I13) and 26 categories of 8 hexadecimal digits (C1-C26), tabs between; a missing
value is empty. `criteo_rows` says how they are drawn.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from recstore_ops.config.output_files import replacing
from recstore_ops.config.paths import user_path
from recstore_ops.training.generated.criteo_rows import CHUNK_ROWS, draw_chunk, draw_values

_LOGIT_LIMIT, _LOGIT_BINS = 16, 16_384


@dataclass(frozen=True)
class GeneratedCriteo:
    """What was written, and the figures of the model that drew the labels.

    Attributes:
        num_rows, num_positives: lines, and those with label 1.
        bayes_auc: of the true logits, rounded to 2^-9; NaN where all labels are equal.
        bayes_logloss: of the true logits, nats.
    """

    num_rows: int
    num_positives: int
    bayes_auc: float
    bayes_logloss: float


def write_criteo(
    path: Path | str,
    num_rows: int,
    *,
    seed: int = 0,
    model_seed: int = 0,
    on_rows: Callable[[int], object] | None = None,
) -> GeneratedCriteo:
    """Writes a file of `num_rows` lines, which appears under its name when it is complete.

    Memory does not grow with the number of rows. Equal arguments give equal bytes, and fewer rows the beginning.

    Args:
        path: an existing file is replaced; with the suffix .gz, the file is compressed.
        num_rows: lines.
        seed: of the rows. Training and test rows differ in it.
        model_seed: of what labels depend on. Training and test rows share it.
        on_rows: called with the number of rows just written, after each chunk of at most 2,048, to show progress.

    Raises:
        ValueError: `num_rows` below one.
        OSError: the file cannot be written; nothing is left of it.
    """
    path = Path(user_path(path))
    if num_rows < 1:
        raise ValueError(f"expected at least one row, got {num_rows}")
    if path.is_dir():
        raise IsADirectoryError(f"expected a name for a file, got the directory {path}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {path.parent} for {path.name}")
    values, tally = draw_values(np.random.default_rng(model_seed)), _Tally()
    with _written(path) as file:
        for chunk, start in enumerate(range(0, num_rows, CHUNK_ROWS)):
            # Each chunk has a random stream of its own and is drawn whole, so that fewer rows are the beginning.
            rows = min(CHUNK_ROWS, num_rows - start)
            lines, labels, logits = draw_chunk(values, np.random.default_rng([seed, chunk]))
            file.write(lines[:rows].tobytes().translate(None, b"\0"))
            tally.add(labels[:rows], logits[:rows])
            if on_rows is not None:
                on_rows(rows)
    return tally.figures()


class _Tally:
    """Adds up labels and true logits, in memory that does not grow with them."""

    def __init__(self) -> None:
        self._counts = np.zeros((2, _LOGIT_BINS), dtype=np.int64)
        self._loss = 0.0

    def add(self, labels: NDArray, logits: NDArray) -> None:
        scaled = (logits + _LOGIT_LIMIT) * (_LOGIT_BINS / (2 * _LOGIT_LIMIT))
        bins = np.clip(scaled, 0, _LOGIT_BINS - 1).astype(np.int64)
        self._counts += np.bincount(bins + _LOGIT_BINS * labels, minlength=2 * _LOGIT_BINS).reshape(2, -1)
        self._loss += float(np.logaddexp(0, np.where(labels, -logits, logits)).sum())

    def figures(self) -> GeneratedCriteo:
        negatives, positives = self._counts
        num_negatives, num_positives = int(negatives.sum()), int(positives.sum())
        num_rows, num_pairs = num_negatives + num_positives, num_negatives * num_positives
        # As floats, for the pairs of a few billion rows are more than an int64 holds.
        negatives_below = np.cumsum(negatives) - 0.5 * negatives
        won = float(positives.astype(np.float64) @ negatives_below)
        return GeneratedCriteo(
            num_rows, num_positives, won / num_pairs if num_pairs else float("nan"), self._loss / num_rows
        )


@contextmanager
def _written(path: Path) -> Iterator[BinaryIO | gzip.GzipFile]:
    """Opens a file that takes its place once all is written."""
    with replacing([path]) as (beside,), open(beside, "wb") as file:
        if path.suffix == ".gz":
            # Without name and time, equal rows give equal bytes.
            with gzip.GzipFile("", "wb", compresslevel=1, fileobj=file, mtime=0) as compressed:
                yield compressed
        else:
            yield file
