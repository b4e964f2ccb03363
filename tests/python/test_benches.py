"""The benches: the yardstick computes what it says, statistics and reports are right, and every cell runs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from warm_programs import output_of

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benches import (  # noqa: E402
    command,
    derived,
    ids,
    plots,
    records,
    report,
    spread,
    stage_run,
    summary,
    targets,
    wording,
)
from benches.cells import TITLES, id_map, lookup, merge, neighbours, peers, row_types  # noqa: E402
from benches.cells.setting import LOOKUPS, STEPS, Setting, tables_of  # noqa: E402
from benches.cells.stage import Stage  # noqa: E402
from benches.competitors import fbgemm  # noqa: E402
from benches.measured import Case, Competitor, Figure, Plan, Timed  # noqa: E402
from benches.rounds import measure  # noqa: E402
from benches.yardstick import ADAM_BETAS, ADAM_EPS, EPS, FTRL_BETA, LR, Yardstick, flush  # noqa: E402

pytestmark = pytest.mark.tier("test")

DIMS = [8, 16, 48, 64, 128, 20, 200]
"""Those that the yardstick's compiler knows, and one that it does not."""

ROWS = 5_000


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def filled(dim: int, optimizer: str = "adagrad", dtype: torch.dtype = torch.float32) -> Yardstick:
    """A yardstick with random rows, and state that is not zero."""
    table, generator = Yardstick(ROWS, dim, optimizer, dtype), torch.Generator().manual_seed(dim)
    table.weights.copy_(torch.rand(table.weights.shape, generator=generator))
    table.state.copy_(torch.rand(table.state.shape, generator=generator))
    return table


def some_rows(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct rows, and a gradient for each."""
    index = ids.in_order_of_arrival(ids.draw(ROWS, 4_099, "uniform", seed=1))
    return index, torch.randn(len(index), dim, generator=torch.Generator().manual_seed(2))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dim", DIMS)
def test_the_yardsticks_lookup_is_indexing(dim: int) -> None:
    table, index = filled(dim), ids.draw(ROWS, 4_099, "uniform", seed=1)
    assert torch.equal(table.lookup(index), table.records[index, :dim])


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dim", DIMS)
def test_the_yardsticks_bags_are_sums(dim: int) -> None:
    table, index = filled(dim), ids.draw(ROWS, 3 * 4_099, "uniform", seed=1)
    ends = torch.randint(len(index) + 1, (4_098,), generator=torch.Generator().manual_seed(3)).sort().values
    offsets = torch.cat([torch.tensor([0]), ends, torch.tensor([len(index)])])
    pooled = torch.empty(4_099, dim)
    table.pool(index, offsets, pooled)
    rows = table.records[index, :dim]
    assert torch.equal(pooled, torch.segment_reduce(rows, "sum", offsets=offsets, axis=0))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dim", DIMS)
def test_the_yardsticks_update_is_adagrad(dim: int) -> None:
    table, (index, grads) = filled(dim), some_rows(dim)
    expected = table.records.clone()
    sums = expected[index, dim:] + grads * grads
    expected[index, :dim] -= LR * grads / torch.sqrt(sums + EPS)
    expected[index, dim:] = sums
    table.update(index, grads)
    assert torch.equal(table.records[:, dim:], expected[:, dim:])
    torch.testing.assert_close(table.records, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dim", DIMS)
def test_the_yardsticks_update_without_state_is_sgd(dim: int) -> None:
    table, (index, grads) = filled(dim, "sgd"), some_rows(dim)
    expected = table.records.clone()
    expected[index] -= LR * grads
    table.update(index, grads)
    torch.testing.assert_close(table.records, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dim", DIMS)
def test_the_yardsticks_adam_is_that_of_torch(dim: int) -> None:
    table, (index, grads) = Yardstick(ROWS, dim, "adam"), some_rows(dim)
    weights = table.weights.clone().requires_grad_()
    theirs = torch.optim.SparseAdam([weights], lr=LR, betas=ADAM_BETAS, eps=ADAM_EPS)
    weights.grad = torch.sparse_coo_tensor(index[None], grads, (ROWS, dim))
    theirs.step()
    table.update(index, grads)
    state = theirs.state[weights]
    torch.testing.assert_close(table.weights, weights.detach())
    torch.testing.assert_close(table.state, torch.cat([state["exp_avg"], state["exp_avg_sq"]], 1))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dim", DIMS)
def test_the_yardsticks_ftrl_is_mcmahans(dim: int) -> None:
    table, (index, grads) = filled(dim, "ftrl"), some_rows(dim)
    w, n, z = (part.double() for part in (table.weights[index], *table.state[index].split(dim, 1)))
    squares = n + grads.double() ** 2
    z += grads - (squares.sqrt() - n.sqrt()) / LR * w
    table.update(index, grads)
    torch.testing.assert_close(table.state[index], torch.cat([squares, z], 1).float(), rtol=1e-5, atol=1e-4)
    expected = -z / ((FTRL_BETA + squares.sqrt()) / LR)
    torch.testing.assert_close(table.weights[index], expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dim", [*DIMS, 7])
def test_the_yardsticks_rows_of_bfloat16_are_widened(dim: int) -> None:
    table, index = filled(dim, dtype=torch.bfloat16), ids.draw(ROWS, 4_099, "uniform", seed=1)
    assert torch.equal(table.lookup(index), table.weights[index].float())


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dim", [*DIMS, 7])
def test_the_yardsticks_rows_of_bfloat16_are_rounded_to_one_of_both_neighbours(dim: int) -> None:
    table, (index, grads) = filled(dim, dtype=torch.bfloat16), some_rows(dim)
    sums = table.state[index] + grads * grads
    exact = table.weights[index].float() - LR * grads / torch.sqrt(sums + EPS)
    table.update(index, grads)
    off = table.weights[index].float() - exact
    assert torch.equal(table.state[index], sums)
    assert bool((off.abs() < exact.abs() * 2**-7 + 1e-30).all())
    # Half are rounded up, and the errors cancel out.
    assert off.gt(0).float().mean().item() == pytest.approx(0.5, abs=0.02)
    assert abs(off.mean().item()) < 0.05 * off.abs().mean().item()


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("distribution", ["uniform", "zipf"])
@pytest.mark.parametrize("dim", DIMS)
def test_the_yardsticks_sums_are_those_of_the_duplicates_in_order(dim: int, distribution: ids.Distribution) -> None:
    batch = ids.Batch.of(ids.draw(ROWS, 9_001, distribution, seed=3))
    grads = torch.randn(9_001, dim, generator=torch.Generator().manual_seed(2))
    expected: dict[int, torch.Tensor] = {}
    for row, grad in zip(batch.index.tolist(), grads, strict=True):
        expected[row] = expected[row] + grad if row in expected else grad
    sums = Yardstick(ROWS, dim).sum(ids.Grouped.of(batch.index), grads)
    assert torch.equal(sums, torch.stack([expected[row] for row in batch.distinct.tolist()]))


def test_the_yardsticks_step_of_duplicates_takes_their_sums() -> None:
    batch = ids.Batch.of(ids.draw(ROWS, 4_099, "zipf", seed=3))
    grads = torch.randn(4_099, 16, generator=torch.Generator().manual_seed(2))
    alone, whole = filled(16), filled(16)
    rows = whole.step(batch.index, batch.distinct, grads, ids.Grouped.of(batch.index))
    assert torch.equal(rows, alone.lookup(batch.index))
    alone.update(batch.distinct, alone.sum(ids.Grouped.of(batch.index), grads))
    assert torch.equal(whole.records, alone.records)
    assert not torch.equal(whole.records, filled(16).records)


def test_flushed_memory_is_still_there() -> None:
    numbers = torch.arange(10_000)
    flush(numbers)
    assert torch.equal(numbers, torch.arange(10_000))


def test_a_yardstick_of_another_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has \"sgd\" of float32, .* got 'lion' of float32"):
        Yardstick(1, 8, "lion")
    with pytest.raises(ValueError, match="\"adagrad\" of bfloat16, got 'adam' of bfloat16"):
        Yardstick(1, 8, "adam", torch.bfloat16)


def test_ids_stand_for_row_numbers_one_to_one() -> None:
    rows = torch.cat(list(ids.all_ids(10_000, 4_096)))
    assert torch.equal(rows, ids.ids_of(torch.arange(10_000)))
    assert len(torch.cat([rows, *ids.missing(10_000, 65_536)]).unique()) > 10_000
    assert not torch.isin(rows, torch.cat(ids.missing(10_000, 65_536))).any()
    assert len(rows.unique()) == 10_000


def test_dense_ids_are_the_row_numbers() -> None:
    in_order, shuffled = (
        torch.cat(list(ids.all_ids(10_000, 4_096, kind))) for kind in (ids.DENSE, ids.IN_RANDOM_ORDER)
    )
    assert torch.equal(in_order, torch.arange(10_000))
    assert not torch.equal(shuffled, in_order)
    assert torch.equal(shuffled.sort().values, in_order)
    batch = ids.batches(10_000, 1_000, "uniform", kind=ids.DENSE)[0]
    assert torch.equal(batch.ids, batch.index)
    assert batch.ids.data_ptr() != batch.index.data_ptr(), "no other competitor has brought them into a cache"
    assert torch.cat(ids.missing(10_000, 1_000, kind=ids.DENSE)).min() >= 10_000


def test_distinct_rows_are_those_of_the_batch() -> None:
    batch = ids.batches(100, 1_000, "uniform")[0]
    assert torch.equal(batch.distinct.sort().values, batch.index.unique())
    assert batch.distinct[0] == batch.index[0]


def test_zipf_draws_few_rows_often() -> None:
    counts = torch.bincount(ids.draw(1_000, 100_000, "zipf", seed=0), minlength=1_000).sort(descending=True).values
    assert counts[0] / counts[1] == pytest.approx(2**1.05, rel=0.1)
    assert counts[0] / counts[9] == pytest.approx(10**1.05, rel=0.1)


@pytest.mark.parametrize("share", [0.05, 0.42])
def test_duplicates_have_their_share(share: float) -> None:
    batch = ids.with_duplicates(20_000, share)
    assert len(batch.unique()) == pytest.approx(20_000 * (1 - share))


def test_spread_is_median_and_percentiles() -> None:
    assert spread.Spread.of([float(value) for value in range(100, -1, -1)]) == spread.Spread(50, 10, 90)
    assert spread.Spread.of([1, 2]) == spread.Spread(1.5, 1.1, 1.9)
    with pytest.raises(ValueError, match="no values"):
        spread.Spread.of([])


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    timed = Timed("lookup", {}, {"a": [2.0, 4.0, 100.0], "b": [1.0, 8.0, 10.0], "c": []})
    ratio = timed.ratio("a", "b")
    assert ratio is not None
    assert ratio.median == 2
    assert timed.ratio("a", "c") is None
    assert timed.spread("c") is None


def test_competitors_take_turns_on_one_batch_after_the_other() -> None:
    calls: list[tuple[str, int, int]] = []

    def competitor(name: str) -> Competitor:
        return Competitor(name, lambda turn: calls.append((name, turn, torch.get_num_threads())))

    before = torch.get_num_threads()
    timed = measure(Case("lookup", {}, [competitor("a"), competitor("b")], Plan(2, 60), threads=1, calls=2))
    assert calls == [(name, 2 * turn + call, 1) for turn in range(3) for name in "ab" for call in range(2)]
    assert {name: len(rounds) for name, rounds in timed.nanoseconds.items()} == {"a": 2, "b": 2}
    assert torch.get_num_threads() == before


def test_a_case_that_fails_keeps_its_whole_rounds() -> None:
    def fail_later(turn: int) -> None:
        if turn == 2:
            raise RuntimeError("no more")

    timed = measure(Case("lookup", {}, [Competitor("a", lambda turn: None), Competitor("b", fail_later)], Plan(5, 60)))
    assert timed.error == "RuntimeError: no more"
    assert [len(rounds) for rounds in timed.nanoseconds.values()] == [1, 1]


def test_tables_that_cannot_be_opened_are_an_error_of_their_stage() -> None:
    def open_none() -> Iterator[Case]:
        yield Case("lookup", {}, [Competitor("a", lambda turn: None)], Plan(1, 1, 1))
        raise MemoryError("too large")

    first, second = stage_run.run(Stage("step", "large tables", 1, open_none))
    assert isinstance(first, Timed)
    assert first.error is None
    assert isinstance(second, Timed)
    assert (second.cell, second.error) == ("step", "MemoryError: too large")


def test_every_setting_is_measured_in_a_table_of_its_size() -> None:
    assert {(setting.rows, setting.dim, setting.ids) for setting in LOOKUPS} == set(tables_of(LOOKUPS))
    assert len(LOOKUPS) == len(set(LOOKUPS))


@pytest.mark.parametrize("settings", [LOOKUPS, STEPS, neighbours.SETTINGS], ids=["lookups", "steps", "neighbours"])
def test_every_setting_is_measured_with_dense_and_with_spread_ids(settings: list[Setting]) -> None:
    dense, spread_out = ([replace(one, ids="spread") for one in settings if one.ids == kind] for kind in ids.KINDS)
    assert dense == spread_out
    assert len(dense) > 10


def lookups(yardstick: float, ours: float, **axes: Any) -> Timed:
    rounds = {"yardstick": [yardstick] * 3, "recstore": [ours] * 3}
    return Timed("lookup", {**Setting().axes(), **axes}, rounds, {"recstore": ("yardstick",)})


def test_targets_are_held_against_the_worst_case() -> None:
    found = targets.targets([lookups(100, 110), lookups(100, 150, threads=1), lookups(1, 9, drawn="zipf")])
    target = next(target for target in found if target.text == "lookup over the yardstick, 1,000,000 rows")
    assert target.worst == targets.Seen(1.5, "threads 1")
    assert target.holds is False
    assert next(target for target in found if "FBGEMM" in target.text).holds is None


def test_the_faster_peer_counts() -> None:
    axes = Setting(dim=16, threads=1, ids="dense").axes()
    rounds = {"recstore": [10.0] * 3, "FBGEMM": [15.0] * 3, "F.embedding": [13.0] * 3}
    found = targets.targets([Timed("lookup", axes, rounds)])
    target = next(
        target for target in found if "faster peer's lookup over ours, 65,536 ids, dim 16, dense" in target.text
    )
    assert target.worst == targets.Seen(1.3, "F.embedding")
    assert target.holds is False
    assert [other for other in found if "faster peer" in other.text and other.seen] == [target]


def test_a_figures_own_limit_is_a_target() -> None:
    figures = [Figure("id_map", "find", 1.3, "x", "<= 1.2"), Figure("id_map", "insert", 0.6, "x", ">= 0.5")]
    assert [target.holds for target in targets.targets(figures)[-2:]] == [False, True]
    assert [target.unit for target in targets.targets([Figure("id_map", "memory", 25, "bytes", "<= 26")])[-1:]] == [
        "bytes"
    ]
    with pytest.raises(ValueError, match='"find" must have a limit'):
        targets.targets([Figure("id_map", "find", 1.3, "x", "fast")])


def test_the_gain_of_a_second_thread_is_relative_to_the_yardsticks() -> None:
    found = derived.derive([lookups(200, 300, threads=1), lookups(100, 200, threads=2)])
    assert [(figure.name, figure.value) for figure in found] == [(derived.SCALING, 0.75)]


def between(ratio: float, **axes: Any) -> Timed:
    timed = lookups(100, 100 * ratio, **axes)
    return Timed("neighbours", {"work": "lookup", **timed.axes}, timed.nanoseconds, timed.against)


def test_a_size_is_compared_with_the_slower_one_of_its_neighbours() -> None:
    cases = [between(ratio, dim=dim) for dim, ratio in ((16, 1.5), (24, 1.8), (48, 9.0), (64, 1.2), (128, 7.0))]
    cases += [between(1.0, drawn="zipf"), between(3.0, drawn="zipf 1.2")]
    found = {(figure.axes["dim"], figure.axes["drawn"]): figure.value for figure in derived.derive(cases)}
    # Neither shields the other: only cells with limits of their own are neighbours.
    assert found == {(24, "uniform"): 1.2, (48, "uniform"): 6.0, (64, "zipf 1.2"): 3.0}
    target = next(target for target in targets.targets(cases) if target.text == derived.NEIGHBOURS)
    assert target.worst is not None
    assert (target.worst.value, target.holds) == (6.0, False)


def test_every_neighbour_is_measured_by_the_cells_with_limits() -> None:
    for setting in neighbours.SETTINGS:
        axes = setting.axes()
        is_neighbour = all(values[axes[name]] for name, values in neighbours.AXES.items())
        assert (setting in STEPS and setting in LOOKUPS) == is_neighbour


def test_the_limit_of_a_step_of_one_id_is_a_time() -> None:
    rounds = {"recstore": [50e3] * 3, "nn.EmbeddingBag": [250e3] * 3}
    found = targets.targets([Timed("step", Setting(batch=1).axes(), rounds)])
    measured = [target for target in found if target.seen]
    assert [(target.text, target.worst and target.worst.value, target.holds) for target in measured] == [
        ("full step of one id", 50, False),
        ("nn.EmbeddingBag's full step of one id over ours", 5, False),
    ]
    assert "| full step of one id | <= 45 us | 50.0 us |  | **no** |" in report.target_table(
        [Timed("step", Setting(batch=1).axes(), rounds)]
    )


def test_large_batches_are_compared_by_time_an_id() -> None:
    large = {"ids a batch": 1_048_576}
    found = derived.derive([lookups(1, 100), lookups(1, 3_200, **large)])
    assert [(figure.name, figure.value) for figure in found] == [(derived.LARGE_BATCHES, 2)]


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [(812, "812 ns (812..812)"), (12_345, "12.3 us (12.3..12.3)"), (1_620_000, "1.62 ms (1.62..1.62)")],
)
def test_times_are_written_in_the_unit_in_which_they_read_best(nanoseconds: float, text: str) -> None:
    assert wording.time_with_spread(spread.Spread(nanoseconds, nanoseconds, nanoseconds)) == text


def test_tables_go_between_the_marks(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("before\n<!-- cells -->\nearlier figures\n<!-- /cells -->\nafter\n", encoding="utf-8")
    failed = Timed("merge", {"dim": 64}, error="RuntimeError: broken | off")
    outcomes = [lookups(100, 150), failed, Figure("memory", "growth", 1.2, "x", "<= 1.3")]
    for _ in range(2):
        report.write(outcomes, {"torch": "2.13.0"}, path)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- cells -->\n")
    assert text.endswith("<!-- /cells -->\nafter\n")
    assert "earlier figures" not in text
    assert "| 100 ns (100..100) | 150 ns (150..150) | 1.50 |" in text
    assert r"dim 64: RuntimeError: broken \| off" in text
    assert "| growth | <= 1.3 | 1.20 |  | yes |" in text


def test_a_file_without_marks_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match="must have the marks"):
        report.write([], {}, path)
    assert path.read_text(encoding="utf-8") == "nothing"


def test_the_readme_of_the_benches_has_its_marks() -> None:
    text = report.README.read_text(encoding="utf-8")
    assert 0 < text.index(report.SUMMARY) < text.index(report.SUMMARY_END) < text.index(report.START)
    assert text.index(report.START) < text.index(report.END)


def test_the_summary_shows_the_figures_of_the_tables() -> None:
    text = report.README.read_text(encoding="utf-8")
    shown = text.partition(report.SUMMARY)[2].partition(report.SUMMARY_END)[0].strip()
    assert shown == summary.summary(), "report.write_summary() writes it anew"
    assert len(shown.splitlines()) == 2 + 10


def peers_case(dim: int, kind: ids.IdKind = "dense", **milliseconds: float) -> Timed:
    names = {"recstore": 1.0, "FBGEMM": 8.0, "nn.EmbeddingBag": 5.0, "TorchRec": 9.0} | milliseconds
    return Timed("peers", {"dim": dim, "ids": kind}, {name: [value * 1e6] * 3 for name, value in names.items()})


MACHINE = {"commit": "abc1234", "processor": "a processor", "date": "2026-11-27"}


def test_the_same_figures_give_the_same_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = [tmp_path / name for name in ("one.svg", "two.svg", "other.svg")]
    for path, dim_128 in zip(paths, (2.0, 2.0, 4.0), strict=True):
        assert plots.draw_steps(path, [peers_case(16), peers_case(128, recstore=dim_128)], MACHINE)
    first, second, other = (path.read_text(encoding="utf-8") for path in paths)
    assert first == second
    others = [peers_case(dim, "spread", recstore=50.0) for dim in peers.DIMS]
    assert plots.draw_steps(paths[1], [peers_case(16), peers_case(128, recstore=2.0), *others], MACHINE)
    assert paths[1].read_text(encoding="utf-8") == first
    assert {f">{steps}<" in first for steps in ("1,000", "500", "125")} == {True}
    assert ">250<" in other
    assert "commit abc1234, a processor, 2026-11-27" in first


def test_no_picture_is_drawn_of_some_libraries(tmp_path: Path) -> None:
    alone = Timed("peers", {"dim": 16, "ids": "dense"}, {"recstore": [1e6], "FBGEMM": []})
    assert not plots.draw_steps(tmp_path / "steps.svg", [alone, peers_case(128)], MACHINE)
    assert not plots.draw_steps(tmp_path / "steps.svg", [peers_case(16)], MACHINE)
    assert not list(tmp_path.iterdir())


def test_a_run_goes_on_with_the_stages_that_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    timed = Timed("step", {"dim": 64}, {"a": [1.0, 3.0], "b": [2.0, 2.0], "c": []}, {"b": ("a",)})
    figure = Figure("memory", "growth", 1.2, "x", "<= 1.3")
    records.start(path, MACHINE, is_full=True)
    records.start_stage(path, "first")
    records.append(path, figure)
    records.start_stage(path, "second")
    records.append(path, timed)
    records.append(path, figure)
    records.finish_stage(path, "second")
    records.start_stage(path, "third")
    records.append(path, figure)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"cell": "mem')
    assert records.finished(path, {**MACHINE, "date": "another"}, is_full=True) == {"second": [timed, figure]}
    with pytest.raises(ValueError, match="measured with commit abc1234, this run has dirty"):
        records.finished(path, {**MACHINE, "commit": "dirty"}, is_full=True)
    with pytest.raises(ValueError, match="measured with full True, this run has False"):
        records.finished(path, MACHINE, is_full=False)
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="has no figures of a run"):
        records.finished(path, MACHINE, is_full=True)


def test_a_stage_that_failed_is_measured_again(tmp_path: Path) -> None:
    path, stages = tmp_path / "run.jsonl", [Stage("step", name, 1, lambda: iter(())) for name in ("one", "two")]
    case = Case("step", {}, [Competitor("a", lambda turn: 1 // 0)], Plan(1, 1, 1))
    failing = Stage("step", "three", 1, lambda: iter([case]))
    records.start(path, MACHINE, is_full=True)
    (failed,) = command.run_all([*stages, failing], path, {})
    assert isinstance(failed, Timed)
    assert str(failed.error).startswith("ZeroDivisionError")
    done = records.finished(path, MACHINE, is_full=True)
    assert set(done) == {"step: one", "step: two"}
    assert len(command.run_all([*stages, failing], path, done)) == 1


def test_the_verdict_counts_targets_and_names_the_missed_ones() -> None:
    figures = [Figure("id_map", "find", 1.3, "x", "<= 1.2"), Figure("id_map", "memory", 25, "bytes", "<= 26")]
    first, *missed = report.verdict(figures).splitlines()
    assert first.startswith("1 targets hold, 1 do not, ")
    assert missed == ["    missed: find"]


def program_printing(text: str, status: int = 0) -> list[str]:
    return [sys.executable, "-c", f"import sys; print({text!r}); sys.exit({status})"]


def test_figures_of_the_id_map_are_read() -> None:
    line = '{"cell": "find over gather", "value": 1.1, "unit": "x", "limit": "<= 1.2"}'
    found = list(id_map.figures(program_printing(f"{line}\n\n{line}"), {}))
    assert found == [Figure("id_map", "find over gather", 1.1, "x", "<= 1.2")] * 2


@pytest.mark.parametrize(
    ("command", "error", "message"),
    [
        (program_printing("", 3), RuntimeError, "failed"),
        (program_printing("fast"), ValueError, "not a figure of the id map: 'fast'"),
        (program_printing('{"cell": "find"}'), ValueError, "not a figure"),
        (program_printing(""), ValueError, "printed no figure"),
        (["no-such-program"], RuntimeError, "there is no no-such-program"),
    ],
    ids=["status", "text", "fields", "nothing", "missing"],
)
def test_a_program_of_the_id_map_that_fails_is_an_error(
    command: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        list(id_map.figures(command, {}))


WHERE_OUTPUTS_LIE = """
import torch
from benches import ids, output_state, tensor_memory
from benches.competitors.recstore import RecStoreTable
from benches.competitors.torch_modules import TorchTable
from benches.yardstick import Yardstick

tensor_memory.recycle()
batch = ids.batches(1_000, 4_096, "uniform")[0]
theirs, limit = TorchTable(1_000, 64), Yardstick(1_000, 64)
with RecStoreTable(1_000, 64) as ours:
    for state in ("hot", "cold"):
        for read in (
            lambda: torch.empty(4_096, 64),
            lambda: limit.lookup(batch.index),
            lambda: ours.lookup(batch.ids),
            lambda: theirs.lookup(batch.index),
        ):
            output_state.put_into(state, (4_096, 64), torch.float32)
            print(read().data_ptr())
tensor_memory.give_back()
print(torch.ones(4_096, 64).sum().item())
"""


def test_all_outputs_lie_in_the_memory_that_was_prepared() -> None:
    # A process of its own: torch keeps the allocator.
    *places, total = output_of(WHERE_OUTPUTS_LIE, cwd=ROOT).split()
    assert len(places) == 8
    assert len(set(places)) == 1
    assert float(total) == 4_096 * 64


def run_benches(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benches" / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


def test_an_unknown_cell_is_refused() -> None:
    done = run_benches("--only", "lookup,look")
    assert done.returncode == 2
    assert "no cell look; there are lookup, step" in done.stderr


def figures_of(line: dict[str, Any]) -> list[float]:
    if "value" in line:
        return [line["value"]]
    return [*line["nanoseconds"].values(), *line["rounds"]]


@pytest.mark.tier("all")
def test_a_quick_run_measures_every_cell(tmp_path: Path) -> None:
    before = report.README.read_bytes()
    output = tmp_path / "quick.jsonl"
    done = run_benches("--quick", "--output", str(output))
    assert done.returncode == 0, done.stdout[-5_000:] + done.stderr[-5_000:]
    machine, *written = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert machine["machine"]["torch"] == torch.__version__
    assert [line["stage"] for line in written if "stage" in line] == [
        line["finished"] for line in written if "finished" in line
    ]
    lines = [line for line in written if "value" in line or "competitor" in line]
    assert {line["cell"] for line in lines} == set(TITLES) - {id_map.CELL}
    # What a save adds to a step's time may be less than nothing.
    signed = [line for line in lines if line.get("unit") == "ms"]
    assert all(math.isfinite(figure) for line in lines for figure in figures_of(line))
    assert all(figure > 0 for line in lines if line not in signed for figure in figures_of(line))
    assert report.README.read_bytes() == before
    timed = {(line["cell"], line["competitor"]) for line in lines if "competitor" in line}
    assert {(lookup.CELL, lookup.MISSING), (merge.CELL, merge.TORCH), (row_types.CELL, "bfloat16")} <= timed
    assert ((lookup.CELL, fbgemm.NAME) in timed) == fbgemm.is_installed()
