"""Which files of a directory are given, in what order, and when: by a clock that tests set."""

from __future__ import annotations

from pathlib import Path

import pytest

from recstore_ops.training.run.followed_files import ArrivingFiles
from recstore_ops.training.run.input_config import FollowOptions

pytestmark = pytest.mark.tier("quick")


class Looks:
    """Looks at a directory every second of a clock that stands still in between."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.notes: list[str] = []
        self.seconds = 0.0
        self.files = ArrivingFiles(directory, 1.0, self.notes.append, lambda: self.seconds)

    def write(self, name: str, size: int = 1) -> None:
        (self.directory / name).write_bytes(b"x" * size)

    def look(self) -> str | None:
        """The next file, which is used at once."""
        path = self.files.look()
        self.seconds += 1.0
        if path is None:
            return None
        self.files.finish()
        return path.name


@pytest.fixture
def looks(tmp_path: Path) -> Looks:
    return Looks(tmp_path)


def test_files_come_in_the_order_of_their_names_once_each(looks: Looks) -> None:
    for name in ("b", "a", "c"):
        looks.write(name)
    assert [looks.look() for _ in range(5)] == [None, "a", "b", "c", None]
    looks.write("d")
    assert [looks.look() for _ in range(3)] == [None, "d", None]
    assert looks.notes == []


def test_a_file_that_grows_keeps_those_behind_it_waiting(looks: Looks) -> None:
    looks.write("b")
    for size in (1, 2, 3):
        looks.write("a", size)
        assert looks.look() is None
    assert [looks.look() for _ in range(2)] == ["a", "b"]


def test_two_looks_within_the_interval_are_not_enough(looks: Looks) -> None:
    looks.write("a")
    assert looks.files.look() is None
    looks.seconds = 0.9
    assert looks.files.look() is None
    looks.seconds = 1.0
    assert looks.look() == "a"


def test_what_is_no_file_of_rows_is_passed_over(looks: Looks) -> None:
    for name in (".a", "a~", "_SUCCESS", "a.tmp", "a.swp", "#a"):
        looks.write(name)
    looks.write("empty", 0)
    (looks.directory / "folder").mkdir()
    (looks.directory / "folder" / "a").write_bytes(b"x")
    (looks.directory / "broken").symlink_to(looks.directory / "nothing")
    looks.write("z")
    assert [looks.look() for _ in range(3)] == [None, "z", None]
    assert looks.notes == []


def test_a_late_file_is_noted_once_and_not_given(looks: Looks) -> None:
    looks.write("b")
    assert [looks.look() for _ in range(2)] == [None, "b"]
    looks.write("a")
    assert [looks.look() for _ in range(4)] == [None] * 4
    assert looks.notes == [f"{looks.directory / 'a'} came after b was used: it is not trained on"]


def test_a_used_file_that_changes_is_noted_once(looks: Looks) -> None:
    looks.write("a")
    assert [looks.look() for _ in range(2)] == [None, "a"]
    looks.write("a", 2000)
    assert [looks.look() for _ in range(3)] == [None] * 3
    sizes = "had 1 bytes when it was used, now it has 2,000"
    assert looks.notes == [f"{looks.directory / 'a'} {sizes}: the change is not trained on"]


def test_a_used_file_may_go_and_is_late_if_it_comes_again(looks: Looks) -> None:
    looks.write("a")
    assert [looks.look() for _ in range(2)] == [None, "a"]
    (looks.directory / "a").unlink()
    assert looks.look() is None
    assert looks.files.state_dict()["used"] == {}
    looks.write("a")
    assert looks.look() is None
    assert looks.notes == [f"{looks.directory / 'a'} came after a was used: it is not trained on"]


def test_a_state_knows_what_was_used_and_what_was_under_way(looks: Looks) -> None:
    for name in ("a", "b"):
        looks.write(name)
    assert [looks.look() for _ in range(2)] == [None, "a"]
    assert looks.files.look() == looks.directory / "b"
    again = Looks(looks.directory)
    again.files.load_state_dict(looks.files.state_dict())
    assert again.files.next(lambda: False, None, print) == looks.directory / "b"
    again.files.finish()
    assert [again.look() for _ in range(3)] == [None] * 3
    assert again.notes == []


@pytest.mark.parametrize("change", ["grows", "goes"])
def test_a_file_that_was_under_way_must_be_as_it_was(looks: Looks, change: str) -> None:
    looks.write("a")
    assert [looks.files.look(), looks.seconds] == [None, 0.0]
    looks.seconds = 1.0
    assert looks.files.look() is not None
    if change == "grows":
        looks.write("a", 3)
        with pytest.raises(ValueError, match="a had 1 bytes when the run began with it, now it has 3"):
            looks.files.next(lambda: False, None, print)
    else:
        (looks.directory / "a").unlink()
        with pytest.raises(FileNotFoundError, match="/a'"):
            looks.files.next(lambda: False, None, print)


def test_waiting_ends_when_nothing_comes_or_the_run_is_to_end(tmp_path: Path) -> None:
    waits: list[Path] = []
    files = ArrivingFiles(tmp_path, 0.01, print)
    assert files.next(lambda: False, 0.05, waits.append) is None
    assert set(waits) == {tmp_path}
    assert files.next(lambda: True, None, waits.append) is None


@pytest.mark.parametrize("name", ["done", "_SUCCESS"])
def test_waiting_ends_when_the_named_file_is_there_and_all_others_are_used(tmp_path: Path, name: str) -> None:
    def write_last(_: Path) -> None:
        waits.append(len(waits))
        if len(waits) == 2:
            (tmp_path / "b").write_text("x")
            (tmp_path / name).write_text("x" * len(waits))

    waits: list[int] = []
    files = ArrivingFiles(tmp_path, 0.01, print, until=name)
    (tmp_path / "a").write_text("x")
    used = []
    while (path := files.next(lambda: False, None, write_last)) is not None:
        used.append(path.name)
        assert not files.all_used
        files.finish()
    assert (used, files.all_used) == (["a", "b"], True)


def test_without_the_named_file_an_end_by_time_is_none_of_all_files(tmp_path: Path) -> None:
    files = ArrivingFiles(tmp_path, 0.01, print, until="done")
    assert files.next(lambda: False, 0.03, lambda _: None) is None
    assert not files.all_used


@pytest.mark.parametrize("name", ["", "in/done", "..", "/done"])
def test_the_name_of_the_last_file_is_one_within_the_directory(name: str) -> None:
    with pytest.raises(ValueError, match=rf"--follow-until takes the name of a file in the directory, got '{name}'"):
        FollowOptions(until=name)


def test_options_of_looks_and_the_directory_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--follow-every must be above 0, got 0"):
        FollowOptions(every=0)
    with pytest.raises(ValueError, match="--follow-until-idle must be a finite number, got inf"):
        FollowOptions(until_idle=float("inf"))
    with pytest.raises(ValueError, match=r"no such directory to follow: .*nowhere"):
        ArrivingFiles(tmp_path / "nowhere", 1.0, print)
