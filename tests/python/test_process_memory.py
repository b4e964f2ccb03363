"""Resident memory of the process, which runs record."""

from __future__ import annotations

import pytest
from warm_programs import output_of

pytestmark = pytest.mark.tier("test")

# A process of its own: elsewhere, memory that other tests freed may go back to the system meanwhile.
PROGRAM = """
import mmap
from recstore_ops.training.run.phases import process_bytes

pages = mmap.mmap(-1, 100_000_000)
before = process_bytes()
for page in range(0, len(pages), mmap.PAGESIZE):
    pages[page] = 1
print(process_bytes() - before)
"""


def test_the_bytes_of_the_process_grow_with_what_it_holds() -> None:
    assert 95_000_000 < int(output_of(PROGRAM)) < 105_000_000
