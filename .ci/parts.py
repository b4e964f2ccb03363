"""Runs parts of the checks, each a target of the Makefile, and says how long each took.

    python .ci/parts.py build test-core+test-python check
    python .ci/parts.py --record docs/testing.md build test-core ...

Parts joined by `+` run side by side; what they print comes when each has ended. All parts run, whichever fails, but for
those behind a part that builds. With `--record` a page gets a row for each part as soon as it has ended, in place of its
last one: a run that was cut off can go on with the parts that it lacks.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- the last run, written by .ci/parts.py -->", "<!-- end of the last run -->"
NEEDED = ("build-tests",)
"""Without these no part behind can run."""

# What the last lines of cargo, pytest and unittest say of the tests they ran.
_PYTEST = re.compile(r"^=*\s*((?:\d+ \w+(?:, )?)+) in [\d.]+s")
_CARGO = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored")


@dataclass(frozen=True)
class Outcome:
    """How a part ended.

    Attributes:
        part: the target.
        code: make's exit code.
        seconds: how long it took.
        busy: the seconds that processors worked for it.
        counts: what it says of the tests it ran, empty for none.
    """

    part: str
    code: int
    seconds: float
    busy: float
    counts: str


def main(arguments: Sequence[str]) -> int:
    """Runs the parts and returns 0 if all ended well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", help="targets of the Makefile; joined by + they run side by side")
    parser.add_argument("--record", type=Path, help="the page that gets the table")
    options = parser.parse_args(arguments)
    if options.record is not None:
        parts_of(options.record)  # A page without marks is told now, and not after an hour.
    # The rows that are written change the tree.
    begun_at = commit()
    outcomes = []
    for ended in run_all([step.split("+") for step in options.parts]):
        outcomes.extend(ended)
        if options.record is not None:
            record(options.record, ended, begun_at)
    print("\n".join(["", *table(outcomes)]), flush=True)
    failed = [outcome.part for outcome in outcomes if outcome.code]
    print(f"failed: {', '.join(failed)}" if failed else "all parts passed", flush=True)
    return 1 if failed else 0


def run_all(steps: Sequence[Sequence[str]]) -> Iterator[list[Outcome]]:
    """Runs steps one after another, the parts of each side by side."""
    for step in steps:
        if len(step) == 1:
            ended = [run(step[0], shows=True)]
        else:
            with ThreadPoolExecutor(len(step)) as threads:
                ended = list(threads.map(run, step))
        yield ended
        if any(outcome.code and outcome.part in NEEDED for outcome in ended):
            break


def run(part: str, shows: bool = False) -> Outcome:
    """Runs one part; what it prints is shown at once, or when it has ended."""
    begun, lines = time.monotonic(), []
    print(f"== {part}", flush=True)
    # Not a part of the make above: its job server and its flags are not for this one.
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    }
    command = ["make", "--no-print-directory", part]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if shows:
                print(line, end="", flush=True)
        # Of make and of all that it waited for.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if not shows:
        print("".join([f"== {part}: its output\n", *lines]), end="", flush=True)
    busy = usage.ru_utime + usage.ru_stime
    return Outcome(part, process.returncode, time.monotonic() - begun, busy, counts_of(lines))


def counts_of(lines: Sequence[str]) -> str:
    """What the test runners say, summed: `12 passed, 1 skipped`."""
    sums: dict[str, int] = {}
    for line in lines:
        if found := _CARGO.match(line):
            each = zip(("passed", "failed", "ignored"), map(int, found.groups()), strict=True)
        elif found := _PYTEST.match(line):
            each = ((word, int(number)) for number, word in re.findall(r"(\d+) (\w+)", found[1]))
        else:
            continue
        for word, number in each:
            sums[word] = sums.get(word, 0) + number
    shown = ("passed", "failed", "error", "errors", "skipped", "ignored")
    return ", ".join(f"{sums[word]} {word}" for word in shown if sums.get(word))


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """The lines of a table in Markdown."""
    return [f"| {' | '.join(line)} |" for line in (_HEAD, ("---",) * len(_HEAD), *map(_cells, outcomes))]


_HEAD = ("part", "result", "tests", "time", "of processors")


def _cells(outcome: Outcome) -> tuple[str, ...]:
    result = "ok" if outcome.code == 0 else "failed"
    return f"`{outcome.part}`", result, outcome.counts, clock(outcome.seconds), clock(outcome.busy)


def clock(seconds: float) -> str:
    """`75.2` as `1 min 15 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def commit() -> str:
    """What was run: the commit, and whether files of it were changed."""
    command = ["git", "describe", "--always", "--dirty= with changes", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def record(page: Path, outcomes: Sequence[Outcome], at: str) -> None:
    """Puts a row for each part between the marks of a page, in the place of its last one."""
    before, rows, after = parts_of(page)
    today = str(datetime.datetime.now(datetime.timezone.utc).date())
    for outcome in outcomes:
        rows[outcome.part] = [*_cells(outcome), at, today, str(os.cpu_count())]
    head = (*_HEAD, "commit", "date", "cores")
    lines = [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows.values())]
    page.write_text("\n".join([before + BEGIN, "", *lines, "", END + after]), encoding="utf-8")


def parts_of(page: Path) -> tuple[str, dict[str, list[str]], str]:
    """What is before the marks of a page, the row of each part between them, and what is after them."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    body, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{page} lacks the lines {BEGIN} and {END}")
    return before, {found[1]: found[0].strip("| ").split(" | ") for found in _ROW.finditer(body)}, after


_ROW = re.compile(r"^\| `(.*?)` \|.*$", re.MULTILINE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
