"""Finds the places in a user's directories, each kind by its own files; anything else is refused."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from os import PathLike
from os.path import lexists
from pathlib import Path

from recstore_ops import _native
from recstore_ops.checkpoint.arguments import checked_directory
from recstore_ops.config.directory import Directory
from recstore_ops.forgetting.bundles import BundlePlace
from recstore_ops.forgetting.location import Location
from recstore_ops.forgetting.publications import PublicationPlace
from recstore_ops.forgetting.stores import StorePlace
from recstore_ops.serving.following.names import CURRENT
from recstore_ops.serving.following.publication import Current
from recstore_ops.serving.manifest import NAME as MANIFEST

_CHECKPOINT_FORMAT, _BUNDLE_FORMAT = "recstore-checkpoint", "recstore bundle"
_OF_RUN = ("checkpoint", "best")
"""The checkpoints of a run of `recstore train`."""


def find_places(paths: Iterable[str | PathLike[str]]) -> list[Location]:
    """Returns the places that directories are, or have; each once.

    Raises:
        ValueError: one is the URL of an object store, is not there, or is something else.
    """
    found: dict[Path, Location] = {}
    for path in paths:
        for place in _places_at(Path(checked_directory(path, "forget"))):
            found.setdefault(place.path.resolve(), place)
    return list(found.values())


def places_below(directories: Iterable[Path], known: set[Path]) -> list[Location]:
    """Returns the checkpoints and bundles anywhere below directories, but for those whose manifest is known.

    Their files say of which table an id is. A manifest that is damaged is a file like others.
    """
    found: dict[Path, Location] = {}
    for manifest in (path for directory in directories for path in directory.rglob(MANIFEST)):
        if manifest.is_file() and manifest.resolve() not in known:
            with suppress(ValueError, OSError):
                kind = {_BUNDLE_FORMAT: BundlePlace, _CHECKPOINT_FORMAT: _checkpoint}.get(_format_of(manifest))
                if kind is not None:
                    found.setdefault(manifest.resolve(), kind(manifest.parent))
    return list(found.values())


def _places_at(path: Path) -> list[Location]:
    if not path.is_dir():
        raise ValueError(f"{path} is no directory" if path.exists() else f"there is no directory {path}")
    if _native.is_server_directory(path):
        return [StorePlace(path, "server")]
    if lexists(path / CURRENT):
        Current.read(path)
        return [PublicationPlace(path)]
    if lexists(path / MANIFEST):
        return [_with_manifest(path)]
    if lexists(path / "config.json") and (saved := _checkpoints_of_run(path)):
        return saved
    if servers := [StorePlace(each, "server") for each in sorted(path.iterdir()) if _native.is_server_directory(each)]:
        return list(servers)
    raise ValueError(
        f"{path} is no checkpoint, no run of `recstore train` with a checkpoint, no --data of servers, no bundle and "
        "no publication"
    )


def _with_manifest(path: Path) -> Location:
    format = _format_of(path / MANIFEST)
    if format == _BUNDLE_FORMAT:
        return BundlePlace(path)
    if format != _CHECKPOINT_FORMAT:
        raise ValueError(f"{path / MANIFEST} is the manifest of no checkpoint and no bundle")
    if _native.is_server_directory(path.absolute().parent):
        raise ValueError(f"{path} belongs to a server, which has a log beside it: name {path.absolute().parent}")
    return _checkpoint(path)


def _format_of(path: Path) -> str:
    try:
        with Directory(path.parent) as directory:
            return str(json.loads(directory.read(path.name)).get("format"))
    except (ValueError, AttributeError, RecursionError):
        raise ValueError(f"{path} is damaged: it is no manifest of a checkpoint or a bundle") from None


def _checkpoints_of_run(path: Path) -> list[Location]:
    return [_checkpoint(path / name) for name in _OF_RUN if lexists(path / name / MANIFEST)]


def _checkpoint(path: Path) -> StorePlace:
    return StorePlace(path, "checkpoint")


__all__ = ["find_places", "places_below"]
