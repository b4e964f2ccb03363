"""Tokens of one text compressed to one id, by the package `tokenizers` or what stands in for it."""

from __future__ import annotations

import importlib.machinery
import re
import sys
import types
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
import torch

from recstore_ops import compress_tokens
from recstore_ops.config.extras import MissingPackage

pytestmark = pytest.mark.tier("quick")

TEXTS_AND_IDS: list[tuple[str, int]] = [
    *(("Zürich", 0), ("zurich", 0), (" zurich ", 0)),
    *(("\ufb01n", 1), ("fin", 1)),
    ("A", 2),
    *(("\t \n", 3), (" ", 3)),
    ("", 4),
    # No texts: each token has its own name.
    *(("\ufffd", 5), ("\ufffd", 6)),
    ("\uff21", 2),
    # An accent alone is a blank with an accent in NFKC.
    *(("\u00b4", 3), ("\n", 3)),
    *(("a  b", 7), ("A\tb", 7)),
    # Blanks of other kinds are not the blank that stands for a text of blanks: nothing is left of these.
    *(("\u2028", 8), ("\u2028", 8)),
]
NAMES = {9: "<0xE2>", 10: "<0x9F>"}


class FakeTokenizer:
    """A tokenizer of a few texts."""

    def get_vocab_size(self, with_added_tokens: bool) -> int:
        assert with_added_tokens
        return len(TEXTS_AND_IDS)

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        (token,) = tokens
        return TEXTS_AND_IDS[token][0]

    def id_to_token(self, token: int) -> str:
        return NAMES[token]


class Normalizer:
    """A normalizer of the package, in Python."""

    def __init__(self, normalize_str: Callable[[str], str]) -> None:
        self.normalize_str = normalize_str


def replacing(pattern: Any, by: str) -> Normalizer:
    compiled = pattern if isinstance(pattern, re.Pattern) else re.compile(re.escape(pattern))
    return Normalizer(lambda text: compiled.sub(by, text))


def in_turn(parts: list[Normalizer]) -> Normalizer:
    def normalize(text: str) -> str:
        for part in parts:
            text = part.normalize_str(text)
        return text

    return Normalizer(normalize)


def without_accents(text: str) -> str:
    return "".join(each for each in text if not unicodedata.combining(each))


@pytest.fixture
def fake_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    package, kinds = types.ModuleType("tokenizers"), types.ModuleType("tokenizers.normalizers")
    vars(kinds).update(
        NFKC=lambda: Normalizer(lambda text: unicodedata.normalize("NFKC", text)),
        NFD=lambda: Normalizer(lambda text: unicodedata.normalize("NFD", text)),
        StripAccents=lambda: Normalizer(without_accents),
        Lowercase=lambda: Normalizer(str.lower),
        Strip=lambda: Normalizer(str.strip),
        Replace=replacing,
        Sequence=in_turn,
    )
    vars(package).update(Tokenizer=FakeTokenizer, Regex=re.compile, normalizers=kinds)
    for module in (package, kinds):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("fake_tokenizers")
def test_tokens_of_one_text_are_compressed_to_one_id() -> None:
    found = compress_tokens(FakeTokenizer())
    assert found.dtype == torch.int64
    assert found.tolist() == [compressed for _, compressed in TEXTS_AND_IDS]


@pytest.mark.usefixtures("fake_tokenizers")
def test_what_is_no_tokenizer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^compress_tokens: expected a tokenizers.Tokenizer, got str$"):
        compress_tokens("tokenizer.json")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    words = r"^compress_tokens needs tokenizers: pip install 'recstore-ops\[ngrams\]'$"
    with pytest.raises(MissingPackage, match=words):
        compress_tokens(FakeTokenizer())


def test_tokens_are_compressed_by_the_package_itself() -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    words = ["[UNK]", "Zürich", "zurich", "Bern", "BERN", " ", "\ufb01n", "fin"]
    model = tokenizers.models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="[UNK]")
    assert compress_tokens(tokenizers.Tokenizer(model)).tolist() == [0, 1, 1, 2, 2, 3, 4, 4]
