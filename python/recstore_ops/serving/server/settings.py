"""How a model server serves its bundle; each field is an option of `recstore serve-model`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from recstore_ops.config.option import Option
from recstore_ops.servers.serve_settings import LogLevel


@dataclass(frozen=True)
class ModelServerSettings:
    """Limits and threads.

    Attributes:
        max_batch: rows of one call of the program that several requests share.
        max_delay_us: microseconds that a request may wait for others.
        workers: calls of the program at a time.
        torch_threads: of each call.
        max_queue: requests that wait for a worker.
        max_body: bytes of a request.
        max_elements: of all inputs of a request.
        max_pending_bytes: of all requests under way, of each protocol.
        max_connections: of each port.
        drain: seconds between a signal to end and the end of listening.
        metrics_host: the host that serves metrics without a token.
        log_level: what is written to the error stream.
    """

    max_batch: Annotated[
        int, Option("Join concurrent requests up to this many rows; 1 joins none. More rows run alone.", least=1)
    ] = 128
    max_delay_us: Annotated[
        int, Option("Microseconds that a request waits for others to join.", least=0, most=1_000_000)
    ] = 0
    workers: Annotated[int, Option("Threads that call the model.", least=1, most=1024)] = 1
    torch_threads: Annotated[int, Option("Threads of torch in each call.", least=1, most=1024)] = 1
    max_queue: Annotated[int, Option("The most requests that wait; more are refused.", least=1)] = 1024
    max_body: Annotated[int, Option("The most bytes of a request.", least=1, most=1 << 30)] = 4 << 20
    max_elements: Annotated[int, Option("The most elements of all inputs of a request.", least=1)] = 1 << 20
    max_pending_bytes: Annotated[
        int, Option("The most bytes of all requests under way, of each protocol; more are refused.", least=1)
    ] = 1 << 30
    max_connections: Annotated[int, Option("The most connections of each port.", least=1)] = 1024
    drain: Annotated[
        float, Option("Seconds to go on after a signal to end, while health says not ready.", least=0.0, most=3600.0)
    ] = 0.0
    metrics_host: Annotated[str, Option("Serve Prometheus metrics on this address, to all who can reach it.")] = (
        "127.0.0.1"
    )
    log_level: Annotated[LogLevel, Option("Write what the ports do to the error stream.")] = LogLevel.WARN

    def __post_init__(self) -> None:
        if self.max_pending_bytes < self.max_body:
            raise ValueError(
                f"--max-pending-bytes {self.max_pending_bytes} has no room for one request of --max-body "
                f"{self.max_body}"
            )
