"""The scheme of a memory that is given none: the hash functions of `ngram_ids`."""

from __future__ import annotations

import torch
from torch import Tensor

from recstore_ops.ngrams.histories import checked_history
from recstore_ops.ngrams.ranges import MAX_INT64, in_range
from recstore_ops.ngrams.scheme import Meaning, NGramScheme
from recstore_ops.ops.feature_hashing import PADDING_TOKEN, ngram_ids
from recstore_ops.ops.integers import as_int64

_OWNER = "NGramMemory"


class RecStoreNGrams(NGramScheme):
    """N-grams of any tokens, by `ngram_ids`: each hash function has a range of rows of its own.

    Function k has the seed `hash_seed + k`, in 64 bits. Functions of length 2 come first, then those of 3, and so on.

    Args:
        n: the length of the longest n-grams, from 2 to 256.
        heads: hash functions of each length, from 1 to 1,024.
        rows: of each hash function.
        hash_seed: an int64.

    Raises:
        TypeError: a number that is no integer.
        ValueError: a number out of its range, or more rows than int64 has ids.
    """

    def __init__(self, n: int, heads: int, rows: int, hash_seed: int) -> None:
        self.n, self.heads = in_range(_OWNER, "n", n, 2, 256), in_range(_OWNER, "heads", heads, 1, 1024)
        # Functions have ranges of ids one after another in the table, and the last id has to fit into int64.
        self.rows = in_range(_OWNER, "rows", rows, 1, MAX_INT64 // self.slots)
        self.hash_seed = as_int64(_OWNER, "hash_seed", hash_seed)

    @property
    def num_rows(self) -> int:
        """The rows of all functions."""
        return self.slots * self.rows

    @property
    def slots(self) -> int:
        """The rows of a token, `(n - 1) * heads`."""
        return (self.n - 1) * self.heads

    @property
    def history(self) -> int:
        """The tokens of a history, `n - 1`."""
        return self.n - 1

    @property
    def start(self) -> int:
        """-1, as `ngram_ids` has it."""
        return PADDING_TOKEN

    def meaning(self) -> Meaning:
        """Returns what the rows depend on."""
        return {"n": self.n, "heads": self.heads, "rows": self.rows, "hash_seed": self.hash_seed}

    def ids(self, tokens: Tensor, history: Tensor | None = None) -> Tensor:
        """The rows of the n-grams that end at each token, as `NGramScheme.ids`; every token is known."""
        if history is None:
            return self._ids(tokens)
        known = checked_history(_OWNER, tokens, history)[..., -self.history :]
        return self._ids(torch.cat([known, tokens], dim=-1))[..., known.shape[-1] :, :]

    def _ids(self, text: Tensor) -> Tensor:
        hashes = [
            ngram_ids(text, length, self.heads, self.rows, _wrapped(self.hash_seed + (length - 2) * self.heads))
            for length in range(2, self.n + 1)
        ]
        functions = torch.arange(self.slots, dtype=torch.int64, device=text.device)
        return torch.cat(hashes, dim=-1) + functions * self.rows


def _wrapped(number: int) -> int:
    """A sum as an int64, of which 64 bits are kept."""
    return (number + 2**63) % 2**64 - 2**63
