"""Publishes a model while it trains."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from recstore_ops.config.paths import user_path
from recstore_ops.servers.server_config import Tls
from recstore_ops.serving.access import Access
from recstore_ops.serving.exporting import ExportedModel, encodings_of, unwrapped
from recstore_ops.serving.following.peer_ranks import OtherRanks, PeerRanks, SingleProcess
from recstore_ops.serving.following.publication_files import WRITING, PublicationFiles
from recstore_ops.serving.following.published_tables import PublishedTables
from recstore_ops.serving.following.publisher import Publisher
from recstore_ops.serving.following.update_interval import MAX_STEPS_OF_RANKS, UpdateInterval
from recstore_ops.serving.following.watches import StateWatch, TableWatch
from recstore_ops.serving.following.writing_publisher import WritingPublisher
from recstore_ops.serving.freezing import freeze_tables, group_of
from recstore_ops.serving.frozen_table import EncodingName
from recstore_ops.serving.graph_operators import Operators
from recstore_ops.serving.program_tables import named_tables, tables_in
from recstore_ops.sharding.join import same_ranks


class RankPublisher(Publisher):
    """Gives the first process the rows that it asks for.

    Args:
        directory: of the publication, as this process sees it.
        ranks: of the tables.

    Raises:
        RuntimeError: the first process could not begin.
    """

    def __init__(self, directory: Path, ranks: OtherRanks) -> None:
        super().__init__(directory)
        self._ranks = ranks
        self._encodings: dict[str, EncodingName] = {}
        self._watch: TableWatch | None = None
        # One job at a time, in the order of the first process's bases.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recstore-publish")
        self._is_open = True
        self._do: dict[str, Callable[[Any], Any]] = {
            "begin": self._begin,
            "take": self._take,
            "end": self._end,
            "base": self._write_base,
        }
        self._obey()

    def update(self) -> bool:
        """See `Publisher`."""
        return self._obey()

    def flush(self) -> None:
        """Returns at once: the first process writes."""

    def close(self) -> None:
        """See `Publisher`."""
        if not self._is_open:
            return
        try:
            self.update()
        finally:
            # The first process ends the publication in a further method, in which this one takes part even if the
            # update failed.
            self._obey()
            self._is_open = False
            self._thread.shutdown()

    @property
    def number(self) -> int:
        """See `Publisher`."""
        return self._told.number

    @property
    def bytes_written(self) -> int:
        """See `Publisher`."""
        return self._told.bytes_written

    @property
    def address(self) -> str | None:
        """See `Publisher`."""
        return self._told.address

    def _due(self) -> int:
        return self._told.due

    def _look(self) -> None:
        self._obey()

    def abandon(self) -> None:
        """See `Publisher`."""
        self._is_open = False
        self._end(None)
        self._thread.shutdown()

    def _obey(self) -> bool:
        """Does what the first process asks for within a method."""
        if not self._is_open:
            raise self._is_closed()
        self._told = self._ranks.obey(lambda asked: self._do[asked.what](asked.argument))
        return self._told.result

    def _begin(self, encodings: dict[str, EncodingName]) -> None:
        if not self.directory.is_dir():
            raise ValueError(f"{self.directory} is not there: all processes must see the directory of a publication")
        self._encodings = encodings
        self._watch = TableWatch(named_tables(encodings), list(encodings.values()))

    def _take(self, was_told: bool) -> Any:
        assert self._watch is not None, "begin goes before take"
        return self._watch.take(was_told=was_told)

    def _end(self, _: None) -> None:
        if self._watch is not None:
            self._watch.end()

    def _write_base(self, _: None) -> None:
        """Begins to write this process's rows. A failure is an error of the first process's base too."""
        tables = named_tables(self._encodings)
        self._thread.submit(freeze_tables, self.directory / WRITING, tables, self._encodings, self._ranks.writing)


def publish(
    model: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    directory: str | os.PathLike[str],
    *,
    encoding: EncodingName | Mapping[str, EncodingName] = "float32",
    interval: float = 0.1,
    dynamic_shapes: Any = None,
    copy_to: str | None = None,
    address: str | None = None,
    token: str | None = None,
    tls: Tls | None = None,
    insecure: bool = False,
    second_group: dist.ProcessGroup | None = None,
    operators: Sequence[str] = (),
) -> Publisher:
    """Publishes a model in training to a directory, from which `load_bundle(..., follow=...)` follows it.

    The directory gets a bundle of the model as it is now, and updates with the changes since: new and changed rows,
    deleted ids, and dense tensors. A reader sees whole updates only. When updates take as much room as the tables, a
    new bundle is written while training goes on, and everything older than the bundle before it is deleted.

    A publisher that begins anew in a directory, such as after a crash, begins with a bundle of the model as it is then.

    Args:
        model: its tables lie in this process, are sharded over processes, or lie on servers. If they are sharded, all
            processes call this together, between the same steps, and the first one writes. On servers, a new publisher
            ends earlier ones of the same tables. It must belong to the only program that trains, or to one of several
            workers that go in step. Otherwise an update can have a part of another program's step.
        example_inputs: as of `export`.
        directory: of the publication; a new one, or one that was published to before. All processes of sharded tables
            must see it.
        encoding: how rows are kept and sent, as in `export`.
        interval: the least seconds between two updates.
        dynamic_shapes: as of `export`.
        copy_to: `s3://bucket/prefix` or `file:///path` of an object store that gets a copy, which a thread keeps up;
            `publisher.copy.problem` says why it could not be. Keys come from the environment, `AWS_ACCESS_KEY_ID` and
            the like. One publisher at a time may copy to a URL.
        address: `host:port` at which the publication is served over HTTP too; port 0 takes any that is free.
        token: the token that followers at that address must send.
        tls: certificate and key of the server, and the authorities of followers' certificates.
        insecure: whether other machines may reach the address without both.
        second_group: for sharded tables, the ranks of their group once more, over gloo. By default one is made, if
            theirs has all ranks of the job.
        operators: as of `export`.

    Raises:
        ValueError: `token`, `tls` or `insecure` without `address`. Something else is in the directory, another process
            publishes to it, or as `export`. Or the program of the model has control flow, so that it cannot be run by
            its graph.
        RuntimeError: a table is published already, or its servers do not answer; another process failed.
        OSError: a file cannot be written.
    """
    if not interval >= 0:
        raise ValueError(f"interval must be 0 or more seconds, got {interval}")
    place, model = Path(user_path(directory, "directory")), unwrapped(model)

    def begun(others: PeerRanks, pace: UpdateInterval) -> WritingPublisher:
        if address is None:
            _check_not_served(token=token, tls=tls, insecure=insecure)
        exported = ExportedModel(model, example_inputs, dynamic_shapes, operators=Operators(operators))
        publisher = _begun(model, exported, place, encodings_of(exported.tables, encoding), others, pace)
        try:
            if copy_to is not None:
                publisher.copy_to(copy_to)
            if address is not None:
                publisher.serve(address, Access(token, tls, insecure))
        except BaseException:
            publisher.abandon()
            raise
        return publisher

    group = group_of(tables_in(model))
    if group is None:
        if second_group is not None:
            raise ValueError("second_group is of sharded tables, and the model has none")
        return begun(SingleProcess(), UpdateInterval(interval))
    ranks = OtherRanks(group, same_ranks(group, second_group, "gloo"))
    if not ranks.is_first:
        return RankPublisher(place, ranks)
    return ranks.together(lambda: begun(ranks, UpdateInterval(interval, MAX_STEPS_OF_RANKS)), WritingPublisher.told)


def _check_not_served(**options: Any) -> None:
    """Refuses options of an address where there is none."""
    if given := [name for name, value in options.items() if value not in (None, False)]:
        raise ValueError(f"publish: {given[0]} is about who may reach the publication, and it has no address")


def _begun(
    model: nn.Module,
    exported: ExportedModel,
    directory: Path,
    encodings: Mapping[str, EncodingName],
    others: PeerRanks,
    pace: UpdateInterval,
) -> WritingPublisher:
    if exported.state is None:
        raise ValueError("the program of the model has no graph: it cannot be published, but exported")
    state, files = StateWatch(model, exported.state), PublicationFiles(directory)
    try:
        return WritingPublisher(PublishedTables(exported, encodings, others), state, files, pace, others)
    except BaseException:
        files.close()
        raise
