"""The random numbers that published schemes draw their multipliers from.

PCG64 is XSL-RR 128/64 in O'Neill 2014, "PCG: A Family of Simple Fast Space-Efficient Statistically Good Algorithms for
Random Number Generation". Its seeds are numpy's `SeedSequence`: O'Neill 2015, "Developing a seed_seq Alternative".
Ranges are cut as in Lemire 2019, "Fast Random Integer Generation in an Interval". The source of splitmix64 is Steele,
Lea, Flood, OOPSLA 2014.
"""

from __future__ import annotations

from collections.abc import Iterator

_BITS_32, _BITS_64, _BITS_128 = 2**32 - 1, 2**64 - 1, 2**128 - 1
_POOL = 4
_ENTROPY_HASH, _ENTROPY_FACTOR = 0x43B0D7E5, 0x931E8875
_STATE_HASH, _STATE_FACTOR = 0x8B51F9DD, 0x58F38DED
_MIX_LEFT, _MIX_RIGHT = 0xCA01F9DD, 0x4973F715
_PCG_FACTOR = 0x2360ED051FC65DA44385DF649FCCF645
GOLDEN_GAMMA = 0x9E3779B97F4A7C15


class _WordHash:
    """Hashes 32-bit words, each by another constant than the one before."""

    def __init__(self, constant: int, factor: int) -> None:
        self.constant, self.factor = constant, factor

    def __call__(self, word: int) -> int:
        word ^= self.constant
        self.constant = self.constant * self.factor & _BITS_32
        word = word * self.constant & _BITS_32
        return word ^ word >> 16


def _seed_words(seed: int, count: int) -> list[int]:
    """`numpy.random.SeedSequence(seed).generate_state(count)`, of a seed below 2**64: 32-bit words."""
    stirred = _WordHash(_ENTROPY_HASH, _ENTROPY_FACTOR)
    pool = [stirred(seed >> 32 * place & _BITS_32) for place in range(_POOL)]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                word = _MIX_LEFT * pool[target] - _MIX_RIGHT * stirred(pool[source]) & _BITS_32
                pool[target] = word ^ word >> 16
    drawn = _WordHash(_STATE_HASH, _STATE_FACTOR)
    return [drawn(pool[place % _POOL]) for place in range(count)]


def _pcg64_words(seed: int) -> Iterator[int]:
    """The 64-bit words of numpy's `PCG64(seed)`."""
    words = _seed_words(seed, 8)
    pairs = zip(words[::2], words[1::2], strict=True)
    high_state, low_state, high_step, low_step = (low | high << 32 for low, high in pairs)
    step = (high_step << 64 | low_step) << 1 & _BITS_128 | 1
    state = (step + (high_state << 64 | low_state)) * _PCG_FACTOR + step
    while True:
        state = state * _PCG_FACTOR + step & _BITS_128
        word, turn = (state >> 64 ^ state) & _BITS_64, state >> 122
        yield (word >> turn | word << 64 - turn) & _BITS_64


def pcg64_integers(seed: int, bound: int, count: int) -> list[int]:
    """Returns `numpy.random.default_rng(seed).integers(0, bound, count)`.

    Args:
        seed: from 0 to below 2**64.
        bound: above 2**32, for numpy draws words of 32 bits below; up to 2**63.
        count: how many to draw.

    Raises:
        ValueError: another bound or seed.
    """
    if not 0 <= seed <= _BITS_64:
        raise ValueError(f"a seed of PCG64 is from 0 to 2**64 - 1, got {seed}")
    if not 2**32 < bound <= 2**63:
        raise ValueError(f"numbers of PCG64 are drawn from a range of more than 2**32 and up to 2**63, got {bound}")
    words, drawn = _pcg64_words(seed), list[int]()
    while len(drawn) < count:
        product = next(words) * bound
        # A product whose lower half is below this belongs to the numbers that would come once too often.
        if product & _BITS_64 >= 2**64 % bound:
            drawn.append(product >> 64)
    return drawn


def splitmix64(state: int) -> int:
    """Returns the first output of splitmix64 from a state, 64 bits."""
    word = state + GOLDEN_GAMMA & _BITS_64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _BITS_64
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _BITS_64
    return word ^ word >> 31


def odd_multiplier_range(vocabulary: int) -> int:
    """Returns how many odd multipliers there are whose product with any token is an int64.

    `engram_demo_v1.py` calls it the half bound: multipliers are `2 r + 1`, and r is below it.
    """
    return max(1, (2**63 - 1) // vocabulary // 2)
