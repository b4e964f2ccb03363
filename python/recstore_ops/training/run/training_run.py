"""A training run in a directory of its own, shown on the terminal; and two of them side by side."""

from __future__ import annotations

import math
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread

from rich.console import Console

from recstore_ops.training.metrics.evaluation import FIGURE_TITLES, Evaluation, Scores
from recstore_ops.training.metrics.retrieval import Retriever
from recstore_ops.training.metrics.segments import SegmentFigures
from recstore_ops.training.models.tables import Vocabulary
from recstore_ops.training.report.comparison import write_comparison
from recstore_ops.training.report.display import Display
from recstore_ops.training.report.records import EvaluationRecord, StepRecord, best_record
from recstore_ops.training.report.run_directory import RunDirectory, create_directory
from recstore_ops.training.run.begin import begin
from recstore_ops.training.run.checkpoints import RunCheckpoints, SaveOptions, ShardedRunCheckpoints, State
from recstore_ops.training.run.choices import RETRIEVAL
from recstore_ops.training.run.config import TrainingConfig
from recstore_ops.training.run.followed_files import FollowedFiles
from recstore_ops.training.run.following import follow
from recstore_ops.training.run.input_config import FollowOptions
from recstore_ops.training.run.job import Job, joined_job, may_restart, restarts
from recstore_ops.training.run.loop import train
from recstore_ops.training.run.phases import Phases
from recstore_ops.training.run.row_form import RowForm
from recstore_ops.training.run.stopping import StopRequest
from recstore_ops.training.run.training_input import TrainingInput, check_file_sizes, open_input


def run_training(
    config: TrainingConfig,
    runs_dir: Path,
    name: str | None,
    saving: SaveOptions,
    following: FollowOptions = FollowOptions(),  # noqa: B008, for it cannot change.
    *,
    profile: bool = False,
) -> Path:
    """Trains as configured and saves the run, writes to the terminal, and returns the run's directory.

    In a job of `torchrun` all processes train together, with tables sharded over them, and the first process writes. If
    `torchrun` restarts the job after a failure, the run resumes from its last save.

    With `profile` it writes the time of this process by phase at the end.

    The first SIGINT or SIGTERM ends the run after the step that is under way.

    Raises:
        ValueError: bad input, a name that is taken, a run that cannot be resumed as configured, tables that have rows
            already, or that cannot be sharded over the processes of a job.
        OSError: the run cannot be saved, or what was saved is damaged.
        RunStopped: the run was asked to end, and was saved.
    """
    if saving.replace_tables and config.tables == "nn":
        raise ValueError("--replace-tables is about tables of the store, and this run has tables nn")
    saving = _going_on_after_restart(runs_dir, name, saving)
    with joined_job() as job, StopRequest() as stop:
        _check_job(config, job)
        if job.is_first:
            return _run_first(config, runs_dir, name, saving, following, job, stop, Phases() if profile else None)
        return _run_further(config, saving, job, stop)


def _run_first(
    config: TrainingConfig,
    runs_dir: Path,
    name: str | None,
    saving: SaveOptions,
    following: FollowOptions,
    job: Job,
    stop: StopRequest,
    phases: Phases | None,
) -> Path:
    """Runs the process that writes the run's directory and shows what happens."""
    console = Console()
    with (
        _created(runs_dir, name, config, saving, job) as run,
        _display(console, config) as display,
    ):
        files = None if config.follow_files is None else FollowedFiles(config, following, stop, display)
        checkpoints = _checkpoints(run.path, run, saving, stop, job)
        is_new = not (saving.resume and _go_on(config, run, checkpoints, display))
        replaces = saving.replace_tables
        records = _train(config, run, display, checkpoints, job, files, phases, is_new=is_new, replaces=replaces)
        _record_best(run, best_record(records))
        if phases is not None:
            display.show(phases.table())
    console.print(_summary(records), highlight=False, soft_wrap=True)
    console.print(f"model: {checkpoints.best_path}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"results: {run.path}", markup=False, highlight=False, soft_wrap=True)
    return run.path


def _run_further(config: TrainingConfig, saving: SaveOptions, job: Job, stop: StopRequest) -> Path:
    """Runs one of the other processes."""
    path = job.told_by_first(None)
    if path is None:
        raise ValueError("the first process of the job could not begin; its own error tells why")
    checkpoints = _checkpoints(path, None, saving, stop, job)
    rows = open_input(config)
    is_new, replaces = checkpoints.last_state() is None, saving.replace_tables
    model, begun = begin(config, rows.train, job, path, is_new=is_new, replaces=replaces)
    train(config, model, rows, _SilentObserver(), checkpoints, job, begun.start)
    begun.changes(model)
    return path


def _created(runs_dir: Path, name: str | None, config: TrainingConfig, saving: SaveOptions, job: Job) -> RunDirectory:
    """Creates or opens the run's directory, and sends its path to the other processes, which wait for it."""
    path = None
    try:
        run = RunDirectory(runs_dir, name, config, resume=saving.resume)
        path = run.path
    finally:
        # After an error too: the other processes wait for this, and end if there is no path.
        job.told_by_first(path)
    return run


def _checkpoints(
    path: Path, run: RunDirectory | None, saving: SaveOptions, stop: StopRequest, job: Job
) -> RunCheckpoints:
    if job.group is None:
        return RunCheckpoints(path, run, saving, stop)
    return ShardedRunCheckpoints(path, run, saving, stop, job)


def _check_job(config: TrainingConfig, job: Job) -> None:
    """Refuses configurations that several processes cannot run together.

    Raises:
        ValueError: there are several processes, and the tables are `nn.Embedding`, the run follows files, or the
            model's loss compares rows.
    """
    if job.world > 1 and config.follow_files is not None:
        raise ValueError(f"a run that follows files has one process, got {job.world}")
    if job.world > 1 and config.model in RETRIEVAL:
        raise ValueError(
            f"model {config.model} is trained by one process: its loss compares all rows of a batch, of which each of "
            f"{job.world} processes would see a share"
        )
    if job.world > 1 and config.tables == "nn":
        raise ValueError(f"tables of nn.Embedding cannot be sharded over {job.world} processes")


def _going_on_after_restart(runs_dir: Path, name: str | None, saving: SaveOptions) -> SaveOptions:
    """The options of a run, which resumes by itself if `torchrun` has restarted its job.

    Raises:
        ValueError: `torchrun` may restart the job, and the run has no name by which it would be found again.
    """
    if name is None:
        if may_restart():
            raise ValueError("with --max-restarts a run needs --run-name, by which it goes on")
        return saving
    return replace(saving, resume=saving.resume or (restarts() > 0 and (runs_dir / name).is_dir()))


def _go_on(config: TrainingConfig, run: RunDirectory, checkpoints: RunCheckpoints, display: Display) -> bool:
    """Restores a run's directory to its last save; returns whether there is a save."""
    state = checkpoints.last_state()
    if state is None:
        display.note("the run ended before it was saved: beginning anew")
        run.restart()
        return False
    check_file_sizes(config, state["file_sizes"])
    # The save comes before its copy, and the run may have ended between the two.
    if state["is_best"]:
        checkpoints.keep_best()
    best = checkpoints.best_state()
    evaluations = [EvaluationRecord.of(fields) for fields in state["records"]]
    run.restore(state["recorded"], evaluations, best["recorded"]["scores"] if best else {}, state["step"])
    display.note(_going_on(state))
    return True


def _going_on(state: State) -> str:
    if state["finished"]:
        return f"the run was finished after step {state['step']:,}"
    return f"going on after step {state['step']:,}, in epoch {state['epoch']}"


def _train(
    config: TrainingConfig,
    run: RunDirectory,
    display: Display,
    checkpoints: RunCheckpoints | None,
    job: Job,
    files: FollowedFiles | None = None,
    phases: Phases | None = None,
    *,
    is_new: bool = True,
    replaces: bool = False,
) -> list[EvaluationRecord]:
    rows, form = _opened(config, run, files, is_new=is_new)
    _show_input(rows, run, display)
    form.write(run.path)
    vocabulary = None
    if config.tables == "nn":
        vocabulary = _take_vocabulary(rows, run, display, is_new=is_new)
        rows = rows.in_places_of(vocabulary)
    model, begun = begin(config, rows.train, job, run.path, is_new=is_new, replaces=replaces, vocabulary=vocabulary)
    if begun.note:
        display.note(begun.note)
    if isinstance(model, Retriever):
        rows = _with_candidates(rows, model, display)
    observer = _RunObserver(run, display, rows, vocabulary)
    if files is None or checkpoints is None:
        records = train(config, model, rows, observer, checkpoints, job, begun.start, phases)
    else:
        records = follow(config, model, rows, files, observer, checkpoints, begun.start, phases)
    for changes in begun.changes(model):
        run.record_event("table_changes", **asdict(changes))
        display.note(changes.as_text())
    for part, figures in run.segments().items():
        display.note(_segments_note(rows.train.group_name or config.auc_by, part, figures))
    return records


def _opened(
    config: TrainingConfig, run: RunDirectory, files: FollowedFiles | None, *, is_new: bool
) -> tuple[TrainingInput, RowForm]:
    if files is not None:
        return files.begin(run.path, is_new=is_new)
    rows = open_input(config)
    return rows, RowForm.of(config, rows)


def _show_input(rows: TrainingInput, run: RunDirectory, display: Display) -> None:
    """Shows the roles of columns and notes about the rows, and keeps them with the run."""
    if (table := rows.schema_table()) is not None:
        display.show(table)
    for note in rows.notes if rows.theory is None else (*rows.notes, rows.theory()):
        display.note(note)
    if rows.schema is not None:
        run.keep_schema(rows.schema)


def _with_candidates(rows: TrainingInput, model: Retriever, display: Display) -> TrainingInput:
    """Passes over all rows for the items that evaluations rank, if there are rows to evaluate."""
    started = time.perf_counter()
    rows = rows.with_candidates(model.sides)
    if rows.candidates is not None:
        seconds, count = time.perf_counter() - started, len(rows.candidates)
        display.note(f"a pass for the items to rank: {count:,} distinct ones of all rows in {seconds:.1f} s")
    return rows


def _display(console: Console, config: TrainingConfig) -> Display:
    return Display(console, config.epochs or 1, retrieves=config.model in RETRIEVAL)


def _record_best(run: RunDirectory, best: EvaluationRecord) -> None:
    run.record_event("best", number=best.number, epoch=best.epoch, step=best.step)


def run_comparison(config: TrainingConfig, runs_dir: Path, name: str | None) -> Path:
    """Trains twice, with tables in the store and in `nn.Embedding`, and returns the directory of runs and report.

    Each side has a process of its own, so that neither profits from nor pays for the other's memory.

    Raises:
        ValueError: as `run_training`, or a configuration that `nn.Embedding` cannot follow.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("a comparison with a baseline is of one process: start it without torchrun")
    if config.follow_files is not None:
        raise ValueError("a run that follows files takes no baseline: two runs would not see the same files")
    sides = {tables: replace(config, tables=tables) for tables in ("store", "nn")}
    path = create_directory(runs_dir, name, f"{config.model}-comparison")
    console = Console()
    runs = {}
    try:
        for tables, side in sides.items():
            console.print(f"== tables: {tables}", markup=False, highlight=False)
            # A pool of its own for each side, so that memory of the first is gone; its future raises the child's error
            # here.
            with ProcessPoolExecutor(1, get_context("spawn"), initializer=_end_with_parent) as process:
                runs[tables] = process.submit(_run_side, side, path, tables).result()
    finally:
        if not any(path.iterdir()):
            path.rmdir()
    console.print(write_comparison(path, runs["store"], runs["nn"]), markup=False, highlight=False, soft_wrap=True)
    return path


def _run_side(config: TrainingConfig, runs_dir: Path, name: str) -> Path:
    """Trains one side of a comparison; nothing is saved, which would take its time."""
    with RunDirectory(runs_dir, name, config) as run, _display(Console(), config) as display:
        records = _train(config, run, display, None, Job())
    Console().print(_summary(records), highlight=False, soft_wrap=True)
    return run.path


def _end_with_parent() -> None:
    """Ends this process when its parent is gone, which cannot announce its end if it was killed."""
    parent = parent_process()
    assert parent is not None, "run in a child process"

    def watch() -> None:
        wait([parent.sentinel])
        # `sys.exit` would end this thread alone.
        os._exit(1)

    Thread(target=watch, name="recstore-watch-parent", daemon=True).start()


def _take_vocabulary(rows: TrainingInput, run: RunDirectory, display: Display, *, is_new: bool) -> Vocabulary:
    """Passes over all rows for the ids that `nn.Embedding` must know beforehand."""
    started = time.perf_counter()
    vocabulary = rows.vocabulary()
    seconds = time.perf_counter() - started
    if is_new:
        run.record_event("vocabulary", ids=len(vocabulary), seconds=seconds)
    display.note(f"a pass for the vocabulary of nn.Embedding: {len(vocabulary):,} ids in {seconds:.1f} s")
    return vocabulary


class _SilentObserver:
    """The observer of the processes that show nothing, but take part in computing what is shown."""

    def on_batch(self, epoch: int, rows: int, expected_rows: int | None, loss: float) -> None:
        pass

    def on_steps(self, record: StepRecord) -> None:
        pass

    def on_evaluation(self, record: EvaluationRecord, scores: dict[str, Scores]) -> None:
        pass


class _RunObserver:
    """Passes the events of a run on to its directory and to the display."""

    def __init__(self, run: RunDirectory, display: Display, rows: TrainingInput, vocabulary: Vocabulary | None) -> None:
        self._run = run
        self._vocabulary = vocabulary
        self._rows = rows
        self._display = display
        self.on_batch = display.on_batch

    def on_steps(self, record: StepRecord) -> None:
        self._run.record_steps(record)
        self._display.on_steps(record)

    def on_evaluation(self, record: EvaluationRecord, scores: dict[str, Scores]) -> None:
        self._run.record_evaluation(record, {part: self._with_ids(each) for part, each in scores.items()})
        self._display.on_evaluation(record)
        if record.number == 1:
            for file in (file for read in self._rows.read for file in read.skipped):
                self._display.note(f"bad lines skipped: {file.count}; the first: {file.first}")

    def _with_ids(self, scores: Scores) -> Scores:
        """The scores with ids as segments, if rows had places in a vocabulary."""
        if self._vocabulary is None or scores.segments is None or self._rows.train.group_name is not None:
            return scores
        return replace(scores, segments=self._vocabulary.ids[scores.segments])


def _segments_note(name: str | None, part: str, figures: SegmentFigures) -> str:
    rows = figures.weighted_auc_rows()
    if rows == 0:
        return f"no id of {name} has {part} rows of both classes: no AUC within it"
    recall, ndcg = figures.mean_ranking()
    return (
        f"{part} AUC within {name}, weighted by rows: {figures.weighted_auc():.4f} "
        f"({rows:,} rows of {len(figures):,} ids; segments.csv has each); recall@10 {recall:.4f} and NDCG@10 "
        f"{ndcg:.4f}, means over those with positive rows"
    )


def _summary(records: list[EvaluationRecord]) -> str:
    best = best_record(records)
    if best.file is not None:
        return _summary_of_files(records)
    reason = "lowest validation logloss" if best.validation else "the last"
    where = f"epoch {best.epoch:.4g} ({reason})"
    if best.test is None:
        return where
    return f"{where}: test {_quality(best.test)}, logloss {best.test.logloss:.4f} nats"


def _quality(result: Evaluation) -> str:
    shown = {name: figure for name, figure in result.figures().items() if name in ("auc", "recall_at_10", "ndcg_at_10")}
    figures = (
        f"{FIGURE_TITLES[name]} {'undefined' if math.isnan(figure) else f'{figure:.4f}'}"
        for name, figure in shown.items()
    )
    return ", ".join(figures)


def _summary_of_files(records: list[EvaluationRecord]) -> str:
    """Sums up the evaluations of files that were followed: each row counts once, by the model before its file."""
    parts = [record.validation for record in records if record.validation is not None]
    rows = sum(part.rows for part in parts)
    logloss = sum(part.rows * part.logloss for part in parts) / rows
    files = f"{len(parts)} files, the last {records[-1].file}"
    return f"{files}: progressive logloss over all {rows:,} rows {logloss:.4f} nats"
