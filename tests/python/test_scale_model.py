"""The page about scale shows what the model computes, and the model rests on what was measured."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benches import scale_model  # noqa: E402
from benches.recorded import recorded  # noqa: E402
from benches.scale_model import Cluster, fewest, page_with  # noqa: E402

pytestmark = pytest.mark.tier("quick")


def test_the_page_shows_what_the_model_computes() -> None:
    page = scale_model.PAGE.read_text(encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "benches.scale_model"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == scale_model.report() + "\n"
    assert page_with(page, scale_model.report()) == page, "python -m benches.scale_model --write"
    assert scale_model.PLOT.is_file()


TABLE = """### Lookup

| rows | dim | yardstick | recstore | x yardstick | recstore |
| --- | --- | --- | --- | --- | --- |
| 1,000 | 64 | 4.54 us (4.05..8.27) | 1,050 us (900..2,000) | 1.41 | none |
| 1,000 | 128 | 3 s (1 s..4 s) | none | 2 | 3 |

### Memory

| figure | value | unit |
| --- | --- | --- |
| memory | 25.2 | bytes a key |
"""


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "README.md"
    page.write_text(TABLE, encoding="utf-8")
    monkeypatch.setattr("benches.recorded.README", page)


@pytest.mark.usefixtures("tables")
def test_a_figure_is_read_from_its_table() -> None:
    assert recorded("Lookup", "recstore", "1,000", "64") == 1_050e3
    assert recorded("Lookup", "yardstick", "1,000", "64") == pytest.approx(4_540)
    assert recorded("Lookup", "yardstick", "1,000", "128") == 3e9
    assert recorded("Memory", "value", "memory") == 25.2


@pytest.mark.usefixtures("tables")
def test_a_column_is_read_behind_another_one() -> None:
    assert recorded("Lookup", "recstore", "1,000", "64", of="yardstick") == 1_050e3
    with pytest.raises(ValueError, match="shows 'none' as recstore"):
        recorded("Lookup", "recstore", "1,000", "64", of="x yardstick")
    with pytest.raises(ValueError, match="shows no yardstick of 1,000, 64 below Lookup"):
        recorded("Lookup", "yardstick", "1,000", "64", of="recstore")


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (("Step", "recstore", "1,000"), "README.md shows no recstore of 1,000 below Step"),
        (("Memory", "recstore", "memory"), "README.md shows no recstore of memory below Memory"),
        (("Lookup", "recstore", "1,000", "8"), "README.md shows no recstore of 1,000, 8 below Lookup"),
        (("Lookup", "value", "memory"), "README.md shows no value of memory below Lookup"),
        (("Lookup", "recstore", "1,000", "128"), "README.md shows 'none' as recstore of 1,000, 128 below Lookup"),
    ],
)
def test_a_figure_that_is_not_there_is_told(asked: tuple[str, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        recorded(*asked)


def test_the_model_rests_on_recorded_figures() -> None:
    case = ("8,000,000", "64", "65,536", "uniform")
    lookup = recorded("Lookup", "recstore", *case, "cold", "1", "spread")
    step = recorded("Full step: lookup, backward, AdaGrad", "recstore", *case, "1", "spread")
    assert scale_model.LOOKUP.value == lookup / 65_536
    assert scale_model.STEP.value == pytest.approx((step - lookup) / 65_536)
    assert scale_model.INDEX.value == recorded("The id map alone", "value", "memory")
    assert scale_model.SAVE.value == min(1, recorded("Checkpoints", "value", "save, speed over plain writing"))
    assert scale_model.LOAD.value == min(1, recorded("Checkpoints", "value", "load, speed over plain reading"))


def test_every_figure_tells_where_it_is_from() -> None:
    for figure in scale_model.FIGURES:
        assert figure.source.startswith(("cell `", "test `", "assumed"))
        for name in re.findall(r"test `(\w+\.rs)`", figure.source):
            assert (ROOT / "rust" / "recstore-ps" / "tests" / name).is_file()


def test_more_servers_hold_more_and_do_more_until_requests_are_most_of_the_work() -> None:
    few, many = Cluster(8), Cluster(16)
    assert many.bytes == few.bytes / 2
    assert many.save_seconds == few.save_seconds / 2
    assert many.rows_by_cores == pytest.approx(2 * few.rows_by_cores)
    assert many.rows_by_network == pytest.approx(2 * few.rows_by_network)
    assert many.request_share > few.request_share
    lookups = [Cluster(servers).lookups for servers in range(1, 1000)]
    most = lookups.index(max(lookups))
    assert lookups[: most + 1] == sorted(lookups[: most + 1])
    assert Cluster(most + 2).limit == "workers"


def test_what_does_not_fit_is_named() -> None:
    assert Cluster(1, workers=1025).breaks() == ["row numbers", "memory", "connections"]
    assert Cluster(1000, 100 * scale_model.TERA).breaks() == []
    servers = fewest(lambda one: not one.breaks(), scale_model.TERA)
    assert Cluster(servers, scale_model.TERA).breaks() == []
    assert Cluster(servers - 1, scale_model.TERA).breaks() == ["memory"]


def test_limits_are_those_of_the_code() -> None:
    limit = (ROOT / "rust/recstore/src/table/ids/id_allocator.rs").read_text(encoding="utf-8")
    assert "const LIMIT: usize = u32::MAX as usize - 1;" in limit
    assert scale_model.MAX_ROWS == 2**32 - 1 - 1
    config = (ROOT / "rust/recstore-ps/src/config.rs").read_text(encoding="utf-8")
    assert f"max_connections: {scale_model.MAX_CONNECTIONS}," in config


def test_the_plot_is_drawn_and_a_wrong_argument_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scale_model.draw(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert scale_model.main(["--wirte"]) == 2
    assert "usage: python -m benches.scale_model [--write], got --wirte" in capsys.readouterr().err
