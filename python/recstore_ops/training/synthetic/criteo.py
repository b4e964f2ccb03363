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

from recstore_ops.config.paths import replacing, user_path
from recstore_ops.training.synthetic.planted import sum_of_pairs

# Rows like those of Criteo's display-advertising data, drawn with labels that can be learnt.
#
# Shares of missing values, numbers of values and the weight of the most frequent ones are like those of the original;
# fields are independent of each other. Labels are drawn with the log-odds
#
#     logit = -1.45 + sum over all fields of an effect + sum over pairs of six small fields of <v, v'>
#
# where every category has an effect of its own, 0.2 N(0, 1), and a v of two columns, 0.5 N(0, 1); an integer's effect
# is a multiple of its logarithm, and being missing has an effect too. All are centred over the values of their field,
# so that the mean logit is -1.45 whatever is drawn, and about a quarter of the labels is 1.
#
# Shapes: B rows of a chunk, F fields, V values of all fields together, K columns of v.

CHUNK_ROWS = 2_048
"""B, small enough for a chunk to stay in the processor's cache."""

_BIAS = -1.45
_EFFECT_STD = 0.2
_FACTOR_STD = 0.5
_FACTOR_RANK = 2
_HEX_PAIRS = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), dtype="<u2")


@dataclass(frozen=True)
class _Field:
    """How often values of a field are missing, how many there are, and how much the frequent ones dominate.

    Values are numbered from 1 by frequency, and 0 is missing. Uniform x gives floor((num_values + 1) ^ (x ^ skew)):
    with skew 1, Zipf's law, for then value r has probability log(1 + 1 / r) / log(num_values + 1).
    """

    name: str
    missing: float
    num_values: int
    skew: float

    def probabilities(self) -> NDArray:
        """The probability of a missing value, and of each value: [num_values + 1]."""
        bounds = np.log(np.arange(1, self.num_values + 2)) / np.log(self.num_values + 1)
        return np.concatenate([[self.missing], (1 - self.missing) * np.diff(bounds ** (1 / self.skew))])


_INTEGER_FIELDS = (
    _Field("I1", 0.45, 1_500, 4),
    _Field("I2", 0.0, 20_000, 3),
    _Field("I3", 0.21, 30_000, 3),
    _Field("I4", 0.22, 500, 2),
    _Field("I5", 0.03, 100_000, 0.5),
    _Field("I6", 0.22, 20_000, 1),
    _Field("I7", 0.04, 5_000, 4),
    _Field("I8", 0.001, 1_000, 2),
    _Field("I9", 0.04, 6_000, 1),
    _Field("I10", 0.45, 8, 2),
    _Field("I11", 0.04, 150, 3),
    _Field("I12", 0.77, 400, 6),
    _Field("I13", 0.22, 1_500, 2),
)
_CATEGORY_FIELDS = (
    _Field("C1", 0.0, 1_400, 4),
    _Field("C2", 0.0, 560, 1),
    _Field("C3", 0.034, 400_000, 1),
    _Field("C4", 0.034, 180_000, 1),
    _Field("C5", 0.0, 300, 4),
    _Field("C6", 0.12, 20, 2),
    _Field("C7", 0.0, 12_000, 0.5),
    _Field("C8", 0.0, 600, 4),
    _Field("C9", 0.0, 3, 6),
    _Field("C10", 0.0, 70_000, 2),
    _Field("C11", 0.0, 5_500, 0.5),
    _Field("C12", 0.034, 350_000, 1),
    _Field("C13", 0.0, 3_100, 0.5),
    _Field("C14", 0.0, 26, 1),
    _Field("C15", 0.0, 13_000, 0.5),
    _Field("C16", 0.034, 250_000, 1),
    _Field("C17", 0.0, 10, 1),
    _Field("C18", 0.0, 5_000, 1),
    _Field("C19", 0.44, 2_000, 4),
    _Field("C20", 0.44, 3, 1),
    _Field("C21", 0.034, 300_000, 1),
    _Field("C22", 0.76, 16, 2),
    _Field("C23", 0.0, 15, 1),
    _Field("C24", 0.034, 90_000, 1),
    _Field("C25", 0.44, 90, 1),
    _Field("C26", 0.44, 50_000, 1),
)
_PAIRED_FIELDS = ("C2", "C5", "C6", "C8", "C14", "C17")
_FIELDS = _INTEGER_FIELDS + _CATEGORY_FIELDS
_MISSING, _NUM_VALUES, _SKEW = np.array([[f.missing, f.num_values, f.skew] for f in _FIELDS]).T[:, :, None]
_PAIRED_PLACES = [place for place, field in enumerate(_FIELDS) if field.name in _PAIRED_FIELDS]
_FIRST_ROW = np.cumsum([0] + [field.num_values + 1 for field in _FIELDS[:-1]])[:, None]
_LINE = np.dtype([("label", "u1"), ("fields", np.dtype([("tab", "u1"), ("text", "<u8")]), len(_FIELDS)), ("end", "u1")])


@dataclass(frozen=True)
class Values:
    """The values of all fields, one field's after the other's, each field's missing one first: V together.

    Attributes:
        texts: uint64 [V], up to 8 characters and zeros behind them.
        effects: float32 [V], what they add to the logit.
        factors: float32 [values of the field, K] of each of `_PAIRED_FIELDS`.
    """

    texts: NDArray
    effects: NDArray
    factors: list[NDArray]


def draw_values(rng: np.random.Generator) -> Values:
    """Draws what labels depend on; the texts are always the same."""
    texts = [_integer_texts(field) for field in _INTEGER_FIELDS]
    texts += [_category_texts(number, field) for number, field in enumerate(_CATEGORY_FIELDS, start=1)]
    effects = [_integer_effects(rng, field) for field in _INTEGER_FIELDS]
    effects += [_normal(rng, _EFFECT_STD, field, 1)[:, 0] for field in _CATEGORY_FIELDS]
    factors = [_normal(rng, _FACTOR_STD, _FIELDS[place], _FACTOR_RANK) for place in _PAIRED_PLACES]
    return Values(np.concatenate(texts), np.concatenate(effects), factors)


def _integer_texts(field: _Field) -> NDArray:
    # Only I2 is negative at times; its most frequent value is -1.
    first = -1 if field.name == "I2" else 0
    texts = np.arange(first - 1, first + field.num_values).astype("S8").view("<u8")
    texts[0] = 0
    return texts


def _category_texts(number: int, field: _Field) -> NDArray:
    hashes = _scattered(np.arange(field.num_values + 1, dtype=np.uint32) | np.uint32(number << 24))
    texts = _HEX_PAIRS[hashes.astype(">u4").view("u1")].view("<u8")
    texts[0] = 0
    return texts


def _integer_effects(rng: np.random.Generator, field: _Field) -> NDArray:
    slope, of_missing = rng.standard_normal(2)
    # Up to the largest value, the logarithm grows by about three standard deviations.
    effects = 3 * _EFFECT_STD * slope * np.log(np.arange(field.num_values + 1) + 1.0) / np.log(field.num_values + 1)
    effects[0] = _EFFECT_STD * of_missing
    return _centred(effects, field)


def _normal(rng: np.random.Generator, std: float, field: _Field, columns: int) -> NDArray:
    return _centred(std * rng.standard_normal((field.num_values + 1, columns)), field)


def _centred(addends: NDArray, field: _Field) -> NDArray:
    """Addends by value less their expectation, so that the field leaves the mean logit as it is."""
    return (addends - field.probabilities() @ addends).astype(np.float32)


def _scattered(numbers: NDArray) -> NDArray:
    """Distinct uint32 of distinct uint32, all bits mixed (the finalizer of MurmurHash3)."""
    numbers = (numbers ^ (numbers >> 16)) * np.uint32(0x85EBCA6B)
    numbers = (numbers ^ (numbers >> 13)) * np.uint32(0xC2B2AE35)
    return numbers ^ (numbers >> 16)


def draw_chunk(values: Values, rng: np.random.Generator) -> tuple[NDArray, NDArray, NDArray]:
    """Draws a chunk: its lines, structured and padded with zero bytes, labels and true logits, [B] each."""
    numbers_FB = _draw_numbers(rng)
    rows_FB = numbers_FB + _FIRST_ROW
    paired_BK = [factors[numbers_FB[place]] for place, factors in zip(_PAIRED_PLACES, values.factors, strict=True)]
    logits_B = _BIAS + values.effects[rows_FB].sum(0) + sum_of_pairs(np.stack(paired_BK, axis=1))
    labels_B = rng.random(CHUNK_ROWS) < 1 / (1 + np.exp(-logits_B))
    lines_B = np.empty(CHUNK_ROWS, dtype=_LINE)
    lines_B["label"] = ord("0") + labels_B
    lines_B["fields"]["tab"] = ord("\t")
    lines_B["fields"]["text"] = values.texts[rows_FB].T
    lines_B["end"] = ord("\n")
    return lines_B, labels_B, logits_B


def _draw_numbers(rng: np.random.Generator) -> NDArray:
    """The number of each field's value, 0 for missing: int64 [F, B]."""
    uniform_FB = rng.random((len(_FIELDS), CHUNK_ROWS))
    x_FB = np.maximum(uniform_FB - _MISSING, 0) / (1 - _MISSING)
    numbers_FB = np.exp(np.log(_NUM_VALUES + 1) * x_FB**_SKEW)
    # Rounding can carry the largest x to the number after the last.
    return np.minimum(numbers_FB, _NUM_VALUES).astype(np.int64) * (uniform_FB >= _MISSING)


_LOGIT_LIMIT, _LOGIT_BINS = 16, 16_384


@dataclass(frozen=True)
class GeneratedCriteo:
    """The size of a written file, and the figures of the model that drew the labels.

    Attributes:
        num_rows, num_positives: lines, and those with label 1.
        bayes_auc: of the true logits, rounded to 2^-9; NaN if all labels are equal.
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
