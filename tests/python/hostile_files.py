"""What somebody may put in the place of a file: links, FIFOs and directories, beside a file that nobody may touch."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

KNOWN = b"nobody changes me"
SECONDS = 60
"""Nothing waits for ever. What was measured is far below; the machine may be busy."""

Tree = dict[str, bytes | str]


def _link(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "file")


def _link_to_directory(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def _dangling(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "missing")


def _fifo(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def _directory(path: Path, outside: Path) -> None:
    path.mkdir()


HOSTILE: dict[str, Callable[[Path, Path], None]] = {
    "link": _link,
    "link to a directory": _link_to_directory,
    "dangling link": _dangling,
    "FIFO": _fifo,
    "directory": _directory,
}


FOUND = {
    "link": "it is a symbolic link, which is not followed",
    "link to a directory": "it is a symbolic link, which is not followed",
    "dangling link": "it is a symbolic link, which is not followed",
    "FIFO": "it is a FIFO, not a regular file",
    "directory": "it is a directory, not a regular file",
}
"""What is said of each in the place of a file."""


def make_outside(path: Path) -> Path:
    """Makes a directory with a file that links lead to."""
    path.mkdir()
    (path / "file").write_bytes(KNOWN)
    return path


def assert_untouched(outside: Path) -> None:
    """Checks that nobody followed a link."""
    assert tree(outside) == {"file": KNOWN}


def put_in_place(path: Path, kind: str, outside: Path) -> None:
    """Puts something hostile in the place of what is at a path, if anything is."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    HOSTILE[kind](path, outside)


def tree(path: Path) -> Tree:
    """All names below a directory, with the bytes of files and what else there is."""
    return dict(_below(path, path))


def _below(root: Path, path: Path) -> Iterator[tuple[str, bytes | str]]:
    for entry in sorted(path.iterdir()):
        name = str(entry.relative_to(root))
        if entry.is_symlink():
            yield name, f"link to {os.readlink(entry)}"
        elif entry.is_dir():
            yield name, "directory"
            yield from _below(root, entry)
        else:
            yield name, entry.read_bytes() if entry.is_file() else "FIFO"


def refusal(call: Callable[[], object]) -> str | None:
    """What a call is refused with; None where it succeeds. It must end.

    Raises:
        AssertionError: it goes on, or raised what does not say which file is meant.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "it waits for ever"
    if not raised:
        return None
    assert isinstance(raised[0], (OSError, ValueError, RuntimeError)), repr(raised[0])
    return str(raised[0])
