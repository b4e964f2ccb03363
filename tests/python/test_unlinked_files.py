"""What saves, prunes and servers remove is listed by a manifest or a note of theirs: watched from the C library."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recstore_ops import DistEmbedding, checkpoint

pytestmark = [
    pytest.mark.tier("test"),
    pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler"),
]

WATCHER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void say(const char *what, const char *path) {
    char line[8192], full[4096];
    int length, file = open(getenv("WATCHED"), O_WRONLY | O_APPEND | O_CREAT, 0600);
    if (file < 0) abort();
    if (path[0] == '/') full[0] = 0;
    else if (getcwd(full, sizeof full) == NULL) abort();
    else strcat(full, "/");
    length = snprintf(line, sizeof line, "%s %s%s\n", what, full, path);
    if (write(file, line, length) != length) abort();
    close(file);
}

/* Keeps what a manifest or a note says when it gets its name. */
static void keep(const char *path) {
    static int number;
    char name[4096], buffer[65536];
    ssize_t count;
    snprintf(name, sizeof name, "%s.%d.%d", getenv("WATCHED"), (int)getpid(), number++);
    int from = open(path, O_RDONLY), to = open(name, O_WRONLY | O_CREAT, 0600);
    if (from < 0 || to < 0) abort();
    while ((count = read(from, buffer, sizeof buffer)) > 0)
        if (write(to, buffer, count) != count) abort();
    close(from);
    close(to);
}

int unlink(const char *path) {
    say("unlink", path);
    return ((int (*)(const char *))dlsym(RTLD_NEXT, "unlink"))(path);
}

/* The whole path of a name in a directory that is open. */
static const char *whole(int directory, const char *name, char *full, size_t room) {
    char link[64];
    if (directory == AT_FDCWD || name[0] == '/') return name;
    snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
    ssize_t length = readlink(link, full, room);
    if (length < 0) abort();
    snprintf(full + length, room - length, "/%s", name);
    return full;
}

int unlinkat(int directory, const char *path, int flags) {
    char full[4096];
    if (!(flags & AT_REMOVEDIR)) say("unlink", whole(directory, path, full, sizeof full));
    return ((int (*)(int, const char *, int))dlsym(RTLD_NEXT, "unlinkat"))(directory, path, flags);
}

static void renamed(const char *from, const char *to) {
    const char *end = strrchr(to, '.');
    if (end != NULL && strcmp(end, ".json") == 0) keep(from);
    say("rename", to);
}

int renameat(int old, const char *from, int new, const char *to) {
    char before[4096], after[4096];
    renamed(whole(old, from, before, sizeof before), whole(new, to, after, sizeof after));
    return ((int (*)(int, const char *, int, const char *))dlsym(RTLD_NEXT, "renameat"))(old, from, new, to);
}

int rename(const char *from, const char *to) {
    renamed(from, to);
    return ((int (*)(const char *, const char *))dlsym(RTLD_NEXT, "rename"))(from, to);
}
"""

PROGRAM = """
import sys
from pathlib import Path
import torch
from recstore_ops import _native, EmbeddingTableConfig, RecStoreClient, DistEmbedding, checkpoint, servers
from recstore_ops.servers.resharding import reshard_directory
from recstore_ops.servers.workers import WorkerSync

root = Path(sys.argv[1])
ids = torch.arange(300)
table = DistEmbedding(None, 4, "t")

def change():
    table.weight[ids[:50]] = torch.rand(50, 4)

saved = root / "saved"
for kind, compression in [("full", None), ("delta", None), ("delta", "zstd"), ("full", None), ("auto", None)]:
    change()
    checkpoint.save(saved, kind=kind, keep=2, compression=compression)
checkpoint.compact(saved)
for _ in range(2):
    change()
    checkpoint.save_async(saved, keep=3).result()
checkpoint.prune(saved, keep=1)
(saved / "manifest.new").mkdir()
change()
try:
    checkpoint.save(saved)
    raise SystemExit("a save without room for its manifest")
except RuntimeError:
    (saved / "manifest.new").rmdir()
checkpoint.save(saved, replace=True)

def serve(durability):
    server = _native.Server(
        host="127.0.0.1", port=0, shard=0, num_shards=1, grpc_port=None, health_port=None, metrics_host="127.0.0.1",
        metrics_port=None, max_connections=8, token=None, tls=None, insecure=False,
        directory=str(root / "data" / "shard-0-of-1"), durability=durability, workers=WorkerSync(),
        follow=None, synchronous=False,
    )
    servers.set_ps_servers([server.address])
    client = RecStoreClient()
    client.init_embedding_table("t", EmbeddingTableConfig(None, 4, optimizer="sgd"))
    for _ in range(3):
        client.push("t", ids, torch.rand(300, 4))
        server.checkpoint()
    servers.set_ps_backend("embedded")
    server.stop()
    server.checkpoint()

for durability in ("checkpoint", "wal", "checkpoint"):
    serve(durability)
for shards in (2, 1):
    reshard_directory(root / "data", root / "data", shards)
serve("wal")
"""

FOREIGN = ("0123456789abcdef-000-t.safetensors", "0123456789abcdef-unfinished.json", "notes.txt", "0123.log", "x.new")
"""Files of other programs, some of which look like those of a save."""

OWN = re.compile(
    r"\.lock|lock|(manifest|recstore-shard|recstore-saves)\.(json|new)|moves\.(json|new)|[0-9a-f]{16}\.log|"
    r"[0-9a-f]{16}(-\S+)?-unfinished\.(json|new)"
)
"""What has a name that only the store gives, in a directory that is its own."""


def listed_names(texts: list[str]) -> set[str]:
    """The files that manifests, notes and parts list."""
    names = set[str]()
    for text in texts:
        document = json.loads(text)
        names.update(document.get("files", ()))
        tables = [table for snapshot in document.get("snapshots", ()) for table in snapshot["tables"]]
        names.update(shard["file"] for table in tables for shard in table["shards"])
    return names


def test_only_what_a_manifest_or_a_note_lists_is_removed(tmp_path: Path) -> None:
    watcher, watched, root = tmp_path / "watcher.so", tmp_path / "watched", tmp_path / "root"
    (tmp_path / "watcher.c").write_text(WATCHER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", watcher, tmp_path / "watcher.c", "-ldl"], check=True)
    (root / "data" / "shard-0-of-1").mkdir(parents=True)
    (root / "saved").mkdir()
    environment = {**os.environ, "LD_PRELOAD": str(watcher), "WATCHED": str(watched)}
    # There is a manifest already: without one such files would be refused.
    DistEmbedding(None, 4, "removals").weight[[1]] = torch.ones(1, 4)
    checkpoint.save(root / "saved")
    for name in FOREIGN:
        (root / "saved" / name).write_text("of another program")
    for name in FOREIGN[2:]:
        (root / "data" / "shard-0-of-1" / name).write_text("of another program")
    command = [sys.executable, "-c", PROGRAM, str(root)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 1) for line in watched.read_text().splitlines()]
    removed = [Path(path) for what, path in lines if what == "unlink" and Path(path).is_relative_to(root)]
    texts = [path.read_text() for path in tmp_path.glob("watched.*")]
    listed = listed_names(texts)
    assert len(removed) > 30
    assert [path for path in removed if path.name not in listed and not OWN.fullmatch(path.name)] == []
    assert all((root / "saved" / name).read_text() == "of another program" for name in FOREIGN)
    moved = root / "data" / "before-reshard-1" / "shard-0-of-1"
    assert all((moved / name).read_text() == "of another program" for name in FOREIGN[2:])
