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

from recstore_ops.config.command_options import path_option
from recstore_ops.servers.metrics_text import NoMetrics, Scrape, fetch
from recstore_ops.servers.serve_settings import load_served_file, serve_settings
from recstore_ops.servers.server_config import ServerAddress, served_shards


@dataclass(frozen=True)
class TableFigures:
    """A table's share on one shard."""

    rows: int
    bytes: int


@dataclass(frozen=True)
class ShardFigures:
    """The figures of a shard.

    Attributes:
        shard: its number, as the server says.
        version: the server's.
        requests: a second.
        rows: rows named by requests, a second.
        bytes: in and out, a second.
        p50: seconds that half of the requests took at most; `None` without requests.
        p99: seconds that 99 of 100 requests took at most.
        in_flight: requests that are not answered yet.
        connections: of clients, at the bulk port and over gRPC.
        log_bytes: bytes of log behind the last checkpoint; `None` without a log.
        tables: by name.
    """

    shard: str
    version: str
    requests: float
    rows: float
    bytes: float
    p50: float | None
    p99: float | None
    in_flight: int
    connections: int
    log_bytes: int | None
    tables: dict[str, TableFigures]


def shard_figures(before: Scrape, after: Scrape) -> ShardFigures:
    """Returns the figures of a shard from two scrapes, the second a moment after the first."""
    seconds = max(after.at - before.at, 1e-9)
    labels = next((sample.labels for sample in after.of("recstore_build_info")), {})
    classes = _growth_by_bound(before, after)

    def rate(*names: str) -> float:
        return sum(_growth(before.total(name), after.total(name)) for name in names) / seconds

    log_bytes = after.of("recstore_log_bytes")
    return ShardFigures(
        shard=labels.get("shard", "?"),
        version=labels.get("version", "?"),
        requests=rate("recstore_requests_total"),
        rows=rate("recstore_rows_total"),
        bytes=rate("recstore_received_bytes_total", "recstore_sent_bytes_total"),
        p50=quantile(0.5, classes),
        p99=quantile(0.99, classes),
        in_flight=int(after.total("recstore_requests_in_flight")),
        connections=_connections(after),
        log_bytes=int(log_bytes[0].value) if log_bytes else None,
        tables=_tables(after),
    )


def _connections(scrape: Scrape) -> int:
    """Counts those that do not watch the server."""
    watching = ("health", "metrics")
    return int(sum(each.value for each in scrape.of("recstore_connections") if each.labels.get("port") not in watching))


def quantile(share: float, classes: dict[float, float]) -> float | None:
    """The value that `share` of the observations do not exceed, as PromQL's `histogram_quantile` computes it.

    Args:
        share: from 0 to 1.
        classes: how many observations do not exceed each bound; the greatest bound is infinity.

    Returns:
        The value, assuming that observations are spread evenly within their class; for the last class its lower bound.
        `None` without observations.
    """
    bounds = sorted(classes)
    total = classes[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return None
    lower, below = 0.0, 0.0
    for bound in bounds[:-1]:
        if classes[bound] >= share * total:
            return lower + (bound - lower) * (share * total - below) / (classes[bound] - below)
        lower, below = bound, classes[bound]
    return lower


def _growth(before: float, after: float) -> float:
    """The increase of a counter, which restarts at 0 with its server."""
    return after - before if after >= before else after


def _growth_by_bound(before: Scrape, after: Scrape) -> dict[float, float]:
    def by_bound(scrape: Scrape) -> dict[float, float]:
        found: dict[float, float] = {}
        for sample in scrape.of("recstore_request_seconds_bucket"):
            bound = float(sample.labels["le"])
            found[bound] = found.get(bound, 0.0) + sample.value
        return found

    earlier, later = by_bound(before), by_bound(after)
    # Counters of a server that was started again begin at zero: then all of them count as growth.
    began_again = any(later[bound] < earlier.get(bound, 0.0) for bound in later)
    return later if began_again else {bound: count - earlier.get(bound, 0.0) for bound, count in later.items()}


def _tables(scrape: Scrape) -> dict[str, TableFigures]:
    rows = {sample.labels["table"]: int(sample.value) for sample in scrape.of("recstore_table_rows")}
    of_bytes = {sample.labels["table"]: int(sample.value) for sample in scrape.of("recstore_table_bytes")}
    return {name: TableFigures(count, of_bytes.get(name, 0)) for name, count in rows.items()}


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
        # 0.0.0.0 and :: stand for all addresses of the server's machine, and lead other machines to themselves.
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
