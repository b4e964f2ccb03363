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
from benches.scale_model import Cluster, Figure, fewest, page_with  # noqa: E402

BENCHES = (ROOT / "benches" / "README.md").read_text(encoding="utf-8")


def test_the_page_shows_what_the_model_computes() -> None:
    page = scale_model.PAGE.read_text(encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "benches.scale_model"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == scale_model.report() + "\n"
    assert page_with(page, scale_model.report()) == page, "python -m benches.scale_model --write"
    assert scale_model.PLOT.is_file()


def row(heading: str, start: str) -> list[float]:
    """The first number of each column, behind the first ones, of a row of the benches' figures."""
    part = BENCHES.split(f"### {heading}\n")[1].split("\n###")[0] if heading else BENCHES
    line = next(line for line in part.splitlines() if line.startswith(start))
    return [float(number) for number in re.findall(r"(?:^|\| ) *([\d.]+)", line[len(start) :])]


CASE = "| 8,000,000 | 64 | 65,536 | uniform |"


@pytest.mark.parametrize(
    ("figure", "measured"),
    [
        (scale_model.LOOKUP, row("Lookup", f"{CASE} cold | 1 |")[1] * 1e6 / 65_536),
        (scale_model.STEP, row("Full step: lookup, backward, AdaGrad", f"{CASE} 1 |")[1] * 1e6 / 65_536),
        (scale_model.INDEX, row("The id map alone", "| memory |")[0]),
        (scale_model.SAVE, row("", "| save, speed over plain writing |")[0]),
        (scale_model.LOAD, row("", "| load, speed over plain reading |")[0]),
    ],
    ids=lambda value: value.what if isinstance(value, Figure) else "",
)
def test_figures_are_about_what_the_benches_measured(figure: Figure, measured: float) -> None:
    assert measured / 2 < figure.value < 2 * measured


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
    limit = (ROOT / "rust/recstore/src/table/id_allocator.rs").read_text(encoding="utf-8")
    assert "const LIMIT: usize = u32::MAX as usize - 1;" in limit
    assert scale_model.MOST_ROWS == 2**32 - 1 - 1
    config = (ROOT / "rust/recstore-ps/src/server/config.rs").read_text(encoding="utf-8")
    assert f"max_connections: {scale_model.MOST_CONNECTIONS}," in config


def test_the_plot_is_drawn_and_a_wrong_argument_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scale_model.draw(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert scale_model.main(["--wirte"]) == 2
    assert "usage: python -m benches.scale_model [--write], got --wirte" in capsys.readouterr().err
