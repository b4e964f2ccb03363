"""Files in the shapes of public samples train as they are: of DeepCTR, FuxiCTR, xLearn, RecBole, MovieLens and Kaggle.

The rows are made here; only names, order and writing of the columns are those of the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from training_runs import train_new

from recstore_ops.training import TrainingConfig, find_input_files, open_input

pytestmark = pytest.mark.tier("quick")

ROWS = 120
RNG = np.random.default_rng(0)
Columns = dict[str, Sequence[Any]]


def some(*values: Any) -> list[Any]:
    return RNG.choice(np.array(values, dtype=object), ROWS).tolist()


def integers(most: int) -> list[int]:
    return RNG.integers(0, most, ROWS).tolist()


def with_gaps(values: Sequence[Any]) -> list[Any]:
    return [value if RNG.random() < 0.7 else "" for value in values]


def decimals(scale: float) -> list[str]:
    return [f"{value:.2f}" for value in RNG.random(ROWS) * scale]


def hexes() -> list[str]:
    return [f"{value:08x}" for value in RNG.integers(0, 2**32, 20)[RNG.integers(0, 20, ROWS)]]


def write_text(path: Path, columns: Columns, *, separator: str = ",", header: bool = True) -> None:
    lines = [separator.join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    path.write_text("\n".join([separator.join(columns), *lines] if header else lines) + "\n")


def criteo_columns(count: Callable[[], Sequence[Any]]) -> Columns:
    return {f"I{n}": count() for n in range(1, 14)} | {f"C{n}": with_gaps(hexes()) for n in range(1, 27)}


def deepctr_criteo(folder: Path) -> dict[str, Any]:
    counts = criteo_columns(lambda: with_gaps([f"{n}.0" for n in integers(100)]))
    write_text(folder / "train_criteo_sample.txt", {"label": integers(2), **counts})
    return {}


def deepctr_movielens(folder: Path) -> dict[str, Any]:
    columns = {
        "user_id": integers(9000),
        "movie_id": integers(3000),
        "rating": some(1, 2, 3, 4, 5),
        "timestamp": [978300000 + n for n in integers(10**6)],
        "title": some('"City of Lost Children, The (1995)"', "Toy Story (1995)"),
        "genres": some("Comedy|Drama", "Drama", "Action|Comedy|War"),
        "gender": some("M", "F"),
        "age": some(1, 18, 25),
        "occupation": integers(20),
        "zip": some("02139", "55455", "90210-1234"),
    }
    write_text(folder / "train.csv", columns)
    return {}


def deepctr_byterec(folder: Path) -> dict[str, Any]:
    names = ["uid", "user_city", "item_id", "author_id", "item_city", "channel"]
    columns: Columns = {name: integers(50) for name in names}
    columns |= {"finish": integers(2), "like": integers(2), "music_id": integers(9), "device": integers(99)}
    columns |= {"time": [53_000_000_000 + n for n in integers(10**6)], "duration_time": integers(30)}
    write_text(folder / "train.txt", columns, separator="\t", header=False)
    return {"label_column": "column_7", "drop_columns": ("column_8",)}


def fuxictr_columns() -> Columns:
    names = ["userid", "adgroup_id", "pid", "cate_id", "campaign_id", "customer", "brand"]
    return {"clk": integers(2), **{name: integers(60) for name in names}, "price": decimals(500.0)}


def fuxictr_tiny_csv(folder: Path) -> dict[str, Any]:
    write_text(folder / "train_sample.csv", fuxictr_columns())
    write_text(folder / "test_sample.csv", fuxictr_columns())
    return {"model": "deepfm"}


def fuxictr_tiny_parquet(folder: Path) -> dict[str, Any]:
    columns = fuxictr_columns() | {"price": [float(price) for price in decimals(500.0)]}
    pq.write_table(pa.table(columns), folder / "train.parquet")
    pq.write_table(pa.table(dict(reversed(columns.items()))), folder / "test.parquet")
    return {"model": "deepfm"}


def fuxictr_tiny_emb(folder: Path) -> dict[str, Any]:
    vectors = RNG.random((ROWS, 4), dtype=np.float32).tolist()
    pq.write_table(pa.table({"click": integers(2), "item": integers(9), "item_emb": vectors}), folder / "train.parquet")
    return {"model": "deepfm"}


def xlearn_titanic(folder: Path) -> dict[str, Any]:
    columns = {"label": integers(2), "class": some(1, 2, 3), "sex": integers(2), "age": with_gaps(decimals(80.0))}
    columns |= {"siblings": integers(4), "fare": decimals(500.0), "cabin": integers(9)}
    write_text(folder / "titanic_train.txt", columns, separator="\t", header=False)
    return {}


def xlearn_house_price(folder: Path) -> dict[str, Any]:
    columns = {"price": [100_000 + 1000 * n for n in integers(300)], "rooms": integers(9), "area": decimals(300.0)}
    write_text(folder / "house_price_train.txt", columns, header=False)
    return {"label_column": "column_1", "rating_threshold": 250_000.0}


def recbole(folder: Path) -> dict[str, Any]:
    columns = {"user_id:token": integers(90), "item_id:token": integers(40), "genres:token_seq": some("A B", "C")}
    columns |= {"rating:float": some(1, 3, 5), "timestamp:float": integers(10**9)}
    write_text(folder / "ml-train.inter", columns, separator="\t")
    return {}


def spark_parts(folder: Path) -> dict[str, Any]:
    for day in (1, 2):
        part = folder / "train" / f"day={day}"
        part.mkdir(parents=True)
        pq.write_table(pa.table({"label": integers(2), "user": integers(20)}), part / "part-0.parquet")
        empty = pa.table({"user": pa.array([], pa.int32()), "label": pa.array([], pa.int64())})
        pq.write_table(empty, part / "part-1.parquet")
    (folder / "train" / "_SUCCESS").touch()
    return {}


def kaggle_criteo(folder: Path) -> dict[str, Any]:
    write_text(
        folder / "train.txt",
        {"label": integers(2), **criteo_columns(lambda: with_gaps(integers(9)))},
        separator="\t",
        header=False,
    )
    write_text(folder / "test.txt", criteo_columns(lambda: with_gaps(integers(9))), separator="\t", header=False)
    (folder / "readme.txt").write_text("about the data\n")
    return {}


def kaggle_avazu(folder: Path) -> dict[str, Any]:
    hex_names = ["site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category"]
    columns: Columns = {"id": integers(10**9), "click": integers(2), "hour": [14102100] * ROWS, "C1": [1005] * ROWS}
    columns |= {"banner_pos": integers(2)} | {name: hexes() for name in hex_names}
    columns |= {name: hexes() for name in ("device_id", "device_ip", "device_model")}
    columns |= {name: integers(5) for name in ("device_type", "device_conn_type", *(f"C{n}" for n in range(14, 22)))}
    write_text(folder / "train.csv", columns)
    write_text(folder / "test.csv", {name: cells for name, cells in columns.items() if name != "click"})
    write_text(folder / "sampleSubmission.csv", {"id": columns["id"], "click": [0.5] * ROWS})
    return {}


SHAPES: dict[str, tuple[Callable[[Path], dict[str, Any]], tuple[str, ...], tuple[str, ...]]] = {
    # What writes the files; some fields, and some dense features, that must be found.
    "DeepCTR criteo": (deepctr_criteo, ("C1", "C26"), ("I1", "I13")),
    "DeepCTR movielens": (deepctr_movielens, ("user_id", "title", "genres", "zip"), ()),
    "DeepCTR byterec": (deepctr_byterec, ("column_1", "column_12"), ()),
    "FuxiCTR tiny_csv": (fuxictr_tiny_csv, ("userid", "brand"), ("price",)),
    "FuxiCTR tiny_parquet": (fuxictr_tiny_parquet, ("userid", "brand"), ("price",)),
    "FuxiCTR tiny_emb": (fuxictr_tiny_emb, ("item",), ("item_emb[0]", "item_emb[3]")),
    "xLearn titanic": (xlearn_titanic, ("column_2", "column_7"), ("column_4", "column_6")),
    "xLearn house_price": (xlearn_house_price, ("column_2",), ("column_3",)),
    "RecBole": (recbole, ("user_id", "item_id", "genres"), ()),
    "parts of Spark": (spark_parts, ("user",), ()),
    "Kaggle criteo": (kaggle_criteo, ("C1", "C26"), ("I1", "I13")),
    "Kaggle avazu": (kaggle_avazu, ("hour", "site_id", "C21"), ()),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_public_shape_trains_as_it_is(tmp_path: Path, shape: str) -> None:
    write, fields, dense = SHAPES[shape]
    options = write(tmp_path)
    train, test = find_input_files([tmp_path], [])
    config = TrainingConfig(train=train, test=test, epochs=2, batch_size=20, patience=0, **options)
    rows = open_input(config)
    assert set(fields) <= set(rows.train.field_names)
    assert set(dense) <= set(rows.train.dense_names)
    assert not {"label", "clk", "rating", "timestamp", "time"} & set(rows.train.field_names)
    assert (rows.test is None) == (not test or shape.startswith("Kaggle"))
    records = train_new(config, "shape")
    assert np.isfinite(records[-1].train_loss)
    # No value is so large that a model cannot be trained on it.
    assert records[-1].train_loss < 1.0
