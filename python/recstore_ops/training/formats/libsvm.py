"""The format libsvm, also called libfm: `label id:value id:value ...`.

What svmlight allows besides: `qid:` after the label says which rows belong to one query, and is their group where it is
asked for. Comments behind `#` are passed over.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from recstore_ops.training.formats.sparse_lines import explain_sparse_line, parse_sparse_lines
from recstore_ops.training.rows.batch import NO_GROUP, Batch, offsets_of_lengths
from recstore_ops.training.rows.row_source import numbered_names

_COMMENT = re.compile(rb"[ \t]*#[^\n]*")
_QUERY = re.compile(rb"^([^ \t\n]+[ \t]+)qid:([0-9]+)[ \t]*", re.MULTILINE)
_MOST_QUERIES = 2**63 - 1
QUERY = "qid"
"""The name of the group of rows."""


class LibsvmFormat:
    """Rows without fields or, for rows of equally many features, with the n-th feature as the n-th field.

    Args:
        num_fields: features of every row, each a field of its own; None takes all features as one field.
        reason: why there are that many, for messages.
        group_name: `QUERY` where the query of each row is its group; None passes it over.
    """

    name = "libsvm"
    dense_names: tuple[str, ...] = ()
    has_labels = True

    def __init__(
        self, num_fields: int | None = None, *, reason: str = "as num_fields says", group_name: str | None = None
    ) -> None:
        self.group_name = group_name
        self._num_fields = num_fields
        self._reason = reason
        self.field_names = ("features",) if num_fields is None else numbered_names("field", num_fields)

    def is_header(self, line: bytes) -> bool:
        return False

    def parse(self, block: bytes) -> Batch:
        lines = parse_sparse_lines(_features_only(block), parts=2)
        lengths = torch.from_numpy(lines.lengths)
        if self._num_fields is not None and not (lengths == self._num_fields).all():
            raise ValueError("a row has another number of features")
        values = lines.values_unless_ones
        return Batch(
            ids=torch.from_numpy(lines.integers[0]),
            labels=torch.from_numpy(lines.labels),
            num_fields=self._num_fields or 1,
            offsets=offsets_of_lengths(lengths) if self._num_fields is None else None,
            values=None if values is None else torch.from_numpy(values),
            groups=None if self.group_name is None else torch.tensor(_groups(block), dtype=torch.int64, device="cpu"),
        )

    def explain(self, line: bytes) -> str:
        try:
            lines = parse_sparse_lines(_features_only(line), parts=2)
        except ValueError:
            return explain_sparse_line(line, "id:value (libsvm)", lambda part: parse_sparse_lines(part, parts=2))
        return f"expected {self._num_fields} features, one a field, {self._reason}, got {lines.lengths[0]}"


def query_of(line: bytes) -> bytes | None:
    """Returns the query of a line, in digits; None without one."""
    found = _QUERY.match(line)
    return None if found is None else found[2]


def _groups(block: bytes) -> list[int]:
    """The query of each line that is a row; a number beyond 63 bits is cut to them."""
    lines = _COMMENT.sub(b"", block).split(b"\n")
    queries = (query_of(line) for line in lines if line.strip())
    return [NO_GROUP if query is None else int(query) % _MOST_QUERIES for query in queries]


def _features_only(block: bytes) -> bytes:
    if b"#" in block:
        block = _COMMENT.sub(b"", block)
    return _QUERY.sub(rb"\1", block) if b"qid:" in block else block


def write_libsvm(path: Path | str, batch: Batch) -> None:
    """Writes rows as `label id:value ...` with labels 0 and 1; values keep every digit, fields become positions."""
    starts = batch.offsets_or_ones()[:: batch.num_fields].tolist()
    pairs = zip(batch.ids.tolist(), batch.values_or_ones().tolist(), strict=True)
    features = [f"{id}:{value:.9g}" for id, value in pairs]
    with open(path, "w", encoding="ascii", newline="\n") as file:
        for row, label in enumerate(batch.labels.tolist()):
            parts = [f"{label:.0f}", *features[starts[row] : starts[row + 1]]]
            file.write(" ".join(parts) + "\n")
