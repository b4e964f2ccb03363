"""The check of the documents' prose finds what it is for, and leaves plain sentences, code and tables alone."""

from pathlib import Path

import pytest
from ci_programs import program

pytestmark = pytest.mark.tier("quick")

prose = program("prose")

LONG = "\n".join(["Word", *["word"] * (prose.LONGEST_SENTENCE - 1)])


def found(text: str, document: str = "docs/page.md") -> list[tuple[int, str, str]]:
    return [(hit.line, hit.pattern, hit.words) for hit in prose.hits(document, text)]


@pytest.mark.parametrize(
    ("text", "pattern", "words"),
    [
        ("The log is of requests.", "belongs to", "is of"),
        ("Two files are\nonly of one table.", "belongs to", "are only of"),
        ("The rate is that of the table.", "that of", "is that of"),
        ("A restart is told by a warning.", "told", "told"),
        ("A tag tells.", "told", "tells"),
        ("Nobody waits.", "nobody", "Nobody"),
        ("It helps those who wait.", "nobody", "those who"),
        ("It counts how often what is asked for what.", "what what", "what is asked for what"),
        ("Where there is none, one is made.", "where for if", "Where there is"),
        ("A step fails, where rows are missing.", "where for if", "fails, where rows are"),
        ("A server reads it; it has the log.", "bare pronoun", "; it"),
        ("Every rank collects, be it nothing.", "be it", "be it"),
        ("It ends. Of three rows one stays.", "fronted of", "Of"),
        ("What is saved depends on the kind.", "fronted clause", "What"),
        (f"{LONG} word.", "long sentence", "36 words: Word word word word word word ..."),
        ("x" * 121, "wide line", "121 columns, 120 allowed"),
        ("| where | of what |\n|---|---|\n| a log | is of requests |", "belongs to", "is of"),
    ],
)
def test_a_hard_sentence_is_found(text: str, pattern: str, words: str) -> None:
    assert (pattern, words) in [(name, hit) for _, name, hit in found(text)]


@pytest.mark.parametrize(
    "text",
    [
        "The log records requests. Each of them has a number.",
        "The error shows where a row lies. It names the place where the file ends.",
        "What does a lookup cost? Where does a row lie?",
        "A server reads the log; the client waits for it.",
        f"{LONG}. {LONG}.",
        "# Where rows lie, and what is of what",
        "| where | of what |\n|---|---|\n| what a row takes | where it lies |",
        "```sh\necho whoever is told\n```",
        "A formula follows.\n\n    where w is of f\n",
        "The key `is of` stands in [a page](told.md).",
        "<!-- nobody is told -->",
    ],
)
def test_plain_sentences_code_tables_and_headings_are_left_alone(text: str) -> None:
    assert found(text) == []


def test_a_span_of_code_counts_as_one_word_and_a_link_as_its_text() -> None:
    words = "word\n" * (prose.LONGEST_SENTENCE - 3)
    assert found(f"{words} `is of` [two words](whoever/tells.md).") == []


def test_hits_have_the_line_of_the_words() -> None:
    text = "# Head\n\nA first sentence. It ends\nhere; they are gone.\n\n- an item\n- it is\n  of this\n"
    text += "\n```\ncode\n```\nIt tells.\n"
    assert found(text) == [(4, "bare pronoun", "; they"), (7, "belongs to", "is of"), (13, "told", "tells")]


def test_a_sentence_ends_at_its_stop_and_not_at_an_abbreviation() -> None:
    def cut(text: str) -> list[str]:
        return [sentence.text for sentence in prose.sentences(prose.Passage(1, text))]

    assert cut("One row. Two\nrows (three.) `code` ends. e.g. four") == [
        "One row.",
        "Two\nrows (three.)",
        "`code` ends. e.g. four",
    ]


def test_documents_with_a_limit_are_counted_whole() -> None:
    text = "Word.\n" * 1_601
    assert found(text, "README.md") == [(1, "too long", "1601 words, 1600 allowed")]
    assert found(text[6:], "README.md") == []
    assert found(text, "docs/other.md") == []


def test_allowed_words_are_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prose.ALLOWED, ("docs/page.md", "Nobody"), "a name")
    assert found("Nobody waits.") == []
    assert found("Nobody waits.", "docs/other.md") == [(1, "nobody", "Nobody")]


def test_the_exit_status_says_whether_there_is_a_hit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    page.write_text("The log records requests.\n", encoding="utf-8")
    assert prose.main([]) == 0
    assert capsys.readouterr().out == ""
    page.write_text("It tells. It tells.\n", encoding="utf-8")
    assert prose.main([str(page)]) == 1
    assert capsys.readouterr().out.splitlines() == [*["docs/page.md:1: told: tells"] * 2, "2 hits: 2 told"]


MODULE = '''"""Nobody reads this."""
COUNT: Annotated[int, Option("Tell a number.", least=0)]
option(help="What it is.")


def call(a, b):
    """Calls.

    Args:
        a: of the one; where it is.
        b: what it is.

    Raises:
        ValueError: it is of another kind.
    """
    raise ValueError("nobody told what it is of")
'''


def test_docstrings_and_help_are_read_and_nothing_else_of_a_module() -> None:
    assert found(MODULE, "python/recstore_ops/call.py") == [
        (1, "nobody", "Nobody"),
        (2, "told", "Tell"),
        (3, "fronted clause", "What"),
        (10, "where for if", "one; where it is."),
        (14, "belongs to", "is of"),
    ]
