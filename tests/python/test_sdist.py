"""The source distribution: it has all that the package is built from."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from packaged_files import missing_files

pytestmark = pytest.mark.tier("test")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    build = "import sys, setup_torch; print(setup_torch.build_sdist(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    return tmp_path / archive.name.removesuffix(".tar.gz")


def test_every_file_that_the_package_names_is_in_it(unpacked: Path) -> None:
    assert missing_files(unpacked) == []


def test_every_crate_of_the_native_module_is_in_it(unpacked: Path) -> None:
    described = ["cargo", "metadata", "--format-version", "1", "--filter-platform", _host()]
    done = subprocess.run(described, cwd=unpacked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    crates = [package for package in json.loads(done.stdout)["packages"] if package["source"] is None]
    assert {crate["name"] for crate in crates} == _crates_of("recstore-python")
    assert all(Path(crate["manifest_path"]).is_relative_to(unpacked.resolve()) for crate in crates)


def _host() -> str:
    said = subprocess.run(["rustc", "--version", "--verbose"], check=True, capture_output=True, text=True).stdout
    return next(line.removeprefix("host: ") for line in said.splitlines() if line.startswith("host: "))


def _crates_of(crate: str) -> set[str]:
    """Returns the project's own crates that one is built from, itself included."""
    listed = ["cargo", "tree", "--package", crate, "--edges", "normal,build", "--prefix", "none"]
    done = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True)
    # A crate's name comes first; those of the project end with their folder.
    return {line.split()[0] for line in done.stdout.splitlines() if str(ROOT) in line}
