"""The published schemes of hashed n-grams once more, in plain Python: lists of tokens, integers of any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Tokens = Sequence[int]


def is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def primes(first: int, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        found += [first] if is_prime(first) else []
        first += 1
    return found


def signed(number: int, bits: int) -> int:
    """The number that the lower bits stand for, with a sign."""
    low = number & (1 << bits) - 1
    return low - (1 << bits) if low >> bits - 1 else low


def splitmix64(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


class XorHash(NamedTuple):
    """The numbers of an xor of products: primes lie in the order of orders and heads."""

    multipliers: Sequence[int]
    primes: Sequence[int]
    heads: int

    def rows(self, seen: Tokens) -> list[int]:
        rows, offset = [], 0
        for place, prime in enumerate(self.primes):
            mix = 0
            for token, multiplier in zip(seen[: 2 + place // self.heads], self.multipliers, strict=False):
                mix ^= token * multiplier
            rows.append(offset + mix % prime)
            offset += prime
        return rows


def deepseek(text: Tokens, at: int, n: int, pad: int, functions: XorHash) -> list[int]:
    """A dead token is -1."""
    begin = max([place + 1 for place in range(at + 1) if text[place] == -1], default=0)
    return functions.rows([text[at - steps] if at - steps >= begin else pad for steps in range(n)])


def qwen(text: Tokens, at: int, n: int, eos: int, functions: XorHash) -> list[int]:
    begin = max([place + 1 for place in range(at) if text[place] == eos], default=0)
    return functions.rows([text[at - steps] if at - steps >= begin else eos for steps in range(n)])


def longcat(text: Tokens, at: int, n: int, heads: int, vocabulary: int, base: int, eos: int) -> list[int]:
    begin = max([place + 1 for place in range(at) if text[place] == eos], default=0)
    rows, offset = [], 0
    for table in range((n - 1) * heads):
        number = 0
        for steps in reversed(range(2 + table // heads)):
            number = number * vocabulary + (text[at - steps] if at - steps >= begin else 0)
        modulus = base + 2 * table + 1
        rows.append(offset + number % modulus)
        offset += modulus
    return rows


def salted(text: Tokens, at: int, order: int, salt: int, rows: int) -> int:
    factors = [1000003 + salt * 2654435761, *(prime + salt * 40503 for prime in (998244353, 911382323, 805306457))]
    total = sum(text[at - steps] * factors[steps] for steps in range(order) if at >= steps)
    return signed(total, 64) % rows


def bigram_and_trigram(text: Tokens, at: int, rows: int) -> list[int]:
    reserved = rows // 2 - 1
    bigram, trigram = reserved, rows - 1
    if at > 0:
        before = reserved if at == 1 else text[at - 1]
        bigram = signed(36313 * text[at] ^ 27191 * before, 32) % reserved
    if at > 1:
        mix = 17351 * text[at] ^ 60961 * text[at - 1] ^ 45259 * text[at - 2]
        trigram = rows // 2 + signed(mix, 32) % reserved
    return [bigram, trigram]
