"""The program that chooses the Rust tests of a tier."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import tomli
from ci_programs import program

pytestmark = pytest.mark.tier("quick")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def rust_tiers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The program, over a tree of its own."""
    module = program("rust_tiers")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("tier", "names"),
    [("quick", ""), ("test", "--test long --test own"), ("all", "--test long --test own --test rare")],
)
def test_a_tier_has_the_files_of_those_before_it(
    rust_tiers: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], tier: str, names: str
) -> None:
    write(tmp_path, "rust/one/tests/long.rs", "//! A file.\n\n// tier: test\n")
    write(tmp_path, "rust/one/tests/own.rs", "// tier: test\n")
    write(tmp_path, "rust/two/tests/own.rs", "// tier: test\n")
    write(tmp_path, "rust/two/tests/shared/mod.rs", "// A module of the tests.\n")
    write(tmp_path, "rust/two/tests/rare.rs", "// tier: all\n")
    write(tmp_path, "tests/rust/tests/elsewhere.rs", "// tier: quick\n")
    assert rust_tiers.main([tier, "rust"]) == 0
    assert capsys.readouterr().out == f"{names}\n"


@pytest.mark.parametrize("text", ["", "// tier: soon\n", "// tier: test\n// tier: all\n", "//! tier: test\n"])
def test_a_file_without_its_one_tier_is_refused(
    rust_tiers: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    write(tmp_path, "rust/one/tests/plain.rs", text)
    assert rust_tiers.main(["test", "tests/rust"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "rust/one/tests/plain.rs must say one tier" in printed.err


def test_files_of_one_name_are_of_one_tier(
    rust_tiers: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "rust/one/tests/own.rs", "// tier: test\n")
    write(tmp_path, "rust/two/tests/own.rs", "// tier: all\n")
    assert rust_tiers.main(["all", "rust"]) == 1
    assert "files called own.rs say several tiers" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["test"], ["soon", "rust"]])
def test_an_unknown_tier_is_refused(rust_tiers: ModuleType, arguments: list[str]) -> None:
    assert rust_tiers.main(arguments) == 2


def test_every_file_of_the_project_says_its_tier(rust_tiers: ModuleType) -> None:
    crates = tomli.loads((ROOT / "Cargo.toml").read_text(encoding="utf-8"))["workspace"]["members"]
    files = {path for crate in crates for path in (ROOT / crate / "tests").glob("*.rs")}
    assert set(rust_tiers.tiers_of(ROOT)) == files
