"""Publications that are damaged or hostile: each defect is a problem that names its file, and what is good is taken."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from eventually import wait_until
from published_sums import IDS, Sums, published

from recstore_ops.serving import FollowingBundle, Publisher, export, load_bundle, publish
from recstore_ops.serving.checked_json import checked_json
from recstore_ops.serving.following import followed, update, writing_publisher
from recstore_ops.serving.following.followed import Follower
from recstore_ops.serving.following.publication import Current
from recstore_ops.serving.following.publication_files import PublicationFiles
from recstore_ops.serving.following.sources import DirectorySource
from recstore_ops.serving.following.update import TableChanges, Update
from recstore_ops.serving.graph_operators import Operators
from recstore_ops.serving.manifest import Manifest

pytestmark = pytest.mark.tier("test")

WITHIN = 5.0
FORMAT = "recstore publication"
OF_NO_FORM = (None, True, -1, 1.5, "7", [], {}, 2**63, 10**300, [[[[]]]], {"a": 1})
OF_NO_HISTORY = (
    None,
    7,
    "",
    "0123abc",
    "0123ABCD",
    "0123abcd\n",
    "x/../../../precious",
    "../../.",
    "\0" * 8,
    "\u0660" * 8,
)


@pytest.fixture
def news(table_name: Callable[[], str], tmp_path: Path) -> Iterator[tuple[Sums, Publisher]]:
    """A model of which two updates are published."""
    model, publisher = published(table_name(), tmp_path / "news", 0)
    step(model, publisher, 1)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("precious")
    with publisher:
        yield model, publisher


def step(model: Sums, publisher: Publisher, number: int) -> None:
    model.write(number)
    publisher.step()
    publisher.flush()


def following(directory: Path) -> Follower:
    """Follows a publication without a thread."""
    expected = Manifest.read(directory / Current.read(directory).base.name)
    return Follower(expected, DirectorySource(directory), "mapped", Operators())


def shown(follower: Follower) -> float:
    """The number that all rows have."""
    (values,) = follower.run([IDS])
    (number,) = values.unique().tolist()
    return number


def assert_refused(follower: Follower, file: str, number: float) -> None:
    """Looks, which must be a problem with a file, and changes nothing."""
    begun = time.monotonic()
    follower.look(0.0)
    assert time.monotonic() - begun < WITHIN
    assert isinstance(follower.problem, (OSError, ValueError))
    assert file in str(follower.problem), follower.problem
    assert (shown(follower), follower.follows) == (number, False)


def assert_taken(follower: Follower, number: float) -> None:
    follower.look(0.0)
    assert (follower.problem, shown(follower), follower.follows) == (None, number, True)


def fields_of(directory: Path) -> dict[str, Any]:
    fields = json.loads((directory / "current.json").read_text())
    return {name: value for name, value in fields.items() if name not in ("format", "version", "crc32")}


def with_value(fields: dict[str, Any], path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    """Fields of which one, at a path, has another value."""
    copy = json.loads(json.dumps(fields))
    place = copy
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    return copy


def forms(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a publication may not say, with checksums that fit."""
    base = fields["base"]
    for path in (("update",), ("base", "after"), ("base", "until"), ("base",)):
        yield from (with_value(fields, path, value) for value in OF_NO_FORM)
    yield from (with_value(fields, ("base", "history"), history) for history in OF_NO_HISTORY)
    yield from (with_value(fields, ("previous",), value) for value in OF_NO_FORM if value is not None)
    for previous in ([base], [base, None], [base, True], [base, 0], [base, 2**62], [base, 1, 1], [{}, 1], [None, 1]):
        yield with_value(fields, ("previous",), previous)
    yield from (with_value(fields, ("previous",), [{**base, "history": other}, 1]) for other in OF_NO_HISTORY)
    for without in fields:
        yield {name: value for name, value in fields.items() if name != without}
    for without in base:
        yield {**fields, "base": {name: value for name, value in base.items() if name != without}}
    yield {**fields, "further": 1}
    yield {**fields, "base": {**base, "further": 1}}
    yield with_value(fields, ("base", "until"), fields["update"] + 1)
    yield with_value(fields, ("base", "after"), base["until"])


def test_no_form_of_current_json_ends_a_follower_or_leads_a_publisher_out(
    news: tuple[Sums, Publisher], tmp_path: Path
) -> None:
    model, publisher = news
    directory, follower = publisher.directory, following(publisher.directory)
    publisher.close()
    current, good = directory / "current.json", (directory / "current.json").read_text()
    kept = sorted(directory.rglob("*"))
    for fields in forms(fields_of(directory)):
        current.write_text(checked_json(fields, FORMAT, 1))
        assert_refused(follower, "current.json", 1.0)
        with pytest.raises((OSError, ValueError), match=r"current\.json"):
            PublicationFiles(directory)
        current.write_text(good)
        assert_taken(follower, 1.0)
    assert sorted(directory.rglob("*")) == kept
    assert (tmp_path / "precious" / "file").read_text() == "precious"
    publish(model, (IDS,), directory).close()


TEXTS = (
    b"",
    b"\0",
    b"\xff" * 100,
    b"null",
    b"[" * 4000,
    b'{"a":' * 700,
    b"[" * 100_000,
    b" " * 5000,
    b"1" * 4000,
    b'{"crc32": NaN}',
    b'{"crc32": 1e999}',
    b'{"crc32": 0, "format": {}, "version": []}',
)


def test_no_text_ends_a_follower(news: tuple[Sums, Publisher]) -> None:
    current = news[1].directory / "current.json"
    follower, good = following(news[1].directory), current.read_bytes()
    for text in TEXTS:
        current.write_bytes(text)
        assert_refused(follower, "current.json", 1.0)
        current.write_bytes(good)
        assert_taken(follower, 1.0)


def test_each_byte_of_current_json_counts(news: tuple[Sums, Publisher]) -> None:
    current = news[1].directory / "current.json"
    follower, good = following(news[1].directory), current.read_bytes()
    for place in range(len(good)):
        current.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        assert_refused(follower, "current.json", 1.0)
    current.write_bytes(good)
    assert_taken(follower, 1.0)


def newest_update(directory: Path) -> Path:
    said = Current.read(directory)
    return directory / f"updates/{said.update}-{said.base.history}.update"


def test_each_byte_of_the_head_of_an_update_counts(news: tuple[Sums, Publisher]) -> None:
    model, publisher = news
    follower = following(publisher.directory)
    step(model, publisher, 2)
    file = newest_update(publisher.directory)
    good = file.read_bytes()
    for place in (*range(400), len(good) - 1):
        file.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        assert_refused(follower, file.name, 1.0)
    for length in (0, 1, 20, 100, len(good) - 1):
        file.write_bytes(good[:length])
        assert_refused(follower, file.name, 1.0)
    file.write_bytes(good)
    assert_taken(follower, 2.0)


def a_table(changed: Update) -> tuple[str, TableChanges]:
    return next(iter(changed.tables.items()))


def with_changes(changed: Update, **parts: bytes) -> Update:
    name, changes = a_table(changed)
    return replace(changed, tables={name: replace(changes, **parts)})


UPDATES: dict[str, Callable[[Update, str], Update]] = {
    "other number": lambda changed, handle: replace(changed, number=changed.number + 1),
    "other history": lambda changed, handle: replace(changed, history="00000000"),
    "unknown table": lambda changed, handle: replace(changed, tables={"other": a_table(changed)[1]}),
    "rows too short": lambda changed, handle: with_changes(changed, rows=a_table(changed)[1].rows[:-1]),
    "no rows": lambda changed, handle: with_changes(changed, rows=b""),
    "half an id": lambda changed, handle: with_changes(changed, ids=a_table(changed)[1].ids[:-4]),
    "half an id that went": lambda changed, handle: with_changes(changed, deleted=b"1234"),
    "unknown tensor": lambda changed, handle: replace(changed, state={"other": torch.zeros(())}),
    "other shape": lambda changed, handle: replace(changed, state={"number": torch.zeros(1)}),
    "other dtype": lambda changed, handle: replace(changed, state={"number": torch.zeros((), dtype=torch.float64)}),
    "the handle of a table": lambda changed, handle: replace(
        changed, state={handle: torch.zeros(4, dtype=torch.int64)}
    ),
}


def test_what_an_update_has_is_checked(news: tuple[Sums, Publisher]) -> None:
    model, publisher = news
    follower = following(publisher.directory)
    for number, changed in enumerate(UPDATES.values(), 2):
        step(model, publisher, number)
        file, said = newest_update(publisher.directory), Current.read(publisher.directory)
        good, name = file.read_bytes(), str(file.relative_to(publisher.directory))
        manifest = Manifest.read(publisher.directory / said.base.name)
        bad = changed(Update.from_bytes(good, name), manifest.tables[0].constants[0])
        file.write_bytes(bad.to_bytes())
        for _ in range(2):
            assert_refused(follower, file.name, number - 1)
        file.write_bytes(good)
        assert_taken(follower, number)


ABOUT: tuple[dict[str, Any], ...] = (
    {"history": "x/../../.."},
    {"number": True},
    {"step": -1},
    {"step": 2**63},
    {"time": float("nan")},
    {"time": float("inf")},
    {"tables": {"a": 1}},
    {"tables": [1]},
    {"tables": ["a", "a"]},
    {"tables": ["a", "b", "c"]},
    {"further": 1},
)


def test_what_an_update_says_of_itself_is_checked(
    news: tuple[Sums, Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, publisher = news
    follower, dumps = following(publisher.directory), json.dumps
    step(model, publisher, 2)
    file = newest_update(publisher.directory)
    good = file.read_bytes()
    changed = Update.from_bytes(good, str(file.relative_to(publisher.directory)))
    for wrong in ABOUT:
        with monkeypatch.context() as patched:
            patched.setattr(update.json, "dumps", lambda about, wrong=wrong: dumps({**about, **wrong}))
            bad = changed.to_bytes()
        file.write_bytes(bad)
        assert_refused(follower, file.name, 1.0)
    file.write_bytes(good)
    assert_taken(follower, 2.0)


def put_link(path: Path, outside: Path) -> None:
    shutil.move(path, outside)
    path.symlink_to(outside)


def put_dangling_link(path: Path, outside: Path) -> None:
    shutil.move(path, outside)
    path.symlink_to(outside.parent / "nothing")


def put_fifo(path: Path, outside: Path) -> None:
    shutil.move(path, outside)
    os.mkfifo(path)


def put_directory(path: Path, outside: Path) -> None:
    shutil.move(path, outside)
    path.mkdir()


def put_back(path: Path, outside: Path) -> None:
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.move(outside, path)


PUTS = (put_link, put_dangling_link, put_fifo, put_directory)


@pytest.mark.parametrize("put", PUTS)
def test_followers_take_regular_files_alone(put: Callable[..., None], news: tuple[Sums, Publisher]) -> None:
    model, publisher = news
    directory, follower = publisher.directory, following(publisher.directory)
    step(model, publisher, 2)
    publisher.close()
    outside = directory.parent / "outside"
    for path in (directory / "current.json", newest_update(directory)):
        put(path, outside)
        assert_refused(follower, path.name, 1.0)
        put_back(path, outside)
    assert_taken(follower, 2.0)
    base = directory / Current.read(directory).base.name
    expected = Manifest.read(base)
    for path in (path for path in sorted(base.rglob("*")) if path.is_file()):
        content = path.read_bytes()
        put(path, outside)
        begun = time.monotonic()
        with pytest.raises((OSError, ValueError), match=path.name):
            Follower(expected, DirectorySource(directory), "mapped", Operators())
        assert time.monotonic() - begun < WITHIN
        assert outside.read_bytes() == content
        put_back(path, outside)
    assert shown(following(directory)) == 2.0


@pytest.mark.tier("all")
def test_each_byte_of_the_heads_of_a_base_counts(news: tuple[Sums, Publisher]) -> None:
    directory = news[1].directory
    base = directory / Current.read(directory).base.name
    expected = Manifest.read(base)
    for name in ("manifest.json", "graph.json", "state.safetensors", "tables/0.safetensors"):
        good = (base / name).read_bytes()
        for place in range(min(len(good), 600)):
            (base / name).write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
            with pytest.raises((OSError, ValueError), match=Path(name).name):
                Follower(expected, DirectorySource(directory), "mapped", Operators())
        (base / name).write_bytes(good)
    assert shown(following(directory)) == 1.0


@pytest.mark.parametrize("name", ["bases", "updates"])
def test_followers_follow_no_linked_folder(name: str, news: tuple[Sums, Publisher], tmp_path: Path) -> None:
    model, publisher = news
    directory, follower = publisher.directory, following(publisher.directory)
    step(model, publisher, 2)
    publisher.close()
    put_link(directory / name, tmp_path / "outside")
    with pytest.raises(OSError, match=name):
        following(directory)
    put_back(directory / name, tmp_path / "outside")
    assert_taken(follower, 2.0)


FILES, FOLDERS = ("current.json", ".lock", ".unfinished.json"), ("updates", "bases")


@pytest.mark.parametrize(
    ("name", "put"), [*product(FILES, PUTS), *product(FOLDERS, (put_link, put_dangling_link, put_fifo))]
)
def test_publishers_take_regular_files_alone(
    name: str, put: Callable[..., None], news: tuple[Sums, Publisher], tmp_path: Path
) -> None:
    model, publisher = news
    publisher.close()
    path, outside = publisher.directory / name, tmp_path / "outside"
    if name == ".unfinished.json":
        path.write_text(checked_json({"files": []}, "recstore publication's unfinished files", 1))
    before = contents(path)
    put(path, outside)
    begun = time.monotonic()
    with pytest.raises((OSError, ValueError), match=name):
        publish(model, (IDS,), publisher.directory)
    assert time.monotonic() - begun < 30, "it does not wait"
    assert contents(outside) == before
    put_back(path, outside)
    publish(model, (IDS,), publisher.directory).close()


def contents(path: Path) -> dict[str, bytes]:
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return {str(file.relative_to(path)): file.read_bytes() for file in files if file.is_file()}


@pytest.mark.parametrize(
    "names",
    [["../precious"], ["bases/1-../../../precious"], ["bases/1-0123abcd/../../../precious"], [7], "bases/1-0123abcd"],
)
def test_a_note_names_files_of_the_publication_alone(
    names: object, news: tuple[Sums, Publisher], tmp_path: Path
) -> None:
    publisher = news[1]
    publisher.close()
    note = publisher.directory / ".unfinished.json"
    note.write_text(checked_json({"files": names}, "recstore publication's unfinished files", 1))
    with pytest.raises(OSError, match=r"unfinished\.json"):
        PublicationFiles(publisher.directory)
    assert (tmp_path / "precious" / "file").read_text() == "precious"


def test_what_is_deleted_is_no_link_and_behind_none(news: tuple[Sums, Publisher], tmp_path: Path) -> None:
    publisher = news[1]
    publisher.close()
    noted = publisher.directory / "bases" / "9-0123abcd"
    noted.mkdir()
    (noted / "tables").symlink_to(tmp_path / "precious")
    note = publisher.directory / ".unfinished.json"
    note.write_text(checked_json({"files": ["bases/9-0123abcd"]}, "recstore publication's unfinished files", 1))
    PublicationFiles(publisher.directory).close()
    assert not noted.exists()
    assert (tmp_path / "precious" / "file").read_text() == "precious"


def test_numbers_never_fall_within_a_history(news: tuple[Sums, Publisher]) -> None:
    model, publisher = news
    directory, follower = publisher.directory, following(publisher.directory)
    older = (directory / "current.json").read_text()
    for number in (2, 3, 4):
        step(model, publisher, number)
    assert_taken(follower, 4.0)
    newer = (directory / "current.json").read_text()
    (directory / "current.json").write_text(older)
    assert_refused(follower, "current.json went back to update 2 of history", 4.0)
    (directory / "current.json").write_text(newer)
    assert_taken(follower, 4.0)
    publisher.close()
    with publish(model, (IDS,), directory, interval=0) as again:
        step(model, again, 5)
        assert_taken(follower, 5.0)
        newest = (directory / "current.json").read_text()
        (directory / "current.json").write_text(newer)
        assert_refused(follower, "current.json went back to history", 5.0)
        (directory / "current.json").write_text(newest)
        step(model, again, 6)
        assert_taken(follower, 6.0)


def test_a_history_begins_anew_also_with_lower_numbers(
    news: tuple[Sums, Publisher], table_name: Callable[[], str]
) -> None:
    model, publisher = news
    for number in (2, 3, 4):
        step(model, publisher, number)
    follower = following(publisher.directory)
    publisher.close()
    shutil.rmtree(publisher.directory)
    model.write(7)
    with publish(model, (IDS,), publisher.directory, interval=0):
        assert_taken(follower, 7.0)
        assert follower.update.number == 1


def test_age_grows_though_the_clock_of_the_trainer_is_ahead(
    table_name: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(time=lambda: time.time() + 1e6)
    monkeypatch.setattr(writing_publisher, "time", clock)
    _, publisher = published(table_name(), tmp_path / "news", 0)
    with publisher:
        begun = time.monotonic()
        follower = following(publisher.directory)
        opened = time.monotonic()
        time.sleep(0.05)
        assert time.monotonic() - opened <= follower.age <= time.monotonic() - begun
        clock.time = lambda: time.time() - 1000
        publisher.close()
        with publish(Sums(table_name()), (IDS,), tmp_path / "other") as other:
            assert 1000 <= following(other.directory).age < 1100


def test_the_thread_lives_through_every_kind_of_problem(
    news: tuple[Sums, Publisher], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, publisher = news
    bundle = load_bundle(export(model, (IDS,), tmp_path / "model"), follow=publisher.directory)
    assert isinstance(bundle, FollowingBundle)
    monkeypatch.setattr(followed, "_PAUSE", 0.01)
    wait, number = DirectorySource.wait, 1
    for error in (KeyError("previous"), TypeError(), RecursionError(), MemoryError(), GeneratorExit(), OSError("no")):

        def fail(*_: object, error: BaseException = error) -> Current:
            raise error

        monkeypatch.setattr(DirectorySource, "wait", fail)
        wait_until(lambda: not bundle.follower.follows)
        assert isinstance(bundle.follower.problem, OSError)
        monkeypatch.setattr(DirectorySource, "wait", wait)
        number += 1
        step(model, publisher, number)
        wait_until(lambda value=number: bundle.follower.follows and bundle(IDS)[0] == value)
    bundle.close()
    assert not bundle.follower.follows


def test_a_source_that_does_not_answer_is_a_problem(
    news: tuple[Sums, Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = following(news[1].directory)
    monkeypatch.setattr(followed, "_SILENCE", 0.01)
    with follower._source.listening():  # type: ignore[attr-defined]
        time.sleep(0.05)
        assert "has not answered for 0 s" in str(follower.problem)
        assert not follower.follows
    assert follower.problem is None


def test_closing_does_not_wait_for_readers_or_sources(
    news: tuple[Sums, Publisher], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, publisher = news
    bundle = load_bundle(export(model, (IDS,), tmp_path / "model"), follow=publisher.directory)
    assert isinstance(bundle, FollowingBundle)
    with bundle.at_one_step() as run:
        step(model, publisher, 2)
        wait_until(lambda: bundle(IDS)[0] == 2)
        step(model, publisher, 3)
        time.sleep(0.05)
        begun = time.monotonic()
        bundle.close()
        assert time.monotonic() - begun < WITHIN
        assert run([IDS])[0].unique().tolist() == [1.0]
    step(model, publisher, 4)
    time.sleep(0.1)
    assert bundle(IDS).unique().tolist() == [2.0]


def test_more_changes_than_an_update_may_have_are_in_a_base(
    news: tuple[Sums, Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, publisher = news
    follower, before = following(publisher.directory), Current.read(publisher.directory).base.history
    monkeypatch.setattr(writing_publisher, "MAX_ROW_BYTES", 1000)
    step(model, publisher, 2)
    assert Current.read(publisher.directory).base.history != before
    assert newest_update(publisher.directory).stat().st_size < 2000
    assert_taken(follower, 2.0)
    monkeypatch.setattr(followed, "MAX_ROW_BYTES", -(16 << 20))
    monkeypatch.setattr(writing_publisher, "MAX_ROW_BYTES", 1 << 20)
    step(model, publisher, 3)
    assert_refused(follower, newest_update(publisher.directory).name, 2.0)


def test_updates_are_taken_a_batch_at_a_time(news: tuple[Sums, Publisher], monkeypatch: pytest.MonkeyPatch) -> None:
    model, publisher = news
    follower, late = following(publisher.directory), []
    for number in range(2, 8):
        step(model, publisher, number)
    monkeypatch.setattr(followed, "_BATCH_BYTES", 1)
    show = Follower._show

    def noted(self: Follower, sides: Any, changed: Update) -> None:
        show(self, sides, changed)
        late.append(shown(self))

    monkeypatch.setattr(Follower, "_show", noted)
    assert_taken(follower, 7.0)
    assert late == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert shown(following(publisher.directory)) == 7.0
