"""Ids forgotten in publications: every byte of the directory, followers, calls that are cut off."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from forgotten import bytes_of_rows, distinctive_ids, holders

from recstore_ops import DistEmbedding, FollowingBundle, export, forget, load_bundle, publish
from recstore_ops.ops import operators
from recstore_ops.serving.following.names import Name
from recstore_ops.serving.following.publication import Current
from recstore_ops.serving.following.publication_files import PublicationFiles

pytestmark = pytest.mark.tier("test")

TableName = Callable[[], str]
IDS = distinctive_ids(40)
GONE, KEPT = IDS[::4], IDS[1::4]


@pytest.fixture
def rows(table_name: TableName) -> DistEmbedding:
    rows = DistEmbedding(None, 8, table_name(), initializer={"kind": "normal", "std": 1.0})
    operators.emb_write(rows.table.handle, IDS[:20], torch.randn(20, 8))
    return rows


@pytest.fixture
def news(rows: DistEmbedding, tmp_path: Path) -> Path:
    """A publication with ids in the base, in updates and among those that were deleted."""
    with publish(rows, (IDS[:2],), tmp_path / "news", interval=0) as publisher:
        for part in IDS.split(10):
            operators.emb_write(rows.table.handle, part, torch.randn(10, 8))
            publisher.step()
        operators.hashtable_delete(rows.table.handle, IDS[4:8])
        publisher.step()
    return publisher.directory


def followed(rows: DistEmbedding, news: Path, path: Path) -> FollowingBundle:
    bundle = load_bundle(export(rows, (IDS[:2],), path), follow=news)
    assert isinstance(bundle, FollowingBundle)
    return bundle


def test_no_byte_has_the_ids_and_followers_have_the_others(rows: DistEmbedding, news: Path, tmp_path: Path) -> None:
    needles = bytes_of_rows(rows.table.name, GONE)
    bundle, before = followed(rows, news, tmp_path / "model"), rows(KEPT)
    assert bundle(KEPT).equal(before)
    assert len(holders(news, GONE, needles)) > 2
    planned = forget(news, rows.table.name, GONE, dry_run=True)
    assert {held.what for held in planned.places[0].held} == {"rows", "update"}
    report = forget(news, rows.table.name, GONE)
    assert not holders(news, GONE, needles)
    assert (report.places[0].kind, report.remaining, report.not_found) == ("publication", [], ())
    end = time.monotonic() + 20
    while torch.isin(operators.hashtable_ids(bundle.tables[rows.table.name].handle), GONE).any():
        assert time.monotonic() < end
        time.sleep(0.005)
    assert bundle(KEPT).equal(before)
    assert not forget(news, rows.table.name, GONE).places[0].held, "nothing is left"
    assert len(list((news / "bases").iterdir())) == 1


def test_a_call_that_is_cut_off_is_done_by_the_next(
    rows: DistEmbedding, news: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needles = bytes_of_rows(rows.table.name, GONE)
    removes, history = PublicationFiles._remove, Current.read(news).base.history

    def cut_off(files: PublicationFiles, names: Iterable[Name]) -> None:
        if files.current is not None and files.current.base.history != history:
            raise KeyboardInterrupt
        removes(files, names)

    monkeypatch.setattr(PublicationFiles, "_remove", cut_off)
    with pytest.raises(KeyboardInterrupt):
        forget(news, rows.table.name, GONE)
    assert holders(news, GONE, needles)
    monkeypatch.setattr(PublicationFiles, "_remove", removes)
    assert forget(news, rows.table.name, GONE).remaining == []
    assert not holders(news, GONE, needles)


def test_a_publication_in_use_is_refused(rows: DistEmbedding, tmp_path: Path) -> None:
    with publish(rows, (IDS[:2],), tmp_path / "news") as publisher:
        with pytest.raises(ValueError, match="another publisher writes to"):
            forget(publisher.directory, rows.table.name, GONE)
        with pytest.raises(ValueError, match='news has no table "none", but'):
            forget(publisher.directory, "none", GONE)
