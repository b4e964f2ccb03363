"""Files that are written for a user: checked first, whole once they are there, and no other file is touched."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from recstore_ops import Table, TableConfig
from recstore_ops.config.paths import check_output_file, replacing
from recstore_ops.ops import operators
from recstore_ops.training import write_criteo
from recstore_ops.training.metrics.evaluation import Scores
from recstore_ops.training.report.predictions_file import PredictionsFile
from recstore_ops.training.run.vectors import Vectors, write_vectors
from recstore_ops.transfer import export_parquet, export_safetensors

pytestmark = pytest.mark.tier("quick")


def write_predictions(path: Path, _: Table) -> None:
    with PredictionsFile(path, names_files=False, has_labels=True) as predictions:
        predictions.write(Scores(torch.zeros(3), torch.ones(3), None), 0)


class ThreeVectors:
    """Vectors of a run that there need not be."""

    ids, dim = np.arange(3), 2

    def __len__(self) -> int:
        return 3

    def parts(self) -> Iterator[tuple[Any, Any]]:
        yield self.ids, np.zeros((3, 2), dtype=np.float32)


def write_some_vectors(path: Path, _: Table) -> None:
    write_vectors(path, cast(Vectors, ThreeVectors()), lambda count: None)


WRITERS: dict[str, tuple[Callable[[Path, Table], object], tuple[str, ...]]] = {
    "p.csv": (write_predictions, ("p.csv",)),
    "p.parquet": (write_predictions, ("p.parquet",)),
    "v.npy": (write_some_vectors, ("v.ids.npy", "v.npy")),
    "v.parquet": (write_some_vectors, ("v.parquet",)),
    "t.parquet": (lambda path, table: export_parquet(path, table), ("t.parquet",)),
    "t.safetensors": (lambda path, table: export_safetensors(path, [table]), ("t.safetensors",)),
    "c.txt": (lambda path, _: write_criteo(path, 3), ("c.txt",)),
    "c.txt.gz": (lambda path, _: write_criteo(path, 3), ("c.txt.gz",)),
}


@pytest.fixture
def table(table_name: Callable[[], str]) -> Table:
    table = Table(table_name(), 2, TableConfig(optimizer={"kind": "sgd", "lr": 0.1}))
    operators.emb_update(table.handle, torch.arange(3), torch.ones(3, 2))
    return table


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_is_written_touches_no_other(name: str, table: Table, tmp_path: Path) -> None:
    write, files = WRITERS[name]
    like = [f"{prefix}{file}{ending}" for file in files for prefix in ("", ".") for ending in (".new", ".tmp", ".part")]
    for other in like:
        (tmp_path / other).write_text("kept")
    write(tmp_path / name, table)
    assert sorted(os.listdir(tmp_path)) == sorted([*like, *files])
    assert all((tmp_path / other).read_text() == "kept" for other in like)


@pytest.mark.parametrize("name", WRITERS)
def test_a_name_may_be_as_long_as_names_can_be(name: str, table: Table, tmp_path: Path) -> None:
    write, files = WRITERS[name]
    path = tmp_path / ("x" * (255 - max(map(len, files))) + name)
    write(path, table)
    assert path.is_file()


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("kept")
    with pytest.raises(FileNotFoundError), replacing([tmp_path / "one", tmp_path / "two"]) as beside:
        beside[0].rename(tmp_path / "nowhere" / "lost")
    assert os.listdir(tmp_path) == ["one"]
    assert (tmp_path / "one").read_text() == "kept"


def test_files_have_the_permissions_of_new_files(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    with replacing([tmp_path / "made"]):
        pass
    assert (tmp_path / "made").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_file_that_cannot_be_made_is_named_by_its_own_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, replacing([tmp_path / "nowhere" / "made"]):
        pass
    assert caught.value.filename == str(tmp_path / "nowhere" / "made")


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("o.json", "expected an output that ends in .csv or .npy, got "),
        ("directory.csv", "directory.csv is a directory; the output must be a file"),
        ("nowhere/o.csv", "nowhere/o.csv cannot be written: there is no directory "),
        ("file/o.csv", "file/o.csv cannot be written: there is no directory "),
    ],
)
def test_a_place_where_no_file_can_be_is_refused(name: str, message: str, replaces: bool, tmp_path: Path) -> None:
    (tmp_path / "directory.csv").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=message):
        check_output_file(tmp_path / name, (".csv", ".npy"), replaces=replaces)


def test_a_file_is_replaced_where_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "o.csv").touch()
    check_output_file(tmp_path / "o.csv", (".csv",), replaces=True)
    with pytest.raises(ValueError, match=r"o\.csv exists already; --replace replaces it"):
        check_output_file(tmp_path / "o.csv", (".csv",), replaces=False)
