"""What `make compat` says of a run of the tests with another torch."""

import subprocess
from pathlib import Path

import pytest
from ci_programs import program

pytestmark = pytest.mark.tier("quick")


@pytest.mark.parametrize(
    ("code", "output", "expected"),
    [
        (0, "....\n41 passed, 2 skipped, 3 warnings in 9.31s\n", "41 passed, 2 skipped"),
        (1, "F...\n1 failed, 40 passed in 9.31s\n", "1 failed, 40 passed"),
        (2, "interrupted\n", "error: pytest exited with 2"),
        (-11, "....\n", "error: pytest exited with -11"),
        (0, "", "error: pytest exited with 0"),
    ],
)
def test_a_run_that_did_not_end_by_itself_is_an_error(code: int, output: str, expected: str) -> None:
    run = subprocess.CompletedProcess(["pytest"], code, stdout=output)
    assert program("compat").summary(run) == expected


def test_runs_of_the_same_wheel_share_a_page_and_each_place_has_its_newest_row(tmp_path: Path) -> None:
    compat, wheel = program("compat"), tmp_path / "a.whl"
    wheel.write_bytes(b"one")
    rows = ["| 2.13.0 | 3.11.7 | 2.36 | 1 failed | 1 of 1 |", "| 2.9.0 | 3.11.7 | 2.36 | 2 passed | 1 of 1 |"]
    first = compat.page(wheel, rows)
    assert compat.rows_of(wheel, first) == rows[::-1], "in the order of releases, not of letters"
    again = "| 2.13.0 | 3.11.7 | 2.36 | 2 passed | 1 of 1 |"
    elsewhere = "| 2.13.0 | 3.11.7 | 2.31 | 2 passed | 1 of 1 |"
    second = compat.page(wheel, [*compat.rows_of(wheel, first), again, elsewhere])
    assert compat.rows_of(wheel, second) == [rows[1], elsewhere, again]

    wheel.write_bytes(b"another")
    assert compat.rows_of(wheel, second) == []
