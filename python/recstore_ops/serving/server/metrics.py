"""Figures of a model server in Prometheus' text format, named as those of servers."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


Ports = Sequence[tuple[str, int, Sequence[tuple[str, int]]]]


class Histogram:
    """Counts of values up to each of some bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Yields its samples."""
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self._sum:g}"
        yield f"{name}_count{{{labels}}} {total}"


class Metrics:
    """The counters of a model server. They change on the event loop only, so no lock is needed.

    Attributes:
        requests: by protocol and outcome, `ok` or the kind of refusal.
        rows: of answered requests.
        seconds: from a request's head to its answer, by protocol.
        forward_seconds: of each call of the program.
        batch_requests, batch_rows: of each call of the program.
        ports: of each port its name, its open connections, and the peers that were refused, by reason.
        gauges: functions that are called when metrics are requested, by name.
    """

    def __init__(self, model: str) -> None:
        self._model = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self.requests: Counter[tuple[str, str]] = Counter()
        self.rows = 0
        self.seconds = {"http": Histogram(SECONDS), "grpc": Histogram(SECONDS)}
        self.forward_seconds = Histogram(SECONDS)
        self.batch_requests = Histogram(ROWS)
        self.batch_rows = Histogram(ROWS)
        self.ports: Callable[[], Ports] = list
        self.gauges: dict[str, tuple[str, Callable[[], float]]] = {}

    def text(self) -> str:
        """Returns all figures."""
        return "\n".join([*self._lines(), ""])

    def _lines(self) -> Iterator[str]:
        model = f'model="{self._model}"'
        yield from _head("recstore_model_build_info", "gauge", "1, with the version of the package as a label.")
        yield f'recstore_model_build_info{{{model},version="{version("recstore-ops")}"}} 1'
        yield from _head("recstore_model_requests_total", "counter", "Requests for inference, by what came of them.")
        ports = self.ports()
        for (protocol, outcome), count in sorted((self.requests + _wrong_tokens(ports)).items()):
            yield f'recstore_model_requests_total{{{model},protocol="{protocol}",outcome="{outcome}"}} {count}'
        yield from _head("recstore_model_rows_total", "counter", "Rows of answered requests.")
        yield f"recstore_model_rows_total{{{model}}} {self.rows}"
        yield from _head("recstore_model_request_seconds", "histogram", "Time to answer a request, waiting included.")
        for protocol, histogram in self.seconds.items():
            yield from histogram.lines("recstore_model_request_seconds", f'{model},protocol="{protocol}"')
        for name, text, histogram in (
            ("forward_seconds", "Time of a call of the program.", self.forward_seconds),
            ("batch_requests", "Requests that a call of the program answers.", self.batch_requests),
            ("batch_rows", "Rows of a call of the program.", self.batch_rows),
        ):
            yield from _head(f"recstore_model_{name}", "histogram", text)
            yield from histogram.lines(f"recstore_model_{name}", model)
        yield from _head("recstore_model_connections", "gauge", "Open connections, by port.")
        for port, count, _ in ports:
            yield f'recstore_model_connections{{{model},port="{port}"}} {count}'
        name = "recstore_model_refused_connections_total"
        yield from _head(name, "counter", "Connections (with a wrong token: requests) that were refused or closed.")
        for port, _, refused in ports:
            for reason, count in refused:
                yield f'{name}{{{model},port="{port}",reason="{reason}"}} {count}'
        for name, (text, read) in self.gauges.items():
            yield from _head(name, "gauge", text)
            yield f"{name}{{{model}}} {read():g}"


def _wrong_tokens(ports: Ports) -> Counter[tuple[str, str]]:
    """Returns the requests that the ports themselves refused, by protocol and outcome."""
    return Counter(
        {(port, reason): count for port, _, refused in ports for reason, count in refused if reason == "token"}
    )


def _head(name: str, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"
