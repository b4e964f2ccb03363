"""Publications over HTTP: the same rows, tokens, certificates, servers that go and come back, and what is refused."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import trustme

from recstore_ops import DistEmbedding
from recstore_ops.ops import operators
from recstore_ops.servers.server_config import Tls
from recstore_ops.serving import FollowingBundle, Publisher, PublisherAddress, export, load_bundle, publish
from recstore_ops.serving.following.publication import Current

pytestmark = pytest.mark.tier("test")

TableName = Callable[[], str]
IDS = torch.arange(6)


@pytest.fixture
def rows(table_name: TableName) -> DistEmbedding:
    return DistEmbedding(None, 4, table_name(), initializer={"kind": "normal", "std": 1.0})


@pytest.fixture
def publisher(rows: DistEmbedding, tmp_path: Path) -> Iterator[Publisher]:
    with publish(rows, (IDS,), tmp_path / "news", interval=0, address="127.0.0.1:0") as publisher:
        yield publisher


@pytest.fixture
def bundle(rows: DistEmbedding, tmp_path: Path) -> Path:
    return export(rows, (IDS,), tmp_path / "model")


def write(rows: DistEmbedding, publisher: Publisher, value: float) -> None:
    operators.emb_write(rows.table.handle, IDS, torch.full((6, 4), value))
    publisher.step()


def shows(bundle: FollowingBundle, value: float) -> bool:
    """Whether a bundle comes to show a value."""
    end = time.monotonic() + 20
    while not bundle(IDS).equal(torch.full((6, 4), value)):
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def following(bundle: Path, follow: str | PublisherAddress | None) -> FollowingBundle:
    opened = load_bundle(bundle, follow=follow)
    assert isinstance(opened, FollowingBundle)
    return opened


def test_an_address_is_followed_as_a_directory_is(rows: DistEmbedding, publisher: Publisher, bundle: Path) -> None:
    assert publisher.address is not None
    opened = following(bundle, publisher.address)
    assert opened(IDS).equal(rows(IDS))
    for value in (1.0, 2.0, 3.0):
        write(rows, publisher, value)
        assert shows(opened, value)
    operators.hashtable_delete(rows.table.handle, IDS[:3])
    publisher.step()
    publisher.flush()
    end = time.monotonic() + 20
    while not opened(IDS).equal(rows(IDS)):
        assert time.monotonic() < end
    late = following(bundle, publisher.address)
    assert late(IDS).equal(rows(IDS))


def test_news_are_told_at_once(rows: DistEmbedding, publisher: Publisher, bundle: Path) -> None:
    opened = following(bundle, publisher.address)
    times = []
    for value in range(1, 21):
        begun = time.monotonic()
        write(rows, publisher, float(value))
        assert shows(opened, float(value))
        times.append(time.monotonic() - begun)
        time.sleep(0.02)
    assert min(times) < 0.9, "it would wait a whole second for the end of each poll"


def test_a_server_that_comes_back_is_followed_again(
    rows: DistEmbedding, publisher: Publisher, bundle: Path, tmp_path: Path
) -> None:
    address = publisher.address
    opened = following(bundle, address)
    write(rows, publisher, 1.0)
    assert shows(opened, 1.0)
    publisher.close()
    end = time.monotonic() + 20
    while opened.follower.problem is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert opened(IDS).equal(torch.ones(6, 4)), "it goes on to answer"
    with publish(rows, (IDS,), publisher.directory, interval=0, address=address) as again:
        write(rows, again, 5.0)
        assert shows(opened, 5.0)
        end = time.monotonic() + 20
        while opened.follower.problem is not None:
            assert time.monotonic() < end
            time.sleep(0.001)


def test_tokens_and_certificates_are_checked(rows: DistEmbedding, bundle: Path, tmp_path: Path) -> None:
    authorities, server = tmp_path / "ca.pem", tmp_path / "server.pem"
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(authorities))
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(server))
    tls, trusted = Tls(server, server), Tls(ca=authorities)
    with publish(rows, (IDS,), tmp_path / "news", address="127.0.0.1:0", token="secret", tls=tls) as publisher:
        assert publisher.address is not None
        assert following(bundle, PublisherAddress(publisher.address, "secret", trusted))(IDS).equal(rows(IDS))
        with pytest.raises(OSError, match="401 the token is not the publisher's"):
            load_bundle(bundle, follow=PublisherAddress(publisher.address, "other", trusted))
        with pytest.raises(OSError, match=r"(?i)certificate.verify.failed"):
            load_bundle(bundle, follow=PublisherAddress(publisher.address, "secret", Tls()))
        with pytest.raises(OSError, match=r"reset by peer|closed connection"):
            load_bundle(bundle, follow=publisher.address)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/.lock",
        "/../news/current.json",
        "/bases/../current.json",
        "/updates/1-00000000.update",
        "/bases/0-00000000/manifest.json",
        "/current.json?wait=x",
        "/bases/0-00000000/tables/../../../current.json",
    ],
)
def test_nothing_but_the_publication_is_told(path: str, publisher: Publisher) -> None:
    assert publisher.address is not None
    connection = http.client.HTTPConnection(publisher.address, timeout=20)
    connection.request("GET", path)
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (404, b"there is no such file")
    connection.request("GET", "/current.json")
    assert connection.getresponse().status == 200, "the connection goes on"


@pytest.mark.parametrize("wait", ["nan", "-1", "-inf"])
def test_no_wait_is_endless(wait: str, publisher: Publisher) -> None:
    assert publisher.address is not None
    seen = Current.read(publisher.directory).tag
    connection = http.client.HTTPConnection(publisher.address, timeout=20)
    connection.request("GET", f"/current.json?seen={seen}&wait={wait}")
    assert connection.getresponse().status == 200


def test_addresses_are_checked(rows: DistEmbedding, bundle: Path, tmp_path: Path) -> None:
    for address in ("localhost", "localhost:x", "localhost:70000"):
        with pytest.raises(ValueError, match=f"address must be host:port, got '{address}'"):
            publish(rows, (IDS,), tmp_path / "news", address=address)
    with pytest.raises(ValueError, match="can be reached from other machines: give the server TLS and a token"):
        publish(rows, (IDS,), tmp_path / "news", address="0.0.0.0:0")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
    with pytest.raises(OSError, match="Connection refused"):
        load_bundle(bundle, follow=f"127.0.0.1:{port}")
