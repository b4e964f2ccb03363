"""What is wrong with the servers of a configuration file that each key by itself does not show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from recstore_ops.config.json_schema import Problem

_SECTIONS = ("cache_ps", "distributed_client")
_THIS_MACHINE = "127.0.0.1"


def server_problems(document: dict[str, Any]) -> list[Problem]:
    """Returns what is wrong with the sections of a document that its schema finds valid."""
    problems: list[Problem] = []
    for name in _SECTIONS:
        section = document.get(name, {})
        problems += [*_shards(name, section), *_number(document, name, section), *_tls(name, section)]
        problems += _addresses(name, section)
    return problems


def _host(server: dict[str, Any]) -> str:
    return server.get("host", _THIS_MACHINE)


def _shards(name: str, section: dict[str, Any]) -> Iterator[Problem]:
    found = [server["shard"] for server in section.get("servers", [])]
    if sorted(found) != list(range(len(found))):
        yield Problem(f"{name}.servers", f"must have each shard from 0 to {len(found) - 1} once, got {found}")


def _number(document: dict[str, Any], name: str, section: dict[str, Any]) -> Iterator[Problem]:
    """Compares `num_shards` with the servers of its section, or with those that a client takes without any."""
    own = section.get("servers", document.get("cache_ps", {}).get("servers"))
    known = 1 if own is None and "client" in document else len(own or ())
    asked = section.get("num_shards", known)
    if asked != known:
        yield Problem(f"{name}.num_shards", f"must be the number of servers, {known}, got {asked}")


def _tls(name: str, section: dict[str, Any]) -> Iterator[Problem]:
    tls = section.get("tls", {})
    if ("certificate" in tls) != ("key" in tls):
        yield Problem(f"{name}.tls", "needs both certificate and key, or neither")


def _addresses(name: str, section: dict[str, Any]) -> Iterator[Problem]:
    """Finds ports that two would have on one machine; a port 0 is any that is free."""
    servers, common = section.get("servers", []), section.get("metrics_port")
    taken = [(_host(server), server["port"]) for server in servers]
    taken += [(_host(server), server.get("metrics_port", common)) for server in servers]
    for (host, port), count in Counter(taken).items():
        if port and count > 1:
            yield Problem(f"{name}.servers", f"{count} ports have the address {host}:{port}")
