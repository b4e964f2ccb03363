"""Delimited text parsed natively, beside the same by Arrow and numpy: equal batches to the bit, or both refuse."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pyarrow as pa
import pytest
import torch
from arrow_delimited import ArrowDelimited, dense_of
from examples import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from text_lines import CASES

from recstore_ops import _native
from recstore_ops.training.data.batch import Batch
from recstore_ops.training.data.delimited import (
    Column,
    ColumnKind,
    DelimitedFormat,
    avazu_format,
    criteo_format,
    movielens_format,
)

pytestmark = pytest.mark.tier("quick")

HEX_CHARACTERS = b"0123456789abcdefABCDEF-"
DECIMAL_CHARACTERS = b"0123456789.-"

# A format, its characters, and the case of good lines of it.
FORMATS = {
    "criteo": (criteo_format(), HEX_CHARACTERS, "criteo"),
    "criteo without labels": (criteo_format(labelled=False), HEX_CHARACTERS, "criteo"),
    "avazu": (avazu_format(), HEX_CHARACTERS, "avazu"),
    "avazu without labels": (avazu_format(labelled=False), HEX_CHARACTERS, "avazu"),
    "ratings.csv": (movielens_format("ratings.csv"), DECIMAL_CHARACTERS, "ratings.csv"),
    "ratings.dat": (movielens_format("ratings.dat", 3.5), DECIMAL_CHARACTERS, "ratings.dat"),
    "u.data": (movielens_format("u.data"), DECIMAL_CHARACTERS, "u.data"),
}
every_format = pytest.mark.parametrize("name", FORMATS)

ODD_CELLS = [
    *(b"", b"0", b"1", b"-1", b"-0", b"00", b"-", b"--1", b"1-", b"+1", b" 1", b"1 ", b"0x1", b"1_0", b'"1"', b"\x00"),
    *(b"nan", b"inf", b"-inf", b"NaN", b"1e3", b"1.", b".5", b"-.5", b".", b"-.", b"1.2.3", b"1-2", b"9" * 400),
    *(b"%d" % number for edge in (2**39, 2**40, 2**63, 2**64, 10**18, 10**19) for number in (edge - 1, edge, -edge)),
    *(b"%d" % -(edge + 1) for edge in (2**39, 2**63)),
    *(b"0" * 30 + b"7", b"-" + b"0" * 30 + b"7", b"14102123", b"14130100", b"14010024", b"99123123", b"00010100"),
    *(b"0000000a", b"ABCDEF01", b"abcdef012", b"g", b"-a", "é".encode(), b"\xff", b"\xef\xbb\xbf", b":", b"1:"),
]


def oracle(name: str) -> ArrowDelimited:
    text_format, characters, _ = FORMATS[name]
    return ArrowDelimited(text_format._columns, text_format._separator, characters, text_format._threshold)


def parsed(parser: DelimitedFormat | ArrowDelimited, block: bytes) -> Batch | None:
    try:
        return parser.parse(block)
    except ValueError:
        return None


def bits(batch: Batch) -> list[bytes | int]:
    tensors = [batch.ids, batch.labels, *([] if batch.dense is None else [batch.dense])]
    shapes = [size for tensor in tensors for size in tensor.shape]
    return [batch.num_fields, *shapes, *(tensor.numpy().tobytes() for tensor in tensors)]


def assert_same(name: str, block: bytes) -> None:
    expected, actual = parsed(oracle(name), block), parsed(FORMATS[name][0], block)
    assert (expected is None) == (actual is None), block
    if expected is not None and actual is not None:
        assert bits(actual) == bits(expected)


@st.composite
def tables(draw: st.DrawFn, name: str) -> bytes:
    """Lines of a format, some of them with odd cells, too few or too many cells, blanks, other ends."""
    text_format, _, case = FORMATS[name]
    separator = text_format._separator
    lines = []
    for _ in range(draw(st.integers(0, 4))):
        cells = draw(CASES[case].lines).split(separator)
        if not text_format.has_labels:
            cells = [cell for cell, column in zip(cells, _columns_with_label(name), strict=True) if column != "label"]
        if draw(st.integers(0, 2)) == 0:
            at = draw(st.integers(0, len(cells) - 1))
            put = draw(st.one_of(st.just([]), st.sampled_from(ODD_CELLS).map(lambda cell: [cell])))
            cells[at : at + draw(st.integers(0, 1))] = put
        blanks = draw(st.sampled_from([b"", b"", b"", b"\n", b"  \n", b" \r\n"]))
        lines.append(blanks + separator.join(cells) + draw(st.sampled_from([b"\n", b"\n", b"\n", b"\r\n"])))
    block = b"".join(lines)
    return block.removesuffix(b"\n") if draw(st.booleans()) else block


def _columns_with_label(name: str) -> list[str]:
    labelled = FORMATS[name.removesuffix(" without labels")][0]
    return ["label" if column.kind is ColumnKind.CLICK else column.name for column in labelled._columns]


class TestBesideArrow:
    @every_format
    @given(data=st.data())
    @settings(max_examples=examples(150), deadline=None)
    def test_any_table_gives_the_same_batch_or_is_refused_by_both(self, name: str, data: st.DataObject) -> None:
        assert_same(name, data.draw(tables(name)))

    @every_format
    @pytest.mark.parametrize("cell", ODD_CELLS)
    def test_an_odd_cell_in_the_first_and_last_column_of_each_kind(self, name: str, cell: bytes) -> None:
        text_format = FORMATS[name][0]
        kinds = [column.kind for column in text_format._columns]
        samples = [kind.sample for kind in kinds]
        last = {kind: place for place, kind in enumerate(kinds)}
        for place in {kinds.index(kind) for kind in last} | set(last.values()):
            line = text_format._separator.join([*samples[:place], cell, *samples[place + 1 :]])
            assert_same(name, line + b"\n")
            assert_same(name, b"\n" + line + b"\n \n" + line)

    @every_format
    @given(block=st.text('0123456789abcF-.,:\t\n \r"x', max_size=60).map(str.encode))
    @example(b"")
    @example(b"\n\n")
    @example(b"  ")
    @settings(max_examples=examples(100), deadline=None)
    def test_any_text(self, name: str, block: bytes) -> None:
        assert_same(name, block)

    def test_dense_values_are_numpys_to_the_bit(self) -> None:
        rng = np.random.default_rng(0)
        widths = rng.integers(0, 63, 200_000)
        counts = np.concatenate([np.arange(-100_000, 400_000), rng.integers(-(2**62), 2**62, 200_000) >> widths])
        counts = np.concatenate([counts, [-(2**63), 2**63 - 1, 0]])
        block = b"".join(b"%d\t1\n" % count for count in counts.tolist())
        columns = [Column("a", ColumnKind.COUNT), Column("b", ColumnKind.HEX)]
        dense = DelimitedFormat("counts", columns, separator=b"\t").parse(block).dense
        assert dense is not None
        assert dense.numpy().tobytes() == dense_of([pa.array(counts)]).tobytes()


class TestArrays:
    def test_are_tensors_that_can_be_changed(self) -> None:
        batch = criteo_format().parse(CASES["criteo"].good + b"\n\n")
        for tensor in (batch.ids, batch.labels, batch.dense):
            assert tensor is not None
            tensor += 1
        assert batch.labels.tolist() == [2.0]

    def test_of_no_rows_are_empty(self) -> None:
        batch = criteo_format().parse(b"\n\n")
        assert (batch.ids.shape, batch.labels.shape) == ((0,), (0,))
        assert batch.dense is not None
        assert batch.dense.shape == (0, 13)
        assert batch.ids.dtype == torch.int64

    def test_a_format_can_be_pickled(self) -> None:
        block = CASES["avazu"].good + b"\n"
        copied = pickle.loads(pickle.dumps(avazu_format()))
        assert bits(copied.parse(block)) == bits(avazu_format().parse(block))


@pytest.mark.parametrize(
    ("text", "kinds", "separator", "message"),
    [
        (b"1\t2\n1\tx\n", ["click", "hex"], b"\t", "line 2 is bad from byte 3 on"),
        (b"1\n", ["click", "hex"], b"\t", "line 1 is bad from byte 1 on"),
        (b"1\t2\n\n2\t2", ["click", "hex"], b"\t", "line 3 is bad from byte 1 on"),
        (b"", ["click"], b"\t", "expected a column that is a field, got none of 1"),
        (b"", ["hex", "click", "rating"], b"\t", "expected at most one column that is a label, got 2"),
        (b"", ["hex", "word"], b"\t", 'unknown kind of column "word"'),
        (b"", ["hex"], b"", 'expected one separator or two equal ones that no cell has, got ""'),
        (b"", ["hex"], b"1", 'expected one separator or two equal ones that no cell has, got "1"'),
    ],
)
def test_what_cannot_be_parsed_is_refused(text: bytes, kinds: list[str], separator: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"parse_delimited: {message}")):
        _native.parse_delimited(text, kinds, separator, 0.0)
