"""`recstore train` with tables on servers, which keep the rows of runs that have ended or were killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import drop_all_tables
from saved_runs import Signals, rows_of, run_train
from served_tables import ServerProcesses

from recstore_ops import DistEmbedding, RecStoreClient, servers, table_names
from recstore_ops.training import load

pytestmark = [pytest.mark.tier("test"), pytest.mark.embedded_only("the runs choose their servers")]

IDS = torch.arange(100)
OPTIONS = ("rows.csv", "--epochs", 2, "--batch-size", 64, "--seed", 3)
REFUSED = "rows already: --table-prefix gives those of this run other names, --replace-tables gives up the rows"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with training rows, where programs keep their tables to themselves."""
    lines = [f"{row % 37},{row * 7 % 23},{int(row * 5 % 11 < 4)}" for row in range(600)]
    (tmp_path / "rows.csv").write_text("\n".join(["user,item,label", *lines]) + "\n")
    return tmp_path


@pytest.fixture
def served(folder: Path) -> Iterator[ServerProcesses]:
    """Two servers, which the directory's configuration file names."""
    with ServerProcesses(folder, 2) as processes:
        addresses = [address.rsplit(":", 1) for address in processes.addresses]
        shards = [{"host": host, "port": int(port), "shard": shard} for shard, (host, port) in enumerate(addresses)]
        config = {"distributed_client": {"num_shards": 2, "servers": shards}}
        (folder / "recstore_config.json").write_text(json.dumps(config))
        yield processes
    servers.set_ps_backend("embedded")


def train(folder: Path, *options: object, signals: Signals | None = None) -> tuple[int | None, str]:
    return run_train(folder, (*OPTIONS, *options), signals)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The newest snapshot of a checkpoint directory, as its manifest tells it."""
    return json.loads((directory / "manifest.json").read_text())["snapshots"][-1]


def own_rows(folder: Path, run: str) -> dict[str, dict[str, bytes]]:
    """The rows of a run's own tables in its last save."""
    rows = rows_of(folder / "runs" / run / "checkpoint")
    return {name: tensors for name, tensors in rows.items() if "-fm_" in name}


def test_a_second_run_names_other_tables_or_gives_up_those_that_are_there(
    folder: Path, served: ServerProcesses
) -> None:
    assert train(folder, "--run-name", "first") == (0, "")
    servers.set_ps_servers(served.addresses)
    client = RecStoreClient()
    before = {name: client.stats()[name]["rows"] for name in table_names()}
    assert sorted(before) == ["fm/v", "fm/w"]
    code, told = train(folder, "--run-name", "second")
    assert code == 2
    assert f"the tables fm/... have {sum(before.values()):,} {REFUSED}" in told
    assert {name: client.stats()[name]["rows"] for name in table_names()} == before
    assert train(folder, "--run-name", "second", "--table-prefix", "second") == (0, "")
    assert table_names() == ["fm/v", "fm/w", "second/v", "second/w"]
    # Begun anew, it is the first run once more.
    assert train(folder, "--run-name", "third", "--replace-tables") == (0, "")
    assert table_names() == ["fm/v", "fm/w", "second/v", "second/w"]
    assert own_rows(folder, "third") == own_rows(folder, "first")


def test_other_tables_on_the_servers_stay_as_they_are(folder: Path, served: ServerProcesses) -> None:
    servers.set_ps_servers(served.addresses)
    other = DistEmbedding(None, 2, "other", optimizer={"kind": "sgd", "lr": 1.0}, initializer="zeros")
    other.weight[IDS] = torch.ones(100, 2)
    saving = ("--run-name", "killed", "--save-every", 4)
    assert train(folder, *saving, signals=Signals(7))[0] == -9
    other.weight[IDS] = torch.full((100, 2), 2.0)
    assert train(folder, *saving, "--resume", "--replace-tables") == (0, "")
    assert train(folder, "--run-name", "next", "--init-from", "runs/killed", "--replace-tables") == (0, "")
    assert torch.equal(other(IDS), torch.full((100, 2), 2.0))


def test_the_best_evaluation_comes_back_without_other_tables(folder: Path, served: ServerProcesses) -> None:
    servers.set_ps_servers(served.addresses)
    other = DistEmbedding(None, 2, "other", initializer="zeros")
    other.weight[IDS] = torch.ones(100, 2)
    assert train(folder, "--run-name", "worse", "--lr", 1.0, "--epochs", 12, "--patience", 0) == (0, "")
    runs = folder / "runs"
    best, last = (read_manifest(runs / "worse" / part)["metadata"]["step"] for part in ("best", "checkpoint"))
    assert best < last
    client = RecStoreClient()
    trained = {name: each["step"] for name, each in client.stats().items()}
    assert trained == {"fm/v": best, "fm/w": best, "other": 0}
    servers.set_ps_backend("embedded")
    drop_all_tables()
    load(runs / "worse")
    assert table_names() == ["fm/v", "fm/w"]
    drop_all_tables()


def test_a_killed_run_goes_on_from_its_last_save(folder: Path, served: ServerProcesses) -> None:
    saving = ("--run-name", "killed", "--save-every", 4)
    assert train(folder, *saving, signals=Signals(7))[0] == -9
    code, told = train(folder, *saving, "--resume")
    assert code == 2
    assert REFUSED in told
    assert train(folder, *saving, "--resume", "--replace-tables") == (0, "")
    (folder / "recstore_config.json").unlink()
    assert train(folder, "--run-name", "alone") == (0, "")
    assert own_rows(folder, "killed") == own_rows(folder, "alone")


def test_a_run_on_servers_begins_with_another_one(folder: Path, served: ServerProcesses) -> None:
    assert train(folder, "--run-name", "first") == (0, "")
    going_on = ("--init-from", "runs/first", "--epochs", 1)
    code, told = train(folder, "--run-name", "second", *going_on)
    assert code == 2
    assert REFUSED in told
    assert train(folder, "--run-name", "second", *going_on, "--replace-tables") == (0, "")
    renamed = (*going_on, "--table-prefix", "third")
    code, told = train(folder, "--run-name", "third", *renamed)
    assert code == 2
    assert (
        "differs in --table-prefix, and servers take optimizer state only with a whole checkpoint: --init-what" in told
    )
    assert train(folder, "--run-name", "third", *renamed, "--init-what", "rows") == (0, "")
    servers.set_ps_servers(served.addresses)
    steps = {name: each["step"] for name, each in RecStoreClient().stats().items()}
    assert steps["third/v"] * 3 == steps["fm/v"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--table-prefix", ""), "--table-prefix must not be empty"),
        (("--tables", "nn", "--replace-tables"), "--replace-tables is about tables of the store"),
        (("--baseline", "nn", "--replace-tables"), "a comparison with a baseline takes no replace-tables"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: tuple[object, ...], message: str, folder: Path) -> None:
    code, told = train(folder, *options)
    assert code == 2
    assert message in told


def test_tables_of_nn_embedding_leave_those_on_servers_alone(folder: Path, served: ServerProcesses) -> None:
    assert train(folder, "--run-name", "first", "--optimizer", "sgd", "--lr", 0.1) == (0, "")
    servers.set_ps_servers(served.addresses)
    before = RecStoreClient().stats()
    assert train(folder, "--run-name", "nn", "--tables", "nn", "--optimizer", "sgd", "--lr", 0.1) == (0, "")
    assert RecStoreClient().stats() == before
