"""Checkpoints: what is saved comes back to the bit, whatever happens meanwhile, and nothing else changes."""

from __future__ import annotations

import fcntl
import inspect
import math
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoints import assert_same, contents, drop_all_tables
from optimizer_kinds import FORMS, TABLES, table_id
from torch import Tensor
from warm_programs import WarmProgram, output_of

from recstore_ops import (
    DistEmbedding,
    DistTensor,
    HashTable,
    KeyedJaggedTensor,
    RecStoreClient,
    RecStoreEmbeddingBagCollection,
    SparseOptimizer,
    checkpoint,
    table_names,
    table_statistics,
)
from recstore_ops.ops import operators

pytestmark = pytest.mark.tier("test")


@pytest.fixture(autouse=True)
def _empty_store() -> Iterator[None]:
    drop_all_tables()
    yield
    drop_all_tables()


def batches(count: int, seed: int = 0) -> list[Tensor]:
    """Batches of ids with duplicates, some of them new in each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-20 * (step + 1), 20 * (step + 1), (64,), generator=generator) for step in range(count)]


def train(modules: list[DistEmbedding], ids: list[Tensor]) -> None:
    optimizer = SparseOptimizer()
    for batch in ids:
        for module in modules:
            rows = module(batch)
            (rows.float().square().sum() + rows.float().sum()).backward()
        optimizer.step(modules)


def push(name: str, ids: list[int], value: float) -> None:
    client = RecStoreClient()
    client.push(name, torch.tensor(ids), torch.full((len(ids), client.get_data_meta(name)[1][1]), value))


def saved_ones(path: Path, **options: Any) -> DistEmbedding:
    """A table of dim 2 whose rows 1, 2 and 3 are ones in a checkpoint at `path`, and nines now."""
    module = DistEmbedding(None, 2, "t", **options)
    push("t", [1, 2, 3], 1.0)
    checkpoint.save(path)
    push("t", [1, 2, 3], 9.0)
    return module


IDS = torch.tensor([3, 1, 2])
ONES = torch.ones(3, 2)


@pytest.mark.parametrize(
    "options",
    [
        *(pytest.param(options, id=table_id(options)) for options in TABLES),
        *(
            pytest.param({"optimizer": form, "dtype": dtype}, id=f"{table_id({'optimizer': form})}-{dtype}")
            for form in FORMS
            for dtype in (torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn)
            if "catch_up" not in form
        ),
    ],
)
def test_training_goes_on_as_if_it_had_not_stopped(options: dict[str, Any], tmp_path: Path) -> None:
    module = DistEmbedding(None, 5, "t", **options)
    first, second = batches(3), batches(3, seed=1)
    train([module], first)
    RecStoreClient().delete("t", first[0][:7])
    at_save = contents("t")
    report = checkpoint.save(tmp_path)
    assert (report.is_delta, report.rows, report.deleted) == (False, at_save[0].numel(), 0)
    train([module], second)
    expected = contents("t")

    loaded = checkpoint.load(tmp_path)
    assert (loaded.snapshot, loaded.tables) == (report.snapshot, {"t": report.rows})
    assert_same(contents("t"), at_save)
    train([module], second)
    assert_same(contents("t"), expected)

    drop_all_tables()
    checkpoint.load(tmp_path)
    assert_same(contents("t"), at_save)
    train([DistEmbedding(None, 5, "t", **options)], second)
    assert_same(contents("t"), expected)


@pytest.mark.parametrize(
    ("optimizer", "make_reference"),
    [
        ({"kind": "sgd", "lr": 0.1}, torch.optim.SGD),
        ({"kind": "adagrad", "lr": 0.1, "eps": 1e-10, "convention": "torch"}, torch.optim.Adagrad),
        ({"kind": "adam", "lr": 0.1}, torch.optim.SparseAdam),
    ],
)
def test_training_over_a_checkpoint_is_as_that_of_torch_without(
    optimizer: dict[str, Any], make_reference: Any, tmp_path: Path
) -> None:
    module = DistEmbedding(100, 4, "t", optimizer=optimizer)
    reference = torch.nn.Embedding(100, 4, sparse=True)
    reference.weight.data.copy_(module(torch.arange(100)).detach())
    reference_optimizer = make_reference(reference.parameters(), lr=0.1)
    for step, batch in enumerate(batches(6)):
        reference_optimizer.zero_grad()
        (reference(batch.abs() % 100).square().sum() + reference(batch.abs() % 100).sum()).backward()
        reference_optimizer.step()
        train([module], [batch.abs() % 100])
        if step == 2:
            checkpoint.save(tmp_path)
            drop_all_tables()
            checkpoint.load(tmp_path)
            module = DistEmbedding(100, 4, "t", optimizer=optimizer)
    torch.testing.assert_close(module(torch.arange(100)).detach(), reference.weight.data)


def test_deltas_tell_what_changed(tmp_path: Path) -> None:
    module = DistEmbedding(None, 3, "t", optimizer="adam")
    other = DistEmbedding(None, 2, "other", optimizer="ftrl")
    client, generator = RecStoreClient(), random.Random(0)
    train([module, other], batches(2))
    checkpoint.save(tmp_path)
    for number, batch in enumerate(batches(8, seed=5)):
        changed = batch[: generator.randrange(20)]
        train([module], [changed])
        deleted = batch[20 : generator.randrange(20, 40)]
        client.delete("t", deleted)
        push("t", batch[45:48].tolist(), float(number))
        if number == 4:
            client.drop("other")
            other = DistEmbedding(None, 2, "other")
            push("other", [7], 7.0)
        expected = {name: contents(name) for name in table_names()}
        report = checkpoint.save(tmp_path, kind="delta")
        assert report.is_delta
        assert report.rows <= len(set(changed.tolist()) | {*batch[45:48].tolist()}) + (number == 4)
        assert report.deleted <= len(set(deleted.tolist()))
        push("t", [1, 10**12], -1.0)
        checkpoint.load(tmp_path)
        for name, held in expected.items():
            assert_same(contents(name), held)


def test_a_delta_needs_something_to_follow_and_auto_does_without(tmp_path: Path) -> None:
    DistEmbedding(None, 2, "t")
    with pytest.raises(RuntimeError, match="a delta must follow the last save or load of this store"):
        checkpoint.save(tmp_path / "new", kind="delta")
    assert not checkpoint.save(tmp_path / "a", kind="auto").is_delta
    assert checkpoint.save(tmp_path / "a", kind="auto").is_delta
    assert not checkpoint.save(tmp_path / "b", kind="auto").is_delta
    assert not checkpoint.save(tmp_path / "a", kind="auto").is_delta, "the last save went elsewhere"


def test_keep_says_how_many_full_snapshots_stay(tmp_path: Path) -> None:
    DistEmbedding(None, 2, "t")
    reports = []
    for kind in ("full", "full", "delta", "full", "delta"):
        # A delta has files of tables that changed.
        push("t", [1], 1.0)
        reports.append(checkpoint.save(tmp_path, kind=kind, keep=2))
    kept = {file.name.split("-")[0] for file in tmp_path.glob("*.safetensors")}
    assert kept == {report.snapshot for report in reports[1:]}
    last = checkpoint.save(tmp_path)
    assert {file.name.split("-")[0] for file in tmp_path.glob("*.safetensors")} == {last.snapshot}


def test_save_async_saves_what_is_there_when_it_returns(tmp_path: Path) -> None:
    module = saved_ones(tmp_path / "other")
    DistEmbedding(None, 64, "large")
    push("large", list(range(100_000)), 5.0)
    report = checkpoint.save_async(tmp_path, metadata={"step": 7})
    push("t", [1, 2, 3, 4], 0.0)
    push("large", list(range(0, 100_000, 3)), 6.0)
    assert not report.cancel()
    written = report.result(timeout=60)
    assert (written.rows, checkpoint.load(tmp_path).metadata) == (100_003, {"step": 7})
    assert torch.equal(module(IDS).detach(), 9 * ONES)
    assert torch.equal(contents("large")[1], torch.full((100_000, 64), 5.0))


def test_save_async_of_no_rows_ends(tmp_path: Path) -> None:
    assert checkpoint.save_async(tmp_path).result(timeout=60).rows == 0
    assert checkpoint.load(tmp_path).tables == {}


def test_saves_while_two_tables_train_hold_both_at_one_step(tmp_path: Path) -> None:
    names, ids = ["a", "b"], torch.arange(20_000)
    options = {"optimizer": {"kind": "sgd", "lr": 1.0}, "initializer": "zeros"}
    modules = [DistEmbedding(None, 8, name, **options) for name in names]
    optimizer = SparseOptimizer(modules=modules)
    is_over = threading.Event()

    def step() -> None:
        sum(module(ids).sum() for module in modules).backward()  # type: ignore[union-attr]
        optimizer.step()

    def keep_training() -> None:
        while not is_over.is_set():
            step()

    step()
    trainer = threading.Thread(target=keep_training)
    trainer.start()
    try:
        for number in range(6):
            kind = "auto" if number % 2 else "full"
            RecStoreClient().save_async(tmp_path / str(number // 2), kind=kind).result(timeout=60)
            before = table_statistics("a")["step"]
            # A step lies between two saves, however busy the machine is.
            while table_statistics("a")["step"] == before:
                time.sleep(0.005)
    finally:
        is_over.set()
        trainer.join()
    steps = []
    for number in range(3):
        checkpoint.load(tmp_path / str(number))
        steps.append(table_statistics("a")["step"])
        assert table_statistics("b")["step"] == steps[-1]
        for name in names:
            assert torch.equal(contents(name)[1], torch.full((20_000, 8), -float(steps[-1])))
    assert steps == sorted(set(steps))


ONE_SAVE_AS_IT_ENDS = """
import sys, torch
from recstore_ops import DistEmbedding, RecStoreClient, checkpoint
DistEmbedding(None, 16, "t")
RecStoreClient().push("t", torch.arange(200_000), torch.ones(200_000, 16))
checkpoint.save_async(sys.argv[1])
"""


def test_a_process_does_not_end_before_its_save_has(tmp_path: Path) -> None:
    output_of(ONE_SAVE_AS_IT_ENDS, tmp_path)
    assert checkpoint.load(tmp_path).tables == {"t": 200_000}


SAVES_WITHOUT_END = """
import sys, torch
from recstore_ops import DistEmbedding, SparseOptimizer, checkpoint
path, ids = sys.argv[1], torch.arange(20_000)
report = checkpoint.load(path)
options = {"optimizer": {"kind": "sgd", "lr": 1.0}, "initializer": "zeros"}
modules = [DistEmbedding(None, 8, name, **options) for name in ("a", "b")]
optimizer = SparseOptimizer(modules=modules)
step = report.metadata
print("ready", flush=True)
while True:
    step += 1
    sum(module(ids).sum() for module in modules).backward()
    optimizer.step()
    checkpoint.save(path, kind="auto" if step % 4 else "full", keep=2, metadata=step)
"""


@pytest.mark.tier("all")
def test_a_process_killed_while_it_saves_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    options = {"optimizer": {"kind": "sgd", "lr": 1.0}, "initializer": "zeros"}
    for name in ("a", "b"):
        DistEmbedding(None, 8, name, **options)
    checkpoint.save(tmp_path, metadata=0)
    generator, steps = random.Random(1), [0]
    for _ in range(5):
        process = WarmProgram(SAVES_WITHOUT_END, tmp_path)
        assert process.stdout.readline() == "ready\n"
        time.sleep(generator.uniform(0.1, 0.5))
        process.kill()
        assert process.wait(timeout=60) == -signal.SIGKILL
        process.stdout.close()
        steps.append(checkpoint.load(tmp_path).metadata)
        for name in ("a", "b"):
            assert table_statistics(name)["step"] == steps[-1]
            assert torch.all(contents(name)[1] == -float(steps[-1]))
    assert steps == sorted(steps)
    assert steps[-1] > 0
    last = checkpoint.save(tmp_path)
    files = {file.name for file in tmp_path.glob("*.safetensors")}
    assert all(name.startswith(last.snapshot) for name in files), "what killed saves left is removed"


@pytest.mark.parametrize(
    "metadata",
    [None, 7, -(2**63), 2**64 - 1, 0.1, 5e-324, 'é\n"', True, [], {"": {"a": [1, 2.5, None]}}],
    ids=repr,
)
def test_metadata_comes_back(metadata: Any, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, metadata=metadata)
    assert checkpoint.load(tmp_path).metadata == metadata


def nested(depth: int) -> list[Any]:
    metadata: list[Any] = []
    for _ in range(depth - 1):
        metadata = [metadata]
    return metadata


def test_metadata_may_be_nested_100_deep(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, metadata=nested(100))
    assert checkpoint.load(tmp_path).metadata == nested(100)


@pytest.mark.parametrize("save", [checkpoint.save, checkpoint.save_async])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"kind": "partial"}, ValueError, "kind must be full, delta or auto, got 'partial'"),
        ({"keep": 0}, ValueError, "keep must be an int of at least 1, got 0"),
        ({"keep": "1"}, ValueError, "keep must be an int of at least 1, got '1'"),
        ({"metadata": {1j}}, TypeError, "metadata must be what JSON can hold: Object of type set"),
        ({"metadata": {1: 2}}, TypeError, "keys are texts, and metadata has the key 1"),
        ({"metadata": {"a": [0, ({None: 2},)]}}, TypeError, r"metadata\['a'\]\[1\]\[0\] has the key None"),
        ({"metadata": [math.nan]}, ValueError, "metadata must be what JSON can hold: Out of range float"),
        (
            {"metadata": 2**64},
            ValueError,
            "metadata must be what JSON can hold: ints of up to 64 bits, got 18446744073709551616",
        ),
        ({"metadata": -(2**63) - 1}, ValueError, "ints of up to 64 bits, got -9223372036854775809"),
        ({"metadata": nested(101)}, ValueError, "metadata holds at most 100 lists and dicts within each other"),
        ({"metadata": nested(10**5)}, ValueError, "metadata holds at most 100 lists and dicts within each other"),
    ],
)
def test_bad_arguments_of_a_save_are_refused_at_once(
    save: Any, arguments: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        save(tmp_path / "new", **arguments)
    assert not (tmp_path / "new").exists()


def test_progress_is_shown_on_the_standard_error_until_all_bytes_are_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DistEmbedding(None, 32, "t")
    push("t", [1, 2, 3], 1.0)
    report = checkpoint.save(tmp_path, progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "saving: 100%" in shown.err
    # Three rows of an id and 32 floats.
    assert "408/408" in shown.err
    checkpoint.load(tmp_path, progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "loading: 100%" in shown.err
    assert f"{report.bytes}/{report.bytes}" in shown.err


def test_without_a_terminal_no_progress_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DistEmbedding(None, 2, "t")
    checkpoint.save(tmp_path)
    checkpoint.load(tmp_path)
    assert capsys.readouterr() == ("", "")


def test_a_directory_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    saved_ones(tmp_path / "there")
    before = contents("t")
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(RuntimeError, match=f"checkpoint: {path}: there is no checkpoint here"):
            checkpoint.load(path)
    assert_same(contents("t"), before)
    assert not (tmp_path / "absent").exists()


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(RuntimeError, match=f"checkpoint: {path}: "):
        checkpoint.save(path)
    with pytest.raises(RuntimeError, match=f"checkpoint: {path}: "):
        checkpoint.save_async(path).result(timeout=60)
    assert path.read_text() == "mine"


def test_two_processes_do_not_save_to_one_directory(tmp_path: Path) -> None:
    module = saved_ones(tmp_path)
    with (tmp_path / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match=f"checkpoint: {tmp_path}: another process"):
            checkpoint.save(tmp_path)
    checkpoint.load(tmp_path)
    assert torch.equal(module(IDS).detach(), ONES)


@pytest.mark.parametrize("place", [0, 9, -1, -25, -49])
def test_a_changed_byte_is_found_and_its_file_named(place: int, tmp_path: Path) -> None:
    saved_ones(tmp_path, optimizer="adagrad")
    before = contents("t")
    (file,) = tmp_path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    with pytest.raises(RuntimeError, match=f"checkpoint: {file}: "):
        checkpoint.load(tmp_path)
    assert_same(contents("t"), before)


def test_a_file_cut_short_and_a_missing_one_are_named(tmp_path: Path) -> None:
    saved_ones(tmp_path)
    before = contents("t")
    (file,) = tmp_path.glob("*.safetensors")
    size = file.stat().st_size
    os.truncate(file, size - 1)
    with pytest.raises(RuntimeError, match=f"{file}: expected {size} bytes, got {size - 1}"):
        checkpoint.load(tmp_path)
    file.unlink()
    with pytest.raises(RuntimeError, match=f"{file}: No such file"):
        checkpoint.load(tmp_path)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text()[:-9])
    with pytest.raises(RuntimeError, match=f"{manifest}: EOF while parsing"):
        checkpoint.load(tmp_path)
    assert_same(contents("t"), before)


@pytest.mark.parametrize(
    ("changed", "existing", "requested"),
    [
        ({"dim": 3}, "dim 3", "dim 2"),
        ({"optimizer": "adam"}, '"kind":"adam"', '"kind":"sgd"'),
        ({"dtype": torch.bfloat16}, '"dtype":"bfloat16"', '"dtype":"float32"'),
        ({"num_embeddings": 9}, '"num_embeddings":9', '"num_embeddings":null'),
    ],
)
def test_a_table_of_another_configuration_is_named_and_nothing_changes(
    changed: dict[str, Any], existing: str, requested: str, tmp_path: Path
) -> None:
    saved_ones(tmp_path)
    DistEmbedding(None, 2, "a")
    push("a", [1], 1.0)
    checkpoint.save(tmp_path)
    drop_all_tables()
    DistEmbedding(changed.pop("num_embeddings", None), changed.pop("dim", 2), "t", **changed)
    DistEmbedding(None, 2, "a")
    push("a", [1], 5.0)
    before = {name: contents(name) for name in table_names()}
    with pytest.raises(RuntimeError, match='table "t"') as caught:
        checkpoint.load(tmp_path)
    assert existing in str(caught.value)
    assert requested in str(caught.value)
    for name in before:
        assert_same(contents(name), before[name])


def test_a_checkpoint_file_opens_with_safetensors(tmp_path: Path) -> None:
    module = DistEmbedding(None, 6, "t", optimizer="adam")
    halves = DistEmbedding(None, 3, "halves", optimizer="ftrl", dtype=torch.bfloat16)
    train([module, halves], batches(3))
    checkpoint.save(tmp_path)
    for name in ("t", "halves"):
        (file,) = tmp_path.glob(f"*-{name}.safetensors")
        tensors = safetensors.torch.load_file(file)
        order = tensors["ids"].argsort()
        ids, rows, slots, _ = contents(name)
        assert torch.equal(tensors["ids"][order], ids)
        assert torch.equal(tensors["rows"][order].float(), rows)
        assert tensors.keys() == {"ids", "rows", *(f"slot.{slot}" for slot in slots)}
        assert all(torch.equal(tensors[f"slot.{slot}"][order], slots[slot]) for slot in slots)
    assert tensors["rows"].dtype is torch.bfloat16


def test_open_modules_see_what_was_loaded(tmp_path: Path) -> None:
    module = saved_ones(tmp_path)
    tensor = module.weight
    table, client = HashTable(2, "t"), RecStoreClient()
    client.load(tmp_path)
    for read in (module(IDS), tensor[IDS], table(IDS), client.pull("t", IDS)):
        assert torch.equal(read.detach(), ONES)
    assert (len(table), sorted(table.ids().tolist())) == (3, [1, 2, 3])
    push("t", [4], 4.0)
    assert torch.equal(module(torch.tensor(4)).detach(), torch.full((2,), 4.0))


def test_a_dist_tensor_still_drops_its_loaded_table(tmp_path: Path) -> None:
    tensor = DistTensor((4, 2), torch.float32, "t")
    tensor[[1]] = torch.ones(1, 2)
    checkpoint.save(tmp_path)
    tensor[[1]] = torch.zeros(1, 2)
    checkpoint.load(tmp_path)
    assert tensor[[1]].tolist() == [[1.0, 1.0]]
    del tensor
    assert table_names() == []


def test_tables_that_are_not_in_the_snapshot_stay(tmp_path: Path) -> None:
    saved_ones(tmp_path)
    DistEmbedding(None, 2, "later")
    push("later", [1], 3.0)
    before = contents("later")
    assert checkpoint.load(tmp_path).tables == {"t": 3}
    assert_same(contents("later"), before)
    # Those it never held come whole with the next delta.
    assert checkpoint.save(tmp_path, kind="delta").rows == 1
    drop_all_tables()
    assert checkpoint.load(tmp_path).tables == {"later": 1, "t": 3}
    assert_same(contents("later"), before)


def test_only_the_tables_that_are_asked_for_are_loaded(tmp_path: Path) -> None:
    ids = torch.arange(10)
    tables = {name: DistEmbedding(None, 2, name, initializer="zeros") for name in ("one", "two", "three")}
    for table in tables.values():
        table.weight[ids] = torch.ones(10, 2)
    checkpoint.save(tmp_path)
    operators.drop_table("three")
    for name in ("one", "two"):
        tables[name].weight[ids] = torch.full((10, 2), 2.0)
    report = checkpoint.load(tmp_path, tables=["two"])
    assert report.tables == {"two": 10}
    assert table_names() == ["one", "two"]
    assert [tables[name](ids)[0, 0].item() for name in ("one", "two")] == [2.0, 1.0]
    # A table that was not loaded has changes that no snapshot here tells: the next one has all of its rows.
    checkpoint.save(tmp_path, kind="auto")
    drop_all_tables()
    checkpoint.load(tmp_path)
    assert RecStoreClient().pull("one", ids).unique().tolist() == [2.0]
    with pytest.raises(RuntimeError, match=r'the snapshot \w{16} has no table "absent"'):
        checkpoint.load(tmp_path, tables=["two", "absent"])
    with pytest.raises(TypeError, match="tables are names in a list, got the text 'two'"):
        checkpoint.load(tmp_path, tables="two")
    assert checkpoint.load(tmp_path, tables=[]).tables == {}


def test_gradients_collected_before_a_load_go_into_the_next_step(tmp_path: Path) -> None:
    module = saved_ones(tmp_path, optimizer={"kind": "sgd", "lr": 0.5})
    # Other places than in the checkpoint: row 1 was deleted and comes back last.
    RecStoreClient().delete("t", torch.tensor([1]))
    push("t", [7, 8, 1], 9.0)
    module(torch.tensor([1, 2, 8])).sum().backward()
    checkpoint.load(tmp_path)
    SparseOptimizer().step([module])
    assert torch.equal(module(IDS).detach(), torch.tensor([[1.0, 1.0], [0.5, 0.5], [0.5, 0.5]]))
    assert sorted(contents("t")[0].tolist()) == [1, 2, 3, 8]


def test_a_backward_pass_may_come_after_a_load(tmp_path: Path) -> None:
    module = saved_ones(tmp_path, optimizer={"kind": "sgd", "lr": 0.5})
    RecStoreClient().delete("t", torch.tensor([1]))
    push("t", [7, 8, 1], 9.0)
    loss = module(torch.tensor([1, 2, 1])).sum()
    checkpoint.load(tmp_path)
    loss.backward()
    SparseOptimizer().step([module])
    assert torch.equal(module(IDS).detach(), torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.5, 0.5]]))


def test_a_collection_goes_on_over_a_load(tmp_path: Path) -> None:
    bags = RecStoreEmbeddingBagCollection(
        [
            {"name": name, "num_embeddings": None, "embedding_dim": 2, "feature_names": [name]}
            for name in ("user", "item")
        ],
        optimizer={"kind": "sgd", "lr": 1.0},
    )
    features = KeyedJaggedTensor(["user", "item"], torch.tensor([1, 1, 2]), lengths=torch.tensor([1, 2]))
    for name in ("user", "item"):
        push(name, [2, 1], 1.0)
    checkpoint.save(tmp_path)
    for name in ("user", "item"):
        RecStoreClient().delete(name, torch.tensor([1, 2]))
        push(name, [1, 2], 9.0)
    loss = bags(features).sum()
    bags(features).sum().backward()
    checkpoint.load(tmp_path)
    assert torch.equal(bags(features).detach(), torch.tensor([[[1.0, 1.0], [2.0, 2.0]]]))
    loss.backward()
    SparseOptimizer(modules=[bags]).step()
    assert torch.equal(contents("user")[1], torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))
    assert torch.equal(contents("item")[1], torch.tensor([[-1.0, -1.0], [-1.0, -1.0]]))


def test_a_prefetch_issued_before_a_load_gives_loaded_rows(tmp_path: Path) -> None:
    saved_ones(tmp_path)
    client = RecStoreClient()
    handle = client.prefetch(IDS, "t")
    checkpoint.load(tmp_path)
    assert torch.equal(client.wait_and_get(handle, 2), ONES)


def loaded_at(path: Path, saved_rate: float, by_hand: bool, **options: Any) -> tuple[DistEmbedding, SparseOptimizer]:
    """A module and its optimizer, made before a load of a table with another learning rate."""
    module = DistEmbedding(None, 2, "t", optimizer={"kind": "sgd", "lr": saved_rate})
    if by_hand:
        RecStoreClient().set_learning_rate("t", saved_rate)
    push("t", [1, 2, 3], 1.0)
    checkpoint.save(path)
    drop_all_tables()
    module = DistEmbedding(None, 2, "t", optimizer={"kind": "sgd", "lr": 0.5})
    optimizer = SparseOptimizer(**{"modules": [module], **options})
    step(module, optimizer)
    checkpoint.load(path)
    assert table_statistics("t")["learning_rate"] == saved_rate
    return module, optimizer


def step(module: DistEmbedding, optimizer: SparseOptimizer) -> None:
    module(IDS).sum().backward()
    optimizer.step([module])


def test_an_optimizer_made_before_a_load_goes_on_with_the_loaded_rate(tmp_path: Path) -> None:
    module, optimizer = loaded_at(tmp_path, 0.25, by_hand=False)
    step(module, optimizer)
    assert (optimizer.param_groups[0]["lr"], table_statistics("t")["learning_rate"]) == (0.25, 0.25)
    assert torch.equal(module(IDS).detach(), 0.75 * ONES)


@pytest.mark.parametrize("way", ["at construction", "before the load", "after the load"])
def test_a_rate_that_an_optimizer_was_given_wins_over_a_loaded_one(way: str, tmp_path: Path) -> None:
    options = {"lr": 0.5} if way == "at construction" else {}
    module, optimizer = loaded_at(tmp_path, 0.25, by_hand=False, **options)
    if way == "before the load":
        optimizer.param_groups[0]["lr"] = 0.5
        step(module, optimizer)
        optimizer.param_groups[0]["lr"] = 0.125
        checkpoint.load(tmp_path)
    elif way == "after the load":
        optimizer.param_groups[0]["lr"] = 0.125
    expected = 0.5 if way == "at construction" else 0.125
    step(module, optimizer)
    assert (optimizer.param_groups[0]["lr"], table_statistics("t")["learning_rate"]) == (expected, expected)
    assert torch.equal(module(IDS).detach(), (1 - expected) * ONES)


def test_a_load_is_followed_once(tmp_path: Path) -> None:
    module, first = loaded_at(tmp_path, 0.25, by_hand=False)
    second = SparseOptimizer(modules=[module])
    for optimizer, rate in ((first, 0.25), (second, 0.25)):
        step(module, optimizer)
        assert optimizer.param_groups[0]["lr"] == rate
    second.param_groups[0]["lr"] = 0.125
    for optimizer, rate in ((second, 0.125), (first, 0.25), (second, 0.125)):
        step(module, optimizer)
        assert (optimizer.param_groups[0]["lr"], table_statistics("t")["learning_rate"]) == (rate, rate)


@pytest.mark.parametrize("made", ["module and optimizer", "module", "nothing"])
def test_what_is_made_before_a_load_trains_as_if_it_had_never_stopped(made: str, tmp_path: Path) -> None:
    def new_module() -> DistEmbedding:
        return DistEmbedding(None, 2, "t", optimizer={"kind": "adam", "lr": 0.5})

    module = new_module()
    optimizer = SparseOptimizer(modules=[module])
    optimizer.param_groups[0]["lr"] = 0.125
    step(module, optimizer)
    checkpoint.save(tmp_path)
    step(module, optimizer)
    expected = module(IDS).detach()

    drop_all_tables()
    del module, optimizer
    modules = [new_module()] if made != "nothing" else []
    optimizers = [SparseOptimizer(modules=modules)] if made == "module and optimizer" else []
    checkpoint.load(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The table keeps its rate.
        [module] = modules or [new_module()]
    [optimizer] = optimizers or [SparseOptimizer(modules=[module])]
    step(module, optimizer)
    assert torch.equal(module(IDS).detach(), expected)


def test_a_loaded_rate_set_by_hand_wins_over_an_optimizer(tmp_path: Path) -> None:
    module, optimizer = loaded_at(tmp_path, 0.25, by_hand=True)
    step(module, optimizer)
    assert (optimizer.param_groups[0]["lr"], table_statistics("t")["learning_rate"]) == (0.25, 0.25)
    assert torch.equal(module(IDS).detach(), 0.75 * ONES)


def test_an_optimizer_without_modules_leaves_a_loaded_rate_alone(tmp_path: Path) -> None:
    module, optimizer = loaded_at(tmp_path, 0.25, by_hand=False, modules=None)
    step(module, optimizer)
    assert torch.equal(module(IDS).detach(), 0.75 * ONES)
    optimizer.param_groups[0]["lr"] = 0.125
    step(module, optimizer)
    assert torch.equal(module(IDS).detach(), 0.625 * ONES)


def test_an_optimizer_made_after_a_load_goes_on_with_the_loaded_rate(tmp_path: Path) -> None:
    module, _ = loaded_at(tmp_path, 0.25, by_hand=False)
    optimizer = SparseOptimizer(modules=[module])
    step(module, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert torch.equal(module(IDS).detach(), 0.75 * ONES)


def test_a_state_dict_saved_beside_brings_an_optimizers_rate_back(tmp_path: Path) -> None:
    module, optimizer = loaded_at(tmp_path, 0.25, by_hand=False)
    optimizer.param_groups[0]["lr"] = 0.125
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    checkpoint.save(tmp_path)
    other = SparseOptimizer(modules=[module], lr=0.5)
    checkpoint.load(tmp_path)
    other.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    step(module, other)
    assert torch.equal(module(IDS).detach(), 0.875 * ONES)


def test_modules_made_after_a_load_find_their_rows(tmp_path: Path) -> None:
    saved_ones(tmp_path, optimizer={"kind": "sgd", "lr": 0.5})
    drop_all_tables()
    checkpoint.load(tmp_path)
    with pytest.warns(UserWarning, match='table "t" exists and keeps lr=0.5, not 0.25'):
        module = DistEmbedding(None, 2, "t", optimizer={"kind": "sgd", "lr": 0.25})
    assert torch.equal(module(IDS).detach(), ONES)
    with pytest.raises(ValueError, match='table "t"'):
        DistEmbedding(None, 2, "t", optimizer="adam")


def test_a_module_made_after_a_load_does_not_start_its_rows_again(tmp_path: Path) -> None:
    DistEmbedding(3, 2, "t", init_func=lambda shape, dtype: torch.ones(shape), padding_idx=0)
    push("t", [0, 1], 7.0)
    checkpoint.save(tmp_path)
    drop_all_tables()
    checkpoint.load(tmp_path)
    module = DistEmbedding(3, 2, "t", init_func=lambda shape, dtype: torch.zeros(shape), padding_idx=0)
    assert module.weight[[0, 1, 2]].tolist() == [[7.0, 7.0], [7.0, 7.0], [1.0, 1.0]]


READS_IN_NEW_PROCESS = """
import sys, torch
from recstore_ops import DistEmbedding, RecStoreClient
assert RecStoreClient().load(sys.argv[1]).metadata == [1]
torch.save(DistEmbedding(None, 4, "t", optimizer="adam")(torch.arange(-50, 50)).detach(), sys.argv[2])
"""


def test_a_new_process_goes_on(tmp_path: Path) -> None:
    module = DistEmbedding(None, 4, "t", optimizer="adam")
    train([module], batches(2))
    RecStoreClient().save(tmp_path / "checkpoint", metadata=[1])
    output_of(READS_IN_NEW_PROCESS, tmp_path / "checkpoint", tmp_path / "rows.pt", warns="error")
    assert torch.equal(torch.load(tmp_path / "rows.pt"), module(torch.arange(-50, 50)).detach())


def test_what_was_collected_is_not_saved(tmp_path: Path) -> None:
    module = DistEmbedding(None, 2, "t")
    module(IDS).sum().backward()
    assert checkpoint.save(tmp_path).rows == 0
    assert len(operators.collected_tables(module.table.collector)) == 1


@pytest.mark.parametrize("name", ["save", "save_async", "load"])
def test_the_client_takes_the_same_arguments(name: str) -> None:
    method, function = getattr(RecStoreClient(), name), getattr(checkpoint, name)
    assert inspect.signature(method) == inspect.signature(function)


@pytest.mark.parametrize("kind", ["full", "auto"])
def test_rows_are_not_replaced_by_none_unless_that_is_said(tmp_path: Path, kind: Any) -> None:
    module = DistEmbedding(None, 2, "kept", initializer="zeros")
    module.weight[[1]] = torch.ones(1, 2)
    checkpoint.save(tmp_path)
    drop_all_tables()
    # A process that has not had these rows, as one that forgot to load them.
    script = f"""
from recstore_ops import DistEmbedding, checkpoint
DistEmbedding(None, 2, "kept", initializer="zeros")
try:
    checkpoint.save({str(tmp_path)!r}, kind={kind!r})
except RuntimeError as error:
    print(error)
checkpoint.save_async({str(tmp_path / "other")!r}, kind={kind!r}).result()
"""
    said = output_of(script)
    assert "the newest snapshot here has 1 rows, and the store to be saved has none and never had those" in said
    assert checkpoint.load(tmp_path).tables == {"kept": 1}
    drop_all_tables()
    checkpoint.save(tmp_path, kind=kind)
    assert checkpoint.load(tmp_path).tables == {}
    with pytest.raises(TypeError, match="replace must be a bool, got 'yes'"):
        checkpoint.save(tmp_path, replace="yes")  # type: ignore[arg-type]
