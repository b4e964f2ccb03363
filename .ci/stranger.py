"""Times what a stranger does first, from a clone, a wheel, a CSV file and a model, and prints a table.

    python .ci/stranger.py                      # all paths, with the newest wheel of dist/
    python .ci/stranger.py wheel csv curl       # without a clone, which compiles
    python .ci/stranger.py --wheel PATH --extras train,serve

Every step is a command of README.md or of a tutorial. The first that fails ends its path, and the script ends with 1.
It downloads what pip downloads, into a folder that is deleted in the end.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATHS = {
    "clone": "a clone to a plot",
    "wheel": "a wheel to a model",
    "csv": "a CSV file to predictions",
    "curl": "a model to an answer of curl",
}
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ (.*)$", re.MULTILINE)


def main(arguments: Sequence[str]) -> int:
    """Times the paths, and returns 0 if all went to their ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=list(PATHS), help=f"of {', '.join(PATHS)}")
    parser.add_argument("--wheel", type=Path, help="by default the newest one of dist/")
    parser.add_argument("--extras", default="train,serve", help="what the wheel is installed with")
    options = parser.parse_args(arguments)
    if unknown := set(options.paths) - set(PATHS):
        parser.error(f"there is no path {', '.join(sorted(unknown))}; there are {', '.join(PATHS)}")
    rows: list[tuple[str, str, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        chosen = [path for path in PATHS if path in options.paths]
        ended_well = [_walk(path, _steps(path, options), Path(folder), rows) for path in chosen]
        table = ["", "| path | step | seconds |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
        print("\n".join(table), flush=True)  # Before the folder is deleted, which takes a while.
    return 0 if all(ended_well) else 1


def _steps(path: str, options: argparse.Namespace) -> list[str]:
    if path == "clone":
        return [f"git clone --quiet {ROOT} clone", "cd clone && make train"]
    if path == "wheel":
        wheel = options.wheel or max(ROOT.glob("dist/*.whl"), key=lambda each: each.stat().st_mtime, default=None)
        if wheel is None:
            raise SystemExit("there is no wheel in dist/: `make wheel` makes one, --wheel names another")
        install = f"pip install --quiet '{Path(wheel).resolve()}[{options.extras}]'"
        return [f"{sys.executable} -m venv ../env", install, "recstore train --planted pairs"]
    return _steps_of_tutorial({"csv": "csv", "curl": "serving"}[path])


def _steps_of_tutorial(name: str) -> list[str]:
    """The first program of a tutorial, which writes its file, and its commands."""
    page = (ROOT / "docs" / "tutorials" / f"{name}.md").read_text("utf-8")
    program = _PYTHON.findall(page)[0]
    return [f"python - <<'END'\n{program}END", *_COMMAND.findall(page)]


def _walk(path: str, steps: Sequence[str], folder: Path, rows: list[tuple[str, str, str]]) -> bool:
    """Takes the steps of a path one after another in a folder of its own, and returns whether all went well."""
    total, jobs = 0.0, list[subprocess.Popen[str]]()
    (folder / path).mkdir()
    with _ending(jobs):
        for step in steps:
            print(f"== {path}: {_shown(step)}", flush=True)
            begun = time.monotonic()
            ended_well = _take(step, folder / path, jobs)
            seconds = time.monotonic() - begun
            total += seconds
            rows.append((path, f"`{_shown(step)}`", f"{seconds:.1f}" if ended_well else "failed"))
            if not ended_well:
                return False
    rows.append((path, PATHS[path], f"**{total:.1f}**"))
    return True


def _take(step: str, folder: Path, jobs: list[subprocess.Popen[str]]) -> bool:
    """Takes a step; one that ends with `&` goes on once it has printed a line."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["PATH"] = f"{folder.parent / 'env' / 'bin'}:{environment['PATH']}"
    if step.startswith("kill %"):
        jobs[int(step.removeprefix("kill %")) - 1].terminate()
        return True
    command = step.removesuffix("&")
    if command == step:
        return subprocess.run(["bash", "-c", command], cwd=folder, env=environment, check=False).returncode == 0
    job = subprocess.Popen(
        ["bash", "-c", f"exec {command}"], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    jobs.append(job)
    assert job.stdout is not None
    return job.stdout.readline() != ""


@contextmanager
def _ending(jobs: list[subprocess.Popen[str]]) -> Iterator[None]:
    try:
        yield
    finally:
        for job in jobs:
            job.terminate()
            job.wait()


def _shown(step: str) -> str:
    line = step.partition("\n")[0].replace(str(ROOT), ".")
    return line if len(line) <= 80 else f"{line[:77]}..."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
