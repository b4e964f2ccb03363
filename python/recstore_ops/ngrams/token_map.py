"""Maps of tokens to the fewer ids that a scheme hashes."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

NO_MAP = "none"
"""Stands in a meaning in the place of a map."""


def checked_map(owner: str, token_map: Tensor) -> Tensor:
    """Returns a copy of a map on the CPU.

    Args:
        token_map: int64 [vocabulary], the id of each token, from 0 on.

    Raises:
        TypeError: no tensor of int64.
        ValueError: of another shape, empty, or with a negative id.
    """
    if not isinstance(token_map, Tensor) or token_map.dtype != torch.int64:
        got = token_map.dtype if isinstance(token_map, Tensor) else type(token_map).__name__
        raise TypeError(f"{owner}: token_map must be a tensor of int64, got {got}")
    if token_map.dim() != 1 or len(token_map) == 0:
        raise ValueError(f"{owner}: token_map must be [vocabulary], got {list(token_map.shape)}")
    copy = token_map.detach().to("cpu", copy=True).contiguous()
    if copy.min() < 0:
        token = int((copy < 0).nonzero()[0])
        raise ValueError(f"{owner}: token_map has the id {int(copy[token])} for token {token}, expected 0 or more")
    return copy


def checksum_of(token_map: Tensor | None) -> str:
    """Returns the CRC-32 of a map's ids as int64 of little-endian bytes, for a meaning."""
    if token_map is None:
        return NO_MAP
    return f"crc32 {zlib.crc32(token_map.numpy().astype('<i8').tobytes()):08x}"


def mapped(tokens: Tensor, token_map: Tensor | None) -> Tensor:
    """Returns the ids of tokens, int64. Negative ones, which stand for no token, stay as they are."""
    tokens = tokens.to(torch.int64)
    if token_map is None:
        return tokens
    return torch.where(tokens < 0, tokens, token_map.to(tokens.device)[tokens.clamp(min=0)])
