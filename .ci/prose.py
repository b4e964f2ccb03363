"""Finds hard sentences in documents, docstrings and help: patterns that a reader has to translate, and long sentences.

Prints `file:line: pattern: words` for each hit and exits with 1 if there is any. It leaves out code and comments, and
looks for fewer patterns in the cells of tables and in the entries of `Args:` and the like.
`python .ci/prose.py FILE ...` reads other files than all documents and modules.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("*.md", "benches/*.md", "deploy/*.md", "docs/**/*.md", "examples/*.md")
MODULES = "python/recstore_ops/**/*.py"

MAX_WORDS = {"README.md": 1_600, "docs/design.md": 5_000}
"""The length of a document as `wc -w` counts it, with code and tables."""
WIDEST_LINE = 120
LONGEST_SENTENCE = 35

PATTERNS = {
    "belongs to": r"\b(?:is|are|was|were|be|been|being)(?:\s+(?:all|also|both|not|only|still))?\s+of\b",
    "that of": r"\b(?:is|are|was|were|be)\s+(?:that|those)\s+of\b",
    "told": r"\b(?:tell|tells|telling|told)\b",
    "nobody": r"\b(?:nobody|somebody|anybody|everybody|no\s+one|someone|whoever|those\s+who)\b",
    "what what": r"\bwhat\b[^.?!]*?\bwhat\b",
    "bare pronoun": r";\s+(?:it|they)\b",
    "be it": r"\bbe\s+(?:it|they)\b",
    "fronted of": r"^of\b",
    "fronted clause": r"^(?:what|whatever|who|which|whichever)\b(?!.*\?$)",
}
"""What is wrong with a sentence, whatever the case of its letters."""
OF_SENTENCES = ("fronted of", "fronted clause")
"""Patterns that do not count in the cells of tables, which are no sentences."""

PHRASE_PATTERNS = [name for name in PATTERNS if name not in OF_SENTENCES]
SECTION = re.compile(r"(?:Args|Attributes|Raises|Returns|Yields|Example|Examples|Source):")

PLACES = (
    r"address|branch|cores?|directory|document|file|folder|from|host|line|loop|machine|paragraph|part|places?|points?"
    r"|positions?|process|room|section|server|shard|step|table|to"
    r"|chooses?|decides?|finds?|knows?|names?|notes?|records?|remembers?|returns?|says?|sees?|shows?"
)
"""Words before `where` that name a place or ask for one. After any other word `where` stands for `if`."""

ALLOWED: dict[tuple[str, str], str] = {}
"""Hits that are meant: document and words, with the reason."""


class Hit(NamedTuple):
    """Words of a document that a reader has to translate."""

    document: str
    line: int
    pattern: str
    words: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}: {self.pattern}: {self.words}"


class Passage(NamedTuple):
    """Text that begins in a line: a paragraph, a heading or an item of a list, and then a sentence of it."""

    line: int
    text: str


def main(names: Sequence[str]) -> int:
    paths = [Path(name).resolve() for name in names] or documents()
    found = [hit for path in paths for hit in hits(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))]
    for hit in found:
        print(hit)
    if found:
        counts = Counter(hit.pattern for hit in found)
        print(f"{len(found)} hits: {', '.join(f'{count} {name}' for name, count in counts.most_common())}")
    return 1 if found else 0


def documents() -> list[Path]:
    return sorted(chain.from_iterable(ROOT.glob(pattern) for pattern in (*DOCUMENTS, MODULES)))


def hits(document: str, text: str) -> Iterator[Hit]:
    """Yields all that is wrong with a document, or with the texts of a module that users read."""
    checks = (_hard_docstrings,) if document.endswith(".py") else (_length, _wide_lines, _hard_sentences, _hard_cells)
    found = chain.from_iterable(check(document, text) for check in checks)
    return (hit for hit in found if (hit.document, hit.words) not in ALLOWED)


def _length(document: str, text: str) -> Iterator[Hit]:
    count, most = len(text.split()), MAX_WORDS.get(document)
    if most is not None and count > most:
        yield Hit(document, 1, "too long", f"{count} words, {most} allowed")


def _wide_lines(document: str, text: str) -> Iterator[Hit]:
    for number, line in _lines_of(text, "prose"):
        if len(line) > WIDEST_LINE:
            yield Hit(document, number, "wide line", f"{len(line)} columns, {WIDEST_LINE} allowed")


def _hard_sentences(document: str, text: str) -> Iterator[Hit]:
    for passage in passages(text):
        yield from _hard_passage(document, passage, PATTERNS)


def _hard_passage(document: str, passage: Passage, names: Iterable[str]) -> Iterator[Hit]:
    for sentence in sentences(passage):
        yield from _patterns(document, sentence, names)
        yield from _where_for_if(document, sentence)
        count = len(re.findall(r"\S*\w\S*", sentence.text))
        if count > LONGEST_SENTENCE:
            yield Hit(document, sentence.line, "long sentence", f"{count} words: {_begin(sentence.text)} ...")


def _hard_docstrings(document: str, text: str) -> Iterator[Hit]:
    found = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case (
                ast.Expr(ast.Constant(str() as words) as at)
                | ast.keyword("help", ast.Constant(str() as words) as at)
                | ast.Call(ast.Name("Option"), [ast.Constant(str() as words) as at, *_])
            ):
                found.extend(_hard_docstring(document, at.lineno, inspect.cleandoc(words)))
    yield from sorted(found, key=lambda hit: hit.line)


def _hard_docstring(document: str, line: int, text: str) -> Iterator[Hit]:
    begin, kept, is_entry = line, list[str](), False
    for number, each in enumerate([*text.splitlines(), ""], line):
        is_next = re.match(r"    [\w.*]+(?: \([^)]*\))?: ", each)
        if kept and (is_next or not each.strip() or each.endswith(":")):
            passage = Passage(begin, _plain("\n".join(kept)))
            yield from _hard_passage(document, passage, PHRASE_PATTERNS if is_entry else PATTERNS)
            kept = []
        if is_next or (each.strip() and not SECTION.fullmatch(each)):
            begin, is_entry = (begin, is_entry) if kept else (number, is_next is not None)
            kept.append(each[is_next.end() :] if is_next else each.strip())


def _hard_cells(document: str, text: str) -> Iterator[Hit]:
    for number, line in _lines_of(text, "table"):
        for cell in re.split(r"(?<!\\)\|", line):
            yield from _patterns(document, Passage(number, _plain(cell)), PHRASE_PATTERNS)


def _patterns(document: str, sentence: Passage, names: Iterable[str]) -> Iterator[Hit]:
    for name in names:
        for match in re.finditer(PATTERNS[name], sentence.text, re.IGNORECASE | re.DOTALL):
            yield _hit(document, sentence, name, match)


def _where_for_if(document: str, sentence: Passage) -> Iterator[Hit]:
    for match in re.finditer(r"(\w*)\W*\bwhere\b(?:\s+\S+){0,2}", sentence.text, re.IGNORECASE):
        if not re.fullmatch(PLACES, match[1], re.IGNORECASE) and not sentence.text.endswith("?"):
            yield _hit(document, sentence, "where for if", match)


def _hit(document: str, sentence: Passage, pattern: str, match: re.Match[str]) -> Hit:
    line = sentence.line + sentence.text.count("\n", 0, match.start())
    return Hit(document, line, pattern, " ".join(match[0].split()))


def _begin(text: str) -> str:
    return " ".join(text.split()[:6])


def sentences(passage: Passage) -> Iterator[Passage]:
    """Cuts a passage after full stops, question marks and exclamation marks."""
    begin = 0
    for match in re.finditer(r"[.?!][)\"'*]*(?=\s+[^a-z\s])|\Z", passage.text):
        text = passage.text[begin : match.end()]
        blank = len(text) - len(text.lstrip())
        if text.strip():
            yield Passage(passage.line + passage.text.count("\n", 0, begin + blank), text.strip())
        begin = match.end()


def passages(text: str) -> Iterator[Passage]:
    """Yields paragraphs and items of lists without their marks. Headings are no sentences."""
    begin, lines = 0, list[str]()
    for number, line in _lines_of(text, "prose"):
        is_item = re.match(r"\s*(?:[-*]|\d+\.)\s", line)
        if lines and (is_item or number != begin + len(lines) or not line.strip()):
            yield Passage(begin, _plain("\n".join(lines)))
            lines = []
        if line.strip() and not line.startswith("#"):
            begin, lines = (begin if lines else number), [*lines, line]
    if lines:
        yield Passage(begin, _plain("\n".join(lines)))


def _lines_of(text: str, kind: Literal["prose", "table"]) -> Iterator[tuple[int, str]]:
    """Yields the lines of a kind with their numbers; lines of code and comments have none."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        is_fence = line.lstrip().startswith("```")
        is_code ^= is_fence
        is_left_out = is_code or is_fence or line.startswith(("    ", "<!--"))
        if not is_left_out and line.startswith("|") == (kind == "table"):
            yield number, line


def _plain(text: str) -> str:
    """Takes marks of Markdown away. A span of code counts as one word, and a link as its text."""
    text = re.sub(r"`+[^`]+`+", lambda match: "`code`" + "\n" * match[0].count("\n"), text)
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\A\s*(?:[-*]|\d+\.)\s+|\*\*", "", text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
