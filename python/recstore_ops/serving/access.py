"""Access control of the servers in this package: addresses, certificates, tokens."""

from __future__ import annotations

import hmac
import ipaddress
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from recstore_ops.config.tokens import check_token
from recstore_ops.servers.server_config import Tls


@dataclass(frozen=True)
class Access:
    """How clients are let in.

    Attributes:
        token: what they must know.
        tls: certificate and key of the server, and the authorities of clients' certificates.
        insecure: whether other machines may reach it without both.

    Raises:
        ValueError: no client could present the token.
    """

    token: str | None = None
    tls: Tls | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        check_token(self.token)

    def check(self, host: str, port: int) -> str:
        """Returns the address of a host.

        Raises:
            ValueError: other machines reach it, and it lacks TLS or a token.
            OSError: the host has no address.
        """
        address = resolved(host, port)
        is_guarded = self.tls is not None and self.token is not None
        if not (ipaddress.ip_address(address).is_loopback or is_guarded or self.insecure):
            raise ValueError(
                f"{host}:{port} can be reached from other machines: give the server TLS and a token, listen on a "
                "loopback address, or set --insecure where the network is trusted"
            )
        return address

    def ssl_context(self) -> ssl.SSLContext | None:
        """Returns how connections of HTTP are encrypted.

        Raises:
            ValueError: a file is missing or no PEM file of its kind; the message names it.
        """
        if self.tls is None:
            return None
        certificate, key = self.own_files(self.tls)
        for path in (certificate, key, *([] if self.tls.ca is None else [Path(self.tls.ca)])):
            # OpenSSL would wait for the writer of a FIFO, whatever signals say.
            if path.exists() and not path.is_file():
                raise ValueError(f"{path}: it is no regular file")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(certificate, key)
        except (OSError, ValueError) as error:
            raise ValueError(f"{certificate} and {key}: no certificate and key that fit: {error}") from None
        if self.tls.ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self.tls.ca)
            except (OSError, ValueError) as error:
                raise ValueError(f"{self.tls.ca}: no certificates of authorities: {error}") from None
        return context

    def own_files(self, tls: Tls) -> tuple[Path, Path]:
        """Returns the files of the server's certificate and key.

        Raises:
            ValueError: there are none.
        """
        if tls.certificate is None or tls.key is None:
            raise ValueError("--tls-client-ca needs --tls-certificate and --tls-key")
        return Path(tls.certificate), Path(tls.key)


def accepts(token: str | None, authorization: bytes) -> bool:
    """Whether what a request has as its authorization is the token that is needed, if one is."""
    # In a time that does not depend on how much of the token is right.
    return token is None or hmac.compare_digest(authorization, f"Bearer {token}".encode())


def resolved(host: str, port: int) -> str:
    """Returns the first address of a host.

    Raises:
        OSError: it has none.
    """
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise OSError(f"cannot listen on {host}:{port}: {error}") from None


def written(address: str, port: int) -> str:
    """Returns `address:port`, as URLs have it."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
