"""The scheme of LongCat-Flash-Lite."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from recstore_ops.ngrams.ranges import (
    MAX_HEADS,
    MAX_ORDER,
    check_agreement,
    checked_total,
    in_range,
    starts_of,
)
from recstore_ops.ngrams.scheme import Meaning
from recstore_ops.ngrams.windows import HeadedScheme, cut_at

_OWNER = "LongCatNGrams"
_NO_TOKEN = 0


class LongCatNGrams(HeadedScheme):
    """The n-grams of LongCat-Flash-Lite: tokens as the digits of a number, modulo numbers that follow each other.

    For each length from 2 to `n` there are `heads` rows, each of a table of its own. The tables lie here one after the
    other. With c0, c1, ... the token, the one before it, and so on, and i the number of the table from 0 on:

        M(i) = modulus_base + 2 i + 1
        row = (c0 + c1 V + ... + c(n-1) V**(n-1)) mod M(i) + offset(i)

    V is `vocabulary`. A token after an EOS sees neither it nor anything before: 0 stands in the place of all these, and
    of tokens before a text. An EOS itself sees the tokens before it.

    Source: Meituan's `modeling_longcat_ngram.py` of LongCat-Next and `over_embedding.py` of SGLang-FluentLLM; arXiv
    2601.21204. The tokens that LongCat-Next ignores are not left out here.

    Args:
        vocabulary: the number of tokens, V.
        eos: the token that ends a text.
        n: the length of the longest n-grams, from 2 to 16.
        heads: tables of each length, from 1 to 64.
        modulus_base: see above.
        expected_rows: the rows that a file or a description says of all tables, with which the moduli must agree.
        expected_moduli: the same of the rows of each table.

    Attributes:
        moduli: M, one for each row of a token: the rows of the tables.
        offsets: the first row of each table.

    Raises:
        TypeError: a number that is no integer.
        ValueError: a number out of its range, or numbers that are not the expected ones.
    """

    __module__ = "recstore_ops"

    def __init__(
        self,
        *,
        vocabulary: int,
        eos: int,
        n: int,
        heads: int,
        modulus_base: int,
        expected_rows: int | None = None,
        expected_moduli: Sequence[int] | None = None,
    ) -> None:
        self.vocabulary = in_range(_OWNER, "vocabulary", vocabulary, 1, 2**31)
        self.eos = in_range(_OWNER, "eos", eos, 0, self.vocabulary - 1)
        self.n, self.heads = in_range(_OWNER, "n", n, 2, MAX_ORDER), in_range(_OWNER, "heads", heads, 1, MAX_HEADS)
        # A sum of n tokens times powers below a modulus of 2**27 stays below 2**62.
        self.modulus_base = in_range(_OWNER, "modulus_base", modulus_base, 1, 2**27 - 2 * MAX_ORDER * MAX_HEADS)
        moduli = tuple(self.modulus_base + 2 * table + 1 for table in range((self.n - 1) * self.heads))
        self.moduli = checked_total(_OWNER, moduli)
        self.offsets = starts_of(self.moduli)
        # Powers are reduced first: V**3 times a token would not fit into int64. Programs that are traced have them too.
        self._powers = tuple(self._powers_of(table) for table in range(self.slots))
        check_agreement(_OWNER, "moduli", self.moduli, expected_moduli)
        check_agreement(_OWNER, "rows", self.num_rows, expected_rows)

    @classmethod
    def longcat_flash_lite(
        cls, expected_rows: int | None = None, expected_moduli: Sequence[int] | None = None
    ) -> LongCatNGrams:
        """Returns the scheme of the 12 tables of LongCat-Flash-Lite, which have 122,683,536 rows.

        Args:
            expected_rows: this and the one that follows are as above.

        Raises:
            ValueError: the numbers of a file are others.
        """
        return cls(
            vocabulary=131_072,
            eos=2,
            n=4,
            heads=4,
            modulus_base=78 * 131_072,
            expected_rows=expected_rows,
            expected_moduli=expected_moduli,
        )

    @property
    def start(self) -> int:
        """The EOS, before which nothing is seen."""
        return self.eos

    def meaning(self) -> Meaning:
        """Returns what the rows depend on: the base of the numbers, the moduli and EOS."""
        return {
            "scheme": _OWNER,
            "n": self.n,
            "heads": self.heads,
            "vocabulary": self.vocabulary,
            "eos": self.eos,
            "modulus_base": self.modulus_base,
        }

    @property
    def _num_tokens(self) -> int:
        return self.vocabulary

    def _rows(self, back: list[Tensor]) -> list[Tensor]:
        seen = cut_at(back, self.eos, _NO_TOKEN, first=1)
        return [self._row(seen, table) for table in range(self.slots)]

    def _powers_of(self, table: int) -> tuple[int, ...]:
        """The powers of V, from V**1 to V**(n-1) of the table's n, modulo its rows."""
        return tuple(pow(self.vocabulary, place, self.moduli[table]) for place in range(1, 2 + table // self.heads))

    def _row(self, seen: list[Tensor], table: int) -> Tensor:
        total = seen[0]
        for tokens, power in zip(seen[1:], self._powers[table], strict=False):
            total = total + tokens * power
        return total % self.moduli[table] + self.offsets[table]
