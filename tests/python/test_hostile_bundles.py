"""Bundles that others wrote or change: each file is what the manifest says and lies inside, or it is refused."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bundle_files import changed_graph, changed_manifest, changed_sum
from torch import Tensor, nn

from recstore_ops import DistEmbedding, FrozenTable, publish
from recstore_ops.ops import operators
from recstore_ops.serving import export, load_bundle
from recstore_ops.serving.exchanging import exchange
from recstore_ops.serving.graph import Graph
from recstore_ops.serving.manifest import Manifest

pytestmark = pytest.mark.tier("test")

IDS = torch.tensor([[1, 2], [3, 4], [5, 99]])
FILES = ["manifest.json", "graph.json", "state.safetensors", "program.pt2", "tables/0.safetensors"]
TIMEOUT = 5.0
"""Seconds within which an error must come."""


class Clicks(nn.Module):
    """A dense layer over rows of a table."""

    def __init__(self, name: str, value: float) -> None:
        super().__init__()
        self.table = DistEmbedding(None, 4, name)
        self.dense = nn.Linear(8, 3)
        operators.emb_write(self.table.table.handle, torch.arange(100), torch.full((100, 4), value))
        with torch.no_grad():
            self.dense.weight.fill_(value)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        """Returns logits [B, 3] of ids [B, 2]."""
        return {"logits": self.dense(self.table(ids).flatten(1))}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle, which no test changes."""
    model = Clicks("test_hostile_bundles/0", 1.0)
    return export(model, (IDS,), tmp_path_factory.mktemp("written") / "model")


@pytest.fixture
def bundle(written: Path, tmp_path: Path) -> Path:
    """A copy of a bundle."""
    return shutil.copytree(written, tmp_path / "model")


def use_all_of(path: Path) -> None:
    """Opens a bundle and reads all of its files."""
    opened = load_bundle(path, trusted=True)
    opened(IDS)
    opened.program()


def refusal_of(path: Path, use: Callable[[Path], object] = use_all_of) -> str:
    """Why a bundle is refused, which it must be by one of two errors and in time."""
    caught: list[BaseException] = []

    def run() -> None:
        try:
            use(path)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    assert not thread.is_alive(), "it hangs"
    assert caught, "it was not refused"
    assert isinstance(caught[0], OSError | ValueError), repr(caught[0])
    return str(caught[0])


def problem_of(use: Callable[..., object], *arguments: object) -> str | None:
    """Why a call is refused by one of two errors, if it is."""
    try:
        use(*arguments)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def replaced(path: Path, by: str, outside: Path) -> None:
    """Puts something else than a file in the place of one, of which a copy lies outside."""
    path.replace(outside)
    if by == "directory":
        path.mkdir()
    elif by == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to({"link": outside, "device": "/dev/zero", "loop": path, "nothing": "nowhere"}[by])


@pytest.mark.parametrize("by", ["directory", "fifo", "link", "device", "loop", "nothing"])
@pytest.mark.parametrize("file", FILES)
def test_files_are_regular_and_lie_inside(bundle: Path, tmp_path: Path, file: str, by: str) -> None:
    outside = tmp_path / "outside"
    replaced(bundle / file, by, outside)
    content = outside.read_bytes()
    told = refusal_of(bundle)
    assert file.rpartition("/")[2] in told
    assert outside.read_bytes() == content


def test_a_directory_of_tables_is_no_link(bundle: Path, tmp_path: Path) -> None:
    (bundle / "tables").rename(tmp_path / "elsewhere")
    (bundle / "tables").symlink_to(tmp_path / "elsewhere")
    assert "tables" in refusal_of(bundle)


def test_the_directory_of_a_bundle_may_be_named_by_a_link(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(bundle)
    assert load_bundle(tmp_path / "link")(IDS)["logits"].shape == (3, 3)


WRONG: list[Any] = [None, True, -1, 1 << 70, 1.5, "x", "../../x", "", [], {}, [[]], {"x": 1}]


def places_of(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in one another."""
    yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places_of(each, (*place, key))


def with_value(fields: Any, place: tuple[Any, ...], value: Any) -> Any:
    """Fields with another value at a place."""
    if not place:
        return value
    copy = fields.copy()
    copy[place[0]] = with_value(copy[place[0]], place[1:], value)
    return copy


def test_a_manifest_is_a_closed_form(bundle: Path) -> None:
    fields = json.loads((bundle / "manifest.json").read_text())
    whole, refused = (bundle / "manifest.json").read_text(), 0
    kept = {name: value for name, value in fields.items() if name not in ("format", "version", "crc32")}
    for place in places_of(kept):
        for wrong in WRONG:
            if not place or place[0] in ("torch", "recstore_ops") or with_value(kept, place, wrong) == kept:
                continue
            (bundle / "manifest.json").write_text(whole)
            changed_manifest(bundle, **{place[0]: with_value(kept[place[0]], place[1:], wrong)})
            if (problem := problem_of(load_bundle, bundle)) is not None:
                assert str(bundle) in problem, (place, wrong)
                refused += 1
            else:
                # What a bundle says that it is called, or was compiled for, is not compared with anything.
                assert place[-1] in ("name", "compiled_for", 0) or wrong is None, (place, wrong)
    assert refused > 300
    for more in ({"more": 1}, {"files": {**fields["files"], "../x": {"bytes": 1, "crc32": 1}}}, {"files": {}}):
        (bundle / "manifest.json").write_text(whole)
        changed_manifest(bundle, **more)
        assert "manifest.json is damaged: " in refusal_of(bundle)
    for file in ("tables/../../x.safetensors", "/etc/passwd", "tables/0.safetensors\0", "tables/x.safetensors"):
        (bundle / "manifest.json").write_text(whole)
        changed_manifest(bundle, tables=[{**fields["tables"][0], "file": file}])
        assert "is no file of a table of a bundle" in refusal_of(bundle)


@pytest.mark.parametrize("text", ["", "7", "null", '{"crc32": 1}', "[" * 100_000, '{"a": ' * 2000 + "1" + "}" * 2000])
def test_a_manifest_of_other_json_is_damaged(bundle: Path, text: str) -> None:
    (bundle / "manifest.json").write_text(text)
    assert "manifest.json is damaged: " in refusal_of(bundle)


def test_a_manifest_of_many_names_is_read_in_one_pass(bundle: Path) -> None:
    """Names that are compared each with each would take an hour."""
    tables = json.loads((bundle / "manifest.json").read_text())["tables"]
    tables[0]["constants"] += [f"constant {number}" for number in range(300_000)]
    changed_manifest(bundle, tables=tables)
    started = time.monotonic()
    refusal_of(bundle)
    assert time.monotonic() - started < 60


def test_each_byte_of_a_manifest_counts(bundle: Path) -> None:
    content = (bundle / "manifest.json").read_bytes()
    same = Manifest.read(bundle)
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1
        (bundle / "manifest.json").write_bytes(flipped)
        if (problem := problem_of(Manifest.read, bundle)) is not None:
            assert "manifest.json" in problem
        else:
            assert Manifest.read(bundle) == same, "only blanks may differ"


def test_each_byte_of_a_graph_is_read_by_its_form(bundle: Path) -> None:
    """Also with checksums that fit: what is read then is a graph over the same operators, or is refused."""
    content = (bundle / "graph.json").read_bytes()
    handles = {constant for table in Manifest.read(bundle).tables for constant in table.constants}
    for bit in (1, 4, 128):
        for place in range(len(content)):
            flipped = bytearray(content)
            flipped[place] ^= bit
            assert problem_of(Graph, bytes(flipped), handles) != ""
    (bundle / "graph.json").write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert "graph.json is not that of this bundle: its checksum is another" in refusal_of(bundle)


@pytest.mark.parametrize("file", ["state.safetensors", "tables/0.safetensors"])
def test_each_byte_of_a_header_counts(bundle: Path, file: str) -> None:
    content = (bundle / file).read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    manifest, changed = (bundle / "manifest.json").read_text(), []
    for place in range(length):
        flipped = bytearray(content)
        flipped[place] ^= 1
        (bundle / file).write_bytes(flipped)
        if file in json.loads(manifest)["files"]:
            (bundle / "manifest.json").write_text(manifest)
            changed_sum(bundle, file)
        if (problem := problem_of(load_bundle, bundle)) is None:
            changed.append(place)
        else:
            assert file.rpartition("/")[2] in problem
    # A tensor of the state may have got another type, shape or place; that its checksum is another was left out here.
    assert file == "state.safetensors" or not changed


def test_parts_of_bundles_that_are_exchanged_do_not_mix(tmp_path: Path) -> None:
    made = [Clicks(f"test_hostile_bundles/exchanged{value}", float(value)) for value in (1, 2)]
    paths = [export(model, (IDS,), tmp_path / f"model{number}") for number, model in enumerate(made)]
    with torch.no_grad():
        answers = [model.eval()(IDS)["logits"] for model in made]
    ended = threading.Event()

    def go_on() -> None:
        while not ended.is_set():
            exchange(paths[0], paths[1])
            time.sleep(0.0005)  # Otherwise it would keep the interpreter to itself.

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        for _ in range(200):
            given = load_bundle(paths[0])(IDS)["logits"]
            assert any(given.equal(answer) for answer in answers)
    finally:
        ended.set()
        thread.join()


def test_code_runs_where_it_is_trusted_alone(bundle: Path) -> None:
    sentence = (
        r"model/program\.pt2 is code, .*: to run it, open the bundle with trusted=True, or serve it with --trust-code"
    )
    with pytest.raises(ValueError, match=sentence):
        load_bundle(bundle).program()
    assert load_bundle(bundle, trusted=True).program().graph is not None
    (bundle / "graph.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"graph\.json"):
        load_bundle(bundle, trusted=True)
    files = json.loads((bundle / "manifest.json").read_text())["files"]
    changed_manifest(bundle, files={"program.pt2": files["program.pt2"]})
    with pytest.raises(ValueError, match=sentence):
        load_bundle(bundle)
    assert load_bundle(bundle, trusted=True)(IDS)["logits"].shape == (3, 3)


def test_a_publication_without_a_graph_is_not_followed(bundle: Path, tmp_path: Path) -> None:
    model = Clicks("test_hostile_bundles/followed", 1.0)
    path = export(model, (IDS,), tmp_path / "followed")
    with publish(model, (IDS,), tmp_path / "news") as publisher:
        (base,) = (publisher.directory / "bases").iterdir()
        changed_graph(base, calls=[["aten::from_file.default", ["x"], {}]])
        with pytest.raises(
            ValueError, match=r"graph\.json: 'aten::from_file\.default' is not in the list of operators"
        ):
            load_bundle(path, follow=publisher.directory, trusted=True)
        (program,) = path.glob("program.pt2")
        shutil.copy(program, base)
        changed_manifest(base, files={})
        changed_manifest(base, files={"program.pt2": {"bytes": program.stat().st_size, "crc32": 0}})
        with pytest.raises(ValueError, match=r"has no graph\.json"):
            load_bundle(path, follow=publisher.directory, trusted=True)


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    """An operator of the caller's own."""
    made = torch.library.Library("hostile_bundles", "DEF")
    made.define("twice(Tensor x) -> Tensor")
    made.impl("twice", lambda x: x * 2, "CPU")
    made.impl("twice", lambda x: x * 2, "Meta")
    yield made
    made._destroy()


class Twice(nn.Module):
    """Calls an operator of the caller's."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns twice of what it is given."""
        return torch.ops.hostile_bundles.twice(x) + 1


@pytest.mark.usefixtures("library")
def test_operators_that_are_not_listed_are_named_and_allowed_by_callers(tmp_path: Path) -> None:
    x, names = torch.rand(3), ["hostile_bundles::twice.default"]
    with pytest.raises(ValueError, match=r"a graph may not call hostile_bundles::twice\.default: .*operators=\['host"):
        export(Twice(), (x,), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
    path = export(Twice(), (x,), tmp_path / "model", operators=names)
    with pytest.raises(ValueError, match=r"graph\.json: 'hostile_bundles::twice\.default' is not in the list"):
        load_bundle(path)
    with pytest.raises(ValueError, match="operators takes names as NAMESPACE::NAME"):
        load_bundle(path, operators=["twice"])
    for allowed in (names, ["hostile_bundles::twice"]):
        assert load_bundle(path, operators=allowed)(x).equal(x * 2 + 1)


def test_the_command_line_trusts_no_code_and_allows_exact_operators(
    bundle: Path, recstore: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    changed_graph(bundle, calls=[["aten::from_file.default", ["x", 7], {}]])
    assert recstore("serve-model", bundle) == 2
    assert "'aten::from_file.default' is not in the list of operators" in capsys.readouterr().err
    assert recstore("serve-model", bundle, "--operators", "aten::from_file") == 2
    assert "aten::from_file.default: the argument shared must be" in capsys.readouterr().err
    assert recstore("serve-model", bundle, "--operators", "from_file") == 2
    assert "operators takes names as NAMESPACE::NAME" in capsys.readouterr().err
    files = json.loads((bundle / "manifest.json").read_text())["files"]
    changed_manifest(bundle, files={"program.pt2": files["program.pt2"]})
    assert recstore("serve-model", bundle) == 2
    assert "serve it with --trust-code" in capsys.readouterr().err


def test_rows_come_from_the_directory_that_was_opened(bundle: Path) -> None:
    opened = load_bundle(bundle)
    before = opened(IDS)["logits"]
    bundle.rename(bundle.with_name("away"))
    assert opened(IDS)["logits"].equal(before)
    assert FrozenTable(bundle.with_name("away") / "tables" / "0.safetensors").rows == 100
