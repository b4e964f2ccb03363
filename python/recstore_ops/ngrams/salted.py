"""The scheme of nanochat's and modded-nanogpt's Engram: salted sums, all in one range of rows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from recstore_ops.ngrams.primes import largest_prime_up_to
from recstore_ops.ngrams.ranges import MAX_INT64, all_in_range, check_agreement, in_range
from recstore_ops.ngrams.scheme import Meaning
from recstore_ops.ngrams.windows import WindowScheme

_OWNER = "SaltedNGrams"
_FACTORS = (1_000_003, 998_244_353, 911_382_323, 805_306_457)
_SALT_OF_TOKEN, _SALT_OF_HISTORY = 2_654_435_761, 40_503
_ORDERS, _HASHES = (2, 3), 2
_NO_TOKEN = 0
_MAX_SLOTS = 1024


class SaltedNGrams(WindowScheme):
    """The n-grams of nanochat and modded-nanogpt: salted sums of products, all in one range of rows.

    Slot k has an order n and a salt s. With t0, t1, ... the token, the one before it, and so on:

        row = (t0 (P0 + 2654435761 s) + t1 (P1 + 40503 s) + ... + t(n-1) (P(n-1) + 40503 s)) mod rows

    P is 1000003, 998244353, 911382323, 805306457. Sums keep 64 bits, and remainders are never negative. All slots share
    the rows: there are no offsets. Tokens before a text are 0; nothing else cuts an n-gram, so that those at the start
    of a document reach into the one before.

    Source: karpathy/nanochat#854 (`nanochat/engram.py`) and KellerJordan/modded-nanogpt#366 (`engram_port.py`).

    Args:
        rows: of the table, which all slots share.
        orders: the length of the n-grams of each slot, from 1 to 4.
        salts: one for each slot, 0 or more.

    Raises:
        TypeError: a number that is no integer.
        ValueError: a number out of its range, or orders and salts of different slots.
    """

    __module__ = "recstore_ops"

    def __init__(self, *, rows: int, orders: Sequence[int], salts: Sequence[int]) -> None:
        self.rows = in_range(_OWNER, "rows", rows, 1, MAX_INT64)
        self.orders = all_in_range(_OWNER, "orders", orders, 1, len(_FACTORS))
        self.salts = all_in_range(_OWNER, "salts", salts, 0, 2**31)
        if len(self.orders) != len(self.salts):
            raise ValueError(
                f"{_OWNER}: expected one salt for each order, got orders {list(self.orders)} and salts "
                f"{list(self.salts)}"
            )
        in_range(_OWNER, "the number of slots", len(self.orders), 1, _MAX_SLOTS)

    @classmethod
    def nanogpt_366(cls, expected_rows: int | None = None) -> SaltedNGrams:
        """Returns the scheme of modded-nanogpt#366: 79,999,987 rows, two slots of each of the orders 2 and 3.

        Args:
            expected_rows: the rows that a file or a description says, with which the prime must agree.

        Raises:
            ValueError: the rows are others.
        """
        return cls._two_hashes(80_000_000, expected_rows)

    @classmethod
    def nanochat(cls, size: int = 300_000_000, expected_rows: int | None = None) -> SaltedNGrams:
        """Returns the scheme of nanochat#854. Its salts are taken from modded-nanogpt#366, of the same author.

        Args:
            size: the table has the largest prime up to here, or one more row if that is prime and `size` even.
            expected_rows: the rows that a file or a description says, with which the prime must agree.

        Raises:
            TypeError: a size that is no integer.
            ValueError: a size out of its range, or other rows.
        """
        return cls._two_hashes(in_range(_OWNER, "size", size, 2, 2**62) | 1, expected_rows)

    @classmethod
    def _two_hashes(cls, most_rows: int, expected_rows: int | None) -> SaltedNGrams:
        rows = largest_prime_up_to(most_rows)
        check_agreement(_OWNER, "rows", rows, expected_rows)
        salts = [1 + 97 * index + 7919 * number for index in range(len(_ORDERS)) for number in range(_HASHES)]
        return cls(rows=rows, orders=[order for order in _ORDERS for _ in range(_HASHES)], salts=salts)

    @property
    def num_rows(self) -> int:
        """The rows, which all slots share."""
        return self.rows

    @property
    def slots(self) -> int:
        """The rows of a token, one for each order and salt."""
        return len(self.orders)

    @property
    def history(self) -> int:
        """The tokens of a history, one fewer than the highest order."""
        return max(self.orders) - 1

    @property
    def start(self) -> int:
        """Token 0."""
        return _NO_TOKEN

    def meaning(self) -> Meaning:
        """Returns what the rows depend on: their number, and order and salt of each slot."""
        return {"scheme": _OWNER, "rows": self.rows, "orders": self.orders, "salts": self.salts}

    @property
    def _num_tokens(self) -> int:
        return MAX_INT64

    def _rows(self, back: list[Tensor]) -> list[Tensor]:
        return [self._row(back[:order], salt) for order, salt in zip(self.orders, self.salts, strict=True)]

    def _row(self, back: list[Tensor], salt: int) -> Tensor:
        total = back[0] * (_FACTORS[0] + salt * _SALT_OF_TOKEN)
        for tokens, factor in zip(back[1:], _FACTORS[1:], strict=False):
            total = total + tokens * (factor + salt * _SALT_OF_HISTORY)
        return total % self.rows
