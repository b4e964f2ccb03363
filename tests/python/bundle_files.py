"""The files of bundles, changed as those do who write checksums anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recstore_ops.serving.checked_json import checked_json
from recstore_ops.serving.manifest import GRAPH, NAME, sum_of


def changed_graph(bundle: Path, **fields: Any) -> None:
    """Changes fields of a bundle's graph."""
    graph = json.loads((bundle / GRAPH).read_text())
    (bundle / GRAPH).write_text(json.dumps({**graph, **fields}))
    changed_sum(bundle, GRAPH)


def changed_sum(bundle: Path, name: str) -> None:
    """Has the manifest of a bundle say what a file is now."""
    files = json.loads((bundle / NAME).read_text())["files"]
    changed_manifest(bundle, files={**files, name: sum_of(bundle / name)})


def changed_manifest(bundle: Path, **fields: Any) -> None:
    """Changes fields of a bundle's manifest; those of None go."""
    given = {**json.loads((bundle / NAME).read_text()), **fields}
    kept = {
        name: value for name, value in given.items() if value is not None and name not in ("format", "version", "crc32")
    }
    (bundle / NAME).write_text(checked_json(kept, given["format"], given["version"]))
