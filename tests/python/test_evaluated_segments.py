"""Segments of `recstore evaluate`: by groups, any column, ranges of numbers, fields and queries."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from grouped_runs import OPTIONS, figures_of_sessions, sessions, train_grouped
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from saved_runs import run_train
from training_runs import drop_tables

from recstore_ops import RecStoreClient, table_names
from recstore_ops.cli.evaluate import segments_grid
from recstore_ops.training.data.batch import NO_GROUP
from recstore_ops.training.data.number_keys import keys_of_numbers, numbers_of_keys
from recstore_ops.training.metrics.evaluation import Scores
from recstore_ops.training.metrics.segments import in_number_parts, segment_figures

pytestmark = [
    pytest.mark.tier("test"),
    pytest.mark.embedded_only("a run is loaded by a process that keeps its tables itself"),
]

Recstore = Callable[..., int]


@pytest.fixture(autouse=True)
def _no_tables_of_models() -> Iterator[None]:
    before = set(table_names())
    yield
    for name in set(table_names()) - before:
        RecStoreClient().drop(name)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `grouped` on rows with sessions; only to be read."""
    folder = tmp_path_factory.mktemp("grouped")
    train_grouped(folder)
    return folder


@pytest.fixture
def expected(trained: Path) -> dict[str, dict[str, float]]:
    """The figures of each session of the test rows."""
    return figures_of_sessions(trained)


class TestEvaluate:
    @pytest.fixture(autouse=True)
    def _in_folder(self, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(trained)

    def json_of(self, recstore: Recstore, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
        capsys.readouterr()
        assert recstore("evaluate", "runs/grouped", "test.parquet", "--json", *options) == 0
        drop_tables("fm")
        return json.loads(capsys.readouterr().out)

    def test_prints_figures_within_the_groups_of_the_run(
        self, recstore: Recstore, capsys: pytest.CaptureFixture[str], expected: dict[str, dict[str, float]]
    ) -> None:
        found = self.json_of(recstore, capsys)
        auc = np.average([each["auc"] for each in expected.values()], weights=[e["rows"] for e in expected.values()])
        assert found["grouped_by"] == "session"
        assert found["weighted_auc"] == pytest.approx(auc, abs=1e-6)
        assert found["group_ndcg_at_10"] == pytest.approx(np.mean([e["ndcg_at_10"] for e in expected.values()]))
        assert "segments" not in found
        assert recstore("evaluate", "runs/grouped", "test.parquet") == 0
        words = capsys.readouterr().out
        assert re.search(r"rows are grouped by +session\b", words)
        assert re.search(rf"AUC within groups, weighted by rows +{auc:.4f}", words)
        assert "segments by" not in words

    def test_prints_all_segments_as_json(
        self, recstore: Recstore, capsys: pytest.CaptureFixture[str], expected: dict[str, dict[str, float]]
    ) -> None:
        segments = self.json_of(recstore, capsys, "--segments-by", "session")["segments"]
        assert {each["segment"] for each in segments} == set(expected)
        for segment in segments:
            for name, figure in expected[segment["segment"]].items():
                assert segment[name] == pytest.approx(figure, abs=1e-6)
        assert [each["rows"] for each in segments] == sorted((e["rows"] for e in expected.values()), reverse=True)

    @pytest.mark.parametrize(
        ("order", "key"),
        [
            ("logloss", lambda each: -each["logloss"]),
            ("auc", lambda each: each["auc"]),
            ("error", lambda each: -abs(each["rows"] * each["mean_prediction"] - each["positives"])),
        ],
    )
    def test_orders_them(
        self, recstore: Recstore, capsys: pytest.CaptureFixture[str], order: str, key: Callable[[Any], float]
    ) -> None:
        options = ("--segments-by", "session", "--segments-order", order)
        segments = self.json_of(recstore, capsys, *options)["segments"]
        assert [key(each) for each in segments] == sorted(map(key, segments))

    def test_rows_without_a_value_are_a_segment_and_no_group(
        self, recstore: Recstore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        columns = sessions(600, 1)
        gaps = [None if row % 3 == 0 else session for row, session in enumerate(columns["session"])]
        pq.write_table(pa.table({**columns, "session": gaps}), tmp_path / "gaps.parquet")
        found = []
        for options in ((), ("--segments-by", "session")):
            assert recstore("evaluate", "runs/grouped", tmp_path / "gaps.parquet", "--json", *options) == 0
            drop_tables("fm")
            found.append(json.loads(capsys.readouterr().out))
        segments = {each["segment"]: each["rows"] for each in found[1].pop("segments")}
        assert found[0] == found[1]
        assert segments["(no value)"] == 200
        assert sum(segments.values()) == 600

    def test_segments_may_be_of_any_column(self, recstore: Recstore, capsys: pytest.CaptureFixture[str]) -> None:
        columns = sessions(600, 1)
        for name in ("shop", "item", "label"):
            segments = self.json_of(recstore, capsys, "--segments-by", name)["segments"]
            values, counts = np.unique(columns[name], return_counts=True)
            assert {int(each["segment"]): each["rows"] for each in segments} == dict(zip(values, counts, strict=True))
        assert [(each["positive_share"], each["auc"]) for each in segments] in (
            [(0, None), (1, None)],
            [(1, None), (0, None)],
        )

    def test_numbers_are_cut_into_ranges(
        self,
        trained: Path,
        recstore: Recstore,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        prices = np.concatenate([np.arange(550) / 4 - 20, np.full(40, np.nan), np.full(10, 1e6)])
        columns = {**sessions(600), "price": pa.array(prices, from_pandas=True)}
        pq.write_table(pa.table(columns), "rows.parquet")
        assert run_train(tmp_path, ("rows.parquet", *OPTIONS, "--run-name", "priced")) == (0, "")
        capsys.readouterr()
        assert recstore("evaluate", "runs/priced", "rows.parquet", "--json", "--segments-by", "price") == 0
        drop_tables("fm")
        segments = json.loads(capsys.readouterr().out)["segments"]
        assert [each["segment"] for each in segments][1:3] == ["[-20, -6)", "[-6, 8)"]
        assert segments[-1]["segment"] == "[106, 1e+06]"
        assert [each["rows"] for each in segments[1:]] == [56] * 10
        assert segments[0] == {**segments[0], "segment": "(no value)", "rows": 40}
        assert recstore("evaluate", "runs/priced", "rows.parquet", "--segments-by", "price") == 0
        assert "segments by price, smallest value first" in capsys.readouterr().out

    def test_prints_a_table_of_the_first(self, recstore: Recstore, capsys: pytest.CaptureFixture[str]) -> None:
        assert recstore("evaluate", "runs/grouped", "test.parquet", "--segments-by", "session") == 0
        lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        place = lines.index("segments by session, most rows first, 20 of 30; --json has all")
        assert lines[place + 1].split()[:2] == ["segment", "rows"]
        assert len(lines) == place + 22
        assert re.fullmatch(r"s\d+ +\d+ +0\.\d{4} +0\.\d{4} +0\.\d{4} +0\.\d{4}", lines[place + 2].strip())

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--segments-by", "sesion"), "there is no column 'sesion' to group rows by, only 'label', 'item'"),
            (("--segments-order", "auc"), "--segments-order needs segments: --segments-by names what they are of"),
            (("--segments-by", "item", "--segments-order", "size"), "Invalid value for '--segments-order'"),
        ],
    )
    def test_refuses(
        self, recstore: Recstore, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
    ) -> None:
        assert recstore("evaluate", "runs/grouped", "test.parquet", *options) == 2
        assert message in capsys.readouterr().err


class TestEvaluateOtherFormats:
    @pytest.fixture
    def recstore(self, recstore: Recstore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recstore:
        monkeypatch.chdir(tmp_path)
        rng = np.random.default_rng(0)
        lines = [f"{rng.integers(2)} qid:{row % 7} {rng.integers(5)}:1 {rng.integers(5) + 10}:1" for row in range(300)]
        (tmp_path / "rows.svm").write_text("\n".join(lines) + "\n")
        return recstore

    def test_by_query_and_by_field(
        self, recstore: Recstore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        options = ("--model", "deepfm", "--epochs", 1, "--run-name", "q")
        assert run_train(tmp_path, ("rows.svm", *options)) == (0, "")
        assert "validation AUC within qid" in (tmp_path / "stdout").read_text()
        for by, values in (("qid", range(7)), ("field_1", range(10, 15)), (None, None)):
            chosen = () if by is None else ("--segments-by", by)
            assert recstore("evaluate", "runs/q", "rows.svm", "--json", *chosen) == 0
            drop_tables("deepfm")
            found = json.loads(capsys.readouterr().out)
            assert found["grouped_by"] == (by or "qid")
            if values is not None:
                assert {int(each["segment"]) for each in found["segments"]} == set(values)
        assert recstore("evaluate", "runs/q", "rows.svm", "--segments-by", "user") == 2
        assert "--segments-by must name a field, one of field_0, field_1; got 'user'" in capsys.readouterr().err

    def test_of_models_that_retrieve_are_refused(
        self, recstore: Recstore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        options = ("--model", "two_tower", "--item-field", "field_1", "--epochs", 1, "--run-name", "t")
        assert run_train(tmp_path, ("rows.svm", *options)) == (0, "")
        assert recstore("evaluate", "runs/t", "rows.svm", "--segments-by", "field_0") == 2
        assert "model two_tower takes no --segments-by: it ranks items for queries" in capsys.readouterr().err
        drop_tables("two_tower")


class TestNumberParts:
    @given(st.lists(st.floats(allow_nan=True), min_size=1, max_size=80))
    def test_keys_are_in_the_order_of_numbers_and_come_back(self, numbers: list[float]) -> None:
        given_numbers = np.array(numbers)
        keys = keys_of_numbers(given_numbers)
        assert (keys == NO_GROUP).tolist() == np.isnan(given_numbers).tolist()
        there = given_numbers[~np.isnan(given_numbers)]
        assert np.array_equal(numbers_of_keys(keys[keys != NO_GROUP]), there)
        assert np.array_equal(np.sort(keys[keys != NO_GROUP]), keys_of_numbers(np.sort(there)))

    @given(st.lists(st.integers(-5, 30) | st.none(), min_size=1, max_size=80))
    def test_rows_are_in_the_range_that_their_segment_says(self, numbers: list[int | None]) -> None:
        amounts = np.array([math.nan if number is None else number for number in numbers], dtype=np.float64)
        keys = torch.from_numpy(keys_of_numbers(amounts))
        zeros = torch.zeros(len(numbers))
        parts = in_number_parts(Scores(zeros, zeros, keys, keys != NO_GROUP))
        assert parts.segments is not None
        assert parts.in_segment is not None
        assert parts.in_segment.tolist() == [number is not None for number in numbers]
        for number, part in zip(numbers, parts.segments.tolist(), strict=True):
            if number is not None:
                assert parts.texts is not None
                low, high = map(float, parts.texts[part][1:-1].split(", "))
                assert low <= number
                assert number <= high if parts.texts[part].endswith("]") else number < high

    def test_as_many_parts_as_distinct_numbers_at_most(self) -> None:
        keys = torch.from_numpy(keys_of_numbers(np.array([1.0, 1.0, 2.5, 1.0])))
        zeros = torch.zeros(4)
        parts = in_number_parts(Scores(zeros, zeros, keys, keys != NO_GROUP))
        assert parts.texts == {0: "[1, 2.5)", 1: "[2.5, 2.5]"}

    def test_without_segments_there_are_none(self) -> None:
        with pytest.raises(ValueError, match="these scores have no segments: there is nothing to cut into parts"):
            in_number_parts(Scores(torch.zeros(1), torch.zeros(1)))


def test_names_of_segments_are_no_markup() -> None:
    labels = torch.tensor([1.0, 0.0])
    scores = Scores(labels, labels, torch.tensor([1, 1]), torch.tensor([True, True]), {1: "[bold]x"})
    console = Console(width=120, record=True)
    console.print(segments_grid("[red]", segment_figures(scores), "rows"))
    text = console.export_text()
    assert "segments by [red], most rows first" in text
    assert "[bold]x" in text
