"""What a cluster of parameter servers can hold and do, computed from figures of one core; docs/scale.md is made of it.

`python -m benches.scale_model` prints the tables, and with `--write` puts them and the plot into docs/.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benches.recorded import recorded

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE, PLOT = DOCS / "scale.md", DOCS / "scale.png"
BEGIN, END = "<!-- model -->\n", "<!-- /model -->"

TERA, GIGA, MEGA = 10**12, 10**9, 10**6
YEAR = 365 * 24 * 3600

MAX_ROWS = 2**32 - 2
"""Rows that one table can have on one server: `IdAllocator::LIMIT`."""
MAX_CONNECTIONS = 1024
"""Connections that one server takes: the default of `ServerConfig::max_connections`."""


@dataclass(frozen=True)
class Figure:
    """A number that the model rests on.

    Attributes:
        what: what it is of.
        value: in `unit`.
        unit: of the value.
        source: the cell of benches/README.md or the test that measured it, or why it is assumed.
    """

    what: str
    value: float
    unit: str
    source: str


_CASE = ("8,000,000", "64", "65,536", "uniform")
_CASE_TEXT = "rows 8,000,000, dim 64, ids a batch 65,536, drawn uniform, output cold, threads 1, ids spread"
_LOOKUP = recorded("Lookup", "recstore", *_CASE, "cold", "1", "spread")
_STEP = recorded("Full step: lookup, backward, AdaGrad", "recstore", *_CASE, "1", "spread")
_BALANCE = "test `balance.rs`, 1,000 shards"


def _checkpoint(what: str) -> Figure:
    """The speed of what reads or writes a disk: no more than the disk's own, whatever lay in memory."""
    value = recorded("Checkpoints", "value", what)
    source = "cell `checkpoint`" + (f": {value:.3g}, of which no more than the disk's own counts" if value > 1 else "")
    return Figure(what, min(1.0, value), "x", source)


LOOKUP = Figure(
    "lookup of a row, one core", _LOOKUP / 65_536, "ns", f"cell `lookup`, {_CASE_TEXT}: {_LOOKUP / 1e6:.3g} ms"
)
STEP = Figure(
    "step of a row, one core",
    (_STEP - _LOOKUP) / 65_536,
    "ns",
    f"cell `step`, {_CASE_TEXT}: {_STEP / 1e6:.3g} ms, less a lookup",
)
INDEX = Figure("id map", recorded("The id map alone", "value", "memory"), "bytes a row", "cell `id_map`, memory")
SAVE = _checkpoint("save, speed over plain writing")
LOAD = _checkpoint("load, speed over plain reading")
DISTINCT = Figure("rows asked for, a lookup", 0.33, "", f"{_BALANCE}: batches of 65,536 ids, Zipf 1.05 over a million")
BUSIEST = Figure("busiest server over the mean", 1.42, "x", f"{_BALANCE}: distinct ids, Zipf 1.05")
WIRE = Figure("copies and checksums, one core", 1.0, "ns a byte", "assumed: not measured over a real network")
REQUEST = Figure("a request and its answer at the client", 20e3, "ns", "assumed: two system calls and what is around")
NETWORK = Figure("network of a machine", 2.5, "GB/s", "assumed: 25 Gbit/s, four fifths of it")
DISK = Figure("disk of a server", 2.0, "GB/s", "assumed: one NVMe drive")
CORES = Figure("cores of a server", 16, "", "assumed")
MEMORY = Figure("memory of a server", 512, "GB", "assumed")
FAILURES = Figure("failures of a server", 1, "a year", "assumed")
BATCH = Figure("ids of a worker's step", 65_536, "", "assumed: a batch of 2,500 examples with 26 fields")
FIGURES = (
    LOOKUP,
    STEP,
    INDEX,
    SAVE,
    LOAD,
    DISTINCT,
    BUSIEST,
    WIRE,
    REQUEST,
    NETWORK,
    DISK,
    CORES,
    MEMORY,
    FAILURES,
    BATCH,
)


@dataclass(frozen=True)
class Cluster:
    """Tables of float32 rows with row-wise AdaGrad on equal servers.

    Attributes:
        servers: how many.
        parameters: weights of all tables together.
        dim: weights a row.
        workers: programs that train.
    """

    servers: int
    parameters: int = 10 * TERA
    dim: int = 64
    workers: int = 100

    @property
    def row_bytes(self) -> int:
        """Weights of a row, as they lie and as they travel."""
        return 4 * self.dim

    @property
    def rows(self) -> float:
        """Rows of a server."""
        return self.parameters / self.dim / self.servers

    @property
    def bytes(self) -> float:
        """Memory of a server: rows, a float of state each, and the id map."""
        return self.rows * (self.row_bytes + 4 + INDEX.value)

    @property
    def wire_bytes(self) -> int:
        """What passes for a row in a step: its id and the row, its id and the gradient."""
        return 2 * (8 + self.row_bytes)

    @property
    def rows_by_cores(self) -> float:
        """Rows that all servers look up and step per second, if cores are the limit."""
        nanoseconds = LOOKUP.value + STEP.value + WIRE.value * self.wire_bytes
        return self.servers / BUSIEST.value * CORES.value * GIGA / nanoseconds

    @property
    def rows_by_network(self) -> float:
        """The same if networks are: rows go one way and gradients the other."""
        return self.servers / BUSIEST.value * NETWORK.value * GIGA / (self.wire_bytes / 2)

    @property
    def rows_by_log(self) -> float:
        """The same if logs are, of servers with `--durability wal`: every gradient is written once."""
        return self.servers / BUSIEST.value * DISK.value * GIGA / (self.wire_bytes / 2)

    @property
    def step_seconds(self) -> float:
        """What a worker's step waits for servers that have time: a read and an update of each."""
        rows = BATCH.value * DISTINCT.value
        requests = 2 * self.servers * REQUEST.value / GIGA
        return requests + rows * (WIRE.value * self.wire_bytes + LOOKUP.value / self.servers) / GIGA

    @property
    def request_share(self) -> float:
        """The part of `step_seconds` that grows with the servers."""
        return 2 * self.servers * REQUEST.value / GIGA / self.step_seconds

    @property
    def rows_by_workers(self) -> float:
        """Rows in a second that the workers ask for, if they do nothing else."""
        return self.workers * BATCH.value * DISTINCT.value / self.step_seconds

    @property
    def lookups(self) -> float:
        """Lookups that are trained per second."""
        return min(self.rows_by_cores, self.rows_by_network, self.rows_by_log, self.rows_by_workers) / DISTINCT.value

    @property
    def limit(self) -> str:
        """What keeps lookups from being more."""
        limits = {
            "cores": self.rows_by_cores,
            "network": self.rows_by_network,
            "log": self.rows_by_log,
            "workers": self.rows_by_workers,
        }
        return min(limits, key=lambda name: limits[name])

    @property
    def save_seconds(self) -> float:
        """A checkpoint of everything; all servers write at once."""
        return self.rows * (self.row_bytes + 4 + 8) / (DISK.value * GIGA * SAVE.value)

    @property
    def load_seconds(self) -> float:
        """What a server that was started again reads before it serves."""
        return self.rows * (self.row_bytes + 4 + 8) / (DISK.value * GIGA * LOAD.value)

    @property
    def hours_between_failures(self) -> float:
        """Hours from one server's failure to the next one's."""
        return YEAR / (FAILURES.value * self.servers) / 3600

    def breaks(self) -> list[str]:
        """What does not fit."""
        found = []
        if self.rows > MAX_ROWS:
            found.append("row numbers")
        if self.bytes > MEMORY.value * GIGA:
            found.append("memory")
        if self.workers > MAX_CONNECTIONS:
            found.append("connections")
        return found


SERVERS = (1, 4, 16, 64, 256, 1000)
SIZES = (TERA // 10, TERA, 10 * TERA, 100 * TERA)


def fewest(is_enough: Callable[[Cluster], bool], parameters: int) -> int:
    """The fewest servers that are enough for the parameters."""
    return next(servers for servers in range(1, 10**6) if is_enough(Cluster(servers, parameters)))


def shown(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def figures_table() -> str:
    """The numbers that the model rests on."""
    rows = ([one.what, f"{shown(one.value)} {one.unit}".strip(), one.source] for one in FIGURES)
    return table(["figure", "value", "from"], rows)


def size_table() -> str:
    """Memory and rows of a server, by the size of the tables."""
    heads = ["servers", *(f"{size / TERA:g} T parameters" for size in SIZES)]

    def cell(cluster: Cluster) -> str:
        broken = cluster.breaks()
        size = f"{shown(cluster.bytes / GIGA)} GB, {shown(cluster.rows / MEGA)} M rows"
        return f"{size}: **{', '.join(broken)}**" if broken else size

    return table(heads, ([f"{n:,}", *(cell(Cluster(n, size)) for size in SIZES)] for n in SERVERS))


def fewest_table() -> str:
    """How many servers the sizes need, and by what."""
    heads = ["parameters", "by memory", "by row numbers, in one table", "checkpoint there", "restart there"]

    def row(size: int) -> list[str]:
        memory = fewest(lambda one: "memory" not in one.breaks(), size)
        numbers = fewest(lambda one: "row numbers" not in one.breaks(), size)
        there = Cluster(max(memory, numbers), size)
        seconds = [f"{value:,.0f} s" for value in (there.save_seconds, there.load_seconds)]
        return [f"{size / TERA:g} T", f"{memory:,}", f"{numbers:,}", *seconds]

    return table(heads, map(row, SIZES))


def speed_table(workers: int) -> str:
    """Lookups per second, by servers."""
    heads = [
        "servers",
        "million rows/s by cores",
        "by network",
        "by log",
        f"by {workers:,} workers",
        "million lookups/s",
        "limit",
        "a worker's step",
        "of it requests",
        "hours between failures",
    ]

    def row(servers: int) -> list[str]:
        one = Cluster(servers, workers=workers)
        limits = (one.rows_by_cores, one.rows_by_network, one.rows_by_log, one.rows_by_workers)
        rates = [shown(rate / MEGA) for rate in limits]
        step = [f"{1000 * one.step_seconds:.1f} ms", f"{100 * one.request_share:.0f} %"]
        return [
            f"{servers:,}",
            *rates,
            shown(one.lookups / MEGA),
            one.limit,
            *step,
            f"{one.hours_between_failures:,.0f}",
        ]

    return table(heads, map(row, SERVERS))


def report() -> str:
    """All tables, with their headings."""
    parts = [
        ("Figures", figures_table()),
        ("Memory of a server", size_table()),
        ("Fewest servers", fewest_table()),
        ("Speed with 100 workers", speed_table(100)),
        ("Speed with 1,000 workers", speed_table(1000)),
    ]
    return "\n".join(f"### {heading}\n\n{text}" for heading, text in parts)


def draw(path: Path) -> None:
    """Writes the plot: lookups in a second, and memory of a server, by servers."""
    from matplotlib.figure import Figure as Canvas

    counts = [round(10 ** (step / 10)) for step in range(31)]
    figure = Canvas(figsize=(11, 4.2), layout="constrained")
    speed, memory = figure.subplots(1, 2)
    clusters = [Cluster(count) for count in counts]
    speed.plot(counts, [one.rows_by_cores / DISTINCT.value / MEGA for one in clusters], label="by cores")
    speed.plot(counts, [one.rows_by_network / DISTINCT.value / MEGA for one in clusters], label="by network")
    speed.plot(counts, [one.rows_by_log / DISTINCT.value / MEGA for one in clusters], label="by log")
    for workers in (10, 100, 1000):
        asked = [Cluster(count, workers=workers).rows_by_workers / DISTINCT.value / MEGA for count in counts]
        speed.plot(counts, asked, linestyle="--", label=f"by {workers:,} workers")
    speed.set(title="Lookups that are trained", ylabel="million per second", ylim=(8, 10**6))
    for size in SIZES[1:]:
        memory.plot(counts, [Cluster(n, size).bytes / GIGA for n in counts], label=f"{size / TERA:g} T parameters")
    memory.axhline(MEMORY.value, color="black", linestyle=":", label=f"{MEMORY.value:g} GB")
    memory.set(title="Memory of a server", ylabel="GB", ylim=(1, 10**7))
    for axes in (speed, memory):
        axes.set(xscale="log", yscale="log", xlabel="servers")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", ncols=2, loc="upper center")
    figure.savefig(path, dpi=110, metadata={"Software": None})


def page_with(text: str, tables: str) -> str:
    """The page with other tables between its marks."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{tables}\n{END}" + rest.split(END)[1]


def main(arguments: Sequence[str]) -> int:
    """Prints the tables, or writes them."""
    if list(arguments) not in ([], ["--write"]):
        print(f"usage: python -m benches.scale_model [--write], got {' '.join(arguments)}", file=sys.stderr)
        return 2
    if not arguments:
        print(report())
        return 0
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), report()), encoding="utf-8")
    draw(PLOT)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
