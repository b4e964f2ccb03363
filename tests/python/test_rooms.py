"""The check of how the sources are cut, on small trees and on the store itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ci_programs import program

pytestmark = pytest.mark.tier("quick")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / ".ci" / "rust_rooms.py"

rust_rooms = program("rust_rooms")


def crate(root: Path, files: dict[str, str], name: str = "store") -> Path:
    for path, text in files.items():
        file = root / "rust" / name / "src" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return root


def faults(root: Path, files: dict[str, str], name: str = "store") -> list[str]:
    return list(rust_rooms.faults_of(crate(root, files, name)))


def test_rooms_that_import_downwards_are_no_fault(tmp_path: Path) -> None:
    files = {
        "lib.rs": "mod rows;\nmod table;\npub use table::Table;\npub use rows::Row;\n",
        "rows/mod.rs": "mod row;\npub use row::Row;\nuse super::rows::row as again;\n",
        "rows/row.rs": "use super::Other;\npub struct Row;\n",
        "table.rs": "use crate::rows::{self, Row as One};\npub struct Table(crate::Row);\n",
    }
    assert faults(tmp_path, files) == []


@pytest.mark.parametrize(
    "way_back",
    [
        "use crate::table::Table;",
        "use crate::{error::Error, table::{Table, Other}};",
        "use super::table::Table;",
        "fn of(table: &crate::table::Table) {}",
        "mod inner { use super::super::table::Table; }",
        "macro_rules! table { () => { $crate::table::Table } }",
        # Names that the crate's root shows are those of the rooms that they come from.
        "use crate::Table;",
        "use crate::{Error, Renamed};",
    ],
)
def test_a_circle_of_rooms_is_named_with_its_imports(tmp_path: Path, way_back: str) -> None:
    files = {
        "lib.rs": "pub use error::Error;\npub use table::{Table, Other as Renamed};\n",
        "error.rs": "pub struct Error;\n",
        "rows.rs": f"\n{way_back}\n",
        "table/mod.rs": "mod step;\n",
        "table/step.rs": "use crate::store::Store;\n",
        "store.rs": "use crate::rows::Row;\n",
    }
    assert faults(tmp_path, files) == [
        "store: a circle of rooms: rows -> table -> store -> rows (table in rust/store/src/rows.rs:2, "
        "store in rust/store/src/table/step.rs:1, rows in rust/store/src/store.rs:1)"
    ]


@pytest.mark.parametrize(
    "no_way_back",
    [
        "/// As [`crate::table::Table`].\nstruct Row;",
        '// use crate::table::Table;\n/* use crate::table::Table; */\nconst A: &str = "crate::table::Table";',
        'const A: &str = r#"a " crate::table::Table"#; const B: char = \'"\'; // crate::table',
        "#[cfg(test)]\nmod tests {\n    use crate::table::Table;\n}",
        "#[cfg(test)]\nuse crate::table::Table;",
        "mod inner { use super::table; }",
        "use other::crate_table::table::Table;",
    ],
)
def test_comments_literals_and_tests_import_nothing(tmp_path: Path, no_way_back: str) -> None:
    files = {"lib.rs": "", "rows.rs": no_way_back, "table.rs": "use crate::rows::Row;\n"}
    assert faults(tmp_path, files) == []


def test_each_circle_is_named_once(tmp_path: Path) -> None:
    files = {
        "lib.rs": "",
        "a.rs": "use crate::b::B;",
        "b.rs": "use crate::{a::A, c::C};",
        "c.rs": "use crate::d::D;",
        "d.rs": "use crate::c::C;",
    }
    told = [fault.partition(" (")[0] for fault in faults(tmp_path, files)]
    assert told == ["store: a circle of rooms: a -> b -> a", "store: a circle of rooms: c -> d -> c"]


@pytest.mark.parametrize(
    "way_back",
    [
        "use super::row::Row;",
        "use super::{inner, row::Row};",
        "use crate::rows::row::Row;",
        "use crate::rows::Row;",
        "use crate::Shown;",
        "macro_rules! row { () => { $crate::rows::row::Row } }",
    ],
)
def test_a_circle_of_files_is_named_with_its_imports(tmp_path: Path, way_back: str) -> None:
    files = {
        "lib.rs": "pub use rows::Row as Shown;\n",
        "rows/mod.rs": "mod inner;\nmod row;\npub use row::Row;\npub struct Other;\n",
        "rows/row.rs": "use super::Other;\nuse super::inner::deep::Deep;\npub struct Row;\n",
        "rows/inner/mod.rs": "mod deep;\nuse super::Other;\n",
        "rows/inner/deep.rs": f"{way_back.replace('super::', 'super::super::')}\n",
    }
    assert faults(tmp_path, files) == [
        "store: a circle of files: rows::inner::deep -> rows::row -> rows::inner::deep "
        "(rows::row in rust/store/src/rows/inner/deep.rs:1, rows::inner::deep in rust/store/src/rows/row.rs:2)"
    ]


def test_a_folder_and_its_files_are_no_circle(tmp_path: Path) -> None:
    files = {
        "lib.rs": "",
        "rows/mod.rs": "mod row;\nuse self::row::Row;\npub use crate::rows::row::Other;\npub struct Location;\n",
        "rows/row.rs": "use super::Location;\nuse crate::rows::Other as Same;\n",
    }
    assert faults(tmp_path, files) == []


def test_the_store_has_few_entries(tmp_path: Path) -> None:
    files = {f"room{number}.rs": "" for number in range(15)}
    assert faults(tmp_path, files, "recstore") == []
    assert faults(tmp_path, {"lib.rs": ""}, "recstore") == ["rust/recstore/src has 16 entries, of at most 15"]


def test_long_files_are_named_and_their_tests_do_not_count(tmp_path: Path) -> None:
    tests = "#[cfg(test)]\nmod tests {\n" + "// A line.\n" * 900 + "}\n"
    files = {"lib.rs": "\n" * 600 + tests, "tests.rs": "\n" * 900, "long.rs": "\n" * 601}
    (tmp_path / "python" / "tests").mkdir(parents=True)
    (tmp_path / "python" / "tests" / "long.py").write_text("\n" * 601, encoding="utf-8")
    (tmp_path / "python" / "long.py").write_text("\n" * 601, encoding="utf-8")
    (tmp_path / "cxx_bridge").mkdir()
    (tmp_path / "cxx_bridge" / "long.cpp").write_text("\n" * 700, encoding="utf-8")
    assert faults(tmp_path, files) == [
        "rust/store/src/long.rs has 601 lines without tests, of at most 600",
        "cxx_bridge/long.cpp has 700 lines without tests, of at most 600",
        "python/long.py has 601 lines without tests, of at most 600",
    ]


def function(name: str, lines: int) -> str:
    return f"fn {name}(of: [usize; 3]) -> String {{\n" + '    call("}");\n' * (lines - 2) + "}\n"


def test_long_functions_are_named(tmp_path: Path) -> None:
    rows = "".join(function(f"short{number}", 20) for number in range(20)) + "trait A { fn no_body(&self); }\n"
    assert faults(tmp_path, {"rows.rs": rows + function("long", 60)}) == []
    assert faults(tmp_path, {"rows.rs": rows + function("longer", 61)}) == [
        "the function longer in rust/store/src/rows.rs:402 has 61 lines, of at most 60"
    ]


def test_nine_functions_in_ten_are_short(tmp_path: Path) -> None:
    shorts = "".join(function(f"short{number}", 3) for number in range(8))
    longs = function("one", 21) + function("another", 21)
    assert faults(tmp_path, {"rows.rs": shorts + longs}) == [
        "nine in ten Rust functions have up to 21 lines, of at most 20"
    ]


def test_the_script_prints_faults_and_fails(tmp_path: Path) -> None:
    run = [sys.executable, SCRIPT, crate(tmp_path, {"lib.rs": "\n" * 601})]
    result = subprocess.run(run, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == "rust_rooms: rust/store/src/lib.rs has 601 lines without tests, of at most 600\n"
    crate(tmp_path, {"lib.rs": ""})
    assert subprocess.run(run, capture_output=True, text=True).returncode == 0


def test_the_store_itself_has_no_fault() -> None:
    own = [fault for fault in rust_rooms.faults_of(ROOT) if fault.startswith("recstore:") or "rust/recstore/" in fault]
    assert own == []
    arrows = list(rust_rooms.arrows_of(ROOT / "rust" / "recstore", ROOT))
    rooms = {arrow[:2] for arrow in rust_rooms.of_rooms(arrows)}
    assert {("table", "kernel"), ("checkpoint", "table"), ("store", "error")} <= rooms
    assert ("table::update::stepping", "table::update::stepped_rows") in {arrow[:2] for arrow in arrows}
