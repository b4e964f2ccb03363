"""Resident memory of the process, which runs record."""

from __future__ import annotations

from recstore_ops.training.process_memory import process_bytes


def test_the_bytes_of_the_process_grow_with_what_it_holds() -> None:
    before = process_bytes()
    held = b"\1" * 100_000_000
    assert 90_000_000 < process_bytes() - before < 200_000_000
    del held
