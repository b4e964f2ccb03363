"""`KVWorker`: push gradients, pull rows, wait; asynchronous, after ps-lite.

What differs from ps-lite: requests of equal priority keep their order, so that a pull sees the pushes before it; keys
may come in any order, duplicates are summed, and every int64 is a key; a push is a step of the table's optimizer; what
fails raises, and waits can have an end.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from recstore_ops.client.request_queue import Callback, Limits, Request, RequestQueue
from recstore_ops.config.config_file import configure_table
from recstore_ops.config.keywords import takes
from recstore_ops.config.table_options import ConfigOptions
from recstore_ops.ops import operators
from recstore_ops.table.checks import check_ids
from recstore_ops.table.owners import keep
from recstore_ops.table.table import Table

_DEFAULTS: ConfigOptions = {"initializer": "zeros"}


class KVWorker:
    """Pushes gradients to one table and pulls rows from it, while the caller goes on.

    The table `kv/<app_id>` lies in this process or on parameter servers, as `set_ps_servers` or the configuration file
    say; workers of one `app_id` share it. A thread carries requests out, one after another: those of a higher priority
    first, and of one priority as they were issued. So a pull sees this worker's pushes before it, unless it overtakes
    them by its priority; pushes always keep their order. Callbacks run on that thread.

    Errors are not lost: `wait` raises what a request failed with, its callback gets it, and `wait_all`, `close` and the
    end of a `with` block raise what nobody was told of.

    Args:
        app_id: names the table.
        dim: elements a row.
        num_embeddings: the number of keys, which are below it then; `None` for all of int64.
        max_pending: the most requests that are issued and not finished.
        max_pending_bytes: the most bytes of them, and of the rows that they give until they are taken.
        issue_timeout: the seconds that a request waits for room before it is refused.
        **options: as in `recstore_ops.TableOptions`: of a table's configuration, not of ranks. The `optimizer` is what
            a push does; rows start at zeros by default.

    Raises:
        TypeError: an option of another name.
        ValueError: the configuration is invalid, the table exists with another one, or a limit is not positive.
    """

    __module__ = "recstore_ops"

    @takes(ConfigOptions, _DEFAULTS)
    def __init__(
        self,
        app_id: int | str,
        dim: int = 1,
        *,
        num_embeddings: int | None = None,
        max_pending: int = 1024,
        max_pending_bytes: int = 256 << 20,
        issue_timeout: float = 60.0,
        **options: Unpack[ConfigOptions],
    ) -> None:
        limits = {"max_pending": max_pending, "max_pending_bytes": max_pending_bytes, "issue_timeout": issue_timeout}
        for limit, value in limits.items():
            if value <= 0:
                raise ValueError(f"{limit} must be positive, got {value}")
        name = f"kv/{app_id}"
        self._table = Table(name, dim, configure_table(name, dim, num_embeddings, **{**_DEFAULTS, **options}))
        keep(self._table.table_id)
        self._requests = RequestQueue(Limits(max_pending, max_pending_bytes, issue_timeout), f"recstore-{name}")

    @property
    def name(self) -> str:
        """The table's name."""
        return self._table.name

    @property
    def dim(self) -> int:
        """The elements of a row."""
        return self._table.dim

    def push(
        self,
        keys: Tensor | Sequence[int],
        vals: Tensor | Sequence[Any],
        priority: int = 0,
        callback: Callback | None = None,
    ) -> int:
        """Issues an optimizer step with gradients and returns its timestamp. Both are copied.

        Args:
            keys: int64, `[n]`, in any order; the gradients of duplicates are summed.
            vals: float32, `[n, dim]`; with a dim of 1 also `[n]`.
            priority: higher ones come first.
            callback: called with a `KVResponse` on the worker's thread.

        Raises:
            TypeError: keys or vals of another type.
            ValueError: vals of another shape, or more bytes than `max_pending_bytes`.
            TimeoutError: no room within `issue_timeout`; the message names the limit.
        """
        return self._issue("push", keys, vals, False, None, priority, callback)

    def pull(
        self,
        keys: Tensor | Sequence[int],
        out: Tensor | None = None,
        priority: int = 0,
        callback: Callback | None = None,
    ) -> int:
        """Issues a read of rows and returns its timestamp.

        Args:
            keys: int64, `[n]`; they are copied.
            out: float32, `[n, dim]`: gets the rows, and must be left alone until then. Without it the callback gets
                them, and without that `wait_rows` does.
            priority: higher ones come first.
            callback: called with a `KVResponse` on the worker's thread.

        Raises:
            TypeError: keys or `out` of another type.
            ValueError: `out` of another shape, or more bytes than `max_pending_bytes`.
            TimeoutError: no room within `issue_timeout`; the message names the limit.
        """
        return self._issue("pull", keys, None, True, out, priority, callback)

    def push_pull(
        self,
        keys: Tensor | Sequence[int],
        vals: Tensor | Sequence[Any],
        out: Tensor | None = None,
        priority: int = 0,
        callback: Callback | None = None,
    ) -> int:
        """Issues a push and a pull of the same keys, with nothing of this worker in between; as `push` and `pull`."""
        return self._issue("push_pull", keys, vals, True, out, priority, callback)

    def wait(self, timestamp: int, timeout: float | None = None) -> None:
        """Waits until a request is finished, its callback included.

        Raises:
            TimeoutError: it is not finished after `timeout` seconds; it goes on.
            ValueError: no request has this timestamp.
            Exception: what the request, or its callback, failed with.
        """
        self._requests.wait(timestamp, timeout)

    def wait_rows(self, timestamp: int, timeout: float | None = None) -> Tensor:
        """Waits for the rows of a pull that has neither `out` nor a callback, float32 `[n, dim]`, and takes them.

        Raises:
            ValueError: no request has this timestamp, or it has no rows to give.
            Exception: as `wait`.
        """
        return self._requests.wait_rows(timestamp, timeout)

    def wait_all(self, timeout: float | None = None) -> None:
        """Waits until all requests are finished.

        Raises:
            TimeoutError: some are not after `timeout` seconds; they go on.
            Exception: what requests failed with of which nobody was told: the first, and how many more.
        """
        self._requests.wait_all(timeout)

    def num_pending(self) -> int:
        """The requests that are not finished."""
        return self._requests.num_pending()

    def set_learning_rate(self, lr: float) -> None:
        """Sets the table's learning rate from the next step on, at once: for steps that are pending, too."""
        operators.set_learning_rate(self._table.handle, lr)

    def close(self) -> None:
        """Finishes what is pending and ends the worker's thread; the table stays.

        Raises:
            Exception: what requests failed with of which nobody was told.
        """
        self._requests.close()

    def __enter__(self) -> KVWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    def __repr__(self) -> str:
        return f"KVWorker({self.name!r}, dim={self.dim})"

    def _issue(
        self,
        operation: str,
        keys: Tensor | Sequence[int],
        vals: Tensor | Sequence[Any] | None,
        gives_rows: bool,
        out: Tensor | None,
        priority: int,
        callback: Callback | None,
    ) -> int:
        ids = self._keys(operation, keys)
        gradients = None if vals is None else self._vals(operation, len(ids), vals)
        if out is not None:
            self._check_out(operation, len(ids), out)
        # The request keeps the table's handle from being released before its turn.
        table = self._table

        def call() -> Tensor | None:
            if gradients is not None:
                operators.emb_update(table.handle, ids, gradients)
            if not gives_rows:
                return None
            rows = operators.emb_read(table.handle, ids, table.dim)
            if out is None:
                return rows
            out.copy_(rows)
            return out if callback is not None else None

        gradient_bytes = 0 if gradients is None else gradients.nbytes
        row_bytes = len(ids) * table.dim * 4 if gives_rows else 0
        request = Request(call, gradients is not None, ids.nbytes + gradient_bytes + row_bytes, callback)
        return self._requests.issue(operation, request, priority)

    def _keys(self, operation: str, keys: Tensor | Sequence[int]) -> Tensor:
        if not isinstance(keys, Tensor):
            return torch.tensor(keys, dtype=torch.int64, device="cpu").reshape(len(keys))
        if keys.dim() != 1:
            raise ValueError(f'{operation}: keys of table "{self.name}" must be [n], got {list(keys.shape)}')
        return check_ids(keys).clone()

    def _vals(self, operation: str, count: int, vals: Tensor | Sequence[Any]) -> Tensor:
        if isinstance(vals, Tensor):
            given = vals.detach().clone()
        else:
            given = torch.tensor(vals, dtype=torch.float32, device="cpu")
        if given.dtype != torch.float32:
            raise TypeError(f'{operation}: vals of table "{self.name}" must be float32, got {given.dtype}')
        if self.dim == 1 and given.shape == (count,):
            given = given[:, None]
        if given.shape != (count, self.dim) and (count, given.numel()) != (0, 0):
            raise ValueError(
                f'{operation}: vals of table "{self.name}" must be [{count}, {self.dim}], got {list(given.shape)}'
            )
        return given.reshape(count, self.dim)

    def _check_out(self, operation: str, count: int, out: Tensor) -> None:
        if out.dtype != torch.float32:
            raise TypeError(f'{operation}: out for table "{self.name}" must be float32, got {out.dtype}')
        if out.shape != (count, self.dim):
            raise ValueError(
                f'{operation}: out for table "{self.name}" must be [{count}, {self.dim}], got {list(out.shape)}'
            )
        if out.requires_grad:
            raise ValueError(f'{operation}: out for table "{self.name}" must not require a gradient')
