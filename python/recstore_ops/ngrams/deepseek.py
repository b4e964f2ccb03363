"""The scheme of Engram and of DeepSeek-V4.1-Flash."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice

from torch import Tensor

from recstore_ops.ngrams.generators import odd_multiplier_range, pcg64_integers
from recstore_ops.ngrams.primes import primes_from
from recstore_ops.ngrams.ranges import (
    MAX_HEADS,
    MAX_INT64,
    MAX_ORDER,
    all_in_range,
    check_agreement,
    checked_total,
    in_range,
    starts_of,
)
from recstore_ops.ngrams.scheme import Meaning
from recstore_ops.ngrams.token_map import checked_map, checksum_of, mapped
from recstore_ops.ngrams.windows import HeadedScheme, cut_at, rows_by_xor

_OWNER = "DeepSeekNGrams"
DEAD_TOKEN = -1
_LAYER_STEP = 10_007
_PAD_TOKEN = 2
_V4_1_ROWS = {1: 384_006_168, 14: 384_016_682}
_V4_1_VOCABULARY, _V4_1_COMPRESSED = 129_280, 99_092
_DEMO_LAYERS = (1, 15)


class DeepSeekNGrams(HeadedScheme):
    """The n-grams of Engram: compressed tokens, hashed by an xor of products, modulo primes.

    For each length from 2 to `n` there are `heads` rows: all heads of length 2, then those of 3, and so on. With c0,
    c1, ... the compressed ids of the token, of the one before it, and so on:

        mix = c0 m0 xor c1 m1 xor ... xor c(n-1) m(n-1)
        row = mix mod prime(n, head) + offset(n, head)

    The multipliers are `2 r + 1` for numbers r of numpy's `default_rng(seed + 10007 layer)`. Primes are searched upward
    from `first_moduli`, layer by layer, and none is taken twice. Offsets are the sums of the primes before. Token -1 is
    dead, as the place of an image: it reads as `pad`, and so do all tokens before it, and those before a text.

    Source: Cheng et al. 2026, "Conditional Memory via Scalable Lookup" (arXiv 2601.07372), section 2, and
    `engram_demo_v1.py` of deepseek-ai/Engram. Dead tokens: the ports of DeepSeek-V4.1-Flash.

    Args:
        n: the length of the longest n-grams, from 2 to 16.
        heads: hash functions of each length, from 1 to 64.
        layers: the numbers of all layers that have a table, in the order in which their primes are searched.
        layer: the number of this one.
        first_moduli: for each length from 2 to `n`, the number from which primes are searched.
        compressed_vocabulary: how many ids the compressed tokens have.
        pad: the compressed id that stands for dead and missing tokens.
        seed: of the multipliers, 0 or more.
        token_map: int64 [vocabulary], the compressed id of each token, as `compress_tokens` makes it. None if tokens
            are given as compressed ids.
        vocabulary: the length that `token_map` must have; None for any.
        pad_token: the token whose compressed id must be `pad`; None for any.
        expected_rows: the rows that a file or a description says, with which the primes must agree.
        expected_moduli: the same of the primes.
        expected_multipliers: the same of the multipliers.

    Attributes:
        multipliers: one for each token of an n-gram.
        moduli: the primes, one for each row of a token.
        offsets: the first row of each prime.

    Raises:
        TypeError: a number that is no integer, or a map that is no tensor of int64.
        ValueError: a number out of its range, a map that disagrees with another argument, numbers that are not the
            expected ones, or a compressed vocabulary for which numpy would draw words of 32 bits.
    """

    __module__ = "recstore_ops"

    def __init__(
        self,
        *,
        n: int,
        heads: int,
        layers: Sequence[int],
        layer: int,
        first_moduli: Sequence[int],
        compressed_vocabulary: int,
        pad: int,
        seed: int = 0,
        token_map: Tensor | None = None,
        vocabulary: int | None = None,
        pad_token: int | None = None,
        expected_rows: int | None = None,
        expected_moduli: Sequence[int] | None = None,
        expected_multipliers: Sequence[int] | None = None,
    ) -> None:
        self.n, self.heads = in_range(_OWNER, "n", n, 2, MAX_ORDER), in_range(_OWNER, "heads", heads, 1, MAX_HEADS)
        self.compressed_vocabulary = in_range(_OWNER, "compressed_vocabulary", compressed_vocabulary, 1, MAX_INT64)
        self.pad = in_range(_OWNER, "pad", pad, 0, self.compressed_vocabulary - 1)
        self.token_map = None if token_map is None else checked_map(_OWNER, token_map)
        self._check_map(vocabulary, pad_token)
        self.multipliers = self._multipliers(in_range(_OWNER, "seed", seed, 0, MAX_INT64), layer)
        self.moduli = self._moduli(layers, layer, first_moduli)
        self.offsets = starts_of(self.moduli)
        check_agreement(_OWNER, "multipliers", self.multipliers, expected_multipliers)
        check_agreement(_OWNER, "moduli", self.moduli, expected_moduli)
        check_agreement(_OWNER, "rows", self.num_rows, expected_rows)

    @classmethod
    def deepseek_v4_1_flash(
        cls, layer: int, token_map: Tensor | None = None, expected_rows: int | None = None
    ) -> DeepSeekNGrams:
        """Returns the scheme of a table of DeepSeek-V4.1-Flash.

        The sums of its primes were compared with the rows that the model's description says. No file of the model was
        opened.

        Args:
            layer: 1 or 14.
            token_map: int64 [129280], with 99,092 ids. None if tokens are given as compressed ids.
            expected_rows: as above.

        Raises:
            TypeError: as above.
            ValueError: another layer, a map of another model; further as above.
        """
        if layer not in _V4_1_ROWS:
            raise ValueError(f"{_OWNER}: DeepSeek-V4.1-Flash has tables at layers {list(_V4_1_ROWS)}, got {layer!r}")
        scheme = cls(
            n=4,
            heads=8,
            layers=tuple(_V4_1_ROWS),
            layer=layer,
            first_moduli=(16_000_000,) * 3,
            compressed_vocabulary=_V4_1_COMPRESSED,
            pad=2,
            token_map=token_map,
            vocabulary=_V4_1_VOCABULARY,
            pad_token=_PAD_TOKEN,
            expected_rows=_V4_1_ROWS[layer],
        )
        check_agreement(_OWNER, "rows", scheme.num_rows, expected_rows)
        return scheme

    @classmethod
    def engram_demo(
        cls, layer: int, token_map: Tensor | None = None, compressed_vocabulary: int | None = None
    ) -> DeepSeekNGrams:
        """Returns the scheme of `engram_demo_v1.py`, the authors' program beside the paper.

        Args:
            layer: 1 or 15.
            token_map: int64 [vocabulary]; its ids give the size of the compressed vocabulary, and token 2 the pad.
            compressed_vocabulary: in place of a map, the size, if tokens are given as compressed ids. The pad is 2.

        Raises:
            TypeError: both a map and a size, or neither.
            ValueError: another layer; further as above.
        """
        if layer not in _DEMO_LAYERS:
            raise ValueError(f"{_OWNER}: the demo of Engram has tables at layers {list(_DEMO_LAYERS)}, got {layer!r}")
        if (token_map is None) == (compressed_vocabulary is None):
            raise TypeError(f"{_OWNER}: the demo of Engram takes either a token_map or a compressed_vocabulary")
        pad = _PAD_TOKEN
        if token_map is not None:
            token_map = checked_map(_OWNER, token_map)
            compressed_vocabulary = int(token_map.max()) + 1
            pad = int(token_map[min(_PAD_TOKEN, len(token_map) - 1)])
        assert compressed_vocabulary is not None
        return cls(
            n=3,
            heads=8,
            layers=_DEMO_LAYERS,
            layer=layer,
            first_moduli=(5 * _V4_1_VOCABULARY,) * 2,
            compressed_vocabulary=compressed_vocabulary,
            pad=pad,
            token_map=token_map,
            pad_token=None if token_map is None else _PAD_TOKEN,
        )

    @property
    def start(self) -> int:
        """The dead token, -1."""
        return DEAD_TOKEN

    def meaning(self) -> Meaning:
        """Returns what the rows depend on: multipliers, primes, and how tokens become compressed ids."""
        return {
            "scheme": _OWNER,
            "n": self.n,
            "heads": self.heads,
            "compressed_vocabulary": self.compressed_vocabulary,
            "pad": self.pad,
            "token_map": checksum_of(self.token_map),
            "multipliers": self.multipliers,
            "moduli": self.moduli,
        }

    def _check_map(self, vocabulary: int | None, pad_token: int | None) -> None:
        if self.token_map is None:
            return
        check_agreement(_OWNER, "tokens in token_map", len(self.token_map), vocabulary)
        size = int(self.token_map.max()) + 1
        if size != self.compressed_vocabulary:
            raise ValueError(
                f"{_OWNER}: expected a token_map with ids up to {self.compressed_vocabulary - 1}, "
                f"of compressed_vocabulary {self.compressed_vocabulary}, got ids up to {size - 1}"
            )
        if pad_token is not None:
            token = in_range(_OWNER, "pad_token", pad_token, 0, len(self.token_map) - 1)
            check_agreement(_OWNER, f"id of pad_token {token}", int(self.token_map[token]), self.pad)

    def _multipliers(self, seed: int, layer: int) -> tuple[int, ...]:
        bound = odd_multiplier_range(self.compressed_vocabulary)
        if bound <= 2**32:
            raise ValueError(
                f"{_OWNER}: expected a compressed_vocabulary below 2**30, as numpy draws multipliers from 32 bits for "
                f"more, got {self.compressed_vocabulary}"
            )
        drawn = pcg64_integers(seed + _LAYER_STEP * in_range(_OWNER, "layer", layer, 0, 2**32), bound, self.n)
        return tuple(2 * number + 1 for number in drawn)

    def _moduli(self, layers: Sequence[int], layer: int, first_moduli: Sequence[int]) -> tuple[int, ...]:
        numbers = all_in_range(_OWNER, "layers", layers, 0, 2**32)
        if len(set(numbers)) < len(numbers) or layer not in numbers:
            raise ValueError(f"{_OWNER}: expected distinct layers with layer {layer} among them, got {list(numbers)}")
        least = all_in_range(_OWNER, "first_moduli", first_moduli, 2, 2**62)
        if len(least) != self.n - 1:
            raise ValueError(f"{_OWNER}: n {self.n} needs {self.n - 1} first_moduli, got {list(least)}")
        return checked_total(_OWNER, _primes_of_layers(numbers[: numbers.index(layer) + 1], least, self.heads)[-1])

    @property
    def _least_token(self) -> int:
        return DEAD_TOKEN

    @property
    def _num_tokens(self) -> int:
        return self.compressed_vocabulary if self.token_map is None else len(self.token_map)

    def _read(self, tokens: Tensor) -> Tensor:
        return mapped(tokens, self.token_map)

    def _rows(self, back: list[Tensor]) -> list[Tensor]:
        seen = cut_at(back, DEAD_TOKEN, self.pad, first=0)
        return rows_by_xor(seen, self.multipliers, self.moduli, self.offsets)


@lru_cache(maxsize=64)
def _primes_of_layers(layers: tuple[int, ...], least: tuple[int, ...], heads: int) -> list[tuple[int, ...]]:
    """Returns the primes of each layer, of all heads of all lengths; no prime is taken twice."""
    taken, primes = set[int](), list[tuple[int, ...]]()
    for _ in layers:
        of_layer: list[int] = []
        for number in least:
            of_order = list(islice(primes_from(number, taken), heads))
            taken.update(of_order)
            of_layer += of_order
        primes.append(tuple(of_layer))
    return primes
