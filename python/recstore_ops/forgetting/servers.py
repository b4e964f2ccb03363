"""Servers that run: they delete the rows themselves, and save to their directories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recstore_ops import _native
from recstore_ops.forgetting.id_set import IdSet, Match
from recstore_ops.forgetting.location import held
from recstore_ops.forgetting.report import PlaceReport
from recstore_ops.servers.addresses import check_addresses
from recstore_ops.servers.server_config import HASH_METHODS, Tls


@dataclass(frozen=True)
class ServersPlace:
    """Parameter servers, called as a client does.

    Attributes:
        servers: `host:port` of each shard, in their order; of all servers of a shard with a bar between them.
        hash_method: how ids are spread over them.
        token: what they want to hear.
        tls: encrypts.
        timeout: the seconds that a call may take.

    Raises:
        ValueError: an address that is none, or another hash method.
    """

    servers: Sequence[str]
    hash_method: str = HASH_METHODS[0]
    token: str | None = None
    tls: Tls | None = None
    timeout: float = 30.0

    def __post_init__(self) -> None:
        check_addresses(self.servers)
        if self.hash_method not in HASH_METHODS:
            raise ValueError(f"hash_method must be one of {', '.join(HASH_METHODS)}, got {self.hash_method!r}")

    def look(self, tables: Sequence[str], ids: IdSet) -> PlaceReport:
        """Returns the rows that the servers have of ids.

        Raises:
            ValueError: they have no such table.
            ConnectionError: a server does not answer, or refuses.
        """
        found, _ = self._call(tables, ids, dry_run=True)
        return self._report(tables, found)

    def forget(self, tables: Sequence[str], ids: IdSet) -> PlaceReport:
        """Deletes the ids, and lets the servers save; raises as `look`, and RuntimeError if one cannot be saved."""
        found, saved = self._call(tables, ids, dry_run=False)
        rows, size = sum(map(len, found)), sum(bytes or 0 for bytes in saved)
        return self._report(tables, found, rows, size)

    def _call(self, tables: Sequence[str], ids: IdSet, *, dry_run: bool) -> tuple[list[list[int]], list[int | None]]:
        return _native.forget_on_servers(
            list(self.servers),
            self.hash_method,
            self.token,
            self.tls,
            self.timeout,
            list(tables),
            list(ids),
            dry_run,
        )

    def _report(self, tables: Sequence[str], found: list[list[int]], rows: int = 0, size: int = 0) -> PlaceReport:
        rows_of = zip(tables, found, strict=True)
        own = [each for table, ids in rows_of for each in held(f'table "{table}"', "rows", Match(ids))]
        return PlaceReport(" ".join(self.servers), "servers", own, rows=rows, bytes=size)


__all__ = ["ServersPlace"]
