"""The scheme of Qwen3.8-Flash-Next."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from torch import Tensor

from recstore_ops.ngrams.generators import GOLDEN_GAMMA, odd_multiplier_range, splitmix64
from recstore_ops.ngrams.primes import primes_from
from recstore_ops.ngrams.ranges import (
    MAX_HEADS,
    MAX_INT64,
    MAX_ORDER,
    check_agreement,
    checked_total,
    in_range,
    starts_of,
)
from recstore_ops.ngrams.scheme import Meaning
from recstore_ops.ngrams.windows import HeadedScheme, cut_at, rows_by_xor

_OWNER = "QwenNGrams"
_LAYER_STEP = 10_007
_MAX_LAYERS = 256


class QwenNGrams(HeadedScheme):
    """The n-grams of Qwen3.8-Flash-Next: tokens, hashed by an xor of products, modulo primes.

    For each length from 2 to `n` there are `heads` rows: all heads of length 2, then those of 3, and so on. With c0,
    c1, ... the token, the one before it, and so on:

        mix = c0 m0 xor c1 m1 xor ... xor c(n-1) m(n-1)
        row = mix mod prime(n, head) + offset(n, head)

        m(i) = 2 (splitmix64(seed + 10007 layer_index + G (i + 1)) mod half) + 1

    G is 0x9E3779B97F4A7C15, and half `(2**63 - 1) // vocabulary // 2`. The primes are consecutive from `first_modulus`
    on, those of the layers before left out. Offsets are the sums of the primes before. A token after an EOS sees
    neither it nor anything before: EOS stands in the place of all these, and of tokens before a text. An EOS itself
    sees the tokens before it.

    Source: the Qwen team's `modular_qwen4_exp.py` in huggingface/transformers.

    Args:
        vocabulary: the number of tokens.
        eos: the token that ends a text.
        n: the length of the longest n-grams, from 2 to 16.
        heads: hash functions of each length, from 1 to 64.
        first_modulus: the number from which primes are searched.
        seed: of the multipliers, 0 or more.
        layer_index: of this table among those of the model, from 0 on. It is not the number of the layer.
        padding: the table has a multiple of so many rows, and the last ones have no n-gram.
        expected_rows: the rows that a file or a description says, with which the primes must agree.
        expected_moduli: the same of the primes, `ngram_heads_vocab_sizes` of a file.
        expected_multipliers: the same of the multipliers, `layer_multipliers` of a file.

    Attributes:
        multipliers: one for each token of an n-gram.
        moduli: the primes, one for each row of a token.
        offsets: the first row of each prime, `ngram_heads_offsets` of a file.

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
        first_modulus: int,
        seed: int,
        layer_index: int = 0,
        padding: int = 1,
        expected_rows: int | None = None,
        expected_moduli: Sequence[int] | None = None,
        expected_multipliers: Sequence[int] | None = None,
    ) -> None:
        self.vocabulary = in_range(_OWNER, "vocabulary", vocabulary, 1, 2**62)
        self.eos = in_range(_OWNER, "eos", eos, 0, self.vocabulary - 1)
        self.n, self.heads = in_range(_OWNER, "n", n, 2, MAX_ORDER), in_range(_OWNER, "heads", heads, 1, MAX_HEADS)
        index = in_range(_OWNER, "layer_index", layer_index, 0, _MAX_LAYERS - 1)
        self.multipliers = self._multipliers(in_range(_OWNER, "seed", seed, 0, MAX_INT64), index)
        self.moduli = self._moduli(in_range(_OWNER, "first_modulus", first_modulus, 2, 2**62), index)
        self.offsets = starts_of(self.moduli)
        self.padding = in_range(_OWNER, "padding", padding, 1, 2**31)
        check_agreement(_OWNER, "multipliers", self.multipliers, expected_multipliers)
        check_agreement(_OWNER, "moduli", self.moduli, expected_moduli)
        check_agreement(_OWNER, "rows", self.num_rows, expected_rows)

    @classmethod
    def qwen3_8_flash_next(
        cls,
        expected_rows: int | None = None,
        expected_moduli: Sequence[int] | None = None,
        expected_multipliers: Sequence[int] | None = None,
    ) -> QwenNGrams:
        """Returns the scheme of the table of Qwen3.8-Flash-Next, which has 320,001,536 rows.

        Args:
            expected_rows: this and those that follow are as above.

        Raises:
            ValueError: the numbers of a file are others.
        """
        return cls(
            vocabulary=248_320,
            eos=248_044,
            n=3,
            heads=8,
            first_modulus=20_000_000,
            seed=1234,
            padding=128,
            expected_rows=expected_rows,
            expected_moduli=expected_moduli,
            expected_multipliers=expected_multipliers,
        )

    @property
    def num_rows(self) -> int:
        """The sum of the primes, up to the next multiple of `padding`."""
        return -(-super().num_rows // self.padding) * self.padding

    @property
    def start(self) -> int:
        """The EOS."""
        return self.eos

    def meaning(self) -> Meaning:
        """Returns what the rows depend on: multipliers, primes, EOS and the number of rows."""
        return {
            "scheme": _OWNER,
            "n": self.n,
            "heads": self.heads,
            "vocabulary": self.vocabulary,
            "eos": self.eos,
            "rows": self.num_rows,
            "multipliers": self.multipliers,
            "moduli": self.moduli,
        }

    def _multipliers(self, seed: int, layer_index: int) -> tuple[int, ...]:
        begin, half = seed + _LAYER_STEP * layer_index, odd_multiplier_range(self.vocabulary)
        drawn = (splitmix64(begin + GOLDEN_GAMMA * place) for place in range(1, self.n + 1))
        return tuple(2 * (word % half) + 1 for word in drawn)

    def _moduli(self, first_modulus: int, layer_index: int) -> tuple[int, ...]:
        count = (self.n - 1) * self.heads
        primes = islice(primes_from(first_modulus), layer_index * count, (layer_index + 1) * count)
        return checked_total(_OWNER, tuple(primes))

    @property
    def _num_tokens(self) -> int:
        return self.vocabulary

    def _rows(self, back: list[Tensor]) -> list[Tensor]:
        return rows_by_xor(cut_at(back, self.eos, self.eos, first=1), self.multipliers, self.moduli, self.offsets)
