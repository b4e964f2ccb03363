"""Writes what the wheel's native module contains of others: their licences, and a list of components.

    python .ci/third_party.py           # after a change of Cargo.lock
    python .ci/third_party.py --check   # fails if the files are not those of Cargo.lock

`third_party/LICENSES.txt` has each licence text once, below the crates that come with it; beside it lies a list of
components, `recstore-ops.cdx.json`, a CycloneDX 1.5 document. Both are of the crates that are linked on Linux, not of
those that only build or test. Of a crate that may be had under MIT as well, that is the licence.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "third_party"
LICENSES, COMPONENTS = FOLDER / "LICENSES.txt", FOLDER / "recstore-ops.cdx.json"
MODULE = "recstore-python"
PLATFORM = "x86_64-unknown-linux-gnu"

_LICENSE_FILE = re.compile(r"(LICEN[CS]E|COPYING|NOTICE|UNLICENSE)", re.IGNORECASE)
_LINE = "=" * 100

HEAD = """The native module of recstore-ops contains the crates below, in compiled form. It also contains the standard
library of Rust (MIT OR Apache-2.0) and, where zig linked it, libc++ of LLVM (Apache-2.0 WITH LLVM-exception).
"""


def linked_crates() -> list[dict[str, Any]]:
    """The packages of others that the native module links, sorted by name and version."""
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", PLATFORM]
    metadata = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    waiting = [name for name, package in packages.items() if package["name"] == MODULE]
    found: set[str] = set()
    while waiting:
        if (name := waiting.pop()) in found or is_macro(packages[name]):
            continue
        found.add(name)
        waiting += [
            needed["pkg"] for needed in nodes[name]["deps"] if any(kind["kind"] is None for kind in needed["dep_kinds"])
        ]
    others = [packages[name] for name in found if packages[name]["source"] is not None]
    return sorted(others, key=lambda package: (package["name"], package["version"]))


def is_macro(package: dict[str, Any]) -> bool:
    """Whether a package runs in the compiler, and is not linked."""
    return any("proc-macro" in target["kind"] for target in package["targets"])


def licenses_of(crates: list[dict[str, Any]]) -> str:
    """The text of all licences.

    Raises:
        SystemExit: a crate names no licence.
    """
    lines, by_text = [], defaultdict(list)
    for crate in crates:
        if not crate["license"]:
            raise SystemExit(f"{crate['name']} {crate['version']} names no licence")
        lines.append(f"{crate['name']} {crate['version']}: {crate['license']}")
        for text in texts_of(crate):
            by_text[text].append(f"{crate['name']} {crate['version']}")
    parts = [HEAD + "\n" + "\n".join(lines)]
    parts += [f"{_LINE}\n{', '.join(names)}\n{_LINE}\n\n{text}" for text, names in by_text.items()]
    return "\n\n".join(parts) + "\n"


def texts_of(crate: dict[str, Any]) -> list[str]:
    """The texts of a crate's licences, without blanks at the ends of lines."""
    folder = Path(crate["manifest_path"]).parent
    files = sorted(path for path in folder.iterdir() if path.is_file() and _LICENSE_FILE.match(path.name))
    if "MIT" in re.split(r" OR |/", crate["license"]):
        files = [path for path in files if "MIT" in path.name] or files
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in files)
    return ["\n".join(line.rstrip() for line in text.strip().splitlines()) for text in texts]


def components_of(crates: list[dict[str, Any]]) -> str:
    """The CycloneDX document: https://cyclonedx.org/docs/1.5/json."""
    locked = (ROOT / "Cargo.lock").read_text(encoding="utf-8")
    sums = re.findall(r'name = "(.+)"\nversion = "(.+)"\nsource = .+\nchecksum = "(\w+)"', locked)
    checksums = {(name, version): checksum for name, version, checksum in sums}
    components = [
        {
            "type": "library",
            "name": crate["name"],
            "version": crate["version"],
            "purl": f"pkg:cargo/{crate['name']}@{crate['version']}",
            "hashes": [{"alg": "SHA-256", "content": checksums[crate["name"], crate["version"]]}],
            "licenses": [{"expression": crate["license"].replace("/", " OR ")}],
        }
        for crate in crates
    ]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "library", "name": "recstore-ops", "purl": "pkg:pypi/recstore-ops"}},
        "components": components,
    }
    return json.dumps(document, indent=1) + "\n"


def main() -> int:
    """Writes the files, or compares them with what they should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    only_checks = parser.parse_args().check
    crates = linked_crates()
    wanted = {LICENSES: licenses_of(crates), COMPONENTS: components_of(crates)}
    if only_checks:
        old = [path.name for path, text in wanted.items() if not path.exists() or path.read_text("utf-8") != text]
        if old:
            print(
                f"third_party: {', '.join(old)} differ from Cargo.lock: run `python .ci/third_party.py`",
                file=sys.stderr,
            )
        return 1 if old else 0
    FOLDER.mkdir(exist_ok=True)
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {len(crates)} crates, {len(text):,} characters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
