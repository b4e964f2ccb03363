"""Compares two runs of one model: tables in this package's store, and in `torch.nn.Embedding(sparse=True)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recstore_ops.config.directory import replace_file
from recstore_ops.training.metrics.evaluation import FIGURE_TITLES
from recstore_ops.training.report.plots import (
    OURS,
    THEIRS,
    abbreviate,
    byte_unit,
    finish,
    marker_of,
    new_figure,
    save,
    show_at_least,
    use_log_scale_where_wide,
    use_rows_axis,
)
from recstore_ops.training.report.recorded_run import RecordedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_STYLES = ((OURS, "-"), (THEIRS, "--"))


def draw_comparison(path: Path, runs: Mapping[str, RecordedRun]) -> None:
    """Writes a PNG of two runs by name: logloss, AUC or recall@10, memory and speed."""
    figure = new_figure(13, 8.5)
    ((loss_axes, auc_axes), (speed_axes, memory_axes)) = figure.subplots(2, 2)
    part = _held_out_part(runs)
    _plot_losses(loss_axes, runs, part)
    ranking = "recall_at_10" if _has(runs, f"{part}_recall_at_10") else "auc"
    _plot_curves(auc_axes, runs, "evaluation", f"{part}_{ranking}")
    show_at_least(auc_axes, 0.01)
    _plot_speed(speed_axes, runs)
    unit = _plot_memory(memory_axes, runs)
    for axes in (loss_axes, auc_axes, memory_axes):
        use_rows_axis(axes)
    finish(loss_axes, title="Logloss", ylabel="logloss (nats)")
    finish(auc_axes, title=f"{FIGURE_TITLES[ranking]} on {part} rows", ylabel=FIGURE_TITLES[ranking])
    finish(speed_axes, title="Speed", ylabel="training rows per second")
    finish(memory_axes, legend="center right", title="Memory", ylabel=f"memory ({unit})")
    save(figure, path)


def _held_out_part(runs: Mapping[str, RecordedRun]) -> str:
    return "validation" if _has(runs, "validation_logloss") else "test"


def _has(runs: Mapping[str, RecordedRun], figure: str) -> bool:
    return any(figure in line for run in runs.values() for line in run.of_kind("evaluation"))


def _plot_losses(axes: Axes, runs: Mapping[str, RecordedRun], part: str) -> None:
    losses = []
    for (name, run), (color, style) in zip(runs.items(), _STYLES, strict=True):
        rows, training = run.curve("steps", "loss")
        axes.plot(rows, training, color=color, linestyle=style, linewidth=0.8, alpha=0.5, label=f"{name}, training")
        losses += training
    _plot_curves(axes, runs, "evaluation", f"{part}_logloss", f", {part}")
    use_log_scale_where_wide(axes, losses)
    axes.yaxis.set_major_formatter("{x:.6g}")


def _plot_curves(axes: Axes, runs: Mapping[str, RecordedRun], event: str, figure: str, suffix: str = "") -> None:
    for (name, run), (color, style) in zip(runs.items(), _STYLES, strict=True):
        rows, values = run.curve(event, figure)
        if rows:
            axes.plot(rows, values, color=color, linestyle=style, marker=marker_of(rows), label=f"{name}{suffix}")


def _plot_speed(axes: Axes, runs: Mapping[str, RecordedRun]) -> None:
    speeds = [run.rows_per_second() or 0 for run in runs.values()]
    bars = axes.bar(list(runs), speeds, color=[color for color, _ in _STYLES], width=0.5)
    axes.bar_label(bars, [f"{speed:,.0f}" for speed in speeds])
    axes.margins(x=0.3, y=0.15)
    abbreviate(axes.yaxis)


def _plot_memory(axes: Axes, runs: Mapping[str, RecordedRun]) -> str:
    """Returns the unit of memory."""
    size, unit = byte_unit(max(run.peak("process_bytes") or 0 for run in runs.values()))
    for (name, run), (color, _) in zip(runs.items(), _STYLES, strict=True):
        for figure, what, style in (("process_bytes", "process (resident)", "-"), ("table_bytes", "tables", ":")):
            rows, amounts = run.curve("steps", figure)
            scaled = [amount / size for amount in amounts]
            axes.plot(rows, scaled, color=color, linestyle=style, marker=marker_of(rows), label=f"{name}, {what}")
    axes.set_ylim(bottom=0)
    return unit


_OURS, _THEIRS = "recstore", "torch.nn.Embedding"
_MEBIBYTE = 2**20

# Both runs must agree on these; other differences are listed.
_MUST_BE_EQUAL = ("model", "seed")
_MEANT_TO_DIFFER = ("tables",)


@dataclass(frozen=True)
class _Row:
    """A line of the report: a figure of both runs, None for a run without it."""

    name: str
    ours: float | None
    theirs: float | None
    form: str
    as_ratio: bool

    def cells(self) -> tuple[str, str, str, str]:
        """Returns the texts of the four columns; the last is ours / theirs, or ours - theirs."""
        return self.name, self._text(self.ours), self._text(self.theirs), self._compared()

    def _text(self, value: float | None) -> str:
        return "-" if value is None else format(value, self.form)

    def _compared(self) -> str:
        if self.ours is None or self.theirs is None:
            return "-"
        if not self.as_ratio:
            return f"{self.ours - self.theirs:+.2g}" if self.ours != self.theirs else "0"
        return f"{self.ours / self.theirs:.2f} x" if self.theirs else "-"


def write_comparison(path: Path, ours: Path, theirs: Path) -> str:
    """Writes `report.md` and `comparison.png` into `path`, and returns the comparison as short text.

    Args:
        path: a directory; made if it is not there.
        ours: the directory of the finished run with the store's tables.
        theirs: that of the run with `torch.nn.Embedding`.

    Raises:
        ValueError: one is not the directory of a run, or the runs differ in model or seed.
    """
    our_run, their_run = RecordedRun.read(ours), RecordedRun.read(theirs)
    differing = _differing_options(our_run, their_run)
    sections = {
        "Quality at the best evaluation": _quality(our_run, their_run),
        "Time": _time(our_run, their_run),
        "Memory": _memory(our_run, their_run),
    }
    path.mkdir(parents=True, exist_ok=True)
    draw_comparison(path / "comparison.png", {_OURS: our_run, _THEIRS: their_run})
    notes = _notes(our_run, their_run)
    report = _report(our_run, their_run, differing, sections, notes)
    replace_file(path / "report.md", report.encode())
    return _terminal_text([row for rows in sections.values() for row in rows], notes)


def _differing_options(ours: RecordedRun, theirs: RecordedRun) -> list[str]:
    names = [name for name in {**ours.config, **theirs.config} if ours.config.get(name) != theirs.config.get(name)]
    for name in _MUST_BE_EQUAL:
        if name in names:
            values = f"{ours.config.get(name)!r} and {theirs.config.get(name)!r}"
            raise ValueError(f"runs of one {name} can be compared, these have {values}")
    return [name for name in names if name not in _MEANT_TO_DIFFER]


def _quality(ours: RecordedRun, theirs: RecordedRun) -> list[_Row]:
    best, their_best = ours.best_evaluation() or {}, theirs.best_evaluation() or {}
    titles = {
        f"{part}_{name}": f"{part} {title}" for part in ("validation", "test") for name, title in FIGURE_TITLES.items()
    }
    present = [name for name in titles if name in best or name in their_best]
    return [_Row(titles[name], best.get(name), their_best.get(name), ".5f", False) for name in present]


def _time(ours: RecordedRun, theirs: RecordedRun) -> list[_Row]:
    rows = [
        ("training rows per second", RecordedRun.rows_per_second, ",.0f"),
        ("seconds of training", RecordedRun.training_seconds, ",.2f"),
        ("seconds for the vocabulary", lambda run: _only(run, "vocabulary", "seconds"), ",.2f"),
        ("seconds in all", lambda run: _only(run, "end", "seconds"), ",.2f"),
    ]
    return [_Row(name, figure(ours), figure(theirs), form, True) for name, figure, form in rows]


def _memory(ours: RecordedRun, theirs: RecordedRun) -> list[_Row]:
    rows = [
        ("peak of the process, MiB", lambda run: _mebibytes(run.peak("process_bytes")), ",.1f"),
        ("tables, MiB", lambda run: _mebibytes(run.peak("table_bytes")), ",.2f"),
        ("rows in tables", lambda run: run.peak("table_rows"), ",.0f"),
    ]
    return [_Row(name, figure(ours), figure(theirs), form, True) for name, figure, form in rows]


def _only(run: RecordedRun, event: str, figure: str) -> float | None:
    events = run.of_kind(event)
    return events[-1][figure] if events else None


def _mebibytes(size: float | None) -> float | None:
    return None if size is None else size / _MEBIBYTE


def _notes(ours: RecordedRun, theirs: RecordedRun) -> list[str]:
    losses = {line["step"]: line["loss"] for line in ours.of_kind("steps")}
    pairs = [(line["step"], losses.get(line["step"]), line["loss"]) for line in theirs.of_kind("steps")]
    differences = [(abs(loss - other), step) for step, loss, other in pairs if loss is not None]
    notes = []
    if differences:
        largest, step = max(differences)
        notes.append(f"Training losses differ by at most {largest:.2g} nats, at step {step:,}.")
    for name, run in ((_OURS, ours), (_THEIRS, theirs)):
        if not _only(run, "end", "finished"):
            notes.append(f"The run with {name} did not finish.")
    return notes


def _report(
    ours: RecordedRun,
    theirs: RecordedRun,
    differing: Sequence[str],
    sections: dict[str, list[_Row]],
    notes: Sequence[str],
) -> str:
    lines = [
        f"# {_OURS} against {_THEIRS}",
        "",
        f"Model {ours.config.get('model')}, seed {ours.config.get('seed')}, "
        f"optimizer {ours.config.get('optimizer')}: the same, tables aside. "
        f"Run `{ours.name}` against run `{theirs.name}`. "
        "The last column is ours - theirs where it has a sign, ours / theirs where it ends in x.",
    ]
    for title, rows in sections.items():
        lines += ["", f"## {title}", "", *_table(rows)]
    lines += ["", *notes] if notes else []
    lines += ["", "![curves of both runs](comparison.png)"]
    if differing:
        lines += ["", "## Options that differ", "", *_options_table(ours, theirs, differing)]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[_Row]) -> list[str]:
    body = [f"| {' | '.join(row.cells())} |" for row in rows]
    return [f"| | {_OURS} | {_THEIRS} | |", "|---|---:|---:|---:|", *body]


def _options_table(ours: RecordedRun, theirs: RecordedRun, names: Sequence[str]) -> list[str]:
    def value(run: RecordedRun, name: str) -> Any:
        return run.config.get(name, "-")

    body = [f"| {name} | {value(ours, name)} | {value(theirs, name)} |" for name in names]
    return [f"| | {_OURS} | {_THEIRS} |", "|---|---|---|", *body]


def _terminal_text(rows: Sequence[_Row], notes: Sequence[str]) -> str:
    lines = [("", _OURS, _THEIRS, ""), *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    aligned = [
        f"{line[0]:<{widths[0]}}  {line[1]:>{widths[1]}}  {line[2]:>{widths[2]}}  {line[3]:>{widths[3]}}".rstrip()
        for line in lines
    ]
    return "\n".join([*aligned, *notes])
