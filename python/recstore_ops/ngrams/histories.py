"""The tokens before a piece of a text."""

from __future__ import annotations

import torch
from torch import Tensor


def checked_history(owner: str, tokens: Tensor, history: Tensor | None) -> Tensor:
    """Returns the history of tokens; an empty one if there is none.

    Raises:
        TypeError: no tensor, or of another type than the tokens.
        ValueError: of other texts than the tokens.
    """
    if history is None:
        return tokens[..., :0]
    if not isinstance(history, Tensor):
        raise TypeError(f"{owner}: a history must be a tensor, got {type(history).__name__}")
    if history.dtype != tokens.dtype:
        raise TypeError(f"{owner}: expected a history of {tokens.dtype}, as the tokens, got {history.dtype}")
    if history.dim() != tokens.dim() or history.shape[:-1] != tokens.shape[:-1]:
        texts = [*tokens.shape[:-1], "H"]
        shape = ", ".join(map(str, texts))
        raise ValueError(
            f"{owner}: tokens of shape {list(tokens.shape)} need a history of [{shape}], got {list(history.shape)}"
        )
    return history


def last_of(tokens: Tensor, history: Tensor, count: int, start: int) -> Tensor:
    """Returns the last tokens of a text.

    Args:
        tokens: `[..., T]`.
        history: `[..., H]`, before them.
        count: how many.
        start: stands for tokens before the first of a text.

    Returns:
        `[..., count]`.
    """
    text = torch.cat([history[..., max(history.shape[-1] - count, 0) :], tokens], dim=-1)
    filled = torch.cat([text.new_full((*text.shape[:-1], count), start), text], dim=-1)
    return filled[..., filled.shape[-1] - count :]
