"""Forgetting ids: in checkpoints, runs, directories of servers, bundles, and on servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from recstore_ops import _native
from recstore_ops.config.paths import user_path
from recstore_ops.forgetting.id_set import IdSet, Match
from recstore_ops.forgetting.places import find_places, places_below
from recstore_ops.forgetting.report import SKETCHED, ForgetReport, Location, Occurrence, PlaceReport, Scan, held
from recstore_ops.forgetting.scan import scan as scan_files
from recstore_ops.servers.addresses import check_addresses
from recstore_ops.servers.server_config import HASH_METHODS, Tls


@dataclass(frozen=True)
class ServersPlace:
    """Parameter servers, called as a client does.

    Attributes:
        servers: `host:port` of each shard, in their order; of all servers of a shard with a bar between them.
        hash_method: how ids are spread over them.
        token: what they want to hear.
        tls: encrypts.
        timeout: the seconds that a call may take.

    Raises:
        ValueError: an address that is none, or another hash method.
    """

    servers: Sequence[str]
    hash_method: str = HASH_METHODS[0]
    token: str | None = None
    tls: Tls | None = None
    timeout: float = 30.0

    def __post_init__(self) -> None:
        check_addresses(self.servers)
        if self.hash_method not in HASH_METHODS:
            raise ValueError(f"hash_method must be one of {', '.join(HASH_METHODS)}, got {self.hash_method!r}")

    def look(self, tables: Sequence[str], ids: IdSet) -> PlaceReport:
        """Returns the rows that the servers have of ids.

        Raises:
            ValueError: they have no such table.
            ConnectionError: a server does not answer, or refuses.
        """
        found, _ = self._call(tables, ids, dry_run=True)
        return self._report(tables, found)

    def forget(self, tables: Sequence[str], ids: IdSet) -> PlaceReport:
        """Deletes the ids, and lets the servers save; raises as `look`, and RuntimeError if one cannot be saved."""
        found, saved = self._call(tables, ids, dry_run=False)
        rows, size = sum(map(len, found)), sum(bytes or 0 for bytes in saved)
        return self._report(tables, found, rows, size)

    def _call(self, tables: Sequence[str], ids: IdSet, *, dry_run: bool) -> tuple[list[list[int]], list[int | None]]:
        return _native.forget_on_servers(
            list(self.servers),
            self.hash_method,
            self.token,
            self.tls,
            self.timeout,
            list(tables),
            list(ids),
            dry_run,
        )

    def _report(self, tables: Sequence[str], found: list[list[int]], rows: int = 0, size: int = 0) -> PlaceReport:
        rows_of = zip(tables, found, strict=True)
        own = [each for table, ids in rows_of for each in held(f'table "{table}"', "rows", Match(ids))]
        return PlaceReport(" ".join(self.servers), "servers", own, rows=rows, bytes=size)


AnyPath = str | PathLike[str]


def forget(
    places: AnyPath | Sequence[AnyPath] = (),
    table: str | Sequence[str] = (),
    ids: Iterable[int] | Tensor | NDArray[Any] = (),
    *,
    servers: Sequence[str] = (),
    hash_method: str = "city_hash",
    token: str | None = None,
    tls: Tls | None = None,
    timeout: float = 30.0,
    scan: AnyPath | Sequence[AnyPath] = (),
    dry_run: bool = False,
    progress: bool | None = None,
    on_plan: Callable[[list[PlaceReport]], None] | None = None,
) -> ForgetReport:
    """Deletes the rows of ids in all given places, and lists the files that still hold the ids.

    A checkpoint loses every snapshot that has an id: as a row, as deleted, as counted by admission or as chosen by
    eviction. One full snapshot of the newest state takes their place. Bundles get their tables without the rows. Other
    rows stay as they are, to the bit. Each place is changed as a whole or not at all. Then all files of the places are
    searched, by their formats. The call takes as much memory as the tables take in training.

    A training process that has the rows in its memory brings them back with its next save: delete them there too.

    Args:
        places: directories: of checkpoints, of runs of `recstore train`, of servers that do not run (their `--data`, or
            one shard of it), of bundles, and of publications whose publisher does not run.
        table: the name of the table, or of several. Every place must have each of them.
        ids: the ids. Those without a row are reported, and are no error.
        servers: `host:port` of running servers, as `set_ps_servers` takes them. They delete the rows, and save to their
            directories, so that no log has the ids.
        hash_method: how the servers spread ids.
        token: the servers' token.
        tls: as in `set_ps_servers`.
        timeout: as in `set_ps_servers`.
        scan: further directories whose files are looked through. They are not changed.
        dry_run: whether nothing is changed.
        progress: whether to show progress bars; by default if the standard error is a terminal or a notebook.
        on_plan: called with what the places have, before anything is changed.

    Returns:
        The report, with the ids found and removed, and the files that still hold ids.

    Raises:
        TypeError: ids that are no integers, or servers that are a text.
        ValueError: no ids, tables or places; a directory that is none of these, or that a server uses; a table that is
            not there, with the names of those that are.
        RuntimeError, OSError: a file is damaged or cannot be written. The message names it; that place is as it was.
        ConnectionError: a server does not answer.
    """
    wanted, names = IdSet(ids), _names(table)
    given = [places] if isinstance(places, str | PathLike) else list(places)
    # A text is one place above, and so it is here.
    scanned = [_directory(path) for path in ([scan] if isinstance(scan, str | PathLike) else scan)]
    check_addresses(servers)
    on_servers = ServersPlace(tuple(servers), hash_method, token, tls, timeout) if servers else None
    if not given and on_servers is None:
        raise ValueError("there is no place where ids are to be forgotten: name directories, or servers")
    found = find_places(given)
    for place in found:
        _check_tables(place, names)
    # All are looked at before the first changes: a file that is damaged refuses the call while all are as they were.
    plan = [(place, place.look(names, wanted)) for place in found]
    reports = [PlaceReport(place.path, place.kind, look.held, look.snapshots) for place, look in plan]
    if on_servers is not None:
        reports.append(on_servers.look(names, wanted))
    if on_plan is not None:
        on_plan(reports)
    if not dry_run:
        reports = [_carried_out(*each, names, wanted, progress) for each in plan]
        reports += [] if on_servers is None else [on_servers.forget(names, wanted)]
    remaining = _remaining(plan, names, wanted, dry_run=dry_run)
    # Only now: what was carried out has changed which files the places have.
    known = {file.resolve() for place in found for file in place.explained()}
    directories = [*(Path(user_path(path)) for path in given), *scanned]
    remaining += _in_other_places(directories, known, names, wanted)
    remaining += scan_files(directories, known, frozenset(names), wanted, progress)
    return ForgetReport(names, tuple(wanted), dry_run, reports, _not_found(wanted, reports), remaining)


def _names(table: str | Sequence[str]) -> tuple[str, ...]:
    names = (table,) if isinstance(table, str) else tuple(dict.fromkeys(table))
    if not names or "" in names:
        raise ValueError("there is no table whose ids are to be forgotten: name one")
    return names


def _directory(path: AnyPath) -> Path:
    directory = Path(user_path(path, "scan"))
    if not directory.is_dir():
        raise ValueError(f"there is no directory {directory} to be looked through")
    return directory


def _check_tables(place: Location, names: Sequence[str]) -> None:
    there = place.tables()
    if missing := [name for name in names if name not in there]:
        raise ValueError(f'{place.path} has no table "{missing[0]}", but {", ".join(sorted(there)) or "none"}')


def _carried_out(place: Location, look: Scan, names: Sequence[str], ids: IdSet, progress: bool | None) -> PlaceReport:
    rows, size = place.forget(names, ids, look, progress)
    return PlaceReport(place.path, place.kind, look.held, look.snapshots, rows, size)


def _remaining(
    plan: list[tuple[Location, Scan]], names: Sequence[str], ids: IdSet, *, dry_run: bool
) -> list[Occurrence]:
    """The ids that the places still hold afterwards, or would still hold."""
    if dry_run:
        return [held for _, look in plan for held in look.stays]
    looks = [place.look(names, ids) for place, _ in plan]
    return [held for look in looks for held in (*look.held, *look.stays)]


def _in_other_places(directories: list[Path], known: set[Path], names: Sequence[str], ids: IdSet) -> list[Occurrence]:
    """The ids in checkpoints and bundles below that the caller did not name; adds the files of these to `known`."""
    found = []
    for place in places_below(directories, known):
        # One that is damaged, or that somebody saves to, is looked through as other files are.
        with suppress(RuntimeError, OSError, ValueError):
            look = place.look(names, ids)
            known |= {file.resolve() for file in place.explained()}
            found += [*look.held, *look.stays]
    return found


def _not_found(ids: IdSet, reports: list[PlaceReport]) -> tuple[int, ...]:
    found = {id for report in reports for held in report.held if held.what != SKETCHED for id in held.ids}
    return tuple(id for id in ids if id not in found)


__all__ = ["ServersPlace", "forget"]
