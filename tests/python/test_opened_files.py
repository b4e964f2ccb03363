"""The check that some rooms open files through `Directory` finds those who do not."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.tier("quick")

CHECK = runpy.run_path(str(Path(__file__).resolve().parents[2] / ".ci" / "opened_files.py"))


def test_calls_by_path_are_found() -> None:
    text = "open(name)\nPath(name).read_text()\npath.unlink()\nshutil.rmtree(path)\n(path / 'a').write_bytes(b'')\n"
    assert list(CHECK["calls_in"](text)) == [
        (1, "open"),
        (2, "read_text"),
        (3, "unlink"),
        (4, "rmtree"),
        (5, "write_bytes"),
    ]


def test_what_is_held_open_is_not() -> None:
    assert (
        list(CHECK["calls_in"]("directory.open(name)\nself._files.open(name)\nTable.open(name)\nfile.truncate(3)\n"))
        == []
    )


def test_the_rooms_are_there() -> None:
    package = Path(__file__).resolve().parents[2] / "python" / "recstore_ops"
    files = CHECK["checked_files"](package)
    assert len(files) > 30
    assert all(file.is_file() for file in files)
