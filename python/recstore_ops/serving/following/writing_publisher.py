"""Writes a publication while its model trains."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from recstore_ops.serving.access import Access
from recstore_ops.serving.following.peer_ranks import Outcome, PeerRanks
from recstore_ops.serving.following.publication import Base
from recstore_ops.serving.following.publication_copy import PublicationCopy
from recstore_ops.serving.following.publication_files import PublicationFiles
from recstore_ops.serving.following.publication_server import PublicationServer
from recstore_ops.serving.following.published_tables import PublishedTables
from recstore_ops.serving.following.publisher import Publisher
from recstore_ops.serving.following.update import MAX_ROW_BYTES, TableChanges, Update
from recstore_ops.serving.following.update_interval import UpdateInterval
from recstore_ops.serving.following.watches import StateWatch

_Result = TypeVar("_Result")
_log = logging.getLogger("recstore_ops.publish")


class WritingPublisher(Publisher):
    """The publisher of the process that has all tables, or of the first of several. A thread writes the files.

    Args:
        tables: of the model.
        state: its dense tensors.
        files: of the publication.
        pace: of updates.
        others: processes that have rows of the tables too.

    Raises:
        RuntimeError: a table is published already, or its servers do not answer.
        OSError: a file cannot be written.
    """

    def __init__(
        self,
        tables: PublishedTables,
        state: StateWatch,
        files: PublicationFiles,
        pace: UpdateInterval,
        others: PeerRanks,
    ) -> None:
        super().__init__(files.directory)
        self._tables, self._state, self._files, self._pace, self._others = tables, state, files, pace, others
        self._lock = threading.Lock()
        # Two: an update does not wait for a base, which takes as long as all rows do.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="recstore-publish")
        self._number = files.newest_update()
        self._server: PublicationServer | None = None
        self._writing: Future[None] | None = None
        self._base_under_way: Future[Base] | None = None
        self._begin()
        self._update()
        self.flush()

    def update(self) -> bool:
        """See `Publisher`."""
        return self._together(self._update)

    def _update(self) -> bool:
        with self._lock:
            self._await_update()
            self._await_base(wait=False)
            self._begin_base()
            self._pace.note_update()
            # False until the write has ended well: if it fails, the next update has these changes too.
            was_told, self._was_told = self._was_told, False
            changes = self._tables.take(was_told=was_told)  # None: a table was loaded, all of its rows may be others.
            if changes is None or _is_too_large(changes):
                self._end_history()
                self._begin()
                changes = self._tables.take(was_told=True) or {}
            state = self._state.take(everything=self._base is not None or not was_told)
            if self._base is None and not changes and not state:
                self._was_told = True
                return False
            # Its rows were read while the tables trained, so it is whole with this update at the earliest.
            base = self._base and replace(self._base, until=self._number + 1)
            update = Update(self._history, self._number + 1, self.steps, time.time(), changes, state)
            self._writing = self._threads.submit(self._write, update, base)
            return True

    def flush(self) -> None:
        """See `Publisher`."""
        with self._lock:
            self._await_update()
            if self.problem is not None:
                raise self.problem
        if self.copy is not None:
            self.copy.flush()

    def close(self) -> None:
        """See `Publisher`."""
        if not self._files.is_open:
            return
        try:
            self.update()
            self.flush()
        finally:
            self._others.together(self._end, self.told)

    def _end(self) -> None:
        try:
            self._end_history()
        finally:
            self._leave()

    def _leave(self) -> None:
        self._threads.shutdown()
        if self._server is not None:
            self._server.close()
        try:
            if self.copy is not None:
                self.copy.close()
        finally:
            self._files.close()

    def abandon(self) -> None:
        """See `Publisher`."""
        if self._others.writing.group is None:
            self.close()
            return
        self._tables.end_here()
        self._leave()

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
        """See `Publisher`."""
        return self._server and self._server.address

    @property
    def number(self) -> int:
        """See `Publisher`."""
        return self._number

    @property
    def bytes_written(self) -> int:
        """See `Publisher`."""
        return self._files.bytes_written

    def _due(self) -> int:
        return self._pace.due

    def _look(self) -> None:
        self._together(lambda: self._pace.is_time(self.steps) and self._update())

    def _together(self, work: Callable[[], _Result]) -> _Result:
        if not self._files.is_open:
            raise self._is_closed()
        return self._others.together(work, self.told)

    def told(self, result: object = None) -> Outcome:
        """The state of this process that the others receive."""
        return Outcome(result is True, self.number, self.bytes_written, self.address, self._pace.due)

    def _begin(self) -> None:
        """Begins a history: from here on changes are noted, and a base has all rows."""
        self._history = uuid.uuid4().hex[:8]
        self._tables.begin()
        self._base: Base | None = Base(self._history, self._number, self._number + 1)
        self._announce_base(self._base)
        self._write_base(self._base)
        self._was_told = True

    def _end_history(self) -> None:
        """Notes no changes any more. A base that no update made whole goes, also one that is being written."""
        # The base under way belongs to this history, and would come to lie in the next one.
        self._await_base(wait=True)
        if self._base is not None:
            self._files.drop_base()
        self._tables.end()

    def _announce_base(self, base: Base) -> None:
        """Goes before a base is written, which needs the other processes."""
        self._files.note_base(base)
        self._tables.announce_base()

    def _write_base(self, base: Base) -> Base:
        self._files.write_base(base, self._tables.write_base)
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
        # Only now: after a failure the next update gets the same number, since readers expect numbers without a gap.
        self._number += 1

    def _begin_base(self) -> None:
        """Begins to write a base while training goes on, if it is time for one."""
        if self._base is not None or self._base_under_way is not None or not self._files.wants_base():
            return
        base = Base(self._history, self._number, self._number + 1)
        try:
            self._announce_base(base)
        except OSError as error:
            self._fails("base", error)
        else:
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


def _is_too_large(changes: Mapping[str, TableChanges]) -> bool:
    """Whether changes are more than an update may have: then a base has them."""
    return sum(map(len, changes.values())) > MAX_ROW_BYTES
