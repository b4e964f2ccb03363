"""The yardstick: a table whose ids are record numbers, read and trained by plain C loops.

It does what a lookup and a step must do at least, and nothing else: no hash map, no search for duplicates, no checks.
It uses torch's own team of OpenMP threads: its library is the one already loaded.

Shape suffixes: R records, S floats a record, D dim, N ids, B bags, U distinct records.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import multiprocessing
import socket
from dataclasses import dataclass

import torch
from torch import Tensor

from benches import compiled
from benches.ids import Grouped

LR, EPS = 0.01, 1e-10
INITIAL_WEIGHT = 0.01

# Without errno square roots are one instruction, and exact as before.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-lm")

_FLOAT_BYTES = 4
_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

_RECORDS = (_POINTER, _SIZE, _SIZE, _POINTER, _SIZE)
"""Records, stride, dim, index, and the number of indices (of bags for `pool`)."""


class _Rule(ctypes.Structure):
    """`struct rule` of yardstick.c: the store's defaults, Adam's bias of the first step corrected."""

    _fields_ = [
        (name, ctypes.c_float) for name in ("lr", "eps", "first", "second", "inverse_alpha", "beta", "l1", "l2")
    ]


ADAM_BETAS, ADAM_EPS = (0.9, 0.999), 1e-8
FTRL_BETA, FTRL_L1, FTRL_L2 = 1.0, 0.0, 0.0

_ADAM_LR = LR * (1 - ADAM_BETAS[1]) ** 0.5 / (1 - ADAM_BETAS[0])


@dataclass(frozen=True)
class _Update:
    """The loop of an optimizer: its number in yardstick.c, floats of state a weight, the numbers of its rule."""

    number: int
    state: int
    rule: _Rule


_UPDATES = {
    ("sgd", torch.float32): _Update(0, 0, _Rule(lr=LR)),
    ("adagrad", torch.float32): _Update(1, 1, _Rule(lr=LR, eps=EPS)),
    ("adam", torch.float32): _Update(
        2, 2, _Rule(lr=_ADAM_LR, eps=ADAM_EPS, first=1 - ADAM_BETAS[0], second=1 - ADAM_BETAS[1])
    ),
    ("ftrl", torch.float32): _Update(3, 2, _Rule(inverse_alpha=1 / LR, beta=FTRL_BETA, l1=FTRL_L1, l2=FTRL_L2)),
    ("adagrad", torch.bfloat16): _Update(4, 1, _Rule(lr=LR, eps=EPS)),
}

_SIGNATURES: dict[str, tuple[tuple[type, ...], type | None]] = {
    "yardstick_gather": ((*_RECORDS, _POINTER, _INT), None),
    "yardstick_pool": ((*_RECORDS, _POINTER, _SIZE, _POINTER, _INT), None),
    "yardstick_widen": ((*_RECORDS, _POINTER, _INT), None),
    "yardstick_sum": ((_POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER, _INT), None),
    "yardstick_update": ((*_RECORDS, _POINTER, _INT, ctypes.POINTER(_Rule), _INT), None),
    "yardstick_flush": ((_POINTER, _SIZE), _INT),
    "yardstick_answer": ((_INT, _POINTER, _SIZE), None),
    "yardstick_round_trip": ((_INT, _POINTER, _SIZE, _POINTER, _SIZE), _INT),
    "yardstick_transfer": ((_INT, _SIZE, _POINTER, _SIZE, _INT, _INT), _INT),
}


class Yardstick:
    """Records of a row's weights followed by its optimizer's state.

    Args:
        rows: the number of records.
        dim: elements a row.
        optimizer: `adagrad`, `sgd`, `adam` or `ftrl`.
        dtype: of the weights, float32, or bfloat16 for `adagrad`; state is float32 always.

    Attributes:
        records: float32, `[R, S]`: the memory itself.

    Raises:
        ValueError: another optimizer, or it has no loop for the type.
        RuntimeError: the loops cannot be compiled.
    """

    def __init__(self, rows: int, dim: int, optimizer: str = "adagrad", dtype: torch.dtype = torch.float32) -> None:
        if (optimizer, dtype) not in _UPDATES:
            known = ", ".join(f'"{name}" of {str(type_)[6:]}' for name, type_ in _UPDATES)
            raise ValueError(f"the yardstick has {known}, got {optimizer!r} of {str(dtype)[6:]}")
        self._loops, self._update = _load(), _UPDATES[optimizer, dtype]
        self.dim, self.dtype = dim, dtype
        self._words = dim if dtype == torch.float32 else (dim + 1) // 2
        self.records = huge_pages(rows * (self._words + self._update.state * dim)).view(rows, -1)
        self._sums = torch.empty(0)
        self.weights[:] = INITIAL_WEIGHT

    @property
    def weights(self) -> Tensor:
        """`[R, D]` in their type, in the memory of `records`."""
        return self.records[:, : self._words].view(self.dtype)[:, : self.dim]

    @property
    def state(self) -> Tensor:
        """The state of each row, in the memory of `records`."""
        return self.records[:, self._words :]

    def gather(self, index_N: Tensor, out_ND: Tensor) -> None:
        """y1: copies the weights of each record into `out_ND`, as float32."""
        loop = self._loops.yardstick_gather if self.dtype == torch.float32 else self._loops.yardstick_widen
        loop(*self._arguments(index_N), out_ND.data_ptr(), torch.get_num_threads())

    def lookup(self, index_N: Tensor) -> Tensor:
        """y1 into memory of torch's allocator, where all others take their outputs from: `[N, D]`."""
        out_ND = torch.empty(index_N.shape[0], self.dim)
        self.gather(index_N, out_ND)
        return out_ND

    def step(self, index_N: Tensor, distinct_U: Tensor, grad_ND: Tensor, grouped: Grouped | None = None) -> Tensor:
        """The limit of a step: y1 on all ids of a batch, then y2 on its distinct rows.

        Args:
            index_N: int64, the records of the batch.
            distinct_U: int64, the distinct ones in the order in which they first come.
            grad_ND: float32, contiguous.
            grouped: for y3 before y2: the positions of each distinct record. Without it gradients count as summed.
        """
        out_ND = self.lookup(index_N)
        self.update(distinct_U, grad_ND if grouped is None else self.sum(grouped, grad_ND))
        return out_ND

    def pool(self, index_N: Tensor, offsets_B: Tensor, out_BD: Tensor) -> None:
        """y1 of bags: sums the weights of each bag's records into `out_BD`; `offsets_B` has the last end too."""
        bags = (offsets_B.data_ptr(), out_BD.shape[0], out_BD.data_ptr())
        self._loops.yardstick_pool(*self._arguments(index_N), *bags, torch.get_num_threads())

    def sum(self, grouped: Grouped, grad_ND: Tensor) -> Tensor:
        """y3: the sum of the gradients of each group `[U, D]`, in memory that the next call uses again."""
        rows = len(grouped.starts) - 1
        if self._sums.numel() < grad_ND.numel():
            self._sums = huge_pages(grad_ND.numel())
        places = (grouped.order.data_ptr(), grouped.starts.data_ptr(), rows)
        self._loops.yardstick_sum(grad_ND.data_ptr(), self.dim, *places, self._sums.data_ptr(), torch.get_num_threads())
        return self._sums[: rows * self.dim].view(rows, self.dim)

    def update(self, index_U: Tensor, grad_UD: Tensor) -> None:
        """y2: takes one step on each of the records, which must be distinct.

        AdaGrad is `s += g^2; w -= lr*g/sqrt(s+eps)`, with an exact square root and division. Adam and FTRL are the
        store's equations. Weights of bfloat16 are rounded stochastically, as the store's are.
        """
        arguments = (*self._arguments(index_U), grad_UD.data_ptr(), self._update.number)
        self._loops.yardstick_update(*arguments, ctypes.byref(self._update.rule), torch.get_num_threads())

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
