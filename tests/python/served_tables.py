"""Server processes for tests."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from types import TracebackType

from warm_recstore import WarmRecstore

_STARTED = re.compile(r"shard (\d+) of (\d+) at ([^\s,]+)(?:.*, metrics at http://([^/]+)/metrics)?")


class ServerProcesses:
    """`recstore serve` for each of some shards, each in a process of its own, ended with the block.

    Attributes:
        addresses: `host:port` of the bulk ports, in the order of the shards.
        metrics: `host:port` of the ports of metrics, where `--metrics-port` asks for them.
        processes: the processes, in the same order.
        logged: the lines before those that say that a server is ready.
    """

    def __init__(self, folder: Path, num_shards: int, *options: str) -> None:
        servers = [{"host": "127.0.0.1", "port": 0, "shard": shard} for shard in range(num_shards)]
        self.config = folder / "servers.json"
        self.config.write_text(json.dumps({"cache_ps": {"num_shards": num_shards, "servers": servers}}))
        self._options = options
        self.logged = ""
        self.processes = [self._start(shard) for shard in range(num_shards)]
        started = [self._started(process) for process in self.processes]
        self.addresses = [found[3] for found in started]
        self.metrics = [found[4] for found in started]

    def _start(self, shard: int, *options: str) -> WarmRecstore:
        return WarmRecstore("serve", "--config", self.config, *self._options, "--shard", shard, *options)

    def _started(self, process: WarmRecstore) -> re.Match[str]:
        while line := process.stdout.readline():
            if started := _STARTED.match(line):
                return started
            self.logged += line
        raise AssertionError(self.logged)

    def kill_and_start_again(self, shard: int) -> None:
        """Ends a server by SIGKILL and starts one in its place, at the same port."""
        self.processes[shard].kill()
        self.processes[shard].communicate(timeout=60)
        self.processes[shard] = self._start(shard, "--port", self.addresses[shard].rsplit(":", 1)[1])
        assert self._started(self.processes[shard])[3] == self.addresses[shard]

    def resident_bytes(self, shard: int) -> int:
        """The memory that a server has, as the system counts it."""
        status = Path(f"/proc/{self.processes[shard].pid}/status").read_text(encoding="utf-8")
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found, status
        return int(found[1]) * 1024

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
