"""The command `recstore top`: the state of the shards of parameter servers, refreshed each second."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table as Grid

from recstore_ops.cli.top_figures import ShardFigures, TableFigures, shard_figures
from recstore_ops.config.command_options import path_option
from recstore_ops.servers.metrics_text import NoMetrics, Scrape, fetch
from recstore_ops.servers.serve_settings import load_served_file, serve_settings
from recstore_ops.servers.server_config import ServerAddress, served_shards

_WIDE = 1000
"""Columns of an output that is no terminal: enough for every line to stay one line."""

_MAX_AT_ONCE = 32
"""Servers that are asked at the same time."""


@dataclass(frozen=True)
class _Down:
    """A server that does not answer with metrics, and the reason."""

    why: str


def top_command(
    addresses: Annotated[
        list[str] | None, typer.Argument(metavar="[HOST:PORT]...", help="Metrics addresses of servers.")
    ] = None,
    config: Annotated[Path | None, path_option("Show the shards of `cache_ps.servers` in this file.")] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Show it once and end; with exit code 1 if a shard is down.")
    ] = False,
    interval: Annotated[float, typer.Option(help="Seconds over which requests are counted.", min=0.05)] = 1.0,
) -> None:
    """Show requests, times, connections and tables of parameter servers, until Ctrl-C.

    Servers report these figures at their `--metrics-port`. One that does not answer is shown as down.
    """
    if (config is None) == (not addresses):
        raise ValueError("recstore top needs either HOST:PORT of servers' metrics, or --config")
    asked = list(addresses or []) if config is None else metrics_addresses(config)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)
    with ThreadPoolExecutor(min(len(asked), _MAX_AT_ONCE)) as pool:
        before = list(pool.map(_ask, asked))
        if once:
            time.sleep(interval)
            after = list(pool.map(_ask, asked))
            console.print(_page(asked, before, after))
            raise typer.Exit(any(isinstance(answer, _Down) for answer in after))
        try:
            _show(console, pool, asked, before, interval)
        except KeyboardInterrupt:
            return


def metrics_addresses(path: Path) -> list[str]:
    """`host:port` of the metrics of all shards that a configuration file serves, in their order.

    Raises:
        ValueError: a shard serves no metrics, or serves them at a port that only its server knows.
    """
    file = load_served_file(path)
    host = serve_settings(file, {}).metrics_host
    found = []
    for server in served_shards(file).servers:
        if not server.metrics_port:
            raise ValueError(f"{path}: shard {server.shard} has no metrics_port, or 0, which is any that is free")
        reached = server.host if host in ("0.0.0.0", "::") else host
        found.append(str(ServerAddress(reached, server.metrics_port, server.shard)))
    return found


def _ask(address: str) -> Scrape | _Down:
    try:
        return fetch(address)
    except NoMetrics as error:
        return _Down(str(error))


def _show(
    console: Console, pool: ThreadPoolExecutor, asked: list[str], before: list[Scrape | _Down], interval: float
) -> None:
    with Live(console=console, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            after = list(pool.map(_ask, asked))
            live.update(_page(asked, before, after), refresh=True)
            before = after


def _page(asked: list[str], before: Sequence[Scrape | _Down], after: Sequence[Scrape | _Down]) -> Group:
    shown = [_figures(earlier, later) for earlier, later in zip(before, after, strict=True)]
    return Group(_shards_grid(asked, shown), "", _tables_grid(shown))


def _figures(before: Scrape | _Down, after: Scrape | _Down) -> ShardFigures | _Down:
    """The figures of a shard between two scrapes; those of one that was down before are not known yet."""
    if isinstance(after, _Down):
        return after
    return shard_figures(after if isinstance(before, _Down) else before, after)


def _shards_grid(asked: list[str], shown: list[ShardFigures | _Down]) -> Grid:
    numbers = ["requests/s", "rows/s", "MB/s", "p50 ms", "p99 ms", "in flight", "connections", "rows", "MB", "log MB"]
    grid = _grid("shards", "shard", "metrics at", "version", numbers=numbers)
    for address, figures in zip(asked, shown, strict=True):
        if isinstance(figures, _Down):
            grid.add_row("?", escape(address), f"down: {escape(figures.why)}", style="red")
        else:
            grid.add_row(figures.shard, escape(address), figures.version, *_numbers(figures))
    return grid


def _numbers(figures: ShardFigures) -> list[str]:
    rows = sum(table.rows for table in figures.tables.values())
    table_bytes = sum(table.bytes for table in figures.tables.values())
    return [
        f"{figures.requests:,.1f}",
        f"{figures.rows:,.0f}",
        _megabytes(figures.bytes),
        _milliseconds(figures.p50),
        _milliseconds(figures.p99),
        f"{figures.in_flight:,}",
        f"{figures.connections:,}",
        f"{rows:,}",
        _megabytes(table_bytes),
        "-" if figures.log_bytes is None else _megabytes(figures.log_bytes),
    ]


def _tables_grid(shown: list[ShardFigures | _Down]) -> Grid:
    grid = _grid("tables, on the shards that answer", "table", numbers=["rows", "MB"])
    sums: dict[str, TableFigures] = {}
    for figures in shown:
        for name, table in ({} if isinstance(figures, _Down) else figures.tables).items():
            known = sums.get(name, TableFigures(0, 0))
            sums[name] = TableFigures(known.rows + table.rows, known.bytes + table.bytes)
    for name, table in sorted(sums.items()):
        grid.add_row(escape(name), f"{table.rows:,}", _megabytes(table.bytes))
    return grid


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.2f}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.2f}"


def _grid(title: str, *columns: str, numbers: Sequence[str] = ()) -> Grid:
    grid = Grid(title=title, title_justify="left", box=None)
    for name in columns:
        grid.add_column(name, overflow="fold")
    for name in numbers:
        grid.add_column(name, justify="right", overflow="fold")
    return grid
