"""Addresses of servers as programs write them: `host:port`, an IPv6 address in brackets; `unix:` and a path."""

import re
from collections.abc import Sequence

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\[\]:\s/]+):(?P<port>\d+)")
_LAST_PORT = 65535
UNIX_PREFIX = "unix:"
"""The prefix of an address that is the path of a Unix socket."""
REPLICA_SEPARATOR = "|"
"""Stands between the addresses of servers of one shard."""


def check_addresses(servers: Sequence[str]) -> list[str]:
    """Returns the addresses of servers, each of which is one.

    Raises:
        TypeError: a text in the place of a list, or an address that is no text.
        ValueError: an address that is neither `host:port` nor a Unix socket.
    """
    if isinstance(servers, str):
        raise TypeError(f'servers must be a list of "host:port", got the text "{servers}"; write ["{servers}"]')
    return [_checked(shard, server) for shard, server in enumerate(servers)]


def _checked(shard: int, server: str) -> str:
    if not isinstance(server, str):
        raise TypeError(f'server {shard} must be a text "host:port", got {server!r}')
    for address in server.split(REPLICA_SEPARATOR):
        if not is_address(address) and not is_socket(address):
            raise ValueError(
                f'server {shard} must be "host:port", with a port from 1 to {_LAST_PORT} and an IPv6 address in '
                f'brackets, or "{UNIX_PREFIX}" and an absolute path, got "{address}"'
            )
    return server


def is_address(text: str) -> bool:
    """Whether a text is `host:port`."""
    found = _ADDRESS.fullmatch(text)
    return found is not None and 0 < int(found["port"]) <= _LAST_PORT


def is_socket(text: str) -> bool:
    """Whether a text is `unix:` and an absolute path."""
    return text.startswith(f"{UNIX_PREFIX}/")
