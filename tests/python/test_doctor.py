"""`recstore doctor`: what it finds on this machine, in files, and what it says of bad settings."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from warm_programs import output_of

from recstore_ops import _native, table_names
from recstore_ops.config.config_file import active_config
from recstore_ops.doctor import examination as doctor

pytestmark = pytest.mark.tier("quick")

Recstore = Callable[..., int]
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RECSTORE_CONFIG", raising=False)


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "recstore_config.json"
        path.write_text(text)
        return path

    return write


def test_this_installation_works(recstore: Recstore, capsys: pytest.CaptureFixture[str]) -> None:
    tables = table_names()
    assert recstore("doctor") == 0
    lines = capsys.readouterr().out.splitlines()
    topics = ["python", "torch", "native module", "cpu", "threads", "huge pages", "memory", "cuda", "dataloader"]
    assert all(any(topic in line for line in lines) for topic in topics)
    assert torch.__version__ in "\n".join(lines)
    assert "\x1b" not in "\n".join(lines), "plain where the output is no terminal"
    assert table_names() == tables


def test_json_has_the_same_findings(recstore: Recstore, capsys: pytest.CaptureFixture[str]) -> None:
    assert recstore("doctor", "--json") == 0
    findings = json.loads(capsys.readouterr().out)
    assert [finding["topic"] for finding in findings] == [finding.topic for finding in doctor.examine()]
    assert all(set(finding) == {"topic", "found", "state", "advice"} for finding in findings)
    assert all(finding["advice"] for finding in findings if finding["state"] == "warning")


def test_the_stable_abi_is_the_one_that_the_build_targets() -> None:
    build = REPOSITORY / "cxx_bridge" / "build.rs"
    if not build.exists():
        pytest.skip("the sources of the native module are not here")
    major, minor = map(int, doctor.STABLE_ABI_TARGET.split("."))
    assert f'"TORCH_TARGET_VERSION", "0x{major:02x}{minor:02x}' in build.read_text()


def test_a_native_module_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_row_after_one_step", lambda: 0.5)
    finding = doctor.check_native_module()
    assert (finding.state, "a step gave 0.5" in finding.found) == ("error", True)


def test_a_narrow_simd_level_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "simd_levels", lambda: ["baseline", "avx2"])
    monkeypatch.setenv("RECSTORE_SIMD", "baseline")
    finding = doctor.check_cpu()
    assert finding.state == "warning"
    assert "unset RECSTORE_SIMD to use avx2" in finding.advice
    monkeypatch.setenv("RECSTORE_SIMD", "avx2")
    assert doctor.check_cpu().state == "ok"


@pytest.mark.parametrize(
    ("threads", "usable", "advice"),
    [(4, 2, "torch.set_num_threads(2)"), (1, 4, "OMP_NUM_THREADS=4"), (2, 4, ""), (2, 2, ""), (1, 1, "")],
)
def test_threads_are_held_against_the_usable_cores(
    threads: int, usable: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(usable)))
    finding = doctor.check_threads()
    assert advice in finding.advice
    assert finding.state == ("warning" if advice else "ok")


@pytest.mark.parametrize(
    ("setting", "tunables", "state"),
    [
        ("[always] madvise never", "", "ok"),
        ("always [madvise] never", "", "warning"),
        ("always [madvise] never", "glibc.malloc.hugetlb=1", "ok"),
        ("always madvise [never]", "glibc.malloc.hugetlb=1", "warning"),
        (None, "", "ok"),
    ],
)
def test_huge_pages_need_the_systems_setting_and_glibcs(
    setting: str | None, tunables: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "enabled"
    if setting is not None:
        path.write_text(setting)
    monkeypatch.setattr(doctor, "HUGE_PAGES", path)
    monkeypatch.setenv("GLIBC_TUNABLES", tunables)
    assert doctor.check_huge_pages().state == state


@pytest.mark.parametrize(
    ("available", "overcommit", "state"),
    [(8_000_000, "0", "ok"), (100_000, "0", "warning"), (8_000_000, "2", "warning")],
)
def test_little_memory_and_strict_overcommit_are_warned_of(
    available: int, overcommit: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {
        "MEMORY": f"MemTotal:  16000000 kB\nMemAvailable: {available} kB\n",
        "OVERCOMMIT": f"{overcommit}\n",
    }.items():
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(doctor, name, tmp_path / name)
    assert doctor.check_memory().state == state


@pytest.mark.parametrize(("way", "state"), [("io_uring", "ok"), ("pread: RECSTORE_IO_URING is off", "warning")])
def test_the_way_of_reading_the_disk_is_named(way: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "disk_reading_way", lambda: way)
    finding = doctor.check_disk()
    assert finding.state == state
    assert way in finding.found


@pytest.mark.parametrize(("method", "advice"), [("fork", "updates are refused"), ("spawn", "a worker has no tables")])
def test_advice_on_workers_depends_on_how_they_start(method: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: method)
    assert advice in doctor.check_fork().advice


def test_an_invalid_active_configuration_is_an_error(
    recstore: Recstore, config: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = config('{"embedding_tables": {"user": {"optimzer": "sgd"}}}')
    assert recstore("doctor") == 1
    output = capsys.readouterr().out
    assert "embedding_tables.user.optimzer" in output
    assert f"recstore doctor --config {path}" in output


def test_a_configuration_file_is_validated_by_path(
    recstore: Recstore, config: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = config('{"embedding_tables": {"user": {"optimzer": 1, "seed": -1}}, "other": 2}')
    assert recstore("doctor", "--config", path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    for line, problem in zip(
        lines, ("user.seed", 'user.optimzer  unknown key; did you mean "optimizer"?', "other"), strict=True
    ):
        assert line.startswith("error")
        assert problem.split()[0] in line


def test_tables_and_keys_without_effect_are_listed(
    recstore: Recstore, config: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    tables = table_names()
    path = config('{"cache_ps": {}, "embedding_tables": {"user": {"embedding_dim": 8, "optimizer": "adam"}, "b": {}}}')
    assert recstore("doctor", "--config", path) == 0
    output = capsys.readouterr().out
    assert "embedding_tables.user  embedding_dim 8, optimizer adam" in output
    assert "embedding_tables.b" in output
    assert "without effect here    cache_ps" in output
    assert table_names() == tables


SERVERS = [{"host": "a", "port": 1, "shard": 0, "metrics_port": 9}, {"host": "b", "port": 2, "shard": 1}]


@pytest.mark.parametrize(
    ("sections", "lines"),
    [
        (
            {"cache_ps": {"servers": SERVERS, "data": "d", "durability": "wal", "token_file": "token"}},
            [
                r"recstore serve --shard 0 .*shard 0 of 2: listens on a:1, keeps its tables in \S+/d/shard-0-of-2, "
                r"durability wal, metrics at port 9, a token$",
                r"recstore serve --shard 1 .*shard 1 of 2: listens on b:2, keeps its tables in \S+/d/shard-1-of-2, "
                r"durability wal, a token$",
                r'programs .*keep their tables; set_ps_backend\("servers"\) means a:1, b:2, ids by city_hash',
            ],
        ),
        (
            {"distributed_client": {"servers": [{"port": 1, "shard": 0}], "hash_method": "simple_mod"}},
            [r"programs .*open their tables on 127.0.0.1:1, ids by simple_mod"],
        ),
        ({"cache_ps": {"servers": [{"port": 1, "shard": 0}]}}, [r"listens on 127.0.0.1:1, keeps its tables in memory"]),
        ({"cache_ps": {}}, [r"programs .*keep their tables: no servers are named"]),
    ],
)
def test_what_servers_and_programs_would_do_is_told(
    sections: dict[str, Any],
    lines: list[str],
    recstore: Recstore,
    config: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = config(json.dumps(sections))
    (path.parent / "token").write_text("secret")
    assert recstore("doctor", "--config", path) == 0
    output = capsys.readouterr().out
    for line in lines:
        assert re.search(line, output, re.MULTILINE), output


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"cache_ps": {"durability": "wal"}}, "--durability wal needs --data"),
        ({"cache_ps": {"staleness": 2}}, "staleness is for the consistency bounded, and this is asynchronous"),
        ({"cache_ps": {"token_file": "missing"}}, "missing"),
        ({"cache_ps": {"token_file": "empty"}}, "the token is empty"),
        ({"cache_ps": {"tls": {"certificate": "missing.pem", "key": "empty"}}}, "missing.pem"),
        ({"distributed_client": {"servers": [{"port": 0, "shard": 0}]}}, "shard 0 has the port 0"),
        ({"distributed_client": {"tls": {"ca": "missing.pem"}}}, "missing.pem"),
    ],
)
def test_what_starting_would_refuse_is_an_error(
    sections: dict[str, Any],
    message: str,
    recstore: Recstore,
    config: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = config(
        json.dumps({"cache_ps": {"servers": [{"port": 1, "shard": 0}], **sections.pop("cache_ps", {})}, **sections})
    )
    (path.parent / "empty").write_text("\n")
    assert recstore("doctor", "--config", path) == 1
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("error")]
    assert message in line


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('{"optimizer": {"kind": "ftrl", "beta": 0}}', "must not both be 0"),
        ('{"initializer": {"kind": "uniform", "a": 2}}', "initializer.a must not exceed initializer.b"),
        ('{"embedding_dim": 1000000, "block_size": 1000000}', "exceeds 1 GiB"),
    ],
)
def test_values_that_are_invalid_together_are_found(
    entry: str, message: str, recstore: Recstore, config: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(f'{{"embedding_tables": {{"user": {entry}}}}}')
    assert recstore("doctor", "--config", path) == 1
    assert message in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{", None])
def test_a_file_that_cannot_be_read_is_an_error(
    text: str | None, recstore: Recstore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "some.json"
    if text is not None:
        path.write_text(text)
    assert recstore("doctor", "--config", path) == 1
    assert "some.json" in capsys.readouterr().out


def closed_port() -> int:
    """A port on which no server listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def servers_down(config: Callable[[str], Path]) -> tuple[Path, str]:
    """A configuration file whose servers are down, and the address of one."""
    port = closed_port()
    servers = [{"port": port, "shard": 0}, {"port": closed_port(), "shard": 1}]
    return config(json.dumps({"distributed_client": {"servers": servers}})), f"127.0.0.1:{port}"


def test_servers_that_are_down_are_reported_with_the_file_that_names_them(
    recstore: Recstore, servers_down: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    path, address = servers_down
    assert recstore("doctor", "--json") == 1
    findings = {finding["topic"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert [topic for topic, finding in findings.items() if finding["state"] == "error"] == ["servers"]
    assert findings["servers"]["found"].startswith(f"{path} names servers: ")
    assert address in findings["servers"]["found"]
    assert "without distributed_client.servers" in findings["servers"]["advice"]
    assert recstore("doctor", "--config", path) == 0, "a file is valid whether its servers run or not"


def test_servers_are_tried_for_three_seconds(servers_down: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[Any, ...]] = []
    monkeypatch.setattr(_native, "try_servers", lambda *given: tried.append(given))
    path, _ = servers_down
    finding = doctor.check_servers()
    assert finding.state == "ok"
    assert re.fullmatch(rf"{path} names 127.0.0.1:\d+, 127.0.0.1:\d+, ids by city_hash: all answer", finding.found)
    [(servers, *others)] = tried
    assert [len(servers), *others] == [2, "city_hash", None, 3.0, None]


@pytest.mark.parametrize("text", [None, '{"cache_ps": {"servers": [{"port": 1, "shard": 0}]}}'])
def test_no_servers_are_tried_that_no_file_chooses(text: str | None, config: Callable[[str], Path]) -> None:
    if text is not None:
        config(text)
    finding = doctor.check_servers()
    assert (finding.state, "tables live in the program's process" in finding.found) == ("ok", True)


@pytest.mark.parametrize("text", ["{", '{"other": 1}'])
def test_of_a_broken_file_it_is_not_said_that_it_chooses_no_servers(text: str, config: Callable[[str], Path]) -> None:
    config(text)
    finding = doctor.check_servers()
    assert (finding.state, finding.found) == ("warning", "not tried: the configuration file is not valid")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_what_has_the_name_of_the_file_and_is_none_is_an_error(make: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "recstore_config.json"
    make(path)
    finding = doctor.check_active_config()
    assert (finding.state, finding.found.startswith(f"{path}: expected a configuration file")) == ("error", True)
    assert doctor.check_servers().state == "warning"
    with pytest.raises(ValueError, match="expected a configuration file, got a directory, a broken link"):
        active_config(reload=True)


FIRST_CALLS = {
    "DistEmbedding": "recstore_ops.DistEmbedding(None, 2, 't')",
    "table_names": "recstore_ops.table_names()",
    "an operator": "torch.ops.recstore.emb_read(torch.tensor([1]), 2)",
    "set_ps_backend": "recstore_ops.set_ps_backend('servers')",
    "a checkpoint": "recstore_ops.RecStoreClient().save('/nowhere')",
}


@pytest.mark.tier("test")
@pytest.mark.parametrize("call", FIRST_CALLS.values(), ids=FIRST_CALLS)
def test_a_program_is_told_which_file_names_the_servers_that_are_down(
    call: str, servers_down: tuple[Path, str]
) -> None:
    path, address = servers_down
    below = path.parent / "project" / "notebooks"
    below.mkdir(parents=True)
    program = f"""
import torch, recstore_ops
from recstore_ops.servers import choosing
choosing.set_ps_servers.__kwdefaults__["timeout"] = 0.2
try:
    {call}
except ConnectionError as error:
    print(error)
"""
    printed = output_of(program, cwd=below)
    assert printed.startswith(f"{path} names servers: ")
    assert address in printed
