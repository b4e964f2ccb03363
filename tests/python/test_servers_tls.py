"""Encrypted servers: the same training, and refusals that say why."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trustme
from served_tables import ServerProcesses
from warm_recstore import run_recstore

from recstore_ops import DistEmbedding, SparseOptimizer, servers
from recstore_ops.config.config_file import load_config_file
from recstore_ops.servers.server_config import Tls, known_servers, served_shards

pytestmark = pytest.mark.tier("test")

TableName = Callable[[], str]


class Files:
    """PEM files of an authority, a server and a client."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        self.ca = folder / "ca.pem"
        authority.cert_pem.write_to_path(str(self.ca))
        for name in ("server", "client"):
            issued = authority.issue_cert("127.0.0.1" if name == "server" else "worker")
            issued.private_key_and_cert_chain_pem.write_to_path(str(folder / f"{name}.pem"))
        self.server, self.client = folder / "server.pem", folder / "client.pem"
        self.token = folder / "token"
        self.token.write_text("a secret\n")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("pem"))


@pytest.fixture(scope="module")
def processes(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcesses]:
    options = ("--tls-certificate", files.server, "--tls-key", files.server, "--tls-client-ca", files.ca)
    options = (*map(str, options), "--token-file", str(files.token))
    with ServerProcesses(tmp_path_factory.mktemp("servers"), 2, *options) as running:
        yield running


@pytest.fixture(autouse=True)
def _embedded_afterwards() -> Iterator[None]:
    yield
    servers.set_ps_backend("embedded")


def test_a_table_is_trained_over_encrypted_connections(
    files: Files, processes: ServerProcesses, table_name: TableName
) -> None:
    name = table_name()

    def trained() -> torch.Tensor:
        module = DistEmbedding(None, 8, name, optimizer="adagrad")
        for _ in range(3):
            module(torch.arange(500)).square().sum().backward()
            SparseOptimizer(modules=[module]).step()
        return module(torch.arange(500)).detach()

    expected = trained()
    servers.set_ps_servers(processes.addresses, token="a secret", tls=Tls(files.client, files.client, files.ca))
    assert torch.equal(trained(), expected)


def test_who_has_no_certificate_or_token_is_refused(files: Files, processes: ServerProcesses) -> None:
    def refusal(token: str, tls: Tls | None) -> str:
        with pytest.raises(ConnectionError) as error:
            servers.set_ps_servers(processes.addresses, token=token, tls=tls, timeout=2)
        assert servers.current_ps_backend() == "embedded"
        return str(error.value)

    assert "the server may ask for encryption" in refusal("a secret", None)
    assert "CertificateRequired" in refusal("a secret", Tls(ca=files.ca))
    assert "the token is not the server's" in refusal("another", Tls(files.client, files.client, files.ca))


def test_a_follower_is_encrypted_too(files: Files, tmp_path: Path) -> None:
    options = ("--tls-certificate", files.server, "--tls-key", files.server, "--tls-client-ca", files.ca)
    options = (*map(str, options), "--token-file", str(files.token), "--durability", "wal")
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    tls = Tls(files.client, files.client, files.ca)
    with (
        ServerProcesses(folders[0], 1, *options, "--data", str(folders[0])) as leader,
        ServerProcesses(
            folders[1], 1, *options, "--data", str(folders[1]), "--follow", leader.addresses[0], "--synchronous"
        ) as follower,
    ):
        servers.set_ps_servers([f"{leader.addresses[0]}|{follower.addresses[0]}"], token="a secret", tls=tls)
        module = DistEmbedding(10, 2, "followed", optimizer="sgd")
        module.weight[torch.arange(10)] = torch.ones(10, 2)
        promote = ("promote", follower.addresses[0], "--token-file", str(files.token))
        refused = run_recstore(*promote)
        assert (refused.returncode, "the server may ask for encryption" in refused.stderr) == (2, True), refused.stderr
        own = ("--tls-ca", str(files.ca), "--tls-certificate", str(files.client), "--tls-key", str(files.client))
        done = run_recstore(*promote, *own)
        assert done.returncode == 0, done.stderr
        assert torch.equal(module(torch.arange(10)), torch.ones(10, 2))


def test_a_follower_that_cannot_trust_its_leader_is_refused(files: Files, tmp_path: Path) -> None:
    options = ("--tls-certificate", str(files.server), "--tls-key", str(files.server), "--durability", "wal")
    refused = run_recstore("serve", "--port", "0", *options, "--data", str(tmp_path), "--follow", "127.0.0.1:1")
    assert (refused.returncode, "tls needs ca, the certificates to trust" in refused.stderr) == (2, True)


def test_files_that_are_of_no_use_are_named(files: Files, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tls needs both certificate and key, or neither"):
        Tls(certificate=files.client)
    with pytest.raises(ValueError, match="tls needs ca, the certificates to trust"):
        servers.set_ps_servers(["127.0.0.1:1"], tls=Tls())
    with pytest.raises(ValueError, match=r"missing\.pem: "):
        servers.set_ps_servers(["127.0.0.1:1"], tls=Tls(ca=tmp_path / "missing.pem"))


@pytest.mark.filterwarnings("ignore:.*without effect here")
def test_a_configuration_file_names_certificates_and_token_beside_it(files: Files, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    address = {"host": "127.0.0.1", "port": 1, "shard": 0}
    document = {
        "cache_ps": {"servers": [address], "tls": {"certificate": "c.pem", "key": "k.pem"}, "token_file": "token"},
        "distributed_client": {"servers": [address], "tls": {"ca": "ca.pem", "server_name": "here"}},
    }
    path = tmp_path / "recstore_config.json"
    path.write_text(json.dumps(document))
    config = load_config_file(path)
    served, known = served_shards(config), known_servers(config)
    assert served.tls == Tls(certificate=str(tmp_path / "c.pem"), key=str(tmp_path / "k.pem"))
    assert served.token == "secret"
    assert known is not None
    assert (known.tls, known.token) == (Tls(ca=str(tmp_path / "ca.pem"), server_name="here"), None)


@pytest.mark.filterwarnings("ignore:.*without effect here")
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"tls": 3}, "distributed_client.tls: must be object, got 3"),
        ({"tls": {"ca": "a", "serial": "a"}}, "distributed_client.tls.serial: unknown key; the known ones are"),
        ({"tls": {"ca": 3}}, "distributed_client.tls.ca: must be string, got 3"),
        ({"tls": {"key": "a"}}, 'distributed_client.tls: needs "ca"'),
        ({"tls": {"ca": "a", "key": "a"}}, "distributed_client.tls: needs both certificate and key, or neither"),
        ({"token_file": 3}, "distributed_client.token_file: must be string, got 3"),
        ({"token_file": "empty"}, "empty: the token is empty"),
    ],
)
def test_an_entry_that_is_none_is_refused_by_its_path(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    (tmp_path / "empty").write_text(" \n")
    path = tmp_path / "recstore_config.json"
    entry = {"servers": [{"host": "127.0.0.1", "port": 1, "shard": 0}], **entry}
    path.write_text(json.dumps({"distributed_client": entry}))
    with pytest.raises(ValueError, match=re.escape(message)):
        known_servers(load_config_file(path))
