"""Prime numbers, which are the moduli of most schemes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import lru_cache
from itertools import count

_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
"""The first primes: together they decide about every number below 3.3e24.

Source: Sorenson, Webster 2017, "Strong pseudoprimes to twelve prime bases" (Mathematics of Computation 86).
"""


def is_prime(number: int) -> bool:
    """Whether a number below 2**64 is prime, by the test of Miller and Rabin."""
    if number < 2:
        return False
    for witness in _WITNESSES:
        if number % witness == 0:
            return number == witness
    twos = ((number - 1) & (1 - number)).bit_length() - 1
    return all(_passes(number, witness, twos) for witness in _WITNESSES)


def _passes(number: int, witness: int, twos: int) -> bool:
    power = pow(witness, (number - 1) >> twos, number)
    if power in (1, number - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % number
        if power == number - 1:
            return True
    return False


@lru_cache(maxsize=1 << 16)
def next_prime(number: int) -> int:
    """Returns the least prime above a number."""
    return next(each for each in count(number + 1) if is_prime(each))


def primes_from(least: int, leaving_out: Collection[int] = ()) -> Iterator[int]:
    """Yields the primes from a number on, in their order, without some of them."""
    prime = least - 1
    while True:
        prime = next_prime(prime)
        if prime not in leaving_out:
            yield prime


@lru_cache(maxsize=1 << 10)
def largest_prime_up_to(most: int) -> int:
    """Returns the largest prime that is at most a number, which is 2 or more."""
    return next(each for each in range(most, 1, -1) if is_prime(each))
