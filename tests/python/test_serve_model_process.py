"""`recstore serve-model` as a process: who is let in, how it ends, what it does not start with, and floods."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import pytest
import torch
import trustme
from served_models import (
    TOKEN,
    Answered,
    ServedModel,
    Slow,
    binary_body,
    call,
    infer_body,
    pairs,
    pairs_body,
)
from warm_programs import run_program
from warm_recstore import run_recstore

from recstore_ops.serving import export

pytestmark = pytest.mark.tier("all")

IDS = torch.tensor([[1, 2], [3, 4]])
INFER = "/v2/models/pairs/infer"
CALLED = {"name": "ids", "datatype": "INT64", "shape": [2, 2], "contents": {"int64_contents": [1, 2, 3, 4]}}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of `Pairs`."""
    return pairs(tmp_path_factory.mktemp("bundles") / "pairs", "serve_model_process")


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of `Slow`."""
    return export(Slow(150), (torch.rand(2, 1),), tmp_path_factory.mktemp("bundles") / "slow")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PEM files of an authority, a server, a client and a stranger, and a token."""
    folder = tmp_path_factory.mktemp("pem")
    authority, other = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    for name, issuer in (("server", authority), ("client", authority), ("stranger", other)):
        issued = issuer.issue_cert("127.0.0.1")
        issued.private_key_and_cert_chain_pem.write_to_path(str(folder / f"{name}.pem"))
    (folder / "token").write_text(f"{TOKEN}\n")
    return folder


def client_context(files: Path, own: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=files / "ca.pem")
    if own is not None:
        context.load_cert_chain(files / f"{own}.pem")
    return context


def client_credentials(files: Path, own: str | None) -> grpc.ChannelCredentials:
    authority = (files / "ca.pem").read_bytes()
    pem = None if own is None else (files / f"{own}.pem").read_bytes()
    return grpc.ssl_channel_credentials(authority, pem, pem)


def test_tokens_are_asked_for_everywhere_but_by_health(bundle: Path, files: Path) -> None:
    options = ("--token-file", files / "token", "--grpc-port", 0, "--metrics-port", 0)
    with ServedModel(bundle, *options) as server, server.channel() as channel:
        for path in ("/v2", "/v2/models/pairs", "/v2/models/pairs/ready", "/metrics", "/nowhere"):
            for headers in ({}, {"Authorization": "Bearer another"}, {"Authorization": TOKEN}):
                refused = server.send(path, headers=headers)
                assert (refused.status, refused.error) == (401, "the token is not the server's")
                assert refused.headers["WWW-Authenticate"] == "Bearer"
        known = {"Authorization": f"Bearer {TOKEN}"}
        assert server.send(INFER, pairs_body(IDS)).status == 401
        assert server.send(INFER, pairs_body(IDS), known).status == 200
        assert server.send("/v2/health/ready").status == 200
        assert server.send("/metrics", headers=known).body.count(b'protocol="http",outcome="token"} 16') == 1
        assert server.send("/metrics", port="metrics").status == 200

        assert call(channel, "ServerLive").live
        assert call(channel, "ServerReady").ready
        assert call(channel, "ModelMetadata", TOKEN, name="pairs").name == "pairs"
        assert call(channel, "ModelInfer", TOKEN, model_name="pairs", inputs=[CALLED]).outputs
        for method in ("ModelReady", "ModelMetadata", "ServerMetadata", "ModelInfer"):
            for token in ("", "another"):
                with pytest.raises(grpc.RpcError, match="the token is not the server's") as error:
                    call(channel, method, token)
                assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]


def test_connections_are_encrypted(bundle: Path, files: Path) -> None:
    options = ("--tls-certificate", files / "server.pem", "--tls-key", files / "server.pem", "--grpc-port", 0)
    with ServedModel(bundle, *options, "--health-port", 0, tls=client_context(files, None)) as server:
        assert f"at https://{server.addresses['http']}, gRPC at" in server.line
        assert server.send(INFER, pairs_body(IDS)).status == 200
        assert server.send("/v2/health/live", port="health").document == {"live": True}
        with server.channel(client_credentials(files, None)) as channel:
            assert call(channel, "ModelInfer", model_name="pairs", inputs=[CALLED]).outputs
        with server.channel() as channel, pytest.raises(grpc.RpcError):
            call(channel, "ServerLive")
        host, port = server.addresses["http"].split(":")
        with socket.create_connection((host, int(port)), timeout=10) as plain:
            plain.sendall(b"GET /v2 HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"HTTP" not in plain.recv(100)


def test_clients_show_certificates(bundle: Path, files: Path) -> None:
    options = ("--tls-certificate", files / "server.pem", "--tls-key", files / "server.pem", "--grpc-port", 0)
    options = (*options, "--tls-client-ca", files / "ca.pem", "--token-file", files / "token")
    with ServedModel(bundle, *options, tls=client_context(files, "client"), token=TOKEN) as server:
        assert server.send(INFER, pairs_body(IDS)).status == 200
        with server.channel(client_credentials(files, "client")) as channel:
            assert call(channel, "ModelInfer", TOKEN, model_name="pairs", inputs=[CALLED]).outputs
        for own in (None, "stranger"):
            with server.channel(client_credentials(files, own)) as channel, pytest.raises(grpc.RpcError):
                call(channel, "ServerLive", TOKEN)
            host, port = server.addresses["http"].split(":")
            with socket.create_connection((host, int(port)), timeout=20) as plain:
                # TLS 1.3 says it at the first read, or the connection just ends.
                encrypted = client_context(files, own).wrap_socket(plain, server_hostname="127.0.0.1")
                answered = b""
                with suppress(OSError):
                    encrypted.sendall(b"GET /v2 HTTP/1.1\r\nHost: a\r\n\r\n")
                    answered = encrypted.recv(100)
                assert answered == b""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--host", "0.0.0.0"), "0.0.0.0:0 can be reached from other machines: give the server TLS and a token"),
        (("--host", "0.0.0.0", "--token-file", "token"), "0.0.0.0:0 can be reached from other machines"),
        (
            ("--host", "0.0.0.0", "--tls-certificate", "server.pem", "--tls-key", "server.pem"),
            "0.0.0.0:0 can be reached from other machines",
        ),
        (("--host", "no.such.host.invalid"), "cannot listen on no.such.host.invalid:0: "),
        (("--host", "192.0.2.1", "--insecure"), "cannot listen on 192.0.2.1:0: "),
        (("--tls-certificate", "server.pem"), "tls needs both certificate and key, or neither"),
        (("--tls-client-ca", "ca.pem"), "--tls-client-ca needs --tls-certificate and --tls-key"),
        (
            ("--tls-certificate", "missing.pem", "--tls-key", "server.pem"),
            "missing.pem and server.pem: no certificate and key that fit: ",
        ),
        (
            ("--tls-certificate", "server.pem", "--tls-key", "client.pem"),
            "server.pem and client.pem: no certificate and key that fit: ",
        ),
        (
            ("--tls-certificate", "server.pem", "--tls-key", "server.pem", "--tls-client-ca", "token"),
            "token: no certificates of authorities: ",
        ),
        (
            ("--tls-certificate", "server.pem", "--tls-key", "server.pem", "--tls-client-ca", "fifo"),
            "fifo: it is no regular file",
        ),
        (("--tls-certificate", "fifo", "--tls-key", "server.pem"), "fifo: it is no regular file"),
        (("--tls-certificate", "server.pem", "--tls-key", "fifo"), "fifo: it is no regular file"),
        (("--token-file", "empty"), "empty: the token is empty"),
        (("--token-file", "missing"), "missing"),
        (("--max-body", 5, "--max-pending-bytes", 4), "--max-pending-bytes 4 has no room for one request"),
    ],
)
def test_starts_that_are_refused(bundle: Path, files: Path, options: tuple[object, ...], message: str) -> None:
    (files / "empty").write_text("\n")
    if not (files / "fifo").exists():
        os.mkfifo(files / "fifo")
    refused = run_recstore("serve-model", bundle, "--port", 0, *options, cwd=files)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("recstore: ")
    assert message in refused.stderr


def test_ports_that_are_taken_are_named(bundle: Path) -> None:
    with ServedModel(bundle, "--grpc-port", 0) as server:
        for option, port in (
            ("--port", "http"),
            ("--grpc-port", "grpc"),
            ("--port", "grpc"),
            ("--metrics-port", "http"),
        ):
            number = server.addresses[port].rpartition(":")[2]
            refused = run_recstore(
                "serve-model", bundle, *(() if option == "--port" else ("--port", 0)), option, number
            )
            assert (refused.returncode, refused.stdout) == (2, "")
            assert f"cannot listen on 127.0.0.1:{number}: " in refused.stderr


def test_other_machines_are_let_in_where_that_is_said(bundle: Path, files: Path) -> None:
    with ServedModel(bundle, "--host", "0.0.0.0", "--insecure") as server:
        assert " at http://0.0.0.0:" in server.line
        assert server.send("/v2/health/live").document == {"live": True}
    options = ("--tls-certificate", files / "server.pem", "--tls-key", files / "server.pem")
    tls = client_context(files, None)
    tls.check_hostname = False
    options = (*options, "--host", "0.0.0.0", "--token-file", files / "token")
    with ServedModel(bundle, *options, tls=tls, token=TOKEN) as server:
        assert server.send("/v2").document["name"] == "recstore"


def test_addresses_of_version_six(bundle: Path) -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with ServedModel(bundle, "--host", "::1", "--grpc-port", 0) as server, server.channel() as channel:
        assert server.addresses["http"].startswith("[::1]:")
        assert call(channel, "ServerLive").live


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    refused = run_recstore("serve-model", tmp_path)
    assert (refused.returncode, refused.stderr) == (2, f"recstore: {tmp_path} is no bundle: it has no manifest.json\n")


@pytest.mark.parametrize("package", ["google.protobuf", "safetensors"])
def test_packages_that_are_missing_are_named(bundle: Path, package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None; sys.argv = ['recstore', 'serve-model', {str(bundle)!r}]\n"
        "from recstore_ops import cli; cli.main()"
    )
    done = run_program(code)
    assert done.returncode == 2, done.stderr
    assert f"recstore: serve-model needs {package}: pip install 'recstore-ops[serve]'" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_requests_under_way_are_answered_at_the_end(slow: Path, number: int) -> None:
    server = ServedModel(slow, "--max-batch", 1, "--grpc-port", 0)
    answers: list[Answered] = []
    body = infer_body(("x", "FP32", torch.rand(1, 1)))
    asking = [
        threading.Thread(target=lambda: answers.append(server.send("/v2/models/slow/infer", body))) for _ in range(3)
    ]
    kept = server.connection()
    kept.request("GET", "/v2/health/ready")
    assert kept.getresponse().read() == b'{"ready": true}'
    entry = {"name": "x", "datatype": "FP32", "shape": [1, 1], "contents": {"fp32_contents": [0.5]}}
    called: list[int] = []
    channel = server.channel()
    asking.append(
        threading.Thread(
            target=lambda: called.append(len(call(channel, "ModelInfer", model_name="slow", inputs=[entry]).outputs))
        )
    )
    for each in asking:
        each.start()
    while server.metric("recstore_model_requests_in_flight") < 4:
        assert not answers, "too fast to show anything"
    server.process.send_signal(number)
    while True:
        kept.request("GET", "/v2/health/ready")
        response = kept.getresponse()
        if (answered := (response.status, response.read())) != (200, b'{"ready": true}'):
            break
    assert answered == (503, b'{"ready": false}')
    kept.request("POST", "/v2/models/slow/infer", body)
    response = kept.getresponse()
    assert (response.status, response.headers["Retry-After"]) == (503, "1")
    assert json.loads(response.read()) == {"error": "the server ends"}
    for each in asking:
        each.join()
    assert [answered.status for answered in answers] == [200, 200, 200]
    assert called == [1]
    channel.close()
    assert server.process.communicate(60) == ("", "")
    assert server.process.returncode == 0


def test_a_server_that_drains_answers_while_it_is_not_ready(bundle: Path) -> None:
    server = ServedModel(bundle, "--drain", 1.5, "--grpc-port", 0)
    with server.channel() as channel:
        assert call(channel, "ServerReady").ready
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        while (found := server.send("/v2/health/ready")).status == 200:
            pass
        assert (found.status, found.document) == (503, {"ready": False})
        refused = server.send("/v2/models/pairs/ready")
        assert (refused.status, refused.document) == (503, {"name": "pairs", "ready": False})
        assert server.send("/v2/health/live").status == 200
        assert server.send(INFER, pairs_body(IDS)).status == 200
        assert not call(channel, "ServerReady").ready
        assert not call(channel, "ModelReady", name="pairs").ready
        assert call(channel, "ModelInfer", model_name="pairs", inputs=[CALLED]).outputs
    assert server.process.communicate(60) == ("", "")
    assert server.process.returncode == 0
    assert time.monotonic() - begin > 1.4


def test_a_signal_before_the_first_request_ends_it(bundle: Path) -> None:
    server = ServedModel(bundle)
    idle = server.connection()
    idle.connect()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0


def opened(server: ServedModel, count: int, stack: ExitStack, port: str = "http") -> list[socket.socket]:
    """Opens connections that say nothing."""
    host, number = server.addresses[port].split(":")
    return [stack.enter_context(socket.create_connection((host, int(number)), timeout=20)) for _ in range(count)]


def test_a_full_port_closes_peers_that_said_nothing(bundle: Path) -> None:
    with ServedModel(bundle, "--max-connections", 20, "--metrics-port", 0) as server, ExitStack() as stack:
        kept = server.connection()
        kept.request("GET", "/v2")
        assert kept.getresponse().read()
        silent = opened(server, 200, stack)
        begin = time.monotonic()
        for each in silent[:180]:
            assert each.recv(1000) == b"", "newer ones took their places"
        kept.request("GET", "/v2")
        assert kept.getresponse().status == 200, "a flood of unknown peers closes no client's connection"
        assert server.send(INFER, pairs_body(IDS)).status == 200
        silent[-1].sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n")
        assert silent[-1].recv(1000).startswith(b"HTTP/1.1 200")
        silent[-2].sendall(b"POST /v2 HTTP/1.1\r\nHost")
        for each in silent[180:-1]:
            assert each.recv(1000) == b"", "none has sent the head of a request"
        assert 4 < time.monotonic() - begin < 60
        text = server.send("/metrics", port="metrics").body.decode()
        refused = dict(re.findall(r'refused_connections_total{model="pairs",port="http",reason="(\w+)"} (\d+)', text))
        assert int(refused["evicted"]) >= 180
        assert int(refused["evicted"]) + int(refused["silent"]) in (199, 200)
        assert (refused["limit"], refused["token"]) == ("0", "0")
        assert 'recstore_model_connections{model="pairs",port="http"} 2\n' in text
        kept.close()


def test_connections_that_never_encrypt_give_way(bundle: Path, files: Path) -> None:
    options = ("--tls-certificate", files / "server.pem", "--tls-key", files / "server.pem", "--max-connections", 5)
    with ServedModel(bundle, *options, tls=client_context(files, None)) as server, ExitStack() as stack:
        waiting = opened(server, 5, stack)
        assert server.send("/v2/health/live").status == 200
        for each in waiting:
            assert each.recv(10) == b""
        assert server.send("/v2/health/live").status == 200


def test_what_peers_do_wrong_is_told_once_a_second(bundle: Path, files: Path) -> None:
    options = ("--token-file", files / "token", "--grpc-port", 0, "--log-level", "info")
    server = ServedModel(bundle, *options)
    for _ in range(50):
        assert server.send("/v2").status == 401
    host, port = server.addresses["grpc"].split(":")
    with socket.create_connection((host, int(port)), timeout=20) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
        with suppress(ConnectionError):
            while stranger.recv(1000):
                pass
    server.process.send_signal(signal.SIGTERM)
    _, told = server.process.communicate(60)
    warnings = [line for line in told.splitlines() if " WARN " in line]
    wrong = [line for line in warnings if 'port="http"' in line and "the token is not the server's" in line]
    assert 1 <= len(wrong) < 25
    assert any('port="grpc"' in line and "it does not speak the protocol" in line for line in warnings), told
    assert re.search(r"INFO .*: limit of descriptors before=\d+ now=\d+", told)
    assert re.search(r"INFO .*: limit of connections max_connections=1024 all_ports=\d+", told)


def hostile(server: ServedModel, number: int) -> None:
    """Sends a request that is refused: large, deep, cut off or wrong."""
    body, headers = binary_body(("ids", "INT64", torch.zeros(100_000, 2, dtype=torch.int64)))
    kind = number % 6
    if kind == 0:
        assert server.send(INFER, b"[" * 1_000_000).status == 400
    elif kind == 1:
        assert server.send(INFER, b'{"inputs": [' + b"[]," * 300_000 + b"[]]}").status == 400
    elif kind == 2:
        assert server.send(INFER, body[:-8], headers).status == 400
    elif kind == 3:
        assert server.send(INFER, bytes(5 << 20)).status == 413
    elif kind == 4:
        assert server.send(INFER, b'{"%s": 1}' % (b"k" * 1_000_000)).status == 400
    else:
        connection = server.connection()
        connection.putrequest("POST", INFER)
        connection.putheader("Content-Length", "4000000")
        connection.endheaders(bytes(1_000_000))
        connection.close()


def test_memory_stays_flat_under_hostile_requests(bundle: Path) -> None:
    with ServedModel(bundle, "--grpc-port", 0) as server, server.channel() as channel:
        before = 0
        for number in range(300):
            hostile(server, number)
            with pytest.raises(grpc.RpcError):
                call(channel, "ModelInfer", model_name="pairs", raw_input_contents=[bytes(1_000_000)] * 3)
            if number == 100:  # What allocators keep has been taken.
                before = server.resident_bytes
        grown = server.resident_bytes - before
        assert server.send(INFER, pairs_body(IDS)).status == 200
        while server.metric("recstore_model_requests_in_flight"):
            time.sleep(0.01)
    assert grown < 128 << 20, "600 MB of messages and 100 MB of bodies came since"


def test_heads_that_are_no_http_are_refused(bundle: Path) -> None:
    with ServedModel(bundle) as server, ExitStack() as stack:
        for head in (b"\x16\x03\x01\x02\x00" * 20, b"GET /" + b"a" * 20_000, b"GET / HTTP/1.1\r\nA: " + b"b" * 20_000):
            (each,) = opened(server, 1, stack)
            each.sendall(head + b"\r\n\r\n")
            answered = each.recv(1000)
            assert answered.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431")), answered
        assert server.send(INFER, pairs_body(IDS)).status == 200
