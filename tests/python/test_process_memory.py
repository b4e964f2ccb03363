"""Resident memory of the process, which runs record."""

from __future__ import annotations

import mmap

from recstore_ops.training.process_memory import process_bytes


def test_the_bytes_of_the_process_grow_with_what_it_holds() -> None:
    # New pages, where malloc might find memory that the process holds already.
    with mmap.mmap(-1, 100_000_000) as pages:
        before = process_bytes()
        pages.write(b"\1" * len(pages))
        assert 90_000_000 < process_bytes() - before < 250_000_000
