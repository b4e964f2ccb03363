"""`forget` on checkpoints, runs and bundles: no byte of an id or its row stays, and no other bit changes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Contents, assert_same, contents, drop_all_tables, snapshots_of
from forgotten import bytes_of_rows, distinctive_ids, files, holders
from torch import Tensor, nn
from warm_recstore import run_recstore

import recstore_ops
from recstore_ops import DistEmbedding, SparseOptimizer, checkpoint, forget
from recstore_ops.forgetting import ForgetReport, places
from recstore_ops.ops import operators
from recstore_ops.serving.manifest import Manifest

pytestmark = [
    pytest.mark.tier("test"),
    pytest.mark.embedded_only("checkpoints are compared with tables of this process"),
]

SLOTS = ("exp_avg", "exp_avg_sq")
IDS = distinctive_ids(300)
GONE = IDS[[5, 120, 250]]


@pytest.fixture(autouse=True)
def _empty_store() -> Iterator[None]:
    drop_all_tables()
    yield
    drop_all_tables()


def step(modules: list[DistEmbedding], optimizer: SparseOptimizer, ids: Tensor, seed: int = 0) -> None:
    """A step with gradients that differ from element to element."""
    torch.manual_seed(seed)
    for module in modules:
        rows = module(ids)
        (rows * torch.randn_like(rows)).sum().backward()
    optimizer.step()


def opened(name: str, dim: int = 8, **options: Any) -> DistEmbedding:
    options = {"optimizer": "adam", "initializer": {"kind": "normal", "std": 1.0}, **options}
    return DistEmbedding(None, dim, name, **options)


def save(directory: Path, kind: checkpoint.SaveKind, **options: Any) -> str:
    return checkpoint.save(directory, kind=kind, keep=9, metadata={"epoch": 3}, **options).snapshot


def save_chain(directory: Path, **options: Any) -> list[bytes]:
    """Saves two full snapshots, each with a delta; the last deletes an id. Returns all rows that `GONE` had."""
    modules = [opened("user"), opened("item", dtype=torch.bfloat16)]
    optimizer, rows = SparseOptimizer(modules=modules), []
    for number, kind in enumerate(["full", "delta", "full", "delta"]):
        step(modules, optimizer, IDS[: 200 + 30 * number], number)
        if number == 3:
            operators.hashtable_delete(modules[0].table.handle, GONE[:1])
        save(directory, kind, **options)  # type: ignore[arg-type]
        there = GONE[torch.isin(GONE, operators.hashtable_ids(modules[0].table.handle))]
        rows += bytes_of_rows("user", there, SLOTS)
    return rows


def loaded(directory: Path) -> dict[str, Contents]:
    drop_all_tables()
    found = checkpoint.load(directory)
    assert found.metadata == {"epoch": 3}
    return {name: contents(name) for name in found.tables}


def without(expected: Contents, gone: Tensor) -> Contents:
    """What a table has once ids were deleted."""
    ids, rows, slots, statistics = expected
    stays = ~torch.isin(ids, gone)
    deleted = int((~stays).sum())
    changed = {
        "rows": statistics["rows"] - deleted,
        "deletes": statistics["deletes"] + deleted,
        "resident_rows": statistics["resident_rows"] - deleted,
        "hash_ids": statistics["hash_ids"] - deleted,
    }
    kept = {name: values[stays] for name, values in slots.items()}
    return ids[stays], rows[stays], kept, statistics | changed


def only_snapshots(directory: Path) -> list[tuple[str, str | None]]:
    return [(snapshot["id"], snapshot["parent"]) for snapshot in snapshots_of(directory)]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_no_byte_of_an_id_or_its_rows_stays_in_a_checkpoint(
    tmp_path: Path, compression: checkpoint.Compression
) -> None:
    rows = save_chain(tmp_path, compression=compression)
    before = loaded(tmp_path)
    assert len(holders(tmp_path, GONE, rows)) > 3
    report = forget(tmp_path, ["user", "item"], [*GONE.tolist(), *GONE.tolist()])
    assert report.ids == tuple(sorted(GONE.tolist()))
    assert (report.is_forgotten, report.not_found, report.dry_run) == (True, (), False)
    [place] = report.places
    assert (place.kind, place.rows, len(place.snapshots)) == ("checkpoint", 5, 4)
    assert {held.what for held in place.held} == {"rows", "deleted ids"}
    assert holders(tmp_path, GONE, rows) == set()
    [(name, parent)] = only_snapshots(tmp_path)
    assert name not in place.snapshots
    assert parent is None
    assert all(path.suffix == (".zst" if compression else ".safetensors") for path in tmp_path.glob("*.safetensors*"))
    after = loaded(tmp_path)
    for table, expected in before.items():
        assert_same(after[table], without(expected, GONE))
    assert checkpoint.verify(tmp_path).findings == []


def test_forgetting_again_changes_nothing(tmp_path: Path) -> None:
    save_chain(tmp_path)
    forget(tmp_path, "user", GONE)
    before = files(tmp_path)
    report = forget(tmp_path, "user", GONE)
    assert report.not_found == report.ids
    assert report.is_forgotten
    assert str(report.places[0]) == f"{tmp_path}, checkpoint: holds none of the ids"
    assert files(tmp_path) == before


def test_another_table_keeps_its_rows_of_the_same_ids(tmp_path: Path) -> None:
    save_chain(tmp_path)
    before = loaded(tmp_path)
    assert forget(tmp_path, "user", GONE).is_forgotten
    after = loaded(tmp_path)
    assert_same(after["item"], before["item"])
    assert_same(after["user"], without(before["user"], GONE))


def test_snapshots_without_the_ids_stay(tmp_path: Path) -> None:
    module = opened("user")
    optimizer = SparseOptimizer(modules=[module])
    step([module], optimizer, IDS[:5])
    early = save(tmp_path, "full")
    step([module], optimizer, IDS[:9])
    with_it = [save(tmp_path, "full"), save(tmp_path, "delta")]
    report = forget(tmp_path, "user", IDS[7:8])
    assert report.places[0].snapshots == with_it
    assert [name for name, _ in only_snapshots(tmp_path)][:-1] == [early]


def test_a_newest_snapshot_without_the_ids_stays_as_it_is(tmp_path: Path) -> None:
    module = opened("user")
    step([module], SparseOptimizer(modules=[module]), IDS[:9])
    old = save(tmp_path, "full")
    operators.hashtable_delete(module.table.handle, IDS[7:8])
    new = save(tmp_path, "full")
    report = forget(tmp_path, "user", IDS[7:8])
    assert (report.places[0].snapshots, report.places[0].rows, report.not_found) == ([old], 0, ())
    assert only_snapshots(tmp_path) == [(new, None)]
    assert holders(tmp_path, IDS[7:8]) == set()


def test_a_store_that_has_the_ids_still_writes_no_delta_onto_it(tmp_path: Path) -> None:
    module = opened("user")
    step([module], SparseOptimizer(modules=[module]), IDS[:9])
    save(tmp_path, "full")
    forget(tmp_path, "user", IDS[7:8])
    with pytest.raises(RuntimeError, match="a delta must follow the last save or load"):
        save(tmp_path, "delta")


ADMISSIONS = [
    {"kind": "count", "threshold": 5},
    {"kind": "sketch", "threshold": 5, "epsilon": 1e-3, "delta": 1e-3},
]


@pytest.mark.parametrize("admission", ADMISSIONS, ids=lambda admission: admission["kind"])
def test_what_admission_counted_is_forgotten(tmp_path: Path, admission: dict[str, Any]) -> None:
    module = opened("user", optimizer="sgd", admission=admission)
    optimizer = SparseOptimizer(modules=[module])
    for _ in range(3):
        step([module], optimizer, IDS[:20])
    save(tmp_path, "full")
    gone, other = IDS[4:5], IDS[5:6]
    report = forget(tmp_path, "user", gone)
    what = "counts" if admission["kind"] == "count" else "a sketch"
    assert [held.what for held in report.places[0].held] == [what]
    assert report.is_forgotten
    assert holders(tmp_path, gone) == set()
    module = None  # type: ignore[assignment]
    drop_all_tables()
    checkpoint.load(tmp_path)
    module = opened("user", optimizer="sgd", admission=admission, on_existing="share")
    optimizer = SparseOptimizer(modules=[module])
    for _ in range(2):
        step([module], optimizer, torch.cat([gone, other]))
    assert torch.equal(operators.hashtable_ids(module.table.handle), other), "the one was counted twice, the other five"


def test_what_eviction_chose_is_forgotten(tmp_path: Path) -> None:
    eviction = {"ttl": 2, "interval": 4, "delay": 3}
    module = opened("user", optimizer="sgd", eviction=eviction)
    optimizer = SparseOptimizer(modules=[module])
    step([module], optimizer, IDS[:20])
    for _ in range(4):
        step([module], optimizer, IDS[20:30])
    save(tmp_path, "full")
    before = loaded(tmp_path)
    report = forget(tmp_path, "user", IDS[3:4])
    assert {held.what for held in report.places[0].held} == {"rows", "rows chosen to leave"}
    assert holders(tmp_path, IDS[3:4]) == set()
    after = loaded(tmp_path)
    assert_same(after["user"], without(before["user"], IDS[3:4]))
    module = opened("user", optimizer="sgd", eviction=eviction, on_existing="share")
    optimizer = SparseOptimizer(modules=[module])
    for _ in range(3):
        step([module], optimizer, IDS[20:30])
    assert torch.equal(operators.hashtable_ids(module.table.handle).sort().values, IDS[20:30].sort().values)


def test_a_deleted_row_is_not_saved_as_chosen_to_leave(tmp_path: Path) -> None:
    module = opened("user", optimizer="sgd", eviction={"ttl": 2, "interval": 4, "delay": 3})
    optimizer = SparseOptimizer(modules=[module])
    step([module], optimizer, IDS[:20])
    for _ in range(4):
        step([module], optimizer, IDS[20:30])
    operators.hashtable_delete(module.table.handle, IDS[3:4])
    save(tmp_path, "full")
    assert holders(tmp_path, IDS[3:4]) == set()
    assert holders(tmp_path, IDS[4:5]) != set()


def test_a_dry_run_tells_all_and_changes_nothing(tmp_path: Path) -> None:
    save_chain(tmp_path)
    before, plans = files(tmp_path), []
    report = forget(tmp_path, "user", [*GONE.tolist(), 7], dry_run=True, on_plan=plans.append)
    assert files(tmp_path) == before
    assert plans == [report.places]
    assert (report.not_found, report.dry_run, report.is_forgotten) == ((7,), True, True)
    assert report.places[0].rows == 0
    assert {(held.place.name, held.what) for held in report.places[0].held if isinstance(held.place, Path)} == {
        (name, what) for name, what in _holding(tmp_path)
    }


def _holding(directory: Path) -> set[tuple[str, str]]:
    found = set()
    for snapshot in snapshots_of(directory):
        for entry in next(table for table in snapshot["tables"] if table["name"] == "user")["shards"]:
            found.add((entry["file"], "rows"))
            if entry["deleted"]:
                found.add((entry["file"], "deleted ids"))
    return found


def test_metadata_and_files_beside_that_hold_ids_are_named(tmp_path: Path) -> None:
    module = opened("user")
    step([module], SparseOptimizer(modules=[module]), IDS[:9])
    checkpoint.save(tmp_path, metadata={"last user": int(IDS[7])})
    (tmp_path / "predictions.csv").write_text(f"user,score\n{int(IDS[7])},0.5\n7,0.25\n")
    report = forget(tmp_path, "user", [int(IDS[7]), 7])
    assert not report.is_forgotten
    found = {Path(held.place).name: (held.what.partition(" of ")[0], held.is_certain) for held in report.remaining}
    assert found == {"manifest.json": ("metadata", True), "predictions.csv": ("text", True)}
    assert report.remaining[1].occurrences == 2
    assert f"predictions.csv holds 7, {int(IDS[7])}, 2 times: text" in str(report.remaining[1])


def test_checkpoints_and_bundles_that_were_not_named_are_read_by_their_manifests(tmp_path: Path) -> None:
    save_chain(tmp_path / "named")
    drop_all_tables()
    save_chain(tmp_path / "backups" / "monday", compression="zstd")
    drop_all_tables()
    exported(tmp_path / "backups" / "bundle")
    before = files(tmp_path / "backups")
    report = forget(tmp_path / "named", "user", GONE, scan=[tmp_path])
    assert files(tmp_path / "backups") == before
    found = {(Path(held.place).parent.name, held.what) for held in report.remaining}
    assert found == {("monday", "rows"), ("monday", "deleted ids"), ("tables", "rows")}
    assert not any("item" in str(held.place) or "1.safetensors" in str(held.place) for held in report.remaining)
    forget([tmp_path / "backups" / "monday", tmp_path / "backups" / "bundle"], "user", GONE)
    (tmp_path / "backups" / "monday" / "manifest.json").write_text("{")
    assert forget(tmp_path / "named", "user", GONE, scan=[tmp_path]).remaining != [], "items have them"


# Bundles.


class Clicks(nn.Module):
    """Sums the rows of users and items."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = opened("user", 8, optimizer="sgd"), opened("item", 8, optimizer="sgd")

    def forward(self, ids: Tensor) -> Tensor:
        """Returns [B] of ids [B, 2]."""
        return (self.user(ids[:, 0]) * self.item(ids[:, 1])).sum(1)


def exported(path: Path, encoding: Any = "float32") -> list[bytes]:
    """Exports a model, and returns the bytes of the rows that `GONE` has in its tables, if these are not encoded."""
    model = Clicks()
    for module in (model.user, model.item):
        operators.emb_write(module.table.handle, IDS, torch.randn(len(IDS), 8))
    recstore_ops.export(model, (IDS[:10].view(5, 2),), path, encoding=encoding)
    return bytes_of_rows("user", GONE)


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8", "int4"])
def test_a_bundle_loses_the_rows_and_keeps_all_others_to_the_bit(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "bundle"
    rows = exported(path, {"user": encoding})
    before = recstore_ops.load_bundle(path)
    users = before.tables["user"].read(IDS)
    asked = IDS[~torch.isin(IDS, GONE)][:100].view(50, 2)
    answers = before(asked)
    report = forget(path, "user", GONE)
    assert (report.is_forgotten, report.not_found) == (True, ())
    [place] = report.places
    assert (place.kind, place.rows) == ("bundle", 3)
    assert place.bytes == sum((path / table.file).stat().st_size for table in Manifest.read(path).tables[:1])
    assert holders(path / "tables", GONE, rows) == {"1.safetensors"}, "that of items"
    after = recstore_ops.load_bundle(path)
    stays = ~torch.isin(IDS, GONE)
    assert torch.equal(after.tables["user"].read(IDS)[stays], users[stays])
    assert len(after.tables["user"]) == len(IDS) - 3
    assert torch.equal(after(asked), answers)
    assert not torch.equal(after.tables["user"].read(GONE), users[~stays])
    assert torch.equal(before.tables["user"].read(GONE), users[~stays]), "a file that is open stays until it is closed"
    files = ["graph.json", "manifest.json", "program.pt2", "state.safetensors", "tables"]
    assert sorted(child.name for child in path.iterdir()) == files
    assert forget(path, ["user", "item"], GONE).places[0].rows == 3
    assert holders(path, GONE) == set()


@pytest.mark.parametrize("cut_off_at", ["_replace_manifest", "_remove_unneeded"])
def test_a_bundle_whose_forgetting_was_cut_off_is_cleaned_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_off_at: str
) -> None:
    path = tmp_path / "bundle"
    exported(path)
    before, original = Manifest.read(path), getattr(places, cut_off_at)

    def cut_off(*arguments: Any) -> None:
        # What is left from before is removed at the beginning.
        if cut_off_at == "_replace_manifest" or Manifest.read(path) != before:
            raise KeyboardInterrupt
        original(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(places, cut_off_at, cut_off)
        with pytest.raises(KeyboardInterrupt):
            forget(path, "user", GONE)
    recstore_ops.load_bundle(path)
    assert (Manifest.read(path) == before) == (cut_off_at == "_replace_manifest")
    assert len(list((path / "tables").iterdir())) == 3
    assert forget(path, "user", GONE).is_forgotten
    assert holders(path / "tables", GONE) == {"1.safetensors"}
    assert len(list((path / "tables").iterdir())) == 2


# Runs and several places.


def test_a_run_is_forgotten_in_both_of_its_checkpoints(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("checkpoint", "best"):
        save_chain(run / name)
        drop_all_tables()
    (run / "config.json").write_text("{}")
    exported(tmp_path / "bundle")
    report = forget([run, tmp_path / "bundle", run / "best"], "user", GONE, scan=[tmp_path])
    assert [str(place.place) for place in report.places] == [
        *(str(run / name) for name in ("checkpoint", "best")),
        str(tmp_path / "bundle"),
    ]
    assert [place.rows for place in report.places] == [2, 2, 3]
    assert report.is_forgotten


# Refusals.


def _a_file(path: Path) -> Path:
    (path / "file").write_text("7")
    return path / "file"


def _damaged_manifest(path: Path) -> Path:
    (path / "manifest.json").write_text("{")
    return path


def _other_manifest(path: Path) -> Path:
    (path / "manifest.json").write_text('{"format": "another"}')
    return path


def _of_a_server(path: Path) -> Path:
    save_chain(path / "shard-0-of-1" / "checkpoint")
    (path / "shard-0-of-1" / "recstore-shard.json").write_text("{}")
    return path / "shard-0-of-1" / "checkpoint"


PLACES: list[tuple[Callable[[Path], Any], str]] = [
    (lambda path: path / "none", "there is no directory {path}/none"),
    (_a_file, "{path}/file is no directory"),
    (lambda path: path, "{path} is no checkpoint, no run of `recstore train` with a checkpoint, no --data of servers"),
    (lambda path: "s3://bucket/prefix", "forget needs a directory, got s3://bucket/prefix"),
    (_damaged_manifest, "{path}/manifest.json is damaged: it is no manifest of a checkpoint or a bundle"),
    (_other_manifest, "{path}/manifest.json is the manifest of no checkpoint and no bundle"),
    (_of_a_server, "belongs to a server, which has a log beside it: name {path}/shard-0-of-1"),
    (lambda path: [], "there is no place where ids are to be forgotten"),
]


@pytest.mark.parametrize(("place", "sentence"), PLACES)
def test_a_place_of_another_kind_is_named(tmp_path: Path, place: Callable[[Path], Any], sentence: str) -> None:
    where = place(tmp_path)
    before = files(tmp_path)
    with pytest.raises(ValueError, match=re.escape(sentence.format(path=tmp_path))):
        forget(where, "user", [7])
    assert files(tmp_path) == before


ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"table": "none"}, ValueError, 'has no table "none", but item, user'),
    ({"table": ["user", "none"]}, ValueError, 'has no table "none", but item, user'),
    ({"table": ""}, ValueError, "there is no table whose ids are to be forgotten"),
    ({"table": ()}, ValueError, "there is no table whose ids are to be forgotten"),
    ({"ids": []}, ValueError, "there are no ids to be forgotten"),
    ({"ids": [2**63]}, ValueError, f"an id must be from {-(2**63)} to {2**63 - 1}, got {2**63}"),
    ({"ids": [True]}, TypeError, "ids must be integers, got True"),
    ({"ids": [7.0]}, TypeError, "ids must be integers, got 7.0"),
    ({"ids": "7"}, TypeError, "ids must be integers, got the text '7'"),
    ({"ids": torch.ones(2)}, TypeError, "ids must be int64, uint64, int32, int16, int8 or uint8, got torch.float32"),
    ({"scan": ["none"]}, ValueError, "there is no directory none to be looked through"),
    ({"scan": "none"}, ValueError, "there is no directory none to be looked through"),
    ({"servers": "127.0.0.1:1"}, TypeError, 'servers must be a list of "host:port", got the text "127.0.0.1:1"'),
    ({"servers": ["none"]}, ValueError, 'server 0 must be "host:port"'),
    ({"servers": ["127.0.0.1:1"], "hash_method": "none"}, ValueError, "hash_method must be one of city_hash"),
]


@pytest.mark.parametrize(("arguments", "error", "sentence"), ARGUMENTS)
def test_arguments_are_checked_before_anything_changes(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    save_chain(tmp_path)
    before = files(tmp_path)
    with pytest.raises(error) as refused:
        forget(**{"places": tmp_path, "table": "user", "ids": GONE, **arguments})
    assert sentence in str(refused.value)
    assert files(tmp_path) == before


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_damaged_file_is_named_and_nothing_changes(tmp_path: Path, compression: checkpoint.Compression) -> None:
    save_chain(tmp_path, compression=compression)
    [damaged] = tmp_path.glob(f"{only_snapshots(tmp_path)[-1][0]}*user*")
    for place in (-20, 600):
        content = damaged.read_bytes()
        changed = bytearray(content)
        changed[place] ^= 1
        damaged.write_bytes(changed)
        before = files(tmp_path)
        with pytest.raises(RuntimeError, match=damaged.name):
            forget(tmp_path, "user", GONE)
        assert files(tmp_path) == before
        damaged.write_bytes(content)
    forget(tmp_path, "user", GONE)


def test_a_save_meanwhile_is_refused(tmp_path: Path) -> None:
    save_chain(tmp_path)

    def save_once_more(_: object) -> None:
        save(tmp_path, "delta")

    with pytest.raises(RuntimeError, match="somebody has saved to it meanwhile: begin again"):
        forget(tmp_path, "user", GONE, on_plan=save_once_more)
    assert len(only_snapshots(tmp_path)) == 5


def test_a_bundle_with_a_file_of_another_is_refused(tmp_path: Path) -> None:
    exported(tmp_path / "bundle")
    tables = tmp_path / "bundle" / "tables"
    (tables / "0.safetensors").write_bytes((tables / "1.safetensors").read_bytes())
    with pytest.raises(OSError, match="is not of this bundle: its fingerprint is another"):
        forget(tmp_path / "bundle", "user", GONE)


# The command.


def recstore(*arguments: object) -> tuple[int | None, str, str]:
    done = run_recstore("forget", *arguments)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def test_the_command_shows_what_holds_ids_forgets_them_and_says_what_stays(tmp_path: Path) -> None:
    directory = tmp_path / "saved"
    save_chain(directory)
    listed = tmp_path / "ids.txt"
    listed.write_text("\n".join(map(str, GONE.tolist())))
    told = ("--table", "user", "--ids-file", listed)
    before = files(directory)
    code, out, _ = recstore(directory, *told, "--dry-run")
    assert (code, files(directory)) == (0, before)
    assert out.count("would drop snapshot") == 4
    assert "deleted ids" in out
    assert out.endswith("3 ids would be forgotten\n")
    code, out, _ = recstore(directory, *told, "--scan", tmp_path)
    assert code == 1
    assert f"{directory}, checkpoint: 2 rows removed, 4 snapshots dropped, " in out
    assert f"still there: {listed} holds " in out
    assert out.endswith("3 ids are forgotten, but for 1 findings\n")
    code, out, _ = recstore(directory, "--table", "user", "--ids", f"{int(GONE[0])},-7")
    assert (code, out) == (
        0,
        f"{directory}, checkpoint: holds none of the ids\nnot found: -7, {int(GONE[0])}\n2 ids are forgotten\n",
    )


REFUSED: list[tuple[tuple[str, ...], str]] = [
    ((), "name the ids either with --ids or with --ids-file"),
    (("--ids", "7", "--ids-file", "none"), "name the ids either with --ids or with --ids-file"),
    (("--ids", "7,x"), "--ids: ids are integers with commas or line ends between them, got 'x'"),
    (("--ids-file", "none"), "none: No such file or directory"),
    (("--ids", "7"), "there is no directory none"),
    (("--ids", "7", "--tls-key", "key"), "--tls-certificate and --tls-key need --tls-ca"),
    (("--ids", "7", "--token-file", "none"), "none"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED)
def test_the_command_says_what_is_wrong(options: tuple[str, ...], sentence: str) -> None:
    code, _, errors = recstore("none", "--table", "user", *options)
    assert code == 2
    assert sentence in errors


def test_a_file_of_ids_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "ids").write_bytes(b"\xff\xfe")
    code, _, errors = recstore("none", "--table", "user", "--ids-file", tmp_path / "ids")
    assert code == 2
    assert f"{tmp_path / 'ids'}: ids are decimal numbers in a file of text" in errors


def test_a_report_shows_only_some_of_many_ids(tmp_path: Path) -> None:
    save_chain(tmp_path)
    report: ForgetReport = forget(tmp_path, "user", IDS, dry_run=True)
    assert " and 195 more, 200 times: rows" in str(report.places[0].held[0])
    assert json.dumps(report.ids)
