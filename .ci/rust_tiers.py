"""Prints the options by which cargo runs the Rust tests of a tier and of those before it, in some folders.

    cargo test --package recstore-tests $(python .ci/rust_tiers.py test tests/rust)

Each file of tests says its tier by one line, `// tier: test`. All files are looked at, whichever are run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIERS = ("quick", "test", "all")
PLACES = ("rust/*/tests/*.rs", "tests/rust/tests/*.rs", "cxx_bridge/tests/*.rs")

_TIER = re.compile(r"^// tier: (.*)$", re.MULTILINE)


def main(arguments: Sequence[str]) -> int:
    """Prints the options; or, to stderr, which file does not say its tier."""
    if len(arguments) < 2 or arguments[0] not in TIERS:
        print(f"rust_tiers: say one of {', '.join(TIERS)}, and folders", file=sys.stderr)
        return 2
    tier, *folders = arguments
    try:
        tiers = tiers_of(ROOT)
    except ValueError as error:
        print(f"rust_tiers: {error}", file=sys.stderr)
        return 1
    print(*(f"--test {name}" for name in chosen(tiers, tier, folders)))
    return 0


def chosen(tiers: Mapping[Path, str], tier: str, folders: Sequence[str]) -> list[str]:
    """The names of the files of these folders up to a tier, sorted."""
    known = TIERS[: TIERS.index(tier) + 1]
    roots = [ROOT / folder for folder in folders]
    return sorted(
        {path.stem for path, of_file in tiers.items() if of_file in known and any(map(path.is_relative_to, roots))}
    )


def tiers_of(root: Path) -> dict[Path, str]:
    """The tier of each file of tests.

    Raises:
        ValueError: a file does not say its one tier, or another file of that name says another.
    """
    tiers: dict[Path, str] = {}
    of_name: dict[str, str] = {}
    for path in sorted(path for place in PLACES for path in root.glob(place)):
        tiers[path] = tier_of(path.read_text(encoding="utf-8"), str(path.relative_to(root)))
        if of_name.setdefault(path.stem, tiers[path]) != tiers[path]:
            raise ValueError(f"files called {path.name} say several tiers; cargo runs all files of a name")
    return tiers


def tier_of(text: str, name: str) -> str:
    """The tier that a file says; raises `ValueError` if that is not one of them, said once."""
    said = _TIER.findall(text)
    if len(said) != 1 or said[0] not in TIERS:
        raise ValueError(f"{name} must say one tier by a line such as `// tier: test`, it says {said}")
    return said[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
