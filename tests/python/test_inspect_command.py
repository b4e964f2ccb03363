"""`recstore inspect`: what it reports of a checkpoint, and what it says of bad arguments."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import drop_all_tables
from warm_recstore import run_recstore

from recstore_ops import (
    DistEmbedding,
    RecStoreClient,
    SparseOptimizer,
    checkpoint,
    inspect_checkpoint,
    table_names,
)
from recstore_ops.inspect import checkpoint_report

pytestmark = pytest.mark.tier("quick")

Recstore = Callable[..., int]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _empty_store() -> Iterator[None]:
    drop_all_tables()
    yield
    drop_all_tables()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A full snapshot of two tables and a delta; no table is left in the process."""
    user = DistEmbedding(None, 2, "user", optimizer={"kind": "adagrad", "lr": 0.5}, nan_policy="allow")
    item = DistEmbedding(100, 8, "[b]item", dtype=torch.bfloat16)
    client = RecStoreClient()
    client.push("user", torch.tensor([1, 2, 3]), torch.tensor([[3.0, 4.0], [0.0, 1.0], [1e30, 0.0]]))
    client.push("[b]item", torch.tensor([7]), torch.ones(1, 8))
    path = tmp_path / "saved"
    checkpoint.save(path, metadata={"epoch": 1})
    user(torch.tensor([2])).sum().backward()
    SparseOptimizer().step([user])
    client.push("user", torch.tensor([4, 5]), torch.tensor([[math.nan, 0.0], [math.inf, 0.0]]))
    client.delete("user", torch.tensor([3]))
    checkpoint.save(path, kind="delta", metadata={"epoch": 2})
    assert item.table is not None
    drop_all_tables()
    return path


def as_json(recstore: Recstore, capsys: Capture, *arguments: str | Path) -> Any:
    assert recstore("inspect", *arguments, "--format", "json") == 0
    return json.loads(capsys.readouterr().out)


def test_snapshots_are_listed_with_parent_time_kind_and_bytes(recstore: Recstore, saved: Path, capsys: Capture) -> None:
    full, delta = as_json(recstore, capsys, saved)["snapshots"]
    assert (full["parent"], full["kind"], full["metadata"]) == (None, "full", {"epoch": 1})
    assert (delta["parent"], delta["kind"], delta["metadata"]) == (full["id"], "delta", {"epoch": 2})
    for snapshot in (full, delta):
        files = list(saved.glob(f"{snapshot['id']}-*.safetensors"))
        assert snapshot["bytes"] == sum(file.stat().st_size for file in files)
        created = datetime.fromisoformat(snapshot["created"])
        assert created.utcoffset() == timedelta(0)
        assert abs(datetime.now(timezone.utc) - created) < timedelta(minutes=5)


def test_tables_have_counts_rate_and_norms(recstore: Recstore, saved: Path, capsys: Capture) -> None:
    item, user = as_json(recstore, capsys, saved)["tables"]
    assert (item["name"], item["dim"], item["config"]["dtype"], item["config"]["num_embeddings"]) == (
        "[b]item",
        8,
        "bfloat16",
        100,
    )
    assert (user["name"], user["dim"], user["slots"]) == ("user", 2, {"state_sum": 2})
    counts = user["statistics"]
    assert (counts["rows"], counts["step"], counts["learning_rate"]) == (4, 1, 0.5)
    assert user["bytes"] == sum(file.stat().st_size for file in saved.glob("*-user.safetensors"))
    # Rows 1 and 2; 2 has taken a step with the gradient 1 and state 1.
    assert (user["norms"]["rows"], user["non_finite"]) == (2, 2)
    assert user["norms"]["maximum"] == 5.0
    assert user["norms"]["minimum"] == pytest.approx(math.hypot(0.5, 0.5))
    assert user["norms"]["mean"] == pytest.approx((5.0 + math.hypot(0.5, 0.5)) / 2)
    assert user["rows"] == item["rows"] == []
    assert table_names() == [], "the tables are dropped again"


def test_rows_of_ids_come_with_slots_where_asked(recstore: Recstore, saved: Path, capsys: Capture) -> None:
    arguments = saved, "--table", "user", "--ids", "2,3,5"
    (table,) = as_json(recstore, capsys, *arguments)["tables"]
    assert [(row["id"], row["is_stored"]) for row in table["rows"]] == [(2, True), (3, False), (5, True)]
    assert table["rows"][0]["values"] == pytest.approx([-0.5, 0.5])
    assert table["rows"][2]["values"] == ["inf", 0.0]
    assert all("slots" not in row for row in table["rows"])
    (table,) = as_json(recstore, capsys, *arguments, "--slots")["tables"]
    assert [row["slots"] for row in table["rows"]] == [{"state_sum": [1.0, 1.0]}, {}, {"state_sum": [0.0, 0.0]}]


def test_text_is_one_line_a_row_where_there_is_no_terminal(recstore: Recstore, saved: Path, capsys: Capture) -> None:
    assert recstore("inspect", saved) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    full, delta = (line for line in lines if line[-2:-1] in (["full"], ["delta"]))
    assert (full[1], delta[1]) == ("-", full[0])
    created = datetime.fromisoformat(f"{full[2]}T{full[3]}+00:00")
    assert abs(datetime.now(timezone.utc) - created) < timedelta(minutes=5)
    assert ["metadata:", '{"epoch":', "2}"] in lines
    user = next(line for line in lines if line[:1] == ["user"])
    assert user[1:5] == ["float32", "adagrad", "2", "4"]
    assert user[6:] == ["1", "0.5", "0.7071", "2.854", "5", "2"]
    assert any(line[:1] == ["[b]item"] for line in lines)


def test_text_of_one_table_has_its_configuration_and_rows(recstore: Recstore, saved: Path, capsys: Capture) -> None:
    assert recstore("inspect", saved, "--table", "user", "--ids", "2,3", "--slots") == 0
    text = capsys.readouterr().out
    assert 'table "user"' in text
    assert "adagrad, lr 0.5" in text
    assert "[b]item" not in text
    lines = [line.split() for line in text.splitlines()]
    assert ["id", "stored", "values", "state_sum"] in lines
    assert ["2", "yes", "-0.5", "0.5", "1", "1"] in lines
    assert next(line for line in lines if line[:2] == ["3", "no"])[-1] == "-"


def test_a_table_without_rows_has_no_norms(recstore: Recstore, tmp_path: Path, capsys: Capture) -> None:
    DistEmbedding(None, 2, "empty")
    checkpoint.save(tmp_path)
    drop_all_tables()
    (table,) = as_json(recstore, capsys, tmp_path, "--ids", "-7")["tables"]
    assert (table["norms"], table["non_finite"], table["rows"][0]["is_stored"]) == (None, 0, False)
    assert recstore("inspect", tmp_path) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[-6:] == ["0", "0.01", "-", "-", "-", "0"]


def test_norms_are_over_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_report, "_ROWS_PER_CHUNK", 7)
    DistEmbedding(None, 1, "t")
    RecStoreClient().push("t", torch.arange(100), torch.arange(100.0).unsqueeze(1))
    checkpoint.save(tmp_path)
    drop_all_tables()
    norms = inspect_checkpoint(tmp_path).tables["t"].table.norms
    assert norms is not None
    assert (norms.rows, norms.minimum, norms.mean, norms.maximum) == (100, 0.0, 49.5, 99.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--table", "absent"], 'the checkpoint has no table "absent"; it has "[b]item", "user"'),
        (["--ids", "3"], 'ids need the table that they are of; the checkpoint has "[b]item", "user"'),
        (["--table", "user", "--ids", "3,x"], '--ids takes ids separated by commas, as in "3,-7", got "3,x"'),
        (["--table", "user", "--ids", str(2**63)], "--ids takes int64 ids, got 9223372036854775808"),
        (["--table", "[b]item", "--ids", "100"], 'out of range for table "[b]item" with num_embeddings 100'),
        (["--slots"], "--slots shows the slots of the rows of --ids, which are missing"),
    ],
)
def test_bad_arguments_are_one_sentence(
    arguments: list[str], message: str, recstore: Recstore, saved: Path, capsys: Capture
) -> None:
    assert recstore("inspect", saved, *arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert len(shown.err.splitlines()) == 1
    assert table_names() == []


def test_a_missing_or_damaged_checkpoint_is_named(recstore: Recstore, saved: Path, capsys: Capture) -> None:
    assert recstore("inspect", saved / "absent") == 2
    assert capsys.readouterr().err == f"recstore: checkpoint: {saved / 'absent'}: there is no checkpoint here\n"
    file = next(saved.glob("*-user.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert recstore("inspect", saved) == 2
    assert f"{file}: " in capsys.readouterr().err


def test_tables_of_the_process_are_not_replaced(saved: Path) -> None:
    DistEmbedding(None, 2, "user")
    message = 'a checkpoint is inspected in a process without tables, this one has "user"'
    with pytest.raises(ValueError, match=message):
        inspect_checkpoint(saved)
    assert table_names() == ["user"]


def test_a_save_that_comes_between_is_seen(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = checkpoint_report.load_to_read

    def load_and_save(path: Path) -> checkpoint.LoadReport:
        monkeypatch.setattr(checkpoint_report, "load_to_read", load)
        report = load(path)
        checkpoint.save(path, metadata="newer")
        return report

    monkeypatch.setattr(checkpoint_report, "load_to_read", load_and_save)
    (snapshot,) = inspect_checkpoint(saved).snapshots
    assert (snapshot.kind, snapshot.metadata) == ("full", "newer")


@pytest.mark.tier("test")
def test_the_command_runs_in_a_process_of_its_own(saved: Path) -> None:
    done = run_recstore("inspect", saved, "--table", "user", "--ids", "-7")
    assert done.returncode == 0, done.stderr
    assert 'rows of table "user"' in done.stdout
    assert done.stderr == ""


@pytest.mark.tier("test")
def test_a_configuration_file_with_servers_is_not_followed(saved: Path) -> None:
    servers = [{"host": "127.0.0.1", "port": 1, "shard": 0}]
    config = saved.parent / "recstore_config.json"
    config.write_text(json.dumps({"distributed_client": {"servers": servers, "num_shards": 1}}))
    ended = run_recstore("inspect", saved, "--format", "json", cwd=saved.parent)
    assert ended.returncode == 0, ended.stderr
    assert [table["name"] for table in json.loads(ended.stdout)["tables"]] == ["[b]item", "user"]
