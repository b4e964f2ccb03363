"""Server processes for tests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

_STARTED = re.compile(r"shard (\d+) of (\d+) at (\S+)")


class ServerProcesses:
    """`recstore serve` for each of some shards, each in a process of its own, ended with the block.

    Attributes:
        addresses: `host:port` of the bulk ports, in the order of the shards.
        processes: the processes, in the same order.
    """

    def __init__(self, folder: Path, num_shards: int, *options: str, ports: list[int] | None = None) -> None:
        ports = ports or [0] * num_shards
        servers = [{"host": "127.0.0.1", "port": port, "shard": shard} for shard, port in enumerate(ports)]
        self.config = folder / "servers.json"
        self.config.write_text(json.dumps({"cache_ps": {"num_shards": num_shards, "servers": servers}}))
        command = [sys.executable, "-m", "recstore_ops.cli", "serve", "--config", str(self.config), *options]
        self.processes = [
            subprocess.Popen(
                [*command, "--shard", str(shard)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for shard in range(num_shards)
        ]
        self.addresses = [self._address(process) for process in self.processes]

    @staticmethod
    def _address(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        started = _STARTED.match(line)
        assert started, line + process.stdout.read()
        return started[3].rstrip(",")

    def stop(self) -> list[str]:
        """Ends all processes in good order and returns what each printed last."""
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        return [process.communicate(timeout=60)[0] for process in self.processes]

    def __enter__(self) -> ServerProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
            process.communicate(timeout=60)
