"""Checks names of the code by the table "Words" in CONTRIBUTING.md: none is of the column of those to avoid.

An entry with `*` is a pattern of identifiers, one in capitals an identifier, one with a capital letter a type.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

SUFFIXES = (".py", ".pyi", ".rs", ".cpp", ".h")
TYPE = re.compile(r"\b(?:class|struct|enum|trait|type|union)\s+(\w+)")
NAME = re.compile(r"\b_*([A-Za-z]\w*)")


def main() -> int:
    avoided = avoided_words(Path("CONTRIBUTING.md").read_text("utf-8"))
    files = subprocess.check_output(["git", "ls-files"], text=True).splitlines()
    faults = [fault for file in files if file.endswith(SUFFIXES) for fault in faults_of(Path(file), avoided)]
    print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults else 0


def avoided_words(text: str) -> dict[str, str]:
    """Returns what to write in place of each word that is to be avoided."""
    _, _, table = text.partition("| write | not |")
    rows = [line.split("|")[1:3] for line in table.partition("\n\n")[0].splitlines()[2:]]
    words = {word: write.strip() for write, avoid in rows for word in re.findall(r"`([^`]+)`", avoid)}
    if not words:
        raise ValueError("CONTRIBUTING.md has no table of words")
    return words


def faults_of(file: Path, avoided: dict[str, str]) -> Iterator[str]:
    patterns = {word: write for word, write in avoided.items() if "*" in word or word.isupper()}
    for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        names = {name for name in NAME.findall(line) if any(fnmatchcase(name, pattern) for pattern in patterns)}
        types = {name for name in TYPE.findall(line) if name in avoided}
        for name in sorted(names | types):
            write = next(write for word, write in avoided.items() if fnmatchcase(name, word))
            yield f"{file}:{number}: {name}: write {write}, by the table of words in CONTRIBUTING.md"


if __name__ == "__main__":
    sys.exit(main())
