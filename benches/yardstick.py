"""The yardstick: a table whose ids are record numbers, read and trained by plain C loops.

It does what a lookup and a step must do at least, and nothing else: no hash map, no duplicates, no checks. It uses
torch's own team of OpenMP threads: its library is the one already loaded.

Shape suffixes: R records, S floats a record, D dim, N ids, B bags, U distinct records.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import multiprocessing
import socket

import torch
from torch import Tensor

from benches import compiled

LR, EPS = 0.01, 1e-10
INITIAL_WEIGHT = 0.01

# Without errno square roots are one instruction, and exact as before.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-lm")

_FLOAT_BYTES = 4
_POINTER, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_float

_RECORDS = (_POINTER, _SIZE, _SIZE, _POINTER, _SIZE)
"""Records, stride, dim, index, and the number of indices (of bags for `pool`)."""

_SIGNATURES: dict[str, tuple[tuple[type, ...], type | None]] = {
    "yardstick_gather": ((*_RECORDS, _POINTER, _INT), None),
    "yardstick_pool": ((*_RECORDS, _SIZE, _POINTER, _INT), None),
    "yardstick_adagrad": ((*_RECORDS, _POINTER, _FLOAT, _FLOAT, _INT), None),
    "yardstick_sgd": ((*_RECORDS, _POINTER, _FLOAT, _INT), None),
    "yardstick_flush": ((_POINTER, _SIZE), _INT),
    "yardstick_answer": ((_INT, _POINTER, _SIZE), None),
    "yardstick_round_trip": ((_INT, _POINTER, _SIZE, _POINTER, _SIZE), _INT),
    "yardstick_transfer": ((_INT, _SIZE, _POINTER, _SIZE, _INT, _INT), _INT),
}


class Yardstick:
    """Records of a row's weights followed by as many floats of AdaGrad state, or by nothing for SGD.

    Args:
        rows: the number of records.
        dim: elements a row.
        optimizer: `adagrad` or `sgd`.

    Attributes:
        records: float32, `[R, S]`: the memory itself.

    Raises:
        ValueError: another optimizer.
        RuntimeError: the loops cannot be compiled.
    """

    def __init__(self, rows: int, dim: int, optimizer: str = "adagrad") -> None:
        if optimizer not in ("adagrad", "sgd"):
            raise ValueError(f'the yardstick has "adagrad" and "sgd", got {optimizer!r}')
        self._loops = _load()
        self.dim, self.optimizer = dim, optimizer
        stride = dim if optimizer == "sgd" else 2 * dim
        self.records = huge_pages(rows * stride).view(rows, stride)
        self.records[:, :dim] = INITIAL_WEIGHT

    def gather(self, index_N: Tensor, out_ND: Tensor) -> None:
        """y1: copies the weights of each record into `out_ND`."""
        self._loops.yardstick_gather(*self._arguments(index_N), out_ND.data_ptr(), torch.get_num_threads())

    def lookup(self, index_N: Tensor) -> Tensor:
        """y1 into memory of torch's allocator, where all others take their outputs from: `[N, D]`."""
        out_ND = torch.empty(index_N.shape[0], self.dim)
        self.gather(index_N, out_ND)
        return out_ND

    def step(self, index_N: Tensor, distinct_U: Tensor, grad_ND: Tensor) -> Tensor:
        """y1 on all ids of a batch, then y2 on its distinct rows, whose gradients count as summed already."""
        out_ND = self.lookup(index_N)
        self.update(distinct_U, grad_ND)
        return out_ND

    def pool(self, index_N: Tensor, out_BD: Tensor) -> None:
        """y1 of bags of equal length: sums the weights of each bag's records into `out_BD`."""
        records, stride, dim, index, count = self._arguments(index_N)
        bags = out_BD.shape[0]
        self._loops.yardstick_pool(
            records, stride, dim, index, bags, count // bags, out_BD.data_ptr(), torch.get_num_threads()
        )

    def update(self, index_U: Tensor, grad_UD: Tensor) -> None:
        """y2: takes one step on each of the records, which must be distinct.

        AdaGrad is `s += g^2; w -= lr*g/sqrt(s+eps)`, with an exact square root and division.
        """
        arguments = (*self._arguments(index_U), grad_UD.data_ptr(), LR)
        if self.optimizer == "sgd":
            self._loops.yardstick_sgd(*arguments, torch.get_num_threads())
        else:
            self._loops.yardstick_adagrad(*arguments, EPS, torch.get_num_threads())

    def _arguments(self, index: Tensor) -> tuple[int, int, int, int, int]:
        return self.records.data_ptr(), self.records.shape[1], self.dim, index.data_ptr(), index.numel()


def huge_pages(floats: int) -> Tensor:
    """Returns zeros `[floats]` in memory of its own, in huge pages where the system gives them, aligned to a page."""
    memory = mmap.mmap(-1, floats * _FLOAT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32)


def flush(tensor: Tensor) -> bool:
    """Puts a tensor out of all caches; False where the machine has no instruction for it."""
    return bool(_load().yardstick_flush(tensor.data_ptr(), tensor.numel() * tensor.element_size()))


def transfer(descriptor: int, record_bytes: int, index_N: Tensor, *, writes: bool) -> None:
    """Writes, or else reads, a record of a file for each index (int64), one plain call each, on torch's many threads.

    Raises:
        OSError: the file is too short, or its disk full.
    """
    arguments = (descriptor, record_bytes, index_N.data_ptr(), index_N.numel(), writes, torch.get_num_threads())
    if not _load().yardstick_transfer(*arguments):
        raise OSError(f"records of {record_bytes} bytes could not be transferred")


class Peer:
    """A process that answers what is sent to it over TCP, with bytes of no meaning; a context manager.

    Args:
        capacity: the most bytes of a request or an answer.
    """

    def __init__(self, capacity: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            # Forked, a process would have threads of torch that do not run there.
            self._process = multiprocessing.get_context("spawn").Process(target=_answer, args=(port, capacity))
            self._process.start()
            self._socket, _ = listener.accept()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def pid(self) -> int:
        """The number of the process that answers."""
        assert self._process.pid is not None
        return self._process.pid

    def round_trip(self, request: Tensor, answer: Tensor) -> None:
        """Sends the bytes of one tensor and receives those of another.

        Raises:
            ConnectionError: the process has ended.
        """
        sizes = [tensor.numel() * tensor.element_size() for tensor in (request, answer)]
        arguments = (request.data_ptr(), sizes[0], answer.data_ptr(), sizes[1])
        if not _load().yardstick_round_trip(self._socket.fileno(), *arguments):
            raise ConnectionError("the yardstick's peer has ended")

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.join()


def _answer(port: int, capacity: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        memory = torch.zeros(capacity, dtype=torch.uint8)
        _load().yardstick_answer(connection.fileno(), memory.data_ptr(), capacity)


@functools.cache
def _load() -> ctypes.CDLL:
    library = compiled.load("yardstick.c", FLAGS)
    for name, (arguments, result) in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library
