"""What `make compat` says of a run of the tests with another torch."""

import subprocess

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
