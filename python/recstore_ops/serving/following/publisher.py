"""Publishes a model while it trains."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from recstore_ops.config.paths import user_path
from recstore_ops.servers.server_config import Tls
from recstore_ops.serving.access import Access
from recstore_ops.serving.exporting import ExportedModel, encodings_of
from recstore_ops.serving.following.publication import Base, Update
from recstore_ops.serving.following.publication_copy import PublicationCopy
from recstore_ops.serving.following.publication_files import PublicationFiles
from recstore_ops.serving.following.publication_server import PublicationServer
from recstore_ops.serving.following.watches import StateWatch, TableWatch
from recstore_ops.serving.frozen_table import EncodingName

_log = logging.getLogger("recstore_ops.publish")


class Publisher:
    """Tells those who follow a model what changed in it, whole steps at a time; made by `publish`.

    A thread beside the training writes the files.

    Attributes:
        directory: of the publication.
        problem: why the last update, or the last base, could not be written, if it could not. What the update had comes
            with the next one.
        copy: in an object store, if there is one.

    Raises:
        ValueError: the model's program has no graph.
        RuntimeError: a table is published already, or its servers do not answer.
        OSError: a file cannot be written.
    """

    def __init__(
        self,
        model: nn.Module,
        exported: ExportedModel,
        files: PublicationFiles,
        encodings: Mapping[str, EncodingName],
        interval: float,
    ) -> None:
        if exported.state is None:
            raise ValueError("the program of the model has no graph: it cannot be published, but exported")
        self.directory = files.directory
        self.problem: Exception | None = None
        self._exported, self._files, self._encodings, self._interval = exported, files, dict(encodings), interval
        self._state = StateWatch(model, exported.state)
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="recstore-publish")
        self._number, self._steps, self._cut_at = files.newest_update(), 0, time.monotonic()
        self._server: PublicationServer | None = None
        self.copy: PublicationCopy | None = None
        self._writing: Future[None] | None = None
        self._base_under_way: Future[Base] | None = None
        self._begin()
        self.update()
        self.flush()

    def step(self) -> None:
        """Counts a step; publishes what changed if the last update is `interval` seconds old.

        Raises:
            RuntimeError: a row has a value that its encoding has no number for; servers do not answer, or another
                program publishes their tables now.
            ValueError: the publisher is closed.
        """
        self._steps += 1
        if time.monotonic() - self._cut_at >= self._interval:
            self.update()

    def update(self) -> bool:
        """Publishes what changed since the last update, as it is now; False: nothing did.

        It waits until the update before is written.

        Raises:
            RuntimeError: a row has a value that its encoding has no number for; servers do not answer, or another
                program publishes their tables now.
            ValueError: the publisher is closed.
        """
        with self._lock:
            if not self._files.is_open:
                raise ValueError(f"the publisher of {self.directory} is closed")
            self._await_update()
            self._await_base(wait=False)
            self._cut_at = time.monotonic()
            was_told, self._was_told = self._was_told, False
            changes = self._tables.take(was_told=was_told)
            if changes is None:  # A table was loaded: all of its rows may be others.
                self._end_history()
                self._begin()
                changes = self._tables.take(was_told=True) or {}
            state = self._state.take(everything=self._base is not None or not was_told)
            if self._base is None and not changes and not state:
                self._was_told = True
                return False
            base = self._base and replace(self._base, until=self._number + 1)
            update = Update(self._history, self._number + 1, self._steps, time.time(), changes, state)
            self._writing = self._threads.submit(self._write, update, base)
            return True

    def flush(self) -> None:
        """Waits until the last update is written, and copied where there is a copy.

        Raises:
            OSError: it could not be.
        """
        with self._lock:
            self._await_update()
            if self.problem is not None:
                raise self.problem
        if self.copy is not None:
            self.copy.flush()

    def close(self) -> None:
        """Publishes what changed, and ends.

        Raises:
            OSError: the last update could not be written.
        """
        if not self._files.is_open:
            return
        try:
            self.update()
            self.flush()
        finally:
            self._end_history()
            self._threads.shutdown()
            if self._server is not None:
                self._server.close()
            try:
                if self.copy is not None:
                    self.copy.close()
            finally:
                self._files.close()

    def serve(self, address: str, access: Access) -> None:
        """Serves the publication over HTTP until `close`.

        Raises:
            ValueError, OSError: as `PublicationServer`.
        """
        self._server = PublicationServer(self.directory, address, access)

    def copy_to(self, url: str) -> None:
        """Keeps a copy in an object store until `close`.

        Raises:
            ValueError, OSError: as `PublicationCopy`.
        """
        self.copy = PublicationCopy(self.directory, url)
        self.copy.tell()

    @property
    def address(self) -> str | None:
        """`host:port` at which followers reach the publication."""
        return self._server and self._server.address

    @property
    def steps(self) -> int:
        """How many were counted."""
        return self._steps

    @property
    def number(self) -> int:
        """Of the last update that is known to be written; the publication counts on where it ended."""
        return self._number

    @property
    def bytes_written(self) -> int:
        """Of all updates."""
        return self._files.bytes_written

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self) -> None:
        """Begins a history: from here on changes are noted, and a base has all rows."""
        self._history = uuid.uuid4().hex[:8]
        tables = list(self._exported.tables.values())
        self._tables = TableWatch(tables, [self._encodings[table.name] for table in tables])
        self._base: Base | None = Base(self._history, self._number, self._number + 1)
        self._write_base(self._base)
        self._was_told = True

    def _end_history(self) -> None:
        """Notes no changes any more. A base that no update made whole goes, also one that is being written."""
        self._await_base(wait=True)
        if self._base is not None:
            self._files.drop_base()
        self._tables.end()

    def _write_base(self, base: Base) -> Base:
        self._files.write_base(
            base, lambda directory: self._exported.write(directory, self._encodings, graph_only=True)
        )
        return base

    def _write(self, update: Update, base: Base | None) -> None:
        self._files.write_update(update, base)
        if self.copy is not None:
            self.copy.tell()

    def _await_update(self) -> None:
        """Waits for the update under way, and notes whether it was written."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result()
        except OSError as error:
            self._fails("update", error)
            return
        self.problem, self._base, self._was_told = None, None, True
        self._number += 1
        if self._base_under_way is None and self._files.wants_base():
            base = Base(self._history, self._number, self._number + 1)
            self._base_under_way = self._threads.submit(self._write_base, base)

    def _await_base(self, *, wait: bool) -> None:
        """Takes the base that was written beside the training: the next update makes it whole."""
        writing = self._base_under_way
        if writing is None or not (wait or writing.done()):
            return
        self._base_under_way = None
        try:
            self._base = writing.result()
        except (OSError, RuntimeError) as error:
            self._fails("base", error)

    def _fails(self, what: str, error: Exception) -> None:
        if str(error) != str(self.problem):
            _log.warning("%s: the next %s of the publication could not be written: %s", self.directory, what, error)
        self.problem = error


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
) -> Publisher:
    """Publishes a model in training to a directory, from which `load_bundle(..., follow=...)` follows it.

    The directory gets a bundle of the model as it is now, and updates with what changed since: rows that are new or
    other, ids whose rows went, and dense tensors. A reader sees whole updates only. When updates take as much room as
    the tables, a new bundle is written beside the training, and what is older than the one before is deleted.

    A publisher that begins anew in a directory, such as after a crash, begins with a bundle of the model as it is then.

    Args:
        model: with tables of this process, or on servers. There a publisher that begins ends those of the same tables,
            and it must be the one program that trains, or a worker of those that go in step: else an update can have a
            part of another program's step.
        example_inputs: as of `export`.
        directory: of the publication; a new one, or one that was published to before.
        encoding: how rows are kept and told, as of `export`.
        interval: the least seconds between two updates.
        dynamic_shapes: as of `export`.
        copy_to: `s3://bucket/prefix` or `file:///path` of an object store that gets a copy, which a thread keeps up;
            `publisher.copy.problem` says why it could not be. Keys come from the environment, `AWS_ACCESS_KEY_ID` and
            the like. One publisher at a time may copy to a URL.
        address: `host:port` at which the publication is served over HTTP too; port 0 takes any that is free.
        token: what followers at that address must know.
        tls: certificate and key of the server, and the authorities of followers' certificates.
        insecure: whether other machines may reach the address without both.

    Raises:
        ValueError: something else is in the directory, another process publishes to it, or as `export`; or the program
            of the model has control flow, so that it cannot be run by its graph.
        RuntimeError: a table is published already, or its servers do not answer.
        OSError: a file cannot be written.
    """
    if not interval >= 0:
        raise ValueError(f"interval must be 0 or more seconds, got {interval}")
    exported = ExportedModel(model, example_inputs, dynamic_shapes)
    encodings = encodings_of(exported.tables, encoding)
    files = PublicationFiles(Path(user_path(directory, "directory")))
    try:
        publisher = Publisher(model, exported, files, encodings, interval)
    except BaseException:
        files.close()
        raise
    try:
        if copy_to is not None:
            publisher.copy_to(copy_to)
        if address is not None:
            publisher.serve(address, Access(token, tls, insecure))
    except BaseException:
        publisher.close()
        raise
    return publisher
