"""The files that `pyproject.toml` names: without one of them the package can't be built."""

from __future__ import annotations

from pathlib import Path

import tomli


def missing_files(tree: Path) -> list[str]:
    """Returns the names and patterns that no file of a tree fits."""
    described = tomli.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))
    project, maturin = described["project"], described["tool"]["maturin"]
    named = [project["readme"], *project["license-files"], *maturin["sbom"]["include"], maturin["manifest-path"]]
    named += [included["path"] for included in maturin["include"]]
    return [name for name in named if not any(tree.glob(name))]
