"""The command `recstore forget`: deletes ids from all places with their rows, and lists files that still hold them."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from recstore_ops.config.command_options import path_option
from recstore_ops.forgetting import ForgetReport, PlaceReport, forget
from recstore_ops.forgetting.id_set import read_ids, read_ids_file
from recstore_ops.servers.server_config import Tls, read_token

_WIDE = 200
_MAX_IDS_SHOWN = 5


class _HashMethod(str, Enum):
    CITY_HASH = "city_hash"
    SIMPLE_MOD = "simple_mod"


def forget_command(
    places: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PLACE...",
            help="A checkpoint, a run, the --data of servers that are down, a bundle, a publication.",
        ),
    ] = None,
    *,
    table: Annotated[list[str], typer.Option(help="The table whose ids they are; may be repeated.")],
    ids: Annotated[str | None, typer.Option(metavar="ID,...", help="The ids, with commas between them.")] = None,
    ids_file: Annotated[Path | None, path_option("A file with the ids, one a line.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what holds the ids; change nothing.")] = False,
    scan: Annotated[
        list[Path] | None,
        path_option("A directory whose files are looked through too; may be repeated."),
    ] = None,
    servers: Annotated[
        str | None, typer.Option(metavar="HOST:PORT,...", help="Running servers, in the order of their shards.")
    ] = None,
    hash_method: Annotated[
        _HashMethod, typer.Option(help="How ids are spread over these servers.")
    ] = _HashMethod.CITY_HASH,
    token_file: Annotated[Path | None, path_option("The token that the servers want to hear.")] = None,
    tls_ca: Annotated[Path | None, path_option("The certificates that are trusted, PEM; encrypts.")] = None,
    tls_certificate: Annotated[Path | None, path_option("The own certificate, PEM.")] = None,
    tls_key: Annotated[Path | None, path_option("The certificate's key, PEM.")] = None,
) -> None:
    """Delete ids from checkpoints, runs, servers and bundles, and list the files that still hold them.

    All snapshots that hold an id are removed, older ones too; a full snapshot without the ids replaces the newest. All
    other rows stay unchanged. Then every file of the places, and of --scan, is searched. The exit code is 1 if
    something still holds an id, or may hold one.
    """
    if tls_ca is None and (tls_certificate or tls_key):
        raise ValueError("--tls-certificate and --tls-key need --tls-ca, the certificates that are trusted")
    try:
        report = forget(
            places or [],
            table,
            _ids(ids, ids_file),
            servers=servers.split(",") if servers else [],
            hash_method=hash_method.value,
            token=None if token_file is None else read_token(token_file),
            tls=None if tls_ca is None else Tls(tls_certificate, tls_key, tls_ca),
            scan=scan or [],
            dry_run=dry_run,
            on_plan=lambda plan: _print_plan(plan, dry_run=dry_run),
        )
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    _print(report)
    if not report.is_forgotten:
        raise typer.Exit(1)


def _ids(ids: str | None, file: Path | None) -> list[int]:
    if (ids is None) == (file is None):
        raise ValueError("name the ids either with --ids or with --ids-file")
    return read_ids(ids, "--ids") if ids is not None else read_ids_file(file or Path())


def _print_plan(plan: list[PlaceReport], *, dry_run: bool) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)
    grid = Grid(title="what holds the ids", title_justify="left", box=None)
    for name in ("place", "kind", "file", "as", "ids"):
        grid.add_column(name, overflow="fold")
    grid.add_column("times", justify="right")
    for report in plan:
        for held in report.held:
            file = held.place.name if isinstance(held.place, Path) else held.place
            shown = ", ".join(map(str, held.ids[:_MAX_IDS_SHOWN]))
            more = f" and {len(held.ids) - _MAX_IDS_SHOWN:,} more" if len(held.ids) > _MAX_IDS_SHOWN else ""
            cells = str(report.place), report.kind, file, held.what, shown + more, f"{held.occurrences:,}"
            grid.add_row(*map(escape, cells))
    if grid.row_count:
        console.print(grid)
    for report in plan:
        for snapshot in report.snapshots:
            print(f"{report.place}: {'would drop' if dry_run else 'drops'} snapshot {snapshot}")


def _print(report: ForgetReport) -> None:
    if not report.dry_run:
        for place in report.places:
            print(place)
    if report.not_found:
        print(f"not found: {', '.join(map(str, report.not_found))}")
    for held in report.remaining:
        print(f"still there: {held}")
    outcome = "would be forgotten" if report.dry_run else "are forgotten"
    kept = len(report.remaining)
    print(f"{len(report.ids):,} ids {outcome}" + (f", but for {kept:,} findings" if kept else ""))


__all__ = ["forget_command"]
