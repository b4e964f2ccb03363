"""The command line: chooses cells, runs their stages one by one, writes what came out."""

from __future__ import annotations

import argparse
import datetime
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from benches import machine, plots, records, report, stage_run, tensor_memory
from benches.cells import SLOW_TO_PREPARE, TITLES, stages
from benches.cells.stage import Stage
from benches.measured import Figure, Outcome
from benches.progress import Progress
from benches.scale import FULL, QUICK


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 where something failed, else 0."""
    options = _options(arguments)
    scale = QUICK if options.quick else FULL
    output = options.resume or options.output or _default_output()
    warnings.filterwarnings("ignore", message="Sparse invariant checks")  # Of torch.optim.Adagrad to its own author.
    if options.quick:
        print(f"sizes are divided by {scale.divisor}: the figures mean nothing")
    described = machine.described()
    done = _done_before(options, described, scale.is_full)
    if not options.resume:
        records.start(output, described, scale.is_full)
    tensor_memory.recycle()
    print(f"raw figures go to {output}; if the run breaks off, --resume {output} goes on with them", flush=True)
    outcomes = run_all(stages(scale, options.only), output, done)
    _finish(outcomes, described, output, options)
    return int(any(not isinstance(outcome, Figure) and outcome.error for outcome in outcomes))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benches/run.py", description="Measures the store beside the yardstick and others."
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny tables, one round: shows that all cells run; the figures mean nothing",
    )
    parser.add_argument("--only", type=_cells, metavar="CELLS", help=f"of {', '.join(TITLES)}, separated by commas")
    parser.add_argument(
        "--output", type=Path, metavar="PATH", help="where the raw figures go as JSON lines [build/bench/<date>.jsonl]"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="PATH",
        help="goes on with the run of these raw figures, of this commit and machine: measures the stages that it lacks",
    )
    parser.add_argument(
        "--picture",
        action="store_true",
        help="draws docs/steps.svg from the cell `peers`, as a run of all cells does anyway",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="rewrite the tables of benches/README.md, as a run of all cells does anyway",
    )
    options = parser.parse_args(arguments)
    if options.quick and (options.write or options.picture):
        parser.error("--quick has no figures worth writing")
    if options.resume and not options.resume.is_file():
        parser.error(f"there is no file {options.resume} to go on with")
    options.writes = options.write or not (options.quick or options.only)
    options.picture = options.picture or options.writes
    options.only = options.only or [cell for cell in TITLES if not (options.quick and cell in SLOW_TO_PREPARE)]
    return options


def _cells(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in TITLES]
    if unknown:
        raise argparse.ArgumentTypeError(f"no cell {', '.join(unknown)}; there are {', '.join(TITLES)}")
    return names


def _default_output() -> Path:
    now = datetime.datetime.now().strftime("%Y-%m-%dT%H-%M-%S")
    return machine.ROOT / "build" / "bench" / f"{now}.jsonl"


def _done_before(options: argparse.Namespace, described: dict[str, str], is_full: bool) -> Mapping[str, list[Outcome]]:
    try:
        return records.finished(options.resume, described, is_full) if options.resume else {}
    except ValueError as error:
        raise SystemExit(f"run.py: {error}") from None


def run_all(chosen: Sequence[Stage], output: Path, done: Mapping[str, list[Outcome]]) -> list[Outcome]:
    """Measures the stages that are not done; gives what came out of all."""
    outcomes: list[Outcome] = []
    started = time.monotonic()
    with Progress(sum(stage.rounds for stage in chosen)) as progress:
        for number, stage in enumerate(chosen, 1):
            progress.start_stage(stage.title, stage.rounds)
            if stage.key in done:
                outcomes += done[stage.key]
                continue
            minutes = (time.monotonic() - started) / 60
            progress.write(f"== {number} of {len(chosen)}, after {minutes:.1f} minutes: {stage.key}")
            outcomes += _run_stage(stage, output, progress)
            tensor_memory.give_back()
    return outcomes


def _run_stage(stage: Stage, output: Path, progress: Progress) -> list[Outcome]:
    outcomes: list[Outcome] = []
    records.start_stage(output, stage.key)
    for outcome in stage_run.run(stage, progress.advance):
        outcomes.append(outcome)
        records.append(output, outcome)
        progress.write(report.line(outcome))
    if all(isinstance(outcome, Figure) or not outcome.error for outcome in outcomes):
        records.finish_stage(output, stage.key)
    return outcomes


def _finish(outcomes: Sequence[Outcome], described: dict[str, str], output: Path, options: argparse.Namespace) -> None:
    print(f"\nraw figures: {output}")
    if options.quick:
        print(f"left out: {', '.join(cell for cell in TITLES if cell not in options.only) or 'nothing'}")
        return
    print(report.target_table(outcomes))
    print(report.verdict(outcomes))
    if plots.draw(output.with_suffix(".png"), outcomes):
        print(f"plot: {output.with_suffix('.png')}")
    if options.picture and plots.draw_steps(plots.STEPS, outcomes, described):
        print(f"picture: {plots.STEPS}")
    if options.writes:
        report.write(outcomes, described)
        print(f"tables: {report.README}")
        try:
            report.write_summary()
        except ValueError as error:  # A run of some cells, or without FBGEMM.
            print(f"the summary stays as it was: {error}")
        print("docs/scale.md rests on them: `python -m benches.scale_model --write` computes it anew")
