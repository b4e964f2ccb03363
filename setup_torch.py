"""The PEP 517 backend: maturin, told where the headers of torch are.

The operators compile against the headers of the torch that is already installed. Under build isolation it
is hidden from import, but its files are where sysconfig says. Only where there is none does the build ask
for one of its own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sysconfig
from pathlib import Path
from typing import Any

import maturin
from maturin import build_sdist, get_requires_for_build_sdist

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

OLDEST_TORCH = (2, 11)
VARIABLE = "RECSTORE_TORCH_DIR"

Settings = dict[str, Any] | None

prepare_metadata_for_build_wheel = maturin.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = maturin.prepare_metadata_for_build_editable


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return maturin.get_requires_for_build_wheel(config_settings) + _torch_requirement()


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return maturin.get_requires_for_build_editable(config_settings) + _torch_requirement()


def build_wheel(directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    _name_torch()
    _keep_paths_out_of_the_binary()
    return maturin.build_wheel(directory, config_settings, metadata_directory)


def build_editable(directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    # No flags of its own, so that the tests' builds and this one share what they compile.
    if importlib.util.find_spec("torch") is None:
        _name_torch()
    return maturin.build_editable(directory, config_settings, metadata_directory)


def find_torch() -> Path | None:
    """The folder of a torch new enough to build against."""
    return next(filter(_is_usable, _candidates()), None)


def _candidates() -> list[Path]:
    if VARIABLE in os.environ:
        return [Path(os.environ[VARIABLE])]
    spec = importlib.util.find_spec("torch")
    visible = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    hidden = [Path(sysconfig.get_path(name)) / "torch" for name in ("purelib", "platlib")]
    return visible + hidden


def _is_usable(torch: Path) -> bool:
    try:
        version = (torch / "version.py").read_text(encoding="utf-8")
    except OSError:
        return False
    found = re.search(r"__version__ = '(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) >= OLDEST_TORCH


def _torch_requirement() -> list[str]:
    if find_torch() is not None:
        return []
    if VARIABLE in os.environ:
        raise SystemExit(f"{VARIABLE}={os.environ[VARIABLE]} is not the folder of a torch of version 2.11 or newer")
    return ["torch>={}.{}".format(*OLDEST_TORCH)]


def _name_torch() -> None:
    """Tells the build of the bridge where torch is."""
    torch = find_torch()
    if torch is None:
        raise SystemExit("no torch to build against: install torch 2.11 or newer, then recstore-ops")
    os.environ[VARIABLE] = str(torch)


def _keep_paths_out_of_the_binary() -> None:
    """Without this, messages of panics and assertions would quote source files by their paths here."""
    cargo_home = os.environ.get("CARGO_HOME", str(Path.home() / ".cargo"))
    flags = [f"--remap-path-prefix={cargo_home}=cargo", f"--remap-path-prefix={os.getcwd()}=recstore-ops"]
    os.environ["CARGO_ENCODED_RUSTFLAGS"] = "\x1f".join(_rust_flags() + flags)
    # The C++ of dependencies; build.rs sees to ours. cc splits the variable at spaces.
    if " " not in cargo_home:
        cxx_flags = f"{os.environ.get('CXXFLAGS', '')} -ffile-prefix-map={cargo_home}=cargo"
        os.environ["CXXFLAGS"] = cxx_flags.strip()


def _rust_flags() -> list[str]:
    if encoded := os.environ.get("CARGO_ENCODED_RUSTFLAGS"):
        return encoded.split("\x1f")
    return os.environ.get("RUSTFLAGS", "").split()
