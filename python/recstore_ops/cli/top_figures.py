"""The figures of a shard in `recstore top`: rates between two scrapes of its metrics, and its current state."""

from __future__ import annotations

from dataclasses import dataclass

from recstore_ops.servers.metrics_text import Scrape


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
    began_again = any(later[bound] < earlier.get(bound, 0.0) for bound in later)
    return later if began_again else {bound: count - earlier.get(bound, 0.0) for bound, count in later.items()}


def _tables(scrape: Scrape) -> dict[str, TableFigures]:
    rows = {sample.labels["table"]: int(sample.value) for sample in scrape.of("recstore_table_rows")}
    of_bytes = {sample.labels["table"]: int(sample.value) for sample in scrape.of("recstore_table_bytes")}
    return {name: TableFigures(count, of_bytes.get(name, 0)) for name, count in rows.items()}
