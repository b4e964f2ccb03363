"""The command line: chooses cells, runs their stages one by one, writes what came out."""

from __future__ import annotations

import argparse
import datetime
import warnings
from collections.abc import Sequence
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
    output = options.output or _default_output()
    warnings.filterwarnings("ignore", message="Sparse invariant checks")  # Of torch.optim.Adagrad to its own author.
    if options.quick:
        print(f"sizes are divided by {scale.divisor}: the figures mean nothing")
    described = machine.described()
    records.start(output, described, scale.is_full)
    tensor_memory.recycle()
    outcomes = _run_all(stages(scale, options.only), output)
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
        "--write",
        action="store_true",
        help="rewrite the tables of benches/README.md, as a run of all cells does anyway",
    )
    options = parser.parse_args(arguments)
    if options.quick and options.write:
        parser.error("--quick has no figures worth writing")
    options.writes = options.write or not (options.quick or options.only)
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


def _run_all(chosen: Sequence[Stage], output: Path) -> list[Outcome]:
    outcomes: list[Outcome] = []
    with Progress(sum(stage.rounds for stage in chosen)) as progress:
        for stage in chosen:
            progress.start_stage(stage.title, stage.rounds)
            for outcome in stage_run.run(stage, progress.advance):
                outcomes.append(outcome)
                records.append(output, outcome)
                progress.write(report.line(outcome))
            tensor_memory.give_back()
    return outcomes


def _finish(outcomes: Sequence[Outcome], described: dict[str, str], output: Path, options: argparse.Namespace) -> None:
    print(f"\nraw figures: {output}")
    if options.quick:
        print(f"left out: {', '.join(cell for cell in TITLES if cell not in options.only) or 'nothing'}")
        return
    print(report.target_table(outcomes))
    if plots.draw(output.with_suffix(".png"), outcomes):
        print(f"plot: {output.with_suffix('.png')}")
    if options.writes:
        report.write(outcomes, described)
        print(f"tables: {report.README}")
        print("docs/scale.md rests on them: `python -m benches.scale_model --write` computes it anew")
