"""Addresses of servers as programs write them: `host:port`, an IPv6 address in brackets."""

import re
from collections.abc import Sequence

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\[\]:\s/]+):(?P<port>\d+)")
_LAST_PORT = 65535
REPLICA_SEPARATOR = "|"
"""Stands between the addresses of servers of one shard."""


def check_addresses(servers: Sequence[str]) -> list[str]:
    """Returns the addresses of servers, each of which is one.

    Raises:
        TypeError: a text in the place of a list, or an address that is no text.
        ValueError: an address that is not `host:port`.
    """
    if isinstance(servers, str):
        raise TypeError(f'servers must be a list of "host:port", got the text "{servers}"; write ["{servers}"]')
    return [_checked(shard, server) for shard, server in enumerate(servers)]


def _checked(shard: int, server: str) -> str:
    if not isinstance(server, str):
        raise TypeError(f'server {shard} must be a text "host:port", got {server!r}')
    for address in server.split(REPLICA_SEPARATOR):
        if not is_address(address):
            raise ValueError(
                f'server {shard} must be "host:port", with a port from 1 to {_LAST_PORT} '
                f'and an IPv6 address in brackets, got "{address}"'
            )
    return server


def is_address(text: str) -> bool:
    """Whether a text is `host:port`."""
    found = _ADDRESS.fullmatch(text)
    return found is not None and 0 < int(found["port"]) <= _LAST_PORT
