"""`KVWorker`: push gradients, pull rows, wait; asynchronous, after ps-lite.

It differs from ps-lite as follows. Requests of equal priority keep their order, so a pull sees the pushes before it.
Keys may come in any order, duplicates are summed, and every int64 is a key. A push is a step of the table's optimizer.
Requests that fail raise, and waits can have a timeout.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from recstore_ops import _native
from recstore_ops.config.config_file import configure_table
from recstore_ops.config.keywords import takes
from recstore_ops.config.table_options import ConfigOptions
from recstore_ops.ops import operators
from recstore_ops.table.checks import as_ids
from recstore_ops.table.owners import keep
from recstore_ops.table.table import Table

_DEFAULTS: ConfigOptions = {"initializer": "zeros"}
_PRIORITIES = range(-(1 << 31), 1 << 31)


@dataclass(frozen=True)
class KVResponse:
    """The result of a request, as its callback gets it.

    Attributes:
        timestamp: the request's.
        rows: the rows of a pull, float32 `[n, dim]`; `None` for a push and for a request that failed.
        error: the error of a request that failed, else `None`.
    """

    __module__ = "recstore_ops"

    timestamp: int
    rows: Tensor | None = None
    error: BaseException | None = None


Callback = Callable[[KVResponse], object]
_Deliver = Callable[[int, bytearray | None, BaseException | None], None]


class KVWorker:
    """Pushes gradients to one table and pulls rows from it, while the caller goes on.

    The table `kv/<app_id>` lies in this process or on parameter servers, as `set_ps_servers` or the configuration file
    say; workers of one `app_id` share it. A thread carries requests out, one after another: those of a higher priority
    first, and of one priority as they were issued. So a pull sees this worker's pushes before it, unless it overtakes
    them by its priority; pushes always keep their order. Callbacks run on that thread.

    Errors are not lost: `wait` raises the error of its request, and the callback gets it. An error that neither has
    seen is raised by `wait_all`, `close`, or the end of a `with` block.

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
        self._requests = _native.Requests(self._table.table_id, name, max_pending, max_pending_bytes, issue_timeout)
        # It also runs when the program ends, so that pending requests are finished, and their errors reported.
        weakref.finalize(self, _finish, self._requests, os.getpid())

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
            priority: higher ones come first; from -2**31 to 2**31 - 1.
            callback: called with a `KVResponse` on the worker's thread.

        Raises:
            TypeError: keys or vals of another type.
            ValueError: vals of another shape, more bytes than `max_pending_bytes`, or a priority out of its range.
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
            keys: int64, `[n]`, copied.
            out: float32, `[n, dim]`: gets the rows, and must be left alone until then. Without it the callback gets
                them, and without that `wait_rows` does.
            priority: as in `push`.
            callback: called with a `KVResponse` on the worker's thread.

        Raises:
            TypeError: keys or `out` of another type.
            ValueError: `out` of another shape; as `push`.
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
            TimeoutError: the request is not finished after `timeout` seconds, and goes on.
            ValueError: no request has this timestamp.
            Exception: the error of the request, or of its callback.
        """
        self._requests.wait(timestamp, timeout)

    def wait_rows(self, timestamp: int, timeout: float | None = None) -> Tensor:
        """Waits for the rows of a pull that has neither `out` nor a callback, float32 `[n, dim]`, and takes them.

        Raises:
            ValueError: no request has this timestamp, or it has no rows to give.
            Exception: as `wait`.
        """
        return _as_rows(self._requests.wait_rows(timestamp, timeout), self.dim)

    def wait_all(self, timeout: float | None = None) -> None:
        """Waits until all requests are finished.

        Raises:
            TimeoutError: some are not finished after `timeout` seconds, and go on.
            Exception: the first error of a request that was not reported before, with the number of further ones.
        """
        _raise_untold(self._requests.wait_all(timeout))

    def num_pending(self) -> int:
        """The requests that are not finished."""
        return self._requests.num_pending()

    def set_learning_rate(self, lr: float) -> None:
        """Sets the table's learning rate from the next step on, at once: for steps that are pending, too."""
        operators.set_learning_rate(self._table.handle, lr)

    def close(self) -> None:
        """Finishes what is pending and ends the worker's thread; the table stays.

        Raises:
            Exception: as `wait_all`, an error of a request that was not reported before.
        """
        _raise_untold(self._requests.close())

    def __enter__(self) -> KVWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # No error of a request takes the place of the block's own: the finalizer finishes what is pending, and warns.
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
        if priority not in _PRIORITIES:
            raise ValueError(f"{operation}: priority must be from -2**31 to 2**31 - 1, got {priority}")
        ids = self._keys(operation, keys)
        gradients = None if vals is None else self._vals(operation, len(ids), vals)
        if out is not None:
            self._check_out(operation, len(ids), out)
        deliver = None if out is None and callback is None else _delivery(self.dim, out, callback)
        arguments = _bytes_of(ids), None if gradients is None else _bytes_of(gradients)
        return self._requests.issue(*arguments, gives_rows, priority, deliver)

    def _keys(self, operation: str, keys: Tensor | Sequence[int]) -> Tensor:
        ids = as_ids(keys)
        if ids.dim() != 1:
            raise ValueError(f'{operation}: keys of table "{self.name}" must be [n], got {list(ids.shape)}')
        return ids

    def _vals(self, operation: str, count: int, vals: Tensor | Sequence[Any]) -> Tensor:
        given = vals if isinstance(vals, Tensor) else torch.tensor(vals, dtype=torch.float32, device="cpu")
        if given.dtype != torch.float32:
            raise TypeError(f'{operation}: vals of table "{self.name}" must be float32, got {given.dtype}')
        if self.dim == 1 and given.shape == (count,):
            given = given[:, None]
        # Without keys any shape without elements will do: an empty list gives [0], and not [0, dim].
        if given.shape != (count, self.dim) and (count, given.numel()) != (0, 0):
            raise ValueError(
                f'{operation}: vals of table "{self.name}" must be [{count}, {self.dim}], got {list(given.shape)}'
            )
        return given

    def _check_out(self, operation: str, count: int, out: Tensor) -> None:
        if out.dtype != torch.float32:
            raise TypeError(f'{operation}: out for table "{self.name}" must be float32, got {out.dtype}')
        if out.shape != (count, self.dim):
            raise ValueError(
                f'{operation}: out for table "{self.name}" must be [{count}, {self.dim}], got {list(out.shape)}'
            )
        if out.requires_grad:
            raise ValueError(f'{operation}: out for table "{self.name}" must not require a gradient')


def _delivery(dim: int, out: Tensor | None, callback: Callback | None) -> _Deliver:
    """Returns the function that the worker's thread calls with the rows of a request. Its errors are the request's.

    It holds no reference to the worker, which lives as long as its owner wants.
    """

    def deliver(timestamp: int, given: bytearray | None, error: BaseException | None) -> None:
        rows = None
        # An error of the copy belongs to the request, and the callback has to see it.
        try:
            if given is not None:
                rows = _as_rows(given, dim) if out is None else out.copy_(_as_rows(given, dim))
        except BaseException as raised:
            error = raised
        if callback is None:
            if error is not None:
                raise error
            return
        try:
            callback(KVResponse(timestamp, rows, error))
        except BaseException as raised:
            warnings.warn(f"request {timestamp}: its callback raised {raised!r}", RuntimeWarning, stacklevel=1)
            raise error or raised from None

    return deliver


def _bytes_of(tensor: Tensor) -> bytes:
    # The stable ABI of Python 3.10 has no buffers: this is the copy that lets the caller change the tensor at once.
    return tensor.detach().cpu().numpy().tobytes()


def _as_rows(rows: bytearray, dim: int) -> Tensor:
    # `frombuffer` refuses a buffer of no bytes.
    return (
        torch.frombuffer(rows, dtype=torch.float32).reshape(-1, dim)
        if rows
        else torch.empty(0, dim, dtype=torch.float32, device="cpu")
    )


def _raise_untold(untold: Sequence[tuple[int, BaseException]]) -> None:
    """Raises the errors of requests that were not reported before."""
    if not untold:
        return
    first = untold[0][1]
    if len(untold) == 1:
        raise first
    raise RuntimeError(f"{first} (and {len(untold) - 1} more requests failed)") from first


def _finish(requests: _native.Requests, process: int) -> None:
    """Finishes what is pending when the worker is no longer used, or the program ends."""
    if process != os.getpid():
        return  # A forked child has not the thread.
    for timestamp, error in requests.close():
        warnings.warn(f"request {timestamp} failed, and nobody was told: {error}", RuntimeWarning, stacklevel=1)
