"""`recstore serve-model --follow`: answers that follow a trainer, over a directory and over HTTP, and refusals."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import trustme
from served_models import ServedModel, infer_body
from warm_recstore import run_recstore

from recstore_ops import DistEmbedding, Publisher, export, publish
from recstore_ops.ops import operators
from recstore_ops.servers.server_config import Tls

pytestmark = pytest.mark.tier("test")

IDS = torch.arange(4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a bundle, a publication, a token and certificates."""
    folder = tmp_path_factory.mktemp("followers")
    (folder / "token").write_text("a secret\n")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
    return folder


@pytest.fixture(scope="module")
def rows(folder: Path) -> DistEmbedding:
    rows = DistEmbedding(None, 2, "served followers")
    export(rows, (IDS,), folder / "rows")
    return rows


@pytest.fixture(scope="module")
def publisher(rows: DistEmbedding, folder: Path) -> Iterator[Publisher]:
    tls = Tls(folder / "server.pem", folder / "server.pem")
    with publish(
        rows, (IDS,), folder / "news", interval=0, address="127.0.0.1:0", token="a secret", tls=tls
    ) as publisher:
        yield publisher


def answers(server: ServedModel) -> list[float]:
    answered = server.send("/v2/models/rows/infer", infer_body(("ids", "INT64", IDS)))
    return answered.document["outputs"][0]["data"]


@pytest.mark.parametrize("place", ["directory", pytest.param("address", marks=pytest.mark.tier("all"))])
def test_answers_follow_the_trainer(place: str, rows: DistEmbedding, publisher: Publisher, folder: Path) -> None:
    options: tuple[object, ...] = ("--follow", publisher.directory)
    if place == "address":
        options = ("--follow", publisher.address, "--follow-token-file", folder / "token")
        options = (*options, "--follow-tls-ca", folder / "ca.pem")
    with ServedModel(folder / "rows", *options) as server:
        for value in (1.0, 2.0):
            operators.emb_write(rows.table.handle, IDS, torch.full((4, 2), value))
            publisher.step()
            end = time.monotonic() + 20
            while answers(server) != [value] * 8:
                assert time.monotonic() < end
                time.sleep(0.005)
        metrics = server.send("/metrics").body.decode()
        assert 'recstore_model_follows{model="rows"} 1' in metrics
        assert f'recstore_model_step{{model="rows"}} {publisher.steps}' in metrics
        assert 'recstore_model_age_seconds{model="rows"}' in metrics


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--follow-token-file", "token"), "--follow-token-file and --follow-tls-ca need --follow, the address of a"),
        (("--follow", "news", "--follow-token-file", "token"), "the address of a publisher is host:port, got 'news'"),
        (("--follow", "rows"), "rows is no publication: it has no current.json"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    options: tuple[object, ...], message: str, publisher: Publisher, folder: Path
) -> None:
    refused = run_recstore("serve-model", "rows", "--port", 0, *options, cwd=folder)
    assert refused.returncode == 2
    assert message in refused.stderr
