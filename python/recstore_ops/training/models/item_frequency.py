"""How probable it is that an item is in a batch, estimated from the stream of batches in memory of a fixed size.

The mean number of batches from one with an item to the next with it is one over that probability. An item's bucket
keeps the last batch with it and a moving mean of these gaps. Items that share a bucket seem more frequent than they
are, so an item has one bucket under each of several hash functions, and the longest of their mean gaps counts.

Source: Yi et al. 2019, "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations", algorithm 2,
and the end of section 4 for several hash functions. In addition, the mean of an item's first 1 / alpha gaps weighs all
of them alike, so that no estimate is biased towards its initial value.

Shapes: C items, H hash functions, M buckets.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
"""Odd numbers of 64 bits; the upper bits of a key's product with one are its bucket."""


class ItemFrequency(nn.Module):
    """The probability that an item is in a batch.

    Args:
        bits: there are 2^bits buckets for each of the hash functions, 12 bytes each.
        alpha: the weight of the newest gap in the mean of more than 1 / alpha.
    """

    batches: Tensor
    last_HM: Tensor
    gap_HM: Tensor
    times_HM: Tensor

    def __init__(self, bits: int = 17, alpha: float = 0.01) -> None:
        super().__init__()
        self._bits = bits
        self._alpha = alpha
        shape = len(_FACTORS), 1 << bits
        self.register_buffer("batches", torch.zeros((), dtype=torch.int32, device="cpu"))
        self.register_buffer("last_HM", torch.zeros(shape, dtype=torch.int32, device="cpu"))
        self.register_buffer("gap_HM", torch.zeros(shape, dtype=torch.float32, device="cpu"))
        self.register_buffer("times_HM", torch.zeros(shape, dtype=torch.int32, device="cpu"))

    def count(self, keys_C: Tensor) -> None:
        """Takes the items of the next batch, by their keys, int64, none twice."""
        self.batches += 1
        at = torch.arange(len(_FACTORS), device=keys_C.device, dtype=torch.int64)[:, None], self._buckets(keys_C)
        seen_HC, mean_HC = self.times_HM[at] + 1, self.gap_HM[at]
        weight_HC = seen_HC.to(mean_HC.dtype).reciprocal().clamp(min=self._alpha)
        # Items of one batch in one bucket are one arrival there: they write equal numbers.
        self.gap_HM[at] = mean_HC + weight_HC * (self.batches - self.last_HM[at] - mean_HC)
        self.last_HM[at] = self.batches
        self.times_HM[at] = seen_HC

    def log_probability(self, keys_C: Tensor) -> Tensor:
        """Returns the logarithm of the probability that each item is in a batch, [C]; 0 of one never counted."""
        gaps_HC = self.gap_HM.gather(1, self._buckets(keys_C))
        return -gaps_HC.amax(0).clamp(min=1).log()

    def _buckets(self, keys_C: Tensor) -> Tensor:
        """The bucket of each item under each hash function, int64 [H, C]."""
        factors = torch.tensor([_signed(factor) for factor in _FACTORS], dtype=torch.int64, device=keys_C.device)
        return (keys_C * factors[:, None]) >> (64 - self._bits) & ((1 << self._bits) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
