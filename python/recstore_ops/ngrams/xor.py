"""The scheme of the bigrams and trigrams of modded-nanogpt."""

from __future__ import annotations

import torch
from torch import Tensor

from recstore_ops.ngrams.ranges import in_range
from recstore_ops.ngrams.scheme import Meaning
from recstore_ops.ngrams.token_map import checked_map, checksum_of, mapped
from recstore_ops.ngrams.windows import WindowScheme

_OWNER = "XorNGrams"
_NO_TOKEN = -1
_BIGRAM, _TRIGRAM = (36_313, 27_191), (17_351, 60_961, 45_259)
_MAX_INT32 = 2**31 - 1


class XorNGrams(WindowScheme):
    """The bigrams and trigrams of modded-nanogpt: an xor of products in 32 bits, half of the rows for each.

    With t0, t1 and t2 the token and the two before it, and b = rows / 2 - 1:

        bigram = (36313 t0 xor 27191 t1) mod b
        trigram = (17351 t0 xor 60961 t1 xor 45259 t2) mod b + rows / 2

    Products keep 32 bits with a sign, and remainders are never negative. A text's first token has no bigram: it has row
    b there. The first two have no trigram: they have row `rows - 1` there. The bigram of the second token has b in the
    place of t1, as in the published program.

    Source: KellerJordan/modded-nanogpt#360, `track_1_short/ngram_table.py`; maps of tokens come from #375. The rows
    of signs that multiply these rows there are not part of this.

    Args:
        rows: of the table, an even number from 4 to 2**31 - 2.
        token_map: int64 [vocabulary], the id that each token is hashed as; None for its own.

    Raises:
        TypeError: a number that is no integer, or a map that is no tensor of int64.
        ValueError: a number out of its range, odd rows, or a map with an id above int32.
    """

    __module__ = "recstore_ops"

    def __init__(self, *, rows: int, token_map: Tensor | None = None) -> None:
        self.rows = in_range(_OWNER, "rows", rows, 4, _MAX_INT32 - 1)
        if self.rows % 2:
            raise ValueError(f"{_OWNER}: expected an even number of rows, got {self.rows}")
        self.token_map = None if token_map is None else checked_map(_OWNER, token_map)
        if self.token_map is not None:
            in_range(_OWNER, "the largest id of token_map", int(self.token_map.max()), 0, _MAX_INT32)

    @classmethod
    def nanogpt_360(cls, token_map: Tensor | None = None) -> XorNGrams:
        """Returns the scheme of modded-nanogpt#360, which has 84,602,880 rows.

        Args:
            token_map: as above; the program has one since #375.

        Raises:
            TypeError: as above.
            ValueError: as above.
        """
        return cls(rows=84_602_880, token_map=token_map)

    @property
    def num_rows(self) -> int:
        """The rows of bigrams and trigrams."""
        return self.rows

    @property
    def slots(self) -> int:
        """2: a bigram and a trigram."""
        return 2

    @property
    def history(self) -> int:
        """2, the tokens of a history."""
        return 2

    @property
    def start(self) -> int:
        """-1, which only a history may have."""
        return _NO_TOKEN

    def meaning(self) -> Meaning:
        """Returns what the rows depend on: their number and the map of tokens."""
        return {"scheme": _OWNER, "rows": self.rows, "token_map": checksum_of(self.token_map)}

    @property
    def _num_tokens(self) -> int:
        return _MAX_INT32 + 1 if self.token_map is None else len(self.token_map)

    def _read(self, tokens: Tensor) -> Tensor:
        return mapped(tokens, self.token_map)

    def _rows(self, back: list[Tensor]) -> list[Tensor]:
        half, no_bigram = self.rows // 2, self.rows // 2 - 1
        is_first, is_early = back[1] < 0, (back[1] < 0) | (back[2] < 0)
        before = torch.where(is_early, no_bigram, back[1])
        bigrams = _hash([back[0], before], _BIGRAM) % no_bigram
        trigrams = _hash(back, _TRIGRAM) % no_bigram + half
        return [torch.where(is_first, no_bigram, bigrams), torch.where(is_early, self.rows - 1, trigrams)]


def _hash(tokens: list[Tensor], factors: tuple[int, ...]) -> Tensor:
    """The xor of products, of which the lower 32 bits are kept as a number with a sign."""
    mix = tokens[0] * factors[0]
    for each, factor in zip(tokens[1:], factors[1:], strict=True):
        mix = mix ^ (each * factor)
    return ((mix + 2**31) & (2**32 - 1)) - 2**31
