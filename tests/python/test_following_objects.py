"""Publications that are copied to an object store, and bundles that follow them there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from eventually import wait_until
from test_following import IDS, Clicks, answer, caught_up, train

from recstore_ops.serving import FollowingBundle, Publisher, export, load_bundle, publish
from recstore_ops.serving.following import publication_copy, publication_files
from recstore_ops.serving.following.followed import Follower
from recstore_ops.serving.following.publication import Current
from recstore_ops.serving.following.sources import source_of
from recstore_ops.serving.graph_operators import Operators

pytestmark = pytest.mark.tier("test")

TableName = Callable[[], str]


@pytest.fixture
def clicks(table_name: TableName) -> Clicks:
    return Clicks(table_name(), table_name())


def published(clicks: Clicks, tmp_path: Path) -> Publisher:
    return publish(clicks, (IDS,), tmp_path / "news", interval=0, copy_to=f"file://{tmp_path}/objects/news")


def opened(clicks: Clicks, tmp_path: Path) -> FollowingBundle:
    bundle = load_bundle(export(clicks, (IDS,), tmp_path / "bundle"), follow=f"file://{tmp_path}/objects/news")
    assert isinstance(bundle, FollowingBundle)
    return bundle


def files(folder: Path) -> set[str]:
    """All files but those of the publisher alone."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {name for name in names if not name.startswith(".")}


def test_a_copy_is_followed_to_the_bit(clicks: Clicks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication_files, "_MIN_BYTES", 4_000)
    with published(clicks, tmp_path) as publisher:
        publisher.flush()
        bundle, bases = opened(clicks, tmp_path), set()
        for steps in (1, 5, 20, 20, 20):
            train(clicks, publisher, steps)
            caught_up(bundle, publisher)
            ids = torch.randint(-5, 80, (64, 2))
            assert bundle(ids).equal(answer(clicks, ids))
            assert files(tmp_path / "objects" / "news") <= files(tmp_path / "news"), "what is old goes"
            bases.add(Current.read(publisher.directory).base.name)
        assert len(bases) > 2
        assert publisher.copy is not None
        assert (publisher.copy.problem, bundle.follower.problem) == (None, None)
    assert files(tmp_path / "objects" / "news") == files(tmp_path / "news")


def test_a_copy_goes_on_where_another_publisher_ended(clicks: Clicks, tmp_path: Path) -> None:
    published(clicks, tmp_path).close()
    bundle = opened(clicks, tmp_path)
    shutil.rmtree(tmp_path / "news")
    with published(clicks, tmp_path) as publisher:
        train(clicks, publisher, 3)
        assert caught_up(bundle, publisher)(IDS).equal(answer(clicks))
        assert files(tmp_path / "objects" / "news") == files(tmp_path / "news")


def test_what_cannot_be_copied_is_copied_later(clicks: Clicks, tmp_path: Path) -> None:
    objects = tmp_path / "objects"
    with published(clicks, tmp_path) as publisher:
        publisher.flush()
        bundle = opened(clicks, tmp_path)
        shutil.move(objects, tmp_path / "away")
        objects.write_text("no folder")
        train(clicks, publisher, 2)
        with pytest.raises(OSError, match=rf"publication: file://{tmp_path}/objects/news: the object "):
            publisher.flush()
        assert publisher.problem is None, "the directory has all"
        objects.unlink()
        shutil.move(tmp_path / "away", objects)
        train(clicks, publisher, 2)
        assert publisher.copy is not None
        while publisher.copy.problem is not None:
            torch.randn(100, 100).sum()
        assert caught_up(bundle, publisher)(IDS).equal(answer(clicks))


def test_a_directory_that_goes_is_an_error_and_not_a_wait(clicks: Clicks, tmp_path: Path) -> None:
    publisher = published(clicks, tmp_path)
    publisher.flush()
    assert publisher.copy is not None
    (tmp_path / "news" / "current.json").unlink()
    publisher.copy.tell()
    with pytest.raises(ValueError, match=r"news is no publication: it has no current\.json"):
        publisher.copy.flush()
    with pytest.raises(ValueError, match=r"it has no current\.json"):
        publisher.close()


def test_what_is_no_copy_is_refused(clicks: Clicks, tmp_path: Path) -> None:
    (tmp_path / "objects" / "news").mkdir(parents=True)
    (tmp_path / "objects" / "news" / "todo.txt").write_text("keep me")
    with pytest.raises(ValueError, match=r"objects/news is no publication: it has todo\.txt"):
        published(clicks, tmp_path)
    (tmp_path / "objects" / "news" / "todo.txt").unlink()
    with pytest.raises(ValueError, match=r"objects/news is no publication: it has no current\.json"):
        opened(clicks, tmp_path)
    with pytest.raises(ValueError, match="publication: gs://news: expected a URL of s3:// or file://, got gs://"):
        publish(clicks, (IDS,), tmp_path / "other", copy_to="gs://news")
    publish(clicks, (IDS,), tmp_path / "news").close()


def test_objects_that_were_deleted_come_back(clicks: Clicks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication_copy, "_LIST_EVERY", 0.05)
    objects = tmp_path / "objects" / "news"
    with published(clicks, tmp_path) as publisher:
        train(clicks, publisher, 2)
        publisher.flush()
        there = {name: (objects / name).read_bytes() for name in files(objects)}
        assert len(there) > 6
        for name, content in there.items():
            (objects / name).unlink()
            wait_until(
                lambda name=name, content=content: (
                    (objects / name).exists() and (objects / name).read_bytes() == content
                )
            )
        shutil.rmtree(objects)
        wait_until(lambda: files(objects) == there.keys())
        assert opened(clicks, tmp_path)(IDS).equal(answer(clicks))


def test_a_foreign_object_is_refused_and_not_deleted(
    clicks: Clicks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication_copy, "_LIST_EVERY", 0.05)
    monkeypatch.setattr(publication_copy, "_PAUSE", 0.05)
    objects = tmp_path / "objects" / "news"
    with published(clicks, tmp_path) as publisher:
        publisher.flush()
        copy = publisher.copy
        assert copy is not None
        for name in ("todo.txt", "updates/1-todo.update", "bases/0-0123abcd/todo.txt", "bases/0-0123abcd/tables/../x"):
            foreign = objects / name
            foreign.parent.mkdir(parents=True, exist_ok=True)
            foreign.write_text("keep me")
            wait_until(lambda: "is no publication: it has" in str(copy.problem))
            assert foreign.read_text() == "keep me"
            foreign.unlink()
            wait_until(lambda: copy.problem is None)
        train(clicks, publisher, 2)
        assert caught_up(opened(clicks, tmp_path), publisher)(IDS).equal(answer(clicks))


@pytest.mark.parametrize("kind", ["link", "fifo", "missing"])
def test_what_is_no_regular_file_is_not_copied(kind: str, clicks: Clicks, tmp_path: Path) -> None:
    with publish(clicks, (IDS,), tmp_path / "news", interval=0) as publisher:
        train(clicks, publisher, 2)
        publisher.flush()
        said = Current.read(publisher.directory)
        path = publisher.directory / f"updates/{said.update}-{said.base.history}.update"
        path.rename(tmp_path / "aside")
        if kind == "link":
            path.symlink_to(tmp_path / "aside")
        elif kind == "fifo":
            os.mkfifo(path)
        copy = publication_copy.PublicationCopy(publisher.directory, f"file://{tmp_path}/objects/news")
        copy.tell()
        with pytest.raises(OSError, match=path.name if kind != "missing" else "lacks updates that follow bases/"):
            copy.flush()
        assert not (tmp_path / "objects" / "news" / path.relative_to(publisher.directory)).exists()
        path.unlink(missing_ok=True)
        (tmp_path / "aside").rename(path)
        copy.tell()
        wait_until(lambda: copy.problem is None)
        copy.close()
    assert opened(clicks, tmp_path)(IDS).equal(answer(clicks))


def test_what_an_object_store_answers_is_checked(clicks: Clicks, tmp_path: Path) -> None:
    objects = tmp_path / "objects" / "news"
    with published(clicks, tmp_path) as publisher:
        publisher.flush()
        bundle = opened(clicks, tmp_path)
        bundle.close()
        follower = Follower(bundle.manifest, source_of(f"file://{objects}"), "mapped", Operators())
        train(clicks, publisher, 1)
        publisher.flush()
        for path in (objects / "current.json", *(objects / "updates").glob("2-*")):
            good = path.read_bytes()
            for bad in (b"", good[:-1], good + b"x", b" " * 5000, bytes(len(good))):
                path.write_bytes(bad)
                follower.look(0.0)
                assert path.name in str(follower.problem), follower.problem
            path.write_bytes(good)
        follower.look(0.0)
        assert follower.problem is None
        assert follower.run([IDS])[0].equal(answer(clicks))
