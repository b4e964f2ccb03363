"""The compression of a tokenizer's vocabulary: tokens whose texts differ in case or accents alone become one id."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recstore_ops.config.extras import imported

_BLANK = "\ue000"
"""Stands for a text of one blank while blanks at the ends of texts are taken away."""
_NO_TEXT = "\ufffd"
"""Stands in a text for bytes that are no UTF-8: a part of a character, as many tokens of bytes are."""


def compress_tokens(tokenizer: Any) -> Tensor:
    """Returns the map of tokens to compressed ids that Engram makes of a tokenizer.

    Each token is decoded alone. Its key is the text through NFKC, NFD, without accents, in lower case, with runs of
    blanks, tabs and line ends as one blank, and without those at its ends. A text of blanks alone is one blank, and one
    of which nothing is left stays as it is. The key of a token that is no text is the tokenizer's own name for it.
    Tokens of one key have one id, and ids are numbered as they first occur.

    Source: `CompressedTokenizer` of `engram_demo_v1.py`, deepseek-ai/Engram.

    Args:
        tokenizer: a `tokenizers.Tokenizer`, as `Tokenizer.from_file("tokenizer.json")` gives it. That of transformers
            may take blanks away when it decodes, so give its `backend_tokenizer`.

    Returns:
        int64 [vocabulary], on the CPU; tokens that were added count as the others.

    Raises:
        MissingPackage: the package `tokenizers` is not installed.
        TypeError: no `tokenizers.Tokenizer`.
    """
    package = imported("tokenizers", "ngrams", "compress_tokens")
    if not isinstance(tokenizer, package.Tokenizer):
        raise TypeError(f"compress_tokens: expected a tokenizers.Tokenizer, got {type(tokenizer).__name__}")
    normalizer = _normalizer(package)
    ids: dict[str, int] = {}
    found = [
        ids.setdefault(_key(tokenizer, normalizer, token), len(ids))
        for token in range(tokenizer.get_vocab_size(with_added_tokens=True))
    ]
    return torch.tensor(found, dtype=torch.int64, device="cpu")


def _normalizer(package: Any) -> Any:
    kinds = imported("tokenizers.normalizers", "ngrams", "compress_tokens")
    return kinds.Sequence(
        [
            kinds.NFKC(),
            kinds.NFD(),
            kinds.StripAccents(),
            kinds.Lowercase(),
            kinds.Replace(package.Regex(r"[ \t\r\n]+"), " "),
            kinds.Replace(package.Regex(r"^ $"), _BLANK),
            kinds.Strip(),
            kinds.Replace(_BLANK, " "),
        ]
    )


def _key(tokenizer: Any, normalizer: Any, token: int) -> str:
    text = tokenizer.decode([token], skip_special_tokens=False)
    if _NO_TEXT in text:
        return tokenizer.id_to_token(token)
    return normalizer.normalize_str(text) or text
