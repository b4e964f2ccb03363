"""Reads the metrics of a server: Prometheus' text, version 0.0.4, over HTTP."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)(?: -?\d+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ADDRESS = re.compile(r"[^\s/]+:\d+")
_ESCAPES = {r"\n": "\n", r"\"": '"', r"\\": "\\"}


@dataclass(frozen=True)
class Sample:
    """One figure: the labels that distinguish it from others of its name, and its value."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Scrape:
    """The metrics of a server at one moment.

    Attributes:
        samples: figures by the name of their metric.
        at: the moment, in seconds of `time.monotonic`.
    """

    samples: Mapping[str, list[Sample]] = field(default_factory=dict)
    at: float = field(default_factory=time.monotonic)

    def of(self, name: str) -> list[Sample]:
        """The figures of a metric; none if the server has none."""
        return self.samples.get(name, [])

    def total(self, name: str) -> float:
        """The sum of a metric's figures."""
        return sum(sample.value for sample in self.of(name))


class NoMetrics(Exception):
    """A server that reports no metrics; the message says why."""


def fetch(address: str, timeout: float = 2.0) -> Scrape:
    """Asks the server at `host:port` for its metrics.

    Raises:
        NoMetrics: it does not answer within `timeout` seconds, or with something else.
    """
    if not _ADDRESS.fullmatch(address):
        raise NoMetrics("this is no HOST:PORT")
    # Without the proxy of the environment, which need not reach these servers.
    opener = build_opener(ProxyHandler({}))
    try:
        with opener.open(f"http://{address}/metrics", timeout=timeout) as answer:
            text = answer.read().decode("utf-8")
    except HTTPError as error:
        raise NoMetrics(f"it answers {error.code} {error.reason}: this is no port of metrics") from None
    except URLError as error:
        raise NoMetrics(str(error.reason)) from None
    except (HTTPException, UnicodeDecodeError):
        raise NoMetrics("it does not answer as HTTP has it: this is no port of metrics") from None
    except OSError as error:
        raise NoMetrics(str(error) or type(error).__name__) from None
    return parse(text)


def parse(text: str) -> Scrape:
    """Reads metrics.

    Raises:
        NoMetrics: a line is none of the format.
    """
    samples: dict[str, list[Sample]] = {}
    for name, sample in _samples(text):
        samples.setdefault(name, []).append(sample)
    return Scrape(samples)


def _samples(text: str) -> Iterator[tuple[str, Sample]]:
    for line in text.split("\n"):
        if not line.strip() or line.startswith("#"):
            continue
        found = _SAMPLE.fullmatch(line)
        if found is None:
            raise NoMetrics(f"no line of metrics: {line[:80]!r}")
        labels = {key: _unescaped(value) for key, value in _LABEL.findall(found["labels"] or "")}
        try:
            yield found["name"], Sample(labels, float(found["value"]))
        except ValueError:
            raise NoMetrics(f"no line of metrics: {line[:80]!r}") from None


def _unescaped(text: str) -> str:
    return re.sub(r"\\.", lambda escape: _ESCAPES.get(escape[0], escape[0]), text)
