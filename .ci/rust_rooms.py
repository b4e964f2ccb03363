"""Checks how the sources are cut: no circle of rooms or files within a crate, few entries, short files and functions.

A crate's room is a module at its top, a file or a folder. A file may import the one that declares it. Tests count for
nothing here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

MAX_ENTRIES = {"rust/recstore/src": 15}
MAX_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_FUNCTION_LINES_P90 = 20
SOURCE_FOLDERS = ("rust", "cxx_bridge", "python", "benches", "examples", ".ci")
TEST_FOLDERS = {"tests", "target", "__pycache__"}

# Comments, and literals: raw strings, strings, characters (a lifetime has no closing quote).
NO_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|\bb?r(?P<fence>\#*)".*?"(?P=fence)|b?"(?:\\.|[^"\\])*"|b?'(?:\\[^\n]+?|[^'\\\n])'""",
    re.DOTALL,
)
TEST_ITEM = re.compile(r"#\[cfg\(test\)\]|#\[cfg\(all\(test\b[^]]*\]")
INLINE_MODULE = re.compile(r"\bmod\s+(\w+)\s*\{")
FUNCTION = re.compile(r"\bfn\s+(\w+)")
PATH = re.compile(r"\b(crate|self|super)\s*::\s*")
IMPORT = re.compile(r"\buse\s+([^;]+);")
RENAMED = re.compile(r"(\w+)\s+as\s+(\w+)")
SEGMENT = re.compile(r"\s*(?:r#)?(\w+|\*|\{)\s*")


# The path of a file's module from the crate's root.
Module = tuple[str, ...]


class Arrow(NamedTuple):
    """One import of a file, or a room, by another."""

    source: str
    target: str
    place: str


class Function(NamedTuple):
    """A function with a body."""

    lines: int
    place: str


def main(root: Path) -> int:
    faults = list(faults_of(root))
    for fault in faults:
        print(f"rust_rooms: {fault}", file=sys.stderr)
    return 1 if faults else 0


def faults_of(root: Path) -> Iterator[str]:
    functions: list[Function] = []
    for crate in crates(root):
        arrows = list(arrows_of(crate, root))
        yield from (f"{crate.name}: a circle of rooms: {told(circle)}" for circle in circles(of_rooms(arrows)))
        yield from (f"{crate.name}: a circle of files: {told(circle)}" for circle in circles(within_rooms(arrows)))
        for file in rust_files(crate / "src"):
            functions += functions_of(file, root)
    yield from long_functions(functions)
    for folder, most in MAX_ENTRIES.items():
        entries = len(list((root / folder).iterdir())) if (root / folder).is_dir() else 0
        if entries > most:
            yield f"{folder} has {entries} entries, of at most {most}"
    yield from long_files(root)


def crates(root: Path) -> list[Path]:
    """Returns the folders of the crates."""
    folders = [root / "cxx_bridge", *sorted((root / "rust").glob("*"))]
    return [folder for folder in folders if (folder / "src").is_dir()]


def rust_files(source: Path) -> list[Path]:
    return [file for file in sorted(source.rglob("*.rs")) if file.name != "tests.rs" and not is_test(file, source)]


def is_test(file: Path, root: Path) -> bool:
    return bool(TEST_FOLDERS.intersection(file.relative_to(root).parts))


# Text


def code_of(text: str) -> str:
    """Returns the text with comments, literals and tests blank: every line and every offset stays."""
    code = NO_CODE.sub(lambda found: blank(found.group()), text)
    while found := TEST_ITEM.search(code):
        end = item_end(code, found.end())
        code = code[: found.start()] + blank(code[found.start() : end]) + code[end:]
    return code


def blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def item_end(code: str, start: int) -> int:
    """Returns where an item ends: behind its body, or its semicolon."""
    depth = 0
    for found in re.compile(r"[][(){;]").finditer(code, start):
        if found.group() in "([":
            depth += 1
        elif found.group() in ")]":
            depth -= 1
        elif depth == 0:
            return found.end() if found.group() == ";" else body_end(code, found.start())
    return len(code)


def body_end(code: str, brace: int) -> int:
    """Returns what lies behind the body that begins with a brace."""
    depth = 0
    for found in re.compile(r"[{}]").finditer(code, brace):
        depth += 1 if found.group() == "{" else -1
        if depth == 0:
            return found.end()
    return len(code)


# Circles


def arrows_of(crate: Path, root: Path) -> Iterator[Arrow]:
    """Yields the imports between the files of a crate, but for those of a file by the one that declares it."""
    source = crate / "src"
    files = {module_of(file, source): file for file in rust_files(source)}
    codes = {module: code_of(file.read_text(encoding="utf-8")) for module, file in files.items()}
    names = {module: names_of(code) for module, code in codes.items()}
    for module, code in codes.items():
        for offset, path in paths(code):
            target = file_of(absolute(path, (*module, *inline_modules(code, offset))), names)
            if target[: len(module)] != module and target:
                line = code.count("\n", 0, offset) + 1
                place = f"{files[module].relative_to(root).as_posix()}:{line}"
                yield Arrow("::".join(module), "::".join(target), place)


def of_rooms(arrows: list[Arrow]) -> list[Arrow]:
    """Returns the imports between rooms."""
    rooms = [Arrow(room_of(arrow.source), room_of(arrow.target), arrow.place) for arrow in arrows]
    return [arrow for arrow in rooms if arrow.source != arrow.target]


def within_rooms(arrows: list[Arrow]) -> list[Arrow]:
    """Returns the other imports: a circle of files that has none of these is one of rooms."""
    return [arrow for arrow in arrows if room_of(arrow.source) == room_of(arrow.target)]


def room_of(module: str) -> str:
    return module.partition("::")[0]


def module_of(file: Path, source: Path) -> Module:
    """Returns the path of a file's module; that of `lib.rs` and `main.rs` is empty."""
    parts = file.relative_to(source).with_suffix("").parts
    return parts[:-1] if parts[-1] == "mod" or parts in (("lib",), ("main",)) else parts


def inline_modules(code: str, offset: int) -> list[str]:
    """Returns the modules with braces in which an offset of a file lies."""
    before = (found for found in INLINE_MODULE.finditer(code) if found.end() <= offset)
    return [found.group(1) for found in before if body_end(code, found.end() - 1) > offset]


def paths(code: str) -> Iterator[tuple[int, list[str]]]:
    """Yields every path of the crate in a file, each branch of an import by itself, and its offset."""
    for found in PATH.finditer(code):
        if code[max(0, found.start() - 2) : found.start()] != "::":
            for branch in branches(code, found.start(), [])[0]:
                yield found.start(), branch


def branches(code: str, start: int, prefix: list[str]) -> tuple[list[list[str]], int]:
    """Reads a path that may branch in braces; returns all of its branches and where it ends."""
    found = SEGMENT.match(code, start)
    if found is None:
        return [prefix], start
    if found.group(1) == "{":
        return group(code, found.end(), prefix)
    path, end = [*prefix, found.group(1)], found.end()
    if code.startswith("::", end):
        return branches(code, end + 2, path)
    return [path], end


def group(code: str, start: int, prefix: list[str]) -> tuple[list[list[str]], int]:
    read: list[list[str]] = []
    while start < len(code) and not code.startswith("}", start):
        more, end = branches(code, start, prefix)
        read += more
        # Behind a name may stand `as another`.
        stop = re.compile(r"[,}]").search(code, end)
        start = len(code) if stop is None else stop.start()
        if code.startswith(",", start):
            start += 1 + len(code[start + 1 :]) - len(code[start + 1 :].lstrip())
    return read, start + 1


def names_of(code: str) -> dict[str, Module]:
    """Returns the paths of the names that a file imports: whoever imports them from it has them from there."""
    names: dict[str, Module] = {}
    for found in IMPORT.finditer(code):
        renamed = dict(RENAMED.findall(found.group(1)))
        for path in branches(found.group(1), 0, [])[0]:
            if not inline_modules(code, found.start()) and path:
                names[renamed.get(path[-1], path[-1])] = tuple(path)
    return names


def absolute(path: Sequence[str], module: Module) -> Module:
    """Returns the path from the crate's root of one in a module."""
    here = () if path[0] == "crate" else module
    for name in path:
        if name not in ("crate", "self", "super"):
            break
        here = here[:-1] if name == "super" else here
    return here + tuple(name for name in path if name not in ("crate", "self", "super"))


def file_of(path: Module, names: dict[Module, dict[str, Module]], seen: frozenset[Module] = frozenset()) -> Module:
    """Returns the module of the file that a path from the crate's root leads to."""
    here: Module = ()
    for number, name in enumerate(path):
        if (*here, name) not in names:
            own = names[here].get(name)
            if own is None or path in seen or own == (name,):
                return here
            start = () if own[0] == "crate" else here
            return file_of(absolute(own, start) + path[number + 1 :], names, seen | {path})
        here = (*here, name)
    return here


def circles(arrows: list[Arrow]) -> Iterator[list[Arrow]]:
    """Yields for each circle the shortest one through its first room."""
    of_room: dict[str, dict[str, Arrow]] = {}
    for arrow in arrows:
        of_room.setdefault(arrow.source, {}).setdefault(arrow.target, arrow)
    told_of: set[str] = set()
    for room in sorted(of_room):
        circle = [] if room in told_of else shortest_circle(room, of_room)
        told_of.update(arrow.source for arrow in circle)
        if circle:
            yield circle


def shortest_circle(room: str, of_room: dict[str, dict[str, Arrow]]) -> list[Arrow]:
    """Returns the arrows from a room back to it; none if there is no way back."""
    ways: dict[str, list[Arrow]] = {room: []}
    queue = [room]
    for here in queue:
        for target, arrow in sorted(of_room.get(here, {}).items()):
            if target == room:
                return [*ways[here], arrow]
            if target not in ways:
                ways[target] = [*ways[here], arrow]
                queue.append(target)
    return []


def told(circle: list[Arrow]) -> str:
    names = " -> ".join([*(arrow.source for arrow in circle), circle[0].source])
    places = ", ".join(f"{arrow.target} in {arrow.place}" for arrow in circle)
    return f"{names} ({places})"


# Lengths


def functions_of(file: Path, root: Path) -> Iterator[Function]:
    """Yields the functions of a Rust file with their lines, from `fn` to the closing brace."""
    code = code_of(file.read_text(encoding="utf-8"))
    for found in FUNCTION.finditer(code):
        end = item_end(code, found.end())
        if code[end - 1] == "}":
            line = code.count("\n", 0, found.start()) + 1
            lines = code.count("\n", found.start(), end) + 1
            yield Function(lines, f"{found.group(1)} in {file.relative_to(root).as_posix()}:{line}")


def long_functions(functions: list[Function]) -> Iterator[str]:
    lengths = sorted(function.lines for function in functions)
    p90 = lengths[len(lengths) * 9 // 10] if lengths else 0
    if p90 > MAX_FUNCTION_LINES_P90:
        yield f"nine in ten Rust functions have up to {p90} lines, of at most {MAX_FUNCTION_LINES_P90}"
    for function in functions:
        if function.lines > MAX_FUNCTION_LINES:
            yield f"the function {function.place} has {function.lines} lines, of at most {MAX_FUNCTION_LINES}"


def long_files(root: Path) -> Iterator[str]:
    for file in source_files(root):
        lines = lines_of(file)
        if lines > MAX_LINES:
            yield f"{file.relative_to(root).as_posix()} has {lines} lines without tests, of at most {MAX_LINES}"


def source_files(root: Path) -> Iterator[Path]:
    for folder in SOURCE_FOLDERS:
        for suffix in ("rs", "py", "cpp"):
            for file in sorted((root / folder).rglob(f"*.{suffix}")):
                if not is_test(file, root) and file.name != "tests.rs":
                    yield file


def lines_of(file: Path) -> int:
    """Returns the lines of a file, of Rust without its tests."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".rs":
        return text.count("\n")
    code = NO_CODE.sub(lambda found: blank(found.group()), text)
    in_tests = sum(code.count("\n", start, end) + 1 for start, end in test_items(code))
    return text.count("\n") - in_tests


def test_items(code: str) -> Iterator[tuple[int, int]]:
    end = 0
    while found := TEST_ITEM.search(code, end):
        end = item_end(code, found.end())
        yield found.start(), end


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent))
