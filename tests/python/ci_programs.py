"""The programs of `.ci`, which lie in no package, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).parents[2] / ".ci"


def program(name: str) -> ModuleType:
    """Loads a program anew, so that what a test changes in it is gone with the test."""
    spec = importlib.util.spec_from_file_location(name, _FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Where dataclasses look for the types of their fields.
    spec.loader.exec_module(module)
    return module
