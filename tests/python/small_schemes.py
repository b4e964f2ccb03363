"""Published schemes of n-grams with numbers so small that texts have the same n-grams often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from recstore_ops import DeepSeekNGrams, LongCatNGrams, NGramScheme, QwenNGrams, SaltedNGrams, XorNGrams

TOKEN_MAP = torch.tensor([0, 1, 2, 3, 3, 4, 2, 5, 6, 0, 7, 8, 9, 10, 10, 11])
SMALL_DEEPSEEK: dict[str, Any] = {
    **{"n": 4, "heads": 3, "layers": (2, 5), "layer": 5, "first_moduli": (50, 40, 90)},
    **{"compressed_vocabulary": 12, "pad": 2},
}
SMALL_QWEN: dict[str, Any] = {"vocabulary": 20, "eos": 3, "n": 3, "heads": 2, "first_modulus": 30, "seed": 7}
SMALL_LONGCAT: dict[str, Any] = {"vocabulary": 20, "eos": 3, "n": 5, "heads": 2, "modulus_base": 1000}
SMALL_SALTED: dict[str, Any] = {"rows": 97, "orders": (1, 2, 3, 4), "salts": (0, 1, 9, 2**31)}


def deepseek_with(**numbers: Any) -> DeepSeekNGrams:
    return DeepSeekNGrams(**{**SMALL_DEEPSEEK, **numbers})


def qwen_with(**numbers: Any) -> QwenNGrams:
    return QwenNGrams(**{**SMALL_QWEN, **numbers})


def longcat_with(**numbers: Any) -> LongCatNGrams:
    return LongCatNGrams(**{**SMALL_LONGCAT, **numbers})


def salted_with(**numbers: Any) -> SaltedNGrams:
    return SaltedNGrams(**{**SMALL_SALTED, **numbers})


SCHEMES: dict[str, tuple[Callable[[], NGramScheme], int, int]] = {
    # With the least and the largest token.
    "DeepSeekNGrams": (deepseek_with, -1, 11),
    "QwenNGrams": (qwen_with, 0, 19),
    "LongCatNGrams": (longcat_with, 0, 19),
    "SaltedNGrams": (salted_with, 0, 2**63 - 2),
    "XorNGrams": (lambda: XorNGrams(rows=100), 0, 2**31 - 1),
}
