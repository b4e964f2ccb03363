"""Packages that only parts of this one need: they come with the extras of `pip install`."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any, Literal

Extra = Literal["cli", "ngrams", "ray", "serve", "train"]

EXTRAS: dict[Extra, tuple[str, ...]] = {
    "cli": ("rich", "typer"),
    "ngrams": ("tokenizers",),
    "ray": ("ray",),
    "serve": ("google.protobuf", "safetensors"),
    "train": ("matplotlib", "pyarrow", "rich", "safetensors", "tensorboardX", "tqdm", "typer"),
}
"""The modules of each extra's packages."""


class MissingPackage(ImportError):
    """A package of an extra is not installed."""


def require(extra: Extra, needed_by: str) -> None:
    """Looks for the packages of an extra, without importing them.

    Raises:
        MissingPackage: one is missing: names it, what needs it, and the command that installs it.
    """
    for module in EXTRAS[extra]:
        _check(module, extra, needed_by)


def imported(module: str, extra: Extra, needed_by: str) -> Any:
    """Imports a module of an extra's packages.

    Raises:
        MissingPackage: as `require`.
    """
    _check(module, extra, needed_by)
    return importlib.import_module(module)


def is_installed(module: str) -> bool:
    """Whether a module can be imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # The package that it lies in is missing.
        return False


def _check(module: str, extra: Extra, needed_by: str) -> None:
    if not is_installed(module):
        raise MissingPackage(f"{needed_by} needs {module}: pip install 'recstore-ops[{extra}]'", name=module)


__all__ = ["EXTRAS", "Extra", "MissingPackage", "imported", "is_installed", "require"]
