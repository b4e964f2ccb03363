"""Tiers of tests: which run, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiers

pytestmark = pytest.mark.tier("quick")
pytest_plugins = ["pytester"]

# Processes of xdist import the module of tiers anew.
CONFTEST = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
import tiers
pytest_addoption = tiers.add_option
pytest_collection_modifyitems = tiers.select
pytest_pycollect_makeitem = tiers.check_made
def pytest_configure(config):
    config.addinivalue_line("markers", "tier(name)")
"""
ORDERED = """
import pytest
SEED = pytest.StashKey()
def pytest_configure(config):
    config.addinivalue_line("markers", "tier(name)")
    config.stash[SEED] = tiers.choose_seed(config)
@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    tiers.give_seed(node, node.config.stash[SEED])
def pytest_collection_modifyitems(config, items):
    assert config.stash[SEED] == 41
    tiers.order(items, config.stash[SEED])
def pytest_terminal_summary(terminalreporter, config):
    terminalreporter.write_line(f"seed {config.stash[SEED]}")
"""
MARKED = """
import pytest
pytestmark = pytest.mark.tier({tier!r})
def test_of_the_file(): pass
@pytest.mark.tier("all")
def test_that_takes_long(): pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """A suite of a quick file and a longer one, each with a test that takes long."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_quick=MARKED.format(tier="quick"), test_longer=MARKED.format(tier="test"))
    return pytester


@pytest.mark.parametrize(("tier", "passed"), [("quick", 1), ("test", 2), ("all", 4)])
def test_a_tier_runs_with_those_before_it(suite: pytest.Pytester, tier: str, passed: int) -> None:
    suite.runpytest_inprocess("--tier", tier).assert_outcomes(passed=passed, deselected=4 - passed)


def ordered(names: Sequence[str], seed: int) -> list[tuple[str, int]]:
    items: Any = [SimpleNamespace(path=Path(f"{name}.py"), number=number) for number, name in enumerate(names)]
    tiers.order(items, seed)
    return [(item.path.stem, item.number) for item in items]


def test_long_files_come_first_in_a_random_order_and_each_stays_whole() -> None:
    first, later = [f"test_{name}" for name in tiers.LONGEST[: tiers.CLASS_SIZE]], ["test_a", "test_b", "test_c"]
    names = [*later, *first, *later]
    orders = {seed: ordered(names, seed) for seed in range(50)}
    assert ordered(names, 7) == orders[7]
    assert ordered([*reversed(names)], 7) != orders[7]
    for order in orders.values():
        assert {name for name, _ in order[: len(first)]} == set(first)
        ends = [(name, number) for name, number in order[len(first) :]]
        assert [name for name, _ in ends[::2]] == [name for name, _ in ends[1::2]]
        assert all(
            after - before == len(names) - 3 for (_, before), (_, after) in zip(ends[::2], ends[1::2], strict=True)
        )
    # One of the six orders of three files is missing in 50 draws with a probability of 6 (5/6)^50 < 1e-3 for seeds
    # that are not these.
    assert len({tuple(name for name, _ in order[len(first) :: 2]) for order in orders.values()}) == 6


@pytest.mark.parametrize("processes", [(), ("--numprocesses", "2")])
def test_a_run_says_the_seed_of_its_order(suite: pytest.Pytester, processes: tuple[str, ...]) -> None:
    suite.makeconftest(CONFTEST + ORDERED)
    result = suite.runpytest_inprocess(*processes, "--order-seed", "41")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["seed 41"])


def test_the_files_that_take_longest_are_there() -> None:
    assert [name for name in tiers.LONGEST if not Path(__file__).with_name(f"test_{name}.py").is_file()] == []
    assert len(set(tiers.LONGEST)) == len(tiers.LONGEST)


def test_without_a_tier_all_tests_run(suite: pytest.Pytester) -> None:
    suite.runpytest_inprocess().assert_outcomes(passed=4)


WITHOUT_ONE_TIER = [
    ("def test_one(): pass", "its file must say one tier by pytestmark, it says 0"),
    (
        "import pytest\npytestmark = [pytest.mark.tier('quick'), pytest.mark.tier('test')]\ndef test_one(): pass",
        "its file must say one tier by pytestmark, it says 2",
    ),
    (
        "import pytest\npytestmark = pytest.mark.tier('soon')\ndef test_one(): pass",
        "its tier must be one of ('quick', 'test', 'all'), it says ('soon',)",
    ),
]


def test_cells_that_are_not_named_run_later() -> None:
    few = tiers.cells({"a": 1, "b": 2}, "b")
    assert [(cell.values, cell.id, [mark.args for mark in cell.marks]) for cell in few] == [
        ((1,), "a", [("all",)]),
        ((2,), "b", []),
    ]
    with pytest.raises(ValueError, match=r"there is no \{'c'\}"):
        tiers.cells({"a": 1}, "c")


@pytest.mark.parametrize(("source", "message"), WITHOUT_ONE_TIER)
@pytest.mark.parametrize("options", [(), ("--tier", "quick")])
def test_a_file_without_its_one_tier_fails_the_run(
    suite: pytest.Pytester, options: tuple[str, ...], source: str, message: str
) -> None:
    suite.makepyfile(test_unmarked=source)
    result = suite.runpytest_inprocess(*options)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert result.parseoutcomes()["errors"] == 1
    assert f"test_unmarked.py::test_one: {message}" in result.stdout.str()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param(*each, marks=pytest.mark.tier("test" if number == 0 else "all"), id=f"tiers-{number}")
        for number, each in enumerate(WITHOUT_ONE_TIER)
    ],
)
def test_a_file_without_its_one_tier_fails_a_run_of_several_processes(
    suite: pytest.Pytester, source: str, message: str
) -> None:
    suite.makepyfile(test_unmarked=source)
    result = suite.runpytest_inprocess("--numprocesses", "2")
    # They run the other files first.
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert result.parseoutcomes()["errors"] == 1
    assert f"test_unmarked.py::test_one: {message}" in result.stdout.str()


def test_a_test_of_an_unknown_tier_ends_the_run(suite: pytest.Pytester) -> None:
    source = "class TestOne:\n    @pytest.mark.tier('soon')\n    def test_one(self): pass\n"
    suite.makepyfile(test_unknown=f"{MARKED.format(tier='quick')}\n{source}")
    result = suite.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert "it says ('soon',)" in result.stdout.str()
