"""How a door lets clients in over gRPC, and how it counts those whose token is another."""

from __future__ import annotations

from pathlib import Path

import grpc

from recstore_ops.serving.access import Access, accepts
from recstore_ops.serving.door.metrics import Metrics
from recstore_ops.serving.door.refusals import Kind, Refusal


def grpc_credentials(access: Access) -> grpc.ServerCredentials | None:
    """Returns how connections of gRPC are encrypted, of files that `Access.ssl_context` takes."""
    if access.tls is None:
        return None
    paths = access.own_files(access.tls)
    certificate, key = (Path(path).read_bytes() for path in paths)  # by path: the own certificate
    ca = None if access.tls.ca is None else Path(access.tls.ca).read_bytes()  # by path: the own authorities
    return grpc.ssl_server_credentials([(key, certificate)], ca, ca is not None)


class TokenCheck:
    """Compares the tokens of requests with the server's.

    Args:
        token: what clients must know; None: nothing.
        protocol: of the requests.
        metrics: where refused ones are counted.
    """

    def __init__(self, token: str | None, protocol: str, metrics: Metrics) -> None:
        self._token = token
        self._protocol = protocol
        self._metrics = metrics

    def check(self, authorization: bytes) -> None:
        """Compares what a request has as its authorization.

        Raises:
            Refusal: it is not the server's.
        """
        if not accepts(self._token, authorization):
            self._metrics.requests[self._protocol, Kind.TOKEN.label] += 1
            raise Refusal(Kind.TOKEN, "the token is not the server's")
