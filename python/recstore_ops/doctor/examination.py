"""The checks that `recstore_ops.doctor` runs, each a function."""

from __future__ import annotations

import multiprocessing
import os
import platform
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from recstore_ops import _native
from recstore_ops.config.config_file import (
    PATH_VARIABLE,
    ConfigFile,
    TableEntry,
    config_from_document,
    document_problems,
    find_config_file,
    read_document,
)
from recstore_ops.config.table_config import TableConfig
from recstore_ops.config.table_options import DEFAULT_LR, options_of
from recstore_ops.ops import operators, require_torch
from recstore_ops.servers.choosing import embedded_for, try_servers, was_chosen
from recstore_ops.servers.serve_settings import ServeSettings, serve_settings, shard_directory
from recstore_ops.servers.server_config import (
    ServerAddress,
    ServerList,
    Tls,
    chosen_servers,
    known_servers,
    served_shards,
)
from recstore_ops.table.table import Table

# What `recstore doctor --config` says of servers: what each of them and each program would do.
#
# It calls what `recstore serve` and programs call when they start, and tells what that refuses.


def examine_servers(config: ConfigFile) -> list[Finding]:
    """Describes the servers and programs of a valid configuration file, or why they would not start."""
    findings: list[Finding] = []
    if "servers" in config.recstore.get("cache_ps", {}):
        findings += _served(config)
    if config.recstore:
        findings.append(_programs(config))
    return findings


def _served(config: ConfigFile) -> list[Finding]:
    try:
        settings, served = serve_settings(config, {}), served_shards(config)
        _check_files(served.tls)
    except (ValueError, OSError) as error:
        return [Finding("recstore serve", str(error), "error")]
    return [_shard(settings, served, server) for server in served.servers]


def _shard(settings: ServeSettings, served: ServerList, server: ServerAddress) -> Finding:
    number = len(served.servers)
    said = [f"listens on {server}"]
    if settings.data is None:
        said.append("keeps its tables in memory alone")
    else:
        directory = shard_directory(settings.data, server.shard, number)
        said.append(f"keeps its tables in {directory}, durability {settings.durability.value}")
    if server.metrics_port is not None:
        said.append(f"metrics at port {server.metrics_port}")
    said += [name for name, asked in (("TLS", served.tls), ("a token", served.token)) if asked is not None]
    return Finding(f"recstore serve --shard {server.shard}", f"shard {server.shard} of {number}: {', '.join(said)}")


def _programs(config: ConfigFile) -> Finding:
    topic = "programs"
    try:
        chosen, known = chosen_servers(config), known_servers(config)
        _check_files(None if known is None else known.tls)
    except (ValueError, OSError) as error:
        return Finding(topic, str(error), "error")
    if chosen is not None:
        return Finding(topic, f"open their tables on {_named(chosen)}")
    if known is not None:
        advice = "name them in distributed_client.servers to open tables there from the start"
        return Finding(topic, f'keep their tables; set_ps_backend("servers") means {_named(known)}', advice=advice)
    return Finding(topic, "keep their tables: no servers are named")


def _named(servers: ServerList) -> str:
    return f"{', '.join(map(str, servers.servers))}, ids by {servers.hash_method}"


def _check_files(tls: Tls | None) -> None:
    """Opens the files of TLS.

    Raises:
        OSError: one cannot be read.
    """
    for path in () if tls is None else (tls.certificate, tls.key, tls.ca):
        if path is not None:
            Path(path).read_bytes()


State = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        topic: the subject of the check.
        found: its state, in words.
        state: `ok`, `warning` if it costs speed or may surprise, `error` if something will not work.
        advice: the remedy; empty if there is none.
    """

    topic: str
    found: str
    state: State = "ok"
    advice: str = ""


STABLE_ABI_TARGET = "2.11"
"""The release of libtorch whose stable ABI the native module is built for."""

SIMD_VARIABLE = "RECSTORE_SIMD"
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
MEMORY = Path("/proc/meminfo")

_GIBIBYTE = 2**30
_SCRATCH_TABLE = "recstore doctor"
_SECONDS_TO_ANSWER = 3.0


def examine() -> list[Finding]:
    """Looks at this installation and machine."""
    return [check() for check in CHECKS]


def check_python() -> Finding:
    return Finding("python", f"{platform.python_version()} at {sys.executable}")


def check_torch() -> Finding:
    oldest = ".".join(map(str, require_torch.OLDEST))
    return Finding("torch", f"{torch.__version__} ({oldest} or newer is needed)")


def check_native_module() -> Finding:
    """Takes one step in a scratch table, which needs all of the native module."""
    found = f"{_native.__version__} at {_native.__file__}, for the stable ABI of torch {STABLE_ABI_TARGET}"
    try:
        with _in_this_process():
            row = _row_after_one_step()
    except RuntimeError as error:
        return Finding("native module", f"{found}: {error}", "error", "reinstall recstore-ops")
    if row != -1.0:
        return Finding("native module", f"{found}: a step gave {row}, not -1.0", "error", "reinstall recstore-ops")
    return Finding("native module", f"{found}; a step works")


def _row_after_one_step() -> float:
    config = TableConfig(initializer={"kind": "zeros"}, optimizer={"kind": "sgd", "lr": 1.0})
    table, id_one = Table(_SCRATCH_TABLE, 1, config), torch.tensor([1], dtype=torch.int64, device="cpu")
    try:
        operators.emb_update(table.handle, id_one, torch.ones(1, 1, dtype=torch.float32, device="cpu"))
        return operators.emb_read(table.handle, id_one, 1).item()
    finally:
        operators.drop_table(_SCRATCH_TABLE)


def _in_this_process() -> AbstractContextManager[None]:
    """Keeps scratch tables here, unless the program has chosen servers: those of a file may not answer."""
    return nullcontext() if was_chosen() else embedded_for("recstore doctor")


def check_cpu() -> Finding:
    levels, forced = _native.simd_levels(), os.environ.get(SIMD_VARIABLE)
    found = f"{platform.machine()}, vector instructions: {', '.join(levels)}"
    if forced is None or forced == levels[-1]:
        return Finding("cpu", f"{found}; {levels[-1]} is used")
    advice = f"unset {SIMD_VARIABLE} to use {levels[-1]}; the results are the same"
    return Finding("cpu", f"{found}; {SIMD_VARIABLE} chooses {forced}", "warning", advice)


def check_threads() -> Finding:
    threads, usable, asked = torch.get_num_threads(), len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS")
    omp = f"OMP_NUM_THREADS={asked}" if asked else "OMP_NUM_THREADS is not set"
    found = f"torch uses {threads}; {usable} of {os.cpu_count()} cores are usable; {omp}"
    if threads > usable:
        return Finding("threads", found, "warning", f"torch.set_num_threads({usable}): threads that share a core wait")
    # torch counts cores, the system their hardware threads, of which there may be two a core.
    if threads * 2 < usable:
        advice = f"set OMP_NUM_THREADS={usable}, or torch.set_num_threads({usable}), unless other processes need them"
        return Finding("threads", found, "warning", advice)
    return Finding("threads", found)


def check_huge_pages() -> Finding:
    setting, tunables = _huge_page_setting(), os.environ.get("GLIBC_TUNABLES", "")
    found = f"transparent huge pages: {setting}; GLIBC_TUNABLES={tunables or '(not set)'}"
    tunable = "GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in the environment (glibc 2.35 or newer)"
    if setting == "never":
        advice = f"tables of gigabytes may read faster: echo madvise > {HUGE_PAGES} as root, and {tunable}"
        return Finding("huge pages", found, "warning", advice)
    if setting == "madvise" and "glibc.malloc.hugetlb=" not in tunables:
        return Finding("huge pages", found, "warning", f"tables of gigabytes may read faster: {tunable}")
    return Finding("huge pages", found)


def _huge_page_setting() -> str:
    """The word in brackets in `always [madvise] never`."""
    text = _read(HUGE_PAGES)
    return text[text.index("[") + 1 : text.index("]")] if "[" in text else "unknown"


def check_memory() -> Finding:
    total, available = (_memory_bytes(key) for key in ("MemTotal", "MemAvailable"))
    found = f"{available / _GIBIBYTE:.1f} of {total / _GIBIBYTE:.1f} GiB available"
    if _read(OVERCOMMIT).strip() == "2":
        advice = "a block of rows is reserved before it is used: sysctl vm.overcommit_memory=0, or a small block_size"
        return Finding("memory", f"{found}; the system refuses to overcommit", "warning", advice)
    if available < total / 20:
        return Finding("memory", found, "warning", "tables live in memory: free some before training")
    return Finding("memory", found)


def _memory_bytes(key: str) -> int:
    for line in _read(MEMORY).splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


def check_disk() -> Finding:
    """How rows of tables larger than memory come from the disk; the results are the same."""
    way = _native.disk_reading_way()
    if way == "io_uring":
        return Finding("disk", f"rows of tables larger than memory are read by {way}")
    advice = "reads of rows that are not in the page cache wait for each other: let this process call io_uring_setup"
    return Finding("disk", f"rows of tables larger than memory are read by {way}", "warning", advice)


def check_cuda() -> Finding:
    if not torch.cuda.is_available():
        return Finding("cuda", "none; tables need none")
    advice = "tables live in the host's memory: ids are copied there, and rows back"
    return Finding("cuda", f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}", advice=advice)


def check_fork() -> Finding:
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    found = f"worker processes start by {method}"
    if method == "fork":
        return Finding("dataloader", found, advice="a forked worker can read tables, but its updates are refused")
    advice = "a worker has no tables: let it prepare ids, and look them up in the training process"
    return Finding("dataloader", found, advice=advice)


def check_servers() -> Finding:
    """Whether the servers answer on which the configuration file has programs open their tables."""
    topic = "servers"
    try:
        path = find_config_file()
        chosen = None if path is None else _chosen_by(path)
    except (OSError, ValueError):
        return Finding(topic, "not tried: the configuration file is not valid", "warning", "mend it first")
    if path is None or chosen is None:
        return Finding(topic, "no configuration file chooses servers: tables live in the program's process")
    try:
        try_servers(path, chosen, _SECONDS_TO_ANSWER)
    except (OSError, ValueError) as error:
        advice = "start them, or programs below that folder fail; without distributed_client.servers they need none"
        return Finding(topic, str(error), "error", advice)
    return Finding(topic, f"{path} names {_named(chosen)}: all answer")


def _chosen_by(path: Path) -> ServerList | None:
    """The servers that a configuration file chooses.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not valid; `check_active_config` says why.
    """
    document = read_document(path)
    if problems := document_problems(document):
        raise ValueError(f"{path}: {problems[0]}")
    return chosen_servers(config_from_document(path, document))


def check_active_config() -> Finding:
    topic = "configuration"
    try:
        path = find_config_file()
    except ValueError as error:
        return Finding(topic, str(error), "error", "move it away, or name another file")
    if path is None:
        return Finding(topic, f"no {PATH_VARIABLE}, and no recstore_config.json here or above")
    errors = [finding for finding in examine_config(path) if finding.state == "error"]
    if errors:
        found = f"{path}: {errors[0].topic}: {errors[0].found}"
        return Finding(topic, found, "error", f"recstore doctor --config {path} names all problems")
    return Finding(topic, str(path), advice=f"recstore doctor --config {path} shows what it says")


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_torch,
    check_native_module,
    check_cpu,
    check_threads,
    check_huge_pages,
    check_memory,
    check_disk,
    check_cuda,
    check_fork,
    check_active_config,
    check_servers,
)


def examine_config(path: Path) -> list[Finding]:
    """Validates a configuration file: reports each problem by its path, or findings on tables, servers and programs."""
    try:
        document = read_document(path)
    except (OSError, ValueError) as error:
        return [Finding("file", str(error), "error", "give a JSON file")]
    problems = document_problems(document)
    if problems:
        return [Finding(problem.path or "file", problem.message, "error") for problem in problems]
    config = config_from_document(path, document)
    with _in_this_process():
        tables = [_examine_table(name, entry) for name, entry in config.embedding_tables.items()]
    return [*tables, *examine_servers(config), *_without_effect(config)]


def _examine_table(name: str, entry: TableEntry) -> Finding:
    """Opens such a table, for some values are only invalid together."""
    said = {key: value for key, value in vars(entry).items() if value is not None}
    topic, found = f"embedding_tables.{name}", ", ".join(f"{key} {value}" for key, value in said.items())
    try:
        Table(_SCRATCH_TABLE, entry.embedding_dim or 1, _scratch_config(entry))
    except ValueError as error:
        return Finding(topic, str(error), "error")
    operators.drop_table(_SCRATCH_TABLE)
    return Finding(topic, found or "the defaults")


def _scratch_config(entry: TableEntry) -> TableConfig:
    lr = DEFAULT_LR if entry.learning_rate is None else entry.learning_rate
    # Where the file has no number of ids, the program may.
    return TableConfig.of(entry.num_embeddings or 1, lr, options_of(entry))


def _without_effect(config: ConfigFile) -> list[Finding]:
    if not config.without_effect:
        return []
    advice = "tables live in this process, without servers: the keys may stay"
    return [Finding("without effect here", ", ".join(config.without_effect), "warning", advice)]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
