"""Bundles: models of every kind exported with their tables, opened in the same process and in a fresh one, damaged."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from optimizer_kinds import TABLES
from torch import Tensor, nn
from warm_programs import output_of

from recstore_ops import (
    DistEmbedding,
    DistEmbeddingBag,
    KeyedJaggedTensor,
    RecStoreEmbeddingBagCollection,
    SparseOptimizer,
    bucket_ids,
    cross_ids,
    ngram_ids,
    prefix_ids,
)
from recstore_ops.ops import operators
from recstore_ops.serving import Bundle, exchanging, export, load_bundle
from recstore_ops.serving.graph_operators import Operators
from recstore_ops.serving.manifest import Manifest
from recstore_ops.serving.opening import BundleFiles

pytestmark = pytest.mark.tier("test")

TableName = Callable[[], str]

IDS, OFFSETS = torch.tensor([[1, 2], [3, 4], [5, 99]]), torch.tensor([0, 2, 5])


class Clicks(nn.Module):
    """A perceptron over rows of two tables."""

    def __init__(self, user: str, item: str) -> None:
        super().__init__()
        self.user = DistEmbedding(None, 4, user, initializer={"kind": "normal", "std": 1.0})
        self.item = DistEmbedding(None, 4, item, initializer={"kind": "normal", "std": 1.0})
        self.dense = nn.Sequential(nn.Linear(8, 3), nn.Dropout(0.5), nn.ReLU(), nn.Linear(3, 1))

    def forward(self, ids: Tensor) -> Tensor:
        """Returns logits [B] of ids [B, 2]."""
        return self.dense(torch.cat([self.user(ids[:, 0]), self.item(ids[:, 1])], dim=1)).squeeze(1)


class Made(nn.Module):
    """Rows of ids that are made of tokens and strings."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.table = DistEmbedding(None, 4, name)
        operators.emb_write(self.table.table.handle, torch.arange(50), torch.randn(50, 4))

    def forward(self, tokens: Tensor, characters: Tensor, offsets: Tensor) -> Tensor:
        """Returns rows of tokens [B, T] and of N strings, of 4 columns."""
        crossed = bucket_ids(cross_ids([tokens, tokens.flip(1)], 5), 50, 6)
        grams = ngram_ids(tokens, 2, 2, 50)
        prefixes = prefix_ids(tokens[:, :2] % 6, [6, 6])
        strings = bucket_ids(operators.hash_strings(characters, offsets), 50)
        return self.table(torch.cat([crossed.flatten(), grams.flatten(), prefixes.flatten(), strings]))


MADE_OF = (torch.tensor([[1, 2, 3], [5, 5, 5]]), torch.arange(30, dtype=torch.uint8), torch.tensor([0, 9, 9, 30]))


@pytest.fixture
def clicks(table_name: TableName) -> Clicks:
    """A model whose tables have some rows."""
    model = Clicks(table_name(), table_name())
    for module in (model.user, model.item):
        operators.emb_write(module.table.handle, torch.arange(6), torch.randn(6, 4))
    return model


def expected(model: nn.Module, *inputs: Tensor | KeyedJaggedTensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(*inputs)


def test_a_bundle_gives_what_the_model_gave_when_it_was_exported(clicks: Clicks, tmp_path: Path) -> None:
    logits, many = expected(clicks, IDS), expected(clicks, IDS.repeat(7, 1))
    clicks.train()
    bundle = load_bundle(export(clicks, (IDS,), tmp_path / "model"))
    assert clicks.training, "export leaves the model as it was"
    assert bundle(IDS).equal(logits)
    assert bundle(IDS.repeat(7, 1)).equal(many), "the batch varies"
    for module in (clicks.user, clicks.item):
        operators.emb_write(module.table.handle, torch.arange(6), torch.zeros(6, 4))
    assert bundle(IDS).equal(logits), "what is trained afterwards does not show"
    assert not bundle(IDS).requires_grad


def test_dense_tensors_lie_as_those_of_torch(clicks: Clicks, tmp_path: Path) -> None:
    path = export(clicks, (IDS,), tmp_path / "model")
    files = BundleFiles(path)
    state = files.state(files.graph(Operators()), files.tables("mapped"))
    assert len(state) > 3
    assert all(value.data_ptr() % 64 == 0 for value in state.values())


FRESH = """
import sys, torch
from recstore_ops import DistEmbedding
from recstore_ops.ops import operators
from recstore_ops.serving import load_bundle
others = [DistEmbedding(None, 4, name) for name in sys.argv[2].split(",")]
for other in others:
    operators.emb_write(other.table.handle, torch.arange(6), torch.full((6, 4), 100.0))
print(load_bundle(sys.argv[1])(torch.tensor([[1, 2], [3, 4], [5, 99]])).tolist())
"""


def test_a_fresh_process_gives_the_same_whatever_is_open(clicks: Clicks, tmp_path: Path) -> None:
    path = export(clicks, (IDS,), tmp_path / "model")
    names = ["other", clicks.item.table.name, "further", clicks.user.table.name]
    assert json.loads(output_of(FRESH, path, ",".join(names))) == expected(clicks, IDS).tolist()


def test_ids_are_made_in_a_bundle(table_name: TableName, tmp_path: Path) -> None:
    model = Made(table_name())
    bundle = load_bundle(export(model, MADE_OF, tmp_path / "model"))
    assert list(bundle.manifest.files) != ["program.pt2"], "it has a graph"
    assert bundle(*MADE_OF).equal(expected(model, *MADE_OF))
    more = (torch.arange(12).view(4, 3), MADE_OF[1][:7], torch.tensor([0, 7]))
    assert bundle(*more).equal(expected(model, *more))


def test_two_bundles_of_one_model_stand_side_by_side(clicks: Clicks, tmp_path: Path) -> None:
    before = expected(clicks, IDS)
    first = load_bundle(export(clicks, (IDS,), tmp_path / "first"))
    operators.emb_write(clicks.user.table.handle, torch.arange(6), torch.ones(6, 4))
    second = load_bundle(export(clicks, (IDS,), tmp_path / "second"))
    assert first(IDS).equal(before)
    assert second(IDS).equal(expected(clicks, IDS))


def test_bags_and_collections_are_bundled(table_name: TableName, tmp_path: Path) -> None:
    bag = DistEmbeddingBag(None, 4, table_name(), mode="sum")
    operators.emb_write(bag.table.handle, torch.arange(6), torch.randn(6, 4))
    ids = IDS.flatten()
    bundle = load_bundle(export(bag, (ids, OFFSETS), tmp_path / "bag"))
    assert bundle(ids, OFFSETS).equal(expected(bag, ids, OFFSETS))

    names = [table_name(), table_name()]
    configs = [
        {"name": name, "num_embeddings": None, "embedding_dim": 4, "feature_names": [name], "pooling": "sum"}
        for name in names
    ]

    class Pooled(nn.Module):
        """A collection behind tensors."""

        def __init__(self) -> None:
            super().__init__()
            self.bags = RecStoreEmbeddingBagCollection(configs)

        def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
            """Returns the pooled rows, [B, F, D]."""
            return self.bags(KeyedJaggedTensor(names, ids, lengths=lengths))

    model, lengths = Pooled(), torch.tensor([2, 1, 0, 3])
    for module in model.bags.embedding_bags.values():
        operators.emb_write(module.table.handle, torch.arange(6), torch.randn(6, 4))
    bundle = load_bundle(export(model, (ids, lengths), tmp_path / "bags"))
    assert bundle(ids, lengths).equal(expected(model, ids, lengths))
    assert sorted(bundle.tables) == sorted(names)


def test_rows_that_any_rule_trained_are_bundled(table_name: TableName, tmp_path: Path) -> None:
    class Rows(nn.Module):
        """The rows of a table of each rule, side by side."""

        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(DistEmbedding(None, 5, table_name(), **options) for options in TABLES)

        def forward(self, ids: Tensor) -> Tensor:
            """Returns rows [N, T * D] of ids [N]."""
            return torch.cat([table(ids) for table in self.tables], dim=1)

    model, ids = Rows(), torch.arange(10)
    optimizer = SparseOptimizer(modules=list(model.tables))
    # Rows 7 to 9 rest at the last steps: those that catch up lie as they were, and are read as they would be.
    for count in (10, 7, 7):
        rows = model(ids[:count])
        (rows * rows.detach()).sum().backward()
        optimizer.step()
    bundle = load_bundle(export(model, (ids,), tmp_path / "rules"))
    assert bundle(ids).equal(expected(model, ids))


def test_features_are_inputs_by_name(table_name: TableName, tmp_path: Path) -> None:
    names = [table_name(), table_name()]
    bags = RecStoreEmbeddingBagCollection(
        [
            {"name": name, "num_embeddings": None, "embedding_dim": 4, "feature_names": [f"f{i}"]}
            for i, name in enumerate(names)
        ]
    )
    for module in bags.embedding_bags.values():
        operators.emb_write(module.table.handle, torch.arange(6), torch.randn(6, 4))
    features = KeyedJaggedTensor(["f0", "f1"], torch.arange(5), lengths=torch.tensor([2, 1, 0, 0, 1, 1]))
    path = export(bags, (features,), tmp_path / "bags")
    bundle = load_bundle(path)
    one = KeyedJaggedTensor(["f0", "f1"], torch.tensor([3, 5]), lengths=torch.tensor([0, 2]))
    for each in (features, one):
        assert bundle(each).equal(expected(bags, each))
    assert [(each["name"], each["shape"]) for each in bundle.manifest.inputs] == [
        ("features_values", [-1]),
        ("features_lengths", [-1, 2]),
    ]
    weighted = KeyedJaggedTensor(["f0", "f1"], torch.arange(2), torch.ones(2), lengths=torch.tensor([1, 1]))
    with pytest.raises(ValueError, match="the bundle takes the arguments that it was exported with"):
        bundle(weighted)


def test_arguments_have_names_and_outputs_keys(clicks: Clicks, tmp_path: Path) -> None:
    class Both(nn.Module):
        """Two outputs."""

        def __init__(self) -> None:
            super().__init__()
            self.clicks = clicks

        def forward(self, ids: Tensor, scale: Tensor) -> dict[str, Tensor]:
            """Returns logits and their multiples."""
            logits = self.clicks(ids)
            return {"logits": logits, "scaled": logits * scale}

    inputs = {"ids": IDS, "scale": torch.rand(3)}
    bundle = load_bundle(export(Both(), inputs, tmp_path / "model"))
    with torch.no_grad():
        wanted = Both().eval()(**inputs)
    given = bundle(**inputs)
    assert all(given[name].equal(wanted[name]) for name in ("logits", "scaled"))
    assert [each["name"] for each in (*bundle.manifest.inputs, *bundle.manifest.outputs)] == [
        "ids",
        "scale",
        "logits",
        "scaled",
    ]


def test_a_bundle_only_predicts(clicks: Clicks, tmp_path: Path) -> None:
    bundle = load_bundle(export(clicks, (IDS,), tmp_path / "model"))
    assert bundle.eval() is bundle
    with pytest.raises(RuntimeError, match="only predicts: train the model that it was exported from"):
        bundle.train()


def test_the_example_is_not_in_the_bundle(clicks: Clicks, tmp_path: Path) -> None:
    secret = torch.tensor([[0x5EC2E75EC2E7, 2], [3, 4]])
    path = export(clicks, (secret,), tmp_path / "model")
    with zipfile.ZipFile(path / "program.pt2") as program:
        parts = [program.read(name) for name in program.namelist()]
    parts += [file.read_bytes() for file in path.iterdir() if file.is_file()]
    assert not any(secret.numpy().tobytes()[:8] in part or str(int(secret[0, 0])).encode() in part for part in parts)


def test_what_reads_no_table_of_a_name_is_refused(tmp_path: Path) -> None:
    class Default(nn.Module):
        """Reads the default table."""

        def forward(self, ids: Tensor) -> Tensor:
            """Returns rows."""
            return operators.emb_read_default(ids, 4)

    with pytest.raises(ValueError, match="reads no table of a name: a bundle takes tables of modules only"):
        export(Default(), (IDS.flatten(),), tmp_path / "model")


def test_encodings_are_chosen_by_table(clicks: Clicks, tmp_path: Path) -> None:
    name = clicks.user.table.name
    bundle = load_bundle(export(clicks, (IDS,), tmp_path / "model", encoding={name: "int8"}))
    assert {table.name: table.encoding for table in bundle.tables.values()} == {
        name: "int8",
        clicks.item.table.name: "float32",
    }
    torch.testing.assert_close(bundle(IDS), expected(clicks, IDS), atol=0.05, rtol=0.05)
    with pytest.raises(ValueError, match="encoding names table 'none', the model reads"):
        export(clicks, (IDS,), tmp_path / "other", encoding={"none": "int8"})


def test_what_is_there_stays_unless_it_may_go(clicks: Clicks, tmp_path: Path) -> None:
    path = export(clicks, (IDS,), tmp_path / "model")
    with pytest.raises(ValueError, match="is there already; replace=True, or --replace, writes"):
        export(clicks, (IDS,), path)
    operators.emb_write(clicks.user.table.handle, torch.arange(6), torch.ones(6, 4))
    assert load_bundle(export(clicks, (IDS,), path, replace=True))(IDS).equal(expected(clicks, IDS))
    other = tmp_path / "notes"
    other.mkdir()
    (other / "todo.txt").write_text("keep me")
    with pytest.raises(ValueError, match=r"notes is no bundle: it has no manifest\.json"):
        export(clicks, (IDS,), other, replace=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model", "notes"]


def test_files_that_the_manifest_does_not_list_stay(clicks: Clicks, tmp_path: Path) -> None:
    path = export(clicks, (IDS,), tmp_path / "model")
    (path / "tables" / "below").mkdir()
    for name in ("notes.txt", "tables/below/a"):
        (path / name).write_text("keep me")
    with pytest.raises(ValueError, match=r"model has notes\.txt, tables/below, tables/below/a, of which the manifest"):
        export(clicks, (IDS,), path, replace=True)
    assert (path / "notes.txt").read_text() == (path / "tables" / "below" / "a").read_text() == "keep me"
    assert load_bundle(path)(IDS).equal(expected(clicks, IDS))


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_link_is_no_place_for_a_bundle(clicks: Clicks, tmp_path: Path, replace: bool, is_there: bool) -> None:
    if is_there:
        export(clicks, (IDS,), tmp_path / "model")
    (tmp_path / "link").symlink_to(tmp_path / "model")
    with pytest.raises(
        ValueError, match=r"link is a symbolic link to .*model: name the directory of the bundle itself"
    ):
        # A model that cannot be exported: the link is looked at first.
        export(nn.Identity(), (), tmp_path / "link", replace=replace)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "model"][: 1 + is_there]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_bundle_is_replaced_in_one_move(
    clicks: Clicks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    path = export(clicks, (IDS,), tmp_path / "model")
    before, opened = expected(clicks, IDS), load_bundle(path)
    operators.emb_write(clicks.user.table.handle, torch.arange(6), torch.ones(6, 4))
    if not at_once:
        monkeypatch.setattr(exchanging, "_is_exchanged", lambda new, old: False)
    renamed = []

    def note(old: Path, new: Path) -> Path:
        renamed.append(new.name)
        return rename(old, new)

    rename = Path.rename
    monkeypatch.setattr(Path, "rename", note)
    export(clicks, (IDS,), path, replace=True)
    assert renamed == ([] if at_once else ["bundle.aside", "model", "bundle"])
    assert load_bundle(path)(IDS).equal(expected(clicks, IDS))
    assert opened(IDS).equal(before)
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_an_exchange_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanging, "_is_exchanged", lambda new, old: False)
    (tmp_path / "old").mkdir()
    with pytest.raises(FileNotFoundError):
        exchanging.exchange(tmp_path / "new", tmp_path / "old")
    assert [each.name for each in tmp_path.iterdir()] == ["old"]


def test_an_export_that_fails_leaves_nothing(clicks: Clicks, tmp_path: Path) -> None:
    operators.emb_write(clicks.item.table.handle, torch.tensor([1]), torch.full((1, 4), 1e9))
    with pytest.raises(OSError, match="cannot be kept as int4"):
        export(clicks, (IDS,), tmp_path / "model", encoding="int4")
    assert not list(tmp_path.iterdir())


def use_all_of(path: Path) -> None:
    """Opens a bundle and reads all of its files."""
    bundle = load_bundle(path, trusted=True)
    bundle(IDS)
    bundle.program()


FILES = ["manifest.json", "graph.json", "state.safetensors", "program.pt2"] + [f"tables/{n}.safetensors" for n in "01"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_damage_is_refused_with_the_file(clicks: Clicks, tmp_path: Path, file: str, damage: str) -> None:
    path = export(clicks, (IDS,), tmp_path / "model")
    content = bytearray((path / file).read_bytes())
    (path / file).unlink()
    if damage == "cut":
        (path / file).write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        content[len(content) // 2] ^= 1
        (path / file).write_bytes(content)
    with pytest.raises((OSError, ValueError, RuntimeError), match=file.rpartition("/")[2].replace(".", r"\.")):
        use_all_of(path)


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_program_that_is_not_run_must_be_there(clicks: Clicks, tmp_path: Path, damage: str) -> None:
    path = export(clicks, (IDS,), tmp_path / "model")
    content = (path / "program.pt2").read_bytes()
    (path / "program.pt2").unlink()
    if damage == "cut":
        (path / "program.pt2").write_bytes(content[:-1])
    expected_bytes = f"expected {len(content)} bytes, got {len(content) - 1}"
    with pytest.raises(OSError, match=r"program\.pt2") as caught:
        load_bundle(path)
    assert damage == "missing" or expected_bytes in str(caught.value)


def test_files_of_other_bundles_are_refused(clicks: Clicks, tmp_path: Path) -> None:
    first = export(clicks, (IDS,), tmp_path / "first")
    operators.emb_write(clicks.user.table.handle, torch.arange(6), torch.ones(6, 4))
    second = export(clicks, (IDS,), tmp_path / "second")
    for name in ("0", "1"):
        other = (second / "tables" / f"{name}.safetensors").read_bytes()
        (first / "tables" / f"{name}.safetensors").write_bytes(other)
    with pytest.raises(OSError, match=r"is not of this bundle: expected table .* with fingerprint"):
        load_bundle(first)


def test_another_version_and_another_directory_are_refused(clicks: Clicks, tmp_path: Path) -> None:
    path = export(clicks, (IDS,), tmp_path / "model")
    manifest = json.loads((path / "manifest.json").read_text())
    assert isinstance(load_bundle(path), Bundle)
    manifest_read = Manifest.read(path)
    assert manifest_read.inputs == ({"name": "ids", "dtype": "int64", "shape": [-1, 2], "sizes": ["n0", None]},)
    assert manifest_read.outputs == ({"name": "output", "dtype": "float32", "shape": [-1], "sizes": ["n0"]},)
    (path / "manifest.json").write_text(json.dumps({**manifest, "version": 4}))
    with pytest.raises(OSError, match="damaged: its checksum is another"):
        load_bundle(path)
    with pytest.raises(ValueError, match=r"is no bundle: it has no manifest\.json"):
        load_bundle(tmp_path)
