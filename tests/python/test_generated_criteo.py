"""Generated Criteo files: their format, their statistics, their labels, and what an interruption leaves."""

from __future__ import annotations

import gzip
import math
import re
from collections import Counter
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from recstore_ops.training.metrics.classification import auc, logloss
from recstore_ops.training.synthetic.criteo import GeneratedCriteo, draw_values, write_criteo

pytestmark = pytest.mark.tier("quick")

ROWS = 30_000
NAMES = [f"I{number}" for number in range(1, 14)] + [f"C{number}" for number in range(1, 27)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GeneratedCriteo]:
    path = tmp_path_factory.mktemp("criteo") / "train.tsv"
    return path, write_criteo(path, ROWS)


@pytest.fixture(scope="module")
def lines(written: tuple[Path, GeneratedCriteo]) -> list[list[str]]:
    text = written[0].read_text(encoding="ascii")
    assert text.endswith("\n")
    return [line.split("\t") for line in text.removesuffix("\n").split("\n")]


def column(lines: list[list[str]], name: str) -> list[str]:
    return [line[1 + NAMES.index(name)] for line in lines]


class TestFormat:
    def test_lines_are_those_of_criteo(self, lines: list[list[str]]) -> None:
        assert len(lines) == ROWS
        assert {len(line) for line in lines} == {40}
        assert {line[0] for line in lines} == {"0", "1"}
        for line in lines:
            assert all(re.fullmatch(r"(-?[0-9]{1,6})?", cell) for cell in line[1:14])
            assert all(re.fullmatch(r"([0-9a-f]{8})?", cell) for cell in line[14:])

    def test_categories_are_numbers_scattered_over_32_bits(self, lines: list[list[str]]) -> None:
        assert set(column(lines, "C6")) - {""} == {f"{murmur3_finalizer(6 << 24 | n):08x}" for n in range(1, 21)}
        first_digits = Counter(cell[0] for cell in set(column(lines, "C3")) if cell)
        assert len(first_digits) == 16
        assert max(first_digits.values()) < 1.2 * min(first_digits.values())

    def test_no_two_fields_share_a_category(self) -> None:
        texts = draw_values(np.random.default_rng(0)).texts[sum(INTEGER_VALUES) + 13 :]
        present = texts[texts != 0]
        assert present.size > 1_500_000
        assert np.unique(present).size == present.size


class TestStatistics:
    @pytest.mark.parametrize(
        ("name", "share"),
        [("I1", 0.45), ("I2", 0), ("I5", 0.03), ("I12", 0.77), ("C1", 0), ("C3", 0.034), ("C6", 0.12), ("C22", 0.76)],
    )
    def test_missing_share(self, lines: list[list[str]], name: str, share: float) -> None:
        five_sigma = 5 * math.sqrt(share * (1 - share) / ROWS)
        assert column(lines, name).count("") / ROWS == pytest.approx(share, abs=five_sigma)

    def test_a_quarter_is_positive(self, written: tuple[Path, GeneratedCriteo], lines: list[list[str]]) -> None:
        positives = sum(line[0] == "1" for line in lines)
        assert written[1].num_positives == positives
        assert positives / ROWS == pytest.approx(0.25, abs=0.015)

    @pytest.mark.parametrize(("name", "values"), [("C6", 20), ("C9", 3), ("C17", 10), ("C20", 3), ("C23", 15)])
    def test_small_vocabularies_are_complete(self, lines: list[list[str]], name: str, values: int) -> None:
        assert len(set(column(lines, name)) - {""}) == values

    @pytest.mark.parametrize("name", ["C3", "C12", "C16", "C21"])
    def test_large_vocabularies_are_mostly_seen_once(self, lines: list[list[str]], name: str) -> None:
        counts = Counter(column(lines, name))
        assert len(counts) > 10_000
        assert sum(count == 1 for count in counts.values()) > 0.7 * len(counts)

    @pytest.mark.parametrize(
        ("name", "values", "skew"), [("C1", 1_400, 4), ("C3", 400_000, 1), ("C9", 3, 6), ("I1", 1_500, 4)]
    )
    def test_share_of_the_most_frequent(self, lines: list[list[str]], name: str, values: int, skew: float) -> None:
        present = [cell for cell in column(lines, name) if cell]
        expected = (math.log(2) / math.log(values + 1)) ** (1 / skew)
        [(most_frequent, count)] = Counter(present).most_common(1)
        assert count / len(present) == pytest.approx(expected, abs=5 * 0.5 / math.sqrt(len(present)))
        assert most_frequent == "0" or name != "I1"

    def test_integers_are_skewed(self, lines: list[list[str]]) -> None:
        numbers = sorted(int(cell) for cell in column(lines, "I5") if cell)
        assert numbers[0] >= 0
        assert 50_000 < numbers[-1] < 100_000
        assert numbers[len(numbers) // 2] < 5_000
        assert min(int(cell) for cell in column(lines, "I2")) == -1


class TestLabels:
    def test_figures_are_those_of_the_true_model_on_the_written_lines(self, tmp_path: Path) -> None:
        written = write_criteo(tmp_path / "rows.tsv", 3_000, seed=4, model_seed=2)
        rows = [line.split("\t") for line in (tmp_path / "rows.tsv").read_text(encoding="ascii").splitlines()]
        labels, logits = [int(row[0]) for row in rows], true_logits(rows, model_seed=2)
        assert (written.num_rows, written.num_positives) == (3_000, sum(labels))
        assert written.bayes_logloss == pytest.approx(logloss(labels, logits), abs=1e-6)
        assert written.bayes_auc == pytest.approx(auc(labels, logits), abs=1e-5)

    def test_can_be_learnt_as_well_as_clicks(self, written: tuple[Path, GeneratedCriteo]) -> None:
        assert written[1].bayes_auc == pytest.approx(0.81, abs=0.01)
        assert written[1].bayes_logloss == pytest.approx(0.435, abs=0.01)

    def test_of_one_class_have_no_auc(self, tmp_path: Path) -> None:
        assert math.isnan(write_criteo(tmp_path / "one.tsv", 1).bayes_auc)


class TestReproducibility:
    def test_fewer_rows_are_the_beginning(self, tmp_path: Path, written: tuple[Path, GeneratedCriteo]) -> None:
        write_criteo(tmp_path / "some.tsv", 5_000)
        some = (tmp_path / "some.tsv").read_bytes()
        assert some.count(b"\n") == 5_000
        assert written[0].read_bytes().startswith(some)

    def test_seeds_give_other_rows_of_the_same_vocabulary(self, tmp_path: Path, lines: list[list[str]]) -> None:
        write_criteo(tmp_path / "test.tsv", 2_000, seed=1)
        others = [line.split("\t") for line in (tmp_path / "test.tsv").read_text(encoding="ascii").splitlines()]
        assert not {tuple(line) for line in others} & {tuple(line) for line in lines}
        assert set(column(others, "C14")) == set(column(lines, "C14"))

    def test_compressed_files_hold_the_same_and_are_equal(self, tmp_path: Path) -> None:
        for name in ("rows.tsv", "rows.tsv.gz", "again.tsv.gz"):
            write_criteo(tmp_path / name, 3_000)
        compressed = (tmp_path / "rows.tsv.gz").read_bytes()
        assert gzip.decompress(compressed) == (tmp_path / "rows.tsv").read_bytes()
        assert compressed == (tmp_path / "again.tsv.gz").read_bytes()


class TestWriting:
    def test_progress_adds_up_to_all_rows(self, tmp_path: Path) -> None:
        steps: list[int] = []
        write_criteo(tmp_path / "rows.tsv", 5_000, on_rows=steps.append)
        assert sum(steps) == 5_000
        assert len(steps) > 1

    @pytest.mark.parametrize("name", ["rows.tsv", "rows.tsv.gz"])
    def test_an_interruption_leaves_the_folder_as_it_was(self, tmp_path: Path, name: str) -> None:
        def interrupt(_: int) -> None:
            raise KeyboardInterrupt

        (tmp_path / name).write_bytes(b"what was here before")
        with pytest.raises(KeyboardInterrupt):
            write_criteo(tmp_path / name, 5_000, on_rows=interrupt)
        assert [path.name for path in tmp_path.iterdir()] == [name]
        assert (tmp_path / name).read_bytes() == b"what was here before"

    def test_what_cannot_be_written_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="at least one row, got 0"):
            write_criteo(tmp_path / "rows.tsv", 0)
        with pytest.raises(IsADirectoryError, match="got the directory"):
            write_criteo(tmp_path, 10)
        with pytest.raises(FileNotFoundError, match=r"there is no directory .*nowhere for rows\.tsv"):
            write_criteo(tmp_path / "nowhere" / "rows.tsv", 10)
        assert list(tmp_path.iterdir()) == []


INTEGER_VALUES = (1_500, 20_000, 30_000, 500, 100_000, 20_000, 5_000, 1_000, 6_000, 8, 150, 400, 1_500)
_FIRST_HALF = (1_400, 560, 400_000, 180_000, 300, 20, 12_000, 600, 3, 70_000, 5_500, 350_000, 3_100)
_SECOND_HALF = (26, 13_000, 250_000, 10, 5_000, 2_000, 3, 300_000, 16, 15, 90_000, 90, 50_000)
CATEGORY_VALUES = _FIRST_HALF + _SECOND_HALF
PAIRED = ("C2", "C5", "C6", "C8", "C14", "C17")


def true_logits(rows: list[list[str]], model_seed: int) -> list[float]:
    """The logits that the texts of rows have by the formula, one text and one pair of fields at a time."""
    values = draw_values(np.random.default_rng(model_seed))
    firsts = dict(zip(NAMES, np.cumsum([0, *(n + 1 for n in INTEGER_VALUES + CATEGORY_VALUES)]).tolist(), strict=False))
    numbers = {f"{murmur3_finalizer(f << 24 | n):08x}": n for f in range(1, 27) for n in range(1, 2_000)}
    places = {int(text): place for place, text in enumerate(values.texts.tolist())}

    def place_of(name: str, text: str) -> int:
        if text == "" or name[0] == "I":
            return firsts[name] + (0 if text == "" else int(text) + 1 + (name == "I2"))
        return places[int.from_bytes(text.encode(), "little")]

    def factors_of(name: str, text: str) -> np.ndarray:
        return values.factors[PAIRED.index(name)][numbers[text] if text else 0].astype(np.float64)

    logits = []
    for row in rows:
        cells = dict(zip(NAMES, row[1:], strict=True))
        effects = sum(float(values.effects[place_of(name, text)]) for name, text in cells.items())
        pairs = sum(float(factors_of(f, cells[f]) @ factors_of(g, cells[g])) for f, g in combinations(PAIRED, 2))
        logits.append(-1.45 + effects + pairs)
    return logits


def murmur3_finalizer(number: int) -> int:
    number = (number ^ number >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    number = (number ^ number >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return number ^ number >> 16
