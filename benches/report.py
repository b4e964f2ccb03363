"""The figures of a run as tables of Markdown, and their place in README.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from benches.cells import TITLES
from benches.cells.one_table import YARDSTICK
from benches.derived import derive
from benches.measured import Figure, Outcome, Timed
from benches.recorded import README
from benches.summary import summary
from benches.targets import Target, targets
from benches.wording import ABSENT, axis, described, differing, ratio, significant, time_with_spread

START, END = "<!-- cells -->", "<!-- /cells -->"
_OTHERS = ("FBGEMM", "TorchRec", "F.embedding", "nn.", "torch", "xxhash")
"""How the names of other libraries begin."""

_NOISE = 1.05
"""Less is no difference."""

SUMMARY, SUMMARY_END = "<!-- summary -->", "<!-- /summary -->"


def write(outcomes: Sequence[Outcome], machine: Mapping[str, str], path: Path = README) -> None:
    """Puts the tables between the two marks of a file, instead of those there.

    Raises:
        ValueError: the file has not both marks.
    """
    _put(tables(outcomes, machine), START, END, path)


def write_summary(path: Path = README) -> None:
    """Puts the ratios of the file's tables between their two marks.

    Raises:
        ValueError: the file has not both marks, or its tables lack a figure.
    """
    _put(summary(), SUMMARY, SUMMARY_END, path)


def _put(content: str, mark: str, end_mark: str, path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    before, start, rest = text.partition(mark)
    _, end, after = rest.partition(end_mark)
    if not start or not end:
        raise ValueError(f"{path} must have the marks {mark} and {end_mark}")
    path.write_text(f"{before}{mark}\n\n{content}\n\n{end_mark}{after}", encoding="utf-8")


def tables(outcomes: Sequence[Outcome], machine: Mapping[str, str]) -> str:
    """All tables: what was measured on, targets, derived figures, then one table a cell."""
    sections = [
        _table(("", ""), machine.items()),
        "### Targets\n\n" + target_table(outcomes),
        "### Where others win\n\n" + _lost_table(outcomes),
        *(_cell(cell, title, outcomes) for cell, title in TITLES.items()),
        "### Derived\n\n" + _derived_table(outcomes),
    ]
    return "\n\n".join(sections)


def target_table(outcomes: Sequence[Outcome]) -> str:
    """Each target, the worst figure seen, where, and whether it holds."""
    return _table(("target", "limit", "seen at worst", "in", "holds"), map(_target_row, targets(outcomes)))


def verdict(outcomes: Sequence[Outcome]) -> str:
    """How many targets hold, and the others by name."""
    found = targets(outcomes)
    held, missed, unmeasured = ([one.text for one in found if one.holds is holds] for holds in (True, False, None))
    head = f"{len(held)} targets hold, {len(missed)} do not, {len(unmeasured)} were not measured"
    return "\n".join([head, *(f"    missed: {text}" for text in missed)])


def _target_row(target: Target) -> Sequence[str]:
    limit = f"{'>=' if target.is_least else '<='} {target.limit:g} {target.unit}".rstrip()
    worst = target.worst
    if worst is None:
        return target.text, limit, ABSENT, "", "not measured"
    seen = f"{significant(worst.value)} {target.unit}".rstrip()
    return target.text, limit, seen, worst.where, "yes" if target.holds else "**no**"


def _lost_table(outcomes: Sequence[Outcome]) -> str:
    """Each case in which another library takes less time than this one, by more than the noise."""
    lost = [
        (TITLES[case.cell], described(case.axes, case.axes), ours, other, f"{factor:.2f} x as fast")
        for case in outcomes
        if isinstance(case, Timed) and not case.error
        for other, ours, factor in _beside_others(case)
        if factor > _NOISE
    ]
    return _table(("cell", "case", "here", "other", "the other is"), lost)


def _beside_others(case: Timed) -> Iterator[tuple[str, str, float]]:
    """Each other library, what it was measured beside, and how many times as fast it is."""
    for name, bases in case.against.items():
        for base in bases:
            spread = case.ratio(name, base)
            if spread is None or _is_other(name) == _is_other(base) or YARDSTICK in (name, base):
                continue
            yield (name, base, 1 / spread.median) if _is_other(name) else (base, name, spread.median)


def _is_other(competitor: str) -> bool:
    return competitor.startswith(_OTHERS)


def _derived_table(outcomes: Sequence[Outcome]) -> str:
    figures = derive([outcome for outcome in outcomes if isinstance(outcome, Timed)])
    return _table(
        ("figure", "cell", "case", "value"),
        (
            (figure.name, figure.cell, described(figure.axes, figure.axes), significant(figure.value))
            for figure in figures
        ),
    )


def _cell(cell: str, title: str, outcomes: Sequence[Outcome]) -> str:
    """One cell's section: what all its cases share, and a row a case."""
    timed = [outcome for outcome in outcomes if isinstance(outcome, Timed) and outcome.cell == cell]
    figures = [outcome for outcome in outcomes if isinstance(outcome, Figure) and outcome.cell == cell]
    parts = [f"### {title}"]
    if timed:
        parts += [part for part in (_shared_axes(timed), _timed_table(timed)) if part]
    if figures:
        parts.append(_table(("figure", "value", "unit", "limit"), map(_figure_row, figures)))
    if not timed and not figures:
        parts.append("Not measured in this run.")
    return "\n\n".join(parts)


def _shared_axes(timed: Sequence[Timed]) -> str:
    """A sentence with the axes that are the same in all rows."""
    rows = [case.axes for case in timed if case.nanoseconds]
    if not rows:
        return ""
    shared = [name for name in rows[0] if name not in differing(rows)]
    return f"All with {described(rows[0], shared)}." if shared else ""


def _timed_table(timed: Sequence[Timed]) -> str:
    measured = [case for case in timed if case.nanoseconds]
    axes = differing(case.axes for case in measured)
    columns = _columns(measured)
    heads = [*axes, *(head for name, bases in columns for head in _heads(name, bases))]
    rows = [_timed_row(case, axes, columns) for case in timed]
    return _table(heads or ["case"], rows)


def _columns(timed: Iterable[Timed]) -> list[tuple[str, Sequence[str]]]:
    """Each competitor, and whose time its own is divided by, in the order in which they come."""
    columns: dict[str, Sequence[str]] = {}
    for case in timed:
        for name in case.nanoseconds:
            columns[name] = columns.get(name) or case.against.get(name, ())
    return list(columns.items())


def _heads(name: str, bases: Sequence[str]) -> Iterator[str]:
    yield name
    yield from (f"x {base}" for base in bases)


def _timed_row(case: Timed, axes: Sequence[str], columns: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    if case.error:
        where = described(case.axes, case.axes)
        return [f"{where}: {_on_one_line(case.error)}"]
    cells = [axis(case.axes.get(name, ABSENT)) for name in axes]
    for name, bases in columns:
        cells.append(time_with_spread(case.spread(name)))
        cells += [ratio(case.ratio(name, base)) for base in bases]
    return cells


def _on_one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _figure_row(figure: Figure) -> Sequence[str]:
    return figure.name, significant(figure.value), figure.unit, figure.limit


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join([*cells, *[''] * (len(heads) - len(cells))])} |" for cells in lines)


def line(outcome: Outcome) -> str:
    """An outcome in a few words, for the terminal."""
    if isinstance(outcome, Figure):
        return f"{outcome.cell}: {outcome.name}: {significant(outcome.value)} {outcome.unit}"
    head = f"{outcome.cell}: {described(outcome.axes, outcome.axes)}"
    if outcome.error:
        return f"{head}\n    failed: {outcome.error}"
    return "\n".join([head, *(f"    {text}" for text in _competitor_lines(outcome))])


def _competitor_lines(timed: Timed) -> Iterator[str]:
    for name in timed.nanoseconds:
        bases = timed.against.get(name, ()) if timed.nanoseconds[name] else ()
        compared = ", ".join(f"{ratio(timed.ratio(name, base))} x {base}" for base in bases)
        yield f"{name:<22} {time_with_spread(timed.spread(name)):<32} {compared}".rstrip()
