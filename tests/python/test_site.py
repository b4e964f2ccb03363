"""The site of docs/: its navigation has every page, the API's pages every name, and it builds without a warning."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import recstore_ops

pytestmark = pytest.mark.tier("quick")

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOT_NAMES = ("__version__", "checkpoint")
"""Public names that are no entries of a page: a string, and a module whose names are."""


class Loader(yaml.SafeLoader):
    """Reads the configuration without the functions that it names."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def pages_in(navigation: object) -> list[str]:
    """The pages that a navigation names."""
    if isinstance(navigation, str):
        return [navigation]
    parts = navigation.values() if isinstance(navigation, dict) else navigation
    assert not isinstance(parts, (str, int))
    return [page for part in parts for page in pages_in(part)]  # pyright: ignore[reportGeneralTypeIssues]


def test_the_navigation_names_every_page_once() -> None:
    configuration = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader)
    named = pages_in(configuration["nav"])
    assert sorted(page for page in named if not page.startswith("repository/")) == sorted(
        page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")
    )
    assert all((ROOT / page.removeprefix("repository/")).is_file() for page in named if page.startswith("repository/"))


def entries() -> list[str]:
    pages = "".join(page.read_text("utf-8") for page in (DOCS / "api").glob("*.md"))
    return re.findall(r"^::: ([\w.]+)$", pages, flags=re.MULTILINE)


def test_the_pages_of_the_api_have_every_public_name_once() -> None:
    names = [entry.removeprefix("recstore_ops.") for entry in entries()]
    assert len(names) == len(set(names))
    assert set(recstore_ops.__all__) - set(NOT_NAMES) <= set(names)
    public = importlib.import_module("recstore_ops.checkpoint").__all__
    assert {f"checkpoint.{name}" for name in public} - set(names) == {"checkpoint.Compression", "checkpoint.SaveKind"}


@pytest.mark.parametrize("entry", entries())
def test_every_entry_of_the_api_is_there(entry: str) -> None:
    module, _, name = entry.rpartition(".")
    assert getattr(importlib.import_module(module), name).__doc__


@pytest.mark.tier("all")
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    mkdocs = shutil.which("mkdocs") or shutil.which(ROOT / ".venv-docs/bin/mkdocs")
    if mkdocs is None:
        pytest.skip("mkdocs is not installed: `make docs` makes an environment with it")
    command = [mkdocs, "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        text = page.read_text("utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?(\w+:[^\"> ]+)", text)
        loaded += re.findall(r"<link[^>]* href=\"?(https?:[^\"> ]+)", text)
        assert loaded == [], page
    names = (tmp_path / "api" / "modules.html").read_text("utf-8")
    assert 'id="recstore_ops.DistEmbedding"' in names
