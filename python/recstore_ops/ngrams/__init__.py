"""Published schemes of hashed n-grams: which rows of a table the n-grams of a text have.

docs/ngrams.md has their equations and their sources.
"""

from recstore_ops.ngrams.compression import compress_tokens
from recstore_ops.ngrams.deepseek import DeepSeekNGrams
from recstore_ops.ngrams.longcat import LongCatNGrams
from recstore_ops.ngrams.qwen import QwenNGrams
from recstore_ops.ngrams.salted import SaltedNGrams
from recstore_ops.ngrams.scheme import NGramScheme
from recstore_ops.ngrams.xor import XorNGrams

__all__ = [
    "DeepSeekNGrams",
    "LongCatNGrams",
    "NGramScheme",
    "QwenNGrams",
    "SaltedNGrams",
    "XorNGrams",
    "compress_tokens",
]
