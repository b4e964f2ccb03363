"""The program that runs the parts of the checks: what it runs, counts and writes down."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
from ci_programs import program

pytestmark = pytest.mark.tier("quick")

ROOT = Path(__file__).parents[2]
MAKEFILE = """\
.PHONY: good bad build-tests
good:
\t@echo "12 passed, 1 skipped in 3.45s"
bad:
\t@echo "1 failed, 2 passed in 0.10s"; exit 1
build-tests:
\t@exit 1
works:
\t@python3 -c "sum(range(10_000_000))"
"""


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The program, in a folder with targets of its own."""
    module = program("parts")
    (tmp_path / "Makefile").write_text(MAKEFILE)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "commit", lambda: "abc1234")
    return module


@pytest.fixture
def page(parts: ModuleType, tmp_path: Path) -> Path:
    """A page with an earlier run."""
    path = tmp_path / "page.md"
    path.write_text(f"before\n{parts.BEGIN}\nold\n{parts.END}\nafter\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("lines", "counts"),
    [
        (["12 passed, 1 skipped, 3 warnings in 3.45s"], "12 passed, 1 skipped"),
        (["==== 2 failed, 7 passed in 61.00s (0:01:01) ===="], "7 passed, 2 failed"),
        (["1 passed, 2291 deselected in 1.00s"], "1 passed"),
        (["test result: ok. 101 passed; 0 failed; 2 ignored; 0 measured; 0 filtered out"], "101 passed, 2 ignored"),
        (["test result: ok. 1 passed; 0 failed; 0 ignored", "4 passed in 0.1s"], "5 passed"),
        (["a line about 3 passed in 2 s"], ""),
    ],
)
def test_what_runners_say_is_summed(parts: ModuleType, lines: list[str], counts: str) -> None:
    assert parts.counts_of(lines) == counts


def test_a_part_that_fails_leaves_the_others_to_run(parts: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert parts.main(["bad", "good+good"]) == 1
    output = capsys.readouterr().out
    assert output.count("| `good` | ok | 12 passed, 1 skipped |") == 2
    assert "| `bad` | failed | 2 passed, 1 failed |" in output
    assert output.endswith("failed: bad\n")


def test_nothing_runs_behind_a_build_that_failed(parts: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert parts.main(["build-tests", "good"]) == 1
    assert "12 passed" not in capsys.readouterr().out


def test_a_part_takes_the_place_of_its_last_run_and_leaves_the_others(
    parts: ModuleType, page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parts.main(["--record", str(page), "good", "works"]) == 0
    monkeypatch.setattr(parts, "commit", lambda: "def5678")
    assert parts.main(["--record", str(page), "bad+good"]) == 1
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    good, works, bad = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert good[:3] == ["`good`", "ok", "12 passed, 1 skipped"]
    assert good[5] == "def5678"
    assert works[:3] == ["`works`", "ok", ""]
    assert works[5] == "abc1234"
    assert bad[:3] == ["`bad`", "failed", "2 passed, 1 failed"]


def test_what_has_ended_is_written_down_when_the_run_is_cut_off(
    parts: ModuleType, page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = parts.run

    def cut_off(part: str, **options: bool) -> object:
        if part == "works":
            raise KeyboardInterrupt
        return run(part, **options)

    monkeypatch.setattr(parts, "run", cut_off)
    with pytest.raises(KeyboardInterrupt):
        parts.main(["--record", str(page), "good", "works"])
    assert "| `good` | ok | 12 passed, 1 skipped |" in page.read_text(encoding="utf-8")


def test_a_page_without_marks_is_refused(parts: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n")
    with pytest.raises(SystemExit, match="lacks the lines"):
        parts.main(["--record", str(page), "missing-target"])


def test_the_time_of_processors_is_that_of_all_that_ran(parts: ModuleType) -> None:
    assert parts.run("works").busy > 0.05
    assert (
        parts.table([parts.Outcome("works", 0, 60.0, 90.0, "")])[-1] == "| `works` | ok |  | 1 min 00 s | 1 min 30 s |"
    )


@pytest.mark.parametrize(("seconds", "text"), [(8.4, "8 s"), (59.6, "1 min 00 s"), (75.2, "1 min 15 s")])
def test_times_are_minutes_and_seconds(parts: ModuleType, seconds: float, text: str) -> None:
    assert parts.clock(seconds) == text


def test_the_makefile_has_every_part_that_it_names(parts: ModuleType) -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    runs = re.findall(r"\.ci/parts\.py (?:--record \S+ )?(.+)", text)
    named = {part for run in runs for step in run.split() for part in step.split("+")}
    targets = set(re.findall(r"^([\w-]+):(?!=)", text, re.MULTILINE))
    assert len(runs) == 3
    assert named <= targets
    assert set(parts.NEEDED) <= named


def test_testing_md_has_the_marks(parts: ModuleType) -> None:
    text = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    assert text.count(parts.BEGIN) == text.count(parts.END) == 1


def test_the_makefile_gives_tiers_in_one_word() -> None:
    """Of `--tier test` pytest takes `test` for a path, before it has read the file that has the option."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "--tier=test" in text
    assert "--tier " not in text
