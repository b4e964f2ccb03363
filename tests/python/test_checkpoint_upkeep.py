"""`checkpoint.verify` and `checkpoint.prune`, and the commands of these names."""

from __future__ import annotations

import fcntl
import json
import os
import random
import resource
import signal
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import assert_same, contents, drop_all_tables, snapshots_of, write_manifest

from recstore_ops import DistEmbedding, RecStoreClient, SparseOptimizer, checkpoint

pytestmark = pytest.mark.tier("quick")

METADATA = {"text": 'a "checksum": "00000000" \\ é \u2028', "floats": [0.1, 1e-300, -0.0], "ints": [2**63, -(2**63)]}


@pytest.fixture(autouse=True)
def _empty_store() -> Iterator[None]:
    drop_all_tables()
    yield
    drop_all_tables()


def content_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def save_some(path: Path, compression: checkpoint.Compression = None) -> list[str]:
    """Saves two full snapshots, each with a delta, of tables of several kinds; returns their names."""
    options = {"admission": {"kind": "count", "threshold": 2}, "eviction": {"ttl": 100}}
    modules = [
        DistEmbedding(None, 4, "user", optimizer="adam", **options),  # type: ignore[arg-type]
        DistEmbedding(None, 3, "item", optimizer="ftrl", dtype=torch.bfloat16),
        DistEmbedding(None, 2, "empty"),
    ]
    optimizer, names = SparseOptimizer(modules=modules), []
    for number, kind in enumerate(["full", "delta", "full", "delta"]):
        for module in modules[:2]:
            module(torch.arange(number * 40, number * 40 + 90)).sum().backward()
        optimizer.step()
        saved = checkpoint.save(path, kind=kind, keep=9, metadata=METADATA, compression=compression)  # type: ignore[arg-type]
        names.append(saved.snapshot)
    return names


def problems(path: Path) -> list[tuple[str, str, str]]:
    return [(finding.kind, finding.file, finding.message) for finding in checkpoint.verify(path).findings]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_what_was_saved_is_sound(tmp_path: Path, compression: checkpoint.Compression) -> None:
    save_some(tmp_path, compression)
    report = checkpoint.verify(tmp_path)
    files = list(tmp_path.glob("*.safetensors*"))
    assert (report.snapshots, report.files) == (4, len(files))
    assert report.bytes == sum(file.stat().st_size for file in files)
    assert report.findings == []
    assert report.is_sound


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_changed_byte_is_found_wherever_it_is(tmp_path: Path, compression: checkpoint.Compression) -> None:
    save_some(tmp_path, compression)
    files, generator = sorted(tmp_path.glob("*.safetensors*")), random.Random(1)
    for _ in range(150):
        file = generator.choice(files)
        before = file.read_bytes()
        place = generator.randrange(len(before))
        file.write_bytes(before[:place] + bytes([before[place] ^ 1 << generator.randrange(8)]) + before[place + 1 :])
        found = problems(tmp_path)
        # A frame of zstd has bits that say nothing of the content.
        assert [entry[:2] for entry in found] == [("damaged", file.name)] or (compression and not found), place
        file.write_bytes(before)


def test_each_kind_of_damage_is_told(tmp_path: Path) -> None:
    save_some(tmp_path)
    cut, longer, gone, fifo, folder = sorted(tmp_path.glob("*.safetensors"))[:5]
    size = cut.stat().st_size
    cut.write_bytes(cut.read_bytes()[:-1])
    longer.write_bytes(longer.read_bytes() + b"x")
    gone.unlink()
    fifo.unlink()
    os.mkfifo(fifo)
    folder.unlink()
    folder.mkdir()
    (tmp_path / "notes.txt").touch()
    left = "0123456789abcdef-0-user.safetensors"
    (tmp_path / left).touch()
    found = {file: (kind, message) for kind, file, message in problems(tmp_path)}
    assert found == {
        cut.name: ("damaged", f"expected {size} bytes, got {size - 1}"),
        longer.name: ("damaged", f"expected {longer.stat().st_size - 1} bytes, got {longer.stat().st_size}"),
        gone.name: ("missing", "the manifest lists it"),
        fifo.name: ("damaged", "it is a FIFO, not a regular file"),
        folder.name: ("damaged", "it is a directory, not a regular file"),
        "notes.txt": ("unexplained", "the manifest does not list it"),
        left: ("unexplained", "the manifest does not list it"),
    }
    assert not checkpoint.verify(tmp_path).is_sound


def test_files_that_explain_nothing_harm_nothing(tmp_path: Path) -> None:
    save_some(tmp_path)
    (tmp_path / "notes.txt").touch()
    assert checkpoint.verify(tmp_path).is_sound


CHANGED_ENTRIES: list[tuple[Callable[[dict[str, int]], object], str]] = [
    (lambda sums: sums.pop("rows"), 'the manifest has no checksum of "rows"'),
    (lambda sums: sums.update(more=1), 'the tensor "more" is missing'),
    (lambda sums: sums.update(rows=1), '"rows" was changed: its checksum is '),
    (lambda sums: sums.update(header=1), '"header" was changed: its checksum is '),
]


@pytest.mark.parametrize(("change", "message"), CHANGED_ENTRIES)
def test_a_manifest_that_tells_otherwise_is_told(
    tmp_path: Path, change: Callable[[dict[str, int]], object], message: str
) -> None:
    save_some(tmp_path)
    snapshots = snapshots_of(tmp_path)
    change(snapshots[0]["tables"][0]["shards"][0]["checksums"])
    write_manifest(tmp_path, snapshots)
    [(kind, _, said)] = problems(tmp_path)
    assert (kind, said.startswith(message)) == ("damaged", True)


def with_tensor(tmp_path: Path, header: bytes, rest: bytes, length: int | None = None) -> str:
    """What is said of a file of these bytes whose checksums are right."""
    save_some(tmp_path)
    snapshots = snapshots_of(tmp_path)
    entry = snapshots[0]["tables"][0]["shards"][0]
    text = (len(header) if length is None else length).to_bytes(8, "little") + header + rest
    (tmp_path / entry["file"]).write_bytes(text)
    entry["bytes"], entry["checksums"] = len(text), {"header": zlib.crc32(header), "a": zlib.crc32(b"abcd")}
    write_manifest(tmp_path, snapshots)
    [(kind, _, message)] = problems(tmp_path)
    assert kind == "damaged"
    return message


def tensor(begin: int, end: int) -> bytes:
    return f'{{"a":{{"dtype":"U8","shape":[4],"data_offsets":[{begin},{end}]}}}}'.encode()


@pytest.mark.parametrize(
    ("header", "rest", "length", "message"),
    [
        (tensor(0, 4), b"abcde", None, "expected 4 bytes behind the header, got 5"),
        (tensor(0, 4), b"abc", None, "expected 4 bytes behind the header, got 3"),
        (tensor(1, 5), b"abcd", None, "invalid offset for tensor `a`"),
        (tensor(0, -4), b"abcd", None, "invalid value: integer `-4`"),
        (tensor(0, 3), b"abc", None, "invalid shape, data type, or offset for tensor"),
        (b'{"a":{"data_offsets":[0,4]}}', b"abcd", None, "missing field `dtype`"),
        (b'{"a":3}', b"abcd", None, "invalid type: integer `3`"),
        (b"{", b"abcd", None, "EOF while parsing an object"),
        (b"[]", b"abcd", None, "invalid type: sequence"),
        (b"{}", b"abcd", 2**63, f"the header cannot have {2**63} bytes"),
    ],
)
def test_a_hostile_file_is_damaged(
    tmp_path: Path, header: bytes, rest: bytes, length: int | None, message: str
) -> None:
    assert message in with_tensor(tmp_path, header, rest, length)


@pytest.mark.parametrize("work", [checkpoint.verify, lambda path: checkpoint.prune(path, 1)])
def test_a_manifest_that_is_none_is_named(tmp_path: Path, work: Callable[[Path], object]) -> None:
    with pytest.raises(RuntimeError, match="there is no checkpoint here"):
        work(tmp_path)
    save_some(tmp_path)
    manifest = tmp_path / "manifest.json"
    text, files = manifest.read_bytes(), content_of(tmp_path)
    for content, message in [
        (b"{", "EOF while parsing an object"),
        (b"[]", "it is no manifest of a checkpoint"),
        (b"{}", "it is no manifest of a checkpoint"),
        (
            text.replace(b'"version": 2', b'"version": 3'),
            "this release reads the versions 1 to 2, the checkpoint has 3",
        ),
        (text.replace(b'"dim": 4', b'"dim": 5'), "it was changed: its checksum is another"),
    ]:
        manifest.write_bytes(content)
        with pytest.raises(RuntimeError, match=message) as caught:
            work(tmp_path)
        assert str(manifest) in str(caught.value)
        assert content_of(tmp_path) == {**files, manifest.name: content}
    snapshots = json.loads(text)["snapshots"]
    snapshots[0]["tables"][0]["shards"][0]["file"] = "../outside.safetensors"
    write_manifest(tmp_path, snapshots)
    with pytest.raises(RuntimeError, match=r'"\.\./outside\.safetensors" is not the name of a file of a checkpoint'):
        work(tmp_path)
    snapshots[0]["tables"] = 3
    write_manifest(tmp_path, snapshots)
    with pytest.raises(RuntimeError, match="it is no manifest of a checkpoint"):
        work(tmp_path)


def test_a_missing_parent_is_told(tmp_path: Path) -> None:
    first = save_some(tmp_path)[0]
    snapshots = snapshots_of(tmp_path)[1:]
    write_manifest(tmp_path, snapshots)
    assert (
        "damaged",
        "manifest.json",
        f"the snapshot {snapshots[0]['id']} follows {first}, which is missing",
    ) in problems(tmp_path)


def test_pruning_removes_what_the_manifest_lists_and_nothing_else(tmp_path: Path) -> None:
    names = save_some(tmp_path, "zstd")
    before = [contents(table) for table in ("user", "item", "empty")]
    foreign = ["notes.txt", "0123456789abcdef-0-user.safetensors", f"{names[0]}-9-user.safetensors.zst"]
    for name in foreign:
        (tmp_path / name).touch()
    listed = {file.name for file in tmp_path.glob("*.zst") if file.name[:16] in names[:2]} - set(foreign)
    files = content_of(tmp_path)
    report = checkpoint.prune(tmp_path, 1)
    assert (report.snapshots, report.kept) == (names[:2], names[2:])
    assert set(report.files) == listed
    assert content_of(tmp_path).keys() == files.keys() - listed
    assert [finding.file for finding in checkpoint.verify(tmp_path).findings] == sorted(foreign)
    drop_all_tables()
    assert checkpoint.load(tmp_path).metadata == METADATA
    for table, expected in zip(("user", "item", "empty"), before, strict=True):
        assert_same(contents(table), expected)
    RecStoreClient().push("item", torch.tensor([7]), torch.ones(1, 3))
    assert checkpoint.save(tmp_path, kind="delta").is_delta


def test_pruning_keeps_what_a_save_keeps(tmp_path: Path) -> None:
    names = save_some(tmp_path)
    before = content_of(tmp_path)
    assert checkpoint.prune(tmp_path, 2).snapshots == []
    assert checkpoint.prune(tmp_path, 99).kept == names
    assert content_of(tmp_path) == before
    saved = checkpoint.save(tmp_path, keep=2)
    report = checkpoint.prune(tmp_path, 2)
    assert (report.snapshots, report.kept) == ([], [*names[2:], saved.snapshot])


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    names = save_some(tmp_path)
    before = content_of(tmp_path)
    report = checkpoint.prune(tmp_path, 1, dry_run=True)
    assert report.snapshots == names[:2]
    assert content_of(tmp_path) == before
    assert checkpoint.prune(tmp_path, 1) == report


def test_what_goes_is_told_before_it_does(tmp_path: Path) -> None:
    save_some(tmp_path)

    def stop(plan: checkpoint.PruneReport) -> None:
        assert all((tmp_path / name).exists() for name in plan.files)
        raise KeyboardInterrupt

    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        checkpoint.prune(tmp_path, 1, on_plan=stop)
    assert sorted(tmp_path.iterdir()) == before
    assert checkpoint.verify(tmp_path).is_sound
    checkpoint.save(tmp_path)  # The lock is free again.


def test_nobody_prunes_while_somebody_saves(tmp_path: Path) -> None:
    save_some(tmp_path)
    with (tmp_path / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match="another process or store is saving to it"):
            checkpoint.prune(tmp_path, 1)
        assert checkpoint.prune(tmp_path, 1, dry_run=True).snapshots
        assert checkpoint.verify(tmp_path).is_sound

    def save(_: object) -> None:
        with pytest.raises(RuntimeError, match="another process or store is saving to it"):
            checkpoint.save(tmp_path)

    checkpoint.prune(tmp_path, 1, on_plan=save)


def test_a_manifest_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    save_some(tmp_path)
    before, (soft, hard) = content_of(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    # As on a disk that is full.
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: .*manifest\.new"):
            checkpoint.prune(tmp_path, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert content_of(tmp_path) == before


@pytest.mark.parametrize("keep", [0, -1, True, 1.0, None])
def test_bad_arguments_are_refused(tmp_path: Path, keep: object) -> None:
    with pytest.raises(ValueError, match="keep must be an int of at least 1, got "):
        checkpoint.prune(tmp_path, keep)  # type: ignore[arg-type]
    for work, name in ((checkpoint.verify, "verify"), (lambda path: checkpoint.prune(path, 1), "prune")):
        with pytest.raises(ValueError, match=f"{name} needs a directory, got s3://bucket"):
            work("s3://bucket")


def test_the_commands_say_what_was_found(
    tmp_path: Path, recstore: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    names = save_some(tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert recstore("checkpoint", "verify", tmp_path) == 0
    assert capsys.readouterr().out.endswith(": sound\n")
    assert recstore("checkpoint", "prune", tmp_path, "--keep", 1, "--dry-run") == 0
    told = capsys.readouterr().out.splitlines()
    assert told[:2] == [f"would remove snapshot {name}" for name in names[:2]]
    assert told[-1] == f"{tmp_path}: 2 snapshots stay, 2 would go"
    assert sorted(tmp_path.glob("*.safetensors")) == files
    assert recstore("checkpoint", "prune", tmp_path, "--keep", 1) == 0
    assert capsys.readouterr().out.splitlines() == [
        *(line.replace("would remove", "removes") for line in told[:-1]),
        f"{tmp_path}: 2 snapshots stay, 2 are gone",
    ]
    gone = next(iter(tmp_path.glob("*.safetensors")))
    gone.unlink()
    assert recstore("checkpoint", "verify", tmp_path) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"missing: {gone.name}: the manifest lists it"
    assert told[-1].endswith(": not sound")
    for command in (("verify", tmp_path / "none"), ("prune", tmp_path / "none", "--keep", "1")):
        assert recstore("checkpoint", *command) == 2
        assert "there is no checkpoint here" in capsys.readouterr().err
    assert recstore("checkpoint", "prune", tmp_path, "--keep", "0") == 2
    assert recstore("checkpoint", "prune", tmp_path) == 2
