"""Directories that are held open: files are opened relative to them, and never over a symbolic link."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from recstore_ops.config.directory import Directory, check_name

pytestmark = pytest.mark.tier("quick")

KNOWN = b"nobody changes me"

CALLS: dict[str, Callable[[Directory, str], object]] = {
    "open": lambda inside, name: inside.open(name),
    "read": lambda inside, name: inside.read(name),
    "create_new": lambda inside, name: inside.create_new(name),
    "append": lambda inside, name: inside.append(name),
    "replace": lambda inside, name: inside.replace(name, b"new"),
    "remove_file": lambda inside, name: inside.remove_file(name),
    "rename": lambda inside, name: inside.rename("file", name),
    "lock": lambda inside, name: inside.lock(name),
}


@pytest.fixture
def inside(tmp_path: Path) -> Directory:
    """A directory beside a file with known bytes."""
    (tmp_path / "outside").write_bytes(KNOWN)
    made = Directory.create(tmp_path / "inside")
    made.replace("file", b"rows")
    made.create_subdirectory("below").replace("file", b"more rows")
    return made


def strange_names(inside: Directory) -> dict[str, str]:
    """Makes what no regular file is, and returns what an error says of each."""
    at = inside.path
    (at / "link").symlink_to(at.parent / "outside")
    (at / "dangling").symlink_to(at.parent / "missing")
    (at / "linked").symlink_to("below")
    os.mkfifo(at / "fifo")
    with socket.socket(socket.AF_UNIX) as made:
        descriptor = os.open(at, os.O_RDONLY)
        made.bind(f"/proc/self/fd/{descriptor}/socket")  # A path of a socket has at most 107 bytes.
        os.close(descriptor)
    return {
        "link": "it is a symbolic link, which is not followed",
        "dangling": "it is a symbolic link, which is not followed",
        "linked/file": "it is a symbolic link, which is not followed",
        "fifo": "it is a FIFO, not a regular file",
        "socket": "it is a socket, not a regular file",
        "below": "it is a directory, not a regular file",
    }


@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_regular_file_is_refused(inside: Directory, call: str) -> None:
    for name, reason in strange_names(inside).items():
        with pytest.raises(OSError, match=reason) as raised:
            CALLS[call](inside, name)
        assert raised.value.filename == str(inside.path / name.split("/")[0])
        assert raised.value.errno in (errno.ELOOP, errno.EINVAL, errno.EISDIR)
    assert (inside.path.parent / "outside").read_bytes() == KNOWN
    assert sorted(path.name for path in inside.path.parent.iterdir()) == ["inside", "outside"]
    assert inside.read("file") == b"rows"


@pytest.mark.parametrize("name", ["", ".", "..", "../outside", "below/../file", "below//file", "below/", "/etc/passwd"])
def test_names_that_lead_out_are_refused(inside: Directory, name: str) -> None:
    for call in CALLS.values():
        with pytest.raises(ValueError, match="is no name of a file inside a directory"):
            call(inside, name)
    with pytest.raises(ValueError, match=r"manifest\.json: .* is no name of a file inside a directory"):
        check_name(name, Path("manifest.json"))


def test_a_name_inside_is_one(inside: Directory) -> None:
    for name in ("file", "below/file", "..file", "a b\n"):
        check_name(name, inside.path)


def test_files_are_written_read_and_removed(inside: Directory) -> None:
    with inside.create_new("below/new") as file:
        file.write(b"one")
        assert file.name == str(inside.path / "below" / "new")
    with inside.append("below/new") as file:
        file.write(b" two")
    with inside.open("below/new") as file:
        assert file.read() == b"one two"
    with pytest.raises(FileExistsError):
        inside.create_new("below/new")
    with pytest.raises(OSError, match="it has more than 6 bytes") as raised:
        inside.read("below/new", most=6)
    assert raised.value.errno == errno.EFBIG
    inside.rename("below/new", "file")
    assert inside.read("file") == b"one two"
    assert inside.names() == ["below", "file"]
    assert [inside.kind(name) for name in ("file", "below", "none")] == ["a regular file", "a directory", None]
    inside.remove_file("file")
    with pytest.raises(FileNotFoundError) as missing:
        inside.read("file")
    assert missing.value.filename == str(inside.path / "file")


def test_a_tree_is_removed_without_what_its_links_lead_to(inside: Directory) -> None:
    (inside.path / "below" / "up").symlink_to(inside.path.parent)
    with pytest.raises(OSError, match="not empty"):
        inside.remove_directory("below")
    inside.remove_tree("below")
    assert inside.names() == ["file"]
    assert (inside.path.parent / "outside").read_bytes() == KNOWN
    (inside.path / "link").symlink_to(inside.path.parent)
    with pytest.raises(OSError, match="it is a symbolic link"):
        inside.remove_tree("link")


def test_the_own_path_may_be_a_link(inside: Directory, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(inside.path)
    with Directory(tmp_path / "link") as linked:
        assert linked.read("file") == b"rows"
        assert linked.path == tmp_path / "link"
        with linked.subdirectory("below") as below:
            assert below.read("file") == b"more rows"


def test_a_lock_is_held_by_one(inside: Directory) -> None:
    with inside.lock(".lock"), pytest.raises(BlockingIOError) as raised:
        inside.lock(".lock")
    assert str(raised.value.filename) == str(inside.path / ".lock")
    held = inside.lock(".lock")
    held.release()
    held.release()
    inside.lock("file").release()
    assert inside.read("file") == b"rows"


def test_a_closed_directory_says_so(inside: Directory) -> None:
    with inside:
        file = inside.open("file")
    with file:
        assert file.read() == b"rows"
    with pytest.raises(ValueError, match="the directory is closed"):
        inside.read("file")


def test_a_file_in_the_place_of_a_directory_is_refused(inside: Directory) -> None:
    with pytest.raises(NotADirectoryError):
        Directory(inside.path / "file")
    with pytest.raises(FileNotFoundError):
        Directory(inside.path / "none")
