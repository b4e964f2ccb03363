"""Checkpoints and directories of servers in which a file is a link, a FIFO or a directory, or has another byte."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import drop_all_tables, snapshots_of
from hostile_files import FOUND, HOSTILE, assert_untouched, make_outside, put_in_place, refusal, tree

from recstore_ops import (
    DistEmbedding,
    EmbeddingTableConfig,
    RecStoreClient,
    _native,
    checkpoint,
    forget,
    inspect_checkpoint,
    servers,
)
from recstore_ops.servers.resharding import reshard_directory
from recstore_ops.servers.workers import WorkerSync

pytestmark = [
    pytest.mark.tier("test"),
    pytest.mark.embedded_only("directories are those of tables of this process"),
]

IDS = torch.arange(40)
Durability = str


@pytest.fixture(autouse=True)
def _empty_store() -> Iterator[None]:
    drop_all_tables()
    yield
    servers.set_ps_backend("embedded")
    drop_all_tables()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two full snapshots and a delta."""
    drop_all_tables()  # Fixtures of a module come before those of a test.
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    table = DistEmbedding(None, 2, "user")
    for kind in ("full", "full", "delta"):
        table.weight[IDS[:20]] = torch.rand(20, 2)
        checkpoint.save(path, kind=kind, keep=9)
    drop_all_tables()
    return path


def save_all(path: Path) -> None:
    DistEmbedding(None, 2, "user").weight[IDS[:5]] = torch.rand(5, 2)
    checkpoint.save(path, kind="full")


def verify(path: Path) -> None:
    report = checkpoint.verify(path)
    if not report.is_sound:
        raise RuntimeError(str(report.findings))


def inspect(path: Path) -> None:
    inspect_checkpoint(path)


WRITING: dict[str, Callable[[Path], object]] = {
    "save": save_all,
    "compact": checkpoint.compact,
    "forget": lambda path: forget(path, "user", [3], progress=False),
    "prune": lambda path: checkpoint.prune(path, 1),
}
COMMANDS: dict[str, Callable[[Path], object]] = {
    **WRITING,
    "load": checkpoint.load,
    "verify": verify,
    "inspect": inspect,
}


def is_opened(command: str, name: str, rows: list[str]) -> bool:
    """Whether a command opens a file of the directory, or replaces it."""
    if name in (".lock", "manifest.new"):
        return command in WRITING
    if name == "manifest.json":
        return True
    newest = name in rows[1:]
    return {"save": False, "prune": not newest, "verify": True, "forget": True}.get(command, newest)


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_file_of_a_checkpoint(saved: Path, tmp_path: Path, command: str, kind: str) -> None:
    outside = make_outside(tmp_path / "outside")
    order = [snapshot["id"] for snapshot in snapshots_of(saved)]
    rows = sorted((path.name for path in saved.glob("*.safetensors")), key=lambda name: order.index(name[:16]))
    assert len(rows) == 3
    for name in [*rows, "manifest.json", "manifest.new", ".lock"]:
        path = Path(shutil.copytree(saved, tmp_path / "copy"))
        put_in_place(path / name, kind, outside)
        before = tree(path)
        said = refusal(lambda path=path: COMMANDS[command](path))
        if is_opened(command, name, rows):
            assert said is not None, f"{name}: it is not refused"
            assert name in said
            assert FOUND[kind] in said
            assert tree(path) == before
        else:
            assert said is None, said
        assert_untouched(outside)
        drop_all_tables()
        shutil.rmtree(path)


def test_a_checkpoint_by_a_link_is_the_callers_own(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "there")
    (tmp_path / "here").symlink_to(tmp_path / "there")
    for command in ("verify", "load", "compact", "prune"):
        COMMANDS[command](tmp_path / "here")
        drop_all_tables()
    assert (tmp_path / "here").is_symlink()


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.tier("all")), 29])
def test_a_flipped_byte_of_a_manifest_or_header_is_named(saved: Path, tmp_path: Path, step: int) -> None:
    path = Path(shutil.copytree(saved, tmp_path / "copy"))
    for file in [path / "manifest.json", *sorted(path.glob("*.safetensors"))]:
        whole = file.read_bytes()
        length = len(whole) if file.name == "manifest.json" else 8 + int.from_bytes(whole[:8], "little")
        for place in range(0, length, step):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
            said = refusal(lambda: verify(path))
            assert said is not None, place
            assert file.name in said, place
        file.write_bytes(whole)
    verify(path)


def server_on(path: Path, durability: Durability) -> _native.Server:
    return _native.Server(
        host="127.0.0.1",
        port=0,
        shard=0,
        num_shards=1,
        grpc_port=None,
        health_port=None,
        metrics_host="127.0.0.1",
        metrics_port=None,
        max_connections=8,
        token=None,
        tls=None,
        insecure=False,
        directory=str(path),
        durability=durability,
        workers=WorkerSync(),
        follow=None,
        synchronous=False,
    )


def start(path: Path, durability: Durability) -> None:
    """Starts a server on the directory of its shard, has it save, and stops it."""
    server = server_on(path, durability)
    try:
        server.checkpoint()
    finally:
        server.stop()


@pytest.fixture(scope="module", params=["checkpoint", "wal"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Durability]:
    """The directory of a server's data, and how it is kept."""
    data = tmp_path_factory.mktemp("served") / "data"
    durability = request.param
    server = server_on(data / "shard-0-of-1", durability)
    servers.set_ps_servers([server.address])
    client = RecStoreClient()
    client.init_embedding_table("user", EmbeddingTableConfig(None, 2, optimizer="sgd"))
    client.push("user", IDS, torch.rand(40, 2))
    server.checkpoint()
    client.push("user", IDS[:10], torch.rand(10, 2))
    if durability == "checkpoint":
        server.checkpoint()
    servers.set_ps_backend("embedded")
    server.stop()
    return data, durability


def names_of(shard: Path) -> list[str]:
    return [str(path.relative_to(shard)) for path in sorted(shard.rglob("*"))]


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("command", ["start", "forget", "reshard"])
def test_every_file_of_a_servers_directory(
    served: tuple[Path, Durability], tmp_path: Path, command: str, kind: str
) -> None:
    data, durability = served
    outside = make_outside(tmp_path / "outside")
    commands: dict[str, Callable[[Path], object]] = {
        "start": lambda copy: start(copy / "shard-0-of-1", durability),
        "forget": lambda copy: forget(copy, "user", [3], progress=False),
        "reshard": lambda copy: reshard_directory(copy, copy, 2),
    }
    for name in names_of(data / "shard-0-of-1"):
        copy = Path(shutil.copytree(data, tmp_path / "copy"))
        shard = copy / "shard-0-of-1"
        if (shard / name).is_dir() and kind == "directory":
            shutil.rmtree(copy)
            continue
        put_in_place(shard / name, kind, outside)
        said = refusal(lambda copy=copy: commands[command](copy))
        # What only a save locks is not opened by who reads.
        if not (command == "reshard" and name.endswith(".lock")):
            assert said is not None, f"{name}: it is not refused"
            assert str(shard / name) in said
        assert_untouched(outside)
        shutil.rmtree(copy)


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.tier("all")), 37])
def test_a_flipped_byte_of_what_a_server_says_of_itself_ends_in_a_sentence(
    served: tuple[Path, Durability], tmp_path: Path, step: int
) -> None:
    data, durability = served
    copy = Path(shutil.copytree(data, tmp_path / "copy")) / "shard-0-of-1"
    whole = tree(copy)
    headers = {"recstore-shard.json": 1 << 20, "incarnation": 64}
    headers.update({name: 16 for name in whole if name.endswith(".log")})
    for name, most in headers.items():
        content = whole.get(name)
        if not isinstance(content, bytes):
            continue
        for place in range(0, min(len(content), most), step):
            (copy / name).write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
            said = refusal(lambda: start(copy, durability))
            assert said is None or name in said, said
            shutil.rmtree(copy)
            shutil.copytree(data / "shard-0-of-1", copy)
