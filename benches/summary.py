"""Ten ratios for who reads one screen only, taken from the tables of README.md: of dense ids, once those have a row."""

from __future__ import annotations

from dataclasses import dataclass

from benches.recorded import recorded

_ONE_TABLE = ("1,000,000", "64", "65,536", "uniform")
_LOOKUP, _STEP = "Lookup", "Full step: lookup, backward, AdaGrad"
_OPTIMIZERS, _COLLECTION = "Full step of other optimizers", "Collections of 26 tables"
_OURS = "recstore"


@dataclass(frozen=True)
class _Ratio:
    """How many times our time another one takes; with `is_limit`, how many times the other's we take.

    Attributes:
        work, other: in words.
        heading: of the table.
        name, ours: the columns of both times.
        row: the first columns of the row.
    """

    work: str
    other: str
    heading: str
    name: str
    row: tuple[str, ...]
    ours: str = _OURS
    is_limit: bool = False

    def text(self) -> str:
        """The row of the summary."""
        name, base = (self.ours, self.name) if self.is_limit else (self.name, self.ours)
        ratio = recorded(self.heading, f"x {base}", *self.row, of=name)
        text = f"{ratio:.2f} x its time" if self.is_limit else f"{ratio:.1f} x as fast"
        return f"| {self.work} | {self.other} | {text} |"


_LOOKED_UP, _STEPPED = "lookup of 65,536 ids", "the same with backward and AdaGrad step"
_ADAGRAD, _FBGEMM = "`nn.EmbeddingBag(sparse=True)`, `torch.optim.Adagrad`", "FBGEMM"

_RATIOS = (
    _Ratio(_LOOKED_UP, "`F.embedding`", _LOOKUP, "F.embedding", (*_ONE_TABLE, "cold", "2")),
    _Ratio(_LOOKED_UP, _FBGEMM, _LOOKUP, "FBGEMM", (*_ONE_TABLE, "cold", "2")),
    _Ratio(_LOOKED_UP, "the yardstick: memory alone", _LOOKUP, "yardstick", (*_ONE_TABLE, "cold", "2"), is_limit=True),
    _Ratio(_STEPPED, _ADAGRAD, _STEP, "nn.EmbeddingBag", (*_ONE_TABLE, "2")),
    _Ratio(_STEPPED, _FBGEMM, _STEP, "FBGEMM", (*_ONE_TABLE, "2")),
    _Ratio(_STEPPED, "the yardstick: memory alone", _STEP, "yardstick", (*_ONE_TABLE, "2"), is_limit=True),
    _Ratio("the same with Adam", "`torch.optim.SparseAdam`", _OPTIMIZERS, "torch SparseAdam", ("2",), "Adam"),
    _Ratio("full step of 26 tables of dim 16", _FBGEMM, _COLLECTION, "FBGEMM", ("step", "16", "1")),
    _Ratio("full step of 26 tables of dim 128", _FBGEMM, _COLLECTION, "FBGEMM", ("step", "128", "1")),
)


def summary() -> str:
    """The ratios as a table of Markdown.

    Raises:
        ValueError: README.md lacks one of the figures.
    """
    growth = recorded("Memory", "value", "growth of the process over rows and slots")
    rows = [ratio.text() for ratio in _RATIOS]
    rows.append(f"| memory of 10 million rows of 16 with their state | the bytes of rows and state | {growth:.2f} x |")
    return "\n".join(["| work | compared with | this package |", "| --- | --- | --- |", *rows])
