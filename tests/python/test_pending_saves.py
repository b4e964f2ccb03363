"""Saves in a thread of their own: what the handle gives, and who is told of a failure."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import drop_all_tables
from served_tables import ServerProcesses
from warm_programs import run_program

from recstore_ops import DistEmbedding, EmbeddingTableConfig, RecStoreClient, checkpoint, servers

pytestmark = pytest.mark.tier("test")


@pytest.fixture(autouse=True)
def _empty_store() -> Iterator[None]:
    drop_all_tables()
    yield
    servers.set_ps_backend("embedded")


def failing(folder: Path) -> checkpoint.PendingSave:
    """A save that has failed: its directory would lie in a file."""
    file = folder / "file"
    file.touch()
    saving = checkpoint.save_async(file / "below")
    while not saving.done():
        time.sleep(0.001)
    return saving


def told(work: object) -> list[str]:
    """What is warned of while `work()` runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert callable(work)
        work()
    assert all(warning.category is RuntimeWarning for warning in caught)
    return [str(warning.message) for warning in caught]


def test_whoever_asks_is_told_and_nobody_else(tmp_path: Path) -> None:
    for ask in ("result", "exception"):
        saving = failing(tmp_path)
        if ask == "result":
            with pytest.raises(RuntimeError, match="file"):
                saving.result()
        else:
            assert isinstance(saving.exception(), RuntimeError)

        def forget() -> None:
            nonlocal saving
            saving = None  # type: ignore[assignment]
            gc.collect()
            checkpoint.save(tmp_path / "fine")

        assert told(forget) == []


def test_a_failure_is_told_when_its_handle_is_gone(tmp_path: Path) -> None:
    def forget() -> None:
        failing(tmp_path)

    messages = told(forget)
    assert len(messages) == 1
    assert f"to {tmp_path}/file/below, failed, and nobody has asked for its result: " in messages[0]
    assert told(lambda: checkpoint.save(tmp_path / "fine")) == []


def test_a_failure_is_told_by_the_next_save_of_any_kind(tmp_path: Path) -> None:
    name = checkpoint.new_snapshot_name()
    saves = [
        lambda: checkpoint.save(tmp_path / "a"),
        lambda: checkpoint.save_async(tmp_path / "b").result(),
        lambda: RecStoreClient().save(tmp_path / "c"),
        lambda: checkpoint.save_part(tmp_path / "d", name, 0, 1),
    ]
    for save in saves:
        saving = failing(tmp_path)
        assert len(told(save)) == 1
        assert told(lambda: checkpoint.save(tmp_path / "a")) == []
        del saving


def test_equal_failures_are_told_each(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            failing(tmp_path)
    assert len(caught) == 3


def test_a_timeout_does_not_count_as_asked(tmp_path: Path) -> None:
    saving = checkpoint.PendingSave("somewhere")
    with pytest.raises(TimeoutError):
        saving.result(timeout=0.01)
    saving.set_exception(RuntimeError("no room"))
    message = "to somewhere, failed, and nobody has asked for its result: no room"
    assert [message in text for text in told(lambda: checkpoint.save(tmp_path))] == [True]


ENDS_WITHOUT_ASKING = """
import sys
from recstore_ops import DistEmbedding, checkpoint
DistEmbedding(None, 2, "t")
saving = checkpoint.save_async(sys.argv[1])
"""


def test_a_failure_is_told_at_the_end_of_the_process(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run_program(ENDS_WITHOUT_ASKING, tmp_path / "file" / "below")
    assert done.returncode == 0, done.stderr
    assert "RuntimeWarning: save 1 that save_async began in this process, to " in done.stderr
    assert done.stderr.count("nobody has asked") == 1


def test_on_servers_a_save_goes_on_beside_the_program(tmp_path: Path) -> None:
    with ServerProcesses(tmp_path, 1) as processes:
        servers.set_ps_servers(processes.addresses)
        client = RecStoreClient()
        client.init_embedding_table("t", EmbeddingTableConfig(None, 64))
        rows = torch.ones(100_000, 64)
        for start in range(0, 500_000, 100_000):
            client.push("t", torch.arange(start, start + 100_000), rows)
        saving = checkpoint.save_async(tmp_path / "saved", metadata={"step": 7})
        was_done = saving.done()
        assert torch.equal(client.pull("t", torch.arange(3)), rows[:3])
        servers.set_ps_backend("embedded")  # Waits for the save, which means the servers.
        assert saving.done()
        assert not was_done
        assert saving.result().rows == 500_000
    assert checkpoint.load(tmp_path / "saved").metadata == {"step": 7}


def test_servers_compress_as_asked(tmp_path: Path) -> None:
    with ServerProcesses(tmp_path, 2) as processes:
        servers.set_ps_servers(processes.addresses)
        client = RecStoreClient()
        client.init_embedding_table("t", EmbeddingTableConfig(None, 8, optimizer="sgd"))
        client.push("t", torch.arange(2000), torch.ones(2000, 8))
        plain = client.save(tmp_path / "plain")
        saves = {"save": checkpoint.save, "async": checkpoint.save_async, "client": client.save}
        for name, save in saves.items():
            report = save(tmp_path / name, compression="zstd")
            report = report.result() if name == "async" else report
            assert report.bytes < plain.bytes / 4
            assert sorted(path.suffix for path in (tmp_path / name).glob("*.safetensors*")) == [".zst", ".zst"]
        client.load(tmp_path / "save")
        assert client.pull("t", torch.arange(2000)).eq(1).all()


def test_a_child_does_not_tell_its_parents_failures(tmp_path: Path) -> None:
    DistEmbedding(None, 2, "t")
    code = """
import os, sys, warnings
from recstore_ops import DistEmbedding, checkpoint
warnings.simplefilter("always")
saving = checkpoint.save_async(sys.argv[1])
while not saving.done():
    pass
if os.fork() == 0:
    checkpoint.save(sys.argv[2])
    sys.exit(0)
os.wait()
saving.exception()
"""
    (tmp_path / "file").touch()
    done = run_program(code, tmp_path / "file" / "below", tmp_path / "fine")
    assert done.returncode == 0, done.stderr
    assert "nobody has asked" not in done.stderr
    assert (tmp_path / "fine").exists()


@pytest.mark.embedded_only("it has servers of its own")
def test_on_servers_a_save_has_what_was_there_when_it_returned(tmp_path: Path) -> None:
    ids = torch.arange(50)
    with ServerProcesses(tmp_path, 2) as processes:
        servers.set_ps_servers(processes.addresses)
        try:
            table = DistEmbedding(None, 2, "t")
            for number in range(40):
                table.weight[ids] = torch.full((50, 2), float(number))
                saving = checkpoint.save_async(tmp_path / "saved")
                table.weight[ids] = torch.full((50, 2), -1.0)
                saving.result(timeout=60)
                checkpoint.load(tmp_path / "saved")
                assert table(ids).detach().equal(torch.full((50, 2), float(number)))
        finally:
            servers.set_ps_backend("embedded")
