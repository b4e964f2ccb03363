"""Bundles that follow a model in training: whole steps, every change, restarts, lost files, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recstore_ops import DistEmbedding, DistEmbeddingBag, SparseOptimizer, checkpoint
from recstore_ops.config.directory import Directory
from recstore_ops.ops import operators
from recstore_ops.servers.server_config import Tls
from recstore_ops.serving import FollowingBundle, Publisher, export, load_bundle, publish
from recstore_ops.serving.checked_json import checked_json
from recstore_ops.serving.exporting import ExportedModel
from recstore_ops.serving.following.followed import Follower
from recstore_ops.serving.following.names import Name
from recstore_ops.serving.following.publication import Base, Current
from recstore_ops.serving.following.publication_files import PublicationFiles
from recstore_ops.serving.following.sources import DirectorySource
from recstore_ops.serving.following.update import Update
from recstore_ops.serving.frozen_table import EncodingName
from recstore_ops.serving.graph_operators import Operators
from recstore_ops.serving.manifest import Manifest

pytestmark = pytest.mark.tier("test")

TableName = Callable[[], str]

IDS = torch.tensor([[1, 2], [3, 4], [5, 99]])
FOUND_WITHIN = 20.0


class Clicks(nn.Module):
    """A perceptron over rows of two tables."""

    def __init__(self, user: str, item: str, **options: Any) -> None:
        super().__init__()
        self.user = DistEmbedding(None, 4, user, initializer={"kind": "normal", "std": 1.0}, **options)
        self.item = DistEmbeddingBag(None, 4, item, mode="sum", initializer={"kind": "normal", "std": 1.0}, **options)
        self.dense = nn.Sequential(nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 1))

    def forward(self, ids: Tensor) -> Tensor:
        """Returns logits [B] of ids [B, 2]."""
        return self.dense(torch.cat([self.user(ids[:, 0]), self.item(ids[:, 1:])], dim=1)).squeeze(1)


@pytest.fixture
def clicks(table_name: TableName) -> Clicks:
    return Clicks(table_name(), table_name())


@pytest.fixture
def publisher(clicks: Clicks, tmp_path: Path) -> Iterator[Publisher]:
    with publish(clicks, (IDS,), tmp_path / "news", interval=0) as publisher:
        yield publisher


def answer(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(ids)


def manifest_of(publisher: Publisher) -> Manifest:
    """What the newest base is."""
    return Manifest.read(publisher.directory / Current.read(publisher.directory).base.name)


def followed(publisher: Publisher, tmp_path: Path) -> FollowingBundle:
    """A bundle of the model that follows it."""
    if not (tmp_path / "first").exists():
        base = Current.read(publisher.directory).base
        shutil.copytree(publisher.directory / base.name, tmp_path / "first")
    bundle = load_bundle(tmp_path / "first", follow=publisher.directory)
    assert isinstance(bundle, FollowingBundle)
    return bundle


def caught_up(bundle: FollowingBundle, publisher: Publisher) -> FollowingBundle:
    """Waits until the bundle has the newest update."""
    publisher.flush()
    newest = Current.read(publisher.directory)
    end = time.monotonic() + FOUND_WITHIN
    while (bundle.follower.update.history, bundle.follower.update.number) != (newest.base.history, newest.update):
        assert time.monotonic() < end, f"not there after {FOUND_WITHIN} s: {bundle.follower.problem}"
        time.sleep(0.002)
    return bundle


def train(model: Clicks, publisher: Publisher, steps: int, ids: int = 50) -> None:
    """Takes steps of both optimizers."""
    sparse, dense = SparseOptimizer(lr=0.1, modules=model), torch.optim.Adam(model.dense.parameters(), lr=0.1)
    for _ in range(steps):
        batch = torch.randint(0, ids, (16, 2))
        model(batch).sub(1.0).square().mean().backward()
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad()
        publisher.step()


def test_what_is_trained_is_seen_to_the_bit(clicks: Clicks, publisher: Publisher, tmp_path: Path) -> None:
    bundle = followed(publisher, tmp_path)
    assert bundle(IDS).equal(answer(clicks))
    before = bundle(IDS)
    for steps in (1, 5, 40):
        train(clicks, publisher, steps)
        publisher.update()
        caught_up(bundle, publisher)
        for ids in (IDS, torch.randint(-5, 80, (64, 2))):
            assert bundle(ids).equal(answer(clicks, ids))
    assert not bundle(IDS).equal(before)
    assert (bundle.step, bundle.follower.problem) == (46, None)
    assert 0 <= bundle.age < 100


def test_rows_that_go_and_come_back_are_seen(clicks: Clicks, publisher: Publisher, tmp_path: Path) -> None:
    bundle, handle = followed(publisher, tmp_path), clicks.user.table.handle

    def agree() -> None:
        publisher.update()
        caught_up(bundle, publisher)
        assert bundle(IDS).equal(answer(clicks))
        assert len(clicks.user.table) == operators.hashtable_ids(bundle.tables[clicks.user.table.name].handle).numel()

    operators.emb_write(handle, torch.tensor([1, 3, 5]), torch.ones(3, 4))
    agree()
    operators.hashtable_delete(handle, torch.tensor([3, 5]))
    agree()
    operators.emb_write(handle, torch.tensor([3]), torch.full((1, 4), 2.0))
    operators.hashtable_delete(handle, torch.tensor([1]))
    operators.emb_write(handle, torch.tensor([1]), torch.full((1, 4), 3.0))
    agree()
    operators.hashtable_clear(handle)
    agree()


def test_rows_that_are_evicted_go(table_name: TableName, tmp_path: Path) -> None:
    model = Clicks(table_name(), table_name(), eviction={"ttl": 3, "interval": 1})
    with publish(model, (IDS,), tmp_path / "news", interval=0) as publisher:
        bundle = followed(publisher, tmp_path)
        for first in range(0, 60, 10):
            model(torch.arange(first, first + 20).view(10, 2)).sum().backward()
            SparseOptimizer(lr=0.1, modules=model).step()
            publisher.step()
        caught_up(bundle, publisher)
        table = bundle.tables[model.user.table.name]
        assert sorted(operators.hashtable_ids(table.handle).tolist()) == sorted(
            operators.hashtable_ids(model.user.table.handle).tolist()
        )
        assert bundle(IDS).equal(answer(model))


@pytest.mark.parametrize("encoding", ["bfloat16", "int8", "int4"])
def test_rows_are_told_in_the_encoding_of_the_bundle(
    encoding: EncodingName, table_name: TableName, tmp_path: Path
) -> None:
    model = Clicks(table_name(), table_name())
    with publish(model, (IDS,), tmp_path / "news", interval=0, encoding=encoding) as publisher:
        bundle = followed(publisher, tmp_path)
        train(model, publisher, 10)
        publisher.update()
        caught_up(bundle, publisher)
        again = load_bundle(export(model, (IDS,), tmp_path / "again", encoding=encoding))
        assert bundle(IDS).equal(again(IDS))


def test_a_follower_that_was_away_catches_up(clicks: Clicks, publisher: Publisher, tmp_path: Path) -> None:
    first = followed(publisher, tmp_path)
    first.close()
    train(clicks, publisher, 30)
    late = followed(publisher, tmp_path)
    caught_up(late, publisher)
    assert late(IDS).equal(answer(clicks))
    assert not first(IDS).equal(answer(clicks)), "one that was closed stays as it was"


def test_a_publisher_that_begins_anew_begins_with_its_own_rows(
    clicks: Clicks, publisher: Publisher, tmp_path: Path
) -> None:
    bundle = followed(publisher, tmp_path)
    saved = tmp_path / "saved"
    train(clicks, publisher, 5)
    checkpoint.save(saved)
    train(clicks, publisher, 20)
    caught_up(bundle, publisher)
    publisher.close()
    checkpoint.load(saved)
    with publish(clicks, (IDS,), publisher.directory, interval=0) as again:
        caught_up(bundle, again)
        assert bundle(IDS).equal(answer(clicks))
        train(clicks, again, 3)
        again.update()
        caught_up(bundle, again)
        assert bundle(IDS).equal(answer(clicks))


def test_tables_that_are_loaded_begin_a_history(clicks: Clicks, publisher: Publisher, tmp_path: Path) -> None:
    bundle = followed(publisher, tmp_path)
    train(clicks, publisher, 5)
    checkpoint.save(tmp_path / "saved")
    train(clicks, publisher, 20)
    before = bundle.follower.update.history
    checkpoint.load(tmp_path / "saved")
    publisher.step()
    caught_up(bundle, publisher)
    assert bundle.follower.update.history != before
    assert bundle(IDS).equal(answer(clicks))


def test_bases_follow_one_another_and_old_files_go(
    clicks: Clicks, publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recstore_ops.serving.following.publication_files._MIN_BYTES", 20_000)
    bundle, stopped = followed(publisher, tmp_path), followed(publisher, tmp_path)
    stopped.close()
    bases = set()
    for _ in range(20):
        train(clicks, publisher, 8)
        publisher.flush()
        bases.add(Current.read(publisher.directory).base.name)
    assert len(bases) > 3
    assert len(list((publisher.directory / "bases").iterdir())) <= 3
    newest = Current.read(publisher.directory)
    assert newest.previous is not None
    numbers = sorted(int(file.name.split("-")[0]) for file in (publisher.directory / "updates").iterdir())
    assert numbers == list(range(newest.previous[0].after + 1, newest.update + 1))
    caught_up(bundle, publisher)
    assert bundle(IDS).equal(answer(clicks))
    late = followed(publisher, tmp_path)
    caught_up(late, publisher)
    assert late(IDS).equal(answer(clicks))


def test_a_base_that_no_update_made_whole_goes(
    clicks: Clicks, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recstore_ops.serving.following.publication_files._MIN_BYTES", 100)
    operators.emb_write(clicks.user.table.handle, torch.arange(5000), torch.rand(5000, 4))
    publisher.step()
    publisher.update()  # It has seen that the update is written, and begun with a base.
    publisher.close()
    said = Current.read(publisher.directory)
    whole = {said.base.name, *([] if said.previous is None else [said.previous[0].name])}
    assert {f"bases/{path.name}" for path in (publisher.directory / "bases").iterdir()} == whole


def test_tables_that_are_loaded_while_a_base_is_written_begin_a_history(
    clicks: Clicks, publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recstore_ops.serving.following.publication_files._MIN_BYTES", 100)
    bundle, write = followed(publisher, tmp_path), ExportedModel.write

    def write_slowly(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        time.sleep(0.3)

    monkeypatch.setattr(ExportedModel, "write", write_slowly)
    checkpoint.save(tmp_path / "saved")
    operators.emb_write(clicks.user.table.handle, torch.arange(5000), torch.rand(5000, 4))
    publisher.update()
    publisher.update()  # It has seen that the update is written, and begun with a base.
    checkpoint.load(tmp_path / "saved")
    publisher.update()
    caught_up(bundle, publisher)
    assert bundle(IDS).equal(answer(clicks))
    said = Current.read(publisher.directory)
    assert said.previous is not None
    whole = {said.base.name, said.previous[0].name}
    assert {f"bases/{path.name}" for path in (publisher.directory / "bases").iterdir()} == whole


@pytest.mark.parametrize("content", [b"\xff\xfe{", b"{", b"[]", b'{"crc32": 1}'])
def test_a_damaged_publication_is_told_by_its_file(content: bytes, publisher: Publisher) -> None:
    publisher.close()
    (publisher.directory / "current.json").write_bytes(content)
    with pytest.raises(OSError, match=r"current\.json is damaged"):
        Current.read(publisher.directory)


def test_no_reader_sees_a_part_of_a_step(table_name: TableName, tmp_path: Path) -> None:
    class Sums(nn.Module):
        """All rows hold the number of the step, and so does a dense tensor."""

        number: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (DistEmbedding(None, 2, table_name()) for _ in range(2))
            self.register_buffer("number", torch.zeros(()))

        def forward(self, ids: Tensor) -> Tensor:
            """Returns all that holds the number."""
            return torch.cat([self.first(ids).flatten(), self.second(ids).flatten(), self.number.reshape(1)])

    model, ids = Sums(), torch.arange(2000)

    def write(number: int) -> None:
        rows = torch.full((2000, 2), float(number))
        for table in (model.first.table, model.second.table):
            operators.emb_write(table.handle, ids, rows)
        model.number.fill_(number)

    write(0)
    with publish(model, (ids,), tmp_path / "news", interval=0) as publisher:
        bundle = followed(publisher, tmp_path)
        ended, seen, mixed = threading.Event(), set(), []

        def read() -> None:
            while not ended.is_set():
                found = bundle(ids).unique().tolist()
                seen.add(found[0])
                mixed.extend(found[1:])

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        for number in range(1, 60):
            write(number)
            publisher.step()
        caught_up(bundle, publisher)
        ended.set()
        for reader in readers:
            reader.join()
        assert not mixed
        assert len(seen) > 5
        assert bundle(ids).unique().tolist() == [59.0]


def test_updates_that_cannot_be_written_come_with_the_next(
    clicks: Clicks, publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = followed(publisher, tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Directory, "create_new", full)
    train(clicks, publisher, 5)
    with pytest.raises(OSError, match="No space left"):
        publisher.flush()
    assert isinstance(publisher.problem, OSError)
    monkeypatch.undo()
    publisher.update()
    caught_up(bundle, publisher)
    assert publisher.problem is None
    assert bundle(IDS).equal(answer(clicks))


def test_values_without_a_code_are_an_error_that_names_the_id(table_name: TableName, tmp_path: Path) -> None:
    model = Clicks(table_name(), table_name())
    with publish(model, (IDS,), tmp_path / "news", interval=0, encoding="int8") as publisher:
        bundle = followed(publisher, tmp_path)
        operators.emb_write(model.user.table.handle, torch.tensor([1, 7]), torch.full((2, 4), 1e9))
        with pytest.raises(RuntimeError, match=r"1000000000 in the row of id [17] cannot be kept as int8"):
            publisher.update()
        operators.emb_write(model.user.table.handle, torch.tensor([1, 7]), torch.ones(2, 4))
        publisher.update()
        caught_up(bundle, publisher)
        assert torch.equal(bundle.tables[model.user.table.name].read(torch.tensor([1, 7])), torch.ones(2, 4))


def test_damage_is_told_and_mended_by_the_next_base(clicks: Clicks, publisher: Publisher, tmp_path: Path) -> None:
    follower = Follower(manifest_of(publisher), DirectorySource(publisher.directory), "mapped", Operators())
    train(clicks, publisher, 2)
    publisher.flush()
    newest = Current.read(publisher.directory)
    path = publisher.directory / f"updates/{newest.update}-{newest.base.history}.update"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    follower.look(0.0)
    assert "is damaged: its checksum is another" in str(follower.problem)
    path.write_bytes(b"something else")
    follower.look(0.0)
    assert "is no update of a publication" in str(follower.problem)
    content[-1] ^= 1
    path.write_bytes(content)
    follower.look(0.0)
    assert follower.problem is None
    assert follower.run([IDS])[0].equal(answer(clicks))


def test_news_are_seen_though_their_file_has_the_number_and_time_of_the_one_before(publisher: Publisher) -> None:
    source, path = DirectorySource(publisher.directory), publisher.directory / "current.json"
    before, found = source.wait(None, 0), path.stat()
    news = replace(before, update=before.update + 1)
    path.write_text(checked_json(asdict(news), "recstore publication", 1))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (found.st_ino, found.st_mtime_ns)
    assert source.wait(before.tag, 0) == news


def test_an_update_under_another_name_is_refused(publisher: Publisher) -> None:
    newest = Current.read(publisher.directory)
    data = (publisher.directory / f"updates/{newest.update}-{newest.base.history}.update").read_bytes()
    with pytest.raises(OSError, match=r"updates/9-00000000\.update is another update, updates/1-"):
        Update.from_bytes(data, "updates/9-00000000.update")


def test_what_is_no_publication_of_the_model_is_refused(
    clicks: Clicks, publisher: Publisher, table_name: TableName, tmp_path: Path
) -> None:
    bundle = export(clicks, (IDS,), tmp_path / "model")
    with pytest.raises(ValueError, match=r"model is no publication: it has no current\.json"):
        load_bundle(bundle, follow=bundle)
    with pytest.raises(ValueError, match=r"publication: gs://news: expected a URL of s3:// or file://, got gs://"):
        load_bundle(bundle, follow="gs://news")
    other = DistEmbedding(None, 4, table_name())
    with publish(other, (IDS,), tmp_path / "other") as others:
        with pytest.raises(ValueError, match="other is of another model: expected outputs"):
            load_bundle(bundle, follow=others.directory)
        current = json.loads((others.directory / "current.json").read_text())
        (others.directory / "current.json").write_text(json.dumps({**current, "version": 2}))
        with pytest.raises(OSError, match=r"current\.json is damaged: its checksum is another"):
            load_bundle(bundle, follow=others.directory)


def test_what_cannot_be_published_is_refused(
    clicks: Clicks, publisher: Publisher, table_name: TableName, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="is published already: close the other publisher first"):
        publish(clicks, (IDS,), tmp_path / "again")
    other = DistEmbedding(None, 4, table_name())
    with pytest.raises(ValueError, match="another publisher writes to"):
        publish(other, (IDS,), publisher.directory)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("keep me")
    with pytest.raises(ValueError, match=r"notes is no publication: it has todo\.txt and no current\.json"):
        publish(other, (IDS,), tmp_path / "notes")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "lost+found").mkdir()
    (tmp_path / "new" / ".nfs0001").write_text("of the system")
    publish(other, (IDS,), tmp_path / "new").close()
    shutil.rmtree(tmp_path / "new")
    with pytest.raises(ValueError, match="interval must be 0 or more seconds, got -1"):
        publish(other, (IDS,), tmp_path / "new", interval=-1)
    for option in ({"token": "secret"}, {"tls": Tls()}, {"insecure": True}):
        with pytest.raises(ValueError, match=f"publish: {next(iter(option))} is about who may reach the publication"):
            publish(other, (IDS,), tmp_path / "new", **option)  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()
    publisher.close()
    with pytest.raises(ValueError, match="is closed"):
        publisher.step()
    publish(clicks, (IDS,), tmp_path / "again").close()


def test_a_bundle_that_follows_has_no_program(publisher: Publisher, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="follows a publication: open it without follow= for its program"):
        followed(publisher, tmp_path).program()
    with pytest.raises(ValueError, match=r"first has no program\.pt2: it is a base of a publication"):
        load_bundle(tmp_path / "first", trusted=True).program()


def test_what_a_killed_publisher_left_goes_and_nothing_else(clicks: Clicks, publisher: Publisher) -> None:
    """Of a base that no update made whole yet, and of files that were about to be deleted."""
    train(clicks, publisher, 1)
    publisher.flush()
    publisher.close()
    directory = publisher.directory
    kept = sorted(path.name for path in directory.glob("*/*"))
    (directory / "bases" / "of somebody").mkdir()
    files = PublicationFiles(directory)
    gone = Base("0123abcd", 7, 8)
    files.note_base(gone)
    files.write_base(gone, lambda path: path.mkdir())
    files._note([Name("updates", 5, gone.history)])
    (directory / "updates" / f"5-{gone.history}.update").write_bytes(b"")
    files.close()
    PublicationFiles(directory).close()
    assert sorted(path.name for path in directory.glob("*/*")) == sorted([*kept, "of somebody"])
    note = directory / ".unfinished.json"
    assert not note.exists()
    cut_off = directory.parent / "cut off"
    cut_off.mkdir()
    for name in ("current.new", ".unfinished.new", ".current.json", ".unfinished.json.new"):
        (cut_off / name).write_text("{")
    PublicationFiles(cut_off).close()
    for text, message in (
        ("{", "unfinished.json is damaged"),
        (
            checked_json({"files": ["../other"]}, "recstore publication's unfinished files", 1),
            "names '../other', which",
        ),
    ):
        note.write_text(text)
        for _ in range(2):  # The lock is free again.
            with pytest.raises(OSError, match=message):
                PublicationFiles(directory)
